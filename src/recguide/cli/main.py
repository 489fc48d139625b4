"""The command line: `recguide generate`, `quickstart`, `bench`, `train-tiny`, `doctor`."""

from __future__ import annotations

import json
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from transformers import TextStreamer

from ..config import STRATEGIES, RecGuideConfig
from ..errors import ConfigError, LosslessError, MissingDependencyError
from ..hf_strategy import resolve_config
from ..hooks import Hook
from ..metrics import DecodeMetrics
from ..tiny.examples import EXAMPLES
from ..tiny.tasks import FAMILIES, Task, make_task
from ..trace import TraceWriter
from . import benchmark
from .doctor import diagnose
from .loading import TINY, chat_ids, errors, load, readable_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=("One language model drafts and checks its own text: several times faster, not a letter changed."),
)
out = Console()

ModelOption = Annotated[str, typer.Option("--model", help=f"{TINY} (embedded), a directory, or a hub name.")]
DtypeOption = Annotated[
    str, typer.Option(help="float32, bfloat16 or float16. Equality with plain decoding holds in float32.")
]
DeviceOption = Annotated[str, typer.Option(help="As in device_map: cpu, cuda, auto.")]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The user's message; - reads it from standard input.")],
    model: ModelOption = TINY,
    strategy: Annotated[str, typer.Option(help=", ".join(STRATEGIES))] = "recguide",
    block_size: Annotated[int, typer.Option(help="Tokens verified a round.")] = 16,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy; above, tokens are sampled.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: all tokens.")] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Of sampling; the same seed gives the same text.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write every round to this JSONL file.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    trust_remote_code: Annotated[bool, typer.Option(help="Let the checkpoint's own code run.")] = False,
) -> None:
    """Answer one prompt, streaming."""
    with readable_errors():
        text = sys.stdin.read() if prompt == "-" else prompt
        config = resolve_config(strategy, {"block_size": block_size})
        sampled = _sampling(temperature, top_p, top_k, seed)
        loaded, tokenizer = load(model, dtype, device, trust_remote_code)
        metrics = DecodeMetrics()
        with ExitStack() as stack:
            hooks: list[Hook] = [metrics]
            if trace:
                header = {"model": model, "strategy": strategy, "block_size": block_size, "prompt": text}
                hooks.append(stack.enter_context(TraceWriter(trace, header)))
            start = time.perf_counter()
            _stream(loaded, tokenizer, text, max_new_tokens, config, hooks, **sampled)
        wall = time.perf_counter() - start
        out.print(
            f"[dim]{metrics.new_tokens} tokens in {wall:.2f} s, {metrics.decode_forwards} forwards after the prefill, "
            f"{metrics.decode_tpf:.2f} tokens per forward, {metrics.reuse_rate:.0%} of the rounds reused a branch.[/dim]"
        )


@app.command()
def quickstart(
    model: ModelOption = TINY,
    block_size: Annotated[int, typer.Option(help="Tokens verified a round.")] = 16,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
) -> None:
    """Answer a few prompts of three kinds, streaming, and compare plain AR, LinearSS and RecGuide."""
    with readable_errors():
        loaded, tokenizer = load(model, dtype, device)
        tasks = {family: [Task(family, "example", prompt, "", ())] for family, prompt in EXAMPLES.items()}
        for family, prompt in EXAMPLES.items():
            out.rule(f"[bold]{family}")
            out.print(f"{prompt}\n", style="cyan", markup=False, highlight=False)
            _stream(loaded, tokenizer, prompt, 256, resolve_config("recguide", {"block_size": block_size}), [])
        out.rule("[bold]the same prompts, three ways")
        entries = benchmark.contenders(("ar", "linear", "recguide"), (block_size,), tuple(EXAMPLES))
        benchmark.run(loaded, tokenizer, tasks, entries, max_new_tokens=256)
        benchmark.check(entries)
        out.print(_summary([entry.report() for entry in entries], accuracy=False))


