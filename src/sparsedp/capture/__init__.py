"""Uses of parameters during forward, and the per-unit norms and sums that follow from them."""

from sparsedp.capture.capture import Capture, Captured
from sparsedp.capture.uses import ParameterUses, RowNorms, RowSparse

__all__ = ["Capture", "Captured", "ParameterUses", "RowNorms", "RowSparse"]
