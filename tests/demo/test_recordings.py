"""Traces are shared whole, and what a file from elsewhere says is checked before it is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recguide import InputError
from recguide.demo import recordings
from recguide.demo.drawing import picture
from recguide.demo.recordings import Recording
from recguide.demo.timeline import timelines

from .test_timeline import EVENTS, text_of


def saved(path: Path) -> Path:
    return Recording({"model": "toy", "prompt": "<b>"}, tuple(EVENTS)).save(path / "trace.jsonl", text_of)


def test_a_shared_trace_is_read_without_the_model(tmp_path: Path) -> None:
    recording = Recording.open(saved(tmp_path))
    assert recording.events == tuple(EVENTS)
    assert recording.header["prompt"] == "<b>"
    again, first = (timelines(r, t) for r, t in ((recording.events, recording.text_of(None)), (EVENTS, text_of)))
    assert again == first


def test_without_texts_tokens_are_numbers() -> None:
    assert Recording({}, tuple(EVENTS)).text_of(None)(7) == "#7"
    assert Recording({}, tuple(EVENTS)).text_of(text_of)(7) == "<7>"


def changed(path: Path, event: str, **values: Any) -> Path:
    """A saved trace with other values in the first event of a kind."""
    lines = [json.loads(line) for line in saved(path).read_text().splitlines()]
    next(line for line in lines if line["event"] == event).update(values)
    (path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path / "trace.jsonl"


GUESS = {"token": 2, "alternatives": [3], "probability": 0.5, "second_probability": 0.1}
BRANCH = {"branch": {"kind": "correction", "depth": 2, "block_size": 4, "replacement": 3}, "first": 3}


@pytest.mark.parametrize(
    ("event", "values"),
    [
        ("commit", {"seed": "<script>"}),
        ("commit", {"seed": -1}),
        ("commit", {"seed": True}),
        ("commit", {"accepted": 9}),
        ("commit", {"committed": []}),
        ("commit", {"committed": [1, 2, 3, 4]}),
        ("commit", {"risky": ["<b>"]}),
        ("commit", {"hit": 7}),
        ("commit", {"hit": 1}),
        ("commit", {"entropies": [float("nan"), 1.0]}),
        (
            "commit",
            {"draft": {"guesses": [GUESS | {"probability": "1"}], "source": "forward"}, "branches": [], "hit": None},
        ),
        (
            "commit",
            {"draft": {"guesses": [GUESS | {"probability": 7}], "source": "forward"}, "branches": [], "hit": None},
        ),
        (
            "commit",
            {
                "branches": [
                    BRANCH
                    | {"branch": BRANCH["branch"] | {"depth": 10**9}, "draft": {"guesses": [], "source": "branch"}}
                ]
            },
        ),  # type: ignore[operator]
        ("verify", {"query_tokens": "many"}),
        ("verify", {"elapsed": float("inf")}),
        ("verify", {"kind": "<b>"}),
        ("finish", {"reason": 3}),
    ],
)
def test_what_no_decoding_writes_is_refused(tmp_path: Path, event: str, values: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"trace.jsonl"):
        Recording.open(changed(tmp_path, event, **values))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a recguide trace"),
        (b"hello", "not a recguide trace"),
        (b"\x80\x81", "not text"),
        (b"[" * 100_000, "trace"),
        (b'{"event": "trace", "version": 9}\n', "version 9"),
        (b'{"event": "trace", "version": 1}\n', "without a round"),
        (b'{"event": "trace", "version": 1}\n{"event": "dance"}\n', "line 2"),
        (b'{"event": "trace", "version": 1}\n[1]\n{}\n', "line 2"),
    ],
)
def test_other_files_are_refused_by_name_and_not_by_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "secret" / "mine.jsonl"
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as error:
        Recording.open(path)
    assert "secret" not in str(error.value)


def test_large_files_and_long_traces_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(recordings, "MOST_ROUNDS", 1)
    with pytest.raises(InputError, match="2 rounds; up to 1"):
        Recording.open(path)
    monkeypatch.setattr(recordings, "LARGEST", 100)
    with pytest.raises(InputError, match="MiB"):
        Recording.open(path)


@pytest.mark.parametrize("texts", [[1], {"1": 2}, "abc"])
def test_texts_must_be_texts(tmp_path: Path, texts: Any) -> None:
    with pytest.raises(InputError, match="tokens"):
        Recording.open(changed(tmp_path, "trace", tokens=texts))


def test_a_trace_of_generate_can_be_opened(tmp_path: Path) -> None:
    """Those of the command line have no texts; auto's branches may lie behind its cut block."""
    from recguide.loading import TINY, chat_ids, load
    from recguide.trace import TraceWriter

    model, tokenizer = load(TINY, "float32", "cpu")
    ids = chat_ids(tokenizer, "Write a letter from Zoe to Mila.")
    for strategy in ("ar", "quadratic", "recguide", "auto"):
        path = tmp_path / f"{strategy}.jsonl"
        with TraceWriter(path, {"model": TINY}) as writer:
            model.generate(
                ids,
                attention_mask=ids.new_ones(ids.shape),
                max_new_tokens=48,
                do_sample=False,
                generation_strategy=strategy,
                recguide_hooks=[writer],
            )
        recording = Recording.open(path)
        (timeline,) = timelines(recording.events, recording.text_of(lambda token: tokenizer.decode([token])))
        assert len(picture(timeline)["rounds"]) == len(timeline.steps) > 0
        assert timeline.counts.tokens + 1 == len(timeline.written)
