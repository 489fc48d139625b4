"""Ways in: attach, detach, the mixin, defaults that travel with a model, and the text-generation pipeline."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, pipeline

from recguide import (
    ConfigError,
    Hook,
    NemotronLabsDiffusionModel,
    RecGuideGenerationMixin,
    RoundRecord,
    attach,
    detach,
)
from recguide.testing import MASK, toy_config, toy_model

PROMPT = torch.tensor([[3, 7, 9, 2]])


class Rounds(Hook):
    """Keeps the block size of each round: 1 in all of them under `ar`."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def on_commit(self, record: RoundRecord) -> None:
        self.sizes.append(record.block_size)


def tiny_llama(seed: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=24,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def block_size(model: Any, **kwargs: Any) -> int:
    """The block size that a call of generate ends up with."""
    rounds = Rounds()
    model.generate(PROMPT, max_new_tokens=9, recguide_hooks=[rounds], **kwargs)
    return max(rounds.sizes)


def understands(model: Any) -> bool:
    """Whether generate takes a strategy, and gives the same tokens with it."""
    plain = model.generate(PROMPT, max_new_tokens=8)
    try:
        return torch.equal(model.generate(PROMPT, max_new_tokens=8, generation_strategy="ar"), plain)
    except ValueError as error:
        assert "generation_strategy" in str(error)  # noqa: PT017 - transformers' own complaint
        return False


# --- instances -----------------------------------------------------------------------------------------------------


def test_attach_and_detach_an_instance() -> None:
    model, other = tiny_llama(), tiny_llama()
    assert not understands(model)
    assert attach(model) is model
    assert type(model) is LlamaForCausalLM
    assert understands(model)
    assert not understands(other)
    assert detach(model) is model
    assert not understands(model)
    assert "generate" not in vars(model)


def test_attach_twice_is_attach_once() -> None:
    model = attach(tiny_llama())
    method = model.generate
    assert attach(model).generate is method
    assert understands(model)
    assert not understands(detach(model))


def test_detach_what_was_never_attached() -> None:
    model = tiny_llama()
    assert not understands(detach(detach(model)))


def test_an_instance_of_an_attached_class_is_left_alone() -> None:
    model = attach(toy_model(num_hidden_layers=1))
    assert "generate" not in vars(model)


def test_detach_keeps_a_users_own_generate() -> None:
    model = tiny_llama()
    model.generate = lambda *args, **kwargs: "mine"
    assert detach(model).generate() == "mine"


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_generates_with_its_own_weights(duplicate: Any) -> None:
    model = attach(tiny_llama())
    twin = duplicate(model)
    assert torch.equal(
        twin.generate(PROMPT, max_new_tokens=8, generation_strategy="ar"),
        model.generate(PROMPT, max_new_tokens=8, generation_strategy="ar"),
    )
    before = model.generate(PROMPT, max_new_tokens=8)
    with torch.no_grad():
        twin.lm_head.weight.copy_(twin.lm_head.weight.flip(0))
    after = twin.generate(PROMPT, max_new_tokens=8, generation_strategy="ar")
    assert not torch.equal(after, before)
    assert torch.equal(after, twin.generate(PROMPT, max_new_tokens=8))
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, generation_strategy="ar"), before)
    assert not understands(detach(twin))
    assert understands(model)


def test_a_default_comes_along_with_a_copy() -> None:
    model = attach(toy_model(num_hidden_layers=1), "linear", {"block_size": 4})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert block_size(twin) == 4


# --- classes -------------------------------------------------------------------------------------------------------


class OwnLlama(LlamaForCausalLM):  # type: ignore[misc]
    """A class that tests may attach to, and nobody else uses."""


class LaterLlama(OwnLlama):
    """A class below it."""


@pytest.fixture
def own_llama() -> Iterator[type[OwnLlama]]:
    yield OwnLlama
    detach(LaterLlama)
    detach(OwnLlama)


