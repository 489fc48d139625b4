"""
Serving in simulated time: the engine's policies and schedulers, with acceptance from a recording or at random, and profiled costs.

Rounds alone take time: prefills and host work are left out. A request ends with an end-of-sequence token that nobody foresees.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .branching import NoBranches
from .calibration import LARGEST_BLOCK, CostProfile, Fingerprint, ProgressTable, RoundCost
from .engine.core import EngineConfig
from .engine.scheduler import SCHEDULERS, Turn
from .errors import ConfigError, InputError
from .fitting import fit_progress
from .policy import AIMD, BlockPolicy, ConcurrencyTable, FixedBlock, Oracle, VerificationGuided
from .rounds import Method, Request, plan_blocks
from .structs import Draft, DraftSource, FinishRecord, Guess, Outcome, RoundRecord
from .trace import read_trace

DATA = Path(__file__).parent / "data"
MODELS = ("nld-8b", "nld-14b")
"""Those whose costs on a B200 are in the package."""
POLICIES = ("fixed", "concurrency_table", "aimd", "verification_guided", "oracle")


# --- what requests would commit ---


@dataclass(frozen=True, eq=False)
class Recording:
    """
    A request's rounds with blocks of 32.

    A block of B that begins where one of them began, or inside of it, commits what is left of that round, B at the most.

    Args:
        committed (`tuple[int]`): tokens of each round; the last may be cut short by the end.
        entropies (`float64[sum(committed)]`): of each token, in nats.
    """

    committed: tuple[int, ...]
    entropies: NDArray[np.float64]

    @cached_property
    def ends(self) -> list[int]:
        """Tokens written after each round."""
        return list(accumulate(self.committed))

    def record(self, request: int, index: int, written: int, block_size: int, committed: int) -> RoundRecord:
        """What an engine would tell of a round of this request that begins after `written` tokens."""
        stop = written + committed
        return RoundRecord(
            request=request,
            index=index,
            position=written,
            seed=0,
            draft=_draft(block_size),
            branches=(),
            risky=(),
            accepted=committed - 1,
            committed=(0,) * committed,
            outcome=Outcome.STOPPED if stop == self.ends[-1] else Outcome.PLAIN,
            hit=None,
            query_tokens=block_size,
            entropies=tuple(self.entropies[written:stop].tolist()) if block_size > 1 else (),
        )

    def rounds(self, request: int) -> list[RoundRecord]:
        """The recorded rounds themselves."""
        starts = pairwise([0, *self.ends])
        return [self.record(request, i, start, LARGEST_BLOCK, end - start) for i, (start, end) in enumerate(starts)]


@cache
def _draft(block_size: int) -> Draft:
    guesses = (Guess(0, (), 1.0, 0.0),) * (block_size - 1)
    return Draft(guesses, DraftSource.FORWARD if guesses else DraftSource.NONE)


FULL_SHARE = 2 / 3
"""Of the rounds in Table 1's longest interval, those that commit all 32: in the authors' public measurements of the 8B, 27.2 % of
rounds fill a block of 32 and 40.6 % one of 16."""
ACCEPTED_NATS, REJECTED_NATS = 0.08, 0.9
"""Mean entropy of an accepted token, and of the verifier's in a rejected one's place, in recordings of the embedded model."""


def random_recordings(count: int, seed: int, prediction: float = 0.0, mean_tokens: float = 256.0) -> list[Recording]:
    """
    Requests whose rounds follow Table 1 of arXiv 2609.34388: a Markov chain over intervals of committed tokens.

    Assumed: the chain starts from its own long-run shares; lengths are uniform within an interval, but [`FULL_SHARE`] of the longest
    is 32; lengths of outputs are exponential.

    Args:
        count (`int`): requests.
        seed (`int`): the same seed gives the same requests.
        prediction (`float`, defaults to 0):
            What entropies say of the future, 0 … 1. At 0 they say which token was rejected, so no more than the round's own
            length. Above, each is multiplied by `exp(prediction * (16 - n) / 8)`, where n tokens would be committed by a block of
            32 behind it: at 1, fifty times more before the shortest block than before the longest.
        mean_tokens (`float`, defaults to 256): of an output.
    """
    if not 0 <= prediction <= 1:
        raise ConfigError(f"prediction must be a number from 0 to 1; got {prediction!r}.")
    generator = np.random.default_rng(seed)
    transitions = np.array(_read("paper.json")["table_1"]["transitions"])
    transitions /= transitions.sum(axis=1, keepdims=True)
    wanted = np.ceil(generator.exponential(mean_tokens, count)).astype(int)
    intervals = generator.choice(3, count, p=np.linalg.matrix_power(transitions, 64)[0])
    lengths: list[NDArray[np.int64]] = []
    # One round more than is needed: the entropies of the last are about the one that would come.
    written = np.zeros(count, dtype=int)
    while True:
        within = np.array([1, 9, 17])[intervals] + generator.integers(np.array([8, 8, 16])[intervals])
        full = (intervals == 2) & (generator.random(count) < FULL_SHARE)
        lengths.append(np.where(full, LARGEST_BLOCK, within))
        if (written >= wanted).all():
            break
        written += lengths[-1]
        climb = transitions.cumsum(axis=1)[intervals, :2]
        intervals = (generator.random((count, 1)) > climb).sum(axis=1)
    table = np.array(lengths).T
    return [_recording(row, int(tokens), prediction) for row, tokens in zip(table, wanted, strict=True)]


def _recording(lengths: NDArray[np.int64], tokens: int, prediction: float) -> Recording:
    """`tokens` of a request whose rounds have these `lengths`, which reach one round further."""
    rounds = int(np.searchsorted(lengths.cumsum(), tokens)) + 1
    committed = lengths[:rounds].copy()
    index = np.repeat(np.arange(rounds), committed)
    left = committed.cumsum()[index] - np.arange(len(index)) - 1
    rejected = (left == 0) & (committed[index] < LARGEST_BLOCK)
    coming = np.where(left > 0, left, lengths[index + 1])
    entropies = np.where(rejected, REJECTED_NATS, ACCEPTED_NATS) * np.exp(prediction * (16 - coming) / 8)
    committed[-1] -= len(index) - tokens
    return Recording(tuple(committed.tolist()), entropies[:tokens])


def read_recordings(path: str | Path) -> list[Recording]:
    """
    The finished requests of a trace.

    Raises:
        InputError: not a trace, or not one of rounds with blocks of 32 and their entropies.
    """
    found, open_rounds = [], dict[int, list[RoundRecord]]()
    for _, event in read_trace(path):
        if isinstance(event, RoundRecord):
            open_rounds.setdefault(event.request, []).append(event)
        elif isinstance(event, FinishRecord) and (rounds := open_rounds.pop(event.request, None)):
            entropies = [nats for r in rounds for nats in r.entropies]
            committed = tuple(len(r.committed) for r in rounds)
            if rounds[0].block_size != LARGEST_BLOCK or len(entropies) != sum(committed):
                raise InputError(
                    f"{path} has blocks of {rounds[0].block_size} and {len(entropies)} entropies of {sum(committed)} tokens; expected "
                    f"blocks of {LARGEST_BLOCK} with an entropy a token. Record it with --strategy linear --block-size {LARGEST_BLOCK}."
                )
            found.append(Recording(committed, np.array(entropies)))
    if not found:
        raise InputError(f"{path} has no finished request. Record at least one to its end.")
    return found


def resampled(recordings: Sequence[Recording], count: int, seed: int) -> list[Recording]:
    """`count` of them, drawn with replacement."""
    return [recordings[i] for i in np.random.default_rng(seed).integers(len(recordings), size=count)]


def fit_recordings(recordings: Sequence[Recording], fingerprint: Fingerprint) -> ProgressTable:
    """The table that a calibration on these requests would have given."""
    return fit_progress([recording.rounds(i) for i, recording in enumerate(recordings)], fingerprint)


def poisson_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Milliseconds at which requests come, `rate` a second in the mean."""
    arrivals: list[float] = np.random.default_rng(seed).exponential(1000 / rate, count).cumsum().tolist()
    return arrivals


