"""`python -m benchmarks convex`: time and memory of a private mean, l1 recovery's reach, and how errors grow.

Errors are distances to the mean of the rows, as root mean squares over repeats. Rows have norm 1 and s non-zeros; half of them
are one and the same, so that the mean is not near zero.
"""

from __future__ import annotations

import math
import multiprocessing
import resource
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse

from benchmarks.speed.growth.measure import fit_power
from benchmarks.speed.machine import machine
from sparsedp.convex import PrivateMean, private_mean
from sparsedp.convex.mean import Method
from sparsedp.errors import SparseDPWarning

# The exponents of the poster's Table 1, in the regime of each bound; of d there is a logarithm only where it is 0.
SPARSE = {"rows": -0.5, "epsilon": -0.5, "sparsity": 0.25, "columns": 0.0}
PURE_SPARSE = {"rows": -0.5, "epsilon": -0.5, "sparsity": 0.5, "columns": 0.0}
DENSE = {"rows": -1.0, "epsilon": -1.0, "sparsity": 0.0, "columns": 0.5}
PURE_DENSE = {"rows": -1.0, "epsilon": -1.0, "sparsity": 0.5, "columns": 0.5}
# Each variant with its method, its delta, and what the poster says of it.
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


@dataclass(frozen=True)
class Problem:
    rows: int = 3_000
    columns: int = 100_000
    sparsity: int = 16
    epsilon: float = 1.0
    delta: float = 1e-6

    def draw(self, seed: int) -> scipy.sparse.csr_array:
        rng = np.random.default_rng(seed)
        places = rng.integers(0, self.columns, (self.rows, self.sparsity))
        places[::2] = rng.choice(self.columns, self.sparsity, replace=False)
        values = np.full(places.size, 1 / math.sqrt(self.sparsity))
        starts = np.arange(0, places.size + 1, self.sparsity)
        return scipy.sparse.csr_array((values, places.ravel(), starts), shape=(self.rows, self.columns))

    def bounds(self, pure: bool) -> tuple[float, float]:
        """The poster's upper bounds without constants: of the sparse and of the dense regime (Table 1)."""
        s, d, noise = self.sparsity, self.columns, self.epsilon * self.rows
        if pure:
            return math.sqrt(s * math.log(d) / noise), math.sqrt(s * d) / noise
        logarithm = math.log(1 / self.delta)
        return (s * math.log(d / s) * logarithm) ** 0.25 / math.sqrt(noise), math.sqrt(d * logarithm) / noise

    def ask(self, X: scipy.sparse.csr_array, method: Method, pure: bool = False, **more: Any) -> PrivateMean:
        return private_mean(
            X, epsilon=self.epsilon, delta=0.0 if pure else self.delta, bound=1.0, sparsity=self.sparsity, method=method,
            neighbours="replace_one", **more,
        )  # fmt: skip


def _clipped_mean(X: scipy.sparse.csr_array, problem: Problem) -> np.ndarray:
    """The mean without noise: what errors are distances to."""
    return problem.ask(X, "gaussian", seed=0, noise_multiplier=0).mean


# ---------------------------------------------------------------------- time and memory


def _run_once(problem: Problem, pure: bool) -> dict[str, Any]:
    """In a process of its own: seconds, those of the processor over all cores, which other programs do not lengthen, and the
    memory that it had at most, rows and libraries included."""
    X = problem.draw(0)
    Problem(rows=10, columns=100, sparsity=2).ask(Problem(10, 100, 2).draw(0), "projection", pure)  # compiles
    begin, worked = time.perf_counter(), time.process_time()
    problem.ask(X, "projection", pure)
    seconds, worked = time.perf_counter() - begin, time.process_time() - worked
    return {
        "seconds": seconds,
        "processor": worked,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def measure_speed(problem: Problem, repeats: int) -> list[dict[str, Any]]:
    rows = []
    for pure in (False, True):
        runs = []
        for _ in range(repeats):
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                runs.append(pool.submit(_run_once, problem, pure).result())
        seconds = sorted(run["seconds"] for run in runs)
        rows.append(
            {
                **asdict(problem),
                "noise": "laplace" if pure else "gaussian",
                "best": seconds[0],
                "median": seconds[len(seconds) // 2],
                "processor": min(run["processor"] for run in runs),
                "memory": max(run["memory"] for run in runs),
            }
        )
    return rows


# ---------------------------------------------------------------------- l1 recovery


def measure_recovery(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """Its time, whether the solver finished, and its error beside the projection's."""
    rows = []
    for problem in problems:
        X = problem.draw(0)
        true = _clipped_mean(X, problem)
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SparseDPWarning)  # an unfinished solve is in the table
            answer = problem.ask(X, "l1_recovery")
        seconds = time.perf_counter() - begin
        projected = problem.ask(X, "projection").mean
        recovery = {} if answer.recovery is None else asdict(answer.recovery)
        rows.append(
            {
                **asdict(problem),
                "seconds": seconds,
                "error": float(np.linalg.norm(answer.mean - true)),
                "projection": float(np.linalg.norm(projected - true)),
                "recovery": recovery,
            }
        )
    return rows


# ---------------------------------------------------------------------- rates


def measure_rates(base: Problem, values: Mapping[str, Sequence[float]], repeats: int) -> list[dict[str, Any]]:
    """The error of each variant along each quantity, all others as in `base`."""
    rows = []
    for quantity, along in values.items():
        for value in along:
            changed: dict[str, Any] = {quantity: value}
            problem = replace(base, **changed)
            X = problem.draw(0)
            true = _clipped_mean(X, problem)
            for variant, (method, pure, _) in VARIANTS.items():
                squares = []
                for _ in range(repeats):
                    squares.append(float(((problem.ask(X, method, pure).mean - true) ** 2).sum()))
                sparse, dense = problem.bounds(pure)
                rows.append(
                    {
                        "quantity": quantity,
                        "value": value,
                        "variant": variant,
                        "error": math.sqrt(sum(squares) / len(squares)),
                        "sparse_rate": sparse,
                        "dense_rate": dense,
                    }
                )
    return rows


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
    for quantity in dict.fromkeys(row["quantity"] for row in rows):
        for variant, (_, _, rates) in VARIANTS.items():
            points = [
                (row["value"], row["error"])
                for row in rows
                if row["quantity"] == quantity and row["variant"] == variant and in_regime(row)
            ]
            fit = fit_power([x for x, _ in points], [y for _, y in points])
            if fit is not None:
                fits.append({"quantity": quantity, "variant": variant, "paper": rates[quantity], **asdict(fit)})
    return fits


def bench_convex(
    parts: Sequence[str], *, speed: Problem, recovery: Sequence[Problem], base: Problem,
    values: Mapping[str, Sequence[float]], repeats: int,
) -> dict[str, Any]:  # fmt: skip
    result: dict[str, Any] = {"machine": machine()}
    if "speed" in parts:
        result["speed"] = measure_speed(speed, repeats)
    if "recovery" in parts:
        result["recovery"] = measure_recovery(recovery)
    if "rates" in parts:
        result["base"] = asdict(base)
        result["rates"] = measure_rates(base, values, repeats)
        result["exponents"] = find_exponents(result["rates"])
    return result
