"""Which branch is hit, what is left of drafts where none is, and that every round ends in exactly one outcome."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recguide.acceptance import hit_branch, leftover, name_outcome
from recguide.structs import Branch, BranchChoice, BranchKind, BranchRecord, Draft, DraftSource, Guess, Outcome

B = 8
CORRECTION, CONTINUATION, ANY_BONUS = BranchKind.CORRECTION, BranchKind.CONTINUATION, BranchKind.ANY_BONUS


def draft_of(tokens: Sequence[int], source: DraftSource = DraftSource.BRANCH) -> Draft:
    return Draft(tuple(Guess(token, (), 1.0, 0.0) for token in tokens), source)


def record(kind: BranchKind, depth: int, first: int, *drafted: int) -> BranchRecord:
    branch = Branch(kind, depth, len(drafted) + 1 if drafted else B, first if kind is CORRECTION else None)
    return BranchRecord(branch, first, draft_of(drafted))


def text(length: int, bonus: int = 9) -> list[int]:
    """`length` committed tokens: 11, 12, … and the bonus."""
    return [*range(11, 10 + length), bonus]


PAPERS = [record(CORRECTION, 2, 9), record(CORRECTION, 5, 9), record(CONTINUATION, B, 9)]
FORETOLD = [record(CONTINUATION, 2, 12, 13, 9, 15), record(CONTINUATION, 4, 9, 15, 16)]


@pytest.mark.parametrize(
    ("branches", "committed", "hit"),
    [
        ([], text(3), None),
        (PAPERS, text(2), 0),
        (PAPERS, text(5), 1),
        (PAPERS, text(B), 2),
        (PAPERS, text(3), None),
        (PAPERS, text(2, 8), None),
        ([record(CONTINUATION, B, 9)], text(B, 8), None),
        ([record(CONTINUATION, B, 9)], text(B - 1), None),
        ([record(ANY_BONUS, d, 9) for d in (1, 2, 3)], text(2, 8), 1),
        ([record(ANY_BONUS, d, 9) for d in (1, 2, 3)], text(4), None),
        ([record(ANY_BONUS, 1, 11, 12, 13, 14)], text(2, 12), None),
        # More was committed than is supposed, and that too was foretold.
        (FORETOLD[:1], text(2, 12), 0),
        (FORETOLD[:1], text(4), 0),
        (FORETOLD[:1], text(4, 8), None),
        (FORETOLD[:1], text(5, 15), None),
        (FORETOLD, text(4), 1),
        (FORETOLD[::-1], text(4), 0),
        (FORETOLD, text(3, 13), 0),
        ([record(CORRECTION, 2, 12, 13, 14)], text(3, 13), 0),
        ([record(CORRECTION, 2, 9, 13, 14)], text(3, 13), None),
    ],
)
def test_the_deepest_branch_is_hit_that_foretold_all_that_is_committed(
    branches: list[BranchRecord], committed: list[int], hit: int | None
) -> None:
    assert hit_branch(branches, committed) == hit


def foretold_slowly(record: BranchRecord, committed: Sequence[int]) -> bool:
    """Every token where the branch says something is as it says, and it says something of the one after them."""
    depth, end = record.branch.depth, len(committed)
    if record.branch.kind is ANY_BONUS:
        return end == depth
    says = {depth: record.first} | dict(enumerate(record.draft.tokens, start=depth + 1))
    if end < depth or (end > depth and end + 1 not in says):
        return False
    return all(says[place] == committed[place - 1] for place in range(depth, end + 1))


RECORDS = st.builds(
    lambda kind, depth, first, drafted: record(kind, depth, first, *drafted),
    st.sampled_from(BranchKind),
    st.integers(1, 5),
    st.integers(0, 1),
    st.lists(st.integers(0, 1), max_size=4),
)


@given(RECORDS, st.lists(st.integers(0, 1), min_size=1, max_size=8))
def test_a_branch_foretells_what_it_says_place_by_place(record: BranchRecord, committed: list[int]) -> None:
    assert record.foretells(committed) == foretold_slowly(record, committed)


@given(st.lists(RECORDS, max_size=4), st.lists(st.integers(0, 1), min_size=1, max_size=8))
def test_none_that_is_hit_is_less_deep_than_another(branches: list[BranchRecord], committed: list[int]) -> None:
    depths = [r.branch.depth for r in branches if foretold_slowly(r, committed)]
    hit = hit_branch(branches, committed)
    assert (hit is not None) == bool(depths)
    if hit is not None:
        assert foretold_slowly(branches[hit], committed)
        assert branches[hit].branch.depth == max(depths)


# --- leftovers ---


def coded(depth: int, size: int, code: int) -> BranchRecord:
    """A branch whose tokens say where they stand, counted from the seed, and whose they are."""
    first, *drafted = range(code + depth, code + depth + size)
    return record(CONTINUATION, depth, first, *drafted)


@given(
    drafted=st.integers(0, 6),
    shapes=st.lists(st.tuples(st.integers(1, 7), st.integers(2, 6)), max_size=3),
    committed=st.integers(1, 7),
)
def test_what_is_left_stands_right_after_what_was_committed(
    drafted: int, shapes: list[tuple[int, int]], committed: int
) -> None:
    draft = draft_of(range(1, drafted + 1), DraftSource.FORWARD)
    branches = [coded(depth, size, 100 * i) for i, (depth, size) in enumerate(shapes, start=1)]
    left = leftover(draft, branches, committed)
    ends = {0: drafted} | {i: depth + size - 1 for i, (depth, size) in enumerate(shapes, start=1) if depth <= committed}
    owner = next((i for i, end in ends.items() if end > committed), None)
    if owner is None:
        assert left == Draft()
    else:
        assert left.tokens == [100 * owner + place for place in range(committed + 1, ends[owner] + 1)]
        assert left.source is DraftSource.LEFTOVER


def test_the_verified_draft_s_rest_goes_before_a_branch_s() -> None:
    branches = [coded(5, 3, 100), coded(2, 4, 200), coded(1, 8, 300)]
    draft = draft_of([1, 2, 3, 4, 5])
    assert leftover(draft, branches, 3).tokens == [4, 5]
    assert leftover(draft_of([1, 2, 3]), branches, 3).tokens == [204, 205]
    assert leftover(draft, branches[:2], 5).tokens == [106, 107]
    assert leftover(draft, [], 5) == Draft()


# --- outcomes ---


def choice(*branches: tuple[BranchKind, int]) -> BranchChoice:
    return BranchChoice(tuple(Branch(kind, depth, B) for kind, depth in branches))


NONE = choice()
ONE = choice((CORRECTION, 3), (CONTINUATION, B))
TWO = choice((CORRECTION, 3), (CORRECTION, 6), (CONTINUATION, B))
TWO_ONLY = choice((CORRECTION, 3), (CORRECTION, 6))
CONTINUATION_ONLY = choice((CONTINUATION, B))
INNER = choice((CONTINUATION, 3), (CONTINUATION, 6))
INNER_AND_LAST = choice((CONTINUATION, 3), (CORRECTION, 6), (CONTINUATION, B))
BESIDE = choice((CONTINUATION, 3), (CORRECTION, 3))
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
    (INNER, 0, None, False, Outcome.REJECTED_BEFORE),
    (INNER, 2, 0, False, Outcome.CORRECTION_1_HIT),
    (INNER, 2, None, False, Outcome.CORRECTION_1_WRONG_TOKEN),
    (INNER, 3, None, False, Outcome.REJECTED_BETWEEN),
    (INNER, 3, 0, False, Outcome.FORETOLD_HIT),
    (INNER, 5, 0, False, Outcome.FORETOLD_HIT),
    (INNER, 5, 1, False, Outcome.CORRECTION_2_HIT),
    (INNER, 6, None, False, Outcome.REJECTED_AFTER),
    (INNER, B - 1, 1, False, Outcome.FORETOLD_HIT),
    (INNER, B - 1, None, False, Outcome.FULL_NO_CONTINUATION),
    (INNER_AND_LAST, B - 1, 0, False, Outcome.FORETOLD_HIT),
    (INNER_AND_LAST, B - 1, 2, False, Outcome.CONTINUATION_HIT),
    (INNER_AND_LAST, B - 1, None, False, Outcome.CONTINUATION_WRONG_TOKEN),
    (BESIDE, 2, 1, False, Outcome.CORRECTION_1_HIT),
    (BESIDE, 3, None, False, Outcome.REJECTED_AFTER),
    (INNER, 3, None, True, Outcome.STOPPED),
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
    branches: Sequence[BranchRecord], committed: Sequence[int], stopped: bool, size: int
) -> list[Outcome]:
    """Each outcome's own definition, asked one by one. A continuation at an inner depth is a correction by its prediction."""
    corrections = sorted({r.branch.depth for r in branches if r.branch.kind is not ANY_BONUS and r.branch.depth < size})
    first, last = (corrections[0], corrections[-1]) if corrections else (0, 0)
    place = len(committed)
    full = place == size
    quadratic = any(r.branch.kind is ANY_BONUS for r in branches)
    continuation = any(r.branch.kind is CONTINUATION and r.branch.depth == size for r in branches)
    hits = {r.branch.depth for r in branches if foretold_slowly(r, committed)}
    here, earlier = place in hits, any(depth < place for depth in hits)
    paper = bool(branches) and not quadratic and not stopped
    foretold = paper and earlier and not here
    rejected = paper and not full and bool(corrections) and not foretold
    full = full and not foretold
    second = place in corrections and place != first
    definitions = {
        Outcome.STOPPED: stopped,
        Outcome.PLAIN: not stopped and not branches,
        Outcome.REJECTED_NO_CORRECTION: paper and not full and not corrections,
        Outcome.REJECTED_BEFORE: rejected and place < first,
        Outcome.REJECTED_BETWEEN: rejected and first < place < last and place not in corrections,
        Outcome.REJECTED_AFTER: rejected and place > last,
        Outcome.CORRECTION_1_HIT: rejected and place == first and here,
        Outcome.CORRECTION_1_WRONG_TOKEN: rejected and place == first and not here,
        Outcome.CORRECTION_2_HIT: rejected and second and here,
        Outcome.CORRECTION_2_WRONG_TOKEN: rejected and second and not here,
        Outcome.CONTINUATION_HIT: paper and full and continuation and here,
        Outcome.CONTINUATION_WRONG_TOKEN: paper and full and continuation and not here,
        Outcome.FULL_NO_CONTINUATION: paper and full and not continuation,
        Outcome.FORETOLD_HIT: foretold,
        Outcome.ANY_BONUS_HIT: not stopped and quadratic and here,
        Outcome.ANY_BONUS_NOT_BUILT: not stopped and quadratic and not here,
    }
    assert set(definitions) == set(Outcome)
    return [outcome for outcome, applies in definitions.items() if applies]


@settings(max_examples=600)
@given(st.data())
def test_every_round_has_exactly_one_outcome(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from((2, 4, 8)))
    bits = st.integers(0, 1)
    if data.draw(st.integers(0, 3)):
        inner = st.tuples(st.sampled_from((CORRECTION, CONTINUATION)), st.integers(1, size - 1))
        shapes = data.draw(st.lists(inner, max_size=4, unique=True))
        shapes += [(CONTINUATION, size)] * data.draw(bits)
    else:
        shapes = [(ANY_BONUS, depth) for depth in range(1, data.draw(st.integers(1, size)) + 1)]
    records = [
        record(kind, depth, data.draw(bits), *data.draw(st.lists(bits, max_size=size))) for kind, depth in shapes
    ]
    committed = data.draw(st.lists(bits, min_size=1, max_size=size))
    stopped = data.draw(st.integers(0, 5)) == 5
    hit = None if stopped else hit_branch(records, committed)
    name = name_outcome(BranchChoice(tuple(r.branch for r in records)), size, len(committed) - 1, hit, stopped)
    assert [name] == outcomes_that_apply(records, committed, stopped, size)
