"""The mean of sparse rows under differential privacy.

"Differentially Private Optimization with Sparse Gradients": algorithm 1 (projection) and algorithm 2 (Gaussian l1 recovery), and
noise alone beside them. The rows' sum gets noise; all that follows is computed from what that gives.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import scipy.sparse

from sparsedp.accounting import Ledger, split_multiplier
from sparsedp.accounting.events import require_count, require_number
from sparsedp.convex.choice import Measuring, Noise, Sizes, choose, choose_measuring
from sparsedp.convex.feasible import L1Ball
from sparsedp.convex.least_l1 import least_l1
from sparsedp.convex.projections import project
from sparsedp.convex.recovery import GaussianMatrix
from sparsedp.convex.release import (
    Calibration,
    FixedPoint,
    Neighbours,
    Releases,
    gaussian_multiplier,
    require_choice,
    units_moved,
)
from sparsedp.convex.rows import ExactSum, RowBounds, clean_chunks
from sparsedp.convex.statement import ReleaseStatement, make_statement
from sparsedp.errors import ConfigError, DataError, SparseDPWarning
from sparsedp.noise import RandomKey
from sparsedp.plan import require_delta

Method = Literal["gaussian", "laplace", "projection", "l1_recovery", "auto"]
Solver = Literal["highs", "columns"]
_MATRIX, _NOISE = 1, 2  # where the public matrix and the secret noise branch off the key
_COUNT_RATIO = 4.0  # the number of rows has this many times the noise of the sum, over their sensitivities
_COUNT_SHARE = 1 / 16  # of a pure budget, that the number of rows takes
_COUNT_STEPS = 1 << 20  # the number of rows is released in steps of 1 / this


@dataclass(frozen=True)
class Recovery:
    """How an l1 recovery went."""

    measurements: int  # m
    solver: str
    iterations: int
    gap: float  # the l1 norm is above the least by this share at most; infinite if the solver found no point
    finished: bool
    cut: bool  # the norm was above 2L, and the mean is zero instead
    clipped_measurements: int = field(repr=False)  # private: rows z with |A z| above the clip, counted without noise


@dataclass(frozen=True)
class PrivateMean:
    """A private mean, the statement about it, and how it was made. What is marked private must not be released."""

    mean: np.ndarray  # (d,) float64
    statement: ReleaseStatement
    method: str
    noise: Noise
    reason: str  # why this method
    rows: int  # that the sum was divided by: a public number, or the number of rows with noise
    # On the root mean square of |mean - mean of the clipped rows|_2, over the noise, and over the matrix of a finished recovery.
    error_bound: float
    bounds: dict[str, float]  # the same for each of the methods that "auto" compares, where there is one
    clipped_rows: int = field(repr=False)  # private: counted without noise
    ledger: Ledger = field(repr=False)  # what was released, as privacy events, to be composed with what else there is
    recovery: Recovery | None = None


def private_mean(
    X: Any,
    *,
    epsilon: float,
    delta: float,
    bound: float,
    sparsity: float,
    method: Method = "auto",
    neighbours: Neighbours = "add_remove",
    rows: int | None = None,
    calibration: Calibration = "analytic",
    measurements: int | None = None,
    measurement_clip: float | None = None,
    solver: Solver | None = None,
    seed: int | None = None,
    noise_multiplier: float | None = None,
) -> PrivateMean:
    """The mean of the rows of `X` with noise, (epsilon, delta)-differentially private.

    X: a scipy sparse matrix, a torch tensor (sparse or not), a numpy array, or an iterable of chunks of rows. Each row is scaled
        down to l2 norm `bound` (L), and to l1 norm L sqrt(`sparsity`), which a row with so many non-zeros has anyway.
    method: "gaussian" and "laplace" are noise alone; "projection" moves that to the nearest point of the l1 ball of radius
        L sqrt(sparsity); "l1_recovery" measures m random directions and takes the vector of least l1 norm that has them;
        "auto" takes the one with the smallest error bound. With delta = 0 the noise is Laplace's.
    neighbours: "add_remove", or "replace_one" (the paper's), for which the number of rows is public.
    rows: with "add_remove", the number that the sum is divided by, where that is public. By default it is the number of rows,
        released with noise for a part of the budget.
    calibration: "analytic", or "paper" for the printed constants, for epsilon <= 1 and a public number of rows.
    measurements, measurement_clip, solver: of "l1_recovery": m, and the bound on |A z| over L (by default those with the smallest
        error bound); "highs" or "columns".
    seed, noise_multiplier: for tests alone. Noise from a seed is known; noise_multiplier=0, with a seed, is none. The statement
        says that such a mean is not private.
    """
    if noise_multiplier is not None and (noise_multiplier != 0 or seed is None):
        raise ConfigError(
            "noise_multiplier=0, together with a seed, leaves the noise out, for tests; it takes no other value."
        )
    asked = _Asked(
        epsilon, delta, bound, sparsity, method, neighbours, rows, calibration, measurements, measurement_clip, solver
    )
    data = _read(X, asked)
    key = RandomKey.from_os() if seed is None else RandomKey.from_seed(seed)
    releases = Releases(key.child(_NOISE), noiseless=noise_multiplier is not None)
    budget = _budget(asked, data.rows, releases)
    sizes = Sizes(budget.divisor, data.columns, asked.bound, data.sparsity, asked.epsilon, asked.delta)
    measuring = _measuring(asked, budget, sizes)
    if method == "l1_recovery" and measuring is not None and not measuring.noise_alone:
        return _by_recovery(asked, data, budget, sizes, releases, measuring, key.child(_MATRIX))
    return _by_noise(asked, data, budget, sizes, releases, measuring)


@dataclass(frozen=True)
class _Asked:
    """The arguments, checked."""

    epsilon: float
    delta: float
    bound: float
    sparsity: float
    method: Method
    neighbours: Neighbours
    rows: int | None
    calibration: Calibration
    measurements: int | None
    measurement_clip: float | None
    solver: Solver | None

    def __post_init__(self) -> None:
        for name, kind in (("method", Method), ("neighbours", Neighbours), ("calibration", Calibration)):
            require_choice(name, getattr(self, name), kind)
        if self.solver is not None:
            require_choice("solver", self.solver, Solver)
        require_number("epsilon", self.epsilon, low=0.0, low_open=True)
        require_number("delta", self.delta, low=0.0, high=1.0, high_open=True)
        require_number("bound", self.bound, low=1e-100, high=1e100)
        require_number("sparsity", self.sparsity, low=1.0)
        if self.measurement_clip is not None:
            require_number("measurement_clip", self.measurement_clip, low=1e-3, high=1e3)
        for name in ("rows", "measurements"):
            if getattr(self, name) is not None:
                require_count(name, getattr(self, name), low=1)
        of_recovery = (self.measurements, self.measurement_clip, self.solver)
        if self.method != "l1_recovery" and any(value is not None for value in of_recovery):
            raise ConfigError("measurements, measurement_clip and solver are for method='l1_recovery'.")
        if self.delta == 0 and self.method in ("gaussian", "l1_recovery"):
            raise ConfigError(
                f"method={self.method!r} has Gaussian noise, which needs a delta above 0. For delta=0 take 'projection'."
            )
        if self.calibration == "paper" and self.neighbours == "add_remove" and self.rows is None:
            raise ConfigError("calibration='paper' needs a public number of rows: neighbours='replace_one', or rows=.")

    @property
    def moved(self) -> int:
        """How many rows' worth a sum can move between neighbours."""
        return units_moved(self.neighbours)


@dataclass(frozen=True)
class _Data:
    """The clipped rows: their sum, or for l1 recovery themselves."""

    total: FixedPoint
    chunks: list[scipy.sparse.csr_array]
    rows: int  # private with "add_remove"
    columns: int
    sparsity: float
    clipped: int


def _read(X: Any, asked: _Asked) -> _Data:
    """Clips and adds up, in one pass over the data."""
    total: ExactSum | None = None
    kept: list[scipy.sparse.csr_array] = []
    clipped = 0
    for chunk in clean_chunks(X):
        # No l1 norm is more than sqrt(d) l2 norms: a larger sparsity would only add Laplace noise.
        sparsity = min(float(asked.sparsity), float(chunk.shape[1]))
        bounds = RowBounds(asked.bound, asked.bound * math.sqrt(sparsity))
        total = total or ExactSum(chunk.shape[1], bounds.step)
        clipped += bounds.clip(chunk)
        total.add(chunk)
        if asked.method == "l1_recovery":
            kept.append(chunk)
    assert total is not None  # there is one chunk at least
    columns = len(total.sum.whole)
    return _Data(total.sum, kept, total.rows, columns, min(float(asked.sparsity), float(columns)), clipped)


@dataclass(frozen=True)
class _Budget:
    """What is left for the sum, and what it is divided by."""

    divisor: int
    divisor_is_public: bool
    multiplier: float | None  # for Gaussian noise; None: there is none
    epsilon: float | None  # for Laplace noise; None: there is none

    def scales(self, asked: _Asked, sparsity: float) -> dict[Noise, float]:
        """The deviation or scale of each noise on the mean."""
        moved = asked.moved * asked.bound / self.divisor
        scales: dict[Noise, float] = {}
        if self.multiplier is not None:
            scales["gaussian"] = self.multiplier * moved
        if self.epsilon is not None:
            scales["laplace"] = moved * math.sqrt(sparsity) / self.epsilon
        return scales

    def measured_multiplier(self, asked: _Asked) -> float | None:
        """The multiplier of Gaussian noise on measurements: the paper prints another one for them."""
        if self.multiplier is not None and asked.calibration == "paper":
            return gaussian_multiplier(asked.epsilon, asked.delta, "paper", halved=True)
        return self.multiplier


def _budget(asked: _Asked, rows: int, releases: Releases) -> _Budget:
    """Settles the divisor, by a release if the number of rows is private, and what is left of the budget after it.

    What is left does not depend on the number that was released: Gaussian noise has its share of one joint Gaussian, Laplace
    noise its share of epsilon.
    """
    epsilon, delta = float(asked.epsilon), float(asked.delta)
    public = asked.rows
    if asked.neighbours == "replace_one":
        if rows == 0:
            raise DataError("X has no rows, and so no mean.")
        if asked.rows not in (None, rows):
            raise DataError(
                f"X has {rows} rows, not rows={asked.rows}: with neighbours='replace_one' it is their number."
            )
        public = rows
    if delta > 0:
        require_delta(delta, public, allow_large=False)
    if public is not None:
        return _Budget(public, True, gaussian_multiplier(epsilon, delta, asked.calibration) if delta else None, epsilon)
    count = FixedPoint(np.array([rows * _COUNT_STEPS]), 1 / _COUNT_STEPS)
    if delta == 0 or asked.method == "laplace":
        noisy = releases.laplace(count, 1.0, epsilon * _COUNT_SHARE)[0]
        return _Budget(max(1, round(float(noisy))), False, None, epsilon * (1 - _COUNT_SHARE))
    for_count, for_sum = split_multiplier(gaussian_multiplier(epsilon, delta), _COUNT_RATIO)
    noisy = releases.gaussian(count, 1.0, for_count)[0]
    return _Budget(max(1, round(float(noisy))), False, for_sum, None)


def _measuring(asked: _Asked, budget: _Budget, sizes: Sizes) -> Measuring | None:
    """How l1 recovery would measure, with the noise that it would have; None: the budget has no Gaussian noise."""
    multiplier = budget.measured_multiplier(asked)
    if multiplier is None:
        return None
    scale = multiplier * asked.moved * asked.bound / budget.divisor
    printed = asked.calibration == "paper"
    return choose_measuring(sizes, scale, asked.measurements, asked.measurement_clip, printed=printed)


def _by_noise(
    asked: _Asked, data: _Data, budget: _Budget, sizes: Sizes, releases: Releases, measuring: Measuring | None
) -> PrivateMean:
    """Noise on the sum, and the projection if that is the method."""
    recovery = math.inf if measuring is None else measuring.bound
    # Where l1 recovery has nothing to recover, it is Gaussian noise alone (algorithm 2's other branch).
    method = "gaussian" if asked.method == "l1_recovery" else asked.method
    choice = choose(sizes, budget.scales(asked, data.sparsity), method, recovery)
    if asked.method == "l1_recovery":
        assert measuring is not None  # delta is above 0
        why = f"for m = {measuring.measurements}, d = {data.columns} is below m ln^2 m or not above m: Gaussian noise alone is "
        choice = replace(choice, method="l1_recovery", reason=why + "as good as recovery")
    moved = asked.moved * asked.bound
    if choice.noise == "gaussian":
        assert budget.multiplier is not None  # otherwise there is no such scale to choose
        noisy = releases.gaussian(data.total, moved, budget.multiplier)
        noise = f"Gaussian, its deviation {budget.multiplier:.4g} times the l2 sensitivity of the sum, {moved:.4g}"
    else:
        assert budget.epsilon is not None
        moved *= math.sqrt(data.sparsity)
        noisy = releases.laplace(data.total, moved, budget.epsilon)
        noise = f"discrete Laplace, its scale {1 / budget.epsilon:.4g} times the l1 sensitivity of the sum, {moved:.4g}"
    mean = noisy / budget.divisor
    if choice.method == "projection":
        mean = project(mean, L1Ball(asked.bound * math.sqrt(data.sparsity)), norm="l2")
    return PrivateMean(
        mean=mean,
        statement=_statement(asked, data, budget, releases, choice.method, noise),
        method=choice.method,
        noise=choice.noise,
        reason=choice.reason,
        rows=budget.divisor,
        error_bound=choice.bound,
        bounds=choice.bounds,
        clipped_rows=data.clipped,
        ledger=releases.ledger,
    )


def _by_recovery(
    asked: _Asked,
    data: _Data,
    budget: _Budget,
    sizes: Sizes,
    releases: Releases,
    measuring: Measuring,
    key: RandomKey,
) -> PrivateMean:
    """Noise on the sum of A z, and the vector of least l1 norm with these measurements."""
    multiplier = budget.measured_multiplier(asked)
    assert multiplier is not None  # delta is above 0
    m, clip = measuring.measurements, measuring.clip * asked.bound
    matrix = GaussianMatrix(key, m, data.columns)
    total = ExactSum(m, RowBounds(clip, clip).step)
    clipped = matrix.clipped_sum(data.chunks, clip, total)
    noisy = releases.gaussian(total.sum, asked.moved * clip, multiplier)
    solved = least_l1(matrix, noisy / budget.divisor, solver=asked.solver)
    if not solved.finished:
        warnings.warn(
            f"The solver ({solved.solver}) ended after {solved.iterations} iterations with a gap of {solved.gap:.2g}: this costs "
            "accuracy, not privacy.",
            SparseDPWarning,
            stacklevel=3,
        )
    cut = float(np.linalg.norm(solved.point)) > 2 * asked.bound
    noise = f"Gaussian on {m} measurements, its deviation {multiplier:.4g} times their l2 sensitivity, {asked.moved * clip:.4g}"
    return PrivateMean(
        mean=np.zeros(data.columns) if cut else solved.point,
        statement=_statement(asked, data, budget, releases, "l1_recovery", noise, measuring),
        method="l1_recovery",
        noise="gaussian",
        reason="as asked",
        rows=budget.divisor,
        error_bound=min(measuring.bound, 3 * asked.bound),  # no error is larger, because of the cut
        bounds=choose(sizes, budget.scales(asked, data.sparsity), "projection", measuring.bound).bounds,
        clipped_rows=data.clipped,
        ledger=releases.ledger,
        recovery=Recovery(m, solved.solver, solved.iterations, solved.gap, solved.finished, cut, clipped),
    )


def _statement(
    asked: _Asked,
    data: _Data,
    budget: _Budget,
    releases: Releases,
    method: str,
    noise: str,
    measuring: Measuring | None = None,
) -> ReleaseStatement:
    assumptions = ["Each unit has one row, and the number of columns is public."]
    released = "the mean"
    if not budget.divisor_is_public:
        released = "the mean and the number of rows, each with noise of its own"
    elif asked.neighbours == "replace_one":
        assumptions.append(f"The number of rows, {budget.divisor}, is public.")
    else:
        assumptions.append(f"The number that the sum is divided by, {budget.divisor}, is public, as was declared.")
    if measuring is not None:
        assumptions.append("The matrix of the measurements may be public: it was drawn before the data were looked at.")
    return make_statement(
        releases,
        target_epsilon=float(asked.epsilon),
        delta=float(asked.delta),
        neighbours=asked.neighbours,
        mechanism=method,
        settings={
            "bound": float(asked.bound),
            "sparsity": data.sparsity,
            "calibration": asked.calibration,
            "measurements": None if measuring is None else measuring.measurements,
            "measurement_clip": None if measuring is None else measuring.clip,
        },
        released=released,
        noise=noise,
        assumptions=tuple(assumptions),
        not_covered=("How many rows were clipped, which is counted from private data without noise.",),
    )
