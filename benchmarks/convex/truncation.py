"""Equation 2 of the DP-AdaFEST paper beside what short private training measures, for several thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.convex.optimisation import risk
from sparsedp import DPSGD, AdaFEST, PrivacyEngine
from sparsedp.accounting import split_multiplier
from sparsedp.convex import L2Ball, Logistic, output_perturbation, weigh_truncation
from sparsedp.convex.sgd import LinearModel, padded
from sparsedp.step_report import StepReport

RATIO = 5.0  # of the map's noise over the gradient's, over their sensitivities


@dataclass(frozen=True)
class Bags:
    """Rows with one word each from several sorts, by Zipf's law; the common words decide on the label."""

    rows: int = 20_000
    columns: int = 20_000
    sorts: int = 8
    batch: int = 1_000
    steps: int = 40
    epsilon: float = 1.0
    delta: float = 1e-6
    radius: float = 5.0
    decay: float = 1.5  # of the words' frequencies

    def draw(self, seed: int) -> tuple[scipy.sparse.csr_array, np.ndarray]:
        rng = np.random.default_rng(seed)
        words = self.columns // self.sorts
        shares = 1 / np.arange(1, words + 1) ** self.decay
        within = np.searchsorted(np.cumsum(shares) / shares.sum(), rng.random((self.rows, self.sorts))).clip(
            max=words - 1
        )
        places = within + words * np.arange(self.sorts)
        weights = np.zeros(self.columns)
        common = (words * np.arange(self.sorts)[:, None] + np.arange(10)).ravel()
        weights[common] = rng.choice([-1.0, 1.0], len(common)) * self.radius / math.sqrt(len(common))
        starts = np.arange(0, places.size + 1, self.sorts)
        values = np.full(places.size, 1 / math.sqrt(self.sorts))
        X = scipy.sparse.csr_array((values, places.ravel(), starts), shape=(self.rows, self.columns))
        chances = 1 / (1 + np.exp(-(X @ weights) * math.sqrt(self.sorts)))
        return X, np.where(rng.random(self.rows) < chances, 1.0, -1.0)


def measure_truncation(problem: Bags, thresholds: Sequence[float], repeats: int) -> list[dict[str, Any]]:
    """DP-SGD, and AdaFEST with each threshold: both sides of equation 2 and the excess losses of the mean iterates."""
    X, y = problem.draw(0)
    least = risk(
        X, y,
        output_perturbation(
            Logistic(), X, y, epsilon=1.0, delta=problem.delta, bound=1.0, regularisation=1e-5, feasible=L2Ball(problem.radius),
            noise_multiplier=0, seed=0,
        ).weights,
    )  # fmt: skip
    dense = [_train(problem, X, y, None, like=None) for _ in range(repeats)]
    dense_excess = sum(risk(X, y, weights) - least for weights, _, _ in dense) / repeats
    dense_std = dense[0][2]
    rows = []
    for threshold in thresholds:
        # What is selected does not depend on the step size, which the bound needs: a run to see it, then the run that counts.
        _, reports, std = _train(problem, X, y, threshold, like=None)
        runs = [_train(problem, X, y, threshold, like=reports) for _ in range(repeats)]
        weighed = [
            weigh_truncation(report, lipschitz=1.0, noise_std=std, steps=problem.steps, dense_noise_std=dense_std)
            for report in reports
        ]
        rows.append(
            {
                **asdict(problem),
                "threshold": threshold,
                "kept_mass": _mean(report.kept_mass for report in reports),
                "truncated": _mean(one.truncated for one in weighed),
                "coordinates": _mean(report.gradient_size for report in reports),
                "selected": _mean(one.selected for one in weighed),
                "dense": weighed[0].dense,
                "largest": _mean(one.largest for one in weighed),
                "excess": sum(risk(X, y, weights) - least for weights, _, _ in runs) / repeats,
                "dense_excess": dense_excess,
                "zero": math.log(2) - least,
            }
        )
    return rows


def _mean(numbers: Any) -> float:
    return float(np.mean(list(numbers)))


def _train(
    problem: Bags, X: scipy.sparse.csr_array, y: np.ndarray, threshold: float | None, like: list[StepReport] | None
) -> tuple[np.ndarray, list[StepReport], float]:  # fmt: skip
    """The mean iterate (d,), the steps' reports, and the deviation of the noise on a coordinate of the mean gradient.

    The step size is Lemma 3.1's, R / sqrt(((L + alpha)^2 + v) T), for the selections of `like`; None: for a dense step.
    """
    columns, values = padded(X)
    module = LinearModel(problem.columns, 1)
    engine = PrivacyEngine()
    mechanism = (
        DPSGD()
        if threshold is None
        else AdaFEST(threshold=threshold, noise_ratio=RATIO, map_clip=math.sqrt(problem.sorts))
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    data = TensorDataset(columns, values, torch.from_numpy(y.astype(np.float32)[:, None]))
    model, private, loader = engine.make_private_with_epsilon(
        module=module, optimizer=optimizer, data_loader=DataLoader(data, batch_size=problem.batch),
        target_epsilon=problem.epsilon, target_delta=problem.delta, epochs=problem.steps * problem.batch // problem.rows,
        max_grad_norm=1.0, mechanism=mechanism,
    )  # fmt: skip
    multiplier = engine.plan.noise_multiplier
    if threshold is not None:
        multiplier = split_multiplier(multiplier, RATIO)[1]
    std = multiplier / problem.batch
    share, kept = 0.0, float(problem.columns)
    if like is not None:
        kept = _mean(report.gradient_size for report in like)
        share = _mean(math.sqrt(max(0.0, 1 - report.kept_mass)) for report in like)
    for group in optimizer.param_groups:
        group["lr"] = 2 * problem.radius / math.sqrt(((1 + share) ** 2 + kept * std**2) * problem.steps)
    total = np.zeros(problem.columns)
    reports: list[StepReport] = []
    while len(reports) < problem.steps:
        for places, sizes, wanted in loader:
            total += module.weights.weight.detach().double().numpy()[:, 0]
            private.zero_grad()
            F.softplus(-wanted * model(places, sizes)).mean().backward()
            private.step()
            assert private.last_step is not None  # there was a step
            reports.append(private.last_step)
    engine.close()
    return total / len(reports), reports, std
