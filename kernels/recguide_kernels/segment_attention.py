"""Attention of segments over paged prefixes: one launch for any mixture of requests, and a second one where prefixes are split.

Partial results of a split prefix are merged by their log-sum-exp, in base 2. See `work` for what runs where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packed import PackedRound
from .work import DeviceWork, power_of_two

_ITEM_FIELDS = tl.constexpr(7)
_MERGE_FIELDS = tl.constexpr(4)
_FAR = tl.constexpr(2**31 - 1)
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Tiling:
    """Keys of a tile, and how the compiler lays it out."""

    keys: int
    num_warps: int
    num_stages: int


def tiling(rows: int, head_dim: int, dtype: torch.dtype) -> Tiling:
    """
    A layout that spills no registers and fits the shared memory of sm_80 and later.

    Args:
        rows (`int`): height of the query tile.
        head_dim (`int`): D.
        dtype (`torch.dtype`): of queries, keys and values.
    """
    width = block_d(head_dim)
    if dtype.itemsize == 4:
        return Tiling(keys=16, num_warps=8 if rows <= 16 else 16, num_stages=1)
    return Tiling(keys=64 if width <= 128 else 32, num_warps=4 if rows <= 32 and width <= 128 else 8, num_stages=2)


def segment_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    packed: PackedRound,
    scaling: float,
    work: DeviceWork,
) -> Tensor:
    """
    [`reference.segment_attention`] on the device.

    Args:
        query (`torch.Tensor`): `[H, T, D]` of float32, bfloat16 or float16, D contiguous, a multiple of 8 up to 256.
        keys, values (`torch.Tensor`): `[G, T, D]` of the same dtype, D contiguous.
        key_cache, value_cache (`torch.Tensor`): `[N, G, D]` of the same dtype, D contiguous.
        packed (`PackedRound`): who sees what; its tensors are on the device, with contiguous rows. Its `starts` and `prefix` have gone
            into the plan.
        scaling (`float`): factor of the scores.
        work (`DeviceWork`): of [`work.plan`].

    Returns:
        `torch.Tensor`: `[T, H, D]`; zeros for a token that sees nothing. Scores and sums are taken in float32.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    _check(query, keys, values, key_cache, value_cache, packed, work.rows)
    heads, tokens, size = query.shape
    kv_heads = keys.shape[0]
    group, width = heads // kv_heads, block_d(size)
    out = torch.empty((tokens, heads, size), dtype=query.dtype, device=query.device)
    partial_out = torch.empty((work.partials, kv_heads, work.rows, width), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((work.partials, kv_heads, work.rows), dtype=torch.float32, device=query.device)
    layout = tiling(work.rows, size, query.dtype)
    if len(work.items):
        attend_kernel[(len(work.items), kv_heads)](
            query,
            keys,
            values,
            key_cache,
            value_cache,
            out,
            partial_out,
            partial_lse,
            work.items,
            packed.visible,
            packed.tables,
            *query.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            *key_cache.stride()[:2],
            *value_cache.stride()[:2],
            packed.visible.stride(0),
            packed.tables.stride(0),
            packed.page_size,
            scaling * _LOG2_E,
            GROUP=group,
            HEAD_DIM=size,
            ROWS=work.rows,
            KEYS=layout.keys,
            BLOCK_D=width,
            UPCAST=triton.knobs.runtime.interpret and query.dtype == torch.bfloat16,
            num_warps=layout.num_warps,
            num_stages=layout.num_stages,
        )
    if len(work.merges):
        merge_kernel[(len(work.merges), kv_heads)](
            partial_out,
            partial_lse,
            out,
            work.merges,
            GROUP=group,
            HEAD_DIM=size,
            ROWS=work.rows,
            BLOCK_D=width,
            num_warps=merge_warps(work.rows, width),
        )
    return out


def merge_warps(rows: int, width: int) -> int:
    """Warps of a merge of tiles `[rows, width]` in which no registers spill."""
    return 4 if rows * width <= 1024 else 8


def block_d(head_dim: int) -> int:
    """The width of a tile that holds a head: a power of two, of which tensor cores take no less than 16."""
    return max(16, power_of_two(head_dim))


def _check(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    packed: PackedRound,
    rows: int,
) -> None:
    heads, tokens, size = query.shape
    kv_heads = keys.shape[0]
    if size % 8 or not 8 <= size <= 256:
        raise ValueError(f"the head size must be a multiple of 8 up to 256; got {size}.")
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} key/value heads.")
    if heads // kv_heads > rows:
        raise ValueError(f"the plan's tiles of {rows} rows do not hold a group of {heads // kv_heads} query heads.")
    expected = {"keys": (kv_heads, tokens, size), "key_cache": (key_cache.shape[0], kv_heads, size)}
    named = {"query": query, "keys": keys, "values": values, "key_cache": key_cache, "value_cache": value_cache}
    for name, tensor in named.items():
        shape = expected["key_cache" if "cache" in name else "keys"]
        if name != "query" and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}; got {tuple(tensor.shape)}.")
        if tensor.dtype != query.dtype or tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"all must have one dtype of float32, bfloat16, float16; {name} has {tensor.dtype}.")
        if tensor.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous in D; its strides are {tensor.stride()}.")
    if tokens and packed.visible.shape != (tokens, 4):
        raise ValueError(f"packed.visible must be {(tokens, 4)}; got {tuple(packed.visible.shape)}.")
    for name, tensor in (("visible", packed.visible), ("tables", packed.tables)):
        if tensor.stride(-1) != 1:
            raise ValueError(f"packed.{name} must have contiguous rows; its strides are {tensor.stride()}.")


