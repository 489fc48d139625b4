"""Which branch is hit, and the name of the outcome. Plain Python on small lists."""

from __future__ import annotations

from collections.abc import Sequence

from .structs import BranchChoice, BranchKind, BranchRecord, Draft, DraftSource, Outcome


def hit_branch(branches: Sequence[BranchRecord], committed: Sequence[int]) -> int | None:
    """Index of the branch that foretold the tokens that this round commits; of several the deepest, which knew most of them."""
    hits = [index for index, record in enumerate(branches) if record.foretells(committed)]
    return max(hits, key=lambda index: branches[index].branch.depth, default=None)


def leftover(draft: Draft, branches: Sequence[BranchRecord], committed: int) -> Draft:
    """
    What is left of a round's drafts where no branch is hit: predictions for the tokens after the `committed` ones.

    Of the verified draft what follows the rejected token; of a branch, if nothing is left there, what follows the one that it had wrong.
    """
    rests = [draft.guesses[committed:]]
    rests += [r.draft.guesses[committed - r.branch.depth :] for r in branches if r.branch.depth <= committed]
    rest = next((rest for rest in rests if rest), ())
    return Draft(rest, DraftSource.LEFTOVER) if rest else Draft()


def name_outcome(choice: BranchChoice, block_size: int, accepted: int, hit: int | None, stopped: bool) -> Outcome:
    """
    The one outcome of a round. `accepted` counts drafted tokens; a rejection is at block position `accepted + 1`.

    A continuation before the block's end counts as a correction there: its replacement is what it predicts.
    """
    if stopped:
        return Outcome.STOPPED
    if not choice.branches:
        return Outcome.PLAIN
    kinds = [branch.kind for branch in choice.branches]
    if BranchKind.ANY_BONUS in kinds:
        return Outcome.ANY_BONUS_NOT_BUILT if hit is None else Outcome.ANY_BONUS_HIT
    if hit is not None and choice.branches[hit].depth <= accepted:
        return Outcome.FORETOLD_HIT
    if accepted == block_size - 1:
        if hit is not None:
            return Outcome.CONTINUATION_HIT
        supposed = any(branch.depth == block_size for branch in choice.branches)
        return Outcome.CONTINUATION_WRONG_TOKEN if supposed else Outcome.FULL_NO_CONTINUATION
    positions = sorted({branch.depth for branch in choice.branches if branch.depth < block_size})
    rejected_at = accepted + 1
    if not positions:
        return Outcome.REJECTED_NO_CORRECTION
    if rejected_at in positions:
        first = rejected_at == positions[0]
        if hit is not None:
            return Outcome.CORRECTION_1_HIT if first else Outcome.CORRECTION_2_HIT
        return Outcome.CORRECTION_1_WRONG_TOKEN if first else Outcome.CORRECTION_2_WRONG_TOKEN
    if rejected_at < positions[0]:
        return Outcome.REJECTED_BEFORE
    return Outcome.REJECTED_AFTER if rejected_at > positions[-1] else Outcome.REJECTED_BETWEEN
