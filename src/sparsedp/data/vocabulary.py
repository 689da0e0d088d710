"""From a value of a categorical column to its row in a table: hashed, counted or given.

A vocabulary is of all categorical columns of a file, or of one of them. Reading binds it to the columns (`for_columns`); a
value is then its code, a whole number from 0 (`sparsedp.data.codes`), and -1 where it is missing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sparsedp.data.codes import MISSING, Form, codes_of, hashed_hex_rows, mix, spelled
from sparsedp.errors import ConfigError

# Rows of a counted or given vocabulary that stand for no value of their own.
OUT_OF_VOCABULARY_ROW, MISSING_ROW, FIRST_VALUE_ROW = 0, 1, 2
_MOST_ROWS = 2**31

Values = Sequence[str] | Mapping[str, int]


@dataclass(frozen=True)
class HashVocabulary:
    """`buckets` rows per table (one number, or one per column): row 0 is missing, values share the others.

    row = 1 + mix(code + (column + 1) golden) mod (buckets - 1), with the mix of splitmix64: the same on
    every machine and in every version. Does not depend on the data.
    """

    buckets: int | Sequence[int] = 100_000
    is_private = False

    def __post_init__(self) -> None:
        sizes = [self.buckets] if isinstance(self.buckets, int) else list(self.buckets)
        if not sizes or min(sizes) < 2 or max(sizes) >= _MOST_ROWS:
            raise ConfigError(
                f"HashVocabulary: buckets must each be at least 2 (row 0 is for missing values), got {self.buckets!r}"
            )

    def for_columns(self, names: Sequence[str], forms: Sequence[Form], first: int = 0) -> list[HashedColumn]:
        """The vocabulary of each column; `first` is the place of the first one among all columns."""
        sizes = [self.buckets] * len(names) if isinstance(self.buckets, int) else [int(b) for b in self.buckets]
        if len(sizes) != len(names):
            raise ConfigError(f"HashVocabulary: buckets must be one number or {len(names)}, got {self.buckets!r}")
        return [HashedColumn(size, first + j) for j, size in enumerate(sizes)]


@dataclass(frozen=True)
class CountVocabulary:
    """Values seen at least `min_count` times get a row each, the most frequent first (ties by value).

    Row 0 is for all the others, row 1 for missing ones. Such a vocabulary is computed from the data without
    noise: whether a row exists depends on single examples, and no privacy accounting covers that.
    `is_private` says so. It is learned from the whole file, also from what is held out later.
    """

    min_count: int = 10
    is_private = True

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ConfigError(f"CountVocabulary: min_count must be at least 1, got {self.min_count}")

    def for_columns(self, names: Sequence[str], forms: Sequence[Form], first: int = 0) -> list[ValueCounter]:
        return [ValueCounter(self.min_count, form) for form in forms]


class GivenVocabulary:
    """A vocabulary fixed beforehand. Row 0 is for values it lacks, row 1 for missing ones, the others follow.

    `values`: an entry for each column in order, or a dict from their names, or a JSON file with either. An entry is a list of
    values, which get the rows 2, 3, ... in that order, or a dict from value to row (2 or more; rows may
    be shared). `private` says that the values were taken from the private data (see `CountVocabulary`).
    """

    def __init__(
        self,
        values: Sequence[Values] | Mapping[str, Values] | str | os.PathLike[str],
        *,
        private: bool = False,
    ) -> None:
        entries: Any = values
        if isinstance(values, (str, os.PathLike)):
            entries, private_file = _read_vocabulary(Path(values))
            private = private or private_file
        self.is_private = private
        if isinstance(entries, Mapping):
            self._entries: Any = {name: _rows_of(entry, f"{name} ") for name, entry in entries.items()}
        elif isinstance(entries, Sequence) and not isinstance(entries, str):
            self._entries = [_rows_of(entry, f"entry {i + 1} ") for i, entry in enumerate(entries)]
        else:
            raise ConfigError("GivenVocabulary: a list or a mapping of columns expected")

    @staticmethod
    def of_values(path: str | os.PathLike[str]) -> GivenVocabulary:
        """Of one column, from a text file with a value in each line."""
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"vocabulary: {path} cannot be read as lines of text: {error}") from error
        return GivenVocabulary([[line.strip() for line in lines if line.strip()]])

    @property
    def sizes(self) -> list[int]:
        entries = self._entries.values() if isinstance(self._entries, dict) else self._entries
        return [1 + max(entry.values(), default=MISSING_ROW) for entry in entries]

    def for_columns(self, names: Sequence[str], forms: Sequence[Form], first: int = 0) -> list[GivenColumn]:
        entries = self._entries
        if isinstance(entries, dict):
            if set(entries) != set(names):
                expected = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
                raise ConfigError(f"GivenVocabulary: keys {expected} expected, got {list(entries)[:30]}")
            entries = [entries[name] for name in names]
        if len(entries) != len(names):
            raise ConfigError(f"GivenVocabulary: a list of {len(names)} features expected, got {len(entries)}")
        return [
            GivenColumn.of_values(entry, name, form, self.is_private)
            for entry, name, form in zip(entries, names, forms)
        ]

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{column: {value: row, ...}, ...}; columns that were given as a list are called 1, 2, ..."""
        named = (
            self._entries if isinstance(self._entries, dict) else {str(i + 1): e for i, e in enumerate(self._entries)}
        )
        return {name: dict(entry) for name, entry in named.items()}

    def options(self) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode())
        return {"kind": "given", "digest": digest.hexdigest(), "private": self.is_private}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON file that `GivenVocabulary(path)` reads; it keeps `private`."""
        Path(path).write_text(json.dumps({"private": self.is_private, "features": self.as_dict()}))


Vocabulary = HashVocabulary | CountVocabulary | GivenVocabulary


# ------------------------------------------------------------------ of one column


@dataclass(frozen=True)
class HashedColumn:
    size: int
    column: int  # its place among all columns: each has a hash of its own
    is_private = False
    missing_row = 0

    def options(self) -> dict[str, Any]:
        return {"kind": "hash", "buckets": self.size, "column": self.column}

    def encode(self, codes: np.ndarray) -> np.ndarray:
        """codes int64 [n] -> rows int32 [n]."""
        rows = (mix(codes.astype(np.uint64) + self.salt) % np.uint64(self.size - 1)).astype(np.int32) + 1
        rows[codes == MISSING] = self.missing_row
        return rows

    @property
    def salt(self) -> np.uint64:
        return np.uint64((self.column + 1) * 0x9E3779B97F4A7C15 % 2**64)

    def encode_hex(self, values: pa.Array) -> tuple[np.ndarray, np.ndarray | None]:
        """Binary values that are hex numbers -> (rows int32 [n], which are none, if any)."""
        return hashed_hex_rows(values, self.salt, np.uint64(self.size - 1))


class GivenColumn:
    """Distinct `codes` and their `rows`; `values` are how these are spelled."""

    missing_row = MISSING_ROW

    def __init__(self, codes: np.ndarray, rows: np.ndarray, values: Sequence[str], is_private: bool) -> None:
        order = np.argsort(codes)
        self._codes, self._rows = codes[order], rows[order]
        self._entry = dict(zip(values, rows.tolist()))
        self.is_private = is_private
        self.size = 1 + int(rows.max(initial=MISSING_ROW))

    @staticmethod
    def of_values(entry: Mapping[str, int], name: str, form: Form, is_private: bool) -> GivenColumn:
        values = pa.array([value.encode() for value in entry], pa.binary())
        codes, wrong = codes_of(values, form)
        if wrong.any():
            value = list(entry)[int(np.argmax(wrong))]
            raise ConfigError(f"GivenVocabulary: {name} holds {value!r}, not {form.says}")
        if len(np.unique(codes)) < len(codes):
            raise ConfigError(f"GivenVocabulary: {name} holds a value twice")
        return GivenColumn(codes, np.array(list(entry.values()), np.int32), list(entry), is_private)

    def options(self) -> dict[str, Any]:
        digest = hashlib.sha256(self._codes.tobytes() + self._rows.tobytes())
        return {"kind": "given", "digest": digest.hexdigest(), "private": self.is_private}

    def encode(self, codes: np.ndarray) -> np.ndarray:
        """codes int64 [n] -> rows int32 [n]."""
        if not len(self._codes):
            rows = np.full(len(codes), OUT_OF_VOCABULARY_ROW, np.int32)
        else:
            position = np.minimum(np.searchsorted(self._codes, codes), self._codes.size - 1)
            rows = np.where(self._codes[position] == codes, self._rows[position], OUT_OF_VOCABULARY_ROW).astype(
                np.int32
            )
        rows[codes == MISSING] = self.missing_row
        return rows

    def entry(self) -> dict[str, int]:
        """{value: row}, in the order of the rows."""
        return dict(sorted(self._entry.items(), key=lambda pair: pair[1]))


class ValueCounter:
    """Counts the values of a column while it numbers them in the order of arrival, so that one pass over the file is enough.

    Holds the known codes, sorted, the number of each, and the count and spelling per number. Memory follows the
    distinct values, not the rows.
    """

    is_private = True
    missing_row = MISSING_ROW

    def __init__(self, min_count: int, form: Form) -> None:
        self._min_count, self._form = min_count, form
        self._codes = np.empty(0, np.int64)
        self._numbers = np.empty(0, np.int32)
        self._counts = np.empty(0, np.int64)
        self._values: list[pa.Array] = []

    def options(self) -> dict[str, Any]:
        return {"kind": "count", "min_count": self._min_count}

    def count(self, codes: np.ndarray, counts: np.ndarray, values: pa.Array) -> np.ndarray:
        """Distinct values as codes, how often each occurs and how it is spelled -> numbers int32, for `finish` to map to rows.

        Values that are spelled differently may have one code.
        """
        distinct, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
        position = np.searchsorted(self._codes, distinct)
        new = np.ones(distinct.size, bool)
        inside = position < self._codes.size
        new[inside] = self._codes[position[inside]] != distinct[inside]
        number = np.empty(distinct.size, np.int32)
        number[~new] = self._numbers[position[~new]]
        number[new] = self._codes.size + np.arange(np.count_nonzero(new))
        if new.any():
            self._codes = np.insert(self._codes, position[new], distinct[new])
            self._numbers = np.insert(self._numbers, position[new], number[new])
            self._counts = np.concatenate([self._counts, np.zeros(np.count_nonzero(new), np.int64)])
            self._values.append(values.take(pa.array(first[new])))
        np.add.at(self._counts, number[inverse], counts)
        return number[inverse]

    def finish(self) -> tuple[GivenColumn, np.ndarray]:
        """The vocabulary, and the rows of the numbers; behind the last one stands the row of missing values."""
        codes, numbers = self._codes, self._numbers
        count = self._counts[numbers]
        rows = np.full(numbers.size + 1, OUT_OF_VOCABULARY_ROW, np.int32)
        rows[-1] = MISSING_ROW
        kept = np.flatnonzero(count >= self._min_count)
        kept = kept[np.lexsort((codes[kept], -count[kept]))]
        rows[numbers[kept]] = FIRST_VALUE_ROW + np.arange(kept.size)
        values = (
            pa.concat_arrays(self._values).take(pa.array(numbers[kept])) if kept.size else pa.array([], pa.binary())
        )
        names = spelled(codes[kept], values, self._form)
        return GivenColumn(codes[kept], rows[numbers[kept]], names, is_private=True), rows


ColumnVocabulary = HashedColumn | GivenColumn | ValueCounter


def _rows_of(entry: Any, name: str) -> dict[str, int]:
    if isinstance(entry, Mapping):
        rows = dict(entry)
        if any(not isinstance(row, int) or not FIRST_VALUE_ROW <= row < _MOST_ROWS - 1 for row in rows.values()):
            raise ConfigError(
                f"GivenVocabulary: {name}needs rows of {FIRST_VALUE_ROW} or more (0 is out of vocabulary, 1 is missing)"
            )
    elif isinstance(entry, Sequence) and not isinstance(entry, str):
        rows = {value: row for row, value in enumerate(entry, FIRST_VALUE_ROW)}
        if len(rows) < len(entry):
            raise ConfigError(f"GivenVocabulary: {name}holds a value twice")
    else:
        raise ConfigError(f"GivenVocabulary: {name}is neither a list of values nor a mapping from values to rows")
    if not all(isinstance(value, str) for value in rows):
        raise ConfigError(f"GivenVocabulary: {name}holds values that are not text; write them in quotes")
    return rows


def _read_vocabulary(path: Path) -> tuple[Any, bool]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"GivenVocabulary: {path} cannot be read as JSON: {error}") from error
    if isinstance(content, dict) and "features" in content:
        return content["features"], bool(content.get("private", False))
    return content, False
