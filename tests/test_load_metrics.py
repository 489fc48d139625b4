"""Times, blocks and waits under load, from hand-made records and a clock that is set by hand."""

from __future__ import annotations

import pytest
import torch

from recguide import Engine, EngineConfig, FinishRecord, ForwardRecord, InputError, RoundRecord
from recguide.config import BLOCK_SIZES
from recguide.engine.scheduler import Bucketed, bucket_of
from recguide.load_metrics import LoadMetrics
from recguide.structs import Draft, Guess, Outcome
from recguide.testing import toy_model


class Scene:
    """An engine's events, told at the time that `now` says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.metrics = LoadMetrics(2, lambda: self.now)

    def submit(self, at: float, request: int) -> None:
        self.now = at
        self.metrics.submitted(request)

    def forward(self, at: float, kind: str, *requests: int, seconds: float = 0.25) -> None:
        self.now = at
        tell = {"prefill": self.metrics.on_prefill, "draft": self.metrics.on_draft}.get(kind, self.metrics.on_verify)
        tell(ForwardRecord(kind, requests, 7, seconds))

    def commit(self, at: float, request: int, block: int, committed: int) -> None:
        self.now = at
        draft = Draft(tuple(Guess(7, (), 1.0, 0.0) for _ in range(block - 1)))
        tokens = (7,) * committed
        self.metrics.on_commit(
            RoundRecord(request, 0, 0, 7, draft, (), (), committed - 1, tokens, Outcome.PLAIN, None, block)
        )

    def finish(self, at: float, request: int, prompt: int, new: int, reason: str = "length") -> None:
        self.now = at
        self.metrics.on_finish(FinishRecord(request, reason, prompt, new))


def two_requests() -> LoadMetrics:
    """Request 0 comes at 10 s, 1 at 11 s; 0 waits for two verifications of 1's, 1 for none, and 1's prompt takes two chunks."""
    scene = Scene()
    scene.submit(10.0, 0)
    scene.submit(11.0, 1)
    scene.forward(12.0, "prefill", 0, 1)
    scene.forward(12.5, "prefill", 1)
    scene.forward(13.0, "draft", 1)
    scene.forward(13.5, "fused", 1)
    scene.commit(14.0, 1, 8, 4)
    scene.forward(14.5, "fused", 1)
    scene.commit(15.0, 1, 3, 2)
    scene.finish(15.5, 1, 600, 7)
    scene.forward(16.0, "verify", 0)
    scene.commit(16.0, 0, 16, 3)
    scene.finish(18.0, 0, 20, 4)
    return scene.metrics


def test_times_of_requests() -> None:
    summary = two_requests().summary()
    expected = {
        "duration": 8.0,
        "completed": 2,
        "total_input_tokens": 620,
        "total_output_tokens": 11,
        "request_throughput": 0.25,
        "output_throughput": 11 / 8,
        "total_token_throughput": 631 / 8,
        "max_concurrency": 2,
        # 0: from 10 to 12 s; 1: from 11 s to its second chunk.
        "mean_ttft_ms": 1750.0,
        "median_ttft_ms": 1750.0,
        "p50_ttft_ms": 1750.0,
        "p95_ttft_ms": 1975.0,
        "p99_ttft_ms": 1995.0,
        # 0: 6 s for 3 tokens; 1: 3 s for 6.
        "mean_tpot_ms": 1250.0,
        "p95_tpot_ms": 1925.0,
        # 0: 4 s; 1: 1.5 s and 1 s.
        "mean_itl_ms": 6500 / 3,
        "median_itl_ms": 1500.0,
        "mean_e2el_ms": 6250.0,
        "p99_e2el_ms": 7965.0,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    times, figures = ("ttft", "tpot", "itl", "e2el"), ("mean", "median", "p50", "p95", "p99")
    names = {f"{figure}_{time}_ms" for time in times for figure in figures}
    assert set(summary) == names | set(list(expected)[:8])
    assert two_requests().per_request_tokens_per_s == pytest.approx((4 / 8 + 7 / 4.5) / 2)


def test_blocks_occupancy_waits_and_the_hosts_share() -> None:
    metrics = two_requests()
    assert metrics.block_share == {"4": 1 / 3, "8": 1 / 3, "16": 1 / 3}
    assert list(metrics.block_share) == ["4", "8", "16"], "ascending"
    assert metrics.bucket_occupancy == 1.0
    assert metrics.bucket_wait == {"mean": pytest.approx(2 / 3), "max": 2}
    assert metrics.host_share == 1 - 6 * 0.25 / 8


def test_a_block_counts_in_its_bucket() -> None:
    scene = Scene()
    scene.submit(0.0, 0)
    for block in range(1, 65):
        scene.commit(1.0, 0, block, 1)
    expected: dict[str, float] = {}
    for block in range(1, 65):
        bucket = str(bucket_of(block))
        expected[bucket] = expected.get(bucket, 0.0) + 1 / 64
    assert scene.metrics.block_share == pytest.approx(expected)


def test_a_request_waits_only_while_it_is_ready() -> None:
    """Sent back and computed again: the rounds of others until then are not the scheduler's doing, nor is its first token new."""
    scene = Scene()
    scene.submit(0.0, 0)
    scene.submit(0.0, 1)
    scene.forward(1.0, "prefill", 0, 1)
    scene.forward(2.0, "verify", 0, 1)
    scene.commit(2.0, 0, 1, 1)
    for _ in range(5):
        scene.forward(3.0, "verify", 1)
    scene.forward(4.0, "prefill", 0)
    scene.forward(5.0, "verify", 1)
    scene.forward(6.0, "verify", 0, 1)
    scene.commit(6.0, 0, 1, 1)
    scene.finish(6.0, 0, 5, 3)
    assert scene.metrics.bucket_wait == {"mean": 1 / 10, "max": 1}
    assert scene.metrics.bucket_occupancy == 10 / 8
    assert scene.metrics.summary()["mean_ttft_ms"] == 1000
    assert scene.metrics.gaps == [1.0, 4.0]