@app.command()
def bench(
    strategies: Annotated[
        str, typer.Option(help=", ".join((*benchmark.OURS, *benchmark.OUTSIDE)))
    ] = "ar,linear,quadratic,recguide,hf-generate,hf-prompt-lookup",
    block_size: Annotated[str, typer.Option(help="One or several, with commas.")] = "16",
    suite: Annotated[str, typer.Option(help=", ".join(FAMILIES))] = ",".join(FAMILIES),
    split: Annotated[str, typer.Option(help="test (unseen seeds) or unseen (unseen templates).")] = "test",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each suite.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 288,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    model: ModelOption = TINY,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, help="torch threads; by default torch's own choice.")] = None,
) -> None:
    """
    Run strategies side by side, one request at a time, and check that outputs equal plain decoding.

    The code suite runs what the model writes, in a subprocess with limits of time, memory and files. That contains the
    accidents of a small model; it is no sandbox against a hostile one.
    """
    with readable_errors():
        suites = _names(suite, FAMILIES, "--suite")
        _names(split, ("test", "unseen"), "--split")
        sizes = [_integer(size) for size in block_size.split(",")]
        entries = benchmark.contenders([s.strip() for s in strategies.split(",")], sizes, suites)
        tasks = {name: [make_task(name, split, index) for index in range(prompts)] for name in suites}
        loaded, tokenizer = load(model, dtype, device)
        if threads:
            torch.set_num_threads(threads)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        errors.print(f"{len(entries)} runs of {prompts} prompts, side by side.", highlight=False)
        interrupted = False
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("bench", total=prompts * len(entries))
            try:
                benchmark.run(loaded, tokenizer, tasks, entries, max_new_tokens, lambda: progress.advance(bar))
            except KeyboardInterrupt:
                interrupted = True
        runs = [entry.report() for entry in entries if entry.prompts]
        if json_file:
            settings = {"split": split, "max_new_tokens": max_new_tokens, "interrupted": interrupted}
            record = {
                "environment": benchmark.environment(model, loaded) | settings,
                "model": model,
                "runs": runs,
                "ratios": benchmark.ratios(runs),
            }
            _write(json_file, record)
        if interrupted:
            out.print(
                f"[yellow]Interrupted.[/yellow] {sum(r['prompts'] for r in runs)} finished runs"
                + (f" are in {json_file}." if json_file else ".")
            )
            raise typer.Exit(130)
        try:
            benchmark.check(entries)
        except LosslessError as error:
            out.print(f"Not lossless: {error}", style="red", markup=False, soft_wrap=True)
            raise typer.Exit(1) from error
        out.print(_summary(runs, accuracy=True))
        for run in runs:
            if run["looping_share"] > 0.05:
                label = benchmark.label_of(run["strategy"], run["block_size"])
                out.print(
                    f"[yellow]{label} on {run['suite']}: {run['looping_share']:.0%} of the tokens are a repetition loop; "
                    "their speed says nothing of real text.[/yellow]"
                )
        for name, value in benchmark.ratios(runs).items():
            out.print(f"{name:<46} {value:5.2f}", highlight=False)


@app.command("train-tiny")
def train_tiny(
    output: Annotated[
        Path, typer.Option(help="Checkpoints, history and the finished model; an interrupted run goes on from here.")
    ] = Path("runs/tiny"),
    steps: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many steps of the recipe, for a trial.")
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="JSON file of a benchmark of the finished model: its figures go on the model's card."),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Train the embedded model by the committed recipe, or go on with that; write the model and its card."""
    with readable_errors():
        try:
            import reasoning_gym  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError('Training needs reasoning-gym: pip install "recguide[train]".') from error
        from ..tiny.card import write_card
        from ..tiny.train import Recipe, train

        if train(Recipe(), output, stop_after=steps, threads=threads):
            write_card(output / "history.jsonl", figures, output / "model")
            out.print(f"The model and its card are in {output / 'model'}.", markup=False)


@app.command()
def doctor() -> None:
    """Show versions, devices, and which attention backends can be used here, with the reason where not."""
    table = Table(show_header=False, box=None)
    for name, value in diagnose():
        table.add_row(f"[bold]{name}", value)
    out.print(table)


def _sampling(temperature: float, top_p: float, top_k: int, seed: int | None) -> dict[str, Any]:
    if temperature == 0.0:
        if given := [
            name
            for name, is_given in (("--top-p", top_p < 1), ("--top-k", top_k), ("--seed", seed is not None))
            if is_given
        ]:
            raise ConfigError(
                f"{', '.join(given)} without --temperature: greedy decoding does not sample. Give --temperature 1."
            )
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}


def _stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    max_new_tokens: int,
    config: RecGuideConfig,
    hooks: list[Hook],
    **sampled: Any,
) -> None:
    ids = chat_ids(tokenizer, prompt).to(model.device)
    model.generate(
        ids,
        attention_mask=ids.new_ones(ids.shape),
        max_new_tokens=max_new_tokens,
        **({"do_sample": False} | sampled),
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        generation_strategy=config.strategy,
        recguide_config=config,
        recguide_hooks=hooks,
    )


def _summary(runs: list[dict[str, Any]], accuracy: bool) -> Table:
    table = Table(title="decode figures leave the prefill out", box=None, padding=(0, 1, 0, 0))
    columns = ["suite", "strategy", "tok/fwd", "e2e", "tau", "reused", "query", "tok/s", "host", "equal"]
    for name in columns + (["accuracy"] if accuracy else []):
        table.add_column(name, justify="left" if name in ("suite", "strategy") else "right")
    for r in runs:
        queries = r["query_tokens_per_forward"]
        line = [
            r["suite"],
            benchmark.label_of(r["strategy"], r["block_size"]),
            f"{r['decode_tpf']:.2f}",
            f"{r['e2e_tpf']:.2f}",
            f"{r['tau']:.2f}",
            f"{r['reuse_rate']:.0%}",
            f"{queries.get('fused', queries.get('verify', 1.0)):.0f}",
            f"{r['tokens_per_s']:.0f}",
            "" if r["host_share"] is None else f"{r['host_share']:.0%}",
            "yes" if r["equal_to_ar"] else "NO",
        ]
        table.add_row(*line, *([f"{r['accuracy']:.0%}"] if accuracy else []))
    return table


def _names(text: str, known: tuple[str, ...], option: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{option} must be of {', '.join(known)}; got {', '.join(unknown)}.")
    return names


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(f"--block-size must be whole numbers with commas between; got {text!r}.") from error


def _write(path: Path, record: dict[str, Any]) -> None:
    """All of it or nothing: a reader never sees half a file."""
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
