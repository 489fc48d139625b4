"""Which branch is hit, and the name of the outcome. Plain Python on small lists."""

from __future__ import annotations

from collections.abc import Sequence

from .structs import BranchChoice, BranchKind, BranchRecord, Outcome


def hit_branch(branches: Sequence[BranchRecord], committed: int, bonus: int) -> int | None:
    """Index of the branch that supposed exactly this: `committed` tokens, the last of which is `bonus`."""
    for index, record in enumerate(branches):
        if record.branch.depth == committed and (record.branch.kind is BranchKind.ANY_BONUS or record.first == bonus):
            return index
    return None


def name_outcome(choice: BranchChoice, block_size: int, accepted: int, hit: int | None, stopped: bool) -> Outcome:
    """The one outcome of a round. `accepted` counts drafted tokens; a rejection is at block position `accepted + 1`."""
    if stopped:
        return Outcome.STOPPED
    if not choice.branches:
        return Outcome.PLAIN
    kinds = [branch.kind for branch in choice.branches]
    if BranchKind.ANY_BONUS in kinds:
        return Outcome.ANY_BONUS_NOT_BUILT if hit is None else Outcome.ANY_BONUS_HIT
    if accepted == block_size - 1:
        if hit is not None:
            return Outcome.CONTINUATION_HIT
        supposed = any(branch.depth == block_size for branch in choice.branches)
        return Outcome.CONTINUATION_WRONG_TOKEN if supposed else Outcome.FULL_NO_CONTINUATION
    positions = [branch.depth for branch in choice.branches if branch.kind is BranchKind.CORRECTION]
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
