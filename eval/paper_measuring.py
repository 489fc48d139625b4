"""What `paper_tables.py` measures and simulates: who is compared, and how, each step kept as it comes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import track
from transformers import DynamicCache

from recguide import simulator
from recguide.adapter import ModelAdapter
from recguide.calibration import ALL, BLOCK_SIZES, ProgressTable, RoundCost
from recguide.cli.benchmark import difference
from recguide.cli.load_benchmark import closed_loop
from recguide.cli.unfinished import Unfinished
from recguide.config import RecGuideConfig
from recguide.errors import LosslessError
from recguide.loop import read_tables
from recguide.metrics import DecodeMetrics
from recguide.policy import BlockPolicy, ConcurrencyTable, VerificationGuided
from recguide.profiling import measure_costs

Prompt = tuple[int, ...]
SIMULATED_LOADS = (2, 4, 8, 16, 32, 64, 128)
FIT_SEED = 2**32
"""Added to the seed for the simulated requests that tables are fitted to."""
FIT_REQUESTS = 500
CONTEXT = 128
"""Cached tokens of each request where forwards are timed."""

# --- who is compared ---

WAYS: dict[str, dict[str, Any]] = {
    "AR": {"strategy": "ar"},
    "LinearSS, B = 16": {"strategy": "linear", "block_size": 16},
    "LinearSS, B = 32": {"strategy": "linear", "block_size": 32},
    "TiDAR (quadratic layout)": {"strategy": "quadratic", "block_size": 16},
    "+ 1st correction": {"strategy": "recguide", "block_size": 16, "max_corrections": 1, "continuation": False},
    "+ 2nd correction": {"strategy": "recguide", "block_size": 16, "max_corrections": 2, "continuation": False},
    "RecGuide": {"strategy": "recguide", "block_size": 16},
    "auto": {"strategy": "auto"},
}
"""One request at a time."""
OURS, DFLASH = "RecGuide", "DFlash"
ABLATION = {"Fixed Block": "padded", "+ s": "padded", "+ z": "padded", "+ bucketing": "bucketed"}
"""Table 6: policies under these schedulers. As the paper has it, bucketing is what ends the padding."""
FIXED = tuple(f"B = {size}" for size in BLOCK_SIZES)
UNDER_LOAD = (*FIXED, *ABLATION, "auto")


class Drafter(Protocol):
    """A separately trained drafter, for DFlash's row."""

    def propose(self, tokens: Sequence[int], count: int) -> Sequence[int]:
        """
        A guess at what comes next.

        Args:
            tokens (`Sequence[int]`): prompt and output so far.
            count (`int`): tokens wanted; fewer are taken too.
        """


def decode_with(
    drafter: Drafter, model: Any, prompt: Prompt, max_new_tokens: int, ends: frozenset[int], block_size: int = 16
) -> tuple[list[int], int]:
    """
    Greedy decoding with a separate drafter: a round drafts with it and verifies with one forward of the model.

    Args:
        drafter (`Drafter`): proposes.
        model ([`~transformers.PreTrainedModel`]): verifies.
        prompt (`tuple[int, ...]`): token ids.
        max_new_tokens (`int`): of the output.
        ends (`frozenset[int]`): end-of-sequence tokens.
        block_size (`int`): tokens verified a round, the seed included.

    Returns:
        `(list[int], int)`: the new tokens, and the rounds after the prefill.
    """
    cache, tokens, rounds = DynamicCache(config=model.config), list(prompt), 0

    def choices(new: Sequence[int], wanted: int) -> list[int]:
        ids = torch.tensor([list(new)], device=model.device)
        with torch.no_grad():
            logits = model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=wanted).logits[0]
        if (mask := getattr(model.config, "mask_token_id", None)) is not None:
            logits[:, mask] = float("-inf")
        chosen: list[int] = logits.argmax(-1).tolist()
        return chosen

    tokens += choices(prompt, 1)
    while len(tokens) - len(prompt) < max_new_tokens and tokens[-1] not in ends:
        left = max_new_tokens - (len(tokens) - len(prompt))
        draft = list(drafter.propose(tokens, block_size - 1))[: min(block_size, left) - 1]
        chosen = choices([tokens[-1], *draft], 1 + len(draft))
        accepted = next((i for i, token in enumerate(draft) if token != chosen[i]), len(draft))
        committed = chosen[: accepted + 1]
        end = next((i for i, token in enumerate(committed, start=1) if token in ends), len(committed))
        tokens += committed[:end]
        # All committed tokens but the newest, which is the next round's seed.
        if rejected := cache.get_seq_length() - (len(tokens) - 1):
            cache.crop(-rejected)
        rounds += 1
    return tokens[len(prompt) :], rounds


# --- measuring ---


