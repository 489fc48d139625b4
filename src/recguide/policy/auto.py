"""One rule for every load: whatever a round may do is priced in the same currency.

A committed token is worth 1. A millisecond costs the rate at which the request commits tokens anyway, since that is what it would bring
otherwise: the rate that all achieve ([`Price`]), higher or lower as its own last rounds foretell. A request must cross the hard
stretches of its text whatever they cost, so there a millisecond is worth less. How much of a block is verified, which branches ride
along and how long they are: each is taken as far as it is expected to bring more than it costs. Spare compute at low load lets
branches ride along; a busy machine shortens them, down to plain decoding; no threshold lies between.

There are no draft forwards. A request without a draft verifies its seed alone, which commits a token, and a continuation branch
drafts beside it what may follow. Where that branch's first prediction is the committed token the draft is as good as one made
in a forward of its own; where it is not, a forward was spent and not two. And in a batch nobody waits for a draft forward of others.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate

from ..calibration import ALL, BLOCK_SIZES, LARGEST_BLOCK, CostProfile, DraftOdds, ProgressTable
from ..structs import (
    Branch,
    BranchChoice,
    BranchKind,
    Draft,
    DraftSource,
    ForwardRecord,
    Guess,
    Outcome,
    RoundRecord,
)
from .base import BlockPolicy
from .best_round import TOKENS, Odds, Situation, best_round
from .forward_times import ForwardTimes
from .guard import RULE, Guard
from .history import History
from .price import Ratio

PRIOR_ACCEPTANCE = 0.86
"""Of each drafted token, without a calibration: blocks commit 5.0, 6.5 and 7.1 tokens then, as in Table 2 of arXiv 2609.34388, on the careful side."""
PRIOR_ROUNDS = 10
"""Weight of what is assumed against what is seen."""
MEMORY = 64
"""Rounds after which a past one counts 1/e in what is learned of drafts."""
LOCALITY = 0.25
"""How far a request's own prospects move the price of its milliseconds; see [`Auto._price_for`]."""
EXPLORE = 32
"""Of so many rounds that would draft nothing, one does, so that drafts are never given up on early figures."""


@dataclass
class _History(History):
    leftover_odds: float | None = None
    """That the first token of its draft is right, by its probability; `None` where the draft is no leftover."""


