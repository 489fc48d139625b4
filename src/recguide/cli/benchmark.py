"""Run strategies side by side on the same prompts and check that none changes a token."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from os import environ
from typing import Any

import torch

from ..config import RecGuideConfig
from ..errors import ConfigError, LosslessError
from ..metrics import DecodeMetrics, looping_tokens
from ..tiny.tasks import Task, score
from .loading import chat_ids

OURS = ("ar", "linear", "quadratic", "recguide")
OUTSIDE: dict[str, dict[str, Any]] = {"hf-generate": {}, "hf-prompt-lookup": {"prompt_lookup_num_tokens": 10}}
"""What a user would pick instead: transformers' greedy generate, and its n-gram assisted decoding."""


@dataclass
class Contender:
    """One strategy at one block size, with what it has done so far."""

    strategy: str
    block_size: int
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
        config = {"block_size": self.block_size}
        return {"generation_strategy": self.strategy, "recguide_config": config, "recguide_hooks": [metrics]}

    def report(self) -> dict[str, Any]:
        """This contender's entry of the JSON file."""
        ours, m = self.strategy not in OUTSIDE, self.metrics
        decode = self.plain_forwards["decode"]
        return {
            "strategy": self.strategy,
            "block_size": self.block_size,
            "suite": self.suite,
            "concurrency": 1,
            "prompts": self.prompts,
            "committed_tokens": m.committed_tokens if ours else self.new_tokens - self.prompts,
            "new_tokens": self.new_tokens,
            "forwards": {kind: m.forwards[kind] for kind in ("prefill", "draft", "verify", "fused")}
            if ours
            else {"prefill": self.plain_forwards["prefill"], "draft": 0, "verify": decode, "fused": 0},
            "decode_tpf": m.decode_tpf if ours else _ratio(self.new_tokens - self.prompts, decode),
            "e2e_tpf": m.e2e_tpf if ours else _ratio(self.new_tokens, sum(self.plain_forwards.values())),
            "tau": m.tau if ours else 2 * _ratio(self.new_tokens - self.prompts, decode),
            "mean_committed": m.mean_committed if ours else _ratio(self.new_tokens - self.prompts, decode),
            "acceptance_histogram": {str(n): m.committed_histogram[n] for n in sorted(m.committed_histogram)},
            "full_round_rate": _ratio(m.full_rounds, m.all_rounds),
            "reuse_rate": m.reuse_rate,
            "outcomes": dict(m.outcomes),
            "query_tokens_per_forward": m.query_tokens_per_forward,
            "host_share": m.host_share if ours and not self.on_gpu else None,
            "wall_s": self.wall_s,
            "tokens_per_s": _ratio(self.new_tokens, self.wall_s),
            "looping_share": _ratio(self.looping, self.new_tokens),
            "accuracy": _ratio(self.right, self.prompts),
            "equal_to_ar": self.different == 0,
            "first_difference": self.first_difference,
        }


def contenders(strategies: Sequence[str], block_sizes: Sequence[int], suites: Sequence[str]) -> list[Contender]:
    """Every strategy at every valid block size on every suite; `ar`, the reference, is always there, and has no block size."""
    known = (*OURS, *OUTSIDE)
    if unknown := sorted(set(strategies) - set(known)):
        raise ConfigError(f"Unknown strategies: {', '.join(unknown)}. Known: {', '.join(known)}.")
    for size in block_sizes:
        RecGuideConfig(block_size=size)
    names = ["ar", *(name for name in strategies if name != "ar")]
    return [
        Contender(name, size, suite)
        for suite in suites
        for name in names
        for size in ((1,) if name == "ar" or name in OUTSIDE else block_sizes)
    ]


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
            _generate(model, warm_up, 2 * max(4, entry.block_size), entry.options(DecodeMetrics()))
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
    """Note where an output leaves the reference first, and how far apart the model's top two logits were there."""
    if output == reference:
        return
    pairs = enumerate(zip(output, reference, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(output), len(reference)))
    entry.different += 1
    if entry.first_difference is None:
        prefix = torch.cat((ids, ids.new_tensor([reference[:at]])), dim=1)
        with torch.no_grad():
            top = model(input_ids=prefix, use_cache=False, logits_to_keep=1).logits[0, -1].float().topk(2).values
        entry.first_difference = {"prompt": entry.prompts, "new_token": at, "top2_gap": float(top[0] - top[1])}


def check(entries: Sequence[Contender]) -> None:
    """Raise [`LosslessError`] if a counter identity fails or an output is not `ar`'s, an outside baseline's included."""
    for entry in entries:
        if entry.strategy not in OUTSIDE:
            entry.metrics.check()
            if entry.metrics.new_tokens != entry.new_tokens:
                raise LosslessError(
                    f"{entry.strategy}: the hooks saw {entry.metrics.new_tokens} new tokens, the output has {entry.new_tokens}."
                )
    wrong = [
        f"{label_of(e.strategy, e.block_size)} on {e.different} of {e.prompts} {e.suite} prompts, first {e.first_difference}"
        for e in entries
        if e.different
    ]
    if wrong:
        raise LosslessError("Outputs differ from plain decoding: " + "; ".join(wrong) + ".")


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
        linear = f"linear-{size}"
        if strategy in ("recguide", "quadratic") and linear in by_label:
            for key in ("decode_tpf", "tokens_per_s"):
                found[f"{label}/{linear} {key}"] = quotient(label, linear, key)
        for base in ("ar", "hf-generate"):
            if base in by_label and label != base:
                found[f"{label}/{base} tokens_per_s"] = quotient(label, base, "tokens_per_s")
    return found


def label_of(strategy: str, block_size: int) -> str:
    """`linear-16`; strategies without blocks are called by name alone."""
    return strategy if strategy == "ar" or strategy in OUTSIDE else f"{strategy}-{block_size}"


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
