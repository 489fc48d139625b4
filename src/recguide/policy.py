"""How long each request's next block is."""

from __future__ import annotations

from typing import Protocol

from .structs import RoundRecord


class BlockPolicy(Protocol):
    """Chooses block sizes from what it has been told of a request's rounds; it never reads the engine."""

    def block_size(self, request: int, load: int) -> int:
        """
        Tokens of the request's next block, the seed included; it is shortened where less is left to write.

        Args:
            request (`int`): its id.
            load (`int`): requests under way.
        """

    def observe(self, record: RoundRecord) -> None:
        """Take note of a round."""


class FixedBlock:
    """The same size always."""

    def __init__(self, size: int) -> None:
        self._size = size

    def block_size(self, request: int, load: int) -> int:
        return self._size

    def observe(self, record: RoundRecord) -> None:
        pass
