"""Uses of parameters during forward, and the per-unit norms and sums that follow from them."""

from sparsedp.capture.capture import Capture
from sparsedp.capture.captured import Captured
from sparsedp.capture.hooks import is_own_hook
from sparsedp.capture.inputs import PublicInputs, is_jagged
from sparsedp.capture.jagged import change_jagged, jagged_inputs, jagged_units, take_of_jagged
from sparsedp.capture.laws import Replaced
from sparsedp.capture.module_state import named_tensors
from sparsedp.capture.randomness import Draws, RepeatedDraws
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.terms import PublicTerm, join_digests
from sparsedp.capture.tracing import TracedOperation, TracingCapture
from sparsedp.capture.uses import ParameterUses, RowNorms, RowSparse

__all__ = [
    "Capture", "Captured", "Draws", "ParameterUses", "PublicInputs", "PublicTerm", "RepeatedDraws", "Replaced", "RowNorms",
    "RowSpace", "RowSparse", "TouchedRows", "TracedOperation", "TracingCapture", "change_jagged", "is_jagged", "is_own_hook",
    "jagged_inputs", "jagged_units", "join_digests", "named_tensors", "take_of_jagged",
]  # fmt: skip
