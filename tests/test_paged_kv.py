"""The paged pool: it holds what a dense cache holds, shares what is equal, loses no page, and decodes the same text."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recguide.adapter import ModelAdapter
from recguide.attention import installed, resolve_backend
from recguide.config import RecGuideConfig
from recguide.dense_kv import DenseKV
from recguide.errors import ConfigError
from recguide.hooks import Hook
from recguide.loop import method_of
from recguide.models.nemotron_labs_diffusion import NemotronLabsDiffusionModel
from recguide.paged_kv import PagedBatch, PagePool, PageTable
from recguide.rounds import Method, Request, plan_blocks, prefill, run_round
from recguide.segments import Plan, Segment, pack
from recguide.structs import ForwardRecord
from recguide.testing import toy_config, toy_model

CPU = torch.device("cpu")
LAYERS, GROUPS, SIZE = 2, 2, 3
NAN = float("nan")


# --- any sequence of calls against dense copies ----------------------------------------------------------------------


@cache
def true_kv(tokens: tuple[int, ...]) -> Tensor:
    """What a model would cache for the last of `tokens`: it depends on all of them. `[2, LAYERS, G, 1, D]`."""
    generator = torch.Generator().manual_seed(hash(tokens) % 2**31)  # The same in every process.
    return torch.randn(2, LAYERS, GROUPS, 1, SIZE, generator=generator)


def kv_of(tokens: Sequence[int], start: int, end: int) -> Tensor:
    """`[2, LAYERS, G, end - start, D]`."""
    parts = [true_kv(tuple(tokens[: i + 1])) for i in range(start, end)]
    return torch.cat(parts, dim=3) if parts else torch.zeros(2, LAYERS, GROUPS, 0, SIZE)


def plan_for(lengths: Sequence[int], counts: Sequence[int]) -> Plan:
    return pack([[Segment([0] * n, p)] if n else [] for n, p in zip(counts, lengths, strict=True)], lengths, CPU)


def write(kv: PagedBatch | DenseKV, new: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Write `new[r]`, `[2, LAYERS, G, n, D]`, behind each row's prefix; returns what each layer gets to attend to."""
    plan = plan_for(kv.lengths, [part.shape[3] for part in new])
    keys, values = torch.cat(list(new), dim=3)
    for layer in range(LAYERS):
        kv.store(layer, keys[layer], values[layer], plan)
    written = [kv.gather(layer, tuple(range(len(new))), plan) for layer in range(LAYERS)]
    ends = [prefix + plan.tokens_of(row) for row, prefix in enumerate(plan.prefix)]
    for layer, (all_keys, all_values) in enumerate(written):
        last = len(new) - 1
        for part, whole in zip(kv.gather(layer, (last,), plan), (all_keys, all_values), strict=True):
            assert_equal(part, whole[last:, :, : ends[last]])
        pages = kv.pages(layer, keys[layer], values[layer], plan)
        for row, end in enumerate(ends):
            place = torch.arange(end)
            slots = pages.tables[row, place // pages.page_size] * pages.page_size + place % pages.page_size
            assert_equal(pages.keys[slots].transpose(0, 1), all_keys[row, :, :end])
            assert_equal(pages.values[slots].transpose(0, 1), all_values[row, :, :end])
    return written


def assert_equal(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape
    assert torch.allclose(got, expected, rtol=0, atol=0, equal_nan=True)


def assert_writes_like_dense(pool: PagePool, tables: Sequence[PageTable], new: Sequence[Tensor]) -> PagedBatch:
    """Write, and compare all that is returned with a dense cache that holds the true prefixes."""
    paged, dense = PagedBatch(pool, tables), DenseKV(len(tables), capacity=1)
    for row, table in enumerate(tables):
        if table.length:
            dense.load(row, list(zip(*kv_of(table.tokens, 0, table.length), strict=True)))
    assert paged.lengths == dense.lengths
    ends = [table.length + part.shape[3] for table, part in zip(tables, new, strict=True)]
    for got, expected in zip(write(paged, new), write(dense, new), strict=True):
        for tensor, other in zip(got, expected, strict=True):
            assert tensor.shape == other.shape == (len(tables), GROUPS, max(ends), SIZE)
            for row, end in enumerate(ends):
                assert_equal(tensor[row, :, :end], other[row, :, :end])
                assert torch.isfinite(tensor[row, :, end:]).all(), "what is masked must be finite"
    return paged


def assert_holds_the_truth(pool: PagePool, *tables: PageTable) -> None:
    """A forward of no tokens returns exactly what is cached."""
    got = write(PagedBatch(pool, tables), [kv_of([], 0, 0) for _ in tables])
    for layer, (keys, values) in enumerate(got):
        for row, table in enumerate(tables):
            expected = kv_of(table.tokens, 0, table.length)[:, layer]
            assert_equal(torch.stack((keys[row, :, : table.length], values[row, :, : table.length])), expected)


TEXTS = (
    [0, 1, 1, 0, 0, 0, 1, 0] * 6,
    [0, 1, 1, 0, 0, 1, 0, 1] * 6,  # Five tokens like the first.
    [1, 1, 1, 0, 0, 0, 1, 0] * 6,  # All but one of each eight like the first.
)


@dataclass(frozen=True)
class Step:
    """One thing to do; rows that are not there are left out."""

    kind: str
    text: int
    rows: list[int]
    kept: list[int]
    """Tokens to commit, for each row; prompt tokens for a start."""
    rejected: list[int]


a_step = st.builds(
    Step,
    kind=st.sampled_from(("start", "start", "forward", "forward", "forward", "draft", "reserve", "end")),
    text=st.integers(0, len(TEXTS) - 1),
    rows=st.permutations(range(4)),
    kept=st.lists(st.integers(0, 7), min_size=4, max_size=4),
    rejected=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)


class Requests:
    """Requests that start, run forwards in any selection, wait and end."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.running: list[tuple[list[int], PageTable]] = []
        """Each one's text, of which its table knows what is written so far."""

    def do(self, step: Step) -> None:
        rows = [row for row in step.rows if row < len(self.running)]
        if step.kind == "start" and len(self.running) < 4:
            self.start(TEXTS[step.text], 1 + sum(step.kept[:2]))
        elif step.kind == "reserve" and rows:
            self.reserve(self.running[rows[0]][1], step.kept[0])
        elif step.kind == "end" and rows:
            self.end(self.running.pop(rows[0])[1])
        elif step.kind in ("forward", "draft") and rows:
            self.forward(rows[: 1 + step.text], step.kept, step.rejected, commit=step.kind == "forward")
        tables = [table for _, table in self.running]
        self.pool.check_integrity(tables)
        if tables:
            assert_holds_the_truth(self.pool, *tables)

    def start(self, text: list[int], length: int) -> None:
        table = self.pool.new_table(text[:length])
        assert 0 <= table.length < length
        assert table.length % self.pool.page_size == 0
        assert self.pool.prefix_sharing or not table.length
        self.running.append((text, table))

    def reserve(self, table: PageTable, tokens: int) -> bool:
        """All or nothing."""
        before, free = list(table.pages), self.pool.free_pages
        missing = max(self.pool.pages_for(table.length + tokens) - len(before), 0)
        granted = table.reserve(tokens)
        assert granted == (missing <= free)
        assert table.pages[: len(before)] == before
        taken = missing if granted else 0
        assert (len(table.pages), self.pool.free_pages) == (len(before) + taken, free - taken)
        return granted

    def forward(self, rows: list[int], kept: list[int], rejected: list[int], commit: bool) -> None:
        """What is rejected is NaN; without `commit` all is."""
        tables, keeps, new = [], [], []
        for row in rows:
            text, table = self.running[row]
            count = kept[row] + rejected[row] if self.reserve(table, kept[row] + rejected[row]) else 0
            keep = min(kept[row], count) if commit else 0
            end = table.length + keep
            assert isinstance(table.tokens, list)
            table.tokens += text[len(table.tokens) : end]
            nan = torch.full((2, LAYERS, GROUPS, count - keep, SIZE), NAN)
            new.append(torch.cat((kv_of(text, table.length, end), nan), dim=3))
            tables.append(table)
            keeps.append(keep)
        if not any(part.shape[3] for part in new):
            return
        ends = tuple(table.length + keep for table, keep in zip(tables, keeps, strict=True))
        batch = assert_writes_like_dense(self.pool, tables, new)
        for row, (table, keep) in enumerate(zip(tables, keeps, strict=True)):
            if commit:
                batch.commit(row, keep)
                assert len(table.pages) == self.pool.pages_for(table.length)
        assert batch.lengths == ends

    def end(self, table: PageTable) -> None:
        table.release()
        free = self.pool.free_pages
        table.release()
        assert (table.length, table.pages, self.pool.free_pages) == (0, [], free)


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("page_size", [1, 2, 4])
@given(steps=st.lists(a_step, min_size=20, max_size=30), tokens=st.integers(12, 40))
@settings(max_examples=15)
def test_any_sequence_of_calls(page_size: int, sharing: bool, steps: list[Step], tokens: int) -> None:
    pool = PagePool(tokens // page_size, page_size, sharing)
    requests = Requests(pool)
    for step in steps:
        requests.do(step)
    for _, table in requests.running:
        table.release()
    pool.check_integrity([])
    assert pool.free_pages == pool.num_pages


# --- the pool ------------------------------------------------------------------------------------------------------


def run(pool: PagePool, table: PageTable, count: int, keep: int | None = None) -> None:
    """Write `count` of the request's tokens behind its prefix and keep some of them, all by default."""
    assert table.reserve(count)
    batch = PagedBatch(pool, [table])
    write(batch, [kv_of(table.tokens, table.length, table.length + count)])
    batch.commit(0, count if keep is None else keep)


def cached(pool: PagePool, tokens: Sequence[int]) -> int:
    """How many tokens a new request finds in the pool; it leaves again."""
    table = pool.new_table(tokens)
    length = table.length
    table.release()
    return length


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (-1, 16)])
def test_sizes_below_one_are_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1; got"):
        PagePool(*arguments)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_budget_is_used_and_not_exceeded(page_size: int, dtype: torch.dtype) -> None:
    config = toy_config()
    budget = 123_456
    pool = PagePool.for_budget(budget, page_size, config, dtype, prefix_sharing=True)
    assert pool.prefix_sharing
    table = pool.new_table([0])
    assert table.reserve(1)
    batch = PagedBatch(pool, [table])
    plan = plan_for([0], [1])
    for layer in range(config.num_hidden_layers):
        new = torch.zeros(config.num_key_value_heads, 1, config.head_dim, dtype=dtype)
        batch.store(layer, new, new, plan)
    used = sum(tensor.nbytes for layer in pool._layers.values() for tensor in layer)
    page = (used * page_size) // (pool.num_pages * page_size + 1)
    assert used <= budget < used + page


def test_a_budget_below_one_page_is_refused() -> None:
    token = 2 * 2 * 2 * 16 * 4
    assert PagePool.for_budget(17 * token, 16, toy_config(), torch.float32).num_pages == 1
    for budget in (17 * token - 1, 0, -5):
        with pytest.raises(ConfigError, match=rf"budget of {budget} bytes .* takes {17 * token} bytes"):
            PagePool.for_budget(budget, 16, toy_config(), torch.float32)
    with pytest.raises(ConfigError, match="page_size"):
        PagePool.for_budget(17 * token, 0, toy_config(), torch.float32)


def test_each_layer_has_its_own_shape_and_dtype() -> None:
    pool = PagePool(4, 2)
    table = pool.new_table([0] * 3)
    assert table.reserve(3)
    batch, plan = PagedBatch(pool, [table]), plan_for([0], [3])
    for layer, (groups, size, dtype) in enumerate(((2, 3, torch.float32), (1, 8, torch.bfloat16))):
        keys, values = torch.randn(groups, 3, size).to(dtype), torch.randn(groups, 3, size + 1).to(dtype)
        batch.store(layer, keys, values, plan)
        got = batch.gather(layer, (0,), plan)
        assert_equal(got[0][0], keys)
        assert_equal(got[1][0], values)


def test_a_pool_made_in_inference_mode_serves_outside_of_it() -> None:
    pool = PagePool(4, 2)
    table = pool.new_table([1, 0, 1])
    with torch.inference_mode():
        run(pool, table, 2)
    run(pool, table, 1)
    assert_holds_the_truth(pool, table)


def test_another_requests_nan_is_never_read() -> None:
    """Neither in the pages it left, nor from a row that is longer."""
    pool = PagePool(4, 4)
    ill = pool.new_table([1])
    assert ill.reserve(16)
    write(PagedBatch(pool, [ill]), [torch.full((2, LAYERS, GROUPS, 16, SIZE), NAN)])
    ill.release()
    tables = [pool.new_table([1, 0, 1, 1, 0]), pool.new_table([1])]
    assert all(table.reserve(n) for table, n in zip(tables, (5, 1), strict=True))
    assert_writes_like_dense(pool, tables, [kv_of(tables[0].tokens, 0, 5), kv_of(tables[1].tokens, 0, 1)])


def test_out_of_pages_changes_nothing_and_ends_with_a_release() -> None:
    pool = PagePool(3, 4)
    first, second = pool.new_table([0] * 9), pool.new_table([1] * 9)
    run(pool, first, 8)
    assert second.reserve(4)
    for table in (first, second):
        before = list(table.pages)
        assert not table.reserve(9)
        assert (table.pages, pool.free_pages) == (before, 0)
    assert not first.reserve(1)
    pool.check_integrity([first, second])
    first.release()
    assert second.reserve(12)
    pool.check_integrity([second])


def test_commit_gives_back_what_was_reserved_too_much() -> None:
    pool = PagePool(8, 4)
    table = pool.new_table([1, 0] * 8)
    run(pool, table, 16, keep=5)
    assert (table.length, len(table.pages), pool.free_pages) == (5, 2, 6)
    run(pool, table, 3, keep=0)
    assert (table.length, len(table.pages)) == (5, 2)
    run(pool, table, 3)
    assert (table.length, len(table.pages)) == (8, 2)
    assert_holds_the_truth(pool, table)


def test_one_batch_serves_many_forwards() -> None:
    """A draft, which is never committed, and the verification after it; then the next round."""
    pool = PagePool(8, 4)
    tables = [pool.new_table([1, 0, 1, 1, 0, 0]), pool.new_table([0, 0, 1, 0])]
    assert all(table.reserve(6) for table in tables)
    batch = PagedBatch(pool, tables)
    write(batch, [torch.full((2, LAYERS, GROUPS, n, SIZE), NAN) for n in (2, 0)])
    write(batch, [kv_of(table.tokens, 0, 3) for table in tables])
    for row in range(2):
        batch.commit(row, 3)
    assert all(table.reserve(3) for table in tables)
    write(batch, [kv_of(tables[0].tokens, 3, 6), kv_of(tables[1].tokens, 3, 4)])
    batch.commit(0, 3)
    batch.commit(1, 1)
    assert batch.lengths == (6, 4)
    assert_holds_the_truth(pool, *tables)


def test_faults_of_the_caller_assert() -> None:
    pool = PagePool(8, 4, prefix_sharing=True)
    table = pool.new_table([1, 0, 1])
    batch = PagedBatch(pool, [table])
    with pytest.raises(AssertionError, match="no room was reserved"):
        write(batch, [kv_of(table.tokens, 0, 3)])
    with pytest.raises(AssertionError, match="than was written"):
        batch.commit(0, 1)
    assert table.reserve(5)
    old_plan = plan_for([0], [2])
    batch.store(0, torch.zeros(GROUPS, 2, SIZE), torch.zeros(GROUPS, 2, SIZE), old_plan)
    batch.commit(0, 1)
    with pytest.raises(AssertionError, match="another state"):
        PagedBatch(pool, [table]).store(0, torch.zeros(GROUPS, 2, SIZE), torch.zeros(GROUPS, 2, SIZE), old_plan)
    batch.commit(0, 1)
    with pytest.raises(AssertionError, match="than was written"):
        batch.commit(0, 1)
    for tokens in (3, -1):
        with pytest.raises(AssertionError, match="than there was room for"):
            table.commit(tokens)
    with pytest.raises(AssertionError, match="does not know the tokens"):
        table.commit(2)
    with pytest.raises(AssertionError, match="same table"):
        PagedBatch(pool, [table, table])
    with pytest.raises(AssertionError, match="another pool"):
        PagedBatch(PagePool(8, 4), [table])


# --- sharing -------------------------------------------------------------------------------------------------------


def test_full_pages_of_an_equal_beginning_are_shared() -> None:
    pool = PagePool(16, 4, prefix_sharing=True)
    prompt = [1, 0, 0, 1, 1, 1, 0, 1, 0, 1, 1]
    first = pool.new_table(prompt)
    assert (first.length, first.pages) == (0, [])
    run(pool, first, 11)
    second = pool.new_table([*prompt, 0, 0])
    assert (second.length, second.pages) == (8, first.pages[:2]), "the third page is not full"
    run(pool, second, 5)
    third = pool.new_table([*prompt[:7], 0, *prompt[8:]])
    assert third.pages == first.pages[:1], "a page is only shared where all before it is equal too"
    run(pool, third, 7)
    tables = [first, second, third]
    pool.check_integrity(tables)
    assert_holds_the_truth(pool, *tables)
    assert pool.free_pages == 16 - 3 - 2 - 2


@pytest.mark.parametrize(("length", "expected"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_prompt_token_is_left_to_compute(length: int, expected: int) -> None:
    pool = PagePool(16, 4, prefix_sharing=True)
    tokens = [1, 0, 0, 1, 1, 1, 0, 1, 0]
    table = pool.new_table(tokens)
    run(pool, table, 9)
    assert cached(pool, tokens[:length]) == expected


def test_a_beginning_is_not_the_same_at_another_place() -> None:
    pool = PagePool(16, 2, prefix_sharing=True)
    table = pool.new_table([0, 1, 0, 1])
    run(pool, table, 4)
    assert len({pool._digests[page] for page in table.pages}) == 2
    assert cached(pool, [1, 1, 0, 1, 0]) == 0


def test_without_sharing_nothing_is_found() -> None:
    pool = PagePool(16, 2)
    table = pool.new_table([0, 1, 0, 1])
    run(pool, table, 4)
    assert cached(pool, [0, 1, 0, 1, 1]) == 0
    assert not pool._found


def test_only_committed_tokens_are_found() -> None:
    pool = PagePool(16, 2, prefix_sharing=True)
    table = pool.new_table([0, 1, 0, 1, 1])
    run(pool, table, 4, keep=3)
    assert cached(pool, [0, 1, 0, 1, 1]) == 2
    run(pool, table, 1)
    assert cached(pool, [0, 1, 0, 1, 1]) == 4


def test_released_pages_are_found_until_they_are_needed() -> None:
    """The longest unused request first, and of one request the last page first."""
    pool = PagePool(6, 2, prefix_sharing=True)
    old, new = [0, 0, 0, 0, 1], [1, 1, 1, 1, 0]
    for tokens in (old, new):
        table = pool.new_table(tokens)
        run(pool, table, 4)
        table.release()
    assert (pool.free_pages, cached(pool, new), cached(pool, old)) == (6, 4, 4)
    assert cached(pool, new) == 4  # Used last.
    other = pool.new_table([7] * 12)
    found = []
    for room in range(2, 13, 2):
        assert other.reserve(room)
        pool.check_integrity([other])
        found.append((_peek(pool, old), _peek(pool, new)))
    assert found == [(4, 4), (4, 4), (2, 4), (0, 4), (0, 2), (0, 0)]


def _peek(pool: PagePool, tokens: Sequence[int]) -> int:
    """How many tokens could be taken over, without using the pages."""
    digest, end = b"", 0
    while end + pool.page_size < len(tokens):
        digest = pool._digest(digest, tokens, end + pool.page_size)
        if digest not in pool._found:
            break
        end += pool.page_size
    return end


def test_a_released_table_is_an_empty_one() -> None:
    pool = PagePool(8, 2, prefix_sharing=True)
    table = pool.new_table([0, 1, 0, 1, 1])
    run(pool, table, 5)
    table.release()
    run(pool, table, 5)
    pool.check_integrity([table])
    assert_holds_the_truth(pool, table)


def test_pages_in_use_are_never_reused() -> None:
    pool = PagePool(3, 2, prefix_sharing=True)
    first = pool.new_table([0, 1, 0, 1, 1])
    run(pool, first, 4)
    second = pool.new_table([0, 1, 0, 1, 1])
    first.release()
    assert (second.length, pool.free_pages) == (4, 1)
    assert not second.reserve(3)
    assert_holds_the_truth(pool, second)


def test_the_same_page_computed_twice_is_kept_twice_and_found_once() -> None:
    pool = PagePool(8, 2, prefix_sharing=True)
    tables = [pool.new_table([0, 1, 0]) for _ in range(2)]
    for table in tables:
        run(pool, table, 3)
    pool.check_integrity(tables)
    assert pool.new_table([0, 1, 1]).pages == tables[0].pages[:1]
    tables[1].release()
    assert len(pool._idle) == 0


def test_a_shared_page_is_never_written() -> None:
    pool = PagePool(8, 2, prefix_sharing=True)
    first = pool.new_table([0, 1, 0])
    run(pool, first, 3)
    second = pool.new_table([0, 1, 0])
    second.length = 1  # As no call would leave it.
    with pytest.raises(AssertionError, match=f"page {first.pages[0]} is shared and must not be written"):
        write(PagedBatch(pool, [second]), [kv_of([0, 1], 1, 2)])


# --- the checker can fail ------------------------------------------------------------------------------------------

Corruption = Callable[[PagePool, PageTable, PageTable], object]
CORRUPTIONS: dict[str, tuple[Corruption, str]] = {
    "leak": (lambda pool, a, b: pool._free.remove(9), "page 9 is lost"),
    "leak of a table": (lambda pool, a, b: b.pages.pop(), "page 2 counts 1 holders, and 0 tables"),
    "given back too often": (lambda pool, a, b: pool._give_back(2), "page 2 counts 0 holders, and 1 tables"),
    "given back once too few": (lambda pool, a, b: pool._holders.__setitem__(9, 1), "page 9 counts 1 holders, and 0"),
    "twice in one table": (lambda pool, a, b: b.pages.append(2), "page 2 counts 1 holders, and 2 tables"),
    "free twice": (lambda pool, a, b: pool._free.append(9), "page 9 is both free and held, or free twice"),
    "free and held": (lambda pool, a, b: pool._free.append(0), "page 0 is both free and held"),
    "kept and held": (lambda pool, a, b: pool._idle.update({0: None}), "page 0 is both free and held"),
    "kept and free": (lambda pool, a, b: pool._idle.update({9: None}), "page 9 is both free and held, or free twice"),
    "kept for nothing": (
        lambda pool, a, b: pool._idle.update({pool._free.pop(0): None}),
        "page 9 is kept though nothing finds it",
    ),
    "no such page": (lambda pool, a, b: b.pages.append(10), "page 10 is not one of 10"),
    "length beyond the pages": (lambda pool, a, b: setattr(b, "length", 9), "9 tokens do not fit .* page 2"),
    "length below zero": (lambda pool, a, b: setattr(b, "length", -1), "-1 tokens do not fit .* page 2"),
    "shared and partial": (lambda pool, a, b: setattr(b, "length", 3), "page 0 is shared and not full"),
    "found and partial": (lambda pool, a, b: setattr(a, "length", 7), "page 1 can be found and is not full"),
    "shared, not found": (
        lambda pool, a, b: (pool._found.pop(pool._digests[0]), pool._digests.__setitem__(0, None)),  # type: ignore
        "page 0 is shared though nothing finds it",
    ),
    "digest that finds nothing": (lambda pool, a, b: pool._found.clear(), "page 0 has a digest that does not find it"),
    "digest of another page": (
        lambda pool, a, b: pool._found.update({pool._digests[0]: 1}),  # type: ignore[dict-item]
        "page 0 has a digest that does not find it",
    ),
    "found without a digest": (
        lambda pool, a, b: pool._found.update({b"x": 2}),
        "page 2 is found by a digest that it does not have",
    ),
    "free and found": (
        lambda pool, a, b: (pool._found.update({b"x": 9}), pool._digests.__setitem__(9, b"x")),
        "page 9 is free to be written and can be found",
    ),
    "other tokens": (lambda pool, a, b: setattr(a, "tokens", [0] * 8), "page 0 is found by other tokens"),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_found(name: str) -> None:
    """Table `a` holds pages 0 and 1, both full; `b` holds 0, shared, and 2, with one token of four."""
    corrupt, message = CORRUPTIONS[name]
    pool = PagePool(10, 4, prefix_sharing=True)
    a = pool.new_table([0, 1, 0, 1, 1, 1, 0, 0])
    run(pool, a, 8)
    b = pool.new_table([0, 1, 0, 1, 0])
    run(pool, b, 1)
    assert (a.pages, b.pages) == ([0, 1], [0, 2])
    pool.check_integrity([a, b])
    corrupt(pool, a, b)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([a, b])


def test_giving_back_twice_asserts() -> None:
    pool = PagePool(2, 4)
    table = pool.new_table([0])
    assert table.reserve(1)
    page = table.pages[0]
    table.release()
    with pytest.raises(AssertionError, match=f"page {page} was given back twice"):
        pool._give_back(page)
    pool._free.append(page)
    assert table.reserve(1)
    with pytest.raises(AssertionError, match=f"page {page} is both free and held"):
        table.reserve(8)


def test_a_forgotten_table_is_found() -> None:
    pool = PagePool(4, 4)
    tables = [pool.new_table([0]) for _ in range(2)]
    assert all(table.reserve(1) for table in tables)
    pool.check_integrity(tables)
    with pytest.raises(AssertionError, match="page 1 counts 1 holders, and 0 tables hold it"):
        pool.check_integrity(tables[:1])


# --- the same text as with the dense cache -------------------------------------------------------------------------

PROMPTS = ([1, 7, 3], [4], [9, 9, 2, 8, 6, 14, 3, 1, 1, 12, 7], [20, 13])
LIMITS = (24, 9, 17, 24)
STRATEGIES = ("ar", "linear", "quadratic", "recguide")
BLOCK = 8
ROOM = BLOCK * (BLOCK + 1)
"""Query tokens of one request's largest forward: the quadratic layout's."""


class Prefills(Hook):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def on_prefill(self, record: ForwardRecord) -> None:
        self.tokens.append(record.query_tokens)


@lru_cache
def model() -> NemotronLabsDiffusionModel:
    return toy_model()


def requests_for(prompts: Sequence[Sequence[int]], method: Method, limits: Sequence[int] = LIMITS) -> list[Request]:
    pairs = zip(prompts, limits, strict=False)
    return [Request(i, list(prompt), limit, lambda tokens: None, method) for i, (prompt, limit) in enumerate(pairs)]


def options(strategy: str) -> RecGuideConfig:
    extra: dict[str, Any] = {"delta": 0.3} if strategy == "recguide" else {}
    return RecGuideConfig(strategy=strategy, block_size=BLOCK, **extra)


@lru_cache
def dense_texts(strategy: str, prompts: tuple[tuple[int, ...], ...] = tuple(map(tuple, PROMPTS))) -> list[list[int]]:
    adapter = ModelAdapter(model(), resolve_backend())
    requests = requests_for(prompts, method_of(options(strategy), frozenset(), adapter))
    kv = DenseKV(len(requests))
    with installed(model()):
        prefill(requests, adapter, kv, Hook())
        while any(request.finished is None for request in requests):
            plan_blocks(requests, len(requests))
            run_round(requests, adapter, kv, Hook())
    return [request.tokens for request in requests]


class Engine:
    """As little of an engine as a pool needs: tables, room before each forward, integrity after each."""

    def __init__(self, pool: PagePool, strategy: str, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
        self.pool, self.log = pool, Prefills()
        self.adapter = ModelAdapter(model(), resolve_backend())
        self.requests = requests_for(prompts, method_of(options(strategy), frozenset(), self.adapter))
        self.tables: dict[int, PageTable] = {}

    def prefill(self, *ids: int) -> None:
        for i in ids:
            self.tables[i] = self.pool.new_table(self.requests[i].tokens)
            assert self.tables[i].reserve(len(self.requests[i].tokens) - self.tables[i].length)
        with installed(model()):
            prefill([self.requests[i] for i in ids], self.adapter, self._batch(ids), self.log)
        self._check()

    def round(self, *ids: int) -> None:
        for i in ids:
            assert self.tables[i].reserve(ROOM if self.requests[i].finished is None else 0)
        with installed(model()):
            plan_blocks([self.requests[i] for i in ids], len(ids))
            run_round([self.requests[i] for i in ids], self.adapter, self._batch(ids), self.log)
        self._check()

    def release(self, request: int) -> None:
        self.tables.pop(request).release()
        self._check()

    @property
    def live(self) -> list[int]:
        return [i for i, request in enumerate(self.requests) if request.finished is None]

    @property
    def texts(self) -> list[list[int]]:
        return [request.tokens for request in self.requests]

    def _batch(self, ids: Sequence[int]) -> PagedBatch:
        return PagedBatch(self.pool, [self.tables[i] for i in ids])

    def _check(self) -> None:
        self.pool.check_integrity(list(self.tables.values()))
        for i, table in self.tables.items():
            assert table.length == len(self.requests[i].tokens) - 1


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_decodes_the_same_text(strategy: str, page_size: int) -> None:
    pool = PagePool(512 // page_size, page_size)
    engine = Engine(pool, strategy)
    engine.prefill(0, 1, 2, 3)
    while engine.live:
        engine.round(0, 1, 2, 3)
    assert engine.texts == dense_texts(strategy)
    for request in range(4):
        engine.release(request)
    assert pool.free_pages == pool.num_pages


@pytest.mark.parametrize("sharing", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_come_go_and_start_again(strategy: str, sharing: bool) -> None:
    """Any selection of the requests runs each round; some lose their pages midway and are prefilled again."""
    choose = random.Random(1)
    engine = Engine(PagePool(160, 4, sharing), strategy)
    waiting, restarts = [3, 1, 2, 0], 0
    while engine.live:
        if waiting and choose.random() < 0.4:
            engine.prefill(waiting.pop())
        running = [i for i in engine.live if i in engine.tables]
        if not running:
            continue
        chosen = choose.sample(running, choose.randint(1, len(running)))
        if restarts < 3 and choose.random() < 0.3:
            engine.release(chosen[0])
            waiting.append(chosen[0])
            restarts += 1
            continue
        engine.round(*chosen)
        for i in chosen:
            if engine.requests[i].finished:
                engine.release(i)
    assert restarts == 3
    assert engine.texts == dense_texts(strategy)
    assert engine.pool.free_pages == engine.pool.num_pages


@pytest.mark.parametrize("strategy", ["ar", "recguide"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_shared_prefix_is_prefilled_once(strategy: str, page_size: int) -> None:
    prefix = tuple(random.Random(2).choices([t for t in range(24) if t != 5], k=37))
    prompts = ((*prefix, 2), (*prefix, 11, 4), prefix)
    engine = Engine(PagePool(1024 // page_size, page_size, prefix_sharing=True), strategy, prompts)
    engine.prefill(0)
    while 0 in engine.live:
        engine.round(0)
    engine.prefill(1)
    engine.release(0)  # Request 1 goes on with the pages of one that has left.
    while 1 in engine.live:
        engine.round(1)
    engine.release(1)
    engine.prefill(2)
    while engine.live:
        engine.round(2)
    assert engine.texts == dense_texts(strategy, prompts)
    shared = 37 // page_size * page_size
    assert engine.log.tokens == [38, 39 - shared, 37 - 36 // page_size * page_size]
