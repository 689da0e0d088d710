"""The excess risk of private logistic regression on sparse rows, by three methods, beside the poster's Table 2."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.speed.growth.measure import fit_power
from sparsedp.convex import BiasReducedSGD, L2Ball, Logistic, linear_gradients, output_perturbation, project
from sparsedp.convex.sgd import SGDPlan, train

EPOCHS, BATCHES = 10, 10  # of DP-SGD: a tenth of the rows in a batch
RISK_EXPONENTS = {"rows": (-0.5, -1.0), "columns": (0.0, 0.5)}  # of the poster's Table 2: sparse, and not


@dataclass(frozen=True)
class Classification:
    """Rows of norm 1 with s non-zeros, half of them in s columns that decide, and labels by a model of norm `radius`."""

    rows: int = 2_000
    columns: int = 10_000
    sparsity: int = 8
    epsilon: float = 2.0
    delta: float = 1e-6
    radius: float = 10.0

    def draw(self, seed: int) -> tuple[scipy.sparse.csr_array, np.ndarray]:
        rng = np.random.default_rng(seed)
        half = self.sparsity // 2
        places = np.hstack(
            [
                rng.permuted(np.tile(np.arange(self.sparsity), (self.rows, 1)), axis=1)[:, :half],
                rng.integers(self.sparsity, self.columns, (self.rows, self.sparsity - half)),
            ]
        )
        values = rng.choice([-1.0, 1.0], places.shape) / math.sqrt(self.sparsity)
        weights = np.zeros(self.columns)
        weights[: self.sparsity] = self.radius / math.sqrt(self.sparsity)
        starts = np.arange(0, places.size + 1, self.sparsity)
        X = scipy.sparse.csr_array((values.ravel(), places.ravel(), starts), shape=(self.rows, self.columns))
        X.sum_duplicates()
        return X, np.where(rng.random(self.rows) < 1 / (1 + np.exp(-(X @ weights))), 1.0, -1.0)

    def rates(self) -> tuple[float, float]:
        """The poster's bounds on the excess risk of a convex problem, without constants: sparse, and not (Table 2)."""
        noise, logarithm = self.epsilon * self.rows, math.log(1 / self.delta)
        sparse = (self.sparsity * math.log(self.columns) * logarithm) ** 0.25 / math.sqrt(noise)
        return sparse, math.sqrt(self.columns * logarithm) / noise


def risk(X: scipy.sparse.csr_array, y: np.ndarray, weights: np.ndarray) -> float:
    return float(np.logaddexp(0, -y * (X @ weights)).mean())


def _sgd(problem: Classification, X: scipy.sparse.csr_array, y: np.ndarray) -> np.ndarray:
    batch = problem.rows // BATCHES
    plan = SGDPlan(
        Logistic(), problem.rows, problem.columns, 1, 1.0, problem.epsilon, problem.delta, EPOCHS, batch, 0.0, problem.radius
    )  # fmt: skip
    # The step size with the smallest bound: R / (G sqrt(T)), of which `excess_risk` is R G / sqrt(T).
    rate = problem.radius**2 / (plan.excess_risk() * plan.steps)
    weights, _ = train(replace(plan, learning_rate=rate), X, y[:, None], None)
    return project(weights[:, 0], L2Ball(problem.radius), norm="l2")


def _bias_reduced(problem: Classification, X: scipy.sparse.csr_array, y: np.ndarray) -> np.ndarray:
    solver = BiasReducedSGD(
        epsilon=problem.epsilon, delta=problem.delta, bound=1.0, sparsity=problem.sparsity, rows=problem.rows,
        columns=problem.columns, feasible=L2Ball(problem.radius), model_norm=problem.radius,
    )  # fmt: skip
    return solver.minimise(linear_gradients(Logistic(), X, y)).weights


def _output(problem: Classification, X: scipy.sparse.csr_array, y: np.ndarray, **more: Any) -> np.ndarray:
    asked: dict[str, Any] = {"regularisation": "auto", **more}
    return output_perturbation(
        Logistic(), X, y, epsilon=problem.epsilon, delta=problem.delta, bound=1.0, sparsity=problem.sparsity,
        feasible=L2Ball(problem.radius), model_norm=problem.radius, **asked,
    ).weights  # fmt: skip


SOLVERS: dict[str, Callable[[Classification, scipy.sparse.csr_array, np.ndarray], np.ndarray]] = {
    "DP-SGD": _sgd,
    "bias-reduced SGD": _bias_reduced,
    "output perturbation": _output,
}


def measure_optimisation(
    base: Classification, values: Mapping[str, Sequence[int]], repeats: int
) -> list[dict[str, Any]]:
    """The excess of the average loss on the rows themselves, beyond the best model in the ball; that of zero beside it."""
    rows = []
    for quantity, along in values.items():
        for value in along:
            changed: dict[str, Any] = {quantity: value}
            problem = replace(base, **changed)
            X, y = problem.draw(0)
            least = risk(X, y, _output(problem, X, y, regularisation=1e-5, noise_multiplier=0, seed=0))
            sparse, dense = problem.rates()
            for name, solve in SOLVERS.items():
                excess = [risk(X, y, solve(problem, X, y)) - least for _ in range(repeats)]
                rows.append(
                    {
                        **asdict(problem),
                        "quantity": quantity,
                        "value": value,
                        "method": name,
                        "excess": sum(excess) / repeats,
                        "zero": math.log(2) - least,
                        "sparse_rate": sparse,
                        "dense_rate": dense,
                    }
                )
    return rows


def find_risk_exponents(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    fits = []
    for name in SOLVERS:
        for quantity, (sparse, dense) in RISK_EXPONENTS.items():
            points = [row for row in rows if row["quantity"] == quantity and row["method"] == name]
            fit = fit_power([row["value"] for row in points], [row["excess"] for row in points])
            if fit is not None:
                fits.append({"method": name, "quantity": quantity, "sparse": sparse, "dense": dense, **asdict(fit)})
    return fits
