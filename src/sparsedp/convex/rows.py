"""Rows as they come (scipy, torch, numpy, chunks of these), made clean, clipped, and summed exactly.

Whatever is done to a row is a function of that row alone: a row more or less changes nothing about the others, not even in
their last digit. Clipped rows are cut to integer multiples of a step, towards zero, so that sums of them round nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse
import torch

from sparsedp.convex.release import FixedPoint
from sparsedp.errors import DataError, UnsupportedError

# Elements, and rows, that are worked on at a time.
_ELEMENTS, _ROWS = 1 << 21, 1 << 16
_STEP = 2.0**-34  # of sums, over a power of two above the bound
LARGEST_COUNT = 1 << 28  # rows whose sum fits into 63 bits, with noise
_SLACK = 2.0**-30  # beyond its bound by this share, a row counts as within it in reports, though not in the sum


def clean_chunks(X: Any) -> Iterator[scipy.sparse.csr_array]:
    """`X` as float64 CSR chunks of some rows each, duplicates summed, columns ascending; at least one chunk.

    `X` is a scipy sparse matrix, a torch tensor (sparse or not), a numpy array, or an iterable of such chunks. The chunks are
    new memory. NaN, infinity, complex numbers, masks and malformed indices are refused.
    """
    columns = None
    for part in _parts(X):
        if part.shape[1] == 0:
            raise DataError("X has no columns.")
        if columns is not None and part.shape[1] != columns:
            raise DataError(f"The chunks of X have {columns} columns and {part.shape[1]}: they must all have as many.")
        columns = part.shape[1]
        for chunk in _pieces(part):
            yield _clean(chunk)
    if columns is None:
        raise DataError("X has no chunks, and so no columns.")


def _parts(X: Any) -> Iterator[Any]:
    """The matrices that X is made of, each with two axes: scipy's sparse ones in CSR, all others numpy's."""
    if scipy.sparse.issparse(X) or isinstance(X, (torch.Tensor, np.ndarray)) or hasattr(X, "__array__"):
        yield _matrix(X)
        return
    if isinstance(X, (str, bytes, dict)) or not isinstance(X, Iterable):
        raise UnsupportedError(
            f"X must be a scipy sparse matrix, a torch tensor, a numpy array or an iterable of these, not {type(X).__name__}."
        )
    for chunk in X:
        if not (scipy.sparse.issparse(chunk) or isinstance(chunk, (torch.Tensor, np.ndarray))):
            raise UnsupportedError(
                f"The chunks of X must be scipy sparse matrices, torch tensors or numpy arrays, not {type(chunk).__name__}."
            )
        yield _matrix(chunk)


def _matrix(X: Any) -> Any:
    if isinstance(X, torch.Tensor):
        X = _from_torch(X)
    if isinstance(X, np.ma.MaskedArray):
        raise UnsupportedError("X is a masked array: say what its missing values are, such as X.filled(0).")
    if not scipy.sparse.issparse(X):
        X = np.asarray(X)
    if X.ndim != 2:
        raise DataError(f"X must have two axes, rows and columns; it has {X.ndim}.")
    if X.dtype.kind not in "fiub":
        raise UnsupportedError(f"X must hold real numbers, not {X.dtype}.")
    if not scipy.sparse.issparse(X):
        return X
    _require_valid(X)
    return X.tocsr()


def _from_torch(X: torch.Tensor) -> Any:
    X = X.detach().cpu()
    if X.is_complex():
        raise UnsupportedError(f"X must hold real numbers, not {X.dtype}.")
    if X.layout == torch.strided:
        return (X.float() if X.dtype == torch.bfloat16 else X).numpy()
    if X.layout not in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc):
        raise UnsupportedError(f"X has the layout {X.layout}: use X.to_sparse_csr().")
    if X.ndim != 2 or X.values().ndim != 1 if X.layout != torch.sparse_coo else X.dense_dim() or X.ndim != 2:
        raise DataError(f"X must have two axes, rows and columns, both sparse; its shape is {tuple(X.shape)}.")
    X = X.to(torch.float64)
    if X.layout == torch.sparse_coo:
        places, values = X._indices().numpy(), X._values().numpy()  # as they are: duplicates are summed later
        coo = scipy.sparse.coo_array(tuple(X.shape))
        coo.row, coo.col, coo.data = places[0], places[1], values
        return coo
    if X.layout == torch.sparse_csc:
        parts = X.values().numpy(), X.row_indices().numpy(), X.ccol_indices().numpy()
        return scipy.sparse.csc_array(parts, shape=tuple(X.shape))
    parts = X.values().numpy(), X.col_indices().numpy(), X.crow_indices().numpy()
    return scipy.sparse.csr_array(parts, shape=tuple(X.shape))


def _require_valid(X: Any) -> None:
    """scipy trusts indices: a negative one would count for another column, or write where nothing belongs to it."""
    if X.format == "coo":
        for places, size in ((X.row, X.shape[0]), (X.col, X.shape[1])):
            if places.size and not 0 <= places.min() <= places.max() < size:
                raise DataError(f"X is not a valid matrix: an index lies outside of its shape, {X.shape}.")
    elif X.format in ("csr", "csc", "bsr"):
        try:
            X.check_format(full_check=True)
        except ValueError as error:
            raise DataError(f"X is not a valid {X.format.upper()} matrix: {error}.") from error


def _pieces(X: Any) -> Iterator[Any]:
    """X in pieces of some rows, one at least."""
    if scipy.sparse.issparse(X):
        ends = X.indptr
    else:
        ends = np.arange(X.shape[0] + 1) * X.shape[1]
    first, rows = 0, X.shape[0]
    while first < rows or first == 0:
        last = int(np.searchsorted(ends, int(ends[first]) + _ELEMENTS, side="right")) - 1
        last = min(max(last, first + 1), first + _ROWS, rows)
        yield X[first:last]
        first = max(last, 1)


def _clean(piece: Any) -> scipy.sparse.csr_array:
    csr = scipy.sparse.csr_array(piece.astype(np.float64), copy=True)
    # A new object: what scipy remembers of the indices' order may be out of date.
    csr = scipy.sparse.csr_array((csr.data, csr.indices, csr.indptr), shape=csr.shape)
    if not np.isfinite(csr.data).all():
        raise DataError("X holds NaN or infinity. Replace them, or leave their rows out.")
    csr.sum_duplicates()
    csr.eliminate_zeros()
    if not np.isfinite(csr.data).all():
        raise DataError("Duplicate entries of X add up to infinity.")
    return csr


@dataclass(frozen=True)
class RowBounds:
    """What every row is scaled down to: an l2 norm and an l1 norm (Remark 2.1: it is the l1 norm that matters)."""

    l2: float
    l1: float

    @property
    def step(self) -> float:
        """The power of two of which sums of rows are multiples."""
        return math.ldexp(_STEP, math.frexp(self.l2)[1])

    def clip(self, rows: scipy.sparse.csr_array) -> int:
        """Scales every row down to both norms, in place, and returns how many had to be.

        Norms are computed with rounding, of which as much is added as there can be: a clipped row's exact norms are within
        the bounds.
        """
        sizes = np.diff(rows.indptr)
        largest = abs(rows).max(axis=1).toarray().ravel() if rows.nnz else np.zeros(rows.shape[0])
        largest[largest == 0] = 1.0
        of_row = np.repeat(np.arange(rows.shape[0]), sizes)
        # Relative to the row's largest entry, so that no square over- or underflows.
        shares = rows.data / largest[of_row]
        relative = scipy.sparse.csr_array((np.abs(shares), rows.indices, rows.indptr), shape=rows.shape)
        ones = np.ones(rows.shape[1])
        rounding = 1 + (sizes + 8) * 2.0**-51
        l1 = np.maximum(relative @ ones, 1.0) * rounding
        relative.data **= 2
        l2 = np.sqrt(np.maximum(relative @ ones, 1.0)) * rounding
        allowed = np.minimum(self.l2 / l2, self.l1 / l1)  # what the largest entry may be
        over = allowed < largest
        scaled = over[of_row]
        rows.data[scaled] = shares[scaled] * allowed[of_row[scaled]]
        return int(np.count_nonzero(allowed * (1 + _SLACK) < largest))


class ExactSum:
    """Adds rows up in integers: what becomes of a row does not depend on those before it."""

    def __init__(self, columns: int, step: float) -> None:
        self._whole = np.zeros(columns, np.int64)
        self._step = step
        self.rows = 0

    def add(self, rows: scipy.sparse.csr_array) -> None:
        """Adds clipped rows, each entry cut to a multiple of the step towards zero: norms get no larger."""
        self._count(rows.shape[0])
        np.add.at(self._whole, rows.indices, np.trunc(rows.data / self._step).astype(np.int64))

    def add_dense(self, rows: np.ndarray) -> None:
        """The same for (n, columns) float64."""
        self._count(len(rows))
        self._whole += np.trunc(rows / self._step).astype(np.int64).sum(axis=0)

    @property
    def sum(self) -> FixedPoint:
        return FixedPoint(self._whole, self._step)

    def _count(self, rows: int) -> None:
        self.rows += rows
        if self.rows > LARGEST_COUNT:
            raise UnsupportedError(f"X has more than {LARGEST_COUNT} rows: their sum would not fit into 63 bits.")
