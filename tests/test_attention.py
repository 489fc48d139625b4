"""The reference backend against a softmax in double precision, packed plans against plain forwards of whole models."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from recguide import attention
from recguide.adapter import ModelAdapter
from recguide.attention import BACKENDS, Work, installed, resolve_backend, torch_sdpa
from recguide.attention.torch_sdpa import CALL, TorchSDPA, row_groups
from recguide.config import ATTENTION_BACKENDS
from recguide.dense_kv import DenseKV
from recguide.errors import ConfigError, MissingDependencyError, UnsupportedError
from recguide.models.draft_adapter import adapter_rows
from recguide.segments import Segment, pack
from recguide.testing import toy_model

CPU = torch.device("cpu")
GROUPS, SIZE, LAYERS = 2, 8, 2
PREFIXES = (0, 1, 63, 64, 65)


# --- the backend against a naive softmax ---------------------------------------------------------------------------


@st.composite
def a_batch(draw: st.DrawFn) -> tuple[list[list[Segment]], list[int]]:
    """Requests with unequal token counts: idle, drafting alone, or verifying with branches."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(("idle", "draft", "verify", "verify")))
        length = draw(st.integers(1, 5))
        row = [] if kind == "idle" else [Segment([0] * length, 0, bidirectional=kind == "draft")]
        if kind == "verify":
            for _ in range(draw(st.integers(0, 3))):
                row.append(Segment([0] * draw(st.integers(1, 4)), 0, True, 0, draw(st.integers(1, length))))
        rows.append(row)
    if not any(rows):
        rows[-1] = [Segment([0] * 3, 0)]
    return rows, [draw(st.sampled_from(PREFIXES)) for _ in rows]


def cache_with_prefix(prefix: list[int], generator: torch.Generator, poison: int = 0) -> tuple[DenseKV, list[Tensor]]:
    """
    A cache that holds random prefixes, and those prefixes: `prefixes[r]` is `[2, LAYERS, G, prefix[r], D]`.

    `poison` tokens of huge keys and values are written behind each row's prefix and never committed.
    """
    kv = DenseKV(len(prefix), capacity=8)
    prefixes = [torch.randn(2, LAYERS, GROUPS, n, SIZE, generator=generator) for n in prefix]
    for row, (keys, values) in enumerate(prefixes):
        if prefix[row]:
            kv.load(row, list(zip(keys, values, strict=True)))
    if poison:
        plan = pack([[Segment([0] * poison, 0)] for _ in prefix], kv.lengths, CPU)
        for layer in range(LAYERS):
            junk = torch.full((GROUPS, plan.query_tokens, SIZE), 1e4)
            kv.store(layer, junk, -junk, plan)
    return kv, prefixes


def naive_attention(
    rows: list[list[Segment]],
    prefixes: list[Tensor],
    layer: int,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scaling: float,
) -> Tensor:
    """Each query alone, in double precision, over the list of keys that the rule lets it see: `[T, H, D]`."""
    out, packed_start = [], 0
    for row, prefix in zip(rows, prefixes, strict=True):
        start = packed_start
        for segment in row:
            length = len(segment.tokens)
            for i in range(length):
                own = range(start, start + length) if segment.bidirectional else range(start, start + i + 1)
                seen = [*range(packed_start, packed_start + segment.hypothesis), *own]
                for head in range(query.shape[0]):
                    group = head // (query.shape[0] // GROUPS)
                    all_keys = torch.cat((prefix[0, layer, group], keys[group, seen])).double()
                    all_values = torch.cat((prefix[1, layer, group], values[group, seen])).double()
                    weights = (all_keys @ query[head, start + i].double() * scaling).softmax(-1)
                    out.append(weights @ all_values)
            start += length
        packed_start = start
    return torch.stack(out).view(query.shape[1], query.shape[0], SIZE)