@dataclass(frozen=True)
class Setup:
    """What all measurements share."""

    model: Any
    adapter: ModelAdapter
    prompts: dict[str, list[Prompt]]
    """By suite."""
    max_new_tokens: int
    repetitions: int
    unfinished: Unfinished
    drafter: Drafter | None = None

    @property
    def must_equal(self) -> bool:
        return self.model.dtype == torch.float32

    def steps(self, title: str, steps: Iterable[tuple[str, Callable[[], Any]]]) -> dict[str, Any]:
        """Do what is not done yet; returns what all of them came to, by name."""
        work = dict(steps)
        for name in track([name for name in work if name not in self.unfinished.done], title, console=errors):
            self.unfinished.add(name, work[name]())
        return {name: self.unfinished.done[name] for name in work}


errors = Console(stderr=True)


def time_alone(setup: Setup) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """One request at a time: by way and suite, for each repetition the sums over the prompts. Ways take turns prompt by prompt."""
    ends = _ends(setup.model)
    ways = [*WAYS, *([DFLASH] if setup.drafter else [])]

    def run(way: str, prompt: Prompt, new_tokens: int) -> dict[str, Any]:
        start = time.perf_counter()
        if way == DFLASH:
            assert setup.drafter is not None
            output, rounds = decode_with(setup.drafter, setup.model, prompt, new_tokens, ends)
            counted = {"committed": len(output) - 1, "forwards": 2 * rounds, "outcomes": {}}
        else:
            metrics = DecodeMetrics()
            output = decode(setup.model, prompt, new_tokens, WAYS[way], metrics)
            metrics.check()
            counted = {
                "committed": metrics.committed_tokens, "forwards": metrics.decode_forwards, "outcomes": metrics.outcomes,
            }  # fmt: skip
        seconds = time.perf_counter() - start
        return counted | {"output": output, "seconds": seconds, "new_tokens": len(output)}

    def step(prompt: Prompt, number: int) -> dict[str, Any]:
        # Whoever comes first may find cold caches: the order turns.
        turn = number % len(ways)
        found = {way: run(way, prompt, setup.max_new_tokens) for way in ways[turn:] + ways[:turn]}
        plain = found["AR"]["output"]
        for way, one in found.items():
            output = one.pop("output")
            one["different"] = output != plain
            if output != plain and setup.must_equal:
                ids = torch.tensor([prompt], device=setup.model.device)
                where = difference(setup.model, ids, output, plain)
                raise LosslessError(f"{way}: an output differs from plain decoding, first {where}.")
        return found

    @cache
    def warm_up() -> None:
        for way in ways:
            run(way, next(iter(setup.prompts.values()))[0], 64)

    def warmed(prompt: Prompt, number: int) -> dict[str, Any]:
        warm_up()
        return step(prompt, number)

    names = {
        (suite, repetition, i): f"alone, repetition {repetition}, {suite} prompt {i}"
        for repetition in range(setup.repetitions)
        for suite, prompts in setup.prompts.items()
        for i in range(len(prompts))
    }
    done = setup.steps(
        "one request at a time",
        (
            (name, lambda suite=suite, i=i, n=number: warmed(setup.prompts[suite][i], n))
            for number, ((suite, _, i), name) in enumerate(names.items())
        ),
    )
    return {
        way: {
            suite: [
                _sum([done[names[suite, repetition, i]][way] for i in range(len(prompts))])
                for repetition in range(setup.repetitions)
            ]
            for suite, prompts in setup.prompts.items()
        }
        for way in ways
    }


def decode(model: Any, prompt: Prompt, new_tokens: int, config: dict[str, Any], metrics: DecodeMetrics) -> list[int]:
    """One prompt's new tokens, greedy."""
    ids = torch.tensor([prompt], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        generation_strategy=config["strategy"],
        recguide_config=config,
        recguide_hooks=[metrics],
    )
    new: list[int] = output[0, len(prompt) :].tolist()
    return new


