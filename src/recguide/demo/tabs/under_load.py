"""Many users: of the real engine, and of the simulator."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gradio as gr

from ... import RecGuideError
from ...engine.scheduler import SCHEDULERS
from ...pictures import check_installed, frontier, panel_grid
from ...simulator import MODELS
from ...simulator import POLICIES as SIMULATED_POLICIES
from .. import load
from ..answer import notice
from ..desk import Desk
from ..figures import figure_html, stack
from .parts import MEASURING


def load_tab(desk: Desk, model: gr.Dropdown) -> Callable[[gr.Request], None]:
    """The tab. Returns what ends a session's load."""
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
        concurrency_id=MEASURING,
        show_progress="minimal",
        show_progress_on=[now],
        trigger_mode="once",
    )
    stop.click(end, None, None, queue=False, api_visibility="private", show_progress="hidden")
    clear.click(lambda: ([], "", ""), None, [runs, drawn, now], api_visibility="private", show_progress="hidden")
    _simulator()
    return end


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
        f'<dl class="rg-tiles">{cells}</dl><p class="rg-note">Block sizes of the rounds so far, by share:</p>'
        f"{stack(look.block_share, 'Blocks of') if look.block_share else ''}{shared}"
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
        '<h2 class="rg-h">The simulator, at the costs of a B200</h2><p class="rg-note">The engine’s own policies and schedulers '
        "in simulated time, with published costs of NLD-8B and 14B (the paper’s Figure 5). Acceptance follows the paper’s Table 1; "
        "the drafts of auto are synthetic.</p>",
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
            scale=2,
        )
        scheduler = gr.Dropdown(list(SCHEDULERS), value="bucketed", label="Scheduler", min_width=140)
        requests = gr.Slider(150, 600, 200, step=50, label="Requests a run", min_width=180)
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
        concurrency_id=MEASURING,
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
