"""Matplotlib's pictures for a page with a light and a dark theme, and small pictures in HTML of their own."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DARK = {"#000000": "#e8ebf0", "#ffffff": "#1b2029", "#0072b2": "#6cbcf0", "#009e73": "#4bd6aa", "#d55e00": "#ff9a57"}
"""Colours of the light picture and what becomes of them in the dark one."""


def figure_html(figure: Figure, alt: str, wide: bool = False) -> str:
    """A figure as SVG in both themes; nothing in it is loaded from elsewhere."""
    text = io.StringIO()
    figure.savefig(text, format="svg", facecolor="#ffffff")
    day = text.getvalue()
    night = day
    for light, dark in DARK.items():
        night = night.replace(light, dark)
    # Text and lines without a colour of their own are black.
    night = night.replace("<svg ", f'<svg fill="{DARK["#000000"]}" ', 1)
    images = "".join(
        f'<img class="{name}" alt="{escape(alt)}" src="data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}">'
        for name, svg in (("day", day), ("night", night))
    )
    return f'<figure class="rg-figure rg-panel{" wide" if wide else ""}">{images}<figcaption>{escape(alt)}</figcaption></figure>'


def stack(shares: Mapping[str, float], what: str) -> str:
    """Shares of a whole as one bar with patterns, and below it their names and figures."""
    parts = "".join(
        f'<span class="s{number % 7}" style="width:{100 * share:.2f}%" title="{escape(what)} {escape(name)}: {share:.0%}">'
        f"{escape(name) if share >= 0.05 else ''}</span>"
        for number, (name, share) in enumerate(shares.items())
    )
    said = escape(f"{what} {', '.join(f'{name}: {share:.0%}' for name, share in shares.items())}")
    return f'<div class="rg-stack" role="img" aria-label="{said}">{parts}</div><p class="rg-note">{said}</p>'
