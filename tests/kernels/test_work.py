from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recguide_kernels.work import MAX_ROWS, MIN_ROWS, WorkPlan, plan, power_of_two, tile_rows

CPU = torch.device("cpu")
Requests = list[tuple[int, int]]
"""Query tokens and cached tokens of each."""

requests = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 130)), max_size=4)
groups = st.sampled_from([1, 2, 3, 5, 8, 16])
heights = st.sampled_from([16, 32, 64])
splits = st.sampled_from([None, 1, 16, 50, 64, 1000])


def planned(sizes: Requests, group: int, rows: int, split: int | None) -> WorkPlan:
    starts = [0]
    for tokens, _ in sizes:
        starts.append(starts[-1] + tokens)
    return plan(starts, [cached for _, cached in sizes], group, rows, split)


@given(requests, groups, heights, splits)
def test_every_query_meets_its_whole_prefix_and_the_round_once(
    sizes: Requests, group: int, rows: int, split: int | None
) -> None:
    met: Counter[tuple[int, int]] = Counter()
    rounds: Counter[int] = Counter()
    owner = [request for request, (tokens, _) in enumerate(sizes) for _ in range(tokens)]
    for item in planned(sizes, group, rows, split).items:
        for token in range(item.query_start, item.query_stop):
            assert owner[token] == item.request
            rounds[token] += item.in_round
            met.update((token, key) for key in range(item.key_start, item.key_stop))
    expected = {(token, key) for token, request in enumerate(owner) for key in range(sizes[request][1])}
    assert met == Counter(expected)
    assert rounds == Counter(range(len(owner)))


@given(requests, groups, heights, splits)
def test_every_query_is_written_once_from_all_its_partial_results(
    sizes: Requests, group: int, rows: int, split: int | None
) -> None:
    work = planned(sizes, group, rows, split)
    written = Counter(
        token for item in work.items if item.partial < 0 for token in range(item.query_start, item.query_stop)
    )
    left = {item.partial: (item.query_start, item.query_stop) for item in work.items if item.partial >= 0}
    assert sorted(left) == list(range(work.partials))
    for merge in work.merges:
        assert merge.last - merge.first > 1
        assert {left.pop(i) for i in range(merge.first, merge.last)} == {(merge.query_start, merge.query_stop)}
        written.update(range(merge.query_start, merge.query_stop))
    assert not left
    assert written == Counter(range(sum(tokens for tokens, _ in sizes)))


@given(requests, groups, heights, splits)
def test_tiles_are_no_higher_than_planned_and_ranges_no_longer(
    sizes: Requests, group: int, rows: int, split: int | None
) -> None:
    for item in planned(sizes, group, rows, split).items:
        assert 0 < (item.query_stop - item.query_start) * group <= rows
        assert 0 <= item.key_start <= item.key_stop
        assert split is None or item.key_stop - item.key_start <= split
        assert item.key_start < item.key_stop or item.in_round, "an item without work"


@given(requests, groups, heights, splits)
def test_a_request_is_cut_the_same_way_whatever_the_batch(
    sizes: Requests, group: int, rows: int, split: int | None
) -> None:
    together = planned(sizes, group, rows, split)
    start = 0
    for request, size in enumerate(sizes):
        alone = [
            (item.query_start, item.query_stop, item.key_start, item.key_stop, item.in_round)
            for item in planned([size], group, rows, split).items
        ]
        within = [
            (item.query_start - start, item.query_stop - start, item.key_start, item.key_stop, item.in_round)
            for item in together.items
            if item.request == request
        ]
        assert within == alone
        start += size[0]


def test_all_segments_of_a_short_request_read_the_prefix_together() -> None:
    assert len(planned([(16, 8000)], 4, 64, None).items) == 1
    assert len(planned([(16, 8000)], 4, 64, 1024).items) == 8


@pytest.mark.parametrize(
    ("tokens", "group", "dtype", "rows"),
    [
        (0, 1, torch.bfloat16, MIN_ROWS),
        (1, 4, torch.bfloat16, 16),
        (5, 4, torch.float16, 32),
        (16, 4, torch.bfloat16, 64),
        (500, 4, torch.bfloat16, MAX_ROWS),
        (1, 3, torch.bfloat16, 16),
        (1, 32, torch.bfloat16, 32),
        (1, 100, torch.bfloat16, 128),
        (500, 4, torch.float32, MIN_ROWS),
        (500, 32, torch.float32, 32),
    ],
)
def test_tile_rows(tokens: int, group: int, dtype: torch.dtype, rows: int) -> None:
    assert tile_rows(tokens, group, dtype) == rows


def test_power_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]


def test_tensors_and_their_padding() -> None:
    work = planned([(3, 40), (2, 0)], 2, 16, 20)
    exact, padded = work.to(CPU), work.to(CPU, items=5, merges=2)
    assert exact.items.tolist() == [[0, 0, 3, 0, 20, 0, 0], [0, 0, 3, 20, 40, 1, 1], [1, 3, 5, 0, 0, 1, -1]]
    assert exact.merges.tolist() == [[0, 3, 0, 2]]
    assert exact.items.dtype == exact.merges.dtype == torch.int32
    assert padded.items.tolist() == exact.items.tolist() + 2 * [[0, 0, 0, 0, 0, 0, -1]]
    assert padded.merges.tolist() == [*exact.merges.tolist(), [0, 0, 0, 0]]
    assert planned([], 2, 16, None).to(CPU).items.shape == (0, 7)


@pytest.mark.parametrize(
    ("group", "rows", "split", "message"),
    [
        (1, 8, None, "at least 16"),
        (1, 48, None, "power of two"),
        (32, 16, None, "group of 32"),
        (1, 16, 0, "at least 1 token"),
    ],
)
def test_refuses(group: int, rows: int, split: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        planned([(1, 1)], group, rows, split)
