"""An answer's rounds, or those of a trace that is opened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gradio as gr

from ... import RecGuideError
from ..answer import notice
from ..desk import Desk
from ..drawing import picture
from ..recordings import Recording
from .parts import Shown, static


def branches_tab(desk: Desk, shown: gr.State) -> None:
    with gr.Row():
        upload = gr.UploadButton(
            "Open a trace (JSONL)",
            file_types=[".jsonl"],
            size="sm",
            min_width=200,
            scale=0,
            elem_id="open-trace",
            type="filepath",
        )
        which = gr.Dropdown([], label="Request", visible=False, min_width=150, elem_id="which")
    message = gr.HTML("", elem_id="branches-message", padding=False)
    rounds = gr.HTML(
        None, elem_id="rounds", html_template=static("rounds.html"), js_on_load=static("rounds.js"), padding=False
    )
    gr.HTML(static("key.html"), padding=False)

    def draw(value: Shown | None) -> list[Any]:
        found = value.timelines if value else []
        if not found:
            return [None, gr.update(visible=False)]
        names = [(f"request {one.request}, {len(one.steps)} rounds", number) for number, one in enumerate(found)]
        return [picture(found[0]), gr.update(choices=names, value=0, visible=len(found) > 1)]

    shown.change(draw, shown, [rounds, which], api_visibility="private", show_progress="hidden")

    def pick(value: Shown | None, number: int | None) -> dict[str, Any] | None:
        found = value.timelines if value else []
        return picture(found[number]) if number is not None and 0 <= number < len(found) else None

    which.input(pick, [shown, which], rounds, api_visibility="private", show_progress="hidden")

    def open_trace(path: str | None) -> dict[Any, Any]:
        if not path:
            return {message: notice("No file came. Choose a trace (JSONL).")}
        try:
            recording = Recording.open(Path(path))
        except (RecGuideError, OSError) as error:
            return {message: notice(f"{error} What was shown stays.")}
        decode, by = None, str(recording.header.get("model", "an unnamed model"))[:80]
        says = f"{Path(path).name}: {str(recording.header.get('strategy', 'a strategy not named'))[:40]}, {by}."
        if "tokens" not in recording.header:
            if by in desk.names:
                decode = desk.model(by).decode
            else:
                says += " It has no texts, and its model is not one of this demo’s: tokens are shown by number."
        if prompt := recording.header.get("prompt"):
            says += f" Prompt: {str(prompt)[:300]}"
        return {message: notice(says, "know"), shown: Shown(recording, decode)}

    upload.upload(open_trace, upload, [message, shown], api_visibility="private", show_progress="minimal")
