"""Exact sampling: the noise is Philox's, and the text is plain sampling's, whatever drafts, branches and neighbours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

import recguide.sampling
from recguide import ConfigError, InputError, NemotronLabsDiffusionModel, RecGuideOutput
from recguide.sampling import Predicted, Sampling, gumbel_noise, philox4x32, processed_scores, row_noise, row_seed
from recguide.testing import MASK, ScriptedDrafts, toy_model

CPU = torch.device("cpu")
STRATEGIES = ("linear", "quadratic", "recguide")
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "hot": {"temperature": 1.6, "min_p": 0.02},
    "typical": {"typical_p": 0.8, "epsilon_cutoff": 0.005, "eta_cutoff": 0.005},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "temperature": 0.8},
    "counts": {"presence_penalty": 0.6, "frequency_penalty": 0.3, "bad_words_ids": [[9], [7, 8]]},
    "biased": {"sequence_bias": {(11,): 2.0, (12, 13): -4.0}, "suppress_tokens": [6], "begin_suppress_tokens": [7]},
}


@pytest.fixture(scope="module")
def model() -> NemotronLabsDiffusionModel:
    return toy_model(seed=3)


@pytest.fixture
def right_drafts(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor], None]:
    """Call it with a whole sequence `[1, S]`, and most of what is drafted from then on is right."""

    def dictate(sequence: Tensor) -> None:
        script = dict(enumerate(sequence[0].tolist()))
        monkeypatch.setattr(
            recguide.hf_call.ModelAdapter,
            "of",
            lambda model, _: ScriptedDrafts(model, lambda at: 7 if at % 11 == 0 else script.get(at, 7)),
        )

    return dictate


def prompts(count: int, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(6, 24, (count, length), generator=torch.Generator().manual_seed(seed))


def sample(model: NemotronLabsDiffusionModel, ids: Tensor, strategy: str, seed: Any, **options: Any) -> Tensor:
    output: Tensor = model.generate(
        ids, do_sample=True, top_k=options.pop("top_k", 0), seed=seed, generation_strategy=strategy, **options
    )
    return output


def scored(logits: Tensor, predicted: list[Predicted]) -> Tensor:
    scores, noise = processed_scores(logits, predicted), row_noise(logits, predicted)
    return scores if noise is None else scores + noise


# --- the generator -------------------------------------------------------------------------------------------------

F = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((F, F, F, F), (F, F), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter: Any, key: Any, words: Any) -> None:
    """Vectors of the Random123 distribution's `kat_vectors`."""
    got = philox4x32(tuple(torch.tensor(c) for c in counter), tuple(torch.tensor(k) for k in key))
    assert tuple(map(int, got)) == words


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    seeds, positions = [5, 2**63 + 1, 5], [0, 7, 2**31]
    together = gumbel_noise(seeds, positions, 50, CPU)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(gumbel_noise([seed], [position], 50, CPU)[0], together[row])
        assert torch.equal(gumbel_noise([seed], [position], 31, CPU)[0], together[row, :31])
    assert not torch.equal(together[0], together[2])
    other = gumbel_noise([5 + 2**32], [0], 50, CPU)[0]
    assert not torch.equal(other, together[0]), "the upper word of the seed counts"


def test_noise_is_gumbel_and_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = gumbel_noise(list(range(400)), [3] * 400, 512, CPU).double()
    exact = -torch.log(-torch.log(torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99, 0.9999], dtype=torch.float64)))
    for quantile, level in zip(exact, (0.01, 0.1, 0.5, 0.9, 0.99, 0.9999), strict=True):
        below = (noise <= quantile).double().mean().item()
        assert abs(below - level) < 4 * (level * (1 - level) / noise.numel()) ** 0.5 + 1e-9
    for word in (0, F):
        monkeypatch.setattr(recguide.sampling, "philox4x32", lambda counter, key, w=word: [counter[0] * 0 + w] * 4)
        assert gumbel_noise([1], [1], 4, CPU).isfinite().all()


def test_row_seeds_differ_and_the_first_is_the_seed_itself() -> None:
    assert row_seed(7, 0) == 7
    seeds = {row_seed(seed, row) for seed in (7, 8, 2**64 - 1) for row in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**64 for seed in seeds)


# --- the distribution ----------------------------------------------------------------------------------------------

SMALL = 8
"""Tokens that may be sampled: few, so that pairs of tokens can be counted."""


