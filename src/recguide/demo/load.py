"""The demo under load: users of the real engine, each sending its next prompt when it has its answer, and the simulator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle
from typing import Any

from .. import (
    Engine,
    EngineConfig,
    FinishRecord,
    ForwardRecord,
    Hook,
    InputError,
    RecGuideConfig,
    RequestHandle,
    RoundRecord,
    simulator,
)
from ..load_metrics import LoadMetrics
from ..loading import chat_ids
from ..simulated_model import PREDICTION
from ..tiny.examples import EXAMPLES
from ..tiny.tasks import make_task

CONTENDERS: dict[str, dict[str, Any]] = {
    "ar": {"strategy": "ar"},
    "linear-8": {"strategy": "linear", "block_size": 8},
    "linear-16": {"strategy": "linear", "block_size": 16},
    "linear-32": {"strategy": "linear", "block_size": 32},
    "linear aimd": {"strategy": "linear", "policy": "aimd"},
    "linear concurrency_table": {"strategy": "linear", "policy": "concurrency_table"},
    "linear verification_guided": {"strategy": "linear", "policy": "verification_guided"},
    "recguide-8": {"strategy": "recguide", "block_size": 8},
    "recguide-16": {"strategy": "recguide", "block_size": 16},
    "auto": {"strategy": "auto"},
}
"""What may serve the users, by name."""
MOST_USERS = 32
EVERY = 0.4
"""Seconds between two looks at a load that is under way."""


def prompts(count_of_each: int = 6) -> list[str]:
    """Prompts of the three families; of mathematics the example alone, since more would need another package."""
    return [
        *EXAMPLES.values(),
        *(make_task(family, "test", index).prompt for index in range(count_of_each) for family in ("code", "text")),
    ]


def loads_up_to(users: int) -> list[int]:
    """1, 2, 4 … below `users`, then `users`."""
    if not 1 <= users <= MOST_USERS:
        raise InputError(f"Between 1 and {MOST_USERS} users; got {users}.")
    return [*(2**i for i in range(6) if 2**i < users), users]


class Watch(Hook):
    """[`LoadMetrics`] that may be looked at while the engine's worker writes them."""

    def __init__(self, users: int) -> None:
        self.metrics = LoadMetrics(users)
        self.tokens = 0
        self.lock = threading.Lock()

    def on_prefill(self, record: ForwardRecord) -> None:
        with self.lock:
            self.metrics.on_prefill(record)

    def on_draft(self, record: ForwardRecord) -> None:
        with self.lock:
            self.metrics.on_draft(record)

    def on_verify(self, record: ForwardRecord) -> None:
        with self.lock:
            self.metrics.on_verify(record)

    def on_commit(self, record: RoundRecord) -> None:
        with self.lock:
            self.metrics.on_commit(record)
            self.tokens += len(record.committed)

    def on_finish(self, record: FinishRecord) -> None:
        with self.lock:
            self.metrics.on_finish(record)


@dataclass(frozen=True)
class Look:
    """
    A load as it is now.

    Args:
        users (`int`), contender (`str`), scheduler (`str`): who is served by what.
        seconds (`float`), tokens (`int`): so far.
        block_share (`dict[str, float]`), occupancy (`float`): as [`~load_metrics.LoadMetrics`] has them.
        figures (`dict`, *optional*): once the load is over, what the frontier is drawn from.
    """

    users: int
    contender: str
    scheduler: str
    seconds: float
    tokens: int
    block_share: dict[str, float]
    occupancy: float
    figures: dict[str, Any] | None = None


@dataclass
class LoadRun:
    """
    Users in a closed loop on an engine of their own, which shares the model with everybody else's.

    Args:
        model, tokenizer: loaded.
        contender (`str`): of [`CONTENDERS`].
        scheduler (`str`): `packed`, `bucketed` or `padded`.
        users (`int`): requests kept under way.
        requests (`int`): served in all.
        max_new_tokens (`int`): of each.
    """

    model: Any
    tokenizer: Any
    contender: str
    scheduler: str
    users: int
    requests: int
    max_new_tokens: int = 128
    stopped: threading.Event = field(default_factory=threading.Event)

    def __iter__(self) -> Iterator[Look]:
        """Serve, and look from time to time; the last look has the figures, unless [`stopped`] was set."""
        watch = Watch(self.users)
        config = RecGuideConfig(**CONTENDERS[self.contender])
        asked = [chat_ids(self.tokenizer, prompt)[0].tolist() for prompt in prompts()]
        with Engine(self.model, EngineConfig(max_requests=self.users, scheduler=self.scheduler), [watch]) as engine:
            began = last = time.perf_counter()
            ids, waiting = count(), cycle(asked)
            under_way: list[RequestHandle] = []
            served = 0
            while served < self.requests or under_way:
                while len(under_way) < self.users and served < self.requests and not self.stopped.is_set():
                    with watch.lock:
                        watch.metrics.submitted(next(ids))
                    under_way.append(
                        engine.add_request(
                            next(waiting),
                            generation_strategy=config.strategy,
                            recguide_config=config,
                            max_new_tokens=self.max_new_tokens,
                            do_sample=False,
                        )
                    )
                    served += 1
                if self.stopped.is_set():
                    for handle in under_way:
                        handle.cancel()
                    break
                with contextlib.suppress(TimeoutError):
                    under_way[0].result(timeout=0.005)
                for handle in [handle for handle in under_way if _has_ended(handle)]:
                    if (error := handle.result().error) is not None:
                        raise error
                    under_way.remove(handle)
                if time.perf_counter() - last >= EVERY:
                    last = time.perf_counter()
                    yield self._look(watch, last - began)
        # The engine is closed: its worker has told the hooks of every end.
        seconds = time.perf_counter() - began
        if not self.stopped.is_set():
            figures = {
                "contender": f"{self.contender}" + ("" if self.scheduler == "packed" else f" {self.scheduler}"),
                "concurrency": self.users,
                "tokens_per_s": watch.metrics.summary()["output_throughput"],
                "per_request_tokens_per_s": watch.metrics.per_request_tokens_per_s,
            }
            yield self._look(watch, seconds, figures)

    def _look(self, watch: Watch, seconds: float, figures: dict[str, Any] | None = None) -> Look:
        with watch.lock:
            share = watch.metrics.block_share if watch.metrics.rounds_by_block else {}
            occupancy = watch.metrics.bucket_occupancy
        return Look(self.users, self.contender, self.scheduler, seconds, watch.tokens, share, occupancy, figures)


def _has_ended(handle: RequestHandle) -> bool:
    try:
        handle.result(timeout=0)
    except TimeoutError:
        return False
    return True


def simulated(
    model: str, policies: Sequence[str], scheduler: str, loads: Sequence[int], requests: int, seed: int = 0
) -> Iterator[dict[str, Any]]:
    """The simulator's runs at published B200 costs, as they are done."""
    served = simulator.random_recordings(requests, seed, PREDICTION)
    fitted = simulator.random_recordings(simulator.FIT_REQUESTS, seed + simulator.FIT_SEED, PREDICTION)
    return simulator.sweep(model, served, fitted, loads, policies, [scheduler])
