"""Which method of estimating a mean has the smallest error bound, for these sizes and this budget."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from sparsedp.convex.recovery import measurements_for, needs_no_recovery

Noise = Literal["gaussian", "laplace"]


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


def recovery_bound(sizes: Sizes) -> float:
    """What a bound for l1 recovery by the M* bound is at least. The paper leaves its constants open.

    The error beyond the noise lies in A's kernel and its l1 norm is bounded by 2 L sqrt(s) at least; an M* bound makes that an
    l2 norm of sqrt(8 pi / m) E|g|_inf times it. Sharper constants than sqrt(8 pi) may exist: this is not the last word.
    """
    m = measurements_for(sizes.rows, sizes.columns, sizes.sparsity, sizes.epsilon, sizes.delta)
    if needs_no_recovery(max(1, math.ceil(m)), sizes.columns):
        return math.nan  # it is noise alone
    largest = math.sqrt(2 * math.log(2 * sizes.columns))
    return math.sqrt(8 * math.pi / m) * largest * 2 * sizes.bound * math.sqrt(sizes.sparsity)


def choose(sizes: Sizes, scales: Mapping[Noise, float], method: str) -> Choice:
    """The method asked for, or for "auto" the one with the smallest bound. `scales` are the noises that the budget allows."""
    bounds: dict[tuple[str, Noise], float] = {}
    for noise, scale in scales.items():
        bounds[noise, noise], bounds["projection", noise] = error_bounds(sizes, noise, scale)
    named = {f"{one} with {noise} noise" if one == "projection" else one: at for (one, noise), at in bounds.items()}
    if method != "auto":
        noise = "laplace" if method == "laplace" or "gaussian" not in scales else "gaussian"
        return Choice(method, noise, bounds[method, noise], named, "as asked")
    # The projection is never further from the mean than what is projected: of equal bounds its own.
    chosen, noise = min(bounds, key=lambda key: (bounds[key], key[0] != "projection"))
    compared = ", ".join(f"{name} {at:.3g}" for name, at in named.items())
    reason = f"nothing has a smaller bound on the root mean square error: {compared}"
    if sizes.delta > 0 and not math.isnan(lowest := recovery_bound(sizes)):
        reason += f"; l1_recovery's is above {lowest:.3g} by the M* bound"
    if bounds[chosen, noise] >= sizes.bound:
        reason += f". The mean's own norm is at most {sizes.bound:.3g}: zero has as small a bound"
    return Choice(chosen, noise, bounds[chosen, noise], named, reason)
