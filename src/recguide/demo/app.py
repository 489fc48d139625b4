"""The page: what is asked, what is shown, and what happens between. The only file that knows Gradio."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Gradio asks for neither leave nor network once this says no; read when it is imported and again when it starts.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import gradio as gr

from .. import RecGuideConfig, RecGuideError
from ..config import BLOCK_SIZES, STRATEGIES
from ..engine.scheduler import SCHEDULERS
from ..pictures import check_installed, frontier, panel_grid
from ..simulator import MODELS
from ..simulator import POLICIES as SIMULATED_POLICIES
from ..structs import RoundRecord
from ..tiny.examples import EXAMPLES
from . import load, race, tables
from .answer import answer_html, counters_html, legend, notice
from .desk import Desk, Model, Running
from .drawing import picture
from .figures import figure_html, stack
from .recordings import LARGEST, Recording
from .timeline import Counts, Timeline, timelines

STATIC = Path(__file__).parent / "static"
EVERY = 0.12
"""Seconds between two pictures of what is under way."""
USERS, WAITING = 8, 64
"""Requests answered at once, and those that may wait in the queue."""
OPTIONS = {
    "ar": (),
    "linear": ("block_size",),
    "quadratic": ("block_size",),
    "recguide": ("block_size", "delta", "max_corrections", "continuation"),
    "auto": (),
}
"""What each strategy lets the user choose."""
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


def build(desk: Desk) -> gr.Blocks:
    """The page for a desk's models."""
    with gr.Blocks(title="recguide", analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        with gr.Row(equal_height=True):
            gr.HTML(
                '<div class="rg-title"><h1>recguide</h1><p>One language model drafts and checks its own text: several tokens a '
                "forward, not a letter changed.</p></div>",
                padding=False,
            )
            model = gr.Dropdown(
                desk.names, value=desk.names[0], label="Model", scale=0, min_width=220, interactive=True
            )
            theme = gr.Button("◐ Light / dark", scale=0, min_width=120, size="sm", elem_id="theme")
        theme.click(None, js="() => { document.body.classList.toggle('dark'); }")
        shown = gr.State(None)
        with gr.Tabs() as tabs:
            with gr.Tab("1 Generate", id="generate"):
                outputs = _generate_tab(desk, model, shown)
            with gr.Tab("2 Branches", id="branches"):
                _branches_tab(desk, model, shown, outputs)
            with gr.Tab("3 Compare", id="compare"):
                _compare_tab(desk, model)
            with gr.Tab("4 Load", id="load"):
                _load_tab(desk, model)
            with gr.Tab("5 Calibration", id="calibration"):
                _calibration_tab(desk, model)
        outputs.see.click(
            lambda: gr.Tabs(selected="branches"), None, tabs, api_visibility="private", show_progress="hidden"
        )
        # Whoever leaves gives the place back.
        page.unload(_stopper(desk))
    page.queue(max_size=WAITING, default_concurrency_limit=USERS)
    return page


def serve(desk: Desk, host: str | None = None, port: int | None = None, block: bool = True) -> tuple[gr.Blocks, str]:
    """
    Start the page.

    Args:
        desk (`Desk`): its models.
        host (`str`, *optional*): address to listen on; by default `GRADIO_SERVER_NAME`, else this machine only.
        port (`int`, *optional*): by default the first free one from 7860.
        block (`bool`, defaults to `True`): return only when it is stopped.

    Returns:
        `tuple[gradio.Blocks, str]`: the page, and its address.
    """
    page = build(desk)
    _, address, _ = page.launch(
        server_name=host,
        server_port=port,
        prevent_thread_lock=True,
        share=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        quiet=True,
        footer_links=[],
        max_file_size=LARGEST,
        theme=_theme(),
        head=f"<style>{static('style.css')}</style>",
    )
    if block:
        print(f"recguide's demo is at {address} (Ctrl+C ends it).", flush=True)
        page.block_thread()
    return page, address


def _theme() -> gr.themes.Base:
    # Fonts of the reader's machine: nothing is fetched.
    sans = [gr.themes.Font(name) for name in ("system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif")]
    mono = [gr.themes.Font(name) for name in ("ui-monospace", "Menlo", "Consolas", "monospace")]
    return gr.themes.Base(primary_hue="blue", neutral_hue="slate", font=sans, font_mono=mono, radius_size="md")


# --- 1: an answer as it comes ---


@dataclass(frozen=True)
class GenerateParts:
    """Components that others need."""

    answer: gr.HTML
    counters: gr.HTML
    save: gr.DownloadButton
    see: gr.Button


def _prompt(label: str, value: str, prefix: str) -> gr.Textbox:
    """A prompt box with the examples of the three families."""
    prompt = gr.Textbox(
        value, label=label, lines=3, max_lines=8, elem_id=f"{prefix}-prompt", placeholder="Your message"
    )
    with gr.Row(elem_classes="rg-examples"):
        for family, text in EXAMPLES.items():
            button = gr.Button(f"Example: {family}", size="sm", min_width=90, elem_id=f"{prefix}-{family}")
            # In the browser, so that it works while an answer is under way.
            button.click(None, None, prompt, js=f"() => {json.dumps(text)}")
    return prompt


def _generate_tab(desk: Desk, model: gr.Dropdown, shown: gr.State) -> GenerateParts:
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            prompt = _prompt("Prompt", EXAMPLES["code"], "generate")
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

    def generate(
        prompt: str,
        name: str,
        strategy: str,
        values: tuple[Any, ...],
        most: int,
        temperature: float,
        top_p: float,
        seed: int | None,
        request: gr.Request,
    ) -> Iterator[dict[Any, Any]]:
        try:
            config = RecGuideConfig(strategy=strategy, **_options_of(strategy, dict(zip(options, values, strict=True))))
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
            for timeline in _follow(loaded, running):
                yield _so_far(timeline, loaded, running, strategy, True) | {}
        result = running.result()
        header = {"model": name, "strategy": strategy, "prompt": prompt, "options": config_options(config), **sampling}
        recording = Recording(header, running.records)
        ended = REASONS.get(result.reason, "")
        failed = notice(f"The answer failed: {result.error}") if result.error else notice(ended, "know")
        final: dict[Any, Any] = {message: failed, run: gr.update(interactive=True), stop: gr.update(interactive=False)}
        if timeline is not None and timeline.steps:
            final |= _so_far(timeline, loaded, running, strategy, False)
            path = _new_file("trace")
            final[save] = gr.update(value=str(recording.save(path, loaded.decode)), interactive=True)
            final[see] = gr.update(interactive=True)
            final[shown] = Shown(recording, loaded.decode)
        elif result.tokens:
            # The answer was one token long, the prefill's: there is no round to show.
            final[message] = notice("The answer ended with its first token, so there is no round to show.", "know")
        yield final

    def _so_far(timeline: Timeline, loaded: Model, running: Running, strategy: str, under_way: bool) -> dict[Any, Any]:
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
        yield from generate(prompt, name, strategy, values, most, temperature, top_p, seed, request)

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
    stop.click(_stopper(desk), None, None, queue=False, api_visibility="private", show_progress="hidden")
    return GenerateParts(answer, counters, save, see)


def _stopper(desk: Desk) -> Callable[[gr.Request], None]:
    def end(request: gr.Request) -> None:
        desk.cancel(str(request.session_hash))

    return end


def _follow(model: Model, running: Running) -> Iterator[Timeline]:
    """What has come so far, from time to time, and in the end all of it."""
    last = 0.0
    for at, event, record in running:
        if event == "finish" or (isinstance(record, RoundRecord) and at - last >= EVERY):
            last = time.perf_counter()
            yield from timelines(running.records, model.decode)


def _options_of(strategy: str, values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in OPTIONS[strategy]}


def config_options(config: RecGuideConfig) -> dict[str, Any]:
    """The options that a strategy lets the user choose, as they were."""
    return {name: getattr(config, name) for name in OPTIONS[config.strategy]}


def _sampling(temperature: float, top_p: float, seed: int | None) -> dict[str, Any]:
    if temperature <= 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "seed": seed}


