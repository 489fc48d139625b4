"""V_B from recorded rounds, against counting by hand and against a known law."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from recguide import CalibrationError, RoundRecord
from recguide.calibration import Fingerprint
from recguide.fitting import LEAST_ROUNDS, fit_progress
from recguide.structs import Draft, Guess, Outcome

HERE = Fingerprint("0123", "float32", "cpu", "torch_sdpa", True)
DRAFT = Draft(tuple(Guess(7, (), 1.0, 0.0) for _ in range(31)))


def a_round(committed: int, entropy: float, outcome: Outcome = Outcome.PLAIN) -> RoundRecord:
    tokens = (7,) * committed
    return RoundRecord(0, 0, 0, 7, DRAFT, (), (), committed - 1, tokens, outcome, None, 32, (entropy,) * committed)


def test_constant_rounds() -> None:
    table = fit_progress([[a_round(12, 0.5) for _ in range(30)] for _ in range(5)], HERE)
    for last, full in ((8, True), (16, False), (32, False)):
        expected = table.expected(-0.5, last, full)
        assert [expected[size] for size in (1, 8, 12, 16, 32)] == [1, 8, 12, 12, 12]
    assert set(table.strata) == {"all", "8 full", "16 partial", "32 partial"}
    assert table.quality["rounds"] == 5 * 29 * 3
    assert table.quality["16"] == {"mean": 12, "bias": 0, "explained": 0}


def test_the_end_of_a_text_and_short_blocks_are_left_out() -> None:
    rounds = [a_round(12, 0.5) for _ in range(20)]
    ended = [*rounds, a_round(2, 0.5, Outcome.STOPPED)]
    assert fit_progress([ended] * 5, HERE).strata == fit_progress([rounds] * 5, HERE).strata


def test_it_learns_what_certainty_says() -> None:
    """Sure rounds commit 32, unsure ones 4, as the last one foretells; bins are monotone and survival falls."""
    rng = Random(0)
    prompts = []
    for _ in range(40):
        sure, rounds = True, []
        for _ in range(30):
            rounds.append(a_round(32 if sure else rng.randint(1, 7), 0.01 if sure else 1.0))
            sure = rng.random() < (0.9 if sure else 0.1)
        prompts.append(rounds)
    table = fit_progress(prompts, HERE)
    after_sure, after_unsure = table.expected(-0.01, 32, True), table.expected(-1.0, 32, False)
    assert after_sure[32] == pytest.approx(0.9 * 32 + 0.1 * 4, rel=0.1)
    assert after_unsure[32] == pytest.approx(0.1 * 32 + 0.9 * 4, rel=0.2)
    assert table.quality["32"]["explained"] > 0.4
    for stratum in table.strata.values():
        assert all(count > 0 for count in stratum.counts)
        assert len(stratum.counts) == len(stratum.survival) == len(stratum.edges) + 1
        for low, high in pairwise(stratum.survival):
            assert all(a <= b + 1e-12 for a, b in zip(low, high, strict=True))
        for odds in stratum.survival:
            assert odds[0] == 1
            assert all(a >= b for a, b in pairwise(odds))


def test_entropies_are_cut_to_the_block_and_to_the_cap() -> None:
    """After 8 sure positions the rest is unsure: a policy that had asked for 8 saw none of that."""

    def uneven() -> RoundRecord:
        entropies = (0.0,) * 8 + (3.0,) * 12
        return RoundRecord(0, 0, 0, 7, DRAFT, (), (), 19, (7,) * 20, Outcome.PLAIN, None, 32, entropies)

    prompts = [[uneven() for _ in range(30)] for _ in range(5)]
    table = fit_progress(prompts, HERE)
    assert table.strata["8 full"].bin_of(-0.0) == len(table.strata["8 full"].counts) - 1
    capped = fit_progress(prompts, HERE, entropy_cap=7)
    assert capped.entropy_cap == 7
    assert capped.uncertainty((0.0,) * 7 + (9.0,)) == 0.0


def test_too_few_rounds() -> None:
    with pytest.raises(CalibrationError, match="too few"):
        fit_progress([[a_round(5, 0.1)] * 3], HERE)
    assert LEAST_ROUNDS == 40


# --- under a policy ---


def met_round(committed: int, block: int, entropy: float = 0.25) -> RoundRecord:
    """A round of this block: cut to it if more would have been committed."""
    tokens = (7,) * min(committed, block)
    draft = Draft(DRAFT.guesses[: block - 1])
    return RoundRecord(
        0, 0, 0, 7, draft, (), (), len(tokens) - 1, tokens, Outcome.PLAIN, None, block, (entropy,) * len(tokens)
    )


def geometric(rng: Random, step: float) -> int:
    committed = 1
    while committed < 32 and rng.random() < step:
        committed += 1
    return committed


def tokens_of(step: float, block: int) -> float:
    """Mean tokens of a block if each is followed by another with these odds."""
    return sum(step**k for k in range(block))


def test_blocks_that_were_accepted_whole_say_only_so_much_at_least() -> None:
    """The law is known; the first table is of another law, and the blocks under the policy are of all sizes at random."""
    rng = Random(1)
    first = [[a_round(geometric(rng, 0.7), 0.25) for _ in range(30)] for _ in range(10)]
    met = [[met_round(geometric(rng, 0.93), rng.choice((8, 16, 32))) for _ in range(60)] for _ in range(50)]
    table = fit_progress(first, HERE, met=met)
    (expected,) = table.strata["all"].expected
    for block in (8, 16, 32):
        assert expected[block] == pytest.approx(tokens_of(0.93, block), rel=0.04)
    assert table.strata["all"].counts == (50 * 59,)
    quality = table.quality["on_policy"]
    assert quality["rounds"] == 50 * 59
    assert quality["before"]["bias"] < -2
    assert abs(quality["after"]["bias"]) < -quality["before"]["bias"] / 8
    assert quality["after"]["explained"] > quality["before"]["explained"]


def test_what_no_block_was_long_enough_for_stays_as_it_was_known() -> None:
    rng = Random(2)
    first = [[a_round(geometric(rng, 0.8), 0.25) for _ in range(40)] for _ in range(50)]
    met = [[met_round(geometric(rng, 0.95), 8) for _ in range(50)] for _ in range(50)]
    (expected,) = fit_progress(first, HERE, met=met).strata["all"].expected
    assert expected[8] == pytest.approx(tokens_of(0.95, 8), rel=0.03)
    # What a block of 8 passes on goes on as in the first table.
    beyond = 0.95**7 * 0.8 * tokens_of(0.8, 24)
    assert expected[32] - expected[8] == pytest.approx(beyond, rel=0.15)


def test_certainties_that_the_policy_did_not_meet_stay_as_they_were_known() -> None:
    rng = Random(4)
    first = [
        [
            a_round(geometric(rng, 0.9), 0.25) if rng.random() < 0.5 else a_round(1 + rng.randrange(3), 2.0)
            for _ in range(40)
        ]
        for _ in range(20)
    ]
    met = [[met_round(geometric(rng, 0.95), 16) for _ in range(30)] for _ in range(20)]
    before, after = fit_progress(first, HERE).strata["all"], fit_progress(first, HERE, met=met).strata["all"]
    assert after.edges == before.edges
    unsure, sure = before.bin_of(-2.0), before.bin_of(-0.25)
    assert after.expected[unsure] == pytest.approx(before.expected[unsure])
    assert after.expected[sure][16] == pytest.approx(tokens_of(0.95, 16), rel=0.03)
    assert after.counts[sure] == 20 * 29


def test_histories_are_those_that_the_policy_met() -> None:
    first = [[a_round(12, 0.5) for _ in range(30)] for _ in range(5)]
    met = [[met_round(12, size, 0.25) for _ in range(15) for size in (8, 32)] for _ in range(5)]
    strata = fit_progress(first, HERE, met=met).strata
    assert sum(strata["8 full"].counts) == 5 * 15
    assert sum(strata["32 partial"].counts) == 5 * 14
    assert sum(strata["16 partial"].counts) == 5 * 29, "not met, so as it was"
    with pytest.raises(CalibrationError, match="too few"):
        fit_progress(first, HERE, met=met[:1])


# --- what drafts say, and what cutting does ---


def test_the_odds_of_acceptance_are_judged_on_prompts_left_out() -> None:
    """Drafts say 0.9 where 0.6 are accepted: calibrated odds are right all the same."""
    rng = Random(3)
    draft = Draft(tuple(Guess(7, (8,), 0.9, 0.1) for _ in range(31)))

    def one() -> RoundRecord:
        committed = geometric(rng, 0.6)
        tokens = (7,) * (committed - 1) + (8,)
        return RoundRecord(
            0, 0, 0, 7, draft, (), (), committed - 1, tokens, Outcome.PLAIN, None, 32, (0.5,) * committed
        )

    quality = fit_progress([[one() for _ in range(40)] for _ in range(25)], HERE).quality["acceptance"]
    assert quality["calibration_error"] < 0.01
    assert sum(count for _, _, count in quality["curve"]) == 25 * 40 * 31
    for predicted, observed, count in quality["curve"]:
        assert predicted == pytest.approx(observed, abs=3 * (0.25 / count) ** 0.5 + 0.02)
    # A table of raw probabilities, as without rejections to learn from, is far off and says so.
    few = fit_progress([[a_round(12, 0.5) for _ in range(20)] for _ in range(5)], HERE).quality["acceptance"]
    assert few["calibration_error"] == pytest.approx(20 / 31)
    assert few["brier"] == pytest.approx(20 / 31)


def test_what_cutting_does_is_measured_where_both_were_run() -> None:
    def at(position: int, committed: int, block: int) -> RoundRecord:
        return replace(met_round(committed, block), position=position)

    prompts = [[at(i, 20 if i % 2 else 4, 32) for i in range(30)] for _ in range(2)]
    shadowed = [[at(1, 7, 8), at(1, 14, 16), at(2, 6, 8), at(2, 4, 16)], []]
    quality = fit_progress(prompts, HERE, shadowed=shadowed, folds=2).quality["shadow"]
    assert quality["8"] == {"rounds": 2, "truncated": 6.0, "true": 6.5, "standard_error": pytest.approx(1.5 / 2**0.5)}
    assert quality["16"] == {"rounds": 2, "truncated": 10.0, "true": 9.0, "standard_error": pytest.approx(1 / 2**0.5)}
    assert "shadow" not in fit_progress(prompts, HERE, folds=2).quality
