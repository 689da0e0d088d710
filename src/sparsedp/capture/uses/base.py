"""What every kind of use answers, and what the kinds have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.kernels.loops import squared_rows


class Use(ABC):
    """What one use of a parameter W contributes to the gradient of each of B units, in factored form.

    A parameter's gradient is the sum of its uses: `ParameterUses`. Inner products of two uses are in `inner.py`.
    """

    @property
    @abstractmethod
    def like(self) -> Tensor:
        """A tensor of the gradient's type and device."""

    @property
    @abstractmethod
    def can_cancel(self) -> bool:
        """Whether terms of one unit are added up, so that large ones may cancel."""

    def uncertainty(self) -> float:
        """A bound for the rounding error of `squared_norms`, in eps times the square of `reach`.

        0 for what is added up in float64, or written out.
        """
        return 0.0

    @abstractmethod
    def squared_norms(self, units: int, row_norms: RowNorms) -> Tensor:
        """The squared norm of each unit's gradient, (B,)."""

    @abstractmethod
    def reach(self, units: int, row_norms: RowNorms) -> Tensor:
        """The sum of the norms of each unit's terms, (B,): what rounding errors are proportional to."""

    @abstractmethod
    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum over units of factor times gradient to `out`, W with all its elements in one dimension."""

    def add_weighted_rows(self, out: Tensor, rows: Tensor, factors: Tensor, shape: torch.Size) -> None:
        """As `add_weighted_sum`, of some rows (ascending) of W alone, into `out` (rows, ...). `shape` is W's."""
        total = out.new_zeros(shape)
        self.add_weighted_sum(total.view(-1), factors)
        out.add_(total[rows])

    @abstractmethod
    def restricted(self, rows: Tensor, width: int) -> Use:
        """The same with zeros outside of `rows` (ascending) of W, whose rows have `width` elements."""

    @abstractmethod
    def regrouped(self, bucket: Bucket) -> Use:
        """The use by the units of a bucket, numbered from 0, of a use whose units are examples."""


class RowNorms:
    """Squared row norms by tensor, so that none is read twice. For tensors that stay as they are meanwhile."""

    def __init__(self) -> None:
        # With the tensor itself: its memory must not be used for another one that would pass for it.
        self._squares: dict[tuple, tuple[Tensor, Tensor]] = {}

    def squared(self, x: Tensor) -> Tensor:
        """(...,) for x (..., d), float64."""
        key = (x.data_ptr(), x.shape, x.stride())
        if key not in self._squares:
            self._squares[key] = (x, squared_rows(x))
        return self._squares[key][1]


@dataclass(frozen=True)
class Bucket:
    """Units that have between c / 2 and c examples, c a power of two."""

    units: Tensor  # (U,)
    places: Tensor  # (U, c): the examples of each; where there are fewer, its first one again
    missing: Tensor | None  # (U, c) bool: these again; None if there are none
    numbers: Tensor  # (examples,): the place of each example's unit in `units`; -1 if it is not there

    def padded(self, values: Tensor) -> Tensor:
        """The rows of `values` (examples, ...) as (U, c, ...), zeros where there are no examples."""
        examples = values[self.places]
        if self.missing is not None:
            examples[self.missing] = 0
        return examples


def slack(uses: Sequence[Use]) -> float:
    """What the squared sum of the terms' norms is multiplied by; see `ParameterUses.squared_norms`."""
    return (16 + max(use.uncertainty() for use in uses)) * torch.finfo(uses[0].like.dtype).eps


def sum_by_unit(values: Tensor, units: Tensor, count: int) -> Tensor:
    """Sums of `values` (N,) over equal `units` (N,): (count,)."""
    return values.new_zeros(count).index_add_(0, units, values)


def places_among(rows: Tensor, wanted: Tensor) -> Tensor:
    """The place of each of `wanted` (any shape and order) among `rows`, ascending; -1 if it is not there."""
    if rows.numel() == 0:
        return torch.full_like(wanted, -1)
    at = torch.searchsorted(rows, wanted.contiguous()).clamp_max(rows.numel() - 1)
    return at.masked_fill(rows[at] != wanted, -1)


def not_among(rows: Tensor, first: int, last: int) -> Tensor:
    """Which of the rows from `first` to before `last` are not among `rows`, ascending: bool (last - first,)."""
    return places_among(rows, torch.arange(first, last, device=rows.device)) < 0
