"""
Serving in simulated time: the engine's policies and schedulers, with acceptance from a recording or at random, and profiled costs.

Rounds alone take time: prefills and host work are left out. A request ends with an end-of-sequence token that nobody foresees.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .branching import NoBranches
from .calibration import LARGEST_BLOCK, CostProfile, Fingerprint, ProgressTable, RoundCost
from .dense_kv import DenseKV
from .engine.core import EngineConfig
from .engine.scheduler import SCHEDULERS, Turn
from .errors import ConfigError, InputError
from .fitting import fit_progress
from .hooks import Hook
from .loop import auto_method
from .policy import AIMD, Auto, BlockPolicy, ConcurrencyTable, FixedBlock, Oracle, VerificationGuided
from .policy.forward_times import between
from .rounds import Method, Request, plan_blocks, run_round
from .simulated_model import PREDICTION, SimulatedModel, SimulatedText, right_token
from .structs import Draft, DraftSource, FinishRecord, ForwardRecord, Guess, Outcome, RoundRecord
from .trace import read_trace

DATA = Path(__file__).parent / "data"
MODELS = ("nld-8b", "nld-14b")
"""Those whose costs on a B200 are in the package."""
POLICIES = ("fixed", "concurrency_table", "aimd", "verification_guided", "auto", "oracle")


def paper_tables() -> dict[str, Any]:
    """
    Printed figures of arXiv 2609.34388: `table_1` (of acceptance), `table_2` (tau and speed-ups), `table_3` (branches), `table_4` (block
    shares), `table_5` and `table_6` (tokens a second).
    """
    tables: dict[str, Any] = json.loads((DATA / "paper.json").read_text())
    return tables


# --- what requests would commit ---


@dataclass(frozen=True, eq=False)
class Recording:
    """
    What blocks of a request would commit, wherever they begin.

    Args:
        ahead (`int64[T]`): by tokens written, those that a block of 32 commits next; one of B commits so many, B at the most.
        entropies (`float64[T]`): of each token, in nats.
        seed (`tuple[int]`), prediction (`float`): of its drafts; see [`~simulated_model.SimulatedText`].
    """

    ahead: NDArray[np.int64]
    entropies: NDArray[np.float64]
    seed: tuple[int, ...] = (0,)
    prediction: float = PREDICTION

    @cached_property
    def text(self) -> SimulatedText:
        """What a model predicts of it."""
        return SimulatedText(self.ahead, self.entropies, self.seed, self.prediction)

    @cached_property
    def committed(self) -> tuple[int, ...]:
        """Tokens of each round with blocks of 32."""
        written, rounds = 0, []
        while written < len(self.ahead):
            rounds.append(int(self.ahead[written]))
            written += rounds[-1]
        return tuple(rounds)

    def record(self, request: int, index: int, written: int, block_size: int, drafted: bool = False) -> RoundRecord:
        """
        What an engine would tell of a round of this request that begins after `written` tokens.

        Args:
            drafted (`bool`, defaults to `False`): with the tokens and probabilities of its draft, which most policies do not read.
        """
        committed = min(int(self.ahead[written]), block_size)
        stop = written + committed
        return RoundRecord(
            request=request,
            index=index,
            position=written,
            seed=0,
            draft=self._drafted(written, block_size) if drafted else _draft(block_size),
            branches=(),
            risky=(),
            accepted=committed - 1,
            committed=tuple(map(right_token, range(written, stop))) if drafted else (0,) * committed,
            outcome=Outcome.STOPPED if stop == len(self.ahead) else Outcome.PLAIN,
            hit=None,
            query_tokens=block_size,
            entropies=tuple(self.entropies[written:stop].tolist()) if block_size > 1 else (),
        )

    def rounds(self, request: int) -> list[RoundRecord]:
        """Its rounds with blocks of 32, and their drafts."""
        starts = [0, *accumulate(self.committed)][:-1]
        return [self.record(request, i, start, LARGEST_BLOCK, drafted=True) for i, start in enumerate(starts)]

    def _drafted(self, written: int, block_size: int) -> Draft:
        predictions = self.text.drafted(written, block_size - 1, sound=True)
        guesses = (Guess(tokens[0], tuple(tokens[1:]), *probabilities) for tokens, probabilities in predictions)
        return Draft(tuple(guesses), DraftSource.FORWARD)


@cache
def _draft(block_size: int) -> Draft:
    guesses = (Guess(0, (), 1.0, 0.0),) * (block_size - 1)
    return Draft(guesses, DraftSource.FORWARD if guesses else DraftSource.NONE)


PASSING = 0.8
"""Share of rounds with blocks of 32 whose end a new draft, begun inside of them, gets past. With it recordings of the embedded model with
blocks of 32 foretell what its fixed blocks of 8 and 16 commit: 6.9 and 11.0 tokens a round (measured: 7.0 and 11.1; at 0: 6.3 and 9.8)."""
FULL_SHARE = 2 / 3
"""Of the rounds in Table 1's longest interval, those that commit all 32: in the authors' public measurements of the 8B, 27.2 % of
rounds fill a block of 32 and 40.6 % one of 16."""
ACCEPTED_NATS, REJECTED_NATS = 0.04, 0.6
"""Mean entropy of an accepted token, and of the verifier's in a rejected one's place, in recordings of the embedded model."""
LOG_SPREAD = 1.2
"""Standard deviation of an entropy's logarithm. With it a round's mean entropy tells its length as well as in those recordings (rank
correlation 0.7); single logarithms spread more there, but depend on each other."""
MEAN_TOKENS = 256
"""Of an output."""
FIT_REQUESTS = 500
FIT_SEED = 2**32
"""Added to the seed for the requests that tables are fitted to: what is measured must not have been fitted to itself."""


def random_recordings(
    count: int, seed: int, prediction: float = PREDICTION, passing: float = PASSING
) -> list[Recording]:
    """
    Requests whose rounds with blocks of 32 follow Table 1 of arXiv 2609.34388, a Markov chain over intervals of committed tokens.

    Assumed: the chain starts from its own long-run shares; lengths are uniform within an interval, but [`FULL_SHARE`] of the longest
    is 32; outputs have exponential lengths, [`MEAN_TOKENS`] in the mean; and [`read_recordings`]'s of what begins inside of a round.

    Args:
        count (`int`): requests.
        seed (`int`): the same seed gives the same requests.
        prediction (`float`):
            What entropies say of the future, 0 … 1: the correlation of a normal variable, which minus the logarithm of a token's
            entropy follows beside the token's acceptance, with the standardised length of a block of 32 behind it. At 0 entropies say,
            with noise, how long their own round was, and nothing of the next. And what a draft's probabilities say of it.
        passing (`float`): share of rounds whose end a block that begins inside of them gets past.
    """
    _check_share("prediction", prediction)
    _check_share("passing", passing)
    generator = np.random.default_rng(seed)
    transitions = np.array(paper_tables()["table_1"]["transitions"])
    transitions /= transitions.sum(axis=1, keepdims=True)
    wanted = np.ceil(generator.exponential(MEAN_TOKENS, count)).astype(int)
    intervals = generator.choice(3, count, p=np.linalg.matrix_power(transitions, 64)[0])
    lengths: list[NDArray[np.int64]] = []
    written = np.zeros(count, dtype=int)
    # Two blocks more than is needed: entropies are about what would come.
    while (written < wanted + 2 * LARGEST_BLOCK).any():
        within = np.array([1, 9, 17])[intervals] + generator.integers(np.array([8, 8, 16])[intervals])
        full = (intervals == 2) & (generator.random(count) < FULL_SHARE)
        lengths.append(np.where(full, LARGEST_BLOCK, within))
        written += lengths[-1]
        steps = transitions.cumsum(axis=1)[intervals, :2]
        intervals = (generator.random((count, 1)) > steps).sum(axis=1)
    rounds = np.array(lengths).T
    passes = generator.random(rounds.shape) < passing
    mean, spread = rounds.mean(), rounds.std()
    found: list[Recording] = []
    for own, own_passes, tokens in zip(rounds, passes, wanted, strict=True):
        ahead = _ahead(own, own_passes)
        levels = np.full(len(ahead), ACCEPTED_NATS)
        levels[own.cumsum()[own < LARGEST_BLOCK] - 1] = REJECTED_NATS
        coming = (ahead[1 : tokens + 1] - mean) / spread
        noise = np.sqrt(1 - prediction**2) * generator.standard_normal(tokens) - prediction * coming
        # Of a lognormal law with these levels as means.
        entropies = levels[:tokens] * np.exp(LOG_SPREAD * noise - LOG_SPREAD**2 / 2)
        found.append(_recording(ahead[:tokens], entropies, (seed, len(found)), prediction))
    return found


def _ahead(lengths: NDArray[np.int64], passes: NDArray[np.bool_]) -> NDArray[np.int64]:
    """`int64[sum(lengths)]`: what a block of 32 commits wherever it begins; passing a round's end, it stops at the next one's."""
    ends = lengths.cumsum()
    index = np.repeat(np.arange(len(lengths)), lengths)
    left = ends[index] - np.arange(len(index))
    gets_past = passes[index] & (left < lengths[index])
    ahead: NDArray[np.int64] = np.minimum(left + gets_past * np.append(lengths[1:], 0)[index], LARGEST_BLOCK)
    return ahead


def _recording(
    ahead: NDArray[np.int64], entropies: NDArray[np.float64], seed: tuple[int, ...], prediction: float = PREDICTION
) -> Recording:
    return Recording(np.minimum(ahead, np.arange(len(ahead), 0, -1)), entropies, seed, prediction)


def read_recordings(path: str | Path, seed: int, passing: float = PASSING) -> list[Recording]:
    """
    The finished requests of a trace of blocks of 32.

    A block that begins where one of its rounds began commits as much as that, up to its own size. One that begins inside of a round
    drafts anew, with nearer context. Assumed: in the share `passing` of the rounds it gets past their end and goes on to the next round's;
    in the others it commits what is left.

    Args:
        path (`str` or `Path`): as [`~trace.TraceWriter`] writes it.
        seed (`int`): of the choice of rounds.
        passing (`float`): the share.

    Raises:
        InputError: not a trace, or not one of rounds with blocks of 32 and their entropies.
    """
    _check_share("passing", passing)
    generator = np.random.default_rng(seed)
    found: list[Recording] = []
    under_way: dict[int, list[RoundRecord]] = {}
    for _, event in read_trace(path):
        if isinstance(event, RoundRecord):
            under_way.setdefault(event.request, []).append(event)
        elif isinstance(event, FinishRecord) and (rounds := under_way.pop(event.request, None)):
            entropies = [nats for r in rounds for nats in r.entropies]
            lengths = np.array([len(r.committed) for r in rounds])
            # Only near the end, where less than a block is left to write, may they be shorter.
            sizes = [r.block_size for r in rounds]
            if sizes[0] != LARGEST_BLOCK or sizes != sorted(sizes, reverse=True) or len(entropies) != lengths.sum():
                raise InputError(
                    f"{path} has blocks of {', '.join(map(str, sorted(set(sizes))))} and {len(entropies)} entropies of {lengths.sum()} "
                    f"tokens; expected blocks of {LARGEST_BLOCK} and an entropy of each token. Record it with `recguide generate "
                    f"--strategy linear --block-size {LARGEST_BLOCK} --trace …`."
                )
            passes = generator.random(len(lengths)) < passing
            found.append(_recording(_ahead(lengths, passes), np.array(entropies), (seed, len(found))))
    if not found:
        raise InputError(f"{path} has no request that was recorded to its end; expected one at least. Record it anew.")
    return found


def _check_share(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must be a number from 0 to 1; got {value!r}.")


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
    data = json.loads((DATA / "b200.json").read_text())
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


class ForwardCosts:
    """
    Milliseconds of single forwards.

    Args:
        costs (`CostProfile`): its forwards, or else the verifying ones of its rounds, are what any with as many query tokens costs.
    """

    def __init__(self, costs: CostProfile) -> None:
        cells = (RoundCost(load, tokens, 0, 0.0, ms) for load, tokens, ms in costs.forward_cells)
        self._verifying = CostProfile(costs.fingerprint, tuple(cells))
        self._known: dict[int, list[tuple[int, float]]] = {}

    def ms(self, tokens: Sequence[int], packed: bool) -> float:
        """
        Of one forward of requests with so many query tokens each.

        Packed, straight lines between the measured sizes for so many requests, and on beyond the smallest and the largest. Else all
        have one shape, the smallest measured size that holds the largest of them; beyond all of these, as large as it is.
        """
        each = sum(tokens) / len(tokens)
        if not packed:
            largest = max(tokens)
            each = next((size for size in self._verifying.block_sizes if size >= largest), largest)
        return self._of_each(len(tokens), each)

    def _of_each(self, requests: int, tokens: float) -> float:
        if requests not in self._known:
            sizes = self._verifying.block_sizes
            self._known[requests] = [(size, self._verifying.round_ms(requests, size)) for size in sizes]
        return between(self._known[requests], tokens)


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
        block_share (`dict[int, float]`): of each size of verified blocks among the rounds of requests.
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
        self._requests = len(recordings)
        self._policy, self._costs, self._concurrency = policy, costs, concurrency
        self._scheduler, self._packed = SCHEDULERS[scheduler](EngineConfig.max_wait), scheduler == "packed"
        self._method = Method(policy, NoBranches())
        if isinstance(policy, Auto):
            self._method = auto_method(policy, frozenset())
        self._forward_costs = ForwardCosts(costs)
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
            queue_ms=steady.queued_ms / self._requests,
        )

    def _admit(self) -> None:
        if not self._admitted:
            self._now = max(self._now, self._waiting[0][1])
        while self._waiting and len(self._admitted) < self._concurrency and self._waiting[0][1] <= self._now:
            number, arrival, recording = self._waiting.popleft()
            stop = partial(_ended, right_token(len(recording.ahead) - 1))
            request = Request(number, [right_token(-1)], sys.maxsize, stop, self._method)
            self._admitted.append(_Guest(request, recording=recording, admitted_ms=self._now))
            self._counts.queued_ms += self._now - arrival

    def _round(self) -> None:
        # As in the engine: whoever waits keeps its block size.
        plan_blocks([guest.request for guest in self._admitted if guest.waited == 0], len(self._admitted))
        chosen = [guest for guest in self._scheduler.choose(self._admitted) if isinstance(guest, _Guest)]
        counts = self._counts
        counts.rounds += 1
        for guest in chosen:
            counts.waited += guest.waited
            counts.longest_wait = max(counts.longest_wait, guest.waited)
        for guest in self._admitted:
            guest.waited += 1
        run = self._replayed if self._method.draft_forwards else self._decoded
        for guest, record in zip(chosen, run(chosen), strict=True):
            guest.waited = 0
            counts.blocks[record.block_size] += 1
            self._tokens += len(record.committed)
            guest.written += len(record.committed)
            if record.outcome is Outcome.STOPPED:
                guest.request.finished = "eos"
                self._policy.forget(guest.request.id)
                counts.speeds.append(guest.written / (self._now - guest.admitted_ms))
        self._admitted = [guest for guest in self._admitted if guest.request.finished is None]

    def _replayed(self, chosen: Sequence[_Guest]) -> list[RoundRecord]:
        """A round of blocks that are drafted and verified, of which nothing but their sizes matters."""
        self._now += step_ms(self._costs, [guest.request.block_size for guest in chosen], self._packed)
        records = []
        for guest in chosen:
            request = guest.request
            records.append(guest.recording.record(request.id, request.rounds, guest.written, request.block_size))
            self._policy.observe(records[-1])
            request.rounds += 1
        return records

    def _decoded(self, chosen: Sequence[_Guest]) -> list[RoundRecord]:
        """A round as the engine runs it, with a stand-in for the model."""
        model = SimulatedModel(
            [guest.recording.text for guest in chosen], lambda tokens: self._forward_costs.ms(tokens, self._packed)
        )
        watch = _Watch()
        run_round([guest.request for guest in chosen], model, DenseKV(len(chosen)), watch)
        self._now += watch.ms
        return watch.records


def _ended(last: int, tokens: Sequence[int]) -> str | None:
    return "eos" if tokens[-1] == last else None


class _Watch(Hook):
    """A round's milliseconds, and what it told."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.records: list[RoundRecord] = []

    def on_draft(self, record: ForwardRecord) -> None:
        self.ms += 1000 * record.elapsed

    def on_verify(self, record: ForwardRecord) -> None:
        self.ms += 1000 * record.elapsed

    def on_commit(self, record: RoundRecord) -> None:
        self.records.append(record)


