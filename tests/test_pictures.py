"""Pictures show the numbers that they are made from."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from recguide import MissingDependencyError, RoundRecord, pictures
from recguide.calibration import CostProfile, Fingerprint, ProgressTable, RoundCost, Stratum
from recguide.structs import Draft, Guess, Outcome

HERE = Fingerprint("0123", "float32", "cpu", "torch_sdpa", True)
COSTS = CostProfile(
    HERE,
    tuple(
        RoundCost(load, size, context, (size > 1) * load * size, 2.0 * load * size)
        for load in (1, 4)
        for size in (1, 8, 32)
        for context in (64, 256)
    ),
)
RISING = tuple(tuple(odds**k for k in range(32)) for odds in (0.5, 0.9))
TABLE = ProgressTable(
    HERE,
    {"all": Stratum((-0.5,), RISING, (30, 40)), "8 full": Stratum((-0.2,), RISING, (20, 20))},
    quality={
        "acceptance": {"brier": 0.2, "calibration_error": 0.05, "curve": [[0.1, 0.2, 30], [0.8, 0.7, 10]]},
    },
)


def a_round(committed: int, confidence: float = 0.9, outcome: Outcome = Outcome.PLAIN) -> RoundRecord:
    """Surer of what is accepted than of what is not."""
    guesses = tuple(Guess(7, (8,), confidence if i < committed else 0.4, 0.1) for i in range(1, 32))
    tokens = (7,) * committed
    return RoundRecord(0, 0, 0, 7, Draft(guesses), (), (), committed - 1, tokens, outcome, None, 32)


PROMPTS = [
    [a_round(n) for n in (4, 8, 9, 32, 32, 3)],
    [a_round(16), a_round(17), a_round(5, outcome=Outcome.STOPPED), a_round(2)],
]


def test_transitions_are_counted_by_interval_and_not_across_an_end() -> None:
    (axes,) = pictures.transitions(PROMPTS).axes
    shares = np.asarray(axes.images[0].get_array())
    # Pairs: 4-8, 8-9, 9-32, 32-32, 32-3 and 16-17.
    assert shares.tolist() == [[0.5, 0.5, 0], [0, 0, 1], [0.5, 0, 0.5]]
    assert [text.get_text() for text in axes.texts[:3]] == ["50.0%", "50.0%", "0.0%"]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "[1, 8]\nn = 2",
        "(8, 16]\nn = 2",
        "(16, 32]\nn = 2",
    ]


def test_confidence_and_margin_of_accepted_and_first_rejected() -> None:
    left, right = pictures.draft_probabilities(PROMPTS).axes
    assert left.get_xlabel() == "confidence of the drafted token"
    assert right.get_xlabel() == "margin of the drafted token"
    accepted, rejected = left.lines
    committed = [4, 8, 9, 32, 32, 3, 16, 17, 2]
    assert accepted.get_label() == f"accepted ({sum(n - 1 for n in committed)})"
    assert rejected.get_label() == f"first rejected ({sum(n < 32 for n in committed)})"
    assert set(np.asarray(accepted.get_xdata())[1:].tolist()) == {0.9}
    assert set(np.asarray(rejected.get_xdata())[1:].tolist()) == {0.4}
    assert max(right.lines[1].get_xdata()) == pytest.approx(0.3)


def test_the_histogram_has_a_bar_for_each_count() -> None:
    (axes,) = pictures.committed_histogram(PROMPTS).axes
    heights = [bar.get_height() for container in axes.containers for bar in container]
    assert len(heights) == 32
    assert heights[31] == pytest.approx(2 / 9)
    assert sum(heights) == pytest.approx(1)
    assert [container.get_label() for container in axes.containers] == ["[1, 8]: 44%", "(8, 16]: 22%", "(16, 32]: 33%"]
    assert len({bar.get_hatch() for container in axes.containers for bar in container}) == 3


def test_expected_progress_by_stratum() -> None:
    figure = pictures.progress(TABLE)
    assert [axes.get_title() for axes in figure.axes] == ["B = 8", "B = 16", "B = 32"]
    every, full = figure.axes[0].lines
    assert [every.get_label(), full.get_label()] == ["all", "8 full"]
    low, high = (sum(row[:8]) for row in RISING)
    assert np.asarray(full.get_ydata()).tolist() == pytest.approx([low, high, high])
    assert np.asarray(full.get_xdata())[1:].tolist() == [-0.2, 0.0]


def test_reliability_is_the_curve_of_the_table() -> None:
    (axes,) = pictures.reliability(TABLE).axes
    assert np.asarray(axes.collections[0].get_offsets()).tolist() == [[0.1, 0.2], [0.8, 0.7]]
    assert "0.050" in axes.get_title()


def test_times_of_rounds_and_forwards() -> None:
    (axes,) = pictures.round_times(COSTS).axes
    assert [line.get_label() for line in axes.lines] == ["B = 1", "B = 8", "B = 32"]
    assert np.asarray(axes.lines[1].get_xdata()).tolist() == [1, 4]
    assert np.asarray(axes.lines[1].get_ydata()).tolist() == [24.0, 96.0]
    draft, verify = pictures.forward_times(COSTS).axes
    assert [len(draft.lines), len(verify.lines)] == [2, 3], "plain decoding drafts nothing"
    assert sorted(np.asarray(verify.lines[2].get_xdata()).tolist()) == [32, 32, 128, 128]
    assert sorted(np.asarray(verify.lines[2].get_ydata()).tolist()) == [64, 64, 256, 256]


def test_files_are_written_whole(tmp_path: Path) -> None:
    figures = pictures.of_calibration(PROMPTS, TABLE) | pictures.of_profile(COSTS)
    paths = pictures.save(figures, tmp_path / "here")
    assert sorted(paths) == sorted((tmp_path / "here").iterdir())
    assert len(paths) == 7
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_matplotlib_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"recguide\[calibrate\]"):
        pictures.check_installed()
