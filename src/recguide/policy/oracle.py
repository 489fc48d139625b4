"""What could be had by knowing the future: an upper mark for policies, on recorded prompts only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

from ..calibration import BLOCK_SIZES, CostProfile
from ..errors import InputError
from ..structs import RoundRecord
from .base import BlockPolicy
from .price import Prices, Ratio


class Oracle(BlockPolicy):
    """
    Knows how much of each block will be accepted: it replays recorded rounds of the largest block.

    At a place where a recorded round began, or inside of one, a block of B commits what is left of that round, B at the most.

    Args:
        recorded (`Mapping[int, Sequence[int]]`): for each request id the tokens that the rounds of its recording committed.
        costs (`CostProfile`): what a round costs.
        block_sizes (`Sequence[int]`, defaults to (8, 16, 32)): the choices; the recording was made with the largest.
    """

    def __init__(
        self,
        recorded: Mapping[int, Sequence[int]],
        costs: CostProfile,
        block_sizes: Sequence[int] = BLOCK_SIZES,
    ) -> None:
        self.max_block = max(block_sizes)
        self._ends = {request: list(accumulate(rounds)) for request, rounds in recorded.items()}
        self._lengths = [length for rounds in recorded.values() for length in rounds]
        self._costs, self._sizes = costs, sorted(block_sizes)
        self._written: dict[int, int] = {}
        self._loads: dict[int, int] = {}
        self._prices = Prices(costs.loads, self._of_best_fixed_block)

    def block_size(self, request: int, load: int) -> int:
        if request not in self._ends:
            raise InputError(f"Request {request} was not recorded; recorded are {sorted(self._ends)}.")
        self._loads[request] = load
        ends, written = self._ends[request], self._written.get(request, 0)
        at = bisect_right(ends, written)
        ahead = ends[at] - written if at < len(ends) else 1
        price = self._prices.at(load).value
        return max(self._sizes, key=lambda size: min(ahead, size) - price * self._costs.round_ms(load, size))

    def observe(self, record: RoundRecord) -> None:
        self._written[record.request] = self._written.get(record.request, 0) + len(record.committed)
        load = self._loads.get(record.request, 1)
        if record.block_size in self._sizes:
            self._prices.at(load).observe(len(record.committed), self._costs.round_ms(load, record.block_size))

    def forget(self, request: int) -> None:
        self._written.pop(request, None)
        self._loads.pop(request, None)

    def _of_best_fixed_block(self, load: int) -> Ratio:
        rates = [
            sum(min(length, size) for length in self._lengths) / len(self._lengths) / self._costs.round_ms(load, size)
            for size in self._sizes
        ]
        return Ratio(max(rates), self._costs.round_ms(load, self._sizes[0]))
