"""Hex numbers that are hashed where they stand get the rows that `codes_of` and `HashedColumn.encode` say."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsedp.data.codes import Form, codes_of
from sparsedp.data.vocabulary import HashedColumn

VALUES = st.one_of(
    st.none(),
    st.text("0123456789abcdefABCDEF", min_size=0, max_size=17).map(str.encode),
    st.binary(max_size=3),
    st.sampled_from(
        [b"7e5c2ff4", b"0", b"00", b"f" * 15, b"f" * 16, b"0x1", b" 1", b"1\r", b"-1", b"+1", b"1_0", "é".encode()]
    ),
)


def expected(values: list[bytes | None], column: HashedColumn) -> tuple[np.ndarray, np.ndarray]:
    present = pa.array([value for value in values if value is not None], pa.binary())
    codes, wrong = codes_of(present, Form.HEX)
    at = np.array([value is not None for value in values], bool)
    rows, bad = np.zeros(len(values), np.int32), np.zeros(len(values), bool)
    rows[at], bad[at] = column.encode(codes), wrong
    return rows, bad


@settings(deadline=None)
@given(
    values=st.lists(VALUES, max_size=40),
    size=st.sampled_from([2, 3, 100_000, 2**31 - 1]),
    place=st.integers(0, 60),
    cut=st.integers(0, 12),
)
def test_rows_and_malformed_values_are_those_of_the_arrays(
    values: list[bytes | None], size: int, place: int, cut: int
) -> None:
    column, cells = HashedColumn(size, place), pa.array(values, pa.binary())
    rows, wrong = column.encode_hex(cells.slice(cut))
    means, bad = expected(values[cut:], column)
    np.testing.assert_array_equal(np.zeros(len(rows), bool) if wrong is None else wrong, bad)
    np.testing.assert_array_equal(rows[~bad], means[~bad])


def test_a_column_without_values() -> None:
    for cells in (pa.array([], pa.binary()), pa.nulls(9, pa.binary())):
        rows, wrong = HashedColumn(10, 0).encode_hex(cells)
        assert wrong is None and rows.tolist() == [0] * len(cells)


def test_text_that_is_no_bytes_is_refused() -> None:
    with pytest.raises(AssertionError):
        HashedColumn(10, 0).encode_hex(pa.array(["1"]))
