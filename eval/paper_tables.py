"""The tables and figures of arXiv 2609.34388, regenerated on a model, beside the printed numbers.

    OMP_WAIT_POLICY=PASSIVE python eval/paper_tables.py --threads 1 --output runs/paper

Writes JSON, CSV, Markdown and PNG into a directory. Every row says what it is: measured here, simulated at published B200 costs, or
printed in the paper. Interrupted, the same command goes on where it was.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from paper_contents import (
    draw_2b,
    draw_5,
    figure_2a,
    figure_2b,
    figure_3,
    figure_5,
    table_1,
    table_2,
    table_3,
    table_4,
    table_4_printed,
    table_5,
    table_6,
    table_6_printed,
)
from paper_measuring import Drafter, Prompt, Setup, save_only_s, serve, simulate, time_alone, time_rounds
from paper_rows import CSV_HEADER, MEASURED, SIMULATED, Row, csv_lines, markdown

from recguide import simulator
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.cli.benchmark import environment
from recguide.cli.mistakes import readable_errors
from recguide.cli.options import whole_numbers
from recguide.cli.recording import Recordings
from recguide.cli.unfinished import Unfinished
from recguide.errors import ConfigError
from recguide.files import whole
from recguide.loading import TINY, chat_ids, load
from recguide.pictures import check_installed, committed_histogram, draft_probabilities, save, transitions
from recguide.tiny.tasks import FAMILIES, make_task

MORE_PROMPTS, MORE_TOKENS = 3, 2
"""Times the prompts and tokens of the timings, for rounds with blocks of 32: these are cheap, and their tables need many."""


def main(
    model: Annotated[str, typer.Option(help=f"{TINY} (embedded), a directory, or a hub name.")] = TINY,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each suite.")] = 5,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 96,
    repetitions: Annotated[int, typer.Option(min=1, help="Of what is timed: median and range are given.")] = 5,
    loads: Annotated[str, typer.Option(help="Requests at once in the engine, with commas.")] = "2,8,32",
    simulated_requests: Annotated[
        int, typer.Option(min=3, help="Served in simulated time; loads up to 128 need 129 and more.")
    ] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the choice of prompts, and of simulated requests.")] = 0,
    drafter: Annotated[
        str | None, typer.Option(help="MODULE:NAME of a function that gives a Drafter for (model, tokenizer).")
    ] = None,
    output: Annotated[Path, typer.Option(help="Directory of the results.")] = Path("runs/paper"),
    dtype: Annotated[str, typer.Option()] = "float32",
    device: Annotated[str, typer.Option()] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Regenerate the paper's tables and figures."""
    with readable_errors():
        check_installed()
        concurrencies = whole_numbers(loads, "--loads")
        if threads:
            torch.set_num_threads(threads)
        network, tokenizer = load(model, dtype, device)
        adapter = ModelAdapter(network, resolve_backend())

        def prompts(count: int) -> dict[str, list[Prompt]]:
            return {
                family: [
                    tuple(chat_ids(tokenizer, make_task(family, "test", seed * 10**6 + i).prompt)[0].tolist())
                    for i in range(count)
                ]
                for family in FAMILIES
            }

        arguments = {
            "limit": limit, "max_new_tokens": max_new_tokens, "repetitions": repetitions, "loads": concurrencies,
            "simulated_requests": simulated_requests, "seed": seed, "drafter": drafter, "threads": torch.get_num_threads(),
        }  # fmt: skip
        begun = time.perf_counter()
        with (
            Unfinished(output / "unfinished.jsonl", adapter.fingerprint, arguments) as unfinished,
            TemporaryDirectory() as folder,
        ):
            setup = Setup(
                network, adapter, prompts(limit), max_new_tokens, repetitions, unfinished,
                None if drafter is None else _drafter(drafter, network, tokenizer),
            )  # fmt: skip
            # What is missing is said before anything is measured.
            only_s = save_only_s(setup, Path(folder))
            many = [
                torch.tensor([p], device=network.device)
                for family in prompts(MORE_PROMPTS * limit).values()
                for p in family
            ]
            recorded = Recordings(adapter, many, MORE_TOKENS * max_new_tokens, unfinished).of_largest_blocks()
            costs = time_rounds(setup, concurrencies)
            timed = time_alone(setup)
            served = serve(setup, concurrencies, only_s)
            simulated = {name: simulate(setup, name, simulated_requests, seed) for name in simulator.MODELS}
            measured = [(MEASURED, model, served), *((SIMULATED, name, runs) for name, runs in simulated.items())]
            rows = [
                *table_1(recorded, model),
                *table_2(timed, model),
                *table_3(timed, model),
                *(row for kind, name, runs in measured for row in table_4(runs, kind, name)),
                *table_4_printed(),
                *table_5(timed, model),
                *(row for kind, name, runs in measured for row in table_6(runs, kind, name)),
                *table_6_printed(),
                *figure_2a(recorded, model),
                *(times := figure_2b(costs, model)),
                *figure_3(recorded, model),
                *(row for kind, name, runs in measured for row in figure_5(runs, kind, name)),
            ]
            about = environment(model, network) | arguments
            about["seconds since the last start"] = round(time.perf_counter() - begun)
            drawn = save(
                {
                    "table-1": transitions(recorded),
                    "figure-2a": committed_histogram(recorded),
                    "figure-2b": draw_2b(times),
                    "figure-3": draft_probabilities(recorded),
                    "figure-5": draw_5(measured),
                },
                output,
            )
            _write(output, about, rows)
        written = [output / name for name in ("tables.json", "tables.csv", "tables.md")]
        print(f"Written: {', '.join(map(str, [*written, *drawn]))}.")


def _drafter(where: str, model: Any, tokenizer: Any) -> Drafter:
    module, colon, name = where.partition(":")
    if not colon:
        raise ConfigError(f"--drafter expects MODULE:NAME; got {where!r}.")
    # A script finds what is beside it; a drafter is where the user is.
    sys.path.append(str(Path.cwd()))
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--drafter {where}: {error}.") from error
    found: Drafter = make(model, tokenizer)
    if not callable(getattr(found, "propose", None)):
        raise ConfigError(f"--drafter {where} gave {found!r}; expected an object with propose(tokens, count).")
    return found


def _write(output: Path, about: dict[str, Any], rows: Sequence[Row]) -> None:
    source = simulator.paper_tables()["source"]
    record = {"environment": about, "printed": source, "rows": [asdict(row) for row in rows]}
    for name, text in (
        ("tables.json", json.dumps(record, indent=1) + "\n"),
        ("tables.csv", "\n".join([CSV_HEADER, *csv_lines(rows)]) + "\n"),
        ("tables.md", markdown(rows, about, source)),
    ):
        with whole(output / name) as file:
            file.write_text(text)


if __name__ == "__main__":
    typer.run(main)
