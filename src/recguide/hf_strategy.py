"""`model.generate(..., generation_strategy="recguide")`: the only file that knows `GenerationConfig`.

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
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StopStringCriteria,
)
from transformers.generation.logits_process import (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from .adapter import ModelAdapter
from .attention import resolve_backend
from .config import STRATEGIES, RecGuideConfig
from .dense_kv import DenseKV
from .errors import ConfigError, InputError, UnsupportedError
from .hooks import Hook
from .loop import Result
from .loop import generate as decode
from .rounds import Request

STRATEGY, OPTIONS, HOOKS = "generation_strategy", "recguide_config", "recguide_hooks"
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


def attach(model: Any, generation_strategy: str | None = None, recguide_config: dict[str, Any] | None = None) -> Any:
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
        resolve_config(generation_strategy or "recguide", recguide_config)
        setattr(model.generation_config, STRATEGY, generation_strategy or "recguide")
        setattr(model.generation_config, OPTIONS, dict(recguide_config or {}))
        # A config that stands as made from the model's is made anew on load, and would lose the two.
        model.generation_config._from_model_config = False
    if isinstance(model, type):
        if _PLAIN not in vars(model):
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
    _refuse_arguments(model, kwargs)
    kwargs, generation_config = _take_stop_strings(model, generation_config, kwargs)
    run = functools.partial(_decode, config=config, hooks=tuple(recguide_hooks), streamer=kwargs.get("streamer"))
    return plain_generate(inputs, generation_config, custom_generate=run, **kwargs)


def resolve_config(strategy: str, options: dict[str, Any] | RecGuideConfig | None) -> RecGuideConfig:
    """The validated config of a strategy's name and its options."""
    if strategy not in STRATEGIES:
        raise ConfigError(f"Unknown generation_strategy {strategy!r}. Known: {', '.join(STRATEGIES)}.")
    if isinstance(options, RecGuideConfig):
        return replace(options, strategy=strategy)
    given = dict(options or {})
    if given.setdefault("strategy", strategy) != strategy:
        raise ConfigError(
            f"generation_strategy={strategy!r} and recguide_config's strategy={given['strategy']!r} disagree; give one."
        )
    return RecGuideConfig.from_options(given)


def _first_of(value: Any, name: str, places: Sequence[GenerationConfig | None]) -> Any:
    if value is not None:
        return value
    return next((found for place in places if (found := getattr(place, name, None)) is not None), None)


# --- what cannot be honoured ----------------------------------------------------------------------------------------


def _refuse(name: str, reason: str) -> None:
    raise UnsupportedError(f"generation_strategy cannot honour {name}: {reason}")


def _refuse_arguments(model: PreTrainedModel, kwargs: dict[str, Any]) -> None:
    """Refuse, before any work, what would reach plain `generate` only to fail there for another reason."""
    if model.config.is_encoder_decoder:
        _refuse("an encoder-decoder model", "drafting and verifying share one decoder-only backbone.")
    text = model.config.get_text_config()
    layers = getattr(text, "layer_types", None)
    if getattr(text, "sliding_window", None) and (layers is None or "sliding_attention" in layers):
        _refuse(f"sliding-window attention (sliding_window={text.sliding_window})", "segments see their whole prefix.")
    if not getattr(model, "_supports_attention_backend", False):
        _refuse(f"{type(model).__name__}", "its attention does not go through transformers' attention interface.")
    if kwargs.get("assistant_model") is not None:
        _refuse("assistant_model", "the model is its own drafter. Leave one of the two out.")
    if kwargs.get("custom_generate") is not None:
        _refuse("custom_generate", "it is another decoding loop. Leave one of the two out.")
    if kwargs.get("inputs_embeds") is not None:
        _refuse("inputs_embeds", "rounds are planned on token ids. Pass input_ids.")
    if kwargs.get("synced_gpus"):
        _refuse("synced_gpus", "ranks would run different numbers of rounds.")


