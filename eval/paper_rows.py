"""Rows of regenerated tables, and how they are written: CSV a value a line, Markdown a table each."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

MEASURED, SIMULATED, PRINTED, NOT_MEASURED = "measured here", "simulated", "printed", "not measured here"
Value = float | list[float]
"""A figure, or median, lowest and highest of repetitions."""

TITLES = {
    "table 1": "Table 1: percent of rounds that are followed by one that commits so much (LinearSS, blocks of 32)",
    "table 2": "Table 2: tau, tokens that two forwards commit, and speed-up over plain decoding, one request, B = 16",
    "table 3": "Table 3: percent of rounds whose end a branch covers, and whose branch becomes the next draft",
    "table 4": "Table 4: percent of rounds with blocks of 8, 16, 32, as the paper's rule chooses them",
    "table 5": "Table 5: tokens a second of one request as branches are added, mean over the suites",
    "table 6": "Table 6: tokens a second under load, mean over the loads, as the policy learns to see",
    "figure 2a": "Figure 2a: how much rounds commit, blocks of 32",
    "figure 2b": "Figure 2b: milliseconds of a round",
    "figure 3": "Figure 3: how sure the draft was of accepted and of first rejected tokens",
    "figure 5": "Figure 5: tokens a second of all requests and of each",
}
PRECISION = {"table 5": 0, "table 6": 0, "figure 5": 0, "figure 3": 3}
"""Digits behind the point; 2 elsewhere, 1 in percents of gain."""


@dataclass(frozen=True)
class Row:
    """
    One line of a table.

    Args:
        table (`str`): a key of [`TITLES`].
        kind (`str`): where its figures come from.
        model (`str`): of which model.
        name (`str`): of the line.
        values (`dict[str, Value]`): by column; none where nothing was measured.
        note (`str`): for the reader.
    """

    table: str
    kind: str
    model: str
    name: str
    values: dict[str, Value]
    note: str = ""


def spread(values: Sequence[float]) -> Value:
    """Median, lowest and highest of repetitions; of one, itself."""
    return values[0] if len(values) == 1 else [median(values), min(values), max(values)]


CSV_HEADER = "table,kind,model,row,column,value,lowest,highest,note"


def csv_lines(rows: Sequence[Row]) -> Iterator[str]:
    """A line for each value; a row without any has one line with its note."""
    for row in rows:
        for column, value in row.values.items() or [("", "")]:
            figures: list[Any] = value if isinstance(value, list) else [value, "", ""]
            buffer = io.StringIO()
            csv.writer(buffer).writerow([row.table, row.kind, row.model, row.name, column, *figures, row.note])
            yield buffer.getvalue().rstrip("\r\n")


def markdown(rows: Sequence[Row], about: dict[str, Any], source: str) -> str:
    """All tables, with what the figures depend on."""
    lines = [
        "# The paper's tables and figures",
        "",
        f"Printed: {source}. Measured and simulated by `eval/paper_tables.py` with: "
        + ", ".join(f"{name} {value}" for name, value in about.items())
        + ".",
        "Timed figures are medians over the repetitions, their range in brackets.",
    ]
    for table, title in TITLES.items():
        some = [row for row in rows if row.table == table]
        columns = sorted(dict.fromkeys(column for row in some for column in row.values), key=_load)
        lines += ["", f"## {title}", "", f"| | model | | {' | '.join([*columns, ''])} |"]
        lines.append(f"|{'---|' * (len(columns) + 4)}")
        for row in some:
            shown = [_shown(table, column, row.values.get(column)) for column in columns]
            lines.append(f"| {row.kind} | {row.model} | {row.name} | {' | '.join([*shown, row.note])} |")
    return "\n".join(lines) + "\n"


def _load(column: str) -> int:
    """By which columns stand: loads ascend, whoever was measured at them; others stay as they come."""
    found = re.match(r"C = (\d+)", column)
    return int(found[1]) if found else 0


def _shown(table: str, column: str, value: Value | None) -> str:
    if value is None:
        return ""
    digits = 1 if column.endswith("%") else PRECISION.get(table, 2)
    if not isinstance(value, list):
        return f"{value:.{digits}f}"
    middle, low, high = (f"{one:.{digits}f}" for one in value)
    return middle if low == high else f"{middle} ({low} to {high})"