@pytest.mark.parametrize("group_size", [1, 3, 5])
@given(batch=a_batch(), call=st.sampled_from([0, 1, 30, CALL]), seed=st.integers(0, 2**16))
@settings(max_examples=40)
def test_sdpa_equals_a_naive_softmax_for_each_query(
    group_size: int, batch: tuple[list[list[Segment]], list[int]], call: int, seed: int
) -> None:
    rows, prefix = batch
    generator = torch.Generator().manual_seed(seed)
    kv, prefixes = cache_with_prefix(prefix, generator)
    poisoned, _ = cache_with_prefix(prefix, torch.Generator().manual_seed(seed), poison=90)
    plan = pack(rows, kv.lengths, CPU)
    with mock.patch.object(torch_sdpa, "CALL", call):
        forwards = TorchSDPA().plan(plan, kv, torch.float32), TorchSDPA().plan(plan, poisoned, torch.float32)
    for layer in range(LAYERS):
        query = torch.randn(GROUPS * group_size, plan.query_tokens, SIZE, generator=generator)
        keys, values = torch.randn(2, GROUPS, plan.query_tokens, SIZE, generator=generator)
        out, from_poisoned = (f.run(layer, query, keys, values, 0.4) for f in forwards)
        expected = naive_attention(rows, prefixes, layer, query, keys, values, 0.4)
        assert out.shape == expected.shape
        assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert torch.equal(out, from_poisoned), "memory beyond what is valid leaks into the result"


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("count", [1, 2])
def test_one_request_of_one_or_two_tokens(prefix: int, count: int) -> None:
    """The paths without a mask and with the smallest one."""
    generator = torch.Generator().manual_seed(prefix)
    kv, prefixes = cache_with_prefix([prefix], generator, poison=3)
    rows = [[Segment([0] * count, prefix)]]
    plan = pack(rows, kv.lengths, CPU)
    query = torch.randn(6, count, SIZE, generator=generator)
    keys, values = torch.randn(2, GROUPS, count, SIZE, generator=generator)
    out = TorchSDPA().plan(plan, kv, torch.float32).run(0, query, keys, values, 1.0)
    expected = naive_attention(rows, prefixes, 0, query, keys, values, 1.0)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_an_unknown_backend_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"'flash'.*torch_sdpa"):
        resolve_backend("flash")
    assert ("auto", *BACKENDS) == ATTENTION_BACKENDS
    assert resolve_backend("torch_sdpa").name == "torch_sdpa"


@pytest.fixture(autouse=True)
def nothing_is_said_yet() -> None:
    attention._tell.cache_clear()


def test_auto_is_torch_on_a_cpu_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "recguide"):
        assert resolve_backend().name == resolve_backend().name == "torch_sdpa"
    assert [(r.levelname, r.message) for r in caplog.records] == [
        ("INFO", "Attention backend torch_sdpa: it is the one for cpu.")
    ]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], Work]:
    """Says that there is a CUDA device of some capability."""

    def pretend(capability: tuple[int, int]) -> Work:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        return Work(torch.device("cuda", 0), torch.bfloat16, frozenset({128}))

    return pretend


def test_auto_is_triton_on_a_cuda_device(a_gpu: Callable[[tuple[int, int]], Work]) -> None:
    pytest.importorskip("triton")
    assert resolve_backend("auto", a_gpu((9, 0))).name == "triton"


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((7, 5), {}, "capability 8.0 or later, and Some GPU has 7.5"),
        ((9, 0), {"dtype": torch.float64}, "float32, float16, bfloat16, and the model in float64"),
        ((9, 0), {"head_dims": frozenset({100})}, "a multiple of 8 up to 256, and the model's is 100"),
        ((9, 0), {"head_dims": frozenset({24, 16})}, "heads of one size, and the model's have 16 and 24"),
    ],
)
def test_auto_says_what_keeps_triton_from_running(
    capability: tuple[int, int],
    changes: dict[str, Any],
    reason: str,
    a_gpu: Callable[[tuple[int, int]], Work],
    caplog: pytest.LogCaptureFixture,
) -> None:
    pytest.importorskip("triton")
    work = replace(a_gpu(capability), **changes)
    assert resolve_backend("auto", work).name == "torch_sdpa"
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert reason in caplog.text
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        resolve_backend("triton", work)


