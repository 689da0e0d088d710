"""Values of a column as whole numbers that depend on the value alone: the same on every machine, in every version."""

from __future__ import annotations

from enum import Enum

import numpy as np
import pyarrow as pa

from sparsedp.kernels.hexadecimal import hashed_rows

MISSING = -1  # the code of a missing value
_HEX_DIGITS = 15
_DIGIT = np.full(256, 255, np.uint8)
for _text in (b"0123456789abcdef", b"0123456789ABCDEF"):
    _DIGIT[list(_text)] = np.arange(16)


class Form(Enum):
    """How values are spelled. A code of TEXT is a hash of its bytes, from 0 to 2^63 - 1; one of HEX the number itself."""

    TEXT = "text"
    HEX = "hex"

    @property
    def says(self) -> str:
        return "text in UTF-8" if self is Form.TEXT else f"a hex number of at most {_HEX_DIGITS} digits"


def mix(h: np.ndarray) -> np.ndarray:
    """The mix of splitmix64, uint64: the same on every machine."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def codes_of(values: pa.Array, form: Form) -> tuple[np.ndarray, np.ndarray]:
    """The codes, int64, of binary values without nulls, and which of them are not spelled as the form says."""
    return _of_hex(values) if form is Form.HEX else (_of_text(values), _not_utf8(values))


def spelled(codes: np.ndarray, values: pa.Array, form: Form) -> list[str]:
    """How a vocabulary's file spells values: hex numbers alike, however the data spell them."""
    if form is Form.HEX:
        return [f"{code:08x}" for code in codes.tolist()]
    return [value.decode() for value in values.to_pylist()]


def hashed_hex_rows(values: pa.Array, salt: np.uint64, modulus: np.uint64) -> tuple[np.ndarray, np.ndarray | None]:
    """(rows int32 [n] of binary values as hex numbers, which are no such numbers or None), by `HashedColumn.encode`'s formula.

    A missing value has row 0. The values need not be distinct: each is read where it stands.
    """
    assert values.type == pa.binary()
    n = len(values)
    rows, wrong = np.zeros(n, np.int32), np.zeros(n, bool)
    if not n:
        return rows, None
    validity, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + n + 1]
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    valid = np.empty(0, np.uint8) if validity is None else np.frombuffer(validity, np.uint8)
    is_wrong = hashed_rows(ends, content, valid, values.offset, _DIGIT, _HEX_DIGITS, salt, modulus, rows, wrong)
    return rows, wrong if is_wrong else None


def _of_text(values: pa.Array) -> np.ndarray:
    """h = mix(h xor the next 8 bytes), from the length on."""
    starts, lengths, data = _buffers(values)
    # Words of 8 bytes that begin at any byte; behind the last value stand zeros.
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    words = np.ndarray((len(data) + 1,), "<u8", buffer=padded.data, strides=(1,))
    h = mix(lengths.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    left, place = np.flatnonzero(lengths), 0
    while left.size:
        word = words[starts[left] + place]
        bits = 8 * np.minimum(lengths[left] - place, 8).astype(np.uint64)
        word &= ~np.uint64(0) >> (np.uint64(64) - bits)
        h[left] = mix(h[left] ^ word)
        place += 8
        left = left[lengths[left] > place]
    return (h >> np.uint64(1)).astype(np.int64)


def _of_hex(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    starts, lengths, data = _buffers(values)
    codes = np.zeros(len(lengths), np.int64)
    wrong = (lengths < 1) | (lengths > _HEX_DIGITS)
    for length in range(1, min(_HEX_DIGITS, int(lengths.max(initial=0))) + 1):
        here = np.flatnonzero(lengths == length)
        if here.size:
            code, worst = np.zeros(here.size, np.int64), np.zeros(here.size, np.uint8)
            for place in range(length):
                digit = _DIGIT[data[starts[here] + place]]
                code = (code << 4) | digit
                worst |= digit
            wrong[here] = worst > 15
            codes[here] = code
    codes[wrong] = MISSING
    return codes, wrong


def _not_utf8(values: pa.Array) -> np.ndarray:
    wrong = np.zeros(len(values), bool)
    try:
        values.cast(pa.string())
    except pa.ArrowInvalid:
        for i, value in enumerate(values.to_pylist()):
            try:
                value.decode()
            except UnicodeDecodeError:
                wrong[i] = True
    return wrong


def _buffers(values: pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each value begins, its length, and the bytes of all."""
    assert values.null_count == 0 and values.type == pa.binary()
    if not len(values):
        return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint8)
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, np.int32)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    content = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    return ends[:-1], np.diff(ends), content
