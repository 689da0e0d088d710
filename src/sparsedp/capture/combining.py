"""What to do about operations that combine the units of a batch, in words, by the kind of operation."""

from __future__ import annotations

from sparsedp.capture.units import VALID_POSITIONS

_STATISTICS = {"mean", "sum", "std", "var", "nanmean", "nansum", "std_mean", "var_mean", "batch_norm", "instance_norm"}
_EXTREMES = {"max", "min", "amax", "amin", "aminmax", "median", "nanmedian", "quantile", "nanquantile", "argmax", "argmin",
             "mode", "kthvalue"}  # fmt: skip
_NORMS = {"norm", "vector_norm", "matrix_norm", "frobenius_norm", "linalg_norm", "linalg_vector_norm"}
_ORDERS = {"sort", "argsort", "topk", "flip", "roll", "rot90", "fliplr", "flipud", "msort", "unique", "index_select"}
_ALONG = {"softmax", "log_softmax", "softmin", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "logsumexp",
          "normalize", "diff", "gumbel_softmax"}  # fmt: skip
_PRODUCTS = {"matmul", "rmatmul", "mm", "bmm", "einsum", "linear", "tensordot", "dot", "inner", "addmm", "baddbmm"}


def combination_advice(operation: str) -> str:
    """What to do where an operation combined the units of a batch."""
    if operation == VALID_POSITIONS:
        return (
            "It divides by the number of valid positions, or the sum of weights, of the whole batch. Take reduction='none' "
            "and the mean of that: every position counts, those that are ignored with 0. Or average over each unit's own "
            "positions first, then over units."
        )
    if operation in _NORMS:
        return (
            "The norm of all units together is no sum over units: use the mean over units of each one's norm, or of its "
            "square. For a penalty on the weights themselves give the optimizer weight_decay."
        )
    if operation in _EXTREMES:
        return "Take it within each unit, along its own dimensions, or use a constant."
    if operation in _ORDERS or operation.startswith("indexing"):
        return (
            "Each unit must keep its place in the batch: do not sort, permute, shift or pick along its axis; where lengths are "
            "sorted for a packed sequence, leave the units in their order and mask what is padding."
        )
    if operation in _ALONG:
        return "Let it act along a dimension of each unit, not along the units: give it another dim."
    if operation in _PRODUCTS:
        return (
            "It sums over the axis of units: transpose its input, or keep their index in the result, and check "
            "batch_first=True where the batch comes first."
        )
    if operation in _STATISTICS:
        return (
            "Use per-unit statistics (LayerNorm instead of BatchNorm), along dimensions of each unit, or reduce over the batch "
            "only in the loss."
        )
    return (
        "Use per-unit statistics (LayerNorm instead of BatchNorm), and batch_first=True where the batch comes first, or reduce "
        "over the batch only in the loss."
    )


def combined_by(operation: str) -> str:
    """How an operation made one value, or another order, of the units of a batch; after "its input was"."""
    if operation in _ORDERS or operation.startswith("indexing"):
        return f"put together across the units of the batch by '{operation}'"
    return f"reduced over the units of the batch by '{operation}'"
