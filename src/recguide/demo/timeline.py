"""From the records of a request to what a picture of its rounds shows. Pure: no model, no drawing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..structs import BranchKind, BranchRecord, DraftSource, FinishRecord, ForwardRecord, Guess, Outcome, RoundRecord
from ..trace import Record

TextOf = Callable[[int], str]
"""A token's text."""


class Came(StrEnum):
    """How a token came to stand where it stands."""

    SEED = "seed"
    """Certain before the round began. In an answer only its first token, which the prefill wrote."""
    ACCEPTED = "accepted"
    """Drafted, and the verifier agreed."""
    CORRECTION = "correction"
    """The verifier's own, in the place of a drafted token that it rejected."""
    BONUS = "bonus"
    """The verifier's own, behind a block that was accepted as a whole. In plain decoding every token."""
    REJECTED = "rejected"
    """Drafted, and not committed."""
    DRAFTED = "drafted"
    """On a branch: what would come next."""


@dataclass(frozen=True)
class Cell:
    """
    A token in a round's picture.

    Args:
        column (`int`): place in the block, the seed's is 0.
        text (`str`), came (`Came`): the token.
        guess (`Guess`, *optional*): what the drafter knew of the place.
        second (`str`, *optional*): text of the drafter's second choice.
        entropy (`float`, *optional*): of the verifier there, in nats.
    """

    column: int
    text: str
    came: Came
    guess: Guess | None = None
    second: str | None = None
    entropy: float | None = None


@dataclass(frozen=True)
class Lane:
    """
    A branch in a round's picture.

    Args:
        kind (`BranchKind`): what it supposes.
        leaves (`int`): column where it leaves the block; its first cell stands there.
        cells (`tuple[Cell]`): the token that it supposes there, then what it drafted.
        hit (`bool`): whether the round ended as it supposed.
        used (`int`): of a hit branch, the column whose token is the next round's seed.
    """

    kind: BranchKind
    leaves: int
    cells: tuple[Cell, ...]
    hit: bool = False
    used: int | None = None

    @property
    def name(self) -> str:
        names = {
            BranchKind.CORRECTION: "correction",
            BranchKind.CONTINUATION: "continuation",
            BranchKind.ANY_BONUS: "any bonus",
        }
        return f"{names[self.kind]} at {self.leaves}"


@dataclass(frozen=True)
class Step:
    """
    A round, ready to be drawn.

    Args:
        number (`int`): from 1.
        position (`int`): of its seed among all tokens, the prompt's included.
        source (`DraftSource`): where its draft came from.
        via (`str`, *optional*): name of the branch of the round before that drafted it.
        block (`tuple[Cell]`): seed, then drafted tokens, accepted or rejected.
        own (`Cell`, *optional*): the verifier's own token; none where the request ended before it.
        risky (`tuple[int]`): columns that the branching rule found doubtful.
        lanes (`tuple[Lane]`): branches.
        accepted (`int`), committed (`int`), outcome (`Outcome`): how it ended.
        forwards (`tuple[ForwardRecord]`): draft and verify forwards that it took part in.
        query_tokens (`int`): its own, in all of them.
    """

    number: int
    position: int
    source: DraftSource
    via: str | None
    block: tuple[Cell, ...]
    own: Cell | None
    risky: tuple[int, ...]
    lanes: tuple[Lane, ...]
    accepted: int
    committed: int
    outcome: Outcome
    forwards: tuple[ForwardRecord, ...]
    query_tokens: int

    @property
    def hit(self) -> Lane | None:
        return next((lane for lane in self.lanes if lane.hit), None)


@dataclass(frozen=True)
class Written:
    """A committed token and the round that committed it; none for the prefill's."""

    token: int
    cell: Cell
    round: int | None


@dataclass(frozen=True)
class Counts:
    """
    What a request has cost after its prefill.

    Args:
        tokens (`int`): committed by rounds.
        rounds (`int`), reused (`int`): the second are those whose draft came from a branch.
        forwards (`int`): draft and verify forwards.
        query_tokens (`int`): in these forwards, this request's.
        drafted (`int`): rounds with a draft.
    """

    tokens: int = 0
    rounds: int = 0
    reused: int = 0
    forwards: int = 0
    query_tokens: int = 0
    drafted: int = 0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / self.forwards if self.forwards else 0.0

    @property
    def saved_against_ar(self) -> int:
        """Plain decoding takes a forward a token."""
        return self.tokens - self.forwards

    @property
    def saved_against_linear(self) -> int:
        """The same rounds, each with a draft forward of its own, as LinearSS has them."""
        return self.rounds + self.drafted - self.forwards


