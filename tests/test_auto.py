"""`auto`: what it decides follows prices, what it learns follows measurements, and the text follows neither."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from recguide import ConfigError, Engine, EngineConfig, Hook, RecGuideConfig, RoundRecord
from recguide.adapter import ModelAdapter
from recguide.attention import resolve_backend
from recguide.branching import NoBranches
from recguide.calibration import CostProfile, DraftOdds, Fingerprint, ProgressTable, RoundCost, Stratum
from recguide.loop import auto_method, generate
from recguide.metrics import DecodeMetrics
from recguide.policy import Auto, FixedBlock, Policies, PolicyShelf
from recguide.policy.auto import EXPLORE
from recguide.policy.best_round import TOKENS
from recguide.policy.forward_times import ForwardTimes
from recguide.rounds import Method, Request
from recguide.sampling import Sampling
from recguide.structs import (
    Branch,
    BranchChoice,
    BranchKind,
    BranchRecord,
    Draft,
    DraftSource,
    ForwardRecord,
    Guess,
    Outcome,
)
from recguide.testing import ScriptedDrafts, toy_model

HERE = Fingerprint("0123", "float32", "cpu", "torch_sdpa", True)


def profile(fixed: float, each: float) -> CostProfile:
    """A forward takes `fixed` ms and `each` for every query token of every request."""
    cells = [
        RoundCost(load, size, 64, fixed + load * size * each, fixed + load * size * each)
        for load in (1, 32)
        for size in (1, 8, 16, 32, 64)
    ]
    return CostProfile(HERE, tuple(cells))


def progress(mean: int = 12) -> ProgressTable:
    survival = (1.0,) * mean + (0.0,) * (32 - mean)
    return ProgressTable(HERE, {"all": Stratum((), (survival,), (10,))}, odds=DraftOdds(second=(0.5,), third=0.1))


def draft(*probabilities: float) -> Draft:
    guesses = tuple(Guess(7 + i % 8, (20, 21), p, (1 - p) / 2) for i, p in enumerate(probabilities))
    return Draft(guesses, DraftSource.BRANCH)


def test_spare_compute_lets_branches_ride_along() -> None:
    auto = Auto(progress(), profile(fixed=10, each=0.01))
    auto.block_size(0, 1)
    choice = auto.choose(0, Draft(), 100, set())
    assert choice.verified == 1, "there is no draft yet: its seed alone"
    [bootstrap] = choice.branches
    assert (bootstrap.kind, bootstrap.depth) == (BranchKind.CONTINUATION, 1)
    assert bootstrap.block_size >= 16
    doubtful = auto.choose(0, draft(*[0.99] * 5, 0.5, *[0.99] * 9), 100, set())
    assert doubtful.verified == 16
    assert {6, 16} <= {branch.depth for branch in doubtful.branches}, "the doubtful place, and the end"


def test_where_tokens_are_dear_a_draft_is_cut_and_nothing_rides_along() -> None:
    auto = Auto(progress(), profile(fixed=1, each=1.0))
    auto.block_size(0, 32)
    choice = auto.choose(0, draft(*[0.99] * 5, *[0.2] * 10), 100, set())
    assert choice.verified is not None
    assert 2 <= choice.verified <= 7
    assert choice.branches == ()


def test_plain_decoding_is_among_its_choices() -> None:
    """Where drafts are worthless and tokens dear, a request's seed goes alone."""
    auto = Auto(progress(mean=1), profile(fixed=0.1, each=1.0))
    auto.block_size(0, 1)
    assert auto.choose(0, Draft(), 100, set()).branches == ()


def test_nothing_is_drafted_that_cannot_be_written() -> None:
    auto = Auto(progress(), profile(fixed=10, each=0.01))
    auto.block_size(0, 1)
    assert auto.choose(0, Draft(), 1, set()).branches == ()
    for branch in auto.choose(0, draft(*[0.9] * 7), 10, set()).branches:
        assert branch.block_size <= 10 - branch.depth
    assert all(b.depth <= 3 for b in auto.choose(0, draft(*[0.9] * 7), 100, {9}).branches), "9 is drafted third"
    assert all(b.replacement != 20 for b in auto.choose(0, draft(*[0.6] * 7), 100, {20}).branches)


def test_what_is_cut_off_a_draft_is_kept() -> None:
    auto = Auto(progress(), profile(fixed=10, each=0.3))
    auto.block_size(0, 1)
    choice = auto.choose(0, draft(*[0.999] * 9, *[0.01] * 6), 100, set())
    assert choice.verified == 10
    assert choice.leftovers


def forward(kind: str, requests: int, tokens: int, ms: float) -> ForwardRecord:
    return ForwardRecord(kind, tuple(range(requests)), tokens, ms / 1000, ms / 1000)