def _sum(prompts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums: dict[str, Any] = {
        key: sum(one[key] for one in prompts) for key in ("seconds", "new_tokens", "committed", "forwards", "different")
    }
    outcomes: Counter[str] = Counter()
    for one in prompts:
        outcomes.update(one["outcomes"])
    return sums | {"outcomes": dict(outcomes)}


def _ends(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    return frozenset(() if ends is None else (ends,) if isinstance(ends, int) else ends)


def serve(setup: Setup, loads: Sequence[int], only_s: Path) -> list[dict[str, Any]]:
    """The engine under load: an entry for each contender, load and repetition. Contenders take turns."""
    mixed = [prompt for one_of_each in zip(*setup.prompts.values(), strict=True) for prompt in one_of_each]

    def config(label: str) -> dict[str, Any]:
        if label in FIXED:
            return {"block_size": int(label.removeprefix("B = "))}
        if label == "auto":
            return {}
        return {"policy": "concurrency_table" if label == "Fixed Block" else "verification_guided"} | (
            {"tables": str(only_s)} if label == "+ s" else {}
        )

    @cache
    def alone() -> dict[Prompt, list[int]]:
        return {
            prompt: decode(setup.model, prompt, setup.max_new_tokens, WAYS["AR"], DecodeMetrics()) for prompt in mixed
        }

    def step(label: str, concurrency: int) -> dict[str, Any]:
        count = max(8, 2 * concurrency)
        requests = [mixed[i % len(mixed)] for i in range(count)]
        options = {
            "generation_strategy": "auto" if label == "auto" else "linear",
            "recguide_config": config(label),
            "max_new_tokens": setup.max_new_tokens,
            "do_sample": False,
        }
        counted, times, results = closed_loop(
            setup.model, requests, requests[: min(2, concurrency)], concurrency, ABLATION.get(label, "packed"), options
        )
        counted.check()
        for prompt, result in zip(requests, results, strict=True):
            if result.error is not None:
                raise result.error
            if setup.must_equal and result.tokens != alone()[prompt]:
                raise LosslessError(f"{label} with {concurrency} requests: an output differs from plain decoding.")
        return {
            "policy": label,
            "concurrency": concurrency,
            "tokens_per_s": times.summary()["output_throughput"],
            "per_request_tokens_per_s": times.per_request_tokens_per_s,
            "block_share": times.block_share,
        }

    grid = [
        (f"{label}, {concurrency} requests, repetition {repetition}", label, concurrency)
        for repetition in range(setup.repetitions)
        for concurrency in loads
        for label in UNDER_LOAD
    ]
    done = setup.steps(
        "under load", ((name, lambda label=label, load=load: step(label, load)) for name, label, load in grid)
    )
    return list(done.values())


def save_only_s(setup: Setup, directory: Path) -> Path:
    """The model's tables without the outcome of the last block, for the ablation; returns their directory."""
    progress, costs = read_tables(setup.adapter, RecGuideConfig(policy="verification_guided"))
    assert progress is not None
    assert costs is not None
    blind(progress).save(directory)
    costs.save(directory)
    return directory


def blind(progress: ProgressTable) -> ProgressTable:
    """A table that knows certainty and nothing of the last block."""
    return replace(progress, strata={ALL: progress.strata[ALL]})


def time_rounds(setup: Setup, loads: Sequence[int]) -> list[RoundCost]:
    def step(number: int) -> list[dict[str, Any]]:
        ((costs, _),) = measure_costs(setup.adapter, [number], BLOCK_SIZES, [CONTEXT], setup.repetitions)
        return [asdict(cost) for cost in costs]

    done = setup.steps("round times", ((f"rounds of {n} requests", lambda n=n: step(n)) for n in loads))
    return [RoundCost(**cost) for costs in done.values() for cost in costs]


def simulate(setup: Setup, model: str, requests: int, seed: int) -> list[dict[str, Any]]:
    """Serving at a B200's published costs: an entry for each contender and load."""
    costs = simulator.b200_costs(model)

    @cache
    def recordings() -> tuple[list[simulator.Recording], ProgressTable]:
        fitted = simulator.random_recordings(FIT_REQUESTS, seed + FIT_SEED)
        return simulator.random_recordings(requests, seed), simulator.fit_recordings(fitted, costs.fingerprint)

    def policy(label: str) -> BlockPolicy:
        served, progress = recordings()
        if label in FIXED:
            makers = simulator.contenders(["fixed"], costs, served, lambda: progress)
            return makers[f"fixed-{label.removeprefix('B = ')}"]()
        match label:
            case "auto":
                return simulator.contenders(["auto"], costs, served, lambda: progress)["auto"]()
            case "Fixed Block":
                return ConcurrencyTable()
            case _:
                return VerificationGuided(blind(progress) if label == "+ s" else progress, costs)

    def step(label: str, concurrency: int) -> dict[str, Any]:
        served = simulator.simulate(recordings()[0], policy(label), costs, ABLATION.get(label, "packed"), concurrency)
        return {
            "policy": label,
            "concurrency": concurrency,
            "tokens_per_s": served.tokens_per_s,
            "per_request_tokens_per_s": served.per_request_tokens_per_s,
            "block_share": {str(size): share for size, share in served.block_share.items()},
        }

    grid = [(label, load) for load in SIMULATED_LOADS if load < requests for label in UNDER_LOAD]
    done = setup.steps(
        f"simulated {model}",
        (
            (f"simulated {model}, {label}, {load} requests", lambda label=label, load=load: step(label, load))
            for label, load in grid
        ),
    )
    return list(done.values())
