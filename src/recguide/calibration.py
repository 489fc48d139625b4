"""Tables that policies decide by: what a round costs, and what it may be expected to commit. Measured, saved, checked on load."""

from __future__ import annotations

import json
import logging
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import numpy as np

from .errors import CalibrationError
from .files import whole

logger = logging.getLogger(__name__)

VERSION = 1
BLOCK_SIZES = (8, 16, 32)
"""The paper's."""
LARGEST_BLOCK = max(BLOCK_SIZES)
ALL = "all"
"""The stratum of rounds whatever came before them."""


@dataclass(frozen=True)
class Fingerprint:
    """
    What a table was measured on. A table of another one would mislead, so it is refused.

    Args:
        model (`str`): hash of its configuration and of a sample of every weight.
        dtype (`str`), device (`str`): `"float32"`; `"cpu"`, or a GPU's name.
        backend (`str`): of the attention.
        adapter (`bool`): whether there is a draft adapter.
    """

    model: str
    dtype: str
    device: str
    backend: str
    adapter: bool

    @property
    def folder(self) -> str:
        """Name of the folder for this dtype, device and backend."""
        return "-".join(part.replace(" ", "_").replace("/", "_") for part in (self.dtype, self.device, self.backend))

    def check(self, found: Fingerprint, path: Path) -> None:
        """Raise [`CalibrationError`] if `found`, of the table in `path`, is another one."""
        if found != self:
            differing = [f.name for f in fields(self) if getattr(self, f.name) != getattr(found, f.name)]
            raise CalibrationError(
                f"{path} was measured on another {', '.join(differing)}: it has {found}, this is {self}. Measure anew with "
                "`recguide profile` and `recguide calibrate`."
            )


# --- what a round costs ---


@dataclass(frozen=True)
class RoundCost:
    """Milliseconds of a round of `load` requests with blocks of one size, each `context` tokens long, branches left out."""

    load: int
    block_size: int
    context: int
    draft_ms: float
    verify_ms: float

    @property
    def ms(self) -> float:
        return self.draft_ms + self.verify_ms


@dataclass(frozen=True)
class ForwardCost:
    """
    Milliseconds of one forward, the host's work for it included, of `load` requests with `query_tokens` each: half of them verified, half a
    branch's. Each request is `context` long.
    """

    load: int
    query_tokens: int
    context: int
    ms: float


@dataclass(frozen=True)
class CostProfile:
    """
    The paper's T_C(B): a measured grid, kept raw, since costs are jagged and need not grow with the load.

    Args:
        fingerprint (`Fingerprint`): of the setup.
        rounds (`tuple[RoundCost]`): every load with every block size, at one context or several.
        environment (`dict`): versions and processor, for the reader.
        forwards (`tuple[ForwardCost]`): every load with every number of query tokens; without them verifying forwards of rounds stand in.
    """

    fingerprint: Fingerprint
    rounds: tuple[RoundCost, ...]
    environment: Mapping[str, Any] = field(default_factory=dict)
    forwards: tuple[ForwardCost, ...] = ()

    @property
    def forward_cells(self) -> list[tuple[int, int, float]]:
        """Of forwards: requests, query tokens of each, milliseconds; a cell for each context."""
        if self.forwards:
            return [(cost.load, cost.query_tokens, cost.ms) for cost in self.forwards]
        return [(cost.load, cost.block_size, cost.verify_ms) for cost in self.rounds]

    @cached_property
    def _grid(self) -> dict[int, tuple[list[int], list[float]]]:
        """Loads in order and mean milliseconds over the contexts, by block size."""
        cells: dict[int, dict[int, list[float]]] = {}
        for cost in self.rounds:
            cells.setdefault(cost.block_size, {}).setdefault(cost.load, []).append(cost.ms)
        return {
            size: (sorted(by_load), [sum(by_load[load]) / len(by_load[load]) for load in sorted(by_load)])
            for size, by_load in cells.items()
        }

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self._grid))

    @property
    def loads(self) -> tuple[int, ...]:
        return tuple(sorted({cost.load for cost in self.rounds}))

    def round_ms(self, load: int, block_size: int) -> float:
        """
        Milliseconds of a round, straight lines between measured loads; beyond the last one a round grows in proportion.

        Raises:
            CalibrationError: the block size was not measured.
        """
        if block_size not in self._grid:
            raise CalibrationError(
                f"The profile has no blocks of {block_size}, only {', '.join(map(str, self.block_sizes))}. Run `recguide profile` "
                "with them."
            )
        loads, ms = self._grid[block_size]
        if load > loads[-1]:
            return ms[-1] * load / loads[-1]
        return float(np.interp(load, loads, ms))

    def save(self, directory: Path) -> Path:
        """Write `profile.json` under `directory`; returns its path."""
        return _save(directory, self.fingerprint, "profile", asdict(self))

    @classmethod
    def load(cls, directory: Path, expected: Fingerprint, may_lack: bool = False) -> Self | None:
        """The profile for `expected` under `directory`; [`CalibrationError`] if it is another's, or missing and may not be."""
        if (loaded := _load(directory, expected, "profile", may_lack)) is None:
            return None
        data, found = loaded
        rounds = tuple(RoundCost(**cost) for cost in data["rounds"])
        forwards = tuple(ForwardCost(**cost) for cost in data["forwards"])
        return cls(found, rounds, data["environment"], forwards)


