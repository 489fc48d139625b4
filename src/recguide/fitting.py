"""From recorded rounds to the tables of [`~calibration.ProgressTable`]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .calibration import ALL, LARGEST_BLOCK, DraftOdds, Fingerprint, ProgressTable, Stratum, stratum_of
from .errors import CalibrationError, MissingDependencyError
from .structs import Outcome, RoundRecord

BLOCK_SIZES = (8, 16, 32)
MOST_BINS = 24
LEAST_ROUNDS = 40
"""In a bin; a stratum with fewer is left out."""

POSITIONS = (1, 2, 3, 5, 9, 17)
PRIOR_ROUNDS = 20
"""Weight of all positions together in the rates of one group."""

Observation = tuple[str, float, int]
"""A round as its policy would have met it: stratum, certainty, and the tokens that a block of 32 commits."""


def fit_progress(
    prompts: Sequence[Sequence[RoundRecord]],
    fingerprint: Fingerprint,
    entropy_cap: int | None = None,
    environment: Mapping[str, Any] | None = None,
    folds: int = 5,
    overlapped: Sequence[Sequence[RoundRecord]] = (),
) -> ProgressTable:
    """
    Fit V_B(s, z), and what a draft says of its verification, from one recording with blocks of 32.

    What blocks of 8 and 16 would have committed, and shown, is read off the same rounds cut to their length: a small bias, since their
    next rounds would have begun elsewhere.

    Args:
        prompts (`Sequence[Sequence[RoundRecord]]`): each prompt's rounds in order, of strategy `linear` with blocks of 32.
        fingerprint (`Fingerprint`): of the setup that they were recorded on.
        entropy_cap (`int`, *optional*): entropies of a round that count.
        environment (`Mapping`, *optional*): goes into the table.
        folds (`int`, defaults to 5): the quality is that of predictions for prompts left out of the fit.
        overlapped (`Sequence[Sequence[RoundRecord]]`): rounds of strategy `recguide`, for the odds of continuations.

    Raises:
        CalibrationError: too few rounds.
        MissingDependencyError: scipy is not installed.
    """
    by_prompt = [list(_observations(rounds, entropy_cap)) for rounds in prompts]
    strata = _fit(by_prompt)
    predicted, actual = [], []
    for fold in range(folds):
        kept = [seen for i, seen in enumerate(by_prompt) if i % folds != fold]
        left_out = [seen for i, seen in enumerate(by_prompt) if i % folds == fold]
        of_kept = _fit(kept)
        for name, certainty, committed in (o for seen in left_out for o in seen):
            stratum = of_kept.get(name, of_kept[ALL])
            row = stratum.expected[stratum.bin_of(certainty)]
            predicted.append([row[size] for size in BLOCK_SIZES])
            actual.append([min(committed, size) for size in BLOCK_SIZES])
    odds = _fit_odds([record for rounds in prompts for record in rounds], [r for rounds in overlapped for r in rounds])
    quality = _quality(np.array(predicted), np.array(actual))
    return ProgressTable(fingerprint, strata, entropy_cap, odds, quality, environment or {})


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


def _isotonic(values: NDArray[np.float64], weights: NDArray[Any]) -> NDArray[np.float64]:
    """The nearest values that nowhere fall."""
    try:
        from scipy.optimize import isotonic_regression
    except ImportError as error:
        raise MissingDependencyError('Fitting needs scipy: pip install "recguide[calibrate]".') from error
    fitted: NDArray[np.float64] = isotonic_regression(values, weights=weights).x
    return fitted


def _fit_stratum(rounds: NDArray[np.float64]) -> Stratum:
    """`rounds`: `float64[N, 2]`, certainty and committed tokens."""
    certainty, committed = rounds.T
    edges, place, counts = _bins(certainty, MOST_BINS)
    survival = np.empty((len(counts), LARGEST_BLOCK))
    for k in range(1, LARGEST_BLOCK + 1):
        share = np.bincount(place, weights=committed >= k, minlength=len(counts)) / counts
        # The surer the verifier was, the more may be expected.
        survival[:, k - 1] = _isotonic(share, counts)
    survival = np.minimum.accumulate(survival, axis=1)
    return Stratum(tuple(edges.tolist()), tuple(map(tuple, survival.tolist())), tuple(counts.tolist()))


def _bins(feature: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], NDArray[np.intp], NDArray[np.intp]]:
    """Edges of bins with about equal counts, each value's bin, and the counts; none is empty."""
    bins = int(np.clip(len(feature) // LEAST_ROUNDS, 1, most))
    edges = np.unique(np.quantile(feature, np.arange(1, bins) / bins))
    place = np.searchsorted(edges, feature, side="right")
    counts = np.bincount(place, minlength=len(edges) + 1)
    # Equal values (many certainties are 0) can leave a bin without any; it goes to its neighbour.
    kept = counts > 0
    if not kept.all():
        edges = edges[kept[1:]] if kept[0] else edges[kept[1:]][1:]
        place, counts = (np.cumsum(kept) - 1)[place], counts[kept]
    return edges, place, counts


def _fit_odds(rounds: Sequence[RoundRecord], overlapped: Sequence[RoundRecord]) -> DraftOdds:
    """Rates of acceptance and of replacements over the positions that verification has decided."""
    decided: list[tuple[int, float, bool]] = []
    shares: list[tuple[float, bool]] = []
    thirds: list[bool] = []
    for record in rounds:
        if record.outcome is Outcome.STOPPED:
            continue
        guesses = record.draft.guesses
        decided += [(i, guess.probability, True) for i, guess in enumerate(guesses[: record.accepted], start=1)]
        if record.accepted < len(guesses):
            guess, token = guesses[record.accepted], record.committed[-1]
            decided.append((record.accepted + 1, guess.probability, False))
            if guess.alternatives and guess.probability < 1:
                shares.append((guess.second_probability / (1 - guess.probability), token == guess.alternatives[0]))
                thirds.append(token in guess.alternatives[1:2])
    if len(shares) < LEAST_ROUNDS:
        return DraftOdds()
    position, probability, accepted = (np.array(column, dtype=float) for column in zip(*decided, strict=True))
    edges, pooled = _rates(probability, accepted, MOST_BINS)
    bins = np.searchsorted(edges, probability, side="right")
    groups = np.searchsorted(POSITIONS, position, side="right") - 1
    by_group = []
    for group in range(len(POSITIONS)):
        counts = np.bincount(bins[groups == group], minlength=len(pooled))
        hits = np.bincount(bins[groups == group], weights=accepted[groups == group], minlength=len(pooled))
        rates = (hits + PRIOR_ROUNDS * pooled) / (counts + PRIOR_ROUNDS)
        by_group.append(tuple(_isotonic(rates, counts + PRIOR_ROUNDS).tolist()))
    share, second = (np.array(column, dtype=float) for column in zip(*shares, strict=True))
    share_edges, seconds = _rates(share, second, 8)
    outcomes = [record.outcome for record in overlapped]
    hit, wrong = outcomes.count(Outcome.CONTINUATION_HIT), outcomes.count(Outcome.CONTINUATION_WRONG_TOKEN)
    prior = DraftOdds().continuation
    return DraftOdds(
        POSITIONS,
        tuple(edges.tolist()),
        tuple(by_group),
        tuple(share_edges.tolist()),
        tuple(seconds.tolist()),
        sum(thirds) / len(thirds),
        (hit + prior * PRIOR_ROUNDS) / (hit + wrong + PRIOR_ROUNDS),
    )


def _rates(
    feature: NDArray[np.float64], happened: NDArray[np.float64], most_bins: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Edges of bins, and how often it happened in each (nowhere falling)."""
    edges, place, counts = _bins(feature, most_bins)
    share = np.bincount(place, weights=happened, minlength=len(counts)) / counts
    return edges, _isotonic(share, counts)


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
