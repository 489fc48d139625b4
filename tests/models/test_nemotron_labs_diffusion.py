"""The NLD family: released checkpoints in and out, errors that name the keys, the draft adapter's per-token switch."""

import copy
import json
import math
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.errors import CheckpointError
from recguide.models.draft_adapter import adapter_rows, draft_adapter_of
from recguide.models.nemotron_labs_diffusion import NemotronLabsDiffusionConfig, NemotronLabsDiffusionModel
from recguide.testing import toy_config, toy_model

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, HEAD, VOCAB, RANK, ALPHA = 32, 48, 2, 4, 2, 16, 24, 4, 16
ADAPTER = "linear_spec_lora"
TOKENS = torch.tensor([[1, 7, 3, 9, 2, 8, 4, 11]])

CONFIG: dict[str, Any] = {
    "architectures": ["NemotronLabsDiffusionModel"],
    "model_type": "nemotron_labs_diffusion",
    "auto_map": {"AutoModel": "modeling_nemotron_labs_diffusion.NemotronLabsDiffusionModel"},
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "mask_token_id": 5,
    "block_size": 32,
    "dlm_paradigm": "bidirectional",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
ADAPTER_CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.0,
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "target_modules": ["o_proj"],
}


# --- a released checkpoint, written by hand ------------------------------------------------------------------------


def released_weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"encoder.embed_tokens": (VOCAB, HIDDEN), "encoder.norm": (HIDDEN,), "diffusion_head": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"encoder.layers.{layer}.{name}": shape
            for name, shape in {
                "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
                "input_layernorm": (HIDDEN,),
                "post_attention_layernorm": (HIDDEN,),
            }.items()
        }
    return {f"{key}.weight": torch.randn(shape, generator=generator) * 0.3 for key, shape in shapes.items()}


def released_adapter() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    weights = {}
    for layer in range(LAYERS):
        path = f"base_model.model.encoder.layers.{layer}.self_attn.o_proj"
        weights[f"{path}.lora_A.weight"] = torch.randn((RANK, HEADS * HEAD), generator=generator) * 0.3
        weights[f"{path}.lora_B.weight"] = torch.randn((HIDDEN, RANK), generator=generator) * 0.3
    return weights


def write_checkpoint(
    directory: Path, weights: dict[str, Tensor] | None = None, adapter: dict[str, Tensor] | None = None, **config: Any
) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    weights = released_weights() if weights is None else weights
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    if adapter is not None:
        (directory / ADAPTER).mkdir(exist_ok=True)
        (directory / ADAPTER / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG))
        save_file(adapter, directory / ADAPTER / "adapter_model.safetensors", metadata={"format": "pt"})
    return directory


def by_hand(adapter: bool = False) -> NemotronLabsDiffusionModel:
    """A model whose weights are set one by one; with the adapter merged into `o_proj` if asked for."""
    model = NemotronLabsDiffusionModel(NemotronLabsDiffusionConfig(**CONFIG)).eval()
    with torch.no_grad():
        for key, value in released_weights().items():
            path = key.replace("encoder.", "model.").replace("diffusion_head.", "lm_head.")
            model.get_parameter(path).copy_(value)
        for layer in range(LAYERS if adapter else 0):
            path = f"base_model.model.encoder.layers.{layer}.self_attn.o_proj"
            delta = released_adapter()[f"{path}.lora_B.weight"] @ released_adapter()[f"{path}.lora_A.weight"]
            model.get_parameter(f"model.layers.{layer}.self_attn.o_proj.weight").add_(delta * (ALPHA / RANK))
    return model


def logits_of(model: Any, rows: Tensor | None = None, **inputs: Any) -> Tensor:
    with torch.no_grad(), adapter_rows(rows):
        return model(TOKENS, use_cache=False, **inputs).logits[0]  # type: ignore[no-any-return]


def drafted_logits(model: Any) -> Tensor:
    return logits_of(model, torch.ones(TOKENS.shape[1], dtype=torch.bool))


# --- loading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModel], ids=["causal", "plain"])
def test_a_released_checkpoint_loads_through_the_auto_classes(auto: Any, tmp_path: Path) -> None:
    model = auto.from_pretrained(write_checkpoint(tmp_path, adapter=released_adapter()))
    assert type(model) is NemotronLabsDiffusionModel
    assert not model.training
    assert torch.equal(logits_of(model), logits_of(by_hand()))
    torch.testing.assert_close(drafted_logits(model), logits_of(by_hand(adapter=True)), rtol=1e-4, atol=1e-4)
    assert (drafted_logits(model) - logits_of(model)).abs().max() > 0.01
    assert {delta.scale for delta in draft_adapter_of(model).values()} == {4.0}


