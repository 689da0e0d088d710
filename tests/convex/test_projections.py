"""Projections against optimality conditions, and against scipy's programmes."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize

from sparsedp import ConfigError, SparseDPError
from sparsedp.convex import Box, L1Ball, L2Ball, WholeSpace, project

# Degenerate ones too: ties, zeros, one coordinate, points on the boundary and far beyond it.
numbers = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 2.0, 1e-9, 1e9]), st.floats(-10, 10, allow_subnormal=False))
points = st.lists(numbers, min_size=1, max_size=7).map(np.array)
radii = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 1e-6]), st.floats(1e-3, 30))


@settings(max_examples=300, deadline=None)
@given(points, radii)
def test_l1_ball_in_l2_fulfils_the_optimality_condition(point: np.ndarray, radius: float) -> None:
    """<p - x, y - x> <= 0 for every y of the ball, which is to say for its vertices."""
    nearest = project(point, L1Ball(radius), norm="l2")
    assert L1Ball(radius).contains(nearest, 1e-12) or radius == 0
    slack = 1e-9 * (1 + np.abs(point).max()) * (1 + radius)
    assert radius * np.abs(point - nearest).max() - (point - nearest) @ nearest <= slack


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4).map(np.array), st.floats(0.1, 8))
def test_l1_ball_against_a_quadratic_programme(point: np.ndarray, radius: float) -> None:
    d = len(point)
    answer = minimize(
        lambda v: float(((v[:d] - v[d:] - point) ** 2).sum()),
        np.zeros(2 * d),
        jac=lambda v: np.outer([2, -2], v[:d] - v[d:] - point).ravel(),
        bounds=[(0, None)] * (2 * d),
        constraints={"type": "ineq", "fun": lambda v: radius - v.sum(), "jac": lambda v: -np.ones(2 * d)},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    nearest = project(point, L1Ball(radius), norm="l2")
    assert np.linalg.norm(nearest - point) <= np.linalg.norm(answer.x[:d] - answer.x[d:] - point) + 1e-6
    assert np.allclose(nearest, answer.x[:d] - answer.x[d:], atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(points, radii)
def test_l1_ball_in_linf_against_a_linear_programme(point: np.ndarray, radius: float) -> None:
    d = len(point)
    # x = u - v, and t above every |x - p|: the least t.
    eye, column = np.eye(d), np.ones((d, 1))
    rows = np.vstack(
        [np.hstack([eye, -eye, -column]), np.hstack([-eye, eye, -column]), np.append(np.ones(2 * d), 0)[None]]
    )
    size = max(1.0, float(np.abs(point).max()))
    answer = linprog(
        np.append(np.zeros(2 * d), 1), rows, np.concatenate([point, -point, [radius]]) / size, bounds=(0, None)
    )
    nearest = project(point, L1Ball(radius), norm="linf")
    assert np.abs(nearest).sum() <= radius * (1 + 1e-9) + 1e-12
    assert np.abs(nearest - point).max() <= answer.fun * size + 1e-6 * size


@settings(max_examples=300, deadline=None)
@given(points, radii)
def test_l2_ball_in_linf(point: np.ndarray, radius: float) -> None:
    """The nearest points within a smaller distance all lie outside: the one of least norm does."""
    nearest = project(point, L2Ball(radius), norm="linf")
    distance = float(np.abs(nearest - point).max())
    assert np.linalg.norm(nearest) <= radius * (1 + 1e-9) + 1e-12 * np.abs(point).max()
    if distance > 0:
        closer = distance - 1e-6 * (distance + radius)
        least = np.maximum(np.abs(point) - max(0.0, closer), 0)
        assert math.hypot(*least) > radius * (1 - 1e-9)  # numpy's norm of tiny numbers is 0
    else:
        assert (nearest == point).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=4).map(np.array), st.floats(0.1, 8))
def test_l2_ball_in_linf_against_a_programme(point: np.ndarray, radius: float) -> None:
    d = len(point)
    answer = minimize(
        lambda v: v[d],
        np.append(point * min(1, radius / max(1e-9, np.linalg.norm(point))), 10.0),
        constraints=[
            {"type": "ineq", "fun": lambda v: v[d] - (v[:d] - point)},
            {"type": "ineq", "fun": lambda v: v[d] + (v[:d] - point)},
            {"type": "ineq", "fun": lambda v: radius**2 - v[:d] @ v[:d]},
        ],
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 500},
    )
    nearest = project(point, L2Ball(radius), norm="linf")
    if answer.success:
        assert np.abs(nearest - point).max() == pytest.approx(max(0.0, answer.x[d]), abs=1e-4)


@settings(max_examples=100, deadline=None)
@given(points, radii)
def test_l2_ball_in_l2(point: np.ndarray, radius: float) -> None:
    nearest = project(point, L2Ball(radius), norm="l2")
    norm = np.linalg.norm(point)
    assert np.allclose(nearest, point if norm <= radius else point * (radius / norm), rtol=1e-12)


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_box_and_whole_space(norm: str) -> None:
    point = np.array([-3.0, 0.5, 9.0])
    assert (project(point, Box(-1, 2), norm=norm) == [-1, 0.5, 2]).all()
    box = Box(np.array([-math.inf, 1.0, 0.0]), np.array([-4.0, 1.0, math.inf]))
    nearest = project(point, box, norm=norm)
    assert (nearest == [-4, 1, 9]).all() and box.contains(nearest) and not box.contains(point)
    everywhere = project(point, WholeSpace(), norm=norm)
    assert (everywhere == point).all() and everywhere is not point and WholeSpace().contains(point)


def test_points_inside_stay_and_the_argument_is_not_changed() -> None:
    point = np.array([0.1, -0.2, 0.0])
    for ball in (L1Ball(1.0), L2Ball(1.0), L1Ball(0.1), L2Ball(0.1)):
        for norm in ("l2", "linf"):
            before = point.copy()
            nearest = project(point, ball, norm=norm)
            assert (point == before).all() and nearest is not point
            assert (nearest == point).all() == ball.contains(point, 0.0)


def test_many_coordinates() -> None:
    point = np.random.default_rng(0).normal(size=200_000)
    nearest = project(point, L1Ball(50.0), norm="l2")
    assert np.abs(nearest).sum() == pytest.approx(50, rel=1e-9)
    moved = np.abs(point - nearest)
    assert moved[nearest != 0].std() < 1e-12 and moved.max() <= moved[nearest != 0].mean() + 1e-12
    assert np.linalg.norm(project(point, L2Ball(50.0), norm="linf")) == pytest.approx(50, rel=1e-9)
    tied = np.full(100_000, 3.0)
    assert np.allclose(project(tied, L1Ball(50.0), norm="l2"), 50 / 100_000)
    assert np.allclose(project(tied, L2Ball(50.0), norm="linf"), 50 / math.sqrt(100_000))


def test_what_is_refused() -> None:
    for call in (
        lambda: project(np.array([np.nan]), L1Ball(1.0), norm="l2"),
        lambda: project(np.array([np.inf]), L2Ball(1.0), norm="l2"),
        lambda: project(np.zeros((2, 2)), L1Ball(1.0), norm="l2"),
    ):
        with pytest.raises(SparseDPError, match="vector of finite"):
            call()
    for call in (
        lambda: project(np.zeros(2), L1Ball(1.0), norm="l1"),
        lambda: project(np.zeros(2), "ball", norm="l2"),
        lambda: L1Ball(-1.0),
        lambda: L2Ball(math.nan),
        lambda: Box(1, 0),
        lambda: Box(math.nan, 0),
        lambda: Box(math.inf, math.inf),
    ):
        with pytest.raises(ConfigError):
            call()
