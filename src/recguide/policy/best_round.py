"""The best round for one request: how much of its draft to verify, and which branches ride along. Pure functions of odds and a price.

Everything is counted in tokens. Verifying v tokens of the block brings `S_0 + … + S_(v-1)`, S_i being the odds that the first i
drafted tokens are right. A round ends with c tokens committed, in one of v ways, and what the next round has to verify then is worth
something too: a branch that foretold the end is a new draft; without one there is what is left of the old draft. A branch is
worth what it adds to that, over all ends. From both goes `price * milliseconds`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from ..calibration import BLOCK_SIZES
from ..structs import Branch, BranchChoice, BranchKind, Guess

TOKENS = 128
"""Query tokens that a request has in a forward at the most."""
MOST_BRANCHES = 4
ENDS = 3
"""Likeliest ends of a round that branches are considered for."""
MARGIN = 3
"""Tokens beyond those that are expected to be right that a draft's next verification is likely to have."""


@dataclass(frozen=True)
class Odds:
    """
    What a draft's probabilities do not say.

    Args:
        continuation (`float`): that a branch's first prediction is right after all that is verified was accepted.
        redrafted (`float`): that it is right where the draft before it was rejected.
        foretold (`float`): that a branch has foretold all that is committed from its depth on, where that is more than one token.
        leftover (`float`): factor on what is expected of drafts behind a rejected token.
        promise (`float`): factor on what is expected of new drafts.
    """

    continuation: float
    redrafted: float
    foretold: float
    leftover: float
    promise: float


@dataclass(frozen=True)
class Situation:
    """
    A request before its round.

    Args:
        guesses (`Sequence[Guess]`): its draft, not beyond an end of the text.
        acceptance (`Sequence[float]`): for each guess the odds that it is right, given that all before it are.
        eos (`Set[int]`): tokens that end a text; nothing is supposed to follow them.
        remaining (`int`): tokens that it may still write.
        expected (`tuple[float]`): `[33]`, what a new draft is expected to commit, by its length.
        ms (`Sequence[float]`): `[129]`, of a forward, by query tokens of each request.
        price (`float`): tokens that a millisecond is worth.
        replacement (callable): `(rank, guess) -> odds` that the second (0) or third (1) choice takes a rejected guess's place.
    """

    guesses: Sequence[Guess]
    acceptance: Sequence[float]
    eos: Set[int]
    remaining: int
    expected: tuple[float, ...]
    ms: Sequence[float]
    price: float
    replacement: Callable[[int, Guess], float]


def best_round(situation: Situation, odds: Odds) -> BranchChoice:
    """The part to verify and the branches that together are worth most."""
    return _BestRound(situation, odds).choose()


