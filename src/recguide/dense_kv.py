"""A small contiguous KV cache: one stretch a batch row. The paged pool of the engine offers the same calls."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .segments import Plan

GROWTH = 256
PAGE_SIZE = 16
"""Of the pages that backends see, where it divides the capacity."""


@dataclass(frozen=True)
class Pages:
    """
    One layer's memory, as backends read and write it in place.

    Args:
        keys, values (`torch.Tensor`): `[N, G, D]`, views of N slots; D is contiguous.
        tables (`torch.Tensor`): `int32[R, W]`, the pages of each batch row in order, with room for the forward's tokens.
        page_size (`int`): tokens a page. Token i of row r lies in slot `tables[r, i // page_size] * page_size + i % page_size`.
    """

    keys: Tensor
    values: Tensor
    tables: Tensor
    page_size: int


class KVCache(Protocol):
    """
    What the round and the attention backends need of a KV cache, dense or paged.

    A forward writes its K/V behind each row's prefix in the order of its packed tokens. The verified (or prefilled)
    segment comes first, so committing n tokens keeps the first n of what was written and forgets the rest.
    """

    @property
    def lengths(self) -> tuple[int, ...]:
        """Cached tokens of each batch row."""

    @property
    def extents(self) -> list[list[int]]:
        """Of each batch row its cached tokens, then its pages if it has any: with these its K/V are found in memory written alike."""

    @property
    def page_size(self) -> int:
        """Tokens of a page of [`pages`]."""

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        """Where the memory of each layer lies, once room is made for a forward; nothing for layers that have none yet."""

    def pages(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> Pages:
        """The layer's memory, with room for a forward's `keys`, `values` `[G, T, D]`, which are not stored."""

    def store(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> None:
        """Store a forward's `keys`, `values` `[G, T, D]`."""

    def gather(self, layer: int, rows: tuple[int, ...], plan: Plan) -> tuple[Tensor, Tensor]:
        """
        All keys and values that batch rows attend to in a forward, `[n, G, K, D]`: their prefixes, then what it has stored.

        K is that of the longest of them; behind shorter ones there are numbers of no meaning, never NaN.
        """

    def commit(self, row: int, tokens: int) -> None:
        """Keep the first `tokens` of what the last forward wrote for `row`."""


