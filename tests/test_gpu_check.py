"""The check for a GPU: its budgets, its bars, its arithmetic, and a dry run of all of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
EVAL = ROOT / "eval"


@pytest.fixture(scope="module")
def check() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        import gpu_check

        yield gpu_check


@pytest.fixture(scope="module")
def roofline() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EVAL)
        import roofline

        yield roofline


# --- budgets ------------------------------------------------------------------------------------


class Time:
    """Parts that take as long as they are told, or as they may."""

    def __init__(self, check: ModuleType, takes: dict[str, float], statuses: dict[str, str] | None = None) -> None:
        self.now, self.given = 100.0, dict[str, float]()
        self._check, self._takes, self._statuses = check, takes, statuses or {}
        self.kept: list[int] = []

    def run(self, part: Any, seconds: float) -> Any:
        self.given[part.name] = seconds
        taken = min(self._takes.get(part.name, 1.0), seconds)
        self.now += taken
        status = self._statuses.get(part.name, "done" if taken < seconds else "out of time")
        return self._check.Outcome(part.name, status, taken)

    def outcomes(self, parts: Any, **options: float) -> dict[str, str]:
        found = self._check.run_parts(
            parts, self.run, lambda kept: self.kept.append(len(kept)), clock=lambda: self.now, **options
        )
        return {outcome.name: outcome.status for outcome in found}


def test_the_budgets_of_all_parts_fit_the_whole(check: ModuleType) -> None:
    assert sum(part.seconds for part in check.PARTS) + check.RESERVE <= check.LIMIT == 480
    script = (EVAL / "gpu_check.sh").read_text(encoding="utf-8")
    assert f"*) limit={check.LIMIT:.0f} ;; esac" in script
    assert f'--dry-run "*) limit={check.DRY_LIMIT:.0f} ;;' in script


def test_a_part_that_takes_too_long_leaves_the_others_their_time(check: ModuleType) -> None:
    time = Time(check, {"correctness": 1e9})
    found = time.outcomes(check.PARTS)
    assert found.pop("correctness") == "out of time"
    assert set(found.values()) == {"done"}
    assert time.given == {part.name: part.seconds for part in check.PARTS}
    assert time.kept == list(range(1, len(check.PARTS) + 1)), "what is there is kept after each part"


def test_the_last_parts_get_what_is_left(check: ModuleType) -> None:
    parts = [check.Part(name, "", 60) for name in ("machine", "b", "c", "d")]
    time = Time(check, {"machine": 50, "b": 55, "c": 1e9})
    assert time.outcomes(parts, limit=155.0) == {
        "machine": "done",
        "b": "done",
        "c": "out of time",
        "d": "not started",
    }
    assert time.given == {"machine": 60, "b": 60, "c": 155 - check.RESERVE - 105}


def test_nothing_is_started_on_a_machine_that_does_not_work(check: ModuleType) -> None:
    time = Time(check, {}, {"machine": "failed"})
    found = time.outcomes(check.PARTS)
    assert found.pop("machine") == "failed"
    assert set(found.values()) == {"not started"}
    time = Time(check, {}, {"correctness": "failed"})
    assert list(time.outcomes(check.PARTS).values()).count("done") == len(check.PARTS) - 1


# --- processes ----------------------------------------------------------------------------------


@pytest.fixture
def parts_of(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a part whose function is given as text, from a copy of the script."""

    def run(body: str, seconds: float = 60, imports: str = "") -> Any:
        folder = tmp_path / "eval"
        folder.mkdir(exist_ok=True)
        script = (EVAL / "gpu_check.py").read_text(encoding="utf-8")
        script = script.replace("PARTS = (", 'PARTS = (\n    Part("mine", "mine", 60),', 1)
        (folder / "gpu_check.py").write_text(script, encoding="utf-8")
        (folder / "gpu_clock.py").write_text("def Clock(dry_run): return dry_run\n", encoding="utf-8")
        (folder / "mine.py").write_text(f"import os, time\n{imports}\ndef mine(dry_run):\n{body}", encoding="utf-8")
        monkeypatch.setattr(check, "HERE", folder)
        return check.run_part(check.Part("mine", "mine", 60), tmp_path, seconds, True)

    return run


def test_rows_are_read_back(parts_of: Any) -> None:
    outcome = parts_of("    yield {'case': 'a', 'right': True}\n    yield {'ms': 1.5}\n")
    assert (outcome.status, outcome.error) == ("done", None)
    assert outcome.rows == [{"case": "a", "right": True}, {"ms": 1.5}]


def test_a_wrong_result_fails_the_part(parts_of: Any) -> None:
    outcome = parts_of("    yield {'case': 'a', 'right': True}\n    yield {'case': 'b', 'right': False}\n")
    assert (outcome.status, outcome.error) == ("failed", "wrong results: b")