def test_times_are_learned_without_a_profile() -> None:
    times = ForwardTimes()
    generator = torch.Generator().manual_seed(0)
    for tokens in torch.randint(1, 100, (300,), generator=generator).tolist():
        times.observe(forward("fused", 1, tokens, 5 + tokens / 10))
    curve = times.curve(1)
    for tokens in (1, 16, 40, 90):
        assert curve[tokens] == pytest.approx(5 + tokens / 10, rel=0.15)


def test_a_busy_moment_moves_a_time_little_and_a_lasting_change_is_followed() -> None:
    times = ForwardTimes(profile(fixed=10, each=0.1))
    for _ in range(50):
        times.observe(forward("verify", 1, 16, 11.6))
    times.observe(forward("verify", 1, 16, 1000.0))
    for _ in range(32):
        times.observe(forward("verify", 1, 16, 11.6))
    assert times.curve(1)[16] == pytest.approx(11.6, rel=0.05)
    for _ in range(100):
        times.observe(forward("verify", 1, 16, 23.2))
    assert times.curve(1)[16] == pytest.approx(23.2, rel=0.1)


def test_drafts_are_tried_now_and_then_where_they_are_not_worth_it() -> None:
    auto = Auto(progress(mean=1), profile(fixed=0.1, each=1.0))
    auto.block_size(0, 1)
    choices = [auto.choose(0, Draft(), 1000, set()) for _ in range(2 * EXPLORE)]
    drafting = [choice for choice in choices if choice.branches]
    assert len(drafting) == 2
    assert all(choice.verified == 1 for choice in choices)
    assert [(b.kind, b.depth) for b in drafting[0].branches] == [(BranchKind.CONTINUATION, 1)]


# --- what is learned ---

LEARNED = ("continuation", "redrafted", "foretold", "leftover")


def branch_at(depth: int, *tokens: int) -> BranchRecord:
    """A continuation that says these tokens, from the `depth`-th committed one on."""
    guesses = tuple(Guess(token, (), 0.9, 0.05) for token in tokens[1:])
    return BranchRecord(Branch(BranchKind.CONTINUATION, depth, len(tokens)), tokens[0], Draft(guesses))


def round_of(
    verified: int, accepted: int, *branches: BranchRecord, outcome: Outcome = Outcome.PLAIN, left_over: bool = False
) -> RoundRecord:
    """A round that commits 1, 2, 3, …"""
    guesses = draft(*[0.9] * (verified - 1)).guesses
    return RoundRecord(
        request=0,
        index=0,
        position=0,
        seed=7,
        draft=Draft(guesses, DraftSource.LEFTOVER if left_over else DraftSource.BRANCH) if guesses else Draft(),
        branches=branches,
        risky=(),
        accepted=accepted,
        committed=tuple(range(1, accepted + 2)),
        outcome=outcome,
        hit=None,
        query_tokens=verified,
        entropies=(0.1,) * (accepted + 1),
    )


def after(times: int, record: RoundRecord) -> Auto:
    """What has seen a round over and over, told of its draft each time."""
    auto = Auto(progress(), profile(fixed=10, each=0.01))
    for _ in range(times):
        auto.block_size(0, 1)
        auto.choose(0, record.draft, 100, set())
        auto.observe_forward(forward("fused", 1, record.query_tokens, 10 + record.query_tokens / 100))
        auto.observe(record)
    return auto


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        # After all that was verified; after a rejected token; where more was committed than supposed.
        ("continuation", round_of(4, 3, branch_at(4, 4, 5, 6)), round_of(4, 3, branch_at(4, 9, 5, 6))),
        ("redrafted", round_of(8, 2, branch_at(3, 3, 4, 5)), round_of(8, 2, branch_at(3, 9, 4, 5))),
        ("foretold", round_of(8, 4, branch_at(3, 3, 4, 5, 6, 7)), round_of(8, 4, branch_at(3, 3, 4, 9, 6, 7))),
        ("leftover", round_of(8, 7, left_over=True), round_of(8, 0, left_over=True)),
    ],
)
def test_odds_move_towards_what_is_seen(name: str, right: RoundRecord, wrong: RoundRecord) -> None:
    prior = Auto(progress(), profile(fixed=10, each=0.01))._odds
    once, often = after(1, wrong)._odds, after(200, wrong)._odds
    assert 0.6 * getattr(prior, name) < getattr(once, name) < getattr(prior, name), "one round moves them a little"
    assert getattr(often, name) < 0.05
    assert getattr(after(200, right)._odds, name) > 0.95
    for other in LEARNED:
        if other != name:
            assert getattr(often, other) == getattr(prior, other), "nothing was seen of this"


