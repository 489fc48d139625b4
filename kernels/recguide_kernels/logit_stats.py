"""One pass over `[T, V]` logits: the likeliest tokens, the probabilities of two, the entropy, and keyed noise made in registers.

The vocabulary is cut into fixed parts, so that few rows fill a device too and the bits of a row do not depend on its neighbours.
One program reads one part of one row and reduces it to its best tokens and a few sums; a second kernel joins the parts of each row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import LogitStats

PART = 4096
"""Tokens of a part: 16 a thread, which is what stays in registers together with the noise."""
NUM_WARPS = 8
NO_NOISE = -1
"""In place of a row's position: this row is greedy."""

_SUMS = tl.constexpr(5)
"""Float fields of a part behind its best scores: maximum and sum of the scores' softmax, maximum, sum and energy of the logits' one."""
_LOWEST = tl.constexpr(-1e30)
"""A logarithm of 0 that may be multiplied by 0."""
_NO_TOKEN = tl.constexpr(2**31 - 1)
"""Loses every tie against a token that exists."""


def noise_keys(seeds: Sequence[int], positions: Sequence[int], device: torch.device) -> Tensor:
    """
    What tells the noise of each row, in the form that [`logit_stats`] takes.

    Args:
        seeds (`Sequence[int]`): T of them, 64 bits.
        positions (`Sequence[int]`): T of them, the absolute position below 2^32 that a row predicts; `NO_NOISE` for a greedy row.
        device (`torch.device`): of the logits.

    Returns:
        `torch.Tensor`: `int64[T, 2]`.
    """
    signed = [seed - (1 << 64) if seed >> 63 else seed for seed in seeds]
    return torch.tensor([signed, list(positions)], dtype=torch.int64).t().contiguous().to(device)


def logit_stats(logits: Tensor, excluded: Sequence[int] = (), keys: Tensor | None = None, top: int = 2) -> LogitStats:
    """
    [`reference.logit_stats`] on the device, with the noise of (seed, position) that `recguide.sampling.gumbel_noise` draws.

    Args:
        logits (`torch.Tensor`): `[T, V]` of float32, bfloat16 or float16 with contiguous rows; see the reference for its values.
        excluded (`Sequence[int]`): tokens that are never predicted; at least two are left. They are compiled into the kernel.
        keys (`torch.Tensor`, *optional*): `int64[T, 2]` of [`noise_keys`]; `None` if all rows are greedy.
        top (`int`, defaults to 2): how many of the likeliest tokens are wanted, at least 2. Each takes a look at the part in registers.

    Returns:
        `LogitStats`: float32.

    Raises:
        ValueError: logits or keys of another layout, an excluded token that is none, or fewer than `top` tokens left.
    """
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [T, V] with contiguous rows; got {tuple(logits.shape)}, {logits.stride()}.")
    rows, vocabulary = logits.shape
    left_out = sorted(set(excluded))
    if left_out and not 0 <= left_out[0] <= left_out[-1] < vocabulary:
        raise ValueError(f"excluded tokens must be from 0 to {vocabulary - 1}; got {left_out}.")
    if not 2 <= top <= vocabulary - len(left_out):
        raise ValueError(
            f"top must be from 2 to the tokens that are left, {vocabulary} less {len(left_out)} excluded; got {top}."
        )
    if keys is not None and (keys.shape != (rows, 2) or keys.dtype != torch.int64 or not keys.is_contiguous()):
        raise ValueError(f"keys must be a contiguous int64[{rows}, 2]; got {keys.dtype} of {tuple(keys.shape)}.")
    device = logits.device
    parts = triton.cdiv(vocabulary, PART)
    state = torch.empty((rows, parts, top + _SUMS.value), dtype=torch.float32, device=device)
    tokens = torch.empty((rows, parts, top), dtype=torch.int32, device=device)
    ids = torch.empty((rows, top), dtype=torch.int64, device=device)
    numbers = torch.empty((rows, 4), dtype=torch.float32, device=device)
    if rows:
        part_kernel[(rows, parts)](
            logits,
            keys,
            state,
            tokens,
            logits.stride(0),
            vocabulary,
            EXCLUDED=tuple(left_out),
            NOISE=keys is not None,
            PART=PART,
            TOP=top,
            num_warps=NUM_WARPS,
        )
        join_kernel[(rows,)](
            state,
            tokens,
            ids,
            numbers,
            parts,
            PARTS=triton.next_power_of_2(parts),
            TOP=top,
            SLOTS=triton.next_power_of_2(top),
            num_warps=1,
        )
    return LogitStats(ids, numbers[:, :2], numbers[:, 2], numbers[:, 3])


@triton.jit
def _first_of(scores, ids, allowed):
    """The highest allowed score and the lowest id that has it; `(-inf, _NO_TOKEN)` where nothing is allowed."""
    best = tl.max(tl.where(allowed, scores, float("-inf")), 0)
    return best, tl.min(tl.where(allowed & (scores == best), ids, _NO_TOKEN), 0)


