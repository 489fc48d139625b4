"""Processors that transformers lacks, and which of its own look at the prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
)
from transformers.generation import NoBadWordsLogitsProcessor

import recguide
from recguide import ConfigError, InputError, NemotronLabsDiffusionModel
from recguide.hf_processors import OutputPenaltyLogitsProcessor, ThinkingBudgetLogitsProcessor, looks_at_prefix
from recguide.testing import MASK, toy_model

STRATEGIES = ("ar", "linear", "quadratic", "recguide", "auto")
THINK, DONE = 20, 21
PROMPT = torch.tensor([[7, 9, 8, THINK]])


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    return toy_model(seed=3)


def test_penalties_count_the_output_only() -> None:
    processor = OutputPenaltyLogitsProcessor(2, presence=0.5, frequency=0.25)
    ids = torch.tensor([[4, 4, 1, 3, 3], [1, 1, 2, 2, 2]])
    scores = processor(ids, torch.zeros(2, 5))
    assert scores.tolist() == [[0, -0.75, 0, -1.0, 0], [0, 0, -1.25, 0, 0]]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_penalties_change_the_text_alike_everywhere(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    arguments: dict[str, Any] = {"max_new_tokens": 40, "suppress_tokens": [MASK]}
    bare = model.generate(PROMPT, **arguments)
    own = OutputPenaltyLogitsProcessor(4, 2.0, 1.0)
    expected = model.generate(PROMPT, logits_processor=[own], **arguments)
    got = model.generate(PROMPT, presence_penalty=2.0, frequency_penalty=1.0, generation_strategy=strategy, **arguments)
    assert torch.equal(got, expected)
    assert not torch.equal(got, bare)


@pytest.mark.parametrize(
    ("processor", "looks"),
    [
        (TemperatureLogitsWarper(0.5), False),
        (TopKLogitsWarper(3), False),
        (SequenceBiasLogitsProcessor({(3,): 1.0}), False),
        (SequenceBiasLogitsProcessor({(3,): 1.0, (3, 4): 1.0}), True),
        (NoBadWordsLogitsProcessor([[3]]), False),
        (NoBadWordsLogitsProcessor([[3, 4]]), True),
        (RepetitionPenaltyLogitsProcessor(1.2), True),
        (LogitsProcessor(), True),
        (type("Mine", (TemperatureLogitsWarper,), {})(0.5), True),
    ],
)
def test_which_look_at_the_prefix(processor: Any, looks: bool) -> None:
    assert looks_at_prefix(processor) is looks


def test_those_that_do_not_give_rows_what_they_give_them_with_a_prefix() -> None:
    """What a block's rows get at once, without ids, is what each gets alone on its prefix."""
    scores = torch.randn(6, 24, generator=torch.Generator().manual_seed(0))
    for processor in (TopKLogitsWarper(3), SequenceBiasLogitsProcessor({(3,): 1.0}), NoBadWordsLogitsProcessor([[4]])):
        together = processor(torch.empty((6, 0), dtype=torch.long), scores.clone())
        for row in range(6):
            alone = processor(torch.arange(5 + row)[None], scores[row : row + 1].clone())
            assert torch.equal(alone[0], together[row])


# --- the thinking budget -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", [[DONE], [DONE, 22], [22, 22, 23]])
@pytest.mark.parametrize("budget", [0, 1, 5, 17])
def test_the_end_marker_stands_in_the_text_after_the_budget(
    model: NemotronLabsDiffusionModel, budget: int, end: list[int]
) -> None:
    processor = ThinkingBudgetLogitsProcessor([THINK], end, budget)
    never = [THINK, DONE, 22, 23, MASK]
    for strategy in STRATEGIES:
        # The model itself never closes: the marker's tokens are suppressed before the budget's processor has its say.
        output = model.generate(
            PROMPT, max_new_tokens=40, suppress_tokens=never, logits_processor=[], generation_strategy=strategy,
            prefix_allowed_tokens_fn=None,
        )  # fmt: skip
        assert not set(end) & set(output[0, 4:].tolist())
        forced = model.generate(
            PROMPT, max_new_tokens=40, logits_processor=[_Suppress(never), processor], generation_strategy=strategy
        )[0, 4:].tolist()
        assert forced[budget : budget + len(end)] == end
        assert not set(end) & set(forced[:budget] + forced[budget + len(end) :])
        assert forced[:budget] == output[0, 4 : 4 + budget].tolist()


class _Suppress(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, self.tokens] = float("-inf")
        return scores


@pytest.mark.parametrize(
    ("tokens", "forced"),
    [
        ([7, 8, 9], None),
        ([THINK, 7, 8], None),
        ([THINK, 7, 8, 9], 21),
        ([THINK, 7, 8, 9, 21], 22),
        ([THINK, 7, 8, 9, 21, 22], None),
        ([THINK, 7, 21, 22, 9, 9, 9, 9], None),
        ([THINK, 7, 21, 22, THINK, 9, 9, 9], 21),
        ([THINK, 7, 8, 21], 22),
        ([THINK, 21, 8, 9], 21),
    ],
)
def test_what_is_forced(tokens: list[int], forced: int | None) -> None:
    scores = ThinkingBudgetLogitsProcessor([THINK], [21, 22], 3)(torch.tensor([tokens]), torch.ones(1, 24))
    finite = scores[0].isfinite().nonzero()[:, 0].tolist()
    assert finite == (list(range(24)) if forced is None else [forced])


def test_the_budget_with_a_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(recguide.tiny_path())
    model = toy_model(vocab_size=len(tokenizer), num_hidden_layers=1, mask_token_id=tokenizer.mask_token_id)
    ids = tokenizer("hello<think>", return_tensors="pt").input_ids
    texts = []
    for strategy in STRATEGIES:
        output = model.generate(
            ids, max_new_tokens=30, thinking_budget=6, tokenizer=tokenizer, generation_strategy=strategy, pad_token_id=0
        )
        texts.append(output[0, ids.shape[1] :].tolist())
    end = tokenizer.convert_tokens_to_ids("</think>")
    assert texts[0].index(end) == 6
    assert all(text == texts[0] for text in texts)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"thinking_budget": 4}, InputError, "tokenizer"),
        ({"thinking_budget": -1, "tokenizer": True}, ConfigError, "-1"),
        ({"thinking_budget": 2.5, "tokenizer": True}, ConfigError, "2.5"),
    ],
)
def test_bad_budgets(
    model: NemotronLabsDiffusionModel, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    if "tokenizer" in arguments:
        arguments = arguments | {"tokenizer": AutoTokenizer.from_pretrained(recguide.tiny_path())}
    with pytest.raises(error, match=words):
        model.generate(PROMPT, max_new_tokens=3, generation_strategy="recguide", **arguments)
