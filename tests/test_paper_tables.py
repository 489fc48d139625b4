"""`eval/paper_tables.py`: its figures, against hand-made runs; a separate drafter; a whole run, interrupted and gone on."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from recguide import ConfigError, simulator
from recguide.calibration import ALL, RoundCost
from recguide.structs import Draft, Guess, Outcome, RoundRecord
from recguide.testing import toy_model

EVAL = Path(__file__).parents[1] / "eval"


@pytest.fixture(autouse=True)
def _scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts find those beside them."""
    monkeypatch.syspath_prepend(str(EVAL))


def script(name: str) -> ModuleType:
    return __import__(name)


# --- a separate drafter ---


class Foreknown:
    """Proposes the given text, with some tokens wrong."""

    def __init__(self, text: Sequence[int], wrong: frozenset[int] = frozenset()) -> None:
        self._text, self._wrong = text, wrong

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        place = len(tokens)
        return [6 if place + i in self._wrong else token for i, token in enumerate(self._text[place : place + count])]


def plain(model: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(ids, max_new_tokens=count, do_sample=False, generation_strategy="ar")
    return output[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(3))
def test_a_separate_drafter_changes_no_token(seed: int) -> None:
    decode_with = script("paper_measuring").decode_with
    model, prompt = toy_model(seed, vocab_size=64), (7, 8, 9)
    expected = plain(model, prompt, 40)
    text = [*prompt, *expected]
    # The prefill writes one, and each round 8 of the others.
    assert decode_with(Foreknown(text), model, prompt, 40, frozenset(), block_size=8) == (expected, 5)
    wrong = frozenset(i for i in range(len(text)) if i % 5 == 0)
    output, rounds = decode_with(Foreknown(text, wrong), model, prompt, 40, frozenset(), block_size=8)
    assert output == expected
    assert 5 < rounds < 39
    assert decode_with(Foreknown([]), model, prompt, 40, frozenset()) == (expected, 39)


def test_a_separate_drafter_stops_at_the_end() -> None:
    decode_with = script("paper_measuring").decode_with
    model, prompt = toy_model(1, vocab_size=64), (7, 8, 9)
    expected = plain(model, prompt, 40)
    end = expected[11]
    output, _ = decode_with(Foreknown([*prompt, *expected]), model, prompt, 40, frozenset({end}))
    assert output == expected[: expected.index(end) + 1]


def test_a_drafter_is_found_where_the_user_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = script("paper_tables")._drafter
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "drafter_of_one_s_own.py").write_text(
        "class Silent:\n    def propose(self, tokens, count):\n        return []\n\n\n"
        "def make(model, tokenizer):\n    return Silent()\n\n\ndef forgotten(model, tokenizer):\n    pass\n"
    )
    assert find("drafter_of_one_s_own:make", None, None).propose([1], 2) == []
    for where, message in (
        ("drafter_of_one_s_own", "expects MODULE:NAME"),
        ("drafter_of_one_s_own:other", "has no attribute 'other'"),
        ("no_such_drafter:make", "No module named"),
        ("drafter_of_one_s_own:forgotten", "gave None; expected an object with propose"),
    ):
        with pytest.raises(ConfigError, match=message):
            find(where, None, None)


# --- tables ---


def runs(new_tokens: int, seconds: Sequence[float], forwards: int, **outcomes: int) -> list[dict[str, Any]]:
    """A repetition for each time."""
    counted = {"new_tokens": new_tokens, "committed": new_tokens - 1, "forwards": forwards, "different": 0}
    return [counted | {"seconds": s, "outcomes": dict(outcomes)} for s in seconds]


def test_table_2() -> None:
    contents, rows = script("paper_contents"), script("paper_rows")
    timed = {
        "AR": {"math": runs(101, [10, 10, 20], 100), "code": runs(51, [5, 5, 5], 50)},
        "RecGuide": {"math": runs(101, [2, 4, 4], 10), "code": runs(51, [1, 2.5, 5], 20)},
    }
    found = {(row.kind, row.model, row.name): row for row in contents.table_2(timed, "tiny")}
    ours = found[rows.MEASURED, "tiny", "RecGuide"].values
    assert (ours["tau, math"], ours["tau, code"], ours["tau, mean"]) == (20, 5, 12.5)
    assert ours["speed-up, math"] == [5, 2.5, 5]
    assert ours["speed-up, code"] == [2, 1, 5]
    # 5 and 5, 2.5 and 2, 5 and 1.
    assert ours["speed-up, mean"] == [3, 2.25, 5]
    assert found[rows.MEASURED, "tiny", "AR"].values["tau, mean"] == 2
    missing = found[rows.NOT_MEASURED, "tiny", "DFlash"]
    assert (missing.values, missing.note[:18]) == ({}, "it needs a drafter")
    printed = found[rows.PRINTED, "nld-8b", "RecGuide"].values
    assert printed["tau, mean"] == 14.02
    assert printed["tau, code"] == pytest.approx((13.64 + 11.08 + 13.54) / 3)
    assert printed["speed-up, text"] == pytest.approx((4.27 + 3.94) / 2)
    assert not any(kind == rows.PRINTED and name == "auto" for kind, _, name in found)


