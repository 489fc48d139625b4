"""Text as it comes: an incremental decoder that never splits a character, and a stream to iterate over, async or not."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from .errors import InputError, UnsupportedError

_UNFINISHED = "\ufffd"
T = TypeVar("T")


class TextDecoder:
    """
    Turns tokens into text piece by piece; the pieces joined are the text decoded in one go.

    A piece is held back while it ends in the middle of a character of several bytes.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the model's.
        skip_special_tokens (`bool`, defaults to `True`).
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._tokens: list[int] = []
        # Tokens before `_known` have given their text; those from `_context` on are decoded again with new ones, since a
        # token's text may depend on what stands before it.
        self._context = 0
        self._known = 0

    def push(self, tokens: Iterable[int]) -> str:
        """The text that `tokens` complete; may be empty."""
        self._tokens.extend(tokens)
        text = self._text(len(self._tokens))
        return "" if text.endswith(_UNFINISHED) else self._give(text)

    def finish(self) -> str:
        """What was held back, as it is."""
        return self._give(self._text(len(self._tokens)))

    def _give(self, text: str) -> str:
        piece = text[len(self._text(self._known)) :]
        if piece:
            self._context, self._known = self._known, len(self._tokens)
        return piece

    def _text(self, end: int) -> str:
        text: str = self._tokenizer.decode(
            self._tokens[self._context : end],
            skip_special_tokens=self._skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        return text


class Feed(Generic[T]):
    """A queue from one thread to one consumer, who iterates with `for` or `async for`; an error comes out at its end."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T | _End] = queue.SimpleQueue()
        self._arrived: Callable[[], None] = lambda: None

    def send(self, item: T) -> None:
        """Give the consumer an item."""
        self._items.put(item)
        self._arrived()

    def end(self, failure: BaseException | None = None) -> None:
        """Nothing comes any more; `failure` is raised in the consumer."""
        self._items.put(_End(failure))
        self._arrived()

    def __iter__(self) -> Iterator[T]:
        while not isinstance(item := self._items.get(), _End):
            yield item
        self._conclude(item)

    async def __aiter__(self) -> AsyncIterator[T]:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        self._arrived = lambda: _call(loop, arrived.set)
        while True:
            arrived.clear()
            try:
                item = self._items.get_nowait()
            except queue.Empty:
                await arrived.wait()
                continue
            if isinstance(item, _End):
                break
            yield item
        self._conclude(item)

    def _conclude(self, end: _End) -> None:
        self._items.put(_End(None))  # whoever iterates again sees the end at once
        if end.failure is not None:
            raise end.failure


@dataclass(frozen=True)
class _End:
    failure: BaseException | None


def _call(loop: asyncio.AbstractEventLoop, what: Callable[[], None]) -> None:
    # The consumer may be gone, and its loop with it.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(what)


class Cancelled(Exception):
    """Raised inside `generate` when its stream is closed before the end."""


class TextStream(Feed[str], BaseStreamer):
    """
    The text of one request under way; see [`stream`]. Iterate with `for` or `async for`, by one consumer.

    Leaving its `with` block, or [`close`], ends the generation at its next token.
    """

    def __init__(self, run: Callable[[TextStream], Any], tokenizer: Any, skip_special_tokens: bool = True) -> None:
        super().__init__()
        self.output: Any = None
        """What `generate` returned, once the stream has ended."""
        self._decoder = TextDecoder(tokenizer, skip_special_tokens)
        self._closed = threading.Event()
        self._prompt_seen = False
        self._worker = threading.Thread(target=self._work, args=(run,), name="recguide-stream", daemon=True)
        self._worker.start()

    def _work(self, run: Callable[[TextStream], Any]) -> None:
        failure: BaseException | None = None
        try:
            self.output = run(self)
        except Cancelled:
            pass
        except BaseException as error:
            failure = error
        super().end(failure)

    def put(self, value: Tensor) -> None:
        """Take the prompt, then one token a call; as of transformers' streamers."""
        if self._closed.is_set():
            raise Cancelled
        if not self._prompt_seen:
            if value.ndim > 1 and value.shape[0] > 1:
                raise UnsupportedError(f"A text stream is of one row; got a batch of {value.shape[0]}.")
            self._prompt_seen = True
        elif piece := self._decoder.push(value.flatten().tolist()):
            self.send(piece)

    def end(self, failure: BaseException | None = None) -> None:
        """Give what was held back; the stream's own end comes when `generate` has returned."""
        if piece := self._decoder.finish():
            self.send(piece)

    def close(self) -> None:
        """End the generation if it still runs, and wait for it."""
        self._closed.set()
        self._worker.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def stream(model: Any, tokenizer: Any, skip_special_tokens: bool = True, **arguments: Any) -> TextStream:
    """
    Start `model.generate(**arguments)` in a thread and stream its text.

    Args:
        model, tokenizer: an attached model and its tokenizer.
        skip_special_tokens (`bool`, defaults to `True`): leave them out of the text.
        arguments: of `generate`, for one prompt; without `streamer`.

    Returns:
        [`TextStream`]: an iterable and async iterable of text; an error in `generate` comes out at its end.

    Example:

    ```python
    with recguide.stream(model, tokenizer, **inputs, generation_strategy="recguide", max_new_tokens=32) as pieces:
        for piece in pieces:
            print(piece, end="")
    ```
    """
    if "streamer" in arguments:
        raise InputError("recguide.stream brings its own streamer; leave streamer= out.")
    return TextStream(lambda streamer: model.generate(streamer=streamer, **arguments), tokenizer, skip_special_tokens)
