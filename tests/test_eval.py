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