def _refuse_config(generation_config: GenerationConfig, processors: LogitsProcessorList, cache: Any) -> None:
    """Refuse what the merged generation config, processors and cache ask for and rounds cannot give."""
    if generation_config.do_sample:
        _refuse("do_sample=True", "sampling is not implemented yet. Pass do_sample=False for greedy decoding.")
    if (generation_config.num_beams or 1) > 1:
        _refuse(f"num_beams={generation_config.num_beams}", "a request is one sequence. Use num_beams=1.")
    if (generation_config.num_return_sequences or 1) > 1:
        _refuse(f"num_return_sequences={generation_config.num_return_sequences}", "greedy decoding has one answer.")
    for name in (
        "prompt_lookup_num_tokens",
        "penalty_alpha",
        "dola_layers",
        "constraints",
        "force_words_ids",
        "assistant_early_exit",
    ):
        if getattr(generation_config, name, None):
            _refuse(f"{name}={getattr(generation_config, name)!r}", "it is another decoding method.")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(generation_config, name, None):
            _refuse(f"{name}=True", "a round computes them for drafted tokens too, in another shape.")
    if generation_config.cache_implementation not in (None, "dynamic", "dynamic_full"):
        _refuse(
            f"cache_implementation={generation_config.cache_implementation!r}",
            "the cache must grow and crop. Use the dynamic one.",
        )
    if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in processors):
        _refuse("guidance_scale", "its processor runs the model itself, one token at a time.")
    if cache is not None and (
        type(cache) is not DynamicCache or any(type(layer) is not DynamicLayer for layer in cache.layers)
    ):
        _refuse(
            f"a {type(cache).__name__}",
            "the cache must be one that can be cropped and read by position: a DynamicCache.",
        )


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
        _refuse("stop_strings on model.generation_config", "pass them to generate() instead.")
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
    cache = model_kwargs.get("cache")
    _refuse_config(generation_config, logits_processor, cache)
    prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
    padding = [input_ids.shape[1] - len(prompt) for prompt in prompts]
    adapter = ModelAdapter(model, resolve_backend())
    keep = generation_config.return_dict_in_generate
    recorder = ScoreRecorder(
        len(prompts),
        scores=bool(keep and generation_config.output_scores),
        logits=bool(keep and generation_config.output_logits),
    )
    eos, criteria = _eos_tokens(stopping_criteria), _other_criteria(stopping_criteria)
    alone = len(prompts) == 1
    batch = [
        Request(
            id=row,
            tokens=prompt,
            max_new_tokens=generation_config.max_length - input_ids.shape[1],
            stop=RowRule(
                input_ids[row, : padding[row]].tolist(), eos, criteria if alone else [c for c in criteria if _by_row(c)]
            ),
            choose=_token_choice(row, input_ids[row, : padding[row]], logits_processor, adapter, recorder),
        )
        for row, prompt in enumerate(prompts)
    ]
    pad = generation_config._pad_token_tensor
    columns = Columns(
        batch,
        input_ids,
        0 if pad is None else int(pad),
        [] if alone else [c for c in criteria if not _by_row(c)],
        streamer,
    )
    kv = _kv_of(cache, padding) if cache is not None and cache.get_seq_length() > 0 else None
    result = decode(batch, adapter, config, eos, hooks, kv, after_round=columns.release)
    if streamer is not None:
        streamer.end()
    sequences = columns.sequences()
    user_cache = getattr(cache, "_is_user_defined", False)
    if cache is not None and (keep or user_cache):
        _extend_cache(cache, result, padding, sequences.shape[1] - 1)
    if not keep:
        return sequences
    length = sequences.shape[1] - input_ids.shape[1]
    fields: dict[str, Any] = {
        "sequences": sequences,
        "scores": recorder.scores(length),
        "logits": recorder.logits(length),
    }
    return GenerateDecoderOnlyOutput(**fields, cache=cache)


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """Each row's tokens without its left padding."""
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is None:
        return rows
    prompts = []
    for number, (row, mask) in enumerate(zip(rows, attention_mask.bool().tolist(), strict=True)):
        start = mask.index(True) if True in mask else len(row)
        if start == len(row):
            raise InputError(f"Row {number} of the batch is an empty prompt: its attention mask is all zeros.")
        if not all(mask[start:]):
            raise InputError(
                f"Row {number}'s attention mask has zeros after its first token; expected left padding only."
            )
        prompts.append(row[start:])
    return prompts


