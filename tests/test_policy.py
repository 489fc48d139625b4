"""Block policies: what they ask for, and that the text is the same whatever they ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recguide import ConfigError, RecGuideConfig, RoundRecord
from recguide.policy import AIMD, ConcurrencyTable, FixedBlock, Policies
from recguide.structs import Draft, Guess, Outcome
from recguide.testing import toy_model


def record(request: int, block: int, committed: int, outcome: Outcome = Outcome.PLAIN) -> RoundRecord:
    guesses = tuple(Guess(7, (), 1.0, 0.0) for _ in range(block - 1))
    return RoundRecord(
        request, 0, 0, 7, Draft(guesses), (), (), committed - 1, tuple([7] * committed), outcome, None, block
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
