"""`recguide eval`: checks of the claim that nothing but the speed changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ..adapter import ModelAdapter
from ..attention import resolve_backend
from ..errors import ConfigError, LosslessError
from ..files import whole
from ..loading import DTYPES, TINY, chat_ids, load, read_prompts
from ..tiny.tasks import FAMILIES, make_task
from .benchmark import OURS, environment
from .lossless import REFERENCE, Compared, LosslessTest, Run, Variant, variants, wrong
from .mistakes import readable_errors
from .options import DeviceOption, ModelOption, ThreadsOption, names, whole_numbers
from .unfinished import Unfinished

out = Console()
app = typer.Typer(no_args_is_help=True, help="Check that strategies change the speed and nothing else.")


@app.callback()
def group() -> None:
    """Check that strategies change the speed and nothing else."""


@app.command()
def lossless(
    model: ModelOption = TINY,
    prompts: Annotated[int, typer.Option(min=1, help="Of each suite, or the most of the file.")] = 5,
    prompts_file: Annotated[
        Path | None, typer.Option(help='JSONL with a "prompt" a line. By default the embedded suites.')
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed takes other prompts of the suites.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    strategies: Annotated[str, typer.Option(help=f"With commas: {', '.join(OURS)}.")] = ",".join(OURS),
    block_size: Annotated[str, typer.Option(help="Block sizes, with commas.")] = "8,16",
    batch_size: Annotated[str, typer.Option(help="Prompts decoded at once, with commas.")] = "1,4",
    dtypes: Annotated[
        str, typer.Option(help=f"With commas: {', '.join(DTYPES)}. Only in float32 must outputs be identical.")
    ] = "float32",
    max_gap: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Fail too where an output in half precision first parts at a larger gap of the top two logits.",
        ),
    ] = None,
    json_file: Annotated[Path, typer.Option("--json", help="Write all figures to this file.")] = Path("lossless.json"),
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """
    Compare every strategy's greedy output with that of transformers' own generate, token for token.

    In float32 a difference ends the command with exit code 1. In half precision a forward of many tokens rounds otherwise than one of one
    token; the report says how many outputs are identical, how near a tie the first difference of the others is, and how many tokens
    are the model's own choice when the output is read in one forward.

    Interrupted, it goes on where it was when started again.
    """
    with readable_errors():
        wanted = names(strategies, OURS, "--strategies")
        kinds = names(dtypes, tuple(DTYPES), "--dtypes")
        grid = variants(wanted, whole_numbers(block_size, "--block-size"), whole_numbers(batch_size, "--batch-size"))
        if prompts_file is not None and seed:
            raise ConfigError("--seed chooses prompts of the embedded suites; a file has its own. Leave one out.")
        texts = (
            read_prompts(prompts_file)[:prompts]
            if prompts_file is not None
            else [make_task(family, "test", seed * 10**6 + i).prompt for i in range(prompts) for family in FAMILIES]
        )
        if threads:
            torch.set_num_threads(threads)
        arguments = {
            "dtypes": kinds,
            "variants": [asdict(variant) for variant in grid],
            "prompts": len(texts),
            "prompts_hash": sha256(json.dumps(texts).encode()).hexdigest()[:16],
            "max_new_tokens": max_new_tokens,
        }
        loaded, tokenizer = load(model, kinds[0], device)
        first = ModelAdapter(loaded, resolve_backend()).fingerprint
        about = environment(model, loaded)
        runs: list[Run] = []
        with Unfinished(json_file.with_suffix(".unfinished.jsonl"), first, arguments) as unfinished:
            for kind in kinds:
                if kind != kinds[0]:
                    loaded, tokenizer = load(model, kind, device)
                ids = [chat_ids(tokenizer, text)[0].tolist() for text in texts]
                excluded = ModelAdapter(loaded, resolve_backend()).excluded_token_ids
                test = LosslessTest(loaded, ids, max_new_tokens, excluded)
                runs += _compared(test, kind, grid, unfinished)
            failures = wrong(runs, max_gap)
            settings = arguments | {"dtype": ", ".join(kinds), "seed": seed, "max_gap": max_gap}
            record = {"environment": about | settings, "failures": failures, "runs": [run.report() for run in runs]}
            with whole(json_file) as file:
                file.write_text(json.dumps(record, indent=1) + "\n")
        out.print(_summary(runs))
        if failures:
            raise LosslessError("; ".join(failures))


def _compared(test: LosslessTest, dtype: str, grid: Sequence[Variant], unfinished: Unfinished) -> list[Run]:
    """All variants in one dtype, plain decoding of single prompts first."""

    def step(variant: Variant, numbers: Sequence[int]) -> Any:
        name = f"{dtype}, {variant.label}, {variant.batch_size} at once, prompts {numbers[0]} to {numbers[-1]}"
        if name not in unfinished.done:
            outputs, metrics = test.decode(variant, numbers)
            compared = [
                asdict(test.compare(number, output, reference.get(number, output)))
                for number, output in zip(numbers, outputs, strict=True)
            ]
            result = {"compared": compared, "committed": metrics.committed_tokens, "forwards": metrics.decode_forwards}
            unfinished.add(name, result | ({"outputs": outputs} if variant == REFERENCE else {}))
        return unfinished.done[name]

    reference: dict[int, list[int]] = {}
    steps = [(variant, numbers) for variant in grid for numbers in test.parts(variant)]
    runs = {variant: Run(dtype, variant) for variant in grid}
    for variant, numbers in track(steps, dtype, console=Console(stderr=True)):
        result = step(variant, numbers)
        if variant == REFERENCE:
            reference |= zip(numbers, result["outputs"], strict=True)
        runs[variant].outputs += [Compared(**one) for one in result["compared"]]
        runs[variant].committed += result["committed"]
        runs[variant].forwards += result["forwards"]
    return list(runs.values())


def _summary(runs: Sequence[Run]) -> Table:
    table = Table(
        title="outputs beside those of transformers' generate, one prompt at a time; gaps in logits",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for name in ("dtype", "strategy", "at once", "identical", "agreement", "largest gap", "first gaps", "tok/fwd"):
        table.add_column(name, justify="left" if name in ("dtype", "strategy") else "right", no_wrap=True)
    for run in runs:
        figures = run.report()
        gaps = [one["top2_gap"] for one in run.divergences]
        table.add_row(
            run.dtype,
            run.variant.label,
            str(run.variant.batch_size),
            f"{figures['identical']} of {figures['prompts']}",
            f"{figures['agreement']:.2%}",
            f"{figures['largest_gap']:.3g}" if figures["largest_gap"] else "",
            f"{median(gaps):.3g} (to {max(gaps):.3g})" if gaps else "",
            f"{figures['decode_tpf']:.2f}" if figures["decode_tpf"] else "",
        )
    return table
