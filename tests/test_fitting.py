"""V_B from recorded rounds, against counting by hand and against a known law."""

from __future__ import annotations

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
