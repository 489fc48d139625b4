"""One server, one process: a model, its engine, and HTTP before it."""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI

from ..config import RecGuideConfig
from ..engine import Engine, EngineConfig
from ..errors import ConfigError, MissingDependencyError
from .app import Access, create_app
from .metrics import EngineMetrics, ServerMetrics
from .observer import EngineObserver
from .request_log import no_span, opentelemetry_span
from .service import Limits, Service
from .tokens import LocalEngine

logger = logging.getLogger(__name__)

LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROUND_TOKENS = 256
"""KV slots that a request's rounds may need beyond its text: blocks of 64 with three branches."""


@dataclass(frozen=True)
class ServerConfig:
    """
    How a server is run.

    Args:
        name (`str`): the model's, as requests call it.
        host (`str`), port (`int`): to listen on; port 0 is a free one.
        engine (`EngineConfig`): sizes of the engine.
        speculation (`RecGuideConfig`): of requests that name none.
        max_waiting (`int`): answers that may wait for a place; whoever comes then gets 429.
        request_seconds (`float`): that a request may take.
        drain_seconds (`float`): that requests under way have when the server is told to stop.
        api_key (`str`, *optional*), max_body_bytes (`int`), log_prompts (`bool`): see [`Access`].
        traces (`bool`): OpenTelemetry spans, exported as the `OTEL_…` variables of the environment say.
    """

    name: str
    host: str = "127.0.0.1"
    port: int = 8000
    engine: EngineConfig = field(default_factory=EngineConfig)
    speculation: RecGuideConfig = field(default_factory=lambda: RecGuideConfig(strategy="auto"))
    max_waiting: int = 128
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    api_key: str | None = None
    max_body_bytes: int = 1_000_000
    log_prompts: bool = False
    traces: bool = False

    def __post_init__(self) -> None:
        if self.max_waiting < 0:
            raise ConfigError(f"max_waiting must be 0 or more; got {self.max_waiting!r}.")
        if self.max_body_bytes < 1:
            raise ConfigError(f"max_body_bytes must be 1 or more; got {self.max_body_bytes!r}.")
        for name in ("request_seconds", "drain_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0; got {getattr(self, name)!r}.")
        if self.api_key is not None and len(self.api_key) < 16:
            raise ConfigError("The API key must have 16 characters or more; a short one can be guessed.")
        if self.api_key is None and not self.is_local:
            raise ConfigError(
                f"host={self.host} lets others in, so requests must have a key: set RECGUIDE_API_KEY, or give --api-key-file."
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in LOOPBACK or self.host.startswith("127.")


def sampling_of(model: Any) -> dict[str, Any]:
    """Sampling of requests that say nothing: as the model's generation config has it where it samples, else as of OpenAI's API."""
    usual = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None}
    config = model.generation_config
    if not config.do_sample:
        return usual
    return {name: value if (own := getattr(config, name, None)) is None else own for name, value in usual.items()}


def context_of(model: Any, engine: Engine) -> int:
    """Tokens that prompt and answer may have together: what the model and the engine's pages both hold."""
    slots = engine.status().pages * engine.config.page_size - ROUND_TOKENS
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    context = slots if longest is None else min(slots, longest)
    if context < 2:
        raise ConfigError(f"The engine's KV pages hold no request: {engine.config.kv_bytes} bytes. Raise kv_bytes.")
    if context == slots and longest is not None:
        logger.warning("Requests may have %d tokens; the model's %d would need more kv_bytes.", slots, longest)
    return context


def local_engine(model: Any, tokenizer: Any, config: EngineConfig) -> LocalEngine:
    """
    An engine that is watched.

    Args:
        model, tokenizer: an attached model and its tokenizer.
        config (`EngineConfig`): its sizes.
    """
    observer = EngineObserver()
    return LocalEngine(Engine(model, config, [observer]), observer, tokenizer)


def build(local: LocalEngine, config: ServerConfig) -> FastAPI:
    """
    The application of one process; it closes the engine when it ends.

    Args:
        local (`LocalEngine`): of `config.engine`'s sizes.
        config (`ServerConfig`): limits and access.
    """
    engine, model = local.engine, local.engine.model
    limits = Limits(config.engine.max_requests, config.max_waiting, config.request_seconds, context_of(model, engine))
    service = Service(config.name, local.tokenizer, local, limits, sampling_of(model), config.speculation, engine.check)
    engine.check(config.speculation)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        # uvicorn has let the requests under way end, for as long as it may; whoever is left is cancelled.
        engine.close()

    app = application(service, ServerMetrics(service, EngineMetrics(service.name, local)), config, lifespan)
    app.state.service = service
    return app


def application(
    service: Service,
    metrics: ServerMetrics,
    config: ServerConfig,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """
    HTTP before a service, with the access that its configuration gives.

    Args:
        service (`Service`): answers.
        metrics (`ServerMetrics`): of it.
        config (`ServerConfig`): its access and traces.
        lifespan (callable, *optional*): what goes on around the serving.
    """
    # Without a key, a page in the user's browser could reach the server under a name of its own that points here.
    hosts = (*LOOPBACK, "[::1]", config.host) if config.api_key is None else None
    access = Access(config.api_key, hosts, config.max_body_bytes, config.log_prompts)
    return create_app(service, metrics, access, _tracer_span() if config.traces else no_span, lifespan)


def _tracer_span() -> Any:
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingDependencyError('Traces need OpenTelemetry: pip install "recguide[otel]".') from error
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return opentelemetry_span(provider.get_tracer("recguide"))


class _Server(uvicorn.Server):
    """uvicorn's, that tells the service when it starts to shut down."""

    def __init__(self, config: uvicorn.Config, service: Service, host: str) -> None:
        super().__init__(config)
        self._service, self._host = service, host

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """To be told to stop is no failure: uvicorn's own would raise the signal again in the end."""
        before = {kind: signal.signal(kind, self.handle_exit) for kind in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            shown = f"[{self._host}]" if ":" in self._host else self._host
            logger.info("Serving %s at http://%s:%d/v1", self._service.name, shown, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.is_draining = True
        logger.info("Stopping; %d answers under way.", self._service.under_way)
        await super().shutdown(sockets)


def serve(model: Any, tokenizer: Any, config: ServerConfig) -> None:
    """
    Serve until SIGINT or SIGTERM; then end what is under way, and return.

    Args:
        model, tokenizer: an attached model and its tokenizer.
        config (`ServerConfig`): sizes, limits and access.
    """
    local = local_engine(model, tokenizer, config.engine)
    if not local.engine.leads:
        # The rank that has the requests ends them, and then this one.
        for kind in (signal.SIGINT, signal.SIGTERM):
            signal.signal(kind, signal.SIG_IGN)
        local.engine.follow()
        return
    app = build(local, config)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=math.ceil(config.drain_seconds),
    )
    _Server(settings, app.state.service, config.host).run()
