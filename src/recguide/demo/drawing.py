"""A timeline as SVG and HTML. Pure; whatever a model or a file has written is escaped here."""

from __future__ import annotations

import math
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from ..structs import BranchKind, DraftSource, Outcome
from .timeline import OUTCOMES, SOURCES, Came, Cell, Lane, Step, Timeline

CHARACTER, PADDING, NARROWEST, GAP = 7.8, 12.0, 24.0, 4.0
"""Of a column: width of a character at 13 px, room beside the text, least width, room between columns."""
HEIGHT, ROW = 26.0, 32.0
"""Of a cell, and of a row with the room below it."""
GUTTER, RAIL, HEADER = 58.0, 12.0, 22.0
"""Left of the blocks; where the rail runs that joins hit branches with the next round; above the blocks."""
LONGEST = 14
"""Characters of a token that are shown in a cell."""
SLIVER = 6.0
"""Height of a branch that is drawn as a line only."""
HITS = (
    Outcome.CORRECTION_1_HIT,
    Outcome.CORRECTION_2_HIT,
    Outcome.CONTINUATION_HIT,
    Outcome.FORETOLD_HIT,
    Outcome.ANY_BONUS_HIT,
)


def picture(timeline: Timeline) -> dict[str, Any]:
    """
    What the page's player takes: `strip`, the whole request as one small SVG; `rounds`, of each its `svg`, its `detail` as HTML and
    a `label` for those who cannot see it.
    """
    steps = timeline.steps
    following = [*steps[1:], None]
    return {
        "strip": strip(steps),
        "rounds": [
            {"svg": round_svg(step), "detail": detail(step, len(steps), after), "label": label(step)}
            for step, after in zip(steps, following, strict=True)
        ],
    }


def named(outcome: Outcome) -> str:
    """An outcome's name for readers."""
    return outcome.value.replace("_", " ")


def label(step: Step) -> str:
    """A round in one line."""
    return f"Round {step.number}: {_plural(step.committed, 'token')}, {_forwards(step)}, {named(step.outcome)}"


def shown(text: str, longest: int = LONGEST) -> str:
    """A token as it stands in a cell: white space visible, not too long."""
    visible = text.replace("\r", "").replace("\n", "⏎").replace("\t", "⇥")
    visible = visible.strip(" ") or "␣" * min(len(visible), 3) or "∅"
    visible = "".join(c if c.isprintable() else "�" for c in visible)
    return visible if len(visible) <= longest else visible[: longest - 1] + "…"


# --- one round ---


@dataclass(frozen=True)
class _Grid:
    """Where columns stand: left edges and widths."""

    left: dict[int, float]
    width: dict[int, float]

    def middle(self, column: int) -> float:
        return self.left[column] + self.width[column] / 2

    def right(self, column: int) -> float:
        return self.left[column] + self.width[column]


def round_svg(step: Step) -> str:
    """A round's picture: its block, the verifier's own token, and each branch where it leaves the block."""
    grid = _grid(step)
    parts: list[str] = []
    row = HEADER
    corrected = step.own is not None and step.own.came is Came.CORRECTION
    lanes_from = row + ROW * (2 if corrected else 1)
    rows = _rows(step, lanes_from)
    bottom = (rows[-1][1] + (SLIVER if _is_sliver(step, rows[-1][0]) else ROW)) if rows else lanes_from
    height = bottom + 6
    right = max(grid.right(column) for column in grid.left)
    # Behind the cells: how the branches hang on the block, and the rail.
    parts += _rail_in(step, row)
    for lane, y in rows:
        parts += _hanger(grid, lane, row, y, _is_sliver(step, lane))
    hit = next(((lane, y) for lane, y in rows if lane.hit), None)
    if hit is not None:
        middle = hit[1] + HEIGHT / 2
        parts.append(f'<path class="rail" d="M{_n(grid.left[hit[0].leaves])} {_n(middle)}H{_n(RAIL)}V{_n(height)}"/>')
    for cell in step.block:
        parts.append(_cell(grid, cell, row, risky=cell.column in step.risky))
    if step.own is not None:
        y = row + ROW if corrected else row
        if corrected:
            x = _n(grid.middle(step.own.column))
            parts.append(f'<path class="hang own" d="M{x} {_n(row + HEIGHT)}V{_n(y)}"/>')
        parts.append(_cell(grid, step.own, y))
    for lane, y in rows:
        parts.append(_lane(grid, lane, y, _is_sliver(step, lane)))
    texts = [
        f'<text class="number" x="{_n(RAIL + 10)}" y="14">{step.number}</text>',
        f'<text class="head" x="{_n(GUTTER)}" y="14">{escape(_headline(step))}</text>',
    ]
    width = max(right, GUTTER + len(_headline(step)) * 6.6, *(_label_end(grid, lane) for lane, _ in rows or [])) + 8
    return (
        f'<svg class="rg-round" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" height="{_n(height)}" '
        f'role="img" aria-label="{escape(label(step))}">{"".join(parts + texts)}</svg>'
    )


