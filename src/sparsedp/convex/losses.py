"""Convex losses of linear models: a function phi of a row's margin <x, w> and its target y.

A row's gradient is phi'(<x, w>, y) x, so that all that privacy asks of a loss is how large phi' and phi'' can be. Rows are
clipped to an l2 norm R before a loss sees them: then the gradient's norm is at most R sup|phi'| (the Lipschitz constant L), and
the loss is smooth with H = R^2 sup phi''.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from scipy.special import expit

from sparsedp.accounting.events import require_number
from sparsedp.errors import ConfigError, suggestion


class Loss(ABC):
    """phi, convex, not negative, with a Lipschitz derivative. Margins and targets are float64 (n,)."""

    name: str
    classifies: bool  # targets are -1 and 1

    @abstractmethod
    def value(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """phi, (n,)."""

    @abstractmethod
    def slope(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """phi', the derivative in the margin, (n,)."""

    @abstractmethod
    def curvature(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """phi'', where there is one, and otherwise one of the values beside it, (n,)."""

    @abstractmethod
    def largest_slope(self, largest_margin: float) -> float:
        """sup |phi'| over margins of at most so much and all targets that `admit` lets through."""

    @property
    @abstractmethod
    def largest_curvature(self) -> float:
        """sup phi''."""

    @property
    @abstractmethod
    def largest_at_zero(self) -> float:
        """sup phi(0, y): the regularised minimiser's norm is at most sqrt(phi(0) / lambda). May be infinite."""

    @property
    def slope_bound(self) -> float:
        """sup |phi'| over predictions in the range of the targets: what gradient descent clips slopes to."""
        return self.largest_slope(0.0)

    def admit(self, targets: np.ndarray) -> np.ndarray:
        """The targets as the loss takes them, each by itself: clipped where the loss needs bounded ones."""
        return targets


@dataclass(frozen=True)
class Logistic(Loss):
    """log(1 + exp(-y m))."""

    name = "logistic"
    classifies = True

    def value(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.logaddexp(0.0, -targets * margins)

    def slope(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return -targets * expit(-targets * margins)

    def curvature(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return expit(margins) * expit(-margins)

    def largest_slope(self, largest_margin: float) -> float:
        # 1 on the whole line; what a bound on the margin would gain is little.
        return 1.0

    @property
    def largest_curvature(self) -> float:
        return 0.25

    @property
    def largest_at_zero(self) -> float:
        return float(np.log(2.0))


@dataclass(frozen=True)
class SmoothedHinge(Loss):
    """The hinge max(0, 1 - y m) with a parabola in place of its corner, from 1 - width to 1 + width."""

    width: float = 0.5
    name = "smoothed_hinge"
    classifies = True

    def __post_init__(self) -> None:
        require_number("width", self.width, low=0.0, high=1.0, low_open=True)

    def value(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        room = 1.0 + self.width - targets * margins  # below 0: no loss; above 2 width: the straight part
        return np.where(room > 2 * self.width, room - self.width, np.maximum(room, 0.0) ** 2 / (4 * self.width))

    def slope(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return -targets * np.clip((1.0 + self.width - targets * margins) / (2 * self.width), 0.0, 1.0)

    def curvature(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return (np.abs(1.0 - targets * margins) < self.width) / (2 * self.width)

    def largest_slope(self, largest_margin: float) -> float:
        return 1.0

    @property
    def largest_curvature(self) -> float:
        return 1 / (2 * self.width)

    @property
    def largest_at_zero(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Squared(Loss):
    """(m - y)^2 / 2 with targets clipped to [-bound, bound]. Its slope is bounded where the margin is."""

    bound: float = 1.0
    name = "squared"
    classifies = False

    def __post_init__(self) -> None:
        require_number("bound", self.bound, low=0.0, low_open=True)

    def value(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return 0.5 * (margins - targets) ** 2

    def slope(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return margins - targets

    def curvature(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.ones_like(margins)

    def largest_slope(self, largest_margin: float) -> float:
        return largest_margin + self.bound

    @property
    def largest_curvature(self) -> float:
        return 1.0

    @property
    def largest_at_zero(self) -> float:
        return 0.5 * self.bound**2

    @property
    def slope_bound(self) -> float:
        return self.largest_slope(self.bound)

    def admit(self, targets: np.ndarray) -> np.ndarray:
        return np.clip(targets, -self.bound, self.bound)


@dataclass(frozen=True)
class Huber(Loss):
    """(m - y)^2 / 2 where |m - y| <= width, and width (|m - y| - width / 2) beyond it. Targets need no bound."""

    width: float = 1.0
    name = "huber"
    classifies = False

    def __post_init__(self) -> None:
        require_number("width", self.width, low=0.0, low_open=True)

    def value(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        error = np.abs(margins - targets)
        return np.where(error <= self.width, 0.5 * error**2, self.width * (error - 0.5 * self.width))

    def slope(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return np.clip(margins - targets, -self.width, self.width)

    def curvature(self, margins: np.ndarray, targets: np.ndarray) -> np.ndarray:
        return (np.abs(margins - targets) < self.width).astype(float)

    def largest_slope(self, largest_margin: float) -> float:
        return self.width

    @property
    def largest_curvature(self) -> float:
        return 1.0

    @property
    def largest_at_zero(self) -> float:
        return float("inf")

    def admit(self, targets: np.ndarray) -> np.ndarray:
        # The slope is bounded whatever the target; the sum of the losses must not overflow.
        return np.clip(targets, -1e100, 1e100)


LOSSES: dict[str, type[Loss]] = {loss.name: loss for loss in (Logistic, SmoothedHinge, Squared, Huber)}


def find_loss(loss: str | Loss) -> Loss:
    """The loss of that name with its usual settings, or the loss itself."""
    if isinstance(loss, Loss):
        return loss
    if loss not in LOSSES:
        raise ConfigError(f"loss must be one of {', '.join(LOSSES)}; got {loss!r}{suggestion(loss, LOSSES)}")
    return LOSSES[loss]()
