"""How engines are loaded and served, here and on machines of Ray's: plain values, by the names of `recguide serve`."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..engine import EngineConfig
from ..hf_strategy import resolve_config
from ..loading import TINY, load
from .server import ServerConfig


class Settings(BaseModel):
    """
    Options of `recguide serve`, and what an engine needs of its machine.

    Args:
        host (`str`): that the HTTP server listens on, which is told to it elsewhere; see [`ServerConfig`] for what depends on it.
        num_cpus, num_gpus (`float`): for each engine; by default one GPU where the device is not the CPU.
    """

    model_config = ConfigDict(extra="forbid")

    model: str = TINY
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    strategy: str = "auto"
    block_size: int | None = None
    policy: str | None = None
    tables: str | None = None
    max_requests: int = 32
    max_waiting: int = 128
    kv_mib: int = 256
    prefix_sharing: bool = False
    prefill_chunk: int = 512
    scheduler: str = "packed"
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    max_body_bytes: int = 1_000_000
    log_prompts: bool = False
    traces: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    attention_backend: str = "auto"
    compile: bool = False
    cuda_graphs: bool = False
    threads: Annotated[int, Field(ge=1)] | None = None
    trust_remote_code: bool = False
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] | None = None

    def server_config(self, api_key: str | None = None) -> ServerConfig:
        """
        How the server is run.

        Raises:
            ConfigError: an option's value is not allowed.
        """
        options = {"block_size": self.block_size, "policy": self.policy, "tables": self.tables}
        return ServerConfig(
            name=self.served_model_name or self.model,
            host=self.host,
            engine=EngineConfig(
                attention_backend=self.attention_backend,
                compile=self.compile,
                cuda_graphs=self.cuda_graphs,
                max_requests=self.max_requests,
                kv_bytes=self.kv_mib * 2**20,
                prefix_sharing=self.prefix_sharing,
                prefill_chunk=self.prefill_chunk,
                scheduler=self.scheduler,
            ),
            speculation=resolve_config(
                self.strategy, {name: value for name, value in options.items() if value is not None}
            ),
            max_waiting=self.max_waiting,
            request_seconds=self.request_seconds,
            drain_seconds=self.drain_seconds,
            api_key=api_key,
            max_body_bytes=self.max_body_bytes,
            log_prompts=self.log_prompts,
            traces=self.traces,
        )

    def load(self, tensor_parallel: bool = False) -> tuple[Any, Any]:
        """The model and its tokenizer, in the process that uses them; see [`~loading.load`]."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        return load(self.model, self.dtype, self.device, self.trust_remote_code, tensor_parallel)

    def actor_options(self) -> dict[str, float]:
        """What Ray reserves for one engine."""
        gpus = float(self.device != "cpu") if self.num_gpus is None else self.num_gpus
        return {"num_cpus": self.num_cpus, "num_gpus": gpus}
