"""The compiled twin of `clickparse.parse_block_python`: one pass over the raw bytes. Needs Numba."""

from __future__ import annotations

import numpy as np
from numba import njit

from sparsedp.data import clickparse

_SKIP, _LABEL, _PERIOD, _USER = clickparse.SKIP, clickparse.LABEL, clickparse.PERIOD, clickparse.USER
_FIRST_INTEGER, _FIRST_CATEGORY = clickparse.FIRST_INTEGER, clickparse.FIRST_CATEGORY
_FIELD_COUNT, _BAD_LABEL = clickparse.FIELD_COUNT, clickparse.BAD_LABEL
_BAD_INTEGER, _BAD_CATEGORY, _BAD_PERIOD, _BAD_USER = (
    clickparse.BAD_INTEGER,
    clickparse.BAD_CATEGORY,
    clickparse.BAD_PERIOD,
    clickparse.BAD_USER,
)
_MISSING_INTEGER, _MISSING_CATEGORY = clickparse.MISSING_INTEGER, clickparse.MISSING_CATEGORY
_NEWLINE, _RETURN, _MINUS, _POINT, _ZERO, _NINE = 10, 13, 45, 46, 48, 57

_HEX = np.full(256, -1, np.int64)
for _digit, _character in enumerate("0123456789abcdef"):
    _HEX[ord(_character)] = _HEX[ord(_character.upper())] = _digit


@njit(cache=True, nogil=True)
def parse_lines(
    buffer: np.ndarray,
    separator: int,
    targets: np.ndarray,
    labels: np.ndarray,
    integers: np.ndarray,
    categories: np.ndarray,
    periods: np.ndarray,
    users: np.ndarray,
    bad: np.ndarray,
) -> tuple[int, int, int]:
    """Fills the arrays from `buffer` (uint8, ends with a newline); returns rows, lines and malformed lines.

    The final newline is what bounds every inner loop, so that none of them tests for the end of the buffer.
    """
    rows = lines = malformed = 0
    pos = 0
    while pos < buffer.size:
        lines += 1
        if buffer[pos] == _NEWLINE:
            pos += 1
            continue
        if buffer[pos] == _RETURN and buffer[pos + 1] == _NEWLINE:
            pos += 2
            continue
        fields = 0
        reason = where = 0
        while True:  # one field per turn; a bad line is read to its end, to find the next one
            target = targets[fields] if fields < targets.size else _SKIP
            begin = pos
            problem = 0
            value = np.int64(0)
            if _FIRST_CATEGORY <= target < _PERIOD:
                digit = _HEX[buffer[pos]]
                while digit >= 0:
                    value = (value << 4) | digit
                    pos += 1
                    digit = _HEX[buffer[pos]]
                if pos == begin:
                    value = np.int64(_MISSING_CATEGORY)
                elif pos - begin > 15:
                    problem = _BAD_CATEGORY
                categories[rows, target - _FIRST_CATEGORY] = value
                wrong = _BAD_CATEGORY
            elif target == _USER:
                wrong = _BAD_USER
                while _ZERO <= buffer[pos] <= _NINE:
                    if pos - begin < 18:
                        value = value * 10 + (np.int64(buffer[pos]) - _ZERO)
                    pos += 1
                if not 1 <= pos - begin <= 18:
                    problem = wrong
                users[rows] = value
            elif target != _SKIP:
                negative = buffer[pos] == _MINUS
                if negative:
                    pos += 1
                first_digit = pos
                while _ZERO <= buffer[pos] <= _NINE:
                    if pos - first_digit < 10:
                        value = value * 10 + (np.int64(buffer[pos]) - _ZERO)
                    pos += 1
                digits = pos - first_digit
                valid = 1 <= digits <= 10 and value < 2**31
                if digits > 0 and buffer[pos] == _POINT:
                    pos += 1
                    while buffer[pos] == _ZERO:
                        pos += 1
                if negative:
                    value = -value
                if target == _LABEL:
                    wrong = _BAD_LABEL
                    if not valid or value < 0 or value > 1:
                        problem = wrong
                    else:
                        labels[rows] = value
                elif target == _PERIOD:
                    wrong = _BAD_PERIOD
                    if not valid:
                        problem = wrong
                    else:
                        periods[rows] = value
                else:
                    wrong = _BAD_INTEGER
                    if pos == begin:
                        value = np.int64(_MISSING_INTEGER)
                    elif not valid:
                        problem = wrong
                    integers[rows, target - _FIRST_INTEGER] = value
            else:
                wrong = 0
            # What is left of the field is not part of a number.
            at_return = buffer[pos] == _RETURN and buffer[pos + 1] == _NEWLINE
            if buffer[pos] != separator and buffer[pos] != _NEWLINE and not at_return:
                problem = wrong
                while buffer[pos] != separator and buffer[pos] != _NEWLINE:
                    pos += 1
            elif at_return:
                pos += 1
            if problem != 0 and reason == 0:
                reason = problem
                where = fields
            fields += 1
            pos += 1
            if buffer[pos - 1] == _NEWLINE:
                break
        if fields != targets.size:
            reason = _FIELD_COUNT
            where = fields
        if reason == 0:
            rows += 1
        else:
            if malformed < bad.shape[0]:
                bad[malformed, 0] = lines - 1
                bad[malformed, 1] = reason
                bad[malformed, 2] = where
            malformed += 1
    return rows, lines, malformed