def chi_square(model: NemotronLabsDiffusionModel, strategy: str, rows: int) -> float:
    """P-value of the sampled pairs of tokens under the exact probabilities."""
    allowed = torch.arange(12, 12 + SMALL)
    banned = [token for token in range(24) if not 12 <= token < 12 + SMALL]
    prompt, chunk = torch.tensor([[7, 9, 8]]), 100
    counts = torch.zeros(SMALL, SMALL, dtype=torch.float64)
    for start in range(0, rows, chunk):
        seeds = list(range(start, start + chunk))
        # Four tokens, so that the second one is verified inside a block.
        got = sample(
            model, prompt.repeat(chunk, 1), strategy, seeds, max_new_tokens=4, suppress_tokens=banned, temperature=3.0
        )[:, 3:5]
        for first, second in (got - 12).tolist():
            counts[first, second] += 1
    with torch.no_grad():
        first_probs = (model(prompt).logits[0, -1, allowed] / 3).double().softmax(-1)
        after = torch.cat((prompt.repeat(SMALL, 1), allowed[:, None]), dim=1)
        second_probs = (model(after).logits[:, -1, allowed] / 3).double().softmax(-1)
    expected = rows * first_probs[:, None] * second_probs
    common = expected >= 5
    pairs = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
    statistic = sum(float(((c - e) ** 2 / e).sum()) for c, e in pairs if e.sum() > 0)
    freedom = int(common.sum()) - (not bool((~common).any()))
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize("strategy", ["ar", "recguide"])
def test_sampled_pairs_have_the_exact_probabilities(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    assert chi_square(model, strategy, 3000) > 0.01


def _too_cold(seeds: Any, positions: Any, *rest: Any) -> Tensor:
    return 0.7 * gumbel_noise(seeds, positions, *rest)


def _one_noise_for_all_positions(seeds: Any, positions: Any, *rest: Any) -> Tensor:
    return gumbel_noise(seeds, [0] * len(positions), *rest)


@pytest.mark.parametrize("biased", [_too_cold, _one_noise_for_all_positions])
def test_the_chi_square_test_rejects_a_biased_sampler(
    model: NemotronLabsDiffusionModel, monkeypatch: pytest.MonkeyPatch, biased: Callable[..., Tensor]
) -> None:
    monkeypatch.setattr(recguide.sampling, "gumbel_noise", biased)
    assert chi_square(model, "recguide", 3000) < 1e-4


# --- equality with plain sampling ----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_strategy_gives_the_text_of_plain_sampling(model: NemotronLabsDiffusionModel, setting: str) -> None:
    """200 prompts; the seeds are each row's own, so the batches may be cut in any way."""
    ids, seeds = prompts(200), [1000 + row for row in range(200)]
    options = {"max_new_tokens": 9, **SETTINGS[setting]}
    expected = torch.cat(
        [sample(model, ids[i : i + 40], "ar", seeds[i : i + 40], **options) for i in range(0, 200, 40)]
    )
    assert len({tuple(row) for row in expected.tolist()}) == 200
    for strategy in STRATEGIES:
        step = 50 if strategy != "quadratic" else 25
        got = [sample(model, ids[i : i + step], strategy, seeds[i : i + step], **options) for i in range(0, 200, step)]
        assert torch.equal(torch.cat(got), expected), strategy


@pytest.mark.parametrize("block_size", [1, 2, 8, 32])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whatever_the_block_size_and_the_acceptance(
    model: NemotronLabsDiffusionModel, right_drafts: Callable[[Tensor], None], strategy: str, block_size: int
) -> None:
    for options in (SETTINGS["cool"], SETTINGS["penalties"]):
        ids = prompts(1, seed=5)
        expected = sample(model, ids, "ar", 77, max_new_tokens=40, **options)
        right_drafts(expected)
        config = {"block_size": block_size}
        assert torch.equal(
            sample(model, ids, strategy, 77, max_new_tokens=40, recguide_config=config, **options), expected
        )


def test_a_row_is_what_it_is_alone(model: NemotronLabsDiffusionModel) -> None:
    """Left padding, neighbours of other lengths, rows that end early."""
    lengths = (3, 17, 40, 8)
    rows = [prompts(1, length, seed=length) for length in lengths]
    ids = torch.zeros(4, 40, dtype=torch.long)
    mask = torch.zeros(4, 40, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, 40 - lengths[i] :], mask[i, 40 - lengths[i] :] = row[0], 1
    options: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.8, "eos_token_id": [9, 21], "pad_token_id": 0}
    together = sample(model, ids, "recguide", [4, 5, 6, 7], attention_mask=mask, **options)
    for i, row in enumerate(rows):
        alone = sample(model, row, "recguide", 4 + i, **options)[0, lengths[i] :].tolist()
        got = together[i, 40:].tolist()
        assert got[: len(alone)] == alone
        assert not any(got[len(alone) :])


