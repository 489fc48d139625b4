"""Block policies: what they ask for, and that the text is the same whatever they ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recguide import ConfigError, RecGuideConfig, RoundRecord
from recguide.policy import AIMD, ConcurrencyTable, FixedBlock, block_policy
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
    policy.observe(record(2, 16, 3, Outcome.STOPPED))
    assert policy.block_size(2, 1) == 8, "an ended request leaves nothing behind"


def test_the_policy_of_a_name() -> None:
    assert isinstance(block_policy("fixed", 4)[0], FixedBlock)
    assert block_policy("fixed", 4)[1] == 4
    assert isinstance(block_policy("aimd", 4)[0], AIMD)
    assert block_policy("concurrency_table", 4)[1] == 32
    with pytest.raises(ConfigError, match="fixed, concurrency_table, aimd"):
        RecGuideConfig(policy="oracle")


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
def test_nor_on_one_that_decides_at_random(monkeypatch: pytest.MonkeyPatch, strategy: str, sampled: bool) -> None:
    model = toy_model()
    ids = torch.randint(6, 24, (4, 5), generator=torch.Generator().manual_seed(1))
    arguments: dict[str, Any] = {"max_new_tokens": 50} | ({"do_sample": True, "seed": 3} if sampled else {})
    expected = model.generate(ids, generation_strategy="ar", **arguments)
    for seed in range(3):
        monkeypatch.setattr("recguide.loop.block_policy", lambda name, size, s=seed: (random_sizes(s), 16))
        assert torch.equal(model.generate(ids, generation_strategy=strategy, **arguments), expected)