# --- what a round commits ---


@dataclass(frozen=True)
class Stratum:
    """
    Rounds with the same last outcome, in bins of certainty.

    Args:
        edges (`tuple[float]`): between neighbouring bins, ascending.
        survival (`tuple[tuple[float]]`): `[bins][32]`, the odds that k or more of 32 tokens are committed, k = 1 … 32.
        counts (`tuple[int]`): rounds in each bin.
    """

    edges: tuple[float, ...]
    survival: tuple[tuple[float, ...], ...]
    counts: tuple[int, ...]

    @cached_property
    def expected(self) -> list[tuple[float, ...]]:
        """`[bins][33]`: tokens that a block of B commits in the mean, by B."""
        return [(0.0, *accumulate(odds)) for odds in self.survival]

    def bin_of(self, certainty: float) -> int:
        return bisect_right(self.edges, certainty)


@dataclass(frozen=True)
class DraftOdds:
    """
    What a draft's own probabilities say of its verification. Without arguments: what is known of NLD-8B at large.

    Args:
        positions (`tuple[int]`): first block position of each group of positions.
        edges (`tuple[float]`): between bins of the best token's probability.
        accepted (`tuple[tuple[float]]`): `[groups][bins]`, how often a token is accepted where all before it were.
        share_edges (`tuple[float]`), second (`tuple[float]`):
            Bins of the second token's probability as a share of all but the best's, and how often the verifier's token is the
            second where the best was the first to be rejected.
        third (`float`): how often it is the third.
        continuation (`float`): how often, after a whole block, the bonus is a continuation branch's first prediction.
    """

    positions: tuple[int, ...] = (1,)
    edges: tuple[float, ...] = ()
    accepted: tuple[tuple[float, ...], ...] = ()
    share_edges: tuple[float, ...] = ()
    second: tuple[float, ...] = (0.575,)
    third: float = 0.158
    continuation: float = 0.95

    def acceptance(self, probability: float, position: int) -> float:
        """Odds that a drafted token is accepted, given that all before it are."""
        if not self.accepted:
            return probability
        return self.accepted[bisect_right(self.positions, position) - 1][bisect_right(self.edges, probability)]

    def replacement(self, rank: int, probability: float, second_probability: float) -> float:
        """Odds that a rejected token's place is taken by the draft's second (`rank` 0) or third (1) choice."""
        if rank:
            return self.third
        rest = 1 - probability
        share = second_probability / rest if rest > 0 else 0.0
        return self.second[bisect_right(self.share_edges, share)]


