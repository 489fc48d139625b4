"""Which branch is hit, and that every round ends in exactly one outcome."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recguide.acceptance import hit_branch, name_outcome
from recguide.structs import Branch, BranchChoice, BranchKind, BranchRecord, Draft, Outcome

B = 8
CORRECTION, CONTINUATION, ANY_BONUS = BranchKind.CORRECTION, BranchKind.CONTINUATION, BranchKind.ANY_BONUS


def record(kind: BranchKind, depth: int, first: int) -> BranchRecord:
    return BranchRecord(Branch(kind, depth, B, first if kind is CORRECTION else None), first, Draft())


@pytest.mark.parametrize(
    ("branches", "committed", "bonus", "hit"),
    [
        ([], 3, 9, None),
        ([record(CORRECTION, 2, 9), record(CORRECTION, 5, 9), record(CONTINUATION, B, 9)], 2, 9, 0),
        ([record(CORRECTION, 2, 9), record(CORRECTION, 5, 9), record(CONTINUATION, B, 9)], 5, 9, 1),
        ([record(CORRECTION, 2, 9), record(CORRECTION, 5, 9), record(CONTINUATION, B, 9)], B, 9, 2),
        ([record(CORRECTION, 2, 9), record(CORRECTION, 5, 9), record(CONTINUATION, B, 9)], 3, 9, None),
        ([record(CORRECTION, 2, 9), record(CORRECTION, 5, 9), record(CONTINUATION, B, 9)], 2, 8, None),
        ([record(CONTINUATION, B, 9)], B, 8, None),
        ([record(CONTINUATION, B, 9)], B - 1, 9, None),
        ([record(ANY_BONUS, d, 9) for d in (1, 2, 3)], 2, 8, 1),
        ([record(ANY_BONUS, d, 9) for d in (1, 2, 3)], 4, 9, None),
    ],
)
def test_a_branch_is_hit_where_all_that_it_supposed_came_true(
    branches: list[BranchRecord], committed: int, bonus: int, hit: int | None
) -> None:
    assert hit_branch(branches, committed, bonus) == hit


def choice(*branches: tuple[BranchKind, int]) -> BranchChoice:
    return BranchChoice(tuple(Branch(kind, depth, B) for kind, depth in branches))


NONE = choice()
ONE = choice((CORRECTION, 3), (CONTINUATION, B))
TWO = choice((CORRECTION, 3), (CORRECTION, 6), (CONTINUATION, B))
TWO_ONLY = choice((CORRECTION, 3), (CORRECTION, 6))
CONTINUATION_ONLY = choice((CONTINUATION, B))
QUADRATIC = choice(*((ANY_BONUS, depth) for depth in range(1, B)))

TABLE = [
    # branches, accepted, hit, stopped, outcome
    (NONE, 0, None, False, Outcome.PLAIN),
    (NONE, B - 1, None, False, Outcome.PLAIN),
    (CONTINUATION_ONLY, 4, None, False, Outcome.REJECTED_NO_CORRECTION),
    (CONTINUATION_ONLY, B - 2, None, False, Outcome.REJECTED_NO_CORRECTION),
    (ONE, 0, None, False, Outcome.REJECTED_BEFORE),
    (TWO, 1, None, False, Outcome.REJECTED_BEFORE),
    (TWO, 2, 0, False, Outcome.CORRECTION_1_HIT),
    (TWO, 2, None, False, Outcome.CORRECTION_1_WRONG_TOKEN),
    (TWO, 3, None, False, Outcome.REJECTED_BETWEEN),
    (TWO, 4, None, False, Outcome.REJECTED_BETWEEN),
    (TWO, 5, 1, False, Outcome.CORRECTION_2_HIT),
    (TWO, 5, None, False, Outcome.CORRECTION_2_WRONG_TOKEN),
    (TWO, 6, None, False, Outcome.REJECTED_AFTER),
    (ONE, 3, None, False, Outcome.REJECTED_AFTER),
    (ONE, 2, 0, False, Outcome.CORRECTION_1_HIT),
    (TWO, B - 1, 2, False, Outcome.CONTINUATION_HIT),
    (CONTINUATION_ONLY, B - 1, 0, False, Outcome.CONTINUATION_HIT),
    (TWO, B - 1, None, False, Outcome.CONTINUATION_WRONG_TOKEN),
    (TWO_ONLY, B - 1, None, False, Outcome.FULL_NO_CONTINUATION),
    (QUADRATIC, 3, 3, False, Outcome.ANY_BONUS_HIT),
    (QUADRATIC, B - 1, None, False, Outcome.ANY_BONUS_NOT_BUILT),
    (TWO, 2, None, True, Outcome.STOPPED),
    (QUADRATIC, 3, None, True, Outcome.STOPPED),
    (NONE, 0, None, True, Outcome.STOPPED),
]


@pytest.mark.parametrize(("branches", "accepted", "hit", "stopped", "outcome"), TABLE)
def test_outcome(branches: BranchChoice, accepted: int, hit: int | None, stopped: bool, outcome: Outcome) -> None:
    assert name_outcome(branches, B, accepted, hit, stopped) is outcome


def test_the_table_reaches_every_outcome() -> None:
    assert {row[-1] for row in TABLE} == set(Outcome)


def outcomes_that_apply(
    kinds: dict[int, BranchKind], accepted: int, hit: bool, stopped: bool, block_size: int
) -> list[Outcome]:
    """Each outcome's own definition, asked one by one; `kinds` are the branches by depth."""
    corrections = sorted(depth for depth, kind in kinds.items() if kind is CORRECTION)
    first, last = (corrections[0], corrections[-1]) if corrections else (0, 0)
    full, place = accepted == block_size - 1, accepted + 1
    quadratic, continuation = ANY_BONUS in kinds.values(), CONTINUATION in kinds.values()
    paper = bool(kinds) and not quadratic and not stopped
    rejected = paper and not full and bool(corrections)
    second = len(corrections) == 2 and place == last
    definitions = {
        Outcome.STOPPED: stopped,
        Outcome.PLAIN: not stopped and not kinds,
        Outcome.REJECTED_NO_CORRECTION: paper and not full and not corrections,
        Outcome.REJECTED_BEFORE: rejected and place < first,
        Outcome.REJECTED_BETWEEN: rejected and first < place < last,
        Outcome.REJECTED_AFTER: rejected and place > last,
        Outcome.CORRECTION_1_HIT: rejected and place == first and hit,
        Outcome.CORRECTION_1_WRONG_TOKEN: rejected and place == first and not hit,
        Outcome.CORRECTION_2_HIT: rejected and second and hit,
        Outcome.CORRECTION_2_WRONG_TOKEN: rejected and second and not hit,
        Outcome.CONTINUATION_HIT: paper and full and continuation and hit,
        Outcome.CONTINUATION_WRONG_TOKEN: paper and full and continuation and not hit,
        Outcome.FULL_NO_CONTINUATION: paper and full and not continuation,
        Outcome.ANY_BONUS_HIT: not stopped and quadratic and hit,
        Outcome.ANY_BONUS_NOT_BUILT: not stopped and quadratic and not hit,
    }
    assert set(definitions) == set(Outcome)
    return [outcome for outcome, applies in definitions.items() if applies]


