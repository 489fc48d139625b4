"""
A model of which only the acceptance is known: it verifies by a recording, and drafts what that says would be accepted.

So the engine's own rounds run without weights. Places are tokens written: 0 is the first token of an output. Each has four token ids
of its own, the first of which is right; so a draft that is off by one place is wrong everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from math import erf, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .adapter import Drafter, ModelAdapter, Predictions
from .calibration import LARGEST_BLOCK, DraftOdds
from .dense_kv import KVCache
from .sampling import Sampling
from .segments import Plan, Segment

DATA = Path(__file__).parent / "data"
PREDICTION = 0.3
"""With it a round's mean entropy tells as much of the next round as in recordings of the embedded model: given its own length, a rank
correlation of 0.3. Drafts are then as sure of themselves as there."""
CONTINUED = 0.75
"""Of the full blocks behind which a new block would be wrong at once, those whose continuation begins right all the same. Where 80 % of
blocks get past a round's end, that makes the 95 % that are published for NLD-8B ([`~calibration.DraftOdds`])."""
IDS = 4
"""Of each place."""
ROOM = 3 * LARGEST_BLOCK
"""Places behind the end of a text that a draft may speak of."""

LEFT = (16, 8, 4, 2, 1)
"""The probabilities of accepted tokens have a law of their own for each number of tokens up to the first wrong one, that one included."""
_CHOICES = {1: (1, 0, 2), 2: (1, 2, 0), 3: (1, 2, 3)}
"""Of a wrong guess, by the rank of the right token behind it: its choices, beyond the right token's id."""

Prediction = tuple[list[int], tuple[float, float]]
"""A place's likeliest three tokens, and the probabilities of the first two."""


def right_token(place: int) -> int:
    return IDS * place


