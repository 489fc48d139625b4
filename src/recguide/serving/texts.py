"""An answer's text as it may be shown: no part of a stop sequence, however it is cut into tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from transformers import StoppingCriteria

from ..streaming import TextDecoder


class VisibleText:
    """
    Turns tokens into text up to the first stop sequence. What may be the beginning of one is held back until it is certain.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the model's.
        stop (`Sequence[str]`): stop sequences, none of them empty.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        self.stopped: str | None = None
        """The stop sequence that has ended the text."""
        self._decoder = TextDecoder(tokenizer)
        self._stop = tuple(stop)
        self._held = ""

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` make certain; may be empty, and always is behind a stop sequence."""
        return self._show(self._decoder.push(tokens))

    def finish(self) -> str:
        """What was held back, where no stop sequence came of it."""
        rest = self._show(self._decoder.finish()) + self._held
        self._held = ""
        return rest

    def _show(self, piece: str) -> str:
        if self.stopped is not None:
            return ""
        text = self._held + piece
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        certain = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[certain:]
        return text[:certain]


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` with which `stop` may begin."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)


class StopSequences(StoppingCriteria):
    """
    Ends one answer with the token that completes a stop sequence. It looks at the answer alone, not at the prompt.

    transformers' own criterion sorts the whole vocabulary anew for each set of stop sequences, which a server's users choose freely.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the model's.
        stop (`Sequence[str]`): stop sequences.
        prompt_tokens (`int`): tokens of the prompt.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], prompt_tokens: int) -> None:
        self._tokenizer, self._stop, self._prompt_tokens = tokenizer, tuple(stop), prompt_tokens
        self._text = VisibleText(tokenizer, stop)
        self._seen = prompt_tokens

    def __deepcopy__(self, memo: dict[int, Any]) -> StopSequences:
        return StopSequences(self._tokenizer, self._stop, self._prompt_tokens)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        self._text.push(input_ids[0, self._seen :].tolist())
        self._seen = input_ids.shape[1]
        return self._text.stopped is not None
