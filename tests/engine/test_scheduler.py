"""Who runs: nobody waits longer than the stated bound, and block sizes are only ever raised."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recguide import ConfigError
from recguide.engine.scheduler import SCHEDULERS, Bucketed, Packed, Padded, Turn, bucket_of
from recguide.policy import FixedBlock
from recguide.rounds import Request


class Stub:
    """As much of a request as a scheduler looks at."""

    def __init__(self, block_size: int, remaining: int = 99, max_block: int = 64) -> None:
        self.block_size, self.remaining = block_size, remaining
        self.method = type("M", (), {"policy": FixedBlock(max_block)})()


def turn(block_size: int, **fields: Any) -> Turn:
    return Turn(cast(Request, Stub(block_size, **fields)))


@given(st.lists(st.lists(st.sampled_from([1, 2, 4, 8, 16, 32, 64]), min_size=32, max_size=32), min_size=1, max_size=60))
def test_the_wait_is_bounded_whatever_blocks_are_wanted(wanted: list[list[int]]) -> None:
    scheduler = Bucketed(max_wait=8, block_sizes=7)
    turns = [turn(1) for _ in range(32)]
    for _ in range(3):
        for sizes in wanted:
            for each, size in zip(turns, sizes, strict=True):
                # A request wants another block when it has run, as in the engine.
                each.request.block_size = size if each.waited == 0 else each.request.block_size
            chosen = scheduler.choose(turns)
            assert chosen
            assert len({bucket_of(each.request.block_size) for each in chosen}) == 1
            for each in turns:
                each.waited = 0 if each in chosen else each.waited + 1
                assert each.waited <= scheduler.longest_wait


def test_one_whose_block_nobody_shares_among_many() -> None:
    scheduler = Bucketed(max_wait=8, block_sizes=7)
    crowd, loner = [turn(16) for _ in range(31)], turn(8)
    waits = []
    for _ in range(40):
        chosen = scheduler.choose([*crowd, loner])
        for each in (*crowd, loner):
            each.waited = 0 if each in chosen else each.waited + 1
        waits.append(loner.waited)
    assert max(waits) == 8
    assert 0 in waits


def test_a_bucket_holds_what_fits_it() -> None:
    assert [bucket_of(size) for size in (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64)] == [
        1, 2, 4, 4, 8, 8, 16, 16, 32, 32, 64, 64,
    ]  # fmt: skip


def test_packed_and_padded_take_everybody() -> None:
    turns = [turn(4), turn(16), turn(8, remaining=10), turn(1, max_block=1)]
    assert Packed().choose(turns) == turns
    assert [each.request.block_size for each in turns] == [4, 16, 8, 1]
    assert Padded().choose(turns) == turns
    assert [each.request.block_size for each in turns] == [16, 16, 10, 1]


def test_a_bound_below_the_number_of_buckets_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 7"):
        SCHEDULERS["bucketed"](3)