@dataclass(frozen=True)
class ProgressTable:
    """
    The paper's V_B(s, z): tokens that a block of B may be expected to commit, from the two rounds before it.

    Args:
        fingerprint (`Fingerprint`): of the setup.
        strata (`Mapping[str, Stratum]`): `all`, and for block sizes B before it `B partial` and `B full`, where enough was seen.
        entropy_cap (`int`, *optional*): entropies of a round that count, from its first; `None`: all.
        odds (`DraftOdds`): what a draft says of its own verification.
        quality (`dict`): how good the prediction is on prompts that it was not fitted to.
        environment (`dict`): versions and processor, for the reader.
    """

    fingerprint: Fingerprint
    strata: Mapping[str, Stratum]
    entropy_cap: int | None = None
    odds: DraftOdds = DraftOdds()
    quality: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    def uncertainty(self, entropies: Sequence[float]) -> float:
        """The paper's e_t: mean entropy of a round's committed positions, in nats."""
        counted = entropies[: self.entropy_cap]
        return sum(counted) / len(counted)

    def expected(self, certainty: float, last_block: int, was_full: bool) -> tuple[float, ...]:
        """Expected tokens by block size, `[33]`; a stratum that was not fitted is replaced by that of all rounds."""
        stratum = self.strata.get(stratum_of(last_block, was_full), self.strata[ALL])
        return stratum.expected[stratum.bin_of(certainty)]

    def save(self, directory: Path) -> Path:
        """Write `calibration.json` under `directory`; returns its path."""
        return _save(directory, self.fingerprint, "calibration", asdict(self))

    @classmethod
    def load(cls, directory: Path, expected: Fingerprint, may_lack: bool = False) -> Self | None:
        """The table for `expected` under `directory`; [`CalibrationError`] if it is another's, or missing and may not be."""
        if (loaded := _load(directory, expected, "calibration", may_lack)) is None:
            return None
        data, found = loaded
        strata = {
            name: Stratum(tuple(s["edges"]), tuple(map(tuple, s["survival"])), tuple(s["counts"]))
            for name, s in data["strata"].items()
        }
        odds = DraftOdds(**{name: _as_tuple(value) for name, value in data["odds"].items()})
        return cls(found, strata, data["entropy_cap"], odds, data["quality"], data["environment"])


def stratum_of(last_block: int, was_full: bool) -> str:
    """The paper's z: the last round's block size, and whether the whole block was accepted."""
    return f"{last_block} {'full' if was_full else 'partial'}"


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


# --- files ---


def _save(directory: Path, owner: Fingerprint, name: str, data: dict[str, Any]) -> Path:
    path = directory / owner.folder / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as file:
        file.write_text(json.dumps({"what": f"recguide {name}", "version": VERSION, **data}) + "\n")
    return path


def _load(
    directory: Path, expected: Fingerprint, name: str, may_lack: bool
) -> tuple[dict[str, Any], Fingerprint] | None:
    path = directory / expected.folder / f"{name}.json"
    if not path.is_file():
        if may_lack:
            logger.info("No %s for this setup (%s); priors are used until times and acceptance are known.", name, path)
            return None
        command = {"profile": "recguide profile", "calibration": "recguide calibrate"}[name]
        raise CalibrationError(f"There is no {name} for this setup: expected {path}. Make it with `{command}`.")
    try:
        data = json.loads(path.read_text())
        kind = (data.pop("what"), data.pop("version"))
        found = Fingerprint(**data.pop("fingerprint"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CalibrationError(f"{path} is not a recguide {name} ({error!r}). Make it anew.") from error
    if kind != (f"recguide {name}", VERSION):
        raise CalibrationError(f"{path} is {kind}; expected {(f'recguide {name}', VERSION)}. Make it anew.")
    expected.check(found, path)
    return data, found
