"""What a strategy cannot honour is refused with the reason, before the model is run once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

from recguide import (
    CheckpointError,
    ConfigError,
    Hook,
    InputError,
    NemotronLabsDiffusionModel,
    RecGuideError,
    UnsupportedError,
    attach,
)
from recguide.testing import toy_model

STRATEGIES = ("ar", "linear", "quadratic", "recguide", "auto")
PROMPT = torch.tensor([[3, 7, 9, 2]])
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    return toy_model()


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(2)
    return attach(LlamaForCausalLM(LlamaConfig(**SIZES)).eval())


class Untouched:
    """Counts the forwards of the models that it watches."""

    def __init__(self) -> None:
        self.forwards = 0
        self.handles: list[Any] = []

    def watch(self, model: Any) -> None:
        self.handles.append(model.register_forward_pre_hook(self._count))

    def _count(self, *_: Any) -> None:
        self.forwards += 1


@pytest.fixture
def untouched() -> Iterator[Untouched]:
    """Fails the test where a watched model was run."""
    counter = Untouched()
    yield counter
    for handle in counter.handles:
        handle.remove()
    assert counter.forwards == 0, "refused only after work was done"


def refused(
    untouched: Untouched, model: Any, words: list[str], kind: type[Exception] = UnsupportedError, **kwargs: Any
) -> None:
    """Assert that generate refuses with a message that has all these words, before any forward."""
    untouched.watch(model)
    before = model.config.get_text_config()._attn_implementation
    arguments = {"generation_strategy": "recguide", "max_new_tokens": 6, **kwargs}
    if not {"inputs", "input_ids", "inputs_embeds"} & set(arguments):
        arguments["inputs"] = PROMPT
    with pytest.raises(kind) as error:
        model.generate(**arguments)
    assert [word for word in words if word not in str(error.value)] == [], str(error.value)
    assert model.config.get_text_config()._attn_implementation == before


def test_the_counter_counts(model: NemotronLabsDiffusionModel) -> None:
    counter = Untouched()
    counter.watch(model)
    model.generate(PROMPT, generation_strategy="ar", max_new_tokens=3)
    counter.handles[0].remove()
    assert counter.forwards == 3


# --- options of generate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 2}, ["num_beams=2"]),
        ({"output_attentions": True, "return_dict_in_generate": True}, ["output_attentions"]),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, ["output_hidden_states"]),
        ({"guidance_scale": 1.5}, ["guidance_scale"]),
        ({"prompt_lookup_num_tokens": 3}, ["prompt_lookup_num_tokens=3"]),
        ({"cache_implementation": "static"}, ["cache_implementation='static'", "dynamic"]),
        ({"cache_implementation": "offloaded"}, ["cache_implementation='offloaded'"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_an_option_that_cannot_be_honoured(
    model: NemotronLabsDiffusionModel, untouched: Untouched, strategy: str, arguments: dict[str, Any], words: list[str]
) -> None:
    refused(untouched, model, words, generation_strategy=strategy, **arguments)


def test_the_same_options_on_a_passed_config(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    config = GenerationConfig(num_beams=3, max_new_tokens=4, pad_token_id=0)
    refused(untouched, model, ["num_beams=3"], generation_config=config)


def test_another_answer_for_the_same_prompt(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    refused(untouched, model, ["num_return_sequences", "2"], ValueError, num_return_sequences=2)


def test_continuous_batching(
    model: NemotronLabsDiffusionModel, untouched: Untouched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers turns to it before it looks at anything else."""
    monkeypatch.setattr(NemotronLabsDiffusionModel, "generate_batch", lambda *args, **kwargs: {})
    refused(untouched, model, ["cache_implementation='paged'"], cache_implementation="paged")


def test_an_assistant_model(model: NemotronLabsDiffusionModel, llama: LlamaForCausalLM, untouched: Untouched) -> None:
    untouched.watch(llama)
    refused(untouched, model, ["assistant_model", "its own drafter"], assistant_model=llama)


