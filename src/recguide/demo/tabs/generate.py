"""An answer as it comes, each token in the look of its kind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from ... import RecGuideConfig, RecGuideError
from ...config import BLOCK_SIZES, STRATEGIES
from ...tiny.examples import EXAMPLES
from ..answer import answer_html, counters_html, legend, notice
from ..desk import Desk, Model, Running
from ..recordings import Recording
from ..timeline import Counts, Timeline
from .parts import OPTIONS, USERS, Shown, follow, options_of, prompt_box, static, stopper

ABOUT = {
    "ar": "Plain decoding: one token, one forward.",
    "linear": "One forward drafts a block, one verifies it.",
    "quadratic": "One forward verifies a block and drafts the next for every place where acceptance may stop.",
    "recguide": "One forward verifies a block and drafts the next for at most three likely ends.",
    "auto": "How much is verified, and which branches ride along, by what their time pays for. Nothing to set.",
}
REASONS = {
    "length": "Ended at the number of tokens that was asked for.",
    "cancelled": "Stopped. What had been written stays, and so do its rounds.",
    "stop": "Ended by a stop rule.",
}


def generate_tab(desk: Desk, model: gr.Dropdown, shown: gr.State) -> gr.Button:
    """The tab; its answers' recordings go into `shown`. Returns the button that leads to their rounds."""
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            prompt = prompt_box("Prompt", EXAMPLES["code"], "generate")
        with gr.Column(scale=2, min_width=300):
            strategy = gr.Radio(list(STRATEGIES), value="recguide", label="Strategy", elem_id="strategy")
            about = gr.HTML(f'<p class="rg-note">{ABOUT["recguide"]}</p>', padding=False)
            with gr.Accordion("Options", open=False):
                block_size = gr.Dropdown(list(BLOCK_SIZES[1:]), value=16, label="Block size (tokens verified a round)")
                delta = gr.Slider(0, 1, 0.5, step=0.05, label="delta: a margin below it is risky")
                max_corrections = gr.Radio([0, 1, 2], value=2, label="Correction branches, at most")
                continuation = gr.Checkbox(True, label="Continuation branch")
                most = gr.Slider(8, 512, 256, step=8, label="Tokens to write, at most")
                temperature = gr.Slider(0, 2, 0, step=0.1, label="Temperature (0: greedy)")
                top_p = gr.Slider(0.05, 1, 1, step=0.05, label="top-p (with a temperature)")
                seed = gr.Number(7, precision=0, minimum=0, maximum=2**31 - 1, label="Seed (with a temperature)")
    with gr.Row():
        run = gr.Button("Generate", variant="primary", elem_id="generate-run", min_width=120)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="generate-stop", min_width=120)
    message = gr.HTML("", elem_id="generate-message", padding=False)
    counters = gr.HTML(counters_html(Counts(), 0.0, "recguide", False), elem_id="counters", padding=False)
    answer = gr.HTML(
        "",
        elem_id="answer",
        html_template=(
            f'<div class="rg-panel">{legend()}<div class="rg-answer" tabindex="0" role="region" aria-label="Answer; arrow keys step '
            'through its tokens">${value}</div></div>'
        ),
        js_on_load=static("tokens.js"),
        padding=False,
    )
    with gr.Row():
        see = gr.Button("See its rounds →", size="sm", min_width=120, interactive=False, elem_id="see-rounds")
        save = gr.DownloadButton("Save the trace (JSONL)", size="sm", min_width=120, interactive=False, elem_id="save")
    options = {
        "block_size": block_size,
        "delta": delta,
        "max_corrections": max_corrections,
        "continuation": continuation,
    }

    def chosen(name: str) -> list[Any]:
        visible = [gr.update(visible=option in OPTIONS[name]) for option in options]
        return [f'<p class="rg-note">{ABOUT[name]}</p>', *visible]

    strategy.change(chosen, strategy, [about, *options.values()], api_visibility="private", show_progress="hidden")

    def so_far(timeline: Timeline, loaded: Model, running: Running, strategy: str, under_way: bool) -> dict[Any, Any]:
        pieces = loaded.pieces([one.token for one in timeline.written])
        return {
            answer: answer_html(timeline.written, pieces),
            counters: counters_html(timeline.counts, running.seconds, strategy, under_way),
        }

    def start(
        prompt: str,
        name: str,
        strategy: str,
        block_size: int,
        delta: float,
        max_corrections: int,
        continuation: bool,
        most: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        values = (block_size, delta, max_corrections, continuation)
        try:
            config = RecGuideConfig(strategy=strategy, **options_of(strategy, dict(zip(options, values, strict=True))))
            loaded = desk.model(name)
            sampling = _sampling(temperature, top_p, seed)
            running = loaded.ask(prompt, config, int(most), **sampling)
        except (RecGuideError, OSError) as error:
            yield {message: notice(str(error)), run: gr.update(interactive=True), stop: gr.update(interactive=False)}
            return
        yield {
            message: "",
            answer: "",
            counters: counters_html(Counts(), 0.0, strategy, True),
            run: gr.update(interactive=False),
            stop: gr.update(interactive=True),
        }
        with desk.serving(str(request.session_hash), loaded, running):
            timeline = None
            for timeline in follow(loaded, running):
                yield so_far(timeline, loaded, running, strategy, True)
        result = running.result()
        header = {"model": name, "strategy": strategy, "prompt": prompt, "options": config_options(config), **sampling}
        recording = Recording(header, running.records)
        ended = REASONS.get(result.reason, "")
        failed = notice(f"The answer failed: {result.error}") if result.error else notice(ended, "know")
        final: dict[Any, Any] = {message: failed, run: gr.update(interactive=True), stop: gr.update(interactive=False)}
        if timeline is not None and timeline.steps:
            final |= so_far(timeline, loaded, running, strategy, False)
            final[see] = gr.update(interactive=True)
            final[shown] = Shown(recording, loaded.decode)
        elif result.tokens:
            # The answer was one token long, the prefill's: there is no round to show.
            final[message] = notice("The answer ended with its first token, so there is no round to show.", "know")
        with tempfile.TemporaryDirectory() as folder:
            # The page takes a copy.
            if shown in final:
                path = recording.save(Path(folder, f"recguide-{strategy}.jsonl"), loaded.decode)
                final[save] = gr.update(value=str(path), interactive=True)
            yield final

    gr.on(
        [run.click, prompt.submit],
        start,
        [prompt, model, strategy, *options.values(), most, temperature, top_p, seed],
        [message, answer, counters, run, stop, see, save, shown],
        api_visibility="private",
        concurrency_limit=USERS,
        show_progress="minimal",
        show_progress_on=[counters],
        trigger_mode="once",
    )
    # Not in the queue, or it would wait behind those whom it is to end.
    stop.click(stopper(desk), None, None, queue=False, api_visibility="private", show_progress="hidden")
    return see


def config_options(config: RecGuideConfig) -> dict[str, Any]:
    """The options that a strategy lets the user choose, as they were."""
    return {name: getattr(config, name) for name in OPTIONS[config.strategy]}


def _sampling(temperature: float, top_p: float, seed: int | None) -> dict[str, Any]:
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "seed": seed}