def _grid(step: Step) -> _Grid:
    widths: defaultdict[int, float] = defaultdict(lambda: NARROWEST)
    cells = [*step.block, *([step.own] if step.own else [])]
    for lane in step.lanes:
        if _is_sliver(step, lane):
            widths[lane.cells[-1].column] = max(widths[lane.cells[-1].column], NARROWEST)
        else:
            cells += lane.cells
    for cell in cells:
        room = NARROWEST if cell.came is Came.SEED else PADDING
        widths[cell.column] = max(widths[cell.column], _length(shown(cell.text)) * CHARACTER + room)
    left, x = {}, GUTTER
    for column in range(max(widths) + 1):
        left[column] = x
        x += widths[column] + GAP
    return _Grid(left, dict(widths))


def _length(text: str) -> int:
    """In characters of a fixed width; Chinese and the like take two."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def _is_sliver(step: Step, lane: Lane) -> bool:
    """The quadratic layout has a branch for every place; only the one that was used is spelled out."""
    return lane.kind is BranchKind.ANY_BONUS and not lane.hit


def _rows(step: Step, y: float) -> list[tuple[Lane, float]]:
    rows = []
    for lane in step.lanes:
        rows.append((lane, y))
        y += SLIVER if _is_sliver(step, lane) else ROW
    return rows


def _rail_in(step: Step, row: float) -> Iterator[str]:
    middle, end = _n(row + HEIGHT / 2), _n(GUTTER - 2)
    x = _n(RAIL)
    if step.source is DraftSource.BRANCH:
        yield f'<path class="rail" d="M{x} 0V{middle}H{end}"/>'
    elif step.source is DraftSource.LEFTOVER:
        yield f'<path class="rail leftover" d="M{x} 0V{middle}H{end}"/>'
    elif step.source is DraftSource.FORWARD:
        # A forward of its own: the rail begins here.
        yield f'<path class="rail start" d="M{x} {middle}H{end}"/><circle class="station" cx="{x}" cy="{middle}" r="5"/>'


def _hanger(grid: _Grid, lane: Lane, row: float, y: float, sliver: bool) -> Iterator[str]:
    x = grid.left[lane.leaves] - GAP / 2
    to = y + (SLIVER / 2 if sliver else HEIGHT / 2)
    yield f'<path class="hang{" hit" if lane.hit else ""}" d="M{_n(x)} {_n(row + HEIGHT)}V{_n(to)}h{_n(GAP / 2)}"/>'


def _lane(grid: _Grid, lane: Lane, y: float, sliver: bool) -> str:
    if sliver:
        left, right = grid.left[lane.leaves], grid.right(lane.cells[-1].column)
        return f'<rect class="sliver" x="{_n(left)}" y="{_n(y)}" width="{_n(right - left)}" height="{_n(SLIVER - 2)}"/>'
    cells = []
    for cell in lane.cells:
        state = ""
        if lane.used is not None:
            state = " seed-next" if cell.column == lane.used else " known" if cell.column < lane.used else ""
        cells.append(_cell(grid, cell, y, extra=("first " if cell.column == lane.leaves else "") + state))
    name = _lane_label(lane)
    if _has_room(grid, lane):
        # Before its first cell; of a hit branch above the line that leads to the next round.
        x, down, anchor = grid.left[lane.leaves] - 8, 9.0 if lane.hit else 17.0, ' text-anchor="end"'
    else:
        x, down, anchor = grid.right(lane.cells[-1].column) + 8, 17.0, ""
    text = f'<text class="lane-name" x="{_n(x)}" y="{_n(y + down)}"{anchor}>{escape(name)}</text>'
    return f'<g class="lane {"hit" if lane.hit else "missed"}">{"".join(cells)}{text}</g>'


def _has_room(grid: _Grid, lane: Lane) -> bool:
    return grid.left[lane.leaves] - 16 - GUTTER > len(_lane_label(lane)) * 6.8


def _label_end(grid: _Grid, lane: Lane) -> float:
    end = grid.right(lane.cells[-1].column)
    return end if _has_room(grid, lane) else end + 8 + len(_lane_label(lane)) * 6.8


def _lane_label(lane: Lane) -> str:
    return f"{'✓ hit: ' if lane.hit else ''}{lane.name}"


def _cell(grid: _Grid, cell: Cell, y: float, risky: bool = False, extra: str = "") -> str:
    x, width = grid.left[cell.column], grid.width[cell.column]
    text = escape(GLYPHS.get(cell.came, "") + shown(cell.text))
    names = " ".join(["c", cell.came.value, *extra.split()])
    parts = [
        f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(HEIGHT)}" rx="4"/>',
        f'<text x="{_n(x + width / 2)}" y="{_n(y + 17.5)}">{text}</text>',
    ]
    if cell.came is Came.REJECTED:
        parts.append(f'<path class="strike" d="M{_n(x + 4)} {_n(y + HEIGHT / 2)}h{_n(width - 8)}"/>')
    if risky:
        parts.append(f'<path class="risky" d="M{_n(x + width - 10)} {_n(y)}h10v10z"/>')
    return f'<g class="{names}">{"".join(parts)}</g>'


GLYPHS = {Came.SEED: "◆ "}
"""Before a token's text in a cell; the other kinds are told apart by border, stroke and place."""


