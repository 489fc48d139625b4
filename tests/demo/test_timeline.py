"""From records to a picture's structure: who came how, which branch was hit, where it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recguide.demo.timeline import OUTCOMES, SOURCES, Came, Timeline, timelines
from recguide.structs import (
    Branch,
    BranchKind,
    BranchRecord,
    Draft,
    DraftSource,
    FinishRecord,
    ForwardRecord,
    Guess,
    Outcome,
    RoundRecord,
)
from recguide.trace import Record

CORRECTION, CONTINUATION, ANY_BONUS = BranchKind.CORRECTION, BranchKind.CONTINUATION, BranchKind.ANY_BONUS


def text_of(token: int) -> str:
    return f"<{token}>"


def guess(token: int, probability: float = 0.9) -> Guess:
    return Guess(token, (token + 100, token + 200), probability, 0.05)


def draft(*tokens: int, source: DraftSource = DraftSource.FORWARD) -> Draft:
    return Draft(tuple(guess(token) for token in tokens), source)


def forward(kind: str, query_tokens: int, *requests: int) -> tuple[str, ForwardRecord]:
    event = "verify" if kind in ("verify", "fused") else kind
    return event, ForwardRecord(kind, requests or (0,), query_tokens, 0.01, 0.012)


REJECTED = RoundRecord(
    request=0,
    index=0,
    position=10,
    seed=1,
    draft=draft(2, 3, 4),
    branches=(
        BranchRecord(Branch(CORRECTION, 2, 4, 103), 103, draft(31, 32, 33, source=DraftSource.BRANCH)),
        BranchRecord(Branch(CONTINUATION, 4, 4), 5, draft(51, 52, 53, source=DraftSource.BRANCH)),
    ),
    risky=(2,),
    accepted=1,
    committed=(2, 103),
    outcome=Outcome.CORRECTION_1_HIT,
    hit=0,
    query_tokens=12,
    entropies=(0.1, 0.7),
)
FULL = RoundRecord(
    request=0,
    index=1,
    position=12,
    seed=103,
    draft=draft(31, 32, 33, source=DraftSource.BRANCH),
    branches=(BranchRecord(Branch(CONTINUATION, 4, 4), 60, draft(61, 62, 63, source=DraftSource.BRANCH)),),
    risky=(),
    accepted=3,
    committed=(31, 32, 33, 66),
    outcome=Outcome.CONTINUATION_WRONG_TOKEN,
    hit=None,
    query_tokens=8,
    entropies=(0.2, 0.3, 0.4, 0.5),
)
EVENTS: list[tuple[str, Record]] = [
    forward("prefill", 10),
    forward("draft", 4),
    forward("fused", 12),
    ("commit", REJECTED),
    forward("fused", 8),
    ("commit", FULL),
    ("finish", FinishRecord(0, "length", 10, 7)),
]


def only(events: list[tuple[str, Record]]) -> Timeline:
    (timeline,) = timelines(events, text_of)
    return timeline


def test_a_rejected_block_and_its_branches() -> None:
    step = only(EVENTS).steps[0]
    assert [(c.column, c.text, c.came.value) for c in step.block] == [
        (0, "<1>", "seed"),
        (1, "<2>", "accepted"),
        (2, "<3>", "rejected"),
        (3, "<4>", "rejected"),
    ]
    assert step.own is not None
    assert (step.own.column, step.own.text, step.own.came) == (2, "<103>", Came.CORRECTION)
    assert step.own.guess == guess(3), "what the drafter had said of the place"
    assert [(lane.name, lane.leaves, lane.hit, lane.used) for lane in step.lanes] == [
        ("correction at 2", 2, True, 2),
        ("continuation at 4", 4, False, None),
    ]
    assert [(c.column, c.text) for c in step.lanes[0].cells] == [(2, "<103>"), (3, "<31>"), (4, "<32>"), (5, "<33>")]
    assert (step.risky, step.accepted, step.committed, step.via) == ((2,), 1, 2, None)
    assert [f.kind for f in step.forwards] == ["draft", "fused"]
    assert step.query_tokens == 4 + 12


def test_a_hit_branch_is_the_next_block() -> None:
    first, second = only(EVENTS).steps
    assert second.via == "correction at 2"
    assert first.hit is not None
    seed = next(cell for cell in first.hit.cells if cell.column == first.hit.used)
    assert seed.text == second.block[0].text
    assert [c.text for c in first.hit.cells if c.column > seed.column] == [c.text for c in second.block[1:]]


def test_a_whole_block_ends_with_its_bonus() -> None:
    step = only(EVENTS).steps[1]
    assert [c.came for c in step.block] == [Came.SEED, Came.ACCEPTED, Came.ACCEPTED, Came.ACCEPTED]
    assert step.own is not None
    assert (step.own.column, step.own.came, step.own.guess, step.own.entropy) == (4, Came.BONUS, None, 0.5)
    assert step.hit is None


def test_the_answer_is_all_that_was_committed() -> None:
    written = only(EVENTS).written
    assert [one.token for one in written] == [1, 2, 103, 31, 32, 33, 66]
    assert [one.cell.came.value for one in written] == ["seed", "accepted", "correction", *["accepted"] * 3, "bonus"]
    assert [one.round for one in written] == [None, 1, 1, 2, 2, 2, 2]
    assert [one.cell.entropy for one in written] == [None, 0.1, 0.7, 0.2, 0.3, 0.4, 0.5]


def test_counts_are_those_of_the_rounds() -> None:
    counts = only(EVENTS).counts
    assert (counts.tokens, counts.rounds, counts.reused, counts.forwards, counts.query_tokens) == (6, 2, 1, 3, 24)
    assert counts.tokens_per_forward == 2
    assert counts.saved_against_ar == 3
    assert counts.saved_against_linear == 1, "two rounds with a draft forward each would be four forwards"


def test_plain_decoding_saves_nothing() -> None:
    plain = replace(
        FULL,
        draft=Draft(),
        branches=(),
        accepted=0,
        committed=(9,),
        outcome=Outcome.PLAIN,
        query_tokens=1,
        entropies=(),
    )
    counts = only([forward("prefill", 3), forward("verify", 1), ("commit", plain)]).counts
    assert (counts.saved_against_ar, counts.saved_against_linear, counts.query_tokens) == (0, 0, 1)


def test_a_request_that_ends_inside_its_block_has_no_token_of_the_verifiers_own() -> None:
    stopped = replace(REJECTED, accepted=1, committed=(2,), outcome=Outcome.STOPPED, hit=None, entropies=(0.1,))
    timeline = only([forward("prefill", 10), forward("verify", 4), ("commit", stopped)])
    assert timeline.steps[0].own is None
    assert [one.token for one in timeline.written] == [1, 2]


def test_a_foretold_branch_goes_on_behind_what_it_foretold() -> None:
    foretold = replace(
        FULL,
        branches=(BranchRecord(Branch(CORRECTION, 2, 4, 32), 32, draft(33, 66, 67, source=DraftSource.BRANCH)),),
        outcome=Outcome.FORETOLD_HIT,
        hit=0,
    )
    (lane,) = only([forward("prefill", 3), forward("fused", 8), ("commit", foretold)]).steps[0].lanes
    assert lane.used == 4
    assert next(c.text for c in lane.cells if c.column == 4) == "<66>", "the bonus, which it had drafted"


def test_in_the_quadratic_layout_the_bonus_stands_before_the_used_draft() -> None:
    layout = replace(
        FULL,
        branches=tuple(BranchRecord(Branch(ANY_BONUS, d, 4), 90 + d, draft(70, 71, 72)) for d in (1, 2, 3, 4)),
        outcome=Outcome.ANY_BONUS_HIT,
        hit=3,
    )
    lanes = only([forward("prefill", 3), forward("fused", 20), ("commit", layout)]).steps[0].lanes
    assert [lane.cells[0].text for lane in lanes] == ["<91>", "<92>", "<93>", "<66>"]


def test_requests_are_told_apart_also_where_an_id_comes_again() -> None:
    other = replace(FULL, request=1)
    events = [
        forward("prefill", 13, 0, 1),
        forward("fused", 20, 0, 1),
        ("commit", REJECTED),
        ("commit", other),
        ("finish", FinishRecord(0, "length", 10, 3)),
        forward("prefill", 10),
        forward("verify", 4),
        ("commit", REJECTED),
    ]
    found = timelines(events, text_of)
    assert [(one.request, len(one.steps), one.finish is not None) for one in found] == [
        (0, 1, True),
        (1, 1, False),
        (0, 1, False),
    ]
    assert [len(f.requests) for f in found[1].steps[0].forwards] == [2]


def test_an_empty_trace_has_no_request() -> None:
    assert timelines([], text_of) == []


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_is_explained(outcome: Outcome) -> None:
    assert OUTCOMES[outcome].endswith(".")


@pytest.mark.parametrize("source", DraftSource)
def test_every_source_is_explained(source: DraftSource) -> None:
    assert SOURCES[source]
