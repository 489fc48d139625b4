"""Structured output: a logits processor that allows only what a JSON schema, a regular expression or a grammar allows."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor

from .errors import ConfigError, InputError, MissingDependencyError


@dataclass
class _Row:
    """How far one row's text has been read: of the text behind the prompt the matcher has read `consumed` tokens."""

    ids: list[int]
    prompt_length: int
    matcher: Any
    consumed: int = 0


class GrammarLogitsProcessor(LogitsProcessor):
    """
    Keeps each row's output inside a grammar; needs `pip install "recguide[grammar]"` (llguidance).

    Works with every strategy and with plain `generate`. It follows the ids that it is given: one token more advances it, fewer
    roll it back, anything else is the prompt of a new text. So one object serves one call after the other.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]): the model's.
        json_schema (`dict` or `str`, *optional*): the output is JSON of it, without white space between its parts.
        regex (`str`, *optional*), lark (`str`, *optional*): instead of it. Exactly one is given.

    Raises:
        ConfigError: none or several of them, or one that llguidance cannot read; with its message.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        json_schema: dict[str, Any] | str | None = None,
        regex: str | None = None,
        lark: str | None = None,
    ) -> None:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise MissingDependencyError('A grammar needs llguidance: pip install "recguide[grammar]".') from error
        given = {"json_schema": json_schema, "regex": regex, "lark": lark}
        if sum(value is not None for value in given.values()) != 1:
            raise ConfigError(f"Give exactly one of {', '.join(given)}; got {given}.")
        matchers = llguidance.LLMatcher
        if json_schema is not None:
            schema = json_schema if isinstance(json_schema, str) else json.dumps(json_schema)
            grammar = matchers.grammar_from_json_schema(schema, overrides={"whitespace_flexible": False})
        else:
            grammar = (
                matchers.grammar_from_regex(regex) if regex is not None else matchers.grammar_from_lark(lark or "")
            )
        if fault := matchers.validate_grammar(grammar, llguidance.hf.from_tokenizer(tokenizer)):
            raise ConfigError(f"llguidance cannot read the grammar: {fault}")
        self._tokenizer, self._grammar = tokenizer, grammar
        self._matcher: Any = None
        self._rows: list[_Row] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> GrammarLogitsProcessor:
        other = copy.copy(self)
        other._rows = []
        return other

    def compile(self, vocab_size: int) -> None:
        """Do now what the first call would: compile the grammar for a model's vocabulary. Copies share the result."""
        self._matcher = self._new_matcher(vocab_size)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._matcher is None:
            self.compile(scores.shape[1])
        texts = input_ids.tolist()
        if len(self._rows) != len(texts):
            self._rows = [self._start(ids) for ids in texts]
        for row, ids in enumerate(texts):
            self._rows[row] = self._follow(self._rows[row], ids)
        allowed = torch.stack([self._allowed(row, scores.shape[1]) for row in self._rows])
        return scores.masked_fill(~allowed.to(scores.device), float("-inf"))

    def _new_matcher(self, vocab_size: int) -> Any:
        import llguidance
        import llguidance.hf

        # A model's vocabulary may be larger than its tokenizer's.
        return llguidance.LLMatcher(llguidance.hf.from_tokenizer(self._tokenizer, n_vocab=vocab_size), self._grammar)

    def _start(self, ids: list[int]) -> _Row:
        return _Row(ids, len(ids), self._matcher.deep_copy())

    def _follow(self, row: _Row, ids: list[int]) -> _Row:
        if ids[:-1] == row.ids:
            if not row.matcher.is_stopped():
                if not row.matcher.consume_token(ids[-1]):
                    raise InputError(f"Token {ids[-1]} is not allowed by the grammar here: {row.matcher.get_error()}")
                row.consumed += 1
        elif len(ids) >= row.prompt_length and ids == row.ids[: len(ids)]:
            kept = min(row.consumed, len(ids) - row.prompt_length)
            row.matcher.rollback(row.consumed - kept)
            row.consumed = kept
        else:
            return self._start(ids)
        row.ids = ids
        return row

    def _allowed(self, row: _Row, vocab_size: int) -> Tensor:
        """`bool[V]`."""
        words = torch.zeros((vocab_size + 31) // 32, dtype=torch.int32)
        row.matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.numel() * words.element_size())
        bits = (words[:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return bits.flatten()[:vocab_size].bool()
