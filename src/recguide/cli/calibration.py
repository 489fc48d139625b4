"""`recguide profile` and `recguide calibrate`: the tables that policies decide by, measured on the user's machine."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from .. import pictures
from ..adapter import ModelAdapter
from ..calibration import BLOCK_SIZES, CostProfile, ForwardCost, ProgressTable, RoundCost
from ..config import ForwardConfig
from ..fitting import fit_progress
from ..loading import TINY, chat_ids, load, read_prompts
from ..loop import tables_directory
from ..profiling import measure_costs
from ..tiny.tasks import FAMILIES, make_task
from .benchmark import environment
from .mistakes import readable_errors
from .options import (
    BackendOption,
    CompileOption,
    DeviceOption,
    DtypeOption,
    GraphsOption,
    ModelOption,
    ThreadsOption,
    whole_numbers,
)
from .recording import Recordings
from .unfinished import Unfinished

out = Console()

Tables = Annotated[
    Path | None,
    typer.Option(help="Directory of the tables; by default recguide_tables beside the model, or here for a hub model."),
]
Figures = Annotated[
    Path | None, typer.Option(help="Directory for PNG pictures of what was measured; needs matplotlib.")
]


def profile(
    model: ModelOption = TINY,
    loads: Annotated[str, typer.Option(help="Requests in a round, with commas.")] = "1,2,4,8,16,32",
    block_size: Annotated[str, typer.Option(help="Block sizes, with commas; 1 is plain decoding.")] = "1,8,16,32,64",
    context: Annotated[str, typer.Option(help="Cached tokens of each request, with commas.")] = "64,256",
    repeats: Annotated[int, typer.Option(min=1, help="Timed rounds of each kind; the median is kept.")] = 5,
    figures: Figures = None,
    tables: Tables = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    attention_backend: BackendOption = "auto",
    compiled: CompileOption = False,
    cuda_graphs: GraphsOption = False,
    threads: ThreadsOption = None,
) -> None:
    """
    Measure what rounds cost here, by load, block size and context, and forwards, by load, query tokens and context.

    Run it on the machine that is to serve, with nothing else.

    Interrupted, it goes on where it was when started again.
    """
    with readable_errors():
        if figures:
            pictures.check_installed()
        grid = [whole_numbers(text, option) for text, option in ((loads, "--loads"), (block_size, "--block-size"))]
        contexts = whole_numbers(context, "--context")
        adapter, _, directory = _setup(
            model, dtype, device, threads, tables, _forwards_as(attention_backend, compiled, cuda_graphs)
        )
        arguments = {"loads": grid[0], "block sizes": grid[1], "contexts": contexts, "repeats": repeats}
        arguments["threads"] = torch.get_num_threads()
        with _unfinished(directory, "profile", adapter, arguments) as unfinished:
            pairs = {f"context {tokens}, load {number}": (tokens, number) for tokens in contexts for number in grid[0]}
            done = [pair for step, pair in pairs.items() if step in unfinished.done]
            steps = zip(
                [step for step in pairs if step not in unfinished.done],
                measure_costs(adapter, grid[0], grid[1], contexts, repeats, done),
                strict=True,
            )
            for step, costs in track(steps, "profile", len(pairs) - len(done), console=Console(stderr=True)):
                unfinished.add(step, [[asdict(cost) for cost in kind] for kind in costs])
            steps_done = [unfinished.done[step] for step in pairs]
            rounds = tuple(RoundCost(**cost) for of_rounds, _ in steps_done for cost in of_rounds)
            forwards = tuple(ForwardCost(**cost) for _, of_forwards in steps_done for cost in of_forwards)
            result = CostProfile(adapter.fingerprint, rounds, environment(model, adapter.model), forwards)
            path = result.save(directory)
            drawn = pictures.save(pictures.of_profile(result), figures) if figures else []
        table = Table(title="milliseconds a round", box=None)
        table.add_column("requests", justify="right")
        for size in grid[1]:
            table.add_column(f"B = {size}", justify="right")
        for number in grid[0]:
            table.add_row(str(number), *(f"{result.round_ms(number, size):.1f}" for size in grid[1]))
        out.print(table)
        out.print(_forwards(result))
        _name_files([path, *drawn])


def calibrate(
    model: ModelOption = TINY,
    prompts: Annotated[int, typer.Option(min=1, help="Of each suite, or the most of the file.")] = 60,
    prompts_file: Annotated[
        Path | None, typer.Option(help='JSONL with a "prompt" a line: what you serve. By default the embedded suites.')
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    entropy_cap: Annotated[
        int | None, typer.Option(min=1, help="Use only the first entropies of a round; by default all.")
    ] = None,
    shadow_rounds: Annotated[
        int,
        typer.Option(min=0, help="Rounds that blocks of 8 and 16 are run beside, to measure what is lost by cutting."),
    ] = 200,
    on_policy: Annotated[
        bool,
        typer.Option("--on-policy", help="Decode the prompts once more under verification_guided, and refit to that."),
    ] = False,
    policy_load: Annotated[
        int, typer.Option("--load", min=1, help="With --on-policy: requests under way, as the policy is told.")
    ] = 8,
    figures: Figures = None,
    tables: Tables = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    attention_backend: BackendOption = "auto",
    compiled: CompileOption = False,
    cuda_graphs: GraphsOption = False,
    threads: ThreadsOption = None,
) -> None:
    """
    Learn how much a block may be expected to commit, from rounds of LinearSS with blocks of 32 on typical prompts.

    Interrupted, it goes on where it was when started again.
    """
    with readable_errors():
        if figures:
            pictures.check_installed()
        texts = _prompts(prompts_file, prompts)
        adapter, tokenizer, directory = _setup(
            model, dtype, device, threads, tables, _forwards_as(attention_backend, compiled, cuda_graphs)
        )
        ids = [chat_ids(tokenizer, text).to(adapter.device) for text in texts]
        costs = _costs(directory, adapter, policy_load) if on_policy else None
        arguments = {
            "prompts": len(ids),
            "prompts_hash": sha256(json.dumps([one.tolist() for one in ids]).encode()).hexdigest()[:16],
            "max_new_tokens": max_new_tokens,
            "entropy_cap": entropy_cap,
            "shadow_rounds": shadow_rounds,
            "on_policy_load": policy_load if on_policy else None,
        }
        with _unfinished(directory, "calibration", adapter, arguments) as unfinished:
            recordings = Recordings(adapter, ids, max_new_tokens, unfinished)
            recorded = recordings.of_largest_blocks()
            fit = partial(
                fit_progress,
                recorded,
                adapter.fingerprint,
                entropy_cap,
                environment(model, adapter.model) | {"calibrated_on": arguments},
                overlapped=recordings.with_branches(),
                shadowed=recordings.of_shadows(recorded, shadow_rounds) if shadow_rounds else (),
            )
            table = fit()
            if costs:
                table = fit(met=recordings.on_policy(table, costs, policy_load))
            path = table.save(directory)
            drawn = pictures.save(pictures.of_calibration(recorded, table), figures) if figures else []
        for shown in _quality(table):
            out.print(shown)
        _name_files([path, *drawn])


def _forwards_as(attention_backend: str, compiled: bool, cuda_graphs: bool) -> ForwardConfig:
    return ForwardConfig(attention_backend=attention_backend, compile=compiled, cuda_graphs=cuda_graphs)


def _setup(
    model: str, dtype: str, device: str, threads: int | None, tables: Path | None, options: ForwardConfig
) -> tuple[ModelAdapter, Any, Path]:
    """Adapter, tokenizer, and the directory of the tables."""
    loaded, tokenizer = load(model, dtype, device)
    if threads:
        torch.set_num_threads(threads)
    adapter = ModelAdapter.of(loaded, options)
    return adapter, tokenizer, tables_directory(adapter, str(tables) if tables else None)


def _unfinished(directory: Path, name: str, adapter: ModelAdapter, arguments: dict[str, Any]) -> Unfinished:
    path = directory / adapter.fingerprint.folder / f"{name}.unfinished.jsonl"
    return Unfinished(path, adapter.fingerprint, arguments)


def _costs(directory: Path, adapter: ModelAdapter, load: int) -> CostProfile:
    """The profile that the policy needs; what is missing is said before the prompts are decoded, not after."""
    costs = CostProfile.load(directory, adapter.fingerprint)
    assert costs is not None
    for size in BLOCK_SIZES:
        costs.round_ms(load, size)
    return costs


def _prompts(file: Path | None, count: int) -> list[str]:
    if file is None:
        # The training split: what is measured on the test split must not have been fitted to it.
        return [make_task(family, "train", 10**9 + i).prompt for i in range(count) for family in FAMILIES]
    return read_prompts(file)[:count]


def _forwards(profile: CostProfile) -> Table:
    tokens = sorted({cost.query_tokens for cost in profile.forwards})
    cells: dict[tuple[int, int], list[float]] = {}
    for cost in profile.forwards:
        cells.setdefault((cost.load, cost.query_tokens), []).append(cost.ms)
    return _shown(
        "milliseconds a forward, by the query tokens of each request",
        ("requests", *map(str, tokens)),
        [
            (str(load), *(f"{sum(cells[load, count]) / len(cells[load, count]):.1f}" for count in tokens))
            for load in profile.loads
        ],
    )


def _quality(table: ProgressTable) -> Iterator[Table | str]:
    quality = table.quality
    yield _shown(
        "predictions for prompts left out of the fit",
        ("B", "committed a round", "bias", "variance explained"),
        [(str(size), *_errors(quality[str(size)])) for size in BLOCK_SIZES],
    )
    odds = quality["acceptance"]
    yield f"odds of acceptance: calibration error {odds['calibration_error']:.3f}, Brier score {odds['brier']:.3f}"
    if "shadow" in quality:
        yield _shown(
            "blocks of 32, cut, and shorter blocks",
            ("B", "rounds", "cut", "in truth", "bias"),
            [
                (
                    size,
                    str(q["rounds"]),
                    f"{q['truncated']:.2f}",
                    f"{q['true']:.2f}",
                    f"{q['truncated'] - q['true']:+.3f} ± {q['standard_error']:.3f}",
                )
                for size, q in quality["shadow"].items()
            ],
        )
    if "on_policy" in quality:
        met = quality["on_policy"]
        yield _shown(
            f"predictions for {met['rounds']} rounds under the policy",
            ("fit", "committed a round", "bias", "variance explained"),
            [("from blocks of 32", *_errors(met["before"])), ("refitted", *_errors(met["after"]))],
        )


def _errors(quality: Mapping[str, float]) -> tuple[str, str, str]:
    return f"{quality['mean']:.2f}", f"{quality['bias']:+.3f}", f"{quality['explained']:.0%}"


def _shown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    shown = Table(title=title, box=None)
    for name in columns:
        shown.add_column(name, justify="right")
    for row in rows:
        shown.add_row(*row)
    return shown


def _name_files(paths: Sequence[Path]) -> None:
    out.print(f"Written: {', '.join(map(str, paths))}.", markup=False, soft_wrap=True)
