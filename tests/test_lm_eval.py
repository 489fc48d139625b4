"""`eval/lm_eval_compare.py`, its tasks and its metric. They need the extra `eval`."""

from __future__ import annotations

import csv
import gzip
import json
import sys
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason='needs pip install "recguide[eval]"')

from recguide import ConfigError, InputError, LosslessError
from recguide.tiny.tasks import make_task

EVAL = Path(__file__).parents[1] / "eval"


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EVAL))
    monkeypatch.syspath_prepend(str(EVAL / "lm_eval_tasks"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name)


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("lm_eval_compare", monkeypatch)


@pytest.fixture
def grading(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return script("grading", monkeypatch)


# --- data ---

ROWS: dict[str, list[dict[str, Any]]] = {
    # Made up, in the format that the hub has.
    "gsm8k": [{"question": "Ann has 2 pens and buys 3. How many?", "answer": "She has <<2+3=5>>5.\n#### 5"}],
    "recguide_humaneval": [
        {
            "task_id": "x/0",
            "prompt": 'def double(n):\n    """Twice n."""\n',
            "entry_point": "double",
            "canonical_solution": "    return 2 * n\n",
            "test": "def check(candidate):\n    assert candidate(4) == 8\n",
        }
    ],
    "recguide_mbpp": [
        {
            "task_id": 1,
            "text": "Write a function that adds one.",
            "code": "def inc(n):\n    return n + 1",
            "test_list": ["assert inc(1) == 2"],
            "test_setup_code": "",
        }
    ],
    "gpqa_diamond_generative_n_shot": [
        {"Question": "Which?", "Correct Answer": "this"} | {f"Incorrect Answer {i}": f"no {i}" for i in (1, 2, 3)}
    ],
    "recguide_aime25": [{"question": "What is $2+3$?", "answer": "5"}],
}


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@cache
def manager() -> Any:
    """It reads some thousand files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(EVAL / "lm_eval_tasks"))


def load_task(configured: str) -> Any:
    (task,) = manager().load([configured])["tasks"].values()
    return task


@pytest.mark.parametrize(
    ("name", "file", "contained"),
    [
        ("gsm8k", "test.jsonl", "Question: Ann has 2 pens"),
        ("recguide_humaneval", "HumanEval.jsonl.gz", "def double(n):"),
        ("recguide_humaneval_instruct", "HumanEval.jsonl", "```python\ndef double(n):"),
        ("recguide_mbpp", "mbpp.jsonl", "assert inc(1) == 2"),
        ("gpqa_diamond_generative_n_shot", "gpqa.csv", "(A) "),
        ("recguide_aime25", "aime.jsonl", "What is $2+3$?"),
    ],
)
def test_standard_tasks_read_local_files(
    compare: ModuleType, tmp_path: Path, name: str, file: str, contained: str
) -> None:
    rows = ROWS[name.removesuffix("_instruct")]
    task = load_task(compare.with_data(manager(), name, str(write(tmp_path / file, rows)), tmp_path))
    (doc,) = task.eval_docs
    assert contained in task.doc_to_text(doc)


def test_a_folder_as_the_hub_has_it(compare: ModuleType, tmp_path: Path) -> None:
    """lm-eval's own gsm8k, with its five examples from the training split."""
    for split, count in (("train", 8), ("test", 2)):
        (tmp_path / "main").mkdir(exist_ok=True)
        write(tmp_path / "main" / f"{split}-00000.jsonl", ROWS["gsm8k"] * count)
    (tmp_path / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "  - split: test\n    path: main/test-*\n---\n"
    )
    task = load_task(compare.with_data(manager(), "gsm8k", str(tmp_path), tmp_path / "tasks"))
    assert (len(task.eval_docs), task.config.num_fewshot) == (2, 5)


@pytest.mark.parametrize(
    ("task", "source", "message"),
    [
        ("gsm8k", "/no/such/file.jsonl", "no such file or folder"),
        ("gsm8k", __file__, "expected a file that ends in"),
        ("ifeval", "package", "packages have data of gsm8k"),
    ],
)
def test_data_that_is_not_there(compare: ModuleType, tmp_path: Path, task: str, source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare.with_data(manager(), task, source, tmp_path)


# --- tasks ---


def test_groups_and_tags_stand_for_their_tasks(compare: ModuleType) -> None:
    found = compare.single_tasks(manager(), ["recguide_text", "minerva_math", "gpqa"])
    assert found["recguide_text"] == ["recguide_text"]
    assert found["minerva_math"][:2] == ["minerva_math_algebra", "minerva_math_counting_and_prob"]
    assert len(found["minerva_math"]) == 7
    assert "gpqa_diamond_generative_n_shot" in found["gpqa"]
    with pytest.raises(ConfigError, match=r"Unknown tasks: no_such_task\..*recguide_aime25, recguide_code"):
        compare.single_tasks(manager(), ["gsm8k", "no_such_task"])


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("hellaswag", r"generates nothing \(multiple_choice\)"),
        ("gsm8k_cot_self_consistency", "samples, so its outputs differ by chance"),
        ("humaneval", "without a sandbox.*--confirm-run-unsafe-code"),
        ("recguide_aime25", "writes up to 4096 tokens, and the model has a context of 2048"),
    ],
)
def test_tasks_that_cannot_be_compared(compare: ModuleType, task: str, message: str) -> None:
    lm = compare.CountedLM(*compare.load(compare.TINY, "float32", "cpu"), 1, {})
    config = manager().task_index[task].cfg
    with pytest.raises(ConfigError, match=message):
        compare.check_task(lm, config, None, False)
    for good in ("gsm8k", "recguide_humaneval", "recguide_text"):
        compare.check_task(lm, manager().task_index[good].cfg, None, False)
    if task == "humaneval":
        compare.check_task(lm, config, None, True)
    if task == "recguide_aime25":
        compare.check_task(lm, config, 64, False)


# --- graders ---


@pytest.mark.parametrize("family", ["math", "code", "text"])
def test_right_answers_of_the_families_score(grading: ModuleType, family: str) -> None:
    pytest.importorskip("reasoning_gym")
    task = load_task(f"recguide_{family}")
    docs = list(task.eval_docs)
    assert docs[3]["prompt"] == make_task(family, "test", 3).prompt
    for answer, expected in ((docs[0]["answer"], 1.0), (docs[1]["answer"], 0.0)):
        # As lm-eval hands it on: cut at the first end.
        for end in task.config.generation_kwargs["until"]:
            answer = answer.partition(end)[0]
        if family == "math":
            (resps,) = zip(*[[answer]], strict=True)
            (filtered,) = task._filters[0].filters[0]().apply([list(resps)], docs[:1])
            assert (filtered[0] == docs[0]["checks"][0]) == bool(expected)
        else:
            grade = {"code": grading.code_results, "text": grading.text_results}[family]
            assert list(grade(docs[0], [answer]).values()) == [expected]


@pytest.mark.parametrize(("body", "expected"), [("    return 2 * n\n", 1.0), ("    return n\n", 0.0)])
def test_humaneval_runs_its_tests(grading: ModuleType, body: str, expected: float) -> None:
    assert grading.humaneval_results(ROWS["recguide_humaneval"][0], [body]) == {"passed": expected}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```python\ndef inc(n):\n    return n + 1", 1.0),
        ("So:\n```py\ndef inc(n):\n    return n + 1\n```", 1.0),
        ("def inc(n):\n    return n + 1", 1.0),
        ("It is n + 1.", 0.0),
    ],
)
def test_mbpp_runs_its_tests(grading: ModuleType, text: str, expected: float) -> None:
    assert grading.mbpp_results(ROWS["recguide_mbpp"][0], [text]) == {"passed": expected}


def test_mathematics_is_verified(grading: ModuleType) -> None:
    pytest.importorskip("math_verify")
    for text, expected in ((r"So \boxed{10/2}.", 1.0), (r"So \boxed{6}.", 0.0)):
        assert grading.math_results({"answer": "5"}, [text]) == {"verified": expected}


def test_the_metric_loads_without_a_network() -> None:
    import evaluate

    metric = evaluate.load(str(EVAL / "metrics" / "code_pass"))
    right, wrong = "def f():\n    return 1", "def f():\n    return 2"
    found = metric.compute(predictions=[[right, wrong], [wrong, wrong]], references=["assert f() == 1"] * 2, k=[1, 2])
    assert found == {"pass@1": 0.25, "pass@2": 0.5, "n_passed": [1, 0]}
    for draws in (0, 2):
        with pytest.raises(ValueError, match=f"pass@{draws} needs as many candidates"):
            metric.compute(predictions=[[right]], references=["assert f() == 1"], k=[draws])


# --- comparing ---


def test_strategies_write_and_score_what_plain_decoding_does(compare: ModuleType) -> None:
    model, tokenizer = compare.load(compare.TINY, "float32", "cpu")
    results = []
    for options in ({}, {"generation_strategy": "recguide", "recguide_config": {"block_size": 16}}):
        lm = compare.CountedLM(model, tokenizer, 2, options)
        results.append(compare.evaluate(lm, "recguide_text", manager(), 2, None, 0, "x"))
    plain, ours = results
    compare.compare(ours, plain)
    assert (ours.different, ours.same_tokens) == ([], True)
    assert plain.scores == ours.scores
    assert plain.scores.keys() == {"followed,none"}
    assert ours.forwards < plain.forwards / 2
    assert ours.report()["tokens_per_forward"] > 2
    assert ours.report()["samples"] == 2
    compare.check(results, "float32")

    ours.texts[1] += "."
    compare.compare(ours, plain)
    assert ours.different == [1]
    with pytest.raises(LosslessError, match="1 of 2 texts or scores differ"):
        compare.check(results, "float32")
    compare.check(results, "bfloat16")


# --- the command ---


@pytest.fixture
def _own_tasks(compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command runs in a folder of its own, and reads only our tasks: lm-eval's are some thousand files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "TaskManager", partial(compare.TaskManager, include_defaults=False))


def call(compare: ModuleType, *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(compare.main)
    given = ("--tasks", "recguide_text", "--limit", "1", "--max-new-tokens", "24", "--output", "out", "--threads", "1")
    return CliRunner().invoke(app, [*given, *arguments], env={"COLUMNS": "200"})


@pytest.mark.usefixtures("_own_tasks")
def test_the_command_writes_as_it_goes_and_goes_on(
    compare: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    evaluate, evaluated = compare.evaluate, []

    def interrupted(*arguments: Any) -> Any:
        evaluated.append(arguments[6])
        if len(evaluated) == 3:
            raise KeyboardInterrupt
        return evaluate(*arguments)

    monkeypatch.setattr(compare, "evaluate", interrupted)
    # A space behind a comma is no other strategy.
    assert call(compare, "--strategies", "ar, linear").exit_code == 130
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "recguide_text.ar.json",
        "recguide_text.plain.json",
    ]
    result = call(compare, "--strategies", "ar, linear")
    assert result.exit_code == 0, result.output
    assert evaluated == ["plain", "ar", "linear-16", "linear-16"]
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [run["strategy"] for run in runs] == ["plain", "ar", "linear-16"]
    assert all(run["same_tokens"] and run["same_texts_and_scores"] for run in runs)
    assert runs[1]["tokens_per_forward"] == 1

    result = call(compare, "--strategies", "ar", "--seed", "1")
    assert result.exit_code == 2
    assert "is of another run (seed 0, here 1)" in result.output
    (tmp_path / "out" / "recguide_text.plain.json").write_text("{}")
    result = call(compare, "--strategies", "ar")
    assert result.exit_code == 2
    assert "is no result of this script" in result.output


@pytest.mark.usefixtures("_own_tasks")
def test_another_seed_takes_other_prompts(compare: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    scored = compare.simple_evaluate

    def simple_evaluate(*arguments: Any, **options: Any) -> Any:
        found = scored(*arguments, **options)
        seen.extend(sample["doc"]["prompt"] for sample in found["samples"]["recguide_text"])
        return found

    monkeypatch.setattr(compare, "simple_evaluate", simple_evaluate)
    for seed in ("0", "2"):
        assert call(compare, "--strategies", "ar", "--seed", seed, "--output", f"out{seed}").exit_code == 0
    first, other = (make_task("text", "test", number).prompt for number in (0, 2_000_000))
    assert seen == [first, first, other, other]