def test_table_3() -> None:
    contents, rows = script("paper_contents"), script("paper_rows")
    math = runs(
        9, [1], 9, correction_1_hit=3, correction_2_hit=1, correction_1_wrong_token=2, continuation_hit=6,
        continuation_wrong_token=1, rejected_before=5, full_no_continuation=2, stopped=7,
    )  # fmt: skip
    code = runs(9, [1], 9, rejected_after=10, stopped=1)
    found = {
        row.name: row.values
        for row in contents.table_3({"RecGuide": {"math": math, "code": code}}, "tiny")
        if row.kind == rows.MEASURED
    }
    assert found["correction"]["math, coverage"] == pytest.approx(30)
    assert found["correction"]["math, reuse"] == pytest.approx(20)
    assert found["continuation"]["math, coverage"] == pytest.approx(35)
    assert found["continuation"]["math, reuse"] == pytest.approx(30)
    assert found["no hit"]["math, coverage"] == pytest.approx(35)
    assert found["correction"]["all, coverage"] == pytest.approx(20)
    assert found["no hit"]["code, coverage"] == 100
    assert len(contents.table_3({"RecGuide": {"math": math}}, "tiny")) == 3 + 2 * 3


def served(policy: str, concurrency: int, speed: float, **shares: float) -> dict[str, Any]:
    block_share = {name.removeprefix("b"): share for name, share in shares.items()}
    return {
        "policy": policy, "concurrency": concurrency, "tokens_per_s": speed, "per_request_tokens_per_s": speed / 2,
        "block_share": block_share,
    }  # fmt: skip


def test_tables_4_and_6() -> None:
    contents = script("paper_contents")
    found = [
        served(policy, load, speed * load, b4=0.1, b8=0.2, b32=0.7)
        for policy, speed in (("Fixed Block", 10), ("+ s", 11), ("+ z", 12), ("+ bucketing", 14), ("auto", 15))
        for load in (2, 8)
    ]
    first, second = contents.table_4(found, "simulated", "x")
    assert (first.name, second.name) == ("C = 2", "C = 8")
    assert first.values == {"B = 8": pytest.approx(30), "B = 16": 0, "B = 32": pytest.approx(70)}
    rows = {row.name: row.values for row in contents.table_6(found, "simulated", "x")}
    assert rows["+ bucketing"] == {"tokens / s": 70, "over Fixed Block, %": pytest.approx(40)}
    assert {row.name: row.values for row in contents.table_6_printed()[:4]}["+ bucketing"]["tokens / s"] == 6608
    assert contents.table_4_printed()[0].values == {"B = 8": 9.33, "B = 16": 2.54, "B = 32": 88.13}


def test_table_5_and_figure_2b() -> None:
    contents = script("paper_contents")
    ways = {"LinearSS, B = 16": 4, "+ 1st correction": 3, "+ 2nd correction": 2.5, "RecGuide": 2}
    timed = {way: {"math": runs(100, [seconds, 2 * seconds], 9)} for way, seconds in ways.items()}
    found = contents.table_5(timed, "tiny")
    assert found[3].values == {"tokens / s": [37.5, 25, 50], "over LinearSS, %": [100, 100, 100]}
    assert found[4].values["tokens / s"] == 595
    assert found[7].values["over LinearSS, %"] == pytest.approx(51.76, abs=0.01)
    times = contents.figure_2b([RoundCost(2, 8, 64, 3.0, 4.0), RoundCost(2, 16, 64, 3.0, 6.0)], "tiny")
    assert times[0].values == {"C = 2": 7.0}
    assert times[3].values["C = 128"] == 48.55


