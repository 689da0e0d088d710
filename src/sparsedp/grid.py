"""The grid that released numbers lie on: a sum and its noise are added first and then rounded together.

Floating-point noise has holes: the numbers that `std * z` can reach are a pattern of their own, and what was added to them shows
where a result falls between them (Mironov 2012, "On significance of the least significant bits for differential privacy").
Rounded to multiples of one power of two, every result is one of the same numbers, whatever was added.
"""

from __future__ import annotations

import math
from typing import overload

import numpy as np
from torch import Tensor

from sparsedp.errors import SparseDPError


def grid_of(std: float) -> float:
    """The distance of neighbours on the grid of numbers whose noise has deviation `std`.

    It is the power of two at or below std / 2^10, and 0, which stands for no grid, where there is no noise.
    """
    if not 0 <= std < math.inf:
        raise SparseDPError(f"The deviation of noise is a finite number that is not negative, not {std}.")
    return math.ldexp(1.0, math.frexp(std)[1] - 11) if std else 0.0


@overload
def round_to(x: np.ndarray, grid: float) -> np.ndarray: ...
@overload
def round_to(x: Tensor, grid: float) -> Tensor: ...
def round_to(x: np.ndarray | Tensor, grid: float) -> np.ndarray | Tensor:
    """The multiple of `grid` next to each element of `x`; `x` itself for grid 0.

    Division and multiplication by a power of two are exact, so the only rounding is the one that is wanted.
    """
    return (x / grid).round() * grid if grid else x
