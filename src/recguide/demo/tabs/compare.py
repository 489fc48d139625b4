"""All strategies on one prompt, side by side."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gradio as gr

from ... import RecGuideConfig, RecGuideError
from ...config import STRATEGIES
from ...tiny.examples import EXAMPLES
from .. import race
from ..answer import notice
from ..desk import Desk
from .parts import MEASURING, follow, options_of, prompt_box, static, stopper


def compare_tab(desk: Desk, model: gr.Dropdown) -> None:
    prompt = prompt_box("Prompt for all", EXAMPLES["math"], "compare")
    with gr.Row():
        block_size = gr.Dropdown([8, 16, 32], value=16, label="Block size", min_width=120)
        most = gr.Slider(16, 512, 192, step=16, label="Tokens to write, at most", min_width=200)
    with gr.Row():
        run = gr.Button("Race", variant="primary", elem_id="race-run", min_width=120)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="race-stop", min_width=120)
    message = gr.HTML("", elem_id="race-message", padding=False)
    lanes = gr.HTML(
        None, elem_id="race", html_template=static("race.html"), js_on_load=static("race.js"), padding=False
    )
    figures = gr.HTML("", elem_id="race-figures", padding=False)

    def start(prompt: str, name: str, block_size: int, most: int, request: gr.Request) -> Iterator[dict[Any, Any]]:
        session = str(request.session_hash)
        entrants = [race.Entrant(strategy) for strategy in STRATEGIES]
        try:
            loaded = desk.model(name)
            loaded.ids(prompt)
        except (RecGuideError, OSError) as error:
            yield {message: notice(str(error)), run: gr.update(interactive=True), stop: gr.update(interactive=False)}
            return
        yield {
            message: "",
            figures: "",
            lanes: race.view(entrants, False),
            run: gr.update(interactive=False),
            stop: gr.update(interactive=True),
        }
        cancelled = False
        for entrant in entrants:
            values = {"block_size": block_size}
            try:
                config = RecGuideConfig(strategy=entrant.strategy, **options_of(entrant.strategy, values))
                running = loaded.ask(prompt, config, int(most))
            except RecGuideError as error:
                entrant.state, entrant.error = "cannot", str(error)
                continue
            entrant.state = "runs"
            with desk.serving(session, loaded, running):
                for _ in follow(loaded, running):
                    entrant.follow(loaded, running)
                    yield {lanes: race.view(entrants, False)}
            result = running.result()
            if result.reason == "cancelled":
                cancelled = True
                entrant.state = "stopped"
                break
            if result.error is not None:
                entrant.state, entrant.error = "failed", str(result.error)
                continue
            entrant.tokens, entrant.state = result.tokens, "done"
        said = ("Stopped.", "know") if cancelled else race.verdict(entrants)
        yield {
            message: notice(*said),
            lanes: race.view(entrants, not cancelled),
            figures: race.table(entrants),
            run: gr.update(interactive=True),
            stop: gr.update(interactive=False),
        }

    gr.on(
        [run.click, prompt.submit],
        start,
        [prompt, model, block_size, most],
        [message, lanes, figures, run, stop],
        api_visibility="private",
        concurrency_limit=1,
        concurrency_id=MEASURING,
        show_progress="minimal",
        show_progress_on=[lanes],
        trigger_mode="once",
    )
    stop.click(stopper(desk), None, None, queue=False, api_visibility="private", show_progress="hidden")
