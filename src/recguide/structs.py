"""Frozen values that travel between the stages.

Shape letters: R requests of the batch, T packed query tokens of a forward, B block size, K keys, V vocabulary,
L layers, H query heads, G key/value heads, D head size.

Words: a round starts from the *seed*, the last token that is certain, whose K/V are still to be computed. The *block*
`[seed, d1 … d(B-1)]` is the seed with its draft. Of the draft, some leading tokens are *accepted*; what is *committed* is
those and the *bonus*, the token that the verifier itself puts next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class BranchKind(StrEnum):
    """Why a branch rides along: what it supposes about the verification it accompanies."""

    CORRECTION = "correction"
    """The block is rejected at the branch's depth, and the verifier's token there is the replacement."""
    CONTINUATION = "continuation"
    """`depth` tokens are committed, the last of them the branch's own first prediction; in the paper's rule the whole block."""
    ANY_BONUS = "any_bonus"
    """Exactly `depth` tokens are committed, whatever the bonus (the quadratic layout)."""


class Outcome(StrEnum):
    """How a round ended; every round has exactly one."""

    PLAIN = "plain"
    """No branch was built."""
    REJECTED_NO_CORRECTION = "rejected_no_correction"
    """Rejected, and no correction branch was built: no position was risky, or none could be corrected."""
    REJECTED_BEFORE = "rejected_before"
    """Rejected before the first correction branch's position."""
    REJECTED_BETWEEN = "rejected_between"
    """Rejected between the two correction branches' positions."""
    REJECTED_AFTER = "rejected_after"
    """Rejected after the last correction branch's position."""
    CORRECTION_1_HIT = "correction_1_hit"
    CORRECTION_2_HIT = "correction_2_hit"
    """The second, or a later one where more are built."""
    CORRECTION_1_WRONG_TOKEN = "correction_1_wrong_token"
    """Rejected at the first branch's position, but the verifier's token is another than the replacement."""
    CORRECTION_2_WRONG_TOKEN = "correction_2_wrong_token"
    CONTINUATION_HIT = "continuation_hit"
    CONTINUATION_WRONG_TOKEN = "continuation_wrong_token"
    """Fully accepted, but the bonus is another than the continuation's first prediction."""
    FULL_NO_CONTINUATION = "full_no_continuation"
    """Fully accepted, and no continuation was built."""
    FORETOLD_HIT = "foretold_hit"
    """More was committed than a branch supposes, and it had foretold that too: the rest of it is the next draft."""
    ANY_BONUS_HIT = "any_bonus_hit"
    """The quadratic layout had prepared a draft for this stop."""
    ANY_BONUS_NOT_BUILT = "any_bonus_not_built"
    """It had not: too little is left to draft after it."""
    STOPPED = "stopped"
    """The request ended in this round (EOS, a stop rule, or its length), so no branch could be used."""


class DraftSource(StrEnum):
    """Where a round's draft came from."""

    NONE = "none"
    """Block size 1: plain autoregressive decoding."""
    FORWARD = "forward"
    """A draft forward (several, under a draft threshold)."""
    BRANCH = "branch"
    """A branch of the round before: a reused round, one forward in all."""
    LEFTOVER = "leftover"
    """What the drafts of the round before had said of the tokens after a rejected one: no forward either."""


@dataclass(frozen=True)
class Guess:
    """What the drafter knew of one position, MASK excluded: its best token, the next best ones, the top two probabilities."""

    token: int
    alternatives: tuple[int, ...]
    probability: float
    second_probability: float

    @property
    def margin(self) -> float:
        """`p1 - p2`, the paper's M_i."""
        return self.probability - self.second_probability


@dataclass(frozen=True)
class Draft:
    """`guesses[i]` drafts position i + 1 of the block, so a block of B tokens has B - 1 guesses."""

    guesses: tuple[Guess, ...] = ()
    source: DraftSource = DraftSource.NONE

    @property
    def tokens(self) -> list[int]:
        return [guess.token for guess in self.guesses]

    def cut(self, block_size: int) -> Draft:
        """The draft of a shorter block."""
        return self if len(self.guesses) < block_size else Draft(self.guesses[: block_size - 1], self.source)


@dataclass(frozen=True)
class Branch:
    """A draft of the next block that rides along with a verification and sees the first `depth` tokens of its block."""

    kind: BranchKind
    depth: int
    block_size: int
    replacement: int | None = None


@dataclass(frozen=True)
class BranchChoice:
    """What the branching rule decided for one block; `risky` are the positions (1 … B-1) that it found doubtful."""

    branches: tuple[Branch, ...] = ()
    risky: tuple[int, ...] = ()
    verified: int | None = None
    """Tokens of the block that are worth verifying, the seed included; None: all."""
    leftovers: bool = False
    """Whether what is left of the drafts is the next round's, where no branch foretold the end of this one."""


@dataclass(frozen=True)
class BranchRecord:
    """A branch and what it drafted: `first` is the token that it supposes after the block's first `depth` tokens."""

    branch: Branch
    first: int
    draft: Draft

    def foretells(self, committed: Sequence[int]) -> bool:
        """Whether these tokens of its round end as the branch supposes, or goes on to predict."""
        since = len(committed) - self.branch.depth
        if since < 0 or (since and since >= len(self.draft.guesses)):
            return False
        if self.branch.kind is BranchKind.ANY_BONUS:
            return since == 0
        return [self.first, *self.draft.tokens[:since]] == list(committed[self.branch.depth - 1 :])


@dataclass(frozen=True)
class ForwardRecord:
    """One packed forward. `kind`: `prefill`, `draft`, `verify`, or `fused` (a verification with branches)."""

    kind: str
    requests: tuple[int, ...]
    query_tokens: int
    seconds: float
    """Host clock around the model's forward alone (on a GPU: around its launch). Plans, masks and statistics are outside."""
    elapsed: float = 0.0
    """Host clock from the plan to the predictions on the host."""


@dataclass(frozen=True)
class RoundRecord:
    """One request's round, as `on_commit` gets it. `position` is the seed's absolute position."""

    request: int
    index: int
    position: int
    seed: int
    draft: Draft
    branches: tuple[BranchRecord, ...]
    risky: tuple[int, ...]
    accepted: int
    """Drafted tokens that the verifier agreed with, counted up to the request's end if it ended in this round."""
    committed: tuple[int, ...]
    """Tokens added to the output; shorter than accepted + 1 only where the request stopped."""
    outcome: Outcome
    hit: int | None
    """Index into `branches` of the one that becomes the next round's draft."""
    query_tokens: int
    """This request's query tokens in the verifying forward."""
    entropies: tuple[float, ...] = ()
    """Of the verifier's own distribution where each committed token stands, in nats, MASK excluded; none
    where no request of the forward had a draft."""

    @property
    def block_size(self) -> int:
        return len(self.draft.guesses) + 1


@dataclass(frozen=True)
class FinishRecord:
    """
    A request's end. `reason`: `eos`, `length`, `stop` (a stop rule), `cancelled` or `error`. `taken_back` counts tokens that were
    committed and then removed: a batch's stopping criterion may look at a column after some rows have written past it.
    """

    request: int
    reason: str
    prompt_tokens: int
    new_tokens: int
    taken_back: int = 0
