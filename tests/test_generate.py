"""`generate(generation_strategy=...)` keeps every promise of transformers' greedy `generate`.

The right value is always that of plain `generate`, one token a forward. With "right" drafts nearly every block is
accepted as a whole, so that acceptance jumps over whatever ought to stop it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer

import recguide.hf_call
from recguide import FinishRecord, ForwardRecord, Hook, NemotronLabsDiffusionModel, RoundRecord
from recguide.testing import MASK, ScriptedDrafts, toy_model

STRATEGIES = ("ar", "linear", "quadratic", "recguide", "auto")
BLOCK = 16
PROMPT = torch.tensor([[3, 7, 9, 2]])
LENGTHS = (3, 17, 90, 8, 31)

each_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
fastest_and_plainest = pytest.mark.parametrize("strategy", ["ar", "recguide"])


class Record(Hook):
    """Keeps what a hook is told."""

    def __init__(self) -> None:
        self.prefills: list[ForwardRecord] = []
        self.rounds: list[RoundRecord] = []
        self.finished: list[FinishRecord] = []

    def on_prefill(self, record: ForwardRecord) -> None:
        self.prefills.append(record)

    def on_commit(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def on_finish(self, record: FinishRecord) -> None:
        self.finished.append(record)


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    """One layer, and a seed whose answer to PROMPT has many different tokens."""
    return toy_model(seed=11, num_hidden_layers=1)


@pytest.fixture(scope="module")
def likely(model: NemotronLabsDiffusionModel) -> list[int]:
    """What plain generate answers to PROMPT when nothing stops it."""
    tokens: list[int] = plain(model, PROMPT, max_new_tokens=48)[0, PROMPT.shape[1] :].tolist()
    return tokens


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token, for the toy vocabulary of 24."""
    special = {0: "<pad>", 1: "<s>", MASK: "<mask>"}
    letters = iter("abcdefghijklmnopqrstu")
    vocab = {special.get(i) or next(letters): i for i in range(24)}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", mask_token="<mask>", padding_side="left"
    )


@pytest.fixture
def right_drafts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Call it with a whole sequence `[1, S]`, and that is what is drafted from then on."""

    def dictate(sequence: Tensor) -> None:
        script = dict(enumerate(sequence[0].tolist()))
        monkeypatch.setattr(
            recguide.hf_call.ModelAdapter, "of", lambda model, _: ScriptedDrafts(model, lambda at: script.get(at, 7))
        )

    return dictate


def plain(model: NemotronLabsDiffusionModel, inputs: Tensor, **kwargs: Any) -> Any:
    """transformers' own generate, which must be told never to choose MASK."""
    return model.generate(inputs, **({"suppress_tokens": [MASK]} | kwargs))


def random_prompt(seed: int, length: int, rows: int = 1) -> Tensor:
    return torch.randint(6, 24, (rows, length), generator=torch.Generator().manual_seed(seed))


