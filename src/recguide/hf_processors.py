"""transformers' logits processors, sorted by what they look at, cut to one row; and those that it lacks."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    MinPLogitsWarper,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation import NoBadWordsLogitsProcessor, TopHLogitsWarper
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, PrefixConstrainedLogitsProcessor

from .errors import ConfigError, UnsupportedError

_BLIND = {
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
}


def looks_at_prefix(processor: Any) -> bool:
    """Whether a processor's result may depend on the tokens so far; of an unknown one that must be supposed."""
    if type(processor) in (SequenceBiasLogitsProcessor, NoBadWordsLogitsProcessor):
        return any(len(sequence) > 1 for sequence in processor.sequence_bias)
    return type(processor) not in _BLIND


def for_row(processor: Any, row: int, prompt: int) -> Any:
    """
    A processor for one row of a batch. Its first row gets the processor itself, which may count its calls; another gets a
    copy, since a processor may keep a state by row, with what it holds for the whole batch cut to that row.

    Args:
        processor: one of the call's.
        row (`int`): the output row.
        prompt (`int`): the prompt that the row answers; several rows may answer one.
    """
    if type(processor) is PrefixConstrainedLogitsProcessor:
        function = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: function(prompt, ids), num_beams=1)
    of_row: dict[str, Any] = {}
    for name, at in (("prompt_ignore_length", row), ("encoder_input_ids", prompt)):
        if isinstance(value := getattr(processor, name, None), Tensor):
            of_row[name] = value[at : at + 1]
    if type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        of_row |= {"batch_size": 1, "generated_ngrams": processor.generated_ngrams[prompt : prompt + 1]}
    if not of_row:
        return processor if row == 0 else own_copy(processor)
    own = copy.copy(processor)
    vars(own).update(of_row)
    return own


def own_copy(rule: Any) -> Any:
    """A processor or criterion for one text alone; it may keep a state. Raises [`UnsupportedError`] where it cannot be copied."""
    try:
        return copy.deepcopy(rule)
    except Exception as error:
        raise UnsupportedError(
            f"{type(rule).__name__} cannot be copied ({error}), and each of several texts needs one of its own. Decode one "
            "prompt a call."
        ) from error


class OutputPenaltyLogitsProcessor(LogitsProcessor):
    """
    Presence and frequency penalties as of the OpenAI API and vLLM: of each token written so far, the score goes down by
    `presence + frequency * count`. The prompt does not count.

    Args:
        prompt_length (`int`): columns of the prompt, padding included.
        presence, frequency (`float`): from -2 to 2; negative ones favour repetition.
    """

    def __init__(self, prompt_length: int, presence: float = 0.0, frequency: float = 0.0) -> None:
        for name, value in (("presence_penalty", presence), ("frequency_penalty", frequency)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not -2 <= value <= 2:
                raise ConfigError(f"{name} must be a number from -2 to 2; got {value!r}.")
        self.prompt_length = prompt_length
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        written = input_ids[:, self.prompt_length :]
        counts = torch.zeros_like(scores).scatter_add_(1, written, torch.ones_like(written, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts


class ThinkingBudgetLogitsProcessor(LogitsProcessor):
    """
    Ends an open thinking part after `budget` tokens by forcing the end marker, token by token, so that it stands in the text.

    Args:
        start, end (`list[int]`): token ids of the two markers, such as those of `<think>` and `</think>`.
        budget (`int`): tokens that a thinking part may have, its markers not counted.
    """

    def __init__(self, start: list[int], end: list[int], budget: int) -> None:
        if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
            raise ConfigError(f"thinking_budget must be a whole number from 0 on; got {budget!r}.")
        if not start or not end:
            raise ConfigError(f"A thinking part needs token ids for both markers; got start={start}, end={end}.")
        self.start = start
        self.end = end
        self.budget = budget

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        for row, tokens in enumerate(input_ids.tolist()):
            forced = self._forced(tokens)
            if forced is not None:
                scores[row] = torch.full_like(scores[row], float("-inf"))
                scores[row, forced] = 0.0
        return scores

    def _forced(self, tokens: list[int]) -> int | None:
        opened = _last(tokens, self.start)
        if opened is None:
            return None
        thought = tokens[opened + len(self.start) :]
        if _last(thought, self.end) is not None or len(thought) < self.budget:
            return None
        # What of the end marker is already there; a marker that began by itself just before the budget ran out is finished.
        for done in range(min(len(self.end) - 1, len(thought)), 0, -1):
            if thought[-done:] == self.end[:done] and len(thought) - done <= self.budget:
                return self.end[done]
        return self.end[0]


def _last(tokens: list[int], marker: list[int]) -> int | None:
    """Where the last occurrence of `marker` starts."""
    for start in range(len(tokens) - len(marker), -1, -1):
        if tokens[start : start + len(marker)] == marker:
            return start
    return None
