"""The bodies of replies, as OpenAI's API has them; what a reply says beyond that is under `recguide`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import __version__
from ..hf_outputs import TokenLogprobs
from .service import Exchange, Piece


def error_body(message: str, kind: str, field: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's API has it."""
    return {"error": {"message": message, "type": kind, "param": field, "code": code}}


class Reply:
    """
    Builds the events, or the one body, of an exchange.

    Args:
        is_chat (`bool`): of `/v1/chat/completions`.
        model (`str`): its name.
        exchange (`Exchange`): being answered.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): for log-probabilities.
    """

    def __init__(self, is_chat: bool, model: str, exchange: Exchange, tokenizer: Any) -> None:
        self.id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._is_chat, self._exchange, self._tokenizer = is_chat, exchange, tokenizer
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"recguide-{__version__}",
        }
        self._answers = [_Answer() for _ in exchange.requests]

    def openings(self) -> list[dict[str, Any]]:
        """Events before the first tokens: in a chat each answer's role."""
        if not self._is_chat:
            return []
        return [
            self._event([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, None, None)])
            for index in range(len(self._answers))
        ]

    def event(self, piece: Piece) -> dict[str, Any] | None:
        """A piece's event; None where it has nothing to show yet."""
        answer = self._answers[piece.index]
        logprobs = self._logprobs(answer, piece)
        answer.text += piece.text
        if not piece.text and logprobs is None and piece.finish_reason is None:
            return None
        content = {"delta": {"content": piece.text} if piece.text else {}} if self._is_chat else {"text": piece.text}
        return self._event([self._choice(piece.index, content, logprobs, piece.finish_reason)])

    def usage_event(self) -> dict[str, Any]:
        """The last event, where usage is asked for."""
        return self._event([]) | {"usage": self.usage(), "recguide": self.about()}

    def take(self, piece: Piece) -> None:
        """Add a piece to the one body."""
        answer = self._answers[piece.index]
        if (logprobs := self._logprobs(answer, piece)) is not None:
            for name, values in logprobs.items():
                answer.logprobs.setdefault(name, []).extend(values)
        answer.text += piece.text
        answer.finish_reason = piece.finish_reason

    def body(self) -> dict[str, Any]:
        """The one body."""
        choices = []
        for index, answer in enumerate(self._answers):
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            content = {"message": message} if self._is_chat else {"text": answer.text}
            choices.append(self._choice(index, content, answer.logprobs or None, answer.finish_reason))
        kind = "chat.completion" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self.usage(), "recguide": self.about()}

    def usage(self) -> dict[str, Any]:
        """Tokens; drafted tokens that were rejected are in no total."""
        exchange = self._exchange
        accepted = exchange.total("accepted")
        return {
            "prompt_tokens": exchange.prompt_tokens,
            "completion_tokens": exchange.completion_tokens,
            "total_tokens": exchange.prompt_tokens + exchange.completion_tokens,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": exchange.total("drafted") - accepted,
            },
        }

    def about(self) -> dict[str, Any]:
        """How it was decoded; `seed` asks for the same texts again. Times are of the slowest answer, from the submission on."""
        exchange = self._exchange
        return {
            "strategy": exchange.strategy,
            "seed": exchange.seed,
            **{f"{name}_s": round(exchange.longest(name), 4) for name in ("queue", "ttft", "e2e")},
            **{name: exchange.total(name) for name in ("rounds", "forwards", "reused")},
        }

    def _event(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        return self._head | {"object": kind, "choices": list(choices)}

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: dict[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, answer: _Answer, piece: Piece) -> dict[str, list[Any]] | None:
        if not piece.logprobs:
            return None
        texts = [self._text(token) for token in piece.tokens]
        if self._is_chat:
            return {
                "content": [
                    self._entry(token, known.logprob)
                    | {"top_logprobs": [self._entry(other, logprob) for other, logprob in known.top]}
                    for token, known in zip(piece.tokens, piece.logprobs, strict=True)
                ]
            }
        offsets = []
        for text in texts:
            offsets.append(answer.offset)
            answer.offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [known.logprob for known in piece.logprobs],
            "top_logprobs": [self._by_text(known) for known in piece.logprobs],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        # Part of a character has no text, and its bytes are the tokenizer's own business.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    def _by_text(self, known: TokenLogprobs) -> dict[str, float] | None:
        # Tokens may share a text, such as parts of characters: then the likeliest of them stands for all.
        return {self._text(token): logprob for token, logprob in reversed(known.top)} or None

    def _text(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text


@dataclass
class _Answer:
    text: str = ""
    finish_reason: str | None = None
    offset: int = 0
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