def test_branches_of_a_round_that_ended_the_text_or_did_not_come_so_far_say_nothing() -> None:
    stopped = round_of(8, 2, branch_at(3, 9, 4, 5), branch_at(2, 2, 9, 5), outcome=Outcome.STOPPED)
    not_reached = round_of(8, 2, branch_at(4, 4, 5, 6), branch_at(8, 9, 9, 9))
    prior = Auto(progress(), profile(fixed=10, each=0.01))._odds
    for record in (stopped, not_reached):
        learned = after(50, record)._odds
        assert [getattr(learned, name) for name in LEARNED] == [getattr(prior, name) for name in LEARNED]


def test_continuations_that_are_always_wrong_are_built_no_more() -> None:
    kept, lost = (after(200, round_of(16, 15, branch_at(16, token, 17, 18))) for token in (16, 99))
    for auto, built in ((kept, True), (lost, False)):
        auto.block_size(0, 1)
        choice = auto.choose(0, draft(*[0.99] * 15), 100, set())
        assert any(branch.depth == 16 for branch in choice.branches) == built


# --- the text ---


@pytest.mark.parametrize("sampled", [False, True])
def test_the_text_is_plain_decodings(sampled: bool) -> None:
    model = toy_model()
    ids = torch.randint(6, 24, (6, 5), generator=torch.Generator().manual_seed(3))
    arguments: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": 9, "pad_token_id": 0}
    arguments |= {"do_sample": True, "seed": 5, "temperature": 0.4} if sampled else {}
    expected = model.generate(ids, generation_strategy="ar", **arguments)
    metrics = DecodeMetrics()
    for _ in range(3):
        got = model.generate(ids, generation_strategy="auto", recguide_hooks=[metrics], **arguments)
        assert torch.equal(got, expected)
    metrics.check()
    assert metrics.forwards["draft"] == 0
    assert metrics.rounds[DraftSource.BRANCH] > 0, "some drafts should have been right"


@pytest.mark.parametrize("scheduler", ["packed", "bucketed", "padded"])
def test_it_never_has_a_draft_forward_in_an_engine(scheduler: str) -> None:
    model, metrics = toy_model(vocab_size=64), DecodeMetrics()
    prompts = [[7 + i, 9, 11 + i] for i in range(6)]
    with Engine(model, EngineConfig(scheduler=scheduler), [metrics]) as engine:
        results = engine.generate_batch(prompts, generation_strategy="auto", max_new_tokens=30)
    assert metrics.forwards["draft"] == 0, "a scheduler may raise blocks beyond what is drafted"
    for prompt, result in zip(prompts, results, strict=True):
        alone = model.generate(torch.tensor([prompt]), generation_strategy="ar", max_new_tokens=30)
        assert result.tokens == alone[0, 3:].tolist()


def test_in_an_engine_beside_others() -> None:
    model = toy_model(vocab_size=64)
    prompts = [[7 + i, 9, 11 + i] for i in range(9)]
    strategies = ("auto", "linear", "ar")
    with Engine(model) as engine:
        handles = [
            engine.add_request(prompt, generation_strategy=strategies[i % 3], max_new_tokens=40)
            for i, prompt in enumerate(prompts)
        ]
        results = [handle.result(60).tokens for handle in handles]
        engine._pool.check_integrity([])
    expected = [
        model.generate(torch.tensor([p]), generation_strategy="ar", max_new_tokens=40)[0, 3:].tolist() for p in prompts
    ]
    assert results == expected


def test_it_takes_no_options_but_tables() -> None:
    with pytest.raises(ConfigError, match="takes no delta, policy, only tables"):
        RecGuideConfig(strategy="auto", delta=0.2, policy="aimd")
    assert RecGuideConfig(strategy="auto", tables="somewhere").tables == "somewhere"


def test_what_was_learned_is_kept_between_calls_and_not_shared_by_calls_side_by_side() -> None:
    shelf, model = PolicyShelf(), toy_model()
    first = shelf.take(model)
    second = shelf.take(model)
    assert first is not second
    shelf.put_back(model, first)
    assert shelf.take(model) is first
    assert isinstance(first, Policies)


def test_calls_from_two_threads() -> None:
    model = toy_model()
    ids = torch.tensor([[7, 8, 9]])
    expected = model.generate(ids, generation_strategy="ar", max_new_tokens=40)
    outputs: list[Any] = []

    def call() -> None:
        outputs.append(model.generate(ids, generation_strategy="auto", max_new_tokens=40))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outputs) == 4
    assert all(torch.equal(output, expected) for output in outputs)


class Rounds(Hook):
    def __init__(self) -> None:
        self.seen: list[RoundRecord] = []

    def on_commit(self, record: RoundRecord) -> None:
        self.seen.append(record)


