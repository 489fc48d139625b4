"""Packed plans against a token-by-token construction, and their dense mask against a loop over queries and keys."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recguide.attention.torch_sdpa import dense_mask
from recguide.segments import Plan, Segment, pack

CPU = torch.device("cpu")
OUTPUTS = ((0, None), (-1, None), (1, None), (0, -1), (0, 0))


@st.composite
def a_row(draw: st.DrawFn) -> list[Segment]:
    """A request's segments: none, a draft alone, or a causal one with up to three branches."""
    position = draw(st.integers(0, 9))
    tokens = st.lists(st.integers(0, 99), min_size=1, max_size=5)
    outputs = st.sampled_from(OUTPUTS)
    kind = draw(st.sampled_from(("none", "draft", "verify", "verify")))
    if kind == "none":
        return []
    first = Segment(draw(tokens), position, kind == "draft", draw(st.sampled_from([None, 0, 1])), outputs=draw(outputs))
    row = [first]
    for _ in range(draw(st.integers(0, 3)) if kind == "verify" else 0):
        depth = draw(st.integers(1, len(first.tokens)))
        row.append(
            Segment(draw(tokens), position + depth, True, draw(st.sampled_from([None, 0, 1])), depth, draw(outputs))
        )
    return row


@st.composite
def a_batch(draw: st.DrawFn) -> tuple[list[list[Segment]], list[int]]:
    rows = draw(st.lists(a_row(), min_size=1, max_size=4).filter(any))
    return rows, [draw(st.integers(0, 6)) for _ in rows]


@dataclass(frozen=True)
class Token:
    row: int
    segment: int
    offset: int


def tokens_of(rows: list[list[Segment]]) -> list[Token]:
    return [Token(r, s, i) for r, row in enumerate(rows) for s, seg in enumerate(row) for i in range(len(seg.tokens))]


def sees(rows: list[list[Segment]], query: Token, key: Token) -> bool:
    """The rule of visibility in words: within the segment, and the hypothesised part of the request's first segment."""
    if query.row != key.row:
        return False
    segment = rows[query.row][query.segment]
    if query.segment == key.segment:
        return segment.bidirectional or key.offset <= query.offset
    return key.segment == 0 and key.offset < segment.hypothesis


@given(a_batch())
@settings(max_examples=60)
def test_pack_equals_a_construction_token_by_token(batch: tuple[list[list[Segment]], list[int]]) -> None:
    rows, prefix = batch
    plan, tokens = pack(rows, prefix, CPU), tokens_of(rows)
    segments = [rows[t.row][t.segment] for t in tokens]
    assert plan.query_tokens == len(tokens)
    assert plan.prefix == tuple(prefix)
    assert plan.input_ids.tolist() == [s.tokens[t.offset] for s, t in zip(segments, tokens, strict=True)]
    assert plan.position_ids.tolist() == [s.position + t.offset for s, t in zip(segments, tokens, strict=True)]
    for r in range(len(rows)):
        mine = [i for i, t in enumerate(tokens) if t.row == r]
        assert list(range(plan.starts[r], plan.starts[r + 1])) == mine
        assert plan.tokens_of(r) == len(mine)
    for query, (a0, a1, b0, b1) in zip(tokens, plan.visible.tolist(), strict=True):
        seen = [*range(a0, a1), *range(b0, b1)]
        assert len(seen) == len(set(seen)), "the intervals overlap"
        assert sorted(seen) == [i for i, key in enumerate(tokens) if sees(rows, query, key)]


