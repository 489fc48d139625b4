"""Every case is compared with the reference in float64; all memory that must not be read is NaN."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from recguide.segments import Segment, pack
from recguide_kernels import reference
from recguide_kernels.packed import PackedRound
from recguide_kernels.segment_attention import segment_attention
from recguide_kernels.work import DeviceWork, Merge, WorkItem, WorkPlan, plan, tile_rows

CPU = torch.device("cpu")
CAUSAL, BOTH = False, True
Shape = tuple[int, bool, int]
"""Length of a segment, whether it is bidirectional, and how much of the verified one it sees besides."""
FUSED: list[Shape] = [(16, CAUSAL, 0), (16, BOTH, 4), (16, BOTH, 9), (16, BOTH, 16)]
"""A verified block of 16 with two corrections and a continuation."""


@dataclass(frozen=True)
class Case:
    """The tensors of one attention, of `query [H, T, D]`, `keys`, `values [G, T, D]` and caches `[N, G, D]`."""

    query: Tensor
    keys: Tensor
    values: Tensor
    key_cache: Tensor
    value_cache: Tensor
    packed: PackedRound

    @property
    def group(self) -> int:
        return self.query.shape[0] // self.keys.shape[0]

    @property
    def scaling(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def tensors(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        named = (self.query, self.keys, self.values, self.key_cache, self.value_cache)
        return [tensor if dtype is None else tensor.to(dtype) for tensor in named]

    def work(self, rows: int | None = None, split: int | None = None) -> WorkPlan:
        packed = self.packed
        longest = max(b - a for a, b in zip(packed.starts, packed.starts[1:], strict=False))
        rows = tile_rows(longest, self.group, torch.bfloat16) if rows is None else rows
        return plan(packed.starts, packed.prefix, self.group, rows, split)

    def run(self, work: DeviceWork | WorkPlan) -> Tensor:
        work = work.to(CPU) if isinstance(work, WorkPlan) else work
        return segment_attention(*self.tensors(), self.packed, self.scaling, work)

    def expected(self) -> Tensor:
        return reference.segment_attention(*self.tensors(torch.float64), self.packed, self.scaling)


def poisoned(shape: Sequence[int], generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """`[A, B, C]` of normal numbers in the middle of NaN, with a row pitch wider than C."""
    a, b, c = shape
    around = torch.full((a + 1, b + 3, c + 8), float("nan"), dtype=dtype)
    inside = around[:a, 1 : b + 1, :c]
    inside[:] = torch.randn(a, b, c, generator=generator).to(dtype)
    return inside


def make(
    requests: Sequence[tuple[int, Sequence[Shape]]],
    *,
    group: int = 2,
    kv_heads: int = 2,
    size: int = 16,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Requests `(prefix, segments)` with pages in random order, and a page of NaN wherever a table is longer than its prefix."""
    rows, prefix = [], []
    for cached, shapes in requests:
        rows.append([Segment([0] * length, cached, both, hypothesis=seen) for length, both, seen in shapes])
        prefix.append(cached)
    packing = pack(rows, prefix, CPU)
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-cached // page_size) for cached in prefix]
    pages = (torch.randperm(sum(needed), generator=generator) + 1).split(needed)
    tables = torch.zeros(len(prefix), max(needed) + 1, dtype=torch.int32)  # Page 0 is nobody's.
    tokens = packing.query_tokens
    caches = [torch.full(((sum(needed) + 1) * page_size, kv_heads, size), float("nan"), dtype=dtype) for _ in range(2)]
    for request, cached in enumerate(prefix):
        tables[request, : needed[request]] = pages[request]
        place = torch.arange(cached)
        slots = tables[request, place // page_size].long() * page_size + place % page_size
        for cache in caches:
            cache[slots] = torch.randn(cached, kv_heads, size, generator=generator).to(dtype)
    keys, values = (poisoned((kv_heads, tokens, size), generator, dtype) for _ in range(2))
    query = poisoned((kv_heads * group, tokens, size), generator, dtype)
    packed = PackedRound(packing.starts, packing.prefix, packing.visible.view(-1, 4), tables, page_size)
    return Case(query, keys, values, *caches, packed)


def check(case: Case, rows: int | None = None, split: int | None = None) -> None:
    torch.testing.assert_close(case.run(case.work(rows, split)).double(), case.expected(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [None, 64])
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 63, 64, 65])
def test_prefix_lengths(prefix: int, split: int | None) -> None:
    """Among them an empty prefix, a last page that is partly filled, and one that is exactly full."""
    check(make([(prefix, FUSED)]), split=split)