@dataclass(frozen=True)
class Timeline:
    """
    A request's rounds in order.

    Args:
        request (`int`): its id.
        steps (`tuple[Step]`): its rounds.
        written (`tuple[Written]`): its answer, as far as the records have it.
        finish (`FinishRecord`, *optional*): its end, if that was recorded.
        counts (`Counts`): what it cost.
    """

    request: int
    steps: tuple[Step, ...]
    written: tuple[Written, ...]
    finish: FinishRecord | None
    counts: Counts


@dataclass
class _UnderWay:
    forwards: list[ForwardRecord]
    rounds: list[tuple[RoundRecord, tuple[ForwardRecord, ...]]]
    finish: FinishRecord | None = None


def timelines(events: Iterable[tuple[str, Record]], text_of: TextOf) -> list[Timeline]:
    """
    The requests of a trace in the order of their coming, each with its rounds.

    Args:
        events (`Iterable[tuple[str, Record]]`): as [`~trace.read_trace`] gives them, from any number of requests.
        text_of (callable): a token's text.
    """
    found: list[_UnderWay] = []
    ids: list[int] = []
    under_way: dict[int, int] = {}

    def of(request: int) -> _UnderWay:
        # An id may come back after its end: two calls of generate with the same hook.
        if request not in under_way:
            under_way[request] = len(found)
            found.append(_UnderWay([], []))
            ids.append(request)
        return found[under_way[request]]

    for _, record in events:
        if isinstance(record, ForwardRecord):
            for request in record.requests:
                if record.kind == "prefill":
                    of(request)
                else:
                    of(request).forwards.append(record)
        elif isinstance(record, RoundRecord):
            one = of(record.request)
            one.rounds.append((record, tuple(one.forwards)))
            one.forwards.clear()
        else:
            of(record.request).finish = record
            del under_way[record.request]
    return [
        _timeline(number, request.rounds, request.finish, text_of) for number, request in zip(ids, found, strict=True)
    ]


def _timeline(
    request: int,
    rounds: Sequence[tuple[RoundRecord, tuple[ForwardRecord, ...]]],
    finish: FinishRecord | None,
    text_of: TextOf,
) -> Timeline:
    steps: list[Step] = []
    written: list[Written] = []
    counts = Counts()
    via: str | None = None
    for record, forwards in rounds:
        step = _step(record, forwards, len(steps) + 1, via, text_of)
        via = step.hit.name if step.hit else None
        if not steps:
            written.append(Written(record.seed, step.block[0], None))
        cells = [*step.block[1 : step.accepted + 1], *([step.own] if step.own else [])]
        written += [
            Written(token, cell, step.number)
            for token, cell in zip(record.committed, cells[: len(record.committed)], strict=True)
        ]
        steps.append(step)
        counts = Counts(
            tokens=counts.tokens + len(record.committed),
            rounds=counts.rounds + 1,
            reused=counts.reused + (record.draft.source is DraftSource.BRANCH),
            forwards=counts.forwards + len(forwards),
            query_tokens=counts.query_tokens + step.query_tokens,
            drafted=counts.drafted + bool(record.draft.guesses),
        )
    return Timeline(request, tuple(steps), tuple(written), finish, counts)


