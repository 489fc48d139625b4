"""Run strategies side by side on the same prompts and check that none changes a token."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from os import environ
from typing import Any

import torch

from ..config import RecGuideConfig
from ..errors import ConfigError, LosslessError
from ..loading import chat_ids
from ..metrics import DecodeMetrics, looping_tokens
from ..tiny.tasks import Task, score

OURS = ("ar", "linear", "quadratic", "recguide", "auto")
OUTSIDE: dict[str, dict[str, Any]] = {"hf-generate": {}, "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10}}
"""What a user would pick instead: transformers' greedy generate, and its n-gram assisted decoding."""


@dataclass
class Contender:
    """One strategy at one block size, with what it has done so far."""

    strategy: str
    block_size: int | None
    """`None` where the strategy chooses."""
    suite: str
    prompts: int = 0
    new_tokens: int = 0
    wall_s: float = 0.0
    right: int = 0
    different: int = 0
    first_difference: dict[str, float] | None = None
    looping: int = 0
    """New tokens that are a repetition loop: accepted at full speed, and worth nothing."""
    on_gpu: bool = False
    """There the host clock around a forward sees its launch only, so no host share is given."""
    metrics: DecodeMetrics = field(default_factory=DecodeMetrics)
    plain_forwards: Counter[str] = field(default_factory=Counter)

    def options(self, metrics: DecodeMetrics) -> dict[str, Any]:
        if self.strategy in OUTSIDE:
            return OUTSIDE[self.strategy]
        config = {} if self.block_size is None else {"block_size": self.block_size}
        return {"generation_strategy": self.strategy, "recguide_config": config, "recguide_hooks": [metrics]}

    def report(self) -> dict[str, Any]:
        """This contender's entry of the JSON file."""
        ours = self.strategy not in OUTSIDE
        return {
            "strategy": self.strategy,
            "block_size": self.block_size,
            "suite": self.suite,
            "concurrency": 1,
            "prompts": self.prompts,
            "new_tokens": self.new_tokens,
            **decode_figures(self.metrics),
            **({} if ours else self._plain_figures()),
            "host_share": self.metrics.host_share if ours and not self.on_gpu else None,
            "wall_s": self.wall_s,
            "tokens_per_s": _ratio(self.new_tokens, self.wall_s),
            "looping_share": _ratio(self.looping, self.new_tokens),
            "accuracy": _ratio(self.right, self.prompts),
            "equal_to_ar": self.different == 0,
            "first_difference": self.first_difference,
        }

    def _plain_figures(self) -> dict[str, Any]:
        """What is known of an outside baseline, which has no hooks: its tokens and its forwards."""
        decode, committed = self.plain_forwards["decode"], self.new_tokens - self.prompts
        return {
            "committed_tokens": committed,
            "forwards": {"prefill": self.plain_forwards["prefill"], "draft": 0, "verify": decode, "fused": 0},
            "decode_tpf": _ratio(committed, decode),
            "e2e_tpf": _ratio(self.new_tokens, self.plain_forwards.total()),
            "tau": 2 * _ratio(committed, decode),
            "mean_committed": _ratio(committed, decode),
        }


def decode_figures(metrics: DecodeMetrics) -> dict[str, Any]:
    """The part of an entry that comes from the hooks."""
    return {
        "committed_tokens": metrics.committed_tokens,
        "forwards": {kind: metrics.forwards[kind] for kind in ("prefill", "draft", "verify", "fused")},
        "decode_tpf": metrics.decode_tpf,
        "e2e_tpf": metrics.e2e_tpf,
        "tau": metrics.tau,
        "mean_committed": metrics.mean_committed,
        "acceptance_histogram": {str(n): metrics.committed_histogram[n] for n in sorted(metrics.committed_histogram)},
        "full_round_rate": _ratio(metrics.full_rounds, metrics.all_rounds),
        "reuse_rate": metrics.reuse_rate,
        "leftover_rate": metrics.leftover_rate,
        "outcomes": dict(metrics.outcomes),
        "query_tokens_per_forward": metrics.query_tokens_per_forward,
    }


def contenders(strategies: Sequence[str], block_sizes: Sequence[int], suites: Sequence[str]) -> list[Contender]:
    """Every strategy at every valid block size on every suite; `ar`, the reference, is always there, and has no block size."""
    known = (*OURS, *OUTSIDE)
    if unknown := sorted(set(strategies) - set(known)):
        raise ConfigError(f"Unknown strategies: {', '.join(unknown)}. Known: {', '.join(known)}.")
    for size in block_sizes:
        RecGuideConfig(block_size=size)
    names = ["ar", *(name for name in strategies if name != "ar")]
    return [Contender(name, size, suite) for suite in suites for name in names for size in sizes_of(name, block_sizes)]


def sizes_of(strategy: str, block_sizes: Sequence[int]) -> Sequence[int | None]:
    """Of these block sizes, those that a strategy can have; `None` where it chooses."""
    if strategy == "auto":
        return (None,)
    return (1,) if strategy == "ar" or strategy in OUTSIDE else block_sizes


