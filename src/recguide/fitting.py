"""From recorded rounds to the tables of [`~calibration.ProgressTable`]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from .calibration import ALL, BLOCK_SIZES, LARGEST_BLOCK, DraftOdds, Fingerprint, ProgressTable, Stratum, stratum_of
from .errors import CalibrationError, MissingDependencyError
from .structs import Outcome, RoundRecord

T = TypeVar("T")

MOST_BINS = 24
LEAST_ROUNDS = 40
"""In a bin; a stratum with fewer is left out."""

POSITIONS = (1, 2, 3, 5, 9, 17)
PRIOR_ROUNDS = 20
"""Weight of all positions together in the rates of one group."""
FIRST_ROUNDS = 5
"""Weight of a first table in each bin of a refitted one: it decides what the policy did not meet, and little else."""
RELIABILITY_BINS = 10

Observation = tuple[str, float, int, int]
"""A round as its policy would have met it: stratum, certainty, tokens that it commits, and the block that it did so with."""


def fit_progress(
    prompts: Sequence[Sequence[RoundRecord]],
    fingerprint: Fingerprint,
    entropy_cap: int | None = None,
    environment: Mapping[str, Any] | None = None,
    folds: int = 5,
    overlapped: Sequence[Sequence[RoundRecord]] = (),
    shadowed: Sequence[Sequence[RoundRecord]] = (),
    met: Sequence[Sequence[RoundRecord]] = (),
) -> ProgressTable:
    """
    Fit V_B(s, z), and what a draft says of its verification, from one recording with blocks of 32.

    What blocks of 8 and 16 would have committed, and shown, is read off the same rounds cut to their length: a small bias, since their
    drafts would have been others and their next rounds would have begun elsewhere. `shadowed` measures the first, `met` mends the second.

    Args:
        prompts (`Sequence[Sequence[RoundRecord]]`): each prompt's rounds in order, of strategy `linear` with blocks of 32.
        fingerprint (`Fingerprint`): of the setup that they were recorded on.
        entropy_cap (`int`, *optional*): entropies of a round that count.
        environment (`Mapping`, *optional*): goes into the table.
        folds (`int`, defaults to 5): the quality is that of predictions for prompts left out of the fit.
        overlapped (`Sequence[Sequence[RoundRecord]]`): rounds of strategy `recguide`, for the odds of continuations.
        shadowed (`Sequence[Sequence[RoundRecord]]`):
            For each prompt, rounds of shorter blocks from where one of its rounds began, for the quality alone.
        met (`Sequence[Sequence[RoundRecord]]`):
            Each prompt's rounds under the policy that the table is for. The strata are then refitted to the histories of these rounds;
            what these did not meet, or were too short to show, stays as the first fit has it.

    Raises:
        CalibrationError: too few rounds.
        MissingDependencyError: scipy is not installed.
    """
    by_prompt = [list(_cut(rounds, entropy_cap)) for rounds in prompts]
    met_by_prompt = [list(_met(rounds, entropy_cap)) for rounds in met]
    if met:
        _check_enough(sum(map(len, met_by_prompt)), LEAST_ROUNDS)
    decisions = [_decisions(rounds) for rounds in prompts]
    strata = _fit(by_prompt)
    odds = _fit_odds(decisions, [r.outcome for rounds in overlapped for r in rounds])

    predicted, actual, before, after, committed = [], [], [], [], []
    survivals: list[tuple[NDArray[np.float64], NDArray[np.bool_]]] = []
    for fold in range(folds):
        first = _fit(_kept(by_prompt, fold, folds))
        for name, certainty, tokens, _ in (o for seen in by_prompt[fold::folds] for o in seen):
            row = _expected(first, name, certainty)
            predicted.append([row[size] for size in BLOCK_SIZES])
            actual.append([min(tokens, size) for size in BLOCK_SIZES])
        refitted = _fit(_kept(met_by_prompt, fold, folds), first)
        for name, certainty, tokens, block in (o for seen in met_by_prompt[fold::folds] for o in seen):
            before.append(_expected(first, name, certainty)[block])
            after.append(_expected(refitted, name, certainty)[block])
            committed.append(tokens)
        odds_of_kept = _fit_odds(_kept(decisions, fold, folds))
        survivals += [_survival(odds_of_kept, rounds) for rounds in prompts[fold::folds]]

    quality: dict[str, Any] = {"rounds": len(actual)}
    for size, ours, truth in zip(BLOCK_SIZES, np.array(predicted).T, np.array(actual).T, strict=True):
        quality[str(size)] = _errors(ours, truth)
    quality["acceptance"] = _reliability(*(np.concatenate(column) for column in zip(*survivals, strict=True)))
    if any(shadowed):
        quality["shadow"] = _truncation(prompts, shadowed)
    if met:
        strata = _fit(met_by_prompt, strata)
        quality["on_policy"] = {"rounds": len(committed)} | {
            name: _errors(np.array(ours), np.array(committed)) for name, ours in (("before", before), ("after", after))
        }
    return ProgressTable(fingerprint, strata, entropy_cap, odds, quality, environment or {})


def _kept(by_prompt: Sequence[T], fold: int, folds: int) -> list[T]:
    return [one for i, one in enumerate(by_prompt) if i % folds != fold]


# --- what a block commits ---


def _cut(rounds: Sequence[RoundRecord], entropy_cap: int | None) -> Iterator[Observation]:
    """Every round with a past, as a policy that had asked for 8, for 16 and for 32 before it would have met it."""
    for i, (before, record) in enumerate(pairwise(rounds)):
        # An end, or too little left to write, says nothing of what would have been committed.
        if record.outcome is Outcome.STOPPED or record.block_size != LARGEST_BLOCK:
            continue
        for size in BLOCK_SIZES:
            certainty = _certainty([r.entropies[:size][:entropy_cap] for r in rounds[max(i - 1, 0) : i + 1]])
            yield stratum_of(size, len(before.committed) >= size), certainty, len(record.committed), LARGEST_BLOCK


def _met(rounds: Sequence[RoundRecord], entropy_cap: int | None) -> Iterator[Observation]:
    """Every round with a past, as the policy that chose its block has met it."""
    for i, (before, record) in enumerate(pairwise(rounds)):
        if record.outcome is Outcome.STOPPED or before.block_size not in BLOCK_SIZES:
            continue
        certainty = _certainty([r.entropies[:entropy_cap] for r in rounds[max(i - 1, 0) : i + 1]])
        was_full = len(before.committed) == before.block_size
        yield stratum_of(before.block_size, was_full), certainty, len(record.committed), record.block_size


def _certainty(past: Sequence[Sequence[float]]) -> float:
    return -sum(sum(entropies) / len(entropies) for entropies in past) / len(past)


def _fit(by_prompt: Sequence[Sequence[Observation]], first: Mapping[str, Stratum] | None = None) -> dict[str, Stratum]:
    """The strata with enough rounds; where there is a `first` table, its own stand in for the others."""
    seen: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
    for observations in by_prompt:
        for name, certainty, committed, block in observations:
            seen[name].append((certainty, committed, block))
            seen[ALL].append((certainty, committed, block))
    if first is None:
        _check_enough(len(seen[ALL]) // len(BLOCK_SIZES), -(-LEAST_ROUNDS // len(BLOCK_SIZES)))
    return dict(first or {}) | {
        name: _fit_stratum(np.array(rounds, dtype=float), None if first is None else first.get(name, first[ALL]))
        for name, rounds in seen.items()
        if len(rounds) >= LEAST_ROUNDS
    }


def _check_enough(rounds: int, least: int) -> None:
    if rounds < least:
        raise CalibrationError(
            f"{rounds} rounds with a past are too few to fit a table; expected at least {least}. Give more prompts, or longer outputs."
        )


def _expected(strata: Mapping[str, Stratum], name: str, certainty: float) -> tuple[float, ...]:
    stratum = strata.get(name, strata[ALL])
    return stratum.expected[stratum.bin_of(certainty)]


def _isotonic(values: NDArray[np.float64], weights: NDArray[Any]) -> NDArray[np.float64]:
    """The nearest values that nowhere fall."""
    try:
        from scipy.optimize import isotonic_regression
    except ImportError as error:
        raise MissingDependencyError('Fitting needs scipy: pip install "recguide[calibrate]".') from error
    fitted: NDArray[np.float64] = isotonic_regression(values, weights=weights).x
    return fitted


def _fit_stratum(rounds: NDArray[np.float64], first: Stratum | None) -> Stratum:
    """
    The odds that k or more tokens are committed, by bins of certainty.

    A block that was accepted whole says "so much at least". So the odds are a product of steps, each from the rounds that could show it (E.
    Kaplan, P. Meier, Nonparametric estimation from incomplete observations, 1958): of those that committed k - 1 tokens and had a block
    of k, the share that committed k. That is sound where, in a bin, a block's length has nothing to do with what it commits beyond
    what the bin knows; a policy chooses it by certainty and the last outcome, which are what makes the bin.

    Args:
        rounds (`np.ndarray`): `float64[N, 3]`: certainty, committed tokens, block.
        first (`Stratum`, *optional*): counts as a few rounds of 32 ([`FIRST_ROUNDS`]) in each of its bins, which are kept.
            Needed where blocks are shorter than 32.
    """
    certainty, committed, block = rounds.T
    if first is None:
        edges, place, counts = _bins(certainty, MOST_BINS)
        known = np.zeros((len(counts), LARGEST_BLOCK))
    else:
        # Its bins, since a policy meets some certainties seldom, and another load may meet them often.
        edges, known = np.array(first.edges), FIRST_ROUNDS * np.array(first.survival)
        place = np.searchsorted(edges, certainty, side="right")
        counts = np.bincount(place, minlength=len(known))
    odds = np.ones(len(counts))
    survival = np.ones((len(counts), LARGEST_BLOCK))
    for k in range(2, LARGEST_BLOCK + 1):
        shown = (committed >= k - 1) & (block >= k)
        passed = np.bincount(place, weights=shown & (committed >= k), minlength=len(counts)) + known[:, k - 1]
        of = np.bincount(place, weights=shown, minlength=len(counts)) + known[:, k - 2]
        # Where none was left there is nothing to pass on.
        odds = odds * np.divide(passed, of, out=np.zeros(len(counts)), where=of > 0)
        # The surer the verifier was, the more may be expected.
        looked = np.bincount(place, weights=block >= k, minlength=len(counts)) + known[:, 0]
        survival[:, k - 1] = _isotonic(odds, looked)
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


# --- what a draft says ---


@dataclass
class _Decisions:
    """
    What verification has decided of one prompt's drafts.

    Args:
        accepted (`list[tuple[int, float, bool]]`): block position, the best token's probability, whether it was accepted.
        replaced (`list[tuple[float, bool, bool]]`): of rejected ones the second token's share, whether the verifier's was it or the third.
    """

    accepted: list[tuple[int, float, bool]]
    replaced: list[tuple[float, bool, bool]]


def _decisions(rounds: Sequence[RoundRecord]) -> _Decisions:
    found = _Decisions([], [])
    for record in rounds:
        if record.outcome is Outcome.STOPPED:
            continue
        guesses = record.draft.guesses
        found.accepted += [(i, guess.probability, True) for i, guess in enumerate(guesses[: record.accepted], start=1)]
        if record.accepted < len(guesses):
            guess, token = guesses[record.accepted], record.committed[-1]
            found.accepted.append((record.accepted + 1, guess.probability, False))
            if guess.alternatives and guess.probability < 1:
                share = guess.second_probability / (1 - guess.probability)
                found.replaced.append((share, token == guess.alternatives[0], token in guess.alternatives[1:2]))
    return found


def _fit_odds(decisions: Sequence[_Decisions], outcomes: Sequence[Outcome] = ()) -> DraftOdds:
    """Rates of acceptance and of replacements; `outcomes`: of rounds with branches."""
    replaced = [one for prompt in decisions for one in prompt.replaced]
    if len(replaced) < LEAST_ROUNDS:
        return DraftOdds()
    position, probability, accepted = np.array([one for prompt in decisions for one in prompt.accepted], dtype=float).T
    edges, pooled = _rates(probability, accepted, MOST_BINS)
    bins = np.searchsorted(edges, probability, side="right")
    groups = np.searchsorted(POSITIONS, position, side="right") - 1
    by_group = []
    for group in range(len(POSITIONS)):
        counts = np.bincount(bins[groups == group], minlength=len(pooled))
        hits = np.bincount(bins[groups == group], weights=accepted[groups == group], minlength=len(pooled))
        rates = (hits + PRIOR_ROUNDS * pooled) / (counts + PRIOR_ROUNDS)
        by_group.append(tuple(_isotonic(rates, counts + PRIOR_ROUNDS).tolist()))
    share, second, third = np.array(replaced, dtype=float).T
    share_edges, seconds = _rates(share, second, 8)
    hit, wrong = outcomes.count(Outcome.CONTINUATION_HIT), outcomes.count(Outcome.CONTINUATION_WRONG_TOKEN)
    prior = DraftOdds().continuation
    return DraftOdds(
        POSITIONS,
        tuple(edges.tolist()),
        tuple(by_group),
        tuple(share_edges.tolist()),
        tuple(seconds.tolist()),
        float(third.mean()),
        (hit + prior * PRIOR_ROUNDS) / (hit + wrong + PRIOR_ROUNDS),
    )


def _rates(
    feature: NDArray[np.float64], happened: NDArray[np.float64], most_bins: int
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Edges of bins, and how often it happened in each (nowhere falling)."""
    edges, place, counts = _bins(feature, most_bins)
    share = np.bincount(place, weights=happened, minlength=len(counts)) / counts
    return edges, _isotonic(share, counts)