class SimulatedText:
    """
    What a model predicts at each place of one request.

    A draft is right up to where a block that begins with it would be rejected. What follows, and the probabilities, have the rates and laws
    of `data/drafts.json`, recorded with the embedded model. How often the right token is a rejected one's second or third choice is in
    [`~calibration.DraftOdds`]. All is drawn by place: drafts that begin elsewhere, but are as right, are as sure.

    Args:
        ahead (`int64[T]`), entropies (`float64[T]`): as in [`~simulator.Recording`].
        seed (`Sequence[int]`): of all that is drawn.
        prediction (`float`):
            How much probabilities say of acceptance, 0 … 1. At [`PREDICTION`] they are as recorded; below, so much rarer, and
            else from the law of all tokens together; above, they come the more often from that law's upper part for each right token
            and from its lower part for each wrong one.
    """

    def __init__(
        self, ahead: NDArray[np.int64], entropies: NDArray[np.float64], seed: Sequence[int], prediction: float
    ) -> None:
        generator = np.random.default_rng(seed)
        count = len(ahead) + ROOM
        of_error, of_law, of_rank, of_share, self._later = generator.random((5, count))
        self._error = _first_errors(ahead, of_error)
        self._entropies = [*entropies.tolist(), *[0.0] * ROOM]
        self._behind: dict[int, list[bool]] = {}

        recorded, sure = min(prediction / PREDICTION, 1.0), max(prediction - PREDICTION, 0.0) / (1 - PREDICTION)
        laws, odds = _laws(), DraftOdds()
        wrong, logits, shares = laws["wrong"], laws["logit"], laws["share"]
        is_second = of_rank < odds.second[0]
        ranks = np.where(is_second, 1, np.where(of_rank < odds.second[0] + odds.third, 2, 3))
        self._choices = [_CHOICES[rank] for rank in ranks.tolist()]

        def drawn(kinds: Sequence[str], draws: NDArray[np.float64], right: bool) -> list[list[tuple[float, float]]]:
            """Probabilities of the first and second choice, by kind and place."""
            common = _drawn(logits["all"], draws)
            telling = _drawn(logits["all"], wrong + (1 - wrong) * draws if right else wrong * draws)
            second_or_not = ("right", "right") if right else ("second", "other")
            own_share = np.where(is_second, *(_drawn(shares[kind], of_share) for kind in second_or_not))
            share = np.where(of_law < recorded, own_share, _drawn(shares["all"], of_share))
            found = []
            for kind in kinds:
                own = np.where(of_law < recorded, _drawn(logits[kind], draws), common)
                first = 1 / (1 + np.exp(-np.where(of_law < sure, telling, own)))
                second = np.minimum(share * (1 - first), first)
                found.append(list(zip(first.tolist(), second.tolist(), strict=True)))
            return found

        # Sure and unsure stretches before the first wrong token, and behind it.
        before, behind = (_stretches(generator, count) for _ in range(2))
        self._accepted = drawn([f"accepted {left}" for left in LEFT], before, right=True)
        (self._later_right,) = drawn(["later_right"], behind, right=True)
        self._rejected, self._later_wrong = drawn(["rejected", "later_wrong"], behind, right=False)

    def verified(self, place: int, count: int) -> tuple[list[Prediction], list[float]]:
        """The text itself, and the verifier's entropies."""
        tokens = range(right_token(place), right_token(place + count), IDS)
        return [([token], (1.0, 0.0)) for token in tokens], self._entropies[place : place + count]

    def drafted(self, place: int, count: int, sound: bool) -> list[Prediction]:
        """
        A draft for `count` places, 32 at the most.

        Args:
            sound (`bool`): what it takes as given is the text; otherwise it goes on as behind a wrong token.
        """
        error = self._error[place] if sound else place - 1
        stop = place + count
        found: list[Prediction] = []
        start = place
        for left, probabilities in zip(LEFT, self._accepted, strict=True):
            # Of one that is wrong nowhere, all tokens are far from where it would be.
            end = min(error - left + 1, stop) if error < place + LARGEST_BLOCK else stop
            if end > start:
                found += [(_right(i), both) for i, both in enumerate(probabilities[start:end], start=start)]
                start = end
        if place <= error < stop:
            found.append((self._wrong(error), self._rejected[error]))
        if error + 1 < stop:
            for i, right in enumerate(self._from(error)[: stop - error - 1], start=error + 1):
                found.append((_right(i), self._later_right[i]) if right else (self._wrong(i), self._later_wrong[i]))
        return found

    def _wrong(self, place: int) -> list[int]:
        return [right_token(place) + choice for choice in self._choices[place]]

    def _from(self, error: int) -> list[bool]:
        """Which tokens of the 32 places behind a draft's first wrong one are right."""
        if error not in self._behind:
            anew = self._error[error + 1]
            rates, right = _laws()["later"], True
            behind = self._behind[error] = []
            for place in range(error + 1, error + 1 + LARGEST_BLOCK):
                against = 0 if place < anew else 1 if place == anew else 2
                right = bool(self._later[place] < rates["after_right" if right else "after_wrong"][against])
                behind.append(right)
        return self._behind[error]


def _right(place: int) -> list[int]:
    token = right_token(place)
    return [token, token + 1, token + 2]


def _first_errors(ahead: NDArray[np.int64], draws: NDArray[np.float64]) -> list[int]:
    """`[T + ROOM]`: the place of the first wrong token of a draft that begins at each place; behind the text all are."""
    length = len(ahead)
    reach = ahead.copy()
    # Behind a whole accepted block, though not behind the text.
    full = np.arange(LARGEST_BLOCK - 1, length - 1)
    full = full[(ahead[full] == 1) & (ahead[full - LARGEST_BLOCK + 1] == LARGEST_BLOCK) & (draws[full] < CONTINUED)]
    reach[full] = np.minimum(1 + ahead[full + 1], LARGEST_BLOCK)
    # A block of 32 has 31 drafted tokens; what the next place's block says of the last is known too.
    steps = np.where(reach < LARGEST_BLOCK, reach - 1, np.append(ahead[1:], 1))
    return [*(np.arange(length) + steps).tolist(), *range(length, length + ROOM + 1)]


