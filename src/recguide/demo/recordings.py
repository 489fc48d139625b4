"""Recorded traces, opened and shared. What a file from elsewhere holds is checked before anything is drawn from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..structs import Draft, FinishRecord, ForwardRecord, RoundRecord
from ..trace import Record, TraceWriter, read_trace

LARGEST = 8 * 2**20
"""Bytes of a file that is opened."""
MOST_ROUNDS = 1000
"""Rounds of a trace that are opened; the page would become slow."""
TEXTS = "tokens"
"""Entry of the header: texts of the tokens, so that others can read the trace without the model."""


@dataclass(frozen=True, eq=False)
class Recording:
    """
    A trace in memory.

    Args:
        header (`Mapping[str, Any]`): its first line: `model`, `strategy`, `prompt` and so on, where they are known.
        events (`tuple[tuple[str, Record], ...]`): the rest.
    """

    header: Mapping[str, Any] = field(default_factory=dict)
    events: tuple[tuple[str, Record], ...] = ()

    @property
    def has_rounds(self) -> bool:
        return any(isinstance(record, RoundRecord) for _, record in self.events)

    def text_of(self, decode: Callable[[int], str] | None) -> Callable[[int], str]:
        """Texts from the header, else from `decode`, else the token's number."""
        texts = self.header.get(TEXTS, {})

        def text(token: int) -> str:
            if (known := texts.get(str(token))) is not None:
                return str(known)
            return f"#{token}" if decode is None else decode(token)

        return text

    def save(self, path: Path, decode: Callable[[int], str] | None) -> Path:
        """Write it as JSONL, with the texts of its tokens where `decode` knows them."""
        header = dict(self.header)
        if decode is not None:
            header[TEXTS] = {str(token): decode(token) for token in sorted(_tokens(self.events))}
        with TraceWriter(path, header) as writer:
            for event, record in self.events:
                getattr(writer, f"on_{event}")(record)
        return path

    @classmethod
    def open(cls, path: Path) -> Recording:
        """
        Read a trace.

        Raises:
            InputError: too large, not a trace, without rounds, or with values that no decoding writes.
        """
        size = path.stat().st_size
        if size > LARGEST:
            raise InputError(
                f"The file has {size / 2**20:.1f} MiB; traces of up to {LARGEST // 2**20} MiB are opened. Record a shorter answer."
            )
        try:
            # Without the folder, which is the server's own business.
            events = tuple(read_trace(path))
            header = json.loads(path.read_text(encoding="utf-8").split("\n", 1)[0])
        except UnicodeDecodeError as error:
            raise InputError(
                f"{path.name} is not a trace: it is not text. Expected JSONL of `recguide generate --trace`."
            ) from error
        except RecursionError as error:
            raise InputError(f"{path.name} is not a trace: it is nested too deeply.") from error
        except InputError as error:
            raise InputError(str(error).replace(str(path), path.name)) from error
        rounds = 0
        for event, record in events:
            try:
                _check(record)
            except (ValueError, TypeError, AttributeError) as error:
                raise InputError(f"{path.name}: a {event} event says what no decoding does ({error}).") from error
            rounds += isinstance(record, RoundRecord)
        if not rounds:
            raise InputError(
                f"{path.name} is a trace without a round: the answer ended with its first token, or was cut off."
            )
        if rounds > MOST_ROUNDS:
            raise InputError(
                f"{path.name} has {rounds} rounds; up to {MOST_ROUNDS} are shown. Record a shorter answer."
            )
        texts = header.get(TEXTS, {})
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise InputError(f"{path.name}: {TEXTS!r} in the header must give a text for each token number.")
        return cls(header, events)


def _tokens(events: tuple[tuple[str, Record], ...]) -> set[int]:
    """All tokens that a picture of these events spells out."""
    found: set[int] = set()
    for _, record in events:
        if isinstance(record, RoundRecord):
            found |= {record.seed, *record.committed, *(branch.first for branch in record.branches)}
            for draft in (record.draft, *(branch.draft for branch in record.branches)):
                for guess in draft.guesses:
                    found |= {guess.token, *guess.alternatives[:1]}
    return found


# --- values ---


def _check(record: Record) -> None:
    if isinstance(record, FinishRecord):
        _whole("request", record.request)
        _require("reason", isinstance(record.reason, str), record.reason)
        for name in ("prompt_tokens", "new_tokens", "taken_back"):
            _whole(name, getattr(record, name))
    elif isinstance(record, ForwardRecord):
        _require("kind", record.kind in ("prefill", "draft", "verify", "fused"), record.kind)
        for request in record.requests:
            _whole("requests", request)
        _whole("query_tokens", record.query_tokens)
        for name in ("seconds", "elapsed"):
            value = getattr(record, name)
            _require(name, _is_number(value) and 0 <= value < 1e9, value)
    else:
        _check_round(record)


def _check_round(record: RoundRecord) -> None:
    for name in ("request", "index", "position", "seed", "accepted", "query_tokens"):
        _whole(name, getattr(record, name))
    _check_draft(record.draft)
    size = record.block_size
    _require("accepted", record.accepted < size, record.accepted)
    for token in record.committed:
        _whole("committed", token)
    _require("committed", 1 <= len(record.committed) <= record.accepted + 1, record.committed)
    for place in record.risky:
        _whole("risky", place)
    for nats in record.entropies:
        _require("entropies", _is_number(nats) and nats < 1e6, nats)
    for branch in record.branches:
        _whole("first", branch.first)
        _whole("depth", branch.branch.depth)
        # A draft may be cut after its branches were chosen.
        _require("depth", 1 <= branch.branch.depth <= max(size, 64), branch.branch.depth)
        _check_draft(branch.draft)
    if record.hit is not None:
        _whole("hit", record.hit)
        _require("hit", record.hit < len(record.branches), record.hit)
        depth, drafted = record.branches[record.hit].branch.depth, len(record.branches[record.hit].draft.guesses)
        _require("hit", depth <= len(record.committed) <= depth + drafted, record.hit)


def _check_draft(draft: Draft) -> None:
    for guess in draft.guesses:
        _whole("token", guess.token)
        for token in guess.alternatives:
            _whole("alternatives", token)
        for name in ("probability", "second_probability"):
            value = getattr(guess, name)
            _require(name, _is_number(value) and -1e-3 <= value <= 1 + 1e-3, value)


def _whole(name: str, value: Any) -> None:
    _require(name, isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31, value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def _require(name: str, holds: bool, value: Any) -> None:
    if not holds:
        raise ValueError(f"{name} is {str(value)[:40]!r}")