def test_attach_and_detach_a_class(own_llama: type[OwnLlama]) -> None:
    model = own_llama(tiny_llama().config).eval()
    assert not understands(model)
    assert attach(own_llama) is own_llama
    method = own_llama.generate
    assert attach(own_llama).generate is method
    assert understands(model)
    assert not understands(tiny_llama())
    assert understands(copy.deepcopy(model))
    assert understands(pickle.loads(pickle.dumps(model)))
    assert detach(own_llama) is own_llama
    assert not understands(model)


def test_detach_leaves_a_class_as_it_was(own_llama: type[OwnLlama]) -> None:
    detach(attach(own_llama))
    assert own_llama.generate is LlamaForCausalLM.generate


def test_a_class_below_an_attached_one(own_llama: type[OwnLlama]) -> None:
    attach(own_llama)
    assert understands(LaterLlama(tiny_llama().config).eval())


def test_attach_a_class_below_an_attached_one(own_llama: type[OwnLlama]) -> None:
    attach(own_llama)
    attach(LaterLlama)
    assert understands(LaterLlama(tiny_llama().config).eval())


def test_attach_a_class_whose_instance_was_attached(own_llama: type[OwnLlama]) -> None:
    model = attach(own_llama(tiny_llama().config).eval())
    attach(own_llama)
    assert understands(model)


def test_the_family_is_attached_by_the_import() -> None:
    model = toy_model(num_hidden_layers=1)
    expected = model.generate(PROMPT, max_new_tokens=8, suppress_tokens=[MASK])
    assert torch.equal(model.generate(PROMPT, max_new_tokens=8, generation_strategy="recguide"), expected)


# --- the mixin -----------------------------------------------------------------------------------------------------


class MixedLlama(RecGuideGenerationMixin, LlamaForCausalLM):  # type: ignore[misc]
    """A stock model."""


class MixedNLD(RecGuideGenerationMixin, NemotronLabsDiffusionModel):
    """A model whose class is attached already."""


def test_the_mixin() -> None:
    model = MixedLlama(tiny_llama().config).eval()
    assert understands(model)
    assert "generate" not in vars(attach(model))
    assert understands(copy.deepcopy(model))


@pytest.mark.parametrize("place", ["argument", "passed config", "model"])
def test_the_mixin_over_an_attached_class(place: str) -> None:
    model = MixedNLD(toy_config(num_hidden_layers=1)).eval()
    model.load_state_dict(toy_model(num_hidden_layers=1).state_dict(), strict=False)
    options = {"generation_strategy": "linear", "recguide_config": {"block_size": 4}}
    arguments: dict[str, Any] = {}
    if place == "argument":
        arguments = options
    elif place == "passed config":
        arguments = {"generation_config": GenerationConfig(pad_token_id=0, **options)}
    else:
        attach(model, *options.values())
    assert block_size(model, **arguments) == 4


# --- defaults ------------------------------------------------------------------------------------------------------


def test_a_default_is_used_and_changes_no_token() -> None:
    model = toy_model(num_hidden_layers=1)
    expected = model.generate(PROMPT, max_new_tokens=12, suppress_tokens=[MASK])
    attach(model, "recguide", {"block_size": 8})
    assert block_size(model) == 8
    assert torch.equal(model.generate(PROMPT, max_new_tokens=12), expected)


def test_options_alone_mean_the_strategy_recguide() -> None:
    model = attach(toy_model(num_hidden_layers=1), recguide_config={"block_size": 2})
    assert model.generation_config.generation_strategy == "recguide"
    assert block_size(model) == 2


def test_detach_takes_the_defaults_away() -> None:
    model = detach(attach(toy_model(num_hidden_layers=1), "recguide", {"block_size": 8}))
    assert not hasattr(model.generation_config, "generation_strategy")
    assert not hasattr(model.generation_config, "recguide_config")
    with pytest.raises(ConfigError):
        block_size(model)


