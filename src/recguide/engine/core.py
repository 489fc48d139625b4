"""The engine as its users see it: submit from any thread, iterate over tokens or results, cancel; one worker does the work."""

from __future__ import annotations

import itertools
import logging
import operator
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from ..adapter import ModelAdapter
from ..config import ForwardConfig, RecGuideConfig
from ..errors import ConfigError, InputError, UnsupportedError
from ..hf_outputs import ScoreRecorder, TokenLogprobs
from ..hf_processors import own_copy
from ..hf_strategy import STRATEGY, checked_hooks, prepared_call
from ..hooks import Hook, Hooks
from ..loop import check_prompts, method_of
from ..paged_kv import PagedBatch, PagePool
from ..policy import SHELF
from ..ranks import BEAT
from ..sampling import Sampling
from ..streaming import Feed
from ..structs import FinishRecord
from .runner import Entry, Runner
from .scheduler import SCHEDULERS

logger = logging.getLogger(__name__)

_NOT_HERE = {
    "streamer": "iterate over the handle.",
    "recguide_hooks": "give hooks to the engine.",
    "cache": "it has its own; prefix_sharing keeps common beginnings.",
    "return_dict_in_generate": "a handle's result() has tokens, reason, seed and log-probabilities.",
    "output_scores": "scores are not kept; use generate().",
    "output_logits": "logits are not kept; use generate().",
    "output_records": "give a hook to the engine; its on_commit gets the round records.",
}


@dataclass(frozen=True)
class EngineConfig(ForwardConfig):
    """
    How much an engine holds, and who runs when; and the options of [`ForwardConfig`], by keyword, for all of its requests.

    Args:
        max_requests (`int`, defaults to 32): requests decoded at once; the others wait in the order of their coming.
        kv_bytes (`int`, defaults to 256 MiB): memory of the KV pages, on each rank that the model is split over.
        page_size (`int`, defaults to 16): tokens a page.
        prefix_sharing (`bool`, defaults to `False`): requests with equal beginnings share pages.
        prefill_chunk (`int`, defaults to 512): prompt tokens a step.
        scheduler (`str`, defaults to `"packed"`): `"packed"`, `"bucketed"` or `"padded"`.
        max_wait (`int`, defaults to 8): rounds that a request of the bucketed scheduler waits before its bucket must run.
    """

    max_requests: int = 32
    kv_bytes: int = 256 * 2**20
    page_size: int = 16
    prefix_sharing: bool = False
    prefill_chunk: int = 512
    scheduler: str = "packed"
    max_wait: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_requests", "kv_bytes", "page_size", "prefill_chunk", "max_wait"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1; got {value!r}.")
        if not isinstance(self.prefix_sharing, bool):
            raise ConfigError(f"prefix_sharing must be True or False; got {self.prefix_sharing!r}.")
        if self.scheduler not in SCHEDULERS:
            raise ConfigError(f"Unknown scheduler {self.scheduler!r}. Known: {', '.join(SCHEDULERS)}.")
        SCHEDULERS[self.scheduler](self.max_wait)


@dataclass(frozen=True)
class RequestResult:
    """
    A request's end.

    Args:
        request_id (`int`): its handle's.
        tokens (`list[int]`): the output, prompt not included.
        reason (`str`): `eos`, `length`, `stop`, `cancelled` or `error`.
        error (`Exception`, *optional*): what went wrong, where the reason is `error`.
        seed (`int`, *optional*): of its sampling.
        preempted (`int`): how often it lost its pages to others.
        logprobs (`list[TokenLogprobs]`, *optional*): of each token, with `output_logprobs=True`.
    """

    request_id: int
    tokens: list[int]
    reason: str
    error: Exception | None = None
    seed: int | None = None
    preempted: int = 0
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class EngineStatus:
    """
    How busy an engine is.

    Args:
        running (`int`): requests that hold a place, prefilled or not.
        waiting (`int`): those that have none yet, or lost it.
        pages, free_pages (`int`): KV pages in all, and those that nobody holds.
        prices (`dict[str, float]`): committed tokens that a millisecond is worth to each policy in use that prices time.
    """

    running: int
    waiting: int
    pages: int
    free_pages: int
    prices: dict[str, float]


