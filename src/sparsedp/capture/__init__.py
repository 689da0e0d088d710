"""Uses of parameters during forward, and the per-unit norms and sums that follow from them."""

from sparsedp.capture.capture import Capture
from sparsedp.capture.captured import Captured
from sparsedp.capture.hooks import is_own_hook
from sparsedp.capture.inputs import PublicInputs
from sparsedp.capture.jagged import jagged_inputs
from sparsedp.capture.laws import Replaced
from sparsedp.capture.module_state import named_tensors
from sparsedp.capture.randomness import Draws, RepeatedDraws
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.terms import PublicTerm, join_digests
from sparsedp.capture.tracing import TracedOperation, TracingCapture
from sparsedp.capture.uses import ParameterUses, RowNorms, RowSparse

__all__ = [
    "Capture", "Captured", "Draws", "ParameterUses", "PublicInputs", "PublicTerm", "RepeatedDraws", "Replaced", "RowNorms",
    "RowSpace", "RowSparse", "TouchedRows", "TracedOperation", "TracingCapture", "is_own_hook", "jagged_inputs", "join_digests",
    "named_tensors",
]  # fmt: skip
