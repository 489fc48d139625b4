"""`auto`: what it decides follows prices, what it learns follows measurements, and the text follows neither."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from recguide import ConfigError, Engine, Hook, RecGuideConfig, RoundRecord
from recguide.calibration import CostProfile, DraftOdds, Fingerprint, ProgressTable, RoundCost, Stratum
from recguide.metrics import DecodeMetrics
from recguide.policy import Auto, Policies, PolicyShelf
from recguide.policy.forward_times import ForwardTimes
from recguide.structs import BranchKind, Draft, DraftSource, ForwardRecord, Guess, Outcome
from recguide.testing import toy_model

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
    assert auto.block_size(0, 1) == 1, "there is no draft yet: its seed alone"
    choice = auto.choose(0, Draft(), 100, set())
    [bootstrap] = choice.branches
    assert (bootstrap.kind, bootstrap.depth) == (BranchKind.CONTINUATION, 1)
    assert bootstrap.block_size >= 16
    doubtful = auto.choose(0, draft(*[0.99] * 5, 0.5, *[0.99] * 9), 100, set())
    assert doubtful.verified == 16
    kinds = {(b.kind, b.depth, b.replacement) for b in doubtful.branches}
    assert (BranchKind.CORRECTION, 6, 20) in kinds, "the doubtful place, and its second choice"
    assert any(kind is BranchKind.CONTINUATION and depth == 16 for kind, depth, _ in kinds)


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


def test_a_cut_draft_says_itself_what_comes_next() -> None:
    auto = Auto(progress(), profile(fixed=10, each=0.3))
    auto.block_size(0, 1)
    choice = auto.choose(0, draft(*[0.999] * 9, *[0.01] * 6), 100, set())
    assert choice.verified is not None
    assert choice.verified < 16
    assert all(b.kind is BranchKind.CORRECTION for b in choice.branches)


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


def test_every_length_is_tried_now_and_then() -> None:
    auto = Auto(progress(), profile(fixed=10, each=0.01))
    sizes = set()
    for _ in range(400):
        auto.block_size(0, 1)
        choice = auto.choose(0, Draft(), 1000, set())
        size = choice.branches[0].block_size
        sizes.add(size)
        auto.observe(round_of(1, 1, choice.branches[0].block_size, hit=True))
        auto.observe_forward(forward("verify", 1, size, 12))
        auto.observe(round_of(size, 12 if size > 8 else 8, None, hit=False))
    assert sizes == {8, 16, 32}


def round_of(size: int, committed: int, branch: int | None, hit: bool) -> RoundRecord:
    from recguide.structs import Branch, BranchRecord

    branches: tuple[BranchRecord, ...] = ()
    if branch is not None:
        made = Branch(BranchKind.CONTINUATION, size, branch)
        branches = (BranchRecord(made, 7, draft(*[0.9] * (branch - 1))),)
    return RoundRecord(
        request=0,
        index=0,
        position=0,
        seed=7,
        draft=draft(*[0.9] * (size - 1)),
        branches=branches,
        risky=(),
        accepted=committed - 1,
        committed=(7,) * committed,
        outcome=Outcome.CONTINUATION_HIT if hit else Outcome.PLAIN,
        hit=0 if hit else None,
        query_tokens=size,
        entropies=(0.1,) * committed,
    )


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


class Lengths(Hook):
    def __init__(self) -> None:
        self.drafted: list[int] = []

    def on_commit(self, record: RoundRecord) -> None:
        self.drafted += [b.branch.block_size for b in record.branches]


def test_a_policy_that_drafts_at_random_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(0)

    class Random(Auto):
        def _best_branch(self, *args: Any) -> tuple[int, float]:
            remaining = args[2]
            return min(int(torch.randint(0, 33, (1,), generator=generator)), remaining), 1.0

    from recguide.adapter import ModelAdapter
    from recguide.attention import resolve_backend
    from recguide.loop import generate
    from recguide.policy import AutoBranches
    from recguide.rounds import Method, Request

    model = toy_model()
    lengths = Lengths()
    random = Random()
    method = Method(random, AutoBranches(random, frozenset()), candidates=3)
    requests = [Request(i, [7 + i, 9, 12], 60, lambda tokens: None, method) for i in range(5)]
    generate(requests, ModelAdapter(model, resolve_backend()), [lengths])
    for i, request in enumerate(requests):
        expected = model.generate(torch.tensor([[7 + i, 9, 12]]), generation_strategy="ar", max_new_tokens=60)
        assert request.tokens == expected[0].tolist()
    assert len(set(lengths.drafted)) > 10
