"""The tables that policies decide by, as pictures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from ... import RecGuideError, RoundRecord
from .. import load, tables
from ..answer import notice
from ..desk import Desk
from .parts import MEASURING, stopper


def calibration_tab(desk: Desk, model: gr.Dropdown) -> None:
    gr.HTML(
        '<p class="rg-note">Policies decide by two tables that are measured for a model on its machine: what rounds cost, and what they '
        "may be expected to commit.</p>",
        padding=False,
    )
    with gr.Row():
        show = gr.Button("Show the model’s tables", variant="primary", elem_id="tables-run", min_width=160)
        record = gr.Button("Record rounds and draw them", elem_id="record-run", min_width=160)
        stop = gr.Button("Stop", variant="stop", min_width=120)
    message = gr.HTML("", elem_id="tables-message", padding=False)
    of_tables = gr.HTML("", elem_id="tables", padding=False)
    of_rounds = gr.HTML("", elem_id="recorded", padding=False)

    def draw(name: str) -> dict[Any, Any]:
        try:
            drawn, said = tables.of_tables(desk.model(name))
        except (RecGuideError, OSError) as error:
            return {message: notice(str(error))}
        return {message: notice(said, "know"), of_tables: drawn}

    def draw_rounds(name: str, request: gr.Request) -> Iterator[dict[Any, Any]]:
        recorded: list[list[RoundRecord]] = []
        try:
            loaded, of = desk.model(name), len(load.prompts())
            for rounds in tables.record(desk, str(request.session_hash), loaded):
                recorded.append(rounds)
                yield {
                    message: notice(f"Recording LinearSS with blocks of 32: {len(recorded)} of {of} answers.", "know")
                }
            if not recorded:
                yield {message: notice("Stopped before the first answer was recorded.", "know")}
                return
            drawn = tables.of_rounds(recorded)
        except (RecGuideError, OSError) as error:
            yield {message: notice(str(error))}
            return
        said = f"Drawn from {sum(map(len, recorded))} rounds of {len(recorded)} answers: few, so a rough picture."
        yield {message: notice(said, "know"), of_rounds: drawn}

    show.click(
        draw,
        model,
        [message, of_tables],
        api_visibility="private",
        show_progress="minimal",
        show_progress_on=[of_tables],
    )
    record.click(
        draw_rounds,
        model,
        [message, of_rounds],
        api_visibility="private",
        concurrency_limit=1,
        concurrency_id=MEASURING,
        show_progress="minimal",
        show_progress_on=[of_rounds],
        trigger_mode="once",
    )
    stop.click(stopper(desk), None, None, queue=False, api_visibility="private", show_progress="hidden")
