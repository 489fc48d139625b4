import pytest
import torch
from torch import Tensor

from recguide_kernels import reference
from recguide_kernels.kv_commit import commit_work, kv_commit
from recguide_kernels.packed import PackedRound

NO_INTERVALS = torch.empty(0, 4, dtype=torch.int64)


def tensors(tokens: int, slots: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Keys and values `[G, T, D]` as a model gives them, transposed; caches `[N, G, D]` full of NaN."""
    generator = torch.Generator().manual_seed(tokens + size)
    keys, values = torch.randn(2, tokens, 2, size, generator=generator).to(dtype).transpose(1, 2)
    key_cache, value_cache = torch.full((2, slots, 2, size), float("nan"), dtype=dtype)
    return keys, values, key_cache, value_cache


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=77.0), b.nan_to_num(nan=77.0))


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("size", [8, 80])
def test_copies_what_the_reference_copies_and_nothing_else(page_size: int, size: int) -> None:
    starts, prefix, counts = (0, 20, 20, 37, 41), (0, 9, 16, 31), [20, 0, 17, 3]
    width = 36
    tables = torch.randperm(4 * width, generator=torch.Generator().manual_seed(1)).view(4, width).to(torch.int32)
    packed = PackedRound(starts, prefix, NO_INTERVALS, tables, page_size)
    keys, values, key_cache, value_cache = tensors(41, 4 * width * page_size + 1, size)
    expected = key_cache.clone(), value_cache.clone()
    kv_commit(keys, values, key_cache, value_cache, packed, commit_work(packed, torch.tensor(counts)))
    reference.kv_commit(keys, values, *expected, packed, counts)
    assert same(key_cache, expected[0])
    assert same(value_cache, expected[1])
    assert int((~key_cache.isnan()).sum()) == sum(counts) * 2 * size


def test_counts_below_a_limit() -> None:
    packed = PackedRound((0, 40), (3,), NO_INTERVALS, torch.tensor([[2, 0, 1, 3]]), 16)
    keys, values, key_cache, value_cache = tensors(40, 65, 8)
    expected = key_cache.clone(), value_cache.clone()
    kv_commit(keys, values, key_cache, value_cache, packed, commit_work(packed, torch.tensor([16]), limit=16))
    reference.kv_commit(keys, values, *expected, packed, [16])
    assert same(key_cache, expected[0])
    assert same(value_cache, expected[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    packed = PackedRound((0, 4), (1,), NO_INTERVALS, torch.tensor([[0]]), 16)
    keys, values, key_cache, value_cache = tensors(4, 17, 8, dtype)
    kv_commit(keys, values, key_cache, value_cache, packed, commit_work(packed, torch.tensor([4])))
    assert torch.equal(key_cache[1:5], keys.transpose(0, 1))
    assert torch.equal(value_cache[1:5], values.transpose(0, 1))


def test_a_cache_of_another_dtype() -> None:
    """To float16: the interpreter cuts bfloat16 off where devices round."""
    packed = PackedRound((0, 4), (1,), NO_INTERVALS, torch.tensor([[0]]), 16)
    keys, values, _, _ = tensors(4, 17, 8)
    key_cache, value_cache = torch.zeros(2, 17, 2, 8, dtype=torch.float16)
    kv_commit(keys, values, key_cache, value_cache, packed, commit_work(packed, torch.tensor([4])))
    assert torch.equal(key_cache[1:5], keys.transpose(0, 1).half())
    assert torch.equal(value_cache[1:5], values.transpose(0, 1).half())


def test_offsets_beyond_32_bits() -> None:
    page = 2**31 // (16 * 2 * 8) + 3
    memory = torch.empty((page + 1) * 16, 2, 8, dtype=torch.float16)  # Only what is written takes memory.
    packed = PackedRound((0, 5), (2,), NO_INTERVALS, torch.tensor([[page]]), 16)
    keys, _, _, _ = tensors(5, 17, 8, torch.float16)
    kv_commit(keys, keys, memory, memory, packed, commit_work(packed, torch.tensor([5])))
    assert torch.equal(memory[page * 16 + 2 : page * 16 + 7], keys.transpose(0, 1))


def test_nothing_to_copy() -> None:
    packed = PackedRound((0, 0), (0,), NO_INTERVALS, torch.zeros(1, 1, dtype=torch.int32), 16)
    keys, values, key_cache, value_cache = tensors(0, 17, 8)
    kv_commit(keys, values, key_cache, value_cache, packed, commit_work(packed, torch.tensor([0])))
    assert bool(key_cache.isnan().all())


def test_refuses() -> None:
    packed = PackedRound((0, 4), (1,), NO_INTERVALS, torch.tensor([[0]]), 16)
    keys, values, key_cache, value_cache = tensors(4, 17, 8)
    with pytest.raises(ValueError, match="one a request"):
        kv_commit(keys, values, key_cache, value_cache, packed, commit_work(packed, torch.tensor([1, 1])))
    with pytest.raises(ValueError, match="do not fit"):
        kv_commit(keys, values, key_cache[:, :1], value_cache, packed, commit_work(packed, torch.tensor([1])))
    with pytest.raises(ValueError, match="contiguous in D"):
        kv_commit(
            keys,
            values,
            key_cache.transpose(0, 2).contiguous().transpose(0, 2),
            value_cache,
            packed,
            commit_work(packed, torch.tensor([1])),
        )
    with pytest.raises(ValueError, match="counts must be contiguous"):
        commit_work(PackedRound((0, 2, 4), (1, 1), NO_INTERVALS, torch.tensor([[0], [0]]), 16), torch.ones(4)[::2])
    wide = PackedRound((0, 4), (1,), NO_INTERVALS, torch.tensor([[0, 0, 1, 0]])[:, ::2], 16)
    with pytest.raises(ValueError, match="contiguous rows"):
        kv_commit(keys, values, key_cache, value_cache, wide, commit_work(wide, torch.tensor([1])))
