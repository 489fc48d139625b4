"""The command line: `recguide` and its commands."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers import TextStreamer

from ..config import STRATEGIES, RecGuideConfig
from ..engine.scheduler import SCHEDULERS
from ..errors import ConfigError, MissingDependencyError
from ..files import whole
from ..hf_strategy import resolve_config
from ..hooks import Hook
from ..loading import TINY, chat_ids, load
from ..metrics import DecodeMetrics
from ..pictures import check_installed
from ..progress import counted
from ..tiny.examples import EXAMPLES
from ..tiny.tasks import FAMILIES, Task, make_task
from ..trace import TraceWriter
from . import benchmark, evaluation, load_benchmark
from .batch import batch
from .calibration import calibrate, profile
from .doctor import diagnose
from .mistakes import errors, readable_errors
from .options import (
    BackendOption,
    CompileOption,
    DeviceOption,
    DtypeOption,
    GraphsOption,
    ModelOption,
    ThreadsOption,
    names,
    whole_numbers,
)
from .serve import serve
from .simulate import simulate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help=("One language model drafts and checks its own text: several times faster, not a letter changed."),
)
out = Console()


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
    attention_backend: BackendOption = "auto",
    compiled: CompileOption = False,
    cuda_graphs: GraphsOption = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Let the checkpoint's own code run.")] = False,
) -> None:
    """Answer one prompt, streaming."""
    with readable_errors():
        text = sys.stdin.read() if prompt == "-" else prompt
        forwards = {"attention_backend": attention_backend, "compile": compiled, "cuda_graphs": cuda_graphs}
        config = resolve_config(strategy, {"block_size": block_size} | forwards)
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
        str | None,
        typer.Option(help=f"{', '.join((*benchmark.OURS, *benchmark.OUTSIDE))}; by default all that the mode knows."),
    ] = None,
    block_size: Annotated[str, typer.Option(help="One or several, with commas.")] = "16",
    suite: Annotated[str, typer.Option(help=", ".join(FAMILIES))] = ",".join(FAMILIES),
    split: Annotated[str, typer.Option(help="test (unseen seeds) or unseen (unseen templates).")] = "test",
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of each suite.")] = 20,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 288,
    concurrency: Annotated[
        str | None,
        typer.Option(help="Requests under way, with commas, such as 1,2,4,8: measure the engine under load."),
    ] = None,
    policies: Annotated[
        str | None, typer.Option(help=f"Under load: {', '.join(load_benchmark.POLICIES)}; by default fixed.")
    ] = None,
    schedulers: Annotated[
        str | None, typer.Option(help=f"Under load: {', '.join(SCHEDULERS)}; by default packed.")
    ] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Under load: write all figures to this table.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="Under load: draw tokens a second, of all over each request's, to this PNG file."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
    model: ModelOption = TINY,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """
    Run strategies side by side, and check that outputs equal plain decoding.

    One request at a time; or, with --concurrency, in the engine, where each request that ends makes room for the next one.

    The code suite runs what the model writes, in a subprocess with limits of time, memory and files. That contains the
    accidents of a small model; it is no sandbox against a hostile one. Under load nothing is run, since nothing is scored.
    """
    with readable_errors():
        suites = names(suite, FAMILIES, "--suite")
        names(split, ("test", "unseen"), "--split")
        sizes = whole_numbers(block_size, "--block-size")
        chosen = None if strategies is None else [name.strip() for name in strategies.split(",")]
        test: load_benchmark.LoadTest | None = None
        entries: list[benchmark.Contender] = []
        if concurrency is None:
            under_load = {"--policies": policies, "--schedulers": schedulers, "--csv": csv_file, "--plot": plot}
            if given := [option for option, value in under_load.items() if value is not None]:
                raise ConfigError(
                    f"{', '.join(given)} without --concurrency: give that too, such as --concurrency 1,4,16."
                )
            entries = benchmark.contenders(chosen or (*benchmark.OURS, *benchmark.OUTSIDE), sizes, suites)
        else:
            contenders = load_benchmark.contenders(
                chosen or benchmark.OURS,
                sizes,
                names(policies or "fixed", load_benchmark.POLICIES, "--policies"),
                names(schedulers or "packed", tuple(SCHEDULERS), "--schedulers"),
            )
            test = load_benchmark.LoadTest(contenders, whole_numbers(concurrency, "--concurrency"), max_new_tokens)
        tasks = {name: [make_task(name, split, index) for index in range(prompts)] for name in suites}
        loaded, tokenizer = load(model, dtype, device)
        if threads:
            torch.set_num_threads(threads)
        settings = {"suites": suites, "split": split, "max_new_tokens": max_new_tokens}
        record = {"environment": benchmark.environment(model, loaded) | settings, "model": model}
        if test is None:
            _bench_alone(loaded, tokenizer, tasks, entries, max_new_tokens, record, json_file)
        else:
            # The suites in turn, so that every part of the load has some of each.
            mixed = [task for one_of_each in zip(*tasks.values(), strict=True) for task in one_of_each]
            ids = [tuple(chat_ids(tokenizer, task.prompt)[0].tolist()) for task in mixed]
            _bench_under_load(loaded, ids, test, record, json_file, csv_file, plot)


def _bench_alone(
    loaded: Any,
    tokenizer: Any,
    tasks: dict[str, list[Task]],
    entries: list[benchmark.Contender],
    max_new_tokens: int,
    record: dict[str, Any],
    json_file: Path | None,
) -> None:
    prompts = len(next(iter(tasks.values())))
    errors.print(f"{len(entries)} runs of {prompts} prompts, side by side.", highlight=False)
    interrupted = _with_bar(
        prompts * len(entries),
        lambda advance: benchmark.run(loaded, tokenizer, tasks, entries, max_new_tokens, advance),
    )
    runs = [entry.report() for entry in entries if entry.prompts]
    _write_record(json_file, record, runs, benchmark.ratios(runs), interrupted)
    if interrupted:
        _end_interrupted(sum(run["prompts"] for run in runs), json_file)
    benchmark.check(entries)
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


def _bench_under_load(
    loaded: Any,
    prompts: list[load_benchmark.Prompt],
    test: load_benchmark.LoadTest,
    record: dict[str, Any],
    json_file: Path | None,
    csv_file: Path | None,
    plot: Path | None,
) -> None:
    if plot:
        # What is missing is said before the hours of measuring, not after.
        check_installed("train")
    finished: list[load_benchmark.LoadRun] = []

    def measure(advance: Callable[[], None]) -> None:
        for run in test.run(loaded, prompts, advance):
            finished.append(run)

    errors.print(f"{len(test.contenders)} contenders at {len(test.loads)} loads, in turn.", highlight=False)
    interrupted = _with_bar(test.steps(prompts), measure)
    runs = [run.report() for run in finished]
    ratios = load_benchmark.ratios(runs)
    _write_record(json_file, record, runs, ratios, interrupted)
    if csv_file and runs:
        with whole(csv_file) as file:
            file.write_text(load_benchmark.table(runs))
    if plot and runs:
        with whole(plot) as file:
            load_benchmark.draw(runs, file)
    if interrupted:
        _end_interrupted(len(runs), json_file)
    load_benchmark.check(finished)
    out.print(_load_summary(runs))
    for run in runs:
        if run["different"]:
            out.print(
                f"[yellow]{run['contender']} at load {run['concurrency']}: {run['different']} of {run['prompts']} outputs differ "
                f"from plain decoding, which only float32 rules out.[/yellow]"
            )
        if run["preempted"]:
            out.print(
                f"[yellow]{run['contender']} at load {run['concurrency']}: the KV pages did not suffice, and {run['preempted']} "
                "times a request was computed again.[/yellow]"
            )
    for name, value in ratios.items():
        if name.endswith("mean over loads"):
            out.print(f"{name:<60} {value:5.2f}", highlight=False)


def _with_bar(steps: int, work: Callable[[Callable[[], None]], None]) -> bool:
    """Do `work`, which calls its argument at each step; whether SIGINT or SIGTERM has ended it early."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with counted(Console(stderr=True)) as progress:
        bar = progress.add_task("bench", total=steps)
        try:
            work(lambda: progress.advance(bar))
        except KeyboardInterrupt:
            return True
    return False


