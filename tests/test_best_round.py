"""The best round: its value by a slow evaluation of the same objective, and what no round may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recguide.calibration import BLOCK_SIZES
from recguide.policy.best_round import ENDS, MARGIN, MOST_BRANCHES, TOKENS, Odds, Situation, best_round
from recguide.structs import Branch, BranchChoice, BranchKind, Guess

CORRECTION, CONTINUATION = BranchKind.CORRECTION, BranchKind.CONTINUATION
EOS = 9
NEARLY = 1e-9
USUAL = Odds(continuation=0.95, redrafted=0.7, foretold=0.7, leftover=0.8, promise=1.0)


def situation(
    acceptance: Sequence[float],
    price: float = 0.1,
    quality: float = 0.86,
    costs: tuple[float, float] = (10, 0.1),
    remaining: int = 100,
    ends: bool = False,
    replaced: tuple[float, float] = (0.5, 0.1),
) -> Situation:
    """
    A request whose next drafts are right token by token with odds `quality`.

    A forward costs the first of `costs`, and the second for each token. `ends`: the last guess is an EOS. `replaced`: the odds of a
    rejected guess's second and third choice.
    """
    guesses = [Guess(10 + i, (50 + i, EOS if i % 2 else 90 + i), 0.9, 0.05) for i in range(len(acceptance))]
    if ends and guesses:
        guesses[-1] = replace(guesses[-1], token=EOS)
    fixed, each = costs
    return Situation(
        guesses=guesses,
        acceptance=acceptance,
        eos=frozenset({EOS}),
        remaining=remaining,
        expected=tuple(sum(quality**i for i in range(size)) for size in range(33)),
        ms=[fixed + each * tokens for tokens in range(TOKENS + 1)],
        price=price,
        replacement=lambda rank, guess: replaced[rank],
    )


def tokens_of(choice: BranchChoice) -> int:
    assert choice.verified is not None
    return choice.verified + sum(branch.block_size for branch in choice.branches)


ONE_LENGTH = 0.5
"""Tokens that may be lost because only one length is considered at each depth; of 6,000 random situations 3 lost more than nothing."""


# --- the objective, evaluated slowly ---


def slow_value(at: Situation, odds: Odds, verified: int, branches: Sequence[Branch] = ()) -> float:
    """What a round is worth: the tokens that it brings, less its price, and after each of its ends what is verified next."""
    brought = sum(prod(at.acceptance[:i]) for i in range(verified))
    spent = at.price * at.ms[verified + sum(branch.block_size for branch in branches)]
    next_round = 0.0
    for c in range(1, verified + 1):
        worths = [branch_worth(at, odds, verified, branch, c) for branch in branches]
        next_round += end_odds(at, verified, c) * max(leftover_worth(at, odds, verified, c), *worths, 0.0)
    return brought - spent + next_round


def end_odds(at: Situation, verified: int, c: int) -> float:
    """That just `c` tokens are committed, and the text goes on."""
    if c < verified:
        return prod(at.acceptance[: c - 1]) * (1 - at.acceptance[c - 1])
    if c > len(at.guesses) > 0 and at.guesses[-1].token in at.eos:
        return 0.0
    return prod(at.acceptance[: c - 1])


def draft_worth(at: Situation, accepted: float, guesses: int) -> float:
    """A draft is verified somewhat further than it is expected to be right; its tokens cost then what they cost now."""
    each = at.price * (at.ms[17] - at.ms[1]) / 16
    return max(0.0, accepted - each * min(guesses, accepted + MARGIN))


def leftover_worth(at: Situation, odds: Odds, verified: int, c: int) -> float:
    """What the old draft says after its `c`-th token; where that was wrong, the next is right less often."""
    rest = at.acceptance[c:]
    if not rest:
        return 0.0
    right = sum(prod(rest[:k]) for k in range(1, len(rest) + 1))
    wrong = 1.0 if c < verified else 1 - at.acceptance[c - 1]
    return draft_worth(at, wrong * odds.leftover * right + (1 - wrong) * right, len(rest))


def branch_worth(at: Situation, odds: Odds, verified: int, branch: Branch, c: int) -> float:
    """A branch where `c` tokens are committed, by the odds that it foretold them; a shortened one is worth a share."""
    used = c - branch.depth
    if not 0 <= used <= branch.block_size - 2:
        return 0.0
    if branch.kind is CORRECTION:
        guess = at.guesses[branch.depth - 1]
        right = 0.0 if used else at.replacement(guess.alternatives.index(branch.replacement or 0), guess)
    elif used:
        right = odds.foretold
    else:
        right = odds.continuation if branch.depth == verified else odds.redrafted
    size = next(size for size in BLOCK_SIZES if size >= branch.block_size)
    reached = [after - before for before, after in pairwise(at.expected)]
    accepted = odds.promise * sum(reached[used + 1 : size]) / reached[used]
    return branch.block_size / size * right * draft_worth(at, accepted, size - 1 - used)


def candidates(at: Situation, verified: int) -> list[Branch]:
    """All branches at the likeliest ends."""
    found = []
    ends = range(1, verified + 1)
    for depth in ends:
        rank = sum(end_odds(at, verified, c) > end_odds(at, verified, depth) - NEARLY for c in ends)
        if rank > ENDS or not end_odds(at, verified, depth):
            continue
        for size in {min(size, at.remaining - depth) for size in BLOCK_SIZES}:
            found.append(Branch(CONTINUATION, depth, size))
            if depth < verified:
                tokens = [token for token in at.guesses[depth - 1].alternatives if token not in at.eos]
                found += [Branch(CORRECTION, depth, size, token) for token in tokens]
    return found


def clearly_best(values: Sequence[float]) -> list[int]:
    """Where the highest stands, counted from 1; nowhere if another comes near it."""
    return [v for v, value in enumerate(values, start=1) if value >= max(values) - NEARLY][:2]


def twentieths(least: int = 0) -> st.SearchStrategy[float]:
    return st.integers(least, 20).map(lambda n: n / 20)


# Room for all of a branch, or for just the longest ones shortened.
FIELDS = st.fixed_dictionaries(
    {
        "acceptance": st.lists(st.integers(1, 99).map(lambda n: n / 100), max_size=5),
        "price": st.sampled_from((0.0, 0.01, 0.1, 0.3, 1.0)),
        "quality": st.sampled_from((0.3, 0.6, 0.86, 0.95)),
        "costs": st.tuples(st.integers(1, 20), st.sampled_from((0.01, 0.1, 0.3, 1.0, 3.0))),
        "remaining": st.sampled_from((24, 27, 60)),
        "ends": st.booleans(),
        "replaced": st.tuples(twentieths(), twentieths()),
    }
)
ODDS = st.builds(Odds, twentieths(), twentieths(), twentieths(), twentieths(), st.sampled_from((0.5, 1.0, 1.3)))
examples = settings(max_examples=250)


def test_the_slow_evaluation_by_hand() -> None:
    at = situation([0.5, 0.8], price=0.1, quality=0.5, costs=(10, 1))
    odds = Odds(continuation=0.9, redrafted=0.6, foretold=0.7, leftover=0.5, promise=1.0)
    # Left after the first: 0.8 of a token once in two if it was wrong; a token to verify costs 0.1, and there is one.
    assert slow_value(at, odds, 1) == pytest.approx(1 - 1.1 + (0.5 * 0.8 + 0.5 * 0.4 - 0.1))
    assert slow_value(at, odds, 2) == pytest.approx(1.5 - 1.2 + 0.5 * (0.4 - 0.1))
    assert slow_value(at, odds, 3) == pytest.approx(1.9 - 1.3 + 0.5 * (0.4 - 0.1))
    # A block of 8 commits the seed's token and nearly one more; four of its tokens are verified for that.
    worth = 127 / 128 - 0.1 * (127 / 128 + MARGIN)
    last = slow_value(at, odds, 3, [Branch(CONTINUATION, 3, 8)])
    assert last == pytest.approx(1.9 - 2.1 + 0.5 * 0.3 + 0.4 * 0.9 * worth)
    # At the first end it was redrafted, at the third it foretold two tokens.
    inner = slow_value(at, odds, 3, [Branch(CONTINUATION, 1, 8)])
    later = [63 / 64 - 0.1 * (63 / 64 + MARGIN), 31 / 32 - 0.1 * (31 / 32 + MARGIN)]
    assert inner == pytest.approx(1.9 - 2.1 + 0.5 * 0.6 * worth + 0.1 * 0.7 * later[0] + 0.4 * 0.7 * later[1])


@examples
@given(FIELDS, ODDS)
def test_no_round_without_branches_is_worth_more(fields: dict[str, Any], odds: Odds) -> None:
    """Plain decoding and verifying everything among them."""
    at = situation(**fields)
    choice = best_round(at, odds)
    value = slow_value(at, odds, choice.verified or 0, choice.branches)
    for verified in range(1, len(at.guesses) + 2):
        assert value >= slow_value(at, odds, verified) - NEARLY


@examples
@given(FIELDS, ODDS)
def test_nor_one_with_a_single_branch(fields: dict[str, Any], odds: Odds) -> None:
    """For what is best verified by itself, and with the rest of the draft kept for the next round."""
    at = situation(**fields)
    choice = best_round(at, odds)
    value = slow_value(at, odds, choice.verified or 0, choice.branches)
    lengths = range(1, len(at.guesses) + 2)
    no_rest = [sum(prod(at.acceptance[:i]) for i in range(v)) - at.price * at.ms[v] for v in lengths]
    for best in (clearly_best(no_rest), clearly_best([slow_value(at, odds, v) for v in lengths])):
        if len(best) == 1:
            for branch in candidates(at, best[0]):
                assert value >= slow_value(at, odds, best[0], [branch]) - ONE_LENGTH


@examples
@given(FIELDS, ODDS)
def test_no_branch_more_would_be_worth_it_nor_one_less(fields: dict[str, Any], odds: Odds) -> None:
    at = situation(**fields)
    choice = best_round(at, odds)
    verified, branches = choice.verified or 0, choice.branches
    value = slow_value(at, odds, verified, branches)
    if len(branches) < MOST_BRANCHES:
        for branch in candidates(at, verified):
            if tokens_of(choice) + branch.block_size <= TOKENS:
                assert value >= slow_value(at, odds, verified, [*branches, branch]) - ONE_LENGTH
    # Of three that were taken one by one, the first may be left with little to add.
    if len(branches) <= 2:
        for branch in branches:
            assert value >= slow_value(at, odds, verified, [b for b in branches if b is not branch]) - NEARLY


# --- what holds for every round ---


@examples
@given(
    acceptance=st.lists(twentieths(), max_size=31),
    steps=st.lists(st.sampled_from((0.0, 0.01, 0.1, 5.0)), min_size=9, max_size=9),
    odds=ODDS,
    data=st.data(),
)
def test_every_round_can_be_run(acceptance: list[float], steps: list[float], odds: Odds, data: st.DataObject) -> None:
    count = len(acceptance)
    remaining = count + 1 + data.draw(st.sampled_from((0, 1, 2, 5, 9, 20, 100)))
    at = situation(
        acceptance,
        price=data.draw(st.sampled_from((0.0, 0.001, 0.01, 0.1))),
        quality=data.draw(st.sampled_from((0.3, 0.86, 0.99))),
        remaining=remaining,
        ends=data.draw(st.booleans()),
        replaced=(data.draw(twentieths()), data.draw(twentieths())),
    )
    at = replace(at, ms=list(accumulate((steps[tokens // 16] for tokens in range(TOKENS)), initial=10.0)))
    choice = best_round(at, odds)
    assert choice.verified is not None
    assert 1 <= choice.verified <= count + 1
    assert tokens_of(choice) <= TOKENS
    assert len(choice.branches) <= MOST_BRANCHES
    ended = at.guesses[-1:] and at.guesses[-1].token == EOS
    for branch in choice.branches:
        assert 1 <= branch.depth <= choice.verified
        assert not ended or branch.depth <= count, "nothing follows an EOS"
        assert 2 <= branch.block_size <= min(remaining - branch.depth, BLOCK_SIZES[-1])
        if branch.kind is CORRECTION:
            assert branch.depth < choice.verified
            assert branch.replacement in at.guesses[branch.depth - 1].alternatives
            assert branch.replacement != EOS
        else:
            assert branch.kind is CONTINUATION
            assert branch.replacement is None


# --- by example ---


def test_a_useless_draft_of_dear_tokens_is_left_alone() -> None:
    at = situation([0.05] * 5, quality=0.3, costs=(1, 5))
    assert best_round(at, USUAL) == BranchChoice(verified=1, leftovers=True)


def test_a_good_draft_of_cheap_tokens_is_verified_and_continued() -> None:
    choice = best_round(situation([0.99] * 15, costs=(10, 0.001)), USUAL)
    assert choice.verified == 16
    assert any(branch.kind is CONTINUATION and branch.depth == 16 for branch in choice.branches)


DOUBTFUL_SIXTH = [0.99] * 5 + [0.5] + [0.99] * 9


def test_a_doubtful_token_is_prepared_for_where_it_stands() -> None:
    cheap = situation(DOUBTFUL_SIXTH, costs=(10, 0.001), replaced=(0.6, 0.05))
    corrected = best_round(cheap, replace(USUAL, redrafted=0.5, foretold=0.0, leftover=0.0)).branches
    assert (CORRECTION, 6, 55) in {(branch.kind, branch.depth, branch.replacement) for branch in corrected}
    redrafted = best_round(cheap, replace(USUAL, redrafted=0.7, foretold=0.0, leftover=0.0)).branches
    assert CORRECTION not in {branch.kind for branch in redrafted}, "what is drafted anew is right there more often"
    assert 6 in {branch.depth for branch in redrafted}


def test_what_is_left_of_a_draft_saves_a_branch() -> None:
    at = situation(DOUBTFUL_SIXTH, quality=0.7)
    lost, kept = (best_round(at, replace(USUAL, foretold=0.0, leftover=leftover)) for leftover in (0.0, 1.0))
    assert 6 in {branch.depth for branch in lost.branches}
    assert 6 not in {branch.depth for branch in kept.branches}


def test_the_dearer_a_millisecond_the_fewer_tokens() -> None:
    acceptance = [0.95, 0.9, 0.9, 0.8, 0.7, 0.9, 0.5, 0.6, 0.8, 0.7]
    tokens = [tokens_of(best_round(situation(acceptance, price=0.01 * 2**i), USUAL)) for i in range(14)]
    assert tokens == sorted(tokens, reverse=True)
    assert tokens[0] > 40
    assert tokens[-1] == 1


def test_at_the_end_of_a_text_nothing_is_drafted() -> None:
    for remaining, drafted in ((16, False), (17, False), (60, True)):
        choice = best_round(situation([0.99] * 15, costs=(10, 0.001), remaining=remaining), USUAL)
        assert any(branch.depth == 16 for branch in choice.branches) == drafted
    ended = best_round(situation([0.99] * 15, costs=(10, 0.001), ends=True), USUAL)
    assert ended.verified == 16
    assert not any(branch.depth == 16 for branch in ended.branches)
