"""Tensor parallelism: a model whose layers are split over several processes. Rank 0 decides, and the others compute along.

All ranks must run the same forwards, or they wait for each other for ever. But what a round does depends on measured times, on who
arrives and who cancels, on seeds, and on rules of the user's. So only rank 0 has requests under way, policies and a scheduler, and only
rank 0 looks at logits. Before each forward it tells the others the segments, and where the K/V of each batch row lie. Every decision is in
that, so there is nothing in which ranks could come to differ.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from enum import StrEnum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch import distributed as dist

from .dense_kv import KVCache
from .errors import RankError, UnsupportedError
from .segments import Segment

TIMEOUT = timedelta(minutes=10)
"""For which a rank waits for word of another; a process that has ended is noticed at once."""
BEAT = 60.0
"""Seconds of idleness after which rank 0 lets the others know that it is still there."""
FIRST, LENGTH = 4096, 8
"""Bytes of a message's first part, which is all of most messages, and of its length, which stands at the beginning."""

Extents = list[list[int]]
"""As of [`KVCache.extents`]."""


class Word(StrEnum):
    """What rank 0 says, and what comes with it."""

    BEGIN = "begin"
    """A call or an engine begins; what it is about, so that ranks that do different things notice."""
    FORWARD = "forward"
    """The segments of a forward, and the extents of its cache."""
    BEAT = "beat"
    """Nothing; rank 0 is idle."""
    END = "end"
    """The call or the engine has ended; its result."""
    FAILED = "failed"
    """It has ended with an error; what that says."""


