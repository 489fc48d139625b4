"""`model.generate(..., generation_strategy="recguide")`: with its helpers, the only files that know `GenerationConfig`.

transformers keeps doing what it does well (checks, lengths, processors, stopping criteria, warnings): its own `generate`
is called with `custom_generate=`, and this file takes over where its decoding loop would start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import LogitsProcessorList, StopStringCriteria

from .adapter import ModelAdapter
from .config import STRATEGIES, RecGuideConfig
from .errors import ConfigError, InputError, UnsupportedError
from .hf_call import Call, Extras, decode, prepare
from .hf_refusals import refuse, refuse_arguments
from .hooks import Hook
from .policy import Policies

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
        given = (
            dict(vars(recguide_config)) if isinstance(recguide_config, RecGuideConfig) else dict(recguide_config or {})
        )
        if not isinstance(given.get("policy", ""), str):
            raise ConfigError(
                f"A policy object cannot be saved with the model: {given['policy']!r}. Pass it to each call."
            )
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
    seed: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    thinking_budget: int | None = None,
    output_logprobs: bool = False,
    top_logprobs: int = 0,
    output_records: bool = False,
    **kwargs: Any,
) -> Any:
    """
    `generate` with more arguments; everything else is as in [`~transformers.GenerationMixin.generate`].

    Args:
        model ([`~transformers.PreTrainedModel`]): the model.
        plain_generate (callable): the model's own `generate`, bound.
        generation_strategy (`str`, *optional*):
            `"recguide"`, `"auto"`, `"linear"`, `"quadratic"` or `"ar"`. Looked for here, then on `generation_config`, then on
            `model.generation_config`; where none is found, plain `generate` runs.
        recguide_config (`dict` or `RecGuideConfig`, *optional*): options of [`RecGuideConfig`], looked for likewise.
        recguide_hooks (`Sequence[Hook]`, *optional*): observers of the decoding.
        seed (`int` or `Sequence[int]`, *optional*):
            Of sampling, one for the call (each row gets one of its own from it) or one for each output row, 0 … 2^64 - 1. By default
            seeds are drawn from `generator`, or else from torch's global generator, so that `torch.manual_seed` governs. Greedy
            decoding has no use for it.
        generator (`torch.Generator`, *optional*): seeds are drawn from it, one a row.
        presence_penalty, frequency_penalty (`float`, defaults to 0.0): see [`OutputPenaltyLogitsProcessor`].
        thinking_budget (`int`, *optional*): tokens after which an open `<think>` is closed; needs `tokenizer=`.
        output_logprobs (`bool`, defaults to `False`): fill [`RecGuideOutput.logprobs`], with `return_dict_in_generate=True`.
        top_logprobs (`int`, defaults to 0): fill [`RecGuideOutput.top_logprobs`] with so many a place; needs `output_logprobs`.
        output_records (`bool`, defaults to `False`): fill [`RecGuideOutput.records`], likewise.

    Returns:
        As plain `generate`; with `return_dict_in_generate=True` a [`RecGuideOutput`].

    Raises:
        ConfigError: an unknown strategy or option, or a value out of range.
        UnsupportedError: an option of `generate` that cannot be honoured; before any forward.
        InputError: an empty prompt, or one longer than the context.
    """
    run = kwargs.get("custom_generate")
    if isinstance(run, functools.partial) and run.func is _take_over:
        # Our own call, on its way down through a second attached class.
        return plain_generate(inputs, generation_config, *args, **kwargs)
    places = (generation_config, model.generation_config)
    strategy = _first_of(generation_strategy, STRATEGY, places)
    options = _first_of(recguide_config, OPTIONS, places)
    extras = Extras(
        hooks=checked_hooks(recguide_hooks),
        seed=tuple(seed) if isinstance(seed, Sequence) else seed,
        generator=generator,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        thinking_budget=thinking_budget,
        thinking_markers=_thinking_markers(kwargs.get("tokenizer")) if thinking_budget is not None else None,
        output_logprobs=output_logprobs,
        top_logprobs=top_logprobs,
        output_records=output_records,
        streamer=kwargs.get("streamer"),
    )
    if strategy is None:
        if recguide_config is not None or extras != Extras(streamer=extras.streamer):
            raise ConfigError(
                f"recguide's arguments need a strategy: pass generation_strategy=, one of {', '.join(STRATEGIES)}."
            )
        return plain_generate(inputs, generation_config, *args, **kwargs)
    config = resolve_config(strategy, options)
    if args:
        raise UnsupportedError("With a generation_strategy, pass everything after generation_config by keyword.")
    refuse_arguments(model, kwargs, generation_config)
    kwargs.pop("custom_generate", None)
    kwargs, generation_config = _take_stop_strings(model, generation_config, kwargs)
    run = functools.partial(_take_over, finish=decode, config=config, extras=extras)
    return plain_generate(inputs, generation_config, custom_generate=run, **kwargs)


def checked_hooks(given: Any) -> tuple[Hook, ...]:
    """The given hooks, if they are a list of hooks."""
    if not isinstance(given, Sequence) or not all(isinstance(hook, Hook) for hook in given):
        raise ConfigError(f"recguide_hooks must be a list of recguide.Hook objects; got {given!r}.")
    return tuple(given)


def _thinking_markers(tokenizer: Any) -> tuple[list[int], list[int]]:
    if tokenizer is None:
        raise InputError("thinking_budget needs the tokenizer: pass generate(..., tokenizer=tokenizer).")
    start, end = (tokenizer.encode(marker, add_special_tokens=False) for marker in ("<think>", "</think>"))
    return start, end


def resolve_config(strategy: str, options: dict[str, Any] | RecGuideConfig | None) -> RecGuideConfig:
    """The validated config of a strategy's name and its options."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"Unknown generation_strategy {strategy!r}. Known: {', '.join(STRATEGIES)}.")
    if options is not None and not isinstance(options, dict | RecGuideConfig):
        raise ConfigError(f"recguide_config must be a dict or a RecGuideConfig; got {options!r}.")
    # Not asdict: that would copy a policy object, and what it has learned would be lost.
    given = dict(vars(options)) if isinstance(options, RecGuideConfig) else dict(options or {})
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
        refuse(
            "stop_strings on model.generation_config",
            "the tokenizer that they need never reaches a strategy. Set them to None there, and pass them to generate().",
        )
    if strings is not None:
        if tokenizer is None:
            raise InputError("stop_strings need the tokenizer: pass generate(..., tokenizer=tokenizer).")
        criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
        kwargs["stopping_criteria"] = criteria
    return kwargs, generation_config


