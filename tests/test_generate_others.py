"""What is easy to overlook: other models' attention, inputs beside the tokens, processors made for a whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from recguide import ConfigError, RecGuideConfig, UnsupportedError, attach
from recguide.metrics import DecodeMetrics
from recguide.models.draft_adapter import draft_adapter_of
from recguide.testing import MASK, ScriptedDrafts, toy_model

SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
PROMPT = torch.tensor([[3, 7, 9, 2]])
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
MODEL = toy_model()


def test_values_may_be_of_another_width_than_keys() -> None:
    config = DeepseekV3Config(
        **SIZES | {"num_key_value_heads": 4},
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        first_k_dense_replace=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    )
    torch.manual_seed(0)
    model = attach(DeepseekV3ForCausalLM(config).eval())
    expected = model.generate(PROMPT, **OPTIONS)
    assert model.generate(PROMPT, **OPTIONS, generation_strategy="ar").equal(expected)


def test_attention_that_segments_do_not_know_is_refused() -> None:
    config = GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2
    )
    model = attach(GptOssForCausalLM(config).eval())
    with pytest.raises(UnsupportedError, match="s_aux"):
        model.generate(PROMPT, **OPTIONS, generation_strategy="ar")


def test_layers_of_another_kind_are_refused() -> None:
    config = MiniMaxConfig(**SIZES, head_dim=8, num_local_experts=2, layer_types=["linear_attention", "full_attention"])
    model = attach(MiniMaxForCausalLM(config).eval())
    with pytest.raises(UnsupportedError, match="linear_attention"):
        model.generate(PROMPT, **OPTIONS, generation_strategy="ar")


def test_positions_of_the_users_own_are_refused() -> None:
    usual = torch.arange(4)[None]
    expected = MODEL.generate(PROMPT, **OPTIONS, suppress_tokens=[MASK])
    output = MODEL.generate(PROMPT, **OPTIONS, position_ids=usual, generation_strategy="recguide")
    assert output.equal(expected)
    with pytest.raises(UnsupportedError, match="position_ids"):
        MODEL.generate(PROMPT, **OPTIONS, position_ids=3 * usual, generation_strategy="recguide")


@pytest.mark.parametrize("option", [{"encoder_no_repeat_ngram_size": 2}, {"encoder_repetition_penalty": 1.4}])
def test_processors_made_for_the_whole_batch(option: dict[str, Any]) -> None:
    prompts = torch.tensor([[3, 7, 9, 2, 3, 7], [4, 6, 8, 4, 6, 9], [2, 2, 1, 9, 8, 7]])
    expected = MODEL.generate(prompts, **OPTIONS, **option, suppress_tokens=[MASK])
    assert MODEL.generate(prompts, **OPTIONS, **option, generation_strategy="recguide").equal(expected)


class StopsRow(StoppingCriteria):
    """Ends row 1 after two columns."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([False, input_ids.shape[1] >= 6])


def test_counters_know_of_tokens_that_were_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = DecodeMetrics()
    prompts = torch.tensor([[3, 7, 9, 2], [4, 6, 8, 4]])
    text = MODEL.generate(prompts, **OPTIONS, suppress_tokens=[MASK])[1].tolist()
    drafts = ScriptedDrafts(MODEL, lambda position: text[position] if position < len(text) else 1)
    monkeypatch.setattr("recguide.hf_call.ModelAdapter.of", lambda *_: drafts)
    output = MODEL.generate(
        prompts,
        **OPTIONS,
        eos_token_id=23,
        stopping_criteria=StoppingCriteriaList([StopsRow()]),
        generation_strategy="recguide",
        recguide_config={"block_size": 8},
        recguide_hooks=[metrics],
    )
    metrics.check()
    assert output[1, 6:].eq(0).all()
    assert metrics.new_tokens == 12 + 2
    assert metrics.taken_back > 0


def test_reduced_precision_by_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = MODEL.generate(PROMPT, **OPTIONS, generation_strategy="recguide")
    assert output.shape == (1, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generation_strategy": "linear", "recguide_config": RecGuideConfig(strategy="quadratic")}, "disagree"),
        ({"generation_strategy": "recguide", "recguide_hooks": DecodeMetrics()}, "list of recguide.Hook"),
        ({"generation_strategy": "recguide", "recguide_hooks": ["metrics"]}, "list of recguide.Hook"),
    ],
)
def test_arguments_that_contradict(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MODEL.generate(PROMPT, **OPTIONS, **arguments)


def test_none_is_no_custom_generate() -> None:
    output = MODEL.generate(PROMPT, **OPTIONS, generation_strategy="ar", custom_generate=None)
    assert output.shape == (1, 16)


def test_defaults_from_a_config_object_and_not_on_a_class() -> None:
    model = attach(toy_model(), "linear", RecGuideConfig(strategy="linear", block_size=8))
    metrics = DecodeMetrics()
    model.generate(PROMPT, **OPTIONS, recguide_hooks=[metrics])
    assert metrics.forwards["draft"] > 0
    other = DecodeMetrics()
    model.generate(PROMPT, **OPTIONS, generation_strategy="ar", recguide_hooks=[other])
    assert other.forwards["draft"] == 0
    with pytest.raises(ConfigError, match="is a class"):
        attach(type(model), "linear")


def test_the_adapter_of_a_subfolder(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path / "sub")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, subfolder="sub")
    assert len(draft_adapter_of(loaded)) == 2


def test_a_model_offloaded_to_disk(tmp_path: Path) -> None:
    MODEL.save_pretrained(tmp_path / "model")
    places = {
        "model.embed_tokens": "cpu",
        "model.layers": "disk",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "cpu",
    }
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    expected = MODEL.generate(PROMPT, **OPTIONS, suppress_tokens=[MASK])
    assert loaded.generate(PROMPT, **OPTIONS, generation_strategy="recguide").equal(expected)
