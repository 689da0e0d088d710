"""Parsing Criteo's text format: label, 13 integers, 26 hex categories, separated by tabs or commas.

`parse_block` runs the compiled kernel of `clickparse_numba` where Numba is installed; `parse_block_python` is
the same parser in plain Python, and the definition of what is malformed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsedp.errors import DataError

INTEGERS = 13
CATEGORIES = 26
MISSING_INTEGER = -(2**31)  # how an empty integer field is stored
MISSING_CATEGORY = -1  # the code of an empty category field; present ones are their hex number

# What a field of a line is for: a column of the log, the period, the user, or nothing.
SKIP, LABEL, FIRST_INTEGER, FIRST_CATEGORY, PERIOD = -1, 0, 1, 1 + INTEGERS, 1 + INTEGERS + CATEGORIES
USER = PERIOD + 1
COLUMNS = ["label", *(f"I{i + 1}" for i in range(INTEGERS)), *(f"C{i + 1}" for i in range(CATEGORIES))]
PERIOD_COLUMNS = ("period", "day", "block")

FIELD_COUNT, BAD_LABEL, BAD_INTEGER, BAD_CATEGORY, BAD_PERIOD, BAD_USER = 1, 2, 3, 4, 5, 6
REASONS = {
    BAD_LABEL: "is neither 0 nor 1",
    BAD_INTEGER: "is not a whole number of 32 bits",
    BAD_CATEGORY: "is not a hex number of at most 15 digits",
    BAD_PERIOD: "is not a whole number of 32 bits",
    BAD_USER: "is not a whole number of at most 18 digits",
}
KEPT_MALFORMED = 20

_INTEGER = re.compile(rb"(-?[0-9]{1,10})(\.0*)?")  # pandas writes 3 as 3.0 in a column with gaps
_CATEGORY = re.compile(rb"[0-9a-fA-F]{1,15}")
_USER = re.compile(rb"[0-9]{1,18}")


@dataclass(frozen=True)
class Layout:
    """Which field of a line is what. `targets[i]` is the meaning of field i: SKIP, LABEL, ..., PERIOD, USER."""

    separator: str
    has_header: bool
    targets: tuple[int, ...]

    @property
    def has_period(self) -> bool:
        return PERIOD in self.targets


@dataclass
class ParsedBlock:
    """Rows of one block: labels [n], integers [n, 13], categories [n, 26] (codes), periods and users [n] (0 if none).

    `bad` holds line (from 0), reason and field of the first malformed lines; `malformed` counts all of them.
    """

    labels: np.ndarray
    integers: np.ndarray
    categories: np.ndarray
    periods: np.ndarray
    users: np.ndarray
    lines: int
    malformed: int
    bad: np.ndarray

    @staticmethod
    def empty(rows: int) -> ParsedBlock:
        return ParsedBlock(
            labels=np.empty(rows, np.uint8),
            integers=np.empty((rows, INTEGERS), np.int32),
            categories=np.empty((rows, CATEGORIES), np.int64),
            periods=np.zeros(rows, np.int32),
            users=np.zeros(rows, np.int64),
            lines=0,
            malformed=0,
            bad=np.zeros((KEPT_MALFORMED, 3), np.int64),
        )

    def cut(self, rows: int, lines: int, malformed: int) -> ParsedBlock:
        return ParsedBlock(
            self.labels[:rows],
            self.integers[:rows],
            self.categories[:rows],
            self.periods[:rows],
            self.users[:rows],
            lines,
            malformed,
            self.bad[: min(malformed, KEPT_MALFORMED)],
        )


def detect_layout(first_line: bytes, path: Path, user_column: str | None = None) -> Layout:
    """The layout of a file from its first line, which is a header if one of its fields is `label`.

    `user_column` names the column of the header that holds the user of each row.
    """
    line = first_line.removesuffix(b"\n").removesuffix(b"\r").decode("latin-1")
    if "\t" not in line and "," not in line:
        raise DataError(f"{path}: the first line has neither tabs nor commas; this is not a click log")
    separator = "\t" if "\t" in line else ","
    names = [name.strip().lower() for name in line.split(separator)]
    if "label" not in names and user_column is not None:
        raise DataError(f"{path}: there is no header, so that the user column {user_column!r} cannot be found")
    if "label" not in names:
        return Layout(separator, False, tuple(range(len(COLUMNS))))
    target_of = {name.lower(): target for target, name in enumerate(COLUMNS)}
    missing = [name for name in COLUMNS if name.lower() not in names]
    if missing:
        raise DataError(f"{path}: the header lacks the columns {', '.join(missing)}")
    repeated = sorted({name for name in names if name in target_of and names.count(name) > 1})
    if repeated:
        raise DataError(f"{path}: the header repeats the columns {', '.join(repeated)}")
    period = next((name for name in PERIOD_COLUMNS if name in names), None)
    targets = [target_of.get(name, SKIP) for name in names]
    if period is not None:
        targets[names.index(period)] = PERIOD
    if user_column is not None:
        where = [i for i, name in enumerate(names) if name == user_column.strip().lower()]
        if len(where) != 1 or targets[where[0]] != SKIP:
            raise DataError(
                f"{path}: the user column {user_column!r} must be one column of the header, and not one that is read as "
                f"something else; the others are {', '.join(n for n, t in zip(names, targets) if t == SKIP) or 'none'}"
            )
        targets[where[0]] = USER
    return Layout(separator, True, tuple(targets))


def explain(layout: Layout, reason: int, field: int) -> str:
    """Why a line is malformed. Never quotes the line: it is somebody's data."""
    if reason == FIELD_COUNT:
        return f"{field} fields, expected {len(layout.targets)}"
    target = layout.targets[field]
    name = {PERIOD: "period", USER: "user"}.get(target) or COLUMNS[target]
    return f"{name} {REASONS[reason]}"


