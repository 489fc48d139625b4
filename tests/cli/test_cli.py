"""The command as a user calls it, with wrong arguments too."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recguide import RecGuideConfig
from recguide.cli import benchmark
from recguide.cli.main import app
from recguide.trace import read_trace

runner = CliRunner()
ROOT = Path(__file__).parents[2]


def call(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200"})


def test_generate_streams_an_answer_and_writes_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    result = call("generate", "Write a letter from Zoe to Mila.", "--max-new-tokens", "24", "--trace", str(trace))
    assert result.exit_code == 0, result.output
    assert "24 tokens" in result.output
    events = [event for event, _ in read_trace(trace)]
    assert events[0] == "prefill"
    assert events[-1] == "finish"


def test_sampling_with_a_seed_is_the_same_text_whatever_the_strategy() -> None:
    texts = []
    for strategy in ("ar", "recguide"):
        sampled = ("--temperature", "0.9", "--seed", "5", "--strategy", strategy)
        result = call("generate", "Write a letter from Zoe to Mila.", "--max-new-tokens", "24", *sampled)
        assert result.exit_code == 0, result.output
        texts.append(result.output.splitlines()[0])
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--strategy", "magic"], "Known: ar, linear, quadratic, recguide"),
        (["generate", "x", "--block-size", "12"], "block_size must be one of"),
        (["generate", "x", "--dtype", "int4"], "float32, bfloat16, float16"),
        (["generate", "x", "--seed", "3"], "--seed without --temperature"),
        (["generate", "x", "--model", "/no/such/model"], "no/such/model"),
        (["demo", "/no/such/model"], "no/such/model"),
        (["demo", "--dtype", "int4"], "float32, bfloat16, float16"),
        (["bench", "--suite", "maths"], "math, code, text"),
        (["bench", "--strategies", "ar,fast"], "Unknown strategies: fast"),
        (["bench", "--block-size", "16,12"], "block_size must be one of"),
        (["bench", "--block-size", "sixteen"], "whole numbers"),
        (["bench", "--split", "train"], "test, unseen"),
    ],
)
def test_a_mistake_ends_with_its_reason(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
    assert "Traceback" not in result.output


def test_doctor_names_versions_and_backends() -> None:
    result = call("doctor")
    assert result.exit_code == 0
    assert "transformers" in result.output
    states = " ".join(result.output.split())
    assert "backend torch_sdpa, cpu usable" in states
    assert "backend triton, cpu not usable: " in states
    assert "backend flashinfer, cpu not usable: " in states
    assert "backend auto, cpu torch_sdpa: it is the one for cpu" in states
    if find_spec("flashinfer") is None:
        assert 'pip install "recguide[flashinfer]"' in states


FIELDS = {
    "strategy", "block_size", "suite", "concurrency", "prompts", "committed_tokens", "forwards", "decode_tpf", "e2e_tpf", "tau",
    "mean_committed", "acceptance_histogram", "reuse_rate", "leftover_rate",
    "outcomes", "query_tokens_per_forward", "wall_s", "tokens_per_s",
    "accuracy", "equal_to_ar",
}  # fmt: skip


def test_bench_writes_every_field(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    names = "linear,quadratic,recguide,hf-generate,hf-prompt-lookup"
    result = call(
        "bench", "--strategies", names, "--block-size", "4,8", "--suite", "code,text", "--prompts", "1", "--max-new-tokens", "24",
        "--json", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert set(record) == {"environment", "model", "runs", "ratios"}
    assert not record["environment"]["interrupted"]
    labels = [(r["suite"], r["strategy"], r["block_size"]) for r in record["runs"]]
    assert len(labels) == len(set(labels)) == 2 * (1 + 3 * 2 + 2)
    for run in record["runs"]:
        assert set(run) >= FIELDS
        assert set(run["forwards"]) == {"prefill", "draft", "verify", "fused"}
        assert run["equal_to_ar"]
        assert run["forwards"]["prefill"] == run["prompts"] == 1
    assert "recguide-8/linear-8 decode_tpf" in record["ratios"]


def test_an_output_that_differs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "bench.json"
    original = benchmark._generate

    def wrong(model: Any, ids: Any, max_new_tokens: int, options: dict[str, Any]) -> list[int]:
        output = original(model, ids, max_new_tokens, options)
        return [*output[:-1], output[-1] + 1] if options.get("generation_strategy") == "linear" else output

    monkeypatch.setattr(benchmark, "_generate", wrong)
    result = call(
        "bench",
        "--strategies",
        "linear",
        "--suite",
        "text",
        "--prompts",
        "1",
        "--max-new-tokens",
        "12",
        "--json",
        str(path),
    )
    assert result.exit_code == 1
    assert "differ from plain decoding: linear-16 on 1 of 1 text prompts" in result.output.replace("\n", " ")
    assert not next(r for r in json.loads(path.read_text())["runs"] if r["strategy"] == "linear")["equal_to_ar"]


def test_contenders_always_hold_the_reference() -> None:
    entries = benchmark.contenders(["recguide"], [16, 32], ["code"])
    assert [(e.strategy, e.block_size) for e in entries] == [("ar", 1), ("recguide", 16), ("recguide", 32)]
    assert RecGuideConfig(block_size=32).block_size == 32


def test_an_interrupt_keeps_what_is_finished(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    command = [
        sys.executable,
        "-m",
        "recguide",
        "bench",
        "--suite",
        "code",
        "--prompts",
        "400",
        "--max-new-tokens",
        "8",
    ]
    process = subprocess.Popen(
        [*command, "--strategies", "linear", "--json", str(path)],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    # Said once the work begins.
    while "side by side" not in process.stderr.readline():
        assert process.poll() is None
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 130
    record = json.loads(path.read_text())
    assert record["environment"]["interrupted"]
    assert 0 <= sum(r["prompts"] for r in record["runs"]) < 800
    assert list(tmp_path.iterdir()) == [path]
