"""Titles of items as features: their words (unigrams) and pairs of neighbouring words (bigrams), hashed to rows of a table."""

from __future__ import annotations

import csv
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from sparsedp.data.codes import mix
from sparsedp.data.sequencefiles import ITEM_COLUMNS, column_name, open_text
from sparsedp.errors import DataError

_MOST_WORDS = 16  # of a title that are looked at


def read_titles(path: str | os.PathLike[str]) -> dict[str, str]:
    """{item: title} of a plain or gzipped csv file, whose header names a column of items and one `title`."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    with open_text(path) as lines:
        rows = csv.reader(lines)
        header = [column_name(name) for name in next(rows, [])]
        item = next((i for i, name in enumerate(header) if name in ITEM_COLUMNS), None)
        title = next((i for i, name in enumerate(header) if name == "title"), None)
        if item is None or title is None:
            raise DataError(f"{path}, line 1: expected a header with a column {ITEM_COLUMNS[0]} and a column title")
        titles = {}
        for row in rows:
            if len(row) != len(header):
                problem = f"{len(row)} fields where the header has {len(header)}"
                raise DataError(f"{path}, line {rows.line_num}: {problem}")
            titles[row[item].strip()] = row[title]
        return titles


def title_words(titles: Mapping[str, str], item_names: Sequence[str]) -> np.ndarray:
    """The words of each item's title as codes, int64 [items + 1, longest], zeros behind; row 0, padding's, has none.

    Words are runs of letters and digits, in lower case. A code is a hash of the word, so that it depends on no other title.
    """
    split = [re.findall(r"\w+", titles.get(name, "").lower())[:_MOST_WORDS] for name in item_names]
    if not any(split):
        raise DataError(f"none of the {len(item_names)} items has a title")
    codes = {word: _code(word) for words in split for word in words}
    out = np.zeros((len(item_names) + 1, max(map(len, split))), np.int64)
    for item, words in enumerate(split, 1):
        out[item, : len(words)] = [codes[word] for word in words]
    return out


def title_rows(words: np.ndarray, feature: str, buckets: int) -> np.ndarray:
    """Rows 1 to `buckets` of a title's words ("unigrams") or pairs of words ("bigrams"), int64; 0 where there is none.

    `words` is [items + 1, n], 0 where a title is shorter. Bigrams are [items + 1, max(1, n - 1)].
    """
    if feature == "unigrams":
        return np.where(words == 0, 0, 1 + _mixed(words.astype(np.uint64), 1) % np.uint64(buckets)).astype(np.int64)
    if words.shape[1] < 2:
        return np.zeros((len(words), 1), np.int64)
    first, second = words[:, :-1].astype(np.uint64), words[:, 1:].astype(np.uint64)
    rows = 1 + _mixed(_mixed(first, 2) + second, 3) % np.uint64(buckets)
    return np.where(words[:, 1:] == 0, 0, rows).astype(np.int64)


def _code(word: str) -> int:
    """From 1 to 2^62."""
    return 1 + (int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "big") >> 2)


def _mixed(codes: np.ndarray, salt: int) -> np.ndarray:
    return mix(codes + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64))
