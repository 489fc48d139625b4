"""The table of `docs/generate.md` is complete, and what it says of each option is so."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    CompileConfig,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

import recguide.hf_call
from recguide import FinishRecord, ForwardRecord, Hook, NemotronLabsDiffusionModel, UnsupportedError
from recguide.hf_processors import OutputPenaltyLogitsProcessor, ThinkingBudgetLogitsProcessor
from recguide.hf_strategy import generate_with_strategy
from recguide.testing import MASK, ScriptedDrafts, toy_model

PAGE = Path(__file__).parents[1] / "docs" / "generate.md"
WIDTH = 6
ONE: dict[str, Any] = {
    "inputs": torch.tensor([[2, 19, 3, 7, 9, 11]]),
    "attention_mask": torch.ones(1, WIDTH, dtype=torch.long),
}
BATCH: dict[str, Any] = {
    "inputs": torch.tensor([[0, 0, 2, 7, 9, 21], [2, 13, 8, 22, 6, 17], [0, 0, 0, 2, 14, 10]]),
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]]),
}
# Plain generate must be told never to choose MASK.
ALWAYS: dict[str, Any] = {"max_new_tokens": 6, "suppress_tokens": [MASK]}
SMALL = {"block_size": 4}


def tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token, but for the special ones."""
    special = {0: "<pad>", 1: "<s>", 2: "<think>", 4: "</think>", MASK: "<mask>"}
    letters = iter("abcdefghijklmnopqrs")
    inner = Tokenizer(models.BPE(vocab={special.get(i) or next(letters): i for i in range(24)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", extra_special_tokens=["<think>", "</think>"]
    )


class NotTwice(LogitsProcessor):
    """Never the same token twice in a row, nor token 10 at any third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        scores = scores.scatter(1, input_ids[:, -1:], float("-inf"))
        if self.calls % 3 == 0:
            scores[:, 10] = float("-inf")
        return scores


class ThreeMore(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= WIDTH + 3)


class Puts(BaseStreamer):  # type: ignore[misc]
    def __init__(self) -> None:
        self.puts: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.puts.append(value.clone())

    def end(self) -> None:
        self.puts.append(torch.tensor([-1]))


class Forwards(Hook):
    """Counts what it is told."""

    def __init__(self) -> None:
        self.told = 0

    def on_verify(self, record: ForwardRecord) -> None:
        self.told += 1

    def on_finish(self, record: FinishRecord) -> None:
        self.told += 1


# --- what shows that an option is honoured -------------------------------------------------------------------------


@dataclass
class Example:
    """
    Args:
        given (`dict`): the option with a value that matters.
        beside (`dict`): without which it would not.
        plainly (`dict`, *optional*): what makes plain generate do the same, where the option is not transformers' own.
    """

    given: dict[str, Any]
    beside: dict[str, Any] = field(default_factory=dict)
    plainly: dict[str, Any] | None = None


SAMPLED: dict[str, Any] = {"do_sample": True}
KEPT: dict[str, Any] = {"return_dict_in_generate": True}
ENDS: dict[str, Any] = {"eos_token_id": list(range(6, 24, 2))}
"""EOS tokens, so many that every row ends soon."""

EXAMPLES: dict[str, Example] = {
    "max_length": Example({"max_length": WIDTH + 3}, {"max_length": WIDTH + 6, "max_new_tokens": None}),
    "max_new_tokens": Example({"max_new_tokens": 3}),
    "min_length": Example({"min_length": WIDTH + 5}, ENDS),
    "min_new_tokens": Example({"min_new_tokens": 5}, ENDS),
    "max_time": Example({"max_time": 0.0}),
    "stop_strings": Example({"stop_strings": list("acegikmoq"), "tokenizer": tokenizer()}),
    "do_sample": Example(SAMPLED),
    "use_cache": Example({"use_cache": False}, KEPT),
    "temperature": Example({"temperature": 3.0}, SAMPLED),
    "top_k": Example({"top_k": 2}, SAMPLED),
    "top_p": Example({"top_p": 0.3}, SAMPLED),
    "min_p": Example({"min_p": 0.5}, SAMPLED),
    "top_h": Example({"top_h": 0.2}, SAMPLED),
    "typical_p": Example({"typical_p": 0.2}, SAMPLED),
    "epsilon_cutoff": Example({"epsilon_cutoff": 0.2}, SAMPLED),
    "eta_cutoff": Example({"eta_cutoff": 0.5}, SAMPLED),
    "repetition_penalty": Example({"repetition_penalty": 1.5}),
    "encoder_repetition_penalty": Example({"encoder_repetition_penalty": 3.0}),
    "no_repeat_ngram_size": Example({"no_repeat_ngram_size": 1}),
    "bad_words_ids": Example({"bad_words_ids": [[token] for token in range(6, 20)] + [[20, 21], [21, 22]]}),
    "renormalize_logits": Example({"renormalize_logits": True}, {"output_scores": True, **KEPT}),
    "forced_bos_token_id": Example(
        {"forced_bos_token_id": 21}, {"inputs": torch.tensor([[9]]), "attention_mask": None}
    ),
    "forced_eos_token_id": Example({"forced_eos_token_id": 21}),
    "remove_invalid_values": Example({"remove_invalid_values": True}, {"sequence_bias": [[[7], float("nan")]]}),
    "exponential_decay_length_penalty": Example({"exponential_decay_length_penalty": (2, 3.0)}, {"eos_token_id": 21}),
    "suppress_tokens": Example({"suppress_tokens": [MASK, *range(6, 20)]}),
    "begin_suppress_tokens": Example({"begin_suppress_tokens": list(range(6, 20))}),
    "sequence_bias": Example({"sequence_bias": [[[18], -4.0], [[10], 4.0], [[10, 6], 9.0]]}),
    "watermarking_config": Example({"watermarking_config": WatermarkingConfig(bias=5.0)}),
    "num_return_sequences": Example({"num_return_sequences": 2}, SAMPLED),
    "output_scores": Example({"output_scores": True}, KEPT),
    "output_logits": Example({"output_logits": True}, KEPT),
    "return_dict_in_generate": Example(KEPT),
    "pad_token_id": Example({"pad_token_id": 3}, ENDS),
    "bos_token_id": Example({"bos_token_id": 9}, {"inputs": None, "attention_mask": None}),
    "eos_token_id": Example(ENDS),
    "encoder_no_repeat_ngram_size": Example({"encoder_no_repeat_ngram_size": 1}),
    "inputs": Example({"inputs": torch.tensor([[8, 2, 15, 6, 20, 12]]), "attention_mask": None}),
    "generation_config": Example({"generation_config": GenerationConfig(repetition_penalty=1.5)}),
    "logits_processor": Example({"logits_processor": [NotTwice()]}),
    "stopping_criteria": Example({"stopping_criteria": [ThreeMore()]}),
    "prefix_allowed_tokens_fn": Example(
        {"prefix_allowed_tokens_fn": lambda row, ids: [6 + row, 8 + row, 12 + (int(ids[-1]) + row) % 4]}
    ),
    "streamer": Example({"streamer": Puts()}),
    "generation_strategy": Example({"generation_strategy": "quadratic"}, KEPT, plainly={}),
    "recguide_config": Example({"recguide_config": {"block_size": 2}}, KEPT, plainly={}),
    "recguide_hooks": Example({"recguide_hooks": [Forwards()]}, plainly={}),
    "seed": Example({"seed": 5}, SAMPLED),
    "generator": Example({"generator": torch.Generator().manual_seed(5)}, SAMPLED),
    "presence_penalty": Example(
        {"presence_penalty": 2.0}, plainly={"logits_processor": [OutputPenaltyLogitsProcessor(WIDTH, presence=2.0)]}
    ),
    "frequency_penalty": Example(
        {"frequency_penalty": -2.0}, plainly={"logits_processor": [OutputPenaltyLogitsProcessor(WIDTH, frequency=-2.0)]}
    ),
    "thinking_budget": Example(
        {"thinking_budget": 7, "tokenizer": tokenizer()},
        plainly={"logits_processor": [ThinkingBudgetLogitsProcessor([2], [4], 7)]},
    ),
    "output_logprobs": Example({"output_logprobs": True}, KEPT, plainly={}),
    "top_logprobs": Example({"output_logprobs": True, "top_logprobs": 3}, KEPT, plainly={}),
    "output_records": Example({"output_records": True}, KEPT, plainly={}),
}

REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 2},
    "use_mtp": {"use_mtp": True},
    "cache_implementation": {"cache_implementation": "static"},
    "token_healing": {"token_healing": True, "tokenizer": tokenizer()},
    "guidance_scale": {"guidance_scale": 1.5},
    "output_attentions": {"output_attentions": True},
    "output_hidden_states": {"output_hidden_states": True},
    "is_assistant": {"is_assistant": True},
    "prompt_lookup_num_tokens": {"prompt_lookup_num_tokens": 3},
    "assistant_early_exit": {"assistant_early_exit": 1},
    "penalty_alpha": {"penalty_alpha": 0.6},
    "dola_layers": {"dola_layers": "low"},
    "constraints": {"constraints": [None]},
    "force_words_ids": {"force_words_ids": [[3]]},
    "prefill_chunk_size": {"prefill_chunk_size": 2},
    "synced_gpus": {"synced_gpus": True},
    "assistant_model": {"assistant_model": toy_model(num_hidden_layers=1)},
    "custom_generate": {"custom_generate": lambda *args, **kwargs: None},
}

NOT_APPLICABLE: dict[str, Any] = {
    "early_stopping": True,
    "cache_config": {"backend": "hqq"},
    "max_cache_len": 64,
    "length_penalty": 2.0,
    "decoder_start_token_id": 3,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "compile_config": CompileConfig(),
    "disable_compile": True,
    "continuous_batching_config": {},
    "low_memory": True,
    "diversity_penalty": 1.0,
    "num_beam_groups": 2,
    "negative_prompt_ids": torch.tensor([[3, 8]]),
    "negative_prompt_attention_mask": torch.tensor([[1, 1]]),
}


# --- running -------------------------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a call gave: what must be equal whatever drafts it, and what the strategy alone is behind."""

    result: dict[str, Any]
    effort: dict[str, Any]


def look(model: NemotronLabsDiffusionModel, *arguments: dict[str, Any], strategy: str | None = None) -> Seen:
    """Call generate with copies of the arguments, the later ones winning, and torch's generator at its start."""
    merged = ALWAYS if strategy is None else {**ALWAYS, "generation_strategy": strategy, "recguide_config": SMALL}
    for more in arguments:
        merged = merged | more
    # Streamers, criteria and processors keep a state.
    merged = copy.deepcopy(merged)
    torch.manual_seed(0)
    output = model.generate(**merged)
    seen = Seen({}, {"told": sum(hook.told for hook in merged.get("recguide_hooks", ()))})
    if "streamer" in merged:
        seen.result["streamed"] = merged["streamer"].puts
    if isinstance(output, Tensor):
        seen.result["sequences"] = output
        return seen
    for name in ("sequences", "scores", "logits", "logprobs"):
        if getattr(output, name, None) is not None:
            seen.result[name] = getattr(output, name)
    seen.result["cached"] = -1 if output.cache is None else output.cache.get_seq_length()
    if strategy is not None:
        seen.effort["forwards"] = sum(output.statistics["forwards"].values())
        seen.effort["records"] = sum(map(len, output.records or ()))
    return seen


KNOWN: dict[str, Seen] = {}


def look_once(model: NemotronLabsDiffusionModel, *arguments: dict[str, Any], strategy: str) -> Seen:
    """As `look`, remembered: many options are left out of the same call."""
    name = f"{arguments} {strategy}"
    if name not in KNOWN:
        KNOWN[name] = look(model, *arguments, strategy=strategy)
    return KNOWN[name]


def assert_equal(got: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def differ(one: dict[str, Any], other: dict[str, Any]) -> bool:
    try:
        assert_equal(one, other)
    except AssertionError:
        return True
    return False


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    return toy_model(seed=11, num_hidden_layers=1)


def right_drafts(monkeypatch: pytest.MonkeyPatch, sequence: Sequence[int]) -> None:
    """Draft this sequence, so that acceptance jumps over whatever an option does inside a block."""
    script = dict(enumerate(sequence))
    monkeypatch.setattr(
        recguide.hf_call.ModelAdapter, "of", lambda model, _: ScriptedDrafts(model, lambda at: script.get(at, 7))
    )


def assert_honoured(
    model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch, option: str, example: Example
) -> None:
    """Equal to plain generate, or sampled to `ar`, with few and with many drafts accepted; and other than without it."""
    sampled = {**example.beside, **example.given}.get("do_sample", False)
    matters = False
    for inputs in (ONE, BATCH):
        given = (inputs, example.beside, example.given)
        if sampled:
            expected = look(model, *given, strategy="ar").result
            strategies = ("linear", "quadratic", "recguide")
        else:
            plainly = example.given if example.plainly is None else example.plainly
            expected = look(model, inputs, example.beside, plainly).result
            strategies = ("ar", "linear", "recguide")
        without = look_once(model, inputs, example.beside, strategy="recguide")
        with monkeypatch.context() as patch:
            if inputs is ONE:
                right_drafts(patch, expected["sequences"][0].tolist())
            for strategy in strategies:
                got = look(model, *given, strategy=strategy)
                assert_equal({name: got.result.get(name) for name in expected}, expected)
        # Of the last, `recguide`; only an option of our own may be one of effort.
        matters |= differ(got.result, without.result) or (option in OURS and differ(got.effort, without.effort))
    assert matters, f"leaving {option} out changes nothing"


# --- the table -----------------------------------------------------------------------------------------------------


def parameters(function: Callable[..., Any], *kinds: Any) -> set[str]:
    return {name for name, parameter in inspect.signature(function).parameters.items() if parameter.kind in kinds}


CONFIG = set(GenerationConfig().to_dict()) - {"_from_model_config", "transformers_version"}
NAMED = parameters(GenerationMixin.generate, inspect.Parameter.POSITIONAL_OR_KEYWORD) - {"self"}
OURS = parameters(generate_with_strategy, inspect.Parameter.KEYWORD_ONLY)


def rows(page: str) -> list[tuple[str, str, str]]:
    """Option, status and note of each row of the table."""
    return re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]*) \|$", page, flags=re.MULTILINE)


ROWS = rows(PAGE.read_text(encoding="utf-8"))


def of_status(status: str) -> list[str]:
    return [option for option, given, _ in ROWS if given == status]


def test_every_option_has_one_row() -> None:
    assert not CONFIG & NAMED
    assert not (CONFIG | NAMED) & OURS
    assert sorted(option for option, _, _ in ROWS) == sorted(CONFIG | NAMED | OURS)


def test_every_row_has_a_known_status_and_a_note() -> None:
    known = {"honoured", "refused", "not applicable"}
    assert [row for row in ROWS if row[1] not in known or not row[2].strip()] == []


def test_every_row_is_shown_to_be_so() -> None:
    assert set(EXAMPLES) == set(of_status("honoured"))
    assert set(REFUSED) == set(of_status("refused"))
    assert set(NOT_APPLICABLE) == set(of_status("not applicable"))


def test_a_row_that_is_malformed_is_missed() -> None:
    assert rows("| `top_k` | honoured | cut |\n| top_p | honoured | cut |\n| `min_p` | honoured |\n") == [
        ("top_k", "honoured", "cut")
    ]


@pytest.mark.parametrize("option", of_status("honoured"))
def test_honoured(model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    assert_honoured(model, monkeypatch, option, EXAMPLES[option])


@pytest.mark.parametrize(
    ("option", "example"),
    [
        ("top_p", Example({"top_p": 1.0}, SAMPLED)),  # changes nothing
        ("logits_processor", Example({}, plainly=EXAMPLES["logits_processor"].given)),  # ignored
    ],
    ids=["idle", "ignored"],
)
def test_what_is_not_honoured_is_noticed(
    model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch, option: str, example: Example
) -> None:
    with pytest.raises(AssertionError):
        assert_honoured(model, monkeypatch, option, example)


def test_the_other_kind_of_watermark(model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2, 3])
    assert_honoured(model, monkeypatch, "watermarking_config", Example({"watermarking_config": config}, SAMPLED))


@pytest.mark.parametrize("place", ["argument", "default"])
@pytest.mark.parametrize("option", of_status("refused"))
def test_refused(model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch, option: str, place: str) -> None:
    assert_refused(model, monkeypatch, option, REFUSED[option], place)


@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static", "paged", "quantized"])
def test_other_caches_are_refused(
    model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    assert_refused(model, monkeypatch, implementation, {"cache_implementation": implementation})


def assert_refused(
    model: NemotronLabsDiffusionModel,
    monkeypatch: pytest.MonkeyPatch,
    word: str,
    given: dict[str, Any],
    place: str = "argument",
) -> None:
    """Refused as an argument, or as a default on the model's generation config, before any forward."""
    arguments = {**ALWAYS, **ONE, **given}
    if place == "default":
        for name in CONFIG & set(given):
            monkeypatch.setattr(model.generation_config, name, arguments.pop(name))
    forwards: list[Any] = []
    handle = model.register_forward_pre_hook(lambda *_: forwards.append(None))
    try:
        with pytest.raises(UnsupportedError, match=word):
            model.generate(**arguments, generation_strategy="recguide")
    finally:
        handle.remove()
    assert not forwards


@pytest.fixture(scope="module")
def usual(model: NemotronLabsDiffusionModel) -> dict[str | None, dict[str, Any]]:
    return {strategy: look(model, BATCH, KEPT, strategy=strategy).result for strategy in (None, "recguide")}


@pytest.mark.parametrize("option", of_status("not applicable"))
def test_not_applicable(
    model: NemotronLabsDiffusionModel, usual: dict[str | None, dict[str, Any]], option: str
) -> None:
    for strategy, expected in usual.items():
        assert_equal(look(model, BATCH, KEPT, {option: NOT_APPLICABLE[option]}, strategy=strategy).result, expected)