def _stretches(generator: np.random.Generator, count: int) -> NDArray[np.float64]:
    """`[count]`: uniform draws whose normal scores hang together, as far as those of drafted probabilities do."""
    shared, memory = _laws()["correlation"]
    steps = np.sqrt(1 - memory**2) * generator.standard_normal(count)
    steps[0] /= np.sqrt(1 - memory**2)
    slow = np.array(list(accumulate(steps.tolist(), lambda before, step: memory * before + step)))
    scores = np.sqrt(shared) * slow + np.sqrt(1 - shared) * generator.standard_normal(count)
    return np.array([(1 + erf(score / sqrt(2))) / 2 for score in scores.tolist()])


@cache
def _laws() -> dict[str, Any]:
    laws: dict[str, Any] = json.loads((DATA / "drafts.json").read_text())
    for name in ("logit", "share"):
        laws[name] = {kind: np.array(quantiles) for kind, quantiles in laws[name].items()}
    return laws


def _drawn(quantiles: NDArray[np.float64], draws: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of the law with these equally spaced quantiles."""
    return np.interp(draws, np.linspace(0, 1, len(quantiles)), quantiles)


class SimulatedModel(ModelAdapter):
    """
    Stands in for a model in [`~rounds.run_round`]; what it verifies and drafts comes from texts, what it takes from costs.

    Args:
        texts (`Sequence[SimulatedText]`): of each batch row. Outputs begin at position 1, behind one token.
        forward_ms (callable): query tokens of each request that takes part -> milliseconds.
    """

    def __init__(self, texts: Sequence[SimulatedText], forward_ms: Callable[[Sequence[int]], float]) -> None:
        self._texts, self._forward_ms = texts, forward_ms
        self._drafter, self._refusal = Drafter(filler_token_id=-1), None

    def forward(
        self,
        rows: Sequence[Sequence[Segment]],
        kv: KVCache,
        best: int = 1,
        samplings: Sequence[Sampling | None] = (),
        entropies: bool = False,
    ) -> tuple[Plan, Predictions]:
        predicted: list[Prediction] = []
        nats: list[float] = []
        outputs: list[tuple[tuple[int, int], ...]] = []
        for text, segments in zip(self._texts, rows, strict=True):
            right, spans = 0, []
            for segment in segments:
                start, place = len(predicted), segment.position
                if segment.bidirectional:
                    known = segment.outputs[0]
                    sound = segment.hypothesis - 1 <= right
                    sound &= not known or segment.tokens[0] == right_token(place - 1)
                    predicted += text.drafted(place - 1 + known, len(segment.tokens) - known, sound)
                    nats += [0.0] * (len(predicted) - start)
                else:
                    tokens, own = text.verified(place, len(segment.tokens))
                    predicted += tokens
                    nats += own
                    while right + 1 < len(segment.tokens) and segment.tokens[right + 1] == tokens[right][0][0]:
                        right += 1
                spans.append((start, len(predicted)))
            outputs.append(tuple(spans))
        sizes = [sum(len(segment.tokens) for segment in segments) for segments in rows]
        elapsed = self._forward_ms([size for size in sizes if size]) / 1000
        nothing = torch.empty(0)
        plan = Plan(
            input_ids=nothing,
            position_ids=nothing,
            visible=nothing,
            adapter=None,
            output_rows=None,
            starts=(0, *accumulate(sizes)),
            prefix=(),
            outputs=tuple(outputs),
            causal=False,
        )
        return plan, Predictions(
            best=[tokens for tokens, _ in predicted],
            probabilities=[probabilities for _, probabilities in predicted],
            entropies=nats if entropies else [],
            logits=nothing,
            noise=None,
            seconds=elapsed,
            elapsed=elapsed,
        )
