"""A batch as transformers' contracts see it: criteria, processors, streamers, scores and caches, over rows that advance unevenly."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import (
    EosTokenCriteria,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, PrefixConstrainedLogitsProcessor

from .adapter import ModelAdapter
from .dense_kv import DenseKV
from .errors import InputError
from .loop import Result
from .rounds import Request


def prompts_of(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens without its left padding."""
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return rows
    prompts = []
    for number, (row, mask) in enumerate(zip(rows, attention_mask.bool().tolist(), strict=True)):
        start = mask.index(True) if True in mask else len(row)
        if start == len(row):
            raise InputError(f"Row {number} of the batch is an empty prompt: its attention mask is all zeros.")
        if not all(mask[start:]):
            raise InputError(
                f"Row {number}'s attention mask has zeros after its first token; expected left padding only."
            )
        prompts.append(row[start:])
    return prompts


def eos_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    return frozenset(int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id)


def other_criteria(criteria: StoppingCriteriaList) -> list[StoppingCriteria]:
    """Those that are neither EOS nor the length, which the loop knows itself."""
    return [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]


def asks_by_row(criterion: StoppingCriteria) -> bool:
    """Whether a row can be asked alone. A user's criterion may keep state by row, so it gets whole columns of the batch."""
    return type(criterion) is StopStringCriteria


class RowRule:
    """
    Why a row ends with its newest token: `eos`, `stop`, or None. Criteria see the row as plain generate shows it, with its
    padding; every one of them is asked each time, since one may count its calls.
    """

    def __init__(
        self, padding: Tensor, eos: frozenset[int], criteria: Sequence[StoppingCriteria], recorder: ScoreRecorder
    ) -> None:
        self._padding = padding
        self._eos = eos
        self._criteria = criteria
        self._recorder = recorder
        self._calls = 0

    def __call__(self, tokens: list[int]) -> str | None:
        self._calls += 1
        answers = []
        if self._criteria:
            ids = torch.cat((self._padding, self._padding.new_tensor(tokens)))[None]
            scores = self._recorder.scores(self._calls)
            answers = [_says_stop(criterion, ids, scores)[0] for criterion in self._criteria]
        if tokens[-1] in self._eos:
            return "eos"
        return "stop" if any(answers) else None


def _says_stop(criterion: StoppingCriteria, ids: Tensor, scores: Any) -> list[bool]:
    """A criterion's answer for each row; one plain bool stands for all of them."""
    answer = criterion(ids, scores)
    if isinstance(answer, bool):
        return [answer] * ids.shape[0]
    answers: list[bool] = torch.as_tensor(answer).expand(ids.shape[0]).tolist()
    return answers


class ScoreRecorder:
    """Keeps the raw logits and the processed scores of each committed token, where they are asked for."""

    def __init__(self, rows: int, scores: bool, logits: bool) -> None:
        self._scores: list[list[Tensor]] | None = [[] for _ in range(rows)] if scores else None
        self._logits: list[list[Tensor]] | None = [[] for _ in range(rows)] if logits else None

    @property
    def active(self) -> bool:
        return self._scores is not None or self._logits is not None

    def record(self, row: int, logits: Tensor, scores: Tensor) -> None:
        if self._logits is not None:
            self._logits[row].append(logits)
        if self._scores is not None:
            self._scores[row].append(scores)

    def scores(self, length: int) -> tuple[Tensor, ...] | None:
        return _columns_of(self._scores, length)

    def logits(self, length: int) -> tuple[Tensor, ...] | None:
        return _columns_of(self._logits, length)


def _columns_of(rows: list[list[Tensor]] | None, length: int) -> tuple[Tensor, ...] | None:
    """One `[B, V]` a column; a row that had ended by then is zeros."""
    if rows is None:
        return None
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(length))


def token_choice(
    row: int, padding: Tensor, processors: LogitsProcessorList, adapter: ModelAdapter, recorder: ScoreRecorder
) -> Callable[[list[int], Tensor], int] | None:
    """
    How a row's tokens are chosen from its logits; None is the likeliest, decided in one go for a whole block.

    Processors are called once a committed position with `[1, T]` ids and `[1, V]` scores, also in a batch: rows commit at
    different rates, so their prefixes differ in length.
    """
    if not processors and not recorder.active:
        return None
    own: Any = LogitsProcessorList(_for_row(p, row) for p in processors)
    pads = padding.tolist()

    def choose(tokens: list[int], logits: Tensor) -> int:
        ids = torch.tensor([pads + tokens], device=logits.device)
        # A copy: a processor may write into what it is given, and the round still holds the logits.
        scores = own(ids, logits.clone()[None])[0]
        recorder.record(row, logits, scores)
        if adapter.excluded_token_ids:
            scores = scores.clone()
            scores[adapter.excluded_token_ids] = float("-inf")
        return int(scores.argmax())

    return choose


