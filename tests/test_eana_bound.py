"""Theorem 3.1 of the EANA paper against the Renyi divergence computed directly."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from sparsedp.mechanisms import eana_advisory_epsilon, eana_renyi_bound


def gaussian_renyi(alpha: int, shift: float, variance: float, other: float) -> float:
    """D_alpha(N(0, variance) || N(shift, other)) in closed form."""
    mixed = alpha * other + (1 - alpha) * variance
    assert mixed > 0
    squares = alpha * shift**2 / (2 * mixed)
    return squares + math.log(other / variance) / 2 + math.log(other / mixed) / (2 * (alpha - 1))


def test_closed_form_against_quadrature() -> None:
    p, q = stats.norm(0, math.sqrt(3.0)), stats.norm(0.7, 2.0)
    value, _ = integrate.quad(lambda x: math.exp(3 * p.logpdf(x) - 2 * q.logpdf(x)), -40, 40)
    assert gaussian_renyi(3, 0.7, 3.0, 4.0) == pytest.approx(math.log(value) / 2)


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(5, 60), min_size=1, max_size=6),
    alpha=st.integers(2, 5),
    std=st.floats(0.1, 5.0),
    seed=st.integers(0, 1000),
)
def test_bound_covers_both_directions(counts: list[int], alpha: int, std: float, seed: int) -> None:
    """A unit x* with |x*| <= L joins: coordinate j's model has noise C_j sigma^2 before and (C_j + 1) sigma^2 after."""
    x = np.random.default_rng(seed).normal(size=len(counts))
    x = x / np.linalg.norm(x)
    bound = eana_renyi_bound(alpha, min_count=min(counts), max_rows=len(counts), gradient_bound=1.0, noise_std=std)
    without, joined = [c * std**2 for c in counts], [(c + 1) * std**2 for c in counts]
    for one, other in ((without, joined), (joined, without)):
        exact = sum(gaussian_renyi(alpha, shift, v, w) for shift, v, w in zip(x, one, other))
        assert exact <= bound + 1e-9


def test_conditions_are_checked() -> None:
    fine = {"min_count": 10, "max_rows": 3, "gradient_bound": 1.0, "noise_std": 1.0}
    for alpha in (1, 11, 2.5):
        with pytest.raises(ValueError, match="alpha"):
            eana_renyi_bound(alpha, **fine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="noise_std"):
        eana_renyi_bound(2, **{**fine, "noise_std": 0.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="delta"):
        eana_advisory_epsilon(0.0, **fine)  # type: ignore[arg-type]


def test_advisory_epsilon_falls_with_noise_and_counts() -> None:
    base = {"min_count": 100, "max_rows": 5, "gradient_bound": 1.0, "noise_std": 0.5}
    epsilon = eana_advisory_epsilon(1e-5, **base)  # type: ignore[arg-type]
    assert 0 < eana_advisory_epsilon(1e-5, **{**base, "noise_std": 2.0}) < epsilon  # type: ignore[arg-type]
    assert 0 < eana_advisory_epsilon(1e-5, **{**base, "min_count": 1000}) < epsilon  # type: ignore[arg-type]