def _headline(step: Step) -> str:
    return f"{named(step.outcome)} · {_plural(step.committed, 'token')} · {_forwards(step)}"


def _forwards(step: Step) -> str:
    return _plural(len(step.forwards), "forward") if step.forwards else "forwards not recorded"


# --- all rounds, small ---

STRIP, BAR = 60.0, 10.0


def strip(steps: Sequence[Step]) -> str:
    """All rounds as bars: the block in outline, of it what was accepted, the verifier's own token, and below whether a branch was used."""
    if not steps:
        return ""
    scale = STRIP / max(len(step.block) for step in steps)
    columns = []
    for step in steps:
        x = (step.number - 1) * BAR
        size, accepted = len(step.block) * scale, step.accepted * scale
        own = step.own.came.value if step.own else ""
        parts = [
            f'<rect class="hover" x="{_n(x)}" y="0" width="{_n(BAR)}" height="{_n(STRIP + 16)}"/>',
            f'<rect class="ghost" x="{_n(x + 1.5)}" y="{_n(STRIP - size)}" width="{_n(BAR - 3)}" height="{_n(size)}"/>',
            f'<rect class="accepted" x="{_n(x + 1.5)}" y="{_n(STRIP - accepted)}" width="{_n(BAR - 3)}" height="{_n(accepted)}"/>',
        ]
        if own:
            parts.append(
                f'<rect class="{own}" x="{_n(x + 1.5)}" y="{_n(STRIP - accepted - scale)}" width="{_n(BAR - 3)}" '
                f'height="{_n(scale)}"/>'
            )
        reused = step.source is DraftSource.BRANCH
        parts.append(
            f'<rect class="{"reused" if reused else "fresh"}" x="{_n(x if reused else x + 2)}" y="{_n(STRIP + 6)}" '
            f'width="{_n(BAR if reused else BAR - 4)}" height="6"/>'
        )
        columns.append(f'<g data-round="{step.number - 1}">{"".join(parts)}</g>')
    width = len(steps) * BAR
    return (
        f'<svg class="rg-strip" viewBox="0 0 {_n(width)} {_n(STRIP + 16)}" preserveAspectRatio="none" '
        f'style="max-width:{_n(len(steps) * 26)}px" role="img" '
        f'aria-label="{_plural(len(steps), "round")}; a bar is a round, its height the tokens committed">{"".join(columns)}</svg>'
    )


# --- one round in words and figures ---