class Forgetful:
    """
    A [`KVCache`] that forgets what it is told to keep, so that any number of rounds start from the same state.

    Args:
        kv (`KVCache`): read and written; what it holds stays as it is.
    """

    def __init__(self, kv: KVCache) -> None:
        self._kv = kv

    @property
    def lengths(self) -> tuple[int, ...]:
        return self._kv.lengths

    @property
    def extents(self) -> list[list[int]]:
        return self._kv.extents

    @property
    def page_size(self) -> int:
        return self._kv.page_size

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        return self._kv.addresses(plan)

    def pages(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> Pages:
        return self._kv.pages(layer, keys, values, plan)

    def store(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> None:
        self._kv.store(layer, keys, values, plan)

    def gather(self, layer: int, rows: tuple[int, ...], plan: Plan) -> tuple[Tensor, Tensor]:
        return self._kv.gather(layer, rows, plan)

    def commit(self, row: int, tokens: int) -> None:
        pass


class DenseKV:
    """
    A [`KVCache`] with one stretch of memory a layer, `[R, G, capacity, D]`, grown as needed.

    Args:
        rows (`int`): batch rows.
        capacity (`int`): tokens that a row is expected to need.
    """

    def __init__(self, rows: int, capacity: int = GROWTH) -> None:
        self._lengths = [0] * rows
        self._capacity = capacity
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._slots: tuple[Plan, Tensor, Tensor] | None = None
        self._tables: dict[tuple[torch.device, int, int], Tensor] = {}

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(self._lengths)

    @property
    def extents(self) -> list[list[int]]:
        return [[length] for length in self._lengths]

    @property
    def page_size(self) -> int:
        return math.gcd(self._keys[0].shape[2] if self._keys else self._capacity, PAGE_SIZE)

    def addresses(self, plan: Plan) -> tuple[int, ...]:
        for layer, (keys, values) in enumerate(zip(self._keys, self._values, strict=True)):
            self._make_room(layer, _end(plan), keys[0], values[0])
        return tuple(stored.data_ptr() for stored in (*self._keys, *self._values))

    def pages(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> Pages:
        self._make_room(layer, _end(plan), keys, values)
        memory = self._keys[layer], self._values[layer]
        rows, heads, capacity, _ = memory[0].shape
        page_size = self.page_size
        # A row's heads lie one behind the other, so a row's pages follow each other, and its heads are a stretch apart.
        if (keys.device, heads, capacity) not in self._tables:
            first = torch.arange(rows)[:, None] * (heads * capacity // page_size)
            tables = (first + torch.arange(capacity // page_size)).to(torch.int32)
            self._tables[keys.device, heads, capacity] = tables.to(keys.device)
        slots = (rows * heads - heads + 1) * capacity
        flat = [
            stored.as_strided((slots, heads, size), (size, capacity * size, 1))
            for stored, size in ((stored, stored.shape[3]) for stored in memory)
        ]
        return Pages(flat[0], flat[1], self._tables[keys.device, heads, capacity], page_size)

    def store(self, layer: int, keys: Tensor, values: Tensor, plan: Plan) -> None:
        end = _end(plan)
        self._make_room(layer, end, keys, values)
        stored_keys, stored_values = self._keys[layer], self._values[layer]
        if len(self._lengths) == 1:
            stored_keys[0, :, plan.prefix[0] : end] = keys
            stored_values[0, :, plan.prefix[0] : end] = values
        else:
            row, slot = self._places(plan, keys.device)
            stored_keys[row, :, slot] = keys.transpose(0, 1).to(stored_keys.dtype)
            stored_values[row, :, slot] = values.transpose(0, 1).to(stored_values.dtype)

    def gather(self, layer: int, rows: tuple[int, ...], plan: Plan) -> tuple[Tensor, Tensor]:
        end = max(plan.prefix[row] + plan.tokens_of(row) for row in rows)
        keys, values = self._keys[layer][:, :, :end], self._values[layer][:, :, :end]
        if rows == tuple(range(len(self._lengths))):
            return keys, values
        return keys[list(rows)], values[list(rows)]

    def commit(self, row: int, tokens: int) -> None:
        self._lengths[row] += tokens

    def at(self, extents: Sequence[Sequence[int]]) -> DenseKV:
        """This cache, once it has committed as much as one of these [`extents`]."""
        self._lengths = [length for (length,) in extents]
        return self

    def read(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """A row's committed keys and values, `[G, length, D]` for each layer (views)."""
        length = self._lengths[row]
        return [(k[row, :, :length], v[row, :, :length]) for k, v in zip(self._keys, self._values, strict=True)]

    def load(self, row: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take over keys and values `[G, length, D]` computed elsewhere as an empty row's prefix."""
        assert self._lengths[row] == 0, "only an empty row can take over a prefix"
        for layer, (keys, values) in enumerate(layers):
            self._make_room(layer, keys.shape[1], keys, values)
            self._keys[layer][row, :, : keys.shape[1]] = keys
            self._values[layer][row, :, : keys.shape[1]] = values
        self._lengths[row] = layers[0][0].shape[1]

    def _places(self, plan: Plan, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row and slot of each packed token, made once a forward and device."""
        if self._slots is None or self._slots[0] is not plan or self._slots[1].device != device:
            rows = [r for r in range(len(plan.prefix)) for _ in range(plan.tokens_of(r))]
            slots = [plan.prefix[r] + i for r in range(len(plan.prefix)) for i in range(plan.tokens_of(r))]
            self._slots = (plan, torch.tensor(rows, device=device), torch.tensor(slots, device=device))
        return self._slots[1:]

    def _make_room(self, layer: int, end: int, keys: Tensor, values: Tensor) -> None:
        if layer == len(self._keys):
            self._capacity = max(self._capacity, end)
        for stored, like in ((self._keys, keys), (self._values, values)):
            if layer == len(stored):
                # Zeros, not empty: a masked key times its zero weight must not be NaN.
                stored.append(like.new_zeros((len(self._lengths), like.shape[0], self._capacity, like.shape[2])))
            elif (missing := end - stored[layer].shape[2]) > 0:
                rows, heads, _, size = stored[layer].shape
                missing += GROWTH - end % PAGE_SIZE
                more = stored[layer].new_zeros((rows, heads, missing, size))
                stored[layer] = torch.cat((stored[layer], more), dim=2)


def _end(plan: Plan) -> int:
    """Tokens of the longest row, prefix and forward together."""
    return max(prefix + plan.tokens_of(row) for row, prefix in enumerate(plan.prefix))
