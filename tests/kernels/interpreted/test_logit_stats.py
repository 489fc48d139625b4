from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recguide.sampling import gumbel_noise
from recguide_kernels import reference
from recguide_kernels.logit_stats import NO_NOISE, PART, _exponential, logit_stats, noise_keys

CPU = torch.device("cpu")


def check(
    logits: Tensor,
    excluded: list[int],
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    top: int = 2,
) -> None:
    """Against the reference in float64, with the noise that sampling draws."""
    noise = None
    if seeds is not None and positions is not None:
        drawn = [
            gumbel_noise([s], [p], logits.shape[1], CPU) if p != NO_NOISE else None
            for s, p in zip(seeds, positions, strict=True)
        ]
        noise = torch.cat([torch.zeros(1, logits.shape[1]) if row is None else row for row in drawn])
        # As the kernel and sampling add it, in float32.
        expected = reference.logit_stats(logits.float(), excluded, noise, top)
        entropies = reference.logit_stats(logits.double(), excluded).entropies
    else:
        expected = reference.logit_stats(logits.double(), excluded, top=top)
        entropies = expected.entropies
    keys = None if seeds is None or positions is None else noise_keys(seeds, positions, CPU)
    got = logit_stats(logits, excluded, keys, top)
    assert torch.equal(got.ids, expected.ids)
    torch.testing.assert_close(got.probabilities.double(), expected.probabilities.double(), rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(got.margins.double(), expected.margins.double(), rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(got.entropies.double(), entropies, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("vocabulary", [2, 3, 7, PART - 1, PART, PART + 1, 2 * PART + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_the_reference(vocabulary: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    check((torch.randn(2, vocabulary, generator=generator) * 4).to(dtype), [])


def test_ties_go_to_the_lowest_id_like_argmax() -> None:
    logits = torch.zeros(4, 2 * PART + 9)
    logits[1, [PART + 3, 5, 2 * PART + 8]] = 2.0
    logits[2, [2 * PART, 2 * PART + 1]] = 2.0
    logits[3, [7, 8]] = torch.tensor([1.0, 3.0])
    logits[3, PART + 1] = 3.0
    got = logit_stats(logits)
    assert got.ids.tolist() == [[0, 1], [5, PART + 3], [2 * PART, 2 * PART + 1], [8, PART + 1]]
    assert torch.equal(got.ids[:, 0], logits.argmax(-1))
    assert got.margins[:3].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("top", [2, 3, 4, 7])
def test_as_many_of_the_likeliest_as_are_wanted(top: int) -> None:
    """Also where they are all in one part, spread over parts, equal, or fewer in a part than wanted."""
    logits = torch.randn(4, 2 * PART + 3, generator=torch.Generator().manual_seed(top))
    logits[1, PART : PART + 9] += 20
    logits[2] = 0.0
    logits[3, 2 * PART :] += 20
    check(logits, [PART + 1], top=top)
    check(logits, [PART + 1], [5, 6, 7, 8], [1, 2, 3, NO_NOISE], top=top)


def test_excluded_tokens_take_no_part() -> None:
    logits = torch.randn(2, PART + 40, generator=torch.Generator().manual_seed(3))
    logits[:, 17] = float("nan")
    logits[:, PART + 39] = float("inf")
    logits[:, 0] = 3e38
    check(logits, [PART + 39, 17, 0, 17])
    got = logit_stats(logits, [17, PART + 39, 0])
    assert not {0, 17, PART + 39} & set(got.ids.flatten().tolist())


def test_a_part_with_nothing_but_excluded_or_impossible_tokens() -> None:
    logits = torch.full((2, PART + 2), float("-inf"))
    logits[0, 9] = 1.5
    logits[1, PART + 1] = -2.0
    check(logits, [PART])
    got = logit_stats(logits, [PART])
    assert got.ids.tolist() == [[9, 0], [PART + 1, 0]]
    assert got.probabilities.tolist() == [[1.0, 0.0], [1.0, 0.0]]
    assert got.entropies.tolist() == [0.0, 0.0]


def test_extreme_logits_stay_finite() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 3e38], [-3e38, -3e38, -3e38, -3e38], [88.0, 90.0, -1e4, 1e4]])
    check(logits, [])


def test_rows_of_a_wider_tensor_with_poison_beside_them() -> None:
    wide = torch.full((3, PART + 100), float("nan"))
    wide[:, 30 : PART + 50] = torch.randn(3, PART + 20, generator=torch.Generator().manual_seed(4))
    check(wide[:, 30 : PART + 50], [5])


def test_no_rows() -> None:
    got = logit_stats(torch.empty(0, 10))
    assert got.ids.shape == (0, 2)
    assert got.entropies.shape == (0,)


def test_offsets_beyond_32_bits() -> None:
    memory = torch.empty(2**31 + 2**20, dtype=torch.float16)  # Only what is written takes memory.
    logits = memory.as_strided((2, 50), (2**31 + 64, 1))
    logits[:] = torch.randn(2, 50, generator=torch.Generator().manual_seed(5))
    check(logits, [])


def test_equal_bits_whatever_the_neighbours() -> None:
    logits = torch.randn(4, PART + 30, generator=torch.Generator().manual_seed(6))
    together = logit_stats(logits)
    for order in ([3, 1, 0, 2], [2], [1, 1, 3]):
        part = logit_stats(logits[order])
        for name in ("ids", "probabilities", "margins", "entropies"):
            assert torch.equal(getattr(part, name), getattr(together, name)[order])


@pytest.mark.parametrize("vocabulary", [6, PART + 3])
def test_noise_is_that_of_sampling(vocabulary: int) -> None:
    seeds, positions = [0, 2**64 - 1, 2**63, 12345, 7], [0, 2**32 - 1, 2**31, 77, NO_NOISE]
    logits = torch.randn(5, vocabulary, generator=torch.Generator().manual_seed(7))
    check(logits, [2], seeds, positions)


def test_noise_itself() -> None:
    """With equal logits the ids are those of the highest noise, and the probabilities tell its height."""
    noise = gumbel_noise([99], [5], PART + 3, CPU)
    got = logit_stats(torch.zeros(1, PART + 3), [], noise_keys([99], [5], CPU))
    assert got.ids.tolist() == noise.topk(2).indices.tolist()
    torch.testing.assert_close(got.probabilities, noise.softmax(-1).topk(2).values, rtol=1e-5, atol=0)


def test_exponential_keeps_its_precision_in_both_tails() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(words, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.arange(0, SIZE)
        tl.store(out + at, _exponential(tl.load(words + at).to(tl.uint32, bitcast=True)))

    words = torch.tensor(
        [
            0,
            1,
            2,
            3,
            1000,
            2**20,
            2**30,
            2**31 - 200,
            2**31,
            2**31 + 200,
            3 * 2**30,
            2**32 - 2**9,
            2**32 - 300,
            2**32 - 2,
            2**32 - 1,
            7,
        ]
    )
    out = torch.empty(16)
    kernel[(1,)](words.to(torch.uint32).view(torch.int32), out, SIZE=16)
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24).double()
    torch.testing.assert_close(out.double(), -torch.log1p(-uniform), rtol=4e-7, atol=0)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_row(data: st.DataObject) -> None:
    size = data.draw(st.integers(3, 40))
    # Few distinct values, so that ties are common.
    values = st.sampled_from([-1e30, -3.0, 0.0, 0.5, 0.5, 2.0])
    row = data.draw(st.lists(values, min_size=size, max_size=size))
    excluded = data.draw(st.lists(st.integers(0, size - 1), max_size=size - 2, unique=True))
    check(torch.tensor([row]), excluded, top=data.draw(st.integers(2, size - len(excluded))))


@pytest.mark.parametrize(
    ("logits", "arguments", "message"),
    [
        (torch.zeros(4), {}, "T, V"),
        (torch.zeros(4, 3).t(), {}, "contiguous"),
        (torch.zeros(1, 3), {"excluded": [0, 2]}, "from 2 to the tokens that are left, 3 less 2"),
        (torch.zeros(1, 3), {"top": 4}, "got 4"),
        (torch.zeros(1, 3), {"top": 1}, "got 1"),
        (torch.zeros(1, 3), {"excluded": [3]}, "from 0 to 2"),
        (torch.zeros(1, 3), {"keys": torch.zeros(2, 2, dtype=torch.int64)}, "keys must be"),
        (torch.zeros(2, 3), {"keys": torch.zeros(2, 2)}, "keys must be"),
    ],
)
def test_refuses(logits: Tensor, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        logit_stats(logits, **arguments)
