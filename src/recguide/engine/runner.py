"""One step of the engine: admit, prefill a chunk, run a round, retire. Single-threaded, and knows no user."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..adapter import ModelAdapter
from ..attention import installed
from ..hooks import Hook
from ..paged_kv import PagedBatch, PagePool, PageTable
from ..rounds import Request, plan_blocks, prefill, run_round
from .scheduler import Scheduler, Turn


@dataclass(eq=False)
class Entry(Turn):
    """A request in the engine; it has a page table while it is admitted."""

    table: PageTable | None = None
    preempted: int = 0
    failure: Exception | None = field(default=None, repr=False)
    approved: int | None = None
    """Tokens that stand, where a rule of the user's has raised: what came after was chosen without it."""

    @property
    def is_cached(self) -> bool:
        """Whether its K/V are all there, so that a round can run."""
        return self.table is not None and self.table.length == self.request.to_cache and self.request.committed > 0


class Runner:
    """
    The requests of an engine, and the steps they take together.

    Args:
        adapter (`ModelAdapter`): the model.
        pool (`PagePool`): its KV pages.
        scheduler (`Scheduler`): who runs in a round.
        max_requests (`int`): admitted at once.
        prefill_chunk (`int`): prompt tokens a step, so that a long prompt does not stall the others.
        hooks (`Hook`): observers.
        progress (callable): told of each entry that has written tokens or has ended.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: PagePool,
        scheduler: Scheduler,
        max_requests: int,
        prefill_chunk: int,
        hooks: Hook,
        progress: Callable[[Entry], None],
    ) -> None:
        self._adapter, self._pool, self._scheduler = adapter, pool, scheduler
        self._max_requests, self._prefill_chunk = max_requests, prefill_chunk
        self._hooks, self._progress = hooks, progress
        self.waiting: deque[Entry] = deque()
        self.admitted: list[Entry] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.admitted

    def pages_of(self, request: Request) -> int:
        """Pages that a request takes when it is longest."""
        longest = len(request.tokens) + request.remaining + request.method.most_tokens
        return self._pool.pages_for(longest)

    def step(self) -> None:
        """Advance: some prompts by a chunk, then the requests that the scheduler chooses by a round."""
        self._admit()
        with installed(self._adapter.model):
            self._prefill()
            self._round()

    def _admit(self) -> None:
        while self.waiting and len(self.admitted) < self._max_requests:
            entry = self.waiting[0]
            request = entry.request
            if self._missing(entry) + sum(map(self._missing, self.admitted)) > self._pool.free_pages:
                return
            self.waiting.popleft()
            entry.table = self._pool.new_table(request.tokens)
            self.admitted.append(entry)

    def _missing(self, entry: Entry) -> int:
        """Pages that an entry lacks for its next round."""
        request, held = entry.request, len(entry.table.pages) if entry.table is not None else 0
        return self._pool.pages_for(request.to_cache + request.method.most_tokens) - held

    def _prefill(self) -> None:
        left, batch = self._prefill_chunk, []
        for entry in list(self.admitted):
            if entry.table is None or entry.is_cached:
                continue
            tokens = min(left, entry.request.to_cache - entry.table.length)
            if tokens > 0 and self._reserve(entry, tokens):
                batch.append(entry)
                left -= tokens
        # Only who came after an entry is sent back for it, so none of the batch was.
        if batch:
            self._run(
                batch, lambda requests, kv: prefill(requests, self._adapter, kv, self._hooks, self._prefill_chunk)
            )

    def _round(self) -> None:
        ready = [entry for entry in self.admitted if entry.is_cached]
        if not ready:
            return
        # Whoever waits keeps its block size: a request that changed buckets while it waits might wait for ever.
        load = len(self.admitted)
        ready = [entry for entry in ready if entry.waited or self._plan(entry, load)]
        if not ready:
            return
        chosen = [entry for entry in self._scheduler.choose(ready) if isinstance(entry, Entry)]
        for entry in ready:
            entry.waited += 1
        for entry in chosen:
            entry.waited = 0
            self._reserve(entry, entry.request.method.most_tokens)
        # Whoever was sent back, for another's room or because there is none for itself, runs later.
        if batch := [entry for entry in chosen if entry.table is not None]:
            self._run(batch, lambda requests, kv: run_round(requests, self._adapter, kv, self._hooks))

    def _plan(self, entry: Entry, load: int) -> bool:
        """Decide its next block; a policy of the user's that raises ends its own request."""
        try:
            plan_blocks([entry.request], load)
        except Exception as error:
            entry.failure = error
            self.end(entry, "error")
        return entry.table is not None

    def _run(self, batch: Sequence[Entry], forward: Callable[[list[Request], PagedBatch], None]) -> None:
        tables = [entry.table for entry in batch if entry.table is not None]
        assert len(tables) == len(batch), "an entry without pages takes part in a forward"
        kv = PagedBatch(self._pool, tables)
        try:
            forward([entry.request for entry in batch], kv)
        except Exception as error:
            # Which of them is to blame cannot be known here; rules of users are guarded one by one before they come here.
            for entry in batch:
                entry.failure = error
                self.end(entry, "error")
            return
        for entry in batch:
            if entry.request.finished is None:
                self._progress(entry)
            else:
                self.end(entry, entry.request.finished)

    def _reserve(self, entry: Entry, tokens: int) -> bool:
        """Room for `tokens` more, if need be by sending back whoever was admitted last; `entry` may have to go itself."""
        while entry.table is not None and not entry.table.reserve(tokens):
            self._preempt(self.admitted[-1])
        return entry.table is not None

    def _preempt(self, entry: Entry) -> None:
        """Take an entry's pages; its tokens stay, and their K/V are computed again when it comes back."""
        assert entry.table is not None
        entry.table.release()
        entry.table = None
        entry.preempted += 1
        self.admitted.remove(entry)
        self.waiting.appendleft(entry)

    def end(self, entry: Entry, reason: str) -> None:
        """End a request at once, whatever its phase; what it has written stays."""
        entry.request.finished = reason
        entry.request.method.policy.forget(entry.request.id)
        if entry.approved is not None:
            del entry.request.tokens[entry.approved :]
        if entry in self.waiting:
            self.waiting.remove(entry)
        if entry.table is not None:
            entry.table.release()
            entry.table = None
            self.admitted.remove(entry)
        self._progress(entry)
