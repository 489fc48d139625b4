"""From recorded rounds to the tables of [`~calibration.ProgressTable`]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import ALL, LARGEST_BLOCK, Fingerprint, ProgressTable, Stratum, stratum_of
from .errors import CalibrationError, MissingDependencyError
from .structs import Outcome, RoundRecord

BLOCK_SIZES = (8, 16, 32)
MOST_BINS = 24
LEAST_ROUNDS = 40
"""In a bin; a stratum with fewer is left out."""

Observation = tuple[str, float, int]
"""A round as its policy would have met it: stratum, certainty, and the tokens that a block of 32 commits."""


def fit_progress(
    prompts: Sequence[Sequence[RoundRecord]],
    fingerprint: Fingerprint,
    entropy_cap: int | None = None,
    environment: Mapping[str, Any] | None = None,
    folds: int = 5,
) -> ProgressTable:
    """
    Fit V_B(s, z) from one recording with blocks of 32.

    What blocks of 8 and 16 would have committed, and shown, is read off the same rounds cut to their length: a small bias, since their
    next rounds would have begun elsewhere.

    Args:
        prompts (`Sequence[Sequence[RoundRecord]]`): each prompt's rounds in order, of strategy `linear` with blocks of 32.
        fingerprint (`Fingerprint`): of the setup that they were recorded on.
        entropy_cap (`int`, *optional*): entropies of a round that count.
        environment (`Mapping`, *optional*): goes into the table.
        folds (`int`, defaults to 5): the quality is that of predictions for prompts left out of the fit.

    Raises:
        CalibrationError: too few rounds.
        MissingDependencyError: scipy is not installed.
    """
    by_prompt = [list(_observations(rounds, entropy_cap)) for rounds in prompts]
    table = ProgressTable(fingerprint, _fit(by_prompt), entropy_cap, {}, environment or {})
    predicted, actual = [], []
    for fold in range(folds):
        kept = [seen for i, seen in enumerate(by_prompt) if i % folds != fold]
        left_out = [seen for i, seen in enumerate(by_prompt) if i % folds == fold]
        strata = _fit(kept)
        for name, certainty, committed in (o for seen in left_out for o in seen):
            stratum = strata.get(name, strata[ALL])
            row = stratum.expected[stratum.bin_of(certainty)]
            predicted.append([row[size] for size in BLOCK_SIZES])
            actual.append([min(committed, size) for size in BLOCK_SIZES])
    return ProgressTable(
        fingerprint, table.strata, entropy_cap, _quality(np.array(predicted), np.array(actual)), table.environment
    )


def _observations(rounds: Sequence[RoundRecord], entropy_cap: int | None) -> Iterator[Observation]:
    """Every round with a past, as a policy that had asked for 8, for 16 and for 32 before it would have met it."""
    for i, (before, record) in enumerate(pairwise(rounds)):
        # An end, or too little left to write, says nothing of what would have been committed.
        if record.outcome is Outcome.STOPPED or record.block_size != LARGEST_BLOCK:
            continue
        for size in BLOCK_SIZES:
            past = [r.entropies[:size][:entropy_cap] for r in rounds[max(i - 1, 0) : i + 1]]
            certainty = -sum(sum(entropies) / len(entropies) for entropies in past) / len(past)
            was_full = len(before.committed) >= size
            yield stratum_of(size, was_full), certainty, len(record.committed)


def _fit(by_prompt: Sequence[Sequence[Observation]]) -> dict[str, Stratum]:
    seen: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for observations in by_prompt:
        for name, certainty, committed in observations:
            seen[name].append((certainty, committed))
            seen[ALL].append((certainty, committed))
    if len(seen[ALL]) < LEAST_ROUNDS:
        raise CalibrationError(
            f"{len(seen[ALL]) // len(BLOCK_SIZES)} rounds with a past are too few to fit a table; expected at least "
            f"{-(-LEAST_ROUNDS // len(BLOCK_SIZES))}. Give more prompts, or longer outputs."
        )
    return {
        name: _fit_stratum(np.array(rounds, dtype=float))
        for name, rounds in seen.items()
        if len(rounds) >= LEAST_ROUNDS
    }


def _fit_stratum(rounds: NDArray[np.float64]) -> Stratum:
    """`rounds`: `float64[N, 2]`, certainty and committed tokens."""
    try:
        from scipy.optimize import isotonic_regression
    except ImportError as error:
        raise MissingDependencyError('Fitting needs scipy: pip install "recguide[calibrate]".') from error
    certainty, committed = rounds.T
    bins = int(np.clip(len(rounds) // LEAST_ROUNDS, 1, MOST_BINS))
    edges = np.unique(np.quantile(certainty, np.arange(1, bins) / bins))
    place = np.searchsorted(edges, certainty, side="right")
    counts = np.bincount(place, minlength=len(edges) + 1)
    edges, place, counts = _without_empty_bins(edges, place, counts)
    survival = np.empty((len(counts), LARGEST_BLOCK))
    for k in range(1, LARGEST_BLOCK + 1):
        share = np.bincount(place, weights=committed >= k, minlength=len(counts)) / counts
        # The surer the verifier was, the more may be expected.
        survival[:, k - 1] = isotonic_regression(share, weights=counts).x
    survival = np.minimum.accumulate(survival, axis=1)
    return Stratum(tuple(edges.tolist()), tuple(map(tuple, survival.tolist())), tuple(counts.tolist()))


def _without_empty_bins(
    edges: NDArray[np.float64], place: NDArray[np.intp], counts: NDArray[np.intp]
) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Equal certainties (many are 0) can leave a bin without rounds; it goes to its neighbour."""
    kept = counts > 0
    if kept.all():
        return edges, place, counts
    edges = edges[kept[1:]] if kept[0] else edges[kept[1:]][1:]
    return edges, (np.cumsum(kept) - 1)[place], counts[kept]


def _quality(predicted: NDArray[np.float64], actual: NDArray[np.float64]) -> dict[str, Any]:
    """How far predictions for unseen prompts are right, by block size: bias in tokens, and the share of variance explained."""
    quality: dict[str, Any] = {"rounds": len(actual)}
    for column, size in enumerate(BLOCK_SIZES):
        error, spread = predicted[:, column] - actual[:, column], actual[:, column].var()
        quality[str(size)] = {
            "mean": float(actual[:, column].mean()),
            "bias": float(error.mean()),
            "explained": float(1 - (error**2).mean() / spread) if spread else 0.0,
        }
    return quality
