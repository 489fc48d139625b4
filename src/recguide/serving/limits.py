"""What is sent away before anything looks at it: bodies that are too long or too slow, wrong keys, foreign host names."""

from __future__ import annotations

import asyncio
import hmac

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .replies import error_body

BODY_SECONDS = 30.0
"""A body must have come by then."""


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class BodyLimit:
    """
    Reads a request's body before the application does, up to a size and for a time.

    Args:
        app: what it wraps.
        max_bytes (`int`): of a body.
        seconds (`float`): until it is there.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float = BODY_SECONDS) -> None:
        self._app, self._max_bytes, self._seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(Headers(scope=scope), receive)
        except _Refused as refused:
            reply = JSONResponse(
                error_body(str(refused), "invalid_request_error", code=refused.code),
                refused.status,
                # What is still on its way is not read.
                headers={"connection": "close"},
            )
            await reply(scope, receive, send)
            return
        if body is None:
            scope["state"]["record"]["is_gone"] = True
            return
        given = False

        async def receive_read() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, receive_read, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None where the client has gone."""
        too_long = _Refused(
            413, f"The body is longer than the {self._max_bytes} bytes that this server reads.", "request_too_large"
        )
        if (length := headers.get("content-length", "")).isdigit() and int(length) > self._max_bytes:
            raise too_long
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self._max_bytes:
                        raise too_long
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise _Refused(408, f"The body had not come after {self._seconds:g} s.", "request_timeout") from None


class ApiKey:
    """
    Lets only those through who send the key as a bearer token; `/health` and `/metrics` are open.

    Args:
        app: what it wraps.
        key (`str`): compared in constant time.
    """

    OPEN = frozenset({"/health", "/metrics"})

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self.OPEN:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self._key):
                reply = JSONResponse(
                    error_body(
                        "The API key is missing or wrong. Send it as: Authorization: Bearer KEY.",
                        "authentication_error",
                        code="invalid_api_key",
                    ),
                    401,
                    headers={"www-authenticate": "Bearer", "connection": "close"},
                )
                await reply(scope, receive, send)
                return
        await self._app(scope, receive, send)
