"""Equation 2 of the DP-AdaFEST paper: against its closed form, a simulated oracle, and what a real step reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sparsedp import AdaFEST, ConfigError, PrivacyEngine
from sparsedp.convex import truncated_share, weigh_truncation
from sparsedp.convex.sgd import LinearModel
from sparsedp.step_report import StepReport, TableStep


def report(kept_mass: float, selected: int, rows: int = 1000, dim: int = 4) -> StepReport:
    return StepReport(0, 10, 0.0, 1.0, kept_mass, {"t": TableStep(rows, dim, selected, selected, 0)})


def test_both_sides_as_printed() -> None:
    """sqrt(L^2 (1 + gamma)^2 + h sigma^2) + gamma L sqrt(T) < sqrt(L^2 + D sigma^2), divided by L."""
    L, sigma, T, gamma, h, D = 2.0, 0.3, 50, 0.05, 40, 4000
    weighed = weigh_truncation(report(1 - gamma**2, 10), lipschitz=L, noise_std=sigma, steps=T)
    assert weighed.truncated == pytest.approx(gamma)
    left = math.sqrt(L**2 * (1 + gamma) ** 2 + h * sigma**2) + gamma * L * math.sqrt(T)
    assert weighed.selected == pytest.approx(left / L)
    assert weighed.dense == pytest.approx(math.sqrt(L**2 + D * sigma**2) / L)
    assert weighed.pays == (left < math.sqrt(L**2 + D * sigma**2))


def test_the_largest_share_is_where_it_stops_to_pay() -> None:
    asked: dict[str, Any] = {"lipschitz": 1.0, "noise_std": 0.05, "steps": 100}
    largest = weigh_truncation(report(1.0, 10), **asked).largest
    assert 0 < largest < 1
    for share, pays in ((largest * 0.99, True), (largest * 1.01, False)):
        assert weigh_truncation(report(1 - share**2, 10), **asked).pays is pays
    # Nothing to gain: all coordinates are kept, or the noise of a selection is that much larger.
    assert weigh_truncation(report(1.0, 1000), **asked).largest == 0
    assert weigh_truncation(report(1.0, 10), **asked, dense_noise_std=1e-4).largest == 0
    assert weigh_truncation(report(0.0, 0), lipschitz=1.0, noise_std=5.0, steps=1).largest == 1
    # Coordinates that have noise either way count on both sides.
    more = weigh_truncation(report(1.0, 10), **asked, other_coordinates=10**6)
    assert more.selected / more.dense > 0.99


def test_shares() -> None:
    assert truncated_share(1.0) == 0 and truncated_share(0.0) == 1 and truncated_share(0.75) == 0.5
    assert truncated_share(1 + 1e-7) == 0  # rounding
    for wrong in (-0.1, 1.1, math.nan):
        with pytest.raises(ConfigError):
            truncated_share(wrong)
    with pytest.raises(ConfigError):
        weigh_truncation(report(1.0, 1), lipschitz=0.0, noise_std=1.0, steps=1)


@pytest.mark.parametrize("kept, h", [(1.0, 200), (0.99, 20), (0.84, 5)])
def test_excess_losses_of_a_simulated_oracle_are_below_the_bounds(kept: float, h: int) -> None:
    """Projected SGD on <c, w> over a ball, whose gradient is cut to its first h coordinates, which get noise."""
    rng = np.random.default_rng(0)
    D, T, std, radius = 200, 400, 0.05, 1.0
    c = np.zeros(D)
    c[0], c[D - 1] = math.sqrt(kept), math.sqrt(1 - kept)  # norm 1 = L; the last coordinate is cut away
    weighed = weigh_truncation(report(kept, h, rows=D, dim=1), lipschitz=1.0, noise_std=std, steps=T)
    scale = 2 * radius / math.sqrt(T)  # R is the diameter
    for bound, cut, count in ((weighed.selected, True, h), (weighed.dense, False, D)):
        eta = 2 * radius / (math.sqrt(T) * math.hypot(1 + cut * weighed.truncated, math.sqrt(count) * std))
        losses = []
        for _ in range(10):
            w, mean = np.zeros(D), np.zeros(D)
            for _ in range(T):
                mean += w / T
                g = c * (np.arange(D) < h) if cut and kept < 1 else c.copy()
                g[:count] += std * rng.normal(size=count)
                w = w - eta * g
                w /= max(1.0, np.linalg.norm(w) / radius)
            losses.append(float(c @ mean) + radius)  # the least is -radius
        assert 0 <= np.mean(losses) <= scale * bound
    if kept == 1.0:
        assert weighed.selected == pytest.approx(weighed.dense)


def test_the_share_of_a_real_step() -> None:
    """What AdaFEST cut away of the units' gradients, computed by hand from the rows that it selected."""
    torch.manual_seed(0)
    columns = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 4]] * 8)
    values = torch.tensor([[1.0, 0.5]]).repeat(32, 1)
    model = LinearModel(50, 1)
    engine = PrivacyEngine(seed=1)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(columns, values), batch_size=32),
        noise_multiplier=0.1,
        max_grad_norm=10.0,
        mechanism=AdaFEST(
            threshold=15.0, noise_ratio=1.0, map_clip=2.0
        ),  # row 0 is in every unit, the others in a quarter
    )
    for places, sizes in loader:
        optimizer.zero_grad()
        (model(places, sizes) * 3.0).mean().backward()
        optimizer.step()
        break
    last = optimizer.last_step
    assert last.gradient_size == 1
    weighed = weigh_truncation(last, lipschitz=10.0, noise_std=0.01, steps=1)
    assert weighed.truncated == pytest.approx(0.5 / math.hypot(1.0, 0.5), rel=1e-4)
    engine.close()