def _new_file(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="recguide-"))
    return folder / f"{name}.jsonl"


# --- 2: its rounds ---


def _branches_tab(desk: Desk, model: gr.Dropdown, shown: gr.State, parts: GenerateParts) -> None:
    with gr.Row():
        upload = gr.UploadButton(
            "Open a trace (JSONL)",
            file_types=[".jsonl"],
            size="sm",
            min_width=150,
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

    def open_trace(path: str | None, name: str) -> dict[Any, Any]:
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

    upload.upload(open_trace, [upload, model], [message, shown], api_visibility="private", show_progress="minimal")


# --- 3: all strategies side by side ---


def _compare_tab(desk: Desk, model: gr.Dropdown) -> None:
    prompt = _prompt("Prompt for all", EXAMPLES["math"], "compare")
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
                config = RecGuideConfig(strategy=entrant.strategy, **_options_of(entrant.strategy, values))
                running = loaded.ask(prompt, config, int(most))
            except RecGuideError as error:
                entrant.state, entrant.error = "cannot", str(error)
                continue
            entrant.state = "runs"
            with desk.serving(session, loaded, running):
                for _ in _follow(loaded, running):
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
        concurrency_id="measuring",
        show_progress="minimal",
        show_progress_on=[lanes],
        trigger_mode="once",
    )
    stop.click(_stopper(desk), None, None, queue=False, api_visibility="private", show_progress="hidden")