# --- what rounds cost ---


def b200_costs(model: str) -> CostProfile:
    """
    A model's costs on a B200, as published. Only the sum of draft and verify is: each has half of it here.

    Raises:
        ConfigError: no such model.
    """
    if model not in MODELS:
        raise ConfigError(f"The model must be one of {', '.join(MODELS)}; got {model!r}.")
    data = _read("b200.json")
    rounds = tuple(
        RoundCost(int(load), int(size), 0, ms / 2, ms / 2)
        for size, by_load in data["models"][model].items()
        for load, ms in by_load.items()
    )
    fingerprint = Fingerprint(model, "bfloat16", "NVIDIA B200", "FlashInfer", True)
    return CostProfile(fingerprint, rounds, {key: data[key] for key in ("what", "source", "warning")})


def step_ms(costs: CostProfile, blocks: Sequence[int], packed: bool) -> float:
    """
    Milliseconds of one round of the requests that own these blocks.

    Packed, it costs what their query tokens cost: straight lines between the measured blocks for so many requests; below the smallest
    nothing is saved. Else all have one shape, the smallest measured block that holds the largest of them.
    """
    sizes, requests = costs.block_sizes, len(blocks)
    if not packed:
        return costs.round_ms(requests, next(size for size in sizes if size >= max(blocks)))
    return float(np.interp(sum(blocks) / requests, sizes, [costs.round_ms(requests, size) for size in sizes]))


