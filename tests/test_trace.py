"""Traces: what is written is read back as the same records; a cut or foreign file is told apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from recguide import InputError, RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.hooks import Hook
from recguide.loop import generate, method_of
from recguide.rounds import Request
from recguide.testing import toy_model
from recguide.trace import TraceWriter, read_trace


class Collector(Hook):
    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []

    def on_prefill(self, record: Any) -> None:
        self.events.append(("prefill", record))

    def on_draft(self, record: Any) -> None:
        self.events.append(("draft", record))

    def on_verify(self, record: Any) -> None:
        self.events.append(("verify", record))

    def on_commit(self, record: Any) -> None:
        self.events.append(("commit", record))

    def on_finish(self, record: Any) -> None:
        self.events.append(("finish", record))


@pytest.mark.parametrize("strategy", ["ar", "linear", "quadratic", "recguide"])
def test_round_trip(tmp_path: Path, strategy: str) -> None:
    seen, path = Collector(), tmp_path / "trace.jsonl"
    adapter = ModelAdapter(toy_model(), resolve_backend())
    method = method_of(RecGuideConfig(strategy=strategy, block_size=4), frozenset(), adapter)
    requests = [Request(i, prompt, 20, lambda tokens: None, method) for i, prompt in enumerate([[1, 2, 3], [4, 6]])]
    with TraceWriter(path, {"model": "toy"}) as writer:
        generate(requests, adapter, hooks=[seen, writer])
    assert len(seen.events) > 4
    assert list(read_trace(path)) == seen.events
    assert json.loads(path.read_text().splitlines()[0]) == {"event": "trace", "version": 1, "model": "toy"}

    whole = path.read_text()
    path.write_text(whole[:-7])
    assert list(read_trace(path)) == seen.events[:-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a recguide trace"),
        ("hello\n", "not a recguide trace"),
        ('{"event": "commit"}\n', "not a recguide trace"),
        ('{"event": "trace", "version": 99}\n', "version 99"),
        ('{"event": "trace", "version": 1}\n{"event": "what"}\n', "line 2"),
        ('{"event": "trace", "version": 1}\n{"event": "finish", "request": 1}\n', "line 2"),
    ],
)
def test_what_is_not_a_trace(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        list(read_trace(path))
