"""What requests go through under load, as an observer of an engine: their times, their blocks, and whom they wait for."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .errors import InputError
from .hooks import Hook
from .structs import FinishRecord, ForwardRecord, RoundRecord

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class RequestTimes:
    """
    A request that came to its end, in seconds from its submission.

    Args:
        ttft (`float`): to its first token.
        e2el (`float`): to its end.
        prompt_tokens, new_tokens (`int`): how long its prompt and its output are.
    """

    ttft: float
    e2el: float
    prompt_tokens: int
    new_tokens: int


@dataclass
class _UnderWay:
    submitted: float
    first_token: float = 0.0
    last_commit: float | None = None
    gaps: list[float] = field(default_factory=list)
    seen: int = 0
    """Verifying forwards of the engine before this request was last ready for a round."""


class LoadMetrics(Hook):
    """
    Times, blocks and waits of an engine's requests, from the first submission to the last end.

    An engine runs its hooks in its worker; whoever submits tells of each submission ([`submitted`]). The first token's time is the end of
    the prompt's last chunk. A request that lost its pages before its first round has that of its second prefill.

    Args:
        max_concurrency (`int`): requests that the caller keeps under way; only reported.
        clock (callable, defaults to `time.perf_counter`): seconds.
    """

    def __init__(self, max_concurrency: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.max_concurrency = max_concurrency
        self.finished: list[RequestTimes] = []
        self.gaps: list[float] = []
        """Seconds between a request's commits, its first token counted as one."""
        self.rounds_by_block: Counter[int] = Counter()
        """Rounds by block size, rounded up to a power of two: near a request's end its blocks are shorter than was asked for."""
        self.rounds_by_wait: Counter[int] = Counter()
        """Rounds by the verifying forwards of others that the request saw pass while it was ready."""
        self.verifications = 0
        self.verified = 0
        """Requests in verifying forwards."""
        self.forward_seconds = 0.0
        """In all forwards, prefill included."""
        self.duration = 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[int, _UnderWay] = {}
        self._until: float | None = None

    def submitted(self, request: int) -> None:
        """A request is about to be submitted; from any thread, before `add_request`. An engine's ids count from 0."""
        with self._lock:
            now = self._clock()
            self._under_way[request] = _UnderWay(now)
            self._until = now if self._until is None else self._until

    def on_prefill(self, record: ForwardRecord) -> None:
        self.forward_seconds += record.seconds
        now = self._clock()
        for request in record.requests:
            state = self._of(request)
            state.seen = self.verifications
            if state.last_commit is None:
                state.first_token = now

    def on_draft(self, record: ForwardRecord) -> None:
        self.forward_seconds += record.seconds

    def on_verify(self, record: ForwardRecord) -> None:
        self.forward_seconds += record.seconds
        self.verified += len(record.requests)
        for request in record.requests:
            state = self._of(request)
            self.rounds_by_wait[self.verifications - state.seen] += 1
            state.seen = self.verifications + 1
        self.verifications += 1

    def on_commit(self, record: RoundRecord) -> None:
        self.rounds_by_block[1 << (record.block_size - 1).bit_length()] += 1
        state, now = self._of(record.request), self._clock()
        state.gaps.append(now - (state.first_token if state.last_commit is None else state.last_commit))
        state.last_commit = now

    def on_finish(self, record: FinishRecord) -> None:
        state, now = self._of(record.request), self._clock()
        with self._lock:
            del self._under_way[record.request]
            assert self._until is not None
            self.duration += now - self._until
            self._until = now
        if record.reason in ("cancelled", "error"):
            return
        self.gaps += state.gaps
        ttft, e2el = state.first_token - state.submitted, now - state.submitted
        self.finished.append(RequestTimes(ttft, e2el, record.prompt_tokens, record.new_tokens))

    def add(self, other: LoadMetrics) -> None:
        """Take over what another observer has seen, as if it had followed."""
        self.finished += other.finished
        self.gaps += other.gaps
        self.rounds_by_block += other.rounds_by_block
        self.rounds_by_wait += other.rounds_by_wait
        self.verifications += other.verifications
        self.verified += other.verified
        self.forward_seconds += other.forward_seconds
        self.duration += other.duration

    def _of(self, request: int) -> _UnderWay:
        with self._lock:
            if request not in self._under_way:
                raise InputError(f"Nobody told of request {request}. Call submitted({request}) before add_request.")
            return self._under_way[request]

    @property
    def block_share(self) -> dict[str, float]:
        """Share of the rounds with each block size, ascending."""
        rounds = self.rounds_by_block.total()
        return {str(size): self.rounds_by_block[size] / rounds for size in sorted(self.rounds_by_block)}

    @property
    def bucket_occupancy(self) -> float:
        """Mean requests in a verifying forward."""
        return _ratio(self.verified, self.verifications)

    @property
    def bucket_wait(self) -> dict[str, float]:
        """
        Verifying forwards of others that a request saw pass while it was ready for a round: `mean` over the rounds, and `max`.

        It is ready from its last round on, or from the prefill that filled its cache.
        """
        waited = sum(wait * rounds for wait, rounds in self.rounds_by_wait.items())
        return {
            "mean": _ratio(waited, self.rounds_by_wait.total()),
            "max": max(self.rounds_by_wait, default=0),
        }

    @property
    def host_share(self) -> float:
        """Share of the duration that is outside the model's forwards."""
        return 1 - self.forward_seconds / self.duration if self.duration else 0.0

    @property
    def per_request_tokens_per_s(self) -> float:
        """Mean over the requests of output tokens a second, from submission to end."""
        return _ratio(sum(times.new_tokens / times.e2el for times in self.finished), len(self.finished))

    def summary(self) -> dict[str, Any]:
        """
        The figures that `vllm bench serve` writes, under its names.

        TTFT: to the first token. TPOT: a token after that, in requests of two tokens and more. ITL: between what arrives at
        once, so here between rounds. E2EL: to the end.
        """
        prompt_tokens = sum(times.prompt_tokens for times in self.finished)
        new_tokens = sum(times.new_tokens for times in self.finished)
        figures: dict[str, Any] = {
            "duration": self.duration,
            "completed": len(self.finished),
            "total_input_tokens": prompt_tokens,
            "total_output_tokens": new_tokens,
            "request_throughput": _ratio(len(self.finished), self.duration),
            "output_throughput": _ratio(new_tokens, self.duration),
            "total_token_throughput": _ratio(prompt_tokens + new_tokens, self.duration),
            "max_concurrency": self.max_concurrency,
        }
        several = [times for times in self.finished if times.new_tokens > 1]
        return (
            figures
            | _distribution("ttft", [times.ttft for times in self.finished])
            | _distribution("tpot", [(times.e2el - times.ttft) / (times.new_tokens - 1) for times in several])
            | _distribution("itl", self.gaps)
            | _distribution("e2el", [times.e2el for times in self.finished])
        )


def _distribution(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and percentiles in milliseconds; 0 where nothing was measured."""
    ms = np.array(seconds or [0.0]) * 1000
    figures = {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
    return figures | {f"p{p}_{name}_ms": float(np.percentile(ms, p)) for p in PERCENTILES}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
