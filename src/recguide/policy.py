"""How long each request's next block is."""

from __future__ import annotations

from typing import Protocol


class BlockPolicy(Protocol):
    """Chooses block sizes."""

    def block_size(self, request: int) -> int:
        """Tokens of the request's next block, the seed included; the round shortens it where less is left to write."""


class FixedBlock:
    """The same size always."""

    def __init__(self, size: int) -> None:
        self._size = size

    def block_size(self, request: int) -> int:
        return self._size
