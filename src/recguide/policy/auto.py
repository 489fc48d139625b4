"""One rule for every load: whatever a round may do is priced in the same currency.

A committed token is worth 1. A millisecond costs the rate at which tokens are committed anyway ([`~price.Ratio`]), since that is
what it would bring otherwise. How much of a block is verified, which branches ride along and how long they are: [`~best_round`] takes
each as far as it brings more than it costs. Spare compute at low load lets branches ride along; a busy machine shortens
them, down to plain decoding; no threshold lies between.

There are no draft forwards. A request without a draft verifies its seed alone, which commits a token, and a branch drafts beside it
what may follow. In a batch it also means that nobody waits for a draft forward of others. After a rejection that no branch
foretold, what is left of the old draft is verified: a draft that was wrong in one place is often right in the next.

Odds and times are corrected by what is seen; without tables they are learned from scratch. A [`~guard.Guard`] watches the whole.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from ..calibration import BLOCK_SIZES, LARGEST_BLOCK, CostProfile, DraftOdds, ProgressTable
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
from .price import Ratio, learned
from .prospects import CalibratedProspects, LearnedProspects, Prospects

PRICE_MEMORY = 256
"""Rounds."""
ODDS_EDGES = (0.3, 0.5, 0.7, 0.85, 0.93, 0.97, 0.99)
"""Between classes of odds of acceptance, each of which is corrected by what came true in it; most tokens are in the highest."""
ODDS_MEMORY = 512
"""Tokens of a class."""
PRIOR_REDRAFTED, PRIOR_FORETOLD, PRIOR_LEFTOVER = 0.7, 0.7, 0.8
"""See [`Odds`]; what is soon learned is 0.9, 0.8 and 0.9 for the embedded model."""
LOCALITY = 0.25
"""How far a request's own prospects move the price of its milliseconds; see [`Auto._price_for`]."""
EXPLORE = 32
"""Of so many rounds that would draft nothing, one does, so that drafts are never given up on early figures."""