def _end_interrupted(finished: int, json_file: Path | None) -> NoReturn:
    where = f" are in {json_file}." if json_file else "."
    out.print(f"[yellow]Interrupted.[/yellow] {finished} finished runs{where}")
    raise typer.Exit(130)


@app.command()
def demo(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help=f"Models that the page offers: {TINY} (embedded), directories, or hub names; the first is chosen. None: {TINY}.",
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, without a password.")
    ] = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default the first free one from 7860.")] = None,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    threads: ThreadsOption = None,
) -> None:
    """Show in a browser how tokens and branches come about (extra: demo)."""
    with readable_errors():
        offered = list(dict.fromkeys(models or [TINY]))
        if threads:
            torch.set_num_threads(threads)
        from ..demo import start

        start({name: partial(load, name, dtype, device) for name in offered}, host, port)


app.command()(profile)
app.command()(calibrate)
app.command()(simulate)
app.command()(serve)
app.command()(batch)
app.add_typer(evaluation.app, name="eval")


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
    threads: ThreadsOption = None,
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
        table.add_row(f"[bold]{name}", escape(value))
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


def _load_summary(runs: list[dict[str, Any]]) -> Table:
    table = Table(
        title="TTFT (median, p95) and TPOT (median) in ms; the longest wait in rounds", box=None, padding=(0, 1, 0, 0)
    )
    columns = ["load", "contender", "tok/s", "each", "TTFT", "p95", "TPOT", "occupancy", "wait", "blocks", "equal"]
    for name in columns:
        is_text = name in ("contender", "blocks")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=name == "contender")
    for before, r in zip([runs[0], *runs], runs, strict=False):
        if before["concurrency"] != r["concurrency"]:
            table.add_row()
        table.add_row(
            str(r["concurrency"]),
            r["contender"],
            f"{r['tokens_per_s']:.0f}",
            f"{r['per_request_tokens_per_s']:.0f}",
            f"{r['p50_ttft_ms']:.0f}",
            f"{r['p95_ttft_ms']:.0f}",
            f"{r['p50_tpot_ms']:.1f}",
            f"{r['bucket_occupancy']:.1f}",
            str(r["bucket_wait"]["max"]),
            " ".join(f"{size}: {share:.0%}" for size, share in r["block_share"].items()),
            "yes" if r["equal_to_ar"] else "NO",
        )
    return table


def _write_record(
    path: Path | None, record: dict[str, Any], runs: list[dict[str, Any]], ratios: dict[str, float], interrupted: bool
) -> None:
    if path is None:
        return
    environment = record["environment"] | {"interrupted": interrupted}
    with whole(path) as file:
        file.write_text(
            json.dumps(record | {"environment": environment, "runs": runs, "ratios": ratios}, indent=1) + "\n"
        )
