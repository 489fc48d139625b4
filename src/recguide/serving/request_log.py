"""One line of JSON for each request, whatever became of it; and, if wanted, an OpenTelemetry span."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("recguide.requests")
GONE = 499
"""Status of a request whose client had gone before it was answered; nginx's number."""

QUIET = frozenset({"/health", "/metrics"})
LONGEST_PATH = 200
"""Characters of a path that are written down."""
_SAFE_ID = re.compile(r"[\w.-]{1,64}")


class RequestLog:
    """
    Outermost middleware: gives each request an id (`x-request-id`, the client's own where it has one), and logs its end.

    Whatever handles the request puts what it knows into `scope["state"]["record"]`.

    Args:
        app: what it wraps.
        paths (`frozenset[str]`): those with counts of their own.
        ended (callable): told of path and status of each request.
        span (callable): a context around each request, given method, path and headers; yields what attributes are handed to.
    """

    def __init__(
        self,
        app: ASGIApp,
        paths: frozenset[str],
        ended: Callable[[str, int], None],
        span: Callable[[str, str, dict[str, str]], contextlib.AbstractContextManager[Callable[[dict[str, Any]], None]]],
    ) -> None:
        self._app, self._paths, self._ended, self._span = app, paths, ended, span

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        request_id = given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex
        record: dict[str, Any] = {
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"][:LONGEST_PATH],
        }
        scope.setdefault("state", {})["record"] = record
        began, status = time.perf_counter(), GONE

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        with self._span(scope["method"], scope["path"], headers) as tell:
            try:
                await self._app(scope, receive, send_and_note)
            except Exception:
                status = 500 if status == GONE else status
                raise
            finally:
                if record.pop("is_gone", False):
                    status = GONE
                record |= {"status": status, "seconds": round(time.perf_counter() - began, 4)}
                self._ended(scope["path"] if scope["path"] in self._paths else "other", status)
                tell(record)
                # Probes and scrapes come every few seconds and say nothing.
                level = logging.DEBUG if scope["path"] in QUIET and status == 200 else logging.INFO
                logger.log(level, "%s", json.dumps(record, ensure_ascii=False))


@contextlib.contextmanager
def no_span(method: str, path: str, headers: dict[str, str]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Where no spans are wanted."""
    yield lambda record: None


def opentelemetry_span(
    tracer: Any,
) -> Callable[[str, str, dict[str, str]], contextlib.AbstractContextManager[Callable[[dict[str, Any]], None]]]:
    """
    Spans of a tracer; a `traceparent` header makes a request's span the child of its caller's.

    Attributes have the names of OpenTelemetry's semantic conventions for HTTP and generative AI, and `recguide.` before the others.
    """
    from opentelemetry import propagate, trace

    names = {
        "method": "http.request.method",
        "path": "url.path",
        "status": "http.response.status_code",
        "model": "gen_ai.request.model",
        "prompt_tokens": "gen_ai.usage.input_tokens",
        "completion_tokens": "gen_ai.usage.output_tokens",
        "finish_reasons": "gen_ai.response.finish_reasons",
    }

    @contextlib.contextmanager
    def span(method: str, path: str, headers: dict[str, str]) -> Iterator[Callable[[dict[str, Any]], None]]:
        with tracer.start_as_current_span(
            f"{method} {path[:LONGEST_PATH]}",
            context=propagate.extract(headers),
            kind=trace.SpanKind.SERVER,
            # Its message may repeat what was sent.
            record_exception=False,
            set_status_on_exception=False,
        ) as current:

            def tell(record: dict[str, Any]) -> None:
                # Prompts stay out of traces, also where the log has them.
                known = {name: value for name, value in record.items() if value is not None and name != "prompts"}
                current.set_attributes({names.get(name, f"recguide.{name}"): value for name, value in known.items()})
                if record["status"] >= 500:
                    current.set_status(trace.StatusCode.ERROR, record.get("error"))

            yield tell

    return span
