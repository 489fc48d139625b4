"""Segment attention over pages, in Triton: prefixes are read where they lie, and nothing is gathered or padded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recguide_kernels.kv_commit import CommitWork, commit_work, kv_commit
from recguide_kernels.packed import PackedRound
from recguide_kernels.segment_attention import segment_attention
from recguide_kernels.work import DeviceWork, WorkPlan, power_of_two, tile_rows
from recguide_kernels.work import plan as plan_work

from ..dense_kv import KVCache, Pages
from ..segments import Plan

SPLIT = 2048
"""Prefix tokens of a work item: fixed, so that a row's bits do not depend on its neighbours. Short enough to give a device work
where one request has a long prefix, and long enough that partial results do not take the bandwidth of K/V (docs/kernels.md)."""


@dataclass(frozen=True)
class Bounds:
    """
    What is fixed when a forward is captured: grids and the sizes of tensors.

    Args:
        group (`int`): query heads of a key/value head, in every layer.
        rows (`int`): height of a tile.
        items, merges (`int`): work items and merges, those that do nothing included.
        width (`int`): pages of the longest table.
    """

    group: int
    rows: int
    items: int
    merges: int
    width: int


class TritonAttention:
    """
    Segment attention on CUDA devices, and on a CPU in Triton's interpreter.

    Args:
        split (`int`, *optional*): prefix tokens of a work item; `None`: prefixes are not split.
    """

    name = "triton"

    def __init__(self, split: int | None = SPLIT) -> None:
        self._split = split

    def plan(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> TritonForward:
        return TritonForward(plan, kv, dtype, self._split)

    def bounds(self, plan: Plan, page_size: int, group: int, dtype: torch.dtype) -> Bounds:
        """The smallest bounds, in powers of two, of a forward that can be captured."""
        work = _work(plan, group, dtype, self._split)
        longest = max(prefix + plan.tokens_of(row) for row, prefix in enumerate(plan.prefix))
        return Bounds(
            group=group,
            rows=work.rows,
            items=power_of_two(len(work.items)),
            merges=power_of_two(len(work.merges)) if work.merges else 0,
            width=power_of_two(-(-longest // page_size)),
        )

    def static(self, padded: Plan, plan: Plan, kv: KVCache, dtype: torch.dtype, bounds: Bounds) -> TritonForward:
        """A forward that can be captured: `padded` is `plan` with tokens and rows that are nobody's behind it."""
        return TritonForward(plan, kv, dtype, self._split, padded, bounds)


@dataclass(frozen=True)
class _Shared:
    """What layers with equal groups of heads and pages on the same device share."""

    packed: PackedRound
    work: DeviceWork
    stored: CommitWork


class TritonForward:
    """One forward: its work items are made when its first layer asks, for only layers know how many heads they have."""

    def __init__(
        self,
        plan: Plan,
        kv: KVCache,
        dtype: torch.dtype,
        split: int | None,
        padded: Plan | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self.layers_run = 0
        self._plan, self._kv, self._dtype, self._split = plan, kv, dtype, split
        self._padded, self._bounds = plan if padded is None else padded, bounds
        self._shared: dict[tuple[torch.device, int, int], _Shared] = {}
        self._first: tuple[int, Tensor, Tensor] | None = None

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.layers_run += 1
        pages = self._kv.pages(layer, keys, values, self._plan)
        if self._first is None:
            self._first = layer, keys[:, :0], values[:, :0]
        key = query.device, query.shape[0] // keys.shape[0], pages.page_size
        if key not in self._shared:
            self._shared[key] = self._share(*key, pages)
        shared = self._shared[key]
        # Triton launches on the current device, which need not be that of a model spread over several.
        with torch.cuda.device_of(query):
            kv_commit(keys, values, pages.keys, pages.values, shared.packed, shared.stored)
            return segment_attention(query, keys, values, pages.keys, pages.values, shared.packed, scaling, shared.work)

    def load(self, padded: Plan, plan: Plan, kv: KVCache) -> None:
        """Take over another forward of the same bounds: its numbers go into the tensors that are there."""
        assert self._first is not None, "a forward is loaded only after it has run"
        self._padded, self._plan, self._kv = padded, plan, kv
        pages = kv.pages(*self._first, plan)
        for (device, group, page_size), shared in self._shared.items():
            assert page_size == pages.page_size, "the caches have pages of different sizes"
            fresh = self._share(device, group, page_size, pages)
            for old, new in (
                (shared.packed.visible, fresh.packed.visible),
                (shared.packed.tables, fresh.packed.tables),
                (shared.work.items, fresh.work.items),
                (shared.work.merges, fresh.work.merges),
                (shared.stored.places, fresh.stored.places),
                (shared.stored.counts, fresh.stored.counts),
            ):
                assert old.shape == new.shape, "the forward is of other bounds"
                old.copy_(new)

    def _share(self, device: torch.device, group: int, page_size: int, pages: Pages) -> _Shared:
        plan, bounds = self._padded, self._bounds
        tables = pages.tables.to(device)
        if bounds is not None:
            width = min(bounds.width, tables.shape[1])
            wide = tables.new_zeros((len(plan.prefix), bounds.width))
            wide[: tables.shape[0], :width] = tables[:, :width]
            tables = wide
        packed = PackedRound(plan.starts, plan.prefix, plan.visible.to(device), tables, page_size)
        # Rows behind the cache's are padding, of which nothing is kept.
        counts = [plan.tokens_of(row) if row < len(self._plan.prefix) else 0 for row in range(len(plan.prefix))]
        stored = commit_work(packed, torch.tensor(counts, device=device))
        work = _work(plan, group, self._dtype, self._split)
        if bounds is None:
            return _Shared(packed, work.to(device), stored)
        assert (group, work.rows) == (bounds.group, bounds.rows), "layers differ in what was taken as fixed"
        fixed = replace(work.to(device, bounds.items, bounds.merges), partials=bounds.items if bounds.merges else 0)
        return _Shared(packed, fixed, replace(stored, limit=plan.query_tokens))


def _work(plan: Plan, group: int, dtype: torch.dtype, split: int | None) -> WorkPlan:
    longest = max(plan.tokens_of(row) for row in range(len(plan.prefix)))
    return plan_work(plan.starts, plan.prefix, group, tile_rows(longest, group, dtype), split)
