"""A call of `generate` at the place where its decoding loop would start: from what transformers has prepared to requests, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import LogitsProcessorList

from .adapter import ModelAdapter
from .config import RecGuideConfig
from .dense_kv import DenseKV
from .errors import ConfigError, InputError
from .hf_batch import Columns, RowRule, asks_by_row, eos_tokens, extend_cache, kv_of, other_criteria, prompts_of
from .hf_outputs import RecGuideOutput, RecordKeeper, ScoreRecorder, token_choice
from .hf_processors import OutputPenaltyLogitsProcessor, ThinkingBudgetLogitsProcessor, looks_at_prefix
from .hf_refusals import refuse_config, refuse_model_inputs
from .hooks import Hook
from .loop import Result, generate, method_of
from .metrics import DecodeMetrics, looping_tokens
from .policy import SHELF, Policies
from .rounds import Request
from .sampling import Sampling, row_seed

MOST_TOP_LOGPROBS = 128
"""Likeliest tokens that can be asked for at each place."""


@dataclass(frozen=True)
class Extras:
    """The arguments that transformers does not know, and those that it does not hand on. Validated here."""

    hooks: tuple[Hook, ...] = ()
    seed: int | tuple[int, ...] | None = None
    generator: torch.Generator | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    thinking_budget: int | None = None
    thinking_markers: tuple[list[int], list[int]] | None = None
    output_logprobs: bool = False
    top_logprobs: int = 0
    output_records: bool = False
    streamer: Any = None
    adapter: ModelAdapter | None = None
    """An engine's; a call of its own makes one by its options."""
    policies: Policies | None = None
    """An engine's, shared by its requests; a call of its own takes those that the last one has left."""

    def __post_init__(self) -> None:
        if self.seed is not None and self.generator is not None:
            raise ConfigError("seed and generator were both given; a call has one source of seeds.")
        top = self.top_logprobs
        if isinstance(top, bool) or not isinstance(top, int) or not 0 <= top <= MOST_TOP_LOGPROBS:
            raise ConfigError(f"top_logprobs must be a whole number from 0 to {MOST_TOP_LOGPROBS}; got {top!r}.")
        if top and not self.output_logprobs:
            raise ConfigError(f"top_logprobs={top} goes with output_logprobs=True.")
        given = self.seed if isinstance(self.seed, tuple) else () if self.seed is None else (self.seed,)
        for seed in given:
            if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
                raise ConfigError(f"A seed must be a whole number from 0 to 2^64 - 1; got {seed!r}.")

    def processors(self, prompt_length: int) -> tuple[LogitsProcessorList, LogitsProcessorList]:
        """Those that come before transformers' own, and those that come after."""
        before, after = LogitsProcessorList(), LogitsProcessorList()
        if self.presence_penalty or self.frequency_penalty:
            before.append(OutputPenaltyLogitsProcessor(prompt_length, self.presence_penalty, self.frequency_penalty))
        if self.thinking_budget is not None and self.thinking_markers is not None:
            after.append(ThinkingBudgetLogitsProcessor(*self.thinking_markers, self.thinking_budget))
        return before, after

    def seeds(self, rows: int) -> tuple[int, ...]:
        """One seed a row."""
        if isinstance(self.seed, tuple):
            if len(self.seed) != rows:
                raise InputError(f"{len(self.seed)} seeds were given for {rows} output rows; expected one each.")
            return self.seed
        if self.seed is not None:
            return tuple(row_seed(self.seed, row) for row in range(rows))
        device = self.generator.device if self.generator is not None else None
        drawn = torch.randint(2**63 - 1, (rows,), generator=self.generator, device=device)
        return tuple(drawn.tolist())


@dataclass(frozen=True)
class Call:
    """
    A call of `generate`, ready to decode.

    Args:
        batch (`list[Request]`): one for each output row.
        config (`RecGuideConfig`): its options.
        adapter (`ModelAdapter`): of its model.
        extras (`Extras`): its arguments that transformers does not know.
        columns (`Columns`), recorder (`ScoreRecorder`): what becomes of committed tokens.
        seeds (`tuple[int]`, *optional*): each row's, where tokens are sampled.
        cache, kv, padding: the user's cache, what it holds as ours, and each row's left padding.
        keep (`bool`): `return_dict_in_generate`.
        policies (`Policies`): that its requests share.
    """

    batch: list[Request]
    config: RecGuideConfig
    adapter: ModelAdapter
    extras: Extras
    columns: Columns
    recorder: ScoreRecorder
    seeds: tuple[int, ...] | None
    cache: Any
    kv: DenseKV | None
    padding: list[int]
    keep: bool
    policies: Policies


