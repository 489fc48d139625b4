"""How long each request's next block is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ..calibration import CostProfile, ProgressTable
from ..config import RecGuideConfig
from .auto import Auto, AutoBranches
from .base import AIMD, BlockPolicy, ConcurrencyTable, FixedBlock
from .oracle import Oracle
from .price import Prices, Ratio, solve_price
from .verification_guided import VerificationGuided

__all__ = [
    "AIMD",
    "SHELF",
    "Auto",
    "AutoBranches",
    "BlockPolicy",
    "ConcurrencyTable",
    "FixedBlock",
    "Oracle",
    "Policies",
    "PolicyShelf",
    "Prices",
    "Ratio",
    "VerificationGuided",
    "solve_price",
]

Tables = tuple[ProgressTable | None, CostProfile | None]


class Policies:
    """The policies in use. Each is made once, so that requests with the same options share what it learns."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, Any, int, str | None], BlockPolicy] = {}
        self._lock = threading.Lock()

    def of(self, config: RecGuideConfig, tables: Callable[[], Tables]) -> BlockPolicy:
        """
        The policy that a config asks for, by name or as an object.

        Args:
            config (`RecGuideConfig`): `strategy`, `policy`, `block_size`, `tables`.
            tables (callable): reads the tables; called only for a policy that needs them, for the first time.
        """
        if not isinstance(config.policy, str):
            own: BlockPolicy = config.policy
            return own
        key = (config.strategy, config.policy, config.block_size, config.tables)
        with self._lock:
            if key not in self._made:
                self._made[key] = _make(config, tables)
            return self._made[key]

    def prices(self) -> dict[str, float]:
        """Of those in use that price time ([`BlockPolicy.price`]), by the strategy's or policy's name."""
        with self._lock:
            named = [("auto" if key[0] == "auto" else key[1], policy.price) for key, policy in self._made.items()]
        return {name: price for name, price in named if price is not None}


class PolicyShelf:
    """
    Policies between uses, so that what they have learned of a model is kept.

    A call of `generate`, or an engine, takes them from the shelf and puts them back when it is done; one that runs beside it gets
    others.
    """

    def __init__(self) -> None:
        self._idle: WeakKeyDictionary[Any, list[Policies]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def take(self, model: Any) -> Policies:
        with self._lock:
            idle = self._idle.setdefault(model, [])
            return idle.pop() if idle else Policies()

    def put_back(self, model: Any, policies: Policies) -> None:
        with self._lock:
            self._idle.setdefault(model, []).append(policies)


SHELF = PolicyShelf()


def _make(config: RecGuideConfig, tables: Callable[[], Tables]) -> BlockPolicy:
    if config.strategy == "auto":
        return Auto(*tables())
    match config.policy:
        case "concurrency_table":
            return ConcurrencyTable()
        case "aimd":
            return AIMD()
        case "verification_guided":
            progress, costs = tables()
            assert progress is not None
            assert costs is not None
            return VerificationGuided(progress, costs)
        case _:
            return FixedBlock(config.block_size)
