"""When a truncated gradient with less noise beats a whole one: equation 2 of the DP-AdaFEST paper, from a step's report.

Projected SGD over a convex set of diameter R, with a gradient oracle of bias alpha and variance v, is off by at most
(R / sqrt(T)) sqrt((L + alpha)^2 + v) + alpha R after T steps (its Lemma 3.1). DP-SGD has no bias, and noise on all D coordinates.
A selection that cuts away a share gamma of the gradient has the bias gamma L, and noise on the h coordinates that it keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq

from sparsedp.accounting.events import require_count, require_number
from sparsedp.step_report import StepReport


@dataclass(frozen=True)
class Truncation:
    """Both sides of equation 2, times L R / sqrt(T) bounds on the excess loss. Derived from private data: not for release."""

    truncated: float  # gamma, the share of a gradient's norm that the selection cut away
    selected: float  # sqrt((1 + gamma)^2 + h (std / L)^2) + gamma sqrt(T)
    dense: float  # sqrt(1 + D (std / L)^2)
    largest: float  # gamma with which both sides are equal; below it the selection should win

    @property
    def pays(self) -> bool:
        """Whether the selection should have the smaller excess loss."""
        return self.selected < self.dense


def truncated_share(kept_mass: float) -> float:
    """gamma: `kept_mass` is left of squared norms, so what was cut away has this share of the norm at most."""
    return math.sqrt(1 - min(1.0, require_number("kept_mass", kept_mass, low=0.0, high=1 + 1e-6)))


def weigh_truncation(
    report: StepReport, *, lipschitz: float, noise_std: float, steps: int, dense_noise_std: float | None = None,
    other_coordinates: int = 0,
) -> Truncation:  # fmt: skip
    """Equation 2 for the selection of this step (`optimizer.last_step`), were all `steps` like it.

    lipschitz: L, a bound on a gradient's norm: the clipping norm, at most.
    noise_std: of the noise on a coordinate of the mean gradient, with the selection; `dense_noise_std`: that of DP-SGD with the
        same budget, which pays for no selection. The paper has one for both, and so does None.
    other_coordinates: of parameters that are no tables, and have noise either way.
    """
    require_number("lipschitz", lipschitz, low=0.0, low_open=True)
    require_number("noise_std", noise_std, low=0.0)
    dense_std = noise_std if dense_noise_std is None else require_number("dense_noise_std", dense_noise_std, low=0.0)
    require_count("steps", steps, low=1)
    require_count("other_coordinates", other_coordinates, low=0)

    def left(gamma: float) -> float:
        kept = report.gradient_size + other_coordinates
        return math.hypot(1 + gamma, math.sqrt(kept) * noise_std / lipschitz) + gamma * math.sqrt(steps)

    dense = math.hypot(1, math.sqrt(report.dense_size + other_coordinates) * dense_std / lipschitz)
    gamma = truncated_share(report.kept_mass)
    largest = 0.0
    if left(0.0) < dense:
        largest = 1.0 if left(1.0) < dense else float(brentq(lambda share: left(share) - dense, 0.0, 1.0))
    return Truncation(gamma, left(gamma), dense, largest)
