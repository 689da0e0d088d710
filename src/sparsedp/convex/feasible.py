"""The sets that points are projected onto: whole space, l2 ball, l1 ball, box."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sparsedp.accounting.events import require_number
from sparsedp.errors import ConfigError


@dataclass(frozen=True)
class WholeSpace:
    """Every point."""

    def contains(self, point: np.ndarray, tolerance: float = 1e-9) -> bool:
        return bool(np.isfinite(point).all())


@dataclass(frozen=True)
class L2Ball:
    """|x|_2 <= radius."""

    radius: float

    def __post_init__(self) -> None:
        require_number("radius", self.radius, low=0.0)

    def contains(self, point: np.ndarray, tolerance: float = 1e-9) -> bool:
        """Whether the point lies in the ball, or beyond it by a share of `tolerance` at most."""
        return float(np.linalg.norm(point)) <= self.radius * (1 + tolerance)


@dataclass(frozen=True)
class L1Ball:
    """|x|_1 <= radius."""

    radius: float

    def __post_init__(self) -> None:
        require_number("radius", self.radius, low=0.0)

    def contains(self, point: np.ndarray, tolerance: float = 1e-9) -> bool:
        """Whether the point lies in the ball, or beyond it by a share of `tolerance` at most."""
        return float(np.abs(point).sum()) <= self.radius * (1 + tolerance)


@dataclass(frozen=True, eq=False)
class Box:
    """low <= x <= high in every coordinate; each is one number or (d,), infinity allowed."""

    low: float | np.ndarray
    high: float | np.ndarray

    def __post_init__(self) -> None:
        low, high = np.asarray(self.low, np.float64), np.asarray(self.high, np.float64)
        if not (low <= high).all():  # NaN compares as false
            raise ConfigError("Box: low must not lie above high, and neither may be NaN.")
        if (low == math.inf).any() or (high == -math.inf).any():
            raise ConfigError("Box: there is no point above infinity.")

    def contains(self, point: np.ndarray, tolerance: float = 0.0) -> bool:
        return bool(((point >= self.low - np.float64(tolerance)) & (point <= self.high + np.float64(tolerance))).all())


FeasibleSet = WholeSpace | L2Ball | L1Ball | Box
