"""A file of requests and one of answers, in OpenAI's batch format, and how a line of one becomes a line of the other."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import InputError
from .app import CHAT, COMPLETIONS
from .replies import error_body
from .server import build, local_engine
from .settings import Settings

logger = logging.getLogger(__name__)

BEGINNING = '{"id": "batch_req_'
"""Of every line of the output."""
NO_LIMIT = 10**9
"""Of answers waiting, seconds and bytes: those limits are for servers, which many share."""


class BatchLine(BaseModel):
    """
    A line of the input.

    Args:
        custom_id (`str`): the user's name for it; none twice.
        method (`str`), url (`str`, *optional*): as of OpenAI's; without a url it is a chat where the body has messages.
        body (`dict`): of `/v1/chat/completions` or `/v1/completions`.
    """

    model_config = ConfigDict(extra="forbid")

    custom_id: str = Field(min_length=1)
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"] | None = None
    body: dict[str, Any]

    @property
    def path(self) -> str:
        """Where the body goes."""
        return self.url or (CHAT if "messages" in self.body else COMPLETIONS)


# --- files ----------------------------------------------------------------------------------------------------------


def read_requests(file: Path) -> dict[str, str]:
    """
    The lines of the input by their `custom_id`.

    Raises:
        InputError: a line is not one, or two have the same `custom_id`. The message names it.
    """
    lines: dict[str, str] = {}
    with file.open(encoding="utf-8") as opened:
        for number, text in enumerate(opened, start=1):
            if not text.strip():
                continue
            try:
                name = BatchLine.model_validate_json(text).custom_id
            except ValidationError as error:
                first = error.errors()[0]
                place = ".".join(map(str, first["loc"])) or "the line"
                raise InputError(
                    f"{file}, line {number}: {place}: {first['msg']}. Expected an object with custom_id and body."
                ) from error
            if name in lines:
                raise InputError(f"{file}, line {number}: custom_id {name!r} stands in a line before. Name each once.")
            lines[name] = text
    if not lines:
        raise InputError(f"{file} has no requests.")
    return lines


def read_done(file: Path) -> set[str]:
    """
    The requests that the output has answers to. A last line that was not written to its end is cut off.

    Raises:
        InputError: it is no such output.
    """
    if not file.exists():
        return set()
    with file.open("r+b") as opened:
        content = opened.read()
        whole = content.rfind(b"\n") + 1
        done = set()
        for number, line in enumerate(content[:whole].splitlines(), start=1):
            try:
                answer = json.loads(line)
                name, _ = answer["custom_id"], answer["response"]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file}, line {number} is not an answer of a batch. Give another output.") from error
            done.add(name)
        if whole < len(content):
            beginning = BEGINNING.encode()
            if not (beginning.startswith(content[whole:]) or content[whole:].startswith(beginning)):
                raise InputError(f"{file}: its last line is not an answer of a batch. Give another output.")
            logger.warning("%s: cut off a last line that was not whole; its request is done again.", file)
            opened.truncate(whole)
    return done


# --- answering ------------------------------------------------------------------------------------------------------


class Answerer:
    """
    A server without sockets: an engine, and the same application that `recguide serve` has before it.

    Args:
        settings (`Settings`): model and engine.
    """

    def __init__(self, settings: Settings) -> None:
        config = replace(
            settings.server_config(), max_waiting=NO_LIMIT, request_seconds=float(NO_LIMIT), max_body_bytes=NO_LIMIT
        )
        self._app = build(local_engine(*settings.load(), config.engine), config)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """Of Ray Data: a batch of lines, all at once."""
        return {"line": await asyncio.gather(*(self.answer(text) for text in batch["line"]))}

    async def answer(self, text: str) -> str:
        """The output's line for one of the input."""
        line = BatchLine.model_validate_json(text)
        if line.body.get("stream"):
            message = "stream=true cannot be honoured in a batch. Leave it out."
            status, body = 400, error_body(message, "invalid_request_error", "stream")
        else:
            status, body = await self._post(line.path, json.dumps(line.body).encode())
        answered = {
            # First, so that a line that was not written to its end is known as one.
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": {"status_code": status, "body": body},
            "error": None,
        }
        return json.dumps(answered, ensure_ascii=False)

    async def _post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])
        sent: list[MutableMapping[str, Any]] = []

        async def receive() -> dict[str, Any]:
            for message in messages:
                return message
            return await asyncio.Future()  # this client does not go

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (b"host", b"127.0.0.1"),
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
            "client": None,
            "server": None,
        }
        try:
            await self._app(scope, receive, send)
        except Exception:
            # One that was answered with a status is raised all the same, for a server's log.
            if not sent:
                raise
            logger.exception("A request failed")
        status = int(sent[0]["status"])
        return status, json.loads(b"".join(message.get("body", b"") for message in sent[1:]))
