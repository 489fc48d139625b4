"""Between the server and whatever decodes: a request in tokens and plain values, and an answer round by round.

Plain values, so that a request can go to another process or machine. Decoding depends on nothing but the request, so it can be
asked for again elsewhere, and in float32 the same tokens come.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..engine import Engine, RequestHandle
from ..grammar import GrammarLogitsProcessor
from ..hf_outputs import TokenLogprobs
from .observer import EngineObserver, Figures
from .texts import StopSequences


@dataclass(frozen=True)
class TokenRequest:
    """
    What is to be decoded: one sequence.

    Args:
        prompt_ids (`list[int]`): the prompt's tokens.
        options (`dict`):
            Of [`Engine.add_request`], plain values only: `max_new_tokens`, `do_sample`, `temperature`, `seed`, `generation_strategy`,
            `recguide_config` as a `dict`, … A sampled request has its seed.
        stop (`tuple[str]`): stop sequences.
        json_schema (`dict`, *optional*): the answer is JSON of it.
    """

    prompt_ids: list[int]
    options: dict[str, Any]
    stop: tuple[str, ...] = ()
    json_schema: dict[str, Any] | None = None


@dataclass(frozen=True)
class Round:
    """The tokens that a round has committed, and their log-probabilities where they were asked for."""

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class End:
    """
    Why an answer ended, and what it has cost.

    Args:
        reason (`str`): `eos`, `length` or `stop`.
        figures (`Figures`): its times and rounds.
    """

    reason: str
    figures: Figures = field(default_factory=Figures)


class TokenSource(Protocol):
    """Something that decodes requests: an engine in this process, or many elsewhere."""

    def decode(self, request: TokenRequest) -> AsyncGenerator[Round | End]:
        """
        Rounds as they come, then one [`End`]. Leaving the iteration (`aclose`) ends the request and frees its place.

        Raises:
            RecGuideError: it cannot be decoded so; before the first round.
        """
        ...


SUBMITTERS = 2
"""Threads that prepare requests for an engine."""


class LocalEngine:
    """
    An engine in this process.

    Args:
        engine ([`Engine`]): with `observer` among its hooks.
        observer (`EngineObserver`): of that engine.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): the model's.
    """

    def __init__(self, engine: Engine, observer: EngineObserver, tokenizer: Any) -> None:
        self.engine, self.observer = engine, observer
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(SUBMITTERS, "recguide-submit")

    async def decode(self, request: TokenRequest) -> AsyncGenerator[Round | End]:
        """As of [`TokenSource`]."""
        # In a thread, since a grammar may take long to compile, and nobody's stream must stand still meanwhile.
        submission = self._threads.submit(self._submit, request, time.perf_counter())
        try:
            handle, figures = await asyncio.wrap_future(submission)
        except asyncio.CancelledError:
            # A thread that has begun goes on, and what it submits is nobody's.
            submission.add_done_callback(self._give_up)
            raise
        given = 0
        try:
            async for tokens in handle:
                logprobs = None
                if handle.logprobs is not None:
                    logprobs = handle.logprobs[given : given + len(tokens)]
                given += len(tokens)
                yield Round(tokens, logprobs)
            result = handle.result()
            figures.preempted = result.preempted
            yield End(result.reason, figures)
        finally:
            self._leave(handle)

    def _submit(self, request: TokenRequest, at: float) -> tuple[RequestHandle, Figures]:
        rules: dict[str, Any] = {}
        if request.stop:
            rules["stopping_criteria"] = [StopSequences(self.tokenizer, request.stop, len(request.prompt_ids))]
        if request.json_schema is not None:
            grammar = GrammarLogitsProcessor(self.tokenizer, json_schema=request.json_schema)
            grammar.compile(self.engine.model.config.get_text_config().vocab_size)
            rules["logits_processor"] = [grammar]
        handle = self.engine.add_request(request.prompt_ids, **request.options, **rules)
        return handle, self.observer.submitted(handle.request_id, at)

    def _give_up(self, submission: Future[tuple[RequestHandle, Figures]]) -> None:
        if not submission.cancelled() and submission.exception() is None:
            self._leave(submission.result()[0])

    def _leave(self, handle: RequestHandle) -> None:
        handle.cancel()
        self.observer.left(handle.request_id)
