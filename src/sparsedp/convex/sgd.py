"""Linear models by gradient descent with noise in every step, on all rows or on Poisson samples of them.

A row's gradient is phi'(<x, w>, y) x, with phi' bounded (clipped where the loss does not do so itself): its norm is at most
L = R sup|phi'|, and no row's gradient is ever formed. A step is two products with X.

On all rows, T steps with noise of deviation sqrt(T) sigma L are as private as one with sigma L. What T steps of size eta move in
a direction without curvature is tau = eta T gradients, and the noise in it has deviation tau sigma L / n, whatever T is: that of
output perturbation with lambda = 1 / tau. Where there is curvature, later steps undo the noise of earlier ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from scipy.sparse import csr_array

from sparsedp.accounting import Ledger, get_noise_multiplier
from sparsedp.convex.losses import Loss
from sparsedp.convex.release import Neighbours, Releases, gaussian_multiplier, units_moved
from sparsedp.convex.statement import ReleaseStatement, make_statement
from sparsedp.errors import UnsupportedError
from sparsedp.noise import RandomKey

_MEMORY = 10  # steps that momentum may average over are T / this at most
_SAMPLES, _NOISE = 1, 2  # purposes of keys


@dataclass(frozen=True)
class SGDPlan:
    """What is fixed before the data are looked at, but for their shape."""

    loss: Loss
    rows: int  # n, the divisor: public
    columns: int  # d
    models: int  # k
    row_norm: float  # R
    epsilon: float
    delta: float
    neighbours: Neighbours
    steps: int  # T
    batch_size: int | None  # expected rows of a Poisson sample; None: all rows
    model_norm: float  # D
    regularisation: float | None = None  # 1 / tau; None: the one with the smallest bound on the risk
    learning_rate: float | None = None  # eta, without momentum; None: tau decides

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.neighbours == "replace_one":
            raise UnsupportedError(
                "method='sgd' with a batch_size protects one row that is added or removed: leave out batch_size, or take "
                "neighbours='add_remove'."
            )

    @property
    def sample_rate(self) -> float:
        return 1.0 if self.batch_size is None else min(1.0, self.batch_size / self.rows)

    @property
    def lipschitz(self) -> float:
        """L: no row's gradient is longer, of all models together."""
        return self.loss.slope_bound * self.row_norm * math.sqrt(self.models)

    @property
    def sensitivity(self) -> float:
        """How far the sum of gradients moves between neighbours, with what rounding can add.

        A computed sum of n numbers is within (n + 1) 2^-53 of the sum of their sizes, and phi' within 16 2^-53, on both sides.
        """
        rounding = 1e-9 + 2.02 * (self.rows + 20) * self.rows * 2.0**-53
        return self.lipschitz * (units_moved(self.neighbours) + rounding)

    @cached_property
    def noise_multiplier(self) -> float:
        """The deviation of the noise on a step's sum, over the sensitivity."""
        if self.batch_size is None:
            return math.sqrt(self.steps) * gaussian_multiplier(self.epsilon, self.delta)
        return get_noise_multiplier(
            target_epsilon=self.epsilon, target_delta=self.delta, sample_rate=self.sample_rate, steps=self.steps
        )

    @property
    def event(self) -> DpEvent:
        """What one step releases."""
        gaussian = GaussianDpEvent(self.noise_multiplier)
        return gaussian if self.batch_size is None else PoissonSampledDpEvent(self.sample_rate, gaussian)

    @property
    def _noise(self) -> float:
        """The deviation of the noise, where there is no curvature, over tau."""
        return self.noise_multiplier * self.sensitivity / (self.rows * self.sample_rate * math.sqrt(self.steps))

    def excess_risk(self, regularisation: float) -> float:
        """Output perturbation's bound (`OutputPlan.excess_risk`) with this noise: lambda/2 D^2 and what noise does to margins."""
        moved = self.row_norm * self._noise / regularisation
        by_slope = self.loss.slope_bound * moved * math.sqrt(2 / math.pi)
        by_curvature = self.loss.largest_curvature * moved**2 / 2
        return regularisation * self.model_norm**2 / 2 + min(by_slope, by_curvature)

    @cached_property
    def best_regularisation(self) -> float:
        """That with the smallest `excess_risk`: of both forms of the bound the least, in closed form."""
        moved = self.row_norm * self._noise  # times 1 / lambda
        by_slope = math.sqrt(2 * self.loss.slope_bound * moved * math.sqrt(2 / math.pi)) / self.model_norm
        by_curvature = (2 * self.loss.largest_curvature * (moved / self.model_norm) ** 2) ** (1 / 3)
        return min(by_slope, by_curvature, key=self.excess_risk)

    @property
    def step_size_and_momentum(self) -> tuple[float, float]:
        """(eta, beta) of w <- w - eta (g + beta v), v <- beta v + g.

        Without momentum eta = tau / T. Beyond 1 / H, H the smoothness, steps may diverge, so eta ends there and momentum does the
        rest: a gradient then moves the weights by eta / (1 - beta) in all. Momentum over more than T / 10 steps is not used, and
        tau ends at T^2 / (10 H).
        """
        if self.learning_rate is not None:
            return self.learning_rate, 0.0
        tau = 1 / (self.best_regularisation if self.regularisation is None else self.regularisation)
        largest = 1 / (self.loss.largest_curvature * self.row_norm**2)
        momentum = min(max(0.0, 1 - largest * self.steps / tau), max(0.0, 1 - _MEMORY / self.steps))
        # What the gradients of all steps have moved the weights by at the end, for eta = 1.
        left = np.arange(1, self.steps + 1)
        moved = float(((1 - momentum ** (left + 1)) / (1 - momentum)).sum())
        return min(largest, tau / moved), momentum