def test_a_backend_that_cannot_run_here_is_refused_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.kernel_support.find_spec", lambda name: object())
    for name in ("triton", "flashinfer"):
        with pytest.raises(UnsupportedError, match=f"{name}.*needs a CUDA device.*is cpu.*use torch_sdpa"):
            resolve_backend(name)
    monkeypatch.setattr("recguide.kernel_support.find_spec", lambda name: None)
    for name, extra in (("triton", "kernels"), ("flashinfer", "flashinfer")):
        with pytest.raises(MissingDependencyError, match=rf'pip install "recguide\[{extra}\]"'):
            resolve_backend(name)


# --- whole models --------------------------------------------------------------------------------------------------

FAMILIES = ("llama", "qwen3", "mistral", "nld")
SHAPE = {
    "vocab_size": 24,
    "hidden_size": 48,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
STOCK = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None}),
}


@lru_cache
def model_of(family: str, implementation: str) -> PreTrainedModel:
    if family == "nld":
        model: PreTrainedModel = toy_model()
    else:
        config_class, model_class, more = STOCK[family]
        model = model_class(config_class(**SHAPE, **more)).eval()  # type: ignore[operator]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    model.set_attn_implementation(implementation)
    return model


@pytest.fixture(params=[(f, i) for f in FAMILIES for i in ("sdpa", "eager")], ids="-".join)
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    family, implementation = request.param
    model = model_of(family, implementation)
    yield model
    assert model.config._attn_implementation == implementation, "the setting was not restored"


def plain(model: PreTrainedModel, tokens: list[int], block: int = 0, adapter: bool = False) -> Tensor:
    """Logits `[len(tokens), V]` of a plain forward; the last `block` tokens see each other in both directions."""
    length = len(tokens)
    mask = torch.ones(length, length, dtype=torch.bool).tril()
    mask[length - block :, length - block :] = True
    if model.config._attn_implementation == "eager":
        mask = torch.zeros(length, length).masked_fill(~mask, torch.finfo(torch.float32).min)
    drafted = torch.tensor([False] * (length - block) + [adapter] * block)
    with torch.no_grad(), adapter_rows(drafted):
        return model(torch.tensor([tokens]), attention_mask=mask[None, None], use_cache=False).logits[0]


def plain_causal(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def near(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_packed_plan_equals_separate_plain_forwards(model: PreTrainedModel) -> None:
    """Three requests in one forward: a verification with two branches, a row at rest, and a draft alone."""
    prompts = [[1, 7, 3, 9, 2, 8, 4], [6], [1, 2, 12, 4]]
    verified, first, second, draft = [11, 6, 13, 2], [14, 5, 5], [5, 5, 5, 5], [3, 5, 5]
    adapter, kv = ModelAdapter(model, TorchSDPA()), DenseKV(3, capacity=4)
    drafts = model.config.model_type == "nemotron_labs_diffusion"
    on = 0 if drafts else None
    with installed(model):
        _, predictions = adapter.forward([[Segment(p, 0)] for p in prompts], kv)
        near(predictions.logits, torch.cat([plain_causal(model, p) for p in prompts]))
        for row, prompt in enumerate(prompts):
            kv.commit(row, len(prompt))
        rows = [
            [Segment(verified, 7), Segment(first, 9, True, on, 2), Segment(second, 11, True, on, 4)],
            [],
            [Segment(draft, 4, True, on)],
        ]
        plan, predictions = adapter.forward(rows, kv)
        logits = predictions.logits
    assert plan.outputs == (((0, 4), (4, 7), (7, 11)), (), ((11, 14),))
    near(logits[0:4], plain_causal(model, prompts[0] + verified)[-4:])
    near(logits[4:7], plain(model, [*prompts[0], *verified[:2], *first], block=3, adapter=drafts)[-3:])
    near(logits[7:11], plain(model, [*prompts[0], *verified, *second], block=4, adapter=drafts)[-4:])
    near(logits[11:14], plain(model, prompts[2] + draft, block=3, adapter=drafts)[-3:])
    assert (logits[11:14] - plain_causal(model, prompts[2] + draft)[-3:]).abs().max() > 0.01, "the block is not causal"


def test_a_plain_forward_is_the_same_while_installed(model: PreTrainedModel) -> None:
    tokens = torch.tensor([[1, 7, 3, 9, 2], [0, 0, 4, 8, 6]])
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "use_cache": False}
    with torch.no_grad():
        before = model(**inputs).logits
        with installed(model):
            inside = model(**inputs).logits
        after = model(**inputs).logits
    assert torch.equal(inside, before)
    assert torch.equal(after, before)


def test_the_setting_is_restored_after_an_exception_and_by_the_outermost_only(model: PreTrainedModel) -> None:
    own = model.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), installed(model):
        raise RuntimeError("inside")
    assert model.config._attn_implementation == own
    with installed(model):
        with pytest.raises(RuntimeError, match="inner"), installed(model):
            raise RuntimeError("inner")
        assert model.config._attn_implementation != own
        near(packed(model, [1, 2, 3]), plain_causal(model, [1, 2, 3]))
    assert model.config._attn_implementation == own


