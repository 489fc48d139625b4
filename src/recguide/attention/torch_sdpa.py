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
        self.packed = plan
        self.kv = kv
        # One query sees all that is there: no mask, and SDPA's fastest path. Else additive: of a bool mask SDPA would make
        # the additive one again in every layer.
        self.mask = None
        if not plan.query_tokens == 1 == len(plan.prefix):
            visible = dense_mask(plan)
            self.mask = visible.new_zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        self.to_padded, self.to_packed = None, None
        if len({plan.tokens_of(r) for r in range(len(plan.prefix))}) > 1:
            padded = _padded_index(plan)
            self.to_padded = padded.flatten()
            longest = padded.shape[1]
            packed = [r * longest + i for r in range(len(plan.prefix)) for i in range(plan.tokens_of(r))]
            self.to_packed = torch.tensor(packed, device=padded.device)

    def run(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        all_keys, all_values = self.kv.write(layer, keys, values, self.packed)
        heads, size = query.shape[0], query.shape[2]
        if self.to_padded is not None:
            query = query[:, self.to_padded]
        padded = query.view(heads, all_keys.shape[0], -1, size).transpose(0, 1)
        out = F.scaled_dot_product_attention(
            padded, all_keys, all_values, attn_mask=self.mask, scale=scaling, enable_gqa=True
        )
        flat = out.transpose(1, 2).reshape(-1, heads, size)
        return flat if self.to_packed is None else flat[self.to_packed]


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
