"""A server under load, from another process: how fast, how fair, how much dearer than its engine, and whether its memory stays.

    recguide serve & python eval/serving.py load http://127.0.0.1:8000 --requests 200 --concurrency 200
    python eval/serving.py overhead --json docs/results/serving-overhead.json
    python eval/serving.py overload --json docs/results/serving-overload.json
    python eval/serving.py soak --minutes 10 --json docs/results/serving-soak.json

`load` asks a server that runs; the others start their own on 127.0.0.1 and stop it. Figures have the names of `vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Annotated, Any

import httpx
import numpy as np
import psutil
import torch
import typer
from rich.console import Console

from recguide.cli.load_benchmark import closed_loop
from recguide.config import RecGuideConfig
from recguide.files import whole
from recguide.loading import TINY, chat_ids, load
from recguide.tiny.tasks import make_task

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
progress = Console(stderr=True)
SUITES = ("math", "code", "text")


@dataclass
class Outcome:
    """
    What became of a request. Times are in seconds from its sending; `queue_s` is the server's own.

    Args:
        status (`int`): of HTTP; 0: the connection failed; -1: we left in the middle.
        number (`int`): of its prompt.
        text (`str`), tokens (`int`): of the answer.
        ended (`bool`): it came whole.
    """

    status: int
    number: int
    text: str = ""
    tokens: int = 0
    ttft_s: float = 0.0
    e2e_s: float = 0.0
    queue_s: float = 0.0
    retry_after: int | None = None
    ended: bool = False
    error: str | None = None


# --- a client -------------------------------------------------------------------------------------------------------


async def ask(client: httpx.AsyncClient, body: dict[str, Any], number: int, leave_after: int | None = None) -> Outcome:
    """Stream one chat; leave after so many events where that is given."""
    began, outcome, events = time.perf_counter(), Outcome(0, number), 0
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            outcome.status = answer.status_code
            if answer.status_code != 200:
                outcome.error = (await answer.aread()).decode()
                outcome.retry_after = int(answer.headers.get("retry-after", 0)) or None
                return outcome
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    outcome.ended = True
                elif line.startswith("data: "):
                    _take(json.loads(line.removeprefix("data: ")), outcome, time.perf_counter() - began)
                    events += 1
                    if events == leave_after:
                        outcome.status = -1
                        return outcome
    except httpx.HTTPError as error:
        outcome.error = repr(error)
    outcome.e2e_s = time.perf_counter() - began
    return outcome


def _take(event: dict[str, Any], outcome: Outcome, now: float) -> None:
    if "error" in event:
        outcome.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            outcome.text += text
            outcome.ttft_s = outcome.ttft_s or now
    if usage := event.get("usage"):
        outcome.tokens = usage["completion_tokens"]
        outcome.queue_s = event["recguide"]["queue_s"]


async def closed(url: str, bodies: list[dict[str, Any]], concurrency: int, leaving: float = 0.0) -> list[Outcome]:
    """Keep so many requests under way until all are sent; a share of them is left in the middle."""
    rng, waiting = Random(0), iter(list(enumerate(bodies)))
    outcomes: list[Outcome] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=concurrency)

    async def worker(client: httpx.AsyncClient) -> None:
        for number, body in waiting:
            leave_after = rng.randint(1, 6) if rng.random() < leaving else None
            outcomes.append(await ask(client, body, number, leave_after))

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client, asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(worker(client))
    return outcomes


async def opened(url: str, bodies: list[dict[str, Any]], rate: float) -> list[Outcome]:
    """Send at a rate, in Poisson arrivals, whatever becomes of those before."""
    rng = Random(0)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client, asyncio.TaskGroup() as group:
        tasks = []
        for number, body in enumerate(bodies):
            tasks.append(group.create_task(ask(client, body, number)))
            await asyncio.sleep(rng.expovariate(rate))
    return [task.result() for task in tasks]


def chats(count: int, max_tokens: int, strategy: str | None, model: str = TINY, **more: Any) -> list[dict[str, Any]]:
    """Bodies of requests, some of each suite."""
    prompts = [make_task(SUITES[i % 3], "test", i // 3).prompt for i in range(min(count, 48))]
    own = {} if strategy is None else {"recguide": {"strategy": strategy}}
    return [
        {
            "model": model, "messages": [{"role": "user", "content": prompts[i % len(prompts)]}], "temperature": 0,
            "max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}, **own, **more,
        }
        for i in range(count)
    ]  # fmt: skip


def report(outcomes: list[Outcome], seconds: float) -> dict[str, Any]:
    """Figures of a run."""
    done = [one for one in outcomes if one.ended]
    figures: dict[str, Any] = {
        "requests": len(outcomes),
        "completed": len(done),
        "statuses": dict(Counter(str(one.status) for one in outcomes)),
        "duration": seconds,
        "request_throughput": len(done) / seconds,
        "output_throughput": sum(one.tokens for one in done) / seconds,
        "different_texts": _different(done),
    }
    times = {
        "ttft": [one.ttft_s for one in done],
        "e2el": [one.e2e_s for one in done],
        "tpot": [(one.e2e_s - one.ttft_s) / (one.tokens - 1) for one in done if one.tokens > 1],
        "queue": [one.queue_s for one in done],
    }
    for name, values in times.items():
        ms = np.array(values or [0.0]) * 1000
        figures |= {f"median_{name}_ms": float(np.median(ms)), f"p99_{name}_ms": float(np.percentile(ms, 99))}
    if after := [one.retry_after for one in outcomes if one.retry_after is not None]:
        figures["median_retry_after_s"] = median(after)
    return figures


def _different(done: list[Outcome]) -> int:
    """Answers to a prompt that differ from its first one."""
    first: dict[int, str] = {}
    return sum(
        first.setdefault(one.number % 48, one.text) != one.text for one in sorted(done, key=lambda one: one.number)
    )


# --- a server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def serving(*options: str, threads: int = 1) -> Iterator[tuple[str, psutil.Process]]:
    """`recguide serve` in a process of its own: its address, and the process."""
    command = [sys.executable, "-m", "recguide", "serve", "--port", "0", "--threads", str(threads), *options]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"(http://127\.0\.0\.1:\d+)/v1", line):
                    break
            else:
                raise RuntimeError(f"The server ended with {process.wait()}.")
            # Its log must not fill the pipe.
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[1], psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def _timed(work: Any) -> tuple[list[Outcome], float]:
    began = time.perf_counter()
    return asyncio.run(work), time.perf_counter() - began


def _environment(**settings: Any) -> dict[str, Any]:
    import platform

    import transformers

    import recguide

    return settings | {
        "recguide": recguide.__version__, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "cpus": os.cpu_count(), "processor": _processor(),
    }  # fmt: skip


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        with whole(path) as file:
            file.write_text(json.dumps(figures, indent=1) + "\n")
    typer.echo(json.dumps(figures, indent=1))


JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file too.")]


@app.command("load")
def load_command(
    url: Annotated[str, typer.Argument(help="Of a server on this machine, such as http://127.0.0.1:8000.")],
    requests: Annotated[int, typer.Option(min=1)] = 200,
    concurrency: Annotated[int, typer.Option(min=1, help="Under way at once.")] = 16,
    rate: Annotated[
        float | None, typer.Option(help="Requests a second instead, whatever becomes of those before.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    strategy: Annotated[str | None, typer.Option(help="By default the server's.")] = None,
    leaving: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the clients that go away in the middle.")
    ] = 0.0,
    outcomes_file: Annotated[
        Path | None, typer.Option("--outcomes", help="Write every request's outcome here.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """Ask a server that runs."""
    if not re.fullmatch(r"http://(127\.\d+\.\d+\.\d+|localhost|\[::1\])(:\d+)?", url):
        raise typer.BadParameter(f"{url}: load goes to this machine only, such as http://127.0.0.1:8000.")
    bodies = chats(requests, max_tokens, strategy)
    work = opened(url, bodies, rate) if rate else closed(url, bodies, concurrency, leaving)
    outcomes, seconds = _timed(work)
    if outcomes_file:
        outcomes_file.write_text(json.dumps([asdict(one) for one in outcomes]))
    _write(json_file, report(outcomes, seconds))


@app.command()
def overhead(
    concurrency: Annotated[int, typer.Option(min=1)] = 16,
    requests: Annotated[int, typer.Option(min=1, help="In each part.")] = 48,
    repetitions: Annotated[int, typer.Option(min=1, help="Engine and server in turn.")] = 5,
    max_tokens: Annotated[int, typer.Option(min=1)] = 96,
    strategy: str = "auto",
    json_file: JsonOption = None,
) -> None:
    """Tokens a second of the engine by itself, and of a server around it, in turn."""
    torch.set_num_threads(1)
    model, tokenizer = load(TINY, "float32", "cpu")
    bodies = chats(requests, max_tokens, strategy)
    ids = [tuple(chat_ids(tokenizer, body["messages"][0]["content"])[0].tolist()) for body in bodies]
    config = RecGuideConfig(strategy=strategy)
    options = {
        "generation_strategy": strategy, "recguide_config": config, "max_new_tokens": max_tokens, "do_sample": False
    }  # fmt: skip
    parts: list[dict[str, float]] = []
    with serving("--max-requests", str(concurrency)) as (url, _):
        _timed(closed(url, bodies, concurrency))
        for part in range(repetitions):
            _, alone, results = closed_loop(model, ids, ids[:2], concurrency, "packed", options)
            outcomes, seconds = _timed(closed(url, bodies, concurrency))
            if failed := [one for one in outcomes if not one.ended]:
                raise RuntimeError(f"A request failed: {failed[0]}")
            texts = [tokenizer.decode(result.tokens, skip_special_tokens=True) for result in results]
            if [one.text for one in sorted(outcomes, key=lambda one: one.number)] != texts:
                raise RuntimeError("The server's texts are not the engine's.")
            engine = alone.summary()["output_throughput"]
            server = report(outcomes, seconds)["output_throughput"]
            parts.append({"engine_tokens_per_s": engine, "server_tokens_per_s": server, "ratio": server / engine})
            progress.print(
                f"{part + 1}/{repetitions}: engine {engine:.0f}, server {server:.0f} tokens/s: {server / engine:.3f}"
            )
    ratios = [part["ratio"] for part in parts]
    settings = _environment(concurrency=concurrency, requests=requests, max_tokens=max_tokens, strategy=strategy)
    _write(
        json_file,
        {"environment": settings, "parts": parts, "median_ratio": median(ratios), "range": [min(ratios), max(ratios)]},
    )


@app.command()
def overload(
    running: Annotated[int, typer.Option(min=1, help="Answers written at once.")] = 8,
    waiting: Annotated[int, typer.Option(min=0, help="Answers that may wait.")] = 8,
    requests: Annotated[int, typer.Option(min=1)] = 400,
    factor: Annotated[float, typer.Option(min=0.1, help="Times what the server can do.")] = 2.0,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    json_file: JsonOption = None,
) -> None:
    """Requests at twice the rate that a server can answer: how long do those wait that it takes on?"""
    with serving("--max-requests", str(running), "--max-waiting", str(waiting)) as (url, _):
        outcomes, seconds = _timed(closed(url, chats(96, max_tokens, None), running))
        capacity = report(outcomes, seconds)["request_throughput"]
        outcomes, seconds = _timed(opened(url, chats(requests, max_tokens, None), factor * capacity))
    settings = _environment(running=running, waiting=waiting, factor=factor, max_tokens=max_tokens)
    _write(json_file, {"environment": settings, "capacity_requests_per_s": capacity} | report(outcomes, seconds))


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1)] = 10.0,
    concurrency: Annotated[int, typer.Option(min=1)] = 32,
    leaving: Annotated[float, typer.Option(min=0, max=1)] = 0.1,
    json_file: JsonOption = None,
) -> None:
    """Keep a server busy, with clients that go away, and read its memory."""
    read: list[dict[str, float]] = []
    statuses: Counter[str] = Counter()
    different = 0
    with serving("--max-requests", "16") as (url, process):
        began, number = time.perf_counter(), 0
        while (now := time.perf_counter() - began) < minutes * 60:
            bodies = chats(4 * concurrency, 32, ("auto", "recguide", "linear")[number % 3])
            outcomes, _ = _timed(closed(url, bodies, concurrency, leaving))
            statuses.update(str(one.status) for one in outcomes)
            different += _different([one for one in outcomes if one.ended])
            number += 1
            read.append(
                {"minutes": now / 60, "requests": statuses.total(), "resident_mib": process.memory_info().rss / 2**20}
            )
            progress.print(f"{now / 60:5.1f} min  {statuses.total():6} requests  {read[-1]['resident_mib']:8.1f} MiB")
        metrics = httpx.get(url + "/metrics").text
    watched = r"^(vllm:num_requests_\w+|vllm:kv_cache_usage_perc|recguide_answers_under_way)\{.*\} (.*)$"
    left = {name: float(value) for name, value in re.findall(watched, metrics, re.M)}
    settings = _environment(minutes=minutes, concurrency=concurrency, leaving=leaving)
    _write(
        json_file,
        {
            "environment": settings,
            "statuses": dict(statuses),
            "different_texts": different,
            "left": left,
            "memory": read,
        },
    )
    typer.echo(
        f"Resident memory: {read[0]['resident_mib']:.1f} MiB at the start, {read[-1]['resident_mib']:.1f} MiB at the end."
    )


if __name__ == "__main__":
    app()