def test_table_1_and_what_drafts_knew() -> None:
    contents = script("paper_contents")

    def round_of(committed: int) -> RoundRecord:
        guesses = tuple(Guess(7, (8,), 0.9 if i < committed else 0.4, 0.1) for i in range(1, 32))
        return RoundRecord(0, 0, 0, 7, Draft(guesses), (), (), committed - 1, (7,) * committed, Outcome.PLAIN, None, 32)

    recorded = [[round_of(n) for n in (4, 8, 9, 32)]]
    measured, printed = contents.table_1(recorded, "tiny")[:2]
    assert measured.values == {"[1, 8]": 50, "(8, 16]": 50, "(16, 32]": 0}
    assert printed.values["[1, 8]"] == pytest.approx(70.3)
    (shares,) = contents.figure_2a(recorded, "tiny")
    assert shares.values == {"[1, 8]": 50, "(8, 16]": 25, "(16, 32]": 25}
    accepted, rejected = contents.figure_3(recorded, "tiny")
    assert accepted.values["margin below 0.5, %"] == 0
    assert rejected.values["mean margin"] == pytest.approx(0.3)
    assert (accepted.note, rejected.note) == ("n = 49", "n = 3")


def test_rows_are_written_with_their_range() -> None:
    rows = script("paper_rows")
    some = [
        rows.Row("table 2", rows.MEASURED, "tiny", "AR", {"tau, math": 2.0, "speed-up, math": [1.0, 0.9, 1.1]}),
        rows.Row("table 2", rows.NOT_MEASURED, "tiny", "DFlash", {}, "a drafter, of one's own"),
    ]
    lines = list(csv.reader([rows.CSV_HEADER, *rows.csv_lines(some)]))
    assert lines[1] == ["table 2", "measured here", "tiny", "AR", "tau, math", "2.0", "", "", ""]
    assert lines[2][5:8] == ["1.0", "0.9", "1.1"]
    assert lines[3][1:] == ["not measured here", "tiny", "DFlash", "", "", "", "", "a drafter, of one's own"]
    text = rows.markdown(some, {"threads": 1}, "the paper")
    assert "| measured here | tiny | AR | 2.00 | 1.00 (0.90 to 1.10) |  |" in text
    assert "| not measured here | tiny | DFlash |  |  | a drafter, of one's own |" in text


def test_loads_ascend_in_tables() -> None:
    rows = script("paper_rows")
    values = [{"C = 2, all": 1.0, "C = 2, each": 2.0, "C = 8, all": 3.0}, {"C = 4, all": 4.0, "C = 16, all": 5.0}]
    text = rows.markdown(
        [rows.Row("figure 5", rows.MEASURED, "tiny", "B = 8", some) for some in values], {}, "the paper"
    )
    assert "| | model | | C = 2, all | C = 2, each | C = 4, all | C = 8, all | C = 16, all |  |" in text
    assert "| measured here | tiny | B = 8 | 1 | 2 |  | 3 |  |  |" in text


def test_the_ablation_knows_certainty_alone() -> None:
    recordings = simulator.random_recordings(60, 0)
    table = simulator.fit_recordings(recordings, simulator.b200_costs("nld-8b").fingerprint)
    assert len(table.strata) > 1
    blind = script("paper_measuring").blind(table)
    assert (
        blind.expected(-0.1, 32, True)
        == blind.expected(-0.1, 8, False)
        == table.strata[ALL].expected[table.strata[ALL].bin_of(-0.1)]
    )


# --- all together ---


@pytest.mark.slow
def test_a_whole_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    import typer

    main, measuring = script("paper_tables"), script("paper_measuring")
    app = typer.Typer()
    app.command()(main.main)
    arguments = [
        "--limit", "1", "--max-new-tokens", "24", "--repetitions", "1", "--loads", "2", "--simulated-requests", "4", "--output",
        str(tmp_path / "out"), "--threads", "1", "--drafter", "some_drafter:make",
    ]  # fmt: skip
    module = ModuleType("some_drafter")
    module.make = lambda model, tokenizer: Foreknown([])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_drafter", module)

    loop = measuring.closed_loop

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring, "closed_loop", interrupted)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130, result.output
    before = (tmp_path / "out" / "unfinished.jsonl").read_text()
    assert "alone, repetition 0, text prompt 0" in before

    monkeypatch.setattr(measuring, "closed_loop", loop)
    monkeypatch.setattr(measuring, "decode_with", None)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {
        "tables.json", "tables.csv", "tables.md", "table-1.png", "figure-2a.png", "figure-2b.png", "figure-3.png", "figure-5.png",
    }  # fmt: skip
    rows = json.loads((tmp_path / "out" / "tables.json").read_text())["rows"]
    assert {row["table"] for row in rows} == set(script("paper_rows").TITLES)
    (drafter,) = [row for row in rows if row["name"] == "DFlash" and row["kind"] == "measured here"]
    # Of a round with a draft and a verification, without anything drafted.
    assert drafter["values"]["tau, mean"] == pytest.approx(1)