@pytest.mark.parametrize("split", [None, 1024, 1500])
def test_a_long_prefix(split: int | None) -> None:
    check(make([(4097, [(3, CAUSAL, 0)])], kv_heads=1), split=split)


@pytest.mark.parametrize("split", [1, 7, 17, 50, 100])
def test_splits_that_are_no_multiple_of_a_tile(split: int) -> None:
    check(make([(23, [(5, CAUSAL, 0)]), (0, [(2, BOTH, 0)])], kv_heads=1), split=split)


@pytest.mark.parametrize("group", [1, 3, 5, 32])
def test_groups(group: int) -> None:
    check(make([(20, FUSED[:2]), (3, [(4, CAUSAL, 0)])], group=group, kv_heads=2 if group < 32 else 1), split=16)


@pytest.mark.parametrize("size", [8, 80, 96, 128, 256])
def test_head_sizes(size: int) -> None:
    check(make([(20, [(8, CAUSAL, 0), (8, BOTH, 3)])], size=size), split=16)


@pytest.mark.parametrize("page_size", [1, 5, 64])
def test_page_sizes(page_size: int) -> None:
    check(make([(70, [(4, CAUSAL, 0)]), (128, [(4, CAUSAL, 0)])], page_size=page_size), split=40)


def test_a_block_that_straddles_tiles_keeps_all_its_keys() -> None:
    """Tiles of 5 tokens cut bidirectional blocks of 16, whose tokens also see what other tiles hold."""
    check(make([(9, FUSED)], group=3), rows=16)


def test_masks_hold_in_the_middle_of_long_rounds() -> None:
    """The second branch sees two intervals with whole tiles of keys between them that it must not see."""
    check(make([(5, [(70, CAUSAL, 0), (130, BOTH, 20), (10, BOTH, 65)])], kv_heads=1))


def test_intervals_are_of_the_packed_row_and_tables_of_the_request() -> None:
    """Requests with the same segments at other places in the row, one that takes no part between them."""
    check(make([(18, FUSED[:2]), (40, []), (0, FUSED[:2]), (33, FUSED[:2])]), split=16)


def test_bidirectional_is_not_causal() -> None:
    both, causal = (make([(6, [(12, way, 0)])]) for way in (BOTH, CAUSAL))
    check(both)
    check(causal)
    out_both, out_causal = (case.run(case.work()) for case in (both, causal))
    torch.testing.assert_close(out_both[-1], out_causal[-1])
    assert bool(((out_both - out_causal)[:-1].abs().amax((1, 2)) > 1e-2).all())


@pytest.mark.parametrize("prefix", [0, 20])
def test_padded_query_tokens_see_nothing_and_disturb_nobody(prefix: int) -> None:
    case = make([(prefix, [(6, CAUSAL, 0)])])
    visible = case.packed.visible.clone()
    visible[4:] = 0
    case = replace(case, packed=replace(case.packed, visible=visible))
    check(case, split=16)
    if not prefix:
        assert bool((case.run(case.work())[4:] == 0).all())


def test_empty_partial_results_merge_to_the_others() -> None:
    """The first, a middle and the last of the merged results are of nothing at all; one tile consists of such alone."""
    case = make([(20, [(4, CAUSAL, 0)]), (0, [(2, CAUSAL, 0)])], kv_heads=1)
    items = [
        WorkItem(0, 0, 4, 0, 0, 0, 0),
        WorkItem(0, 0, 4, 0, 20, 0, 1),
        WorkItem(0, 0, 4, 20, 20, 0, 2),
        WorkItem(0, 0, 4, 20, 20, 1, 3),
        WorkItem(0, 0, 4, 3, 3, 0, 4),
        WorkItem(1, 4, 6, 0, 0, 0, 5),
        WorkItem(1, 4, 6, 0, 0, 0, 6),
    ]
    out = case.run(WorkPlan(tuple(items), (Merge(0, 4, 0, 5), Merge(4, 6, 5, 7)), 16, 7))
    torch.testing.assert_close(out[:4].double(), case.expected()[:4], rtol=0, atol=1e-5)
    assert bool((out[4:] == 0).all())


