"""Simulated serving: nothing is lost, times are those computed by hand, and knowing more is never worse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from recguide import ConfigError, RoundRecord
from recguide.calibration import CostProfile, Fingerprint, ProgressTable, RoundCost
from recguide.cli.main import app
from recguide.engine.scheduler import SCHEDULERS, Bucketed
from recguide.errors import InputError
from recguide.policy import AIMD, Auto, BlockPolicy, ConcurrencyTable, FixedBlock, Oracle, VerificationGuided
from recguide.simulated_model import PREDICTION, Prediction, SimulatedText, right_token
from recguide.simulator import (
    MODELS,
    POLICIES,
    Foresight,
    ForwardCosts,
    Recording,
    b200_costs,
    contenders,
    fit_recordings,
    poisson_arrivals,
    random_recordings,
    read_recordings,
    resampled,
    simulate,
    step_ms,
)
from recguide.structs import Draft, DraftSource, FinishRecord, Guess, Outcome
from recguide.trace import TraceWriter

HERE = Fingerprint("a", "float32", "cpu", "torch_sdpa", True)
COSTS = b200_costs("nld-8b")


def constant(ahead: int, tokens: int, count: int) -> list[Recording]:
    """Requests in which a block of 32 commits `ahead` tokens wherever it begins, up to the end."""
    return [Recording(np.minimum(ahead, np.arange(tokens, 0, -1)), np.full(tokens, 0.5)) for _ in range(count)]


def total(recordings: list[Recording]) -> int:
    return sum(len(recording.ahead) for recording in recordings)


class AtRandom(BlockPolicy):
    """Any block of 1 to 32, and a look at all that it is told."""

    max_block = 32

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.records: list[RoundRecord] = []
        self.ended: list[int] = []

    def block_size(self, request: int, load: int) -> int:
        return self._random.randint(1, 32)

    def observe(self, record: RoundRecord) -> None:
        self.records.append(record)

    def forget(self, request: int) -> None:
        self.ended.append(request)


# --- recordings ---


@pytest.mark.parametrize("passing", [0.0, 0.8, 1.0])
def test_random_requests_follow_the_chain_whatever_blocks_inside_of_rounds_do(passing: float) -> None:
    recordings = random_recordings(400, 0, passing=passing)
    counts = np.zeros((3, 3))
    for recording in recordings:
        assert sum(recording.committed) == len(recording.ahead) == len(recording.entropies)
        # The last may be cut by the end.
        intervals = [(n > 8) + (n > 16) for n in recording.committed[:-1]]
        for before, after in pairwise(intervals):
            counts[before, after] += 1
    shares = counts / counts.sum(axis=1, keepdims=True)
    assert shares == pytest.approx(
        np.array([[0.703, 0.1811, 0.116], [0.5839, 0.2242, 0.1919], [0.2083, 0.1251, 0.6666]]), abs=0.03
    )


def test_inside_of_a_round_is_left_what_it_has_or_the_next_one_too() -> None:
    never, always = (random_recordings(50, 3, passing=share) for share in (0.0, 1.0))
    assert [one.committed for one in never] == [one.committed for one in always]
    for without, past in zip(never, always, strict=True):
        starts = np.cumsum([0, *without.committed])
        for written, (left, further) in enumerate(zip(without.ahead, past.ahead, strict=True)):
            round_ = int(np.searchsorted(starts, written, side="right")) - 1
            assert left == starts[round_ + 1] - written
            if written == starts[round_]:
                assert further == left
            elif round_ + 2 < len(starts) - 1:
                assert further == min(32, left + without.committed[round_ + 1])


def test_prediction_is_what_entropies_say_of_what_comes() -> None:
    known = []
    for prediction in (0.0, 0.5, 1.0):
        recordings = random_recordings(300, 0, prediction)
        pairs = [
            (-np.log(r.entropies[end - 1]), after)
            for r in recordings
            for end, before, after in zip(np.cumsum(r.committed), r.committed, r.committed[1:-1], strict=False)
            if before < 32
        ]
        known.append(float(np.corrcoef(np.array(pairs).T)[0, 1]))
    # Less than the parameter: what follows a rejection varies less than all rounds do.
    assert known == pytest.approx([0.0, 0.44, 1.0], abs=0.03)


def test_the_same_seed_is_the_same_requests_and_another_is_not() -> None:
    first, again, other = (random_recordings(30, seed) for seed in (5, 5, 6))
    assert all(np.array_equal(a.ahead, b.ahead) for a, b in zip(first, again, strict=True))
    assert all(np.array_equal(a.entropies, b.entropies) for a, b in zip(first, again, strict=True))
    assert [len(a.ahead) for a in first] != [len(a.ahead) for a in other]
    for wrong in (-0.1, 1.1):
        with pytest.raises(ConfigError, match="prediction must be a number from 0 to 1"):
            random_recordings(3, 0, prediction=wrong)
        with pytest.raises(ConfigError, match="passing must be a number from 0 to 1"):
            random_recordings(3, 0, passing=wrong)


def traced(request: int, block: int, committed: int, entropies: int | None = None) -> RoundRecord:
    draft = Draft((Guess(7, (), 1.0, 0.0),) * (block - 1))
    nats = tuple(0.1 * i for i in range(committed if entropies is None else entropies))
    return RoundRecord(
        request, 0, 0, 7, draft, (), (), committed - 1, (7,) * committed, Outcome.PLAIN, None, block, nats
    )


def write(path: Path, *requests: list[RoundRecord]) -> Path:
    with TraceWriter(path) as trace:
        for rounds in requests:
            for record in rounds:
                trace.on_commit(record)
            new = sum(len(record.committed) for record in rounds)
            trace.on_finish(FinishRecord(rounds[0].request, "eos", 5, new))
    return path


def test_a_trace_is_read_request_by_request(tmp_path: Path) -> None:
    # Two calls of `generate` number their requests alike; one is under way when the other begins.
    path = write(tmp_path / "trace.jsonl", [traced(0, 32, 3), traced(0, 32, 32), traced(0, 20, 2)], [traced(0, 32, 4)])
    first, second = read_recordings(path, 0, passing=0.0)
    assert first.committed == (3, 32, 2)
    assert second.committed == (4,)
    assert list(first.ahead[:6]) == [3, 2, 1, 32, 31, 30]
    assert first.entropies[:5] == pytest.approx([0.0, 0.1, 0.2, 0.0, 0.1])
    drawn = resampled([first, second], 20, 1)
    assert {id(one) for one in drawn} == {id(first), id(second)}


@pytest.mark.parametrize(
    "rounds",
    [[traced(0, 16, 3)], [traced(0, 32, 3), traced(0, 8, 3), traced(0, 16, 3)], [traced(0, 32, 3, entropies=0)]],
)
def test_a_trace_of_other_blocks_or_without_entropies_is_refused(tmp_path: Path, rounds: list[RoundRecord]) -> None:
    with pytest.raises(InputError, match="expected blocks of 32 and an entropy of each token"):
        read_recordings(write(tmp_path / "trace.jsonl", rounds), 0)


def test_a_trace_without_an_end_is_refused(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        trace.on_commit(traced(0, 32, 3))
    with pytest.raises(InputError, match="no request that was recorded to its end"):
        read_recordings(tmp_path / "trace.jsonl", 0)


# --- drafts ---


def rights(predictions: list[Prediction], place: int) -> list[bool]:
    return [tokens[0] == right_token(place + i) for i, (tokens, _) in enumerate(predictions)]


def leading(flags: list[bool]) -> int:
    return next((i for i, flag in enumerate(flags) if not flag), len(flags))


TEXTS = random_recordings(40, 11)


@given(st.sampled_from(TEXTS), st.data())
def test_a_draft_is_right_as_far_as_its_block_would_be_accepted(recording: Recording, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(recording.ahead) - 1))
    count = data.draw(st.integers(1, 32))
    drafted = recording.text.drafted(place, count, sound=True)
    assert len(drafted) == count
    ahead = int(recording.ahead[place])
    right = leading(rights(drafted, place))
    if place >= 31 and ahead == 1 and recording.ahead[place - 31] == 32:
        # Behind a full block a continuation may know better, as far as the next place's block.
        further = 1 + int(recording.ahead[place + 1]) if place + 1 < len(recording.ahead) else 1
        assert right in (0, min(further - 1, count))
    elif ahead < 32:
        assert right == min(ahead - 1, count)
    else:
        assert right >= min(31, count)
    for tokens, (first, second) in drafted:
        assert len({*tokens}) == 3
        assert 0 <= second <= first <= 1
        assert first + second <= 1 + 1e-12
    longer = recording.text.drafted(place, 32, sound=True)
    assert longer[:count] == drafted, "a longer draft is the same as far as it goes"


@given(st.sampled_from(TEXTS), st.data())
def test_what_follows_a_wrong_token_is_the_rest_of_the_draft_that_had_it(
    recording: Recording, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(recording.ahead) - 1))
    drafted = recording.text.drafted(place, 32, sound=True)
    error = leading(rights(drafted, place))
    if error < 31:
        behind = place + error + 1
        assert recording.text.drafted(behind, 31 - error, sound=False) == drafted[error + 1 :]
    assert not any(rights(recording.text.drafted(len(recording.ahead), 20, sound=True), len(recording.ahead))[:1])


def test_how_often_drafts_are_right_is_as_measured_and_published() -> None:
    recordings = random_recordings(250, 5)
    after_full, after_error, second, third = [], [], [], []
    for recording in recordings:
        ahead, text = recording.ahead, recording.text
        for start in np.cumsum([0, *recording.committed])[:-2].tolist():
            drafted = text.drafted(start, 32, sound=True)
            right = rights(drafted, start)
            error = leading(right)
            if ahead[start] == 32:
                after_full += rights(text.drafted(start + 31, 1, sound=True), start + 31)
            elif error < 32:
                tokens = drafted[error][0]
                second.append(tokens[1] == right_token(start + error))
                third.append(tokens[2] == right_token(start + error))
                if error < 31 and start + error + 1 < len(ahead) and ahead[start + error + 1] > 1:
                    after_error.append(right[error + 1])
    assert np.mean(after_full) == pytest.approx(0.95, abs=0.02)
    assert np.mean(after_error) == pytest.approx(0.71, abs=0.04)
    assert (np.mean(second), np.mean(third)) == pytest.approx((0.575, 0.158), abs=0.03)


def test_probabilities_say_as_much_as_they_are_told_to() -> None:
    """The area under the curve: how often a right token is likelier than a wrong one."""
    areas = []
    for prediction in (0.0, PREDICTION / 2, PREDICTION, 1.0):
        pairs: dict[bool, list[float]] = {True: [], False: []}
        for recording in random_recordings(30, 2, prediction):
            for start in np.cumsum([0, *recording.committed])[:-1].tolist():
                drafted = recording.text.drafted(start, 31, sound=True)
                for right, (_, (probability, _)) in zip(rights(drafted, start), drafted, strict=True):
                    pairs[right].append(probability)
        right, wrong = (np.array(pairs[flag]) for flag in (True, False))
        areas.append(float((np.sort(wrong).searchsorted(right) / len(wrong)).mean()))
    assert areas[0] == pytest.approx(0.5, abs=0.02)
    assert areas == sorted(areas)
    assert areas[2] > 0.85
    assert areas[3] == pytest.approx(1, abs=1e-3)


def test_the_same_seed_is_the_same_drafts_and_another_is_not() -> None:
    recording = TEXTS[0]
    first, again, other = (
        SimulatedText(recording.ahead, recording.entropies, seed, 0.3).drafted(0, 32, sound=True)
        for seed in ((1, 2), (1, 2), (1, 3))
    )
    assert first == again != other


# --- costs ---


def test_published_costs() -> None:
    for model in MODELS:
        costs = b200_costs(model)
        assert costs.block_sizes == (8, 16, 32)
        assert "B200" in costs.environment["source"]
        assert {cost.context for cost in costs.rounds} == {0}
    assert COSTS.round_ms(32, 16) == 28.95
    assert b200_costs("nld-14b").round_ms(128, 32) == 200.57
    with pytest.raises(ConfigError, match="nld-8b, nld-14b"):
        b200_costs("nld-70b")


@given(st.lists(st.integers(1, 32), min_size=1, max_size=130), st.integers(0, 200))
def test_a_packed_round_costs_no_less_for_longer_blocks_and_no_more_than_a_padded_one(
    blocks: list[int], longer: int
) -> None:
    which = longer % len(blocks)
    raised = [min(32, size + 5) if i == which else size for i, size in enumerate(blocks)]
    packed = step_ms(COSTS, blocks, packed=True)
    assert packed <= step_ms(COSTS, raised, packed=True)
    assert packed <= step_ms(COSTS, blocks, packed=False)


def test_rounds_of_one_measured_size_cost_what_was_measured() -> None:
    for size in (8, 16, 32):
        for packed in (True, False):
            assert step_ms(COSTS, [size] * 48, packed) == pytest.approx(COSTS.round_ms(48, size))
    assert step_ms(COSTS, [8, 16], packed=True) == pytest.approx((10.96 + 12.26) / 2)
    assert step_ms(COSTS, [8, 16], packed=False) == 12.26
    assert step_ms(COSTS, [3, 9], packed=False) == 12.26, "a shape that was measured"


def test_a_forward_is_half_a_round_by_its_query_tokens() -> None:
    costs = ForwardCosts(COSTS)
    for size in (8, 16, 32):
        for packed in (True, False):
            assert costs.ms([size] * 48, packed) == pytest.approx(COSTS.round_ms(48, size) / 2)
    assert costs.ms([8, 16], packed=True) == pytest.approx((10.96 + 12.26) / 4)
    assert costs.ms([1, 23], packed=True) == costs.ms([12, 12], packed=True)
    assert costs.ms([64], packed=True) == pytest.approx((11.17 + 2 * (11.17 - 10.24)) / 2), "the line goes on"
    assert costs.ms([1] * 128, packed=True) == pytest.approx((48.55 - 7 / 8 * (76.84 - 48.55)) / 2), "at both ends"
    assert costs.ms([3, 9], packed=False) == 12.26 / 2
    assert costs.ms([40, 2], packed=False) == costs.ms([40, 40], packed=True)
    # Plain decoding was measured: a round of it is one forward.
    measured = ForwardCosts(CostProfile(HERE, (RoundCost(1, 1, 0, 0.0, 5.0), RoundCost(1, 8, 0, 9.0, 6.0))))
    assert [measured.ms([tokens], packed=True) for tokens in (1, 8)] == [5.0, 6.0]
    assert ForwardCosts(CostProfile(HERE, (RoundCost(1, 8, 0, 9.0, 6.0),))).ms([20], packed=True) == 6.0


# --- serving ---


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_one_that_decides_at_random_serves_everybody_whole(scheduler: str) -> None:
    recordings = random_recordings(60, 1)
    policy = AtRandom(2)
    served = simulate(recordings, policy, COSTS, scheduler, 8)
    assert served.tokens == total(recordings)
    assert sorted(policy.ended) == list(range(60))
    written = [0] * 60
    for record in policy.records:
        recording, start = recordings[record.request], written[record.request]
        assert record.position == start
        assert len(record.committed) == min(recording.ahead[start], record.block_size)
        if record.block_size > 1:
            assert record.entropies == tuple(recording.entropies[start : start + len(record.committed)])
        written[record.request] += len(record.committed)
        assert (record.outcome is Outcome.STOPPED) == (written[record.request] == len(recording.ahead))
    assert written == [len(recording.ahead) for recording in recordings]
    assert sum(served.block_share.values()) == pytest.approx(1)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("block", "a_round"), [(8, 8), (16, 10), (32, 10)])
def test_a_fixed_block_with_constant_acceptance_takes_the_time_computed_by_hand(
    scheduler: str, block: int, a_round: int
) -> None:
    recordings = constant(10, 400, 32)
    served = simulate(recordings, FixedBlock(block), COSTS, scheduler, 16)
    rounds = 400 / a_round
    ms = COSTS.round_ms(16, block)
    # All begin and end together, twice; the second time none is waiting.
    assert served.tokens_per_s == pytest.approx(16 * a_round / ms * 1000)
    assert served.seconds == pytest.approx(2 * rounds * ms / 1000)
    assert served.per_request_tokens_per_s == pytest.approx(served.tokens_per_s / 16)
    assert served.round_ms == pytest.approx(ms)
    assert served.block_share == {block: 1.0}
    assert (served.requests_per_round, served.longest_wait) == (16, 0)


def test_buckets_are_priced_by_who_is_in_them() -> None:
    """Two requests, one of them with blocks of 8: each round is one of a single request."""

    class OneAtEight(FixedBlock):
        def block_size(self, request: int, load: int) -> int:
            return 8 if request == 1 else 32

    served = simulate(constant(4, 40, 4), OneAtEight(32), COSTS, "bucketed", 2)
    assert served.requests_per_round < 1.6
    assert served.block_share.keys() == {8, 32}
    packed = simulate(constant(4, 40, 4), OneAtEight(32), COSTS, "packed", 2)
    assert packed.requests_per_round == 2
    assert packed.tokens_per_s > 1.3 * served.tokens_per_s


def test_nobody_waits_longer_than_the_bound() -> None:
    bound = SCHEDULERS["bucketed"](8)
    assert isinstance(bound, Bucketed)
    served = simulate(random_recordings(60, 4), AtRandom(4), COSTS, "bucketed", 16)
    assert 0 < served.mean_wait < served.longest_wait <= bound.longest_wait


def test_the_same_seed_is_the_same_service() -> None:
    runs = [simulate(random_recordings(50, 9), AIMD(), COSTS, "bucketed", 8) for _ in range(2)]
    assert runs[0] == runs[1]


def test_requests_that_come_seldom_do_not_meet() -> None:
    recordings = constant(10, 40, 12)
    seldom = simulate(recordings, FixedBlock(16), COSTS, "packed", 4, [1000.0 * i for i in range(12)])
    ms = 4 * COSTS.round_ms(1, 16)
    assert seldom.requests_per_round == 1
    assert seldom.queue_ms == 0
    assert seldom.per_request_tokens_per_s == pytest.approx(40_000 / ms)
    assert seldom.seconds == pytest.approx(11 + ms / 1000)
    crowded = simulate(recordings, FixedBlock(16), COSTS, "packed", 4, poisson_arrivals(12, 1e6, 0))
    assert crowded.queue_ms > 0
    assert crowded.requests_per_round > 3.5
    arrivals = poisson_arrivals(20_000, 50, 1)
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] == pytest.approx(400_000, rel=0.05)


def test_what_cannot_be_served_is_refused() -> None:
    recordings = constant(4, 40, 4)
    with pytest.raises(ConfigError, match="packed"):
        simulate(recordings, FixedBlock(8), COSTS, "fair", 2)
    for wrong in (0, 4):
        with pytest.raises(ConfigError, match="below the number of requests, 4"):
            simulate(recordings, FixedBlock(8), COSTS, "packed", wrong)
    with pytest.raises(ConfigError, match="blocks of 64; costs were measured up to 32"):
        simulate(recordings, FixedBlock(64), COSTS, "packed", 2)


# --- policies ---


@pytest.fixture(scope="module")
def table() -> ProgressTable:
    return fit_recordings(random_recordings(100, 1), HERE)


@pytest.mark.parametrize("load", [4, 32, 128])
def test_knowing_what_will_be_accepted_is_worth_most(load: int, table: ProgressTable) -> None:
    recordings = random_recordings(load + 60, 0)
    # Of those that draft in forwards of their own.
    makers = contenders([name for name in POLICIES if name != "auto"], COSTS, recordings, lambda: table)
    assert list(makers) == [
        "fixed-8",
        "fixed-16",
        "fixed-32",
        "concurrency_table",
        "aimd",
        "verification_guided",
        "oracle",
    ]
    speeds = {name: simulate(recordings, make(), COSTS, "packed", load).tokens_per_s for name, make in makers.items()}
    assert max(speeds, key=lambda name: speeds[name]) == "oracle"
    fixed = max(speed for name, speed in speeds.items() if name.startswith("fixed-"))
    assert speeds["oracle"] > 1.05 * fixed
    assert speeds["verification_guided"] > 0.97 * fixed


def test_foresight_is_the_oracle_where_nothing_gets_past_a_round() -> None:
    recordings = random_recordings(60, 2, passing=0.0)
    known = {i: recording.committed for i, recording in enumerate(recordings)}
    ours, theirs = Foresight(recordings, COSTS), Oracle(known, COSTS)
    assert simulate(recordings, ours, COSTS, "packed", 16) == simulate(recordings, theirs, COSTS, "packed", 16)


def test_better_prediction_is_worth_more() -> None:
    speeds = []
    for prediction in (0.0, 1.0):
        table = fit_recordings(random_recordings(100, 1, prediction), HERE)
        recordings = random_recordings(120, 0, prediction)
        speeds.append(simulate(recordings, VerificationGuided(table, COSTS), COSTS, "packed", 32).tokens_per_s)
    assert speeds[1] > 1.02 * speeds[0]


# --- auto ---


class Told(Auto):
    """`auto`, and all that it is told."""

    records: list[RoundRecord]

    def observe(self, record: RoundRecord) -> None:
        super().observe(record)
        self.records.append(record)


def flat(each: float) -> CostProfile:
    """Forwards of 5 ms and so many for each further query token of a request; plain decoding has one a round, others two."""
    sizes = (1, 8, 16, 32)
    return CostProfile(
        HERE,
        tuple(
            RoundCost(load, size, 0, (size > 1) * (5 + each * size), 5 + each * (size - 1))
            for load in (1, 64)
            for size in sizes
        ),
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_auto_runs_the_rounds_of_the_engine_to_the_end_of_every_text(scheduler: str, table: ProgressTable) -> None:
    recordings = random_recordings(16, 1)
    policy = Told(table, COSTS)
    policy.records = []
    served = simulate(recordings, policy, COSTS, scheduler, 6)
    assert served.tokens == total(recordings)
    written = [0] * len(recordings)
    for record in policy.records:
        place = written[record.request]
        assert record.position == place
        assert list(record.committed) == [right_token(place + i) for i in range(len(record.committed))]
        assert record.accepted == leading(
            [token == right_token(place + i) for i, token in enumerate(record.draft.tokens)]
        )
        written[record.request] += len(record.committed)
    assert written == [len(recording.ahead) for recording in recordings]
    sources = {record.draft.source for record in policy.records}
    assert {DraftSource.BRANCH, DraftSource.LEFTOVER} <= sources
    assert sum(served.block_share.values()) == pytest.approx(1)


def test_auto_on_the_same_seed_is_the_same_service(table: ProgressTable) -> None:
    first, again, other = (
        simulate(random_recordings(8, seed), Auto(table, COSTS), COSTS, "packed", 4) for seed in (9, 9, 10)
    )
    assert first == again != other


def test_auto_gains_where_tokens_are_cheap(table: ProgressTable) -> None:
    recordings, costs = random_recordings(14, 3), flat(0.02)
    plain = simulate(recordings, FixedBlock(1), costs, "packed", 4).tokens_per_s
    assert simulate(recordings, Auto(table, costs), costs, "packed", 4).tokens_per_s > 3 * plain


@pytest.mark.parametrize("each", [0.5, 5.0])
def test_auto_loses_little_where_tokens_are_dear_and_drafts_say_nothing(each: float) -> None:
    costs = flat(each)
    blind = fit_recordings(random_recordings(40, 4, prediction=0.0), HERE)
    assert max(blind.odds.accepted[0]) - min(blind.odds.accepted[0]) < 0.2
    recordings = random_recordings(14, 5, prediction=0.0)
    plain = simulate(recordings, FixedBlock(1), costs, "packed", 8).tokens_per_s
    assert simulate(recordings, Auto(blind, costs), costs, "packed", 8).tokens_per_s > 0.93 * plain


def test_auto_is_told_by_other_requests_how_sure_drafts_are(table: ProgressTable) -> None:
    """Not quite calibrated, as with the embedded model's own drafts (0.015): tokens of a draft are not independent."""
    assert table.odds.accepted
    assert table.quality["acceptance"]["calibration_error"] < 0.06
    assert all(rates[0] < 0.75 and rates[-1] > 0.95 for rates in table.odds.accepted)


