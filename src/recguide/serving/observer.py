"""What an engine's requests cost and how its drafts fare: an observer for the server's metrics, log and usage figures."""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..hooks import Hook
from ..structs import DraftSource, FinishRecord, ForwardRecord, RoundRecord

WINDOW = 1024
"""Rounds and verifying forwards, the newest, that shares are taken over."""
LEAST_DRAFTED = 64
"""Drafted rounds before a low acceptance says anything."""
COLLAPSED = 0.25
"""Share of first drafted tokens that must be accepted; a drafter that fits its model is far above, one that does not is near 0."""


@dataclass
class Figures:
    """
    What one request has cost. Times are in seconds from its submission.

    Args:
        queue, ttft, e2e (`float`): to the start of its first forward, to its first token, to its newest one.
        rounds, forwards (`int`): that it took part in; its prefill is not among them.
        reused (`int`): rounds whose draft came from a branch.
        drafted, accepted (`int`): drafted tokens that were verified, and those that the verifier agreed with.
        preempted (`int`): how often it lost its pages to others.
    """

    queue: float = 0.0
    ttft: float = 0.0
    e2e: float = 0.0
    rounds: int = 0
    forwards: int = 0
    reused: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0


@dataclass
class Counts:
    """
    Of all requests since the start.

    Args:
        forwards, query_tokens (`Counter[str]`): by kind of forward, prefill too.
        outcomes (`Counter[str]`): rounds by [`~structs.Outcome`].
        drafts, draft_tokens, accepted_tokens (`int`): drafts that were verified, their tokens, and those the verifier agreed with.
        accepted_by_position (`Counter[int]`): likewise by place in the draft, from 0.
    """

    forwards: Counter[str] = field(default_factory=Counter)
    query_tokens: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: Counter[int] = field(default_factory=Counter)


@dataclass
class _UnderWay:
    figures: Figures
    submitted: float | None = None
    first_forward: float | None = None
    is_finished: bool = False
    is_left: bool = False


@dataclass(frozen=True)
class Recent:
    """
    The last rounds, as shares of them.

    Args:
        block_share (`dict[int, float]`): by block size, rounded up to a power of two.
        reuse_share (`float`): whose draft came from a branch.
        occupancy (`float`): requests in a verifying forward, in the mean.
        first_accepted (`float`, *optional*): drafted rounds whose first drafted token was accepted; None where too few were drafted.
    """

    block_share: dict[int, float]
    reuse_share: float
    occupancy: float
    first_accepted: float | None

    @property
    def has_collapsed(self) -> bool:
        """Whether drafts are hardly ever right, as with an adapter of another model."""
        return self.first_accepted is not None and self.first_accepted < COLLAPSED


class EngineObserver(Hook):
    """
    Figures of each request under way, and of the last rounds of all. The engine's worker writes, other threads read.

    Args:
        clock (callable, defaults to `time.perf_counter`): seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._counts = Counts()
        self._clock = clock
        self._lock = threading.Lock()
        self._under_way: dict[int, _UnderWay] = {}
        self._blocks: deque[int] = deque(maxlen=WINDOW)
        self._reused: deque[bool] = deque(maxlen=WINDOW)
        self._firsts: deque[bool] = deque(maxlen=WINDOW)
        self._occupancy: deque[int] = deque(maxlen=WINDOW)

    def submitted(self, request: int, at: float) -> Figures:
        """The figures of a request that was submitted `at` that time; it may have begun since. End with [`left`]."""
        with self._lock:
            state = self._of(request)
            state.submitted = at
            for name in ("queue", "ttft", "e2e"):
                if (seen := getattr(state.figures, name)) > 0.0:
                    setattr(state.figures, name, seen - at)
            return state.figures

    def left(self, request: int) -> None:
        """Nobody looks at the request's figures any more."""
        with self._lock:
            self._of(request).is_left = True
            self._forget_if_over(request)

    def counts(self) -> Counts:
        """All so far."""
        with self._lock:
            return copy.deepcopy(self._counts)

    def recent(self) -> Recent:
        """Shares over the last rounds."""
        with self._lock:
            sizes, firsts = Counter(self._blocks), list(self._firsts)
            reused, occupancy = list(self._reused), list(self._occupancy)
        rounds = max(sizes.total(), 1)
        return Recent(
            block_share={size: count / rounds for size, count in sorted(sizes.items())},
            reuse_share=sum(reused) / rounds,
            occupancy=sum(occupancy) / max(len(occupancy), 1),
            first_accepted=sum(firsts) / len(firsts) if len(firsts) >= LEAST_DRAFTED else None,
        )

    def on_prefill(self, record: ForwardRecord) -> None:
        now = self._clock()
        with self._lock:
            self._count(record)
            for request in record.requests:
                state = self._of(request)
                if state.first_forward is None:
                    state.first_forward = now - record.elapsed
                    state.figures.queue = self._since(state, state.first_forward)
                if state.figures.rounds == 0:
                    state.figures.ttft = state.figures.e2e = self._since(state, now)

    def on_draft(self, record: ForwardRecord) -> None:
        with self._lock:
            self._count(record)
            for request in record.requests:
                self._of(request).figures.forwards += 1

    def on_verify(self, record: ForwardRecord) -> None:
        self.on_draft(record)
        with self._lock:
            self._occupancy.append(len(record.requests))

    def on_commit(self, record: RoundRecord) -> None:
        now, drafted = self._clock(), len(record.draft.guesses)
        is_reused = record.draft.source is DraftSource.BRANCH
        with self._lock:
            state = self._of(record.request)
            figures = state.figures
            figures.rounds += 1
            figures.reused += is_reused
            figures.drafted += drafted
            figures.accepted += record.accepted
            figures.e2e = self._since(state, now)
            counts = self._counts
            counts.outcomes[record.outcome.value] += 1
            self._blocks.append(1 << (record.block_size - 1).bit_length())
            self._reused.append(is_reused)
            if drafted:
                counts.drafts += 1
                counts.draft_tokens += drafted
                counts.accepted_tokens += record.accepted
                counts.accepted_by_position.update(range(record.accepted))
                self._firsts.append(record.accepted > 0)

    def on_finish(self, record: FinishRecord) -> None:
        with self._lock:
            self._of(record.request).is_finished = True
            self._forget_if_over(record.request)

    def _count(self, record: ForwardRecord) -> None:
        self._counts.forwards[record.kind] += 1
        self._counts.query_tokens[record.kind] += record.query_tokens

    def _of(self, request: int) -> _UnderWay:
        if request not in self._under_way:
            self._under_way[request] = _UnderWay(Figures())
        return self._under_way[request]

    def _since(self, state: _UnderWay, now: float) -> float:
        """Seconds since its submission; the clock's own time while that is not known ([`submitted`] makes up for it)."""
        return now if state.submitted is None else now - state.submitted

    def _forget_if_over(self, request: int) -> None:
        # Whoever asked for it may leave before its end is known here, and the other way round.
        if (state := self._of(request)).is_finished and state.is_left:
            del self._under_way[request]
