"""How long a forward takes, by its requests and query tokens: from a profile, or learned while serving."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from statistics import median

import numpy as np

from ..calibration import CostProfile
from ..structs import ForwardRecord
from .best_round import TOKENS

WINDOW = 15
"""Last measurements of a size that count."""
LEAN = 3
"""Weight, in measurements, of all sizes together."""


class ForwardTimes:
    """
    Milliseconds of verifying forwards, with or without branches; `auto` runs no others.

    A profile gives the shape: a fixed part, and what query tokens add to it; the times of real forwards scale both parts, so that a machine
    that changes is followed, and a curve never gets bumps that were only noise. Without a profile a plane is learned from scratch.

    Args:
        profile (`CostProfile`, *optional*): measured rounds.
    """

    def __init__(self, profile: CostProfile | None = None) -> None:
        self._model: _Scaled | _Plane = _Scaled(profile) if profile else _Plane()
        self._curves: dict[int, list[float]] = {}

    def curve(self, load: int) -> list[float]:
        """`[129]`: milliseconds of a forward of `load` requests, by the query tokens of each."""
        if load not in self._curves:
            self._curves[load] = self._model.curve(load)
        return self._curves[load]

    def observe(self, record: ForwardRecord) -> float:
        """Learn from a forward that was run; returns its milliseconds, with the noise of the moment smoothed out."""
        self._curves.clear()
        return self._model.observe(len(record.requests), record.query_tokens, 1000 * record.elapsed)


class _Scaled:
    """A profile's grid, its fixed part and what tokens add scaled by what is measured."""

    def __init__(self, profile: CostProfile) -> None:
        self._grid = _Grid(profile.forward_cells)
        self._scales = _Scales()

    def curve(self, load: int) -> list[float]:
        fixed, *_ = line = self._grid.line(load)
        scales = self._scales
        return [scales.fixed * fixed + scales.each * (ms - fixed) for ms in line]

    def observe(self, requests: int, query_tokens: int, ms: float) -> float:
        fixed, *_ = line = self._grid.line(requests)
        tokens = query_tokens / requests
        below = min(int(tokens), TOKENS - 1)
        expected = line[below] + (line[below + 1] - line[below]) * (tokens - below)
        self._scales.observe(query_tokens, min(fixed / expected, 1.0), ms / expected)
        return self._scales.fixed * fixed + self._scales.each * (expected - fixed)


class _Plane:
    """
    `a + b * requests + c * query tokens`, by least squares of relative errors over the last forwards.

    To begin with a forward is taken to cost as much as 32 of its query tokens, or 64 of its requests, at the scale of the first one that is
    seen; this counts little, but decides what measurements leave open.
    """

    SHAPE = np.array([1.0, 1 / 64, 1 / 32])
    WEIGHT = 0.05
    """Of the prior, in measurements."""
    KEEP = 1 - 1 / 128
    CLIP = 2.0
    """A forward that took longer than so many times what was expected counts as that: something else was in its way."""

    def __init__(self) -> None:
        self._prior = self._plane = self.SHAPE
        self._gram, self._sums, self._seen = np.zeros((3, 3)), np.zeros(3), 0

    def curve(self, load: int) -> list[float]:
        fixed, each = float(self._plane @ (1, load, 0)), load * float(self._plane[2])
        return [fixed + each * tokens for tokens in range(TOKENS + 1)]

    def observe(self, requests: int, query_tokens: int, ms: float) -> float:
        features = np.array([1.0, requests, query_tokens])
        if not self._seen:
            self._prior = self._plane = self.SHAPE * (ms / (self.SHAPE @ features))
        self._seen += 1
        ms = min(ms, self.CLIP * float(self._plane @ features))
        self._gram = self.KEEP * self._gram + np.outer(features, features) / ms**2
        self._sums = self.KEEP * self._sums + features / ms
        weights = np.diag(self.WEIGHT * self._prior**-2)
        solved = np.linalg.solve(self._gram + weights, self._sums + weights @ self._prior)
        # Nothing gets faster by having more to do.
        self._plane = np.maximum(solved, 0.01 * self._prior)
        return float(self._plane @ features)


class _Grid:
    """Measured milliseconds by load and tokens a request; straight lines between them and beyond the last."""

    def __init__(self, cells: list[tuple[int, int, float]]) -> None:
        sums: dict[int, dict[int, list[float]]] = {}
        for load, tokens, ms in cells:
            sums.setdefault(load, {}).setdefault(tokens, []).append(ms)
        self._rows: list[tuple[int, list[float]]] = []
        for load, row in sorted(sums.items()):
            points = [(tokens, sum(ms) / len(ms)) for tokens, ms in sorted(row.items())]
            self._rows.append((load, [between(points, tokens) for tokens in range(TOKENS + 1)]))
        self._lines: dict[int, list[float]] = {}

    def line(self, load: int) -> list[float]:
        """`[129]`: at one load, by tokens."""
        if load not in self._lines:
            columns = zip(*(row for _, row in self._rows), strict=True)
            loads = [known for known, _ in self._rows]
            self._lines[load] = [between(list(zip(loads, column, strict=True)), load) for column in columns]
        return self._lines[load]


def between(points: list[tuple[int, float]], x: float) -> float:
    """The height at `x` of straight lines between points, which ascend."""
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left(points, (x,)), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    # Beyond the first and the last point the line goes on, though never to nothing.
    return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), y0 / 4)


class _Scales:
    """
    Factors of a forward's fixed part and of what its tokens add.

    For each power of two of query tokens the median of measured over expected is taken, since a busy moment of the machine can make one
    forward many times slower; least squares over these give the factors. Both lean on the median of all, so that sizes that were
    seen little do not set them far apart.
    """

    def __init__(self) -> None:
        self.fixed = self.each = 1.0
        self._by_size: dict[int, deque[tuple[float, float]]] = {}
        self._all: deque[float] = deque(maxlen=4 * WINDOW)

    def observe(self, tokens: int, fixed_share: float, ratio: float) -> None:
        self._all.append(ratio)
        self._by_size.setdefault(tokens.bit_length(), deque(maxlen=WINDOW)).append((fixed_share, ratio))
        together = median(self._all)
        # Normal equations of `ratio = fixed * share + each * (1 - share)`, with the leaning as two more measurements.
        a, b, c = float(LEAN), float(LEAN), 0.0
        d = e = LEAN * together
        for seen in self._by_size.values():
            shares, ratios = zip(*seen, strict=True)
            share, value, n = median(shares), median(ratios), len(seen)
            a, b, c = a + n * share**2, b + n * (1 - share) ** 2, c + n * share * (1 - share)
            d, e = d + n * share * value, e + n * (1 - share) * value
        determinant = a * b - c * c
        self.fixed = max((d * b - e * c) / determinant, together / 4)
        self.each = max((a * e - c * d) / determinant, together / 4)
