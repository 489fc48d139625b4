"""The HTTP side: routes, errors, and replies that end when their client goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import Receive, Scope, Send

from .. import __version__
from ..config import RecGuideConfig
from ..errors import MissingDependencyError, RecGuideError
from .limits import ApiKey, BodyLimit
from .metrics import ServerMetrics
from .protocol import ChatRequest, CompletionRequest, ErrorBody, NotHonoured, Speculation
from .replies import Reply, error_body
from .request_log import RequestLog, no_span
from .service import ContextExceeded, Exchange, Overloaded, Piece, Service, ShuttingDown

logger = logging.getLogger(__name__)

CHAT, COMPLETIONS, MODELS, SPECULATION = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/models",
    "/recguide/speculation",
)
PATHS = frozenset({CHAT, COMPLETIONS, MODELS, SPECULATION, "/health", "/metrics", "/openapi.json"})


@dataclass(frozen=True)
class Access:
    """
    Who may ask, and what is written down.

    Args:
        api_key (`str`, *optional*): that every request but those for health and metrics must have.
        hosts (`tuple[str]`, *optional*): `Host` headers that are answered; all where it is None.
        max_body_bytes (`int`, defaults to 1,000,000): of a request.
        log_prompts (`bool`, defaults to `False`): write prompts into the log.
    """

    api_key: str | None = None
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 1_000_000
    log_prompts: bool = False


def create_app(
    service: Service,
    metrics: ServerMetrics,
    access: Access,
    span: Any = no_span,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """
    The application of a server.

    Args:
        service (`Service`): answers.
        metrics (`ServerMetrics`): of it.
        access (`Access`): who may ask.
        span (callable): see [`RequestLog`].
        lifespan (callable, *optional*): what goes on around the serving.
    """
    middleware = [Middleware(RequestLog, paths=PATHS, ended=metrics.http, span=span)]
    if access.hosts is not None:
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(access.hosts), www_redirect=False))
    if access.api_key is not None:
        middleware.append(Middleware(ApiKey, key=access.api_key))
    middleware.append(Middleware(BodyLimit, max_bytes=access.max_body_bytes))
    app = FastAPI(
        title="recguide",
        version=__version__,
        description="One model drafts and checks its own text. The API is OpenAI's; see docs/serving.md for what is beyond it.",
        middleware=middleware,
        lifespan=lifespan,
        # Those pages load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        responses={
            "4XX": {"model": ErrorBody, "description": "Refused, with the reason."},
            "5XX": {"model": ErrorBody, "description": "The server is shutting down, was too slow, or has failed."},
        },
    )
    _handle_errors(app)

    answers: dict[int | str, dict[str, Any]] = {
        200: {
            "description": "The answer; with `stream`, one event a round.",
            "content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}},
        }
    }

    @app.post(CHAT, response_class=Response, responses=answers)
    async def chat(body: ChatRequest) -> Response:
        """Answer a conversation."""
        return _Answering(service, metrics, access, body)

    @app.post(COMPLETIONS, response_class=Response, responses=answers)
    async def completions(body: CompletionRequest) -> Response:
        """Go on with prompts."""
        return _Answering(service, metrics, access, body)

    @app.get(MODELS)
    async def models() -> dict[str, Any]:
        """The model that is served."""
        return {"object": "list", "data": [_model(service)]}

    @app.get(MODELS + "/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """The model of that name."""
        _check_model(service, name)
        return _model(service)

    @app.get(SPECULATION)
    async def speculation() -> dict[str, Any]:
        """How requests are decoded that do not say."""
        return _shown(service.speculation)

    @app.put(SPECULATION)
    async def set_speculation(wanted: Speculation) -> dict[str, Any]:
        """Change that, for requests from now on. What is not named is as before, or by default where the strategy is another."""
        await asyncio.to_thread(service.set_speculation, wanted)
        return _shown(service.speculation)

    @app.get("/health", response_class=JSONResponse)
    async def health() -> Response:
        """200 while requests are taken, 503 once the server is shutting down."""
        return JSONResponse({"status": "draining"}, 503) if service.is_draining else JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        """Prometheus metrics."""
        return Response(await metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "recguide",
        "max_model_len": service.limits.context,
    }


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        raise _UnknownModel(f"The model {name!r} is not served here; {service.name!r} is.")


class _UnknownModel(Exception):
    pass


EXPECTED: tuple[type[Exception], ...] = (RecGuideError, Overloaded, _UnknownModel, TimeoutError)
"""What a request may end with without a fault of the server's."""


