"""Who takes part in the next round. A scheduler never looks at how a round works."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import BLOCK_SIZES
from ..errors import ConfigError
from ..rounds import Request


@dataclass(eq=False)
class Turn:
    """A request that could run now, and how many rounds of others it has seen pass since its own last one."""

    request: Request
    waited: int = 0


class Scheduler(Protocol):
    """Chooses among the requests that are ready for a round."""

    def choose(self, ready: Sequence[Turn]) -> list[Turn]:
        """Some of `ready`, at least one; their `block_size` is set. May raise block sizes, never lower them."""


class Packed:
    """Everybody, with blocks of any size side by side in one forward without padding."""

    def choose(self, ready: Sequence[Turn]) -> list[Turn]:
        return list(ready)


class Padded:
    """Everybody, with the largest block size that anybody wants and the own method allows: the strawman of fixed shapes."""

    def choose(self, ready: Sequence[Turn]) -> list[Turn]:
        largest = max(turn.request.block_size for turn in ready)
        for turn in ready:
            request = turn.request
            request.block_size = min(largest, request.method.policy.max_block, request.remaining)
        return list(ready)


class Bucketed:
    """
    The requests of one block size, so that shapes repeat: the fullest bucket, unless somebody has waited for long.

    Once a request has waited `max_wait` rounds, the bucket of whoever has waited longest runs. Those before it in that order are
    in at most `block_sizes - 1` other buckets, each of which empties its own queue when it runs; so nobody waits more than
    [`longest_wait`] rounds.

    Args:
        max_wait (`int`): at least the number of block sizes.
        block_sizes (`int`): how many there are.
    """

    def __init__(self, max_wait: int, block_sizes: int) -> None:
        if max_wait < block_sizes:
            raise ConfigError(f"max_wait must be at least {block_sizes}, the number of block sizes; got {max_wait}.")
        self._max_wait = max_wait
        self.longest_wait = max_wait + block_sizes - 1
        """Rounds of others that a ready request sees pass at the most."""

    def choose(self, ready: Sequence[Turn]) -> list[Turn]:
        buckets: dict[int, list[Turn]] = defaultdict(list)
        for turn in ready:
            buckets[bucket_of(turn.request.block_size)].append(turn)
        oldest = max(ready, key=lambda turn: turn.waited)
        if oldest.waited >= self._max_wait:
            return buckets[bucket_of(oldest.request.block_size)]
        return max(buckets.values(), key=lambda turns: (len(turns), max(turn.waited for turn in turns)))


def bucket_of(block_size: int) -> int:
    """The smallest power of two that holds a block: near a request's end its blocks are shorter than their bucket."""
    return 1 << max(block_size - 1, 0).bit_length()


SCHEDULERS: dict[str, Callable[[int], Scheduler]] = {
    "bucketed": lambda max_wait: Bucketed(max_wait, len(BLOCK_SIZES)),
    "packed": lambda max_wait: Packed(),
    "padded": lambda max_wait: Padded(),
}