def test_a_captured_launch_follows_the_plan_that_is_copied_in() -> None:
    """A CUDA graph keeps grids and addresses; all else is read from tensors, so another plan of the same size just takes over."""
    first = make([(40, [(5, CAUSAL, 0)]), (0, [(5, BOTH, 0)])], kv_heads=1)
    second = make([(0, [(3, CAUSAL, 0), (4, BOTH, 2)]), (17, [(3, CAUSAL, 0)])], kv_heads=1, seed=1)
    captured = replace(first.work(16, split=20).to(CPU, items=6, merges=4), partials=8)
    out = first.run(captured)
    torch.testing.assert_close(out.double(), first.expected(), rtol=0, atol=1e-5)
    fresh = second.work(16, split=20).to(CPU, items=6, merges=4)
    captured.items.copy_(fresh.items)
    captured.merges.copy_(fresh.merges)
    torch.testing.assert_close(second.run(captured).double(), second.expected(), rtol=0, atol=1e-5)


def test_views_as_models_and_pools_give_them() -> None:
    """Queries and keys that are transposed, keys and values interleaved in one cache, a visible table with wider rows."""
    case = make([(20, FUSED[:2])])
    both = torch.stack((case.key_cache, case.value_cache), dim=2)
    wide = torch.full((case.packed.visible.shape[0], 9), -(2**40))
    wide[:, :4] = case.packed.visible
    check(
        Case(
            case.query.transpose(0, 1).contiguous().transpose(0, 1),
            case.keys.transpose(0, 1).contiguous().transpose(0, 1),
            case.values.clone(),
            both[:, :, 0],
            both[:, :, 1],
            replace(case.packed, visible=wide[:, :4], tables=case.packed.tables.long()),
        ),
        split=16,
    )


def test_large_finite_values_that_are_not_seen() -> None:
    """Keys whose products overflow lie in the tiles that are read, behind the mask."""
    case = make([(20, [(8, CAUSAL, 0), (4, BOTH, 3)])])
    for tensor in (case.keys, case.values):
        tensor[:, 7] = torch.finfo(torch.float32).max  # Token 7 is seen by itself alone.
    out = case.run(case.work())
    seen = [i for i in range(12) if i != 7]
    torch.testing.assert_close(out[seen].double(), case.expected()[seen], rtol=0, atol=1e-5)


def test_large_finite_values_that_are_seen() -> None:
    case = make([(20, [(6, CAUSAL, 0)])])
    case.values[:, 2] = 1e30
    case.keys[:, 2] *= 1e4
    torch.testing.assert_close(case.run(case.work(split=16)).double(), case.expected(), rtol=1e-5, atol=1e-5)