@pytest.mark.parametrize("strategy", ["ar", *STRATEGIES])
def test_going_on_from_a_cache_is_one_longer_call(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    ids = prompts(1, seed=9)
    options: dict[str, Any] = {"temperature": 0.9, "repetition_penalty": 1.1}
    long = sample(model, ids, "ar", 6, max_new_tokens=24, **options)
    first = sample(model, ids, strategy, 6, max_new_tokens=11, return_dict_in_generate=True, **options)
    second = sample(
        model,
        first.sequences,
        strategy,
        6,
        max_new_tokens=13,
        cache=first.cache,
        attention_mask=torch.ones_like(first.sequences),
        **options,
    )
    assert torch.equal(second, long)


@pytest.mark.parametrize("strategy", ["ar", *STRATEGIES])
def test_stop_rules_end_a_sampled_text_where_they_end_it_in_ar(
    model: NemotronLabsDiffusionModel, right_drafts: Callable[[Tensor], None], strategy: str
) -> None:
    ids = prompts(1, seed=5)
    free = sample(model, ids, "ar", 77, max_new_tokens=40)
    written = free[0, 6:].tolist()
    end = next(i for i in range(9, 40) if written[i] not in written[:i])
    right_drafts(free)
    got = sample(model, ids, strategy, 77, max_new_tokens=40, eos_token_id=written[end])
    assert got[0].tolist() == free[0, : 6 + end + 1].tolist()
    got = sample(model, ids, strategy, 77, max_new_tokens=end - 2, eos_token_id=written[end])
    assert got[0].tolist() == free[0, : 6 + end - 2].tolist()


def test_a_draft_shares_the_noise(model: NemotronLabsDiffusionModel) -> None:
    """A drafter that is always right about the logits is always right about the sampled token: the coupling at its best."""
    logits = torch.randn(6, 24, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(9, (TemperatureLogitsWarper(0.7), TopKLogitsWarper(5)))
    verify = scored(logits, [Predicted(sampling, 0, list(range(10, 16)))])
    draft = scored(logits[2:5], [Predicted(sampling, 0, [12, 13, 14])])
    assert torch.equal(draft, verify[2:5])
    assert not torch.equal(logits.argmax(-1), verify.argmax(-1))


def test_rows_without_rules_keep_their_logits() -> None:
    logits = torch.randn(5, 24, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    scores = scored(logits, [Predicted(Sampling(3), 1, [4, 5])])
    assert torch.equal(logits, before)
    assert torch.equal(scores[[0, 3, 4]], logits[[0, 3, 4]])
    assert not torch.equal(scores[1:3], logits[1:3])


@pytest.mark.parametrize("strategy", ["ar", "recguide"])
def test_a_temperature_near_zero_is_greedy(model: NemotronLabsDiffusionModel, strategy: str) -> None:
    ids = prompts(8)
    greedy = model.generate(ids, max_new_tokens=20, do_sample=False, suppress_tokens=[MASK])
    assert torch.equal(sample(model, ids, strategy, 3, max_new_tokens=20, temperature=1e-5), greedy)


@pytest.mark.parametrize("option", [{"top_k": 1}, {"min_p": 0.5}, {"top_p": 0.05}])
@pytest.mark.parametrize("penalty", [{}, {"repetition_penalty": 1.01}])
def test_mask_takes_no_place_from_others(option: dict[str, Any], penalty: dict[str, Any]) -> None:
    """Where MASK is the likeliest by far, top-k and its like choose among the rest."""
    model = toy_model(seed=3)
    with torch.no_grad():
        model.lm_head.weight[MASK] *= 8
    options = {"max_new_tokens": 12, **option, **penalty}
    without = sample(model, prompts(6), "ar", 1, suppress_tokens=[MASK], **options)
    for strategy in ("ar", "recguide"):
        got = sample(model, prompts(6), strategy, 1, **options)
        assert torch.equal(got, without)
    assert len(set(without[:, 6:].flatten().tolist())) > 3


def test_mask_is_never_sampled(model: NemotronLabsDiffusionModel) -> None:
    got = sample(model, prompts(20), "recguide", 1, max_new_tokens=40, temperature=5.0)
    assert MASK not in got
    assert {int(t) for t in got[:, 6:].flatten()} == set(range(24)) - {MASK}


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_num_return_sequences_gives_distinct_reproducible_rows(model: NemotronLabsDiffusionModel) -> None:
    ids = prompts(2)
    arguments: dict[str, Any] = {"max_new_tokens": 15, "num_return_sequences": 3}
    rows = sample(model, ids, "recguide", 42, **arguments)
    assert len({tuple(row) for row in rows.tolist()}) == 6
    assert torch.equal(rows, sample(model, ids, "ar", 42, **arguments))
    for row in range(6):
        alone = sample(model, ids[row // 3 : row // 3 + 1], "recguide", row_seed(42, row), max_new_tokens=15)
        assert torch.equal(alone[0], rows[row])


def test_rules_of_a_prompt_hold_for_all_its_rows(model: NemotronLabsDiffusionModel) -> None:
    """The prefix function is asked by the prompt's number, and rules that look at the prompt get the right one."""
    asked: set[int] = set()

    def allowed(prompt: int, ids: Tensor) -> list[int]:
        asked.add(prompt)
        return list(range(6 + 8 * prompt, 14 + 8 * prompt))

    arguments: dict[str, Any] = {"max_new_tokens": 12, "num_return_sequences": 3, "prefix_allowed_tokens_fn": allowed}
    rows = sample(model, prompts(2), "recguide", 3, **arguments)[:, 6:]
    assert asked == {0, 1}
    assert rows[:3].max() < 14 <= rows[3:].min()
    for option in ({"encoder_no_repeat_ngram_size": 2}, {"encoder_repetition_penalty": 1.5}):
        together = sample(model, prompts(2), "recguide", 3, max_new_tokens=12, num_return_sequences=3, **option)
        for row in range(6):
            alone = prompts(2)[row // 3 : row // 3 + 1]
            expected = sample(model, alone, "ar", row_seed(3, row), max_new_tokens=12, **option)
            assert torch.equal(together[row], expected[0])


def test_the_global_generator_governs_where_no_seed_is_given(model: NemotronLabsDiffusionModel) -> None:
    ids = prompts(2)
    got = []
    for seed, strategy in ((1, "ar"), (1, "recguide"), (2, "recguide")):
        torch.manual_seed(seed)
        got.append(sample(model, ids, strategy, None, max_new_tokens=15))
    assert torch.equal(got[0], got[1])
    assert not torch.equal(got[1], got[2])
    again = sample(model, ids, "recguide", None, max_new_tokens=15)
    assert not torch.equal(got[2], again), "a second call draws other seeds"


def test_a_generator_of_ones_own_leaves_the_global_one_alone(model: NemotronLabsDiffusionModel) -> None:
    ids, state = prompts(2), torch.get_rng_state()
    first, second = (
        sample(model, ids, s, None, max_new_tokens=15, generator=torch.Generator().manual_seed(8))
        for s in ("ar", "recguide")
    )
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_output_tells_the_seeds(model: NemotronLabsDiffusionModel) -> None:
    ids = prompts(3)
    output = sample(model, ids, "recguide", None, max_new_tokens=9, return_dict_in_generate=True)
    assert isinstance(output, RecGuideOutput)
    assert output.seeds is not None
    assert torch.equal(sample(model, ids, "ar", output.seeds, max_new_tokens=9), output.sequences)
    greedy = model.generate(ids, max_new_tokens=3, generation_strategy="ar", return_dict_in_generate=True)
    assert greedy.seeds is None


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"seed": -1}, ConfigError, "-1"),
        ({"seed": 2**64}, ConfigError, str(2**64)),
        ({"seed": 1.5}, ConfigError, "1.5"),
        ({"seed": [1, True]}, ConfigError, "True"),
        ({"seed": "3"}, ConfigError, "'3'"),
        ({"seed": [1, 2, 3]}, InputError, "3 seeds were given for 2 output rows"),
        ({"seed": 1, "generator": torch.Generator()}, ConfigError, "both"),
        ({"presence_penalty": 3.0}, ConfigError, "presence_penalty"),
        ({"frequency_penalty": "much"}, ConfigError, "frequency_penalty"),
    ],
)
def test_bad_arguments(
    model: NemotronLabsDiffusionModel, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        model.generate(prompts(2), max_new_tokens=3, do_sample=True, generation_strategy="recguide", **arguments)


def test_sampling_arguments_need_a_strategy(model: NemotronLabsDiffusionModel) -> None:
    with pytest.raises(ConfigError, match="need a strategy"):
        model.generate(prompts(1), max_new_tokens=3, do_sample=True, seed=4)


# --- outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("setting", ["cool", "penalties"])
def test_scores_logits_and_logprobs_are_those_of_ar(
    model: NemotronLabsDiffusionModel, strategy: str, setting: str
) -> None:
    arguments: dict[str, Any] = {
        "max_new_tokens": 25,
        "eos_token_id": 9,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_logprobs": True,
        "top_logprobs": 4,
        **SETTINGS[setting],
    }
    ids = prompts(3)
    wanted, got = (sample(model, ids, name, [1, 2, 3], **arguments) for name in ("ar", strategy))
    assert torch.equal(got.sequences, wanted.sequences)
    new = wanted.sequences.shape[1] - 6
    for name in ("scores", "logits"):
        assert len(getattr(got, name)) == new
        for mine, theirs in zip(getattr(got, name), getattr(wanted, name), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)
    assert got.logprobs.shape == (3, new)
    assert torch.allclose(got.logprobs, wanted.logprobs, atol=1e-4)
    ended = torch.cumsum(got.sequences[:, 6:] == 9, dim=1) - (got.sequences[:, 6:] == 9).long() > 0
    by_hand = torch.stack(got.logits, dim=1).log_softmax(-1).gather(2, got.sequences[:, 6:, None])[..., 0]
    assert torch.allclose(got.logprobs, by_hand.masked_fill(ended, 0.0), atol=1e-5)
    values, ids = got.top_logprobs
    tops = torch.stack(got.logits, dim=1).log_softmax(-1).topk(4)
    assert torch.allclose(values, tops.values.masked_fill(ended[..., None], 0.0), atol=1e-5)
    assert torch.equal(ids, tops.indices.masked_fill(ended[..., None], 0))


def test_what_was_taken_back_is_in_no_output(model: NemotronLabsDiffusionModel, right_drafts: Any) -> None:
    """A criterion stops the first row in the middle of a block that was accepted as a whole."""

    def stop(ids: Tensor, scores: Any) -> Tensor:
        return torch.tensor([ids.shape[1] >= 6 + 9, ids.shape[1] >= 6 + 20])

    arguments: dict[str, Any] = {
        "max_new_tokens": 30,
        "stopping_criteria": [stop],
        "eos_token_id": 0,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logprobs": True,
        "suppress_tokens": [0],
    }
    ids = prompts(1).repeat(2, 1)
    wanted = sample(model, ids, "ar", [5, 5], **arguments)
    right_drafts(wanted.sequences[1:])
    got = sample(model, ids, "linear", [5, 5], **arguments)
    assert torch.equal(got.sequences, wanted.sequences)
    assert wanted.logprobs[0].count_nonzero() == 9
    assert torch.allclose(got.logprobs, wanted.logprobs, atol=1e-4)


def test_statistics_and_records(model: NemotronLabsDiffusionModel) -> None:
    output = sample(
        model, prompts(2), "recguide", 5, max_new_tokens=20, return_dict_in_generate=True, output_records=True
    )
    statistics, records = output.statistics, output.records
    assert statistics["new_tokens"] == 40
    assert statistics["rounds"] == sum(map(len, records)) == sum(statistics["outcomes"].values())
    assert statistics["tau"] == pytest.approx(2 * statistics["decode_tpf"])
    for row in range(2):
        committed = [token for record in records[row] for token in record.committed]
        assert committed == output.sequences[row, 7:].tolist()
    bare = sample(model, prompts(2), "recguide", 5, max_new_tokens=20, return_dict_in_generate=True)
    assert bare.records is None
    assert bare.scores is None
    assert bare.logprobs is None


def test_processors_are_called_in_their_order(model: NemotronLabsDiffusionModel) -> None:
    """Penalties come before the temperature, as they do in the fast path and in the one by position."""
    seen: list[list[str]] = []

    def spy(self: LogitsProcessorList, *args: Any, **kwargs: Any) -> Any:
        seen.append([type(p).__name__ for p in self])
        return original(self, *args, **kwargs)

    original = LogitsProcessorList.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LogitsProcessorList, "__call__", spy)
        sample(model, prompts(1), "ar", 5, max_new_tokens=1, temperature=0.5, presence_penalty=1.0)
    assert seen == [["OutputPenaltyLogitsProcessor", "TemperatureLogitsWarper"]]