def _step(
    record: RoundRecord, forwards: tuple[ForwardRecord, ...], number: int, via: str | None, text_of: TextOf
) -> Step:
    guesses = record.draft.guesses
    # A request may end inside the accepted part; what was committed then is all drafted.
    accepted = min(record.accepted, len(record.committed))
    entropies = dict(enumerate(record.entropies, start=1))

    def drafted(column: int, guess: Guess, came: Came) -> Cell:
        second = text_of(guess.alternatives[0]) if guess.alternatives else None
        return Cell(column, text_of(guess.token), came, guess, second, entropies.get(column))

    block = [Cell(0, text_of(record.seed), Came.SEED)]
    for column, guess in enumerate(guesses, start=1):
        block.append(drafted(column, guess, Came.ACCEPTED if column <= accepted else Came.REJECTED))
    own = None
    if len(record.committed) > accepted:
        column = accepted + 1
        text, entropy = text_of(record.committed[accepted]), entropies.get(column)
        own = Cell(column, text, Came.BONUS, entropy=entropy)
        if column <= len(guesses):
            seen = block[column]
            own = Cell(column, text, Came.CORRECTION, seen.guess, seen.second, entropy)
    lanes = tuple(_lane(branch, i == record.hit, record, text_of) for i, branch in enumerate(record.branches))
    drafts = sum(forward.kind == "draft" for forward in forwards)
    return Step(
        number=number,
        position=record.position,
        source=record.draft.source,
        via=via if record.draft.source is DraftSource.BRANCH else None,
        block=tuple(block),
        own=own,
        risky=record.risky,
        lanes=lanes,
        accepted=accepted,
        committed=len(record.committed),
        outcome=record.outcome,
        forwards=forwards,
        query_tokens=record.query_tokens + drafts * record.block_size,
    )


def _lane(branch: BranchRecord, hit: bool, record: RoundRecord, text_of: TextOf) -> Lane:
    leaves, kind = branch.branch.depth, branch.branch.kind
    first = branch.first
    if hit and kind is BranchKind.ANY_BONUS:
        # It was prepared for whatever the bonus is.
        first = record.committed[-1]
    cells = [Cell(leaves, text_of(first), Came.DRAFTED)]
    for column, guess in enumerate(branch.draft.guesses, start=leaves + 1):
        second = text_of(guess.alternatives[0]) if guess.alternatives else None
        cells.append(Cell(column, text_of(guess.token), Came.DRAFTED, guess, second))
    return Lane(kind, leaves, tuple(cells), hit, len(record.committed) if hit else None)


# --- in words ---

SOURCES = {
    DraftSource.NONE: "nothing drafted: plain decoding",
    DraftSource.FORWARD: "drafted in a forward of its own",
    DraftSource.BRANCH: "drafted by a branch of the round before: no draft forward",
    DraftSource.LEFTOVER: "what was left of the drafts of the round before: no draft forward",
}
OUTCOMES = {
    Outcome.PLAIN: "No branch was built.",
    Outcome.REJECTED_NO_CORRECTION: "The verifier rejected a token, and no correction branch had been built.",
    Outcome.REJECTED_BEFORE: "The verifier rejected a token before the place that the first correction branch supposed.",
    Outcome.REJECTED_BETWEEN: "The verifier rejected a token between the places that the two correction branches supposed.",
    Outcome.REJECTED_AFTER: "The verifier rejected a token after the place that the last correction branch supposed.",
    Outcome.CORRECTION_1_HIT: "The first correction branch was right: the block was rejected there, and the verifier put its token.",
    Outcome.CORRECTION_2_HIT: "The second or a later correction branch was right: rejected there, and the verifier put its token.",
    Outcome.CORRECTION_1_WRONG_TOKEN: "Rejected where the first correction branch supposed it, but the verifier put another token.",
    Outcome.CORRECTION_2_WRONG_TOKEN: "Rejected where a later correction branch supposed it, but the verifier put another token.",
    Outcome.CONTINUATION_HIT: "The whole block was accepted, and the continuation had foretold the bonus.",
    Outcome.CONTINUATION_WRONG_TOKEN: "The whole block was accepted, but the bonus is another token than the continuation's.",
    Outcome.FULL_NO_CONTINUATION: "The whole block was accepted, and no continuation had been built.",
    Outcome.FORETOLD_HIT: "More was accepted than a branch supposed, and the branch had foretold that too.",
    Outcome.ANY_BONUS_HIT: "A draft was ready for this stop, whatever the bonus.",
    Outcome.ANY_BONUS_NOT_BUILT: "No draft was ready for this stop: too little is left to write.",
    Outcome.STOPPED: "The answer ended in this round, so no branch could be used.",
}
"""What each outcome means, for the reader of a picture."""
