"""`recguide batch`: a file of requests, answered."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..config import STRATEGIES
from ..errors import MissingDependencyError
from ..loading import TINY
from ..progress import counted
from .mistakes import readable_errors
from .options import BackendOption, CompileOption, DeviceOption, DtypeOption, GraphsOption, ModelOption, ThreadsOption

out = Console()


def batch(
    source: Annotated[Path, typer.Argument(metavar="IN", help="JSONL in OpenAI's batch format.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="JSONL of answers; what it has already is not done again.")
    ],
    model: ModelOption = TINY,
    served_model_name: Annotated[
        str | None, typer.Option(help="As requests call it; by default as it is named here.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, help="Engines, each in a process of its own.")] = 1,
    strategy: Annotated[str, typer.Option(help=f"Of requests that name none: {', '.join(STRATEGIES)}.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Likewise; not with auto, which decides by itself.")] = None,
    policy: Annotated[str | None, typer.Option(help="Block policy, likewise.")] = None,
    tables: Annotated[
        str | None, typer.Option(help="Directory that `recguide profile` and `calibrate` have written.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Answers that an engine writes at once.")] = 32,
    kv_mib: Annotated[int, typer.Option(min=1, help="Memory of an engine's KV pages, in MiB.")] = 256,
    prefix_sharing: Annotated[bool, typer.Option("--prefix-sharing", help="Equal beginnings share KV pages.")] = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    attention_backend: BackendOption = "auto",
    compiled: CompileOption = False,
    cuda_graphs: GraphsOption = False,
    threads: ThreadsOption = None,
    num_cpus: Annotated[float, typer.Option(min=0, help="CPUs that Ray reserves for an engine.")] = 1.0,
    num_gpus: Annotated[
        float | None, typer.Option(min=0, help="GPUs likewise; by default one where the device is not the CPU.")
    ] = None,
    trust_remote_code: Annotated[bool, typer.Option(help="Let the checkpoint's own code run.")] = False,
) -> None:
    """
    Answer a file of requests with one engine or several (extra: ray).

    The same command again goes on where it was stopped. RAY_ADDRESS names a cluster; without it, Ray runs on this machine meanwhile.
    """
    with readable_errors():
        # Ray reads it when it is imported: what runs here is nobody else's business, unless the user says so.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray.data  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError('Batches need more packages: pip install "recguide[ray]".') from error
        from ..serving.ray_batch import BatchReport, run
        from ..serving.settings import Settings

        settings = Settings(
            model=model,
            served_model_name=served_model_name,
            strategy=strategy,
            block_size=block_size,
            policy=policy,
            tables=tables,
            max_requests=max_requests,
            kv_mib=kv_mib,
            prefix_sharing=prefix_sharing,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            compile=compiled,
            cuda_graphs=cuda_graphs,
            threads=threads,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            trust_remote_code=trust_remote_code,
        )
        report = BatchReport()
        try:
            with counted(out) as progress:
                bar = progress.add_task("requests", total=None)
                for report in run(source, target, settings, replicas):
                    done = report.before + report.answered + report.refused
                    progress.update(bar, total=report.lines, completed=done)
        except KeyboardInterrupt:
            out.print("Stopped. The same command goes on.")
            raise typer.Exit(130) from None
        finally:
            if report.lines:
                out.print(
                    f"{report.answered} answered, {report.refused} with an error, {report.before} were there before.",
                    highlight=False,
                )
