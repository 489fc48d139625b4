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
from functools import cached_property

from ..calibration import ALL, BLOCK_SIZES, CostProfile, DraftOdds, ProgressTable
from ..structs import Branch, BranchChoice, BranchKind, Draft, ForwardRecord, Outcome, RoundRecord
from .base import BlockPolicy
from .forward_times import TOKENS, ForwardTimes
from .history import History
from .price import Price

PRIOR_COMMITTED = {8: 4.5, 16: 6.5, 32: 7.5}
"""Expected tokens without a calibration: in the range of Table 2 of arXiv 2609.34388, on the careful side."""
PRIOR_FIRST = 0.85
"""Odds, to begin with, that a draft's first token is right."""
EXPLORE = 32
"""One draft begun in so many has the length that has been tried least, so that none is given up on early figures."""
LEARNING = 0.02
MOST_BRANCHES = 4


@dataclass
class _History(History):
    drafted: int = 0
    """Length of the block that a branch has prepared for the next round; 0: none."""


@dataclass
class _Lesson:
    """What blocks of one length have come to, as slow averages."""

    ratio: float = 1.0
    """Committed over expected."""
    verified: float | None = None
    tried: int = 0


class Auto(BlockPolicy):
    """
    Decides everything about a request's rounds; see the module.

    Args:
        progress (`ProgressTable`, *optional*): what blocks are expected to commit, and what drafts say of their verification.
        profile (`CostProfile`, *optional*): what forwards cost. Without tables it starts from priors, and learns while it serves.
    """

    max_block = max(BLOCK_SIZES)

    def __init__(self, progress: ProgressTable | None = None, profile: CostProfile | None = None) -> None:
        self._progress = progress
        self._odds = progress.odds if progress else DraftOdds()
        self._times = ForwardTimes(profile)
        self._histories: dict[int, _History] = {}
        self._lessons = {size: _Lesson() for size in BLOCK_SIZES}
        self._first, self._continuation = PRIOR_FIRST, self._odds.continuation
        self._later = 0.0
        """What branches beside a verification gain, as a slow average."""
        self._prices: dict[int, Price] = {}
        self._load, self._seeds, self._forward_ms = 1, 0, 0.0

    def block_size(self, request: int, load: int) -> int:
        self._load = load
        history = self._histories.setdefault(request, _History())
        return self.max_block if history.drafted else 1

    def choose(self, request: int, draft: Draft, remaining: int, eos: Set[int]) -> BranchChoice:
        """How much of a draft is verified, and what rides along; see [`~branching.BranchingRule`]."""
        if not draft.guesses:
            return self._bootstrap(request, remaining)
        expected, ms = self._expected(request), self._ms
        price = self._local_price(expected)
        # Odds that the first i drafted tokens are all accepted. As many are verified as are worth their time.
        survival, worth, best, verified = [1.0], 1 - price * ms[1], 1 - price * ms[1], 1
        for i, guess in enumerate(draft.guesses, start=1):
            survival.append(survival[-1] * self._odds.acceptance(guess.probability, i))
            worth += survival[i] - price * (ms[i + 1] - ms[i])
            if worth > best:
                best, verified = worth, i + 1
        beyond = survival[verified] if verified < len(survival) else 0.0
        del survival[verified:]
        saved = self._saved(expected, price)
        least = price * (ms[min(verified + BLOCK_SIZES[0], TOKENS)] - ms[verified]) / max(*saved.values(), 1e-9)
        supposed = self._suppositions(draft, survival, beyond, least, eos)
        branches: list[Branch] = []
        tokens, gained = verified, 0.0
        for odds, kind, depth, replacement in sorted(supposed, key=lambda one: -one[0])[:MOST_BRANCHES]:
            size, gain = self._best_branch(odds, tokens, remaining - depth, saved, price)
            if gain <= 0:
                break
            branches.append(Branch(kind, depth, size, replacement))
            tokens, gained = tokens + size, gained + gain
        self._later += LEARNING * (gained - self._later)
        return BranchChoice(tuple(sorted(branches, key=lambda branch: branch.depth)), verified=verified)

    # --- prices ---

    @property
    def _ms(self) -> list[float]:
        """Of a forward at the present load, by the query tokens of each request."""
        return self._times.curve(self._load)

    @property
    def _price(self) -> Price:
        """At the present load; loads within a factor of two have one together, so that one that wavers has one price."""
        key = self._load.bit_length()
        if key not in self._prices:
            self._prices[key] = Price(self._cycle_rate(self._mean), 2 * self._ms[16])
        return self._prices[key]

    def _local_price(self, expected: dict[int, float]) -> float:
        """Of a request's milliseconds: what is achieved, as much higher or lower as its prospects are than the mean's."""
        return self._price.value * self._cycle_rate(expected) / self._cycle_rate(self._mean)

    def _cycle_rate(self, expected: dict[int, float]) -> float:
        """Tokens a millisecond of drafting beside a seed and verifying that, at the best length; or of plain decoding."""
        ms = self._ms
        rates = [
            (1 + tokens) / (ms[1 + size] + ms[self._likely_verified(size, tokens)]) for size, tokens in expected.items()
        ]
        return max(1 / ms[1], *rates)

    def _likely_verified(self, size: int, tokens: float) -> int:
        return round(self._lessons[size].verified or min(size, tokens + 4))

    @cached_property
    def _mean(self) -> dict[int, float]:
        if self._progress is None:
            return PRIOR_COMMITTED
        rounds = self._progress.strata[ALL]
        total = sum(rounds.counts)
        return {
            size: sum(n * row[size] for n, row in zip(rounds.counts, rounds.expected, strict=True)) / total
            for size in BLOCK_SIZES
        }

    def _expected(self, request: int) -> dict[int, float]:
        """Tokens that a block of each length may commit, as the request's last rounds foretell."""
        history = self._histories.setdefault(request, _History())
        table = self._mean
        if self._progress is not None and history.certainty is not None:
            row = self._progress.expected(history.certainty, history.last_block, history.was_full)
            table = {size: row[size] for size in BLOCK_SIZES}
        return {size: tokens * self._lessons[size].ratio for size, tokens in table.items()}

    def _saved(self, expected: dict[int, float], price: float) -> dict[int, float]:
        """What having a draft of each length is worth, over having none: a seed then, with or without a draft beside it."""
        ms = self._ms
        having = {
            size: tokens - price * ms[self._likely_verified(size, tokens)] + self._later
            for size, tokens in expected.items()
        }
        begun = [1 - price * ms[1 + size] + self._first * worth for size, worth in having.items()]
        none = max(1 - price * ms[1], *begun)
        return {size: worth - none for size, worth in having.items()}

    def _best_branch(
        self, odds: float, tokens: int, remaining: int, saved: dict[int, float], price: float
    ) -> tuple[int, float]:
        """The length of a branch beside `tokens` others that is expected to gain most, and how much; 0: none gains."""
        ms = self._ms
        best, most = 0, 0.0
        for size in BLOCK_SIZES:
            length = min(size, remaining)
            if length < 2 or tokens + length > TOKENS:
                continue
            gain = odds * saved[size] * length / size - price * (ms[tokens + length] - ms[tokens])
            if gain > most:
                best, most = length, gain
        return best, most

    # --- what may come next ---

    def _bootstrap(self, request: int, remaining: int) -> BranchChoice:
        """A request without a draft: its seed, and beside it a draft of what follows, if that pays."""
        expected = self._expected(request)
        price = self._local_price(expected)
        size, _ = self._best_branch(self._first, 1, remaining - 1, self._saved(expected, price), price)
        self._seeds += 1
        if self._seeds % EXPLORE == 0:
            size = min(BLOCK_SIZES, key=lambda one: self._lessons[one].tried)
        size = min(size, remaining - 1)
        return BranchChoice((Branch(BranchKind.CONTINUATION, 1, size),) if size > 1 else ())

    def _suppositions(
        self, draft: Draft, survival: list[float], beyond: float, least: float, eos: Set[int]
    ) -> list[tuple[float, BranchKind, int, int | None]]:
        """
        Ways the verification may end, if their odds are above `least`: odds, kind of branch, depth, replacement.

        Nothing follows an end of the text.
        """
        found: list[tuple[float, BranchKind, int, int | None]] = []
        verified = len(survival)
        for depth, guess in enumerate(draft.guesses[: verified - 1], start=1):
            rejected = survival[depth - 1] - survival[depth]
            if rejected > least:
                for rank, token in enumerate(guess.alternatives[:2]):
                    odds = rejected * self._odds.replacement(rank, guess.probability, guess.second_probability)
                    if odds > least and token not in eos:
                        found.append((odds, BranchKind.CORRECTION, depth, token))
            if guess.token in eos:
                return found
        if verified > len(draft.guesses):
            if (odds := survival[-1] * self._continuation) > least:
                found.append((odds, BranchKind.CONTINUATION, verified, None))
        elif beyond > least and (token := draft.guesses[verified - 1].token) not in eos:
            # Cut short, the draft itself says what should come next.
            found.append((beyond, BranchKind.CORRECTION, verified, token))
        return found

    # --- what is learned ---

    def observe_forward(self, record: ForwardRecord) -> None:
        self._forward_ms = self._times.observe(record)

    def observe(self, record: RoundRecord) -> None:
        history = self._histories.setdefault(record.request, _History())
        committed = len(record.committed)
        self._price.observe(committed, self._forward_ms)
        if history.drafted in self._lessons and record.outcome is not Outcome.STOPPED:
            lesson = self._lessons[history.drafted]
            expected = self._expected(record.request)[history.drafted] / lesson.ratio
            lesson.ratio += LEARNING * (committed / expected - lesson.ratio)
            before = record.block_size if lesson.verified is None else lesson.verified
            lesson.verified = before + LEARNING * (record.block_size - before)
            lesson.tried += 1
        last = record.branches[-1] if record.branches else None
        if last is not None and last.branch.kind is BranchKind.CONTINUATION and committed == record.block_size:
            right = last.first == record.committed[-1]
            if record.block_size == 1:
                self._first += LEARNING * (right - self._first)
            else:
                self._continuation += LEARNING * (right - self._continuation)
        if record.block_size > 1:
            if record.entropies and self._progress is not None:
                history.uncertainties.append(self._progress.uncertainty(record.entropies))
            history.last_block = next(size for size in BLOCK_SIZES if size >= record.block_size)
            history.was_full = committed == record.block_size
        history.drafted = 0 if record.hit is None else record.branches[record.hit].branch.block_size

    def forget(self, request: int) -> None:
        self._histories.pop(request, None)


@dataclass(frozen=True)
class AutoBranches:
    """The branching rule of one request under [`Auto`]."""

    auto: Auto
    eos: Set[int]

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        return self.auto.choose(request, draft, remaining, self.eos)

    def most_tokens(self, block_size: int) -> int:
        return TOKENS
