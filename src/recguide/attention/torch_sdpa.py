"""The reference backend: torch's scaled_dot_product_attention with a dense mask made from the intervals."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dense_kv import KVCache
from ..segments import Plan

CALL = 2048
"""What one more SDPA call costs on a CPU, in pairs of query and key: rows are padded to each other's size where that costs less."""


class TorchSDPA:
    """Segment attention on any device, one SDPA call a layer and group of batch rows, which are padded to the longest."""

    name = "torch_sdpa"

    def plan(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> SDPAForward:
        return SDPAForward(plan, kv, dtype)


class SDPAForward:
    """One forward's groups of batch rows with their masks `[n, 1, Q, K]`, and the indices between packed and padded queries."""

    def __init__(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> None:
        self.layers_run = 0
        self._plan, self._kv = plan, kv
        self._groups = row_groups(plan, 0 if plan.input_ids.is_cuda else CALL)
        tensors: dict[str, Tensor] = {}
        to_padded: list[int] = []
        to_packed = [0] * plan.query_tokens
        self._padded_queries: list[int] = []
        for number, rows in enumerate(self._groups):
            padded = _padded(plan, rows)
            self._padded_queries.append(sum(map(len, padded)))
            for row, queries in zip(rows, padded, strict=True):
                start, end = plan.starts[row], plan.starts[row + 1]
                to_packed[start:end] = range(len(to_padded), len(to_padded) + end - start)
                to_padded += queries
            # One query sees all that is there, and whole prompts need the causal flag alone. Else the mask is additive: of a
            # bool one SDPA would make the additive one again in every layer.
            if not (plan.causal or len(rows) == 1 == len(padded[0])):
                visible = dense_mask(plan, rows)
                mask = visible.new_zeros(visible.shape, dtype=dtype)
                tensors[f"mask {number}"] = mask.masked_fill_(~visible, float("-inf"))
        if to_padded != list(range(plan.query_tokens)):
            device = plan.input_ids.device
            tensors["to_padded"] = torch.tensor(to_padded, device=device)
            tensors["to_packed"] = torch.tensor(to_packed, device=device)
        self._tensors = {plan.input_ids.device: tensors}

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.layers_run += 1
        self._kv.store(layer, keys, values, self._plan)
        tensors, heads = self._on(query.device), query.shape[0]
        if "to_padded" in tensors:
            query = query.index_select(1, tensors["to_padded"])
        outputs = []
        for number, (rows, part) in enumerate(zip(self._groups, query.split(self._padded_queries, 1), strict=True)):
            group_keys, group_values = self._kv.gather(layer, rows, self._plan)
            mask = tensors.get(f"mask {number}")
            if mask is not None and query.is_cuda:
                # CUDA's fused kernels take grouped heads or a mask, not both.
                repeats = heads // group_keys.shape[1]
                group_keys, group_values = (x.repeat_interleave(repeats, dim=1) for x in (group_keys, group_values))
            padded = part.view(heads, len(rows), -1, part.shape[-1]).transpose(0, 1)
            out = _attention(padded, group_keys, group_values, mask, self._plan.causal, scaling)
            outputs.append(out.transpose(1, 2).reshape(-1, heads, out.shape[-1]))
        flat = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return flat.index_select(0, tensors["to_packed"]) if "to_packed" in tensors else flat

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """The plan's tensors on a layer's device; a model may be spread over several."""
        if device not in self._tensors:
            first = next(iter(self._tensors.values()))
            self._tensors[device] = {name: tensor.to(device) for name, tensor in first.items()}
        return self._tensors[device]


def row_groups(plan: Plan, call: int) -> list[tuple[int, ...]]:
    """
    Batch rows that have tokens, in groups of similar size; rows of a group stay in order.

    Args:
        plan (`Plan`): the forward.
        call (`int`): pairs of query and key that a group of its own is worth; 0: there is one group.
    """
    live = [row for row in range(len(plan.prefix)) if plan.tokens_of(row)]
    if not call:
        return [tuple(live)]
    sizes = {row: (plan.tokens_of(row), plan.prefix[row] + plan.tokens_of(row)) for row in live}
    groups: list[list[int]] = []
    queries = keys = 0
    for row in sorted(live, key=sizes.__getitem__, reverse=True):
        own, total = sizes[row]
        if groups:
            longest = max(keys, total)
            joined = (len(groups[-1]) + 1) * queries * longest
            if joined <= len(groups[-1]) * queries * keys + own * total + call:
                groups[-1].append(row)
                keys = longest
                continue
        groups.append([row])
        queries, keys = own, total
    return [tuple(sorted(group)) for group in groups]


def _attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, causal: bool, scaling: float
) -> Tensor:
    return F.scaled_dot_product_attention(
        query,
        keys,
        values,
        attn_mask=mask if mask is None else mask.to(query.dtype),
        is_causal=causal,
        scale=scaling,
        enable_gqa=keys.shape[1] != query.shape[1],
    )


def _padded(plan: Plan, rows: Sequence[int]) -> list[list[int]]:
    """`[n][Q]`: the packed token that each padded query of these rows repeats: its own, else the row's last (that result is unused)."""
    longest = max(plan.tokens_of(row) for row in rows)
    queries = (range(plan.starts[row], plan.starts[row + 1]) for row in rows)
    return [[*own, *[own[-1]] * (longest - len(own))] for own in queries]


def dense_mask(plan: Plan, rows: Sequence[int]) -> Tensor:
    """`bool[n, 1, Q, K]`: which keys each query of these batch rows sees; a row's keys are its prefix, then its packed tokens."""
    device = plan.input_ids.device
    key = torch.arange(max(plan.prefix[r] + plan.tokens_of(r) for r in rows), device=device)
    spans = [[plan.prefix[r] for r in rows], [plan.starts[r] for r in rows]]
    prefix, start = torch.tensor(spans, device=device)[:, :, None, None]
    packed_key = key - prefix + start
    a0, a1, b0, b1 = plan.visible[torch.tensor(_padded(plan, rows), device=device)].unsqueeze(-1).unbind(-2)
    mask: Tensor = (key < prefix) | ((packed_key >= a0) & (packed_key < a1)) | ((packed_key >= b0) & (packed_key < b1))
    return mask[:, None]