def _eos_tokens(criteria: StoppingCriteriaList) -> frozenset[int]:
    return frozenset(int(token) for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id)


def _other_criteria(criteria: StoppingCriteriaList) -> list[StoppingCriteria]:
    """Those that are neither EOS nor the length, which the loop knows itself."""
    return [c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]


def _by_row(criterion: StoppingCriteria) -> bool:
    """Whether a row can be asked alone. A user's criterion may keep state by row, so it gets whole columns of the batch."""
    return type(criterion) is StopStringCriteria


class RowRule:
    """Why a row ends with its newest token: `eos`, `stop`, or None. Criteria see the row as plain generate shows it, padding and all."""

    def __init__(self, padding: list[int], eos: frozenset[int], criteria: Sequence[StoppingCriteria]) -> None:
        self._padding = padding
        self._eos = eos
        self._criteria = criteria

    def __call__(self, tokens: list[int]) -> str | None:
        stop = None
        if self._criteria:
            ids = torch.tensor([self._padding + tokens])
            # Every criterion is asked, as in plain generate: one may count its calls.
            stop = "stop" if sum(_says_stop(c, ids)[0] for c in self._criteria) else None
        return "eos" if tokens[-1] in self._eos else stop


def _says_stop(criterion: StoppingCriteria, ids: Tensor) -> list[bool]:
    """A criterion's answer for each row; one plain bool stands for all of them."""
    answer = criterion(ids, None)
    return (
        [answer] * ids.shape[0] if isinstance(answer, bool) else torch.as_tensor(answer).expand(ids.shape[0]).tolist()
    )


class ScoreRecorder:
    """Keeps the raw logits and the processed scores of each committed token, where they are asked for."""

    def __init__(self, rows: int, scores: bool, logits: bool) -> None:
        self._scores: list[list[Tensor]] | None = [[] for _ in range(rows)] if scores else None
        self._logits: list[list[Tensor]] | None = [[] for _ in range(rows)] if logits else None

    @property
    def active(self) -> bool:
        return self._scores is not None or self._logits is not None

    def record(self, row: int, logits: Tensor, scores: Tensor) -> None:
        if self._logits is not None:
            self._logits[row].append(logits)
        if self._scores is not None:
            self._scores[row].append(scores)

    def scores(self, length: int) -> tuple[Tensor, ...] | None:
        return _columns_of(self._scores, length)

    def logits(self, length: int) -> tuple[Tensor, ...] | None:
        return _columns_of(self._logits, length)


def _columns_of(rows: list[list[Tensor]] | None, length: int) -> tuple[Tensor, ...] | None:
    """One `[B, V]` a column; a row that had ended by then is zeros."""
    if rows is None:
        return None
    blank = torch.zeros_like(rows[0][0])
    return tuple(torch.stack([row[i] if i < len(row) else blank for row in rows]) for i in range(length))


def _token_choice(
    row: int, padding: Tensor, processors: LogitsProcessorList, adapter: ModelAdapter, recorder: ScoreRecorder
) -> Callable[[list[int], Tensor], int] | None:
    """
    How a row's tokens are chosen from its logits; None is the likeliest, decided in one go for a whole block.

    Processors are called once a committed position with `[1, T]` ids and `[1, V]` scores, also in a batch: rows commit at
    different rates, so their prefixes differ in length.
    """
    if not processors and not recorder.active:
        return None
    own: Any = LogitsProcessorList(_for_row(p, row) for p in processors)
    pads = padding.tolist()

    def choose(tokens: list[int], logits: Tensor) -> int:
        raw = logits.clone()
        ids = torch.tensor([pads + tokens], device=logits.device)
        scores = own(ids, logits.clone()[None])[0]
        recorder.record(row, raw, scores)
        allowed = scores.clone()
        allowed[adapter.excluded_token_ids] = float("-inf")
        return int(allowed.argmax())

    return choose


