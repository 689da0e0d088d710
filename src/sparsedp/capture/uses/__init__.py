"""What one use of a parameter contributes to each unit's gradient, kept in factored form: one file for each kind.

- `lookup.py`: rows of a table, each with an output gradient
- `linear.py`: a block of the parameter as the matrix of a linear map, by its inputs and output gradients
- `softmax.py`: rows of a table as the weights of logits; a linear map whose output gradient is computed when it is needed
- `built.py`: gradients of units that are written out
- `carried.py`: gradients of a large parameter through a computed copy, written out for one unit at a time

`inner.py` has the inner products of every two kinds, `parameter.py` the uses of one parameter together. `softmax_loss.py` is
the forward pass that `Softmax` belongs to.
"""

from sparsedp.capture.uses.base import Bucket, RowNorms, Use, slack
from sparsedp.capture.uses.built import Built
from sparsedp.capture.uses.by_owner import of_owners
from sparsedp.capture.uses.carried import Carried, Part
from sparsedp.capture.uses.linear import Linear
from sparsedp.capture.uses.lookup import Lookup, RowSparse
from sparsedp.capture.uses.parameter import ParameterUses, add_use
from sparsedp.capture.uses.softmax import Softmax
from sparsedp.capture.uses.softmax_loss import Passed, SoftmaxLoss, checked_targets

__all__ = [
    "Bucket", "Built", "Carried", "Linear", "Lookup", "ParameterUses", "Part", "Passed", "RowNorms", "RowSparse", "Softmax",
    "SoftmaxLoss", "Use", "add_use", "checked_targets", "of_owners", "slack",
]  # fmt: skip
