"""`evaluate.load("eval/metrics/code_pass")`: pass@k of programs, run in recguide's sandbox; needs no network."""

from __future__ import annotations

from math import comb
from typing import Any

import datasets
import evaluate

from recguide.tiny.tasks.sandbox import runs

_DESCRIPTION = """\
How often at least one of k programs passes its tests (M. Chen et al., Evaluating Large Language Models Trained on Code, 2021). Each runs
by itself in a short-lived subprocess with limits of time and memory, an empty temporary directory, and no network. That contains
accidents; it is no defence against an attacker."""
_INPUTS = """\
Args:
    predictions (list of list of str): each problem's candidates.
    references (list of str): each problem's tests.
    k (list of int): draws.
    cpu_seconds (int), memory_mib (int): limits of one program.
Returns:
    pass@k (float) for each k, and n_passed (list of int) of each problem."""


class CodePass(evaluate.Metric):
    def _info(self) -> evaluate.MetricInfo:
        features = {
            "predictions": datasets.Sequence(datasets.Value("string")),
            "references": datasets.Value("string"),
        }
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=_INPUTS, features=datasets.Features(features)
        )

    def _compute(
        self,
        predictions: list[list[str]],
        references: list[str],
        k: tuple[int, ...] = (1,),
        cpu_seconds: int = 10,
        memory_mib: int = 1024,
    ) -> dict[str, Any]:
        fewest = min(map(len, predictions))
        if wrong := [draws for draws in k if not 1 <= draws <= fewest]:
            raise ValueError(f"pass@{wrong[0]} needs as many candidates for each problem; got {fewest}.")
        limits: dict[str, Any] = {"timeout": 3.0 * cpu_seconds, "cpu_seconds": cpu_seconds, "memory_mib": memory_mib}
        passed = [
            sum(runs(f"{program}\n{tests}", **limits) for program in candidates)
            for candidates, tests in zip(predictions, references, strict=True)
        ]
        counts = list(zip(map(len, predictions), passed, strict=True))
        # 1 - the odds that none of k drawn without replacement passes.
        return {
            f"pass@{draws}": sum(1 - comb(n - right, draws) / comb(n, draws) for n, right in counts) / len(counts)
            for draws in k
        } | {"n_passed": passed}
