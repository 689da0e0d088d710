"""Curves of any length in a bounded number of points: neighbours join into their mean, with their extremes beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class Point:
    """One value, or several that lie beside one another. `y` is None where none of them was a finite number."""

    x: float
    y: float | None
    low: float | None
    high: float | None


class Curve:
    """Takes values one after the other; keeps at most 2 x `points` sums of neighbours in memory."""

    def __init__(self, points: int = 300) -> None:
        self._limit = 2 * points
        self._width = 1  # values that a full sum holds
        self._sums: list[_Sum] = []
        self.count = 0
        self.not_finite = 0  # of these
        self.total = 0.0

    def add(self, x: float, value: Any) -> None:
        """A value that is None, text or not finite leaves a gap."""
        number = finite(value)
        self.count += 1
        if number is None:
            self.not_finite += 1
        else:
            self.total += number
        if not self._sums or self._sums[-1].count >= self._width:
            if len(self._sums) == self._limit:
                self._sums = [a.joined(b) for a, b in zip(self._sums[::2], self._sums[1::2])]
                self._width *= 2
            self._sums.append(_Sum())
        self._sums[-1].add(x, number)

    @property
    def mean(self) -> float | None:
        finite = self.count - self.not_finite
        return self.total / finite if finite else None

    @property
    def is_thinned(self) -> bool:
        return self._width > 1

    def points(self) -> list[Point]:
        return [part.point() for part in self._sums]

    def ends(self, share: float = 0.2) -> tuple[float, float] | None:
        """The means of the first and of the last `share` of the values; None without two numbers."""
        numbers = [point.y for point in self.points() if point.y is not None]
        if len(numbers) < 2:
            return None
        part = max(1, round(share * len(numbers)))
        return fmean(numbers[:part]), fmean(numbers[-part:])


def finite(value: Any) -> float | None:
    """The value as a finite number; None if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


class _Sum:
    def __init__(self) -> None:
        self.count, self.numbers = 0, 0
        self.x, self.y = 0.0, 0.0
        self.low, self.high = math.inf, -math.inf

    def add(self, x: float, y: float | None) -> None:
        self.count += 1
        self.x += x
        if y is not None:
            self.numbers += 1
            self.y += y
            self.low, self.high = min(self.low, y), max(self.high, y)

    def joined(self, other: _Sum) -> _Sum:
        both = _Sum()
        both.count, both.numbers = self.count + other.count, self.numbers + other.numbers
        both.x, both.y = self.x + other.x, self.y + other.y
        both.low, both.high = min(self.low, other.low), max(self.high, other.high)
        return both

    def point(self) -> Point:
        if not self.numbers:
            return Point(self.x / self.count, None, None, None)
        return Point(self.x / self.count, self.y / self.numbers, self.low, self.high)
