"""Block policies: what they ask for, and that the text is the same whatever they ask for."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recguide import ConfigError, Engine, InputError, RecGuideConfig, RoundRecord
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.calibration import CostProfile, Fingerprint, ProgressTable, RoundCost, Stratum
from recguide.policy import (
    AIMD,
    ConcurrencyTable,
    FixedBlock,
    Oracle,
    Policies,
    Ratio,
    VerificationGuided,
    solve_price,
)
from recguide.structs import Draft, Guess, Outcome
from recguide.testing import toy_model


def record(
    request: int, block: int, committed: int, outcome: Outcome = Outcome.PLAIN, entropy: float = 0.0
) -> RoundRecord:
    guesses = tuple(Guess(7, (), 1.0, 0.0) for _ in range(block - 1))
    return RoundRecord(
        request=request,
        index=0,
        position=0,
        seed=7,
        draft=Draft(guesses),
        branches=(),
        risky=(),
        accepted=committed - 1,
        committed=tuple([7] * committed),
        outcome=outcome,
        hit=None,
        query_tokens=block,
        entropies=tuple([entropy] * committed),
    )


def test_the_concurrency_table() -> None:
    policy = ConcurrencyTable()
    assert [policy.block_size(0, load) for load in (1, 4, 5, 8, 32, 63, 64, 128)] == [32, 32, 16, 16, 16, 16, 8, 8]


def test_aimd_doubles_and_halves_by_request() -> None:
    policy = AIMD()
    sizes = []
    for committed in (8, 16, 32, 17, 16, 9, 8, 4, 1):
        sizes.append(policy.block_size(1, 4))
        policy.observe(record(1, sizes[-1], min(committed, sizes[-1])))
    assert sizes == [8, 16, 32, 32, 32, 16, 16, 8, 8]
    policy.observe(record(2, 8, 8))
    assert policy.block_size(2, 1) == 16
    policy.forget(2)
    assert policy.block_size(2, 1) == 8, "an ended request leaves nothing behind"


def no_tables() -> Any:
    raise AssertionError("asked for tables")


def test_the_policy_of_a_name() -> None:
    policies = Policies()
    fixed = policies.of(RecGuideConfig(block_size=4), no_tables)
    assert isinstance(fixed, FixedBlock)
    assert fixed.max_block == 4
    aimd = policies.of(RecGuideConfig(policy="aimd"), no_tables)
    assert isinstance(aimd, AIMD)
    assert policies.of(RecGuideConfig(policy="aimd"), no_tables) is aimd, "requests share what a policy learns"
    assert policies.of(RecGuideConfig(policy="concurrency_table"), no_tables).max_block == 32
    own = AIMD()
    assert policies.of(RecGuideConfig(policy=own), no_tables) is own
    for wrong in ("oracle", 3, object()):
        with pytest.raises(ConfigError, match="fixed, concurrency_table, aimd, verification_guided"):
            RecGuideConfig(policy=wrong)


@pytest.mark.parametrize("policy", ["concurrency_table", "aimd"])
@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide"])
def test_the_text_does_not_depend_on_the_policy(strategy: str, policy: str) -> None:
    model = toy_model()
    ids = torch.randint(6, 24, (6, 5), generator=torch.Generator().manual_seed(0))
    arguments: dict[str, Any] = {"max_new_tokens": 70, "return_dict_in_generate": True, "output_records": True}
    expected = model.generate(ids, generation_strategy="ar", **arguments)
    got = model.generate(ids, generation_strategy=strategy, recguide_config={"policy": policy}, **arguments)
    assert torch.equal(got.sequences, expected.sequences)
    blocks = {r.block_size for row in got.records for r in row[:3]}
    assert blocks <= ({8, 16} if policy == "aimd" else {16})


def random_sizes(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)

    class Random(FixedBlock):
        def block_size(self, request: int, load: int) -> int:
            return int(torch.randint(1, 17, (1,), generator=generator))

    return Random(16)


@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide"])
@pytest.mark.parametrize("sampled", [False, True])
def test_nor_on_one_that_decides_at_random(strategy: str, sampled: bool) -> None:
    model = toy_model()
    ids = torch.randint(6, 24, (4, 5), generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {"max_new_tokens": 50} | ({"do_sample": True, "seed": 3} if sampled else {})
    expected = model.generate(ids, generation_strategy="ar", **arguments)
    for seed in range(3):
        options = {"policy": random_sizes(seed)}
        got = model.generate(ids, generation_strategy=strategy, recguide_config=options, **arguments)
        assert torch.equal(got, expected)


# --- the price of time ---


@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.floats(1, 32), min_size=3, max_size=3)), min_size=1, max_size=4),
    st.lists(st.floats(0.5, 50), min_size=3, max_size=3),
)
def test_no_choice_of_blocks_achieves_more_than_the_solved_price(
    situations: list[tuple[int, list[float]]], milliseconds: list[float]
) -> None:
    weights, tokens = zip(*situations, strict=True)
    best = max(
        sum(w * row[i] for w, row, i in zip(weights, tokens, choice, strict=True))
        / sum(w * milliseconds[i] for w, i in zip(weights, choice, strict=True))
        for choice in product(range(3), repeat=len(situations))
    )
    assert solve_price(weights, tokens, milliseconds) == pytest.approx(best)


def test_a_price_follows_what_is_achieved() -> None:
    price = Ratio(1.0, 10.0, memory=50)
    assert price.value == 1.0
    price.observe(20, 10)
    assert 1.0 < price.value < 1.05
    for _ in range(500):
        price.observe(20, 10)
    assert price.value == pytest.approx(2.0, rel=1e-3)


# --- verification guided ---

HERE = Fingerprint("0123", "float32", "cpu", "torch_sdpa", True)


def costs_of(fingerprint: Fingerprint = HERE) -> CostProfile:
    """A round costs its tokens beyond a fixed part, and at load 16 the tokens are all that counts."""
    cells = [RoundCost(1, size, 64, 10.0, 10.0 + size / 100) for size in (8, 16, 32)]
    return CostProfile(fingerprint, (*cells, *(RoundCost(16, size, 64, size / 2, size / 2) for size in (8, 16, 32))))


def progress_of(fingerprint: Fingerprint = HERE) -> ProgressTable:
    """Unsure (below -1): 4 tokens are committed. Sure: 30; after a full block always 32."""
    low, high = (1.0,) * 4 + (0.0,) * 28, (1.0,) * 30 + (0.0,) * 2
    full = Stratum((), ((1.0,) * 32,), (10,))
    return ProgressTable(fingerprint, {"all": Stratum((-1.0,), (low, high), (10, 10)), "8 full": full})


def test_it_shrinks_where_the_verifier_was_unsure_and_time_is_scarce() -> None:
    policy = VerificationGuided(progress_of(), costs_of())
    assert [policy.block_size(0, load) for load in (1, 8, 64)] == [32, 16, 8], "no history: by the load"
    policy.observe(record(0, 32, 3, entropy=2.0))
    assert policy.block_size(0, 16) == 8, "4 tokens are not worth 32 ms"
    assert policy.block_size(0, 1) == 8, "8 tokens do as well as 32, and cost less"
    policy.observe(record(0, 8, 3, entropy=0.0))
    # The mean of the last two is the threshold itself, which belongs to the surer bin.
    assert policy.block_size(0, 1) == 32
    policy.observe(record(1, 8, 8, entropy=5.0))
    assert policy.block_size(1, 16) == 32, "all of 8 was accepted: it may have been many more"
    policy.forget(0)
    assert policy.block_size(0, 1) == 32
    policy.forget(99)


def test_hysteresis() -> None:
    """Two blocks that are worth nearly the same: a request stays with what it has."""
    survival = tuple(1.0 if k < 8 else 0.04 for k in range(32))
    progress = ProgressTable(HERE, {"all": Stratum((), (survival,), (10,))})
    flat = CostProfile(HERE, tuple(RoundCost(1, size, 64, 5.0, 5.0) for size in (8, 16, 32)))
    for hysteresis, expected in ((0.2, 8), (0.0, 32)):
        policy = VerificationGuided(progress, flat, hysteresis=hysteresis)
        policy.observe(record(0, 8, 5))
        assert policy.block_size(0, 1) == expected


def test_a_load_that_goes_back_and_forth_does_not_change_blocks_each_time() -> None:
    cells = [RoundCost(load, size, 64, 0.0, 10 + load * size / 20) for load in (16, 17) for size in (8, 16, 32)]
    policy = VerificationGuided(progress_of(), CostProfile(HERE, tuple(cells)))
    policy.observe(record(0, 16, 10, entropy=0.3))
    sizes = []
    for i in range(40):
        sizes.append(policy.block_size(0, 16 + i % 2))
        policy.observe(record(0, sizes[-1], min(10, sizes[-1]), entropy=0.3))
    assert sum(a != b for a, b in pairwise(sizes)) <= 1


def test_an_oracle_takes_what_will_be_accepted() -> None:
    policy = Oracle({0: [30, 5, 12], 1: [20]}, costs_of())
    sizes = []
    for committed in (30, 5, 12):
        sizes.append(policy.block_size(0, 1))
        policy.observe(record(0, sizes[-1], min(committed, sizes[-1])))
    assert sizes == [32, 8, 16]
    inside = Oracle({0: [20]}, costs_of())
    inside.observe(record(0, 8, 8))
    assert inside.block_size(0, 1) == 16, "12 of the recorded round are left"
    inside.observe(record(0, 16, 12))
    assert inside.block_size(0, 1) == 8, "beyond the recording"
    assert inside.block_size(0, 16) == 8
    inside.forget(0)
    with pytest.raises(InputError, match="Request 5 was not recorded"):
        inside.block_size(5, 1)


def test_the_text_does_not_depend_on_a_guided_policy(tmp_path: Path) -> None:
    model = toy_model()
    here = ModelAdapter(model, resolve_backend()).fingerprint
    progress_of(here).save(tmp_path)
    costs_of(here).save(tmp_path)
    ids = torch.randint(6, 24, (6, 5), generator=torch.Generator().manual_seed(2))
    expected = model.generate(ids, generation_strategy="ar", max_new_tokens=60)
    options: dict[str, Any] = {"policy": "verification_guided", "tables": str(tmp_path)}
    for strategy in ("linear", "recguide", "quadratic"):
        got = model.generate(ids, generation_strategy=strategy, recguide_config=options, max_new_tokens=60)
        assert torch.equal(got, expected)
    for policy in (options, {"policy": Oracle({i: [3] * 30 for i in range(6)}, costs_of(here))}):
        with Engine(model) as engine:
            results = engine.generate_batch(
                ids.tolist(), generation_strategy="linear", recguide_config=policy, max_new_tokens=60
            )
            assert [r.tokens for r in results] == expected[:, 5:].tolist()


def test_a_policy_that_raises_ends_its_own_requests() -> None:
    model = toy_model()
    expected = model.generate(torch.tensor([[7, 8]]), generation_strategy="ar", max_new_tokens=20)[0, 2:].tolist()
    broken = Oracle({}, costs_of())
    with Engine(model) as engine:
        good = engine.add_request([7, 8], max_new_tokens=20)
        bad = engine.add_request([7, 8], max_new_tokens=20, recguide_config={"policy": broken})
        assert good.result(60).tokens == expected
        assert bad.result(60).reason == "error"
        assert isinstance(bad.result(60).error, InputError)