def _shown(config: RecGuideConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in Speculation.model_fields}


# --- errors ---------------------------------------------------------------------------------------------------------


def _refusal(error: Exception) -> JSONResponse:
    """What a request that cannot be answered gets."""
    match error:
        case Overloaded():
            status, kind, code = 429, "rate_limit_error", "queue_full"
            if isinstance(error, ShuttingDown):
                status, kind, code = 503, "service_unavailable", "draining"
            return JSONResponse(
                error_body(str(error), kind, code=code), status, headers={"retry-after": str(error.retry_after)}
            )
        case _UnknownModel():
            return JSONResponse(error_body(str(error), "invalid_request_error", "model", "model_not_found"), 404)
        case ContextExceeded():
            return JSONResponse(
                error_body(str(error), "invalid_request_error", error.field, "context_length_exceeded"), 400
            )
        case MissingDependencyError():
            return JSONResponse(error_body(str(error), "not_implemented_error"), 501)
        case RecGuideError():
            return JSONResponse(error_body(str(error), "invalid_request_error"), 400)
        case TimeoutError():
            return JSONResponse(error_body("The answer took longer than this server allows.", "timeout_error"), 504)
    logger.error("A request failed", exc_info=error)
    return JSONResponse(error_body("The server failed; its log says why.", "internal_server_error"), 500)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        # Where a value may be of several kinds each has its complaint; the one that got deepest is of the kind that was meant.
        first = max(error.errors(), key=lambda one: len(one["loc"]))
        cause = first.get("ctx", {}).get("error")
        if first["type"] == "json_invalid":
            return JSONResponse(error_body(f"The body is not JSON: {cause}", "invalid_request_error"), 400)
        field = cause.field if isinstance(cause, NotHonoured) else _field_at(first["loc"], error.body)
        reason = str(cause) if cause is not None else first["msg"]
        message = reason if isinstance(cause, NotHonoured) else f"{field or 'The body'}: {reason}"
        # The message may repeat what was sent, which stays out of the log.
        known = "" if first["type"] == "extra_forbidden" else f": {field}"
        request.scope["state"]["record"]["error"] = first["type"] + known
        return JSONResponse(error_body(message, "invalid_request_error", field, first["type"]), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            error_body(str(error.detail), "invalid_request_error"), error.status_code, headers=error.headers
        )

    for kind in (*EXPECTED, Exception):

        @app.exception_handler(kind)
        async def refused(request: Request, error: Exception) -> JSONResponse:
            return _refusal(error)


def _field_at(location: Sequence[str | int], body: Any) -> str | None:
    """The field that pydantic means, without the names of types that it puts between."""
    path: list[str] = []
    value = body
    for part in location:
        if part in range(len(value)) if isinstance(value, list) else isinstance(value, dict) and part in value:
            path.append(str(part))
            value = value[part]
    if isinstance(value, dict) and location[-1] != "body" and location[-1] not in path:
        path.append(str(location[-1]))  # it is missing
    return ".".join(path) or None


# --- answering ------------------------------------------------------------------------------------------------------


