"""What was measured, as pictures: matplotlib figures from records and tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .calibration import ALL, BLOCK_SIZES, LARGEST_BLOCK, CostProfile, ProgressTable, Stratum, stratum_of
from .errors import MissingDependencyError
from .files import whole
from .structs import Outcome, RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INTERVALS = ("[1, 8]", "(8, 16]", "(16, 32]")
"""The paper's, of committed tokens."""
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which the colour-blind tell apart; markers, hatches and dashes say the same again."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
HATCHES = ("", "//", "..")


def check_installed(extra: str = "calibrate") -> None:
    """Raise [`MissingDependencyError`] where matplotlib is not installed; `extra` of recguide has it."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(f'Pictures need matplotlib: pip install "recguide[{extra}]".') from error


def of_calibration(prompts: Sequence[Sequence[RoundRecord]], table: ProgressTable) -> dict[str, Figure]:
    """
    The pictures of `recguide calibrate`, by file name.

    Args:
        prompts (`Sequence[Sequence[RoundRecord]]`): each prompt's rounds in order, of strategy `linear` with blocks of 32.
        table (`ProgressTable`): what was fitted to them.
    """
    return {
        "transitions": transitions(prompts),
        "draft-probabilities": draft_probabilities(prompts),
        "committed": committed_histogram(prompts),
        "progress": progress(table),
        "reliability": reliability(table),
    }


def of_profile(profile: CostProfile) -> dict[str, Figure]:
    """The pictures of `recguide profile`, by file name."""
    return {"round-times": round_times(profile), "forward-times": forward_times(profile)}


def save(figures: Mapping[str, Figure], directory: Path) -> list[Path]:
    """Write PNG files, each whole or not at all; returns their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in figures.items():
        path = directory / f"{name}.png"
        with whole(path) as file:
            figure.savefig(file, format="png", dpi=130)
        paths.append(path)
    return paths


# --- of recorded rounds ---


def transitions(prompts: Sequence[Sequence[RoundRecord]]) -> Figure:
    """How often a round that commits so much is followed by one that commits so much (the paper's Table 1)."""
    counts = np.zeros((len(INTERVALS), len(INTERVALS)))
    for before, after in (pair for rounds in prompts for pair in pairwise(rounds)):
        if _is_whole(before) and _is_whole(after):
            counts[_interval(before), _interval(after)] += 1
    of = counts.sum(axis=1, keepdims=True)
    shares = counts / np.maximum(of, 1)
    figure, axes = _figure(4.8, 4.2)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(*shares.shape):
        share = shares[row, column]
        axes.text(column, row, f"{share:.1%}", ha="center", va="center", color="white" if share > 0.5 else "black")
    axes.set_xticks(range(len(INTERVALS)), INTERVALS)
    axes.set_yticks(
        range(len(INTERVALS)), [f"{name}\nn = {int(n)}" for name, n in zip(INTERVALS, of[:, 0], strict=True)]
    )
    axes.set(xlabel="tokens that the next round commits", ylabel="tokens that a round commits", title="blocks of 32")
    return figure


def draft_probabilities(prompts: Sequence[Sequence[RoundRecord]]) -> Figure:
    """How sure the draft was of accepted and of first rejected tokens, as distribution functions (the paper's Figure 3)."""
    records = [record for rounds in prompts for record in rounds if _is_whole(record)]
    accepted = [guess for record in records for guess in record.draft.guesses[: record.accepted]]
    rejected = [guess for record in records for guess in record.draft.guesses[record.accepted : record.accepted + 1]]
    figure, (left, right) = _panels(2, 8, 3.6)
    for axes, name in ((left, "confidence"), (right, "margin")):
        for label, guesses, colour, dashes in (
            (f"accepted ({len(accepted)})", accepted, COLOURS[0], "-"),
            (f"first rejected ({len(rejected)})", rejected, COLOURS[1], "--"),
        ):
            values = [guess.probability if name == "confidence" else guess.margin for guess in guesses]
            if values:
                axes.ecdf(values, label=label, color=colour, linestyle=dashes)
        axes.set(xlabel=f"{name} of the drafted token", xlim=(0, 1), ylim=(0, 1))
    left.set_ylabel("share of tokens at or below")
    left.legend(frameon=False, loc="upper left")
    return figure