class _BestRound:
    def __init__(self, situation: Situation, odds: Odds) -> None:
        self._at, self._odds = situation, odds
        self._each = situation.price * (situation.ms[1 + BLOCK_SIZES[1]] - situation.ms[1]) / BLOCK_SIZES[1]
        """Price of a query token that is verified in the next round."""
        self._survival = [1.0, *accumulate(situation.acceptance, mul)]
        self._left, self._cut = self._leftovers()
        self._whole = {size: self._worth_of_branch(size, used=0) for size in BLOCK_SIZES}
        """What a branch of each length is worth if none of its predictions after the first is used up."""

    def choose(self) -> BranchChoice:
        plain, with_leftovers = self._verifying()
        candidates = {max(range(1, len(one)), key=one.__getitem__) for one in (plain, with_leftovers)}
        best, choice = float("-inf"), BranchChoice()
        for verified in sorted(candidates):
            value, branches = self._with_branches(verified)
            if plain[verified] + value > best:
                best = plain[verified] + value
                ordered = sorted(branches, key=lambda branch: branch.depth)
                choice = BranchChoice(tuple(ordered), verified=verified, leftovers=True)
        return choice

    def _verifying(self) -> tuple[list[float], list[float]]:
        """What verifying v tokens is worth, by v: alone, and with what would be left of the draft for the next round."""
        ms, price, survival = self._at.ms, self._at.price, self._survival
        plain, both = [0.0], [0.0]
        brought = later = 0.0
        for v in range(1, len(survival) + 1):
            brought += survival[v - 1]
            if v > 1:
                later += (survival[v - 2] - survival[v - 1]) * self._left[v - 1]
            plain.append(brought - price * ms[v])
            both.append(plain[v] + later + survival[v - 1] * self._cut[v])
        return plain, both

    def _leftovers(self) -> tuple[list[float], list[float]]:
        """
        What the rest of the draft is worth in the next round, by tokens committed: after a rejection, and after all that was verified.

        A draft that was wrong in one place is often right in the next.
        """
        acceptance = self._at.acceptance
        count = len(acceptance)
        rest = [0.0] * (count + 2)
        for i in reversed(range(count)):
            rest[i] = acceptance[i] * (1 + rest[i + 1])
        left, cut = [0.0] * (count + 2), [0.0] * (count + 2)
        factor = self._odds.leftover
        for c in range(1, count + 1):
            wrong = factor * rest[c]
            mixed = wrong + acceptance[c - 1] * (rest[c] - wrong)
            left[c] = _worth_of_draft(wrong, count - c, self._each)
            cut[c] = _worth_of_draft(mixed, count - c, self._each)
        return left, cut

    def _with_branches(self, verified: int) -> tuple[float, list[Branch]]:
        """The branches that ride best beside `verified` tokens, taken one by one, and what is worth there for the next round."""
        survival, ms, price = self._survival, self._at.ms, self._at.price
        count = len(self._at.acceptance)
        odds = [0.0] + [survival[c - 1] - survival[c] for c in range(1, verified)] + [survival[verified - 1]]
        if count and self._at.guesses[-1].token in self._at.eos and verified >= count:
            # Nothing follows the text's end.
            odds[verified] *= 0.0 if verified > count else 1 - self._at.acceptance[-1]
        present = [*self._left[:verified], self._cut[verified]]
        value = sum(p * worth for p, worth in zip(odds, present, strict=True))
        branches: list[Branch] = []
        tokens = verified
        candidates = self._candidates(verified, odds)
        while candidates and len(branches) < MOST_BRANCHES:
            most, best = 0.0, None
            for candidate in candidates:
                branch, worth = candidate
                together = tokens + branch.block_size
                if together <= TOKENS:
                    gain = -price * (ms[together] - ms[tokens])
                    for p, offered, had in zip(odds[branch.depth :], worth, present[branch.depth :], strict=False):
                        if offered > had:
                            gain += p * (offered - had)
                    if gain > most:
                        most, best = gain, candidate
            if best is None:
                break
            candidates.remove(best)
            branch, worth = best
            branches.append(branch)
            tokens, value = tokens + branch.block_size, value + most
            for c, offered in enumerate(worth, start=branch.depth):
                present[c] = max(present[c], offered)
        return value, branches

    def _candidates(self, verified: int, odds: list[float]) -> list[tuple[Branch, list[float]]]:
        """Branches for the likeliest ends of the round, with what each is worth at ends from its depth on."""
        at, found = self._at, []
        reached = list(accumulate(reversed(odds)))[::-1]
        for depth in sorted(range(1, verified + 1), key=odds.__getitem__, reverse=True)[:ENDS]:
            first, later = self._odds.redrafted, self._odds.foretold
            supposed: list[tuple[float, int]] = []
            if depth == verified:
                first = self._odds.continuation
            else:
                guess = at.guesses[depth - 1]
                # A continuation that is right as often is worth as much here, and something at other ends too.
                supposed = [
                    (right, token)
                    for rank, token in enumerate(guess.alternatives[:2])
                    if token not in at.eos and (right := at.replacement(rank, guess)) > first
                ]
            likeliest = max([first, *(right for right, _ in supposed)])
            hit = odds[depth] * likeliest + (reached[depth] - odds[depth]) * later
            size = self._best_size(hit, verified, at.remaining - depth)
            if not size:
                continue
            length = min(size, at.remaining - depth)
            share = length / size
            used_up = range(1, min(verified + 1 - depth, length - 1))
            whole = share * self._whole[size]
            continued = [first * whole, *[later * share * self._worth_of_branch(size, used) for used in used_up]]
            found.append((Branch(BranchKind.CONTINUATION, depth, length), continued))
            for right, token in supposed:
                found.append((Branch(BranchKind.CORRECTION, depth, length, token), [right * whole]))
        return found

    def _worth_of_branch(self, size: int, used: int) -> float:
        """Of one of this length, if it is right and `used` of its predictions after the first are committed with it."""
        expected = self._at.expected
        survived = expected[used + 1] - expected[used]
        accepted = (expected[size] - expected[used]) / survived - 1 if survived > 0 else 0.0
        return _worth_of_draft(self._odds.promise * accepted, size - 1 - used, self._each)

    def _best_size(self, odds: float, verified: int, room: int) -> int:
        """Of a branch that is the next draft with these odds, if no end of the round uses up any of it; 0: none pays."""
        ms, price = self._at.ms, self._at.price
        best, most = 0, 0.0
        for size in BLOCK_SIZES:
            length = min(size, room)
            if length >= 2:
                gain = odds * self._whole[size] * length / size - price * (ms[verified + length] - ms[verified])
                if gain > most:
                    best, most = size, gain
            # A larger one would be shortened too.
            if size >= room:
                break
        return best


def _worth_of_draft(accepted: float, guesses: int, each: float) -> float:
    """Of one that is verified in the next round, beside the seed that is verified in any case, where a query token costs `each`."""
    return max(accepted - each * min(guesses, accepted + MARGIN), 0.0)
