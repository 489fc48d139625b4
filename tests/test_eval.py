"""The flat scripts of `eval/`: what they work out, against the slow obvious way."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


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