@triton.jit
def _meet(q, k, v, seen, m, total, acc, scale, UPCAST: tl.constexpr):
    """One step of the online softmax in base 2: queries `[ROWS, D]` meet keys and values `[KEYS, D]` where `seen`."""
    if UPCAST:
        # The interpreter's products of bfloat16 are wrong.
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    # TF32 would round what float32 models are run for.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen nothing yet: any finite maximum makes its weights 0, where -inf less -inf would make them NaN.
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(m - base)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_m, total, acc


@triton.jit
def attend_kernel(
    query,
    keys,
    values,
    key_cache,
    value_cache,
    out,
    partial_out,
    partial_lse,
    items,
    visible,
    tables,
    query_head_stride,
    query_token_stride,
    key_head_stride,
    key_token_stride,
    value_head_stride,
    value_token_stride,
    key_slot_stride,
    key_cache_head_stride,
    value_slot_stride,
    value_cache_head_stride,
    visible_stride,
    table_stride,
    page_size,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):
    item = items + tl.program_id(0) * _ITEM_FIELDS
    request = tl.load(item).to(tl.int64)
    query_start = tl.load(item + 1)
    query_stop = tl.load(item + 2)
    key_start = tl.load(item + 3)
    key_stop = tl.load(item + 4)
    in_round = tl.load(item + 5)
    partial = tl.load(item + 6).to(tl.int64)
    # Every offset is taken in 64 bits: caches hold more than 2^31 numbers.
    kv_head = tl.program_id(1).to(tl.int64)

    row = tl.arange(0, ROWS)
    token = query_start + row // GROUP
    there = token < query_stop
    token = tl.where(there, token, query_start).to(tl.int64)
    head = kv_head * GROUP + row % GROUP
    column = tl.arange(0, BLOCK_D)
    in_head = column < HEAD_DIM
    q = tl.load(
        query + head[:, None] * query_head_stride + token[:, None] * query_token_stride + column[None, :],
        mask=there[:, None] & in_head[None, :],
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)

    table = tables + request * table_stride
    for start in range(key_start, key_stop, KEYS):
        position = start + tl.arange(0, KEYS)
        cached = position < key_stop
        page = tl.load(table + position // page_size, mask=cached, other=0).to(tl.int64)
        slot = (page * page_size + position % page_size)[:, None]
        load = cached[:, None] & in_head[None, :]
        key_at = key_cache + kv_head * key_cache_head_stride + slot * key_slot_stride + column[None, :]
        value_at = value_cache + kv_head * value_cache_head_stride + slot * value_slot_stride + column[None, :]
        k = tl.load(key_at, mask=load, other=0.0)
        v = tl.load(value_at, mask=load, other=0.0)
        m, total, acc = _meet(q, k, v, cached[None, :], m, total, acc, scale, UPCAST)

    if in_round != 0:
        sees = visible + token * visible_stride
        a0 = tl.load(sees, mask=there, other=0).to(tl.int32)
        a1 = tl.load(sees + 1, mask=there, other=0).to(tl.int32)
        b0 = tl.load(sees + 2, mask=there, other=0).to(tl.int32)
        b1 = tl.load(sees + 3, mask=there, other=0).to(tl.int32)
        first = tl.minimum(tl.min(tl.where(a1 > a0, a0, _FAR), 0), tl.min(tl.where(b1 > b0, b0, _FAR), 0))
        last = tl.maximum(tl.max(tl.where(a1 > a0, a1, 0), 0), tl.max(tl.where(b1 > b0, b1, 0), 0))
        for start in range(first, last, KEYS):
            other = start + tl.arange(0, KEYS)
            seen = ((other[None, :] >= a0[:, None]) & (other[None, :] < a1[:, None])) | (
                (other[None, :] >= b0[:, None]) & (other[None, :] < b1[:, None])
            )
            load = (other < last)[:, None] & in_head[None, :]
            place = other.to(tl.int64)[:, None]
            key_at = keys + kv_head * key_head_stride + place * key_token_stride + column[None, :]
            value_at = values + kv_head * value_head_stride + place * value_token_stride + column[None, :]
            k = tl.load(key_at, mask=load, other=0.0)
            v = tl.load(value_at, mask=load, other=0.0)
            m, total, acc = _meet(q, k, v, seen, m, total, acc, scale, UPCAST)

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if partial < 0:
        tl.store(
            out + (token[:, None] * (tl.num_programs(1) * GROUP) + head[:, None]) * HEAD_DIM + column[None, :],
            result.to(out.dtype.element_ty),
            mask=there[:, None] & in_head[None, :],
        )
    else:
        cell = (partial * tl.num_programs(1) + kv_head) * ROWS + row
        tl.store(partial_out + cell[:, None] * BLOCK_D + column[None, :], result)
        tl.store(partial_lse + cell, tl.where(total > 0, m + tl.log2(total), float("-inf")))


@triton.jit
def merge_kernel(
    partial_out,
    partial_lse,
    out,
    merges,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    merge = merges + tl.program_id(0) * _MERGE_FIELDS
    query_start = tl.load(merge)
    query_stop = tl.load(merge + 1)
    first = tl.load(merge + 2)
    last = tl.load(merge + 3)
    kv_head = tl.program_id(1).to(tl.int64)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for partial in range(first, last):
        cell = (kv_head + partial * tl.num_programs(1)) * ROWS + row
        lse = tl.load(partial_lse + cell)
        new_m = tl.maximum(m, lse)
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        weight = tl.exp2(lse - base)
        fade = tl.exp2(m - base)
        total = total * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * tl.load(partial_out + cell[:, None] * BLOCK_D + column[None, :])
        m = new_m
    token = query_start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    tl.store(
        out + (token.to(tl.int64)[:, None] * (tl.num_programs(1) * GROUP) + head[:, None]) * HEAD_DIM + column[None, :],
        (acc / tl.where(total > 0, total, 1.0)[:, None]).to(out.dtype.element_ty),
        mask=(token < query_stop)[:, None] & (column < HEAD_DIM)[None, :],
    )
