"""The paper's rule for busy servers: each request's next block from what its last verifications looked like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..calibration import ALL, BLOCK_SIZES, CostProfile, ProgressTable
from ..structs import RoundRecord
from .base import BlockPolicy, ConcurrencyTable
from .history import History
from .price import Prices, Ratio, solve_price


@dataclass
class _History(History):
    load: int = 1
    """When its present block was chosen."""


class VerificationGuided(BlockPolicy):
    """
    Takes the block of the largest `V_B(s, z) - price * T_C(B)` (arXiv 2609.34388, equations 2 and 3).

    `s` is minus the mean entropy of the last two rounds' verified decisions, `z` the last block's size and whether all of it was
    accepted. The first round of a request, without history, follows the load alone. The price at a load starts as the solution
    for the calibrated mixture of rounds and then follows what is achieved ([`Ratio`]); the paper does not publish its own.

    Args:
        progress (`ProgressTable`): V_B.
        costs (`CostProfile`): T_C(B), with all of `block_sizes`.
        block_sizes (`Sequence[int]`, defaults to (8, 16, 32)): the choices.
        hysteresis (`float`, defaults to 0.02):
            A request keeps its block size until another is better by this share of what its own commits, so that a load that goes back
            and forth across a threshold does not change all blocks each time.
    """

    def __init__(
        self,
        progress: ProgressTable,
        costs: CostProfile,
        block_sizes: Sequence[int] = BLOCK_SIZES,
        hysteresis: float = 0.02,
    ) -> None:
        self.max_block = max(block_sizes)
        self._progress, self._costs = progress, costs
        self._sizes = sorted(block_sizes)
        self._hysteresis = hysteresis
        self._first = ConcurrencyTable()
        self._histories: dict[int, _History] = {}
        self._prices = Prices(costs.loads, self._solved)

    def block_size(self, request: int, load: int) -> int:
        history = self._histories.setdefault(request, _History())
        history.load = load
        if history.certainty is None:
            return self._first.block_size(request, load)
        expected = self._progress.expected(history.certainty, history.last_block, history.was_full)
        self.price = price = self._prices.at(load).value
        worth = {size: expected[size] - price * self._costs.round_ms(load, size) for size in self._sizes}
        best = max(self._sizes, key=lambda size: worth[size])
        last = history.last_block
        if last in worth and worth[best] - worth[last] < self._hysteresis * expected[last]:
            return last
        return best

    def observe(self, record: RoundRecord) -> None:
        history = self._histories.setdefault(record.request, _History())
        if record.entropies:
            history.uncertainties.append(self._progress.uncertainty(record.entropies))
        history.last_block, history.was_full = record.block_size, len(record.committed) == record.block_size
        if record.block_size in self._sizes:
            cost = self._costs.round_ms(history.load, record.block_size)
            self._prices.at(history.load).observe(len(record.committed), cost)

    def forget(self, request: int) -> None:
        self._histories.pop(request, None)

    def _solved(self, load: int) -> Ratio:
        milliseconds = [self._costs.round_ms(load, size) for size in self._sizes]
        rounds = self._progress.strata[ALL]
        mixture = [[row[size] for size in self._sizes] for row in rounds.expected]
        return Ratio(solve_price(rounds.counts, mixture, milliseconds), sum(milliseconds) / len(milliseconds))