def _take_over(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    finish: Callable[[Call], Any],
    config: RecGuideConfig,
    extras: Extras,
    **model_kwargs: Any,
) -> Any:
    """In place of transformers' decoding loop, which hands over what it has prepared."""
    return finish(
        prepare(model, input_ids, logits_processor, stopping_criteria, generation_config, config, extras, model_kwargs)
    )


def prepared_call(adapter: ModelAdapter, inputs: Tensor, policies: Policies, **arguments: Any) -> Call:
    """
    What `generate(inputs, **arguments)` would decode, by the same checks and rules, not yet decoded: the engine's way in.

    Args:
        adapter (`ModelAdapter`): the engine's, of its model.
        inputs (`torch.LongTensor` of shape `(batch, length)`): the prompt.
        policies (`Policies`): the engine's.
        arguments: of [`generate_with_strategy`], a strategy among them.
    """
    calls: list[Call] = []
    model: Any = adapter.model

    def until_prepared(*args: Any, custom_generate: Any, **kwargs: Any) -> None:
        given = custom_generate.keywords
        ours = {"finish": calls.append, "extras": replace(given["extras"], adapter=adapter, policies=policies)}
        run = functools.partial(_take_over, **(given | ours))
        plain = getattr(type(model), _PLAIN, None) or type(model).generate
        plain(model, *args, custom_generate=run, **kwargs)

    generate_with_strategy(model, until_prepared, inputs, **arguments)
    return calls[0]
