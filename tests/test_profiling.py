"""Costs are measured for every cell, and measuring leaves no trace in the caches."""

from __future__ import annotations

from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.profiling import QUERY_TOKENS, measure_costs
from recguide.testing import toy_model


def test_every_cell_is_measured_once() -> None:
    adapter = ModelAdapter(toy_model(), resolve_backend())
    advanced: list[int] = []
    pairs = list(
        measure_costs(adapter, (1, 3), (1, 8), (5, 17), repeats=2, done=[(5, 1)], advance=lambda: advanced.append(1))
    )
    cells = [cost for rounds, _ in pairs for cost in rounds]
    assert [(c.context, c.load, c.block_size) for c in cells] == [
        (context, load, size) for context, load in ((5, 3), (17, 1), (17, 3)) for size in (1, 8)
    ]
    assert all(c.verify_ms > 0 for c in cells)
    assert all((c.draft_ms > 0) == (c.block_size > 1) for c in cells), "plain decoding drafts nothing"
    assert len(advanced) == 4
    forwards = [cost for _, costs in pairs for cost in costs]
    assert [(c.context, c.load, c.query_tokens) for c in forwards] == [
        (context, load, tokens) for context, load in ((5, 3), (17, 1), (17, 3)) for tokens in QUERY_TOKENS
    ]
    assert all(c.ms > 0 for c in forwards)
