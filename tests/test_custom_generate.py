"""The folder `custom_generate/`: `model.generate(..., custom_generate=<repository>)` without attaching anything."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.versions import require_version

import recguide.hf_call
import recguide.loop
from recguide import (
    ConfigError,
    Hook,
    NemotronLabsDiffusionModel,
    RecGuideConfig,
    RoundRecord,
    UnsupportedError,
    attach,
    detach,
)
from recguide.testing import MASK, toy_model

FOLDER = Path(__file__).resolve().parents[1]
PROMPT = torch.tensor([[3, 7, 9, 2], [8, 6, 21, 14]])


class Rounds(Hook):
    """Keeps the block size of each round."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_commit(self, record: RoundRecord) -> None:
        self.sizes.append(record.block_size)


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remote code is copied to a directory of the test's; recguide counts as installed where only its sources are there."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    try:
        importlib.metadata.version("recguide")
    except importlib.metadata.PackageNotFoundError:
        (tmp_path / "recguide-0.1.0.dist-info").mkdir()
        (tmp_path / "recguide-0.1.0.dist-info/METADATA").write_text("Name: recguide\nVersion: 0.1.0\n")
        monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    return toy_model(num_hidden_layers=1)


@pytest.fixture
def _detached() -> Iterator[None]:
    detach(NemotronLabsDiffusionModel)
    yield
    attach(NemotronLabsDiffusionModel)


def custom(model: Any, *args: Any, **kwargs: Any) -> Any:
    return model.generate(*args, custom_generate=str(FOLDER), trust_remote_code=True, max_new_tokens=18, **kwargs)


def expected(model: Any) -> torch.Tensor:
    tokens: torch.Tensor = model.generate(PROMPT, max_new_tokens=18, suppress_tokens=[MASK])
    return tokens


def test_on_an_attached_model(model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[RecGuideConfig] = []

    def method_of(config: RecGuideConfig, *args: Any) -> Any:
        configs.append(config)
        return recguide.loop.method_of(config, *args)

    monkeypatch.setattr(recguide.hf_call, "method_of", method_of)
    assert torch.equal(custom(model, PROMPT), expected(model))
    assert configs == [RecGuideConfig("recguide")], "decoded once, and without a name the strategy is recguide"


def test_an_attached_model_takes_the_arguments_itself(model: NemotronLabsDiffusionModel) -> None:
    with pytest.raises(UnsupportedError, match="custom_generate"):
        custom(model, PROMPT, generation_strategy="linear")
    with pytest.raises(ConfigError, match="generation_strategy"):
        custom(model, PROMPT, recguide_config={"block_size": 8})


@pytest.mark.usefixtures("_detached")
def test_on_a_model_that_was_never_attached() -> None:
    model = toy_model(num_hidden_layers=1)
    with pytest.raises(ValueError, match="generation_strategy"):
        model.generate(PROMPT, max_new_tokens=2, generation_strategy="ar")
    rounds = Rounds()
    tokens = custom(model, PROMPT, recguide_hooks=[rounds], recguide_config={"block_size": 8})
    assert torch.equal(tokens, expected(model))
    assert max(rounds.sizes) == 8


@pytest.mark.usefixtures("_detached")
@pytest.mark.parametrize("strategy", ["ar", "linear", "quadratic", "recguide", "auto"])
def test_a_strategy_by_name(strategy: str) -> None:
    model = toy_model(num_hidden_layers=1)
    rounds = Rounds()
    tokens = custom(model, PROMPT, generation_strategy=strategy, recguide_hooks=[rounds])
    assert torch.equal(tokens, expected(model))
    # What auto drafts beside a seed need not be right here.
    assert strategy == "auto" or (max(rounds.sizes) == 1) == (strategy == "ar")


@pytest.mark.usefixtures("_detached")
def test_a_strategy_on_the_config() -> None:
    model = toy_model(num_hidden_layers=1)
    rounds = Rounds()
    config = GenerationConfig(generation_strategy="ar", pad_token_id=0)
    tokens = custom(model, PROMPT, generation_config=config, recguide_hooks=[rounds])
    assert torch.equal(tokens, expected(model))
    assert max(rounds.sizes) == 1


def test_a_model_without_drafter_decodes_with_ar() -> None:
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=24,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
            eos_token_id=None,
        )
    ).eval()
    assert torch.equal(custom(model, PROMPT, generation_strategy="ar"), model.generate(PROMPT, max_new_tokens=18))
    with pytest.raises(UnsupportedError, match="'ar'"):
        custom(model, PROMPT)


def test_what_else_generate_takes(model: NemotronLabsDiffusionModel) -> None:
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    arguments = {"attention_mask": mask, "eos_token_id": 10, "repetition_penalty": 1.1, "return_dict_in_generate": True}
    one = {name: value for name, value in arguments.items() if name != "attention_mask"}
    wanted = model.generate(PROMPT[1:], max_new_tokens=18, suppress_tokens=[MASK], **one)
    got = custom(model, PROMPT[1:], **one)
    assert torch.equal(got.sequences, wanted.sequences)
    masked = {"attention_mask": mask, "eos_token_id": 10}
    assert torch.equal(
        custom(model, PROMPT, **masked),
        model.generate(PROMPT, max_new_tokens=18, suppress_tokens=[MASK], **masked),
    )


@pytest.mark.usefixtures("_detached")
def test_refusals_reach_the_caller() -> None:
    model = toy_model(num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="num_beams"):
        custom(model, PROMPT, num_beams=2)
    with pytest.raises(ConfigError, match="block_size"):
        custom(model, PROMPT, recguide_config={"block_size": 12})


def test_remote_code_must_be_trusted(model: NemotronLabsDiffusionModel) -> None:
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(PROMPT, custom_generate=str(FOLDER), trust_remote_code=False)


def test_requirements_and_card() -> None:
    requirements = (FOLDER / "custom_generate/requirements.txt").read_text().split()
    assert requirements == ["recguide"]
    require_version(requirements[0])
    _, front_matter, text = (FOLDER / "custom_generate/README.md").read_text().split("---\n", 2)
    assert front_matter.splitlines() == ["library_name: transformers", "tags:", "- custom_generate"]
    assert "custom_generate=" in text
    assert "trust_remote_code=True" in text
