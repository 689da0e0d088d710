"""Rows of a table that are looked up, and row-sparse sums of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.uses.base import Bucket, RowNorms, Use, places_among, sum_by_unit
from sparsedp.errors import SparseDPError
from sparsedp.kernels.loops import distinct_with_places, group, squared_rows, squared_sums


class RowSparse(NamedTuple):
    """Some rows of a table: `rows` (n,) distinct and ascending, `values` (n, dim)."""

    rows: Tensor
    values: Tensor


@dataclass
class Lookup(Use):
    """Rows of W, each with an output gradient.

    Unit b's gradient is the sum over its positions n of weight[n] * grad[source[n]] at row ids[n].
    """

    ids: Tensor  # (N,) rows of the table; -1 for a position without gradient (padding)
    units: Tensor  # (N,) the unit of each position
    grad: Tensor  # (M, d)
    source: Tensor | None = None  # (N,) row of `grad` for each position; None: position n has grad[n]
    weight: Tensor | None = None  # (N,) factor of each position; None: 1
    one_each: bool = False  # position n belongs to unit n, and N is the number of units

    def __post_init__(self) -> None:
        """Compiled loops trust these lengths."""
        if self.ids.dtype != torch.int64 or self.units.dtype != torch.int64:
            raise SparseDPError(f"A lookup has int64 ids and units, not {self.ids.dtype} and {self.units.dtype}.")
        (count,) = self.grad.shape[:1] if self.source is None else self.source.shape
        expected = torch.Size([count])
        if not self.ids.shape == self.units.shape == expected or not (
            self.weight is None or self.weight.shape == expected
        ):
            raise SparseDPError(
                f"A lookup has a unit, a gradient and a weight for each of its ids, but {len(self.ids)} ids came with "
                f"{len(self.units)} units, {count} gradients and {count if self.weight is None else len(self.weight)} weights."
            )

    @staticmethod
    def merged(lookups: list[Lookup]) -> list[Lookup]:
        """All lookups as one, with all their positions."""
        if len(lookups) < 2:
            return lookups
        return [
            Lookup(
                ids=torch.cat([lookup.ids for lookup in lookups]),
                units=torch.cat([lookup.units for lookup in lookups]),
                grad=torch.cat([lookup.positions() for lookup in lookups]),
            )
        ]

    def plus(self, other: Lookup) -> Lookup | None:
        """Both as one if they look up the same rows at the same positions, as each layer does in a relative position bias.

        The gradients are added up as autograd adds up those of a tensor that is used twice. None if they do not fit.
        """
        alike = self.grad.shape == other.grad.shape and self.grad.dtype == other.grad.dtype
        if not alike or not all(part is None for part in (self.source, self.weight, other.source, other.weight)):
            return None
        if not torch.equal(self.ids, other.ids) or not torch.equal(self.units, other.units):
            return None
        return Lookup(self.ids, self.units, self.grad + other.grad, one_each=self.one_each and other.one_each)

    @property
    def like(self) -> Tensor:
        return self.grad

    @property
    def can_cancel(self) -> bool:
        return not self.one_each

    def positions(self) -> Tensor:
        """The gradient of each position, (N, d)."""
        values = self.grad if self.source is None else self.grad[self.source]
        return values if self.weight is None else values * self.weight[:, None]

    def squares(self, row_norms: RowNorms) -> Tensor:
        """The squared norm of each position's gradient, (N,), float64."""
        squares = row_norms.squared(self.grad)
        squares = squares if self.source is None else squares[self.source]
        return squares if self.weight is None else squares * self.weight.double().square()

    def squared_norms(self, units: int, row_norms: RowNorms) -> Tensor:
        """In float64. What a unit adds to one row is added up first."""
        if self.one_each:
            return row_norms.squared(self.grad).masked_fill(self.ids < 0, 0)
        width = (int(self.ids.max()) if self.ids.numel() else 0) + 2
        keys, begin, order = group(self.units * width + (self.ids + 1))
        key_units, key_rows = keys // width, keys % width - 1  # padding is row -1, which is left out
        if self.source is not None and self.source is self.units and self.grad.shape[0] == units:
            # One bag per unit: every row gets a multiple of the same gradient, so only the multiples are added up.
            multiples = self.grad.new_ones(self.ids.shape) if self.weight is None else self.weight
            squares = squared_sums(begin[:-1], begin[1:], order, 0, multiples[:, None], None, None)
            return sum_by_unit(squares.masked_fill_(key_rows < 0, 0), key_units, units) * squared_rows(self.grad)
        squares = squared_sums(begin[:-1], begin[1:], order, 0, self.grad, self.source, self.weight)
        return sum_by_unit(squares.masked_fill_(key_rows < 0, 0), key_units, units)

    def reach(self, units: int, row_norms: RowNorms) -> Tensor:
        norms = row_norms.squared(self.grad).sqrt()
        norms = norms if self.source is None else norms[self.source]
        norms = norms if self.weight is None else norms * self.weight.abs().double()
        return sum_by_unit(norms.masked_fill(self.ids < 0, 0), self.units, units)

    def weighted_rows(self, factors: Tensor) -> RowSparse:
        """The sum over units of factor times gradient."""
        scale = factors if self.one_each else factors[self.units]
        if self.weight is not None:
            scale = scale * self.weight
        values = self.grad if self.source is None else self.grad[self.source]
        return sum_rows(self.ids, values * scale[:, None].to(values.dtype))

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        rows, values = self.weighted_rows(factors)
        out.view(-1, values.shape[1]).index_add_(0, rows, values)

    def add_weighted_rows(self, out: Tensor, rows: Tensor, factors: Tensor, shape: torch.Size) -> None:
        found, values = self.weighted_rows(factors)
        at = places_among(rows, found)
        out.view(len(rows), -1).index_add_(0, at[at >= 0], values[at >= 0])

    def restricted(self, rows: Tensor, width: int) -> Lookup:
        ids = self.ids.masked_fill(places_among(rows, self.ids) < 0, -1)
        return Lookup(ids, self.units, self.grad, self.source, self.weight, self.one_each)

    def regrouped(self, bucket: Bucket) -> Lookup:
        """The positions of the bucket's units. Never `one_each`, and `source` is not `units`."""
        units = bucket.numbers[self.units]
        inside = (units >= 0).nonzero().squeeze(1)
        source = inside if self.source is None else self.source[inside]
        weight = None if self.weight is None else self.weight[inside]
        return Lookup(self.ids[inside], units[inside], self.grad, source, weight)

    def of_owners(self, owners: Tensor) -> Lookup:
        """The same positions, each of the owner of its unit: `owners` (B,)."""
        return Lookup(self.ids, owners[self.units], self.grad, self.source, self.weight)

    def of_unit(self, unit: int) -> Lookup:
        """The positions of one unit, which becomes number 0."""
        at = (self.units == unit).nonzero().squeeze(1)
        source = at if self.source is None else self.source[at]
        weight = None if self.weight is None else self.weight[at]
        return Lookup(self.ids[at], torch.zeros_like(at), self.grad, source, weight)

    def touched(self) -> tuple[Tensor, Tensor]:
        """The distinct (unit, row) pairs: two tensors of equal length, sorted by unit, then row."""
        used = self.ids >= 0
        ids, units = self.ids[used], self.units[used]
        if self.one_each:
            return units, ids
        width = int(ids.max()) + 1 if ids.numel() else 1
        keys = torch.unique(units * width + ids)
        return keys // width, keys % width


def sum_rows(ids: Tensor, values: Tensor) -> RowSparse:
    """Sums `values` (n, d) over equal ids; negative ids are dropped."""
    rows, inverse = distinct_with_places(ids + 1)
    rows -= 1
    exact = values.to(_sum_dtype(values.dtype, ids.numel(), rows.numel()))
    sums = exact.new_zeros(rows.numel(), values.shape[1]).index_add_(0, inverse, exact).to(values.dtype)
    if rows.numel() and int(rows[0]) < 0:
        return RowSparse(rows[1:], sums[1:])
    return RowSparse(rows, sums)


def _sum_dtype(dtype: torch.dtype, terms: int, sums: int) -> torch.dtype:
    """float64 for long sums: in float32 they would lose more than a ten-thousandth of a single unit's part."""
    return torch.float64 if terms > 8 * max(sums, 1) else dtype
