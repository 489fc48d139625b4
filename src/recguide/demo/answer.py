"""An answer with its tokens' origins, and what it has cost, as HTML. Pure; what the model wrote is escaped here."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .timeline import Came, Counts, Written

KINDS = {
    Came.SEED: "the first token, written by the prefill",
    Came.ACCEPTED: "drafted, and the verifier agreed",
    Came.CORRECTION: "the verifier’s own, in place of a rejected token",
    Came.BONUS: "the verifier’s own, behind a whole block",
}
"""Kinds of an answer's tokens, for the legend."""


def legend() -> str:
    """The kinds of tokens, each with its look."""
    items = "".join(
        f'<li><span class="tok {came.value}">{came.value}</span> {escape(meaning)}</li>'
        for came, meaning in KINDS.items()
    )
    return f'<ul class="rg-legend">{items}</ul>'


def answer_html(written: Sequence[Written], pieces: Sequence[str]) -> str:
    """
    The answer, each token in the look of its kind with what is known of it.

    Args:
        written (`Sequence[Written]`): the tokens.
        pieces (`Sequence[str]`): what each adds to the text; empty where it ends in the middle of a character or is a special token.
    """
    return "".join(_token(one, piece) for one, piece in zip(written, pieces, strict=True))


def _token(one: Written, piece: str) -> str:
    cell, guess = one.cell, one.cell.guess
    known = {"k": cell.came.value, "r": "" if one.round is None else str(one.round)}
    if guess is not None:
        known |= {"p": f"{guess.probability:.3f}", "m": f"{guess.margin:.3f}"}
        if cell.second is not None:
            known |= {"s": cell.second, "q": f"{guess.second_probability:.3f}"}
    if cell.entropy is not None:
        known["e"] = f"{cell.entropy:.3f}"
    attributes = "".join(f' data-{name}="{escape(value)}"' for name, value in known.items())
    # A token without text of its own: special, or the first bytes of a character.
    mark = "·" if "\ufffd" in cell.text else "∎"
    text = escape(piece) if piece else f'<span class="mark">{mark}</span>'
    return f'<span class="tok {cell.came.value}"{attributes}>{text}</span>'


def counters_html(counts: Counts, seconds: float, strategy: str, running: bool) -> str:
    """What an answer has cost so far; `seconds` from the end of its prefill."""
    speed = counts.tokens / seconds if seconds > 0 else 0.0
    saved = (
        f"forwards: {counts.saved_against_ar / counts.tokens:.0%} of {counts.tokens}" if counts.tokens else "forwards"
    )
    against_linear = "–" if strategy in ("ar", "linear") else f"{counts.saved_against_linear}"
    tiles = [
        (
            "tokens per forward",
            f"{counts.tokens_per_forward:.2f}",
            f"{counts.tokens} tokens, {counts.forwards} forwards",
        ),
        ("tokens per second", f"{speed:.0f}", f"{seconds:.2f} s after the prefill"),
        ("saved against AR", f"{counts.saved_against_ar}", saved),
        ("saved against LinearSS", against_linear, "forwards, of the same rounds"),
        ("rounds reused", f"{counts.reused}", f"of {counts.rounds}"),
        ("query tokens", f"{counts.query_tokens}", "in all these forwards"),
    ]
    cells = "".join(
        f'<div class="rg-tile"><dt>{escape(name)}</dt><dd>{value}</dd><small>{escape(note)}</small></div>'
        for name, value, note in tiles
    )
    return f'<dl class="rg-tiles" data-running="{str(running).lower()}">{cells}</dl>'


def notice(text: str, kind: str = "error") -> str:
    """A message to the user: an `error` or something to `know`; nothing for an empty text."""
    if not text:
        return ""
    role = "alert" if kind == "error" else "status"
    return f'<div class="rg-notice {kind}" role="{role}">{escape(text)}</div>'
