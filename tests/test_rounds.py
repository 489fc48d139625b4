"""Rounds: the text is plain decoding's whatever the drafts, the cache holds what was committed, the counts add up."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from recguide.adapter import ModelAdapter
from recguide.attention import installed, resolve_backend
from recguide.config import RecGuideConfig
from recguide.dense_kv import DenseKV
from recguide.hooks import Hook, Hooks
from recguide.loop import Result, generate, method_of
from recguide.models.draft_adapter import draft_adapter_of
from recguide.models.nemotron_labs_diffusion import NemotronLabsDiffusionModel
from recguide.rounds import Request, StopRule, plan_blocks, prefill, run_round
from recguide.sampling import Sampling
from recguide.segments import Segment
from recguide.structs import DraftSource, FinishRecord, ForwardRecord, Outcome, RoundRecord
from recguide.testing import MASK, ScriptedDrafts, toy_model

PROMPTS = ([1, 7, 3], [4], [9, 9, 2, 8, 6, 14, 3, 1, 1, 12, 7], [20, 13])
STRATEGIES = ("ar", "linear", "quadratic", "recguide")
BLOCKS = (1, 2, 4, 8, 16)
B, NEW = 8, 20


class Log(Hook):
    """Everything that was observed."""

    def __init__(self) -> None:
        self.forwards: list[ForwardRecord] = []
        self.rounds: list[RoundRecord] = []
        self.finishes: list[FinishRecord] = []
        self.on_prefill = self.on_draft = self.on_verify = self.forwards.append  # type: ignore[method-assign]
        self.on_commit = self.rounds.append  # type: ignore[method-assign]
        self.on_finish = self.finishes.append  # type: ignore[method-assign]

    def count(self, *kinds: str) -> int:
        return sum(forward.kind in kinds for forward in self.forwards)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(record.outcome for record in self.rounds)

    @property
    def reused(self) -> int:
        return sum(record.draft.source is DraftSource.BRANCH for record in self.rounds)


@lru_cache
def model() -> NemotronLabsDiffusionModel:
    return toy_model()


@lru_cache
def masked_model() -> NemotronLabsDiffusionModel:
    """Its likeliest token is often MASK, verifying or drafting."""
    model = toy_model()
    with torch.no_grad():
        model.lm_head.weight[MASK] *= 8
    return model


def logits_after(of: NemotronLabsDiffusionModel, tokens: Sequence[int]) -> Tensor:
    """Next-token logits from scratch: one plain forward of all tokens."""
    with torch.no_grad():
        return of(torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]


@lru_cache
def plain_text(prompt: tuple[int, ...], length: int, of: Callable[[], NemotronLabsDiffusionModel] = model) -> list[int]:
    """The slow way: a full forward for each token, the likeliest one but MASK."""
    tokens = list(prompt)
    for _ in range(length):
        scores = logits_after(of(), tokens)
        scores[MASK] = float("-inf")
        tokens.append(int(scores.argmax()))
    return tokens[len(prompt) :]


def never(tokens: list[int]) -> str | None:
    return None


def decode(
    adapter: ModelAdapter | None = None,
    prompts: Sequence[list[int]] = PROMPTS[:1],
    new: int | Sequence[int] = NEW,
    stop: StopRule = never,
    eos: frozenset[int] = frozenset(),
    **options: Any,
) -> tuple[list[list[int]], Log, Result]:
    """Outputs, what was observed, and the result."""
    limits = [new] * len(prompts) if isinstance(new, int) else new
    adapter = adapter or ModelAdapter(model(), resolve_backend())
    method = method_of(RecGuideConfig(**options), eos, adapter)
    requests = [Request(i, list(p), n, stop, method) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]
    log = Log()
    result = generate(requests, adapter, [log])
    return [r.tokens[r.prompt_tokens :] for r in requests], log, result


def true_token(prompt: Sequence[int], length: int = 60) -> Callable[[int], int]:
    """The model's own token at an absolute position of its text after `prompt`."""
    text = [*prompt, *plain_text(tuple(prompt), length)]
    return lambda position: text[position]


def another(token: int) -> int:
    """A token that is neither `token` nor MASK."""
    return next(t for t in (token + 1, token + 2) if t != MASK) % 24


