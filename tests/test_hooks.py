"""Hooks: the order of events and of hooks, and what an exception raised in one leads to."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest

from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.config import RecGuideConfig
from recguide.hooks import Hook, Hooks
from recguide.loop import generate, method_of
from recguide.models.nemotron_labs_diffusion import NemotronLabsDiffusionModel
from recguide.rounds import Request
from recguide.structs import FinishRecord, RoundRecord
from recguide.testing import toy_model

EVENTS = ("on_prefill", "on_draft", "on_verify", "on_commit", "on_finish")
PROMPTS = ([1, 7, 3], [4], [9, 9, 2])
NEW = 6


class Recorder(Hook):
    """Appends `(name, event, record)` to a log that several hooks share; raises at one event's n-th call if told to."""

    def __init__(self, name: str, log: list[tuple[str, str, Any]], fails_at: str | None = None, call: int = 1) -> None:
        for event in EVENTS:
            setattr(self, event, self._recorder(name, event, log, call if event == fails_at else 0))

    def _recorder(self, name: str, event: str, log: list[tuple[str, str, Any]], call: int) -> Callable[[Any], None]:
        calls = 0

        def record(value: Any) -> None:
            nonlocal calls
            calls += 1
            log.append((name, event, value))
            if calls == call:
                raise RuntimeError(f"{name} fails at {event}")

        return record


@lru_cache
def model() -> NemotronLabsDiffusionModel:
    return toy_model()


def requests_of(prompts: Sequence[list[int]], new: int = NEW) -> list[Request]:
    method = method_of(RecGuideConfig(block_size=4), frozenset(), ModelAdapter(model(), resolve_backend()))
    return [Request(10 + i, list(prompt), new, lambda tokens: None, method) for i, prompt in enumerate(prompts)]


def run(requests: Sequence[Request], hooks: Sequence[Hook], **options: Any) -> list[list[int]]:
    adapter = ModelAdapter(model(), resolve_backend())
    method = method_of(RecGuideConfig(**{"block_size": 4, **options}), frozenset(), adapter)
    for request in requests:
        request.method = method
    generate(requests, adapter, hooks=hooks)
    return [request.tokens for request in requests]


