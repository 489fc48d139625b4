"""Strategies under load in priced time: real texts, drafts and acceptance, but every forward takes what a plane says.

    python eval/priced_time.py --loads 1,8,32 --prompts 6 --json priced.json

Two strategies that differ by one per cent cannot be told apart by a clock on a shared machine; here they can. What is left out is the time
outside of forwards, and whatever in a forward is not on the plane.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track

from recguide import Engine, EngineConfig
from recguide.loading import TINY, chat_ids, load
from recguide.policy import SHELF
from recguide.testing import PricedRates, priced_time
from recguide.tiny.tasks import FAMILIES, make_task


def contenders(sizes: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Options of `generate`, by name."""
    found: dict[str, dict[str, Any]] = {"ar": {"generation_strategy": "ar"}}
    for size in sizes:
        found[f"linear-{size}"] = {"generation_strategy": "linear", "recguide_config": {"block_size": size}}
    found["recguide-16"] = {"generation_strategy": "recguide", "recguide_config": {"block_size": 16}}
    found["verification_guided"] = {
        "generation_strategy": "linear",
        "recguide_config": {"policy": "verification_guided"},
    }
    return found | {"auto": {"generation_strategy": "auto"}, "auto, no tables": {"generation_strategy": "auto"}}


def rate(model: Any, prompts: Sequence[list[int]], load: int, options: dict[str, Any], tables: bool) -> float:
    """Tokens a priced second, `load` requests at once while some are waiting."""
    rates, directory = PricedRates(), model.name_or_path
    if not tables:
        # A model without a directory has none.
        model.name_or_path = ""
    try:
        with Engine(model, EngineConfig(max_requests=load), [rates]) as engine:
            engine.generate_batch(prompts, max_new_tokens=192, do_sample=False, **options)
    finally:
        model.name_or_path = directory
    # What was learned goes with the policies.
    SHELF.take(model)
    return 1000 * rates.tokens / rates.ms


def main(
    loads: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,8,32",
    prompts: Annotated[int, typer.Option(min=1, help="Of each suite.")] = 6,
    fixed: Annotated[float, typer.Option(help="Milliseconds of a forward.")] = 12.0,
    each_request: Annotated[float, typer.Option(help="Milliseconds of a request in it.")] = 0.6,
    each_token: Annotated[float, typer.Option(help="Milliseconds of a query token.")] = 0.2,
    json_file: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Print tokens a second of every strategy at every load."""
    torch.set_num_threads(1)
    model, tokenizer = load(TINY, "float32", "cpu")
    texts = [
        chat_ids(tokenizer, make_task(family, "test", i).prompt)[0].tolist()
        for i in range(prompts)
        for family in FAMILIES
    ]
    concurrencies = [int(number) for number in loads.split(",")]
    names = contenders((8, 16, 32))
    runs: dict[str, dict[int, float]] = {name: {} for name in names}
    pairs = [(name, concurrency) for concurrency in concurrencies for name in names]
    with priced_time(lambda requests, tokens: fixed + each_request * requests + each_token * tokens):
        for name, concurrency in track(pairs, "priced time", console=Console(stderr=True)):
            # Enough of them that the load is kept up for most of the time.
            requests = list(islice(cycle(texts), max(len(texts), 6 * concurrency)))
            runs[name][concurrency] = rate(model, requests, concurrency, names[name], name != "auto, no tables")
    print("| tokens a second | " + " | ".join(f"C = {concurrency}" for concurrency in concurrencies) + " |")
    print("|---|" + "---|" * len(concurrencies))
    for name, row in runs.items():
        print(f"| {name} | " + " | ".join(f"{row[concurrency]:.0f}" for concurrency in concurrencies) + " |")
    if json_file:
        json_file.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
