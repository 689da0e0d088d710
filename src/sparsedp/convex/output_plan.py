"""What output perturbation fixes before it looks at the data: sensitivity, noise, and the regularisation.

Let w and w' minimise F_S and F_S' over a convex set, F strongly convex with modulus lambda. By the first-order conditions
lambda |w - w'| <= |grad F_S'(w) - grad F_S(w)|, in which only the rows appear that S and S' do not share. So

    |w - w'|_2 <= k L / (lambda n),    k = 1 if a row was added or removed, 2 if one was replaced,

with L the largest gradient norm *at a minimiser*, of the smaller data set. n is a public number, the same for both. (The
paper's proof says 4 L / (lambda n); its printed noise is that of 2.)

On the whole space lambda (w - w') = [grad of the rows not shared] + [grad F(w') - grad F(w) over the shared ones], and each
shared row's part is (phi'(m') - phi'(m)) x, at most sup phi'' |x|_2 |x|_1 |w - w'|_2 in l1 norm. With |x|_1 <= R sqrt(s)

    |w - w'|_1 <= sqrt(s) (k L / (lambda n)) (1 + H / lambda),    and at most sqrt(d) |w - w'|_2.

The minimiser is computed to a distance `target` that is certified: twice that is added, sqrt(d) times it for the l1 norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsedp.convex.objective import Bounds
from sparsedp.convex.release import Calibration, Neighbours, gaussian_multiplier, units_moved
from sparsedp.errors import ConfigError

# The share of the sensitivity that a minimiser's distance from the exact one may have.
_INEXACT = 1e-3
# Clipping rows in float64 leaves a norm above the bound by a few units in the last place: that much is added to sensitivities.
_CLIPPED = 1 + 1e-9
_GRID = np.geomspace(1e-9, 1e3, 241)  # of regularisations, ten to a half decade


@dataclass(frozen=True)
class OutputPlan:
    """Output perturbation of `models` minimisers that are released together, such as one for each class against the rest."""

    bounds: Bounds
    sparsity: float  # s: no row's l1 norm is above row_norm * sqrt(s)
    neighbours: Neighbours
    epsilon: float
    delta: float  # 0: Laplace noise
    whole_space: bool
    models: int = 1
    calibration: Calibration = "analytic"

    def __post_init__(self) -> None:
        if self.delta == 0 and not self.whole_space:
            raise ConfigError(
                "delta=0 needs the whole space: on another feasible set the l1 sensitivity of the minimiser has no such bound. "
                "Leave out feasible=, or give a delta."
            )

    @cached_property
    def target(self) -> float:
        """The distance to the exact minimiser to which each model is certified. Rounding sets how small it can be."""
        bounds = self.bounds
        rounding = bounds.rounding(2 * bounds.minimiser_norm, bounds.slope)
        return max(_INEXACT * bounds.lipschitz / bounds.rows, 8 * rounding) / bounds.regularisation

    @cached_property
    def _exact_l2(self) -> float:
        bounds = self.bounds
        moved = units_moved(self.neighbours) * bounds.lipschitz / (bounds.regularisation * bounds.rows)
        return min(moved, 2 * bounds.radius)

    @cached_property
    def l2_sensitivity(self) -> float:
        """How far all models together move between neighbours, in l2 norm."""
        return math.sqrt(self.models) * _CLIPPED * (self._exact_l2 + 2 * self.target)

    @cached_property
    def l1_sensitivity(self) -> float:
        """The same in l1 norm; on the whole space only."""
        bounds = self.bounds
        # An added row's gradient counts at the minimiser of the n + 1 rows, whose norm is bounded by sqrt(1 + 1/n) as much.
        more = math.sqrt(1 + 1 / bounds.rows)
        by_rows = more * math.sqrt(self.sparsity) * self._exact_l2 * (1 + bounds.smoothness / bounds.regularisation)
        root = math.sqrt(bounds.columns)
        return self.models * _CLIPPED * (min(by_rows, root * self._exact_l2) + 2 * root * self.target)

    @cached_property
    def noise_multiplier(self) -> float:
        """The deviation of Gaussian noise over the l2 sensitivity."""
        return gaussian_multiplier(self.epsilon, self.delta, self.calibration)

    @property
    def noise_std(self) -> float:
        """The deviation of the noise on each coefficient."""
        if self.delta == 0:
            return math.sqrt(2.0) * self.l1_sensitivity / self.epsilon
        return self.noise_multiplier * self.l2_sensitivity

    def excess_risk(self, model_norm: float) -> float:
        """A bound on the expected excess of the average loss over that of the best model of that norm (to which it is close).

        Regularisation costs lambda/2 |w|^2. The noise z is independent of the rows, so a row's margin moves by <x, z>, of
        deviation at most R std: the loss grows by at most L/R times its mean size, and by at most phi'' / 2 times its variance.
        """
        bounds = self.bounds
        moved = bounds.row_norm * self.noise_std
        slope = bounds.loss.largest_slope(bounds.row_norm * bounds.minimiser_norm + 6 * moved)
        by_slope = slope * moved * math.sqrt(2 / math.pi)
        by_curvature = bounds.loss.largest_curvature * moved**2 / 2
        return bounds.regularisation * model_norm**2 / 2 + min(by_slope, by_curvature)

    def with_regularisation(self, regularisation: float) -> OutputPlan:
        plan = replace(self, bounds=replace(self.bounds, regularisation=regularisation))
        if self.delta > 0:
            plan.__dict__["noise_multiplier"] = self.noise_multiplier  # it does not depend on it
        return plan

    def with_best_regularisation(self, model_norm: float) -> OutputPlan:
        """The regularisation with the smallest `excess_risk`, on a grid: no data are looked at."""
        scale = self.bounds.smoothness
        plans = [self.with_regularisation(scale * float(factor)) for factor in _GRID]
        return min(plans, key=lambda plan: plan.excess_risk(model_norm))

    def paper_regularisation(self, model_norm: float, beta: float = 0.05) -> float:
        """The lambda of the paper's theorem on empirical risk, for models of that norm and success probability 1 - beta."""
        bounds = self.bounds
        lipschitz = bounds.loss.largest_slope(bounds.row_norm * model_norm) * bounds.row_norm
        spread = self.sparsity * math.log(bounds.columns / beta)
        budget = self.epsilon * bounds.rows
        if self.delta == 0:
            return float((lipschitz**2 * bounds.smoothness / model_norm**2 * spread / budget) ** (1 / 3))
        return lipschitz / model_norm * (spread * math.log(1 / self.delta)) ** 0.25 / math.sqrt(budget)
