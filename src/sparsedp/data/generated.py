"""Click logs from a planted model: Criteo's shape and skew, without Criteo's data."""

from __future__ import annotations

import gzip
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
from scipy.special import expit, ndtri

from sparsedp.data.clicklog import CATEGORIES, COLUMNS, CRITEO_VOCABULARY, INTEGERS
from sparsedp.data.codes import MISSING
from sparsedp.data.metrics import auc
from sparsedp.data.table import TableDataset
from sparsedp.data.tablecolumns import MISSING_INTEGER
from sparsedp.errors import ConfigError

PLANTED_AUC = 0.80
# Shares of the variance of the planted logit.
_FROM_CATEGORIES, _FROM_PAIRS, _FROM_INTEGERS = 0.7, 0.1, 0.2
_PAIRS = ((0, 4), (1, 13), (7, 19), (5, 16))  # small and middle-sized features, so that pairs recur
# Of Criteo's integers: share missing, and the largest value.
_MISSING = (0.45, 0.0, 0.21, 0.21, 0.03, 0.22, 0.04, 0.001, 0.04, 0.45, 0.04, 0.77, 0.21)
_LARGEST = (425, 10255, 65535, 349, 2071071, 111105, 6498, 1689, 9465, 7, 123, 193, 1574)


class GeneratedClickLog(TableDataset):
    """A click log in memory that knows the model its clicks were drawn from."""

    def __init__(
        self,
        integers: np.ndarray,
        categories: np.ndarray,
        labels: np.ndarray,
        periods: np.ndarray | None,
        vocabulary_sizes: Sequence[int],
        logits: np.ndarray,
        users: np.ndarray | None = None,
    ) -> None:
        super().__init__(integers, categories, labels, periods, vocabulary_sizes, users=users)
        self._logits = logits

    @property
    def planted_logits(self) -> np.ndarray:
        """float64 [n]: the log-odds of a click under the planted model."""
        return self._view(self._logits)

    @property
    def planted_auc(self) -> float:
        """The AUC of the true probabilities: what no model can beat but by luck."""
        return auc(self.labels, self.planted_logits)


