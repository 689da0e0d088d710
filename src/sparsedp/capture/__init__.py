"""Uses of parameters during forward, and the per-unit norms and sums that follow from them."""

from sparsedp.capture.capture import Capture, Captured, named_tensors
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.uses import ParameterUses, RowNorms, RowSparse

__all__ = [
    "Capture", "Captured", "ParameterUses", "RowNorms", "RowSpace", "RowSparse", "TouchedRows", "named_tensors",
]  # fmt: skip