@given(a_batch())
@settings(max_examples=60)
def test_pack_marks_the_adapter_and_the_wanted_rows(batch: tuple[list[list[Segment]], list[int]]) -> None:
    rows, prefix = batch
    plan, tokens = pack(rows, prefix, CPU), tokens_of(rows)
    starts = [rows[t.row][t.segment].adapter_from for t in tokens]
    flags = [start is not None and t.offset >= start for t, start in zip(tokens, starts, strict=True)]
    assert flags == [False] * len(tokens) if plan.adapter is None else flags == plan.adapter.tolist()
    output_rows = list(range(len(tokens))) if plan.output_rows is None else plan.output_rows.tolist()
    covered = []
    assert [len(spans) for spans in plan.outputs] == [len(row) for row in rows]
    for r, row in enumerate(rows):
        for s, segment in enumerate(row):
            start, stop = plan.outputs[r][s]
            mine = [i for i, t in enumerate(tokens) if (t.row, t.segment) == (r, s)]
            assert output_rows[start:stop] == mine[segment.outputs[0] : segment.outputs[1]]
            covered += range(start, stop)
    assert covered == list(range(len(output_rows)))


def naive_mask(rows: list[list[Segment]], prefix: list[int], row: int, keys: int) -> list[list[bool]]:
    """One row's mask by a loop over its queries and its keys: its cached prefix, its own tokens, then nothing."""
    mine = [t for t in tokens_of(rows) if t.row == row]
    mask = []
    for query in mine:
        line = []
        for key in range(keys):
            behind = key - prefix[row]
            line.append(behind < 0 or (behind < len(mine) and sees(rows, query, mine[behind])))
        mask.append(line)
    return mask


def check_mask(rows: list[list[Segment]], prefix: list[int]) -> Plan:
    plan = pack(rows, prefix, CPU)
    counts = [sum(len(segment.tokens) for segment in row) for row in rows]
    live = [r for r, count in enumerate(counts) if count]
    for some in (live, live[-1:], live[::-1]):
        mask = dense_mask(plan, some)
        keys = max(prefix[r] + counts[r] for r in some)
        assert mask.shape == (len(some), 1, max(counts[r] for r in some), keys)
        for i, r in enumerate(some):
            assert mask[i, 0, : counts[r]].tolist() == naive_mask(rows, prefix, r, keys)
    return plan


@given(a_batch())
@settings(max_examples=60)
def test_dense_mask_equals_a_loop_over_queries_and_keys(batch: tuple[list[list[Segment]], list[int]]) -> None:
    check_mask(*batch)


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_dense_mask_with_an_empty_row_at_any_place(empty: int) -> None:
    rows = [
        [Segment([1, 2, 3], 4), Segment([7, 5, 5], 6, True, 0, 2)],
        [Segment([4], 9), Segment([5, 5], 10, True, 0, 1)],
    ]
    prefix = [4, 9]
    rows.insert(empty, [])
    prefix.insert(empty, 11)
    plan = check_mask(rows, prefix)
    assert plan.tokens_of(empty) == 0
    assert plan.outputs[empty] == ()


def test_a_fused_round_by_hand() -> None:
    """Three verified tokens, a correction at depth 1 and a continuation at depth 3, behind two cached tokens."""
    row = [
        Segment([10, 11, 12], 2),
        Segment([20, 5], 3, True, 0, 1, (1, None)),
        Segment([5, 5], 5, True, 0, 3),
    ]
    plan = pack([row], [2], CPU)
    assert plan.visible.tolist() == [[0, 1, 0, 0], [0, 2, 0, 0], [0, 3, 0, 0], *[[3, 5, 0, 1]] * 2, *[[5, 7, 0, 3]] * 2]
    assert plan.position_ids.tolist() == [2, 3, 4, 3, 4, 5, 6]
    assert plan.output_rows is not None
    assert plan.output_rows.tolist() == [0, 1, 2, 4, 5, 6]
    assert plan.outputs == (((0, 3), (3, 4), (4, 6)),)
    picture = ["11100....", "11110....", "11111....", "111..11..", "111..11..", "11111..11", "11111..11"]
    expected = [[mark == "1" for mark in line] for line in picture]
    assert dense_mask(plan, [0])[0, 0].tolist() == expected


def test_a_branch_cannot_see_more_than_the_verified_segment_holds() -> None:
    with pytest.raises(AssertionError, match="a branch sees more"):
        pack([[Segment([1, 2], 0), Segment([5], 3, True, 0, 3)]], [0], CPU)