# --- serving ---


@dataclass(frozen=True)
class Served:
    """
    What a simulation came to. All but `tokens` and `seconds` is about the time until the last request was admitted: after it the load
    falls.

    Args:
        tokens (`int`), seconds (`float`): of the whole.
        tokens_per_s (`float`): of all requests together.
        per_request_tokens_per_s (`float`): mean over the requests that ended, each over its own time since it was admitted.
        block_share (`dict[int, float]`): of each block size among the rounds of requests.
        round_ms (`float`): mean.
        requests_per_round (`float`): mean.
        mean_wait (`float`), longest_wait (`int`): rounds of others that a request saw pass before its own.
        queue_ms (`float`): mean time from a request's arrival to its admission.
    """

    tokens: int
    seconds: float
    tokens_per_s: float
    per_request_tokens_per_s: float
    block_share: dict[int, float]
    round_ms: float
    requests_per_round: float
    mean_wait: float
    longest_wait: int
    queue_ms: float


@dataclass(eq=False, kw_only=True)
class _Guest(Turn):
    """A request under way."""

    recording: Recording
    admitted_ms: float
    written: int = 0
    round: int = 0
    """Of the recording, that it is in."""


@dataclass
class _Counts:
    rounds: int = 0
    blocks: Counter[int] = field(default_factory=Counter)
    waited: int = 0
    longest_wait: int = 0
    queued_ms: float = 0.0
    speeds: list[float] = field(default_factory=list)
    """Tokens a millisecond of each request that has ended."""


def simulate(
    recordings: Sequence[Recording],
    policy: BlockPolicy,
    costs: CostProfile,
    scheduler: str,
    concurrency: int,
    arrivals: Sequence[float] | None = None,
) -> Served:
    """
    Serve requests, at most `concurrency` at once, in the order of their coming.

    Args:
        recordings (`Sequence[Recording]`): the requests, more than `concurrency`.
        policy (`BlockPolicy`): chooses their blocks; its requests are called 0, 1, 2, …
        costs (`CostProfile`): of rounds.
        scheduler (`str`): `packed`, `bucketed` or `padded`, as in an engine.
        concurrency (`int`): requests at once.
        arrivals (`Sequence[float]`, *optional*): when each comes, ascending, in ms; by default all are there from the beginning.

    Raises:
        ConfigError: unknown scheduler, too few requests, or a policy whose blocks are larger than any that was measured.
    """
    if scheduler not in SCHEDULERS:
        raise ConfigError(f"Unknown scheduler {scheduler!r}. Known: {', '.join(SCHEDULERS)}.")
    if not 1 <= concurrency < len(recordings):
        raise ConfigError(
            f"concurrency must be at least 1 and below the number of requests, {len(recordings)}; got {concurrency}. The load is "
            "steady while some are waiting."
        )
    if policy.max_block > max(costs.block_sizes):
        raise ConfigError(
            f"The policy asks for blocks of {policy.max_block}; costs were measured up to {max(costs.block_sizes)}."
        )
    return _Serving(recordings, policy, costs, scheduler, concurrency, arrivals or [0.0] * len(recordings)).run()


