"""
The backend `flashinfer`, whose kernels need a GPU. Its passes are computed here by FlashInfer's documented rules, and the calls themselves
are compared with the signatures of the FlashInfer that is installed.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from recguide.attention.torch_sdpa import TorchSDPA
from recguide.dense_kv import DenseKV, KVCache
from recguide.paged_kv import PagedBatch, PagePool
from recguide.segments import Plan, Segment, pack

CPU = torch.device("cpu")
GROUPS, SIZE = 2, 8
Call = tuple[str, int, frozenset[str]]
"""What was called, with how many arguments by place, and which by name."""


def attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`query [Q, H, D]`, `keys`, `values [K, G, D]`, `mask bool[Q, K]`: the output, and log2 of the softmax's sum `[Q, H]`."""
    repeated = [x.repeat_interleave(query.shape[1] // keys.shape[1], dim=1) for x in (keys, values)]
    scores = torch.einsum("qhd,khd->qhk", query, repeated[0]) * scale
    scores = scores.masked_fill(~mask[:, None], float("-inf"))
    out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), repeated[1])
    return out, scores.logsumexp(-1) / torch.log(torch.tensor(2.0))


class Prefill:
    """What both wrappers have in common."""

    calls: list[Call] = []

    def __init__(self, workspace: Tensor, kv_layout: str, **options: Any) -> None:
        self._note("__init__", 2, options)
        assert (kv_layout, workspace.dtype, options) == ("NHD", torch.uint8, {"backend": "fa2"})

    def _note(self, method: str, places: int, names: dict[str, Any]) -> None:
        self.calls.append((f"{type(self).__name__}.{method}", places, frozenset(names)))

    def _given(self, options: dict[str, Any], own: set[str]) -> None:
        self.options = options
        assert options.keys() >= {"q_data_type", "kv_data_type", "sm_scale", "num_qo_heads", *own}
        assert options["head_dim_qk"] == SIZE

    def _results(self, rows: list[tuple[Tensor, Tensor]], return_lse: bool) -> Any:
        out, lse = (torch.cat(parts) for parts in zip(*rows, strict=True))
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(Prefill):
    def plan(self, **options: Any) -> None:
        self._note("plan", 0, options)
        self._given(options, {"paged_kv_indices", "page_size"})
        assert options["causal"] is False
        # FlashInfer plans on the host; only the indices are read on the device.
        assert min(options["paged_kv_last_page_len"].tolist()) >= 1
        assert options["paged_kv_indices"].dtype == options["paged_kv_indptr"].dtype == torch.int32

    def run(self, query: Tensor, memory: tuple[Tensor, Tensor], **options: Any) -> Any:
        self._note("run", 2, options)
        o, rows = self.options, []
        assert memory[0].shape[1:] == (o["page_size"], GROUPS, SIZE)
        starts, pages = o["qo_indptr"].tolist(), o["paged_kv_indptr"].tolist()
        for row, last in enumerate(o["paged_kv_last_page_len"].tolist()):
            index = o["paged_kv_indices"][pages[row] : pages[row + 1]].long()
            count = (len(index) - 1) * o["page_size"] + last
            keys, values = (x[index].flatten(0, 1)[:count] for x in memory)
            own = query[starts[row] : starts[row + 1]]
            everything = torch.ones(len(own), count, dtype=torch.bool)
            rows.append(attention(own, keys, values, everything, o["sm_scale"]))
        assert query.shape[0] == starts[-1]
        return self._results(rows, **options)


