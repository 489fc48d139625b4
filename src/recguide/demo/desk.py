"""Where prompts are answered: one engine a model, shared by all sessions. Knows no page.

An engine and not a lock: it packs the requests of all users into the same forwards, so that nobody waits for another's end; each
text is what it would be alone; and a request that is cancelled gives its place and pages back at the next step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import (
    Engine,
    EngineConfig,
    FinishRecord,
    ForwardRecord,
    Hook,
    InputError,
    RequestHandle,
    RequestResult,
    RoundRecord,
)
from ..config import RecGuideConfig
from ..loading import chat_ids
from ..streaming import TextDecoder
from ..trace import Record

Loader = Callable[[], tuple[Any, Any]]
"""Gives a model that understands strategies, and its tokenizer."""
Moment = tuple[float, str, Record]
"""When (seconds of a clock), which event, and its record."""
LONGEST_PROMPT = 40_000
"""Characters; whatever the model's context, a prompt of more is not even tokenized."""


class Recorder(Hook):
    """An engine's events, in a queue for each request."""

    def __init__(self) -> None:
        self._queues: dict[int, queue.SimpleQueue[Moment]] = {}
        self._lock = threading.Lock()

    def of(self, request: int) -> queue.SimpleQueue[Moment]:
        """The events of a request, whether it has begun or not; it ends with its `finish`."""
        with self._lock:
            return self._queues.setdefault(request, queue.SimpleQueue())

    def forget(self, request: int) -> None:
        """Its events are no longer wanted."""
        with self._lock:
            self._queues.pop(request, None)

    def on_prefill(self, record: ForwardRecord) -> None:
        self._tell("prefill", record, record.requests)

    def on_draft(self, record: ForwardRecord) -> None:
        self._tell("draft", record, record.requests)

    def on_verify(self, record: ForwardRecord) -> None:
        self._tell("verify", record, record.requests)

    def on_commit(self, record: RoundRecord) -> None:
        self._tell("commit", record, (record.request,))

    def on_finish(self, record: FinishRecord) -> None:
        self._tell("finish", record, (record.request,))

    def _tell(self, event: str, record: Record, requests: Sequence[int]) -> None:
        now = time.perf_counter()
        for request in requests:
            self.of(request).put((now, event, record))


@dataclass
class Running:
    """A request under way; iterate over it for its events. What has come so far stays in `moments`."""

    handle: RequestHandle
    events: queue.SimpleQueue[Moment]
    began: float
    moments: list[Moment] = field(default_factory=list)

    def __iter__(self) -> Iterator[Moment]:
        while not self.moments or self.moments[-1][1] != "finish":
            self.moments.append(self.events.get())
            yield self.moments[-1]

    @property
    def records(self) -> tuple[tuple[str, Record], ...]:
        return tuple((event, record) for _, event, record in self.moments)

    @property
    def seconds(self) -> float:
        """From the end of the prefill to the last commit."""
        prefilled = [at for at, event, _ in self.moments if event == "prefill"]
        committed = [at for at, event, _ in self.moments if event == "commit"]
        return committed[-1] - prefilled[-1] if prefilled and committed else 0.0

    @property
    def was_shared(self) -> bool:
        """Whether other requests took part in its forwards, so that its times are not its own."""
        return any(isinstance(r, ForwardRecord) and len(r.requests) > 1 for _, _, r in self.moments)

    def result(self) -> RequestResult:
        """Its end; blocks until then."""
        return self.handle.result()