# --- who chooses ---


class Foresight(Oracle):
    """
    [`~policy.Oracle`] where a block that begins inside of a recorded round may get past its end.

    Args:
        recordings (`Sequence[Recording]`): of requests 0, 1, 2, …
        costs (`CostProfile`): what a round costs.
    """

    def __init__(self, recordings: Sequence[Recording], costs: CostProfile) -> None:
        super().__init__({i: recording.committed for i, recording in enumerate(recordings)}, costs)
        self._ahead = [recording.ahead for recording in recordings]

    def block_size(self, request: int, load: int) -> int:
        self._loads[request] = load
        ahead, price = self._ahead[request][self._written.get(request, 0)], self._prices.at(load).value
        return max(self._sizes, key=lambda size: min(ahead, size) - price * self._costs.round_ms(load, size))


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
        progress (callable): the table of `verification_guided` and `auto`.
    """
    makers: dict[str, Callable[[], BlockPolicy]] = {}
    for name in names:
        match name:
            case "fixed":
                for size in costs.block_sizes:
                    makers[f"fixed-{size}" if size > 1 else "ar"] = partial(FixedBlock, size)
            case "concurrency_table":
                makers[name] = ConcurrencyTable
            case "aimd":
                makers[name] = AIMD
            case "verification_guided":
                makers[name] = lambda: VerificationGuided(progress(), costs)
            case "auto":
                makers[name] = lambda: Auto(progress(), costs)
            case "oracle":
                makers[name] = lambda: Foresight(recordings, costs)
            case _:
                raise ConfigError(f"Policies must be of {', '.join(POLICIES)}; got {name!r}.")
    return makers


# --- all of them ---


def sweep(
    model: str,
    served: Sequence[Recording],
    fitted: Sequence[Recording],
    loads: Sequence[int],
    policies: Sequence[str],
    schedulers: Sequence[str],
    watched: Callable[[Sequence[tuple[str, str, int]]], Iterable[tuple[str, str, int]]] = iter,
) -> Iterator[dict[str, Any]]:
    """
    Serve the same requests by every policy under every scheduler at every load; the figures of each run when it is done.

    Args:
        model (`str`): whose costs on a B200 are taken.
        served (`Sequence[Recording]`), fitted (`Sequence[Recording]`): the requests, and others that tables are fitted to.
        loads (`Sequence[int]`), policies (`Sequence[str]`), schedulers (`Sequence[str]`): of [`POLICIES`] and `SCHEDULERS`.
        watched (callable): goes through the list of runs, a bar for example.
    """
    costs = b200_costs(model)

    @cache
    def progress() -> ProgressTable:
        return fit_recordings(fitted, costs.fingerprint)

    makers = contenders(policies, costs, served, progress)
    grid = [(scheduler, policy, load) for scheduler in schedulers for policy in makers for load in loads]
    for scheduler, policy, load in watched(grid):
        result = simulate(served, makers[policy](), costs, scheduler, load)
        yield {
            "model": model,
            "policy": policy,
            "scheduler": scheduler,
            "concurrency": load,
            "tokens_per_s": result.tokens_per_s,
            "per_request_tokens_per_s": result.per_request_tokens_per_s,
            "block_share": {str(size): share for size, share in result.block_share.items()},
            "round_ms": result.round_ms,
            "requests_per_round": result.requests_per_round,
            "mean_wait": result.mean_wait,
            "longest_wait": result.longest_wait,
        }