def test_a_repack_with_a_prefix_and_leftover_buffers_loads(tmp_path: Path) -> None:
    weights = {f"language_model.{key}": value for key, value in released_weights().items()}
    for layer in range(LAYERS):
        weights[f"language_model.encoder.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.zeros(HEAD // 2)
    weights["encoder.rotary_emb.inv_freq"] = torch.zeros(HEAD // 2)
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path, weights))
    assert torch.equal(logits_of(model), logits_of(by_hand()))
    assert draft_adapter_of(model) == {}


@pytest.mark.parametrize("device_map", [None, "cpu", {"": "cpu"}], ids=str)
def test_dtype_and_device_map(device_map: Any, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, adapter=released_adapter())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map=device_map)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    deltas = draft_adapter_of(model)
    assert len(deltas) == LAYERS
    for layer in range(LAYERS):
        delta, path_of = deltas[f"model.layers.{layer}.self_attn.o_proj"], f"encoder.layers.{layer}.self_attn.o_proj"
        expected = released_adapter()[f"base_model.model.{path_of}.lora_A.weight"].bfloat16()
        assert torch.equal(delta.lora_A.weight, expected)
    hand = by_hand()
    for parameter in hand.parameters():  # not hand.bfloat16(), which rounds the rotary frequencies too
        parameter.data = parameter.data.bfloat16()
    assert torch.equal(logits_of(model), logits_of(hand))
    assert (drafted_logits(model) - logits_of(model)).abs().max() > 0.01


def test_loading_info_is_handed_out_on_request(tmp_path: Path) -> None:
    model, info = AutoModelForCausalLM.from_pretrained(write_checkpoint(tmp_path), output_loading_info=True)
    assert type(model) is NemotronLabsDiffusionModel
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]


def test_plain_generate_is_the_autoregressive_model(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        write_checkpoint(tmp_path, adapter=released_adapter(), eos_token_id=None)
    )
    out = model.generate(TOKENS, max_new_tokens=6, do_sample=False)[0].tolist()
    tokens = TOKENS[0].tolist()
    for _ in range(6):
        with torch.no_grad():
            tokens.append(int(by_hand()(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    assert out == tokens


def without(key: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: {k: v for k, v in weights.items() if k != key}


def with_key(key: str, *shape: int) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda weights: weights | {key: torch.ones(shape)}


UP, O_PROJ = "encoder.layers.1.mlp.up_proj.weight", "base_model.model.encoder.layers.1.self_attn.o_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(UP), r"missing .*layers\.1\.mlp\.up_proj\.weight"),
        (without("diffusion_head.weight"), r"missing .*(diffusion_head|lm_head)\.weight"),
        (
            with_key("encoder.layers.0.self_attn.q_norm.weight", HEAD),
            r"unexpected .*layers\.0\.self_attn\.q_norm\.weight",
        ),
        (with_key("encoder.layers.7.mlp.up_proj.weight", FFN, HIDDEN), r"unexpected .*layers\.7\.mlp\.up_proj\.weight"),
        (with_key(UP, FFN, HIDDEN + 1), r"layers\.1\.mlp\.up_proj\.weight"),
    ],
    ids=["missing", "missing-head", "extra", "extra-layer", "misshapen"],
)
@pytest.mark.parametrize("options", [{}, {"ignore_mismatched_sizes": True}], ids=["", "ignore-sizes"])
def test_an_error_names_the_key(change: Any, message: str, options: dict[str, Any], tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, change(released_weights()))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(path, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{O_PROJ}.lora_B.weight"), r"missing .*layers\.1\.self_attn\.o_proj\.lora_B\.weight"),
        (
            with_key(f"{O_PROJ}.lora_A.weight", RANK + 1, HEADS * HEAD),
            r"layers\.1.*o_proj\.lora_A\.weight.*\(5, 64\).*\(4, 64\)",
        ),
        (
            with_key(O_PROJ.replace("1", "9") + ".lora_A.weight", RANK, HEADS * HEAD),
            r"unexpected .*layers\.9.*lora_A\.weight",
        ),
        (
            with_key(O_PROJ.replace("o_proj", "q_proj") + ".lora_A.weight", RANK, HIDDEN),
            r"unexpected .*q_proj\.lora_A\.weight",
        ),
    ],
    ids=["missing", "misshapen", "extra-layer", "other-module"],
)
def test_an_adapter_error_names_the_key(change: Any, message: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, adapter=change(released_adapter()))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_directory_must_be_whole(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, adapter=released_adapter())
    (path / ADAPTER / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        AutoModelForCausalLM.from_pretrained(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"use_rslora": True}, "use_rslora=True"),
        ({"bias": "all"}, "bias='all'"),
        ({"target_modules": ["wo"]}, "wo"),
    ],
    ids=["dora", "rslora", "bias", "target"],
)
def test_an_adapter_of_another_kind_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, adapter=released_adapter())
    (path / ADAPTER / "adapter_config.json").write_text(json.dumps(ADAPTER_CONFIG | change))
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(path)


