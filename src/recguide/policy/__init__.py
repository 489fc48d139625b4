"""How long each request's next block is."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..calibration import CostProfile, ProgressTable
from ..config import RecGuideConfig
from .base import AIMD, BlockPolicy, ConcurrencyTable, FixedBlock
from .oracle import Oracle
from .price import Price, Prices, solve_price
from .verification_guided import VerificationGuided

__all__ = [
    "AIMD",
    "BlockPolicy",
    "ConcurrencyTable",
    "FixedBlock",
    "Oracle",
    "Policies",
    "Price",
    "Prices",
    "VerificationGuided",
    "solve_price",
]

Tables = tuple[ProgressTable, CostProfile]


class Policies:
    """The policies in use. Each is made once, so that requests with the same options share what it learns."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, int, str | None], BlockPolicy] = {}
        self._lock = threading.Lock()

    def of(self, config: RecGuideConfig, tables: Callable[[], Tables]) -> BlockPolicy:
        """
        The policy that a config asks for, by name or as an object.

        Args:
            config (`RecGuideConfig`): `policy`, `block_size`, `tables`.
            tables (callable): reads the tables; called only for a policy that needs them, for the first time.
        """
        if not isinstance(config.policy, str):
            own: BlockPolicy = config.policy
            return own
        key = (config.policy, config.block_size, config.tables)
        with self._lock:
            if key not in self._made:
                self._made[key] = _make(config, tables)
            return self._made[key]


def _make(config: RecGuideConfig, tables: Callable[[], Tables]) -> BlockPolicy:
    match config.policy:
        case "concurrency_table":
            return ConcurrencyTable()
        case "aimd":
            return AIMD()
        case "verification_guided":
            return VerificationGuided(*tables())
        case _:
            return FixedBlock(config.block_size)