def prepare(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    config: RecGuideConfig,
    extras: Extras,
    model_kwargs: dict[str, Any],
) -> Call:
    """Requests from what transformers hands to a decoding loop; refuses what cannot be honoured."""
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
    adapter = extras.adapter or ModelAdapter.of(model, config)
    keep = bool(generation_config.return_dict_in_generate)
    in_engine = extras.adapter is not None
    recorder = ScoreRecorder(
        len(prompts),
        scores=keep and generation_config.output_scores,
        logits=keep and generation_config.output_logits,
        logprobs=(keep or in_engine) and extras.output_logprobs,
        top_logprobs=min(extras.top_logprobs, model.config.get_text_config().vocab_size),
    )
    eos, criteria = eos_tokens(stopping_criteria), other_criteria(stopping_criteria)
    by_row = [c for c in criteria if len(prompts) == 1 or (eos and asks_by_row(c))]
    before, after = extras.processors(width)
    processors = LogitsProcessorList([*before, *logits_processor, *after])
    blind = tuple(p for p in processors if not looks_at_prefix(p))
    policies = extras.policies or SHELF.take(model)
    method = method_of(config, eos, adapter, policies)
    copies = generation_config.num_return_sequences or 1
    seeds = extras.seeds(len(prompts)) if generation_config.do_sample else None
    batch = []
    for row, prompt in enumerate(prompts):
        seed = seeds[row] if seeds else None
        by_position = recorder.active or len(blind) < len(processors)
        batch.append(
            Request(
                id=row,
                tokens=prompt,
                max_new_tokens=(stopping_criteria.max_length or generation_config.max_length) - width,
                stop=RowRule(pads[row], eos, by_row, recorder),
                method=method,
                sampling=Sampling(seed, blind, by_position) if seed is not None or blind else None,
                choose=token_choice(row, row // copies, pads[row], processors, adapter, recorder)
                if by_position
                else None,
            )
        )
    pad = generation_config._pad_token_tensor
    columns = Columns(
        batch,
        input_ids,
        pad=int(pad) if eos and pad is not None else None,
        criteria=[c for c in criteria if c not in by_row],
        streamer=extras.streamer,
        recorder=recorder,
    )
    return Call(
        batch=batch,
        config=config,
        adapter=adapter,
        extras=extras,
        columns=columns,
        recorder=recorder,
        seeds=seeds,
        cache=cache,
        kv=kv_of(cache, padding) if cached else None,
        padding=padding,
        keep=keep,
        policies=policies,
    )


def decode(call: Call) -> Any:
    """Decode a prepared call; returns what `generate` returns."""
    extras, recorder, keep = call.extras, call.recorder, call.keep
    metrics, records = DecodeMetrics(), RecordKeeper([[] for _ in call.batch])
    hooks = (*extras.hooks, *([metrics] if keep else []), *([records] if keep and extras.output_records else []))
    result = _decoded(call, hooks)
    SHELF.put_back(call.adapter.model, call.policies)
    if extras.streamer is not None:
        extras.streamer.end()
    sequences = call.columns.sequences()
    if call.cache is not None and (keep or getattr(call.cache, "_is_user_defined", False)):
        extend_cache(call.cache, result, call.padding, sequences.shape[1] - 1)
    if not keep:
        return sequences
    fields: dict[str, Any] = {"sequences": sequences, "cache": call.cache}
    if call.adapter.ranks is not None and not call.adapter.ranks.leads:
        # Whatever else there is to know was seen on rank 0.
        return RecGuideOutput(**fields)
    length = sequences.shape[1] - call.columns.width
    fields |= {"scores": recorder.scores(length), "logits": recorder.logits(length)}
    return RecGuideOutput(
        **fields,
        logprobs=recorder.logprobs(length),
        top_logprobs=recorder.top_logprobs(length),
        seeds=call.seeds,
        statistics=metrics.summary()
        | {"looping_tokens": [looping_tokens(r.tokens[r.prompt_tokens :]) for r in call.batch]},
        records=tuple(map(tuple, records.rows)) if extras.output_records else None,
    )


def _decoded(call: Call, hooks: tuple[Hook, ...]) -> Result:
    """Rounds until all requests are done; of a model that is split over ranks, the first decodes and the others follow."""
    ranks = call.adapter.ranks

    def decoded() -> Result:
        return generate(call.batch, call.adapter, hooks, call.kv, after_round=call.columns.release)

    if ranks is None:
        return decoded()
    work = ["generate", [request.tokens for request in call.batch]]
    if ranks.leads:
        with ranks.leading(work) as told:
            result = decoded()
            told += [[r.tokens[r.prompt_tokens :] for r in call.batch], result.kv.extents]
        return result
    kv = DenseKV(len(call.batch)) if call.kv is None else call.kv
    outputs, extents = call.adapter.follow(work, kv.at)
    for request, output in zip(call.batch, outputs, strict=True):
        request.tokens += output
    return Result(tuple(call.batch), kv.at(extents))