class Random(Auto):
    """Any round that can be run."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(0)

    def _between(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self._generator))

    def choose(self, request: int, draft: Draft, remaining: int, eos: Any) -> BranchChoice:
        verified = left = self._between(1, len(draft.guesses) + 1)
        branches = []
        for _ in range(self._between(0, 4)):
            depth = self._between(1, verified)
            size = self._between(2, 32)
            if size > remaining - depth or left + size > TOKENS:
                continue
            left += size
            if depth < verified and self._between(0, 1):
                tokens = (*draft.guesses[depth - 1].alternatives, self._between(6, 23))
                token = tokens[self._between(0, len(tokens) - 1)]
                branches.append(Branch(BranchKind.CORRECTION, depth, size, token))
            else:
                branches.append(Branch(BranchKind.CONTINUATION, depth, size))
        return BranchChoice(tuple(branches), verified=verified, leftovers=bool(self._between(0, 1)))


class Steady(Auto):
    """Whatever the clock says, a forward costs the same."""

    def observe_forward(self, record: ForwardRecord) -> None:
        super().observe_forward(forward(record.kind, len(record.requests), record.query_tokens, 10.0))


PROMPTS = [[7 + i, 9, 12] for i in range(5)]


def decode(
    method: Method, sampled: bool, prompts: Sequence[list[int]] = PROMPTS, adapter: ModelAdapter | None = None
) -> tuple[list[list[int]], list[RoundRecord], DecodeMetrics]:
    """Texts of some prompts, which end with 9 or after 60 tokens; the rounds, and their figures."""

    def stop(tokens: list[int]) -> str | None:
        return "eos" if tokens[-1] == 9 else None

    sampling = Sampling(seed=5, processors=(lambda ids, scores: scores / 0.4,)) if sampled else None
    requests = [Request(i, list(prompt), 60, stop, method, sampling) for i, prompt in enumerate(prompts)]
    rounds, metrics = Rounds(), DecodeMetrics()
    generate(requests, adapter or ModelAdapter(toy_model(), resolve_backend()), [rounds, metrics])
    metrics.check()
    return [request.tokens for request in requests], rounds.seen, metrics


def run_by(auto: Auto) -> Method:
    return auto_method(auto, frozenset({9}))


PLAIN = Method(FixedBlock(1), NoBranches(), candidates=1)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_policy_that_decides_at_random_changes_nothing(sampled: bool) -> None:
    expected, _, _ = decode(PLAIN, sampled)
    random, lengths = Random(), set()
    for _ in range(3):
        got, rounds, _ = decode(run_by(random), sampled)
        assert got == expected
        lengths |= {branch.branch.block_size for record in rounds for branch in record.branches}
    assert len(lengths) > 20


@pytest.mark.parametrize("sampled", [False, True])
def test_nor_where_most_that_is_drafted_is_right(sampled: bool) -> None:
    """The same prompt in each row, and drafts that are wrong in every seventh place, where their second choice is right."""
    prompts = [[4]] * 4
    expected, _, _ = decode(PLAIN, sampled, prompts)
    assert len(expected[0]) > 40, "too short to show much"
    truth = dict(enumerate(expected[0]))

    def right(position: int) -> int:
        return truth.get(position, 6)

    def wrong(position: int) -> int:
        return 7 if right(position) == 6 else 6

    def is_wrong(position: int) -> bool:
        return position % 7 == 0

    adapter = ScriptedDrafts(
        toy_model(),
        lambda position: wrong(position) if is_wrong(position) else right(position),
        alternative=lambda position: right(position) if is_wrong(position) else wrong(position),
    )
    random = Random()
    sources, outcomes = set(), set()
    for _ in range(4):
        got, rounds, _ = decode(run_by(random), sampled, prompts, adapter)
        assert got == expected
        sources |= {record.draft.source for record in rounds}
        outcomes |= {record.outcome for record in rounds}
    assert sources == {DraftSource.NONE, DraftSource.BRANCH, DraftSource.LEFTOVER}
    assert {o for o in Outcome if o.value.endswith("_hit")} - outcomes == {Outcome.ANY_BONUS_HIT}


@pytest.mark.parametrize("sampled", [False, True])
def test_what_is_left_of_drafts_is_verified(sampled: bool) -> None:
    expected, _, _ = decode(PLAIN, sampled)
    got, rounds, metrics = decode(run_by(Steady()), sampled)
    assert got == expected
    assert metrics.forwards["draft"] == 0
    assert metrics.rounds[DraftSource.LEFTOVER] > 0
    assert metrics.rounds[DraftSource.BRANCH] > 0
    last: dict[int, RoundRecord] = {}
    for record in rounds:
        before = last.get(record.request)
        if record.draft.source is DraftSource.LEFTOVER:
            assert before is not None
            assert before.hit is None, "no branch had foretold the end of the round before"
        last[record.request] = record
