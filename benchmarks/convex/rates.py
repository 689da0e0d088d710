"""How errors of private means grow, on several kinds of rows, beside the poster's Table 1."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from scipy.optimize import brentq

from benchmarks.convex.problem import KINDS, Problem
from benchmarks.speed.growth.measure import fit_power
from sparsedp.convex.choice import Sizes, error_bounds
from sparsedp.convex.mean import Method
from sparsedp.convex.release import gaussian_multiplier

# The exponents of the poster's Table 1, in the regime of each bound; of d there is a logarithm only where it is 0.
SPARSE = {"rows": -0.5, "epsilon": -0.5, "sparsity": 0.25, "columns": 0.0}
PURE_SPARSE = {"rows": -0.5, "epsilon": -0.5, "sparsity": 0.5, "columns": 0.0}
DENSE = {"rows": -1.0, "epsilon": -1.0, "sparsity": 0.0, "columns": 0.5}
PURE_DENSE = {"rows": -1.0, "epsilon": -1.0, "sparsity": 0.5, "columns": 0.5}
# Each variant with its method, whether delta is 0, and what the poster says of it.
VARIANTS: dict[str, tuple[Method, bool, Mapping[str, float]]] = {
    "gaussian": ("gaussian", False, DENSE),
    "projection": ("projection", False, SPARSE),
    "laplace": ("laplace", True, PURE_DENSE),
    "pure projection": ("projection", True, PURE_SPARSE),
}
QUANTITIES = {
    "rows": "n, rows",
    "columns": "d, columns",
    "sparsity": "s, non-zeros of a row",
    "epsilon": "epsilon",
}


def measure_rates(base: Problem, values: Mapping[str, Sequence[float]], repeats: int) -> list[dict[str, Any]]:
    """The error of each variant along each quantity, all others as in `base`, on every kind of rows."""
    rows = []
    for kind in KINDS:
        for quantity, along in values.items():
            for value in along:
                changed: dict[str, Any] = {quantity: value, "kind": kind}
                problem = replace(base, **changed)
                X = problem.draw(0)
                true = problem.clipped_mean(X)
                for variant, (method, pure, _) in VARIANTS.items():
                    answers = [problem.ask(X, method, pure) for _ in range(repeats)]
                    squares = [float(((answer.mean - true) ** 2).sum()) for answer in answers]
                    sparse, dense = problem.upper_rates(pure)
                    rows.append(
                        {
                            "kind": kind,
                            "quantity": quantity,
                            "value": value,
                            "variant": variant,
                            "error": math.sqrt(sum(squares) / repeats),
                            "upper": answers[0].error_bound,
                            "lower_rate": problem.lower_rate(pure),
                            "sparse_rate": sparse,
                            "dense_rate": dense,
                        }
                    )
    return rows


def crossing(base: Problem, quantity: str, pure: bool) -> float | None:
    """Where our bounds of both regimes are equal along a quantity: the new regime is on one side of it. None: nowhere."""

    def difference(logarithm: float) -> float:
        value = math.exp(logarithm)
        changed: dict[str, Any] = {quantity: value if quantity == "epsilon" else max(1, round(value))}
        problem = replace(base, **changed)
        scale = 2 / (problem.rows * problem.epsilon) * math.sqrt(problem.sparsity)
        if not pure:
            scale = 2 * gaussian_multiplier(problem.epsilon, problem.delta) / problem.rows
        sizes = Sizes(problem.rows, problem.columns, 1.0, problem.sparsity, problem.epsilon, problem.delta)
        alone, projected = error_bounds(sizes, "laplace" if pure else "gaussian", scale)
        return math.log(alone / projected) - 1e-9

    low, high = (0.01, 100.0) if quantity == "epsilon" else (2.0, 1e8)
    if quantity == "sparsity":
        high = float(base.columns)
    ends = difference(math.log(low)), difference(math.log(high))
    if (ends[0] > 0) == (ends[1] > 0):
        return None
    return math.exp(float(brentq(difference, math.log(low), math.log(high), xtol=1e-3)))


def in_regime(row: Mapping[str, Any]) -> bool:
    """Whether the poster's bound for a variant is the one whose exponent it is compared with.

    Noise alone has the dense rate everywhere. A projection has the sparse one where that is the smallest bound, and below 1.
    """
    if "projection" not in row["variant"]:
        return True
    return row["sparse_rate"] <= min(1.0, row["dense_rate"])


def find_exponents(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Fitted exponents of the errors in the regime that the poster's exponents are of, beside them."""
    fits = []
    for variant, (_, _, rates) in VARIANTS.items():
        for kind in dict.fromkeys(row["kind"] for row in rows):
            for quantity in dict.fromkeys(row["quantity"] for row in rows):
                points = [
                    (row["value"], row["error"])
                    for row in rows
                    if (row["kind"], row["quantity"], row["variant"]) == (kind, quantity, variant) and in_regime(row)
                ]
                fit = fit_power([x for x, _ in points], [y for _, y in points])
                if fit is not None:
                    names = {"kind": kind, "quantity": quantity, "variant": variant}
                    fits.append({**names, "paper": rates[quantity], **asdict(fit)})
    return fits