def generated_click_log(
    rows: int,
    *,
    seed: int = 0,
    scale: float = 1.0,
    vocabulary_sizes: Sequence[int] | None = None,
    skew: float = 1.1,
    days: int = 1,
    drift: float = 0.0,
    click_rate: float = 0.25,
    users: int | None = None,
) -> GeneratedClickLog:
    """`rows` clicks in order of time, the same for the same arguments.

    Tables have `vocabulary_sizes` (Criteo's, unless given) times `scale` rows, at least 3. A value's
    popularity is rank^-skew. The planted logit is a sum of one effect per value (70 % of its variance), of
    products of two values' effects (10 %) and of the integers (20 %), scaled so that its AUC is about 0.80 at
    `click_rate`.
    From one day to the next a share `drift` of the values change places in popularity, and effects become
    sqrt(1 - drift^2) old + drift new. With days > 1 the periods are the days.
    With `users`, each row belongs to one of so many, whose activity is log-normal; what they click does not depend on it.
    """
    sizes = [max(3, round(size * scale)) for size in vocabulary_sizes or CRITEO_VOCABULARY]
    if len(sizes) != CATEGORIES:
        raise ConfigError(f"generated_click_log: {CATEGORIES} vocabulary sizes expected, got {len(sizes)}")
    if rows < 1 or not 1 <= days <= rows:
        raise ConfigError(f"generated_click_log: at least one row a day, got rows={rows}, days={days}")
    if not 0 <= drift <= 1 or not 0 < click_rate < 1 or skew < 0 or scale <= 0:
        raise ConfigError(
            "generated_click_log: expected drift in [0, 1], click_rate in (0, 1), skew >= 0 and scale > 0, "
            f"got drift={drift}, click_rate={click_rate}, skew={skew}, scale={scale}"
        )
    if users is not None and users < 1:
        raise ConfigError(f"generated_click_log: at least one user, got users={users}")
    starts = [rows * day // days for day in range(days + 1)]
    # A generator per purpose, so that one feature's size does not change the others' draws.
    *feature_seeds, weight_seed, integer_seed, label_seed, user_seed = np.random.SeedSequence(seed).spawn(
        CATEGORIES + 4
    )

    weights = np.random.default_rng(weight_seed).uniform(0.5, 1.5, CATEGORIES)
    weights *= np.sqrt(_FROM_CATEGORIES / np.square(weights).sum())
    paired = {feature for pair in _PAIRS for feature in pair}
    factors = {feature: np.empty(rows) for feature in paired}
    score = np.zeros(rows)
    categories = np.empty((rows, CATEGORIES), np.int32)
    for j, size in enumerate(sizes):
        rng = np.random.default_rng(feature_seeds[j])
        popularity = np.arange(1, size + 1) ** -float(skew)
        popularity /= popularity.sum()
        cumulated = np.cumsum(popularity)
        by_rank = rng.permutation(size)  # the value at each rank of popularity
        effects = rng.standard_normal((2, size))  # own effect, and the factor in a pair
        for day in range(days):
            if day and drift:
                moving = rng.choice(size, round(drift * size), replace=False)
                by_rank[moving] = by_rank[rng.permutation(moving)]
                effects = np.sqrt(1 - drift**2) * effects + drift * rng.standard_normal((2, size))
            effects[:, by_rank] = _standardised(effects[:, by_rank], popularity)
            now = slice(starts[day], starts[day + 1])
            ranks = np.searchsorted(cumulated, rng.random(now.stop - now.start), side="right")
            values = by_rank[np.minimum(ranks, size - 1)]  # rounding may leave cumulated[-1] below 1
            categories[now, j] = values
            score[now] += weights[j] * effects[0, values]
            if j in paired:
                factors[j][now] = effects[1, values]
    for first, second in _PAIRS:
        score += np.sqrt(_FROM_PAIRS / len(_PAIRS)) * factors[first] * factors[second]

    integers, from_integers = _integers(rows, np.random.default_rng(integer_seed))
    score += np.sqrt(_FROM_INTEGERS) * from_integers
    slope, intercept = _calibrated(click_rate)
    logits = slope * score + intercept
    labels = (np.random.default_rng(label_seed).random(rows) < expit(logits)).astype(np.uint8)
    periods = np.repeat(np.arange(days, dtype=np.int32), np.diff(starts)) if days > 1 else None
    owners = None if users is None else _owners(rows, users, np.random.default_rng(user_seed))
    return GeneratedClickLog(integers, categories, labels, periods, sizes, logits, owners)


def _owners(rows: int, users: int, rng: np.random.Generator) -> np.ndarray:
    """A user for each row, int64 [rows]."""
    activity = rng.lognormal(size=users)
    return rng.choice(users, rows, p=activity / activity.sum())


def _standardised(effects: np.ndarray, popularity: np.ndarray) -> np.ndarray:
    """Mean 0 and variance 1 over the popularity."""
    effects = effects - (effects @ popularity)[:, None]
    return effects / np.sqrt(np.square(effects) @ popularity)[:, None]


def _integers(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Log-normal integers with gaps, int32 [rows, 13], and their effect, of variance about 1, [rows]."""
    weights = rng.uniform(0.5, 1.5, INTEGERS) * rng.choice([-1.0, 1.0], INTEGERS)
    weights /= np.sqrt(np.square(weights).sum())
    integers = np.empty((rows, INTEGERS), np.int32)
    effect = np.zeros(rows)
    for k, (missing, largest) in enumerate(zip(_MISSING, _LARGEST)):
        z = rng.standard_normal(rows)
        # A quarter of the way to the largest value, in logarithms, is the median; the largest is four sigmas.
        centre = np.log(largest) / 4
        values = np.floor(np.exp(centre + z * (np.log(largest) - centre) / 4)).clip(max=largest)
        if k == 1:
            values -= 2  # Criteo's I2 starts at -2
        gone = rng.random(rows) < missing
        integers[:, k] = np.where(gone, MISSING_INTEGER, values)
        effect += weights[k] * np.where(gone, -1.0, z)
    return integers, effect


def _calibrated(click_rate: float) -> tuple[float, float]:
    """Slope and intercept of the logit for which a standard normal score has AUC 0.80 and the click rate."""
    score = ndtri((np.arange(2000) + 0.5) / 2000)

    def intercept(slope: float) -> float:
        low, high = -100.0, 100.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if expit(slope * score + middle).mean() < click_rate else (low, middle)
        return (low + high) / 2

    low, high = 0.0, 20.0
    for _ in range(40):
        slope = (low + high) / 2
        p = expit(slope * score + intercept(slope))
        expected = p @ (np.cumsum(1 - p) - (1 - p) / 2) / (p.sum() * (1 - p).sum())
        low, high = (slope, high) if expected < PLANTED_AUC else (low, slope)
    return slope, intercept(slope)


def write_click_log(
    log: GeneratedClickLog,
    path: str | os.PathLike[str],
    *,
    separator: str = "\t",
    header: bool = False,
) -> list[Path]:
    """Writes a log in Criteo's text format, gzipped if `path` ends in .gz; returns the files.

    A log with days becomes one file per day: `path` then holds `{day}`, as in `day_{day}.tsv.gz`. Value v of
    a feature is written as `category_code(feature, v)`. Users need a `header`, and become its last column, `user`.
    """
    columns = np.arange(CATEGORIES)
    if log._users is not None and not header:
        raise ConfigError("write_click_log: the log has users, which can only be written with header=True")
    if log.periods is None:
        parts = [(Path(path), np.arange(len(log)))]
    elif "{day}" not in os.fspath(path):
        raise ConfigError(f"write_click_log: the log has days, so that {os.fspath(path)!r} must hold {{day}}")
    else:
        days = np.unique(log.periods).tolist()
        parts = [(Path(os.fspath(path).replace("{day}", str(d))), np.flatnonzero(log.periods == d)) for d in days]
    for file, where in parts:
        rows = where if log._indices is None else log._indices[where]
        codes = category_code(columns, log._categories[rows].astype(np.int64))
        users = None if log._users is None else log._users[rows]
        write_rows(file, log._labels[rows], log._numbers[rows], codes, separator=separator, header=header, users=users)
    return [file for file, _ in parts]


def category_code(feature: int | np.ndarray, value: np.ndarray) -> np.ndarray:
    """A 32-bit code that looks as random as Criteo's: (value * odd + feature * odd') mod 2^32, one to one."""
    return (value * 2654435761 + (np.asarray(feature) + 1) * 2246822519) % 2**32


def write_rows(
    path: str | os.PathLike[str],
    labels: np.ndarray,
    integers: np.ndarray,
    codes: np.ndarray,
    *,
    separator: str = "\t",
    header: bool = False,
    users: np.ndarray | None = None,
) -> None:
    """Writes labels [n], integers [n, 13], category codes [n, 26] and users [n] as text; a missing one is left empty."""
    with open(path, "wb") as file:
        # No time in the gzip header: the same log gives the same bytes.
        zipped = os.fspath(path).endswith(".gz")
        stream: IO[bytes] = gzip.GzipFile("", "wb", 6, file, mtime=0) if zipped else file  # type: ignore[assignment]
        if header:
            names = COLUMNS if users is None else [*COLUMNS, "user"]
            stream.write((separator.join(names) + "\n").encode())
        for begin in range(0, len(labels), 1 << 16):
            piece = slice(begin, begin + (1 << 16))
            texts = [
                list(map(str, labels[piece].tolist())),
                *(_texts(column, MISSING_INTEGER, "d") for column in integers[piece].T),
                *(_texts(column, MISSING, "08x") for column in codes[piece].T),
                *([] if users is None else [list(map(str, users[piece].tolist()))]),
            ]
            stream.write("".join(separator.join(row) + "\n" for row in zip(*texts)).encode())
        if zipped:
            stream.close()


def _texts(column: np.ndarray, missing: int, form: str) -> list[str]:
    values, inverse = np.unique(column, return_inverse=True)
    texts = ["" if value == missing else format(value, form) for value in values.tolist()]
    return [texts[i] for i in inverse.tolist()]
