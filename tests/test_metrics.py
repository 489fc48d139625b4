"""Counters: they agree with the records they count, and contradictions are caught."""

import pytest

from recguide import LosslessError, RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.loop import generate
from recguide.metrics import DecodeMetrics
from recguide.rounds import Request
from recguide.testing import ScriptedDrafts, toy_model

MODEL = toy_model()


def decode(adapter: ModelAdapter, new_tokens: int, **options: object) -> tuple[list[int], DecodeMetrics]:
    metrics = DecodeMetrics()
    request = Request(0, [1, 2, 3], new_tokens, lambda tokens: None)
    generate([request], adapter, RecGuideConfig(**options), hooks=[metrics])  # type: ignore[arg-type]
    return request.tokens, metrics


@pytest.mark.parametrize("strategy", ["ar", "linear", "quadratic", "recguide"])
@pytest.mark.parametrize("new_tokens", [1, 2, 33])
def test_the_identities_hold(strategy: str, new_tokens: int) -> None:
    _, metrics = decode(ModelAdapter(MODEL, resolve_backend()), new_tokens, strategy=strategy, block_size=8)
    metrics.check()
    assert metrics.new_tokens == new_tokens
    assert metrics.committed_tokens == new_tokens - 1
    assert metrics.forwards["prefill"] == 1


def test_figures_of_a_perfect_drafter() -> None:
    """Block 8, 41 tokens, drafts always right: one prefill, one draft, then five fused rounds of which four are reused."""
    text, _ = decode(ModelAdapter(MODEL, resolve_backend()), 60, strategy="ar")
    adapter = ScriptedDrafts(MODEL, lambda position: text[position])
    _, metrics = decode(adapter, 41, block_size=8)
    assert dict(metrics.forwards) == {"prefill": 1, "draft": 1, "fused": 4, "verify": 1}
    assert metrics.decode_tpf == pytest.approx(40 / 6)
    assert metrics.e2e_tpf == pytest.approx(41 / 7)
    assert metrics.tau == pytest.approx(80 / 6)
    assert metrics.mean_committed == 8
    assert metrics.reuse_rate == pytest.approx(4 / 5)
    assert metrics.tau == pytest.approx(2 * metrics.mean_committed / (2 - metrics.reuse_rate))
    assert metrics.committed_histogram == {8: 5}
    assert metrics.full_rounds == 5
    assert metrics.query_tokens_per_forward["fused"] == 16
    assert 0 < metrics.host_share < 1


def test_a_contradiction_is_caught() -> None:
    _, metrics = decode(ModelAdapter(MODEL, resolve_backend()), 20, block_size=4)
    metrics.forwards["draft"] += 1
    with pytest.raises(LosslessError, match="contradict"):
        metrics.check()
