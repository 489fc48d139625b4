"""A batch as transformers' contracts see it: criteria, processors, streamers, scores and caches, over rows that advance unevenly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
)

from .dense_kv import DenseKV
from .errors import InputError
from .hf_outputs import ScoreRecorder
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
            # Stop strings never look at scores, and to stack them anew for each token takes its time.
            scores = None if all(map(asks_by_row, self._criteria)) else self._recorder.scores(self._calls)
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

    @property
    def width(self) -> int:
        """Columns of the prompts."""
        return self._ids.shape[1]

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
                self._recorder.cut(request.id, self._released)
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
