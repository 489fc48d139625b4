"""The flat scripts of `eval/`: what they work out, against the slow obvious way."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from recguide.structs import Draft, Guess, Outcome, RoundRecord


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / "eval" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("seed", range(6))
def test_acceptance_of_shared_noise(seed: int) -> None:
    pytest.importorskip("reasoning_gym")
    generator = torch.Generator().manual_seed(seed)
    draft, target = (torch.rand(9, generator=generator, dtype=torch.float64) ** 3 for _ in range(2))
    draft[torch.rand(9, generator=generator) < 0.3] = 0
    target[torch.rand(9, generator=generator) < 0.3] = 0
    draft, target = draft / draft.sum(), target / target.sum()
    noise = -torch.log(-torch.log(torch.rand(100_000, 9, generator=generator, dtype=torch.float64)))
    counted = ((draft.log() + noise).argmax(1) == (target.log() + noise).argmax(1)).double().mean()
    got = script("coupling").shared_noise_acceptance(draft, target)
    assert got == pytest.approx(float(counted), abs=0.006)
    overlap = float(torch.minimum(draft, target).sum())
    assert overlap / (2 - overlap) - 1e-9 <= got <= overlap + 1e-9


def test_priced_time_is_exact() -> None:
    module = script("priced_time")
    model, tokenizer = module.load(module.TINY, "float32", "cpu")
    prompts = [module.chat_ids(tokenizer, module.make_task("text", "test", i).prompt)[0].tolist() for i in range(2)]
    with module.priced_time(lambda requests, tokens: 10 + tokens):
        plain = module.rate(model, prompts, 1, {"generation_strategy": "ar"}, True)
        ours = [module.rate(model, prompts, 1, {"generation_strategy": "auto"}, tables) for tables in (True, False)]
    assert plain == pytest.approx(1000 / 11)
    assert min(ours) > plain
    assert ours[0] != ours[1], "one knew the tables, the other did not"


def test_laws_of_drafts() -> None:
    module = script("draft_laws")
    text = [100, *range(200, 240)]

    def round_at(place: int, accepted: int, wrong: set[int]) -> RoundRecord:
        """Its drafted token number i is of `wrong` or right, and as sure as i says."""
        tokens = [0 if i in wrong else token for i, token in enumerate(text[place + 1 : place + 32])]
        tokens += [0] * (31 - len(tokens))
        guesses = tuple(
            Guess(token, (text[place + 1 + accepted], 1), 0.9 - i / 50, 0.05) for i, token in enumerate(tokens)
        )
        committed = tuple(text[place + 1 : place + 2 + accepted])
        return RoundRecord(
            0, 0, place, text[place], Draft(guesses), (), (), accepted, committed, Outcome.PLAIN, None, 32
        )

    rounds = [round_at(0, 3, {3, 6, 8}), round_at(4, 4, {4, 6}), round_at(9, 2, {2})]
    drafts = list(module.blocks(module.Request(rounds, text)))
    first = drafts[0]
    assert [token.kind for token in first[:9]] == [
        *("accepted 2", "accepted 2", "accepted 1", "rejected"),
        *("later_right", "later_right", "later_wrong", "later_right", "later_wrong"),
    ]
    assert first[3].second
    assert first[1].logit == pytest.approx(math.log(0.88 / 0.12))
    assert first[1].share == pytest.approx(0.05 / 0.12)
    # The next draft begins at the fifth of them: four are right there, the next is rejected.
    assert [token.setting for token in first[4:10]] == [
        *(("after_right", 0), ("after_right", 0), ("after_right", 0)),
        *(("after_wrong", 0), ("after_right", 1), ("after_wrong", 2)),
    ]
    assert drafts[2][-1].setting is None, "no draft was begun behind the last"

    laws = module.laws(drafts)
    assert laws["tokens"]["all"] == 93
    assert laws["wrong"] == round(6 / 93, 4)
    assert laws["later"]["after_right"][:2] == [0.6, 0.0]
    assert laws["logit"]["rejected"][0] == round(math.log(0.82 / 0.18), 2)


def test_correlation_of_drafts_ranks() -> None:
    module = script("draft_laws")
    rng = np.random.default_rng(0)

    def draft(level: float) -> list[Any]:
        return [module.Drafted("accepted 16", (level + noise) ** 3, 0.5) for noise in rng.standard_normal(20)]

    drafts = [draft(level) for level in rng.standard_normal(400)]
    # Half of the variance is the draft's own, and a rank does not mind the cube.
    for apart in (1, 8):
        assert module.correlation(drafts, apart, own_laws=True) == pytest.approx(0.5, abs=0.05)