@triton.jit
def _soft_sum(values, allowed):
    """Maximum m, sum of `exp(x - m)`, and energy, the sum of `exp(x - m) (x - m)`, over the allowed values x."""
    values = tl.where(allowed, values, float("-inf"))
    m = tl.max(values, 0)
    # Where the distance to the maximum is infinite or NaN, its product with a weight of 0 would be NaN.
    shifted = tl.maximum(values - tl.where(m == float("-inf"), 0.0, m), _LOWEST)
    weights = tl.exp(shifted)
    return m, tl.sum(weights, 0), tl.sum(weights * shifted, 0)


@triton.jit
def _exponential(words):
    """`-log1p(-u)` of the uniform variates `u = (word + 1/2) / 2^32`, with full relative precision where u is small."""
    u = tl.minimum((words.to(tl.float32) + 0.5) * (2.0**-32), 1 - 2.0**-24)
    # -log(1 - u) = 2 atanh(s). Below 1/2, 1 - u would be rounded, and a device's logarithm is inexact near 1.
    s = u / (2.0 - u)
    t = s * s
    series = 1 / 15 + t * (1 / 17)
    series = 1 / 13 + t * series
    series = 1 / 11 + t * series
    series = 1 / 9 + t * series
    series = 1 / 7 + t * series
    series = 1 / 5 + t * series
    series = 1 / 3 + t * series
    small = 2.0 * s + 2.0 * s * t * series
    return tl.where(u < 0.5, small, -tl.log(1.0 - u))


@triton.jit
def _gumbel(seed, position, first, PART: tl.constexpr):
    """The noise of tokens `[first, first + PART)`, `first` a multiple of 4: four of them share a Philox block."""
    block = (first // 4 + tl.arange(0, PART // 4)).to(tl.uint32)
    zero = block * 0
    w0, w1, w2, w3 = tl.philox(seed, block, zero + position.to(tl.uint32), zero, zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return -tl.log(_exponential(words))


@triton.jit
def part_kernel(
    logits,
    keys,
    state,
    tokens,
    row_stride,
    vocabulary,
    EXCLUDED: tl.constexpr,
    NOISE: tl.constexpr,
    PART: tl.constexpr,
    TOP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    ids = part * PART + tl.arange(0, PART)
    allowed = ids < vocabulary
    own = tl.load(logits + row * row_stride + ids, mask=allowed, other=float("-inf")).to(tl.float32)
    for i in tl.static_range(len(EXCLUDED)):
        allowed = allowed & (ids != EXCLUDED[i])
    m, total, energy = _soft_sum(own, allowed)
    if NOISE:
        position = tl.load(keys + row * 2 + 1)
        scores = own
        if position >= 0:
            scores = own + _gumbel(tl.load(keys + row * 2), position, part * PART, PART)
        score_m, score_total, _ = _soft_sum(scores, allowed)
    else:
        scores = own
        score_m = m
        score_total = total
    cell = row * tl.num_programs(1) + part
    out = state + cell * (TOP + _SUMS)
    left = allowed
    for i in tl.static_range(TOP):
        best, best_id = _first_of(scores, ids, left)
        tl.store(tokens + cell * TOP + i, best_id)
        tl.store(out + i, best)
        left = left & (ids != best_id)
    tl.store(out + TOP, score_m)
    tl.store(out + TOP + 1, score_total)
    tl.store(out + TOP + 2, m)
    tl.store(out + TOP + 3, total)
    tl.store(out + TOP + 4, energy)


@triton.jit
def join_kernel(state, tokens, ids, numbers, parts, PARTS: tl.constexpr, TOP: tl.constexpr, SLOTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    there = part < parts
    sums = state + (row * parts + part) * (TOP + _SUMS) + TOP
    score_m = tl.load(sums, mask=there, other=float("-inf"))
    score_top = tl.max(score_m, 0)
    score_total = tl.sum(tl.load(sums + 1, mask=there, other=0.0) * tl.exp(score_m - score_top), 0)

    # All that can be among the best of the row: the best of each part.
    place = tl.arange(0, PARTS * SLOTS)
    slot = place % SLOTS
    of_part = row * parts + place // SLOTS
    left = (place // SLOTS < parts) & (slot < TOP)
    scores = tl.load(state + of_part * (TOP + _SUMS) + slot, mask=left, other=float("-inf"))
    candidates = tl.load(tokens + of_part * TOP + slot, mask=left, other=_NO_TOKEN)
    left = left & (candidates != _NO_TOKEN)
    p1 = score_total
    for i in tl.static_range(TOP):
        best, best_id = _first_of(scores, candidates, left)
        tl.store(ids + row * TOP + i, best_id.to(tl.int64))
        left = left & (candidates != best_id)
        if i < 2:
            probability = tl.exp(best - score_top) / score_total
            tl.store(numbers + row * 4 + i, probability)
            if i == 0:
                p1 = probability
            else:
                tl.store(numbers + row * 4 + 2, p1 - probability)

    m = tl.load(sums + 2, mask=there, other=float("-inf"))
    top = tl.max(m, 0)
    shift = tl.maximum(m - top, _LOWEST)
    factor = tl.exp(shift)
    part_sums = tl.load(sums + 3, mask=there, other=0.0)
    total = tl.sum(part_sums * factor, 0)
    energy = tl.sum((tl.load(sums + 4, mask=there, other=0.0) + part_sums * shift) * factor, 0)
    tl.store(numbers + row * 4 + 3, tl.log(total) - energy / total)
