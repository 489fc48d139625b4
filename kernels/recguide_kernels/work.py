"""The work items of segment attention, made on the host once a forward, in plain Python.

A work item is a tile of one request's query tokens against a range of its prefix and, for the last range, against the round.
All query heads of a key/value head are rows of the same tile, and all segments of a request share its tiles, so the prefix is read once
a tile. A long prefix may be split into ranges of a fixed length that run side by side and leave partial results to be merged;
the length does not depend on the batch, and neither do the bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MIN_ROWS = 16
"""The smallest tile height that tensor cores take."""
MAX_ROWS = 64


@dataclass(frozen=True)
class WorkItem:
    """
    A tile of queries and the keys it meets.

    Args:
        request (`int`): whose.
        query_start, query_stop (`int`): packed indices of its query tokens.
        key_start, key_stop (`int`): the range of the prefix, in tokens.
        in_round (`int`): 1 if the packed tokens are met too, else 0.
        partial (`int`): where the partial result goes; -1: the result is whole.
    """

    request: int
    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    in_round: int
    partial: int

    def fields(self) -> list[int]:
        """As the kernel reads them."""
        return [
            self.request,
            self.query_start,
            self.query_stop,
            self.key_start,
            self.key_stop,
            self.in_round,
            self.partial,
        ]


@dataclass(frozen=True)
class Merge:
    """Query tokens `[query_start, query_stop)` whose result is that of the partial ones `[first, last)` together."""

    query_start: int
    query_stop: int
    first: int
    last: int

    def fields(self) -> list[int]:
        """As the kernel reads them."""
        return [self.query_start, self.query_stop, self.first, self.last]


@dataclass(frozen=True)
class WorkPlan:
    """
    All work of one forward, the same for every layer.

    Args:
        items (`tuple[WorkItem]`): of all requests.
        merges (`tuple[Merge]`): of the tiles whose prefix is split.
        rows (`int`): height of a tile, a power of two: query tokens times the query heads of a key/value head.
        partials (`int`): partial results in all.
    """

    items: tuple[WorkItem, ...]
    merges: tuple[Merge, ...]
    rows: int
    partials: int

    def to(self, device: torch.device, items: int = 0, merges: int = 0) -> DeviceWork:
        """
        The plan as tensors.

        Args:
            device (`torch.device`): of the kernels.
            items, merges (`int`): pad to these numbers with work that does nothing, so that the grids of a captured graph stay right when
                another forward's plan is copied into the tensors.
        """
        nothing = [0] * 5 + [0, -1]
        item_rows = [item.fields() for item in self.items] + [nothing] * (items - len(self.items))
        merge_rows = [merge.fields() for merge in self.merges] + [[0] * 4] * (merges - len(self.merges))
        return DeviceWork(
            items=torch.tensor(item_rows, dtype=torch.int32).view(-1, 7).to(device),
            merges=torch.tensor(merge_rows, dtype=torch.int32).view(-1, 4).to(device),
            rows=self.rows,
            partials=self.partials,
        )


@dataclass(frozen=True)
class DeviceWork:
    """A [`WorkPlan`] as the kernels read it: `items` `int32[I, 7]`, `merges` `int32[M, 4]`."""

    items: Tensor
    merges: Tensor
    rows: int
    partials: int


def tile_rows(tokens: int, group: int, dtype: torch.dtype) -> int:
    """
    The height of tiles for requests of up to `tokens` query tokens, a power of two.

    Args:
        tokens (`int`): query tokens of the longest request.
        group (`int`): query heads of a key/value head; a tile holds at least one token.
        dtype (`torch.dtype`): of the queries. Exact float32 products have no tensor cores, and more registers go into each.
    """
    highest = MAX_ROWS if dtype.itemsize == 2 else MIN_ROWS
    wanted = power_of_two(max(tokens, 1) * group)
    return max(MIN_ROWS, power_of_two(group), min(wanted, highest))


def plan(starts: Sequence[int], prefix: Sequence[int], group: int, rows: int, split: int | None = None) -> WorkPlan:
    """
    The work items of a forward: every query token meets every token of its prefix once, and the round once.

    Args:
        starts, prefix (`Sequence[int]`): as in [`PackedRound`].
        group (`int`): query heads of a key/value head.
        rows (`int`): height of a tile, a power of two from 16 on that holds a group, such as [`tile_rows`]. Results are the same to
            the bit in all batches with the same height.
        split (`int`, *optional*): prefix tokens of an item; `None`: prefixes are not split. Worth its merge where the tiles alone are too
            few to fill the device.

    Raises:
        ValueError: `rows` or `split` is out of range.
    """
    if rows < max(MIN_ROWS, group) or rows & (rows - 1):
        raise ValueError(
            f"rows must be a power of two, at least {MIN_ROWS} and the group of {group} query heads; got {rows}."
        )
    if split is not None and split < 1:
        raise ValueError(f"split must be at least 1 token, or None; got {split}.")
    items: list[WorkItem] = []
    merges: list[Merge] = []
    partials = 0
    for request, cached in enumerate(prefix):
        step = max(cached, 1) if split is None else split
        ranges = [(start, min(start + step, cached)) for start in range(0, max(cached, 1), step)]
        for query_start in range(starts[request], starts[request + 1], rows // group):
            query_stop = min(query_start + rows // group, starts[request + 1])
            whole = len(ranges) == 1
            for i, (key_start, key_stop) in enumerate(ranges):
                in_round = int(i == len(ranges) - 1)
                partial = -1 if whole else partials + i
                items.append(WorkItem(request, query_start, query_stop, key_start, key_stop, in_round, partial))
            if not whole:
                merges.append(Merge(query_start, query_stop, partials, partials + len(ranges)))
                partials += len(ranges)
    return WorkPlan(tuple(items), tuple(merges), rows, partials)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
