"""A rule that is wrong costs little, for how long it may be wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recguide.policy.guard import FORWARDS, RULE, SLACK, TRIAL, Guard


def serve(rounds: int, achieved: dict[int, float], promised: dict[int, float], seed: int | None = None) -> list[int]:
    """The mode of each round, each taking 10 ms, where modes achieve and promise so many tokens a millisecond."""
    guard, modes = Guard(), []
    noise = np.random.default_rng(seed).uniform(0.5, 1.5, rounds) if seed is not None else np.ones(rounds)
    for factor in noise:
        modes.append(guard.mode)
        guard.observe(guard.mode, True, 10 * achieved[guard.mode] * factor, 10, promised)
    return modes


def test_a_rule_that_achieves_what_others_promise_is_left_alone() -> None:
    modes = serve(5000, {RULE: 1.0, 16: 1.0}, {1: 0.3, 8: 0.9, 16: 1.0}, seed=0)
    assert modes.count(RULE) >= 0.9 * len(modes), "single trials may look bad by chance"


def test_a_rule_that_loses_for_good_costs_a_logarithm() -> None:
    modes = serve(100_000, {RULE: 0.5, 1: 1.0}, {1: 1.0, 8: 0.4}, seed=1)
    in_rule = modes.count(RULE)
    assert in_rule <= TRIAL * (2 + math.log2(100_000 / TRIAL))
    assert set(modes) == {RULE, 1}


def test_who_does_not_keep_its_promise_goes_after_one_trial() -> None:
    modes = serve(10 * TRIAL, {RULE: 0.5, 16: 0.1}, {1: 0.2, 16: 1.0})
    assert modes[TRIAL : 2 * TRIAL] == [16] * TRIAL
    assert modes[2 * TRIAL] == RULE


def test_a_rule_that_has_got_better_comes_back() -> None:
    guard = Guard()
    for _ in range(TRIAL):
        guard.observe(guard.mode, True, 1, 10, {1: 1.0})
    assert guard.mode == 1
    modes = []
    for _ in range(10 * TRIAL):
        modes.append(guard.mode)
        guard.observe(guard.mode, True, 10 if guard.mode == 1 else 20, 10, {1: 1.0})
    assert modes[:TRIAL] == [1] * TRIAL
    assert set(modes[TRIAL:]) == {RULE}


@given(
    st.dictionaries(st.sampled_from((1, 8, 16, 32)), st.floats(0.1, 1.0), min_size=1),
    st.floats(0.1, 1.0),
)
def test_promises_that_are_kept_bound_the_regret(rates: dict[int, float], rule: float) -> None:
    rounds = 64 * TRIAL
    modes = serve(rounds, rates | {RULE: rule}, rates)
    achieved = sum((rates | {RULE: rule})[mode] for mode in modes) / rounds
    best = max(rule, *rates.values())
    trials = 2 + math.log2(rounds / TRIAL)
    assert achieved >= SLACK * best * (1 - trials * TRIAL / rounds)


@pytest.mark.parametrize("wrong", [1, 8])
def test_one_bad_trial_is_no_sentence(wrong: int) -> None:
    """Hard texts for one trial: the rule is back after another."""
    guard, modes = Guard(), []
    for number in range(20 * TRIAL):
        modes.append(guard.mode)
        hard = number < TRIAL
        guard.observe(guard.mode, True, 2 if hard else 10, 10, {wrong: 0.9})
    assert modes.count(RULE) >= 17 * TRIAL


def test_a_round_of_another_mode_says_nothing_and_a_trial_has_several_forwards() -> None:
    guard = Guard()
    for _ in range(10 * TRIAL):
        guard.observe(8, True, 1, 10, {1: 1.0})
    assert guard.mode == RULE, "these were chosen in the mode of 8"
    for number in range(FORWARDS * TRIAL):
        assert guard.mode == RULE, number
        # Requests of one forward.
        guard.observe(RULE, number % TRIAL == TRIAL - 1, 1, 10, {1: 1.0})
    assert guard.mode == 1