def detail(step: Step, rounds: int, after: Step | None = None) -> str:
    """A round's details as HTML."""
    hit = step.outcome in HITS
    figures = [
        ("committed", f"{step.committed} of a block of {len(step.block)}"),
        (
            "draft",
            f"by the {step.via} of round {step.number - 1}: no draft forward" if step.via else SOURCES[step.source],
        ),
        ("forwards", _forward_list(step)),
        ("query tokens", f"{step.query_tokens} of this request"),
        ("starts at", f"token {step.position} of the text"),
    ]
    if step.risky:
        figures.append(("risky", "positions " + ", ".join(map(str, step.risky))))
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in figures)
    return (
        f'<div class="rg-detail"><h3>Round {step.number} <small>of {rounds}</small></h3>'
        f'<p class="rg-outcome {"hit" if hit else ""}">{"✓ " if hit else ""}{escape(named(step.outcome))}</p>'
        f"<p>{escape(OUTCOMES[step.outcome])}</p><dl>{rows}</dl>{_branches(step, after)}{_positions(step)}</div>"
    )


def _forward_list(step: Step) -> str:
    if not step.forwards:
        return "not recorded"
    parts = []
    for forward in step.forwards:
        shared = f", shared by {len(forward.requests)} requests" if len(forward.requests) > 1 else ""
        parts.append(f"{forward.kind} ({forward.query_tokens} query tokens, {1000 * forward.elapsed:.0f} ms{shared})")
    return "; ".join(parts)


def _branches(step: Step, after: Step | None) -> str:
    if not step.lanes:
        return ""
    items, unused = [], 0
    for lane in step.lanes:
        if _is_sliver(step, lane):
            unused += 1
            continue
        first, rest = lane.cells[0], "".join(cell.text for cell in lane.cells[1:])
        text = f"{lane.name}: supposes {quoted(first.text)}"
        if lane.kind is BranchKind.ANY_BONUS:
            text = f"{lane.name}: ready for the bonus {quoted(first.text)}"
        going_on = ""
        if lane.hit:
            where = f"round {after.number}, from {quoted(after.block[0].text)}" if after else "the next round"
            going_on = f" <strong>✓ hit</strong>, goes on as the block of {escape(where)}"
        drafts = f"; drafts {quoted(rest, 120)}" if rest else ""
        items.append(f'<li class="{"hit" if lane.hit else ""}">{escape(text)}{escape(drafts)}.{going_on}</li>')
    if unused:
        items.append(
            f"<li>{unused} other branches, for the other places where the block might have ended; not used.</li>"
        )
    return f"<h4>Branches</h4><ul>{''.join(items)}</ul>"


def _positions(step: Step) -> str:
    cells = [*step.block[1:]]
    if step.own is not None and step.own.column >= len(step.block):
        cells.append(step.own)
    if not cells:
        return ""
    rows = []
    for cell in cells:
        came, text = cell.came.value, quoted(cell.text)
        if step.own is not None and step.own.came is Came.CORRECTION and cell.column == step.own.column:
            came, text = Came.CORRECTION.value, f"{text} → {quoted(step.own.text)}"
        guess = cell.guess
        figures = ["–", "–", "–"]
        if guess is not None:
            second = f"{quoted(cell.second)} {guess.second_probability:.2f}" if cell.second is not None else "–"
            figures = [f"{guess.probability:.2f}", f"{guess.margin:.2f}", second]
        entropy = "–" if cell.entropy is None else f"{cell.entropy:.2f}"
        values = "".join(f"<td>{escape(value)}</td>" for value in (*figures, entropy))
        doubt = ' <abbr class="rg-risky" title="margin below delta">◥</abbr>' if cell.column in step.risky else ""
        rows.append(
            f'<tr class="{came}"><th scope="row">{cell.column}{doubt}</th><td><span class="rg-key {came}"></span>{escape(text)}</td>'
            f"{values}</tr>"
        )
    head = "".join(f"<th>{name}</th>" for name in ("", "token", "p", "margin", "second", "nats"))
    return (
        '<h4>Positions</h4><p class="rg-note">p and margin: the drafter’s probability, and its lead over the second choice; nats: '
        f'the verifier’s entropy.</p><div class="rg-scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}'
        "</tbody></table></div>"
    )


def quoted(text: str, longest: int = 40) -> str:
    """A text in quotation marks, white space visible, cut if it is long."""
    visible = text.replace("\n", "⏎").replace("\t", "⇥").replace("\r", "")
    return f"“{visible if len(visible) <= longest else visible[: longest - 1] + '…'}”"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _n(value: float) -> str:
    """A coordinate, short."""
    assert math.isfinite(value)
    return f"{value:.1f}".removesuffix(".0")
