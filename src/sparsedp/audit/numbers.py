"""Numbers that an audit is given, or a clear error."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparsedp.errors import SparseDPError


def finite_vector(name: str, values: Any, least: int = 1) -> np.ndarray:
    """`values` as float64 (n,), at least `least` of them and all finite."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        vector = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise SparseDPError(f"{name} must be numbers, one for each canary: {error}") from error
    if vector.ndim != 1 or len(vector) < least:
        raise SparseDPError(f"{name} must be a vector of at least {least} numbers, not of shape {vector.shape}.")
    unusable = int(len(vector) - np.isfinite(vector).sum())
    if unusable:
        raise SparseDPError(
            f"{unusable} of the {len(vector)} {name} are NaN or infinite, so that they have no rank. Leave such canaries out "
            "before it is known which of them were in, or find out why the model has no loss for them."
        )
    return vector


def probability(name: str, value: float, zero: bool = False) -> float:
    """A number between 0 and 1, without the ends, or with `zero` from 0 on."""
    if not (0 < value < 1 or (zero and value == 0)):
        raise SparseDPError(f"{name} must lie {'from 0 up to' if zero else 'between 0 and'} 1, not {value}.")
    return float(value)
