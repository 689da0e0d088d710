"""What all peers are given: the model's sizes, its data, its privacy parameters, and the cases for the clip bound.

Needs numpy alone, so that workers in other environments can import it by its file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist

import numpy as np

# How libraries say that there is no memory, in lower case.
OUT_OF_MEMORY = (
    "can't allocate memory", "not enough memory", "out of memory", "cannot allocate memory", "unable to allocate",
    "resource_exhausted", "resource exhausted", "bad_alloc", "memoryerror", "oom when allocating",
    "cannot parse tensor from proto",  # TensorFlow, of a constant that it could not allocate
)  # fmt: skip
BATCHES = 8  # different batches that a worker goes round in, so that rows do not stay in a cache
_EXPONENT = 1.1  # a row is as popular as rank^-1.1
_MULTIPLIER = 2_654_435_761  # prime: spreads popular rows over the table
_BLOCK = 1000  # rows that the table's start values repeat


@dataclass(frozen=True)
class Problem:
    """A table; the rows that an example looks up, side by side; two layers; binary cross-entropy; SGD."""

    rows: int
    dim: int = 64
    ids: int = 8
    hidden: int = 128
    batch: int = 1024
    lr: float = 0.01
    clip: float = 1.0
    noise_multiplier: float = 1.0
    delta: float = 1e-6
    examples: int = 100_000  # in the data set, for accounting
    steps: int = 1000  # that epsilon is stated for
    noise_ratio: float = 5.0  # of map and gradient, for mechanisms that select rows

    @property
    def table_bytes(self) -> int:
        return 4 * self.rows * self.dim

    def block(self) -> np.ndarray:
        """The start values that the table repeats, float32 [at most 1000, dim]."""
        return _normal(1, (min(_BLOCK, self.rows), self.dim), 0.05)

    def fill(self, table: np.ndarray) -> None:
        """Gives a table, float32 [rows, dim], its start values in place: at the largest sizes memory for two is dear."""
        block = self.block()
        for start in range(0, self.rows, len(block)):
            part = table[start : start + len(block)]
            part[:] = block[: len(part)]

    def layers(self) -> dict[str, np.ndarray]:
        """Start values of the layers: weights are [outputs, inputs], as PyTorch has them."""
        inputs = self.ids * self.dim
        return {
            "hidden.weight": _normal(2, (self.hidden, inputs), 1 / sqrt(inputs)),
            "hidden.bias": np.zeros(self.hidden, np.float32),
            "out.weight": _normal(3, (1, self.hidden), 1 / sqrt(self.hidden)),
            "out.bias": np.zeros(1, np.float32),
        }

    def batches(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids, int64 [batch, ids], and targets, float32 [batch]: the same for everyone."""
        generator = np.random.default_rng(4)
        shape = (BATCHES, self.batch, self.ids)
        power = 1 - _EXPONENT
        # The inverse of a continuous law's distribution function: a table of 10^7 probabilities would take long.
        rank = ((self.rows + 1) ** power - 1) * generator.random(shape) + 1
        rank = np.minimum((rank ** (1 / power)).astype(np.int64), self.rows) - 1
        ids = rank * (_MULTIPLIER % self.rows) % self.rows if self.rows > 1 else rank
        targets = generator.integers(2, size=shape[:2]).astype(np.float32)
        return list(zip(ids, targets))

    def threshold(self) -> float:
        """For mechanisms that select rows by noisy counts: about as many untouched rows are selected as are touched."""
        touched = len(np.unique(self.batches()[0][0]))
        deviation = self.noise_multiplier * sqrt(1 + self.noise_ratio**2)
        return deviation * NormalDist().inv_cdf(1 - min(0.5, touched / self.rows))

    def units_at_a_time(self) -> int:
        """For libraries that write every unit's gradient of the table out: what fits into 1 GiB, a divisor of the batch."""
        units = self.batch
        while units > 1 and units * self.table_bytes > 1 << 30:
            units = next(n for n in range(units - 1, 0, -1) if self.batch % n == 0)
        return units


def _normal(seed: int, shape: tuple[int, ...], scale: float) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)
    return drawn * np.float32(scale)


# ---------------------------------------------------------------------- does the clipped sum honour its bound?


@dataclass(frozen=True)
class Case:
    """A tiny model, by its kind, and a bound so small that every unit is clipped.

    - model: the benchmark's own; binary cross-entropy. All others: cross-entropy of the logits.
    - module tie, functional tie: E = emb.weight, h = sum of the E[id], logits = h E^T. The two differ in their spelling.
    - bag: h = sum of the E[id], where ids repeat; logits = h W^T + b.
    - one: the E[id] side by side, logits = h W^T + b; a batch of one unit.
    - positions: as "one", of E[id] + P[position], where the positions' lookup is broadcast over units.
    """

    kind: str
    weights: Mapping[str, np.ndarray]
    ids: np.ndarray  # int64 [units, ids]
    target: np.ndarray  # int64 [units]; float32 for "model"
    clip: float = 0.1


KINDS = ("model", "module tie", "functional tie", "bag", "one", "positions")
_ROWS, _DIM, _LENGTH, _CLASSES, _UNITS = 10, 4, 3, 5, 4
_SCALE = 0.4


def case(kind: str) -> Case:
    units = 1 if kind == "one" else _UNITS
    ids = (np.arange(units)[:, None] * 2 + np.arange(_LENGTH) * 3) % _ROWS
    if kind == "bag":
        ids[:, 1] = ids[:, 0]
    weights = {"emb.weight": _normal(5, (_ROWS, _DIM), _SCALE)}
    target = (np.arange(units) * 3 + 1) % _CLASSES
    if kind == "model":
        weights["hidden.weight"] = _normal(6, (6, _LENGTH * _DIM), _SCALE)
        weights["hidden.bias"] = _normal(7, (6,), _SCALE)
        weights["out.weight"] = _normal(8, (1, 6), _SCALE)
        weights["out.bias"] = _normal(9, (1,), _SCALE)
        return Case(kind, weights, ids, (np.arange(units) % 2).astype(np.float32))
    if kind not in ("module tie", "functional tie"):
        width = _DIM if kind == "bag" else _LENGTH * _DIM
        weights["out.weight"] = _normal(6, (_CLASSES, width), _SCALE)
        weights["out.bias"] = _normal(7, (_CLASSES,), _SCALE)
    if kind == "positions":
        weights["pos.weight"] = _normal(8, (_LENGTH, _DIM), _SCALE)
    return Case(kind, weights, ids, target)
