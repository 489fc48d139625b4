"""The backend `triton` and the kernels beside it, from plans and caches to whole texts, against torch."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import TemperatureLogitsWarper, TopKLogitsWarper

from recguide import Engine, EngineConfig, attach, ranking
from recguide.attention import Work, resolve_backend
from recguide.attention.torch_sdpa import TorchSDPA
from recguide.attention.triton import TritonAttention
from recguide.dense_kv import DenseKV, KVCache
from recguide.models.nemotron_labs_diffusion import NemotronLabsDiffusionModel
from recguide.paged_kv import PagedBatch, PagePool, PageTable
from recguide.ranking import _by_kernel, _by_torch, rank
from recguide.sampling import Predicted, Sampling, gumbel_noise, processed_scores
from recguide.segments import Plan, Segment, pack
from recguide.testing import toy_model

CPU = torch.device("cpu")
GROUPS, SIZE = 2, 16


@st.composite
def forwards(draw: st.DrawFn) -> list[tuple[int, list[Segment]]]:
    """Rows of a batch: how much is cached, and their segments; some rows take no part."""
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        prefix = draw(st.sampled_from([0, 1, 15, 16, 17, 40]))
        first = draw(st.integers(0, 9))
        segments = [Segment([0] * first, prefix, bidirectional=draw(st.booleans()))] if first else []
        for _ in range(draw(st.integers(0, 2)) if first else 0):
            segments.append(Segment([0] * draw(st.integers(1, 6)), 0, True, hypothesis=draw(st.integers(1, first))))
        rows.append((prefix, segments))
    if not any(segments for _, segments in rows):
        rows[0][1].append(Segment([0], rows[0][0]))
    return rows


def caches(lengths: list[int], room: int, generator: torch.Generator) -> list[KVCache]:
    """A dense cache and a batch of pages with the same random prefixes."""
    dense, pool = DenseKV(len(lengths), capacity=24), PagePool(60, 4)
    tables = []
    for length in lengths:
        table = PageTable(pool, [0] * (length + room))
        assert table.reserve(length + room)
        tables.append(table)
    plan = pack([[Segment([0] * length, 0)] if length else [] for length in lengths], [0] * len(lengths), CPU)
    paged = PagedBatch(pool, tables)
    if plan.query_tokens:
        keys, values = torch.randn(2, GROUPS, plan.query_tokens, SIZE, generator=generator)
        for kv in (dense, paged):
            kv.store(0, keys, values, plan)
            for row, length in enumerate(lengths):
                if length:
                    kv.commit(row, length)
        for row, table in enumerate(tables):
            assert table.reserve(room), row
    return [dense, paged]


def attended(backend: Any, plan: Plan, kv: KVCache, tensors: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    forward = backend.plan(plan, kv, torch.float32)
    out: Tensor = forward.run(0, *tensors, 0.3)
    assert forward.layers_run == 1
    return out


@settings(max_examples=6, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(forwards(), st.sampled_from([1, 3]), st.sampled_from([None, 16]), st.integers(0, 99))
def test_any_forward_equals_torch_and_leaves_its_tokens_in_the_cache(
    rows: list[tuple[int, list[Segment]]], group: int, split: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [prefix for prefix, _ in rows]
    room = max(sum(len(s.tokens) for s in segments) for _, segments in rows)
    ours, theirs = (caches(lengths, room, torch.Generator().manual_seed(seed)) for _ in range(2))
    for kv, other in zip(ours, theirs, strict=True):
        plan = pack([segments for _, segments in rows], kv.lengths, CPU)
        query = torch.randn(GROUPS * group, plan.query_tokens, SIZE, generator=generator)
        keys, values = torch.randn(2, GROUPS, plan.query_tokens, SIZE, generator=generator)
        out = attended(TritonAttention(split), plan, kv, (query, keys, values))
        expected = attended(TorchSDPA(), plan, other, (query, keys, values))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
        for row, (_, segments) in enumerate(rows):
            if segments:
                kv.commit(row, plan.tokens_of(row))
                other.commit(row, plan.tokens_of(row))
        # A second forward reads what the first has stored.
        plan = pack([[Segment([0], length)] for length in kv.lengths], kv.lengths, CPU)
        if isinstance(kv, PagedBatch):
            assert all(table.reserve(1) for table in (*kv._tables, *other._tables))  # type: ignore[attr-defined]
        query = torch.randn(GROUPS * group, plan.query_tokens, SIZE, generator=generator)
        keys, values = torch.randn(2, GROUPS, plan.query_tokens, SIZE, generator=generator)
        out = attended(TritonAttention(split), plan, kv, (query, keys, values))
        expected = attended(TorchSDPA(), plan, other, (query, keys, values))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@lru_cache
def model() -> NemotronLabsDiffusionModel:
    return attach(toy_model())


PROMPTS = torch.tensor([[3, 9, 4, 11, 2, 8], [0, 0, 7, 6, 13, 1]])


@lru_cache
def plain(new_tokens: int) -> list[list[int]]:
    """Plain decoding by transformers itself, with its own attention."""
    texts = model().generate(
        PROMPTS, attention_mask=PROMPTS.ne(0), max_new_tokens=new_tokens, suppress_tokens=[5], do_sample=False
    )
    return texts.tolist()


@pytest.mark.parametrize("strategy", ["recguide", "ar"])
def test_generate_writes_plain_decodings_text(strategy: str) -> None:
    texts = model().generate(
        PROMPTS,
        attention_mask=PROMPTS.ne(0),
        max_new_tokens=8,
        generation_strategy=strategy,
        recguide_config={"block_size": 4, "attention_backend": "triton"},
    )
    assert texts.tolist() == plain(8)


def test_sampling_writes_what_plain_sampling_writes() -> None:
    given = {"max_new_tokens": 6, "do_sample": True, "top_k": 9, "seed": 4}
    texts = [
        model()
        .generate(
            PROMPTS[:1],
            **given,
            generation_strategy=strategy,
            recguide_config={"block_size": 4, "attention_backend": backend},
        )
        .tolist()
        for strategy, backend in (("recguide", "triton"), ("ar", "triton"), ("ar", "torch_sdpa"))
    ]
    assert texts[0] == texts[1] == texts[2]


def test_the_engine_writes_plain_decodings_text() -> None:
    prompts = [[token for token in row if token] for row in PROMPTS.tolist()]
    with Engine(model(), EngineConfig(attention_backend="triton", page_size=4, kv_bytes=2**17)) as engine:
        results = engine.generate_batch(prompts, recguide_config={"block_size": 4}, max_new_tokens=8)
    assert [result.tokens for result in results] == [row[PROMPTS.shape[1] :] for row in plain(8)]


def test_auto_stays_with_torch_on_a_cpu() -> None:
    assert resolve_backend("auto").name == "torch_sdpa"
    assert resolve_backend("triton", Work(CPU, torch.float32, frozenset({16}))).name == "triton"


def predicted(logits: Tensor, by_position: bool = False) -> list[Predicted]:
    """Rules for most rows: sampled and greedy ones, with processors and without."""
    warp = (TemperatureLogitsWarper(0.7), TopKLogitsWarper(9))
    return [
        Predicted(Sampling(2**63 + 5, (), by_position), 0, [40, 41]),
        Predicted(Sampling(None, warp), 2, [7]),
        Predicted(Sampling(11, warp), 3, [8, 9]),
    ]


@pytest.mark.parametrize("best", [1, 2, 3, 5])
@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("rules", [False, True])
def test_ranking_by_the_kernel_is_that_of_torch(best: int, entropies: bool, rules: bool) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(best)) * 3
    logits[5, [7, 250]] = 20.0  # Equals: the lower one is first.
    before = logits.clone()
    given = predicted(logits) if rules else []
    scores = processed_scores(logits, given, [4])
    got, expected = (
        f(logits, scores.clone() if rules else scores, given, best, entropies, [4]) for f in (_by_kernel, _by_torch)
    )
    assert torch.equal(logits, before)
    assert got.best == expected.best
    for mine, other in ((got.probabilities, expected.probabilities), (got.entropies, expected.entropies)):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), rtol=1e-4, atol=1e-5)
    assert got.noise is None


def test_noise_is_kept_for_who_chooses_by_position_and_the_kernel_is_what_serves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(ranking, "_by_torch", None)
    noise = rank(logits, predicted(logits, by_position=True), 2, False, []).noise
    assert noise is not None
    assert torch.equal(noise[:2], gumbel_noise([2**63 + 5] * 2, [40, 41], 300, CPU))
    assert not noise[2:].any()
