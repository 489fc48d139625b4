"""Segment attention over pages, in Triton: prefixes are read where they lie, and nothing is gathered or padded."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from recguide_kernels.kv_commit import CommitWork, commit_work, kv_commit
from recguide_kernels.packed import PackedRound
from recguide_kernels.segment_attention import segment_attention
from recguide_kernels.work import DeviceWork, tile_rows
from recguide_kernels.work import plan as plan_work

from ..dense_kv import KVCache, Pages
from ..segments import Plan

SPLIT = 512
"""Prefix tokens of a work item: fixed, so that a row's bits do not depend on its neighbours, and short enough to give a device
work where one request has a long prefix."""


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


@dataclass(frozen=True)
class _Shared:
    """What layers with equal groups of heads and pages on the same device share."""

    packed: PackedRound
    work: DeviceWork
    stored: CommitWork


class TritonForward:
    """One forward: its work items are made when its first layer asks, for only layers know how many heads they have."""

    def __init__(self, plan: Plan, kv: KVCache, dtype: torch.dtype, split: int | None) -> None:
        self.layers_run = 0
        self._plan, self._kv, self._dtype, self._split = plan, kv, dtype, split
        self._shared: dict[tuple[torch.device, int, int], _Shared] = {}

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.layers_run += 1
        pages = self._kv.pages(layer, keys, values, self._plan)
        shared = self._of(query.device, query.shape[0] // keys.shape[0], pages)
        # Triton launches on the current device, which need not be that of a model spread over several.
        with torch.cuda.device_of(query):
            kv_commit(keys, values, pages.keys, pages.values, shared.packed, shared.stored)
            return segment_attention(
                query, keys, values, pages.keys, pages.values, shared.packed, scaling, shared.work
            )

    def _of(self, device: torch.device, group: int, pages: Pages) -> _Shared:
        key = device, group, pages.page_size
        if key not in self._shared:
            plan = self._plan
            tokens = [plan.tokens_of(row) for row in range(len(plan.prefix))]
            packed = PackedRound(plan.starts, plan.prefix, plan.visible.to(device), pages.tables, pages.page_size)
            rows = tile_rows(max(tokens), group, self._dtype)
            work = plan_work(plan.starts, plan.prefix, group, rows, self._split).to(device)
            stored = commit_work(packed, torch.tensor(tokens, device=device))
            self._shared[key] = _Shared(packed, work, stored)
        return self._shared[key]
