"""Losses: derivatives against differences, and their bounds."""

import numpy as np
import pytest

from sparsedp import ConfigError
from sparsedp.convex.losses import Huber, Logistic, Loss, SmoothedHinge, Squared, find_loss

LOSSES = [Logistic(), SmoothedHinge(), SmoothedHinge(0.1), Squared(2.0), Huber(0.3)]


def margins_and_targets(loss: Loss) -> tuple[np.ndarray, np.ndarray]:
    margins = np.concatenate([np.linspace(-4, 4, 1601) + 1e-4, [-800.0, 800.0]])
    values = (-1.0, 1.0) if loss.classifies else (-2.0, 0.4, 2.0)
    targets = np.repeat(values, len(margins))
    return np.tile(margins, len(values)), targets


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_derivatives_match_differences(loss: Loss) -> None:
    margins, targets = margins_and_targets(loss)
    step = 1e-6
    slopes = (loss.value(margins + step, targets) - loss.value(margins - step, targets)) / (2 * step)
    inside = np.abs(margins) < 100
    np.testing.assert_allclose(loss.slope(margins, targets)[inside], slopes[inside], atol=1e-5)
    curvatures = (loss.slope(margins + step, targets) - loss.slope(margins - step, targets)) / (2 * step)
    away = inside & (np.abs(loss.curvature(margins + step, targets) - loss.curvature(margins - step, targets)) < 1e-3)
    np.testing.assert_allclose(loss.curvature(margins, targets)[away], curvatures[away], atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_bounds_hold_and_are_reached(loss: Loss) -> None:
    margins, targets = margins_and_targets(loss)
    largest = float(np.abs(margins).max())
    slopes = np.abs(loss.slope(margins, targets))
    assert slopes.max() <= loss.largest_slope(largest) <= slopes.max() * 1.001
    curvatures = loss.curvature(margins, targets)
    assert curvatures.max() <= loss.largest_curvature * (1 + 1e-12) <= curvatures.max() * 1.01
    at_zero = loss.value(np.zeros_like(targets), targets).max()
    assert at_zero <= loss.largest_at_zero * (1 + 1e-12)


def test_values_do_not_overflow() -> None:
    margins, targets = np.array([-1e4, 1e4]), np.array([1.0, 1.0])
    np.testing.assert_allclose(Logistic().value(margins, targets), [1e4, 0.0])
    np.testing.assert_allclose(Logistic().slope(margins, targets), [-1.0, 0.0])


def test_targets_are_clipped_one_by_one() -> None:
    np.testing.assert_array_equal(Squared(1.5).admit(np.array([-9.0, 1.0, 1.6])), [-1.5, 1.0, 1.5])


def test_unknown_losses_and_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'logistic'"):
        find_loss("logistc")
    with pytest.raises(ConfigError, match="width"):
        SmoothedHinge(0.0)
    with pytest.raises(ConfigError, match="bound"):
        Squared(float("inf"))