class Auto(BlockPolicy):
    """
    Decides everything about a request's rounds; see the module.

    Args:
        progress (`ProgressTable`, *optional*): what blocks are expected to commit, and what drafts say of their verification.
        profile (`CostProfile`, *optional*): what forwards cost. Without tables it starts from priors, and learns while it serves.
    """

    max_block = LARGEST_BLOCK

    def __init__(self, progress: ProgressTable | None = None, profile: CostProfile | None = None) -> None:
        self._progress = progress
        self._draft_odds = progress.odds if progress else DraftOdds()
        self._times = ForwardTimes(profile)
        self._histories: dict[int, _History] = {}
        self._continuation = _learned(self._draft_odds.continuation)
        self._redrafted = _learned(0.7)
        self._foretold = _learned(0.7)
        self._leftover = _learned(0.8)
        self._accepted = _learned(PRIOR_ACCEPTANCE)
        self._prices: dict[int, Ratio] = {}
        self._guards: dict[int, Guard] = {}
        self._load, self._plain = 1, 0
        self._smooth_ms = self._true_ms = 0.0

    def block_size(self, request: int, load: int) -> int:
        self._load = load
        return self.max_block

    def choose(self, request: int, draft: Draft, remaining: int, eos: Set[int]) -> BranchChoice:
        """How much of a draft is verified, and what rides along; see [`~branching.BranchingRule`]."""
        history = self._histories.setdefault(request, _History())
        end = next((i for i, guess in enumerate(draft.guesses, start=1) if guess.token in eos), len(draft.guesses))
        guesses = draft.guesses[:end]
        acceptance = [self._draft_odds.acceptance(guess.probability, i) for i, guess in enumerate(guesses, start=1)]
        history.leftover_odds = None
        if self._guard.mode != RULE:
            return _fixed_block(self._guard.mode, draft, remaining)
        if draft.source is DraftSource.LEFTOVER:
            history.leftover_odds = acceptance[0]
            acceptance[0] = min(acceptance[0] * self._leftover.value, 1.0)
        expected = self._expected(history)
        situation = Situation(
            guesses,
            acceptance,
            eos,
            remaining,
            expected,
            self._times.curve(self._load),
            self._price_for(expected),
            self._replacement,
        )
        choice = best_round(situation, self._odds)
        if not guesses and not choice.branches and remaining > BLOCK_SIZES[0]:
            self._plain += 1
            if self._plain % EXPLORE == 0:
                draft_anew = Branch(BranchKind.CONTINUATION, 1, BLOCK_SIZES[0])
                return BranchChoice((draft_anew,), verified=1, leftovers=True)
        return choice

    @property
    def _odds(self) -> Odds:
        return Odds(
            min(self._continuation.value, 1.0),
            min(self._redrafted.value, 1.0),
            min(self._foretold.value, 1.0),
            self._leftover.value,
        )

    def _replacement(self, rank: int, guess: Guess) -> float:
        return self._draft_odds.replacement(rank, guess.probability, guess.second_probability)

    # --- prices and prospects ---

    @property
    def _price(self) -> Ratio:
        """At the present load; loads within a factor of two have one together, so that one that wavers has one price."""
        key = self._load.bit_length()
        if key not in self._prices:
            ms = self._times.curve(self._load)
            self._prices[key] = Ratio(max(self._promises(self._mean).values()), ms[BLOCK_SIZES[1]])
        return self._prices[key]

    def _price_for(self, expected: tuple[float, ...]) -> float:
        """
        Of a request's milliseconds: what is achieved, moved towards what the request itself may be expected to achieve.

        Time saved in a hard stretch of a text is not spent on an easier one, since the text must be written as it stands. But what the last
        rounds foretell is only partly true.
        """
        return self._price.value * (expected[-1] / self._mean[-1]) ** LOCALITY

    @cached_property
    def _calibrated_mean(self) -> tuple[float, ...]:
        assert self._progress is not None
        rounds = self._progress.strata[ALL]
        total = sum(rounds.counts)
        return tuple(
            sum(n * row[size] for n, row in zip(rounds.counts, rounds.expected, strict=True)) / total
            for size in range(LARGEST_BLOCK + 1)
        )

    @property
    def _mean(self) -> tuple[float, ...]:
        """`[33]`: tokens that a new draft commits in the mean, by its length."""
        if self._progress is not None:
            return self._calibrated_mean
        # Rounded, since what is computed from it is kept.
        return _of_equal_odds(round(min(self._accepted.value, 0.99), 2))

    def _expected(self, history: _History) -> tuple[float, ...]:
        """`[33]`, as the request's last rounds foretell."""
        if self._progress is None or history.certainty is None:
            return self._mean
        return self._progress.expected(history.certainty, history.last_block, history.was_full)

    # --- the guard ---

    @property
    def _guard(self) -> Guard:
        return self._guards.setdefault(self._load.bit_length(), Guard())

    def _promises(self, expected: tuple[float, ...]) -> dict[int, float]:
        """Tokens a millisecond of plain decoding, and of blocks with a draft forward each, at the present load."""
        ms = self._times.curve(self._load)
        return {1: 1 / ms[1]} | {size: expected[size] / (2 * ms[size]) for size in BLOCK_SIZES}

    # --- what is learned ---

    def observe_forward(self, record: ForwardRecord) -> None:
        self._smooth_ms = self._times.observe(record)
        # What is smooth is of a model of times, which may be wrong; but one disturbed forward must not decide either.
        self._true_ms = min(1000 * record.elapsed, 2 * self._smooth_ms)

    def observe(self, record: RoundRecord) -> None:
        history = self._histories.setdefault(record.request, _History())
        committed = len(record.committed)
        self._price.observe(committed, self._smooth_ms)
        self._guard.observe(committed, self._true_ms, self._promises(self._expected(history)))
        if record.draft.source is DraftSource.BRANCH:
            self._accepted.observe(record.accepted, min(record.accepted + 1, record.block_size - 1))
        if record.block_size > 1:
            if record.entropies and self._progress is not None:
                history.uncertainties.append(self._progress.uncertainty(record.entropies))
            history.last_block = next(size for size in BLOCK_SIZES if size >= record.block_size)
            history.was_full = committed == record.block_size
            if history.leftover_odds is not None:
                self._leftover.observe(record.accepted > 0, history.leftover_odds)
        if record.outcome is Outcome.STOPPED:
            return
        for branch in record.branches:
            depth = branch.branch.depth
            if branch.branch.kind is BranchKind.CONTINUATION and depth <= committed:
                if committed > depth:
                    self._foretold.observe(branch.foretells(record.committed), 1)
                elif depth == record.block_size:
                    self._continuation.observe(branch.foretells(record.committed), 1)
                else:
                    self._redrafted.observe(branch.foretells(record.committed), 1)

    def forget(self, request: int) -> None:
        self._histories.pop(request, None)


def _learned(prior: float) -> Ratio:
    return Ratio(prior, PRIOR_ROUNDS / MEMORY, MEMORY)


@cache
def _of_equal_odds(acceptance: float) -> tuple[float, ...]:
    return (0.0, *accumulate(acceptance**i for i in range(LARGEST_BLOCK)))


def _fixed_block(size: int, draft: Draft, remaining: int) -> BranchChoice:
    """The guard's modes: a block's draft, begun beside a seed, is verified as it is; nothing else rides along."""
    if draft.guesses:
        return BranchChoice(verified=min(size, len(draft.guesses) + 1))
    length = min(size, remaining - 1)
    return BranchChoice((Branch(BranchKind.CONTINUATION, 1, length),) if length > 1 else (), verified=1)


@dataclass(frozen=True)
class AutoBranches:
    """The branching rule of one request under [`Auto`]."""

    auto: Auto
    eos: Set[int]

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        return self.auto.choose(request, draft, remaining, self.eos)

    def most_tokens(self, block_size: int) -> int:
        return TOKENS