def packed(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    return ModelAdapter(model, TorchSDPA()).forward([[Segment(tokens, 0)]], DenseKV(1))[1].logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_two_threads_overlap_in_one_model(implementation: str) -> None:
    """The first to enter leaves first: the second still computes packed forwards, and the last one restores."""
    model = model_of("nld", implementation)
    expected = plain_causal(model, [1, 7, 3, 9])
    second_is_in, first_is_out = threading.Event(), threading.Event()
    results: dict[str, Tensor] = {}

    def first() -> None:
        with installed(model):
            second_is_in.wait(20)
            results["first"] = packed(model, [1, 7, 3, 9])
        first_is_out.set()

    def second() -> None:
        with installed(model):
            second_is_in.set()
            first_is_out.wait(20)
            results["second"] = packed(model, [1, 7, 3, 9])
            results["plain"] = plain_causal(model, [1, 7, 3, 9])

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert model.config._attn_implementation == implementation
    near(results["first"], expected)
    near(results["second"], expected)
    assert torch.equal(results["plain"], expected)


def test_two_models_do_not_disturb_each_other() -> None:
    llama, eager = model_of("llama", "sdpa"), model_of("nld", "eager")
    with installed(llama):
        with installed(eager):
            near(packed(llama, [1, 2, 3]), plain_causal(llama, [1, 2, 3]))
            near(packed(eager, [1, 2, 3]), plain_causal(eager, [1, 2, 3]))
        assert eager.config._attn_implementation == "eager"
        near(packed(llama, [4, 2]), plain_causal(llama, [4, 2]))
    assert llama.config._attn_implementation == "sdpa"


def test_rows_of_the_same_length_may_change_places() -> None:
    """The longer prefix makes a group of its own that comes first: what goes there must come back."""
    generator = torch.Generator().manual_seed(0)
    kv, prefixes = cache_with_prefix([3, 40], generator)
    rows = [[Segment([0] * 2, 3)], [Segment([0] * 2, 40)]]
    plan = pack(rows, kv.lengths, CPU)
    assert row_groups(plan, 10) == [(1,), (0,)]
    query = torch.randn(6, 4, SIZE, generator=generator)
    keys, values = torch.randn(2, GROUPS, 4, SIZE, generator=generator)
    with mock.patch.object(torch_sdpa, "CALL", 10):
        out = TorchSDPA().plan(plan, kv, torch.float32).run(0, query, keys, values, 1.0)
    expected = naive_attention(rows, prefixes, 0, query, keys, values, 1.0)
    assert (out - expected).abs().max() <= 1e-5 * expected.abs().max()


@given(batch=a_batch(), call=st.integers(1, 500))
def test_grouping_never_costs_more_than_rows_alone(batch: tuple[list[list[Segment]], list[int]], call: int) -> None:
    rows, prefix = batch
    plan = pack(rows, prefix, CPU)
    groups = row_groups(plan, call)
    live = [row for row in range(len(rows)) if plan.tokens_of(row)]
    assert sorted(row for group in groups for row in group) == live
    assert row_groups(plan, 0) == [tuple(live)]

    def pairs(group: tuple[int, ...]) -> int:
        longest = max(prefix[row] + plan.tokens_of(row) for row in group)
        return len(group) * longest * max(plan.tokens_of(row) for row in group) + call

    assert sum(map(pairs, groups)) <= sum(pairs((row,)) for row in live)
