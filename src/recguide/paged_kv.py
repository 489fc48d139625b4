"""A KV cache in pages: many requests share one pool of memory, and requests with equal beginnings share pages.

A request's `PageTable` lists the pages that hold its tokens in order. Whoever runs forwards reserves room in the tables
first, runs any selection of them as a `PagedBatch`, and releases a table when its request ends.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from hashlib import sha256

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .dense_kv import Pages
from .errors import ConfigError
from .segments import Plan

CPU = torch.device("cpu")


class PagePool:
    """
    The pages of all requests, and who holds them. One thread at a time may use it, for one model.

    A layer's memory is made at its first write, in that write's shape, dtype and device: `[P * S + 1, G, D]` for keys and
    for values, P pages of S tokens. The last slot is never written: padded reads go there.

    With prefix sharing a full page is found again by its tokens and all before them. One that nobody holds any more is
    still found until its memory is needed, the longest unused first.

    Args:
        num_pages (`int`): pages in all.
        page_size (`int`): tokens a page.
        prefix_sharing (`bool`): requests take over the pages of equal beginnings.

    Raises:
        ConfigError: fewer than one page, or than one token a page.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_sharing: bool = False) -> None:
        for name, value in (("num_pages", num_pages), ("page_size", page_size)):
            if value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}.")
        self.num_pages, self.page_size, self.prefix_sharing = num_pages, page_size, prefix_sharing
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._holders = [0] * num_pages
        self._free = list(range(num_pages))[::-1]
        self._idle: dict[int, None] = {}  # Pages that nobody holds but that can be found; the longest unused first.
        self._digests: list[bytes | None] = [None] * num_pages
        self._found: dict[bytes, int] = {}

    @classmethod
    def for_budget(
        cls, budget: int, page_size: int, config: PreTrainedConfig, dtype: torch.dtype, prefix_sharing: bool = False
    ) -> PagePool:
        """
        The largest pool whose keys and values, of all layers together, take `budget` bytes at the most.

        Args:
            budget (`int`): bytes.
            page_size (`int`): tokens a page.
            config (`PreTrainedConfig`): the model's.
            dtype (`torch.dtype`): that keys and values will have.
            prefix_sharing (`bool`): as in [`PagePool`].

        Raises:
            ConfigError: the budget does not hold one page.
        """
        text = config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        token = 2 * text.num_hidden_layers * heads * head_size(text) * dtype.itemsize
        num_pages = (budget // token - 1) // max(page_size, 1)
        if num_pages < 1:
            raise ConfigError(
                f"A KV budget of {budget} bytes does not hold one page of {page_size} tokens, which takes "
                f"{(page_size + 1) * token} bytes in {dtype}. Raise the budget, or lower page_size."
            )
        return cls(num_pages, page_size, prefix_sharing)

    @property
    def free_pages(self) -> int:
        """Pages that can be reserved now."""
        return len(self._free) + len(self._idle)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of one request take."""
        return -(-tokens // self.page_size)

    def new_table(self, tokens: Sequence[int]) -> PageTable:
        """
        A table for a request that starts, or starts again; its `length` is how many tokens are cached already.

        It takes over the pages it shares at once, but none with the last token, whose logits are still to be computed.

        Args:
            tokens (`Sequence[int]`): the request's own growing list, not a copy: `commit` looks up there what it keeps.
        """
        table = PageTable(self, tokens)
        if self.prefix_sharing:
            for end in range(self.page_size, len(tokens), self.page_size):
                digest = self._digest(table.digest, tokens, end)
                if digest not in self._found:
                    break
                page = self._found[digest]
                self._idle.pop(page, None)
                self._holders[page] += 1
                table.pages.append(page)
                table.length, table.digest = end, digest
        return table

    def check_integrity(self, tables: Sequence[PageTable]) -> None:
        """
        Compare counts, free pages, findable pages and tables with each other.

        Args:
            tables (`Sequence[PageTable]`): all that are in use; released ones may be left out.

        Raises:
            AssertionError: they contradict each other; the message names the page.
        """
        held = Counter(page for table in tables for page in table.pages)
        free, idle = Counter(self._free), set(self._idle)
        for page in held.keys() | free.keys() | idle | set(self._found.values()):
            assert 0 <= page < self.num_pages, f"page {page} is not one of {self.num_pages}"
        for page, (holders, digest) in enumerate(zip(self._holders, self._digests, strict=True)):
            assert holders == held[page], f"page {page} counts {holders} holders, and {held[page]} tables hold it"
            places = held[page] + free[page] + (page in idle)
            assert places, f"page {page} is lost: neither held nor free"
            assert places == max(held[page], 1), f"page {page} is both free and held, or free twice"
            assert digest is None or self._found.get(digest) == page, f"page {page} has a digest that does not find it"
            assert holders < 2 or digest is not None, f"page {page} is shared though nothing finds it"
            assert not free[page] or digest is None, f"page {page} is free to be written and can be found"
        for digest, page in self._found.items():
            assert self._digests[page] == digest, f"page {page} is found by a digest that it does not have"
        for page in idle:
            assert self._digests[page] is not None, f"page {page} is kept though nothing finds it"
        for table in tables:
            self._check_table(table, held)

    def _check_table(self, table: PageTable, held: Counter[int]) -> None:
        last = table.pages[-1] if table.pages else None
        assert 0 <= table.length <= len(table.pages) * self.page_size, (
            f"{table.length} tokens do not fit the {len(table.pages)} pages that end with page {last}"
        )
        digest = b""
        for i, page in enumerate(table.pages):
            end = (i + 1) * self.page_size
            full = end <= table.length
            assert full or held[page] == 1, f"page {page} is shared and not full"
            assert full or self._digests[page] is None, f"page {page} can be found and is not full"
            # A stopping criterion may have taken the last tokens back.
            if self.prefix_sharing and full and end <= len(table.tokens):
                digest = self._digest(digest, table.tokens, end)
                assert self._digests[page] in (None, digest), f"page {page} is found by other tokens than it holds"

    def _digest(self, before: bytes, tokens: Sequence[int], end: int) -> bytes:
        """Of the page that ends before `tokens[end]`, and through `before` of all tokens; nobody can make two collide."""
        return sha256(before + array("q", tokens[end - self.page_size : end]).tobytes()).digest()

    def _take(self) -> int:
        """A page of which one table is the holder, and which nothing finds."""
        if self._free:
            page = self._free.pop()
        else:
            page = next(iter(self._idle))
            del self._idle[page]
            digest = self._digests[page]
            assert digest is not None
            del self._found[digest]
            self._digests[page] = None
        assert self._holders[page] == 0, f"page {page} is both free and held"
        self._holders[page] = 1
        return page

    def _give_back(self, page: int) -> None:
        assert self._holders[page] > 0, f"page {page} was given back twice"
        self._holders[page] -= 1
        if not self._holders[page]:
            if self._digests[page] is None:
                self._free.append(page)
            else:
                self._idle[page] = None

    def _make_findable(self, page: int, digest: bytes) -> None:
        # Two requests may compute the same page side by side; the first is as good as the second.
        if digest not in self._found:
            self._found[digest], self._digests[page] = page, digest

    def _layer(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if layer not in self._layers:
            slots = self.num_pages * self.page_size + 1
            # The pool outlives the call: made in inference mode, it could not be written outside of it.
            with torch.inference_mode(False):
                self._layers[layer] = _memory(slots, keys), _memory(slots, values)
        return self._layers[layer]


def head_size(config: PreTrainedConfig) -> int:
    """D of a model's attention."""
    text = config.get_text_config()
    size: int = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return size


def head_dims(config: PreTrainedConfig) -> frozenset[int]:
    """D of a model's queries and keys, and of its values: one, but for multi-head latent attention."""
    text = config.get_text_config()
    if getattr(text, "v_head_dim", None) is None:
        return frozenset({head_size(text)})
    return frozenset({text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim})


def _memory(slots: int, like: Tensor) -> Tensor:
    """Not cleared, which would take long and touch every page, but for the last slot, which padded reads go to."""
    memory = torch.empty((slots, like.shape[0], like.shape[2]), dtype=like.dtype, device=like.device)
    memory[-1] = 0
    return memory


class PageTable:
    """
    One request's pages and how many tokens it has cached; made by [`PagePool.new_table`].

    Args:
        pool (`PagePool`): whose pages they are.
        tokens (`Sequence[int]`): the request's own growing list.
    """

    def __init__(self, pool: PagePool, tokens: Sequence[int]) -> None:
        self.pool, self.tokens = pool, tokens
        self.pages: list[int] = []
        self.length = 0
        self.digest = b""
        """Stands for all tokens of its full pages."""

    def reserve(self, tokens: int) -> bool:
        """Make room for `tokens` behind the cached ones; `False`, and nothing is changed, where the pool lacks pages."""
        missing = self.pool.pages_for(self.length + tokens) - len(self.pages)
        if missing > self.pool.free_pages:
            return False
        self.pages += [self.pool._take() for _ in range(missing)]
        return True

    def commit(self, tokens: int) -> None:
        """Keep the first `tokens` of what was written, and give back the pages behind them."""
        pool, size = self.pool, self.pool.page_size
        assert 0 <= tokens <= len(self.pages) * size - self.length, "more is committed than there was room for"
        full = self.length // size
        self.length += tokens
        while len(self.pages) > pool.pages_for(self.length):
            pool._give_back(self.pages.pop())
        if pool.prefix_sharing:
            assert self.length <= len(self.tokens), "the table does not know the tokens that are committed"
            for i in range(full, self.length // size):
                self.digest = pool._digest(self.digest, self.tokens, (i + 1) * size)
                pool._make_findable(self.pages[i], self.digest)

    def release(self) -> None:
        """Give back all pages; the table is an empty one then."""
        # The last page first, so that it is reused first: a page is only found through those before it.
        while self.pages:
            self.pool._give_back(self.pages.pop())
        self.length, self.digest = 0, b""


class PagedBatch:
    """
    A [`KVCache`] over the tables of the requests that take part in a forward, or in several; row r is `tables[r]`.

    Nothing is copied to forget what was written: the next forward writes over it.

    Args:
        pool (`PagePool`): holds the memory.
        tables (`Sequence[PageTable]`): of that pool, no two the same.
    """

    def __init__(self, pool: PagePool, tables: Sequence[PageTable]) -> None:
        assert all(table.pool is pool for table in tables), "a table belongs to another pool"
        assert len({id(table) for table in tables}) == len(tables), "two rows have the same table"
        self._pool, self._tables = pool, tuple(tables)
        self._plan: Plan | None = None
        self._pages: dict[torch.device, Tensor] = {}
        self._slots: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._reads: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}

    @classmethod
    def at(cls, pool: PagePool, extents: Sequence[Sequence[int]]) -> PagedBatch:
        """
        The batch that has these [`extents`] in the same pool of another process.

        Args:
            pool (`PagePool`): serves such batches only: who holds a page is known to the other process.
            extents (`Sequence[Sequence[int]]`): of the other batch.
        """
        tables = []
        for length, *pages in extents:
            table = PageTable(pool, ())
            table.length, table.pages = length, pages
            for page in pages:
                # The other process has seen to it that what is written is not shared.
                pool._holders[page] = 1
            tables.append(table)
        return cls(pool, tables)

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(table.length for table in self._tables)

    @property
    def extents(self) -> list[list[int]]:
        return [[table.length, *table.pages] for table in self._tables]

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        self._prepare(plan)
        return tuple(stored.data_ptr() for layer in self._pool._layers.values() for stored in layer)

    def pages(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> Pages:
        self._prepare(plan)
        if keys.device not in self._pages:
            self._pages[keys.device] = self._pages[CPU].to(keys.device)
        stored_keys, stored_values = self._pool._layer(layer, keys, values)
        return Pages(stored_keys, stored_values, self._pages[keys.device], self._pool.page_size)

    def store(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> None:
        self._prepare(plan)
        _, writes = self._slots_of(plan, keys.device)
        for stored, new in zip(self._pool._layer(layer, keys, values), (keys, values), strict=True):
            stored.index_copy_(0, writes, new.transpose(0, 1).to(stored.dtype))

    def gather(self, layer: int, rows: tuple[int, ...], plan: Plan) -> tuple[Tensor, Tensor]:
        gathered = []
        for stored in self._pool._layers[layer]:
            reads = self._reads_of(rows, plan, stored.device)
            # Of the ways to gather rows, the fastest on a CPU by far.
            read = stored.index_select(0, reads.flatten()).view(*reads.shape, *stored.shape[1:])
            gathered.append(read.transpose(1, 2))
        return gathered[0], gathered[1]

    def commit(self, row: int, tokens: int) -> None:
        table, plan = self._tables[row], self._plan
        written = 0 if plan is None else plan.prefix[row] + plan.tokens_of(row)
        assert tokens == 0 or table.length + tokens <= written, "more is committed than was written"
        table.commit(tokens)

    def _prepare(self, plan: Plan) -> None:
        """Make the tables of a new plan, `int32[R, W]`, and see that all that it writes is reserved and not shared."""
        if self._plan is plan:
            return
        pool, size = self._pool, self._pool.page_size
        width = 1
        for table, prefix, total in zip(self._tables, plan.prefix, _totals(plan), strict=True):
            assert table.length == prefix, "the plan was made for another state of the cache"
            assert total <= len(table.pages) * size, f"no room was reserved: {total} tokens, {len(table.pages)} pages"
            for page in table.pages[prefix // size : pool.pages_for(total)]:
                alone = pool._holders[page] == 1 and pool._digests[page] is None
                assert alone, f"page {page} is shared and must not be written"
            width = max(width, pool.pages_for(total))
        padded = [table.pages[:width] + [0] * (width - len(table.pages)) for table in self._tables]
        self._plan, self._pages, self._slots = plan, {CPU: torch.tensor(padded, dtype=torch.int32)}, {}
        self._reads.clear()

    def _reads_of(self, rows: tuple[int, ...], plan: Plan, device: torch.device) -> Tensor:
        """Slots that batch rows read, `int64[n, K]`; made once a forward and device."""
        if (rows, device) not in self._reads:
            longest = max(plan.prefix[row] + plan.tokens_of(row) for row in rows)
            self._reads[rows, device] = self._slots_of(plan, device)[0][list(rows), :longest]
        return self._reads[rows, device]

    def _slots_of(self, plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
        """Slots to read, `int64[R, K]`, and to write, `int64[T]`; made once a forward, and moved once to each device."""
        if CPU not in self._slots:
            self._slots[CPU] = self._make_slots(plan)
        if device not in self._slots:
            reads, writes = self._slots[CPU]
            self._slots[device] = reads.to(device), writes.to(device)
        return self._slots[device]

    def _make_slots(self, plan: Plan) -> tuple[Tensor, Tensor]:
        pool, size = self._pool, self._pool.page_size
        totals = _totals(plan)
        place = torch.arange(max(totals))
        slots = self._pages[CPU].long()[:, place // size] * size + place % size
        prefixes, ends = torch.tensor([plan.prefix, totals])[:, :, None]
        # Behind a row's tokens the slot that is always zero is read: a page's leftovers may be another request's NaN.
        reads = slots.where(place < ends, pool.num_pages * size)
        return reads, slots[(place >= prefixes) & (place < ends)]


def _totals(plan: Plan) -> list[int]:
    """Tokens of each row, prefix and forward together."""
    return [prefix + plan.tokens_of(row) for row, prefix in enumerate(plan.prefix)]