class _Answering(Response):
    """A request's answer, from its place in the queue to its last byte, so that whatever ends it gives the place back."""

    SEND_SECONDS = 10.0
    """Beyond the service's own limit, for a client that is slow to read."""

    def __init__(
        self, service: Service, metrics: ServerMetrics, access: Access, body: ChatRequest | CompletionRequest
    ) -> None:
        self._service, self._metrics, self._access, self._body = service, metrics, access, body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope["state"]["record"]
        limit = self._service.limits.seconds + self.SEND_SECONDS
        if not await _while_connected(receive, self._answer(record, scope, receive, send), limit):
            record["is_gone"] = True

    async def _answer(self, record: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        service, body = self._service, self._body
        deadline = asyncio.get_running_loop().time() + service.limits.seconds
        _check_model(service, body.model)
        prompts = 1 if isinstance(body, ChatRequest) else len(body.prompts)
        record |= {"model": body.model, "stream": bool(body.stream), "answers": prompts * (body.n or 1)}
        if body.user is not None:
            record["user"] = body.user
        if self._access.log_prompts:
            record["prompts"] = (
                [message.plain for message in body.messages] if isinstance(body, ChatRequest) else body.prompts
            )
        try:
            with service.place(record["answers"]):
                async with asyncio.timeout_at(deadline):
                    exchange = await asyncio.to_thread(service.exchange, body)
                record |= {"strategy": exchange.strategy, "prompt_tokens": exchange.prompt_tokens}
                self._metrics.prompts(exchange.prompt_tokens)
                try:
                    if (failure := await self._write(exchange, deadline, send)) is not None:
                        record["error"] = type(failure).__name__
                finally:
                    record |= _costs(exchange)
        except Exception as error:
            # Its message may repeat what was sent, which stays out of the log.
            record["error"] = type(error).__name__
            if isinstance(error, EXPECTED):
                raise
            # Here and not further out, where the request's id is no longer known.
            await _refusal(error)(scope, receive, send)

    async def _write(self, exchange: Exchange, deadline: float, send: Send) -> Exception | None:
        service, body = self._service, self._body
        reply = Reply(isinstance(body, ChatRequest), service.name, exchange, service.tokenizer)
        async with contextlib.aclosing(self._counted(exchange, deadline)) as pieces:
            if body.stream:
                return await _send_events(reply, pieces, body.include_usage, send)
            async for piece in pieces:
                reply.take(piece)
        await _send_json(send, 200, reply.body())
        return None

    async def _counted(self, exchange: Exchange, deadline: float) -> AsyncGenerator[Piece]:
        written = dict.fromkeys(range(len(exchange.requests)), 0)
        async with contextlib.aclosing(self._service.answers(exchange, deadline)) as pieces:
            async for piece in pieces:
                written[piece.index] += len(piece.tokens)
                self._metrics.tokens(len(piece.tokens))
                if piece.finish_reason is not None:
                    exchange.finish_reasons.append(piece.finish_reason)
                    figures = exchange.figures[piece.index]
                    self._metrics.answered(piece.finish_reason, figures, written[piece.index])
                yield piece


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None], seconds: float) -> bool:
    """Do the work unless the client goes or is too slow; whether it was done."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watcher}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return False
        task.result()
        return True
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _send_events(
    reply: Reply, pieces: AsyncGenerator[Piece], include_usage: bool, send: Send
) -> Exception | None:
    """Send a stream; what has ended it early, where something has."""
    # What cannot be answered is known with the first piece at the latest, and gets a status of its own.
    first = await anext(pieces)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for opening in reply.openings():
        await _send_event(send, opening)
    try:
        if (event := reply.event(first)) is not None:
            await _send_event(send, event)
        async for piece in pieces:
            if (event := reply.event(piece)) is not None:
                await _send_event(send, event)
        if include_usage:
            await _send_event(send, reply.usage_event())
        await _send_text(send, "data: [DONE]\n\n", more=False)
    except Exception as error:
        # The status is out; clients look for `error` in an event.
        await _send_text(send, f"data: {bytes(_refusal(error).body).decode()}\n\n", more=False)
        return error
    return None


async def _send_event(send: Send, event: dict[str, Any]) -> None:
    await _send_text(send, f"data: {json.dumps(event, separators=(',', ':'))}\n\n", more=True)


async def _send_text(send: Send, text: str, more: bool) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _send_json(send: Send, status: int, body: dict[str, Any]) -> None:
    await JSONResponse(body, status)({"type": "http"}, _no_message, send)


async def _no_message() -> Any:
    raise AssertionError("nothing more is read")


def _costs(exchange: Exchange) -> dict[str, Any]:
    """For the log."""
    costs: dict[str, Any] = {
        "completion_tokens": exchange.completion_tokens,
        "finish_reasons": exchange.finish_reasons,
    }
    if exchange.figures:
        for name in ("queue", "ttft", "e2e"):
            costs[f"{name}_s"] = round(exchange.longest(name), 4)
        costs |= {
            name: exchange.total(name) for name in ("rounds", "forwards", "reused", "drafted", "accepted", "preempted")
        }
    return costs
