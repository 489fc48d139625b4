"""Counters: they agree with the records they count, and contradictions are caught."""

import pytest
import torch

from recguide import LosslessError, RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.loop import generate, method_of
from recguide.metrics import DecodeMetrics, looping_tokens
from recguide.rounds import Request
from recguide.testing import ScriptedDrafts, toy_model

MODEL = toy_model()


def decode(adapter: ModelAdapter, new_tokens: int, **options: object) -> tuple[list[int], DecodeMetrics]:
    metrics = DecodeMetrics()
    method = method_of(RecGuideConfig(**options), frozenset(), adapter)  # type: ignore[arg-type]
    request = Request(0, [1, 2, 3], new_tokens, lambda tokens: None, method)
    generate([request], adapter, hooks=[metrics])
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


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([], 0),
        ([7] * 3, 0),
        ([7] * 4, 3),
        ([1, 2, 3, 7, 7, 7, 7, 7], 4),
        ([1, 2, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7], 9),
        ([1, 2, 5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6, 7, 8], 0),
        (list(range(20)) * 3, 0),
        (list(range(20)) * 4 + [0, 1], 62),
    ],
)
def test_a_repetition_loop_is_told(tokens: list[int], looping: int) -> None:
    assert looping_tokens(tokens) == looping


@pytest.mark.parametrize("strategy", ["ar", "recguide"])
def test_a_loop_is_flagged_in_the_statistics_and_its_text_is_that_of_ar(strategy: str) -> None:
    """A bias makes the model write one token for ever, and the drafts are as sure of it."""
    arguments = {"max_new_tokens": 60, "sequence_bias": {(9,): 100.0}, "return_dict_in_generate": True}
    output = MODEL.generate(torch.tensor([[1, 2, 3]]), generation_strategy=strategy, **arguments)
    assert output.sequences[0, 3:].tolist() == [9] * 60
    assert output.statistics["looping_tokens"] == [59]
    if strategy == "recguide":
        assert output.statistics["mean_committed"] > 10
