"""What a millisecond is worth: the rate at which tokens are committed, solved instead of tuned."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class Ratio:
    """
    A quotient of two sums that are added to round by round, the past slowly forgotten: a price, or how often odds came true.

    To maximise tokens over time, take in every round whatever maximises `tokens - price * time`, where the price is the rate that
    is achieved by doing so (W. Dinkelbach, On nonlinear fractional programming, 1967). Each observed round moves the quotient a
    little, so that it converges to that fixed point and follows a change of prompts.

    Args:
        start (`float`): the quotient to begin with.
        usual (`float`): what a round usually adds to the divisor, to weigh the start with.
        memory (`int`, defaults to 256): rounds after which a past one counts 1/e.
    """

    def __init__(self, start: float, usual: float, memory: int = 256) -> None:
        self._keep = 1 - 1 / memory
        self._below = usual * memory
        self._above = start * self._below

    @property
    def value(self) -> float:
        return self._above / self._below

    def observe(self, above: float, below: float) -> None:
        self._above = self._above * self._keep + above
        self._below = self._below * self._keep + below


PRIOR_ROUNDS = 10
"""Weight of what is assumed against what is seen."""


def learned(prior: float, memory: int = 64, usual: float = 1.0) -> Ratio:
    """How often odds come true, or the like: `prior` at first, then soon what is seen; see [`Ratio`]."""
    return Ratio(prior, usual * PRIOR_ROUNDS / memory, memory)


class Prices:
    """
    A price for each load, since time is scarcer where more requests share it.

    Args:
        loads (`Sequence[int]`): those that costs were measured at; another load has the price of the nearest.
        start (callable): `load -> Ratio`, for the first time that it is asked for.
    """

    def __init__(self, loads: Sequence[int], start: Callable[[int], Ratio]) -> None:
        self._loads, self._start = loads, start
        self._by_load: dict[int, Ratio] = {}

    def at(self, load: int) -> Ratio:
        nearest = min(self._loads, key=lambda measured: abs(measured - load))
        if nearest not in self._by_load:
            self._by_load[nearest] = self._start(nearest)
        return self._by_load[nearest]


def solve_price(
    weights: Sequence[float], tokens: Sequence[Sequence[float]], milliseconds: Sequence[float], tolerance: float = 1e-9
) -> float:
    """
    Dinkelbach's fixed point for a known mixture of situations.

    Args:
        weights (`Sequence[float]`): how often each situation occurs.
        tokens (`Sequence[Sequence[float]]`): expected tokens, `[situations][choices]`.
        milliseconds (`Sequence[float]`): cost of each choice.

    Returns:
        `float`: tokens a millisecond of the best choices; no fixed choice achieves more.
    """
    price = 0.0
    while True:
        gained = spent = 0.0
        for weight, row in zip(weights, tokens, strict=True):
            best = max(range(len(row)), key=lambda i: row[i] - price * milliseconds[i])
            gained += weight * row[best]
            spent += weight * milliseconds[best]
        achieved = gained / spent
        if achieved <= price * (1 + tolerance):
            return max(achieved, price)
        price = achieved
