from __future__ import annotations

from typing import Any

import pytest

from recguide import FinishRecord, ForwardRecord, RecGuideConfig, RoundRecord
from recguide.serving.observer import LEAST_DRAFTED, EngineObserver
from recguide.structs import Draft, DraftSource, Guess, Outcome


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def forward(kind: str, *requests: int, tokens: int = 8, elapsed: float = 0.0) -> ForwardRecord:
    return ForwardRecord(kind, requests, tokens, seconds=0.0, elapsed=elapsed)


def commit(request: int, accepted: int, drafted: int, source: DraftSource = DraftSource.FORWARD) -> RoundRecord:
    guesses = tuple(Guess(7, (), 0.9, 0.1) for _ in range(drafted))
    return RoundRecord(
        request=request,
        index=0,
        position=0,
        seed=7,
        draft=Draft(guesses, source if drafted else DraftSource.NONE),
        branches=(),
        risky=(),
        accepted=accepted,
        committed=(7,) * (accepted + 1),
        outcome=Outcome.PLAIN,
        hit=None,
        query_tokens=drafted + 1,
    )


@pytest.mark.parametrize("told", ["before", "after"])
def test_times_are_from_the_submission_whenever_that_is_told(told: str) -> None:
    clock = Clock()
    observer = EngineObserver(clock)
    clock.now = 10.0
    if told == "before":
        figures = observer.submitted(3, 10.0)
    clock.now = 12.0
    observer.on_prefill(forward("prefill", 3, elapsed=0.5))
    clock.now = 15.0
    observer.on_commit(commit(3, 2, 7))
    if told == "after":
        figures = observer.submitted(3, 10.0)
    clock.now = 16.0
    observer.on_commit(commit(3, 0, 0))
    assert (figures.queue, figures.ttft, figures.e2e) == (1.5, 2.0, 6.0)


def test_counts_are_the_records() -> None:
    observer = EngineObserver()
    figures = [observer.submitted(request, 0.0) for request in (0, 1)]
    observer.on_prefill(forward("prefill", 0, 1, tokens=20))
    observer.on_draft(forward("draft", 0, tokens=8))
    observer.on_verify(forward("verify", 0, 1, tokens=9))
    observer.on_commit(commit(0, 3, 7))
    observer.on_commit(commit(1, 0, 0))
    observer.on_verify(forward("fused", 0, tokens=30))
    observer.on_commit(commit(0, 7, 7, DraftSource.BRANCH))
    first, second = figures
    assert (first.rounds, first.forwards, first.reused, first.drafted, first.accepted) == (2, 3, 1, 14, 10)
    assert (second.rounds, second.forwards, second.drafted) == (1, 1, 0)
    counts = observer.counts()
    assert counts.forwards == {"prefill": 1, "draft": 1, "verify": 1, "fused": 1}
    assert counts.query_tokens == {"prefill": 20, "draft": 8, "verify": 9, "fused": 30}
    assert (counts.drafts, counts.draft_tokens, counts.accepted_tokens) == (2, 14, 10)
    assert [counts.accepted_by_position[i] for i in range(8)] == [2, 2, 2, 1, 1, 1, 1, 0]
    recent = observer.recent()
    assert recent.block_share == {1: 1 / 3, 8: 2 / 3}
    assert (recent.reuse_share, recent.occupancy, recent.first_accepted) == (1 / 3, 1.5, None)


@pytest.mark.parametrize("first", ["finish", "left"])
def test_nothing_is_kept_of_a_request_that_is_over(first: str) -> None:
    observer = EngineObserver()
    observer.submitted(0, 0.0)
    over = {"finish": lambda: observer.on_finish(FinishRecord(0, "eos", 1, 1)), "left": lambda: observer.left(0)}
    over[first]()
    assert observer._under_way
    over["left" if first == "finish" else "finish"]()
    assert not observer._under_way


def test_drafts_that_are_never_right_are_a_collapse() -> None:
    observer = EngineObserver()
    for _ in range(LEAST_DRAFTED - 1):
        observer.on_commit(commit(0, 0, 7))
    assert not observer.recent().has_collapsed
    observer.on_commit(commit(0, 0, 7))
    assert observer.recent().has_collapsed
    for _ in range(LEAST_DRAFTED):
        observer.on_commit(commit(0, 4, 7))
    assert observer.recent().first_accepted == 0.5
    assert not observer.recent().has_collapsed


def test_plain_decoding_is_no_collapse() -> None:
    observer = EngineObserver()
    for _ in range(10 * LEAST_DRAFTED):
        observer.on_commit(commit(0, 0, 0))
    assert not observer.recent().has_collapsed


def test_a_wrong_adapter_is_told_by_the_gauge(loaded: Any, start: Any) -> None:
    """The embedded model with a draft adapter of random weights: texts stay, acceptance goes."""
    import copy

    import httpx
    import torch

    model = copy.deepcopy(loaded[0])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn_like(weight))
    server = start(model=model, speculation=RecGuideConfig(strategy="linear"))
    texts = []
    for strategy in ("ar", "linear"):
        body = {
            "model": "recguide-tiny",
            "prompt": "Tom has 3",
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = server.post("/v1/completions", body | {"recguide": {"strategy": strategy}}).json()
        texts.append(answer["choices"][0]["text"])
    assert texts[0] == texts[1]
    metrics = httpx.get(server.url + "/metrics").text
    assert 'recguide_acceptance_collapsed{model_name="recguide-tiny"} 1.0' in metrics
