"""Sparse rows and labels for linear models: SST-2 as a bag of words, Criteo's sample hashed one-hot, and generated rows."""

from __future__ import annotations

import csv
import gzip
import math
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.sparse import csr_array

from sparsedp.convex.rows import RowBounds
from sparsedp.errors import DataError

WORDS, CATEGORIES = 1 << 14, 1 << 19  # columns that words, and values of categories, are hashed to


@dataclass(frozen=True)
class Labelled:
    """Rows, all of l2 norm at most 1, and labels 0 and 1."""

    train: csr_array
    labels: np.ndarray
    valid: csr_array  # taken to be public: hyperparameters may be chosen on it
    valid_labels: np.ndarray
    test: csr_array
    test_labels: np.ndarray


def load(name: str) -> Labelled:
    """The data set of that name: "sst2", "criteo" or "generated"."""
    return {"sst2": _sst2, "criteo": _criteo, "generated": _generated}[name]()


def _file(name: str) -> Path:
    folder = os.environ.get("SPARSEDP_DATA")
    if not folder or not (Path(folder) / name).exists():
        raise DataError(f"It is looked for in $SPARSEDP_DATA/{name}, which is not there.")
    return Path(folder) / name


def _sst2() -> Labelled:
    """Which words a sentence has; the training, the development and the test split."""

    def read(split: str) -> tuple[csr_array, np.ndarray]:
        with gzip.open(_file(f"sst2/{split}.tsv.gz"), "rt", encoding="utf-8") as file:
            next(file)
            lines = [line.rstrip("\n").rsplit("\t", 1) for line in file]
        rows = _hashed((sentence.split() for sentence, _ in lines), WORDS)
        return rows, np.array([int(label) for _, label in lines])

    return Labelled(*read("train"), *read("dev"), *read("test"))


def _criteo() -> Labelled:
    """The 39 features of an impression, counts by the square of their logarithm; split by time, six, one and one parts."""
    with gzip.open(_file("criteo/kaggle_sample_137k.csv.gz"), "rt", encoding="utf-8") as file:
        records = list(csv.reader(file))[1:]

    def features(record: list[str]) -> Iterable[str]:
        for place, value in enumerate(record[2:]):
            number = place < 13 and value != ""
            yield f"{place}={int(math.log1p(max(int(value), 0)) ** 2) if number else value}"

    rows = _hashed((features(record) for record in records), CATEGORIES)
    labels = np.array([int(record[1]) for record in records])
    block = np.array([int(record[0]) for record in records])  # of 83 in time order
    return _split(rows, labels, [block < 60, (block >= 60) & (block < 71), block >= 71])


def _generated(n: int = 50_000, d: int = 10_000, nonzeros: int = 10) -> Labelled:
    """Popular columns decide: column j is drawn with weight 1 / (j + 1), and has a weight of its own."""
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, d + 1)
    columns = rng.choice(d, (n, nonzeros), p=share / share.sum())
    weights = rng.standard_normal(d)
    rows = _hashed((map(str, row) for row in columns), d)
    margins = 8 * weights[columns].sum(axis=1) / nonzeros
    labels = (rng.random(n) < 1 / (1 + np.exp(-margins))).astype(int)
    fifth = np.arange(n) * 5 // n
    return _split(rows, labels, [fifth <= 2, fifth == 3, fifth == 4])


def _split(rows: csr_array, labels: np.ndarray, parts: list[np.ndarray]) -> Labelled:
    train, valid, test = ((csr_array(rows[part]), labels[part]) for part in parts)
    return Labelled(*train, *valid, *test)


def _hashed(texts: Iterable[Iterable[str]], columns: int) -> csr_array:
    """A one for each text of a row, scaled to norm 1 at most."""
    places, ends = [], [0]
    for row in texts:
        places += sorted({zlib.crc32(text.encode()) % columns for text in row})
        ends.append(len(places))
    rows = csr_array((np.ones(len(places)), np.array(places), np.array(ends)), shape=(len(ends) - 1, columns))
    RowBounds(1.0, math.sqrt(columns)).clip(rows)
    return rows
