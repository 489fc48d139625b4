"""`recguide bench --concurrency`: every contender serves the same requests, and what is measured is written whole or not at all."""

from __future__ import annotations

import csv
import json
import signal
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

import recguide
from recguide import EngineConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.calibration import CostProfile, ProgressTable, RoundCost, Stratum
from recguide.cli import load_benchmark
from recguide.cli.load_benchmark import LoadContender, LoadTest, contenders, ratios
from recguide.cli.main import app
from recguide.testing import toy_model

runner = CliRunner()
SMALL = ("bench", "--suite", "text,code", "--prompts", "1", "--max-new-tokens", "9", "--block-size", "8")


@lru_cache
def model() -> Any:
    return toy_model(vocab_size=2048)


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command finds a toy model with the embedded model's tokenizer and an empty directory; little memory, few requests."""
    monkeypatch.setattr(load_benchmark, "PARTS", 1)
    monkeypatch.setattr(load_benchmark, "EngineConfig", partial(EngineConfig, kv_bytes=2**22))
    tokenizer = AutoTokenizer.from_pretrained(recguide.tiny_path())
    monkeypatch.setattr("recguide.cli.main.load", lambda name, dtype, device: (model(), tokenizer))
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Any:
    return runner.invoke(app, [*SMALL, *arguments], env={"COLUMNS": "200"})


def save_tables() -> None:
    here = ModelAdapter(model(), resolve_backend()).fingerprint
    cells = tuple(RoundCost(load, size, 64, size, size) for load in (1, 8) for size in (8, 16, 32))
    CostProfile(here, cells).save(Path("recguide_tables"))
    ProgressTable(here, {"all": Stratum((), ((1.0,) * 8 + (0.0,) * 24,), (10,))}).save(Path("recguide_tables"))


FIELDS = {
    "contender", "strategy", "block_size", "policy", "scheduler", "suite", "concurrency", "prompts", "new_tokens",
    "committed_tokens", "forwards", "decode_tpf", "e2e_tpf", "tau", "mean_committed", "acceptance_histogram", "full_round_rate",
    "reuse_rate", "leftover_rate",
    "outcomes", "query_tokens_per_forward", "host_share", "wall_s", "tokens_per_s", "per_request_tokens_per_s",
    "block_share", "bucket_occupancy", "bucket_wait", "preempted", "equal_to_ar", "different", "first_difference", "duration",
    "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput", "total_token_throughput",
    "max_concurrency",
}  # fmt: skip
TIMES = {f"{f}_{t}_ms" for t in ("ttft", "tpot", "itl", "e2el") for f in ("mean", "median", "p50", "p95", "p99")}


