"""`recguide profile` and `recguide calibrate`: interrupted, they go on where they were; what they write is whole or not there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

import recguide
from recguide import CalibrationError
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.calibration import CostProfile, Fingerprint, ProgressTable, RoundCost
from recguide.cli import calibration, recording
from recguide.cli.main import app
from recguide.cli.unfinished import Unfinished
from recguide.testing import toy_model

runner = CliRunner()
PROFILE = ("profile", "--loads", "1,2", "--block-size", "1,8", "--context", "5,9", "--repeats", "1")
CALIBRATE = ("calibrate", "--prompts", "1", "--max-new-tokens", "42", "--shadow-rounds", "4")
HERE = Fingerprint("0123", "float32", "cpu", "torch_sdpa", True)


@lru_cache
def model() -> Any:
    return toy_model(vocab_size=2048)


def here() -> Fingerprint:
    return ModelAdapter(model(), resolve_backend()).fingerprint


@pytest.fixture(autouse=True)
def _toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The commands find a toy model with the embedded model's tokenizer, and an empty directory."""
    tokenizer = AutoTokenizer.from_pretrained(recguide.tiny_path())
    monkeypatch.setattr("recguide.cli.calibration.load", lambda name, dtype, device: (model(), tokenizer))
    monkeypatch.chdir(tmp_path)


def call(*arguments: str) -> Any:
    return runner.invoke(app, list(arguments), env={"COLUMNS": "200"})


def files(directory: str = "recguide_tables") -> list[str]:
    return sorted(path.name for path in Path(directory).rglob("*") if path.is_file())