# --- 4: many users ---


def _load_tab(desk: Desk, model: gr.Dropdown) -> None:
    gr.HTML(
        '<h2 class="rg-h">The real engine</h2><p class="rg-note">Simulated users, each sending its next prompt when it has its answer. '
        "The loads 1, 2, 4 … up to yours are run in turn, so that a frontier grows; a second run is drawn beside the first.</p>",
        padding=False,
    )
    with gr.Row():
        users = gr.Slider(1, load.MOST_USERS, 8, step=1, label="Users, at most", min_width=200, elem_id="users")
        contender = gr.Dropdown(list(load.CONTENDERS), value="auto", label="Served by", min_width=200)
        scheduler = gr.Dropdown(list(SCHEDULERS), value="packed", label="Scheduler", min_width=140)
    with gr.Row():
        run = gr.Button("Put under load", variant="primary", elem_id="load-run", min_width=120)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="load-stop", min_width=120)
        clear = gr.Button("Forget all runs", min_width=120)
    message = gr.HTML("", elem_id="load-message", padding=False)
    now = gr.HTML("", elem_id="load-now", padding=False)
    drawn = gr.HTML("", elem_id="load-frontier", padding=False)
    runs = gr.State([])
    # Only this demo's process knows who runs; a session's own flag ends its loop.
    stopping: dict[str, load.LoadRun] = {}

    def start(
        name: str, most: int, contender: str, scheduler: str, before: list[dict[str, Any]], request: gr.Request
    ) -> Iterator[dict[Any, Any]]:
        session, found = str(request.session_hash), list(before)
        idle = {run: gr.update(interactive=True), stop: gr.update(interactive=False)}
        try:
            check_installed("demo")
            loaded, loads = desk.model(name), load.loads_up_to(int(most))
            yield {message: "", run: gr.update(interactive=False), stop: gr.update(interactive=True)}
            for some in loads:
                one = stopping[session] = load.LoadRun(
                    loaded.model, loaded.tokenizer, contender, scheduler, some, requests=max(6, 2 * some)
                )
                for look in one:
                    others = desk.under_way
                    yield {now: _look(look, others)}
                    if look.figures is not None:
                        found = [r for r in found if (r["contender"], r["concurrency"]) != _key(look.figures)] + [
                            look.figures
                        ]
                        yield {drawn: _frontier(found, "contender", "This engine, on this machine"), runs: found}
                if one.stopped.is_set():
                    break
        except (RecGuideError, OSError) as error:
            yield {message: notice(str(error)), **idle}
            return
        finally:
            stopping.pop(session, None)
        yield {message: notice("Stopped. The finished loads stay.", "know") if one.stopped.is_set() else "", **idle}

    def end(request: gr.Request) -> None:
        if one := stopping.get(str(request.session_hash)):
            one.stopped.set()

    run.click(
        start,
        [model, users, contender, scheduler, runs],
        [message, now, drawn, runs, run, stop],
        api_visibility="private",
        concurrency_limit=1,
        concurrency_id="measuring",
        show_progress="minimal",
        show_progress_on=[now],
        trigger_mode="once",
    )
    stop.click(end, None, None, queue=False, api_visibility="private", show_progress="hidden")
    clear.click(lambda: ([], "", ""), None, [runs, drawn, now], api_visibility="private", show_progress="hidden")
    _simulator()


def _key(figures: Mapping[str, Any]) -> tuple[str, int]:
    return figures["contender"], figures["concurrency"]


