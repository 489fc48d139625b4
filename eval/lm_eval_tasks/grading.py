"""Documents and graders of the tasks in this folder, for lm-eval, which imports this file by its path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import datasets

from recguide.errors import MissingDependencyError
from recguide.tiny.tasks import Task, make_task, score
from recguide.tiny.tasks.sandbox import runs

DOCUMENTS = 200
"""Of a family; lm-eval's --limit takes the first of them."""
Doc = Mapping[str, Any]


# --- the embedded model's families ---


def family_docs(family: str, first: int = 0, **_: Any) -> dict[str, datasets.Dataset]:
    """Held-out tasks of a family, from number `first` on; other metadata of the task is lm-eval's."""
    tasks = [make_task(family, "test", first + i) for i in range(DOCUMENTS)]
    rows = [{"family": family, "prompt": t.prompt, "answer": t.answer, "checks": list(t.checks)} for t in tasks]
    return {"test": datasets.Dataset.from_list(rows)}


def text_results(doc: Doc, results: list[str]) -> dict[str, float]:
    return {"followed": float(score(_task(doc), results[0]))}


def code_results(doc: Doc, results: list[str]) -> dict[str, float]:
    # What ends the text is cut off: the closing fence.
    return {"passed": float(score(_task(doc), f"{results[0]}\n```\n"))}


def _task(doc: Doc) -> Task:
    return Task(doc["family"], "", doc["prompt"], doc["answer"], tuple(doc["checks"]))


# --- programs of others ---

LIMITS: dict[str, Any] = {"timeout": 30.0, "cpu_seconds": 10, "memory_mib": 1024}
"""Of one program with its tests."""


def humaneval_results(doc: Doc, results: list[str]) -> dict[str, float]:
    program = f"{doc['prompt']}{results[0]}\n{doc['test']}\ncheck({doc['entry_point']})"
    return {"passed": float(runs(program, **LIMITS))}


def mbpp_results(doc: Doc, results: list[str]) -> dict[str, float]:
    _, fence, block = results[0].partition("```")
    # Behind the fence stands the language, by one name or another.
    code = block.partition("\n")[2].partition("```")[0] if fence else results[0]
    program = "\n".join([code, doc.get("test_setup_code") or "", *doc["test_list"]])
    return {"passed": float(runs(program, **LIMITS))}


# --- graders from packages ---


def math_results(doc: Doc, results: list[str]) -> dict[str, float]:
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise MissingDependencyError('Grading needs math-verify: pip install "recguide[eval-data]".') from error
    return {"verified": float(verify(parse(f"${doc['answer']}$"), parse(results[0])))}


def ifbench_results(doc: Doc, results: list[str]) -> dict[str, float]:
    check, sample_type = _ifbench()
    kwargs = [{name: value for name, value in one.items() if value is not None} for one in doc["kwargs"]]
    sample = sample_type(doc["key"], doc["prompt"], doc["instruction_id_list"], kwargs)
    _, scores = check("ifbench", sample, results[0])
    return {"followed": scores.binary_strict}


@cache
def _ifbench() -> tuple[Any, Any]:
    try:
        from if_verifiable import IFBenchSample, evaluate_output_for_sample
    except ImportError as error:
        raise MissingDependencyError('Grading needs if-verifiable: pip install "recguide[eval-data]".') from error
    return evaluate_output_for_sample, IFBenchSample
