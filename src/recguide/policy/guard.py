"""What keeps `auto` from losing: its own rate, measured, against what plain decoding and fixed blocks promise."""

from __future__ import annotations

from collections.abc import Mapping

RULE = 0
"""The mode in which `auto` decides by itself; the others are block sizes, 1 for plain decoding."""
TRIAL, FORWARDS = 64, 4
"""Rounds of requests that a mode is measured for, and the fewest forwards that they must have been in."""
SLACK = 0.9
"""A promise counts if the rule achieves less than this share of it: promises are forecasts, and texts differ from one trial to the next."""


class Guard:
    """
    Which mode a load is served in.

    The rule is on trial all the time. Where it achieves clearly less than another mode promises, that mode takes over: for one trial
    first, and for twice as many each time that the rule, tried again, loses again. Where it does not keep its promise, the rule
    comes back, and its next promises count for less. So a rule that is wrong for good costs the time of a trial in 64, 128,
    256, … rounds: the regret grows with the logarithm of their number.
    """

    def __init__(self) -> None:
        self.mode = RULE
        self._tokens = self._ms = 0.0
        self._rounds = self._forwards = 0
        self._promised: dict[int, float] = {}
        self._kept: dict[int, float] = {}
        """What modes that were tried achieved, as a share of their promises."""
        self._to_beat = 0.0
        """What the rule achieved when it was last sent away."""
        self._stay, self._trials_left = 1, 0

    def observe(self, mode: int, first: bool, tokens: float, ms: float, promises: Mapping[int, float]) -> None:
        """
        Take note of a request's round; of one that was chosen in another mode than the present one nothing is learned.

        Args:
            mode (`int`): in which it was chosen.
            first (`bool`): whether it is the first of its forward.
            tokens (`float`): that it committed.
            ms (`float`): that it took.
            promises (`Mapping[int, float]`): tokens a millisecond that each other mode may be expected to achieve there.
        """
        if mode != self.mode:
            return
        self._tokens, self._ms = self._tokens + tokens, self._ms + ms
        self._rounds, self._forwards = self._rounds + 1, self._forwards + first
        for other, rate in promises.items():
            self._promised[other] = self._promised.get(other, 0.0) + rate
        if self._rounds < TRIAL or self._forwards < FORWARDS:
            return
        rate = self._tokens / self._ms
        promised = {other: total / self._rounds * self._kept.get(other, 1.0) for other, total in self._promised.items()}
        self._tokens = self._ms = 0.0
        self._rounds = self._forwards = 0
        self._promised = {}
        if self.mode == RULE:
            best = max(promised, key=promised.__getitem__)
            if rate < SLACK * promised[best]:
                self.mode, self._to_beat, self._trials_left = best, rate, self._stay
                self._stay *= 2
            else:
                self._stay = 1
            return
        self._kept[self.mode] = self._kept.get(self.mode, 1.0) * rate / promised[self.mode]
        self._trials_left -= 1
        if rate < self._to_beat or self._trials_left == 0:
            self.mode = RULE
