"""The minimiser of a regularised risk, with a certificate: how far the returned point can be from the exact minimiser.

F is strongly convex with modulus lambda, so |w - w*| <= |grad F(w)| / lambda on the whole space. On a convex set, the point
p = P(v - grad F(v) / M), with P the projection, has r = grad F(p) - grad F(v) + M (v - p) in grad F(p) + normal cone at p, and
|p - w*| <= |r| / lambda. Both bounds hold whatever the solver did, and are computed with what rounding can have changed.

The target is fixed before the data are looked at. Newton's method comes first; where it does not reach the target, accelerated
gradient steps do, whose number is bounded beforehand for every data set.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sparsedp.convex.feasible import Box, FeasibleSet, L1Ball, L2Ball, WholeSpace
from sparsedp.convex.objective import Objective
from sparsedp.convex.projections import project
from sparsedp.errors import SparseDPError

_NEWTON_STEPS = 100
_CONJUGATE_STEPS = 500
_CHECKED_EVERY = 20  # gradient steps
_UNIT = 2.0**-53  # the relative error of one operation


class NotConvergedError(SparseDPError):
    """The minimiser could not be certified to the distance that the noise was chosen for; nothing was released."""


@dataclass(frozen=True)
class Minimum:
    point: np.ndarray  # (d,)
    distance: float  # to the exact minimiser, at most
    evaluations: int  # of the gradient


def minimise(objective: Objective, feasible: FeasibleSet, target: float) -> Minimum:
    """A feasible point whose distance to the minimiser over the set is certified to be at most `target`."""
    bounds = objective.bounds
    point, evaluations = _newton(objective, target)
    distance = objective.residual(point, objective.gradient(point)) / bounds.regularisation
    if distance <= target and _contains_ball(feasible, point, distance):
        # The minimiser over the whole space is in the set, and so it is the one over the set.
        return Minimum(point, distance, evaluations)
    return _accelerated(objective, feasible, project(point, feasible, norm="l2"), target, evaluations)


def _newton(objective: Objective, target: float) -> tuple[np.ndarray, int]:
    """Newton's method with conjugate gradients over the whole space, and the number of gradients and products it took."""
    lam = objective.bounds.regularisation
    w = np.zeros(objective.bounds.columns)
    value, gradient = objective.value_and_gradient(w)
    evaluations = 1
    for _ in range(_NEWTON_STEPS):
        size = float(np.linalg.norm(gradient))
        if objective.residual(w, gradient) <= target * lam or size == 0:
            break
        step, products = _newton_step(objective, w, gradient, min(0.1, math.sqrt(size)) * size)
        evaluations += products
        length = 1.0
        while True:
            candidate = w + length * step
            new_value, new_gradient = objective.value_and_gradient(candidate)
            evaluations += 1
            # Near the minimum the values differ by less than their rounding; there the gradient decides.
            enough = new_value <= value + 1e-4 * length * float(gradient @ step)
            if enough or float(np.linalg.norm(new_gradient)) <= 0.9 * size:
                break
            length /= 2
            if length < 1e-8:
                return w, evaluations
        w, value, gradient = candidate, new_value, new_gradient
    return w, evaluations


def _newton_step(objective: Objective, w: np.ndarray, gradient: np.ndarray, tolerance: float) -> tuple[np.ndarray, int]:
    """p with |Hessian p + gradient| <= tolerance, by conjugate gradients, and the number of products."""
    curvatures = objective.curvatures(w)
    p = np.zeros_like(gradient)
    residual, direction = -gradient, -gradient
    squared = float(residual @ residual)
    products = 0
    while products < _CONJUGATE_STEPS:
        products += 1
        product = objective.hessian_product(curvatures, direction)
        length = squared / float(direction @ product)
        p = p + length * direction
        residual = residual - length * product
        before, squared = squared, float(residual @ residual)
        if squared <= tolerance**2:
            break
        direction = residual + (squared / before) * direction
    return p, products


def largest_number_of_steps(objective: Objective, target: float) -> int:
    """So many accelerated gradient steps reach the target on any data, but for rounding.

    After t steps F(w_t) - F* <= (1 - sqrt(lambda/M))^t (F(w_0) - F* + lambda/2 |w_0 - w*|^2), M = H + lambda (Nesterov 2004,
    theorem 2.2.3). With gap g there, |w_t - w*| <= sqrt(2 g / lambda), the point ahead is within 3 times that of w*, and the
    residual of what the next step makes of it is at most 12 M sqrt(2 g / lambda). Half of the target is left for rounding.
    """
    bounds = objective.bounds
    lam, curvature = bounds.regularisation, bounds.smoothness + bounds.regularisation
    apart = 2 * bounds.minimiser_norm  # of a starting point and the minimiser
    start = (bounds.lipschitz + lam * apart) * apart + curvature * apart**2
    wanted = lam / 2 * (target * lam / (24 * curvature)) ** 2
    return max(100, math.ceil(math.sqrt(curvature / lam) * max(1.0, math.log(start / wanted))))


