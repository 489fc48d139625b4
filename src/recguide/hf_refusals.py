"""What `generate` can be asked for and a strategy cannot honour: refused with the reason, before any forward."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.generation import LogitsProcessorList
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from .errors import UnsupportedError

_DYNAMIC_ONLY = "the cache must grow and crop. Use the dynamic one."


def refuse(name: str, reason: str) -> NoReturn:
    """Raise [`UnsupportedError`] for an argument, with the reason and what to do."""
    raise UnsupportedError(f"generation_strategy cannot honour {name}: {reason}")


def refuse_arguments(
    model: PreTrainedModel, kwargs: dict[str, Any], generation_config: GenerationConfig | None = None
) -> None:
    """Refuse, before any work, what would reach plain `generate` only to fail there for another reason."""
    if model.config.is_encoder_decoder:
        refuse("an encoder-decoder model", "drafting and verifying share one decoder-only backbone.")
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ())
    if others := sorted(layers - {"full_attention", "sliding_attention"}):
        refuse(f"layers of type {', '.join(others)}", "every layer must attend to its whole prefix.")
    if getattr(model, "_is_stateful", False):
        refuse(f"{type(model).__name__}", "it carries a state that cannot be taken back when a draft is rejected.")
    if getattr(text, "sliding_window", None) and (not layers or "sliding_attention" in layers):
        refuse(f"sliding-window attention (sliding_window={text.sliding_window})", "segments see their whole prefix.")
    if not getattr(model, "_supports_attention_backend", False):
        refuse(f"{type(model).__name__}", "its attention does not go through transformers' attention interface.")
    if kwargs.get("assistant_model") is not None:
        refuse("assistant_model", "the model is its own drafter. Leave one of the two out.")
    if kwargs.get("custom_generate") is not None:
        refuse("custom_generate", "it is another decoding loop. Leave one of the two out.")
    if kwargs.get("inputs_embeds") is not None:
        refuse("inputs_embeds", "rounds are planned on token ids. Pass input_ids.")
    if kwargs.get("cache_implementation") == "paged":
        refuse("cache_implementation='paged'", "it is another decoding loop. Use the dynamic cache.")
    merged = _merged(model.generation_config, generation_config, kwargs)
    if merged.get("cache_implementation") == "quantized":
        refuse("cache_implementation='quantized'", _DYNAMIC_ONLY)
    if merged.get("token_healing"):
        refuse("token_healing", "it decodes to rewrite the prompt. Heal the prompt beforehand, with model.heal_tokens.")
    if kwargs.get("synced_gpus"):
        refuse("synced_gpus", "ranks would run different numbers of rounds.")


def _merged(
    defaults: GenerationConfig, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The options as transformers will merge them: what a config leaves at None is unset, an argument's None is not."""
    places = [defaults] if generation_config is None else [defaults, generation_config]
    merged = {name: value for place in places for name, value in vars(place).items() if value is not None}
    return merged | kwargs


def refuse_config(generation_config: GenerationConfig, processors: LogitsProcessorList, cache: Any) -> None:
    """Refuse what the merged generation config, processors and cache ask for and rounds cannot give."""
    if (generation_config.num_beams or 1) > 1:
        refuse(f"num_beams={generation_config.num_beams}", "a request is one sequence. Use num_beams=1.")
    if (generation_config.num_return_sequences or 1) > 1 and not generation_config.do_sample:
        refuse(f"num_return_sequences={generation_config.num_return_sequences}", "greedy decoding has one answer.")
    if generation_config.is_assistant:
        refuse("is_assistant=True", "the model drafts for itself, not for another.")
    if generation_config.prefill_chunk_size is not None:
        refuse(
            f"prefill_chunk_size={generation_config.prefill_chunk_size}",
            "a prompt goes through the model in one forward.",
        )
    for name in (
        "use_mtp",
        "prompt_lookup_num_tokens",
        "penalty_alpha",
        "dola_layers",
        "constraints",
        "force_words_ids",
        "assistant_early_exit",
    ):
        if getattr(generation_config, name, None):
            refuse(f"{name}={getattr(generation_config, name)!r}", "it is another decoding method.")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            refuse(f"{name}=True", "a round computes them for drafted tokens too, in another shape.")
    if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        refuse(f"cache_implementation={generation_config.cache_implementation!r}", _DYNAMIC_ONLY)
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        refuse("guidance_scale", "its processor runs the model itself, one token at a time.")
    if cache is not None and (
        type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers)
    ):
        refuse(
            f"a {type(cache).__name__}",
            "the cache must be one that can be cropped and read by position: a DynamicCache.",
        )


KNOWN_MODEL_KWARGS = {"attention_mask", "cache", "logits_to_keep", "position_ids", "use_cache"}


def refuse_model_inputs(model_kwargs: dict[str, Any], padding: list[int], width: int) -> None:
    """Refuse inputs that rounds would leave out: whatever is not tokens, mask and cache, and positions of the user's own."""
    if others := sorted(
        name for name, value in model_kwargs.items() if value is not None and name not in KNOWN_MODEL_KWARGS
    ):
        refuse(", ".join(others), "rounds give the model tokens, positions and a cache, nothing else.")
    given = model_kwargs.get("position_ids")
    if given is None:
        return
    for row, pads in enumerate(padding):
        positions = given[min(row, given.shape[0] - 1)][-(width - pads) :].tolist()
        usual = list(range(width - pads))
        if positions != usual[len(usual) - len(positions) :]:
            refuse("position_ids", f"row {row}'s do not count its tokens from 0. Leave them out.")