def committed_histogram(prompts: Sequence[Sequence[RoundRecord]]) -> Figure:
    """How much rounds commit (the paper's Figure 2a)."""
    committed = [len(record.committed) for rounds in prompts for record in rounds if _is_whole(record)]
    share = np.bincount(committed, minlength=LARGEST_BLOCK + 1)[1:] / max(len(committed), 1)
    figure, axes = _figure(7, 3.6)
    for number, (low, high) in enumerate(pairwise((0, *BLOCK_SIZES))):
        axes.bar(
            range(low + 1, high + 1),
            share[low:high],
            color=COLOURS[number],
            hatch=HATCHES[number],
            edgecolor="white",
            label=f"{INTERVALS[number]}: {share[low:high].sum():.0%}",
        )
    axes.set(xlabel="tokens that a block of 32 commits", ylabel="share of rounds", xlim=(0, LARGEST_BLOCK + 1))
    axes.set_xticks([1, *range(4, LARGEST_BLOCK + 1, 4)])
    axes.legend(frameon=False, title=f"{len(committed)} rounds")
    return figure


# --- of tables ---


def progress(table: ProgressTable) -> Figure:
    """V_B against certainty, a panel for each block size, a line for each stratum."""
    figure, panels = _panels(len(BLOCK_SIZES), 11, 4.2)
    lowest = min((stratum.edges[0] for stratum in table.strata.values() if stratum.edges), default=-1.0)
    for axes, size in zip(panels, BLOCK_SIZES, strict=True):
        for name, colour, marker, dashes in _styles(table.strata):
            x, y = _steps(table.strata[name], size, lowest)
            axes.step(x, y, where="post", label=name, color=colour, marker=marker, markersize=3, linestyle=dashes)
        # Most rounds are sure: half of the bins are within a hundredth of a nat.
        axes.set_xscale("symlog", linthresh=0.01)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set(xlabel="certainty s (nats)", title=f"B = {size}", ylim=(0, None))
    panels[0].set_ylabel("expected tokens V")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, title="last block")
    return figure


