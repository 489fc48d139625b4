"""Rounds on disk: one JSON object a line, written as they happen and read back as the same records."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import InputError
from .hooks import Hook
from .structs import (
    Branch,
    BranchKind,
    BranchRecord,
    Draft,
    DraftSource,
    FinishRecord,
    ForwardRecord,
    Guess,
    Outcome,
    RoundRecord,
)

VERSION = 1
Record = ForwardRecord | RoundRecord | FinishRecord


class TraceWriter(Hook):
    """
    Writes every event to a JSONL file; a context manager. What is written stays readable after an interruption.

    Args:
        path (`str` or `Path`): made anew.
        header (`dict`, *optional*): goes into the first line, beside the format's version.
    """

    def __init__(self, path: str | Path, header: dict[str, Any] | None = None) -> None:
        self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115 - closed on exit
        self._write({"event": "trace", "version": VERSION, **(header or {})})

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def on_prefill(self, record: ForwardRecord) -> None:
        self._write({"event": "prefill", **asdict(record)})

    def on_draft(self, record: ForwardRecord) -> None:
        self._write({"event": "draft", **asdict(record)})

    def on_verify(self, record: ForwardRecord) -> None:
        self._write({"event": "verify", **asdict(record)})

    def on_commit(self, record: RoundRecord) -> None:
        self._write({"event": "commit", **asdict(record)})

    def on_finish(self, record: FinishRecord) -> None:
        self._write({"event": "finish", **asdict(record)})

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def read_trace(path: str | Path) -> Iterator[tuple[str, Record]]:
    """
    The events of a trace in order, as `(event, record)`; `event` is `prefill`, `draft`, `verify`, `commit` or `finish`.

    A last line that was cut off in writing is left out. Raises [`InputError`] for what is not a trace, or of a later version.
    """
    with Path(path).open(encoding="utf-8") as file:
        lines = file.readlines()
    try:
        header = json.loads(lines[0]) if lines else {}
    except json.JSONDecodeError:
        header = {}
    if not isinstance(header, dict) or header.get("event") != "trace":
        raise InputError(f"{path} is not a recguide trace: its first line should be a trace header.")
    if header.get("version") != VERSION:
        raise InputError(
            f"{path} is a trace of version {header.get('version')}; this recguide reads version {VERSION}."
        )
    for number, line in enumerate(lines[1:], start=2):
        if number == len(lines) and not line.endswith("\n"):
            return
        try:
            yield _record(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}, line {number}: not an event of a trace ({error}).") from error


def _record(line: dict[str, Any]) -> tuple[str, Record]:
    event = line.pop("event")
    if event in ("prefill", "draft", "verify"):
        return event, ForwardRecord(**line | {"requests": tuple(line["requests"])})
    if event == "finish":
        return event, FinishRecord(**line)
    if event != "commit":
        raise ValueError(f"unknown event {event!r}")
    return event, round_of(line)


def round_of(values: dict[str, Any]) -> RoundRecord:
    """The record whose `asdict` has been through JSON; raises `ValueError`, `KeyError` or `TypeError` for other things."""
    fields = values | {
        "draft": _draft(values["draft"]),
        "branches": tuple(
            BranchRecord(_branch(b["branch"]), b["first"], _draft(b["draft"])) for b in values["branches"]
        ),
        "risky": tuple(values["risky"]),
        "committed": tuple(values["committed"]),
        "entropies": tuple(values.get("entropies", ())),
        "outcome": Outcome(values["outcome"]),
    }
    return RoundRecord(**fields)


def _draft(value: dict[str, Any]) -> Draft:
    guesses = (Guess(**guess | {"alternatives": tuple(guess["alternatives"])}) for guess in value["guesses"])
    return Draft(tuple(guesses), DraftSource(value["source"]))


def _branch(value: dict[str, Any]) -> Branch:
    return Branch(**value | {"kind": BranchKind(value["kind"])})
