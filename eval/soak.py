"""Whether an engine's memory stays where it is over thousands of requests.

    python eval/soak.py --requests 5000 --json soak.json

Requests of all strategies and policies, greedy and sampled, some cancelled, keep the slots full; the process's resident memory is
read as they end. The model is a toy of two layers, so that what the engine keeps would show.
"""

from __future__ import annotations

import gc
import json
from collections import deque
from pathlib import Path
from random import Random
from typing import Annotated, Any

import psutil
import typer
from rich.console import Console
from rich.progress import track

from recguide import Engine, EngineConfig, RequestHandle
from recguide.testing import toy_model

STRATEGIES = ("ar", "linear", "recguide", "quadratic", "auto")


def soak(requests: int, slots: int, readings: int) -> list[dict[str, float]]:
    """Run `requests` requests; returns `readings` pairs of ended requests and resident MiB."""
    rng, process = Random(0), psutil.Process()
    config = EngineConfig(max_requests=slots, kv_bytes=2**20, page_size=8, scheduler="bucketed", prefix_sharing=True)
    under_way: deque[RequestHandle] = deque()
    read: list[dict[str, float]] = []
    with Engine(toy_model(vocab_size=64), config) as engine:
        for number in track(range(1, requests + 1), "soak", console=Console(stderr=True)):
            if len(under_way) == 2 * slots:
                under_way.popleft().result()
            under_way.append(engine.add_request(_prompt(rng), **_options(rng)))
            if rng.random() < 0.05:
                rng.choice(under_way).cancel()
            if number % (requests // readings) == 0:
                gc.collect()
                read.append({"requests": number, "resident_mib": process.memory_info().rss / 2**20})
        for handle in under_way:
            handle.result()
    return read


def _prompt(rng: Random) -> list[int]:
    return [rng.randrange(6, 64) for _ in range(rng.randint(1, 40))]


def _options(rng: Random) -> dict[str, Any]:
    strategy = rng.choice(STRATEGIES)
    options: dict[str, Any] = {"generation_strategy": strategy, "max_new_tokens": rng.randint(1, 12)}
    if strategy != "auto":
        options["recguide_config"] = {"block_size": rng.choice((4, 8)), "policy": rng.choice(("fixed", "aimd"))}
    if rng.random() < 0.5:
        options |= {"do_sample": True, "seed": rng.randrange(2**32)}
    return options


def main(
    requests: Annotated[int, typer.Option(min=10)] = 5000,
    slots: Annotated[int, typer.Option(min=1)] = 16,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print the process's memory as requests come and go."""
    read = soak(requests, slots, readings=10)
    for line in read:
        print(f"{line['requests']:6.0f} requests  {line['resident_mib']:8.1f} MiB")
    if json_file:
        json_file.write_text(json.dumps(read, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
