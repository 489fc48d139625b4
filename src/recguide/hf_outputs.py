"""What `generate` gives back, and how each committed token is chosen where somebody looks at its scores or its prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList

from .adapter import ModelAdapter
from .hf_processors import for_row
from .hooks import Hook
from .structs import RoundRecord


@dataclass
class RecGuideOutput(GenerateDecoderOnlyOutput):
    """
    `generate`'s output where `return_dict_in_generate=True`; every field but `sequences` is None unless asked for.

    Args:
        sequences (`torch.LongTensor` of shape `(batch, length)`): prompts and outputs.
        scores, logits (`tuple` of `torch.FloatTensor` of shape `(batch, vocab)`): processed scores and the model's logits
            of each new token, with `output_scores=True` and `output_logits=True`.
        logprobs (`torch.FloatTensor` of shape `(batch, new)`):
            Natural log-probability of each new token under the model's own logits, with `output_logprobs=True`. 0 after a row's end.
        top_logprobs (`tuple` of `torch.FloatTensor` and `torch.LongTensor`, each of shape `(batch, new, top_logprobs)`):
            Those of the likeliest tokens at each place, falling, and their ids, with `top_logprobs=` above 0. 0 after a row's end.
        seeds (`tuple[int]`): each row's seed, always there where tokens were sampled: a row decoded alone with it is the same.
        statistics (`dict`):
            Of all rows together, always there: see [`DecodeMetrics.summary`]; and `looping_tokens` of each row, those at its end that are a
            repetition loop ([`looping_tokens`]).
        records (`tuple[tuple[RoundRecord]]`): each row's rounds, with `output_records=True`.
    """

    logprobs: Tensor | None = None
    top_logprobs: tuple[Tensor, Tensor] | None = None
    seeds: tuple[int, ...] | None = None
    statistics: dict[str, Any] | None = None
    records: tuple[tuple[RoundRecord, ...], ...] | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """
    What the model's own logits say of a new token's place, as natural logarithms.

    Args:
        logprob (`float`): of the token itself.
        top (`tuple[tuple[int, float]]`): the likeliest tokens there, each with its own, falling.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class RecordKeeper(Hook):
    """Keeps the round records of each row."""

    rows: list[list[RoundRecord]] = field(default_factory=list)

    def on_commit(self, record: RoundRecord) -> None:
        self.rows[record.request].append(record)


class _Kept:
    """Tensors of committed tokens by row, given out by column; a column that all rows have is stacked once."""

    def __init__(self, rows: int) -> None:
        self._rows: list[list[Tensor]] = [[] for _ in range(rows)]
        self._stacked: list[Tensor] = []

    def add(self, row: int, value: Tensor) -> None:
        self._rows[row].append(value)

    def of_row(self, row: int, start: int) -> list[Tensor]:
        return self._rows[row][start:]

    def cut(self, row: int, length: int) -> None:
        del self._rows[row][length:]
        del self._stacked[length:]

    def columns(self, length: int) -> tuple[Tensor, ...]:
        """One `[B, ...]` a column; a row that had ended by then is zeros."""
        while len(self._stacked) < length and all(len(row) > len(self._stacked) for row in self._rows):
            self._stacked.append(torch.stack([row[len(self._stacked)] for row in self._rows]))
        blank = torch.zeros_like(self._rows[0][0])
        rest = (
            torch.stack([row[i] if i < len(row) else blank for row in self._rows])
            for i in range(len(self._stacked), length)
        )
        return (*self._stacked[:length], *rest)


class ScoreRecorder:
    """Keeps logits, processed scores and log-probabilities of each committed token, where they are asked for."""

    def __init__(
        self, rows: int, scores: bool = False, logits: bool = False, logprobs: bool = False, top_logprobs: int = 0
    ) -> None:
        self._scores = _Kept(rows) if scores else None
        self._logits = _Kept(rows) if logits else None
        self._logprobs = _Kept(rows) if logprobs else None
        self._top = (_Kept(rows), _Kept(rows)) if logprobs and top_logprobs else None
        self._top_logprobs = top_logprobs

    @property
    def active(self) -> bool:
        return bool(self._kept)

    @property
    def _kept(self) -> list[_Kept]:
        return [kept for kept in (self._scores, self._logits, self._logprobs, *(self._top or ())) if kept is not None]

    def record(self, row: int, logits: Tensor, scores: Tensor, token: int) -> None:
        if self._logits is not None:
            self._logits.add(row, logits)
        if self._scores is not None:
            self._scores.add(row, scores)
        if self._logprobs is not None:
            logprobs = logits.log_softmax(-1)
            self._logprobs.add(row, logprobs[token])
            if self._top is not None:
                for kept, value in zip(self._top, logprobs.topk(self._top_logprobs), strict=True):
                    kept.add(row, value)

    def cut(self, row: int, length: int) -> None:
        """Forget what was recorded of a row past its first `length` tokens, which were taken back."""
        for kept in self._kept:
            kept.cut(row, length)

    def scores(self, length: int) -> tuple[Tensor, ...] | None:
        return None if self._scores is None else self._scores.columns(length)

    def logits(self, length: int) -> tuple[Tensor, ...] | None:
        return None if self._logits is None else self._logits.columns(length)

    def logprobs(self, length: int) -> Tensor | None:
        return None if self._logprobs is None else torch.stack(self._logprobs.columns(length), dim=1)

    def top_logprobs(self, length: int) -> tuple[Tensor, Tensor] | None:
        if self._top is None:
            return None
        values, ids = (torch.stack(kept.columns(length), dim=1) for kept in self._top)
        return values, ids

    def token_logprobs(self, row: int, start: int) -> list[TokenLogprobs]:
        """Those of a row's tokens from `start` on, as plain values; none where they are not kept."""
        if self._logprobs is None:
            return []
        chosen = self._logprobs.of_row(row, start)
        likeliest = (
            [tuple(zip(ids.tolist(), values.tolist(), strict=True)) for values, ids in zip(*tops, strict=True)]
            if (tops := [kept.of_row(row, start) for kept in self._top or ()])
            else [()] * len(chosen)
        )
        return [TokenLogprobs(float(value), top) for value, top in zip(chosen, likeliest, strict=True)]


def token_choice(
    row: int,
    prompt: int,
    padding: Tensor,
    processors: LogitsProcessorList,
    adapter: ModelAdapter,
    recorder: ScoreRecorder,
) -> Callable[[list[int], Tensor, Tensor | None], int]:
    """
    How the tokens of an output row, one of those that answer `prompt`, are chosen from its logits: one committed position at a
    time, each once and in order.

    Processors are called with `[1, S]` ids and `[1, V]` scores, also in a batch: rows commit at different rates, so their
    prefixes differ in length. What is drafted and rejected they never see, so a stateful one has nothing to roll back.
    """
    own: Any = LogitsProcessorList(for_row(p, row, prompt) for p in processors)
    pads = padding.tolist()

    def choose(tokens: list[int], logits: Tensor, noise: Tensor | None) -> int:
        ids = torch.tensor([pads + tokens], device=logits.device)
        # A copy: a processor may write into what it is given, and the round still holds the logits.
        given = logits.clone()
        if noise is not None:
            # Before top-k and its like, which would keep MASK and nothing else where it is the likeliest.
            given[adapter.excluded_token_ids] = float("-inf")
        processed = own(ids, given[None])[0]
        scores = processed.clone() if noise is None else processed + noise
        if adapter.excluded_token_ids:
            scores[adapter.excluded_token_ids] = float("-inf")
        token = int(scores.argmax())
        recorder.record(row, logits, processed, token)
        return token

    return choose
