"""Exact costs of composed events, without a grid of losses and without an FFT, to compare the accountant with.

One step: the closed form of the Poisson-sampled Gaussian, in mpmath with 40 digits. Many steps: the loss L of a pair (P, Q) has
the Laplace transform M(s) = E_P[e^(sL)], that of independent losses is the product, and the hockey-stick divergence
E_P[(1 - e^(epsilon - L))+] is Bromwich's integral of M(s) e^(-s epsilon) / (s (s + 1)) along any line Re s = c > 0. On the line
through the saddle point the integrand does not oscillate, so that float64 gives ten digits of delta, however small it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import mpmath
import numpy as np
from scipy.optimize import minimize_scalar

Direction = Literal["remove", "add"]
# log M(s) for an array of complex s.
Transform = Callable[[np.ndarray], np.ndarray]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(40)


# ---------------------------------------------------------------------- one step, in mpmath


def one_step_delta(sigma: float, rate: float, epsilon: float, direction: Direction) -> mpmath.mpf:
    """Of the Poisson-sampled Gaussian: (1-q) N(0, sigma^2) + q N(1, sigma^2) against N(0, sigma^2), or the reverse."""
    with mpmath.workdps(40):
        s, q, e = mpmath.mpf(sigma), mpmath.mpf(rate), mpmath.mpf(epsilon)

        def above(x: Any, mean: int) -> Any:
            return mpmath.erfc((x - mean) / (s * mpmath.sqrt(2))) / 2

        # Where the mixture is e^(+-epsilon) times the other one.
        ratio = (mpmath.exp(e if direction == "remove" else -e) - (1 - q)) / q
        if ratio <= 0:
            return mpmath.mpf(0)
        x = s**2 * mpmath.log(ratio) + mpmath.mpf(1) / 2
        if direction == "remove":
            return (1 - q) * above(x, 0) + q * above(x, 1) - mpmath.exp(e) * above(x, 0)
        return above(-x, 0) - mpmath.exp(e) * ((1 - q) * above(-x, 0) + q * above(-x, -1))


# ---------------------------------------------------------------------- Laplace transforms of the loss


def gaussian(sigma: float) -> Transform:
    """On all data: the loss is N(1 / (2 sigma^2), 1 / sigma^2)."""
    return lambda s: (s + s * s) / (2 * sigma**2)


def sampled_gaussian(sigma: float, rate: float, direction: Direction) -> Transform:
    """By the trapezoidal rule in x, whose error falls exponentially for integrands that are analytic, as this one is."""

    def transform(s: np.ndarray) -> np.ndarray:
        c, turns = float(s.real.max()), float(np.abs(s.imag).max())
        # Removing: the tilted density is a mixture of normals with means up to c + 1.
        low, high = -14 * sigma, 14 * sigma + (c + 1 if direction == "remove" else 0.0)
        step = min(sigma / 12, math.pi * sigma**2 / (2 * turns + 1e-300))
        x = np.linspace(low, high, max(400, math.ceil((high - low) / step)))
        ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / sigma**2)  # log of mixture / N(0, sigma^2)
        density = -(x**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])
        exponent = density + (1 + c) * ratio if direction == "remove" else density - c * ratio
        top = float(exponent.max())
        kept = exponent > top - 80
        ratio, weight = ratio[kept], np.exp(exponent[kept] - top)
        sign = 1 if direction == "remove" else -1
        out = np.empty(s.shape, dtype=np.complex128)
        for first in range(0, len(s), 64):
            part = slice(first, first + 64)
            tilt = np.exp(np.outer(s[part] - c, sign * ratio))  # |.| <= 1 on one line Re s = c
            out[part] = np.log(tilt @ weight) + top
        return out

    return transform


def exponential(epsilon: float) -> Transform:
    """The pair that covers a loss of range epsilon (Dong, Durfee & Rogers 2020): density e^((x - epsilon)/2) / (2 (1 - e^-epsilon))
    at a loss x > 0, and e^-x times that at -x."""

    def transform(s: np.ndarray) -> np.ndarray:
        scale = math.exp(-epsilon / 2) / (2 * -math.expm1(-epsilon))
        return np.log(scale * (np.expm1((s + 0.5) * epsilon) / (s + 0.5) + -np.expm1(-(s + 0.5) * epsilon) / (s + 0.5)))

    return transform


# ---------------------------------------------------------------------- many steps, by inversion


def composed_delta(parts: Sequence[tuple[Transform, int]], epsilon: float, shift: float = 0.9) -> float:
    """delta at `epsilon` of `count` independent losses of each kind.

    `shift` moves the line off the saddle point. Any will do; to the right of it M(s) of sampled Gaussians soon grows beyond
    float64, and at tiny sampling rates the saddle point lies close to where it does.
    """

    def log_integrand(s: np.ndarray) -> np.ndarray:
        total = sum(count * transform(s) for transform, count in parts)
        return total - s * epsilon - np.log(s) - np.log1p(s)

    def on_axis(log_c: float) -> float:
        return float(log_integrand(np.array([math.exp(log_c)], dtype=np.complex128)).real[0])

    c = math.exp(minimize_scalar(on_axis, bounds=(-12, 12), method="bounded", options={"xatol": 1e-6}).x) * shift
    top = on_axis(math.log(c))

    def integrand(u: np.ndarray) -> np.ndarray:
        return np.exp(log_integrand(c + 1j * u) - top).real

    # How wide the peak is, by halving; then panels that grow.
    width = c
    while integrand(np.array([width]))[0] < 0.9:
        width /= 2
    total, begin, small = 0.0, 0.0, 0
    for _ in range(200):
        if small == 3:
            return math.exp(top) * total / math.pi
        nodes = begin + width * (_NODES + 1) / 2
        value = float(width / 2 * _WEIGHTS @ integrand(nodes))
        total += value
        begin += width
        width *= 1.25
        small = small + 1 if abs(value) < 1e-13 * abs(total) else 0
    raise ArithmeticError("the integral converges too slowly: the losses are too few, or too rare")


def steps_delta(sigma: float, rate: float, steps: int, epsilon: float, shift: float = 0.9) -> float:
    """delta at `epsilon` of many Poisson-sampled Gaussians, the larger of removing and adding a unit."""
    deltas = [composed_delta([(sampled_gaussian(sigma, rate, "remove"), steps)], epsilon, shift)]
    if epsilon < -steps * math.log1p(-rate):  # otherwise no loss is as large, when a unit is added
        deltas.append(composed_delta([(sampled_gaussian(sigma, rate, "add"), steps)], epsilon, shift))
    return max(deltas)


def sampled_delta(rate: float, epsilon: float, direction: Direction, inner: Callable[[float], float]) -> float:
    """Of a mechanism on a Poisson sample, from the delta of the same mechanism on all data, as a function of epsilon.

    With the dominating pair (P, Q), whose reverse has the same delta, (1-q) Q + q P - e^epsilon Q = q (P - e^a Q) where
    e^a = 1 + (e^epsilon - 1) / q, and Q - e^epsilon ((1-q) Q + q P) is a multiple of Q - e^b P.
    """
    if direction == "remove":
        return rate * inner(math.log1p(math.expm1(epsilon) / rate))
    share = 1 - (1 - rate) * math.exp(epsilon)
    return 0.0 if share <= 0 else share * inner(math.log(rate * math.exp(epsilon) / share))
