"""`recguide profile` and `recguide calibrate`: the tables that policies decide by, measured on the user's machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..adapter import ModelAdapter
from ..attention import resolve_backend
from ..calibration import CostProfile, ProgressTable
from ..errors import ConfigError, InputError
from ..fitting import BLOCK_SIZES, fit_progress
from ..hooks import Hook
from ..loop import tables_directory
from ..profiling import measure_rounds
from ..structs import RoundRecord
from ..tiny.tasks import FAMILIES, make_task
from .benchmark import environment
from .loading import TINY, chat_ids, load, readable_errors

out = Console()

Tables = Annotated[
    Path | None,
    typer.Option(help="Directory of the tables; by default recguide_tables beside the model, or here for a hub model."),
]


def profile(
    model: Annotated[str, typer.Option("--model", help=f"{TINY} (embedded), a directory, or a hub name.")] = TINY,
    loads: Annotated[str, typer.Option(help="Requests in a round, with commas.")] = "1,2,4,8,16,32",
    block_size: Annotated[str, typer.Option(help="Block sizes, with commas; 1 is plain decoding.")] = "1,8,16,32,64",
    context: Annotated[str, typer.Option(help="Cached tokens of each request, with commas.")] = "64,256",
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds of each kind; the median is kept.")] = 7,
    tables: Tables = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="As in device_map: cpu, cuda, auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads; by default torch's own choice.")] = None,
) -> None:
    """Measure what a round costs here, by load, block size and context. Run it on the machine that is to serve, with nothing else."""
    with readable_errors():
        grid = [whole_numbers(text, option) for text, option in ((loads, "--loads"), (block_size, "--block-size"))]
        contexts = whole_numbers(context, "--context")
        loaded, _ = load(model, dtype, device)
        if threads:
            torch.set_num_threads(threads)
        adapter = ModelAdapter(loaded, resolve_backend())
        steps = measure_rounds(adapter, grid[0], grid[1], contexts, repeats)
        total = len(grid[0]) * len(contexts)
        costs = [cost for step in track(steps, "profile", total, console=Console(stderr=True)) for cost in step]
        result = CostProfile(adapter.fingerprint, tuple(costs), environment(model, loaded))
        path = result.save(tables_directory(adapter, str(tables) if tables else None))
        table = Table(title="milliseconds a round", box=None)
        table.add_column("requests", justify="right")
        for size in grid[1]:
            table.add_column(f"B = {size}", justify="right")
        for number in grid[0]:
            table.add_row(str(number), *(f"{result.round_ms(number, size):.1f}" for size in grid[1]))
        out.print(table)
        out.print(f"Written to {path}.", markup=False, soft_wrap=True)


def calibrate(
    model: Annotated[str, typer.Option("--model", help=f"{TINY} (embedded), a directory, or a hub name.")] = TINY,
    prompts: Annotated[int, typer.Option(min=1, help="Of each suite, or the most of the file.")] = 60,
    prompts_file: Annotated[
        Path | None, typer.Option(help='JSONL with a "prompt" a line: what you serve. By default the embedded suites.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    entropy_cap: Annotated[
        int | None, typer.Option(min=1, help="Use only the first entropies of a round; by default all.")
    ] = None,
    tables: Tables = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="As in device_map: cpu, cuda, auto.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads; by default torch's own choice.")] = None,
) -> None:
    """Learn how much a block may be expected to commit, from rounds of LinearSS with blocks of 32 on typical prompts."""
    with readable_errors():
        texts = _prompts(prompts_file, prompts)
        loaded, tokenizer = load(model, dtype, device)
        if threads:
            torch.set_num_threads(threads)
        adapter = ModelAdapter(loaded, resolve_backend())
        recorded, overlapped = [], []
        for number, text in enumerate(track(texts, "calibrate", console=Console(stderr=True))):
            ids = chat_ids(tokenizer, text).to(loaded.device)
            recorded.append(record_rounds(loaded, ids, max_new_tokens, "linear", 32))
            if number % 3 == 0:
                overlapped.append(record_rounds(loaded, ids, max_new_tokens, "recguide", 16))
        measured_on = environment(model, loaded)
        table = fit_progress(recorded, adapter.fingerprint, entropy_cap, measured_on, overlapped=overlapped)
        path = table.save(tables_directory(adapter, str(tables) if tables else None))
        out.print(_quality(table))
        out.print(f"Written to {path}.", markup=False, soft_wrap=True)


class _Rounds(Hook):
    def __init__(self) -> None:
        self.records: list[RoundRecord] = []

    def on_commit(self, record: RoundRecord) -> None:
        self.records.append(record)


def record_rounds(
    model: Any, ids: torch.Tensor, max_new_tokens: int, strategy: str, block_size: int
) -> list[RoundRecord]:
    """One prompt's rounds, decoded greedily; `ids`: `int64[1, T]` on the model's device."""
    rounds = _Rounds()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        generation_strategy=strategy,
        recguide_config={"block_size": block_size},
        recguide_hooks=[rounds],
    )
    return rounds.records


def _prompts(file: Path | None, count: int) -> list[str]:
    if file is None:
        # The training split: what is measured on the test split must not have been fitted to it.
        return [make_task(family, "train", 10**9 + i).prompt for i in range(count) for family in FAMILIES]
    texts = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        try:
            text = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f'{file}, line {number}: expected a JSON object with a "prompt" ({error!r}).') from error
        if not isinstance(text, str) or not text:
            raise InputError(f"{file}, line {number}: the prompt must be a text that is not empty; got {text!r}.")
        texts.append(text)
    if not texts:
        raise InputError(f"{file} has no prompts.")
    return texts[:count]


def _quality(table: ProgressTable) -> Table:
    shown = Table(title="predictions for prompts left out of the fit", box=None)
    for name in ("B", "committed a round", "bias", "variance explained"):
        shown.add_column(name, justify="right")
    for size in BLOCK_SIZES:
        q = table.quality[str(size)]
        shown.add_row(str(size), f"{q['mean']:.2f}", f"{q['bias']:+.3f}", f"{q['explained']:.0%}")
    return shown


def whole_numbers(text: str, option: str) -> list[int]:
    """The positive whole numbers of an option, in order, none twice."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{option} must be whole numbers with commas between; got {text!r}.") from error
    if min(numbers) < 1:
        raise ConfigError(f"{option} must be at least 1; got {text!r}.")
    return sorted(set(numbers))
