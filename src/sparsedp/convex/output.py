"""Output perturbation with l-infinity projection: the minimiser of a regularised risk, with noise (the paper's Algorithm 6)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy.sparse import csr_array, vstack

from sparsedp.accounting.events import require_count, require_number
from sparsedp.convex.feasible import FeasibleSet, WholeSpace
from sparsedp.convex.losses import Loss, find_loss
from sparsedp.convex.minimiser import contains_zero, minimise, radius_of
from sparsedp.convex.objective import Bounds, Objective
from sparsedp.convex.output_plan import OutputPlan
from sparsedp.convex.projections import project
from sparsedp.convex.release import Calibration, Neighbours, Releases
from sparsedp.convex.rows import RowBounds, clean_chunks
from sparsedp.convex.statement import ReleaseStatement, make_statement
from sparsedp.errors import ConfigError, DataError
from sparsedp.noise import RandomKey
from sparsedp.plan import require_delta

Regularisation = float | Literal["auto", "paper"]
NOT_CONVERGED = (
    "That a minimiser could not be certified, if that happens: an error is raised then, nothing else is released, and the next "
    "try costs its budget again."
)


@dataclass(frozen=True)
class PrivateMinimiser:
    """What output perturbation releases. Nothing in it depends on the data but `weights`."""

    weights: np.ndarray  # (d,), or (d, k) for targets (n, k)
    statement: ReleaseStatement
    plan: OutputPlan

    @property
    def regularisation(self) -> float:
        return self.plan.bounds.regularisation


def output_perturbation(
    loss: str | Loss, X: Any, y: Any, *, epsilon: float, delta: float, bound: float, sparsity: float | None = None,
    feasible: FeasibleSet | None = None, regularisation: Regularisation = "auto", model_norm: float = 10.0,
    neighbours: Neighbours = "add_remove", calibration: Calibration = "analytic", seed: int | None = None,
    noise_multiplier: float | None = None,
) -> PrivateMinimiser:  # fmt: skip
    """A linear model w that nearly minimises (1/n) sum_i loss(<x_i, w>, y_i) over the feasible set, differentially private.

    `X` (n, d) is sparse or dense; its rows are clipped to l2 norm `bound` and, with `sparsity` s, to l1 norm bound * sqrt(s).
    `y` (n,) holds -1 and 1 for losses that classify, and (n, k) makes k models that are released together. delta=0 has Laplace
    noise. `regularisation` is lambda; "auto" and "paper" choose it, without looking at the data, so as to do well against models
    of norm `model_norm`, by the smallest bound on the risk or by the paper's formula. n, the number of rows, counts as public.
    `seed`, and `noise_multiplier=0` with a seed, are for tests: the statement then says that nothing may be released.
    """
    if noise_multiplier is not None and (noise_multiplier != 0 or seed is None):
        raise ConfigError(
            "noise_multiplier=0, together with a seed, leaves the noise out, for tests; it takes no other value."
        )
    rows = read_rows(X)
    plan = make_plan(
        find_loss(loss), shape=shape_of(rows, y), epsilon=epsilon, delta=delta, bound=bound, sparsity=sparsity,
        feasible=feasible, regularisation=regularisation, model_norm=model_norm, neighbours=neighbours,
        calibration=calibration,
    )  # fmt: skip
    key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
    return perturb(plan, rows, y, feasible or WholeSpace(), Releases(key, noiseless=noise_multiplier is not None))


def read_rows(X: Any) -> csr_array:
    """All rows of `X`, in any form that `clean_chunks` takes, as new float64 CSR memory."""
    return csr_array(vstack(list(clean_chunks(X)), format="csr"))


def shape_of(rows: csr_array, y: Any) -> tuple[int, int, int]:
    """(n, d, k) of rows and targets (n,) or (n, k), or an error."""
    targets = np.shape(y)
    if not 1 <= len(targets) <= 2 or rows.shape[0] != targets[0]:
        raise DataError(f"X has {rows.shape[0]} rows: y must be (n,) or (n, k) with as many; its shape is {targets}.")
    if min(targets) < 1:
        raise DataError("There must be at least one row and one target.")
    return rows.shape[0], rows.shape[1], 1 if len(targets) == 1 else targets[1]


def make_plan(
    loss: Loss, *, shape: tuple[int, int, int], epsilon: float, delta: float, bound: float, sparsity: float | None,
    feasible: FeasibleSet | None, regularisation: Regularisation, model_norm: float, neighbours: Neighbours,
    calibration: Calibration = "analytic",
) -> OutputPlan:  # fmt: skip
    """Everything that is fixed before the data are looked at, but for their shape (n, d, k)."""
    rows, columns, models = (
        require_count(name, size, low=1) for name, size in zip(("rows", "columns", "models"), shape)
    )
    feasible = feasible or WholeSpace()
    if not contains_zero(feasible):
        raise ConfigError("The point 0 must be feasible: the bounds on minimisers rest on it. Move the box.")
    model_norm = require_number("model_norm", model_norm, low=0.0, low_open=True)
    spread = columns if sparsity is None else require_number("sparsity", sparsity, low=0.0, low_open=True)
    given = not isinstance(regularisation, str)
    plan = OutputPlan(
        bounds=Bounds(
            loss=loss,
            rows=rows,
            columns=columns,
            row_norm=require_number("bound", bound, low=0.0, low_open=True),
            regularisation=require_number("regularisation", regularisation, low=0.0, low_open=True) if given else 1.0,
            radius=radius_of(feasible, columns),
        ),
        sparsity=min(float(columns), spread),
        neighbours=neighbours,
        epsilon=require_number("epsilon", epsilon, low=0.0, low_open=True),
        delta=delta if delta == 0 else require_delta(delta, rows, allow_large=False),
        whole_space=isinstance(feasible, WholeSpace),
        models=models,
        calibration=calibration,
    )
    if regularisation == "auto":
        return plan.with_best_regularisation(model_norm)
    if regularisation == "paper":
        return plan.with_regularisation(plan.paper_regularisation(model_norm))
    if not given:
        raise ConfigError(f"regularisation must be a positive number, 'auto' or 'paper'; got {regularisation!r}")
    return plan


def perturb(plan: OutputPlan, rows: csr_array, y: Any, feasible: FeasibleSet, releases: Releases) -> PrivateMinimiser:
    """Clips the rows, in place, minimises, adds the plan's noise and projects back onto the feasible set."""
    bounds = plan.bounds
    RowBounds(bounds.row_norm, bounds.row_norm * math.sqrt(plan.sparsity)).clip(rows)
    targets = admitted_targets(bounds.loss, y)
    columns = targets.reshape(bounds.rows, plan.models).T
    exact = np.concatenate(
        [_minimiser(bounds, rows, np.ascontiguousarray(one), feasible, plan.target) for one in columns]
    )
    if plan.delta == 0:
        noisy = releases.laplace(exact, plan.l1_sensitivity, plan.epsilon)
        noise = f"Laplace, deviation {plan.noise_std:.4g} on l1 sensitivity {plan.l1_sensitivity:.4g}"
    else:
        noisy = releases.gaussian(exact, plan.l2_sensitivity, plan.noise_multiplier)
        noise = f"Gaussian, deviation {plan.noise_std:.4g} on l2 sensitivity {plan.l2_sensitivity:.4g}"
    parts = [project(one, feasible, norm="linf") for one in noisy.reshape(plan.models, bounds.columns)]
    weights = parts[0] if targets.ndim == 1 else np.stack(parts, axis=1)
    statement = make_statement(
        releases,
        target_epsilon=plan.epsilon,
        delta=plan.delta,
        neighbours=plan.neighbours,
        mechanism="OutputPerturbation",
        settings={
            "loss": bounds.loss.name,
            "regularisation": bounds.regularisation,
            "bound": bounds.row_norm,
            "sparsity": plan.sparsity,
            "models": plan.models,
            "feasible": type(feasible).__name__,
        },
        released="the weights, released once",
        noise=noise,
        assumptions=(
            f"The number of rows, {bounds.rows}, and of columns, {bounds.columns}, are public.",
            f"Each row is one unit: nobody has two. Rows beyond the norm {bounds.row_norm:g} were clipped.",
        ),
        not_covered=(NOT_CONVERGED,),
    )
    return PrivateMinimiser(weights, statement, plan)


def admitted_targets(loss: Loss, y: Any) -> np.ndarray:
    """Targets as the loss takes them, float64; an error if there is one that it cannot take."""
    try:
        targets = np.asarray(y, np.float64)
    except (TypeError, ValueError):
        raise DataError("Targets must be numbers.") from None
    if not np.isfinite(targets).all():
        raise DataError("Targets hold NaN or infinity: nothing was released.")
    if loss.classifies and not (np.abs(targets) == 1).all():
        raise DataError(f"The {loss.name} loss takes targets -1 and 1: nothing was released.")
    return loss.admit(targets)


def _minimiser(
    bounds: Bounds, rows: csr_array, targets: np.ndarray, feasible: FeasibleSet, target: float
) -> np.ndarray:
    return minimise(Objective(bounds, rows, targets), feasible, target).point
