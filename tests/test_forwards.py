"""Forwards as they are, compiled, and what is refused. Captured ones are tested with the kernels, which they need."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from recguide import Engine, EngineConfig, UnsupportedError, attach
from recguide.adapter import ModelAdapter
from recguide.attention import installed
from recguide.attention.torch_sdpa import TorchSDPA
from recguide.config import ForwardConfig
from recguide.dense_kv import DenseKV
from recguide.errors import MissingDependencyError
from recguide.forwards import Forwards, Shape, compile_problem
from recguide.segments import Segment, pack
from recguide.testing import toy_model

CPU = torch.device("cpu")
MODEL = attach(toy_model())
BLOCK = Segment([8, 5, 5, 5], 6, True, adapter_from=0)


@pytest.mark.slow
def test_compiled_forwards_are_those_that_they_are_compiled_from() -> None:
    """Without the draft adapter and with it, per token; one program serves any number of tokens and any prefix."""
    if (problem := compile_problem(CPU)) is not None:
        pytest.skip(str(problem))
    adapters = ModelAdapter.of(MODEL, ForwardConfig(compile=True)), ModelAdapter.of(MODEL)
    caches = [DenseKV(2, capacity=64) for _ in adapters]
    forwards = [
        [[Segment([3, 9, 4, 11, 2, 8], 0)], [Segment([7, 6, 13, 1], 0)]],
        [[BLOCK], [replace(BLOCK, position=4)]],
        [[replace(BLOCK, adapter_from=2)], [replace(BLOCK, position=4, adapter_from=None)]],
        [[Segment([8, 3, 3], 6), replace(BLOCK, hypothesis=2)], [Segment([1], 4)]],
        [[Segment([8, 3, 3], 6)], []],
    ]
    all_logits = []
    programs = torch._dynamo.utils.counters["stats"]
    before = programs["unique_graphs"]
    with installed(MODEL):
        for rows in forwards:
            logits = []
            for adapter, kv in zip(adapters, caches, strict=True):
                plan, predictions = adapter.forward(rows, kv)
                logits.append(predictions.logits)
                for row in range(2):
                    kv.commit(row, plan.tokens_of(row) if not plan.prefix[row] else 0)
            torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=1e-4)
            all_logits.append(logits[0])
    assert programs["unique_graphs"] - before == 2, "one program with the adapter among its inputs, and one without"
    assert (all_logits[1] - all_logits[2]).abs().max() > 0.1, "the adapter makes no difference"


def test_without_a_compiler_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        MissingDependencyError, match=r"compile=True cannot be honoured: .*C\+\+ compiler.*'g\+\+'.*set CXX"
    ):
        ModelAdapter.of(MODEL, ForwardConfig(compile=True))


def test_cuda_graphs_on_a_cpu_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="needs a CUDA device, and the model is on cpu"):
        MODEL.generate(
            torch.tensor([[3, 9]]), max_new_tokens=2, generation_strategy="ar", recguide_config={"cuda_graphs": True}
        )


def test_a_layer_that_does_not_ask_is_found_out() -> None:
    forwards, kv = Forwards(MODEL, TorchSDPA()), DenseKV(1)
    forwards.layers = 3
    run = forwards.prepare(pack([[Segment([3], 0)]], [0], CPU), kv)
    with installed(MODEL), pytest.raises(UnsupportedError, match="has 3 layers, but 2 asked"):
        run()


def test_tables_belong_to_one_way_of_running() -> None:
    backends = [
        ModelAdapter(MODEL, TorchSDPA(), forwards=Forwards(MODEL, TorchSDPA(), compiled)).fingerprint.backend
        for compiled in (False, True)
    ]
    assert backends == ["torch_sdpa", "torch_sdpa+compile"]


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (3, 4), (16, 16), (17, 32), (64, 64), (128, 128), (129, 192)])
def test_few_shapes_hold_all_forwards(tokens: int, expected: int) -> None:
    rows = [[Segment([7] * tokens, 3, outputs=(-1, None))], [], []]
    assert Shape.of(pack(rows, [3, 0, 0], CPU)) == Shape(expected, rows=4, outputs=1, adapter=False)


@pytest.mark.parametrize("given", [{"attention_backend": "torch_sdpa"}, {"compile": True}])
def test_an_engine_runs_all_requests_alike(given: dict[str, Any]) -> None:
    if "compile" in given and compile_problem(CPU) is not None:
        pytest.skip("there is no compiler")
    with Engine(MODEL) as engine, pytest.raises(UnsupportedError, match=f"give {next(iter(given))} to EngineConfig"):
        engine.add_request([3, 9], recguide_config=given, max_new_tokens=2)
    if "compile" not in given:
        with Engine(MODEL, EngineConfig(**given)) as engine:
            result = engine.add_request([3, 9], recguide_config=given, max_new_tokens=2).result(60)
        assert len(result.tokens) == 2


def test_an_engine_that_cannot_run_so_is_not_made() -> None:
    for name in ("triton", "flashinfer"):
        with pytest.raises((UnsupportedError, MissingDependencyError), match=re.escape(name)):
            Engine(MODEL, EngineConfig(attention_backend=name))