def left_padded(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """`(input_ids, attention_mask)` of prompts `[1, T]`."""
    longest = max(row.shape[1] for row in rows)
    ids, mask = torch.zeros(len(rows), longest, dtype=torch.long), torch.zeros(len(rows), longest, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, longest - row.shape[1] :] = row[0]
        mask[i, longest - row.shape[1] :] = 1
    return ids, mask


def first_occurrence(tokens: list[int], start: int) -> int:
    """The first place from `start` on whose token has not been there before."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


# --- tokens --------------------------------------------------------------------------------------------------------


def test_two_hundred_prompts_equal_plain_generate(model: NemotronLabsDiffusionModel) -> None:
    prompts = [random_prompt(seed, 2 + seed % 9) for seed in range(200)]
    for start in range(0, 200, 100):
        ids, mask = left_padded(prompts[start : start + 100])
        expected = plain(model, ids, attention_mask=mask, max_new_tokens=10)
        for strategy in ("ar", "recguide"):
            got = model.generate(ids, attention_mask=mask, max_new_tokens=10, generation_strategy=strategy)
            assert torch.equal(got, expected), strategy
        assert len({tuple(row) for row in expected[:, -10:].tolist()}) > 90, "the answers should differ among prompts"


@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide"])
@pytest.mark.parametrize("block_size", [1, 2, 8])
def test_block_sizes_change_nothing(
    model: NemotronLabsDiffusionModel, likely: list[int], strategy: str, block_size: int
) -> None:
    got = model.generate(
        PROMPT, max_new_tokens=12, generation_strategy=strategy, recguide_config={"block_size": block_size}
    )
    assert got[0, 4:].tolist() == likely[:12]


@fastest_and_plainest
def test_bfloat16_runs(strategy: str) -> None:
    got = toy_model().to(torch.bfloat16).generate(PROMPT, max_new_tokens=12, generation_strategy=strategy)
    assert got.shape == (1, 16)
    assert MASK not in got


def test_mask_is_never_emitted(model: NemotronLabsDiffusionModel) -> None:
    ids = random_prompt(1, 6, rows=30)
    free = model.generate(ids, max_new_tokens=10)
    assert (free[:, 6:] == MASK).any(), "plain generate should choose MASK somewhere for this test to mean anything"
    expected = plain(model, ids, max_new_tokens=10)
    assert torch.equal(model.generate(ids, max_new_tokens=10, generation_strategy="recguide"), expected)


@fastest_and_plainest
def test_prompt_of_one_token(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    one = torch.tensor([[9]])
    got = model.generate(one, max_new_tokens=18, generation_strategy=strategy)
    assert torch.equal(got, plain(model, one, max_new_tokens=18))


# --- ends ----------------------------------------------------------------------------------------------------------


@each_strategy
def test_eos_in_the_middle_of_an_accepted_block(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    right_drafts: Callable[[Tensor], None],
    strategy: str,
) -> None:
    # The prefill commits the block's first token, so output i is the block's token i + 1.
    eos = likely[4]
    assert eos not in likely[:4]
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    record = Record()
    got = model.generate(
        PROMPT,
        max_new_tokens=40,
        eos_token_id=eos,
        generation_strategy=strategy,
        recguide_hooks=[record],
        return_dict_in_generate=True,
    )
    assert got.sequences[0, 4:].tolist() == likely[:5]
    assert torch.equal(got.sequences, plain(model, PROMPT, max_new_tokens=40, eos_token_id=eos))
    assert got.cache.get_seq_length() == 8
    (finish,) = record.finished
    assert (finish.reason, finish.prompt_tokens, finish.new_tokens) == ("eos", 4, 5)
    if strategy not in ("ar", "auto"):
        (only,) = record.rounds
        assert len(only.draft.tokens) == BLOCK - 1
        assert only.committed == tuple(likely[1:5])


@fastest_and_plainest
def test_one_of_several_eos_tokens_ends(
    model: NemotronLabsDiffusionModel, likely: list[int], right_drafts: Callable[[Tensor], None], strategy: str
) -> None:
    late, early = first_occurrence(likely, 9), first_occurrence(likely, 6)
    assert early < late
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    eos = [likely[late], likely[early], 0]
    got = model.generate(PROMPT, max_new_tokens=40, eos_token_id=eos, generation_strategy=strategy)
    assert got[0, 4:].tolist() == likely[: early + 1]


@fastest_and_plainest
@pytest.mark.parametrize("least", [{"min_new_tokens": 13}, {"min_length": 17}])
def test_least_length_beyond_an_early_eos(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    right_drafts: Callable[[Tensor], None],
    strategy: str,
    least: dict[str, int],
) -> None:
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    arguments: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": [likely[2], likely[5]], **least}
    expected = plain(model, PROMPT, **arguments)
    assert expected.shape[1] >= 4 + 13
    assert torch.equal(model.generate(PROMPT, generation_strategy=strategy, **arguments), expected)


@each_strategy
def test_exactly_so_many_new_tokens(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    right_drafts: Callable[[Tensor], None],
    strategy: str,
) -> None:
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    for limit in (1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1):
        record = Record()
        got = model.generate(PROMPT, max_new_tokens=limit, generation_strategy=strategy, recguide_hooks=[record])
        assert got[0, 4:].tolist() == likely[:limit]
        assert [(finish.reason, finish.new_tokens) for finish in record.finished] == [("length", limit)]


@fastest_and_plainest
def test_max_length_counts_the_prompt(model: NemotronLabsDiffusionModel, likely: list[int], strategy: str) -> None:
    got = model.generate(PROMPT, max_length=15, generation_strategy=strategy)
    assert got[0, 4:].tolist() == likely[:11]


@fastest_and_plainest
def test_no_new_tokens_is_an_error_as_in_transformers(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    with pytest.raises(ValueError, match="max_new_tokens") as plainly:
        model.generate(PROMPT, max_new_tokens=0)
    with pytest.raises(ValueError, match="max_new_tokens") as ours:
        model.generate(PROMPT, max_new_tokens=0, generation_strategy=strategy)
    assert str(ours.value) == str(plainly.value)


@fastest_and_plainest
def test_hooks_are_told_why_each_row_ended(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    ids = random_prompt(3, 6, rows=3)
    free = plain(model, ids, max_new_tokens=12)[:, 6:].tolist()
    at = first_occurrence(free[1], 3)
    eos = free[1][at]
    record = Record()
    model.generate(ids, max_new_tokens=12, eos_token_id=eos, generation_strategy=strategy, recguide_hooks=[record])
    ends = [row.index(eos) + 1 if eos in row else 12 for row in free]
    expected = [("eos" if eos in row else "length", end) for row, end in zip(free, ends, strict=True)]
    assert "eos" in dict(expected)
    assert [(finish.reason, finish.new_tokens) for finish in record.finished] == expected


# --- stop strings --------------------------------------------------------------------------------------------------


@each_strategy
@pytest.mark.parametrize("length", [1, 2])
def test_stop_string_that_acceptance_jumps_over(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    tokenizer: PreTrainedTokenizerFast,
    right_drafts: Callable[[Tensor], None],
    strategy: str,
    length: int,
) -> None:
    """A stop string of one token, and one split over two, in the middle of a block."""
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    start = next(i for i in range(4, 12) if likely[i] not in likely[:i])
    text = tokenizer.decode(likely[start : start + length])
    arguments: dict[str, Any] = {"max_new_tokens": 40, "stop_strings": [text, "zz"], "tokenizer": tokenizer}
    expected = plain(model, PROMPT, **arguments)
    assert expected.shape[1] == 4 + start + length
    record = Record()
    got = model.generate(PROMPT, generation_strategy=strategy, recguide_hooks=[record], **arguments)
    assert torch.equal(got, expected)
    assert [finish.reason for finish in record.finished] == ["stop"]


@fastest_and_plainest
def test_stop_string_that_begins_in_the_prompt(
    model: NemotronLabsDiffusionModel, likely: list[int], tokenizer: PreTrainedTokenizerFast, strategy: str
) -> None:
    text = tokenizer.decode([PROMPT[0, -1].item(), likely[0]])
    arguments: dict[str, Any] = {"max_new_tokens": 20, "stop_strings": text, "tokenizer": tokenizer}
    expected = plain(model, PROMPT, **arguments)
    assert expected.shape[1] == 5
    assert torch.equal(model.generate(PROMPT, generation_strategy=strategy, **arguments), expected)


@fastest_and_plainest
def test_stop_strings_in_a_passed_config(
    model: NemotronLabsDiffusionModel, likely: list[int], tokenizer: PreTrainedTokenizerFast, strategy: str
) -> None:
    text = tokenizer.decode(likely[5:7])
    config = GenerationConfig(max_new_tokens=30, stop_strings=[text], pad_token_id=0)
    expected = plain(model, PROMPT, generation_config=config, tokenizer=tokenizer)
    assert expected.shape[1] < 34
    got = model.generate(PROMPT, generation_config=config, tokenizer=tokenizer, generation_strategy=strategy)
    assert torch.equal(got, expected)
    assert config.stop_strings == [text], "the user's config stays as it was"


def test_stop_strings_and_eos_in_a_batch(model: NemotronLabsDiffusionModel, tokenizer: PreTrainedTokenizerFast) -> None:
    ids, mask = left_padded([random_prompt(seed, length) for seed, length in enumerate((4, 9, 6))])
    free = plain(model, ids, attention_mask=mask, max_new_tokens=16)[:, 9:].tolist()
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 16,
        "stop_strings": tokenizer.decode(free[0][4:6]),
        "tokenizer": tokenizer,
        "eos_token_id": free[1][first_occurrence(free[1], 8)],
    }
    expected = plain(model, ids, **arguments)
    assert (expected[:, -1] == 0).any(), "some row should end early"
    assert torch.equal(model.generate(ids, generation_strategy="recguide", **arguments), expected)


def test_stop_strings_need_the_tokenizer(model: NemotronLabsDiffusionModel) -> None:
    with pytest.raises(ValueError, match="tokenizer"):
        model.generate(PROMPT, max_new_tokens=4, stop_strings="ab", generation_strategy="recguide")


# --- batches -------------------------------------------------------------------------------------------------------


@each_strategy
def test_rows_of_unequal_lengths_that_end_in_different_rounds(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    ids, mask = left_padded(prompts)
    free = plain(model, ids, attention_mask=mask, max_new_tokens=20)[:, 90:].tolist()
    eos = [free[0][first_occurrence(free[0], 1)], free[3][first_occurrence(free[3], 9)]]
    arguments: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": eos}
    expected = plain(model, ids, attention_mask=mask, **arguments)
    ends = {next((i + 1 for i, token in enumerate(row) if token in eos), 20) for row in free}
    assert len(ends) > 2, "rows should end at different places"
    got = model.generate(ids, attention_mask=mask, generation_strategy=strategy, **arguments)
    assert torch.equal(got, expected)
    if strategy != "recguide":
        return
    for prompt, row in zip(prompts, got, strict=True):
        (alone,) = model.generate(prompt, generation_strategy=strategy, **arguments)[:, prompt.shape[1] :]
        assert torch.equal(row[90 : 90 + len(alone)], alone)
        assert (row[90 + len(alone) :] == 0).all(), "pad after the row's end"


def test_padding_is_seen_without_an_attention_mask(model: NemotronLabsDiffusionModel) -> None:
    ids, mask = left_padded([random_prompt(1, 3), random_prompt(2, 11)])
    got = model.generate(ids, max_new_tokens=10, generation_strategy="recguide")
    assert torch.equal(got, plain(model, ids, attention_mask=mask, max_new_tokens=10))


# --- stopping criteria ---------------------------------------------------------------------------------------------


class Watch(StoppingCriteria):
    """Keeps the ids of each call; `rule(ids)` decides."""

    def __init__(self, rule: Callable[[Tensor], Any]) -> None:
        self.rule = rule
        self.seen: list[list[list[int]]] = []
        self.scores: list[int | None] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        self.seen.append(input_ids.tolist())
        self.scores.append(None if scores is None else len(scores))
        return self.rule(input_ids)


def never(ids: Tensor) -> Tensor:
    return torch.zeros(ids.shape[0], dtype=torch.bool)


def compare_criteria(
    model: NemotronLabsDiffusionModel, ids: Tensor, strategy: str, make: Callable[[], Watch], **kwargs: Any
) -> tuple[Watch, Tensor]:
    """Run plain generate and the strategy with a criterion each; returns the strategy's."""
    wanted, got = make(), make()
    expected = plain(model, ids, stopping_criteria=[wanted], **kwargs)
    output = model.generate(ids, stopping_criteria=[got], generation_strategy=strategy, **kwargs)
    assert torch.equal(output, expected)
    assert got.seen == wanted.seen
    return got, output


@pytest.mark.parametrize(
    ("strategy", "rows"), [("ar", 1), ("ar", 3), ("linear", 3), ("quadratic", 1), ("recguide", 1), ("recguide", 3)]
)
def test_a_criterion_sees_each_column_once(model: NemotronLabsDiffusionModel, strategy: str, rows: int) -> None:
    got, _ = compare_criteria(model, random_prompt(5, 6, rows), strategy, lambda: Watch(never), max_new_tokens=17)
    assert [(len(ids), len(ids[0])) for ids in got.seen] == [(rows, 7 + i) for i in range(17)]


@fastest_and_plainest
@pytest.mark.parametrize("rows", [1, 3])
def test_a_criterion_on_the_last_token(model: NemotronLabsDiffusionModel, strategy: str, rows: int) -> None:
    ids = random_prompt(6, 5, rows)
    free = plain(model, ids, max_new_tokens=20)[:, 5:].tolist()
    stop = free[0][first_occurrence(free[0], 5)]
    _, output = compare_criteria(
        model, ids, strategy, lambda: Watch(lambda seen: seen[:, -1] == stop), max_new_tokens=20, eos_token_id=2
    )
    assert stop in output[0, 5:]
    assert output[0, -1] in (stop, 0)


@fastest_and_plainest
@pytest.mark.parametrize("rows", [1, 3])
def test_a_stateful_criterion_that_returns_a_plain_bool(
    model: NemotronLabsDiffusionModel, strategy: str, rows: int
) -> None:
    def counting() -> Watch:
        watch = Watch(lambda _: len(watch.seen) >= 7)
        return watch

    got, output = compare_criteria(model, random_prompt(7, 4, rows), strategy, counting, max_new_tokens=20)
    assert output.shape == (rows, 11)
    assert len(got.seen) == 7


@each_strategy
def test_a_criterion_is_called_while_rows_that_ended_wait(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    """Rows end with EOS in different columns; the criterion sees their padding, and the rows in their order."""
    ids, mask = left_padded([random_prompt(seed, length) for seed, length in ((11, 4), (12, 13), (13, 7))])
    free = plain(model, ids, attention_mask=mask, max_new_tokens=18)[:, 13:].tolist()
    eos = [free[0][first_occurrence(free[0], 3)], free[2][first_occurrence(free[2], 8)]]
    got, _ = compare_criteria(
        model, ids, strategy, lambda: Watch(never), attention_mask=mask, max_new_tokens=18, eos_token_id=eos
    )
    assert any(row[-1] == 0 for row in got.seen[-1])


def test_rows_that_a_criterion_ended_as_in_plain_generate_without_eos(model: NemotronLabsDiffusionModel) -> None:
    """Without an EOS token plain generate pads no row: one that a criterion ended goes on until all have ended."""
    ids = random_prompt(6, 5, 3)
    free = plain(model, ids, max_new_tokens=20)[:, 5:].tolist()
    stop = free[0][first_occurrence(free[0], 5)]
    compare_criteria(model, ids, "recguide", lambda: Watch(lambda seen: seen[:, -1] == stop), max_new_tokens=20)


def test_a_criterion_that_stops_before_a_later_eos_is_the_reason(
    model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row had run on to an EOS in the same round; that EOS is taken back, so it is not why the row ended."""
    ids = random_prompt(8, 5, 2)
    free = plain(model, ids, max_new_tokens=14)[:, 5:].tolist()
    at = next(i for i in range(6, 14) if free[0][i] not in free[0][:i] and free[0][i] not in free[1][:14])
    script = dict(enumerate(ids[0].tolist() + free[0]))
    monkeypatch.setattr(
        recguide.hf_call.ModelAdapter, "of", lambda model, _: ScriptedDrafts(model, lambda place: script[place])
    )
    record = Record()
    output = model.generate(
        ids,
        max_new_tokens=14,
        eos_token_id=free[0][at],
        stopping_criteria=[Watch(lambda seen: seen.shape[1] >= 5 + 4)],
        generation_strategy="linear",
        recguide_hooks=[record],
    )
    assert output[:, 5:].tolist() == [row[:4] for row in free]
    assert [finish.reason for finish in record.finished] == ["stop", "stop"]
    assert [finish.new_tokens for finish in record.finished] == [4, 4]


@pytest.mark.parametrize("rows", [1, 2])
def test_a_users_own_length_criterion(model: NemotronLabsDiffusionModel, rows: int) -> None:
    ids = random_prompt(9, 5, rows)
    arguments: dict[str, Any] = {"max_new_tokens": 20, "stopping_criteria": [MaxLengthCriteria(max_length=12)]}
    expected = plain(model, ids, **arguments)
    assert expected.shape == (rows, 12)
    assert torch.equal(model.generate(ids, generation_strategy="recguide", **arguments), expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_criterion_gets_the_scores_where_they_are_kept(model: NemotronLabsDiffusionModel, rows: int) -> None:
    got, wanted = Watch(never), Watch(never)
    arguments: dict[str, Any] = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
    plain(model, PROMPT.repeat(rows, 1), stopping_criteria=[wanted], **arguments)
    model.generate(PROMPT.repeat(rows, 1), stopping_criteria=[got], generation_strategy="recguide", **arguments)
    assert wanted.scores == [1, 2, 3, 4, 5, 6]
    assert got.scores == wanted.scores


# --- processors ----------------------------------------------------------------------------------------------------

PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[22], [6, 3]]},
    "suppress_tokens": {"suppress_tokens": [MASK, 18, 6]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [10]},
    "forced_eos_token_id": {"forced_eos_token_id": 21},
    "min_new_tokens": {"eos_token_id": [3, 22], "min_new_tokens": 7},
    "sequence_bias": {"sequence_bias": [[[18], -4.0], [[10, 6], 3.0]]},
    "all_at_once": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7]], "eos_token_id": 21},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    right_drafts: Callable[[Tensor], None],
    name: str,
) -> None:
    expected = plain(model, PROMPT, max_new_tokens=18, **PROCESSORS[name])
    assert expected[0, 4:].tolist() != likely[:18], "the option should change something"
    right_drafts(expected)
    for strategy in STRATEGIES:
        got = model.generate(PROMPT, max_new_tokens=18, generation_strategy=strategy, **PROCESSORS[name])
        assert torch.equal(got, expected), strategy


@fastest_and_plainest
def test_processors_in_a_padded_batch(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    ids, mask = left_padded([random_prompt(seed, length) for seed, length in ((21, 3), (22, 9))])
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 19,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "eos_token_id": 7,
        "min_new_tokens": 4,
    }
    expected = plain(model, ids, **arguments)
    assert torch.equal(model.generate(ids, generation_strategy=strategy, **arguments), expected)


@fastest_and_plainest
def test_prefix_function_is_asked_by_row(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [6 + row, 8 + row, 12 + (int(ids[-1]) + row) % 4]

    arguments: dict[str, Any] = {"max_new_tokens": 18, "prefix_allowed_tokens_fn": allowed}
    ids = random_prompt(23, 5, rows=2)
    expected = plain(model, ids, **arguments)
    assert not torch.equal(expected[0], expected[1])
    assert torch.equal(model.generate(ids, generation_strategy=strategy, **arguments), expected)


class Counting(LogitsProcessor):
    """Notes what it gets, and never lets the same token come twice in a row, or token 10 at any third call."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.logits: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        self.shapes.append((tuple(input_ids.shape), tuple(scores.shape)))
        self.logits.append(scores.clone())
        scores = scores.clone()
        scores[:, input_ids[0, -1]] = float("-inf")
        scores[:, MASK] = float("-inf")
        if len(self.seen) % 3 == 1:
            scores[:, 10] = float("-inf")
        return scores


@pytest.mark.parametrize(
    ("strategy", "drafts"),
    [("ar", "own"), ("linear", "right"), ("quadratic", "right"), ("recguide", "own"), ("recguide", "right")],
)
def test_a_users_processor_is_called_once_a_committed_token(
    model: NemotronLabsDiffusionModel, right_drafts: Callable[[Tensor], None], strategy: str, drafts: str
) -> None:
    wanted, got = Counting(), Counting()
    expected = model.generate(PROMPT, max_new_tokens=19, logits_processor=[wanted])
    if drafts == "right":
        right_drafts(expected)
    output = model.generate(PROMPT, max_new_tokens=19, logits_processor=[got], generation_strategy=strategy)
    assert torch.equal(output, expected)
    assert got.seen == wanted.seen == [expected[0, : 4 + i].tolist() for i in range(19)]
    assert got.shapes == [((1, 4 + i), (1, 24)) for i in range(19)]
    assert torch.allclose(torch.cat(got.logits), torch.cat(wanted.logits), atol=1e-4)


# --- streamers -----------------------------------------------------------------------------------------------------


class Puts(BaseStreamer):  # type: ignore[misc]
    """Keeps what it is given; raises at put number `fail_at`."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.puts: list[Tensor] = []
        self.ends = 0
        self.fail_at = fail_at

    def put(self, value: Tensor) -> None:
        assert not self.ends, "nothing comes after the end"
        if len(self.puts) == self.fail_at:
            raise ConnectionError("the client is gone")
        self.puts.append(value.clone())

    def end(self) -> None:
        self.ends += 1


@each_strategy
def test_a_streamer_gets_the_prompt_then_each_token(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    right_drafts: Callable[[Tensor], None],
    strategy: str,
) -> None:
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    eos = likely[first_occurrence(likely, 9)]
    streamer = Puts()
    output = model.generate(
        PROMPT, max_new_tokens=30, eos_token_id=eos, streamer=streamer, generation_strategy=strategy
    )
    assert output[0, -1] == eos
    assert torch.equal(streamer.puts[0], PROMPT)
    assert [put.shape for put in streamer.puts[1:]] == [(1,)] * (output.shape[1] - 4)
    assert torch.equal(torch.cat([put.flatten() for put in streamer.puts]), output[0])
    assert streamer.ends == 1


def test_a_streamer_gets_columns_of_a_batch(model: NemotronLabsDiffusionModel) -> None:
    ids, mask = left_padded([random_prompt(seed, length) for seed, length in ((11, 4), (12, 13), (13, 7))])
    free = plain(model, ids, attention_mask=mask, max_new_tokens=20)[:, 13:].tolist()
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 20,
        "eos_token_id": free[0][first_occurrence(free[0], 3)],
    }
    wanted, got = Puts(), Puts()
    plain(model, ids, streamer=wanted, **arguments)
    model.generate(ids, streamer=got, generation_strategy="recguide", **arguments)
    assert [put.tolist() for put in got.puts] == [put.tolist() for put in wanted.puts]
    assert got.ends == 1


def test_text_streamer_in_a_thread(
    model: NemotronLabsDiffusionModel, likely: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    arguments = {"max_new_tokens": 18, "streamer": streamer, "generation_strategy": "recguide"}
    thread = threading.Thread(target=model.generate, args=(PROMPT,), kwargs=arguments)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(likely[:18])


@pytest.mark.parametrize(
    ("strategy", "put"), [("ar", 1), ("ar", 12), ("linear", 12), ("quadratic", 12), ("recguide", 1), ("recguide", 12)]
)
def test_an_exception_in_put_gets_out_and_leaves_nothing_behind(
    model: NemotronLabsDiffusionModel, likely: list[int], strategy: str, put: int
) -> None:
    before, record = model.config._attn_implementation, Record()
    with pytest.raises(ConnectionError, match="the client is gone"):
        model.generate(
            PROMPT,
            max_new_tokens=16,
            streamer=Puts(fail_at=put),
            generation_strategy=strategy,
            recguide_hooks=[record],
        )
    assert model.config._attn_implementation == before
    assert [finish.reason for finish in record.finished] == ["error"]
    assert model.generate(PROMPT, max_new_tokens=16, generation_strategy=strategy)[0, 4:].tolist() == likely[:16]
    assert plain(model, PROMPT, max_new_tokens=16)[0, 4:].tolist() == likely[:16]


# --- scores, logits, output ----------------------------------------------------------------------------------------


@each_strategy
@pytest.mark.parametrize(
    "processors", [{}, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}], ids=["", "processed"]
)
def test_scores_and_logits(
    model: NemotronLabsDiffusionModel,
    right_drafts: Callable[[Tensor], None],
    strategy: str,
    processors: dict[str, Any],
) -> None:
    arguments: dict[str, Any] = {
        "max_new_tokens": 19,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "suppress_tokens": [MASK],
        **processors,
    }
    free = model.generate(PROMPT, **arguments).sequences[0, 4:].tolist()
    arguments["eos_token_id"] = free[first_occurrence(free, 8)]
    wanted = model.generate(PROMPT, **arguments)
    right_drafts(wanted.sequences)
    got = model.generate(PROMPT, generation_strategy=strategy, **arguments)
    assert isinstance(got, type(wanted))
    assert set(got.keys()) == set(wanted.keys()) | {"statistics"}
    assert torch.equal(got.sequences, wanted.sequences)
    assert len(got.scores) == len(got.logits) == len(wanted.scores) == wanted.sequences.shape[1] - 4
    assert {entry.shape for entry in (*got.scores, *got.logits)} == {(1, 24)}
    assert torch.allclose(torch.cat(got.scores), torch.cat(wanted.scores), atol=1e-4)
    assert torch.allclose(torch.cat(got.logits), torch.cat(wanted.logits), atol=1e-4)
    assert got.cache.get_seq_length() == wanted.cache.get_seq_length() == wanted.sequences.shape[1] - 1
    transitions = model.compute_transition_scores(got.sequences, got.scores)
    assert torch.allclose(transitions, model.compute_transition_scores(wanted.sequences, wanted.scores), atol=1e-4)


def test_scores_without_suppression_are_the_models_own(model: NemotronLabsDiffusionModel) -> None:
    """MASK is not chosen, yet its logit is what the model said."""
    arguments: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    got = model.generate(PROMPT, max_new_tokens=8, generation_strategy="recguide", **arguments)
    wanted = plain(model, PROMPT, max_new_tokens=8, **arguments)
    assert torch.allclose(torch.cat(got.scores), torch.cat(wanted.logits), atol=1e-4)
    assert torch.allclose(torch.cat(got.logits), torch.cat(wanted.logits), atol=1e-4)


def test_scores_of_a_batch(model: NemotronLabsDiffusionModel) -> None:
    ids, mask = left_padded([random_prompt(1, 3), random_prompt(2, 11)])
    arguments: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": 18,
        "return_dict_in_generate": True,
        "output_scores": True,
        "suppress_tokens": [MASK],
    }
    wanted = model.generate(ids, **arguments)
    got = model.generate(ids, generation_strategy="recguide", **arguments)
    assert torch.allclose(torch.stack(got.scores), torch.stack(wanted.scores), atol=1e-4)


def test_output_fields_that_were_not_asked_for_are_absent(model: NemotronLabsDiffusionModel) -> None:
    got = model.generate(PROMPT, max_new_tokens=3, generation_strategy="recguide", return_dict_in_generate=True)
    assert set(got.keys()) == {"sequences", "cache", "statistics"}
    assert got.scores is None
    assert got[0] is got.sequences


# --- caches --------------------------------------------------------------------------------------------------------


def assert_same_cache(got: DynamicCache, wanted: DynamicCache, mask: Tensor | None = None) -> None:
    """Equal keys and values, where `mask` says that there is something."""
    assert got.get_seq_length() == wanted.get_seq_length()
    assert len(got.layers) == len(wanted.layers)
    for ours, theirs in zip(got.layers, wanted.layers, strict=True):
        for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            seen = torch.ones(a.shape[0], a.shape[2]) if mask is None else mask[:, : a.shape[2]]
            there = seen.bool()[:, None, :, None]
            assert torch.allclose(a.masked_fill(~there, 0.0), b.masked_fill(~there, 0.0), atol=1e-4)


@each_strategy
def test_a_second_call_continues_from_the_cache(
    model: NemotronLabsDiffusionModel, likely: list[int], strategy: str
) -> None:
    first = model.generate(PROMPT, max_new_tokens=9, generation_strategy=strategy, return_dict_in_generate=True)
    record = Record()
    second = model.generate(
        first.sequences,
        attention_mask=torch.ones_like(first.sequences),
        cache=first.cache,
        max_new_tokens=9,
        generation_strategy=strategy,
        recguide_hooks=[record],
        return_dict_in_generate=True,
    )
    assert second.sequences[0, 4:].tolist() == likely[:18]
    assert [prefill.query_tokens for prefill in record.prefills] == [1], "only the newest token is not cached"
    wanted = plain(model, PROMPT, max_new_tokens=18, return_dict_in_generate=True)
    assert_same_cache(second.cache, wanted.cache)


@fastest_and_plainest
def test_a_padded_batch_continues_from_the_cache(strategy: str) -> None:
    model = toy_model()
    ids, mask = left_padded([random_prompt(1, 3), random_prompt(2, 11)])
    wanted = plain(model, ids, attention_mask=mask, max_new_tokens=14, return_dict_in_generate=True)
    arguments: dict[str, Any] = {
        "max_new_tokens": 7,
        "generation_strategy": strategy,
        "return_dict_in_generate": True,
    }
    first = model.generate(ids, attention_mask=mask, **arguments)
    longer = torch.cat((mask, torch.ones(2, 7, dtype=torch.long)), dim=1)
    second = model.generate(first.sequences, attention_mask=longer, cache=first.cache, **arguments)
    assert torch.equal(second.sequences, wanted.sequences)
    assert_same_cache(second.cache, wanted.cache, torch.cat((longer, torch.ones(2, 7)), dim=1))


def test_plain_generate_continues_from_a_strategys_cache_and_the_other_way_round(
    model: NemotronLabsDiffusionModel, likely: list[int]
) -> None:
    for first_strategy, second_strategy in (
        ({"generation_strategy": "recguide"}, {}),
        ({}, {"generation_strategy": "recguide"}),
    ):
        first = plain(model, PROMPT, max_new_tokens=9, return_dict_in_generate=True, **first_strategy)
        second = plain(
            model,
            first.sequences,
            attention_mask=torch.ones_like(first.sequences),
            cache=first.cache,
            max_new_tokens=9,
            **second_strategy,
        )
        assert second[0, 4:].tolist() == likely[:18]


@fastest_and_plainest
def test_a_users_own_cache_is_filled(strategy: str) -> None:
    model = toy_model()
    cache, wanted = DynamicCache(config=model.config), DynamicCache(config=model.config)
    got = model.generate(PROMPT, max_new_tokens=18, cache=cache, generation_strategy=strategy)
    assert torch.equal(got, plain(model, PROMPT, max_new_tokens=18, cache=wanted))
    assert len(cache.layers) == 2
    assert_same_cache(cache, wanted)


@each_strategy
def test_a_users_own_cache_holds_no_more_than_was_committed(
    model: NemotronLabsDiffusionModel,
    likely: list[int],
    right_drafts: Callable[[Tensor], None],
    strategy: str,
) -> None:
    """EOS inside an accepted block; a new turn is then asked on the cache."""
    right_drafts(torch.tensor([PROMPT[0].tolist() + likely]))
    cache = DynamicCache(config=model.config)
    got = model.generate(PROMPT, max_new_tokens=40, eos_token_id=likely[4], cache=cache, generation_strategy=strategy)
    assert got[0, 4:].tolist() == likely[:5]
    assert cache.get_seq_length() == 8
    turn = torch.cat((got, torch.tensor([[8, 11, 3]])), dim=1)
    again = plain(model, turn, attention_mask=torch.ones_like(turn), cache=cache, max_new_tokens=6)
    assert torch.equal(again, plain(model, turn, max_new_tokens=6))


@pytest.mark.parametrize("rows", [1, 2])
def test_a_users_own_cache_where_a_criterion_stops_inside_a_block(
    model: NemotronLabsDiffusionModel, right_drafts: Callable[[Tensor], None], rows: int
) -> None:
    ids = PROMPT.repeat(rows, 1)
    right_drafts(plain(model, PROMPT, max_new_tokens=24))
    cache, wanted = DynamicCache(config=model.config), DynamicCache(config=model.config)
    stop = [Watch(lambda seen: seen.shape[1] >= 9)]
    got = model.generate(ids, max_new_tokens=20, stopping_criteria=stop, cache=cache, generation_strategy="recguide")
    assert torch.equal(got, plain(model, ids, max_new_tokens=20, stopping_criteria=stop, cache=wanted))
    assert_same_cache(cache, wanted)


@pytest.mark.parametrize("more", [1, 15])
def test_only_the_new_tokens_beside_a_cache(model: NemotronLabsDiffusionModel, more: int) -> None:
    """transformers takes the new tokens alone where the attention mask covers the cached ones too: equal or refused."""
    first = plain(model, PROMPT, max_new_tokens=9, return_dict_in_generate=True)
    whole = torch.cat((first.sequences, random_prompt(31, more)), dim=1)
    new = whole[:, 12:]
    assert first.cache.get_seq_length() == 12
    arguments: dict[str, Any] = {"attention_mask": torch.ones_like(whole), "max_new_tokens": 6}
    try:
        got = model.generate(new, cache=first.cache, generation_strategy="recguide", **arguments)
    except recguide.RecGuideError as refusal:
        assert "cache" in str(refusal)  # noqa: PT017 - either is right
    else:
        assert torch.equal(got[:, new.shape[1] :], plain(model, whole, max_new_tokens=6)[:, whole.shape[1] :])


def test_without_a_cache_as_with_one(model: NemotronLabsDiffusionModel, likely: list[int]) -> None:
    got = model.generate(
        PROMPT, max_new_tokens=18, use_cache=False, generation_strategy="recguide", return_dict_in_generate=True
    )
    assert got.sequences[0, 4:].tolist() == likely[:18]
    assert got.cache is None
