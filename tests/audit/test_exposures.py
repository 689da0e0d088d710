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


def test_agrees_with_tensorflow_privacy_on_the_same_losses() -> None:
    """Recorded by running secret_sharer/exposures.py of the repository tensorflow/privacy, revision 03035d5 (the wheel lacks it),
    by itself with scipy 1.17.1, on these losses: `compute_exposure_interpolation` and `compute_exposure_extrapolation`, which
    take them by repetitions. Both return them in the order of the losses, which are ascending here.
    """
    references = 6 + 2 * stats.skewnorm.ppf((np.arange(1000) + 0.5) / 1000, 2.0)
    losses = [5.3, 6.7, 7.9, 9.4, 4.1, 5.05, 6.2, 1.5, 3.0, 4.6]
    by_rank = [
        4.3808217839, 1.6348674065, 0.5972778232, 0.1328942705, 8.3808217839, 5.1078032895, 2.3808217839, 9.9657842847,
        9.9657842847, 6.506352666,
    ]  # fmt: skip
    extrapolated = [
        4.41180691, 1.64028129, 0.59850168, 0.13449634, 8.74432656, 5.1490749, 2.39232413, 25.79918843, 14.61478439, 6.69036253
    ]  # fmt: skip
    np.testing.assert_allclose(exposure(losses, references), by_rank, rtol=1e-9)
    np.testing.assert_allclose(exposure(losses, references, "extrapolate"), extrapolated, rtol=1e-5)


def test_what_is_infinite_for_tensorflow_privacy_is_finite() -> None:
    """Recorded likewise: 294.9402965 and inf, where the law's share is too small for float64."""
    references = stats.norm.ppf((np.arange(500) + 0.5) / 500)
    near, far = exposure([-20.0, -45.0], references, "extrapolate")
    assert near == pytest.approx(294.9402965, rel=1e-4)
    assert 1400 < far < 1600  # about 45^2 / 2 / ln 2


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shape", [1e4, 1e8, 1e12])
def test_a_law_with_an_edge(shape: float) -> None:
    """References whose losses begin at once are fitted by a huge shape, nearly half a normal law."""
    fit = ReferenceFit(shape, 0.0, 1.0, 0.0, 1.0)
    values = [fit.log_cdf(x) for x in (1e-3, 1e-9, 0.0, -1e-12, -1e-9, -1e-3, -1.0, -2e3)]
    assert all(np.isfinite(values)) and values == sorted(values, reverse=True)
    assert fit.log_cdf(0.0) == pytest.approx(math.log(math.atan(1 / shape) / math.pi), rel=1e-6)
    assert fit.log_cdf(1e-3) == pytest.approx(math.log(math.erf(1e-3 / math.sqrt(2))), rel=0.02)


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