def run(
    model: Any,
    tokenizer: Any,
    tasks: dict[str, list[Task]],
    entries: list[Contender],
    max_new_tokens: int,
    advance: Callable[[], None] = lambda: None,
) -> None:
    """
    Run every contender on every task of its suite, prompt by prompt in turn, so that a noisy moment hits all alike.

    The contenders are filled in place; an interruption loses the prompt under way and nothing else.
    """
    counter: Counter[str] = Counter()
    handle = model.register_forward_pre_hook(lambda *_: counter.update(("forward",)))
    try:
        for entry in entries:
            warm_up = chat_ids(tokenizer, tasks[entry.suite][0].prompt).to(model.device)
            _generate(model, warm_up, 2 * max(4, entry.block_size or 32), entry.options(DecodeMetrics()))
        for suite, suite_tasks in tasks.items():
            own = [entry for entry in entries if entry.suite == suite]
            for entry in own:
                entry.on_gpu = model.device.type == "cuda"
            for number, task in enumerate(suite_tasks):
                ids = chat_ids(tokenizer, task.prompt).to(model.device)
                outputs: dict[int, list[int]] = {}
                # Whoever comes first may find cold caches: the order turns from prompt to prompt.
                turn = number % len(own)
                for entry in own[turn:] + own[:turn]:
                    counter.clear()
                    metrics = DecodeMetrics()
                    start = time.perf_counter()
                    output = _generate(model, ids, max_new_tokens, entry.options(metrics))
                    wall = time.perf_counter() - start
                    outputs[id(entry)] = output
                    _note(entry, task, output, wall, metrics, counter["forward"], tokenizer)
                    advance()
                for entry in own:
                    _compare(entry, model, ids, outputs[id(entry)], outputs[id(own[0])])
    finally:
        handle.remove()


def _generate(model: Any, ids: torch.Tensor, max_new_tokens: int, options: dict[str, Any]) -> list[int]:
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False, **options
    )
    new: list[int] = output[0, ids.shape[1] :].tolist()
    return new


def _note(
    entry: Contender,
    task: Task,
    output: list[int],
    wall: float,
    metrics: DecodeMetrics,
    forwards: int,
    tokenizer: Any,
) -> None:
    entry.prompts += 1
    entry.metrics.add(metrics)
    entry.new_tokens += len(output)
    entry.wall_s += wall
    entry.looping += looping_tokens(output)
    entry.right += bool(task.checks) and score(task, tokenizer.decode(output, skip_special_tokens=True))
    entry.plain_forwards.update({"prefill": 1, "decode": forwards - 1})


def _compare(entry: Contender, model: Any, ids: torch.Tensor, output: list[int], reference: list[int]) -> None:
    if output != reference:
        entry.different += 1
        if entry.first_difference is None:
            entry.first_difference = {"prompt": entry.prompts} | difference(model, ids, output, reference)


def difference(model: Any, ids: torch.Tensor, output: list[int], reference: list[int]) -> dict[str, float]:
    """Where an output leaves the reference, and how far apart the model's top two logits are there; `ids`: `int64[1, T]`."""
    pairs = enumerate(zip(output, reference, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(output), len(reference)))
    prefix = torch.cat((ids, ids.new_tensor([reference[:at]])), dim=1)
    with torch.no_grad():
        top = model(input_ids=prefix, use_cache=False, logits_to_keep=1).logits[0, -1].float().topk(2).values
    return {"new_token": at, "top2_gap": float(top[0] - top[1])}


def check(entries: Sequence[Contender]) -> None:
    """Raise [`LosslessError`] if a counter identity fails or an output is not `ar`'s, an outside baseline's included."""
    for entry in entries:
        if entry.strategy not in OUTSIDE:
            check_counters(entry.strategy, entry.metrics, entry.new_tokens)
    check_outputs(
        f"{label_of(e.strategy, e.block_size)} on {e.different} of {e.prompts} {e.suite} prompts, first {e.first_difference}"
        for e in entries
        if e.different
    )


def check_counters(label: str, metrics: DecodeMetrics, new_tokens: int) -> None:
    """Raise [`LosslessError`] if the counters contradict each other, or the number of new tokens in the outputs."""
    metrics.check()
    if metrics.new_tokens != new_tokens:
        raise LosslessError(f"{label}: the hooks saw {metrics.new_tokens} new tokens, the outputs have {new_tokens}.")


def check_outputs(wrong: Iterable[str]) -> None:
    """Raise [`LosslessError`] if there is any that differs."""
    if differing := "; ".join(wrong):
        raise LosslessError(f"Outputs differ from plain decoding: {differing}.")


def ratios(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """
    Quotients of means over the suites: `recguide-16/linear-16 decode_tpf`, each strategy's tokens a second against `ar`
    and against `hf-generate`.
    """
    by_label: dict[str, dict[str, dict[str, Any]]] = {}
    for r in runs:
        by_label.setdefault(label_of(r["strategy"], r["block_size"]), {})[r["suite"]] = r

    def quotient(label: str, base: str, key: str) -> float:
        shared = by_label[label].keys() & by_label[base].keys()
        return _ratio(sum(by_label[label][s][key] for s in shared), sum(by_label[base][s][key] for s in shared))

    found = {}
    for label in by_label:
        strategy, _, size = label.partition("-")
        linears = [
            name for name in by_label if name.startswith("linear-") and size in ("", name.removeprefix("linear-"))
        ]
        for linear in linears if strategy in ("recguide", "quadratic", "auto") else ():
            for key in ("decode_tpf", "tokens_per_s"):
                found[f"{label}/{linear} {key}"] = quotient(label, linear, key)
        for base in ("ar", "hf-generate"):
            if base in by_label and label != base:
                found[f"{label}/{base} tokens_per_s"] = quotient(label, base, "tokens_per_s")
    return found


def label_of(strategy: str, block_size: int | None) -> str:
    """`linear-16`; strategies without blocks, or that choose them, are called by name alone."""
    return strategy if strategy == "ar" or strategy in OUTSIDE or block_size is None else f"{strategy}-{block_size}"


def environment(model_name: str, model: Any) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "recguide": version("recguide"),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(model.device),
        "threads": torch.get_num_threads(),
        "omp_wait_policy": environ.get("OMP_WAIT_POLICY", "default"),
        "device": str(model.device),
        "dtype": str(model.dtype).removeprefix("torch."),
        "model": model_name,
    }


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