def _for_row(processor: Any, row: int) -> Any:
    """A processor for one row: what it holds for the whole batch is cut to that row, or the row's number is told."""
    if type(processor) is PrefixConstrainedLogitsProcessor:
        function = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: function(row, ids), num_beams=1)
    of_row: dict[str, Any] = {}
    for name in ("prompt_ignore_length", "encoder_input_ids"):
        if isinstance(value := getattr(processor, name, None), Tensor):
            of_row[name] = value[row : row + 1]
    if type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        of_row |= {"batch_size": 1, "generated_ngrams": processor.generated_ngrams[row : row + 1]}
    if not of_row:
        return processor  # itself, not a copy: a user's may count its calls
    own = copy.copy(processor)
    vars(own).update(of_row)
    return own


class Columns:
    """
    The batch as plain generate would have written it, column by column.

    Rows commit at different rates; a column is released once every row has written it or has ended before. Then the
    users' criteria see the whole batch in its order, and the streamer gets the column. What a row had written past a
    stop is taken back.
    """

    def __init__(
        self,
        batch: list[Request],
        input_ids: Tensor,
        pad: int | None,
        criteria: list[StoppingCriteria],
        streamer: Any,
        recorder: ScoreRecorder,
    ) -> None:
        self._batch = batch
        self._ids = input_ids
        self._pad = pad
        self._criteria = criteria
        self._streamer = streamer
        self._recorder = recorder
        self._released = 0
        self._stopped: set[int] = set()

    def release(self) -> None:
        """Release the columns that are complete; does nothing where nobody looks at them."""
        if not self._criteria and self._streamer is None:
            return
        while any(self._written(r) > self._released for r in self._batch):
            if any(r.finished is None and self._written(r) <= self._released for r in self._batch):
                return
            self._released += 1
            ids = self._first(self._released)
            self._ask(ids)
            if self._streamer is not None:
                self._streamer.put(ids[:, -1].cpu())

    def _ask(self, ids: Tensor) -> None:
        """Ask the criteria about the newest column, and take back what stopped rows had written past it."""
        scores = self._recorder.scores(self._released)
        for criterion in self._criteria:
            for request, stop in zip(self._batch, _says_stop(criterion, ids, scores), strict=True):
                if stop and self._written(request) >= self._released:
                    self._stopped.add(request.id)
        # Plain generate pads after a row's end where there is an EOS; else a stopped row writes on until all have stopped.
        if self._pad is None and len(self._stopped) < len(self._batch):
            return
        for request in self._batch:
            if request.id in self._stopped and self._written(request) >= self._released:
                ended_here = request.finished == "eos" and self._written(request) == self._released
                del request.tokens[request.prompt_tokens + self._released :]
                request.finished = "eos" if ended_here else "stop"

    def sequences(self) -> Tensor:
        """`int64[B, S]`: prompts as given, outputs, padding after each row's end."""
        return self._first(max(self._written(r) for r in self._batch))

    def _written(self, request: Request) -> int:
        return len(request.tokens) - request.prompt_tokens

    def _first(self, columns: int) -> Tensor:
        outputs = [request.tokens[request.prompt_tokens :][:columns] for request in self._batch]
        padded = [output + [self._pad or 0] * (columns - len(output)) for output in outputs]
        return torch.cat((self._ids, torch.tensor(padded, device=self._ids.device, dtype=self._ids.dtype)), dim=1)


def kv_of(cache: Any, padding: list[int]) -> DenseKV:
    """The user's cache as ours, each row without its left padding."""
    kv = DenseKV(len(padding))
    for row, pads in enumerate(padding):
        kv.load(row, [(layer.keys[row, :, pads:], layer.values[row, :, pads:]) for layer in cache.layers])
    return kv


def extend_cache(cache: Cache, result: Result, padding: list[int], length: int) -> None:
    """Append what was decoded to the user's cache, up to `length` columns; rows that ended early are zeros there."""
    done = cache.get_seq_length()
    rows = [result.kv.read(row) for row in range(len(padding))]
    for layer in range(len(rows[0])):
        new = []
        for kind in (0, 1):
            like = rows[0][layer][kind]
            out = like.new_zeros((len(rows), like.shape[0], length - done, like.shape[2]))
            for row, pads in enumerate(padding):
                # The newest token's K/V are not cached; nor is what was taken back.
                ours = rows[row][layer][kind][:, : len(result.requests[row].tokens) - 1]
                columns = ours[:, max(done - pads, 0) :]
                at = max(pads - done, 0)
                out[row, :, at : at + columns.shape[1]] = columns
            new.append(out)
        cache.update(new[0], new[1], layer)
