"""How long a forward takes, by its requests and query tokens: from a profile, or learned while serving."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median

from ..calibration import CostProfile
from ..structs import ForwardRecord

TOKENS = 128
"""Query tokens of a request that curves reach to."""
WINDOW = 15
"""Last measurements of a size that count."""
LEAN = 3
"""Weight, in measurements, of all sizes together."""


class ForwardTimes:
    """
    Milliseconds of draft and verify forwards.

    A profile, or without one a straight line of no scale, says what to expect; the times of real forwards correct it, by kind and
    by the total of query tokens. So a machine without a profile is known after a few rounds, and one that changes is followed.

    Args:
        profile (`CostProfile`, *optional*): measured rounds.
    """

    def __init__(self, profile: CostProfile | None = None) -> None:
        self._draft = _Grid(
            [(c.load, c.block_size, c.draft_ms) for c in profile.rounds if c.draft_ms] if profile else ()
        )
        self._verify = _Grid([(c.load, c.block_size, c.verify_ms) for c in profile.rounds] if profile else ())
        self._corrections = {"draft": _Correction(), "verify": _Correction()}
        self._curves: dict[tuple[str, int], list[float]] = {}
        self._seen = 0

    def curve(self, kind: str, load: int) -> list[float]:
        """`[129]`: milliseconds of a `draft` or `verify` forward of `load` requests, by the query tokens of each."""
        if (kind, load) not in self._curves:
            correction = self._corrections[kind]
            self._curves[kind, load] = [
                self._expected(kind, load, tokens) * correction.at(load * max(tokens, 1))
                for tokens in range(TOKENS + 1)
            ]
        return self._curves[kind, load]

    def observe(self, record: ForwardRecord) -> float:
        """Learn from a forward that was run; returns its milliseconds, with the noise of the moment smoothed out."""
        requests, kind = len(record.requests), "draft" if record.kind == "draft" else "verify"
        expected = self._expected(kind, requests, record.query_tokens / requests)
        self._corrections[kind].observe(record.query_tokens, 1000 * record.elapsed / expected)
        self._seen += 1
        # Curves are made anew now and then, not for every forward.
        if self._seen < 32 or self._seen % 32 == 0:
            self._curves.clear()
        return expected * self._corrections[kind].at(record.query_tokens)

    def _expected(self, kind: str, load: int, tokens: float) -> float:
        return (self._draft if kind == "draft" else self._verify).at(load, tokens)


class _Grid:
    """Measured milliseconds by load and tokens a request; straight lines between them and beyond the last."""

    def __init__(self, cells: list[tuple[int, int, float]] | tuple[()]) -> None:
        sums: dict[int, dict[int, list[float]]] = {}
        for load, tokens, ms in cells:
            sums.setdefault(load, {}).setdefault(tokens, []).append(ms)
        self._rows = {
            load: [(tokens, sum(ms) / len(ms)) for tokens, ms in sorted(row.items())]
            for load, row in sorted(sums.items())
        }

    def at(self, load: int, tokens: float) -> float:
        if not self._rows:
            # Without a scale: a forward costs as much as 32 of its query tokens, and one for each.
            return 1 + load * tokens / 32
        return _between([(known, _between(row, tokens)) for known, row in self._rows.items()], load)


def _between(points: list[tuple[int, float]], x: float) -> float:
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    # Beyond the first and the last point the line goes on, though never to nothing.
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), y0 / 4)


class _Correction:
    """
    Measured over expected, by powers of two of the query tokens.

    Medians, since a busy moment of the machine can make one forward many times slower. A size that was seen little leans on all sizes
    together: a first bad measurement must not keep it from being measured again.
    """

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        self._all: deque[float] = deque(maxlen=4 * WINDOW)
        self._known: list[tuple[int, float]] = []

    def observe(self, tokens: int, ratio: float) -> None:
        value = math.log(ratio)
        self._all.append(value)
        self._recent.setdefault(tokens.bit_length(), deque(maxlen=WINDOW)).append(value)
        together = median(self._all)
        self._known = [
            (bucket, (len(seen) * median(seen) + LEAN * together) / (len(seen) + LEAN))
            for bucket, seen in sorted(self._recent.items())
        ]

    def at(self, tokens: int) -> float:
        """What was not measured is as its neighbours are."""
        if not self._known:
            return 1.0
        place = math.log2(tokens) + 1
        right = bisect_left(self._known, (place,))
        if right in (0, len(self._known)):
            return math.exp(self._known[min(right, len(self._known) - 1)][1])
        (low, before), (high, after) = self._known[right - 1 : right + 1]
        return math.exp(before + (after - before) * (place - low) / (high - low))