def test_a_request_of_one_token_has_no_time_per_token() -> None:
    scene = Scene()
    scene.submit(0.0, 0)
    scene.forward(1.0, "prefill", 0)
    scene.finish(1.5, 0, 5, 1)
    summary = scene.metrics.summary()
    assert (summary["mean_ttft_ms"], summary["mean_tpot_ms"], summary["mean_itl_ms"]) == (1000, 0, 0)
    assert (scene.metrics.bucket_wait, scene.metrics.block_share) == ({"mean": 0.0, "max": 0}, {})


def test_who_was_cancelled_or_failed_has_no_times() -> None:
    scene = Scene()
    for request, reason in enumerate(("cancelled", "error", "eos")):
        scene.submit(0.0, request)
        scene.forward(1.0, "prefill", request)
        scene.commit(2.0, request, 1, 1)
        scene.finish(2.0 + request, request, 5, 2, reason)
    summary = scene.metrics.summary()
    assert (summary["completed"], summary["total_output_tokens"], summary["duration"]) == (1, 2, 4.0)
    assert summary["mean_e2el_ms"] == 4000
    assert len(scene.metrics.gaps) == 1


def test_parts_add_up() -> None:
    together, part = two_requests(), two_requests()
    together.add(part)
    assert together.summary()["duration"] == 16.0
    assert together.summary()["completed"] == 4
    for name in ("mean_ttft_ms", "p50_e2el_ms", "output_throughput", "mean_itl_ms"):
        assert together.summary()[name] == pytest.approx(part.summary()[name])
    assert together.block_share == part.block_share
    assert together.bucket_wait == part.bucket_wait
    assert together.bucket_occupancy == part.bucket_occupancy
    assert together.host_share == part.host_share


def test_a_submission_that_nobody_told_of() -> None:
    with pytest.raises(InputError, match=r"Call submitted\(3\) before add_request"):
        Scene().forward(0.0, "prefill", 3)


def test_on_an_engine_no_wait_is_longer_than_its_scheduler_allows() -> None:
    model = toy_model(vocab_size=64)
    metrics = LoadMetrics(4)
    prompts = torch.randint(6, 64, (6, 5), generator=torch.Generator().manual_seed(0)).tolist()
    with Engine(model, EngineConfig(max_requests=4, scheduler="bucketed"), [metrics]) as engine:
        for number, prompt in enumerate(prompts):
            metrics.submitted(number)
            options = {"policy": "aimd"} if number % 2 else {"block_size": 4}
            engine.add_request(prompt, generation_strategy="linear", recguide_config=options, max_new_tokens=20)
    summary = metrics.summary()
    assert (summary["completed"], summary["total_input_tokens"], summary["total_output_tokens"]) == (6, 30, 120)
    assert 0 < metrics.bucket_wait["max"] <= Bucketed(EngineConfig().max_wait, len(BLOCK_SIZES)).longest_wait
    assert sum(metrics.block_share.values()) == pytest.approx(1)
    assert 0 < metrics.host_share < 1
    assert summary["mean_ttft_ms"] < summary["mean_e2el_ms"] <= summary["duration"] * 1000
