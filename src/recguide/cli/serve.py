"""`recguide serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..config import STRATEGIES
from ..engine.scheduler import SCHEDULERS
from ..errors import ConfigError, MissingDependencyError
from ..loading import TINY
from .mistakes import readable_errors
from .options import BackendOption, CompileOption, DeviceOption, DtypeOption, GraphsOption, ThreadsOption


def serve(
    model: Annotated[str, typer.Argument(help=f"{TINY} (embedded), a directory, or a hub name.")] = TINY,
    served_model_name: Annotated[
        str | None, typer.Option(help="As requests call it; by default as it is named here.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in, with a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one; the log says which.")] = 8000,
    strategy: Annotated[str, typer.Option(help=f"Of requests that name none: {', '.join(STRATEGIES)}.")] = "auto",
    block_size: Annotated[int | None, typer.Option(help="Likewise; not with auto, which decides by itself.")] = None,
    policy: Annotated[str | None, typer.Option(help="Block policy, likewise.")] = None,
    tables: Annotated[
        str | None, typer.Option(help="Directory that `recguide profile` and `calibrate` have written.")
    ] = None,
    max_requests: Annotated[int, typer.Option(min=1, help="Answers written at once.")] = 32,
    max_waiting: Annotated[int, typer.Option(min=0, help="Answers that may wait; whoever comes then gets 429.")] = 128,
    kv_mib: Annotated[int, typer.Option(min=1, help="Memory of the KV pages, in MiB.")] = 256,
    prefix_sharing: Annotated[bool, typer.Option("--prefix-sharing", help="Equal beginnings share KV pages.")] = False,
    prefill_chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens a step.")] = 512,
    scheduler: Annotated[str, typer.Option(help=", ".join(SCHEDULERS))] = "packed",
    request_seconds: Annotated[float, typer.Option(help="That a request may take, waiting included.")] = 600.0,
    drain_seconds: Annotated[float, typer.Option(help="That requests have to end after SIGTERM.")] = 30.0,
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request; a longer one gets 413.")] = 1_000_000,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File whose first line is the key that requests must have; or set RECGUIDE_API_KEY."),
    ] = None,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log.")] = False,
    traces: Annotated[
        bool, typer.Option("--traces", help="OpenTelemetry spans (extra: otel), as OTEL_… variables say.")
    ] = False,
    dtype: DtypeOption = "float32",
    device: DeviceOption = "cpu",
    attention_backend: BackendOption = "auto",
    compiled: CompileOption = False,
    cuda_graphs: GraphsOption = False,
    threads: ThreadsOption = None,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel", help="Split the model over the processes of torchrun; see docs/tensor-parallel.md."
        ),
    ] = False,
    trust_remote_code: Annotated[bool, typer.Option(help="Let the checkpoint's own code run.")] = False,
) -> None:
    """Serve a model to clients of OpenAI's API (extra: serve). Logs one line of JSON a request to standard error."""
    with readable_errors():
        try:
            import fastapi  # noqa: F401
            import prometheus_client  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError('Serving needs more packages: pip install "recguide[serve]".') from error
        from ..serving import server
        from ..serving.settings import Settings

        logging.basicConfig(stream=sys.stderr, format="%(message)s")
        logging.getLogger("recguide").setLevel(logging.INFO)
        api_key = os.environ.get("RECGUIDE_API_KEY", "").strip() or None
        if api_key_file is not None:
            if api_key is not None:
                raise ConfigError("--api-key-file and RECGUIDE_API_KEY were both given; a server has one key.")
            lines = api_key_file.read_text().splitlines()
            if not lines:
                raise ConfigError(f"{api_key_file} is empty; expected the API key in its first line.")
            api_key = lines[0].strip()
        settings = Settings(
            model=model,
            served_model_name=served_model_name,
            host=host,
            strategy=strategy,
            block_size=block_size,
            policy=policy,
            tables=tables,
            max_requests=max_requests,
            max_waiting=max_waiting,
            kv_mib=kv_mib,
            prefix_sharing=prefix_sharing,
            prefill_chunk=prefill_chunk,
            scheduler=scheduler,
            request_seconds=request_seconds,
            drain_seconds=drain_seconds,
            max_body_bytes=max_body_bytes,
            log_prompts=log_prompts,
            traces=traces,
            dtype=dtype,
            device=device,
            attention_backend=attention_backend,
            compile=compiled,
            cuda_graphs=cuda_graphs,
            threads=threads,
            trust_remote_code=trust_remote_code,
        )
        config = replace(settings.server_config(api_key), port=port)
        server.serve(*settings.load(tensor_parallel), config)
