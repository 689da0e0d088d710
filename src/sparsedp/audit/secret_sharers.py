"""The secret sharer test: exposure of canaries by how often they were inserted.

Carlini et al. 2019; with embedding tables, section 4.1.3 of the EANA paper (Ning et al. 2022), whose numbers of canaries,
repetitions and references are the defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import mannwhitneyu

from sparsedp.audit.exposures import LEAST_REFERENCES, ReferenceFit, exposure, fit_references
from sparsedp.audit.numbers import finite_vector
from sparsedp.errors import SparseDPError

REPETITIONS, CANARIES, REFERENCES = (1, 2, 3, 4, 5, 10, 20, 50, 100), 50, 16_384
# From here on a fitted law's tail is not to be relied on: the largest gap between the law and the references, and the shape
# beyond which its skewness no longer grows, but the law gets an edge, below which exposures are without measure.
_MOST = 10_000_000  # canaries and references: more take too long to make
_POOR_FIT, _EDGE = 0.05, 50.0
_CHANCE = 0.01  # p-value from which on nothing is seen


@dataclass(frozen=True)
class Quartiles:
    low: float
    median: float
    high: float

    @staticmethod
    def of(values: np.ndarray) -> Quartiles:
        return Quartiles(*(float(value) for value in np.quantile(values, [0.25, 0.5, 0.75])))


@dataclass(frozen=True)
class Exposures:
    """Exposure in bits of the canaries with the same number of repetitions."""

    repetitions: int
    canaries: int
    rank: Quartiles
    extrapolated: Quartiles
    p_value: float  # of losses as small as these if they were references' (Mann and Whitney, one-sided)


@dataclass(frozen=True)
class SecretSharer:
    """What the test says of one model. A canary that left no trace has exposure 1 in the median, quartiles 0.4 and 2."""

    references: int
    fit: ReferenceFit
    exposures: tuple[Exposures, ...]  # by ascending repetitions

    @property
    def most(self) -> float:
        """The largest exposure by rank."""
        return math.log2(self.references)

    @property
    def fits_poorly(self) -> bool:
        """Whether extrapolated exposures beyond the references mean nothing."""
        return self.fit.distance > _POOR_FIT or self.fit.shape > _EDGE

    def __str__(self) -> str:
        """One sentence."""
        seen = [entry for entry in self.exposures if entry.p_value < _CHANCE]
        if not seen:
            return "No canary stands out, however often it was inserted."
        first, last = seen[0], self.exposures[-1]
        extrapolated = "" if self.fits_poorly else f", {last.extrapolated.median:.1f} by extrapolation"
        return (
            f"Canaries stand out from {first.repetitions} repetition{'s' * (first.repetitions > 1)} on; with {last.repetitions} "
            f"the median canary has an exposure of {last.rank.median:.1f} of {self.most:.1f} bits by rank{extrapolated}."
        )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fits_poorly": self.fits_poorly}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SecretSharer:
        exposures = [
            Exposures(
                **{**entry, "rank": Quartiles(**entry["rank"]), "extrapolated": Quartiles(**entry["extrapolated"])}
            )
            for entry in values["exposures"]
        ]
        return SecretSharer(values["references"], ReferenceFit(**values["fit"]), tuple(exposures))


def planned_repetitions(
    repetitions: Sequence[int] = REPETITIONS, canaries: int = CANARIES, references: int = REFERENCES
) -> tuple[int, ...]:
    """How often each canary is inserted: `canaries` of each number of repetitions, and `references` of 0."""
    if not repetitions or min(repetitions) < 1 or len(set(repetitions)) < len(repetitions):
        raise SparseDPError(f"Repetitions must be different whole numbers from 1 on, not {list(repetitions)}.")
    if canaries < 1:
        raise SparseDPError(f"There must be at least one canary for each number of repetitions, not {canaries}.")
    if references < LEAST_REFERENCES:
        raise SparseDPError(f"There must be at least {LEAST_REFERENCES} references to compare with, not {references}.")
    together = canaries * len(repetitions) + references
    if together > _MOST:
        raise SparseDPError(
            f"{together:,} canaries and references are too many to be made one by one: at most {_MOST:,} in all."
        )
    return tuple(np.repeat([*repetitions, 0], [*[canaries] * len(repetitions), references]).tolist())


def secret_sharer(losses: Any, repetitions: Any) -> SecretSharer:
    """From the loss of each canary (n,) and how often it was inserted (n,); those with 0 are the references."""
    values, counts = finite_vector("losses of canaries", losses), np.asarray(repetitions)
    if counts.shape != values.shape:
        raise SparseDPError(
            f"There are {len(values)} losses and {len(counts)} numbers of repetitions: give one for each."
        )
    references, inserted = values[counts == 0], counts > 0
    if not inserted.any() or not len(references):
        raise SparseDPError(
            f"Of {len(values)} canaries {int(inserted.sum())} were inserted: some must be, and some not."
        )
    fit = fit_references(references)
    by_rank = exposure(values, references)
    extrapolated = fit.exposure(values[inserted])
    exposures = [
        Exposures(
            repetitions=count,
            canaries=int((counts == count).sum()),
            rank=Quartiles.of(by_rank[counts == count]),
            extrapolated=Quartiles.of(extrapolated[counts[inserted] == count]),
            p_value=float(mannwhitneyu(values[counts == count], references, alternative="less").pvalue),
        )
        for count in np.unique(counts[inserted]).tolist()
    ]
    return SecretSharer(len(references), fit, tuple(exposures))
