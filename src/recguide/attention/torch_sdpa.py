"""The reference backend: torch's scaled_dot_product_attention with a dense mask made from the intervals."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..dense_kv import KVCache
from ..segments import Plan


class TorchSDPA:
    """Segment attention on any device, one SDPA call a layer: batch rows are padded to the longest."""

    name = "torch_sdpa"

    def plan(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> SDPAForward:
        return SDPAForward(plan, kv, dtype)


class SDPAForward:
    """One forward's mask `[R, 1, Q, K]` and the indices between packed and padded queries; Q is the longest row's T."""

    def __init__(self, plan: Plan, kv: KVCache, dtype: torch.dtype) -> None:
        self.layers_run = 0
        self._plan, self._kv = plan, kv
        tensors: dict[str, Tensor] = {}
        # One query sees all that is there, and whole prompts need the causal flag alone. Else the mask is additive: of a
        # bool one SDPA would make the additive one again in every layer.
        if not (plan.causal or plan.query_tokens == 1 == len(plan.prefix)):
            visible = dense_mask(plan)
            tensors["mask"] = visible.new_zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        self._ragged = len({plan.tokens_of(r) for r in range(len(plan.prefix))}) > 1
        if self._ragged and plan.input_ids.is_cuda:
            padded = _padded_index(plan)
            longest = padded.shape[1]
            packed = [r * longest + i for r in range(len(plan.prefix)) for i in range(plan.tokens_of(r))]
            tensors["to_padded"], tensors["to_packed"] = padded.flatten(), torch.tensor(packed, device=padded.device)
        self._tensors = {plan.input_ids.device: tensors}
        self._rows: list[tuple[int, int, Tensor | None]] = []
        """Each batch row's tokens, keys and mask; only where rows are ragged, on a CPU."""

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.layers_run += 1
        all_keys, all_values = self._kv.write(layer, keys, values, self._plan)
        tensors = self._on(query.device)
        mask = tensors.get("mask")
        if self._ragged and not query.is_cuda:
            return self._row_by_row(query, all_keys, all_values, mask, scaling)
        heads, size = query.shape[0], query.shape[2]
        if "to_padded" in tensors:
            query = query[:, tensors["to_padded"]]
        padded = query.view(heads, all_keys.shape[0], -1, size).transpose(0, 1)
        if mask is not None and query.is_cuda:
            # CUDA's fused kernels take grouped heads or a mask, not both.
            groups = heads // all_keys.shape[1]
            all_keys, all_values = (x.repeat_interleave(groups, dim=1) for x in (all_keys, all_values))
        out = _attention(padded, all_keys, all_values, mask, self._plan.causal, scaling)
        flat = out.transpose(1, 2).reshape(-1, heads, out.shape[-1])
        return flat[tensors["to_packed"]] if "to_packed" in tensors else flat

    def _row_by_row(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """On a CPU padding costs more than calls: with branches, rows differ much in length."""
        if not self._rows:
            for row, prefix in enumerate(self._plan.prefix):
                tokens = self._plan.tokens_of(row)
                seen = None if mask is None else mask[row : row + 1, :, :tokens, : prefix + tokens]
                self._rows.append((tokens, prefix + tokens, seen))
        queries = query[None].split([tokens for tokens, _, _ in self._rows], dim=2)
        outputs = []
        for (tokens, total, seen), own, key, value in zip(
            self._rows, queries, keys.split(1), values.split(1), strict=True
        ):
            if tokens:
                key, value = key.narrow(2, 0, total), value.narrow(2, 0, total)
                out = _attention(own, key, value, seen, self._plan.causal, scaling)
                # As the kernel has laid it out, so that nothing is copied twice.
                outputs.append(out.transpose(1, 2)[0])
        return torch.cat(outputs)

    def _on(self, device: torch.device) -> dict[str, Tensor]:
        """The plan's tensors on a layer's device; a model may be spread over several."""
        if device not in self._tensors:
            first = next(iter(self._tensors.values()))
            self._tensors[device] = {name: tensor.to(device) for name, tensor in first.items()}
        return self._tensors[device]


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


def _padded_index(plan: Plan) -> Tensor:
    """`int64[R, Q]`: the packed token that each padded query repeats: its own, else one that is there (its result is unused)."""
    rows = range(len(plan.prefix))
    longest, last = max(plan.tokens_of(r) for r in rows), plan.query_tokens - 1
    index = [[min(plan.starts[r] + min(i, max(plan.tokens_of(r) - 1, 0)), last) for i in range(longest)] for r in rows]
    return torch.tensor(index, device=plan.input_ids.device)


def dense_mask(plan: Plan) -> Tensor:
    """`bool[R, 1, Q, K]`: which keys each query sees; the keys of row r are its prefix, then its packed tokens."""
    device = plan.input_ids.device
    keys = max(p + plan.tokens_of(r) for r, p in enumerate(plan.prefix))
    key = torch.arange(keys, device=device)
    if len(plan.prefix) == 1:
        visible, in_prefix, packed_key = plan.visible[None], key < plan.prefix[0], key - plan.prefix[0]
    else:
        prefix, start = torch.tensor([plan.prefix, plan.starts[:-1]], device=device)[:, :, None, None]
        visible, in_prefix, packed_key = plan.visible[_padded_index(plan)], key < prefix, key - prefix + start
    a0, a1, b0, b1 = visible.unsqueeze(-1).unbind(-2)
    mask = in_prefix | ((packed_key >= a0) & (packed_key < a1)) | ((packed_key >= b0) & (packed_key < b1))
    return mask[:, None]
