"""Each kernel in plain torch: slow, dense, and right in any floating dtype, float64 included. The kernels are tested against these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .packed import PackedRound


@dataclass(frozen=True)
class LogitStats:
    """
    What is known of each row's next token.

    Args:
        ids (`torch.Tensor`): `int64[T, K]`, the K tokens of the highest scores; among equals the lowest id is first.
        probabilities (`torch.Tensor`): `[T, 2]`, of the first two, by the softmax of the scores.
        margins (`torch.Tensor`): `[T]`, the first probability less the second.
        entropies (`torch.Tensor`): `[T]`, of the softmax of the logits, without noise, in nats.
    """

    ids: Tensor
    probabilities: Tensor
    margins: Tensor
    entropies: Tensor


def dense_mask(packed: PackedRound, request: int) -> Tensor:
    """`bool[Q, K]`: which keys the queries of one request see; its keys are its prefix, then its packed tokens."""
    start, stop, prefix = packed.starts[request], packed.starts[request + 1], packed.prefix[request]
    a0, a1, b0, b1 = packed.visible[start:stop].unsqueeze(-1).unbind(1)
    own = torch.arange(start, stop, device=packed.visible.device)
    in_round = ((own >= a0) & (own < a1)) | ((own >= b0) & (own < b1))
    return torch.cat((in_round.new_ones(stop - start, prefix), in_round), dim=1)


def segment_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    packed: PackedRound,
    scaling: float,
) -> Tensor:
    """
    Attention of packed query tokens to paged prefixes and to each other.

    Args:
        query (`torch.Tensor`): `[H, T, D]`.
        keys, values (`torch.Tensor`): `[G, T, D]`, of the packed tokens; query head h attends with key/value head `h // (H / G)`.
        key_cache, value_cache (`torch.Tensor`): `[N, G, D]`, of the prefixes. Only slots of the prefixes are read.
        packed (`PackedRound`): who sees what.
        scaling (`float`): factor of the scores.

    Returns:
        `torch.Tensor`: `[T, H, D]` in the query's dtype; zeros for a token that sees nothing.
    """
    heads, _, size = query.shape
    kv_heads = keys.shape[0]
    out = query.new_zeros(packed.query_tokens, heads, size)
    for request, prefix in enumerate(packed.prefix):
        start, stop = packed.starts[request], packed.starts[request + 1]
        slots = _slots(packed, request, 0, prefix)
        own = query[:, start:stop].reshape(kv_heads, heads // kv_heads, stop - start, size)
        all_keys = torch.cat((key_cache[slots].transpose(0, 1), keys[:, start:stop]), dim=1)
        all_values = torch.cat((value_cache[slots].transpose(0, 1), values[:, start:stop]), dim=1)
        scores = torch.einsum("ghqd,gkd->ghqk", own, all_keys) * scaling
        weights = scores.masked_fill(~dense_mask(packed, request), float("-inf")).softmax(-1)
        attended = torch.einsum("ghqk,gkd->qghd", weights.nan_to_num(0.0), all_values)
        out[start:stop] = attended.reshape(stop - start, heads, size)
    return out


def logit_stats(logits: Tensor, excluded: Sequence[int] = (), noise: Tensor | None = None, top: int = 2) -> LogitStats:
    """
    The likeliest tokens of each row, the probabilities of two, and the entropy.

    Args:
        logits (`torch.Tensor`): `[T, V]`, may hold `-inf` but neither `inf` nor NaN; at least one token of a row that is not
            excluded is finite.
        excluded (`Sequence[int]`): tokens that are never predicted and take no part in any distribution; at least two are left.
        noise (`torch.Tensor`, *optional*): `[T, V]`. The scores are the logits plus this.
        top (`int`, defaults to 2): K, at least 2.

    Returns:
        `LogitStats`: in the logits' dtype.
    """
    vocabulary = logits.shape[1]
    allowed = torch.ones(vocabulary, dtype=torch.bool, device=logits.device)
    allowed[list(excluded)] = False
    tokens = allowed.nonzero()[:, 0]
    own = logits[:, tokens]
    scores = own if noise is None else own + noise[:, tokens].to(own.dtype)
    # A stable sort keeps equals in the order of their ids.
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :top]
    probabilities = scores.softmax(-1).gather(1, best[:, :2])
    return LogitStats(
        ids=tokens[best],
        probabilities=probabilities,
        margins=probabilities[:, 0] - probabilities[:, 1],
        entropies=torch.special.entr(own.softmax(-1)).sum(-1),
    )


def kv_commit(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, packed: PackedRound, counts: Sequence[int]
) -> None:
    """
    Copy the first packed tokens of each request behind its prefix, in place.

    Args:
        keys, values (`torch.Tensor`): `[G, T, D]`, of the packed tokens.
        key_cache, value_cache (`torch.Tensor`): `[N, G, D]`, written.
        packed (`PackedRound`): its tables have room for what is committed.
        counts (`Sequence[int]`): R of them, how many tokens to copy, from 0 to those the request has in the forward.
    """
    for request, count in enumerate(counts):
        start, prefix = packed.starts[request], packed.prefix[request]
        slots = _slots(packed, request, prefix, prefix + count)
        for cache, new in ((key_cache, keys), (value_cache, values)):
            cache[slots] = new[:, start : start + count].transpose(0, 1).to(cache.dtype)


def _slots(packed: PackedRound, request: int, start: int, stop: int) -> Tensor:
    """`int64[stop - start]`: the slots of a request's tokens `[start, stop)`."""
    place = torch.arange(start, stop, device=packed.tables.device)
    pages = packed.tables[request, place // packed.page_size].long()
    return pages * packed.page_size + place % packed.page_size
