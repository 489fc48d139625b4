"""Which branches ride along with a verification. One rule for each strategy, behind one interface."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from .config import RecGuideConfig
from .structs import Branch, BranchChoice, BranchKind, Draft, DraftSource

NOTHING = BranchChoice()


class BranchingRule(Protocol):
    """Looks at a block's draft before it is verified."""

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        """
        The branches to build.

        Args:
            request (`int`): its id.
            draft (`Draft`): of the block about to be verified.
            remaining (`int`): tokens that the request may still commit, in this round and later.
        """

    def most_tokens(self, block_size: int) -> int:
        """Query tokens that a verification of `block_size` tokens can have with its branches."""


class NoBranches:
    """`ar` and `linear`: draft, then verify."""

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        return NOTHING

    def most_tokens(self, block_size: int) -> int:
        return block_size


class QuadraticLayout:
    """TiDAR's layout: a next draft for every number of tokens that may be committed; the bonus replaces its first token."""

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        depths = range(1, len(draft.guesses) + 2)
        sizes = [_next_block(len(draft.guesses) + 1, remaining, depth) for depth in depths]
        kind = BranchKind.ANY_BONUS
        return BranchChoice(tuple(Branch(kind, d, size) for d, size in zip(depths, sizes, strict=True) if size > 1))

    def most_tokens(self, block_size: int) -> int:
        return block_size * (1 + block_size)


class PaperOverlap:
    """
    RecGuide's rule (arXiv 2609.34388, section 5.1): corrections at the earliest risky positions, a continuation where at
    most two are risky.

    Args:
        config (`RecGuideConfig`): `delta`, `max_corrections`, `continuation`, `reuse`.
        eos (`Set[int]`): end-of-sequence tokens, never a replacement if the config says so.
    """

    def __init__(self, config: RecGuideConfig, eos: Set[int]) -> None:
        self._config = config
        self._eos = eos

    def choose(self, request: int, draft: Draft, remaining: int) -> BranchChoice:
        config = self._config
        risky = tuple(i for i, guess in enumerate(draft.guesses, start=1) if guess.margin < config.delta)
        if draft.source is DraftSource.BRANCH and not config.reuse:
            return BranchChoice(risky=risky)
        block_size = len(draft.guesses) + 1
        # Nothing is written after a drafted EOS is committed, so no next block supposes one.
        end = next((i for i, guess in enumerate(draft.guesses, start=1) if guess.token in self._eos), block_size)
        branches = []
        for position in risky[: config.max_corrections]:
            replacement = self._replacement(draft, position)
            size = _next_block(block_size, remaining, position)
            if replacement is not None and size > 1 and position <= end:
                branches.append(Branch(BranchKind.CORRECTION, position, size, replacement))
        if config.continuation and len(risky) <= 2 and block_size > 1 and end == block_size:
            size = _next_block(block_size, remaining, block_size)
            if size > 1:
                branches.append(Branch(BranchKind.CONTINUATION, block_size, size))
        return BranchChoice(tuple(branches), risky)

    def most_tokens(self, block_size: int) -> int:
        return block_size * (1 + self._config.max_corrections + self._config.continuation)

    def _replacement(self, draft: Draft, position: int) -> int | None:
        excluded = self._eos if self._config.exclude_eos_replacement else ()
        return next((token for token in draft.guesses[position - 1].alternatives if token not in excluded), None)


def _next_block(block_size: int, remaining: int, committed: int) -> int:
    """Size of the block after `committed` more tokens, as long as the present one; below 2 there is nothing to draft."""
    return min(block_size, remaining - committed)


def branching_rule(config: RecGuideConfig, eos: Set[int]) -> BranchingRule:
    """The rule of the config's strategy."""
    if config.strategy == "recguide":
        return PaperOverlap(config, eos)
    return QuadraticLayout() if config.strategy == "quadratic" else NoBranches()