def test_every_policy_in_one_run() -> None:
    save_tables()
    result = call(
        "--concurrency", "2", "--policies", ",".join(load_benchmark.POLICIES), "--schedulers", "bucketed",
        "--strategies", "linear,quadratic", "--json", "load.json", "--csv", "load.csv", "--plot", "load.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(Path("load.json").read_text())
    assert set(record) == {"environment", "model", "runs", "ratios"}
    assert record["environment"]["suites"] == ["text", "code"]
    assert not record["environment"]["interrupted"]
    names = ["linear-8", *(f"linear {p}" for p in load_benchmark.POLICIES[1:]), "quadratic-8"]
    expected = ["ar", *(f"{name} bucketed" for name in names)]
    assert [run["contender"] for run in record["runs"]] == expected
    for run in record["runs"]:
        assert set(run) == FIELDS | TIMES
        assert run["equal_to_ar"]
        assert run["prompts"] == run["completed"] == 4, "the load is filled twice"
        assert run["new_tokens"] == run["total_output_tokens"] == 4 * 9
        assert run["forwards"]["prefill"] == 4, "warm-up is in no figure"
        assert sum(run["acceptance_histogram"].values()) == run["forwards"]["verify"] + run["forwards"]["fused"]
        assert sum(run["block_share"].values()) == pytest.approx(1)
        assert 1 <= run["bucket_occupancy"] <= 2 == run["max_concurrency"] == run["concurrency"]
        assert run["tokens_per_s"] == pytest.approx(run["new_tokens"] / run["wall_s"])
        assert 0 < run["host_share"] < 1
        assert (run["block_size"] is None) == (run["policy"] != "fixed")
        assert f"{run['tokens_per_s']:.0f}" in result.output
    assert record["runs"][0]["block_share"] == {"1": 1.0}
    with Path("load.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["contender"] for line in lines] == expected
    assert lines[1]["forwards.draft"] == str(record["runs"][1]["forwards"]["draft"])
    assert Path("load.png").read_bytes().startswith(b"\x89PNG")
    assert "linear verification_guided bucketed/best fixed, mean over loads" in record["ratios"]
    assert sorted(path.name for path in Path().iterdir()) == ["load.csv", "load.json", "load.png", "recguide_tables"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--concurrency", "1", "--strategies", "ar,hf-generate"], "hf-generate answer one request at a time"),
        (["--concurrency", "1", "--strategies", "fast"], "Unknown strategies: fast"),
        (["--concurrency", "0,1"], "--concurrency must be at least 1"),
        (["--concurrency", "many"], "--concurrency must be whole numbers"),
        (["--concurrency", "1", "--block-size", "12"], "block_size must be one of"),
        (["--concurrency", "1", "--policies", "clever"], "fixed, concurrency_table, aimd, verification_guided, oracle"),
        (["--concurrency", "1", "--schedulers", "fifo"], "--schedulers must be of bucketed, packed, padded"),
        (["--concurrency", "1", "--policies", "verification_guided"], "There is no calibration for this setup"),
        (["--concurrency", "1", "--policies", "oracle"], "There is no calibration for this setup"),
        (["--policies", "aimd", "--csv", "x.csv"], "--policies, --csv without --concurrency"),
        (["--schedulers", "packed", "--plot", "x.png"], "--schedulers, --plot without --concurrency"),
    ],
)
def test_a_mistake_ends_with_its_reason(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert not list(Path().iterdir())


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = call("--concurrency", "1", "--strategies", "ar", "--plot", "load.png", "--json", "load.json")
    assert result.exit_code == 2
    assert 'pip install "recguide[train]"' in result.output
    assert not list(Path().iterdir()), "said before anything is measured"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_that_differ_are_an_error_in_float32_and_counted_elsewhere(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = load_benchmark._Arena._alone
    other = toy_model(vocab_size=2048).to(dtype)
    tokenizer = AutoTokenizer.from_pretrained(recguide.tiny_path())
    monkeypatch.setattr("recguide.cli.main.load", lambda *_: (other, tokenizer))
    monkeypatch.setattr(load_benchmark._Arena, "_alone", lambda *args: [*alone(*args)[:-1], 6])
    result = call("--concurrency", "1", "--strategies", "ar", "--suite", "text", "--json", "load.json")
    said = " ".join(result.output.split())
    (run,) = json.loads(Path("load.json").read_text())["runs"]
    assert not run["equal_to_ar"]
    assert run["different"] == 2
    assert run["first_difference"]["prompt"] == 1
    if dtype == torch.float32:
        assert result.exit_code == 1
        assert "differ from plain decoding: ar at load 1 on 2 of 2 prompts" in said
    else:
        assert result.exit_code == 0, said
        assert "ar at load 1: 2 of 2 outputs differ from plain decoding, which only float32 rules out" in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_the_runs_that_are_finished(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted: list[int] = []
    add_request = recguide.Engine.add_request

    def interrupted(engine: recguide.Engine, *args: Any, **options: Any) -> Any:
        submitted.append(engine.config.max_requests)
        if submitted.count(2) == 5:
            signal.raise_signal(number)
        return add_request(engine, *args, **options)

    monkeypatch.setattr(recguide.Engine, "add_request", interrupted)
    files = ("--json", "load.json", "--csv", "load.csv", "--plot", "load.png")
    result = call("--concurrency", "1,2", "--strategies", "linear", "--suite", "text", *files)
    assert result.exit_code == 130, result.output
    assert "2 finished runs are in load.json" in result.output.replace("\n", " ")
    record = json.loads(Path("load.json").read_text())
    assert record["environment"]["interrupted"]
    assert [(run["contender"], run["concurrency"]) for run in record["runs"]] == [("ar", 1), ("linear-8", 1)]
    assert len(Path("load.csv").read_text().splitlines()) == 3
    assert sorted(path.name for path in Path().iterdir()) == ["load.csv", "load.json", "load.png"]


def test_contenders() -> None:
    found = contenders(("recguide", "quadratic", "ar"), (8, 16), ("fixed", "aimd", "aimd"), ("padded", "packed"))
    assert [contender.label for contender in found] == [
        "ar",
        "recguide-8 padded",
        "recguide-8",
        "recguide-16 padded",
        "recguide-16",
        "recguide aimd padded",
        "recguide aimd",
        "quadratic-8 padded",
        "quadratic-8",
        "quadratic-16 padded",
        "quadratic-16",
    ]


def test_every_part_fills_its_load_and_begins_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_benchmark, "PARTS", 3)
    prompts = [(i,) for i in range(6, 16)]
    served: list[tuple[str, int, list[tuple[int, ...]]]] = []

    def serve(self: object, run: load_benchmark.LoadRun, requests: list[tuple[int, ...]], advance: object) -> None:
        served.append((run.contender.label, run.concurrency, requests))

    monkeypatch.setattr(load_benchmark._Arena, "_alone", lambda *_: [])
    monkeypatch.setattr(load_benchmark._Arena, "serve", serve)
    test = LoadTest(contenders(("linear",), (8, 16), ("fixed",), ("packed",)), (1, 4), 5)
    runs = list(test.run(model(), prompts))
    labels = ["ar", "linear-8", "linear-16"]
    assert [(run.concurrency, run.contender.label) for run in runs] == [(c, label) for c in (1, 4) for label in labels]
    assert [label for label, load, _ in served if load == 1] == labels[1:] + labels[:1] + labels[2:] + labels[
        :2
    ] + labels
    for label in labels:
        assert sum([taken for name, load, taken in served if (name, load) == (label, 1)], []) == prompts  # noqa: RUF017
        parts = [taken for name, load, taken in served if (name, load) == (label, 4)]
        assert [len(taken) for taken in parts] == [8, 8, 8]
        assert sum(parts, []) == prompts + prompts + prompts[:4]  # noqa: RUF017
    assert test.steps(prompts) == 10 + 3 * (10 + 24)


def test_the_oracle_knows_the_rounds_of_each_request_by_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    save_tables()
    known: list[dict[int, list[int]]] = []
    oracle = load_benchmark.Oracle

    def spy(rounds: dict[int, list[int]], costs: CostProfile) -> Any:
        known.append(rounds)
        return oracle(rounds, costs)

    monkeypatch.setattr(load_benchmark, "Oracle", spy)
    prompts = [(7, 8, 9), (10, 11)]
    test = LoadTest([LoadContender("linear", None, "oracle", "packed")], (1,), 20)
    steps: list[None] = []
    runs = list(test.run(model(), prompts, lambda: steps.append(None)))
    load_benchmark.check(runs)
    assert len(steps) == test.steps(prompts) == 2 + 2 + 2
    rounds = []
    for prompt in prompts:
        output = model().generate(
            torch.tensor([prompt]),
            max_new_tokens=20,
            generation_strategy="linear",
            recguide_config={"block_size": 32},
            return_dict_in_generate=True,
            output_records=True,
        )
        rounds.append([len(record.committed) for record in output.records[0]])
    assert known == [{0: rounds[0], 1: rounds[0], 2: rounds[1]}], "the warm-up comes first"


def test_ratios() -> None:
    def run(contender: str, policy: str, load: int, speed: float) -> dict[str, Any]:
        strategy = contender.partition(" ")[0].partition("-")[0]
        scheduler = "packed"
        return {
            "contender": contender,
            "strategy": strategy,
            "policy": policy,
            "scheduler": scheduler,
            "concurrency": load,
            "tokens_per_s": speed,
        }

    speeds = {
        ("ar", "fixed"): (10.0, 20.0),
        ("linear-8", "fixed"): (20.0, 60.0),
        ("linear-16", "fixed"): (40.0, 30.0),
        ("linear aimd", "aimd"): (20.0, 90.0),
    }
    runs = [run(*name, load, speed) for name, pair in speeds.items() for load, speed in zip((1, 4), pair, strict=True)]
    found = ratios(runs)
    assert found["linear-8/ar, load 1"] == 2.0
    assert found["linear-8/ar, load 4"] == 3.0
    assert found["linear-8/ar, mean over loads"] == 2.5
    assert found["ar/ar at load 1, load 4"] == 2.0
    assert found["linear-8/ar at load 1, mean over loads"] == 4.0
    assert found["linear aimd/best fixed, load 1"] == 0.5, "16 at load 1"
    assert found["linear aimd/best fixed, load 4"] == 1.5, "8 at load 4"
    assert found["linear aimd/best fixed, mean over loads"] == 1.0
    unfinished = ratios(runs[:-1])
    assert "linear aimd/best fixed, load 4" not in unfinished
    assert ratios([]) == {}