def parse_block(block: bytes, layout: Layout) -> ParsedBlock:
    """Parses whole lines; `block` ends with a newline. Blank lines are skipped; they are not malformed."""
    try:
        from sparsedp.data.clickparse_numba import parse_lines
    except ImportError:
        return parse_block_python(block, layout)
    parsed = ParsedBlock.empty(block.count(b"\n"))
    rows, lines, malformed = parse_lines(
        np.frombuffer(block, np.uint8),
        ord(layout.separator),
        np.array(layout.targets, np.int64),
        parsed.labels,
        parsed.integers,
        parsed.categories,
        parsed.periods,
        parsed.users,
        parsed.bad,
    )
    return parsed.cut(rows, lines, malformed)


def parse_block_python(block: bytes, layout: Layout) -> ParsedBlock:
    """`parse_block` without Numba."""
    parsed = ParsedBlock.empty(block.count(b"\n"))
    separator = layout.separator.encode()
    rows = lines = malformed = 0
    for line in block.split(b"\n")[:-1]:
        line = line.removesuffix(b"\r")
        lines += 1
        if not line:
            continue
        fields = line.split(separator)
        reason, where = _parse_fields(fields, layout, parsed, rows)
        if reason == 0:
            rows += 1
        else:
            if malformed < KEPT_MALFORMED:
                parsed.bad[malformed] = lines - 1, reason, where
            malformed += 1
    return parsed.cut(rows, lines, malformed)


def _parse_fields(fields: list[bytes], layout: Layout, parsed: ParsedBlock, row: int) -> tuple[int, int]:
    """Fills one row; returns (0, 0), or the reason and the field that is wrong."""
    if len(fields) != len(layout.targets):
        return FIELD_COUNT, len(fields)
    for i, (field, target) in enumerate(zip(fields, layout.targets)):
        if target == SKIP:
            continue
        if FIRST_CATEGORY <= target < PERIOD:
            if field and not _CATEGORY.fullmatch(field):
                return BAD_CATEGORY, i
            parsed.categories[row, target - FIRST_CATEGORY] = int(field, 16) if field else MISSING_CATEGORY
            continue
        if target == USER:
            if not _USER.fullmatch(field):
                return BAD_USER, i
            parsed.users[row] = int(field)
            continue
        match = _INTEGER.fullmatch(field)
        value = int(match[1]) if match else MISSING_INTEGER
        valid = match is not None and abs(value) < 2**31
        if target == LABEL:
            if not valid or value not in (0, 1):
                return BAD_LABEL, i
            parsed.labels[row] = value
        elif target == PERIOD:
            if not valid:
                return BAD_PERIOD, i
            parsed.periods[row] = value
        else:
            if field and not valid:
                return BAD_INTEGER, i
            parsed.integers[row, target - FIRST_INTEGER] = value
    return 0, 0
