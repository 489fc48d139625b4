"""A server in this process, with the embedded model, for clients that come over the wire."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import torch
import uvicorn

from recguide.engine import EngineConfig
from recguide.loading import TINY, load
from recguide.serving.server import ServerConfig, build, local_engine
from recguide.serving.service import Service


@dataclass
class Running:
    """A server that listens."""

    url: str
    service: Service
    model: Any
    tokenizer: Any
    http: uvicorn.Server

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.url + "/v1", **({"api_key": "none", "max_retries": 0, "timeout": 120} | options)
        )

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120, **options)

    def text(self, prompt_ids: list[int], **options: Any) -> str:
        """What `generate` writes."""
        ids = torch.tensor([prompt_ids])
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **({"do_sample": False} | options))
        text: str = self.tokenizer.decode(out[0, len(prompt_ids) :], skip_special_tokens=True)
        return text

    def settle(self, seconds: float = 60) -> None:
        """Wait until nobody is being answered, and the engine holds nothing."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            engine = self.engine.status()
            is_idle = self.service.under_way == engine.running == engine.waiting == 0
            # A request is logged and counted behind its last byte.
            if is_idle and engine.free_pages == engine.pages and not self.http.server_state.tasks:
                return
            time.sleep(0.02)
        raise AssertionError(f"Still under way after {seconds} s: {self.service.under_way} answers, {engine}.")

    @property
    def engine(self) -> Any:
        return self.service._source.engine  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def loaded() -> tuple[Any, Any]:
    return load(TINY, "float32", "cpu")


@contextlib.contextmanager
def _listening(loaded: tuple[Any, Any], **changes: Any) -> Iterator[Running]:
    config = ServerConfig(**({"name": TINY, "engine": EngineConfig(max_requests=8)} | changes))
    app = build(local_engine(*loaded, config.engine), config)
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False, timeout_graceful_shutdown=5))
    thread = threading.Thread(target=server.run, name="server", daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", app.state.service, *loaded, server)
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive(), "the server did not stop"


@pytest.fixture(scope="session")
def listening() -> Callable[..., Any]:
    """A server as a context, for fixtures that outlive a test."""
    return _listening


@pytest.fixture(scope="session")
def server(loaded: tuple[Any, Any]) -> Iterator[Running]:
    with _listening(loaded) as running:
        yield running


@pytest.fixture
def start(loaded: tuple[Any, Any]) -> Iterator[Callable[..., Running]]:
    """Starts servers with other settings; they stop with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda model=loaded[0], **changes: stack.enter_context(_listening((model, loaded[1]), **changes))