def _look(look: load.Look, others: int) -> str:
    speed = look.tokens / look.seconds if look.seconds else 0.0
    tiles = (
        ("users", f"{look.users}", f"{look.contender}, {look.scheduler}"),
        ("tokens per second", f"{speed:.0f}", f"{look.tokens} tokens in {look.seconds:.1f} s"),
        ("bucket occupancy", f"{look.occupancy:.1f}", f"requests in a verifying forward, of {look.users}"),
    )
    cells = "".join(
        f'<div class="rg-tile"><dt>{name}</dt><dd>{value}</dd><small>{note}</small></div>'
        for name, value, note in tiles
    )
    shared = f'<p class="rg-note">{others} requests of other users were under way.</p>' if others else ""
    return (
        f'<dl class="rg-tiles">{cells}</dl><p class="rg-note">Block sizes of the rounds so far:</p>'
        f"{stack(look.block_share, 'block of') if look.block_share else ''}{shared}"
    )


def _frontier(runs: Sequence[Mapping[str, Any]], who: str, title: str) -> str:
    figure, ((axes,),) = panel_grid(1, 1, 8, 4.6)
    frontier(axes, runs, who)
    axes.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    caption = "Tokens a second of all requests over those of one; the numbers at the points are the requests under way."
    return figure_html(figure, caption)


def _simulator() -> None:
    gr.HTML(
        '<h2 class="rg-h">The simulator, at the costs of a B200</h2><p class="rg-note">The engine’s own policies and schedulers in simulated '
        "time, with published costs of NLD-8B and 14B (the paper’s Figure 5). Acceptance follows the paper’s Table 1; the drafts of "
        "auto are synthetic.</p>",
        padding=False,
    )
    with gr.Row():
        costs = gr.Dropdown(list(MODELS), value=MODELS[0], label="Costs of", min_width=140)
        policies = gr.Dropdown(
            list(SIMULATED_POLICIES),
            value=["fixed", "concurrency_table", "verification_guided"],
            multiselect=True,
            label="Policies",
            min_width=260,
        )
        scheduler = gr.Dropdown(list(SCHEDULERS), value="bucketed", label="Scheduler", min_width=140)
        requests = gr.Slider(150, 600, 200, step=50, label="Requests served in each run", min_width=180)
    with gr.Row():
        run = gr.Button("Simulate", variant="primary", elem_id="simulate-run", min_width=120)
        stop = gr.Button("Stop", variant="stop", min_width=120, elem_id="simulate-stop")
    message = gr.HTML("", elem_id="simulate-message", padding=False)
    drawn = gr.HTML("", elem_id="simulate-frontier", padding=False)

    def start(costs: str, policies: list[str], scheduler: str, requests: int) -> Iterator[dict[Any, Any]]:
        if not policies:
            yield {message: notice("Choose at least one policy.")}
            return
        try:
            check_installed("demo")
            found: list[dict[str, Any]] = []
            yield {message: notice("Simulating …", "know")}
            last = 0.0
            for one in load.simulated(costs, policies, scheduler, (2, 4, 8, 16, 32, 64, 128), int(requests)):
                found.append(one)
                if time.perf_counter() - last >= 1:
                    last = time.perf_counter()
                    yield {drawn: _frontier(found, "policy", f"{costs} on a B200, {scheduler}")}
        except (RecGuideError, OSError) as error:
            yield {message: notice(str(error))}
            return
        yield {message: "", drawn: _frontier(found, "policy", f"{costs} on a B200, {scheduler}")}

    going = run.click(
        start,
        [costs, policies, scheduler, requests],
        [message, drawn],
        api_visibility="private",
        concurrency_limit=1,
        concurrency_id="measuring",
        show_progress="minimal",
        show_progress_on=[drawn],
        trigger_mode="once",
    )
    stop.click(
        lambda: notice("Stopped.", "know"),
        None,
        message,
        cancels=[going],
        api_visibility="private",
        show_progress="hidden",
    )


# --- 5: what policies decide by ---


def _calibration_tab(desk: Desk, model: gr.Dropdown) -> None:
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
        concurrency_id="measuring",
        show_progress="minimal",
        show_progress_on=[of_rounds],
        trigger_mode="once",
    )
    stop.click(_stopper(desk), None, None, queue=False, api_visibility="private", show_progress="hidden")
