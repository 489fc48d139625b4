"""Which branches ride along: the paper's table, the limits on it, and the quadratic layout."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recguide.branching import NOTHING, branching_rule
from recguide.config import RecGuideConfig
from recguide.structs import Branch, BranchChoice, BranchKind, Draft, DraftSource, Guess

B, EOS, FAR = 8, frozenset({2, 3}), 1000
CORRECTION, CONTINUATION = BranchKind.CORRECTION, BranchKind.CONTINUATION


def guess(token: int = 10, margin: float = 1.0, alternatives: tuple[int, ...] = (11, 12, 13)) -> Guess:
    return Guess(token, alternatives, margin, 0.0)


def draft(*risky: int, size: int = B, source: DraftSource = DraftSource.FORWARD, **at: Guess) -> Draft:
    """A draft that is sure of itself but at the positions `risky`; `p3=guess(...)` sets the guess at position 3."""
    guesses = [at.get(f"p{i}", guess(10 + i, 0.1 if i in risky else 0.9)) for i in range(1, size)]
    return Draft(tuple(guesses), source)


def choose(of: Draft, remaining: int = FAR, eos: frozenset[int] = EOS, **options: Any) -> BranchChoice:
    return branching_rule(RecGuideConfig(block_size=B, **options), eos).choose(0, of, remaining)


def correction(position: int, size: int = B, token: int = 11) -> Branch:
    return Branch(CORRECTION, position, size, token)


def continuation(size: int = B) -> Branch:
    return Branch(CONTINUATION, B, size)


@pytest.mark.parametrize(
    ("risky", "corrected", "continued"),
    [
        ((), (), True),
        ((4,), (4,), True),
        ((1,), (1,), True),
        ((7,), (7,), True),
        ((2, 5), (2, 5), True),
        ((2, 5, 6), (2, 5), False),
        ((1, 2, 3, 4, 5, 6, 7), (1, 2), False),
    ],
)
def test_the_paper_table(risky: tuple[int, ...], corrected: tuple[int, ...], continued: bool) -> None:
    chosen = choose(draft(*risky))
    assert chosen.risky == risky
    assert chosen.branches == (*(correction(p) for p in corrected), *([continuation()] if continued else []))


@pytest.mark.parametrize(("margin", "risky"), [(0.5, False), (0.4999, True), (0.5001, False)])
def test_risky_is_strictly_below_delta(margin: float, risky: bool) -> None:
    chosen = choose(draft(p3=guess(margin=margin)), delta=0.5)
    assert chosen.risky == ((3,) if risky else ())
    assert choose(draft(1, 2, 3), delta=0.0).risky == ()
    assert choose(draft(p3=guess(margin=1.0)), delta=1.0).risky == (1, 2, 4, 5, 6, 7)


@pytest.mark.parametrize("limit", [0, 1, 2])
@pytest.mark.parametrize("risky", [(), (4,), (2, 5), (2, 5, 6)])
def test_max_corrections(limit: int, risky: tuple[int, ...]) -> None:
    """The continuation depends on the count of risky positions, not on the count of corrections."""
    chosen = choose(draft(*risky), max_corrections=limit)
    expected = [correction(p) for p in risky[:limit]] + ([continuation()] if len(risky) <= 2 else [])
    assert chosen == BranchChoice(tuple(expected), risky)


def test_without_continuation() -> None:
    assert choose(draft(), continuation=False).branches == ()
    assert choose(draft(2, 5), continuation=False).branches == (correction(2), correction(5))


def test_an_eos_is_no_replacement_and_the_next_candidate_is_taken() -> None:
    doubtful = draft(p3=guess(margin=0.1, alternatives=(2, 3, 14)), p5=guess(margin=0.1, alternatives=(15, 2)))
    assert choose(doubtful).branches == (correction(3, token=14), correction(5, token=15), continuation())
    allowed = choose(doubtful, exclude_eos_replacement=False)
    assert allowed.branches == (correction(3, token=2), correction(5, token=15), continuation())


def test_a_position_without_a_replacement_stays_counted() -> None:
    """Its branch is not built and no later position takes its place."""
    chosen = choose(draft(5, 6, p3=guess(margin=0.1, alternatives=(2, 3))))
    assert chosen == BranchChoice((correction(5),), risky=(3, 5, 6))


@pytest.mark.parametrize(
    ("remaining", "branches"),
    [
        (3, ()),
        (4, (correction(2, size=2),)),
        (6, (correction(2, size=4),)),
        (7, (correction(2, size=5), correction(5, size=2))),
        (9, (correction(2, size=7), correction(5, size=4))),
        (10, (correction(2), correction(5, size=5), continuation(size=2))),
        (16, (correction(2), correction(5), continuation())),
    ],
)
def test_a_branch_needs_two_more_tokens_to_write(remaining: int, branches: tuple[Branch, ...]) -> None:
    """Beyond its depth: one would be the seed's successor, which a plain verification gives anyway."""
    assert choose(draft(2, 5), remaining) == BranchChoice(branches, risky=(2, 5))