def test_another_decoding_loop(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    refused(untouched, model, ["custom_generate"], custom_generate=lambda *args, **kwargs: None)


def test_embeddings_in_place_of_tokens(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    refused(untouched, model, ["inputs_embeds", "input_ids"], inputs_embeds=torch.zeros(1, 4, 32))


def test_ranks_in_step(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    refused(untouched, model, ["synced_gpus"], synced_gpus=True)


def test_a_cache_that_cannot_be_cropped(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    refused(untouched, model, ["StaticCache", "DynamicCache"], cache=StaticCache(model.config, max_cache_len=64))


def test_positional_arguments_behind_the_config(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    untouched.watch(model)
    with pytest.raises(UnsupportedError, match="keyword"):
        model.generate(PROMPT, None, None, generation_strategy="ar")


def test_stop_strings_on_the_models_own_config(untouched: Untouched) -> None:
    model = toy_model()
    model.generation_config.stop_strings = ["ab"]
    refused(untouched, model, ["stop_strings"])


# --- models --------------------------------------------------------------------------------------------------------


def test_an_encoder_decoder_model(untouched: Untouched) -> None:
    config = T5Config(vocab_size=24, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = attach(T5ForConditionalGeneration(config).eval())
    untouched.watch(model.encoder)
    refused(untouched, model, ["encoder-decoder"], generation_strategy="ar")


def test_a_model_with_sliding_windows(untouched: Untouched) -> None:
    model = attach(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval())
    refused(untouched, model, ["sliding_window=16"], generation_strategy="ar")


@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide"])
def test_a_model_that_cannot_draft(llama: LlamaForCausalLM, untouched: Untouched, strategy: str) -> None:
    refused(
        untouched,
        llama,
        ["LlamaForCausalLM", "'llama'", "'ar'", "nemotron_labs_diffusion"],
        generation_strategy=strategy,
    )


def test_such_a_model_decodes_with_ar(llama: LlamaForCausalLM) -> None:
    ids = torch.tensor([[3, 7, 9, 2], [11, 4, 6, 21]])
    expected = llama.generate(ids, max_new_tokens=8)
    assert torch.equal(llama.generate(ids, max_new_tokens=8, generation_strategy="ar"), expected)


@pytest.mark.parametrize("mask_token_id", [-1, 24, 100])
def test_a_mask_token_outside_the_vocabulary(untouched: Untouched, mask_token_id: int) -> None:
    model = toy_model()
    model.config.mask_token_id = mask_token_id
    refused(untouched, model, [f"mask_token_id={mask_token_id}", "0 … 23"], CheckpointError)


# --- the strategy's own options ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["RecGuide", "speculative", ""])
def test_an_unknown_strategy(model: NemotronLabsDiffusionModel, untouched: Untouched, strategy: str) -> None:
    refused(untouched, model, [repr(strategy), *STRATEGIES], ConfigError, generation_strategy=strategy)


def test_an_unknown_strategy_on_a_config(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    config = GenerationConfig(generation_strategy="fast", max_new_tokens=4)
    refused(untouched, model, ["'fast'", *STRATEGIES], ConfigError, generation_strategy=None, generation_config=config)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_size": 0}, ["block_size", "got 0", "1, 2, 4, 8, 16, 32, 64"]),
        ({"block_size": 12}, ["block_size", "got 12", "1, 2, 4, 8, 16, 32, 64"]),
        ({"block_size": 4096}, ["block_size", "got 4096", "1, 2, 4, 8, 16, 32, 64"]),
        ({"delta": -0.5}, ["delta", "-0.5", "0 to 1"]),
        ({"delta": 1.5}, ["delta", "1.5", "0 to 1"]),
        ({"blocksize": 8}, ["blocksize", "block_size", "max_corrections"]),
        ({"draft_threshold": 0.5}, ["draft_threshold=0.5", "linear"]),
    ],
    ids=str,
)
def test_an_option_out_of_range(
    model: NemotronLabsDiffusionModel, untouched: Untouched, options: dict[str, Any], words: list[str]
) -> None:
    refused(untouched, model, words, ConfigError, recguide_config=options)


@pytest.mark.parametrize(
    "extra", [{"recguide_config": {"block_size": 8}}, {"recguide_hooks": [Hook()]}], ids=["config", "hooks"]
)
def test_options_without_a_strategy(
    model: NemotronLabsDiffusionModel, untouched: Untouched, extra: dict[str, Any]
) -> None:
    refused(untouched, model, ["generation_strategy", *STRATEGIES], ConfigError, generation_strategy=None, **extra)


@pytest.mark.parametrize("typo", ["max_new_tokenz", "generation_stratgy", "recguide_confg"])
def test_a_typo_is_found_as_in_transformers(model: NemotronLabsDiffusionModel, untouched: Untouched, typo: str) -> None:
    refused(untouched, model, [typo], ValueError, **{typo: 3})


# --- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_empty_prompt(model: NemotronLabsDiffusionModel, untouched: Untouched, strategy: str) -> None:
    empty = torch.zeros((1, 0), dtype=torch.long)
    refused(untouched, model, ["empty"], InputError, inputs=empty, generation_strategy=strategy)


@pytest.mark.parametrize("with_mask", [True, False])
def test_an_empty_row_of_a_batch(model: NemotronLabsDiffusionModel, untouched: Untouched, with_mask: bool) -> None:
    ids = torch.tensor([[3, 7, 9], [6, 8, 2], [0, 0, 0], [0, 4, 7]])
    mask = {"attention_mask": (ids != 0).long()} if with_mask else {}
    refused(untouched, model, ["Row 2", "empty"], InputError, inputs=ids, **mask)


def test_a_prompt_longer_than_the_context(untouched: Untouched) -> None:
    model = toy_model(max_position_embeddings=16)
    refused(untouched, model, ["17 tokens", "16"], InputError, inputs=torch.full((1, 17), 7))


def test_a_row_longer_than_the_context(untouched: Untouched) -> None:
    model = toy_model(max_position_embeddings=16)
    ids: Tensor = torch.full((2, 17), 7)
    mask = torch.ones_like(ids)
    ids[0, :9], mask[0, :9] = 0, 0
    refused(untouched, model, ["Row 1", "17", "16"], InputError, inputs=ids, attention_mask=mask)


def test_padding_is_no_part_of_a_prompts_length() -> None:
    model = toy_model(max_position_embeddings=16)
    ids, mask = torch.full((2, 18), 7), torch.ones((2, 18), dtype=torch.long)
    ids[:, :4], mask[:, :4] = 0, 0
    assert model.generate(ids, attention_mask=mask, max_new_tokens=1, generation_strategy="ar").shape == (2, 19)


def test_padding_on_the_right(model: NemotronLabsDiffusionModel, untouched: Untouched) -> None:
    ids = torch.tensor([[3, 7, 9, 4], [6, 8, 0, 0]])
    refused(untouched, model, ["Row 1", "left padding"], InputError, inputs=ids, attention_mask=(ids != 0).long())


def test_refusals_share_a_base() -> None:
    for kind in (CheckpointError, ConfigError, InputError, UnsupportedError):
        assert issubclass(kind, RecGuideError)
        assert issubclass(kind, ValueError)