def test_plain_decoding_takes_part_where_it_was_measured() -> None:
    costs = CostProfile(HERE, tuple(RoundCost(load, size, 0, size / 2, 5.0) for load in (1, 8) for size in (1, 8)))
    recordings = constant(4, 40, 12)
    makers = contenders(["fixed"], costs, recordings, lambda: fit_recordings([], HERE))
    assert list(makers) == ["ar", "fixed-8"]
    served = simulate(recordings, makers["ar"](), costs, "packed", 4)
    assert served.tokens_per_s == pytest.approx(4 / 5.5 * 1000)
    with pytest.raises(ConfigError, match="fixed, concurrency_table"):
        contenders(["magic"], costs, recordings, lambda: fit_recordings([], HERE))


def test_the_concurrency_table_is_the_fixed_block_of_its_load() -> None:
    recordings = random_recordings(80, 0)
    for load, block in ((2, 32), (16, 16), (64, 8)):
        table, fixed = (
            simulate(recordings, policy, COSTS, "bucketed", load).tokens_per_s
            for policy in (ConcurrencyTable(), FixedBlock(block))
        )
        assert table == fixed


# --- the command ---

runner = CliRunner()


def call(*arguments: str) -> Any:
    return runner.invoke(app, ["simulate", *arguments], env={"COLUMNS": "200"})


