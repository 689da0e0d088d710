"""Rows in every form, clean or not: the same exact sum, or a clear error."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp import DataError, UnsupportedError
from sparsedp.convex import rows as sparse_rows
from sparsedp.convex.rows import ExactSum, RowBounds, clean_chunks

DENSE = np.array([[1.0, 0, 2, 0], [0, 0, 0, 0], [0, -3, 0.5, 0], [1, 1, 1, 1]])


def as_dense(X: object) -> np.ndarray:
    return np.concatenate([chunk.toarray() for chunk in clean_chunks(X)])


def unsorted_with_duplicates() -> sp.csr_array:
    """DENSE, with explicit zeros, columns in any order, and entries in parts."""
    data = [2.0, 0.25, 0.75, 0.0, 0.5, -1.0, -2.0, 0.0, 1.0, 1.0, 1.0, 1.0]
    columns = [2, 0, 0, 3, 2, 1, 1, 0, 3, 2, 1, 0]
    return sp.csr_array((data, columns, [0, 4, 4, 8, 12]), shape=(4, 4))


FORMS = {
    "numpy": DENSE,
    "fortran": np.asfortranarray(DENSE),
    "float32": DENSE.astype(np.float32),
    "float16": DENSE.astype(np.float16),
    "csr": sp.csr_array(DENSE),
    "csr matrix": sp.csr_matrix(DENSE),
    "csc": sp.csc_array(DENSE),
    "coo": sp.coo_array(DENSE),
    "lil": sp.lil_array(DENSE),
    "not canonical": unsorted_with_duplicates(),
    "torch": torch.tensor(DENSE, requires_grad=True),
    "torch bfloat16": torch.tensor(DENSE).bfloat16(),
    "torch coo": torch.tensor(DENSE).to_sparse_coo(),
    "torch coo with duplicates": torch.sparse_coo_tensor(
        [[0, 0, 0, 2, 2, 3, 3, 3, 3], [0, 0, 2, 1, 2, 0, 1, 2, 3]],
        [0.5, 0.5, 2, -3, 0.5, 1, 1, 1, 1],
        (4, 4),
        check_invariants=True,
    ),
    "torch csr": torch.tensor(DENSE).to_sparse_csr(),
    "torch csc": torch.tensor(DENSE).to_sparse_csc(),
    "chunks": [sp.csr_array(DENSE[:1]), DENSE[1:3], torch.tensor(DENSE[3:])],
    "empty chunks": [DENSE[:0], DENSE[:2], sp.csr_array((0, 4)), DENSE[2:], DENSE[:0]],
    "iterator": None,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_rows(form: str) -> None:
    X = FORMS[form] if form != "iterator" else (DENSE[i : i + 1] for i in range(4))
    before = X.copy() if sp.issparse(X) else None
    assert (as_dense(X) == DENSE).all()
    if before is not None and before.format == "csr":  # the user's matrix is as it was
        assert (before.data == X.data).all() and (before.indices == X.indices).all()


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, bool])
def test_integers_and_booleans(dtype: type) -> None:
    X = np.array([[1, 0, 1], [0, 0, 1]], dtype)
    assert (as_dense(X) == X).all() and (as_dense(sp.csr_array(X)) == X).all()
    assert (as_dense(torch.tensor(X.astype(np.int64)).to_sparse_coo()) == X).all()


def test_large_matrices_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    X = sp.random_array((57, 11), density=0.4, rng=np.random.default_rng(0), format="csr")
    for elements, most in ((1, 100), (17, 100), (10_000, 5), (10_000, 100)):
        monkeypatch.setattr(sparse_rows, "_ELEMENTS", elements)
        monkeypatch.setattr(sparse_rows, "_ROWS", most)
        for form in (X, X.toarray()):
            pieces = list(clean_chunks(form))
            assert (np.concatenate([piece.toarray() for piece in pieces]) == X.toarray()).all()
            assert len(pieces) > 1 or (elements, most) == (10_000, 100)


def test_what_scipy_remembers_of_a_matrix_may_be_out_of_date() -> None:
    X = sp.csr_array(np.array([[1.0, 1.0]]))
    assert X.has_canonical_format
    X.indices[:] = 0  # twice the same column now
    assert (as_dense(X) == [[2.0, 0.0]]).all()


def test_no_rows() -> None:
    assert as_dense(np.zeros((0, 3))).shape == (0, 3)
    assert as_dense(sp.csr_array((0, 3))).shape == (0, 3)


@pytest.mark.parametrize(
    "X, message",
    [
        (np.array([[np.nan]]), "NaN"),
        (sp.csr_array(np.array([[np.inf]])), "NaN or infinity"),
        (torch.tensor([[math.inf]]).to_sparse_coo(), "NaN or infinity"),
        (sp.coo_array(([1e308, 1e308], ([0, 0], [0, 0])), shape=(1, 1)), "infinity"),
        (np.zeros(3), "two axes"),
        (np.zeros((2, 2, 2)), "two axes"),
        (np.zeros((2, 0)), "no columns"),
        (np.array([[1j]]), "real numbers"),
        (torch.tensor([[1j]]), "real numbers"),
        (np.array([["a"]]), "real numbers"),
        (np.array([[None]]), "real numbers"),
        (np.ma.masked_array([[1.0]], [[True]]), "masked"),
        ([[1.0, 2.0]], "chunks of X must be"),
        ([], "no chunks"),
        (iter([]), "no chunks"),
        ([DENSE, DENSE[:, :2]], "columns"),
        ("X.npz", "X must be"),
        (3, "X must be"),
        ({"a": 1}, "X must be"),
        (torch.zeros(2, 2, 2).to_sparse_coo(), "two axes"),
        (torch.sparse_coo_tensor([[0]], [[1.0, 2.0]], (1, 2), check_invariants=True), "two axes"),
        (torch.zeros(2, 2).to_sparse_bsr((1, 1)), "layout"),
    ],
)
def test_what_is_refused(X: object, message: str) -> None:
    with pytest.raises((DataError, UnsupportedError), match=message):
        list(clean_chunks(X))


@pytest.mark.parametrize("index", [-1, 3])
@pytest.mark.parametrize("form", ["csr", "csc", "coo", "torch coo", "torch csr"])
def test_indices_outside_of_the_matrix_are_refused(form: str, index: int) -> None:
    dense = np.array([[1.0, 0, 2.0], [0, 0, 0], [4, 5, 6]])
    if form.startswith("torch"):
        X = torch.tensor(dense).to_sparse_coo() if form == "torch coo" else torch.tensor(dense).to_sparse_csr()
        places = X._indices() if form == "torch coo" else X.col_indices()
        places.view(-1)[-1] = index
    else:
        X = sp.csr_array(dense).asformat(form)
        (X.col if form == "coo" else X.indices)[-1] = index
    with pytest.raises(DataError, match="not a valid"):
        list(clean_chunks(X))


# Entries of all sizes, so that norms come near to rounding, overflow and underflow.
entries = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.1, 1e300, -1e300, 1e-300, 5e-324, 1.0 + 2**-52]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.floats(-2, 2),
)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(entries, min_size=3, max_size=3), min_size=1, max_size=4).map(np.array),
    st.sampled_from([1e-100, 0.1, 1.0, 1 / 3, 7.0, 1e100]),
    st.sampled_from([1.0, 1.5, 2.0, 3.0]),
)
def test_clipped_rows_are_within_their_bounds_exactly(X: np.ndarray, bound: float, sparsity: float) -> None:
    """In rational numbers, after the cut to integers: no rounding lets a row go beyond its bounds."""
    bounds = RowBounds(bound, bound * math.sqrt(sparsity))
    for row in X:
        total = ExactSum(3, bounds.step)
        (chunk,) = clean_chunks(row[None])
        bounds.clip(chunk)
        total.add(chunk)
        exact = [Fraction(int(whole)) * Fraction(bounds.step) for whole in total.sum.whole]
        assert sum(value**2 for value in exact) <= Fraction(bounds.l2) ** 2
        assert sum(abs(value) for value in exact) <= Fraction(bounds.l1)
        # And no more was taken than had to be.
        with np.errstate(over="ignore"):
            l2, l1 = np.linalg.norm(row / bound), np.abs(row / bound).sum()
        if np.isfinite(l2) and np.isfinite(l1):
            factor = min(1.0, 1 / l2 if l2 else 1.0, math.sqrt(sparsity) / l1 if l1 else 1.0)
            assert np.allclose(total.sum.values / bound, row / bound * factor, atol=1e-9)


def test_rows_within_bounds_are_kept_and_not_reported() -> None:
    X = np.array([[0.6, 0.8, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 0.0], [0.5, 0.5, 0.5]])
    (chunk,) = clean_chunks(X)
    assert RowBounds(1.0, math.sqrt(2)).clip(chunk) == 2
    expected = X.copy()
    expected[3] /= 5
    expected[4] *= math.sqrt(2) / 1.5
    assert np.allclose(chunk.toarray(), expected, rtol=1e-12)


def test_sums_do_not_depend_on_order_or_company() -> None:
    """A row more moves the sum by exactly that row, wherever it stands and however the data are cut."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(200, 5)) * 10.0 ** rng.integers(-8, 8, size=(200, 1))
    bounds = RowBounds(1.0, math.sqrt(2))

    def total(rows: np.ndarray, size: int) -> np.ndarray:
        out = ExactSum(5, bounds.step)
        for chunk in clean_chunks(rows[i : i + size] for i in range(0, len(rows), size)):
            bounds.clip(chunk)
            out.add(chunk)
        return out.sum.whole

    everything = total(X, 200)
    assert (total(X[::-1], 7) == everything).all()
    for left_out in (0, 77, 199):
        rest = total(np.delete(X, left_out, axis=0), 11)
        assert (everything - rest == total(X[left_out : left_out + 1], 1)).all()


def test_more_rows_than_a_sum_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_rows, "LARGEST_COUNT", 3)
    total = ExactSum(4, 2.0**-34)
    with pytest.raises(UnsupportedError, match="more than 3 rows"):
        total.add(next(clean_chunks(DENSE)))
