"""The dense cache: growth, commit and rollback, independent rows, taking over a prefix."""

import pytest
import torch
from torch import Tensor

from recguide.dense_kv import GROWTH, DenseKV
from recguide.segments import Segment, pack

GROUPS, SIZE = 2, 3
CPU = torch.device("cpu")


def write(kv: DenseKV, counts: list[int], layers: int = 2) -> list[tuple[Tensor, Tensor]]:
    """Write `counts[r]` random tokens for each row r in every layer; returns the packed keys and values by layer."""
    rows = [[Segment([0] * n, p)] if n else [] for n, p in zip(counts, kv.lengths, strict=True)]
    plan = pack(rows, kv.lengths, CPU)
    written = []
    for layer in range(layers):
        keys, values = torch.randn(2, GROUPS, sum(counts), SIZE)
        kv.store(layer, keys, values, plan)
        all_keys, all_values = kv.gather(layer, tuple(range(len(counts))), plan)
        end = max(p + n for p, n in zip(kv.lengths, counts, strict=True))
        assert all_keys.shape == all_values.shape == (len(counts), GROUPS, end, SIZE)
        for r, start in enumerate(plan.starts[:-1]):
            behind = slice(kv.lengths[r], kv.lengths[r] + counts[r])
            torch.testing.assert_close(all_keys[r, :, behind], keys[:, start : start + counts[r]], rtol=0, atol=0)
            torch.testing.assert_close(all_values[r, :, behind], values[:, start : start + counts[r]], rtol=0, atol=0)
        for some in [(0,), (len(counts) - 1, 0)]:
            longest = max(kv.lengths[r] + counts[r] for r in some)
            for part, whole in zip(kv.gather(layer, some, plan), (all_keys, all_values), strict=True):
                assert torch.equal(part, whole[list(some), :, :longest])
        pages = kv.pages(layer, keys, values, plan)
        place = torch.arange(end)
        slots = pages.tables[:, place // pages.page_size] * pages.page_size + place % pages.page_size
        assert torch.equal(pages.keys[slots].transpose(1, 2), all_keys)
        assert torch.equal(pages.values[slots].transpose(1, 2), all_values)
        written.append((keys, values))
    return written


def assert_holds(kv: DenseKV, row: int, expected: list[tuple[Tensor, Tensor]]) -> None:
    """The row's committed keys and values are exactly `expected`, layer by layer."""
    for (keys, values), (expected_keys, expected_values) in zip(kv.read(row), expected, strict=True):
        torch.testing.assert_close(keys, expected_keys, rtol=0, atol=0)
        torch.testing.assert_close(values, expected_values, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 3])
def test_growth_beyond_the_capacity_keeps_everything(rows: int) -> None:
    kv = DenseKV(rows, capacity=4)
    kept: list[list[list[tuple[Tensor, Tensor]]]] = [[] for _ in range(rows)]
    for count in (3, 1, 2, GROWTH, 5, GROWTH + 7):
        written = write(kv, [count] * rows)
        for row in range(rows):
            mine = slice(row * count, (row + 1) * count)
            kept[row].append([(k[:, mine], v[:, mine]) for k, v in written])
            kv.commit(row, count)
    assert kv.lengths == (3 + 1 + 2 + GROWTH + 5 + GROWTH + 7,) * rows
    for row in range(rows):
        by_layer = zip(*kept[row], strict=True)
        expected = [tuple(torch.cat(parts, dim=1) for parts in zip(*layer, strict=True)) for layer in by_layer]
        assert_holds(kv, row, expected)  # type: ignore[arg-type]


def test_uncommitted_tokens_are_forgotten_and_overwritten() -> None:
    kv = DenseKV(1)
    first = write(kv, [5])
    kv.commit(0, 2)
    assert kv.lengths == (2,)
    assert_holds(kv, 0, [(k[:, :2], v[:, :2]) for k, v in first])
    write(kv, [4])
    assert kv.lengths == (2,), "nothing was committed"
    second = write(kv, [3])
    kv.commit(0, 3)
    assert kv.lengths == (5,)
    expected = [
        (torch.cat((k1[:, :2], k2), dim=1), torch.cat((v1[:, :2], v2), dim=1))
        for (k1, v1), (k2, v2) in zip(first, second, strict=True)
    ]
    assert_holds(kv, 0, expected)


def test_committing_nothing_keeps_nothing() -> None:
    kv = DenseKV(2)
    write(kv, [3, 1])
    kv.commit(0, 0)
    assert kv.lengths == (0, 0)
    assert [k.shape[1] for k, _ in kv.read(0)] == [0, 0]


def test_rows_are_independent() -> None:
    """Rows write and commit different amounts, one of them nothing for a while; none disturbs another."""
    kv = DenseKV(3, capacity=2)
    kept: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    for counts, committed in (
        ([4, 1, 2], [1, 1, 2]),
        ([0, 6, 3], [0, 6, 0]),
        ([2, 0, 1], [2, 0, 1]),
        ([1, 1, 0], [1, 1, 0]),
    ):
        written = write(kv, counts, layers=1)
        start = 0
        for row in range(3):
            kept[row] += [tuple(t[:, start : start + committed[row]] for t in written[0])]  # type: ignore[list-item]
            start += counts[row]
            kv.commit(row, committed[row])
    assert kv.lengths == (4, 8, 3)
    for row in range(3):
        keys, values = zip(*kept[row], strict=True)
        assert_holds(kv, row, [(torch.cat(keys, dim=1), torch.cat(values, dim=1))])


def test_load_takes_over_what_read_gives() -> None:
    source = DenseKV(2)
    write(source, [5, 3])
    source.commit(0, 4)
    source.commit(1, 3)
    target = DenseKV(3, capacity=1)
    target.load(2, source.read(0))
    target.load(0, source.read(1))
    assert target.lengths == (3, 0, 4)
    assert_holds(target, 2, source.read(0))
    assert_holds(target, 0, source.read(1))
    write(target, [1, 2, 2])
    assert_holds(target, 2, source.read(0))
    assert_holds(target, 0, source.read(1))


def test_load_refuses_a_row_that_holds_something() -> None:
    kv = DenseKV(1)
    write(kv, [2])
    kv.commit(0, 1)
    with pytest.raises(AssertionError, match="empty row"):
        kv.load(0, kv.read(0))


def test_memory_never_written_is_zero() -> None:
    """A masked key times its zero weight must not become NaN, whatever memory the allocator hands out."""
    kv = DenseKV(2, capacity=2)
    for count in (1, GROWTH):
        rows = [[Segment([0] * count, 0)], []]
        keys = torch.ones(GROUPS, count, SIZE)
        plan = pack(rows, kv.lengths, CPU)
        kv.store(0, keys, keys, plan)
        all_keys, all_values = kv.gather(0, (0, 1), plan)
        assert torch.equal(all_keys[1], torch.zeros_like(all_keys[1]))
        assert torch.equal(all_values[1], torch.zeros_like(all_values[1]))