class BatchPrefillWithRaggedKVCacheWrapper(Prefill):
    def plan(self, **options: Any) -> None:
        self._note("plan", 0, options)
        self._given(options, {"kv_indptr"})

    def run(self, query: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
        self._note("run", 3, options)
        assert query.is_contiguous()
        assert keys.is_contiguous()
        o, rows, used = self.options, [], 0
        starts = o["qo_indptr"].tolist()
        assert starts == o["kv_indptr"].tolist()
        for start, stop in pairwise(starts):
            length = stop - start
            if o.get("causal"):
                mask = torch.ones(length, length, dtype=torch.bool).tril()
            else:
                mask = o["custom_mask"][used : used + length**2].view(length, length)
                used += length**2
            own = (x[start:stop] for x in (query, keys, values))
            rows.append(attention(*own, mask, o["sm_scale"]))
        assert "custom_mask" not in o or used == len(o["custom_mask"])
        return self._results(rows, **{"return_lse": False} | options)


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    Prefill.calls.append(("merge_state", 4, frozenset()))
    top = torch.maximum(s_a, s_b)
    a, b = 2 ** (s_a - top), 2 ** (s_b - top)
    return (v_a * a[..., None] + v_b * b[..., None]) / (a + b)[..., None], top + torch.log2(a + b)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The backend on top of this file's FlashInfer."""
    library = ModuleType("flashinfer")
    for thing in (BatchPrefillWithPagedKVCacheWrapper, BatchPrefillWithRaggedKVCacheWrapper, merge_state):
        setattr(library, thing.__name__, thing)
    monkeypatch.setitem(sys.modules, "flashinfer", library)
    monkeypatch.delitem(sys.modules, "recguide.attention.flashinfer", raising=False)
    monkeypatch.setattr(Prefill, "calls", [])
    module = importlib.import_module("recguide.attention.flashinfer")
    monkeypatch.setattr(module, "WORKSPACE", 64)
    return module.FlashInferAttention()


def filled(kv: KVCache, lengths: list[int], seed: int) -> KVCache:
    """The cache after random tokens were committed, `lengths[r]` of row r."""
    plan = pack([[Segment([0] * length, 0)] if length else [] for length in lengths], [0] * len(lengths), CPU)
    keys, values = torch.randn(2, GROUPS, plan.query_tokens, SIZE, generator=torch.Generator().manual_seed(seed))
    kv.store(0, keys, values, plan)
    for row, length in enumerate(lengths):
        kv.commit(row, length)
    return kv


def paged(lengths: list[int], room: int) -> PagedBatch:
    pool = PagePool(40, 4)
    tables = [pool.new_table([0] * 99) for _ in lengths]
    for table, length in zip(tables, lengths, strict=True):
        assert table.reserve(length + room)
    return PagedBatch(pool, tables)


def run(backend: Any, plan: Plan, kv: KVCache) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(3 * GROUPS, plan.query_tokens, SIZE, generator=generator)
    keys, values = torch.randn(2, GROUPS, plan.query_tokens, SIZE, generator=generator)
    forward = backend.plan(plan, kv, torch.float32)
    first: Tensor = forward.run(0, query, keys, values, 0.4)
    assert torch.equal(forward.run(0, query, keys, values, 0.4), first)
    other_scale = forward.run(0, query, keys, values, 0.2)
    return torch.cat((first, other_scale))


FUSED = [Segment([0] * 4, 0), Segment([0] * 3, 0, True, hypothesis=2), Segment([0] * 2, 0, True, hypothesis=4)]
CASES: dict[str, tuple[list[list[Segment]], list[int]]] = {
    "a fused round": ([FUSED], [9]),
    "the last page exactly full": ([FUSED], [8]),
    "an empty prefix": ([FUSED], [0]),
    "whole prompts": ([[Segment([0] * 5, 0)], [Segment([0] * 2, 0)]], [0, 0]),
    "some prefixes empty": ([FUSED, [Segment([0], 0)], FUSED[:2]], [7, 0, 12]),
    "a row that takes no part": ([FUSED[:1], [], [Segment([0] * 3, 0, True)]], [7, 5, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_both_passes_together_equal_torch(name: str, backend: Any) -> None:
    rows, lengths = CASES[name]
    plan = pack(rows, lengths, CPU)
    room = max(plan.tokens_of(row) for row in range(len(rows)))
    for fresh in (lambda: DenseKV(len(rows), capacity=16), lambda: DenseKV(len(rows), 9), lambda: paged(lengths, room)):
        kv, other = (filled(fresh(), lengths, 3) if any(lengths) else fresh() for _ in range(2))
        if isinstance(kv, PagedBatch) and any(lengths):
            assert all(table.reserve(room) for batch in (kv, other) for table in batch._tables)  # type: ignore[attr-defined]
        torch.testing.assert_close(run(backend, plan, kv), run(TorchSDPA(), plan, other), rtol=1e-5, atol=1e-5)


def signature(source: Path, name: str) -> inspect.Signature:
    """Of a function or method in a file, without importing it, which may need a GPU; the last of its overloads."""
    body: list[Any] = ast.parse(source.read_text()).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{source.name} has no {name}"
        body = found[-1].body
    arguments = found[-1].args
    places = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    kinds = inspect.Parameter
    defaults = [kinds.empty] * (len(places) - len(arguments.defaults)) + [None] * len(arguments.defaults)
    parameters = [kinds(n, kinds.POSITIONAL_OR_KEYWORD, default=d) for n, d in zip(places, defaults, strict=True)]
    if arguments.vararg:
        parameters.append(kinds(arguments.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=kinds.empty if default is None else None))
    return inspect.Signature([p for p in parameters if p.name != "self"])


def test_every_call_fits_the_installed_flashinfer(backend: Any) -> None:
    own = sys.modules.pop("flashinfer")
    try:
        found = find_spec("flashinfer")
    finally:
        sys.modules["flashinfer"] = own
    if found is None or found.origin is None:
        pytest.skip("flashinfer-python is not installed: its dependencies bring CUDA's libraries, so CI does without")
    for name in CASES:
        test_both_passes_together_equal_torch(name, backend)
    folder = Path(found.origin).parent
    assert {name.split(".")[-1] for name, _, _ in Prefill.calls} == {"__init__", "plan", "run", "merge_state"}
    for name, places, names in set(Prefill.calls):
        source = folder / ("cascade.py" if name == "merge_state" else "prefill.py")
        signature(source, name).bind(*[None] * places, **dict.fromkeys(names))
