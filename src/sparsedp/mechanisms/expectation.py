"""What a mechanism is asked when a step is predicted: how often rows are touched, and what it will select of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import xlog1py


@dataclass(frozen=True)
class RowCounts:
    """Groups of rows that are touched alike, and how many units of a batch will touch each.

    A row of group g meets n ~ Binomial(counts[g], rate) units of a batch; n is about Poisson if counts are not `exact`.
    """

    counts: np.ndarray  # units that touch a row of the group
    weights: np.ndarray  # what each of these units adds to a map of rows, on average
    chosen: np.ndarray  # whether the rows may be selected, as far as was decided ahead of the steps
    rate: float  # the probability that a unit is in a batch
    exact: bool
    size: float  # rows of all tables

    @cached_property
    def mean(self) -> np.ndarray:
        """Units of a batch that touch a row, on average."""
        return self.counts * self.rate

    @cached_property
    def absent(self) -> np.ndarray:
        """The probability that no unit of a batch touches a row."""
        return np.exp(xlog1py(self.counts, -self.rate)) if self.exact else np.exp(-self.mean)

    def all_chosen(self, chance: float = 1.0) -> Expected:
        """What is expected if each row that may be selected is, with probability `chance`, whoever touches it."""
        each = self.chosen * chance
        return Expected(each, each * self.absent, each * self.mean)


@dataclass(frozen=True)
class Expected:
    """What is expected of a row of each group."""

    selected: np.ndarray  # the probability that it is selected
    false: np.ndarray  # the probability that it is selected and no unit touches it
    kept: np.ndarray  # how many units touch it and find it selected, on average