@given(st.data())
def test_every_round_has_exactly_one_outcome(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((2, 4, 8)))
    if data.draw(st.booleans()):
        corrections = sorted(data.draw(st.sets(st.integers(1, size - 1), max_size=2)))
        kinds = dict.fromkeys(corrections, CORRECTION)
        if data.draw(st.booleans()):
            kinds[size] = CONTINUATION
    else:
        kinds = dict.fromkeys(range(1, data.draw(st.integers(1, size)) + 1), ANY_BONUS)
    firsts = {depth: data.draw(st.integers(0, 1)) for depth in kinds}
    records = [record(kind, depth, firsts[depth]) for depth, kind in kinds.items()]
    accepted, bonus, stopped = (
        data.draw(st.integers(0, size - 1)),
        data.draw(st.integers(0, 1)),
        data.draw(st.booleans()),
    )
    hit = None if stopped else hit_branch(records, accepted + 1, bonus)
    name = name_outcome(BranchChoice(tuple(r.branch for r in records)), size, accepted, hit, stopped)
    came_true = accepted + 1 in kinds and (kinds[accepted + 1] is ANY_BONUS or firsts[accepted + 1] == bonus)
    assert (hit is not None) == (came_true and not stopped)
    assert [name] == outcomes_that_apply(kinds, accepted, came_true, stopped, size)
