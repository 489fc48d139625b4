"""Keeping accepted tokens: their keys and values go from the packed forward into pages, with counts that may stay on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .packed import PackedRound

BLOCK_TOKENS = 16


@dataclass(frozen=True)
class CommitWork:
    """
    What the commits of all layers of a forward share.

    Args:
        places (`torch.Tensor`): `int32[R, 2]`, each request's first packed token and its prefix.
        counts (`torch.Tensor`): integers `[R]`, how many tokens to copy.
        limit (`int`): no count is above this.
    """

    places: Tensor
    counts: Tensor
    limit: int


def commit_work(packed: PackedRound, counts: Tensor, limit: int | None = None) -> CommitWork:
    """
    Prepare the commits of a forward.

    Args:
        packed (`PackedRound`): its tables have room for what is committed.
        counts (`torch.Tensor`): integers `[R]` on the caches' device, where they may stay: how many tokens of each request to copy, from 0
            to those it has in the forward. Contiguous.
        limit (`int`, *optional*): no count is above this; by default the tokens of the longest request.

    Raises:
        ValueError: as many counts as requests were not given, or they are not contiguous.
    """
    requests = packed.requests
    if counts.shape != (requests,):
        raise ValueError(f"counts must be {(requests,)}, one a request; got {tuple(counts.shape)}.")
    if not counts.is_contiguous():
        raise ValueError(f"counts must be contiguous; their stride is {counts.stride(0)}.")
    longest = max((packed.starts[r + 1] - packed.starts[r] for r in range(requests)), default=0)
    places = torch.tensor([[packed.starts[r], packed.prefix[r]] for r in range(requests)], dtype=torch.int32)
    return CommitWork(places.to(counts.device), counts, longest if limit is None else min(limit, longest))


def kv_commit(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, packed: PackedRound, work: CommitWork
) -> None:
    """
    [`reference.kv_commit`] on the device: copy the first packed tokens of each request behind its prefix, in place.

    Args:
        keys, values (`torch.Tensor`): `[G, T, D]`, of the packed tokens, D contiguous.
        key_cache, value_cache (`torch.Tensor`): `[N, G, D]`, written; D contiguous.
        packed (`PackedRound`): the tables, with contiguous rows, and their page size.
        work (`CommitWork`): of [`commit_work`].

    Raises:
        ValueError: shapes do not fit, or what must be contiguous is not.
    """
    for name, new, cache in (("keys", keys, key_cache), ("values", values, value_cache)):
        if (new.shape[0], new.shape[2]) != cache.shape[1:]:
            raise ValueError(f"{name} {tuple(new.shape)} do not fit a cache of {tuple(cache.shape)}.")
        if new.stride(2) != 1 or cache.stride(2) != 1:
            raise ValueError(f"{name} and their cache must be contiguous in D.")
    if packed.tables.stride(-1) != 1:
        raise ValueError(f"packed.tables must have contiguous rows; its strides are {packed.tables.stride()}.")
    if not work.limit:
        return
    for new, cache in ((keys, key_cache), (values, value_cache)):
        grid = (packed.requests, new.shape[0], triton.cdiv(work.limit, BLOCK_TOKENS))
        commit_kernel[grid](
            new,
            cache,
            work.places,
            work.counts,
            packed.tables,
            new.stride(0),
            new.stride(1),
            cache.stride(0),
            cache.stride(1),
            packed.tables.stride(0),
            packed.page_size,
            HEAD_DIM=new.shape[2],
            BLOCK_D=triton.next_power_of_2(new.shape[2]),
            BLOCK_TOKENS=BLOCK_TOKENS,
            num_warps=4,
        )


@triton.jit
def commit_kernel(
    new,
    cache,
    places,
    counts,
    tables,
    new_head_stride,
    new_token_stride,
    cache_slot_stride,
    cache_head_stride,
    table_stride,
    page_size,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    request = tl.program_id(0)
    # Caches and packed rows may hold more than 2^31 numbers.
    head = tl.program_id(1).to(tl.int64)
    index = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    kept = index < tl.load(counts + request)
    token = tl.load(places + request * 2).to(tl.int64) + index
    position = tl.load(places + request * 2 + 1) + index
    table = tables + request.to(tl.int64) * table_stride
    page = tl.load(table + position // page_size, mask=kept, other=0).to(tl.int64)
    slot = page * page_size + position % page_size
    column = tl.arange(0, BLOCK_D)
    mask = kept[:, None] & (column < HEAD_DIM)[None, :]
    source = new + head * new_head_stride + token[:, None] * new_token_stride + column[None, :]
    target = cache + head * cache_head_stride + slot[:, None] * cache_slot_stride + column[None, :]
    tl.store(target, tl.load(source, mask=mask).to(cache.dtype.element_ty), mask=mask)
