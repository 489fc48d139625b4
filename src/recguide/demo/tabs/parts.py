"""What several tabs have: prompt boxes, the files of the page, and how a request under way is followed or stopped."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

from ...structs import RoundRecord
from ...tiny.examples import EXAMPLES
from ..desk import Desk, Model, Running
from ..recordings import Recording
from ..timeline import Timeline, timelines

STATIC = Path(__file__).parents[1] / "static"
EVERY = 0.12
"""Seconds between two pictures of what is under way."""
USERS, WAITING = 8, 64
"""Requests answered at once, and those that may wait in the queue."""
MEASURING = "measuring"
"""Name of the queue of whatever takes times: one at a time, or they would measure each other."""
OPTIONS = {
    "ar": (),
    "linear": ("block_size",),
    "quadratic": ("block_size",),
    "recguide": ("block_size", "delta", "max_corrections", "continuation"),
    "auto": (),
}
"""What each strategy lets the user choose."""


def static(name: str) -> str:
    """A file of the page's own."""
    return (STATIC / name).read_text(encoding="utf-8")


@dataclass(frozen=True, eq=False)
class Shown:
    """What a session looks at: a recording, and whose tokens it has."""

    recording: Recording
    decode: Callable[[int], str] | None

    @property
    def timelines(self) -> list[Timeline]:
        found = timelines(self.recording.events, self.recording.text_of(self.decode))
        return [timeline for timeline in found if timeline.steps]


def prompt_box(label: str, value: str, prefix: str) -> gr.Textbox:
    """A prompt box with the examples of the three families."""
    prompt = gr.Textbox(
        value, label=label, lines=4, max_lines=8, elem_id=f"{prefix}-prompt", placeholder="Your message"
    )
    with gr.Row(elem_classes="rg-examples"):
        for family, text in EXAMPLES.items():
            button = gr.Button(f"Example: {family}", size="sm", min_width=90, elem_id=f"{prefix}-{family}")
            # In the browser, so that it works while an answer is under way.
            button.click(None, None, prompt, js=f"() => {json.dumps(text)}")
    return prompt


def stopper(desk: Desk) -> Callable[[gr.Request], None]:
    def end(request: gr.Request) -> None:
        desk.cancel(str(request.session_hash))

    return end


def follow(model: Model, running: Running) -> Iterator[Timeline]:
    """What has come so far, from time to time, and in the end all of it."""
    last = 0.0
    for at, event, record in running:
        if event == "finish" or (isinstance(record, RoundRecord) and at - last >= EVERY):
            last = time.perf_counter()
            yield from timelines(running.records, model.decode)


def options_of(strategy: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in OPTIONS[strategy]}