def test_offsets_beyond_32_bits() -> None:
    case = make([(20, [(3, CAUSAL, 0)])], dtype=torch.float16)
    slots, heads, size = case.key_cache.shape
    far = 2**31 // (heads * size * 16) + 3
    memory = torch.empty(far * 16 + slots, heads, size, dtype=torch.float16)  # Only what is written takes memory.
    memory[far * 16 :] = case.key_cache
    moved = replace(
        case, key_cache=memory, value_cache=memory, packed=replace(case.packed, tables=case.packed.tables + far)
    )
    near = replace(case, value_cache=case.key_cache)
    assert torch.equal(moved.run(moved.work()), near.run(near.work()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [64, 80])
def test_half_types_are_as_exact_as_torch(dtype: torch.dtype, size: int) -> None:
    case = make([(70, FUSED)], dtype=dtype, size=size, group=3)
    expected = case.expected()
    packed, prefix = case.packed, case.packed.prefix[0]
    place = torch.arange(prefix)
    slots = packed.tables[0, place // packed.page_size].long() * packed.page_size + place % packed.page_size
    keys = torch.cat((case.key_cache[slots].transpose(0, 1), case.keys), dim=1)
    values = torch.cat((case.value_cache[slots].transpose(0, 1), case.values), dim=1)
    torch_out = F.scaled_dot_product_attention(
        case.query[None], keys[None], values[None], reference.dense_mask(packed, 0), scale=case.scaling, enable_gqa=True
    )
    allowed = 2 * (torch_out[0].transpose(0, 1).double() - expected).abs().max()
    for split in (None, 32):
        assert (case.run(case.work(split=split)).double() - expected).abs().max() <= allowed


def test_equal_bits_whatever_the_order_of_requests_and_pages() -> None:
    """Rows of a batch are independent: another order, other pages and fewer neighbours change no bit."""
    shapes = [(40, FUSED[:2]), (0, FUSED[:1]), (17, FUSED[:3])]
    case = make(shapes)
    packed = case.packed
    out = case.run(case.work(64, split=16))
    shuffle = torch.randperm(case.key_cache.shape[0] // 16, generator=torch.Generator().manual_seed(9))
    caches = [
        torch.full_like(cache, float("nan"))
        .unflatten(0, (-1, 16))
        .index_copy(0, shuffle, cache.unflatten(0, (-1, 16)))
        .flatten(0, 1)
        for cache in (case.key_cache, case.value_cache)
    ]
    for order in ([2, 0, 1], [1, 2], [0]):
        tokens, starts, visible = [], [0], []
        for request in order:
            own = range(packed.starts[request], packed.starts[request + 1])
            moved = starts[-1] - own.start
            lines = packed.visible[own.start : own.stop]
            visible.append(torch.where(lines[:, [1, 1, 3, 3]] > lines[:, [0, 0, 2, 2]], lines + moved, lines))
            tokens += own
            starts.append(len(tokens))
        other = PackedRound(
            tuple(starts),
            tuple(packed.prefix[request] for request in order),
            torch.cat(visible),
            shuffle[packed.tables[order].long()].to(torch.int32),
            packed.page_size,
        )
        moved_case = Case(case.query[:, tokens], case.keys[:, tokens], case.values[:, tokens], *caches, other)
        assert torch.equal(moved_case.run(moved_case.work(64, split=16)), out[tokens])


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, list[Shape]]]:
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(1, 20))
        segments: list[Shape] = [(first, draw(st.booleans()), 0)]
        for _ in range(draw(st.integers(0, 3))):
            segments.append((draw(st.integers(1, 17)), draw(st.booleans()), draw(st.integers(0, first))))
        requests.append((draw(st.integers(0, 70)), segments))
    return requests


@settings(max_examples=15, deadline=None)
@given(
    rounds(), st.sampled_from([1, 2, 3]), st.sampled_from([16, 64]), st.sampled_from([None, 13, 32]), st.integers(0, 99)
)
def test_any_round(
    requests: list[tuple[int, list[Shape]]], group: int, rows: int, split: int | None, seed: int
) -> None:
    check(make(requests, group=group, kv_heads=1, seed=seed), rows=rows, split=split)


def test_refuses() -> None:
    case = make([(2, [(2, CAUSAL, 0)])], group=3)
    work = case.work()
    with pytest.raises(ValueError, match="multiple of 8"):
        replace(case, query=case.query[..., :12]).run(work)
    with pytest.raises(ValueError, match="no multiple of 2"):
        replace(case, query=case.query[:5]).run(work)
    with pytest.raises(ValueError, match="keys must be"):
        replace(case, keys=case.keys[:, :1]).run(work)
    with pytest.raises(ValueError, match="one dtype"):
        replace(case, values=case.values.half()).run(work)
    with pytest.raises(ValueError, match="contiguous in D"):
        replace(case, value_cache=case.value_cache.transpose(0, 2).contiguous().transpose(0, 2)).run(work)
    turned = case.packed.visible.t().contiguous().t()
    with pytest.raises(ValueError, match=r"packed\.visible must have contiguous rows"):
        replace(case, packed=replace(case.packed, visible=turned)).run(work)
    tables = case.packed.tables.repeat(1, 2)[:, ::2]
    with pytest.raises(ValueError, match=r"packed\.tables must have contiguous rows"):
        replace(case, packed=replace(case.packed, tables=tables)).run(work)
    with pytest.raises(ValueError, match=r"packed\.visible must be \(2, 4\)"):
        replace(case, packed=replace(case.packed, visible=case.packed.visible[:1])).run(work)
    with pytest.raises(ValueError, match="do not hold a group"):
        replace(case, query=case.query.repeat(6, 1, 1)).run(work)
