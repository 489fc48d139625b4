"""Counters over a decoding, as an observer, and the identities that they must satisfy."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import LosslessError
from .hooks import Hook
from .structs import DraftSource, FinishRecord, ForwardRecord, RoundRecord

DECODE_KINDS = ("draft", "verify", "fused")


@dataclass
class DecodeMetrics(Hook):
    """
    What the decodings since its making have cost. Prefill is counted apart and is in none of the decode figures.

    Every forward is counted once for each request that takes part in it, so that the figures of a request do not depend on
    its neighbours; for one request at a time that is the number of forwards.
    """

    forwards: Counter[str] = field(default_factory=Counter)
    query_tokens: Counter[str] = field(default_factory=Counter)
    forward_seconds: float = 0.0
    """In draft and verify forwards."""
    decode_seconds: float = 0.0
    """From the end of a prefill to the last commit after it."""
    requests: int = 0
    new_tokens: int = 0
    """All tokens written, each request's first one (the prefill's) included."""
    taken_back: int = 0
    """Tokens committed and then removed by a batch's stopping criterion."""
    committed_tokens: int = 0
    """Tokens committed by rounds."""
    rounds: Counter[DraftSource] = field(default_factory=Counter)
    committed_histogram: Counter[int] = field(default_factory=Counter)
    full_rounds: int = 0
    """Rounds whose whole block was accepted."""
    outcomes: Counter[str] = field(default_factory=Counter)
    _since: float = 0.0

    def on_prefill(self, record: ForwardRecord) -> None:
        self._count(record)
        self._since = time.perf_counter()

    def on_draft(self, record: ForwardRecord) -> None:
        self._count(record)
        self.forward_seconds += record.seconds

    def on_verify(self, record: ForwardRecord) -> None:
        self._count(record)
        self.forward_seconds += record.seconds

    def on_commit(self, record: RoundRecord) -> None:
        now = time.perf_counter()
        self.decode_seconds += now - self._since
        self._since = now
        self.rounds[record.draft.source] += 1
        self.committed_tokens += len(record.committed)
        self.committed_histogram[len(record.committed)] += 1
        self.full_rounds += record.accepted == record.block_size - 1
        self.outcomes[record.outcome.value] += 1

    def on_finish(self, record: FinishRecord) -> None:
        self.requests += 1
        self.new_tokens += record.new_tokens
        self.taken_back += record.taken_back

    def add(self, other: DecodeMetrics) -> None:
        """Take over what another observer has counted."""
        for name, value in vars(other).items():
            if not name.startswith("_"):
                setattr(self, name, getattr(self, name) + value)

    def _count(self, record: ForwardRecord) -> None:
        self.forwards[record.kind] += len(record.requests)
        self.query_tokens[record.kind] += record.query_tokens

    @property
    def decode_forwards(self) -> int:
        return sum(self.forwards[kind] for kind in DECODE_KINDS)

    @property
    def all_rounds(self) -> int:
        return sum(self.rounds.values())

    @property
    def decode_tpf(self) -> float:
        """Tokens committed by rounds for each draft or verify forward."""
        return _ratio(self.committed_tokens, self.decode_forwards)

    @property
    def e2e_tpf(self) -> float:
        """All new tokens for each forward, the prefill included."""
        return _ratio(self.new_tokens, self.decode_forwards + self.forwards["prefill"])

    @property
    def tau(self) -> float:
        """Committed tokens per two forwards."""
        return 2 * self.decode_tpf

    @property
    def mean_committed(self) -> float:
        return _ratio(self.committed_tokens, self.all_rounds)

    @property
    def reuse_rate(self) -> float:
        """Share of the rounds whose draft came from a branch."""
        return _ratio(self.rounds[DraftSource.BRANCH], self.all_rounds)

    @property
    def leftover_rate(self) -> float:
        """Share of the rounds whose draft is what was left of others."""
        return _ratio(self.rounds[DraftSource.LEFTOVER], self.all_rounds)

    @property
    def query_tokens_per_forward(self) -> dict[str, float]:
        """Mean query tokens of a forward of each kind, for each request in it."""
        return {kind: _ratio(self.query_tokens[kind], self.forwards[kind]) for kind in self.forwards}

    @property
    def host_share(self) -> float:
        """Share of the decode time that is outside the model's forwards."""
        return 1 - self.forward_seconds / self.decode_seconds if self.decode_seconds else 0.0

    def summary(self) -> dict[str, Any]:
        """The figures as plain values; `committed` counts tokens of rounds, so the prefill's first token is not in it."""
        return {
            "requests": self.requests,
            "new_tokens": self.new_tokens,
            "committed": self.committed_tokens,
            "rounds": self.all_rounds,
            "forwards": dict(self.forwards),
            "decode_tpf": self.decode_tpf,
            "e2e_tpf": self.e2e_tpf,
            "tau": self.tau,
            "mean_committed": self.mean_committed,
            "reuse_rate": self.reuse_rate,
            "leftover_rate": self.leftover_rate,
            "outcomes": dict(self.outcomes),
        }

    def check(self, draft_forwards_per_draft: int | None = 1) -> None:
        """
        Raise [`LosslessError`] if the counters contradict each other.

        Args:
            draft_forwards_per_draft (`int`, *optional*): 1 for one-forward drafts; `None` under a draft threshold.
        """
        drafted, reused = self.rounds[DraftSource.FORWARD], self.rounds[DraftSource.BRANCH]
        verified = self.forwards["verify"] + self.forwards["fused"]
        undrafted = self.rounds[DraftSource.NONE] + self.rounds[DraftSource.LEFTOVER]
        claims = {
            "rounds = verifying forwards": (self.all_rounds, verified),
            "rounds = sum of outcomes": (self.all_rounds, sum(self.outcomes.values())),
            "new tokens + taken back = one a request + committed": (
                self.new_tokens + self.taken_back,
                self.requests + self.committed_tokens,
            ),
        }
        if draft_forwards_per_draft is not None:
            forwards = sum(self.forwards.values())
            claims["forwards = prefills + 2 rounds - reused - left over - undrafted"] = (
                forwards,
                self.forwards["prefill"] + 2 * self.all_rounds - reused - undrafted,
            )
            claims["draft forwards = drafted rounds"] = (self.forwards["draft"], drafted)
        for claim, (left, right) in claims.items():
            if left != right:
                raise LosslessError(f"The counters contradict each other: {claim}, but {left} != {right}.")


def looping_tokens(tokens: Sequence[int], longest_period: int = 64, least_times: int = 4) -> int:
    """
    How many tokens at the end of a text only repeat what stands before them.

    In a loop nearly everything drafted is accepted, which says nothing about the speed on real text.

    Args:
        tokens (`Sequence[int]`): an output.
        longest_period (`int`, defaults to 64): tokens that a repeated piece may have.
        least_times (`int`, defaults to 4): pieces, the first one included, that make a loop.
    """
    longest = 0
    for period in range(1, min(longest_period, len(tokens) // least_times) + 1):
        same = 0
        while same + period < len(tokens) and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        if same >= period * (least_times - 1):
            longest = max(longest, same)
    return longest


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