def _survival(odds: DraftOdds, rounds: Sequence[RoundRecord]) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """For every drafted token of whole rounds, the odds that it and all before it are accepted, and whether they were."""
    predicted: list[float] = []
    happened: list[bool] = []
    for record in rounds:
        if record.outcome is not Outcome.STOPPED:
            steps = (odds.acceptance(g.probability, i) for i, g in enumerate(record.draft.guesses, start=1))
            predicted += accumulate(steps, mul)
            happened += [i <= record.accepted for i in range(1, record.block_size)]
    return np.array(predicted, dtype=np.float64), np.array(happened, dtype=np.bool_)


# --- how good it is ---


def _errors(predicted: NDArray[np.float64], actual: NDArray[Any]) -> dict[str, float]:
    """How far predictions for unseen prompts are right: mean of the truth and bias in tokens, and the share of variance explained."""
    error, spread = predicted - actual, actual.var()
    return {
        "mean": float(actual.mean()),
        "bias": float(error.mean()),
        "explained": float(1 - (error**2).mean() / spread) if spread else 0.0,
    }


def _reliability(predicted: NDArray[np.float64], happened: NDArray[np.bool_]) -> dict[str, Any]:
    """
    How far odds are right: Brier's score, the expected calibration error, and the curve behind it.

    `curve` has an entry for each tenth of the odds that occurs: their mean, how often it happened, how many they were. The calibration
    error is the mean distance of the first two, weighted with the third.
    """
    place = np.minimum((predicted * RELIABILITY_BINS).astype(int), RELIABILITY_BINS - 1)
    count = np.bincount(place, minlength=RELIABILITY_BINS)
    occurs = count > 0
    mean, share = (
        np.bincount(place, weights=column, minlength=RELIABILITY_BINS)[occurs] / count[occurs]
        for column in (predicted, happened)
    )
    return {
        "brier": float(((predicted - happened) ** 2).mean()),
        "calibration_error": float((abs(mean - share) * count[occurs]).sum() / len(predicted)),
        "curve": [list(point) for point in zip(mean.tolist(), share.tolist(), count[occurs].tolist(), strict=True)],
    }


def _truncation(prompts: Sequence[Sequence[RoundRecord]], shadowed: Sequence[Sequence[RoundRecord]]) -> dict[str, Any]:
    """What shorter blocks commit in truth, beside what is read off those of 32: means, and the standard error of their difference."""
    found: dict[str, Any] = {}
    for size in BLOCK_SIZES[:-1]:
        pairs = [
            (min(len(recorded.committed), size), len(record.committed))
            for rounds, shadows in zip(prompts, shadowed, strict=True)
            for record in shadows
            for recorded in rounds
            if record.block_size == size and recorded.position == record.position
        ]
        truncated, true = np.array(pairs, dtype=float).T
        found[str(size)] = {
            "rounds": len(pairs),
            "truncated": float(truncated.mean()),
            "true": float(true.mean()),
            "standard_error": float((truncated - true).std() / len(pairs) ** 0.5),
        }
    return found