def _for_row(processor: Any, row: int) -> Any:
    """A processor that is told the row's number: the prefix constraint asks the user's function by it."""
    if type(processor) is PrefixConstrainedLogitsProcessor:
        function = processor._prefix_allowed_tokens_fn
        return PrefixConstrainedLogitsProcessor(lambda _, ids: function(row, ids), num_beams=1)
    return processor


class Columns:
    """
    The batch as plain generate would have written it, column by column.

    Rows commit at different rates; a column is released once every row has written it or has ended before. Then the
    users' criteria see the whole batch in its order, and the streamer gets the column. What a row had written past a
    stop is taken back.
    """

    def __init__(
        self, batch: list[Request], input_ids: Tensor, pad: int, criteria: list[StoppingCriteria], streamer: Any
    ) -> None:
        self._batch = batch
        self._ids = input_ids
        self._pad = pad
        self._criteria = criteria
        self._streamer = streamer
        self._released = 0

    def release(self) -> None:
        """Release the columns that are complete; does nothing where nobody looks at them."""
        if not self._criteria and self._streamer is None:
            return
        while any(self._written(r) > self._released for r in self._batch):
            if any(r.finished is None and self._written(r) <= self._released for r in self._batch):
                return
            self._released += 1
            ids = self._first(self._released)
            for criterion in self._criteria:
                for request, stop in zip(self._batch, _says_stop(criterion, ids), strict=True):
                    if stop and self._written(request) >= self._released:
                        del request.tokens[request.prompt_tokens + self._released :]
                        request.finished = request.finished if request.finished == "eos" else "stop"
            if self._streamer is not None:
                self._streamer.put(ids[:, -1].cpu())

    def sequences(self) -> Tensor:
        """`int64[B, S]`: prompts as given, outputs, padding after each row's end."""
        return self._first(max(self._written(r) for r in self._batch))

    def _written(self, request: Request) -> int:
        return len(request.tokens) - request.prompt_tokens

    def _first(self, columns: int) -> Tensor:
        outputs = [request.tokens[request.prompt_tokens :][:columns] for request in self._batch]
        padded = [output + [self._pad] * (columns - len(output)) for output in outputs]
        return torch.cat((self._ids, torch.tensor(padded, device=self._ids.device, dtype=self._ids.dtype)), dim=1)


def _kv_of(cache: Any, padding: list[int]) -> DenseKV:
    """The user's cache as ours, each row without its left padding."""
    kv = DenseKV(len(padding))
    for row, pads in enumerate(padding):
        kv.load(row, [(layer.keys[row, :, pads:], layer.values[row, :, pads:]) for layer in cache.layers])
    return kv


def _extend_cache(cache: Cache, result: Result, padding: list[int], length: int) -> None:
    """Append what was decoded to the user's cache, up to `length` columns; rows that ended early are zeros there."""
    done = cache.get_seq_length()
    rows = [result.kv.read(row) for row in range(len(padding))]
    for layer in range(len(rows[0])):
        new = []
        for kind in (0, 1):
            like = rows[0][layer][kind]
            out = like.new_zeros((len(rows), like.shape[0], length - done, like.shape[2]))
            for row, pads in enumerate(padding):
                # The newest token's K/V are not cached; nor is what was taken back.
                ours = rows[row][layer][kind][:, : len(result.requests[row].tokens) - 1]
                columns = ours[:, max(done - pads, 0) :]
                at = max(pads - done, 0)
                out[row, :, at : at + columns.shape[1]] = columns
            new.append(out)
        cache.update(new[0], new[1], layer)