def reliability(table: ProgressTable) -> Figure:
    """Odds that a drafted token and all before it are accepted: predicted for prompts left out of the fit, and observed."""
    quality = table.quality["acceptance"]
    predicted, observed, count = (np.array(column) for column in zip(*quality["curve"], strict=True))
    figure, axes = _figure(4.6, 4.4)
    axes.plot((0, 1), (0, 1), color="#999999", linewidth=0.8, linestyle="--", label="exact")
    axes.plot(predicted, observed, color=COLOURS[0], linewidth=1)
    area = 20 + 200 * count / count.sum()
    axes.scatter(predicted, observed, area, color=COLOURS[0], label="measured (area: count)", clip_on=False, zorder=3)
    axes.set(xlabel="predicted odds of acceptance", ylabel="share that was accepted", xlim=(0, 1), ylim=(0, 1))
    axes.set_title(f"calibration error {quality['calibration_error']:.3f}, Brier {quality['brier']:.3f}", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    return figure


def round_times(profile: CostProfile) -> Figure:
    """Milliseconds of a round against the load, a line for each block size (the paper's Figure 2b)."""
    figure, axes = _figure(6.4, 4)
    for number, size in enumerate(profile.block_sizes):
        axes.plot(
            profile.loads,
            [profile.round_ms(load, size) for load in profile.loads],
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            label=f"B = {size}",
        )
    axes.set(xscale="log", yscale="log", xlabel="requests in a round", ylabel="milliseconds of a round")
    _plain_ticks(axes, profile.loads)
    figure.legend(loc="outside right upper", frameon=False)
    return figure


def forward_times(profile: CostProfile) -> Figure:
    """Milliseconds of draft forwards, verify forwards and those with a branch against their query tokens, bookkeeping included."""
    blocks = [(f"B = {size}", [c for c in profile.rounds if c.block_size == size]) for size in profile.block_sizes]
    kinds = {
        # Plain decoding drafts nothing.
        "draft": [
            (label, [(c.load * c.block_size, c.draft_ms) for c in cells if c.draft_ms]) for label, cells in blocks
        ],
        "verify": [(label, [(c.load * c.block_size, c.verify_ms) for c in cells]) for label, cells in blocks],
    }
    if profile.forwards:
        kinds["with a branch"] = [
            (f"{tokens} a request", [(c.load * tokens, c.ms) for c in profile.forwards if c.query_tokens == tokens])
            for tokens in sorted({cost.query_tokens for cost in profile.forwards})
        ]
    figure, panels = _panels(len(kinds), 4.5 * len(kinds), 4, share=True)
    ticks = sorted({c.load * c.block_size for c in profile.rounds})[::2]
    for axes, (kind, lines) in zip(panels, kinds.items(), strict=True):
        for number, (label, points) in enumerate(lines):
            if points:
                x, y = zip(*points, strict=True)
                colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
                axes.plot(x, y, color=colour, marker=marker, linestyle="none", label=label)
        axes.set(xscale="log", yscale="log", xlabel="query tokens of the forward", title=kind)
        axes.legend(frameon=False, fontsize=7)
        _plain_ticks(axes, ticks)
    panels[0].set_ylabel("milliseconds")
    return figure


# --- of runs under load ---


def frontier(axes: Axes, runs: Sequence[Mapping[str, Any]], who: str) -> None:
    """Tokens a second of all requests over those of one (the paper's Figure 5), a line for each value of `who`, a point a load."""
    for number, label in enumerate(dict.fromkeys(run[who] for run in runs)):
        points = sorted(
            (run["concurrency"], run["per_request_tokens_per_s"], run["tokens_per_s"])
            for run in runs
            if run[who] == label
        )
        _, x, y = zip(*points, strict=True)
        colour, marker = COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]
        axes.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1, label=label)
        for load, each, together in points:
            axes.annotate(str(load), (each, together), (3, 3), textcoords="offset points", fontsize=6, color=colour)
    axes.set(xlabel="tokens a second of one request (mean)", ylabel="tokens a second of all requests")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)


# --- drawing ---


def panel_grid(
    rows: int, columns: int, width: float, height: float, share: bool = False
) -> tuple[Figure, list[list[Axes]]]:
    """A figure with rows of pictures, with the same axes if they `share` them; inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    panels: list[list[Axes]] = figure.subplots(rows, columns, squeeze=False, sharex=share, sharey=share).tolist()
    return figure, panels


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure with one picture; inches."""
    figure, ((axes,),) = panel_grid(1, 1, width, height)
    return figure, axes


def _panels(count: int, width: float, height: float, share: bool = False) -> tuple[Figure, list[Axes]]:
    """A figure with pictures side by side; inches."""
    figure, (panels,) = panel_grid(1, count, width, height, share)
    return figure, panels


def _plain_ticks(axes: Axes, values: Sequence[int]) -> None:
    """Numbers along logarithmic axes: below where something was measured, at the side no powers."""
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_formatter("{x:g}")


def _styles(names: Collection[str]) -> list[tuple[str, str, str, str]]:
    """Name, colour, marker and dashes of the strata: colour and marker by the last block, dashed where it was not full."""
    styles = [(ALL, COLOURS[-1], "", ":")]
    for number, size in enumerate(BLOCK_SIZES):
        for was_full, dashes in ((True, "-"), (False, "--")):
            styles.append((stratum_of(size, was_full), COLOURS[number], MARKERS[number], dashes))
    return [style for style in styles if style[0] in names]


def _steps(stratum: Stratum, size: int, lowest: float) -> tuple[list[float], list[float]]:
    """Corners of a stratum's curve: bins begin at their edges, the first one at the left border, and the last ends at 0."""
    expected = [row[size] for row in stratum.expected]
    return [lowest, *stratum.edges, 0.0], [*expected, expected[-1]]


def _is_whole(record: RoundRecord) -> bool:
    return record.outcome is not Outcome.STOPPED and record.block_size == LARGEST_BLOCK


def _interval(record: RoundRecord) -> int:
    return bisect_left(BLOCK_SIZES, len(record.committed))
