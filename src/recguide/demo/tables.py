"""The calibration pictures: of the tables that belong to a loaded model, and of rounds that are recorded for them now."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from .. import RecGuideConfig, RoundRecord, pictures
from ..adapter import ModelAdapter
from ..attention import resolve_backend
from ..loop import read_tables, tables_directory
from .desk import Desk, Model
from .figures import figure_html
from .load import prompts

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPTIONS = {
    "progress": "What a block may be expected to commit, by the certainty of the rounds before it.",
    "reliability": "Odds of acceptance: predicted for prompts left out of the fit, and observed.",
    "round-times": "What a round costs, by requests and block size.",
    "forward-times": "What a forward costs, by its query tokens.",
    "transitions": "How much a round commits after one that committed so much.",
    "draft-probabilities": "How sure the draft was of accepted and of first rejected tokens.",
    "committed": "How much rounds commit.",
}
WIDE = ("progress", "forward-times", "draft-probabilities")


def of_tables(model: Model) -> tuple[str, str]:
    """
    Pictures of the model's tables as HTML, and where the tables are or why there are none.

    Raises:
        CalibrationError: the tables there are of another setup.
        MissingDependencyError: matplotlib is not installed.
    """
    pictures.check_installed("demo")
    adapter = ModelAdapter(model.model, resolve_backend())
    progress, profile = read_tables(adapter, RecGuideConfig(strategy="auto"))
    # Its name, not its place on this machine.
    where = f"{tables_directory(adapter, None).name}/{adapter.fingerprint.folder}"
    if progress is None and profile is None:
        return (
            "",
            f"{model.name} has no tables for this setup ({where}). Make them with `recguide profile` and `recguide calibrate`.",
        )
    figures: dict[str, Figure] = {}
    if progress is not None:
        figures |= {"progress": pictures.progress(progress), "reliability": pictures.reliability(progress)}
    if profile is not None:
        figures |= pictures.of_profile(profile)
    return _html(figures), f"Tables of {model.name}, {where}."


def of_rounds(recorded: Sequence[Sequence[RoundRecord]]) -> str:
    """Pictures of recorded rounds with blocks of 32, as HTML."""
    pictures.check_installed("demo")
    return _html(
        {
            "transitions": pictures.transitions(recorded),
            "committed": pictures.committed_histogram(recorded),
            "draft-probabilities": pictures.draft_probabilities(recorded),
        }
    )


def record(desk: Desk, session: str, model: Model) -> Iterator[list[RoundRecord]]:
    """Answer the demo's prompts with LinearSS and blocks of 32, as a calibration does; the rounds of each answer."""
    config = RecGuideConfig(strategy="linear", block_size=32)
    for prompt in prompts():
        running = model.ask(prompt, config, 256)
        with desk.serving(session, model, running):
            rounds = [event for _, _, event in running if isinstance(event, RoundRecord)]
        result = running.result()
        if result.error is not None:
            raise result.error
        if result.reason == "cancelled":
            return
        yield rounds


def _html(figures: dict[str, Figure]) -> str:
    drawn = "".join(figure_html(figure, CAPTIONS[name], name in WIDE) for name, figure in figures.items())
    return f'<div class="rg-figures">{drawn}</div>'
