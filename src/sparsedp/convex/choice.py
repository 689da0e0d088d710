"""Which method of estimating a mean has the smallest error bound, for these sizes and this budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sparsedp.convex.recovery import measurements_for, needs_no_recovery
from sparsedp.convex.recovery_bound import RecoveryBound

Noise = Literal["gaussian", "laplace"]
PRINTED_CLIP = 1.5


@dataclass(frozen=True)
class Sizes:
    """What error bounds depend on, beside the noise. All of it is public, or released already."""

    rows: int  # that the sum is divided by
    columns: int
    bound: float  # L
    sparsity: float  # s
    epsilon: float
    delta: float


@dataclass(frozen=True)
class Choice:
    method: str
    noise: Noise
    bound: float  # on the root mean square of the error's l2 norm
    bounds: dict[str, float]  # of all that there was to choose from
    reason: str


def error_bounds(sizes: Sizes, noise: Noise, scale: float) -> tuple[float, float]:
    """Bounds on the root mean square error of noise of this scale on the mean, as it is and after the projection.

    As it is: sqrt(d) deviations. After: |z - mean|^2 <= <noise, z - mean> <= 2 L sqrt(s) |noise|_inf (Lemma 3.1), and the error
    does not grow. `scale` is a normal's deviation, and the largest of d has E <= sqrt(2 ln 2d) of them; or a Laplace number's
    scale, and the largest of d has E = 1 + 1/2 + ... + 1/d of them.
    """
    d = sizes.columns
    if noise == "gaussian":
        alone, largest = scale * math.sqrt(d), scale * math.sqrt(2 * math.log(2 * d))
    else:
        alone, largest = scale * math.sqrt(2 * d), scale * (math.log(d) + 0.5773 + 1 / (2 * d))
    return alone, min(alone, math.sqrt(2 * sizes.bound * math.sqrt(sizes.sparsity) * largest))


@dataclass(frozen=True)
class Measuring:
    """How l1 recovery measures, and its error bound."""

    measurements: int  # m
    clip: float  # of |A z|, over L
    bound: float  # on the root mean square of the error's l2 norm, over the noise and the matrix; infinite where m is too small
    noise_alone: bool  # there is nothing to recover


def choose_measuring(
    sizes: Sizes, scale: float, measurements: int | None, clip: float | None, *, printed: bool
) -> Measuring:
    """m and the clip with the smallest bound, where they are not given; or as they are printed.

    `scale` is the deviation of the noise for a clip of 1. The paper leaves a constant of m open, which is 1 here where it is
    printed, and has the clip of 1.5 as a property of A.
    """
    bound = RecoveryBound(sizes.columns, sizes.bound, sizes.bound * math.sqrt(sizes.sparsity), scale)
    m = max(1, math.ceil(measurements_for(sizes.rows, sizes.columns, sizes.sparsity, sizes.epsilon, sizes.delta)))
    best = None if printed else bound.best(measurements, clip)
    m, clip = best or (measurements or m, clip or PRINTED_CLIP)
    if needs_no_recovery(m, sizes.columns):
        return Measuring(m, clip, error_bounds(sizes, "gaussian", scale)[0], True)
    return Measuring(m, clip, bound.at(m, clip), False)


def choose(sizes: Sizes, scales: Mapping[Noise, float], method: str, recovery: float = math.inf) -> Choice:
    """The method asked for, or for "auto" the one with the smallest bound. `scales` are the noises that the budget allows.

    `recovery` is l1 recovery's bound. It is compared, but "auto" does not take it: it is above the projection's at all sizes
    (a test goes over them), and it needs the rows twice.
    """
    bounds: dict[tuple[str, Noise], float] = {}
    for noise, scale in scales.items():
        bounds[noise, noise], bounds["projection", noise] = error_bounds(sizes, noise, scale)
    named = {f"{one} with {noise} noise" if one == "projection" else one: at for (one, noise), at in bounds.items()}
    if recovery < math.inf:
        named["l1_recovery"] = recovery
    if method != "auto":
        noise = "laplace" if method == "laplace" or "gaussian" not in scales else "gaussian"
        return Choice(method, noise, bounds[method, noise], named, "as asked")
    # The projection is never further from the mean than what is projected: of equal bounds its own.
    chosen, noise = min(bounds, key=lambda key: (bounds[key], key[0] != "projection"))
    compared = ", ".join(f"{name} {at:.3g}" for name, at in named.items())
    reason = f"nothing has a smaller bound on the root mean square error: {compared}"
    if bounds[chosen, noise] >= sizes.bound:
        reason += f". The mean's own norm is at most {sizes.bound:.3g}: zero has as small a bound"
    return Choice(chosen, noise, bounds[chosen, noise], named, reason)