def _accelerated(
    objective: Objective, feasible: FeasibleSet, start: np.ndarray, target: float, evaluations: int
) -> Minimum:
    """Accelerated projected gradient steps from a feasible point."""
    bounds = objective.bounds
    curvature = bounds.smoothness + bounds.regularisation
    root = math.sqrt(bounds.regularisation / curvature)
    momentum = (1 - root) / (1 + root)
    if float(np.linalg.norm(start)) > bounds.minimiser_norm:
        start = np.zeros(bounds.columns)  # which is feasible
    w = ahead = start
    steps = 2 * largest_number_of_steps(objective, target)
    for step in range(1, steps + 1):
        gradient = objective.gradient(ahead)
        evaluations += 1
        new = project(ahead - gradient / curvature, feasible, norm="l2")
        if step % _CHECKED_EVERY == 0 or step == steps:
            distance = _distance(objective, feasible, ahead, gradient, new)
            evaluations += 1
            if distance <= target:
                return Minimum(new, distance, evaluations)
        ahead = new + momentum * (new - w)
        w = new
    raise NotConvergedError(
        f"The minimiser could not be certified: after {evaluations} evaluations its distance is at most {distance:.3g}, and the "
        f"noise was chosen for {target:.3g}. Nothing was released but this message, which depends on the data. Raise the "
        f"regularisation ({bounds.regularisation:g}), or make rows and columns of more even size."
    )


def _distance(objective: Objective, feasible: FeasibleSet, v: np.ndarray, gradient: np.ndarray, p: np.ndarray) -> float:
    """How far p, computed as P(v - gradient / M), can be from the minimiser over the set."""
    bounds = objective.bounds
    curvature = bounds.smoothness + bounds.regularisation
    at_p = objective.gradient(p)
    if isinstance(feasible, WholeSpace):
        return objective.residual(p, at_p) / bounds.regularisation
    norm = max(float(np.linalg.norm(p)), float(np.linalg.norm(v)))
    slope = bounds.loss.largest_slope(bounds.row_norm * norm)
    # The computed p is not quite the projection, nor quite feasible: the exact one, within `error` of it, is both.
    error = _projection_error(feasible, p) + 8 * _UNIT * norm
    residual = 1.0001 * float(np.linalg.norm(at_p - gradient + curvature * (v - p)))
    residual += 2 * bounds.rounding(1.0001 * norm, slope) + 8 * _UNIT * curvature * norm + 2 * curvature * error
    return residual / bounds.regularisation + error


def _projection_error(feasible: FeasibleSet, p: np.ndarray) -> float:
    """How far p, as `project` computed it in the l2 norm, can be from the exact projection.

    Found from p itself, with sums that round once (`math.fsum`): by how much the ball's boundary is missed. A box is exact.
    """
    if isinstance(feasible, (WholeSpace, Box)):
        return 0.0
    sizes = p * p if isinstance(feasible, L2Ball) else np.abs(p)
    total = math.fsum(sizes.tolist())
    missed = (math.sqrt(total) if isinstance(feasible, L2Ball) else total) - feasible.radius
    if missed < -1e-6 * feasible.radius:  # inside, so that nothing was projected
        return 0.0
    # Onto the l2 ball: a multiple of the point. Onto the l1 ball every coordinate that is left is moved by one threshold, which
    # is wrong by what the sum misses at most.
    moved = 1.0 if isinstance(feasible, L2Ball) else math.sqrt(np.count_nonzero(p) + 1)
    return moved * (abs(missed) + 8 * _UNIT * feasible.radius)


def contains_zero(feasible: FeasibleSet) -> bool:
    """Whether the point 0 is feasible, as the bounds on minimisers take for granted."""
    return not isinstance(feasible, Box) or bool(
        (np.asarray(feasible.low) <= 0).all() and (np.asarray(feasible.high) >= 0).all()
    )


def radius_of(feasible: FeasibleSet, columns: int) -> float:
    """The largest l2 norm of a feasible point; may be infinite."""
    if isinstance(feasible, Box):
        size = np.maximum(np.abs(feasible.low), np.abs(feasible.high))
        return float(np.linalg.norm(np.broadcast_to(size, columns)))
    return math.inf if isinstance(feasible, WholeSpace) else feasible.radius


def _contains_ball(feasible: FeasibleSet, centre: np.ndarray, radius: float) -> bool:
    """Whether all points within `radius` of `centre`, in l2 norm, are feasible; in doubt not."""
    if isinstance(feasible, L2Ball):
        return 1.0001 * float(np.linalg.norm(centre)) + radius <= feasible.radius
    if isinstance(feasible, L1Ball):
        return 1.0001 * (float(np.abs(centre).sum()) + math.sqrt(len(centre)) * radius) <= feasible.radius
    if isinstance(feasible, Box):
        return bool(
            (centre - 1.0001 * radius >= feasible.low).all() and (centre + 1.0001 * radius <= feasible.high).all()
        )
    return True