@dataclass
class _History(History):
    odds: list[float] = field(default_factory=list)
    """Of its draft's tokens, before what is learned of odds."""
    mode: int = RULE
    """The guard's, in which its round was chosen."""


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
        self._prospects: Prospects = CalibratedProspects(progress) if progress else LearnedProspects()
        self._times = ForwardTimes(profile)
        self._histories: dict[int, _History] = {}
        self._continuation = learned(self._draft_odds.continuation)
        self._redrafted = learned(PRIOR_REDRAFTED)
        self._foretold = learned(PRIOR_FORETOLD)
        self._leftover = learned(PRIOR_LEFTOVER)
        self._promise = learned(1.0)
        self._came_true = [learned(1.0, ODDS_MEMORY) for _ in range(len(ODDS_EDGES) + 1)]
        self._prices: dict[int, Ratio] = {}
        self._guards: dict[int, Guard] = {}
        self._load, self._plain = 1, 0
        self._smooth_ms, self._is_first = 0.0, True

    def block_size(self, request: int, load: int) -> int:
        self._load = load
        return self.max_block

    def choose(self, request: int, draft: Draft, remaining: int, eos: Set[int]) -> BranchChoice:
        """How much of a draft is verified, and what rides along; see [`~branching.BranchingRule`]."""
        history = self._histories.setdefault(request, _History())
        end = next((i for i, guess in enumerate(draft.guesses, start=1) if guess.token in eos), len(draft.guesses))
        guesses = draft.guesses[:end]
        history.odds = [self._draft_odds.acceptance(guess.probability, i) for i, guess in enumerate(guesses, start=1)]
        history.mode = self._guard.mode
        if history.mode != RULE:
            return _fixed_block(history.mode, draft, remaining)
        acceptance = [self._corrected(odds) for odds in history.odds]
        expected = self._prospects.of(history)
        if draft.source is DraftSource.BRANCH:
            self._promise.observe(sum(accumulate(acceptance, mul)), expected[len(guesses) + 1] - 1)
            self._prospects.learn(history, acceptance)
        if draft.source is DraftSource.LEFTOVER:
            acceptance[0] = min(acceptance[0] * self._leftover.value, 1.0)
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
            self._promise.value,
        )

    def _replacement(self, rank: int, guess: Guess) -> float:
        return self._draft_odds.replacement(rank, guess.probability, guess.second_probability)

    # --- prices and prospects ---

    @property
    def _price(self) -> Ratio:
        """At the present load; loads within a factor of two have one together, so that one that wavers has one price."""
        key = self._load.bit_length()
        if key not in self._prices:
            usual = self._times.curve(self._load)[BLOCK_SIZES[1]]
            self._prices[key] = learned(max(self._promises(self._prospects.mean).values()), PRICE_MEMORY, usual)
        return self._prices[key]

    def _price_for(self, expected: tuple[float, ...]) -> float:
        """
        Of a request's milliseconds: what is achieved, moved towards what the request itself may be expected to achieve.

        Time saved in a hard stretch of a text is not spent on an easier one, since the text must be written as it stands. But what the last
        rounds foretell is only partly true.
        """
        self.price = self._price.value
        share: float = (expected[-1] / self._prospects.mean[-1]) ** LOCALITY
        return self.price * share

    # --- the guard ---

    @property
    def _guard(self) -> Guard:
        return self._guards.setdefault(self._load.bit_length(), Guard())

    def _promises(self, expected: tuple[float, ...]) -> dict[int, float]:
        """Tokens a millisecond of plain decoding, and of blocks with a draft forward each, at the present load."""
        ms, promise = self._times.curve(self._load), self._promise.value
        return {1: 1 / ms[1]} | {size: (1 + promise * (expected[size] - 1)) / (2 * ms[size]) for size in BLOCK_SIZES}

    # --- what is learned ---

    def observe_forward(self, record: ForwardRecord) -> None:
        self._is_first = True
        self._smooth_ms = self._times.observe(record)

    def observe(self, record: RoundRecord) -> None:
        history = self._histories.setdefault(record.request, _History())
        committed = len(record.committed)
        self._price.observe(committed, self._smooth_ms)
        promises = self._promises(self._prospects.of(history))
        # Promises are of smooth times, so achievements must be: the mean of noisy times is above their median.
        self._guard.observe(history.mode, self._is_first, committed, self._smooth_ms, promises)
        self._is_first = False
        if record.block_size > 1:
            if record.entropies and self._progress is not None:
                history.uncertainties.append(self._progress.uncertainty(record.entropies))
            history.last_block = next(size for size in BLOCK_SIZES if size >= record.block_size)
            history.was_full, history.last_committed = committed == record.block_size, committed
        self._learn_odds(record, history.odds)
        if record.outcome is Outcome.STOPPED:
            return
        for branch in record.branches:
            depth = branch.branch.depth
            # A branch that ends before what is committed could not foretell it.
            if branch.branch.kind is BranchKind.CONTINUATION and 0 <= committed - depth < branch.branch.block_size - 1:
                whole = depth == record.block_size
                odds = self._foretold if committed > depth else self._continuation if whole else self._redrafted
                odds.observe(branch.foretells(record.committed), 1)

    def _learn_odds(self, record: RoundRecord, odds: list[float]) -> None:
        verified = odds[: len(record.draft.guesses)]
        if record.draft.source is DraftSource.LEFTOVER:
            self._leftover.observe(record.accepted, sum(accumulate(map(self._corrected, verified), mul)))
            return
        for i, predicted in enumerate(verified[: record.accepted + 1]):
            self._correction(predicted).observe(i < record.accepted, predicted)

    def _corrected(self, odds: float) -> float:
        return min(odds * self._correction(odds).value, 1.0)

    def _correction(self, odds: float) -> Ratio:
        return self._came_true[bisect_right(ODDS_EDGES, odds)]

    def forget(self, request: int) -> None:
        self._histories.pop(request, None)


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
