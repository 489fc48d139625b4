"""Captured forwards without a CUDA device: a capturer that runs what it has recorded again, with the kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recguide import RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import installed
from recguide.attention.triton import TritonAttention
from recguide.dense_kv import DenseKV
from recguide.forwards import GraphForwards, Shape, StaticTensors
from recguide.hooks import Hook
from recguide.loop import generate, method_of
from recguide.rounds import Request
from recguide.segments import Segment, pack
from recguide.testing import toy_model

CPU = torch.device("cpu")
MODEL = toy_model()
PROMPTS = [[3, 9, 4, 11, 2, 8], [7, 6, 13, 1]]


class Recorder:
    """
    In place of CUDA graphs: replays run the same function on the same tensors.

    What is not read from tensors that keep their addresses was fixed when `run` was made, as it is in a graph. Between replays the
    result is poisoned, as scratch memory that others write over.
    """

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture(self, run: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        self.captured += 1
        logits = run().clone()

        def replay() -> None:
            self.replayed += 1
            logits.copy_(run())

        logits.fill_(float("nan"))
        return logits, replay


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


def graphs(recorder: Recorder) -> ModelAdapter:
    backend = TritonAttention(split=16)
    return ModelAdapter(MODEL, backend, forwards=GraphForwards(MODEL, backend, recorder))


def texts(adapter: ModelAdapter, strategy: str, new_tokens: int) -> list[list[int]]:
    method = method_of(RecGuideConfig(strategy=strategy, block_size=1 if strategy == "ar" else 4), frozenset(), adapter)
    requests = [Request(i, list(prompt), new_tokens, lambda tokens: None, method) for i, prompt in enumerate(PROMPTS)]
    generate(requests, adapter, [Hook()])
    return [request.tokens for request in requests]


@pytest.mark.parametrize("strategy", ["ar", "recguide"])
def test_replayed_forwards_write_the_same_text(
    strategy: str, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("recguide.forwards.WORTH_CAPTURING", 2)
    expected = texts(ModelAdapter.of(MODEL), "ar", 12)
    assert texts(graphs(recorder), strategy, 12) == expected
    assert 0 < recorder.captured < recorder.replayed


def test_replays_take_over_plan_adapter_and_padding(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes with the same graph but other lengths, prefixes, masks and adapter flags, against forwards as they are."""
    monkeypatch.setattr("recguide.forwards.WORTH_CAPTURING", 1)
    adapters = graphs(recorder), ModelAdapter.of(MODEL)
    caches = [DenseKV(2, capacity=64) for _ in adapters]
    block = Segment([8, 5, 5, 5], 6, True, adapter_from=0)
    forwards = [
        [[Segment(PROMPTS[0], 0)], [Segment(PROMPTS[1], 0)]],
        [[Segment([8, 3, 3, 3], 6), replace(block, hypothesis=2)], [Segment([1], 4)]],
        [[Segment([8, 3], 6)], [Segment([1, 2, 2], 4), replace(block, position=4, adapter_from=2)]],
        [[block], [replace(block, tokens=[8, *[5] * 7], position=4, outputs=(1, None))]],
    ]
    with installed(MODEL):
        for i, rows in enumerate(forwards):
            logits = []
            for adapter, kv in zip(adapters, caches, strict=True):
                logits.append(adapter.forward(rows, kv)[1].logits)
                for row in range(2):
                    kv.commit(row, min(len(rows[row][0].tokens), 3 if i else 6))
            torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)
    assert recorder.captured == 1, "three forwards of 9 to 16 tokens behind the prompts, one graph"
    assert recorder.replayed == 3


def test_the_adapter_is_among_the_static_inputs(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.forwards.WORTH_CAPTURING", 1)
    adapter, kv = graphs(recorder), DenseKV(1, capacity=64)
    with installed(MODEL):
        adapter.forward([[Segment(PROMPTS[0], 0)]], kv)
        kv.commit(0, 6)
        logits = [
            adapter.forward([[Segment([8, 5, 5, 5], 6, True, adapter_from=start)]], kv)[1].logits for start in (0, 3, 0)
        ]
    assert (recorder.captured, recorder.replayed) == (1, 3)
    assert torch.equal(logits[0], logits[2])
    assert (logits[0] - logits[1]).abs().max() > 0.1, "the adapter makes no difference"


def test_graphs_are_dropped_the_longest_unused_first(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.forwards.WORTH_CAPTURING", 1)
    monkeypatch.setattr("recguide.forwards.MOST_GRAPHS", 2)
    adapter, kv = graphs(recorder), DenseKV(1, capacity=128)
    captured = []
    with installed(MODEL):
        adapter.forward([[Segment(PROMPTS[0], 0)]], kv)
        kv.commit(0, 6)
        for length in (1, 2, 1, 4, 1, 2):
            adapter.forward([[Segment([8] * length, 6)]], kv)
            captured.append(recorder.captured)
    assert captured == [1, 2, 2, 3, 3, 4]


def test_a_cache_that_grows_gets_graphs_of_its_own(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.forwards.WORTH_CAPTURING", 1)
    adapter, kv, other = graphs(recorder), DenseKV(1, capacity=16), DenseKV(1, capacity=64)
    plain = ModelAdapter.of(MODEL)
    with installed(MODEL):
        for model, cache in ((adapter, kv), (plain, other)):
            model.forward([[Segment([3, 9, 4, 11] * 3, 0)]], cache)
            cache.commit(0, 12)
        for _ in range(5):
            tokens = [Segment([8, 7], kv.lengths[0])]
            logits = [m.forward([tokens], cache)[1].logits for m, cache in ((adapter, kv), (plain, other))]
            torch.testing.assert_close(*logits, rtol=0, atol=1e-4)
            kv.commit(0, 2)
            other.commit(0, 2)
    assert recorder.captured >= 2


def test_padding_is_put_back() -> None:
    shape = Shape.of(pack([[Segment([9] * 5, 3, True, adapter_from=1)]], [3], CPU))
    assert shape == Shape(tokens=8, rows=2, outputs=8, adapter=True)
    tensors = StaticTensors(shape, CPU)
    tensors.fill(pack([[Segment([9] * 7, 3, True, adapter_from=0)]], [3], CPU))
    padded = shape.pad(tensors.fill(pack([[Segment([9] * 5, 3, True, adapter_from=1, outputs=(1, None))]], [3], CPU)))
    assert padded.input_ids.tolist() == [9] * 5 + [0] * 3
    assert padded.position_ids.tolist() == [3, 4, 5, 6, 7, 0, 0, 0]
    assert padded.visible.tolist() == [[0, 5, 0, 0]] * 5 + [[i, i + 1, 0, 0] for i in (5, 6, 7)]
    assert padded.adapter is not None
    assert padded.adapter.tolist() == [False] + [True] * 4 + [False] * 3
    assert padded.output_rows is not None
    assert padded.output_rows.tolist() == [1, 2, 3, 4, 0, 0, 0, 0]
    assert (padded.starts, padded.prefix) == ((0, 5, 8), (3, 0))