def assert_cache(kv: DenseKV, row: int, tokens: Sequence[int]) -> None:
    """The row holds exactly `tokens`: their K/V equal a prefill of them from scratch."""
    assert kv.lengths[row] == len(tokens)
    fresh, adapter = DenseKV(1), ModelAdapter(model(), resolve_backend())
    with installed(model()):
        adapter.forward([[adapter.causal(list(tokens), 0)]], fresh)
    fresh.commit(0, len(tokens))
    for held, expected in zip(kv.read(row), fresh.read(0), strict=True):
        torch.testing.assert_close(held, expected, rtol=1e-4, atol=1e-4)


def assert_counts(log: Log) -> None:
    """The identities of one request alone."""
    rounds, drafts = len(log.rounds), log.count("draft")
    undrafted = sum(record.draft.source is DraftSource.NONE for record in log.rounds)
    assert log.count("prefill") == 1
    assert log.count("verify", "fused") == rounds
    assert len(log.forwards) == 1 + rounds + drafts
    assert len(log.forwards) == 1 + 2 * rounds - log.reused - undrafted
    for record in log.rounds:
        assert record.query_tokens == record.block_size + sum(b.branch.block_size for b in record.branches)
    hits = [record.hit is not None for record in log.rounds]
    sources = [record.draft.source is DraftSource.BRANCH for record in log.rounds]
    assert sources == [False, *hits[:-1]], "a round is reused just where the one before had a hit"


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("block_size", BLOCKS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_output_equals_plain_decoding(strategy: str, block_size: int, rows: int) -> None:
    prompts = PROMPTS[:rows]
    outputs, log, result = decode(prompts=prompts, strategy=strategy, block_size=block_size)
    assert outputs == [plain_text(tuple(prompt), NEW) for prompt in prompts]
    assert [request.finished for request in result.requests] == ["length"] * rows
    for row, request in enumerate(result.requests):
        assert_cache(result.kv, row, request.tokens[:-1])
    assert sum(log.outcomes.values()) == len(log.rounds) == sum(request.rounds for request in result.requests)
    assert sum(len(record.committed) for record in log.rounds) == rows * (NEW - 1)
    if rows == 1:
        assert_counts(log)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_that_end_at_different_times_equal_their_runs_alone(strategy: str) -> None:
    limits, block_size = (1, 13, 4, 9), 4
    outputs, log, result = decode(prompts=PROMPTS, new=limits, strategy=strategy, block_size=block_size)
    for row, (prompt, limit) in enumerate(zip(PROMPTS, limits, strict=True)):
        alone, alone_log, _ = decode(prompts=[prompt], new=limit, strategy=strategy, block_size=block_size)
        assert outputs[row] == alone[0] == plain_text(tuple(prompt), limit)
        assert_cache(result.kv, row, [*prompt, *outputs[row][:-1]])
        mine = [(r.outcome, r.committed, r.accepted, r.position, r.hit) for r in log.rounds if r.request == row]
        assert mine == [(r.outcome, r.committed, r.accepted, r.position, r.hit) for r in alone_log.rounds]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("right", [True, False])
def test_exactly_as_many_tokens_as_asked(strategy: str, right: bool) -> None:
    """Where all drafts are right, and where all are wrong; alone, and beside requests of other lengths."""
    prompt = PROMPTS[0]
    truth = true_token(prompt)
    drafts = ScriptedDrafts(model(), truth if right else lambda position: another(truth(position)), lambda _: 0.1)
    for limits in ((1, 2, 7, B - 1, B, B + 1), (1,), (2,), (B,)):
        outputs, log, result = decode(drafts, [prompt] * len(limits), limits, strategy=strategy, block_size=B)
        assert outputs == [plain_text(tuple(prompt), limit) for limit in limits]
        assert log.finishes == [FinishRecord(i, "length", len(prompt), limit) for i, limit in enumerate(limits)]
        assert result.kv.lengths == tuple(len(prompt) + limit - 1 for limit in limits)


@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide"])
@pytest.mark.parametrize("place", range(1, B))
def test_rejection_at_each_position(strategy: str, place: int) -> None:
    """The first block goes wrong at `place`: what came before is kept, and decoding goes on as if from scratch."""
    prompt = PROMPTS[0]
    truth = true_token(prompt)
    wrong_at = len(prompt) + place  # the block's first token, the seed, is at len(prompt)
    drafts = ScriptedDrafts(model(), lambda p: another(truth(p)) if p == wrong_at else truth(p))
    config = RecGuideConfig(strategy=strategy, block_size=B)
    method, log = method_of(config, frozenset(), drafts), Log()
    request, kv, hooks = Request(0, list(prompt), B + 4, never, method), DenseKV(1), Hooks([log])
    with installed(model()):
        prefill([request], drafts, kv, hooks)
        plan_blocks([request], 1)
        run_round([request], drafts, kv, hooks)
        record = log.rounds[0]
        assert record.accepted == place - 1
        assert list(record.committed) == plain_text(tuple(prompt), place + 1)[1:]
        assert kv.lengths == (len(prompt) + place,) == (len(request.tokens) - 1,)
        assert_cache(kv, 0, request.tokens[:-1])
        _, predictions = drafts.forward([[drafts.causal(request.tokens[-1:], len(request.tokens) - 1)]], kv)
        torch.testing.assert_close(predictions.logits[0], logits_after(model(), request.tokens), rtol=1e-4, atol=1e-4)
        while request.finished is None:
            plan_blocks([request], 1)
            run_round([request], drafts, kv, hooks)
    assert request.tokens == [*prompt, *plain_text(tuple(prompt), B + 4)]


@pytest.mark.parametrize("strategy", ["linear", "quadratic", "recguide"])
def test_rows_at_different_offsets_after_unequal_acceptance(strategy: str) -> None:
    """Each row's drafts go wrong at its own rhythm; drafts are told apart by where the rows start."""
    starts = (3, 63, 123)
    padding = [(7 * i) % 23 for i in range(120)]
    prompts = [[t if t != MASK else 6 for t in [*padding[: start - 3], *PROMPTS[0]]] for start in starts]
    truths = [true_token(prompt, NEW + B) for prompt in prompts]

    def guess(position: int) -> int:
        row = max(r for r, start in enumerate(starts) if position >= start)
        into, rhythm = position - starts[row], (2, 5, 100)[row]
        token = truths[row](position)
        return another(token) if into % rhythm == 0 else token

    outputs, log, result = decode(
        ScriptedDrafts(model(), guess), prompts=prompts, strategy=strategy, block_size=B, continuation=False
    )
    assert outputs == [plain_text(tuple(prompt), NEW) for prompt in prompts]
    rounds = [request.rounds for request in result.requests]
    assert rounds[0] > rounds[1] > rounds[2]
    for row, prompt in enumerate(prompts):
        mine = [record for record in log.rounds if record.request == row]
        position = len(prompt)
        for record in mine:
            assert record.position == position
            assert record.seed == truths[row](position)
            position += len(record.committed)
        assert_cache(result.kv, row, [*prompt, *outputs[row][:-1]])


# --- stop rules ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("place", [1, 2, 5, B, B + 1])
def test_a_stop_inside_an_accepted_block_cuts_the_output(strategy: str, place: int) -> None:
    """All drafts are right, and a rule stops after the `place`-th new token; it sees each token once, in order."""
    prompt = PROMPTS[0]
    calls: list[list[int]] = []

    def stop(tokens: list[int]) -> str | None:
        calls.append(list(tokens))
        return "stop" if len(tokens) == len(prompt) + place else None

    drafts = ScriptedDrafts(model(), true_token(prompt))
    outputs, log, result = decode(drafts, stop=stop, strategy=strategy, block_size=B)
    expected = plain_text(tuple(prompt), place)
    assert outputs == [expected]
    assert calls == [[*prompt, *expected[: i + 1]] for i in range(place)]
    assert log.finishes == [FinishRecord(0, "stop", len(prompt), place)]
    assert_cache(result.kv, 0, [*prompt, *expected[:-1]])
    if place > 1:
        assert log.rounds[-1].outcome is Outcome.STOPPED
        assert log.rounds[-1].hit is None


@pytest.mark.parametrize("strategy", ["linear", "recguide"])
def test_a_drafted_eos_ends_the_text_and_nothing_after_it_is_committed(strategy: str) -> None:
    prompt = PROMPTS[0]
    text = plain_text(tuple(prompt), NEW)
    eos = text[4]
    first = text.index(eos)
    drafts = ScriptedDrafts(model(), true_token(prompt))
    ends = decode(drafts, stop=lambda t: "eos" if t[-1] == eos else None, eos=frozenset({eos}), strategy=strategy)
    assert ends[0] == [text[: first + 1]]
    assert ends[2].kv.lengths == (len(prompt) + first,)
    assert ends[1].finishes[0].reason == "eos"


# --- forwards and outcomes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["quadratic", "recguide"])
def test_full_acceptance_costs_one_forward_a_round(strategy: str) -> None:
    """Drafts and guesses of the bonus always right: after the first round every draft comes from a branch."""
    new = 1 + 5 * B
    outputs, log, _ = decode(ScriptedDrafts(model(), true_token(PROMPTS[0])), new=new, strategy=strategy, block_size=B)
    assert outputs == [plain_text(tuple(PROMPTS[0]), new)]
    assert_counts(log)
    assert [len(record.committed) for record in log.rounds] == [B] * 5
    # The quadratic layout prepares for a rejection in the last round too.
    last = "verify" if strategy == "recguide" else "fused"
    assert [forward.kind for forward in log.forwards] == ["prefill", "draft", *["fused"] * 4, last]
    hit = Outcome.CONTINUATION_HIT if strategy == "recguide" else Outcome.ANY_BONUS_HIT
    assert log.outcomes == {hit: 4, Outcome.STOPPED: 1}


def test_linear_full_acceptance_costs_two_forwards_a_round() -> None:
    drafts = ScriptedDrafts(model(), true_token(PROMPTS[0]))
    _, log, _ = decode(drafts, new=1 + 3 * B, strategy="linear", block_size=B)
    assert [forward.kind for forward in log.forwards] == ["prefill", *["draft", "verify"] * 3]
    assert log.reused == 0


def staged(
    wrong: Callable[[int], bool],
    risky: Callable[[int], bool],
    right_alternative: bool = True,
    new: int = NEW,
    **options: Any,
) -> Log:
    """
    Decode with drafts that are wrong at the new tokens `wrong` (the first seed is 0) and doubtful at `risky`.

    Where the first candidate is wrong, the second one is the true token, or is wrong too.
    """
    prompt = PROMPTS[0]
    truth = true_token(prompt)

    def guess(position: int) -> int:
        return another(truth(position)) if wrong(position - len(prompt)) else truth(position)

    def alternative(position: int) -> int:
        right = truth(position)
        if guess(position) != right and right_alternative:
            return right
        return next(t for t in (21, 22, 23) if t not in (right, guess(position)))

    drafts = ScriptedDrafts(model(), guess, lambda p: 0.1 if risky(p - len(prompt)) else 0.9, alternative)
    outputs, log, _ = decode(drafts, new=new, block_size=B, **options)
    assert outputs == [plain_text(tuple(prompt), new)]
    assert_counts(log)
    return log


def test_corrections_hit_again_and_again() -> None:
    """Every fourth token is wrong, doubted, and corrected: one forward a round from the second round on."""
    log = staged(lambda n: n % 4 == 0, lambda n: n % 4 == 0, new=1 + 4 * 6)
    assert log.outcomes == {Outcome.CORRECTION_1_HIT: 5, Outcome.STOPPED: 1}
    assert log.count("draft") == 1
    assert [len(record.committed) for record in log.rounds] == [4] * 6


def test_without_reuse_no_branch_follows_a_hit() -> None:
    log = staged(lambda n: n % 4 == 0, lambda n: n % 4 == 0, new=1 + 4 * 6, reuse=False)
    assert log.outcomes == {Outcome.CORRECTION_1_HIT: 3, Outcome.PLAIN: 2, Outcome.STOPPED: 1}
    assert [record.draft.source is DraftSource.BRANCH for record in log.rounds] == [False, True] * 3


@pytest.mark.parametrize(
    ("wrong", "risky", "right_alternative", "outcome"),
    [
        ({3}, {3, 5}, True, Outcome.CORRECTION_1_HIT),
        ({5}, {3, 5}, True, Outcome.CORRECTION_2_HIT),
        ({5}, {3, 5, 6, 7}, True, Outcome.CORRECTION_2_HIT),
        ({3}, {3, 5}, False, Outcome.CORRECTION_1_WRONG_TOKEN),
        ({5}, {3, 5}, False, Outcome.CORRECTION_2_WRONG_TOKEN),
        ({2}, {3, 5}, True, Outcome.REJECTED_BEFORE),
        ({4}, {3, 5}, True, Outcome.REJECTED_BETWEEN),
        ({7}, {3, 5}, True, Outcome.REJECTED_AFTER),
        ({6}, {3}, True, Outcome.REJECTED_AFTER),
        ({6}, set(), True, Outcome.REJECTED_NO_CORRECTION),
        (set(), {3, 5}, True, Outcome.CONTINUATION_HIT),
        ({B}, set(), True, Outcome.CONTINUATION_WRONG_TOKEN),
        (set(), {1, 3, 5}, True, Outcome.FULL_NO_CONTINUATION),
    ],
)
def test_the_first_round_ends_as_staged(
    wrong: set[int], risky: set[int], right_alternative: bool, outcome: Outcome
) -> None:
    """Numbers are positions in the first block; B is the bonus, as the continuation guesses it."""
    log = staged(wrong.__contains__, risky.__contains__, right_alternative)
    assert log.rounds[0].outcome is outcome
    assert log.rounds[0].risky == tuple(sorted(risky))
    assert (log.rounds[0].hit is not None) == outcome.value.endswith("_hit")
    assert (log.rounds[1].draft.source is DraftSource.BRANCH) == outcome.value.endswith("_hit")


def test_a_hit_hands_on_the_branch_s_own_draft_and_margins() -> None:
    log = staged(lambda n: n == 3, lambda n: n in (3, 6))
    first, second = log.rounds[:2]
    assert first.hit == 0
    assert first.branches[0].first == second.seed
    assert second.draft == first.branches[0].draft
    assert second.risky == (3,), "new token 6 is the third after the corrected seed"


# --- siblings and the adapter --------------------------------------------------------------------------------------


def cached(adapter: ModelAdapter, prompts: Sequence[list[int]]) -> DenseKV:
    kv = DenseKV(len(prompts))
    adapter.forward([[adapter.causal(prompt, 0)] for prompt in prompts], kv)
    for row, prompt in enumerate(prompts):
        kv.commit(row, len(prompt))
    return kv


def test_verify_logits_do_not_depend_on_siblings() -> None:
    adapter = ModelAdapter(model(), resolve_backend())
    verified = [[3, 8, 1, 7], [2, 9, 9, 4]]
    prompts = PROMPTS[:2]
    with installed(model()):
        kv = cached(adapter, prompts)
        alone = [[adapter.causal(v, len(p))] for v, p in zip(verified, prompts, strict=True)]
        _, without = adapter.forward(alone, kv)
        branches = [
            adapter.block([9, None, None], len(prompts[0]) + 2, 2),
            adapter.block([None] * 4, len(prompts[0]) + 4, 4),
        ]
        plan, fused = adapter.forward([[*alone[0], *branches], alone[1]], kv)
        _, other = adapter.forward([[*alone[0], *branches[1:]], [*alone[1], adapter.block([6, None], 3, 1)]], kv)
    (start, end), (start_1, end_1) = plan.outputs[0][0], plan.outputs[1][0]
    torch.testing.assert_close(fused.logits[start:end], without.logits[:4], rtol=0, atol=1e-5)
    torch.testing.assert_close(fused.logits[start_1:end_1], without.logits[4:], rtol=0, atol=1e-5)
    torch.testing.assert_close(other.logits[start:end], without.logits[:4], rtol=0, atol=1e-5)


def test_the_adapter_changes_drafts_and_no_bit_of_verification() -> None:
    adapter = ModelAdapter(model(), resolve_backend())
    prompt, deltas = PROMPTS[0], draft_adapter_of(model())
    with installed(model()):
        kv = cached(adapter, [prompt])
        row = [adapter.causal([3, 8, 1, 7], 3), adapter.block([9, None, None], 5, 2)]
        plan, on = adapter.forward([row], kv)
        off_row = [Segment(s.tokens, s.position, s.bidirectional, None, s.hypothesis, s.outputs) for s in row]
        _, off = adapter.forward([off_row], kv)
        held = {path: delta.scale for path, delta in deltas.items()}
        try:
            for delta in deltas.values():
                delta.scale = 0.0
            _, zero = adapter.forward([row], kv)
        finally:
            for path, delta in deltas.items():
                delta.scale = held[path]
    (start, end), (draft_start, draft_end) = plan.outputs[0]
    assert torch.equal(on.logits[start:end], off.logits[start:end])
    assert torch.equal(on.logits[start:end], zero.logits[start:end])
    assert (on.logits[draft_start:draft_end] - off.logits[draft_start:draft_end]).abs().max() > 0.01
    torch.testing.assert_close(zero.logits[draft_start:draft_end], off.logits[draft_start:draft_end], rtol=0, atol=1e-6)


# --- MASK ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mask_is_never_drafted_nor_emitted(strategy: str) -> None:
    """By a model that often finds MASK the likeliest."""
    prompt = PROMPTS[2]
    text = plain_text(tuple(prompt), NEW, masked_model)
    tokens = [*prompt, *text]
    wants_mask = [int(logits_after(masked_model(), tokens[: len(prompt) + i]).argmax()) == MASK for i in range(NEW)]
    assert sum(wants_mask) > 3, "the model does not want MASK, so this test shows nothing"
    adapter = ModelAdapter(masked_model(), resolve_backend())
    outputs, log, _ = decode(adapter, prompts=[prompt], strategy=strategy, block_size=B, delta=1.0)
    assert outputs == [text]
    assert MASK not in outputs[0]
    for record in log.rounds:
        guesses = [*record.draft.guesses, *(g for b in record.branches for g in b.draft.guesses)]
        assert all(MASK not in (guess.token, *guess.alternatives) for guess in guesses)
        assert all(b.first != MASK for b in record.branches)
        assert all(0 <= g.second_probability <= g.probability <= 1.000001 for g in guesses)


def test_probabilities_are_a_softmax_without_mask() -> None:
    adapter = ModelAdapter(masked_model(), resolve_backend())
    segment = adapter.block([3, None, None, None, None], 0)
    with installed(masked_model()):
        _, predictions = adapter.forward([[segment]], DenseKV(1), best=4, entropies=True)
        _, noisy = adapter.forward([[segment]], DenseKV(1), samplings=[Sampling(seed=3)], entropies=True)
        _, bare = adapter.forward([[segment]], DenseKV(1))
    scores = predictions.logits.double()
    assert (scores.argmax(-1) == MASK).any(), "MASK is never the likeliest here, so this test shows nothing"
    scores[:, MASK] = float("-inf")
    expected = scores.softmax(-1).sort(descending=True)
    assert predictions.best == expected.indices[:, :4].tolist()
    torch.testing.assert_close(torch.tensor(predictions.probabilities), expected.values[:, :2].float())
    entropy = torch.special.entr(scores.softmax(-1)).sum(-1).float()
    torch.testing.assert_close(torch.tensor(predictions.entropies), entropy, rtol=1e-4, atol=1e-5)
    # Those of the model's own distribution, whatever the noise.
    torch.testing.assert_close(torch.tensor(noisy.entropies), entropy, rtol=1e-4, atol=1e-5)
    assert bare.best == [line[:1] for line in predictions.best]
    assert bare.entropies == bare.probabilities == []


# --- draft threshold -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("threshold", [0.3, 0.9, 1.0])
def test_a_draft_threshold_ends_and_changes_no_text(threshold: float, rows: int) -> None:
    prompts = PROMPTS[:rows]
    outputs, log, _ = decode(None, prompts, 10, strategy="linear", block_size=4, draft_threshold=threshold)
    assert outputs == [plain_text(tuple(prompt), 10) for prompt in prompts]
    run = 0
    longest = 0
    for forward in log.forwards:
        run = run + 1 if forward.kind == "draft" else 0
        longest = max(longest, run)
    assert 1 <= longest <= 3
    if threshold == 1.0:
        assert longest == 3, "no guess is certain, so each forward settles just one position"


def test_settled_guesses_stand_in_the_next_draft_forward() -> None:
    """Under a threshold the second draft forward sees the tokens that the first one settled."""
    seen: list[list[int]] = []

    class Spy(ScriptedDrafts):
        def forward(self, rows: Any, kv: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(list(s.tokens) for row in rows for s in row if s.bidirectional)
            return super().forward(rows, kv, *args, **kwargs)

    prompt = PROMPTS[0]
    truth = true_token(prompt)
    sure = {2, 3}  # positions in the first block; a margin of 0.2 is a probability of 0.6
    spy = Spy(model(), truth, lambda p: 1.0 if p - len(prompt) in sure else 0.2)
    decode(spy, new=1 + 5, strategy="linear", block_size=8, draft_threshold=0.9)
    seed, *right = [truth(len(prompt) + i) for i in range(5)]
    assert seen == [
        [seed, MASK, MASK, MASK, MASK],
        [seed, right[0], right[1], right[2], MASK],
    ]
