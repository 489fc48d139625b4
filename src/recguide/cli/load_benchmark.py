"""The engine under closed-loop load: strategies, block policies and schedulers in turn on the same requests."""

from __future__ import annotations

import csv
import io
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from ..adapter import ModelAdapter
from ..calibration import CostProfile
from ..config import POLICIES as NAMED_POLICIES
from ..config import RecGuideConfig
from ..engine import Engine, EngineConfig, RequestHandle, RequestResult
from ..errors import ConfigError
from ..hooks import Hook, Hooks
from ..load_metrics import LoadMetrics
from ..loop import read_tables
from ..metrics import DecodeMetrics
from ..pictures import frontier, panel_grid
from ..policy import Oracle
from ..structs import FinishRecord
from .benchmark import OURS, OUTSIDE, check_counters, check_outputs, decode_figures, difference, label_of
from .recording import record_rounds

POLICIES = (*NAMED_POLICIES, "oracle")
PARTS = 3
"""Contenders take turns in so many parts at each load, so that a noisy stretch of time hits all alike."""
WARM_UP = 2
"""Requests before each part, in its engine, that no figure counts: an engine makes its KV memory with its first forward."""

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class LoadContender:
    """A strategy under a policy and a scheduler; `block_size` is `None` where the policy chooses."""

    strategy: str
    block_size: int | None
    policy: str
    scheduler: str

    @property
    def label(self) -> str:
        """`linear-16`, `linear aimd`; the scheduler is named where it is not `packed`."""
        size = self.block_size
        chosen = size is None and self.strategy != "auto"
        name = f"{self.strategy} {self.policy}" if chosen else label_of(self.strategy, size)
        return name if self.strategy == "ar" or self.scheduler == "packed" else f"{name} {self.scheduler}"


def contenders(
    strategies: Sequence[str], block_sizes: Sequence[int], policies: Sequence[str], schedulers: Sequence[str]
) -> list[LoadContender]:
    """
    `ar`, the reference, once, since its blocks give a policy or scheduler no choice; the others with every scheduler. `auto` is its
    own policy.

    The policy `fixed` stands for one contender a block size. `quadratic` has no other policy.
    """
    if outside := [name for name in strategies if name in OUTSIDE]:
        raise ConfigError(
            f"{', '.join(outside)} answer one request at a time: under load, choose --strategies of {', '.join(OURS)}."
        )
    if unknown := sorted(set(strategies) - set(OURS)):
        raise ConfigError(f"Unknown strategies: {', '.join(unknown)}. Known: {', '.join(OURS)}.")
    for size in block_sizes:
        RecGuideConfig(block_size=size)
    found = [LoadContender("ar", 1, "fixed", schedulers[0])]
    if "auto" in strategies:
        found += [LoadContender("auto", None, "auto", name) for name in schedulers]
    for strategy in (name for name in strategies if name not in ("ar", "auto")):
        for policy in policies if strategy != "quadratic" else ("fixed",):
            sizes = block_sizes if policy == "fixed" else (None,)
            found += [LoadContender(strategy, size, policy, name) for size in sizes for name in schedulers]
    return list(dict.fromkeys(found))


@dataclass
class LoadRun:
    """One contender at one load, with what it has done so far."""

    contender: LoadContender
    concurrency: int
    must_equal: bool = True
    """In float32 every output is plain decoding's; in other dtypes the differing ones are counted only."""
    on_gpu: bool = False
    """There the host clock around a forward sees its launch only, so no host share is given."""
    decode: DecodeMetrics = field(default_factory=DecodeMetrics)
    prompts: int = 0
    new_tokens: int = 0
    different: int = 0
    first_difference: dict[str, float] | None = None
    preempted: int = 0
    """How often a request lost its KV pages to others, all requests together."""

    def __post_init__(self) -> None:
        self.load = LoadMetrics(self.concurrency)

    def report(self) -> dict[str, Any]:
        """This run's entry of the JSON file."""
        figures = self.load.summary()
        return {
            "contender": self.contender.label,
            "strategy": self.contender.strategy,
            "block_size": self.contender.block_size,
            "policy": self.contender.policy,
            "scheduler": self.contender.scheduler,
            "suite": "all",
            "concurrency": self.concurrency,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            **decode_figures(self.decode),
            "host_share": None if self.on_gpu else self.load.host_share,
            "wall_s": self.load.duration,
            "tokens_per_s": figures["output_throughput"],
            "per_request_tokens_per_s": self.load.per_request_tokens_per_s,
            "block_share": self.load.block_share,
            "bucket_occupancy": self.load.bucket_occupancy,
            "bucket_wait": self.load.bucket_wait,
            "preempted": self.preempted,
            "equal_to_ar": self.different == 0,
            "different": self.different,
            "first_difference": self.first_difference,
            **figures,
        }


