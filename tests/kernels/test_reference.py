"""The references against what recguide computes today: its dense mask, its argmax and softmax, its pages."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from recguide.attention.torch_sdpa import TorchSDPA
from recguide.paged_kv import PagedBatch, PagePool
from recguide.segments import Segment, pack
from recguide_kernels import reference
from recguide_kernels.packed import PackedRound

CPU = torch.device("cpu")
PAGE = 4


def segments(shapes: list[tuple[int, bool, int]], position: int) -> list[Segment]:
    return [Segment([0] * length, position, both, hypothesis=seen) for length, both, seen in shapes]


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, bool, int]]]]:
    requests = []
    for _ in range(draw(st.integers(1, 3))):
        first = draw(st.integers(1, 9))
        shapes = [(first, draw(st.booleans()), 0)]
        for _ in range(draw(st.integers(0, 3))):
            shapes.append((draw(st.integers(1, 9)), draw(st.booleans()), draw(st.integers(0, first))))
        requests.append((draw(st.integers(0, 11)), shapes))
    return requests


@settings(max_examples=30, deadline=None)
@given(rounds(), st.sampled_from([1, 3]))
def test_attention_and_commit_equal_the_sdpa_backend_over_a_paged_batch(
    requests: list[tuple[int, list[tuple[int, bool, int]]]], group: int
) -> None:
    """Prefixes are committed by the kernel's reference, then both attend to them; the backend finds them in its own pages."""
    generator = torch.Generator().manual_seed(1)
    heads, size = 2, 8
    pool = PagePool(64, PAGE)
    prefix = [cached for cached, _ in requests]
    tables = [pool.new_table([]) for _ in requests]
    batch = PagedBatch(pool, tables)
    key_cache, value_cache = torch.zeros(2, 64 * PAGE + 1, heads, size, dtype=torch.float64)
    filling = pack([segments([(max(n, 1), False, 0)], 0) for n in prefix], [0] * len(prefix), CPU)
    round_ = pack([segments(shapes, n) for n, shapes in requests], prefix, CPU)

    def fresh(tokens: int) -> torch.Tensor:
        return torch.randn(2, heads, tokens, size, dtype=torch.float64, generator=generator)

    def padded_tables() -> torch.Tensor:
        return torch.tensor([table.pages + [0] * (64 - len(table.pages)) for table in tables])

    for table, cached in zip(tables, prefix, strict=True):
        assert table.reserve(max(cached, 1))
    keys, values = fresh(filling.query_tokens)
    empty = PackedRound(filling.starts, filling.prefix, filling.visible, padded_tables(), PAGE)
    batch.store(0, keys, values, filling)
    reference.kv_commit(keys, values, key_cache, value_cache, empty, prefix)
    for row, cached in enumerate(prefix):
        batch.commit(row, cached)
    for table, row in zip(tables, range(len(prefix)), strict=True):
        assert table.reserve(round_.tokens_of(row))

    keys, values = fresh(round_.query_tokens)
    query = torch.randn(heads * group, round_.query_tokens, size, dtype=torch.float64, generator=generator)
    packed = PackedRound(round_.starts, round_.prefix, round_.visible, padded_tables(), PAGE)
    got = reference.segment_attention(query, keys, values, key_cache, value_cache, packed, 0.3)
    expected = TorchSDPA().plan(round_, batch, torch.float64).run(0, query, keys, values, 0.3)
    torch.testing.assert_close(got, expected)


def test_attention_reads_nothing_but_prefixes_and_gives_zeros_to_who_sees_nothing() -> None:
    cache = torch.full((17, 1, 8), float("nan"))
    cache[4:7] = 1.0
    visible = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0]])
    query, keys, values = torch.ones(3, 1, 2, 8)
    packed = PackedRound((0, 2), (3,), visible, torch.tensor([[1, 3]]), PAGE)
    out = reference.segment_attention(query, keys, values, cache, cache, packed, 1.0)
    torch.testing.assert_close(out, torch.ones(2, 1, 8))
    packed = PackedRound((0, 2), (0,), visible, torch.tensor([[1]]), PAGE)
    out = reference.segment_attention(query, keys, values, cache, cache, packed, 1.0)
    assert out[1].tolist() == [[0.0] * 8]


@pytest.mark.parametrize("excluded", [[], [3], [0, 5, 8]])
@pytest.mark.parametrize("noisy", [False, True])
def test_logit_stats_by_definition(excluded: list[int], noisy: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(6, 9, dtype=torch.float64, generator=generator).mul(2).round()
    noise = torch.randn(6, 9, dtype=torch.float64, generator=generator) if noisy else None
    got = reference.logit_stats(logits, excluded, noise)
    own = logits.clone()
    own[:, excluded] = float("-inf")
    scores = own if noise is None else own + noise
    first = scores.argmax(-1)
    second = scores.scatter(1, first[:, None], float("-inf")).argmax(-1)
    probabilities = F.softmax(scores, -1)
    assert torch.equal(got.ids, torch.stack((first, second), 1))
    torch.testing.assert_close(got.probabilities, probabilities.gather(1, got.ids))
    torch.testing.assert_close(got.margins, got.probabilities[:, 0] - got.probabilities[:, 1])
    torch.testing.assert_close(got.entropies, torch.distributions.Categorical(logits=own).entropy())
