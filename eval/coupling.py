"""How often shared noise makes a draft right under sampling, against the best that any coupling could do.

    python eval/coupling.py --prompts 20 --json coupling.json

For every drafted position up to the first rejection it compares the drafter's distribution with the verifier's there:
the acceptance of the maximal coupling is one minus their total variation; that of shared Gumbel noise is
`sum_i 1 / sum_j max(draft_j / draft_i, target_j / target_i)` (Daliri, Musco and Suresh, 2025, Coupling without
Communication and Drafter-Invariant Speculative Decoding); beside them stands what was accepted in truth. A second table says what
it is worth to apply the processors to drafts too.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import recguide
from recguide.adapter import ModelAdapter, Predictions
from recguide.attention import resolve_backend
from recguide.dense_kv import KVCache
from recguide.loop import generate, method_of
from recguide.metrics import DecodeMetrics
from recguide.rounds import Request
from recguide.sampling import Sampling
from recguide.segments import Plan, Segment
from recguide.tiny.tasks import FAMILIES, make_task

SETTINGS: dict[str, list[Any]] = {
    "temperature 0.3": [TemperatureLogitsWarper(0.3)],
    "temperature 0.7": [TemperatureLogitsWarper(0.7)],
    "temperature 1.0": [],
    "temperature 1.5": [TemperatureLogitsWarper(1.5)],
    "0.7, top-k 20, top-p 0.9": [TemperatureLogitsWarper(0.7), TopKLogitsWarper(20), TopPLogitsWarper(0.9)],
}


@dataclass
class Compared:
    """Sums over drafted positions."""

    positions: int = 0
    accepted: int = 0
    shared: float = 0.0
    maximal: float = 0.0

    def report(self) -> dict[str, float]:
        return {
            "positions": self.positions,
            "accepted": self.accepted / self.positions,
            "shared_noise": self.shared / self.positions,
            "maximal_coupling": self.maximal / self.positions,
        }


class Watching(ModelAdapter):
    """Compares each draft forward's distributions with those of the verification after it (`linear`, one request)."""

    def __init__(self, model: Any, compared: Compared, draft_processors: Sequence[Any] | None = None) -> None:
        super().__init__(model, resolve_backend())
        self._compared = compared
        self._draft_processors = draft_processors
        self._drafted: Tensor | None = None

    def forward(
        self,
        rows: Sequence[Sequence[Segment]],
        kv: KVCache,
        best: int = 1,
        samplings: Sequence[Sampling | None] = (),
        entropies: bool = False,
    ) -> tuple[Plan, Predictions]:
        drafts = rows[0][0].bidirectional
        if drafts and self._draft_processors is not None and samplings[0] is not None:
            samplings = [replace(samplings[0], processors=tuple(self._draft_processors))]
        plan, predictions = super().forward(rows, kv, best, samplings, entropies)
        assert samplings[0] is not None
        probs = self._probabilities(predictions.logits, samplings[0])
        if drafts:
            self._drafted = probs
        elif self._drafted is not None:
            for i, token in enumerate(rows[0][0].tokens[1:]):
                right = predictions.best[i][0] == token
                self._compared.positions += 1
                self._compared.accepted += right
                self._compared.maximal += float(torch.minimum(self._drafted[i], probs[i]).sum())
                self._compared.shared += shared_noise_acceptance(self._drafted[i], probs[i])
                if not right:
                    break
            self._drafted = None
        return plan, predictions

    def _probabilities(self, logits: Tensor, sampling: Sampling) -> Tensor:
        scores = logits.clone()
        for processor in sampling.processors:
            scores = processor(torch.empty((len(scores), 0), dtype=torch.long), scores)
        scores[:, self.excluded_token_ids] = float("-inf")
        return scores.double().softmax(-1)


def shared_noise_acceptance(draft_probs: Tensor, target_probs: Tensor) -> float:
    """Probability that both argmaxes agree; `float64[V]` each."""
    # max(draft_j / draft_i, target_j / target_i) is the first of the two where draft_j / target_j is at least that of i: sorted by
    # this quotient, the sum over j is a sum of targets before i and of drafts from i on. Nobody wins where one of them is zero.
    order = (draft_probs / target_probs.clamp_min(1e-300)).argsort()
    draft, target = draft_probs[order], target_probs[order]
    targets_before = target.cumsum(0) - target
    drafts_from = draft.sum() - (draft.cumsum(0) - draft)
    both = (draft > 0) & (target > 0)
    return float((1 / (targets_before[both] / target[both] + drafts_from[both] / draft[both])).sum())


def run(model: Any, prompts: Sequence[list[int]], processors: list[Any], block_size: int, eos: int, draft: Any) -> Any:
    compared, metrics = Compared(), DecodeMetrics()
    adapter = Watching(model, compared, draft)
    method = method_of(recguide.RecGuideConfig("linear", block_size=block_size), frozenset({eos}), adapter)
    for seed, prompt in enumerate(prompts):
        request = Request(
            id=0,
            tokens=list(prompt),
            max_new_tokens=200,
            stop=lambda tokens: "eos" if tokens[-1] == eos else None,
            method=method,
            sampling=Sampling(seed, tuple(processors)),
        )
        generate([request], adapter, [metrics])
    return compared.report() | {"mean_committed": metrics.mean_committed}


def main(
    model: Annotated[
        str, typer.Argument(help="recguide-tiny (embedded), a directory, or a hub name.")
    ] = "recguide-tiny",
    prompts: Annotated[int, typer.Option(help="Prompts, over the three suites.", min=3)] = 30,
    block_size: Annotated[int, typer.Option()] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Acceptance of shared noise against the maximal coupling, and the worth of processors on drafts."""
    torch.set_num_threads(1)
    path = recguide.tiny_path() if model == "recguide-tiny" else model
    network = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": make_task(family, "test", i).prompt}], add_generation_prompt=True
        )["input_ids"]
        for i in range(prompts // 3)
        for family in FAMILIES
    ]
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, processors in track(SETTINGS.items(), description="settings"):
        temperature = [p for p in processors if isinstance(p, TemperatureLogitsWarper)]
        for drafted_with, draft in (("all", None), ("temperature", temperature), ("nothing", [])):
            rows[name][drafted_with] = run(network, ids, processors, block_size, tokenizer.eos_token_id, draft)
    console = Console()
    coupling = Table("setting", "positions", "accepted", "shared noise", "maximal coupling")
    worth = Table("setting", "drafts with all processors", "with the temperature", "with none")
    for name, by_draft in rows.items():
        figures = by_draft["all"]
        columns = ("accepted", "shared_noise", "maximal_coupling")
        coupling.add_row(name, f"{figures['positions']}", *(f"{figures[c]:.3f}" for c in columns))
        worth.add_row(name, *(f"{by_draft[d]['mean_committed']:.2f}" for d in ("all", "temperature", "nothing")))
    console.print("Share of drafted positions, up to the first rejection", coupling)
    console.print("Tokens committed a round, LinearSS", worth)
    if json_file is not None:
        json_file.write_text(json.dumps({"model": model, "block_size": block_size, "settings": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