def test_an_error_is_reported_and_what_came_before_it_kept(parts_of: Any) -> None:
    outcome = parts_of("    yield {'ms': 1}\n    raise RuntimeError('no kernel image')\n")
    assert outcome.status == "failed"
    assert "no kernel image" in outcome.error
    assert outcome.rows == [{"ms": 1}]


def test_a_process_that_dies_or_hangs_is_a_part_that_fails(parts_of: Any) -> None:
    outcome = parts_of("    yield {'ms': 1}\n    os._exit(7)\n")
    assert (outcome.status, outcome.error, outcome.rows) == ("failed", "exit code 7", [{"ms": 1}])
    assert parts_of("    time.sleep(600)\n    yield {}\n", seconds=1).status == "out of time"


def test_what_is_not_installed_is_skipped_by_name(check: ModuleType, parts_of: Any) -> None:
    outcome = parts_of("    yield {}\n", imports="import no_such_package")
    assert outcome.status == "skipped"
    assert "no_such_package" in outcome.error
    found = check.report([outcome], {"dry_run": False})
    assert found["skipped"] == 1
    # A fault of ours, not a package that lacks.
    assert parts_of("    import no_such_package\n    yield {}\n").status == "failed"


def test_lines_cut_off_in_writing_are_left_out(check: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"part": "a", "ms": 1}\n{"part": "b", "ms": 2}\n{"part": "b", "m', encoding="utf-8")
    assert check.read_rows(path) == [{"ms": 1}, {"ms": 2}]
    assert check.read_rows(path, len('{"part": "a", "ms": 1}\n')) == [{"ms": 2}]
    assert check.read_rows(tmp_path / "none") == []


# --- bars ---------------------------------------------------------------------------------------


def attention_row(kind: str, requests: int, context: int, ms: float, **changes: Any) -> dict[str, Any]:
    row = {"way": "segment_attention", "round": kind, "requests": requests, "context": context, "ms": ms}
    return row | {"split": 2048, "rows": 64, "bytes": 400.0} | changes


def test_bars(check: ModuleType) -> None:
    stats = {"vocabulary": 131_072, "dtype": "bf16"}
    rows = {
        "machine": [{"device": "x"}, {"bytes_per_ms": 100.0}],
        "attention": [
            attention_row("verify", 64, 8192, 5.0),  # The floor is 4 ms: 0.8 of it.
            attention_row("verify", 64, 2048, 5.5),
            attention_row("fused", 64, 8192, 8.0),
            attention_row("fused", 64, 8192, 4.1, split=None),  # Not the way that is shipped.
            attention_row("fused", 64, 8192, 4.1, rows=128),
            attention_row("fused", 64, 8192, 0.1, way="torch SDPA from pages"),
            attention_row("verify", 1, 8192, 10.0),
            attention_row("fused", 1, 8192, 11.0),
        ],
        "statistics_of_logits": [
            stats | {"rows": 64, "way": "logit_stats", "ms": 1.0},
            stats | {"rows": 64, "way": "three passes of torch", "ms": 4.0},
            stats | {"rows": 16, "way": "logit_stats", "ms": 1.0},
            stats | {"rows": 16, "way": "three passes of torch", "ms": 2.0},
            stats | {"rows": 256, "way": "logit_stats", "ms": 1.0},
        ],
        "model": [
            {"forward": "fused", "context": 1024, "ms": 5.0},
            {"forward": "verify", "context": 1024, "ms": 4.0},
            {"forward": "fused", "context": 8192, "ms": 5.0},
            {"forward": "causal", "context": 1024, "ms": 1.0},
            {"requests": 8, "fused": 3.0},
        ],
    }
    found = check.bars(rows)
    assert [bar.figure for bar in found] == pytest.approx([4 / 5.5, 0.5, 1.1, 2.0, 1.25])
    assert [bar.limit for bar in found] == [0.7, 0.7, 1.15, 2.5, 1.2]
    assert [bar.reached for bar in found] == [True, False, True, False, False]


def test_bars_of_what_was_not_measured_are_not_judged(check: ModuleType) -> None:
    assert [bar.reached for bar in check.bars({})] == [None] * 5
    no_copy = check.bars({"attention": [attention_row("verify", 64, 8192, 5.0)]})
    assert no_copy[0].figure is None


def test_a_dry_run_judges_nothing(check: ModuleType) -> None:
    rows = [{"forward": name, "context": 20, "ms": 1.0} for name in ("fused", "verify")]
    outcomes = [check.Outcome("model", "done", rows=rows)]
    assert check.report(outcomes, {"dry_run": False})["bars"][-1]["reached"] is True
    dry = check.report(outcomes, {"dry_run": True})["bars"][-1]
    assert (dry["figure"], dry["reached"]) == (1.0, None)


def test_the_backend_that_is_judged_is_the_one_that_is_shipped(check: ModuleType) -> None:
    pytest.importorskip("triton")
    import gpu_kernels

    from recguide.attention.triton import SPLIT
    from recguide_kernels.work import MAX_ROWS

    assert gpu_kernels.SPLIT == SPLIT == 2048
    assert MAX_ROWS == 64


# --- the dry run --------------------------------------------------------------------------------


def run_script(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(EVAL / "gpu_check.sh"), "--out", str(folder), *arguments]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=3600)


