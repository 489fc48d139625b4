"""What a new draft may be expected to commit, by its length: from a calibration, or learned from drafts while serving."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol

from ..calibration import ALL, LARGEST_BLOCK, ProgressTable
from .history import History
from .price import Ratio, learned

PRIOR_ACCEPTANCE = 0.86
"""Of each drafted token: blocks of 8, 16 and 32 commit 5.0, 6.5 and 7.1 tokens then, in the range of Table 2 of arXiv 2609.34388."""
FEW, MANY = 4, 10
"""Tokens that a request committed with its last block: up to the first are few, unless that was all of it, beyond the second many."""

Expected = tuple[float, ...]
"""`[33]`: committed tokens, by the draft's length, the seed included."""


class Prospects(Protocol):
    """Expectations for requests."""

    @property
    def mean(self) -> Expected:
        """Of any request."""

    def of(self, history: History) -> Expected:
        """Of one whose last rounds are known."""

    def learn(self, history: History, acceptance: Sequence[float]) -> None:
        """A new draft says that its tokens have these odds, each given that all before it are right."""


class CalibratedProspects:
    """The paper's V_B(s, z)."""

    def __init__(self, progress: ProgressTable) -> None:
        self._progress = progress
        rounds = progress.strata[ALL]
        total = sum(rounds.counts)
        self.mean = tuple(
            sum(n * row[size] for n, row in zip(rounds.counts, rounds.expected, strict=True)) / total
            for size in range(LARGEST_BLOCK + 1)
        )

    def of(self, history: History) -> Expected:
        if history.certainty is None:
            return self.mean
        return self._progress.expected(history.certainty, history.last_block, history.was_full)

    def learn(self, history: History, acceptance: Sequence[float]) -> None:
        """A calibration stays as it is."""


class LearnedProspects:
    """
    Odds of each further token, for requests whose last block committed few, some, or many.

    From what new drafts say themselves: outcomes only show what was worth verifying, which are the better drafts.
    """

    def __init__(self) -> None:
        self._steps = [[learned(PRIOR_ACCEPTANCE) for _ in range(LARGEST_BLOCK - 1)] for _ in range(3)]
        self._expected = [_expected(steps) for steps in self._steps]

    @property
    def mean(self) -> Expected:
        return self._expected[1]

    def of(self, history: History) -> Expected:
        return self._expected[_kind(history)]

    def learn(self, history: History, acceptance: Sequence[float]) -> None:
        kind, survival = _kind(history), 1.0
        for step, odds in zip(self._steps[kind], acceptance, strict=False):
            step.observe(survival * odds, survival)
            survival *= odds
        self._expected[kind] = _expected(self._steps[kind])


def _kind(history: History) -> int:
    last = history.last_committed
    if last is None:
        return 1
    return 2 if history.was_full or last > MANY else int(last > FEW)


def _expected(steps: Sequence[Ratio]) -> Expected:
    survival = accumulate((min(step.value, 1.0) for step in steps), mul, initial=1.0)
    return (0.0, *accumulate(survival))
