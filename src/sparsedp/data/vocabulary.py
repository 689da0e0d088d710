"""From a category's code (its hex number, -1 if missing) to its row in a table: hashed, counted or given."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsedp.data.clickparse import CATEGORIES, MISSING_CATEGORY
from sparsedp.errors import ConfigError

# Rows of a counted or given vocabulary that stand for no value of their own.
OUT_OF_VOCABULARY_ROW, MISSING_ROW, FIRST_VALUE_ROW = 0, 1, 2

Values = Sequence[str] | Mapping[str, int]


def mix(h: np.ndarray) -> np.ndarray:
    """The mix of splitmix64, uint64: the same on every machine."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@dataclass(frozen=True)
class HashVocabulary:
    """`buckets` rows per table (one number, or one per feature): row 0 is missing, values share the others.

    row = 1 + mix(code + (feature + 1) golden) mod (buckets - 1), with the mix of splitmix64: the same on
    every machine and in every version. Does not depend on the data.
    """

    buckets: int | Sequence[int] = 100_000
    is_private = False

    def __post_init__(self) -> None:
        if min(self.sizes) < 2 or max(self.sizes) >= 2**31 or len(self.sizes) != CATEGORIES:
            raise ConfigError(
                f"HashVocabulary: buckets must be one number or {CATEGORIES}, each of at least 2 "
                f"(row 0 is for missing values), got {self.buckets!r}"
            )

    @property
    def sizes(self) -> list[int]:
        return [self.buckets] * CATEGORIES if isinstance(self.buckets, int) else [int(b) for b in self.buckets]

    def options(self) -> dict[str, Any]:
        return {"kind": "hash", "buckets": self.sizes}

    def encode(self, codes: np.ndarray) -> np.ndarray:
        """codes int64 [n, 26] -> rows int32 [n, 26]."""
        salt = np.arange(1, CATEGORIES + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        rows = (mix(codes.astype(np.uint64) + salt) % (np.array(self.sizes, np.uint64) - np.uint64(1))).astype(
            np.int32
        ) + 1
        rows[codes == MISSING_CATEGORY] = 0
        return rows


class GivenVocabulary:
    """A vocabulary fixed beforehand. Row 0 is for values it lacks, row 1 for missing ones, the others follow.

    `values`: 26 entries, or a dict from "C1".."C26", or a JSON file with either. An entry is a list of hex
    values, which get the rows 2, 3, ... in that order, or a dict from hex value to row (2 or more; rows may
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
        names = [f"C{j + 1}" for j in range(CATEGORIES)]
        if isinstance(entries, Mapping):
            if set(entries) != set(names):
                raise ConfigError(f"GivenVocabulary: keys C1 to C{CATEGORIES} expected, got {list(entries)[:30]}")
            entries = [entries[name] for name in names]
        if not isinstance(entries, Sequence) or len(entries) != CATEGORIES:
            raise ConfigError(f"GivenVocabulary: a list of {CATEGORIES} features expected")
        pairs = [_codes_and_rows(entry, name) for entry, name in zip(entries, names)]
        self._set(pairs, private)

    def _set(self, pairs: Sequence[tuple[np.ndarray, np.ndarray]], private: bool) -> None:
        self.is_private = private
        self.sizes: list[int] = []
        self._codes: list[np.ndarray] = []
        self._rows: list[np.ndarray] = []
        for codes, rows in pairs:
            # "Missing" is one more value, so that every lookup table has an entry.
            codes = np.concatenate([np.array([MISSING_CATEGORY], np.int64), codes])
            rows = np.concatenate([np.array([MISSING_ROW], np.int32), rows])
            order = np.argsort(codes)
            self._codes.append(codes[order])
            self._rows.append(rows[order])
            self.sizes.append(int(rows.max()) + 1)

    @staticmethod
    def from_arrays(pairs: Sequence[tuple[np.ndarray, np.ndarray]], *, private: bool) -> GivenVocabulary:
        """From distinct codes (int64) and their rows (int32), per feature."""
        vocabulary = GivenVocabulary.__new__(GivenVocabulary)
        vocabulary._set(pairs, private)
        return vocabulary

    def arrays(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Codes, sorted, and their rows, per feature: what `from_arrays` takes."""
        return [(codes[1:], rows[1:]) for codes, rows in zip(self._codes, self._rows)]

    def options(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for codes, rows in zip(self._codes, self._rows):
            digest.update(len(codes).to_bytes(8, "little") + codes.tobytes() + rows.tobytes())
        return {"kind": "given", "digest": digest.hexdigest(), "private": self.is_private}

    def encode(self, codes: np.ndarray) -> np.ndarray:
        """codes int64 [n, 26] -> rows int32 [n, 26]."""
        out = np.empty(codes.shape, np.int32)
        for j, (sorted_codes, rows) in enumerate(zip(self._codes, self._rows)):
            column = np.ascontiguousarray(codes[:, j])
            position = np.minimum(np.searchsorted(sorted_codes, column), sorted_codes.size - 1)
            out[:, j] = np.where(sorted_codes[position] == column, rows[position], OUT_OF_VOCABULARY_ROW)
        return out

    def as_dict(self) -> dict[str, dict[str, int]]:
        """{"C1": {hex value: row, ...}, ...} in the order of the rows."""
        out = {}
        for j, (codes, rows) in enumerate(self.arrays()):
            order = np.argsort(rows, kind="stable")
            out[f"C{j + 1}"] = {f"{codes[i]:08x}": int(rows[i]) for i in order}
        return out

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the JSON file that `GivenVocabulary(path)` reads; it keeps `private`."""
        Path(path).write_text(json.dumps({"private": self.is_private, "features": self.as_dict()}))


@dataclass(frozen=True)
class CountVocabulary:
    """Values seen at least `min_count` times get a row each, the most frequent first (ties by value).

    Row 0 is for all the others, row 1 for missing ones. Such a vocabulary is computed from the data without
    noise: whether a row exists depends on single examples, and no privacy accounting covers that.
    `is_private` says so. It is learned from the whole log, also from what is held out later.
    """

    min_count: int = 10
    is_private = True

    def __post_init__(self) -> None:
        if self.min_count < 1:
            raise ConfigError(f"CountVocabulary: min_count must be at least 1, got {self.min_count}")

    def options(self) -> dict[str, Any]:
        return {"kind": "count", "min_count": self.min_count}

    def counter(self) -> ValueCounter:
        return ValueCounter(self.min_count)


Vocabulary = HashVocabulary | CountVocabulary | GivenVocabulary


class ValueCounter:
    """Counts values while it numbers them in the order of arrival, so that one pass over the file is enough.

    Per feature: the known codes, sorted, the number of each, and the count per number. Memory follows the
    distinct values, not the rows.
    """

    def __init__(self, min_count: int) -> None:
        self._min_count = min_count
        self._codes = [np.empty(0, np.int64) for _ in range(CATEGORIES)]
        self._numbers = [np.empty(0, np.int32) for _ in range(CATEGORIES)]
        self._counts = [np.empty(0, np.int64) for _ in range(CATEGORIES)]

    def encode(self, codes: np.ndarray) -> np.ndarray:
        """codes int64 [n, 26] -> numbers int32 [n, 26], to be mapped to rows by `finish`."""
        out = np.empty(codes.shape, np.int32)
        for j in range(CATEGORIES if len(codes) else 0):
            values, inverse, counts = np.unique(
                np.ascontiguousarray(codes[:, j]), return_inverse=True, return_counts=True
            )
            sorted_codes, numbers = self._codes[j], self._numbers[j]
            position = np.searchsorted(sorted_codes, values)
            new = np.ones(values.size, bool)
            inside = position < sorted_codes.size
            new[inside] = sorted_codes[position[inside]] != values[inside]
            number = np.empty(values.size, np.int32)
            number[~new] = numbers[position[~new]]
            number[new] = sorted_codes.size + np.arange(np.count_nonzero(new))
            if new.any():
                self._codes[j] = np.insert(sorted_codes, position[new], values[new])
                self._numbers[j] = np.insert(numbers, position[new], number[new])
                self._counts[j] = np.concatenate([self._counts[j], np.zeros(np.count_nonzero(new), np.int64)])
            self._counts[j][number] += counts
            out[:, j] = number[inverse]
        return out

    def finish(self) -> tuple[GivenVocabulary, list[np.ndarray]]:
        """The vocabulary, and the map from number to row per feature."""
        pairs, number_to_row = [], []
        for codes, numbers, counts in zip(self._codes, self._numbers, self._counts):
            count = counts[numbers]
            row = np.full(numbers.size, OUT_OF_VOCABULARY_ROW, np.int32)
            kept = np.flatnonzero((count >= self._min_count) & (codes != MISSING_CATEGORY))
            kept = kept[np.lexsort((codes[kept], -count[kept]))]
            row[numbers[kept]] = FIRST_VALUE_ROW + np.arange(kept.size)
            row[numbers[codes == MISSING_CATEGORY]] = MISSING_ROW
            pairs.append((codes[kept], row[numbers[kept]]))
            number_to_row.append(row)
        return GivenVocabulary.from_arrays(pairs, private=True), number_to_row


def _codes_and_rows(entry: Values, name: str) -> tuple[np.ndarray, np.ndarray]:
    if isinstance(entry, Mapping):
        rows = list(entry.values())
        if any(not isinstance(row, int) or not FIRST_VALUE_ROW <= row < 2**31 - 1 for row in rows):
            raise ConfigError(
                f"GivenVocabulary: {name} needs rows of {FIRST_VALUE_ROW} or more "
                f"(0 is out of vocabulary, 1 is missing)"
            )
    else:
        rows = list(range(FIRST_VALUE_ROW, FIRST_VALUE_ROW + len(entry)))
    codes = []
    for value in entry:
        try:
            code = int(value, 16)
        except (TypeError, ValueError):
            code = -1
        if not 0 <= code < 16**15:
            raise ConfigError(f"GivenVocabulary: {name} holds {value!r}, not a hex number of at most 15 digits")
        codes.append(code)
    if len(set(codes)) < len(codes):
        raise ConfigError(f"GivenVocabulary: {name} holds a value twice")
    return np.array(codes, np.int64), np.array(rows, np.int32)


def _read_vocabulary(path: Path) -> tuple[Any, bool]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"GivenVocabulary: {path} cannot be read as JSON: {error}") from error
    if isinstance(content, dict) and "features" in content:
        return content["features"], bool(content.get("private", False))
    return content, False
