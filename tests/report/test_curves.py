"""Curves of any length in few points, and charts of them: nothing is lost that somebody would look for."""

from __future__ import annotations

import math
import sys

import pytest

from sparsedp.report.chart import Series, chart, number, short
from sparsedp.report.curves import Curve, Point


def test_a_million_values_are_few_points_whose_range_has_the_one_spike() -> None:
    curve = Curve(points=300)
    for step in range(1_000_000):
        curve.add(step, 1e6 if step == 777_777 else math.sin(step / 1e5))
    points = curve.points()
    assert 300 <= len(points) <= 600 and curve.count == 1_000_000 and curve.is_thinned
    assert sys.getsizeof(points) < 10_000
    assert max(point.high or 0 for point in points) == 1e6
    spike = next(point for point in points if point.high == 1e6)
    assert abs(spike.x - 777_777) < 1e6 / 300
    assert [point.x for point in points] == sorted(point.x for point in points)
    assert points[0].y == pytest.approx(math.sin(points[0].x / 1e5), abs=1e-2)
    assert curve.mean == pytest.approx(sum(math.sin(s / 1e5) for s in range(0, 1_000_000, 100)) / 1e4 + 1, abs=0.01)


def test_few_values_stay_as_they_are() -> None:
    curve = Curve()
    for step in range(500):
        curve.add(step, step**2)
    assert [(p.x, p.y, p.low, p.high) for p in curve.points()] == [(s, s**2, s**2, s**2) for s in range(500)]
    assert not curve.is_thinned


@pytest.mark.parametrize("value", [None, "infinity", math.nan, math.inf, -math.inf, True, [], 10**400])
def test_what_is_no_finite_number_leaves_a_gap(value: object) -> None:
    curve = Curve()
    for step, y in enumerate([1.0, value, 3.0]):
        curve.add(step, y)
    assert [point.y for point in curve.points()] == [1.0, None, 3.0]
    assert curve.not_finite == 1 and curve.mean == 2.0
    drawn = chart("loss", [Series.of("loss", curve)])
    assert drawn is not None and drawn.lines[0].path.count("M") == 2
    assert drawn.data["series"][0]["y"] == [1.0, None, 3.0]


def test_nothing_to_draw_is_no_chart() -> None:
    empty, nothing = Curve(), Curve()
    nothing.add(1, math.nan)
    assert chart("loss", [Series.of("a", empty), Series.of("b", nothing)]) is None
    assert empty.mean is None and nothing.mean is None


@pytest.mark.parametrize(
    "values",
    [[0.0], [5.0], [-3.0], [1e-12, 2e-12], [0.5, 0.5], [1e26, 1.0], [1e300, 1e-300], [-1e9, 1e9], [3, 3.0000001]],
)
def test_ticks_lie_on_the_axis_are_few_and_have_names_of_their_own(values: list[float]) -> None:
    drawn = chart("c", [Series("c", [Point(i, v, v, v) for i, v in enumerate(values)])])
    assert drawn is not None
    for ticks in (drawn.x_ticks, drawn.y_ticks):
        assert 2 <= len(ticks) <= 7
        assert all(-1e-6 <= tick.at <= 100 + 1e-6 for tick in ticks)
        assert len({tick.label for tick in ticks}) == len(ticks)
    assert all(0 <= at <= 100 for one in drawn.data["series"] for at in one["at"])


def test_a_loss_over_many_powers_of_ten_gets_a_logarithmic_scale() -> None:
    drawn = chart("loss", [Series("loss", [Point(i, 10.0**i, 10.0**i, 10.0**i) for i in range(27)])])
    assert drawn is not None and "Logarithmic" in drawn.note
    assert drawn.y_ticks[0].label == "1"


def test_numbers_in_words() -> None:
    assert [short(v) for v in (0, 0.25, 1500, 2e7, 1e-5, 3e20)] == ["0", "0.25", "1.5k", "20M", "1e-5", "3e20"]
    assert [number(v) for v in (None, 1234567, 0.12345, 1e-6, 12345.6)] == [
        "–",
        "1,234,567",
        "0.1235",
        "1e-06",
        "12,346",
    ]


def test_the_ends_of_a_curve_are_means_of_its_first_and_last_fifth() -> None:
    curve = Curve()
    for step, y in enumerate([None, 1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0, 7.0]):
        curve.add(step, y)
    assert curve.ends() == (2.0, 6.0)
    assert Curve().ends() is None