def train(plan: SGDPlan, rows: csr_array, targets: np.ndarray, key: RandomKey) -> tuple[np.ndarray, ReleaseStatement]:
    """Weights (d, k) and the statement about them. `rows` (n, d) are clipped, `targets` (n, k)."""
    samples = key.child(_SAMPLES).generator()
    releases = Releases(key.child(_NOISE))
    transposed = rows.T.tocsr() if plan.batch_size is None else None
    size, momentum = plan.step_size_and_momentum
    weights = np.zeros((plan.columns, plan.models))
    moving = np.zeros_like(weights)
    for _ in range(plan.steps):
        if transposed is not None:
            total = transposed @ slopes(plan.loss, rows @ weights, targets)
        else:
            batch = samples.ones(plan.rows, math.log(plan.sample_rate))
            part = rows[batch]
            total = part.T @ slopes(plan.loss, part @ weights, targets[batch])
        noisy = releases.gaussian(total.reshape(-1), plan.sensitivity, plan.noise_multiplier)
        gradient = noisy.reshape(weights.shape) / (plan.rows * plan.sample_rate)
        moving = momentum * moving + gradient
        weights = weights - size * (gradient + momentum * moving)
    return weights, _statement(plan, releases)


def slopes(loss: Loss, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """phi' of every row and model, at most `slope_bound` in size, whatever the margins are."""
    # A sum of noise that overflows has no gradient to follow: it must not make a row's slope NaN, which no bound holds.
    return np.nan_to_num(np.clip(loss.slope(margins, targets), -loss.slope_bound, loss.slope_bound))


def _statement(plan: SGDPlan, releases: Releases) -> ReleaseStatement:
    ledger = Ledger()
    ledger.record(plan.event, plan.steps)
    size, momentum = plan.step_size_and_momentum
    return make_statement(
        Releases(releases.key, ledger=ledger),
        target_epsilon=plan.epsilon,
        delta=plan.delta,
        neighbours=plan.neighbours,
        mechanism="GradientDescent",
        settings={
            "loss": plan.loss.name,
            "bound": plan.row_norm,
            "models": plan.models,
            "steps": plan.steps,
            "batch_size": plan.batch_size,
            "step_size": size,
            "momentum": momentum,
        },
        released="every step's noisy gradient, and so the weights after every step",
        noise=f"Gaussian, its deviation {plan.noise_multiplier:.4g} times the sensitivity {plan.sensitivity:.4g}, in each step",
        assumptions=(
            f"The number of rows, {plan.rows}, and of columns, {plan.columns}, are public.",
            f"Each row is one unit: nobody has two. Rows beyond the norm {plan.row_norm:g} were clipped.",
        ),
    )
