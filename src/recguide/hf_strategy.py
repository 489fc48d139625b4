"""`model.generate(..., generation_strategy="recguide")`: with its two helpers, the only files that know `GenerationConfig`.

transformers keeps doing what it does well (checks, lengths, processors, stopping criteria, warnings): its own `generate`
is called with `custom_generate=`, and this file takes over where its decoding loop would start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput, LogitsProcessorList, StopStringCriteria

from .adapter import ModelAdapter
from .attention import resolve_backend
from .config import STRATEGIES, RecGuideConfig
from .errors import ConfigError, InputError, UnsupportedError
from .hf_batch import (
    Columns,
    RowRule,
    ScoreRecorder,
    asks_by_row,
    eos_tokens,
    extend_cache,
    kv_of,
    other_criteria,
    prompts_of,
    token_choice,
)
from .hf_refusals import refuse, refuse_arguments, refuse_config, refuse_model_inputs
from .hooks import Hook
from .loop import generate as decode
from .rounds import Request

STRATEGY, OPTIONS = "generation_strategy", "recguide_config"
_PLAIN = "_recguide_plain_generate"


# --- ways in -------------------------------------------------------------------------------------------------------


class RecGuideGenerationMixin:
    """
    Gives a model class `generate(..., generation_strategy=...)`; put it before the model class in the bases.

    Example:

    ```python
    class MyModel(RecGuideGenerationMixin, NemotronLabsDiffusionModel): ...
    ```
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' `generate` with [`generate_with_strategy`]'s extra arguments."""
        return generate_with_strategy(self, super().generate, *args, **kwargs)  # type: ignore[misc, arg-type]


def attach(
    model: Any, generation_strategy: str | None = None, recguide_config: dict[str, Any] | RecGuideConfig | None = None
) -> Any:
    """
    Teach a loaded model (or a model class) the strategies. A model that is attached already is left as it is.

    Args:
        model ([`~transformers.PreTrainedModel`] or a class of it): its `generate` is replaced, its class is not.
        generation_strategy (`str`, *optional*): make this the default, on `model.generation_config`; saved with the model.
        recguide_config (`dict`, *optional*): default options, likewise.

    Returns:
        The same `model`.
    """
    if generation_strategy is not None or recguide_config is not None:
        if isinstance(model, type):
            raise ConfigError(f"Defaults belong to a loaded model's generation_config; {model.__name__} is a class.")
        strategy = generation_strategy or "recguide"
        resolve_config(strategy, recguide_config)
        given = asdict(recguide_config) if isinstance(recguide_config, RecGuideConfig) else dict(recguide_config or {})
        # Kept once, under its own name: a call may ask for another strategy with the same options.
        given.pop("strategy", None)
        setattr(model.generation_config, STRATEGY, strategy)
        setattr(model.generation_config, OPTIONS, given)
        # A config that stands as made from the model's is made anew on load, and would lose the two.
        model.generation_config._from_model_config = False
    if isinstance(model, type):
        if not hasattr(model, _PLAIN) and not issubclass(model, RecGuideGenerationMixin):
            setattr(model, _PLAIN, getattr(model, "generate"))  # noqa: B009
            setattr(model, "generate", _generate_method)  # noqa: B010
    elif not _is_attached(model):
        # A partial, not a bound method or a new class: it survives deepcopy, pickle and PEFT.
        model.generate = functools.partial(_generate_method, model)
    return model


def detach(model: Any) -> Any:
    """Undo [`attach`]; the defaults on `generation_config` go too. Returns the same `model`."""
    if isinstance(model, type):
        if _PLAIN in vars(model):
            setattr(model, "generate", getattr(model, _PLAIN))  # noqa: B010
            delattr(model, _PLAIN)
        return model
    if "generate" in vars(model) and _is_attached(model):
        del model.generate
    for name in (STRATEGY, OPTIONS):
        if hasattr(model.generation_config, name):
            delattr(model.generation_config, name)
    return model


def _is_attached(model: Any) -> bool:
    own = vars(model).get("generate")
    if isinstance(own, functools.partial) and own.func is _generate_method:
        return True
    return isinstance(model, RecGuideGenerationMixin) or hasattr(type(model), _PLAIN)


def _generate_method(self: Any, *args: Any, **kwargs: Any) -> Any:
    plain = getattr(type(self), _PLAIN, None) or type(self).generate
    return generate_with_strategy(self, functools.partial(plain, self), *args, **kwargs)


def generate_with_strategy(
    model: PreTrainedModel,
    plain_generate: Callable[..., Any],
    inputs: Tensor | None = None,
    generation_config: GenerationConfig | None = None,
    *args: Any,
    generation_strategy: str | None = None,
    recguide_config: dict[str, Any] | RecGuideConfig | None = None,
    recguide_hooks: Sequence[Hook] = (),
    **kwargs: Any,
) -> Any:
    """
    `generate` with three more arguments; everything else is as in [`~transformers.GenerationMixin.generate`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the model.
        plain_generate (callable): the model's own `generate`, bound.
        generation_strategy (`str`, *optional*):
            `"recguide"`, `"linear"`, `"quadratic"` or `"ar"`. Looked for here, then on `generation_config`, then on
            `model.generation_config`; where none is found, plain `generate` runs.
        recguide_config (`dict` or `RecGuideConfig`, *optional*): options of [`RecGuideConfig`], looked for likewise.
        recguide_hooks (`Sequence[Hook]`, *optional*): observers of the decoding.

    Raises:
        ConfigError: an unknown strategy or option, or a value out of range.
        UnsupportedError: an option of `generate` that cannot be honoured; before any forward.
        InputError: an empty prompt, or one longer than the context.
    """
    run = kwargs.get("custom_generate")
    if isinstance(run, functools.partial) and run.func is _decode:
        # Our own call, on its way down through a second attached class.
        return plain_generate(inputs, generation_config, *args, **kwargs)
    places = (generation_config, model.generation_config)
    strategy = _first_of(generation_strategy, STRATEGY, places)
    options = _first_of(recguide_config, OPTIONS, places)
    if strategy is None:
        if recguide_config is not None or recguide_hooks:
            raise ConfigError(
                f"recguide options need a strategy: pass generation_strategy=, one of {', '.join(STRATEGIES)}."
            )
        return plain_generate(inputs, generation_config, *args, **kwargs)
    config = resolve_config(strategy, options)
    if args:
        raise UnsupportedError("With a generation_strategy, pass everything after generation_config by keyword.")
    if not isinstance(recguide_hooks, Sequence) or not all(isinstance(hook, Hook) for hook in recguide_hooks):
        raise ConfigError(f"recguide_hooks must be a list of recguide.Hook objects; got {recguide_hooks!r}.")
    refuse_arguments(model, kwargs)
    kwargs.pop("custom_generate", None)
    kwargs, generation_config = _take_stop_strings(model, generation_config, kwargs)
    run = functools.partial(_decode, config=config, hooks=tuple(recguide_hooks), streamer=kwargs.get("streamer"))
    return plain_generate(inputs, generation_config, custom_generate=run, **kwargs)


def resolve_config(strategy: str, options: dict[str, Any] | RecGuideConfig | None) -> RecGuideConfig:
    """The validated config of a strategy's name and its options."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"Unknown generation_strategy {strategy!r}. Known: {', '.join(STRATEGIES)}.")
    if options is not None and not isinstance(options, dict | RecGuideConfig):
        raise ConfigError(f"recguide_config must be a dict or a RecGuideConfig; got {options!r}.")
    given = asdict(options) if isinstance(options, RecGuideConfig) else dict(options or {})
    if given.setdefault("strategy", strategy) != strategy:
        raise ConfigError(
            f"generation_strategy={strategy!r} and recguide_config's strategy={given['strategy']!r} disagree; give one."
        )
    return RecGuideConfig.from_options(given)


def _first_of(value: Any, name: str, places: Sequence[GenerationConfig | None]) -> Any:
    if value is not None:
        return value
    return next((found for place in places if (found := getattr(place, name, None)) is not None), None)


def _take_stop_strings(
    model: PreTrainedModel, generation_config: GenerationConfig | None, kwargs: dict[str, Any]
) -> tuple[dict[str, Any], GenerationConfig | None]:
    """Turn stop strings into a criterion: the tokenizer that transformers needs for that never reaches a custom loop."""
    kwargs = dict(kwargs)
    tokenizer = kwargs.get("tokenizer")
    strings = kwargs.pop("stop_strings", None)
    if strings is None and generation_config is not None and generation_config.stop_strings is not None:
        strings = generation_config.stop_strings
        generation_config = GenerationConfig.from_dict({**generation_config.to_dict(), "stop_strings": None})
    if model.generation_config.stop_strings is not None:
        refuse("stop_strings on model.generation_config", "pass them to generate() instead.")
    if strings is not None:
        if tokenizer is None:
            raise InputError("stop_strings need the tokenizer: pass generate(..., tokenizer=tokenizer).")
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        kwargs["stopping_criteria"] = criteria
    return kwargs, generation_config


# --- in place of transformers' decoding loop ------------------------------------------------------------------------


def _decode(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    config: RecGuideConfig,
    hooks: tuple[Hook, ...],
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    cache, mask = model_kwargs.get("cache"), model_kwargs.get("attention_mask")
    refuse_config(generation_config, logits_processor, cache)
    width = input_ids.shape[1]
    cached = 0 if cache is None else cache.get_seq_length()
    seen = generation_config._mask_length if mask is None else mask.shape[1]
    if cached and (seen != width or cached >= width):
        raise InputError(
            f"The cache holds {cached} columns, the attention mask covers {seen}, input_ids {width}: to go on from a cache, pass "
            "the whole sequence, cached columns and at least one new one, and a mask of its length."
        )
    prompts = prompts_of(input_ids, mask)
    padding = [width - len(prompt) for prompt in prompts]
    pads = [input_ids[row, :columns] for row, columns in enumerate(padding)]
    refuse_model_inputs(model_kwargs, padding, width)
    adapter = ModelAdapter(model, resolve_backend())
    keep = generation_config.return_dict_in_generate
    recorder = ScoreRecorder(
        len(prompts),
        scores=bool(keep and generation_config.output_scores),
        logits=bool(keep and generation_config.output_logits),
    )
    eos, criteria = eos_tokens(stopping_criteria), other_criteria(stopping_criteria)
    by_row = [c for c in criteria if len(prompts) == 1 or (eos and asks_by_row(c))]
    batch = [
        Request(
            id=row,
            tokens=prompt,
            max_new_tokens=(stopping_criteria.max_length or generation_config.max_length) - width,
            stop=RowRule(pads[row], eos, by_row, recorder),
            choose=token_choice(row, pads[row], logits_processor, adapter, recorder),
        )
        for row, prompt in enumerate(prompts)
    ]
    pad = generation_config._pad_token_tensor
    columns = Columns(
        batch,
        input_ids,
        pad=int(pad) if eos and pad is not None else None,
        criteria=[c for c in criteria if c not in by_row],
        streamer=streamer,
        recorder=recorder,
    )
    kv = kv_of(cache, padding) if cached else None
    result = decode(batch, adapter, config, eos, hooks, kv, after_round=columns.release)
    if streamer is not None:
        streamer.end()
    sequences = columns.sequences()
    if cache is not None and (keep or getattr(cache, "_is_user_defined", False)):
        extend_cache(cache, result, padding, sequences.shape[1] - 1)
    if not keep:
        return sequences
    length = sequences.shape[1] - width
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": recorder.scores(length),
        "logits": recorder.logits(length),
    }
    return GenerateDecoderOnlyOutput(**fields, cache=cache)
