"""
`auto` on the embedded model in priced time: every forward takes what a plane says, so that rates are exact and the same everywhere.

Texts are real, so what is drafted and accepted is too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from recguide import RecGuideConfig
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.calibration import CostProfile, DraftOdds, ForwardCost, ProgressTable, RoundCost, Stratum
from recguide.loading import TINY, chat_ids
from recguide.loading import load as load_model
from recguide.loop import auto_method, generate, method_of, read_tables
from recguide.policy import Auto
from recguide.rounds import Method, Request
from recguide.testing import PricedRates, priced_time
from recguide.tiny.tasks import FAMILIES, make_task

PROMPTS = 4
"""Of each family, in a batch of them all."""


def milliseconds(requests: int, query_tokens: int) -> float:
    """Near those of the embedded model on a CPU."""
    return 12 + 0.6 * requests + 0.2 * query_tokens


@pytest.fixture(scope="module")
def embedded() -> tuple[ModelAdapter, list[list[int]]]:
    model, tokenizer = load_model(TINY, "float32", "cpu")
    prompts = [
        chat_ids(tokenizer, make_task(family, "test", i).prompt)[0].tolist()
        for i in range(PROMPTS)
        for family in FAMILIES
    ]
    return ModelAdapter(model, resolve_backend()), prompts


@pytest.fixture(autouse=True)
def priced() -> Iterator[None]:
    with priced_time(milliseconds):
        yield


def rate(adapter: ModelAdapter, prompts: Sequence[list[int]], method: Method) -> float:
    """Tokens a priced millisecond, all prompts in one batch."""
    eos = adapter.model.generation_config.eos_token_id
    rates = PricedRates()
    requests = [
        Request(i, list(prompt), 96, lambda tokens: "eos" if tokens[-1] == eos else None, method)
        for i, prompt in enumerate(prompts)
    ]
    generate(requests, adapter, [rates])
    return rates.tokens / rates.ms


def auto_on(adapter: ModelAdapter, auto: Auto) -> Method:
    return auto_method(auto, frozenset({adapter.model.generation_config.eos_token_id}))


def tables(adapter: ModelAdapter) -> tuple[ProgressTable, CostProfile]:
    """The shipped calibration, and a profile of the priced time."""
    progress, _ = read_tables(adapter, RecGuideConfig(strategy="auto"))
    assert progress is not None
    loads, sizes = (1, 2, 4, 8, 16, 32), (1, 8, 16, 32, 64, 96)
    rounds = [
        RoundCost(n, size, 64, milliseconds(n, n * size), milliseconds(n, n * size)) for n in loads for size in sizes
    ]
    forwards = [ForwardCost(n, size, 64, milliseconds(n, n * size)) for n in loads for size in sizes]
    return progress, CostProfile(progress.fingerprint, tuple(rounds), forwards=tuple(forwards))


Embedded = tuple[ModelAdapter, list[list[int]]]


def test_it_beats_plain_decoding_and_fixed_blocks_at_low_and_high_load(embedded: Embedded) -> None:
    adapter, prompts = embedded
    for load in (1, len(prompts)):
        batches = [prompts[i : i + load] for i in range(0, 3 if load == 1 else 1, load)]
        auto = auto_on(adapter, Auto(*tables(adapter)))
        ours = sum(rate(adapter, batch, auto) for batch in batches)
        for options in ({"strategy": "ar"}, *({"strategy": "linear", "block_size": size} for size in (8, 16, 32))):
            fixed = method_of(RecGuideConfig(**options), frozenset(), adapter)
            assert ours >= 0.97 * sum(rate(adapter, batch, fixed) for batch in batches), (load, options)


def test_without_tables_it_is_nearly_as_good_after_a_while(embedded: Embedded) -> None:
    adapter, prompts = embedded
    calibrated = auto_on(adapter, Auto(*tables(adapter)))
    learning = auto_on(adapter, Auto())
    warm = rate(adapter, prompts, learning), rate(adapter, prompts, calibrated)
    assert warm[0] >= 0.75 * warm[1], "its prior is sane"
    # About 100 rounds a batch have been seen by now.
    rate(adapter, prompts[::-1], learning), rate(adapter, prompts[::-1], calibrated)
    assert rate(adapter, prompts, learning) >= 0.95 * rate(adapter, prompts, calibrated)


def test_a_load_that_jumps_costs_nothing(embedded: Embedded) -> None:
    adapter, prompts = embedded
    make: Callable[[], Method] = lambda: auto_on(adapter, Auto(*tables(adapter)))  # noqa: E731
    alone, together, jumping = make(), make(), make()
    steady, jumped = [0.0, 0.0], [0.0, 0.0]
    for number in range(3):
        one = [prompts[number]]
        steady[0] += rate(adapter, one, alone)
        steady[1] += rate(adapter, prompts, together)
        jumped[0] += rate(adapter, one, jumping)
        jumped[1] += rate(adapter, prompts, jumping)
    for still, moved in zip(steady, jumped, strict=True):
        assert moved >= 0.95 * still


def test_wrong_tables_do_not_make_it_slower_than_plain_decoding(embedded: Embedded) -> None:
    """A calibration that expects everything of every draft, for texts of which little can be foretold."""
    adapter, prompts = embedded
    progress, costs = tables(adapter)
    boasting = ProgressTable(
        progress.fingerprint,
        {"all": Stratum((), ((1.0,) * 32,), (1,))},
        odds=DraftOdds((1,), (), ((1.0,),), (), (1.0,), 1.0, 1.0),
    )
    nonsense = [list(reversed(prompt)) for prompt in prompts[:6]]
    auto = auto_on(adapter, Auto(boasting, costs))
    plain = method_of(RecGuideConfig(strategy="ar"), frozenset(), adapter)
    # A trial of each load and mode.
    for _ in range(3):
        rate(adapter, nonsense, auto)
    last = rate(adapter, nonsense, auto), rate(adapter, nonsense, plain)
    assert last[0] >= 0.97 * last[1]