@pytest.mark.parametrize(
    ("risky", "corrected"), [((), ()), ((2,), (2,)), ((4,), (4,)), ((5,), ()), ((2, 6), (2,)), ((5, 6), ())]
)
def test_nothing_follows_a_drafted_eos(risky: tuple[int, ...], corrected: tuple[int, ...]) -> None:
    """EOS drafted at 4: a correction at 4 supposes another token there; whatever is later supposes the EOS."""
    margin = 0.1 if 4 in risky else 0.9
    assert choose(draft(*risky, p4=guess(3, margin))) == BranchChoice(tuple(map(correction, corrected)), risky)
    assert continuation() in choose(draft(*risky, p4=guess(3, margin)), eos=frozenset()).branches


def test_without_reuse_a_branch_draft_carries_no_branches() -> None:
    from_branch, from_forward = draft(2, source=DraftSource.BRANCH), draft(2)
    assert choose(from_branch).branches == (correction(2), continuation())
    assert choose(from_branch, reuse=False) == BranchChoice((), risky=(2,))
    assert choose(from_forward, reuse=False).branches == (correction(2), continuation())


def test_a_block_of_one_has_no_branches() -> None:
    assert choose(Draft()) == NOTHING


@pytest.mark.parametrize("strategy", ["ar", "linear"])
def test_plain_strategies_build_nothing(strategy: str) -> None:
    assert choose(draft(2, 5), strategy=strategy) == NOTHING


@pytest.mark.parametrize(
    ("size", "remaining", "sizes"),
    [
        (B, FAR, [B] * B),
        (B, 10, [8, 8, 7, 6, 5, 4, 3, 2]),
        (B, B, [7, 6, 5, 4, 3, 2]),
        (4, 4, [3, 2]),
        (2, 2, []),
        (1, FAR, []),
    ],
)
def test_quadratic_prepares_every_depth_after_which_there_is_something_to_draft(
    size: int, remaining: int, sizes: list[int]
) -> None:
    chosen = choose(draft(2, size=size), remaining, strategy="quadratic")
    expected = (Branch(BranchKind.ANY_BONUS, depth, n) for depth, n in enumerate(sizes, start=1))
    assert chosen.branches == tuple(expected)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1), st.lists(st.integers(0, 9), max_size=3)), max_size=7),
    st.integers(1, 30),
    st.floats(0, 1),
    st.integers(0, 2),
)
def test_no_branch_is_useless(guesses: list[Any], remaining: int, delta: float, limit: int) -> None:
    """Whatever the draft: at most `limit` corrections, all risky, ascending, replacing by another token than EOS."""
    block = Draft(
        tuple(guess(token, margin, tuple(a for a in others if a != token)) for token, margin, others in guesses)
    )
    chosen = choose(block, remaining, delta=delta, max_corrections=limit)
    corrections = [branch for branch in chosen.branches if branch.kind is CORRECTION]
    depths = [branch.depth for branch in chosen.branches]
    assert len(corrections) <= limit
    assert depths == sorted(set(depths))
    assert chosen.risky == tuple(i for i, g in enumerate(block.guesses, 1) if g.probability < delta)
    for branch in chosen.branches:
        assert 2 <= branch.block_size == min(len(block.guesses) + 1, remaining - branch.depth)
        assert not any(g.token in EOS for g in block.guesses[: branch.depth - 1])
        if branch.kind is CORRECTION:
            assert branch.depth in chosen.risky
            assert branch.replacement not in {*EOS, block.guesses[branch.depth - 1].token, None}
        else:
            assert branch.depth == len(block.guesses) + 1
            assert len(chosen.risky) <= 2