# --- saving --------------------------------------------------------------------------------------------------------


def read_all(directory: Path) -> dict[str, Tensor]:
    files = sorted(directory.glob("*.safetensors"))
    tensors = [load_file(file) for file in files]
    assert sum(map(len, tensors)) == len({key for part in tensors for key in part})
    return {key: value for part in tensors for key, value in part.items()}


def assert_same_tensors(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype is value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("options", [{}, {"max_shard_size": "10KB"}], ids=["whole", "sharded"])
def test_saving_writes_the_released_layout(options: dict[str, Any], tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", adapter=released_adapter())
    target = tmp_path / "target"
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(target, **options)
    assert (len(list(target.glob("*.safetensors"))) > 1) == bool(options)
    assert_same_tensors(read_all(target), released_weights())
    if options:
        index = json.loads((target / "model.safetensors.index.json").read_text())
        assert index["weight_map"].keys() == released_weights().keys()
    assert_same_tensors(read_all(target / ADAPTER), released_adapter())
    adapter_config = json.loads((target / ADAPTER / "adapter_config.json").read_text())
    assert (adapter_config["r"], adapter_config["lora_alpha"]) == (RANK, ALPHA)
    assert adapter_config["target_modules"] == ["o_proj"]
    config = json.loads((target / "config.json").read_text())
    for key in (
        "architectures",
        "model_type",
        "mask_token_id",
        "block_size",
        "dlm_paradigm",
        "rope_parameters",
        "head_dim",
    ):
        assert config[key] == CONFIG[key]
    again = AutoModel.from_pretrained(target)
    assert torch.equal(logits_of(again), logits_of(by_hand()))
    assert torch.equal(drafted_logits(again), drafted_logits(AutoModel.from_pretrained(source)))


def test_a_model_without_an_adapter_saves_none(tmp_path: Path) -> None:
    by_hand().save_pretrained(tmp_path)
    assert_same_tensors(read_all(tmp_path), released_weights())
    assert not (tmp_path / ADAPTER).exists()


def test_half_precision_is_saved_as_it_is(tmp_path: Path) -> None:
    by_hand().bfloat16().save_pretrained(tmp_path)
    assert_same_tensors(read_all(tmp_path), {key: value.bfloat16() for key, value in released_weights().items()})


# --- the per-token switch ------------------------------------------------------------------------------------------


def o_proj_outputs(model: Any, rows: Tensor | None) -> Tensor:
    """What the first layer's `o_proj` gives for each token: its input does not depend on the switch."""
    outputs: list[Tensor] = []
    handle = model.model.layers[0].self_attn.o_proj.register_forward_hook(
        lambda module, args, out: outputs.append(out[0])
    )
    logits_of(model, rows)
    handle.remove()
    return outputs[0]


@pytest.mark.parametrize("drafted", [set(), {0}, {3, 4, 5}, {7}, set(range(8))], ids=str)
def test_the_delta_is_added_to_drafted_tokens_only(drafted: set[int]) -> None:
    model = toy_model()
    rows = torch.tensor([i in drafted for i in range(TOKENS.shape[1])])
    off, on = o_proj_outputs(model, None), o_proj_outputs(model, torch.ones_like(rows))
    mixed = o_proj_outputs(model, rows)
    assert ((on - off).abs().amax(-1) > 1e-3).all()
    assert torch.equal(mixed, torch.where(rows[:, None], on, off))
    assert torch.equal(o_proj_outputs(model, rows[None]), mixed)


def test_the_switch_is_off_again_afterwards_and_in_other_threads() -> None:
    model = toy_model()
    off, rows = logits_of(model), torch.ones(TOKENS.shape[1], dtype=torch.bool)
    elsewhere: list[Tensor] = []
    with adapter_rows(rows):
        with torch.no_grad():
            on = model(TOKENS, use_cache=False).logits[0]
        thread = threading.Thread(target=lambda: elsewhere.append(model(TOKENS, use_cache=False).logits[0].detach()))
        thread.start()
        thread.join(30)
        assert torch.equal(logits_of(model, None), off)
        with torch.no_grad():
            assert torch.equal(model(TOKENS, use_cache=False).logits[0], on)
    with pytest.raises(RuntimeError, match="inside"), adapter_rows(rows):
        raise RuntimeError("inside")
    with torch.no_grad():
        assert torch.equal(model(TOKENS, use_cache=False).logits[0], off)
    assert torch.equal(elsewhere[0], off)
    assert not torch.equal(on, off)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_the_adapter_survives_copies(duplicate: Callable[[Any], Any]) -> None:
    model = toy_model()
    before = drafted_logits(model)
    copied = duplicate(model)
    assert draft_adapter_of(copied).keys() == draft_adapter_of(model).keys()
    assert torch.equal(drafted_logits(copied), before)
    assert torch.equal(logits_of(copied), logits_of(model))
    with torch.no_grad():
        for delta in draft_adapter_of(copied).values():
            delta.lora_B.weight.zero_()
    assert torch.equal(drafted_logits(copied), logits_of(copied))
    assert torch.equal(drafted_logits(model), before), "the copy shares the adapter's weights"


# --- configuration -------------------------------------------------------------------------------------------------


def with_scaling(beta: float) -> NemotronLabsDiffusionModel:
    model = by_hand()
    rope = CONFIG["rope_parameters"] | {"llama_4_scaling_beta": beta}
    other = NemotronLabsDiffusionModel(NemotronLabsDiffusionConfig(**CONFIG | {"rope_parameters": rope})).eval()
    other.load_state_dict(model.state_dict())
    return other


def test_queries_beyond_the_original_context_are_scaled() -> None:
    """Within it nothing changes; in its n-th length every query is scaled by 1 + 0.1 ln n."""
    scaled, unscaled = with_scaling(0.1), with_scaling(0.0)
    for start, times in ((100, 1), (130, 2), (300, 3)):
        positions = {"position_ids": torch.arange(start, start + TOKENS.shape[1])[None]}
        by_weights = copy.deepcopy(unscaled)
        with torch.no_grad():
            for layer in by_weights.model.layers:
                layer.self_attn.q_proj.weight *= 1 + 0.1 * math.log(times)
        got, expected = logits_of(scaled, **positions), logits_of(by_weights, **positions)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        changed = (got - logits_of(unscaled, **positions)).abs().max()
        assert changed == 0 if times == 1 else changed > 1e-3


def test_the_config_makes_a_round_trip(tmp_path: Path) -> None:
    config = NemotronLabsDiffusionConfig(**CONFIG)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is NemotronLabsDiffusionConfig
    assert again.rope_parameters == config.rope_parameters
    assert {key: again.rope_parameters[key] for key in CONFIG["rope_parameters"]} == CONFIG["rope_parameters"]
    assert again.to_diff_dict() == config.to_diff_dict()


def test_defaults_are_the_release_s() -> None:
    config = NemotronLabsDiffusionConfig()
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers) == (4096, 14336, 34)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.vocab_size, config.rms_norm_eps, config.tie_word_embeddings) == (131072, 1e-5, False)
    assert (config.mask_token_id, config.block_size, config.dlm_paradigm) == (-1, 32, "bidirectional")
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 11, 11)
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384}
    assert {key: config.rope_parameters[key] for key in rope} == rope
    assert config.rope_parameters["llama_4_scaling_beta"] == 0.1


def test_an_unknown_paradigm_is_refused() -> None:
    with pytest.raises(Exception, match=r"dlm_paradigm must be one of bidirectional.*'sideways'"):
        toy_config(dlm_paradigm="sideways")


@pytest.mark.parametrize("mask", [-1, VOCAB])
def test_a_mask_token_that_is_none_is_refused(mask: int) -> None:
    model = NemotronLabsDiffusionModel(toy_config(mask_token_id=mask)).eval()
    assert logits_of(model).shape == (TOKENS.shape[1], VOCAB)
    with pytest.raises(CheckpointError, match=f"mask_token_id={mask} is not a token"):
        ModelAdapter(model, resolve_backend()).block([1, None], 0)
