"""
Segment attention with FlashInfer: one pass over the cached prefixes in pages, one over the packed tokens with a mask, then merged.

Only a prefix that every query of its row sees can be read in pages without a mask, and FlashInfer's cascades take no masks at all, so
the two intervals go into the mask of the second, small pass. Both passes give the logarithm (base 2) of their softmax's sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flashinfer
import torch
from torch import Tensor

from ..dense_kv import KVCache, Pages
from ..segments import Plan

WORKSPACE = 128 * 2**20
"""Bytes of a wrapper's scratch memory, as FlashInfer recommends."""


class FlashInferAttention:
    """Segment attention on CUDA devices, in half types. One forward at a time uses it."""

    name = "flashinfer"

    def __init__(self) -> None:
        self._wrappers: dict[torch.device, Wrappers] = {}

    def plan(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> FlashInferForward:
        return FlashInferForward(plan, kv, dtype, self)

    def wrappers(self, device: torch.device) -> Wrappers:
        """FlashInfer's objects of a device; they keep the plan of the last forward."""
        if device not in self._wrappers:
            self._wrappers[device] = Wrappers(device)
        return self._wrappers[device]


class Wrappers:
    """The two passes' objects of one device. Only FlashInfer's `fa2` kernels take custom masks."""

    def __init__(self, device: torch.device) -> None:
        scratch = [torch.empty(WORKSPACE, dtype=torch.uint8, device=device) for _ in range(2)]
        self.prefix: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch[0], "NHD", backend="fa2")
        self.round: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(scratch[1], "NHD", backend="fa2")


@dataclass(frozen=True)
class _Shape:
    """What a plan is made for; layers that differ in it are planned one by one."""

    heads: int
    kv_heads: int
    size: int
    page_size: int
    scaling: float


class FlashInferForward:
    """One forward; it is planned when its first layer asks, for only layers know their shapes."""

    def __init__(self, plan: Plan, kv: KVCache, dtype: torch.dtype, backend: FlashInferAttention) -> None:
        self.layers_run = 0
        self._plan, self._kv, self._dtype, self._backend = plan, kv, dtype, backend
        rows = range(len(plan.prefix))
        self._cached = [row for row in rows if plan.prefix[row] and plan.tokens_of(row)]
        self._all_cached = all(row in self._cached or not plan.tokens_of(row) for row in rows)
        self._planned: dict[torch.device, _Shape] = {}
        self._readers: dict[torch.device, Tensor] = {}

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.layers_run += 1
        self._kv.store(layer, keys, values, self._plan)
        pages = self._kv.pages(layer, keys, values, self._plan)
        heads, _, size = query.shape
        shape = _Shape(heads, keys.shape[0], size, pages.page_size, scaling)
        with torch.cuda.device_of(query):
            wrappers = self._backend.wrappers(query.device)
            if self._planned.get(query.device) != shape:
                self._plan_passes(wrappers, shape, pages, query.device)
                self._planned[query.device] = shape
            packed = [tensor.transpose(0, 1).contiguous() for tensor in (query, keys, values)]
            if not self._cached:
                alone: Tensor = wrappers.round.run(*packed)
                return alone
            out, lse = wrappers.round.run(*packed, return_lse=True)
            memory = _as_pages(pages.keys, pages.page_size), _as_pages(pages.values, pages.page_size)
            if self._all_cached:
                whole: Tensor = flashinfer.merge_state(
                    out, lse, *wrappers.prefix.run(packed[0], memory, return_lse=True)
                )[0]
                return whole
            # An empty prefix has no state to merge: its logarithm would be that of 0.
            readers = self._readers[query.device]
            before = wrappers.prefix.run(packed[0][readers], memory, return_lse=True)
            merged: Tensor = out.index_copy(0, readers, flashinfer.merge_state(out[readers], lse[readers], *before)[0])
            return merged

    def _plan_passes(self, wrappers: Wrappers, shape: _Shape, pages: Pages, device: torch.device) -> None:
        plan, size = self._plan, shape.page_size
        kinds = {"q_data_type": self._dtype, "kv_data_type": self._dtype, "sm_scale": shape.scaling}
        starts = torch.tensor(plan.starts, dtype=torch.int32)
        masked = {"causal": True} if plan.causal else {"custom_mask": in_round_mask(plan).to(device)}
        wrappers.round.plan(
            qo_indptr=starts,
            kv_indptr=starts,
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.size,
            **kinds,
            **masked,
        )
        if not self._cached:
            return
        counts = [-(-plan.prefix[row] // size) for row in self._cached]
        tables = pages.tables.cpu()
        index = torch.cat([tables[row, :count] for row, count in zip(self._cached, counts, strict=True)])
        last = [(plan.prefix[row] - 1) % size + 1 for row in self._cached]
        wrappers.prefix.plan(
            qo_indptr=_cumulative([plan.tokens_of(row) for row in self._cached]),
            paged_kv_indptr=_cumulative(counts),
            paged_kv_indices=index.to(device),
            paged_kv_last_page_len=torch.tensor(last, dtype=torch.int32),
            num_qo_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            head_dim_qk=shape.size,
            page_size=size,
            causal=False,
            **kinds,
        )
        tokens = [i for row in self._cached for i in range(plan.starts[row], plan.starts[row + 1])]
        self._readers[device] = torch.tensor(tokens, device=device)


def in_round_mask(plan: Plan) -> Tensor:
    """`bool[M]`, on the CPU: for each row which of its packed tokens each of them sees, `[Q, Q]`, flattened one behind the other."""
    visible = plan.visible.cpu()
    masks = []
    for row in range(len(plan.prefix)):
        own = torch.arange(plan.starts[row], plan.starts[row + 1])
        a0, a1, b0, b1 = visible[plan.starts[row] : plan.starts[row + 1], :, None].unbind(1)
        masks.append((((own >= a0) & (own < a1)) | ((own >= b0) & (own < b1))).flatten())
    return torch.cat(masks)


def _as_pages(memory: Tensor, page_size: int) -> Tensor:
    """`[N, G, D]` as `[N // page_size, page_size, G, D]`, which FlashInfer calls NHD; it takes any strides."""
    pages = memory.shape[0] // page_size
    return memory[: pages * page_size].view(pages, page_size, *memory.shape[1:])


def _cumulative(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
