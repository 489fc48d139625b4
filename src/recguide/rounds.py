"""One round, for a batch of requests of any size: draft, choose branches, verify, accept, commit.

A round costs a request two forwards, draft and verify, or one where a branch of the round before had guessed right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .acceptance import hit_branch, leftover, name_outcome
from .adapter import ModelAdapter, Predictions
from .branching import BranchingRule
from .dense_kv import KVCache
from .hooks import Hook
from .policy import BlockPolicy
from .sampling import Sampling
from .segments import Segment
from .structs import (
    Branch,
    BranchChoice,
    BranchRecord,
    Draft,
    DraftSource,
    ForwardRecord,
    Guess,
    RoundRecord,
)

TokenChoice = Callable[[list[int], Tensor, "Tensor | None"], int]
"""`(tokens so far, logits [V], noise [V]) -> token`: called once for each committed position, on its true prefix."""
StopRule = Callable[[list[int]], "str | None"]
"""`(tokens so far, the newest last) -> reason to stop, or None`: called once for each committed token."""


@dataclass(frozen=True)
class Method:
    """How a request's rounds are run: block sizes, branches, and the draft threshold of `linear`."""

    policy: BlockPolicy
    branching: BranchingRule
    draft_threshold: float = 0.0
    candidates: int = 2
    """Likeliest tokens asked of the drafter for each position; the replacement comes from those after the first."""
    draft_forwards: bool = True
    """Whether a request without a draft gets one in a forward of its own; otherwise only beside a verification."""

    @property
    def most_tokens(self) -> int:
        """Query tokens that a forward of one round can have."""
        return self.branching.most_tokens(self.policy.max_block)


@dataclass
class Request:
    """A request under way: its tokens, its rules, and the draft that a branch has prepared for its next round."""

    id: int
    tokens: list[int]
    max_new_tokens: int
    stop: StopRule
    method: Method
    sampling: Sampling | None = None
    """Noise and processors that drafts have too; None: the logits as they are, greedily."""
    choose: TokenChoice | None = None
    """Rules that look at the prefix; None: the token of the highest score."""
    prompt_tokens: int = 0
    committed: int = 0
    """Tokens committed so far, also those that a stopping criterion took back later."""
    rounds: int = 0
    block_size: int = 1
    """Of the next round, as [`plan_blocks`] has set it."""
    draft: Draft = field(default_factory=Draft)
    finished: str | None = None
    """Why it ended; None while it runs."""

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def remaining(self) -> int:
        """Tokens that it may still commit."""
        return self.max_new_tokens - (len(self.tokens) - self.prompt_tokens)

    @property
    def to_cache(self) -> int:
        """Tokens to be in the cache before its next round: all, but once it has committed some not the newest, the seed."""
        return len(self.tokens) - (self.committed > 0)

    def commit(self, predictions: Predictions, row: int) -> int:
        """Commit one token, chosen from output row `row` on the true prefix, and see whether the request ends with it."""
        token = predictions.best[row][0]
        if self.choose is not None:
            noise = None if predictions.noise is None else predictions.noise[row]
            token = self.choose(self.tokens, predictions.logits[row], noise)
        self.tokens.append(token)
        self.committed += 1
        self.finished = self.stop(self.tokens) or ("length" if self.remaining <= 0 else None)
        return token


def prefill(
    batch: Sequence[Request], adapter: ModelAdapter, kv: KVCache, hooks: Hook, chunk: int | None = None
) -> None:
    """
    Put prompts into the cache, and commit the first token, the first seed, of each request whose prompt is in it then.

    A request that has committed tokens already, and lost its cache, gets it back and commits nothing.

    Args:
        chunk (`int`, *optional*): tokens that this forward may have; the rest waits for another call.
    """
    taken: list[list[int]] = []
    left = chunk
    for request, cached in zip(batch, kv.lengths, strict=True):
        taken.append(request.tokens[cached : request.to_cache][:left])
        left = None if left is None else left - len(taken[-1])
    if not any(taken):
        return
    plan, predictions = adapter.forward(
        [
            [adapter.causal(tokens, cached, outputs=(-1, None))] if tokens else []
            for tokens, cached in zip(taken, kv.lengths, strict=True)
        ],
        kv,
        samplings=_samplings(batch),
    )
    hooks.on_prefill(
        _forward_record(
            "prefill", [r for r, tokens in zip(batch, taken, strict=True) if tokens], plan.query_tokens, predictions
        )
    )
    for row, (request, tokens) in enumerate(zip(batch, taken, strict=True)):
        kv.commit(row, len(tokens))
        if tokens and not request.committed and kv.lengths[row] == request.to_cache:
            request.commit(predictions, plan.outputs[row][0][0])