def test_the_command_writes_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.simulator.FIT_REQUESTS", 60)
    file = tmp_path / "figures.json"
    arguments = ["--model", "nld-8b", "--concurrency", "2,8", "--requests", "16", "--schedulers", "packed,padded"]
    result = call(*arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    record = json.loads(file.read_text())
    assert list(record) == ["assumptions", "runs", "summary"]
    assert "arXiv 2609.34388" in record["assumptions"]["acceptance"]
    assert len(record["runs"]) == 2 * 2 * 8
    assert record["runs"][0].keys() >= {
        "model", "policy", "scheduler", "concurrency", "tokens_per_s", "per_request_tokens_per_s", "block_share",
    }  # fmt: skip
    packed = record["summary"]["nld-8b"]["schedulers"]["packed"]
    assert packed["best_fixed"] == {"2": "fixed-32", "8": "fixed-32"}
    assert packed["policies"]["concurrency_table"]["over_concurrency_table"] == 1
    speeds = {(r["scheduler"], r["policy"], r["concurrency"]): r["tokens_per_s"] for r in record["runs"]}
    ours = [speeds["packed", "verification_guided", load] / speeds["packed", "fixed-32", load] for load in (2, 8)]
    gains = packed["policies"]["verification_guided"]
    assert gains["over_best_fixed"] == pytest.approx(sum(ours) / 2)
    assert gains["least_over_best_fixed"] == pytest.approx(min(ours))
    gap = packed["policies"]["oracle"]["over_best_fixed"] - 1
    assert gains["oracle_gain_closed"] == pytest.approx((sum(ours) / 2 - 1) / gap)
    assert packed["oracle_gap"] == gap
    against = packed["auto_over_verification_guided"]
    assert list(against) == ["2", "8", "mean"]
    assert against["8"] == speeds["packed", "auto", 8] / speeds["packed", "verification_guided", 8]
    assert against["mean"] == pytest.approx((against["2"] + against["8"]) / 2)
    assert "recguide-tiny" in record["assumptions"]["drafts of auto"]
    assert f"The oracle gains {gap:.1%}" in result.output
    assert packed["table_4"]["8"]["printed"] == [3.7, 36.96, 59.34]
    assert sum(packed["table_4"]["8"]["simulated"]) == pytest.approx(100)
    table = record["summary"]["nld-8b"]["table_6"]
    assert {row: figures["printed"] for row, figures in table.items()} == {
        "fixed block": 4725, "+s": 5221, "+z": 5254, "+bucketing": 6608,
    }  # fmt: skip
    assert table["+z"]["simulated"] == pytest.approx(
        sum(speeds["padded", "verification_guided", load] for load in (2, 8)) / 2
    )
    assert table["+bucketing"]["simulated"] is None
    assert "Table 4" in result.output
    assert "lognormal" in result.output


def test_the_command_tells_what_prediction_is_worth_to_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recguide.simulator.FIT_REQUESTS", 30)
    file = tmp_path / "figures.json"
    arguments = ["--model", "nld-8b", "--concurrency", "4", "--requests", "10", "--schedulers", "packed"]
    result = call(*arguments, "--policies", "fixed", "--prediction", "0.2", "--sensitivity", "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())["summary"]["nld-8b"]["prediction"]
    assert list(found) == ["0.0", "0.1", "0.2", "1.0"]
    for by_load in found.values():
        assert list(by_load) == ["4"]
        assert by_load["4"].keys() == {"tokens_per_s", "over_verification_guided", "over_best_fixed"}
    assert found["1.0"]["4"]["tokens_per_s"] > found["0.0"]["4"]["tokens_per_s"]
    assert "prediction 0.1" in result.output


def test_the_command_serves_a_trace_and_draws(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    requests = [[traced(0, 32, 1 + (i * j) % 32) for j in range(1, 12)] for i in range(1, 13)]
    trace, picture = write(tmp_path / "trace.jsonl", *requests), tmp_path / "frontier.png"
    arguments = [
        "--model",
        "nld-14b",
        "--trace",
        str(trace),
        "--requests",
        "12",
        "--concurrency",
        "2,4",
        "--schedulers",
        "packed",
    ]
    result = call(*arguments, "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "trace.jsonl" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nld-70b"], "--model must be of nld-8b, nld-14b"),
        (["--policies", "fixed,magic"], "--policies must be of fixed"),
        (["--schedulers", "fair"], "--schedulers must be of"),
        (["--concurrency", "two"], "--concurrency must be whole numbers"),
        (["--concurrency", "64", "--requests", "64"], "--requests must be more than the largest concurrency, 64"),
        (["--prediction", "2"], "prediction must be a number from 0 to 1"),
        (["--trace", "/no/such/file"], "/no/such/file"),
        (["--trace", "x", "--prediction", "0"], "--prediction is about random requests"),
        (["--trace", "x", "--sensitivity"], "--sensitivity is about random requests"),
    ],
)
def test_a_mistake_ends_with_its_reason(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
