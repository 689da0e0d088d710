"""Exposure of canaries: by rank, and by a law that is fitted to the references."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from sparsedp.audit import ReferenceFit, exposure, fit_references
from sparsedp.errors import SparseDPError


def test_by_rank_as_tensorflow_privacy_has_it() -> None:
    """Recorded from `compute_exposure_interpolation` of TensorFlow Privacy's secret_sharer.exposures, in the order given."""
    losses = [20.0, 3.5, 0.0, 0.1]
    expected = [math.log2(16 / 17), math.log2(16) - 2, math.log2(16), math.log2(16)]
    np.testing.assert_allclose(exposure(losses, range(1, 17)), expected)


def test_references_of_the_same_loss_come_first() -> None:
    np.testing.assert_allclose(exposure(torch.tensor([2.0]), [1.0, 2.0, 2.0, 3.0]), [0.0])
    np.testing.assert_allclose(exposure([5.0], [5.0] * 8), [math.log2(8 / 9)])


def test_extrapolation_agrees_with_ranks_where_there_are_references() -> None:
    references = stats.skewnorm(3.0, 2.0, 1.5).rvs(16384, random_state=0)
    losses = np.quantile(references, [0.001, 0.01, 0.2, 0.7])
    np.testing.assert_allclose(exposure(losses, references, "extrapolate"), exposure(losses, references), atol=0.35)
    fit = fit_references(references)
    assert fit.distance < 0.02 and fit.p_value > 0.01


@pytest.mark.parametrize("shape", [-4.0, 0.0, 0.7, 6.0])
def test_the_far_tail_has_no_end(shape: float) -> None:
    """-log2 of a share that float64 cannot hold; against the integral with so many digits as it takes."""
    fit = ReferenceFit(shape, 0.0, 1.0, 0.0, 1.0)
    values = [fit.log_cdf(x) for x in (-2.0, -5.0, -5.5, -8.0, -60.0, -1e4)]
    assert all(np.isfinite(values)) and values == sorted(values, reverse=True)
    at = -4.0  # where both are exact
    area, _ = integrate.quad(lambda x: stats.skewnorm.pdf(x, shape), -40, at, epsabs=0, epsrel=1e-10, limit=400)
    assert fit.log_cdf(at) == pytest.approx(math.log(area), rel=1e-6)
    # The tail joins the other formula without a step.
    edge = stats.skewnorm.ppf(1e-8, shape)
    assert fit.log_cdf(edge - 1e-6) == pytest.approx(fit.log_cdf(edge + 1e-6), abs=1e-3)


@pytest.mark.parametrize("losses, references, method, match", [
    ([float("nan")], [1.0, 2.0], "rank", "1 of the 1 losses are NaN"),
    ([1.0], [1.0, float("inf")], "rank", "references are NaN or infinite"),
    ([], [1.0], "rank", "at least 1 numbers"),
    ([1.0], [], "rank", "references must be a vector"),
    ([[1.0]], [1.0], "rank", "vector"),
    (["a"], [1.0], "rank", "must be numbers"),
    ([1.0], [1.0] * 99, "extrapolate", "at least 100"),
    ([1.0], [1.0] * 200, "extrapolate", "All 200 references have the loss 1"),
    ([1.0], [1.0], "ranks", "Did you mean 'rank'"),
])  # fmt: skip
def test_bad_input_is_told(losses: list, references: list, method: str, match: str) -> None:
    with pytest.raises(SparseDPError, match=match):
        exposure(losses, references, method)