@pytest.mark.parametrize("default", [("medusa", None), ("linear", {"block_size": 12}), (None, {"bloksize": 8})])
def test_a_wrong_default_is_refused_at_once(default: tuple[Any, Any]) -> None:
    model = tiny_llama()
    with pytest.raises(ConfigError):
        attach(model, *default)
    assert not hasattr(model.generation_config, "generation_strategy")
    assert not understands(model)


def test_the_users_dict_is_not_kept() -> None:
    options = {"block_size": 8}
    model = attach(toy_model(num_hidden_layers=1), "linear", options)
    options["block_size"] = 2
    assert block_size(model) == 8


def test_defaults_survive_saving_and_loading(tmp_path: Path) -> None:
    model = attach(toy_model(num_hidden_layers=1), "recguide", {"block_size": 8, "delta": 0.25})
    expected = model.generate(PROMPT, max_new_tokens=12)
    model.save_pretrained(tmp_path)
    loaded = NemotronLabsDiffusionModel.from_pretrained(tmp_path).eval()
    assert loaded.generation_config.generation_strategy == "recguide"
    assert loaded.generation_config.recguide_config == {"block_size": 8, "delta": 0.25}
    assert block_size(loaded) == 8
    assert torch.equal(loaded.generate(PROMPT, max_new_tokens=12), expected)


def test_an_argument_beats_a_passed_config_beats_the_model() -> None:
    model = attach(toy_model(num_hidden_layers=1), "linear", {"block_size": 8})
    config = GenerationConfig(generation_strategy="linear", recguide_config={"block_size": 4}, pad_token_id=0)
    assert block_size(model) == 8
    assert block_size(model, generation_config=config) == 4
    assert block_size(model, generation_config=config, recguide_config={"block_size": 2}) == 2
    assert block_size(model, generation_config=config, generation_strategy="ar") == 1
    assert block_size(model, generation_strategy="ar") == 1
    assert block_size(model, generation_config=GenerationConfig(pad_token_id=0)) == 8


def test_a_strategy_on_a_passed_config() -> None:
    model = toy_model(num_hidden_layers=1)
    config = GenerationConfig(generation_strategy="recguide", pad_token_id=0)
    assert block_size(model, generation_config=config) == 8, "all that nine tokens leave for a round"
    assert block_size(model, generation_config=config, recguide_config={"block_size": 4}) == 4


# --- the pipeline --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token."""
    special = {0: "<pad>", 1: "<s>", MASK: "<mask>"}
    letters = iter("abcdefghijklmnopqrstu")
    inner = Tokenizer(models.BPE(vocab={special.get(i) or next(letters): i for i in range(24)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", mask_token="<mask>", padding_side="left"
    )


def test_text_generation_pipeline(tokenizer: PreTrainedTokenizerFast) -> None:
    model = toy_model(num_hidden_layers=1)
    ids: Tensor = tokenizer("feed", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=16, suppress_tokens=[MASK])
    rounds = Rounds()
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (answer,) = pipe(
        "feed",
        max_new_tokens=16,
        do_sample=False,
        return_full_text=False,
        generation_strategy="recguide",
        recguide_config={"block_size": 8},
        recguide_hooks=[rounds],
    )
    assert answer["generated_text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert max(rounds.sizes) == 8


def test_text_generation_pipeline_in_batches(tokenizer: PreTrainedTokenizerFast) -> None:
    pipe = pipeline("text-generation", model=toy_model(num_hidden_layers=1), tokenizer=tokenizer)
    arguments: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False, "batch_size": 2}
    expected = pipe(["feed", "a", "bead"], suppress_tokens=[MASK], **arguments)
    assert pipe(["feed", "a", "bead"], generation_strategy="recguide", **arguments) == expected


# --- PEFT ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_peft_model_keeps_its_base_models_strategies() -> None:
    import peft

    model = peft.get_peft_model(attach(tiny_llama()), peft.LoraConfig(target_modules=["q_proj"]))
    plain = model.generate(input_ids=PROMPT, max_new_tokens=8)
    assert torch.equal(model.generate(input_ids=PROMPT, max_new_tokens=8, generation_strategy="ar"), plain)