def plan_blocks(batch: Sequence[Request], load: int) -> None:
    """Ask the policies how long each unfinished request's next block is, with `load` requests under way in all."""
    for request in batch:
        if request.finished is None:
            wanted = request.method.policy.block_size(request.id, load)
            # What a branch has drafted already is verified as it is, not drafted again at another length.
            has_draft = request.draft.guesses or not request.method.draft_forwards
            drafted = len(request.draft.guesses) + 1 if has_draft else wanted
            request.block_size = min(wanted, drafted, request.remaining)


def run_round(batch: Sequence[Request], adapter: ModelAdapter, kv: KVCache, hooks: Hook) -> None:
    """
    Run one round for every unfinished request of `batch`, with the blocks that [`plan_blocks`] has set.

    `batch[r]` owns row r of the cache.
    """
    live = [row for row, request in enumerate(batch) if request.finished is None]
    drafts = {row: batch[row].draft.cut(batch[row].block_size) for row in live}
    undrafted = [
        row
        for row in live
        if batch[row].block_size > 1 and batch[row].method.draft_forwards and not drafts[row].guesses
    ]
    drafts |= draft_blocks(batch, undrafted, adapter, kv, hooks)

    choices = {row: _choice(batch[row], drafts[row]) for row in live}
    verified = {row: drafts[row].cut(choices[row].verified or batch[row].block_size) for row in live}
    rows = [
        _verify_segments(request, verified[row], choices[row], adapter) if row in choices else []
        for row, request in enumerate(batch)
    ]
    kind = "fused" if any(choice.branches for choice in choices.values()) else "verify"
    # Where nothing is drafted, nobody asks for second choices; where nothing was, nobody for entropies.
    candidates = _candidates(batch, live) if kind == "fused" else 1
    entropies = any(draft.guesses for draft in verified.values())
    plan, predictions = adapter.forward(rows, kv, candidates, _samplings(batch), entropies)
    _tell(kind, [batch[row] for row in live], plan.query_tokens, predictions, hooks.on_verify)

    for row in live:
        record = _accept(batch[row], verified[row], choices[row], plan.outputs[row], plan.tokens_of(row), predictions)
        if choices[row].leftovers and record.hit is None:
            batch[row].draft = leftover(drafts[row], record.branches, len(record.committed))
        kv.commit(row, len(record.committed))
        batch[row].method.policy.observe(record)
        hooks.on_commit(record)


def draft_blocks(
    batch: Sequence[Request], rows: list[int], adapter: ModelAdapter, kv: KVCache, hooks: Hook
) -> dict[int, Draft]:
    """
    Draft the next block of the given rows: in one forward, or under a threshold in as many as it takes.

    Each forward settles at least the earliest open position, so that B - 1 of them suffice whatever the threshold.
    """
    settled: dict[int, dict[int, Guess]] = {row: {} for row in rows}
    sizes = {row: batch[row].block_size for row in rows}
    while rows:
        segments: list[list[Segment]] = [[] for _ in batch]
        for row in rows:
            known = [settled[row][i].token if i in settled[row] else None for i in range(1, sizes[row])]
            segments[row] = [adapter.block([batch[row].tokens[-1], *known], len(batch[row].tokens) - 1)]
        plan, predictions = adapter.forward(segments, kv, _candidates(batch, rows), _samplings(batch))
        _tell("draft", [batch[row] for row in rows], plan.query_tokens, predictions, hooks.on_draft)
        for row in rows:
            guesses = _guesses(predictions, *plan.outputs[row][0])
            unsettled = [i for i in range(1, sizes[row]) if i not in settled[row]]
            for i in unsettled:
                if i == unsettled[0] or guesses[i - 1].probability >= batch[row].method.draft_threshold:
                    settled[row][i] = guesses[i - 1]
        rows = [row for row in rows if len(settled[row]) < sizes[row] - 1]
    return {
        row: Draft(tuple(guess for _, guess in sorted(by_position.items())), DraftSource.FORWARD)
        for row, by_position in settled.items()
    }