@dataclass(frozen=True)
class Model:
    """A loaded model with its engine."""

    name: str
    model: Any
    tokenizer: Any
    engine: Engine
    recorder: Recorder

    def decode(self, token: int) -> str:
        """A token's text by itself."""
        text: str = self.tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """What each token adds to the text; joined they are the text."""
        decoder = TextDecoder(self.tokenizer)
        found = [decoder.push([token]) for token in tokens]
        if found:
            found[-1] += decoder.finish()
        return found

    def ids(self, prompt: str) -> list[int]:
        """
        A prompt's tokens.

        Raises:
            InputError: empty, or longer than any context.
        """
        if not prompt.strip():
            raise InputError("The prompt is empty. Write something, or take one of the examples.")
        if len(prompt) > LONGEST_PROMPT:
            raise InputError(f"The prompt has {len(prompt)} characters; up to {LONGEST_PROMPT} are read. Shorten it.")
        ids: list[int] = chat_ids(self.tokenizer, prompt)[0].tolist()
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None and len(ids) >= context:
            raise InputError(f"The prompt has {len(ids)} tokens; the model's context is {context}. Shorten the prompt.")
        return ids

    def ask(self, prompt: str, config: RecGuideConfig, max_new_tokens: int, **sampling: Any) -> Running:
        """
        Submit a prompt.

        Args:
            prompt (`str`): the user's message.
            config (`RecGuideConfig`): the strategy with its options.
            max_new_tokens (`int`): cut where the model's context ends.
            sampling: `do_sample` and what goes with it; greedy by default.

        Raises:
            RecGuideError: it cannot be answered so; nothing is submitted.
        """
        ids = self.ids(prompt)
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if context is not None:
            max_new_tokens = min(max_new_tokens, context - len(ids))
        began = time.perf_counter()
        handle = self.engine.add_request(
            ids,
            generation_strategy=config.strategy,
            recguide_config=config,
            max_new_tokens=max_new_tokens,
            **({"do_sample": False} | sampling),
        )
        return Running(handle, self.recorder.of(handle.request_id), began)


class Desk:
    """
    The models that may be chosen, each loaded when it is first asked for, and who is being answered.

    Args:
        loaders (`Mapping[str, Loader]`): by the name that users choose; no other model can be reached.
        config (`EngineConfig`, *optional*): of each engine.
    """

    def __init__(self, loaders: Mapping[str, Loader], config: EngineConfig | None = None) -> None:
        self._loaders, self._config = dict(loaders), config
        self._models: dict[str, Model] = {}
        self._loading = threading.Lock()
        self._running: dict[str, list[Running]] = {}
        self._lock = threading.Lock()

    @property
    def names(self) -> list[str]:
        return list(self._loaders)

    def model(self, name: str) -> Model:
        """
        The model of that name, loaded now if it was not.

        Raises:
            InputError: it is not one of those that were given.
        """
        if name not in self._loaders:
            raise InputError(
                f"Unknown model {name!r}. Known: {', '.join(self._loaders)}. Name others when you start the demo."
            )
        with self._loading:
            if name not in self._models:
                loaded, tokenizer = self._loaders[name]()
                recorder = Recorder()
                self._models[name] = Model(name, loaded, tokenizer, Engine(loaded, self._config, [recorder]), recorder)
            return self._models[name]

    @contextlib.contextmanager
    def serving(self, session: str, model: Model, running: Running) -> Iterator[Running]:
        """While inside, [`cancel`] of the session ends the request; leaving ends it in any case."""
        with self._lock:
            self._running.setdefault(session, []).append(running)
        try:
            yield running
        finally:
            running.handle.cancel()
            # Its last event comes after its result; then nothing more does.
            for _ in running:
                pass
            model.recorder.forget(running.handle.request_id)
            with self._lock:
                self._running[session].remove(running)
                if not self._running[session]:
                    del self._running[session]

    def cancel(self, session: str) -> int:
        """End the session's requests; how many there were."""
        with self._lock:
            running = list(self._running.get(session, ()))
        for request in running:
            request.handle.cancel()
        return len(running)

    @property
    def under_way(self) -> int:
        """Requests of all sessions."""
        with self._lock:
            return sum(map(len, self._running.values()))

    def close(self) -> None:
        """Close the engines."""
        for model in self._models.values():
            model.engine.close()
