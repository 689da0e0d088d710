"""How SGD moves a row that no unit touches, over several steps at once.

A row w and its momentum v are moved by a gradient g as x' = A x + b g, where x = (w, v) and A and b depend on the step's
learning rate, weight decay and momentum, but not on the row (torch.optim.SGD without dampening):

    v' = mu v + lambda w + g            w' = w - lr v'                          (Nesterov: w' = w - lr (g + lambda w + mu v'))

An untouched row's gradients are noise, g_k ~ N(0, s^2). From step t0 to step t they add up to

    x_t = Phi x_t0 + N(0, s^2 C),    Phi = A_(t-1) ... A_t0,    C = sum over k of (A_(t-1) ... A_(k+1) b_k)(...)^T

so that one draw settles all of them (LazyDP, section 4.3, which has A = 1 and b = -lr alone; with a schedule C is the sum
of the squared learning rates). Phi and C are kept for every t0 since the last time that all rows were settled, and moved on
by one product per step: exact, and without the inverses that prefix sums would need.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Coefficients:
    """A and b of one step: x' = [[ww, wv], [vw, vv]] x + (gw, gv) g. Without momentum v stays as it is."""

    ww: float
    wv: float
    vw: float
    vv: float
    gw: float
    gv: float

    @staticmethod
    def of(lr: float, momentum: float, weight_decay: float, nesterov: bool, maximize: bool) -> Coefficients:
        sign = -1.0 if maximize else 1.0
        if momentum == 0:
            return Coefficients(1 - lr * weight_decay, 0.0, 0.0, 1.0, -lr * sign, 0.0)
        if nesterov:
            step = lr * (1 + momentum)
            return Coefficients(1 - step * weight_decay, -lr * momentum**2, weight_decay, momentum, -step * sign, sign)
        return Coefficients(1 - lr * weight_decay, -lr * momentum, weight_decay, momentum, -lr * sign, sign)

    @property
    def has_momentum(self) -> bool:
        return self.gv != 0

    def pull_back(self) -> float | None:
        """What to add to w before a step without momentum, per unit of its gradient: b / A. None where A is close to 0.

        A row that is touched in a step takes its gradient in this way and stays where it was in time, so that the noise of
        that step is settled together with that of later ones.
        """
        return None if abs(self.ww) < 1e-3 else self.gw / self.ww

    def take(self, w: Tensor, v: Tensor | None, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
        """Row and momentum after this step with a gradient; without momentum v may be None."""
        if v is None:
            return self.ww * w + self.gw * gradient, None
        return (
            self.ww * w + self.wv * v + self.gw * gradient,
            self.vw * w + self.vv * v + self.gv * gradient,
        )


class PendingSteps:
    """The steps since all rows were settled, and how each row that waits since one of them has to be moved.

    `steps` is the present, counted from then on: a row that is settled up to step t0 < `steps` is owed noise.
    """

    def __init__(self, window: int = 1 << 14) -> None:
        """After `window` steps all rows have to be settled: what a step costs here grows with their number."""
        self.window = window
        self.steps = 0
        self.has_momentum = False
        self.drifts = False  # whether weight decay or momentum move rows that nothing touches
        self.reach = 0.0, 0.0  # what a unit of noise did to (w, v) at once, in the latest step in which it did anything
        self._phi = np.empty((4, window))  # ww, wv, vw, vv for each t0
        self._noise = np.empty((3, window))  # C: ww, wv, vv

    @property
    def full(self) -> bool:
        return self.steps == self.window

    def restart(self) -> None:
        """All rows are settled."""
        self.steps, self.has_momentum, self.drifts, self.reach = 0, False, False, (0.0, 0.0)

    def advance(self, step: Coefficients) -> None:
        assert not self.full, "all rows must be settled first"
        self.has_momentum |= step.has_momentum
        self.drifts |= step.has_momentum or step.ww != 1
        self.reach = abs(step.gw) or self.reach[0], abs(step.gv) or self.reach[1]
        self._phi[:, self.steps] = 1.0, 0.0, 0.0, 1.0
        self._noise[:, self.steps] = 0.0
        self.steps += 1
        phi, noise = self._phi[:, : self.steps], self._noise[:, : self.steps]
        if not self.has_momentum:
            phi[0] *= step.ww
            noise[0] *= step.ww**2
            noise[0] += step.gw**2
            return
        ww, wv, vw, vv = phi
        phi[:] = (
            step.ww * ww + step.wv * vw, step.ww * wv + step.wv * vv,
            step.vw * ww + step.vv * vw, step.vw * wv + step.vv * vv,
        )  # fmt: skip
        a, b, c = noise
        noise[:] = (
            step.ww**2 * a + 2 * step.ww * step.wv * b + step.wv**2 * c + step.gw**2,
            step.ww * step.vw * a + (step.ww * step.vv + step.wv * step.vw) * b + step.wv * step.vv * c + step.gw * step.gv,
            step.vw**2 * a + 2 * step.vw * step.vv * b + step.vv**2 * c + step.gv**2,
        )  # fmt: skip

    def transition(self, since: np.ndarray) -> np.ndarray:
        """Phi from each of the steps `since` to the present, (4, n): ww, wv, vw, vv."""
        return self._phi[:, since]

    def deviation_of_weights(self, since: np.ndarray) -> np.ndarray:
        """The first row of `deviation`, (n,): all of it where no step had momentum."""
        deviations: np.ndarray = np.sqrt(self._noise[0].take(since))
        return deviations

    def deviation(self, since: np.ndarray) -> np.ndarray:
        """L with L L^T = C from each of the steps `since` to the present, (3, n): ww, vw, vv (lower triangle)."""
        if not self.has_momentum:
            factor = np.zeros((3, len(since)))
            factor[0] = self.deviation_of_weights(since)
            return factor
        a, b, c = self._noise[:, since]
        root = np.sqrt(a)
        below = np.divide(b, root, out=np.zeros_like(b), where=root > 0)
        rest = c - below**2
        # After one step w says what v is. What rounding left of it must not look like noise of v's own.
        return np.stack([root, below, np.sqrt(np.where(rest > 1e-12 * c, rest, 0.0))])