def counted(work: Callable[..., Any], calls: list[int], interrupted_at: int = 0) -> Callable[..., Any]:
    """`work`, interrupted when it is called for the nth time; its calls are counted."""

    def run(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == interrupted_at:
            raise KeyboardInterrupt
        return work(*arguments)

    return run


def test_an_interrupted_profile_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = recguide.profiling._measure  # type: ignore[attr-defined]
    calls: list[int] = []
    monkeypatch.setattr("recguide.profiling._measure", counted(measure, calls, 3))
    result = call(*PROFILE)
    assert result.exit_code == 130, result.output
    assert "Interrupted" in result.output
    assert "goes on from there" in result.output
    assert files() == ["profile.unfinished.jsonl"]

    other = call(*PROFILE, "--repeats", "2")
    assert other.exit_code == 2
    assert "repeats 1, here 2" in other.output
    assert "Delete it to measure anew" in other.output

    monkeypatch.setattr("recguide.profiling._measure", counted(measure, calls := []))
    result = call(*PROFILE, "--figures", "pictures")
    assert result.exit_code == 0, result.output
    assert len(calls) == 2
    assert files() == ["profile.json"]
    assert files("pictures") == ["forward-times.png", "round-times.png"]
    profile = CostProfile.load(Path("recguide_tables"), here())
    assert profile is not None
    assert [(c.context, c.load, c.block_size) for c in profile.rounds] == [
        (context, load, size) for context in (5, 9) for load in (1, 2) for size in (1, 8)
    ]


def test_an_interrupted_calibration_comes_to_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = tuple(RoundCost(load, size, 64, size, size) for load in (1, 8) for size in (8, 16, 32))
    for directory in ("recguide_tables", "others"):
        CostProfile(here(), cells).save(Path(directory))
    calls: list[int] = []
    monkeypatch.setattr(recording, "record_rounds", counted(recording.record_rounds, calls))
    whole = call(*CALIBRATE, "--on-policy", "--tables", "others", "--figures", "pictures")
    assert whole.exit_code == 0, whole.output
    assert len(calls) == 3 + 1 + 3
    for text in ("left out of the fit", "calibration error", "shorter blocks", "under the policy", "refitted"):
        assert text in whole.output
    assert files("others") == ["calibration.json", "profile.json"]
    assert files("pictures") == [
        "committed.png", "draft-probabilities.png", "progress.png", "reliability.png", "transitions.png",
    ]  # fmt: skip

    for interrupted_at in (2, 4):
        # Once in the first pass, then in the one under the policy.
        monkeypatch.setattr(recording, "record_rounds", counted(record := recording.record_rounds, [], interrupted_at))
        result = call(*CALIBRATE, "--on-policy")
        monkeypatch.setattr(recording, "record_rounds", record)
        assert result.exit_code == 130, result.output
        assert files() == ["calibration.unfinished.jsonl", "profile.json"]
    (path,) = Path("recguide_tables").rglob("calibration.unfinished.jsonl")
    with path.open("a") as file:
        file.write('["on policy, prompt 1", [{"req')
    result = call(*CALIBRATE, "--on-policy")
    assert result.exit_code == 0, result.output
    assert files() == ["calibration.json", "profile.json"]
    tables = [ProgressTable.load(Path(directory), here()) for directory in ("recguide_tables", "others")]
    assert tables[0] == tables[1]
    quality = tables[0].quality  # type: ignore[union-attr]
    assert quality["shadow"]["8"]["rounds"] == 4
    assert quality["on_policy"]["rounds"] >= 40


def test_what_a_policy_needs_is_asked_for_before_the_work() -> None:
    result = call(*CALIBRATE, "--on-policy")
    assert result.exit_code == 2
    assert "recguide profile" in result.output
    cells = tuple(RoundCost(1, size, 64, size, size) for size in (8, 32))
    CostProfile(here(), cells).save(Path("recguide_tables"))
    result = call(*CALIBRATE, "--on-policy")
    assert result.exit_code == 2
    assert "no blocks of 16" in result.output
    assert files() == ["profile.json"]


def test_without_shadow_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.cli.recording.run_shadows", None)
    result = call(*CALIBRATE[:-1], "0")
    assert result.exit_code == 0, result.output
    assert "shorter blocks" not in result.output


@pytest.mark.parametrize("command", [PROFILE, CALIBRATE])
def test_pictures_without_matplotlib(monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = call(*command, "--figures", "pictures")
    assert result.exit_code == 2
    assert 'pip install "recguide[calibrate]"' in result.output


# --- the file of finished steps ---


def test_steps_are_kept_and_removed_with_the_result(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "steps.jsonl"
    unfinished = Unfinished(path, HERE, {"a": 1})
    unfinished.add("one", [1, 2])
    with pytest.raises(ZeroDivisionError), unfinished:
        unfinished.done["one"][0] / 0
    with path.open("a") as file:
        file.write('["two", [3')
    unfinished = Unfinished(path, HERE, {"a": 1})
    assert unfinished.done == {"one": [1, 2]}
    with unfinished:
        unfinished.add("two", [3])
        assert Unfinished(path, HERE, {"a": 1}).done == {"one": [1, 2], "two": [3]}
    assert not path.exists()


@pytest.mark.parametrize("kept", [0, 40])
def test_a_header_cut_off_is_no_step(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "steps.jsonl"
    Unfinished(path, HERE, {}).add("one", 1)
    path.write_bytes(path.read_bytes()[:kept])
    unfinished = Unfinished(path, HERE, {})
    assert unfinished.done == {}
    unfinished.add("two", 2)
    assert Unfinished(path, HERE, {}).done == {"two": 2}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"0123"', '"4567"'), "another run .model '4567', here '0123'"),
        (lambda text: text.replace('"a": 1', '"a": 2'), "another run .a 2, here 1"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "expected"),
        (lambda text: text.replace('"what"', '"who"'), "not a file of finished steps"),
        (lambda text: "[]\n" + text, "not a file of finished steps"),
        (lambda text: text + "{\n", "not a file of finished steps"),
    ],
)
def test_what_is_not_of_this_run(tmp_path: Path, change: Callable[[str], str], message: str) -> None:
    path = tmp_path / "steps.jsonl"
    Unfinished(path, HERE, {"a": 1}).add("one", 1)
    path.write_text(changed := change(path.read_text()))
    with pytest.raises(CalibrationError, match=message) as error:
        Unfinished(path, HERE, {"a": 1})
    assert str(path) in str(error.value)
    assert path.read_text() == changed, "nothing is lost"


def test_sigterm_is_an_interruption(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, Unfinished(tmp_path / "steps.jsonl", HERE, {}):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.exit_code == 130
    assert signal.getsignal(signal.SIGTERM) == before
    assert calibration.Unfinished is Unfinished