class _Serving:
    def __init__(
        self,
        recordings: Sequence[Recording],
        policy: BlockPolicy,
        costs: CostProfile,
        scheduler: str,
        concurrency: int,
        arrivals: Sequence[float],
    ) -> None:
        self._waiting = deque(zip(range(len(recordings)), arrivals, recordings, strict=True))
        self._policy, self._costs, self._concurrency = policy, costs, concurrency
        self._scheduler, self._packed = SCHEDULERS[scheduler](EngineConfig.max_wait), scheduler == "packed"
        self._method = Method(policy, NoBranches())
        self._admitted: list[_Guest] = []
        self._now = 0.0
        self._tokens = 0
        self._counts = _Counts()

    def run(self) -> Served:
        self._admit()
        while self._waiting:
            self._round()
            self._admit()
        steady, tokens, now = self._counts, self._tokens, self._now
        self._counts = _Counts()
        while self._admitted:
            self._round()
        runs = steady.blocks.total()
        return Served(
            tokens=self._tokens,
            seconds=self._now / 1000,
            tokens_per_s=1000 * tokens / now,
            per_request_tokens_per_s=1000 * sum(steady.speeds) / len(steady.speeds),
            block_share={size: steady.blocks[size] / runs for size in sorted(steady.blocks)},
            round_ms=now / steady.rounds,
            requests_per_round=runs / steady.rounds,
            mean_wait=steady.waited / runs,
            longest_wait=steady.longest_wait,
            queue_ms=steady.queued_ms / (len(steady.speeds) + len(steady.speeds)),
        )

    def _admit(self) -> None:
        if not self._admitted:
            self._now = max(self._now, self._waiting[0][1])
        while self._waiting and len(self._admitted) < self._concurrency and self._waiting[0][1] <= self._now:
            number, arrival, recording = self._waiting.popleft()
            request = Request(number, [], sys.maxsize, lambda tokens: None, self._method)
            self._admitted.append(_Guest(request, recording=recording, admitted_ms=self._now))
            self._counts.queued_ms += self._now - arrival

    def _round(self) -> None:
        # As in the engine: whoever waits keeps its block size.
        plan_blocks([guest.request for guest in self._admitted if guest.waited == 0], len(self._admitted))
        chosen = [guest for guest in self._scheduler.choose(self._admitted) if isinstance(guest, _Guest)]
        self._now += step_ms(self._costs, [guest.request.block_size for guest in chosen], self._packed)
        counts = self._counts
        counts.rounds += 1
        for guest in chosen:
            counts.waited += guest.waited
            counts.longest_wait = max(counts.longest_wait, guest.waited)
            counts.blocks[guest.request.block_size] += 1
        for guest in self._admitted:
            guest.waited += 1
        for guest in chosen:
            guest.waited = 0
            self._commit(guest)
        self._admitted = [guest for guest in self._admitted if guest.request.finished is None]

    def _commit(self, guest: _Guest) -> None:
        request, recording = guest.request, guest.recording
        end = recording.ends[guest.round]
        committed = min(end - guest.written, request.block_size)
        self._policy.observe(recording.record(request.id, request.rounds, guest.written, request.block_size, committed))
        request.rounds += 1
        guest.written += committed
        guest.round += guest.written == end
        self._tokens += committed
        if guest.written == recording.ends[-1]:
            request.finished = "eos"
            self._policy.forget(request.id)
            self._counts.speeds.append(guest.written / (self._now - guest.admitted_ms))


# --- who chooses ---


def contenders(
    names: Sequence[str],
    costs: CostProfile,
    recordings: Sequence[Recording],
    progress: Callable[[], ProgressTable],
) -> dict[str, Callable[[], BlockPolicy]]:
    """
    Makers of the named policies; `fixed` is one for each measured block, called `ar` with blocks of 1.

    Args:
        recordings (`Sequence[Recording]`): what the oracle knows.
        progress (callable): the table of `verification_guided`.
    """
    makers: dict[str, Callable[[], BlockPolicy]] = {}
    for name in names:
        match name:
            case "fixed":
                for size in costs.block_sizes:
                    makers[f"fixed-{size}" if size > 1 else "ar"] = lambda size=size: FixedBlock(size)
            case "concurrency_table":
                makers[name] = ConcurrencyTable
            case "aimd":
                makers[name] = AIMD
            case "verification_guided":
                makers[name] = lambda: VerificationGuided(progress(), costs)
            case "oracle":
                known = {i: recording.committed for i, recording in enumerate(recordings)}
                makers[name] = lambda: Oracle(known, costs)
            case _:
                raise ConfigError(f"Policies must be of {', '.join(POLICIES)}; got {name!r}.")
    return makers


def _read(name: str) -> Any:
    return json.loads((DATA / name).read_text())
