"""Charts of a report: lines over steps as SVG, whose scales and labels are HTML, so that text keeps its size at any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sparsedp.report.curves import Curve, Point

COLORS = 7  # that the style sheet has; lines beyond them are dashed
_EXTENT = 1000  # of the drawing, in both directions
_DOTS = 40  # points up to which each has a dot
_LOG_FROM = 1000.0  # largest by smallest value above which an axis is logarithmic


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[Point]
    color: int = 0

    @staticmethod
    def of(name: str, curve: Curve, color: int = 0) -> Series:
        return Series(name, curve.points(), color)


@dataclass(frozen=True)
class Tick:
    at: float  # per cent of the axis
    label: str


@dataclass(frozen=True)
class Line:
    name: str
    color: int
    dashed: bool
    path: str
    dots: str
    band: str
    end: float  # where it ends, as a share of the axis: the legend at its right has names in this order


@dataclass(frozen=True)
class Chart:
    title: str
    note: str
    lines: list[Line]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    summary: str  # for those who cannot see it
    x_label: str = "step"
    data: dict[str, Any] = field(default_factory=dict)  # for whoever points at it


def chart(
    title: str, series: Sequence[Series], note: str = "", from_zero: bool = False, x_label: str = "step"
) -> Chart | None:
    """None if there is no number to draw. `from_zero`: the scale begins there, as for counts and shares."""
    series = [one for one in series if any(point.y is not None for point in one.points)]
    if not series:
        return None
    points = [point for one in series for point in one.points]
    left, right = min(point.x for point in points), max(point.x for point in points)
    across = _Linear(0.0 if 0 <= left <= right / 2 else left, right if right > left else left + 1)
    numbers = [value for point in points for value in (point.low, point.high) if value is not None]
    low, high = min(numbers), max(numbers)
    up: _Linear | _Log
    if low > 0 and high / low > _LOG_FROM:
        up = _Log(low, high)
        note = f"{note} Logarithmic scale.".strip()
    else:
        up = _Linear.around(0.0 if from_zero and low >= 0 else low, high)
    if any(point.low != point.high for point in points):
        note = f"{note} Lines are means of neighbouring steps, shades their range.".strip()
    ends = [(one.name, *_ends(one.points)) for one in series]
    return Chart(
        title=title,
        note=note,
        lines=[_line(one, across, up) for one in series],
        x_ticks=_ticks(across),
        y_ticks=_ticks(up),
        summary=f"{title}. " + " ".join(f"{name}: from {number(a)} to {number(b)}." for name, a, b in ends),
        x_label=x_label,
        data={
            "x": [across.low, across.high],
            "label": x_label,
            "series": [
                {
                    "name": one.name,
                    "color": one.color % COLORS,
                    "x": [_rounded(point.x) for point in one.points],
                    "y": [None if point.y is None else _rounded(point.y) for point in one.points],
                    "at": [None if point.y is None else round(100 * up.place(point.y), 2) for point in one.points],
                }
                for one in series
            ],
        },
    )


def _line(series: Series, across: _Linear, up: _Linear | _Log) -> Line:
    runs: list[list[Point]] = [[]]  # between gaps
    for point in series.points:
        if point.y is None:
            runs.append([])
        else:
            runs[-1].append(point)
    runs = [run for run in runs if run]

    def at(x: float, y: float | None) -> str:
        assert y is not None
        return f"{_EXTENT * across.place(x):.1f} {_EXTENT * (1 - up.place(y)):.1f}"

    path = "".join("M" + "L".join(at(p.x, p.y) for p in run) for run in runs)
    count = sum(map(len, runs))
    alone = [run[0] for run in runs if len(run) == 1]
    dotted = [point for run in runs for point in run] if count <= _DOTS else alone
    dots = "".join(f"M{at(point.x, point.y)}h0" for point in dotted)
    band = ""
    if any(point.low != point.high for run in runs for point in run):
        for run in runs:
            band += "M" + "L".join([at(p.x, p.high) for p in run] + [at(p.x, p.low) for p in reversed(run)]) + "Z"
    end = runs[-1][-1].y
    assert end is not None
    return Line(series.name, series.color % COLORS, series.color >= COLORS, path, dots, band, up.place(end))


def _ends(points: Sequence[Point]) -> tuple[float | None, float | None]:
    values = [point.y for point in points if point.y is not None]
    return values[0], values[-1]


@dataclass(frozen=True)
class _Linear:
    low: float
    high: float

    @staticmethod
    def around(low: float, high: float) -> _Linear:
        """A range that ends at ticks."""
        if low == high:
            low, high = (low - 1, high + 1) if low == 0 else (low - abs(low) / 10, high + abs(high) / 10)
        step = _step((high - low) / 4)
        return _Linear(step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9))

    def place(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int) -> list[float]:
        step = _step((self.high - self.low) / most)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor((self.high - first * step) / step + 1e-9)
        return [(first + i) * step for i in range(count + 1)]


@dataclass(frozen=True)
class _Log:
    low: float
    high: float

    def place(self, value: float) -> float:
        first, last = self._powers
        return (math.log10(value) - first) / (last - first)

    @property
    def _powers(self) -> tuple[int, int]:
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        return first, max(last, first + 1)

    def ticks(self, most: int) -> list[float]:
        first, last = self._powers
        every = math.ceil((last - first) / most)
        return [10.0**power for power in range(first, last + 1, every)]


def _step(about: float) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below `about`."""
    power = 10.0 ** math.floor(math.log10(about))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= about * (1 - 1e-9))


def _rounded(value: float) -> float:
    return round(value) if 1e6 <= abs(value) < 1e15 else float(f"{value:.8g}")


def short(value: float, digits: int = 4) -> str:
    """A number on an axis: 0.25, 1.5k, 20M."""
    if value == 0:
        return "0"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size <= abs(value) < 1e15:
            return f"{value / size:.{digits}g}{letter}"
    if 1e-3 <= abs(value) < 1e15:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def _ticks(axis: _Linear | _Log) -> list[Tick]:
    """With so many digits that no two of them read the same."""
    places = axis.ticks(5)
    labels = [short(place) for place in places]
    for digits in range(5, 17):
        if len(set(labels)) == len(labels):
            break
        labels = [short(place, digits) for place in places]
    return [Tick(100 * axis.place(place), label) for place, label in zip(places, labels)]


def number(value: Any) -> str:
    """A number in a sentence or a table."""
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or (value.is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}" if abs(value) < 1e15 else f"{value:.3g}"
