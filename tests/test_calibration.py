"""Tables on disk: they come back as they were, and only for the setup that they were measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recguide import CalibrationError, RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.calibration import CostProfile, DraftOdds, Fingerprint, ProgressTable, RoundCost, Stratum, stratum_of
from recguide.loop import read_tables, tables_directory
from recguide.testing import toy_model

HERE = Fingerprint("0123", "float32", "cpu", "torch_sdpa", True)
COSTS = CostProfile(
    HERE, (RoundCost(1, 8, 64, 1.0, 2.0), RoundCost(1, 8, 256, 2.0, 3.0), RoundCost(4, 8, 64, 4.0, 6.0))
)
SURVIVAL = tuple(max(0.0, 1 - k / 40) for k in range(32))
PROGRESS = ProgressTable(
    HERE, {"all": Stratum((-0.5,), (SURVIVAL, (1.0,) * 32), (3, 4))}, 7, DraftOdds(), {"rounds": 7}
)


@pytest.mark.parametrize("table", [COSTS, PROGRESS])
def test_a_table_comes_back_as_it_was(tmp_path: Path, table: Any) -> None:
    path = table.save(tmp_path)
    assert type(table).load(tmp_path, HERE) == table
    assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing half written is left"


@pytest.mark.parametrize("field", ["model", "dtype", "device", "backend", "adapter"])
def test_a_table_of_another_setup_is_refused_with_both_fingerprints(tmp_path: Path, field: str) -> None:
    other = replace(HERE, **{field: "other" if field != "adapter" else False})
    path = COSTS.save(tmp_path)
    moved = tmp_path / other.folder / path.name
    moved.parent.mkdir(exist_ok=True)
    path.replace(moved)
    with pytest.raises(CalibrationError) as error:
        CostProfile.load(tmp_path, other)
    assert all(text in str(error.value) for text in (str(HERE), str(other), f"another {field}", "recguide profile"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not a recguide profile"),
        ("[]", "is not a recguide profile"),
        ('{"what": "recguide profile", "version": 1}', "fingerprint"),
        (json.dumps({"what": "recguide profile", "version": 2, "fingerprint": vars(HERE)}), "Make it anew"),
        (json.dumps({"what": "recguide calibration", "version": 1, "fingerprint": vars(HERE)}), "Make it anew"),
    ],
)
def test_what_is_not_a_table(tmp_path: Path, text: str, message: str) -> None:
    path = COSTS.save(tmp_path)
    path.write_text(text)
    with pytest.raises(CalibrationError, match=message):
        CostProfile.load(tmp_path, HERE)


def test_a_missing_table_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="recguide calibrate"):
        ProgressTable.load(tmp_path, HERE)


def test_costs_between_and_beyond_measured_loads() -> None:
    assert COSTS.round_ms(1, 8) == 4.0, "the mean of both contexts"
    assert COSTS.round_ms(4, 8) == 10.0
    assert COSTS.round_ms(2, 8) == 6.0
    assert COSTS.round_ms(8, 8) == 20.0
    with pytest.raises(CalibrationError, match="no blocks of 16, only 8"):
        COSTS.round_ms(1, 16)


def test_expected_tokens_sum_the_survival() -> None:
    expected = PROGRESS.expected(-1.0, 8, False)
    assert expected[0] == 0
    assert expected[1] == 1.0
    assert expected[8] == pytest.approx(sum(SURVIVAL[:8]))
    assert PROGRESS.expected(-0.5, 8, False)[32] == 32.0
    assert PROGRESS.uncertainty([1.0] * 7 + [100.0]) == 1.0
    assert stratum_of(16, True) == "16 full"


def adapter_of(model: Any) -> ModelAdapter:
    return ModelAdapter(model, resolve_backend())


def test_a_fingerprint_is_of_weights_dtype_and_adapter() -> None:
    here = adapter_of(toy_model()).fingerprint
    assert here == adapter_of(toy_model()).fingerprint
    assert here.adapter
    other = toy_model()
    with torch.no_grad():
        other.lm_head.weight[0, 0] += 1
    assert adapter_of(other).fingerprint.model != here.model
    half = adapter_of(toy_model().bfloat16()).fingerprint
    assert half.dtype == "bfloat16"


def test_where_tables_are_looked_for(tmp_path: Path) -> None:
    model = toy_model()
    adapter = adapter_of(model)
    assert tables_directory(adapter, "somewhere") == Path("somewhere")
    model.name_or_path = "nvidia/some-model"
    assert tables_directory(adapter, None) == Path("recguide_tables")
    model.name_or_path = str(tmp_path)
    assert tables_directory(adapter, None) == tmp_path / "recguide_tables"
    with pytest.raises(CalibrationError, match="no calibration for this setup"):
        read_tables(adapter, RecGuideConfig(policy="verification_guided"))
    assert read_tables(adapter, RecGuideConfig(strategy="auto")) == (None, None)
    with pytest.raises(CalibrationError, match="no calibration for this setup"):
        read_tables(adapter, RecGuideConfig(strategy="auto", tables=str(tmp_path)))