class Ranks:
    """
    The processes that one model is split over, as one of them sees them; made by all of them together, see [`Ranks.of`].

    Args:
        model ([`~transformers.PreTrainedModel`]): loaded with a `tp_plan`.

    Raises:
        UnsupportedError: the model cannot be split like this, or there are processes that do not take part.
    """

    def __init__(self, model: Any) -> None:
        from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

        self.rank, self.size = dist.get_rank(), int(model.tp_size)
        if dist.get_world_size() != self.size:
            raise UnsupportedError(
                f"The model is split over {self.size} of {dist.get_world_size()} processes; expected all of them: tensor parallelism "
                "alone, without pipeline or data parallelism in the same process group."
            )
        text = model.config.get_text_config()
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        own = get_kv_heads_per_rank(model.tp_plan, heads, self.size)
        if not isinstance(own, int):
            raise UnsupportedError(f"{heads} key/value heads cannot be split evenly over {self.size} ranks.")
        self.kv_shards = heads // own
        """Ranks that share the key/value heads; 1 where each has all of them."""
        # Words are bytes in the memory of the host, whatever the model's tensors travel through.
        self._group = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._failure: str | None = None
        self._free = threading.Lock()

    @classmethod
    def of(cls, model: Any) -> Ranks | None:
        """Those of a model, the same ones each time; `None` where it is whole. All ranks must ask for the first time alike."""
        if (getattr(model, "tp_size", None) or 1) == 1:
            return None
        if model not in _KNOWN:
            _KNOWN[model] = cls(model)
        return _KNOWN[model]

    @property
    def leads(self) -> bool:
        """Whether this is the rank that decides."""
        return self.rank == 0

    # --- on rank 0 ---

    @contextmanager
    def leading(self, work: list[Any]) -> Iterator[list[Any]]:
        """
        Lead the other ranks, which [`follow`] the same work, through the forwards of the `with` block.

        Args:
            work (`list`): what it is about.

        Returns:
            `list`: empty; what it holds in the end is the result that the others get.

        Raises:
            UnsupportedError: they follow something else already.
            RankError: one of them has ended, or does not answer.
        """
        if not self._free.acquire(blocking=False):
            raise UnsupportedError(
                "The ranks of this model are with another call or engine: end it, or close it, before the next one."
            )
        try:
            self._say(Word.BEGIN, work)
            result: list[Any] = []
            try:
                yield result
            except BaseException as error:
                self._conclude(Word.FAILED, f"{type(error).__name__}: {error}")
                raise
            self._conclude(Word.END, result)
        finally:
            self._free.release()

    @contextmanager
    def forward(self, rows: Sequence[Sequence[Segment]], kv: KVCache) -> Iterator[None]:
        """Tell the other ranks of a forward, which this one runs in the `with` block."""
        if not (self.leads and self._free.locked()):
            raise UnsupportedError(
                f"Rank {self.rank} cannot plan a forward of its own here: a model that is split over ranks runs in generate(), called "
                "on all of them, or in an engine on rank 0, which the others follow()."
            )
        self._say(Word.FORWARD, [[[list(vars(segment).values()) for segment in row] for row in rows], kv.extents])
        with self._together():
            yield

    def beat(self) -> None:
        """Tell the others that nothing is to do."""
        self._say(Word.BEAT)

    # --- on the others ---

    def follow(self, work: list[Any], forward: Callable[[list[list[Segment]], Extents], None]) -> Any:
        """
        Take part in what rank 0 leads, until it ends.

        Args:
            work (`list`): what rank 0 must be about.
            forward (callable): `(rows, extents)` runs a forward.

        Returns:
            The result that rank 0 gives.

        Raises:
            RankError: rank 0 has ended, or its work has failed, or is another.
        """
        word, content = self._hear()
        if (word, content) != (Word.BEGIN, work):
            self._failure = f"rank {self.rank} follows {_short(work)}, and rank 0 says {word} {_short(content)}"
            raise RankError(
                f"All ranks must do the same: {self._failure}. Call generate() with the same prompts on every rank, or follow() an "
                "engine of the same EngineConfig."
            )
        while True:
            word, content = self._hear()
            if word == Word.FORWARD:
                rows, extents = content
                with self._together():
                    forward([[Segment(*fields) for fields in row] for row in rows], extents)
            elif word == Word.END:
                return content
            elif word == Word.FAILED:
                raise RankError(f"What rank 0 did has failed there: {content}")

    # --- between them ---

    def _conclude(self, word: Word, content: Any) -> None:
        # Ranks that are out of step do not listen any more.
        if self._failure is None:
            self._say(word, content)

    def _say(self, word: Word, content: Any = None) -> None:
        data = json.dumps([word, content], separators=(",", ":")).encode()
        data = len(data).to_bytes(LENGTH, "little") + data
        self._broadcast(torch.frombuffer(bytearray(data[:FIRST].ljust(FIRST)), dtype=torch.uint8))
        if rest := data[FIRST:]:
            self._broadcast(torch.frombuffer(bytearray(rest), dtype=torch.uint8))

    def _hear(self) -> tuple[str, Any]:
        data = self._received(FIRST)
        end = LENGTH + int.from_bytes(data[:LENGTH], "little")
        if end > FIRST:
            data += self._received(end - FIRST)
        word, content = json.loads(data[LENGTH:end])
        return word, content

    def _received(self, size: int) -> bytes:
        tensor = torch.empty(size, dtype=torch.uint8)
        self._broadcast(tensor)
        return tensor.numpy().tobytes()

    def _broadcast(self, tensor: Tensor) -> None:
        with self._together():
            dist.broadcast(tensor, src=0, group=self._group)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What fails inside leaves the ranks out of step for good: whatever comes later fails at once instead of waiting."""
        if self._failure is not None:
            raise RankError(f"The ranks of this model are out of step, start them again: {self._failure}")
        try:
            yield
        except BaseException as error:
            self._failure = f"{type(error).__name__} on rank {self.rank}: {error}"
            if isinstance(error, RuntimeError) and not isinstance(error, RankError):
                # What torch raises where a peer has gone, or does not answer.
                raise RankError(
                    f"A step that all ranks take together has failed, start them again: {self._failure}"
                ) from error
            raise


_KNOWN: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()


def _short(content: Any) -> str:
    text = str(content)
    return text if len(text) <= 80 else text[:80] + " …"
