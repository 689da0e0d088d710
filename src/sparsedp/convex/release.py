"""Noisy releases of vectors: noise, its calibration, and what it costs.

What is released lies on a grid, so that its bits do not tell what the noise was added to (`sparsedp.grid`). Sums of rows
come as integers (`FixedPoint`): adding them rounds nothing, so that one row moves them by no more than its bound.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import torch
from dp_accounting import GaussianDpEvent, LaplaceDpEvent, NonPrivateDpEvent

from sparsedp.accounting import Ledger, calibrate, epsilon_of
from sparsedp.accounting.events import require_number
from sparsedp.convex.laplace import LARGEST_SCALE, discrete_laplace
from sparsedp.errors import ConfigError, SparseDPError, suggestion
from sparsedp.grid import grid_of
from sparsedp.noise import GaussianNoise, RandomKey, Sums

Calibration = Literal["analytic", "paper"]
Neighbours = Literal["add_remove", "replace_one"]
NEIGHBOURING = {"add_remove": "adding or removing one row", "replace_one": "replacing one row by another"}
_TOLERANCE = 1e-6  # of calibrated noise
_FINER = 2.0**-12  # what rounding numbers to integers adds to their sensitivity, at most
_LARGEST = 1 << 61  # of integers that get noise


@dataclass(frozen=True)
class FixedPoint:
    """Numbers that are multiples of a power of two: `whole` (d,) int64, times `step`."""

    whole: np.ndarray
    step: float

    def __post_init__(self) -> None:
        if self.whole.dtype != np.int64 or math.frexp(self.step)[0] != 0.5:
            raise SparseDPError(f"FixedPoint takes int64 and a power of two, not {self.whole.dtype} and {self.step}.")

    @property
    def values(self) -> np.ndarray:
        return self.whole * self.step


def require_choice(name: str, value: object, kind: object) -> str:
    """`value`, if it is one of a Literal's, or an error with what there is."""
    names = get_args(kind)
    if not isinstance(value, str) or value not in names:
        hint = suggestion(value, names)
        raise ConfigError(f"{name} must be one of {', '.join(names)}; got {value!r}{hint}")
    return value


def units_moved(neighbours: Neighbours) -> int:
    """How many rows' worth a sum can move between neighbours: a replaced row leaves and another one comes."""
    return 2 if require_choice("neighbours", neighbours, Neighbours) == "replace_one" else 1


def gaussian_multiplier(
    epsilon: float, delta: float, calibration: Calibration = "analytic", *, halved: bool = False
) -> float:
    """The deviation of noise over the l2 sensitivity, for (epsilon, delta).

    "analytic": the least, to a millionth, for any epsilon. "paper": sqrt(2 ln(1.25 / delta)) / epsilon, which is proven for
    epsilon <= 1 and refused above; `halved` has 2.5 for 1.25, as the paper prints it for l1 recovery.
    """
    epsilon = require_number("epsilon", epsilon, low=0.0, low_open=True)
    delta = require_number("delta", delta, low=0.0, high=1.0, low_open=True, high_open=True)
    if require_choice("calibration", calibration, Calibration) == "analytic":
        return _least_multiplier(epsilon, delta)
    if epsilon > 1:
        raise ConfigError(
            f"calibration='paper' holds for epsilon up to 1, not for {epsilon:g}: take calibration='analytic'."
        )
    return math.sqrt(2 * math.log((2.5 if halved else 1.25) / delta)) / epsilon


@functools.cache
def _least_multiplier(epsilon: float, delta: float) -> float:
    return calibrate(GaussianDpEvent, epsilon, delta, tolerance=_TOLERANCE)