@dataclass(frozen=True)
class LoadTest:
    """
    Contenders at loads, on the same requests.

    Args:
        contenders (`Sequence[LoadContender]`): see [`contenders`].
        loads (`Sequence[int]`): requests under way at once.
        max_new_tokens (`int`): of each request.
    """

    contenders: Sequence[LoadContender]
    loads: Sequence[int]
    max_new_tokens: int

    def requests(self, prompts: Sequence[Prompt], load: int) -> list[Prompt]:
        """The prompts, repeated until every part fills its load twice: a loop that only drains is no load."""
        return list(islice(cycle(prompts), max(len(prompts), PARTS * 2 * load)))

    def steps(self, prompts: Sequence[Prompt]) -> int:
        """How often [`run`] calls `advance`."""
        alone = len(set(prompts)) * (1 + any(contender.policy == "oracle" for contender in self.contenders))
        return alone + sum(len(self.requests(prompts, load)) for load in self.loads) * len(self.contenders)

    def run(
        self, model: Any, prompts: Sequence[Prompt], advance: Callable[[], None] = lambda: None
    ) -> Iterator[LoadRun]:
        """
        Give each run when it is finished; an interruption loses those under way and nothing else.

        Args:
            model ([`~transformers.PreTrainedModel`]): the model.
            prompts (`Sequence[tuple[int, ...]]`): in the order of their submission.
            advance (callable): called after each request, warm-up left out.

        Raises:
            CalibrationError: a policy needs tables, and there are none for this setup; before anything has run.
        """
        arena = _Arena(model, self, prompts, advance)
        for load in self.loads:
            requests = self.requests(prompts, load)
            runs = [
                LoadRun(contender, load, model.dtype == torch.float32, model.device.type == "cuda")
                for contender in self.contenders
            ]
            for part in range(PARTS):
                taken = requests[part * len(requests) // PARTS : (part + 1) * len(requests) // PARTS]
                # Whoever comes first may find cold caches: the order turns from part to part, and the last part has the given one.
                turn = (part + 1) * len(runs) // PARTS
                for run in runs[turn:] + runs[:turn]:
                    arena.serve(run, taken, advance)
                    if part == PARTS - 1:
                        yield run


def closed_loop(
    model: Any,
    requests: Sequence[Prompt],
    warm_up: Sequence[Prompt],
    concurrency: int,
    scheduler: str,
    options: Mapping[str, Any],
    advance: Callable[[], None] = lambda: None,
) -> tuple[DecodeMetrics, LoadMetrics, list[RequestResult]]:
    """
    Serve requests in an engine of their own, the next one submitted when one ends.

    Args:
        model ([`~transformers.PreTrainedModel`]): the model.
        requests (`Sequence[tuple[int, ...]]`): prompts in the order of their submission.
        warm_up (`Sequence[tuple[int, ...]]`): prompts answered before, which no figure counts.
        concurrency (`int`): requests under way.
        scheduler (`str`): of the engine.
        options (`dict`): of each request.
        advance (callable): called after each request.

    Returns:
        `(DecodeMetrics, LoadMetrics, list[RequestResult])`: what it took, and the results in the order of the requests.
    """
    decode, load, warmed = DecodeMetrics(), LoadMetrics(concurrency), _Ends()
    observers = Hooks([warmed])
    handles: list[RequestHandle] = []
    under_way: dict[int, RequestHandle] = {}
    with Engine(model, EngineConfig(max_requests=concurrency, scheduler=scheduler), [observers]) as engine:
        for prompt in warm_up:
            engine.add_request(prompt, **options)
        for _ in warm_up:
            warmed.count.acquire()
        observers.hooks = (decode, load)
        for number, prompt in enumerate(requests, start=len(warm_up)):
            if len(under_way) == concurrency:
                del under_way[next(engine.as_completed(under_way.values())).request_id]
                advance()
            load.submitted(number)
            handles.append(engine.add_request(prompt, **options))
            under_way[number] = handles[-1]
        for _ in engine.as_completed(under_way.values()):
            advance()
    # The engine is closed: its worker has told the hooks of every end.
    return decode, load, [handle.result() for handle in handles]


class _Ends(Hook):
    """Counts ends. A handle's result may be there before the hooks have heard of it."""

    def __init__(self) -> None:
        self.count = threading.Semaphore(0)

    def on_finish(self, record: FinishRecord) -> None:
        self.count.release()


class _Arena:
    """What all runs share: the model, every prompt's output alone and, for the oracle, its rounds."""

    def __init__(self, model: Any, test: LoadTest, prompts: Sequence[Prompt], advance: Callable[[], None]) -> None:
        self._model, self._max_new_tokens = model, test.max_new_tokens
        self._outputs: dict[Prompt, list[int]] = {}
        self._rounds: dict[Prompt, list[int]] = {}
        policies = {contender.policy for contender in test.contenders}
        self._costs: CostProfile | None = None
        if policies & {"verification_guided", "oracle"}:
            # Read now, so that a missing table does not end the benchmark half way.
            guided = RecGuideConfig(policy="verification_guided")
            self._costs = read_tables(ModelAdapter.of(model), guided)[1]
        for prompt in dict.fromkeys(prompts):
            self._outputs[prompt] = self._alone(prompt)
            advance()
        for prompt in self._outputs if "oracle" in policies else ():
            ids = torch.tensor([prompt], device=model.device)
            records = record_rounds(model, ids, self._max_new_tokens, "linear", 32)
            self._rounds[prompt] = [len(record.committed) for record in records]
            advance()

    def _alone(self, prompt: Prompt) -> list[int]:
        ids = torch.tensor([prompt], device=self._model.device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self._max_new_tokens,
            do_sample=False,
            generation_strategy="ar",
        )
        new: list[int] = output[0, len(prompt) :].tolist()
        return new

    def serve(self, run: LoadRun, requests: Sequence[Prompt], advance: Callable[[], None]) -> None:
        """Serve requests in an engine of their own, the next one submitted when one ends, and note in `run` what it took."""
        warm_up = requests[: min(run.concurrency, WARM_UP)]
        options = self._options(run.contender, [*warm_up, *requests])
        decode, load, results = closed_loop(
            self._model, requests, warm_up, run.concurrency, run.contender.scheduler, options, advance
        )
        run.decode.add(decode)
        run.load.add(load)
        for prompt, result in zip(requests, results, strict=True):
            self._note(run, prompt, result)

    def _options(self, contender: LoadContender, requests: Sequence[Prompt]) -> dict[str, Any]:
        config: dict[str, Any] = {} if contender.strategy == "auto" else {"policy": contender.policy}
        if contender.policy == "oracle":
            assert self._costs is not None
            # An engine's ids count from 0 in the order of submission.
            rounds = {number: self._rounds[prompt] for number, prompt in enumerate(requests)}
            config["policy"] = Oracle(rounds, self._costs)
        if contender.block_size is not None:
            config["block_size"] = contender.block_size
        return {
            "generation_strategy": contender.strategy,
            "recguide_config": config,
            "max_new_tokens": self._max_new_tokens,
            "do_sample": False,
        }

    def _note(self, run: LoadRun, prompt: Prompt, result: RequestResult) -> None:
        if result.error is not None:
            raise result.error
        run.prompts += 1
        run.new_tokens += len(result.tokens)
        run.preempted += result.preempted
        if result.tokens != self._outputs[prompt]:
            run.different += 1
            if run.first_difference is None:
                ids = torch.tensor([prompt], device=self._model.device)
                gap = difference(self._model, ids, result.tokens, self._outputs[prompt])
                run.first_difference = {"prompt": run.prompts} | gap


def check(runs: Sequence[LoadRun]) -> None:
    """Raise [`LosslessError`] if a counter identity fails, or if an output is not `ar`'s where it must be."""
    for run in runs:
        check_counters(run.contender.label, run.decode, run.new_tokens)
    check_outputs(
        f"{run.contender.label} at load {run.concurrency} on {run.different} of {run.prompts} prompts, first {run.first_difference}"
        for run in runs
        if run.different and run.must_equal
    )


def ratios(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """
    Quotients of tokens a second at each load and their mean over the loads: each contender against `ar` at that load and
    against `ar` at load 1, and each policy that chooses blocks against the best fixed block of that load, its strategy's own.
    """
    speeds: dict[str, dict[int, float]] = {}
    fixed: dict[tuple[str, str], dict[int, float]] = {}
    for run in runs:
        load, speed = run["concurrency"], run["tokens_per_s"]
        speeds.setdefault(run["contender"], {})[load] = speed
        if run["policy"] == "fixed":
            best = fixed.setdefault((run["strategy"], run["scheduler"]), {})
            best[load] = max(speed, best.get(load, 0.0))
    found: dict[str, float] = {}

    def compare(label: str, name: str, base: Mapping[int, float]) -> None:
        quotients = {load: speed / base[load] for load, speed in speeds[label].items() if load in base}
        found.update({f"{label}/{name}, load {load}": quotient for load, quotient in quotients.items()})
        if quotients:
            found[f"{label}/{name}, mean over loads"] = sum(quotients.values()) / len(quotients)

    ar = speeds.get("ar", {})
    for label in speeds:
        if label != "ar":
            compare(label, "ar", ar)
        if 1 in ar:
            compare(label, "ar at load 1", dict.fromkeys(ar, ar[1]))
    for label, strategy, scheduler in dict.fromkeys(
        (run["contender"], run["strategy"], run["scheduler"]) for run in runs if run["policy"] != "fixed"
    ):
        compare(label, "best fixed", fixed.get((strategy, scheduler), {}))
    return found


# --- files ---


def table(runs: Sequence[dict[str, Any]]) -> str:
    """The runs as CSV, a line each; what has parts takes a column for each part, such as `forwards.draft`."""
    lines = [_flat(run) for run in runs]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    line: dict[str, Any] = {}
    for name, value in run.items():
        line |= {f"{name}.{part}": v for part, v in value.items()} if isinstance(value, dict) else {name: value}
    return line


def draw(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The Pareto picture of the contenders as PNG."""
    figure, ((axes,),) = panel_grid(1, 1, 8, 5)
    frontier(axes, runs, "contender")
    axes.set_title("numbers: requests under way")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    figure.savefig(path, format="png", dpi=130)