def _choice(request: Request, draft: Draft) -> BranchChoice:
    return request.method.branching.choose(request.id, draft, request.remaining)


def _verify_segments(request: Request, draft: Draft, choice: BranchChoice, adapter: ModelAdapter) -> list[Segment]:
    position = len(request.tokens) - 1
    verified = adapter.causal([request.tokens[-1], *draft.tokens], position)
    open_places = {branch: [None] * (branch.block_size - 1) for branch in choice.branches}
    return [verified] + [
        adapter.block([branch.replacement, *open_places[branch]], position + branch.depth, branch.depth)
        for branch in choice.branches
    ]


def _accept(
    request: Request,
    draft: Draft,
    choice: BranchChoice,
    outputs: Sequence[tuple[int, int]],
    query_tokens: int,
    predictions: Predictions,
) -> RoundRecord:
    """Commit drafted tokens while the verifier agrees, then its own next one; find the branch that supposed just this."""
    position, seed = len(request.tokens) - 1, request.tokens[-1]
    drafted, committed = draft.tokens, []
    accepted = 0
    for i in range(*outputs[0]):
        committed.append(request.commit(predictions, i))
        agrees = accepted < len(drafted) and committed[-1] == drafted[accepted]
        accepted += agrees
        if request.finished or not agrees:
            break
    branches = tuple(
        _branch_record(branch, predictions, *span) for branch, span in zip(choice.branches, outputs[1:], strict=True)
    )
    stopped = request.finished is not None
    hit = None if stopped else hit_branch(branches, committed)
    request.draft = Draft()
    if hit is not None:
        used = len(committed) - branches[hit].branch.depth
        request.draft = Draft(branches[hit].draft.guesses[used:], DraftSource.BRANCH)
    request.rounds += 1
    return RoundRecord(
        request=request.id,
        index=request.rounds - 1,
        position=position,
        seed=seed,
        draft=draft,
        branches=branches,
        risky=choice.risky,
        accepted=accepted,
        committed=tuple(committed),
        outcome=name_outcome(choice, len(drafted) + 1, accepted, hit, stopped),
        hit=hit,
        query_tokens=query_tokens,
        entropies=tuple(predictions.entropies[outputs[0][0] :][: len(committed)]),
    )


def _branch_record(branch: Branch, predictions: Predictions, start: int, end: int) -> BranchRecord:
    guesses = _guesses(predictions, start, end)
    if branch.replacement is not None:
        return BranchRecord(branch, branch.replacement, Draft(guesses, DraftSource.BRANCH))
    return BranchRecord(branch, guesses[0].token, Draft(guesses[1:], DraftSource.BRANCH))


def _guesses(predictions: Predictions, start: int, end: int) -> tuple[Guess, ...]:
    return tuple(
        Guess(best[0], tuple(best[1:]), *probabilities)
        for best, probabilities in zip(predictions.best[start:end], predictions.probabilities[start:end], strict=True)
    )


def _candidates(batch: Sequence[Request], rows: Sequence[int]) -> int:
    return max(batch[row].method.candidates for row in rows)


def _samplings(batch: Sequence[Request]) -> list[Sampling | None]:
    return [request.sampling for request in batch]


def _forward_record(
    kind: str, requests: Sequence[Request], query_tokens: int, predictions: Predictions
) -> ForwardRecord:
    ids = tuple(request.id for request in requests)
    return ForwardRecord(kind, ids, query_tokens, predictions.seconds, predictions.elapsed)


def _tell(
    kind: str,
    requests: Sequence[Request],
    query_tokens: int,
    predictions: Predictions,
    hook: Callable[[ForwardRecord], None],
) -> None:
    """A forward of a round, to the policies that learn from it and to a hook."""
    record = _forward_record(kind, requests, query_tokens, predictions)
    for policy in {id(request.method.policy): request.method.policy for request in requests}.values():
        policy.observe_forward(record)
    hook(record)