def test_every_hook_gets_every_event_in_the_order_of_the_list() -> None:
    log: list[tuple[str, str, Any]] = []
    run(requests_of(PROMPTS), [Recorder("a", log), Recorder("b", log), Recorder("c", log)])
    assert [name for name, _, _ in log] == ["a", "b", "c"] * (len(log) // 3)
    for i in range(0, len(log), 3):
        assert len({event for _, event, _ in log[i : i + 3]}) == 1
        assert all(record is log[i][2] for _, _, record in log[i : i + 3])


@pytest.mark.parametrize("strategy", ["ar", "linear", "quadratic", "recguide"])
def test_the_order_of_events(strategy: str) -> None:
    """Prefill, then rounds of drafts, one verification, one commit for each live request; the ends come last."""
    log: list[tuple[str, str, Any]] = []
    requests = requests_of(PROMPTS)
    run(requests, [Recorder("a", log)], strategy=strategy)
    events = [event for _, event, _ in log]
    assert events[0] == "on_prefill"
    assert events[-3:] == ["on_finish"] * 3
    assert set(events[1:-3]) <= {"on_draft", "on_verify", "on_commit"}
    ids = [request.id for request in requests]
    assert log[0][2].requests == tuple(ids)
    assert [record.request for _, event, record in log if event == "on_finish"] == ids
    lengths = dict.fromkeys(ids, 1)
    i = 1
    while events[i] != "on_finish":
        live = [r for r in ids if lengths[r] < NEW]
        if events[i] == "on_draft":
            assert strategy != "ar"
            assert set(log[i][2].requests) <= set(live)
            i += 1
        assert events[i] == "on_verify"
        assert log[i][2].requests == tuple(live)
        commits: list[RoundRecord] = [record for _, _, record in log[i + 1 : i + 1 + len(live)]]
        assert events[i + 1 : i + 1 + len(live)] == ["on_commit"] * len(live)
        assert [record.request for record in commits] == live
        for record in commits:
            lengths[record.request] += len(record.committed)
        i += 1 + len(live)
    assert set(lengths.values()) == {NEW}


def test_records_tell_the_whole_text() -> None:
    log: list[tuple[str, str, Any]] = []
    requests = requests_of(PROMPTS)
    outputs = run(requests, [Recorder("a", log)])
    for request, prompt, output in zip(requests, PROMPTS, outputs, strict=True):
        rounds = [r for _, event, r in log if event == "on_commit" and r.request == request.id]
        assert [record.index for record in rounds] == list(range(len(rounds)))
        text = [*prompt, rounds[0].seed]
        for record in rounds:
            assert record.position == len(text) - 1
            assert record.seed == text[-1]
            text += record.committed
        assert text == output
    finishes = [record for _, event, record in log if event == "on_finish"]
    assert finishes == [FinishRecord(10 + i, "length", len(p), NEW) for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize(
    ("event", "call"),
    [("on_prefill", 1), *((event, call) for event in ("on_draft", "on_verify", "on_commit") for call in (1, 2))],
)
def test_an_exception_reaches_the_caller_and_everything_is_released(event: str, call: int) -> None:
    expected = run(requests_of(PROMPTS), [])
    own = model().config._attn_implementation
    log: list[tuple[str, str, Any]] = []
    hooks = [Recorder("a", log), Recorder("b", log, fails_at=event, call=call), Recorder("c", log)]
    requests = requests_of(PROMPTS)
    with pytest.raises(RuntimeError, match=f"^b fails at {event}$"):
        run(requests, hooks)
    names = [name for name, at, _ in log if at == event]
    assert names == ["a", "b", "c"] * (call - 1) + ["a", "b"], "the later hooks of that event are not called"
    last = max(i for i, (_, at, _) in enumerate(log) if at == event)
    assert [at for _, at, _ in log[last + 1 :]] == ["on_finish"] * 9, "nothing happens afterwards but the ends"
    for name in ("a", "b", "c"):
        ends = [record for at_name, at, record in log if (at_name, at) == (name, "on_finish")]
        assert [(end.request, end.reason) for end in ends] == [(10, "error"), (11, "error"), (12, "error")]
        assert [end.new_tokens for end in ends] == [len(r.tokens) - r.prompt_tokens for r in requests]
    assert [request.finished for request in requests] == ["error"] * 3
    assert model().config._attn_implementation == own
    assert run(requests_of(PROMPTS), []) == expected, "a later call works"


def test_a_request_that_had_ended_before_the_exception_keeps_its_reason() -> None:
    log: list[tuple[str, str, Any]] = []
    requests = [*requests_of(PROMPTS[:1], new=1), *requests_of(PROMPTS[1:2])]
    requests[1].id = 99
    with pytest.raises(RuntimeError, match="fails at on_verify"):
        run(requests, [Recorder("a", log, fails_at="on_verify")])
    ends = [record for _, event, record in log if event == "on_finish"]
    assert [(end.request, end.reason) for end in ends] == [(10, "length"), (99, "error")]


def test_an_exception_at_the_end_reaches_the_caller() -> None:
    own = model().config._attn_implementation
    log: list[tuple[str, str, Any]] = []
    with pytest.raises(RuntimeError, match="b fails at on_finish"):
        run(
            requests_of(PROMPTS),
            [Recorder("a", log), Recorder("b", log, fails_at="on_finish", call=3), Recorder("c", log)],
        )
    assert [name for name, event, _ in log if event == "on_finish"] == ["a", "b", "c", "a", "b", "c", "a", "b"]
    assert model().config._attn_implementation == own


def test_every_request_gets_its_end_though_a_hook_fails_at_the_first_one() -> None:
    log: list[tuple[str, str, Any]] = []
    with pytest.raises(RuntimeError, match="a fails at on_finish"):
        run(requests_of(PROMPTS), [Recorder("a", log, fails_at="on_finish")])
    assert [record.request for _, event, record in log if event == "on_finish"] == [10, 11, 12]


def test_an_exception_at_the_end_is_chained_to_the_one_under_way() -> None:
    log: list[tuple[str, str, Any]] = []
    hooks = [Recorder("a", log, fails_at="on_verify"), Recorder("b", log, fails_at="on_finish")]
    with pytest.raises(RuntimeError, match="b fails at on_finish") as caught:
        run(requests_of(PROMPTS[:1]), hooks)
    assert str(caught.value.__context__) == "a fails at on_verify"


def test_an_interrupt_ends_the_requests_too() -> None:
    log: list[tuple[str, str, Any]] = []

    class Interrupting(Hook):
        def on_draft(self, record: Any) -> None:
            raise KeyboardInterrupt

    requests = requests_of(PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        run(requests, [Interrupting(), Recorder("a", log)])
    assert [record.reason for _, event, record in log if event == "on_finish"] == ["error"] * 3


def test_a_base_hook_and_an_empty_list_observe_nothing() -> None:
    assert run(requests_of(PROMPTS), [Hook()]) == run(requests_of(PROMPTS), [])
    assert Hooks().hooks == ()
