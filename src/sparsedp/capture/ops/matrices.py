"""Operations on the matrices in the last two dimensions, each by itself."""

from __future__ import annotations

from torch import Tensor

from sparsedp.capture.ops.registry import Call, axis_rule
from sparsedp.capture.units import Mixed, UnitAxis

# Operations on the matrices in the last two dimensions, each by itself.
_ON_MATRICES = ("inverse", "det", "logdet", "slogdet", "cholesky", "cholesky_inverse", "qr", "svd", "pinverse", "matrix_exp",
                "matrix_power", "linalg_inv", "linalg_inv_ex", "linalg_det", "linalg_slogdet", "linalg_cholesky",
                "linalg_cholesky_ex", "linalg_qr", "linalg_svd", "linalg_svdvals", "linalg_eigh", "linalg_eigvalsh",
                "linalg_pinv", "linalg_matrix_power", "linalg_matrix_exp", "linalg_cond")  # fmt: skip


@axis_rule(*_ON_MATRICES)
def _on_matrices(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return axis if axis.dim < source.ndim - 2 else Mixed(call.name)


@axis_rule("tril", "triu", in_place=True)
def _triangle(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    return axis if axis.dim < source.ndim - 2 else None


@axis_rule("cdist", joint=True)
def _cdist(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | Mixed:
    return axis.shifted(call.out.ndim - source.ndim) if axis.dim < source.ndim - 2 else Mixed("cdist")
