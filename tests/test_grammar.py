"""Structured output: whatever a block's boundary falls into, the text is valid and that of plain decoding."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LogitsProcessor, PreTrainedTokenizerBase

import recguide
from recguide import ConfigError, InputError, NemotronLabsDiffusionModel, UnsupportedError
from recguide.testing import toy_model

pytest.importorskip("llguidance")
from recguide.grammar import GrammarLogitsProcessor

STRATEGIES = ("ar", "linear", "quadratic", "recguide")
PROMPT = torch.tensor([[300, 301, 302, 303]])
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "tags", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(recguide.tiny_path())


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerBase) -> NemotronLabsDiffusionModel:
    return toy_model(vocab_size=len(tokenizer), num_hidden_layers=1, mask_token_id=tokenizer.mask_token_id)


@pytest.fixture(scope="module")
def arguments(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {"max_new_tokens": 60, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}


def text_of(tokenizer: PreTrainedTokenizerBase, row: torch.Tensor) -> str:
    return tokenizer.decode(row[PROMPT.shape[1] :], skip_special_tokens=True)


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["name", "tags", "count"]
        and len(value["name"]) <= 6
        and set(value["tags"]) <= {"red", "green"}
        and 0 <= value["count"] <= 999
    )


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_json_of_a_schema(
    model: NemotronLabsDiffusionModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: dict[str, Any],
    seed: int | None,
    block_size: int,
) -> None:
    processor = GrammarLogitsProcessor(tokenizer, json_schema=SCHEMA)
    sampled = {} if seed is None else {"do_sample": True, "seed": seed, "top_k": 0}
    texts = []
    for strategy in STRATEGIES:
        output = model.generate(
            PROMPT,
            logits_processor=[processor],
            generation_strategy=strategy,
            recguide_config={"block_size": block_size},
            **arguments,
            **sampled,
        )
        texts.append(text_of(tokenizer, output[0]))
    assert is_valid(texts[0])
    assert len(set(texts)) == 1


def test_plain_generate_takes_it_too(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
) -> None:
    processor = GrammarLogitsProcessor(tokenizer, json_schema=json.dumps(SCHEMA))
    ids = torch.cat((PROMPT, PROMPT + 7))
    expected = model.generate(ids, logits_processor=[processor], **arguments)
    assert all(is_valid(text_of(tokenizer, row)) for row in expected)
    got = model.generate(ids, logits_processor=[processor], generation_strategy="recguide", **arguments)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "grammar", [{"regex": r"[a-f]{3}-[0-9]{2,4}!"}, {"lark": 'start: "<" WORD ">"\nWORD: /[x-z]{2,5}/'}]
)
def test_regular_expressions_and_grammars(
    model: NemotronLabsDiffusionModel,
    tokenizer: PreTrainedTokenizerBase,
    arguments: dict[str, Any],
    grammar: dict[str, str],
) -> None:
    processor = GrammarLogitsProcessor(tokenizer, **grammar)
    output = model.generate(PROMPT, logits_processor=[processor], generation_strategy="recguide", **arguments)
    assert re.fullmatch(r"[a-f]{3}-[0-9]{2,4}!|<[x-z]{2,5}>", text_of(tokenizer, output[0]))


def test_prefix_allowed_tokens_fn_keeps_a_pattern(
    model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerBase, arguments: dict[str, Any]
) -> None:
    """Digits and commas in turn, so that every block has boundaries inside."""
    digits = [tokenizer.convert_tokens_to_ids(str(d)) for d in range(10)]
    comma = tokenizer.encode(",", add_special_tokens=False)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return comma if int(ids[-1]) in digits else digits

    for strategy in STRATEGIES:
        output = model.generate(
            PROMPT,
            prefix_allowed_tokens_fn=allowed,
            generation_strategy=strategy,
            **(arguments | {"max_new_tokens": 21}),
        )
        assert re.fullmatch(r"(\d,)*\d", text_of(tokenizer, output[0]))


def test_it_follows_its_text_forward_back_and_to_another(tokenizer: PreTrainedTokenizerBase) -> None:
    processor = GrammarLogitsProcessor(tokenizer, regex="[ab][cd][cd]")
    scores = torch.zeros(1, len(tokenizer))
    a, b, c, d = (tokenizer.convert_tokens_to_ids(letter) for letter in "abcd")

    def allows(ids: list[int]) -> set[int]:
        allowed = processor(torch.tensor([ids]), scores)[0].isfinite().nonzero()[:, 0].tolist()
        return set(allowed) & {a, b, c, d, tokenizer.eos_token_id}

    prompt = [300, 301]
    assert allows(prompt) == {a, b}
    assert allows([*prompt, a]) == {c, d}
    assert allows([*prompt, a, c]) == {c, d}
    assert allows([*prompt]) == {a, b}, "two tokens were taken back"
    for text in ([b], [b, d], [b, d, d]):
        allowed = allows([*prompt, *text])
    assert allowed == {tokenizer.eos_token_id}
    for end in ([tokenizer.eos_token_id], [tokenizer.eos_token_id, 0], [tokenizer.eos_token_id, 0, 0]):
        allows([*prompt, b, d, d, *end])
    assert allows(prompt) == {a, b}, "the same prompt again, after an end and padding"
    assert allows([*prompt, a, c, d, tokenizer.eos_token_id, 400, 401]) == {a, b}, (
        "a longer prompt that holds the first text"
    )
    assert allows([400, 401]) == {a, b}, "another prompt"
    assert allows([400, 401, a]) == {c, d}
    other = copy.deepcopy(processor)
    assert other(torch.tensor([[400, 401]]), scores)[0].isfinite().any()
    assert allows([400, 401, a, c]) == {c, d}, "a copy keeps its own place"
    with pytest.raises(InputError, match="not allowed"):
        allows([400, 401, a, c, a])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "lark": "start: a"}, "exactly one"),
        ({"regex": "("}, "cannot read"),
        ({"lark": "start: missing"}, "cannot read"),
        ({"json_schema": {"type": "thing"}}, "cannot read"),
    ],
)
def test_bad_grammars(tokenizer: PreTrainedTokenizerBase, given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        GrammarLogitsProcessor(tokenizer, **given)


# --- other processors with a state ---------------------------------------------------------------------------------


class Alternating(LogitsProcessor):  # type: ignore[misc]
    """Lets even and odd tokens come in turn, by a count that it keeps."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls % 2 :: 2] = float("-inf")
        return scores


def test_each_row_of_a_batch_has_a_state_of_its_own(model: NemotronLabsDiffusionModel) -> None:
    ids = torch.cat((PROMPT, PROMPT + 7, PROMPT + 9))
    expected = model.generate(ids, max_new_tokens=15, logits_processor=[Alternating()], pad_token_id=0)
    got = model.generate(
        ids, max_new_tokens=15, logits_processor=[Alternating()], pad_token_id=0, generation_strategy="recguide"
    )
    assert torch.equal(got, expected)


class Uncopyable(Alternating):
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise TypeError("there is only one of me")


def test_one_that_cannot_be_copied_is_refused_in_a_batch(model: NemotronLabsDiffusionModel) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 5, "pad_token_id": 0, "generation_strategy": "recguide"}
    model.generate(PROMPT, logits_processor=[Uncopyable()], **arguments)
    with pytest.raises(UnsupportedError, match="only one of me"):
        model.generate(torch.cat((PROMPT, PROMPT)), logits_processor=[Uncopyable()], **arguments)
