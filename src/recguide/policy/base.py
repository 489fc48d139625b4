"""The interface of block policies, and those that need no tables."""

from __future__ import annotations

from ..structs import ForwardRecord, RoundRecord


class BlockPolicy:
    """
    Chooses block sizes from what it has been told of a request's rounds; it never reads the engine.

    `max_block` is the largest block that it asks for.
    """

    max_block: int
    price: float | None = None
    """Committed tokens that a millisecond was worth in its last decision; None for one that prices nothing, or before the first."""

    def block_size(self, request: int, load: int) -> int:
        """
        Tokens of the request's next block, the seed included; it is shortened where less is left to write.

        Args:
            request (`int`): its id.
            load (`int`): requests under way.
        """
        raise NotImplementedError

    def observe(self, record: RoundRecord) -> None:
        """Take note of a round."""

    def observe_forward(self, record: ForwardRecord) -> None:
        """Take note of a draft or verify forward in which requests of this policy took part."""

    def forget(self, request: int) -> None:
        """The request has ended, whatever the reason; one that the policy has never seen may end too."""


class FixedBlock(BlockPolicy):
    """The same size always."""

    def __init__(self, size: int) -> None:
        self.max_block = size

    def block_size(self, request: int, load: int) -> int:
        return self.max_block


class ConcurrencyTable(BlockPolicy):
    """
    By load alone: 32 up to 4 requests, 16 up to 63, 8 from 64 on.

    The recipe of the released models' own serving, as the paper's baseline has it (arXiv 2609.34388, section 5.2); between the
    loads that it names, 16.
    """

    max_block = 32

    def block_size(self, request: int, load: int) -> int:
        return 32 if load <= 4 else 16 if load < 64 else 8


class AIMD(BlockPolicy):
    """
    Doubles a request's block when all of it was accepted, halves it when half or less was committed, between 8 and 32.

    After congestion control's additive increase, multiplicative decrease; that here both are multiplicative is a public port's
    choice. A branch's draft is as long as the block it rides along with, so blocks grow in rounds that draft anew.
    """

    max_block = 32

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    def block_size(self, request: int, load: int) -> int:
        return self._sizes.get(request, 8)

    def observe(self, record: RoundRecord) -> None:
        size, committed = record.block_size, len(record.committed)
        if committed == size:
            self._sizes[record.request] = min(2 * size, 32)
        elif committed <= size / 2:
            self._sizes[record.request] = max(size // 2, 8)

    def forget(self, request: int) -> None:
        self._sizes.pop(request, None)
