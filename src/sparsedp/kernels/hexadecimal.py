"""Hex numbers of a text column to the rows of a hashed vocabulary, in one pass over its bytes; Python's lock is free meanwhile.

`sparsedp.data.codes` and `HashedColumn.encode` say the same of whole arrays in numpy, for columns that come otherwise.
"""

from __future__ import annotations

import numpy as np

from sparsedp.kernels.compiler import compile_loop

_PRIME = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)  # splitmix64's
_SHIFTS = np.uint64(30), np.uint64(27), np.uint64(31)
_FOUR = np.uint64(4)


@compile_loop()
def hashed_rows(
    ends: np.ndarray, data: np.ndarray, valid: np.ndarray, first: int, digits: np.ndarray, most: int, salt: np.uint64,
    modulus: np.uint64, rows: np.ndarray, wrong: np.ndarray,
) -> bool:  # fmt: skip
    """rows[i] = 1 + mix(code + salt) mod modulus for the number `data[ends[i]:ends[i + 1]]`, 0 where there is none.

    `ends` int32 [n + 1]; bit `first + i` of `valid` says whether there is a value i; empty: there are all. `digits[byte]` is a
    digit, 255 for none. wrong[i], and the answer, say where a value is not a number of 1 to `most` digits: its row means nothing.
    """
    any_wrong = False
    for i in range(len(rows)):
        at = first + i
        if len(valid) and not (valid[at >> 3] >> (at & 7)) & 1:
            rows[i] = 0
            continue
        begin, end = ends[i], ends[i + 1]
        code, worst = np.uint64(0), np.uint8(0)
        for place in range(begin, end):
            digit = digits[data[place]]
            code = (code << _FOUR) | np.uint64(digit)
            worst |= digit
        if worst > 15 or end == begin or end - begin > most:
            wrong[i] = any_wrong = True
        h = code + salt
        h = (h ^ (h >> _SHIFTS[0])) * _PRIME[0]
        h = (h ^ (h >> _SHIFTS[1])) * _PRIME[1]
        h = h ^ (h >> _SHIFTS[2])
        rows[i] = np.int32(1) + np.int32(h % modulus)
    return any_wrong