class RequestHandle(Feed[list[int]]):
    """A submitted request. Iterate (`for` or `async for`) over the tokens that its rounds commit; or wait for its [`result`]."""

    def __init__(self, engine: Engine, request_id: int, seed: int | None) -> None:
        super().__init__()
        self.request_id = request_id
        self.seed = seed
        self.logprobs: list[TokenLogprobs] | None = None
        """With `output_logprobs=True`, of the tokens given so far, and perhaps of some that are still to come."""
        self._engine = engine
        self._given = 0
        self._result: RequestResult | None = None
        self._ended = threading.Event()
        self._watchers: list[queue.SimpleQueue[RequestResult]] = []

    def result(self, timeout: float | None = None) -> RequestResult:
        """Wait for the end; raises `TimeoutError` after `timeout` seconds. An error is in the result, not raised."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"Request {self.request_id} has not ended after {timeout} s.")
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """End the request at its next step; what it has written stays in its result. Does nothing after its end."""
        self._engine._cancel(self)

    def _advance(self, output: list[int]) -> None:
        if len(output) > self._given:
            self.send(output[self._given :])
            self._given = len(output)

    def _finish(self, result: RequestResult) -> None:
        self._result = result
        self._ended.set()
        self.end(result.error)


@dataclass
class _Job:
    entry: Entry
    handle: RequestHandle
    recorder: ScoreRecorder


class Engine:
    """
    Continuous batching over one model.

    Every request has its own options, the same ones as `generate`, and its text is what it would be alone. Use it in a `with` block, or
    call [`close`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the model, on its device.
        config (`EngineConfig`, *optional*): sizes and scheduler.
        hooks (`Sequence[Hook]`, *optional*): observers; they run in the worker.

    Example:

    ```python
    with recguide.Engine(model) as engine:
        handle = engine.add_request(prompt_ids, generation_strategy="recguide", max_new_tokens=64)
        for tokens in handle:
            ...
        print(handle.result().reason)
    ```
    """

    def __init__(self, model: Any, config: EngineConfig | None = None, hooks: Sequence[Hook] = ()) -> None:
        self.config = EngineConfig() if config is None else config
        if not isinstance(self.config, EngineConfig):
            raise ConfigError(f"config must be an EngineConfig; got {config!r}.")
        self.model = model
        self._hooks = Hooks(checked_hooks(hooks))
        self._adapter = ModelAdapter.of(model, self.config)
        self._ranks = self._adapter.ranks
        kv_bytes = self.config.kv_bytes * (1 if self._ranks is None else self._ranks.kv_shards)
        pool = PagePool.for_budget(
            kv_bytes, self.config.page_size, model.config, model.dtype, self.config.prefix_sharing
        )
        self._policies = SHELF.take(model)
        self._runner = Runner(
            self._adapter,
            pool,
            SCHEDULERS[self.config.scheduler](self.config.max_wait),
            self.config.max_requests,
            self.config.prefill_chunk,
            self._hooks,
            self._progress,
        )
        self._pool = pool
        self._ids = itertools.count()
        self._jobs: dict[int, _Job] = {}
        self._arrivals: deque[_Job] = deque()
        self._cancellations: deque[int] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._worker: threading.Thread | None = None
        self._session = ExitStack()
        self._work_of_all = ["engine", pool.num_pages, pool.page_size]
        if self._ranks is not None and self.leads:
            self._session.enter_context(self._ranks.leading(self._work_of_all))
            # Those who follow must hear of it now and then, also before the first request.
            self._start()

    @property
    def leads(self) -> bool:
        """Whether requests are submitted here: not on ranks above 0 of a model that is split, which [`follow`]."""
        return self._ranks is None or self._ranks.leads

    def follow(self) -> None:
        """
        On the ranks above 0 of a model that is split: run the forwards that rank 0's engine plans, until that is closed.

        Raises:
            UnsupportedError: this is the engine that leads.
            RankError: another rank has ended, or does something else.
        """
        if self.leads:
            raise UnsupportedError("There is nothing to follow: requests are submitted to this engine.")
        self._adapter.follow(self._work_of_all, lambda extents: PagedBatch.at(self._pool, extents))

    # --- from any thread ---

    def add_request(self, prompt_ids: Sequence[int], **options: Any) -> RequestHandle:
        """
        Submit a request.

        Args:
            prompt_ids (`Sequence[int]`): the prompt's tokens.
            options:
                Of `generate` with a strategy ([`generate_with_strategy`]); where no config names one it is `"recguide"`. Logits
                processors and stopping criteria are copied for each request, since they may keep a state.

        Raises:
            ConfigError, UnsupportedError, InputError: as `generate` does; nothing is submitted then.
        """
        if not self.leads:
            raise UnsupportedError("Requests are submitted on rank 0; call follow() on the other ranks.")
        for name in _NOT_HERE.keys() & options.keys():
            if options[name] is not None and options[name] is not False:
                raise UnsupportedError(f"The engine cannot honour {name}: {_NOT_HERE[name]}")
        places = (options.get("generation_config"), self.model.generation_config)
        if options.get(STRATEGY) is None and not any(getattr(place, STRATEGY, None) for place in places):
            options[STRATEGY] = "recguide"
        for name in ("logits_processor", "stopping_criteria"):
            # One that keeps a state would mix the texts of all requests that share it.
            options[name] = [own_copy(rule) for rule in options.get(name) or ()]
        ids = torch.tensor([self._checked(prompt_ids)], device=self._adapter.device)
        # Without a mask of ours, transformers would take pad tokens of the prompt for padding.
        call = prepared_call(self._adapter, ids, self._policies, **({"attention_mask": torch.ones_like(ids)} | options))
        if len(call.batch) > 1:
            raise UnsupportedError(
                "The engine's request is one sequence; submit it again instead of num_return_sequences."
            )
        if other := [name for name, value in call.config.changed.items() if value != getattr(self.config, name)]:
            names = ", ".join(other)
            raise UnsupportedError(f"The engine runs the forwards of all requests alike; give {names} to EngineConfig.")
        if call.keep:
            reason = _NOT_HERE["return_dict_in_generate"]
            raise UnsupportedError(f"The engine cannot honour return_dict_in_generate: {reason}")
        request = call.batch[0]
        if request.sampling is not None:
            self._try(request.sampling)
        check_prompts([request], self._adapter)
        if (pages := self._runner.pages_of(request)) > self._pool.num_pages:
            raise InputError(
                f"The request may need {pages} KV pages and the engine has {self._pool.num_pages}. Lower max_new_tokens, or raise "
                "kv_bytes."
            )
        request.id = next(self._ids)
        entry = Entry(request)
        _guard(entry)
        job = _Job(entry, RequestHandle(self, request.id, call.seeds[0] if call.seeds else None), call.recorder)
        if call.recorder.active:
            job.handle.logprobs = []
        with self._changed:
            if self._closing:
                raise UnsupportedError("The engine is closed; make a new one.")
            self._jobs[request.id] = job
            self._arrivals.append(job)
            self._start()
            self._changed.notify()
        return job.handle

    def _try(self, sampling: Sampling) -> None:
        """Rules that need no prefix run on the rows of a whole forward: what they raise there would end other requests too."""
        vocabulary = self.model.config.get_text_config().vocab_size
        scores = torch.zeros((1, vocabulary), device=self._adapter.device)
        for rule in sampling.processors:
            try:
                scores = rule(torch.empty((1, 0), dtype=torch.long, device=scores.device), scores)
            except Exception as error:
                raise InputError(f"{type(rule).__name__} does not take this model's scores: {error}") from error

    def check(self, config: RecGuideConfig) -> None:
        """
        Whether requests can be decoded by a config.

        Raises:
            UnsupportedError, CheckpointError, CalibrationError: the model cannot draft in this way, or there are no tables for it.
        """
        method_of(config, frozenset(), self._adapter, self._policies)

    def _checked(self, prompt_ids: Sequence[int]) -> list[int]:
        """The prompt as a list; a token that the model does not have would end everybody's forward."""
        vocabulary = self.model.config.get_text_config().vocab_size
        try:
            ids = [operator.index(token) for token in prompt_ids]
        except TypeError as error:
            raise InputError(
                f"prompt_ids must be a flat sequence of token ids; got {type(prompt_ids).__name__} ({error})."
            ) from error
        if not ids:
            raise InputError("The prompt is empty; expected at least one token. Give it a BOS token.")
        if strange := [token for token in ids if not 0 <= token < vocabulary]:
            raise InputError(f"Token {strange[0]} is not of the model's vocabulary (0 … {vocabulary - 1}).")
        return ids

    def generate_batch(self, prompts: Iterable[Sequence[int]], **options: Any) -> list[RequestResult]:
        """Submit prompts with the same options and wait for all; results in the order of the prompts."""
        handles = [self.add_request(prompt, **options) for prompt in prompts]
        return [handle.result() for handle in handles]

    def as_completed(self, handles: Iterable[RequestHandle]) -> Iterator[RequestResult]:
        """Results in the order in which the requests end."""
        ended: queue.SimpleQueue[RequestResult] = queue.SimpleQueue()
        count = 0
        for handle in handles:
            count += 1
            with self._changed:
                if handle._result is None:
                    handle._watchers.append(ended)
                else:
                    ended.put(handle._result)
        for _ in range(count):
            yield ended.get()

    def status(self) -> EngineStatus:
        """How busy it is just now."""
        with self._changed:
            arriving = len(self._arrivals)
        return EngineStatus(
            running=len(self._runner.admitted),
            waiting=arriving + len(self._runner.waiting),
            pages=self._pool.num_pages,
            free_pages=self._pool.free_pages,
            prices=self._policies.prices(),
        )

    def close(self, drain: bool = False) -> None:
        """
        Stop the worker and free all pages; the pool's memory goes with the engine.

        Args:
            drain (`bool`, defaults to `False`): let the requests under way end first; otherwise they are cancelled.
        """
        with self._changed:
            again, self._closing = self._closing, True
            if not drain:
                self._cancellations.extend(self._jobs)
            self._changed.notify()
        if self._worker is not None:
            self._worker.join()
        self._session.close()
        if not again:
            SHELF.put_back(self.model, self._policies)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(drain=kind is None)

    def _cancel(self, handle: RequestHandle) -> None:
        with self._changed:
            self._cancellations.append(handle.request_id)
            self._changed.notify()

    def _start(self) -> None:
        if self._worker is None:
            self._worker = threading.Thread(target=self._work, name="recguide-engine", daemon=True)
            self._worker.start()

    # --- in the worker ---

    def _work(self) -> None:
        going = True
        while going:
            try:
                going = self._take_orders()
                self._runner.step()
            except Exception as error:
                # A fault of ours: nobody must wait for an engine that stands still.
                with self._changed:
                    self._arrivals.clear()
                    jobs = list(self._jobs.values())
                for job in jobs:
                    job.entry.failure = error
                    self._runner.end(job.entry, "error")

    def _take_orders(self) -> bool:
        """Wait for something to do, take in arrivals and cancellations; `False` when the engine is closed and done."""
        with self._changed:
            due = self._changed.wait_for(
                lambda: self._arrivals or self._cancellations or not self._runner.idle or self._closing,
                timeout=None if self._ranks is None else BEAT,
            )
            arrivals, self._arrivals = self._arrivals, deque()
            cancelled, self._cancellations = self._cancellations, deque()
        if not due and self._ranks is not None:
            self._ranks.beat()
        self._runner.waiting.extend(job.entry for job in arrivals)
        for request_id in cancelled:
            if (job := self._jobs.get(request_id)) is not None:
                self._runner.end(job.entry, "cancelled")
        return not (self._closing and self._runner.idle)

    def _progress(self, entry: Entry) -> None:
        request = entry.request
        job = self._jobs[request.id]
        output = request.tokens[request.prompt_tokens :]
        if (known := job.handle.logprobs) is not None:
            known += job.recorder.token_logprobs(0, len(known))
        job.handle._advance(output)
        if request.finished is None:
            return
        result = RequestResult(
            request_id=request.id,
            tokens=output,
            reason=request.finished,
            error=entry.failure,
            seed=job.handle.seed,
            preempted=entry.preempted,
            logprobs=known if known is None else known[: len(output)],
        )
        with self._changed:
            del self._jobs[request.id]
            job.handle._finish(result)
            for watcher in job.handle._watchers:
                watcher.put(result)
        new = len(output)
        record = FinishRecord(request.id, request.finished, request.prompt_tokens, new, request.committed - new)
        try:
            self._hooks.on_finish(record)
        except Exception:
            # The request has its result already, and no caller is there to raise to.
            logger.exception("A hook failed in on_finish of request %d", request.id)


def _guard(entry: Entry) -> None:
    """Catch what a user's processor or stopping criterion raises: it ends its own request and no other."""
    request, stop, choose = entry.request, entry.request.stop, entry.request.choose

    def guarded_stop(tokens: list[int]) -> str | None:
        if entry.failure is None:
            try:
                return stop(tokens)
            except Exception as error:
                entry.failure = error
        return "error"

    request.stop = guarded_stop
    if choose is None:
        return

    def guarded_choose(tokens: list[int], logits: torch.Tensor, noise: torch.Tensor | None) -> int:
        try:
            return choose(tokens, logits, noise)
        except Exception as error:
            entry.failure, entry.approved = error, len(tokens)
            return int(logits.argmax())

    request.choose = guarded_choose