@pytest.mark.slow
def test_dry_run(tmp_path: Path, check: ModuleType) -> None:
    pytest.importorskip("triton")
    done = run_script(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "DRY RUN" in done.stdout
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert [(part["name"], part["status"]) for part in found["parts"]] == [(part.name, "done") for part in check.PARTS]
    assert found["skipped"] == 0
    assert {"torch", "triton", "transformers", "python"} <= found["versions"].keys()
    assert all(bar["reached"] is None for bar in found["bars"])
    rows = {part["name"]: part["rows"] for part in found["parts"]}
    assert all(row["right"] for row in rows["correctness"])
    kernels = {row["case"].split(":")[0] for row in rows["correctness"]}
    assert kernels == {"segment_attention", "logit_stats", "kv_commit"}
    assert {row["way"] for row in rows["attention"]} == {
        "segment_attention",
        "separate padded rows",
        "torch SDPA, keys and values laid out before",
        "torch SDPA from pages",
    }
    assert {row["forward"] for row in rows["model"] if "forward" in row} == {"fused", "draft", "verify", "causal"}
    strategies = {row["strategy"]: row for row in rows["end_to_end"]}
    assert strategies["ar"]["tokens_per_round"] == 1
    assert strategies["linear"]["forwards"].keys() == {"draft", "verify"}
    assert strategies["recguide"]["forwards"]["fused"] > 0
    assert len({row["tokens"] for row in strategies.values()}) == 1, "all wrote the same text"
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line.pop("part") for line in lines] == [part["name"] for part in found["parts"] for _ in part["rows"]]


def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    done = run_script(tmp_path)
    assert done.returncode == 1
    found = json.loads((tmp_path / "gpu_check.json").read_text(encoding="utf-8"))
    assert "no CUDA device" in found["parts"][0]["error"]
    assert {part["status"] for part in found["parts"][1:]} == {"not started"}


def test_refuses_unknown_parts(tmp_path: Path) -> None:
    done = run_script(tmp_path, "--parts", "machine,attenion")
    assert done.returncode == 2
    assert "no part is called attenion" in done.stderr


# --- arithmetic ---------------------------------------------------------------------------------


def test_weights_are_those_of_the_network(roofline: ModuleType) -> None:
    """Counted once more in the obvious way, on a model without memory."""
    import torch

    from recguide import NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel
    from recguide.models.draft_adapter import DraftAdapterConfig, add_draft_adapter

    net = roofline.NETWORKS[1]
    with torch.device("meta"):
        model = NemotronLabsDiffusionModel(NemotronLabsDiffusionConfig(mask_token_id=100))
    add_draft_adapter(model, DraftAdapterConfig(128, 512, ("o_proj",)))
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name}
    assert net.layer_weights + net.head_weights == sum(matrices.values())
    assert (net.layers, net.head_weights) == (34, matrices["lm_head.weight"])


def test_pairs_that_see_each_other(roofline: ModuleType) -> None:
    import torch

    from recguide.segments import Segment, pack

    verify = Segment([0] * 16, 9)
    branches = [Segment([0] * 16, 9 + depth, True, hypothesis=depth) for depth in (4, 8, 16)]
    visible = pack([[verify, *branches]], [9], torch.device("cpu")).visible
    pairs = int((visible[:, 1] - visible[:, 0] + visible[:, 3] - visible[:, 2]).sum())
    assert roofline.fused_pairs(16, (4, 8, 16)) == pairs


def test_turning_points(roofline: ModuleType) -> None:
    net, chip = roofline.NETWORKS[1], roofline.H200
    point = roofline.turning_point(net, chip, 1024)
    assert not roofline.forward_cost(net, 1, point - 1, 1024, 0).compute_bound(chip)
    assert roofline.forward_cost(net, 1, point, 1024, roofline.causal_pairs(point)).compute_bound(chip)
    slow = roofline.Chip("slow", 1.0, 1e30)
    assert roofline.turning_point(net, slow, 1024, 16) == 0


def test_the_tables_of_the_documentation_are_what_the_scripts_say(roofline: ModuleType, check: ModuleType) -> None:
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    for part in check.PARTS:
        assert re.search(rf"^\| `{part.name}` \| .* \| {part.seconds:.0f} \|$", page, flags=re.MULTILINE), part.name
    for lines in (roofline.weight_lines(), roofline.round_lines(), roofline.turning_lines(), roofline.partial_lines()):
        assert "\n".join(lines) in page
