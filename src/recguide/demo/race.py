"""The same prompt by every strategy: each alone, one after the other, so that their times can be put on one clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..config import STRATEGIES
from .answer import answer_html
from .desk import Model, Running
from .timeline import Counts, timelines

LABELS = {"ar": "AR", "linear": "LinearSS", "quadratic": "Quadratic", "recguide": "RecGuide", "auto": "Auto"}
assert tuple(LABELS) == STRATEGIES


@dataclass
class Entrant:
    """
    A strategy in the race.

    Args:
        strategy (`str`): its name.
        commits (`list[tuple]`): of each round so far: ms since its prefill, tokens, forwards, query tokens.
        tokens (`list[int]`): its answer, once it has ended.
        html (`str`): its answer so far.
        state (`str`): for readers, while the race is run.
        shared (`bool`): whether others' requests took part in its forwards.
        counts (`Counts`): what it cost.
        error (`str`, *optional*): why it cannot take part.
    """

    strategy: str
    commits: list[tuple[float, int, int, int]] = field(default_factory=list)
    tokens: list[int] | None = None
    html: str = ""
    state: str = "waits"
    shared: bool = False
    counts: Counts = field(default_factory=Counts)
    error: str | None = None

    @property
    def ms(self) -> float:
        return self.commits[-1][0] if self.commits else 0.0

    def follow(self, model: Model, running: Running) -> None:
        """Take in what has come so far."""
        found = timelines(running.records, model.decode)
        if not found:
            return
        timeline = found[0]
        self.counts, self.shared = timeline.counts, running.was_shared
        self.html = answer_html(timeline.written, model.pieces([one.token for one in timeline.written]))
        began = max((at for at, event, _ in running.moments if event == "prefill"), default=0.0)
        times = [at for at, event, _ in running.moments if event == "commit"]
        done = (0, 0, 0)
        self.commits = []
        for at, step in zip(times, timeline.steps, strict=True):
            done = (done[0] + step.committed, done[1] + len(step.forwards), done[2] + step.query_tokens)
            self.commits.append((1000 * (at - began), *done))


def view(entrants: list[Entrant], done: bool) -> dict[str, Any]:
    """What the page's race takes."""
    return {
        "done": done,
        "total": max((entrant.counts.tokens for entrant in entrants), default=0),
        "lanes": [
            {
                "label": LABELS[entrant.strategy],
                "html": entrant.html,
                "commits": entrant.commits,
                "state": entrant.state,
                "done": entrant.tokens is not None,
            }
            for entrant in entrants
        ],
    }


def verdict(entrants: list[Entrant]) -> tuple[str, str]:
    """Whether all wrote the same text, as a message and its kind."""
    ended = [entrant for entrant in entrants if entrant.tokens is not None]
    if not ended:
        return "", "know"
    same = all(entrant.tokens == ended[0].tokens for entrant in ended)
    failed = "".join(
        f" {LABELS[entrant.strategy]} cannot take part: {entrant.error}" for entrant in entrants if entrant.error
    )
    shared = (
        " Other requests were under way, so the times are not theirs alone." if any(e.shared for e in ended) else ""
    )
    if same:
        return f"All {len(ended)} wrote the same {len(ended[0].tokens or ())} tokens.{shared}{failed}", "know"
    differing = [LABELS[e.strategy] for e in ended if e.tokens != ended[0].tokens]
    return (
        f"{', '.join(differing)} wrote another text than {LABELS[ended[0].strategy]}. In float32 that is a fault; in half precision "
        f"near-ties may part.{shared}{failed}"
    ), "error"


def table(entrants: list[Entrant]) -> str:
    """The race in figures, as HTML."""
    slowest = next((e.ms for e in entrants if e.strategy == "ar" and e.tokens is not None), 0.0)
    rows = []
    for entrant in entrants:
        counts, ms = entrant.counts, entrant.ms
        speed = f"{1000 * counts.tokens / ms:.0f}" if ms else "–"
        gain = f"{slowest / ms:.2f}×" if ms and slowest else "–"
        figures = (
            counts.tokens,
            counts.rounds,
            counts.forwards,
            f"{counts.tokens_per_forward:.2f}",
            counts.query_tokens,
        )
        values = "".join(f"<td>{value}</td>" for value in (*figures, f"{ms:.0f}", speed, gain))
        rows.append(f"<tr><th scope='row'>{escape(LABELS[entrant.strategy])}</th>{values}</tr>")
    names = ("", "tokens", "rounds", "forwards", "tokens / forward", "query tokens", "ms", "tokens / s", "against AR")
    head = "".join(f"<th>{name}</th>" for name in names)
    return (
        f'<div class="rg-panel rg-scroll"><table class="rg-table"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
        '<p class="rg-note">After the prefill. Each strategy ran by itself, one after the other.</p></div>'
    )