@dataclass
class Releases:
    """Releases vectors with noise, and keeps the ledger of them.

    Each release has noise of its own: a function of the key and the release's number. With `noiseless`, for tests, there is
    no noise, and the ledger says that nothing is private.
    """

    key: RandomKey
    noiseless: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    taken: int = 0  # how many releases there were

    def gaussian(self, values: np.ndarray | FixedPoint, sensitivity: float, noise_multiplier: float) -> np.ndarray:
        """`values` (d,) plus N(0, (noise_multiplier * sensitivity)^2) for each, float64 on a grid.

        `sensitivity` bounds the l2 distance of the values of neighbours. `values` are float64 or `FixedPoint`.
        """
        std = require_number("noise_multiplier", noise_multiplier, low=0.0, low_open=True) * _positive(sensitivity)
        key = self._next_key()
        if self.noiseless:
            return self._without_noise(values)
        grid = grid_of(std)
        if isinstance(values, FixedPoint):
            # What is a multiple of the grid already rounds nothing: it joins afterwards, as an integer.
            multiples, rest = _split(values, grid)
        else:
            _require_finite(values)
            multiples = np.zeros(len(values), np.int64)
            rest = np.array(values, np.float64)
        # Noise of about 1: the sampler's grids have limits. Powers of two change no digit.
        unit = math.ldexp(1.0, math.frexp(std)[1])
        noisy = torch.from_numpy(rest / unit)
        GaussianNoise(key).add({0: Sums(noisy)}, std / unit, 0)
        self.ledger.record(GaussianDpEvent(noise_multiplier))
        return (multiples + np.rint(noisy.numpy() * (unit / grid))) * grid

    def laplace(self, values: np.ndarray | FixedPoint, sensitivity: float, epsilon: float) -> np.ndarray:
        """`values` (d,) plus discrete Laplace noise of scale sensitivity / epsilon for each, float64: epsilon-DP exactly.

        `sensitivity` bounds the l1 distance of the values of neighbours. Values in float64 are rounded to integer multiples
        of a step first, by which that distance grows by 2^-12 of itself at most; those beyond 2^61 steps are cut there.
        """
        epsilon = require_number("epsilon", epsilon, low=0.0, low_open=True)
        sensitivity = _positive(sensitivity)
        generator = self._next_key().generator()
        if self.noiseless:
            return self._without_noise(values)
        if not isinstance(values, FixedPoint):
            _require_finite(values)
            step = math.ldexp(1.0, math.frexp(sensitivity * _FINER / max(1, len(values)))[1] - 1)
            sensitivity += len(values) * step
            cut = np.clip(np.asarray(values, np.float64) / step, -_LARGEST, _LARGEST)
            values = FixedPoint(np.rint(cut).astype(np.int64), step)
        steps = sensitivity / (epsilon * values.step)
        if steps > LARGEST_SCALE:
            raise SparseDPError(
                f"epsilon={epsilon:g} is too small for Laplace noise on {len(values.whole)} numbers of sensitivity "
                f"{sensitivity:g}: its integers would not fit."
            )
        scale = math.ceil(steps * (1 + 2.0**-50)) + 1  # up, whatever was rounded on the way
        noise = discrete_laplace(generator, scale, len(values.whole))
        self.ledger.record(LaplaceDpEvent(math.nextafter(1 / epsilon, math.inf)))  # less than the scale was rounded up
        return (values.whole + noise) * values.step

    @property
    def is_pure(self) -> bool:
        """Whether the guarantee holds at delta = 0."""
        return all(isinstance(entry.event, LaplaceDpEvent) for entry in self.ledger.entries)

    def epsilon(self, delta: float) -> float:
        """What all releases cost together, at `delta`, by the ledger; at 0 if all noise is Laplace's."""
        if self.is_pure:
            return sum(entry.count / entry.event.noise_multiplier for entry in self.ledger.entries)
        if delta == 0:
            return math.inf
        return epsilon_of(self.ledger, delta)

    def _next_key(self) -> RandomKey:
        self.taken += 1
        return self.key.child(self.taken)

    def _without_noise(self, values: np.ndarray | FixedPoint) -> np.ndarray:
        self.ledger.record(NonPrivateDpEvent())
        return values.values if isinstance(values, FixedPoint) else np.array(values, np.float64)


def _split(values: FixedPoint, grid: float) -> tuple[np.ndarray, np.ndarray]:
    """Whole multiples of the grid, int64, and what is left of each number, float64: both exact."""
    shift = round(math.log2(grid / values.step))
    if shift >= 0:
        multiples = values.whole >> shift
        return multiples, (values.whole - (multiples << shift)) * values.step
    if int(np.abs(values.whole).max(initial=0)).bit_length() - shift > 62:
        raise SparseDPError(f"Noise on a grid of {grid:g} is too small for such large numbers.")
    return values.whole << -shift, np.zeros(len(values.whole))


def _positive(sensitivity: float) -> float:
    return require_number("sensitivity", sensitivity, low=0.0, low_open=True)


def _require_finite(values: np.ndarray) -> None:
    if not np.isfinite(values).all():
        raise SparseDPError("What gets noise holds NaN or infinity: nothing was released.")
