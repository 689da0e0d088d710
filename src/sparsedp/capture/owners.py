"""Norms of units that have several examples each: users.

Uses keep the examples of a batch apart, on an axis of their own. A weighted sum over units is one over examples, each with
its unit's factor. A norm is not: that of a unit is the norm of the sum of its examples' gradients. So the examples of
a unit become positions of it, as if the unit were one long example, and `ParameterUses` does the rest:

- `Linear` (examples, P, I): units with about equally many examples together, (units, c P, I), zeros where there are fewer
- `Softmax` (examples, P, d): likewise
- `Built` (examples, n): added up, (units, n)
- `Lookup`: the positions stay as they are and get another unit
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsedp.capture.uses import Built, Linear, Lookup, ParameterUses, Use, slack
from sparsedp.kernels.loops import squared_rows


@dataclass(frozen=True)
class Bucket:
    """Units that have between c / 2 and c examples, c a power of two."""

    units: Tensor  # (U,)
    places: Tensor  # (U, c): the examples of each; where there are fewer, its first one again
    missing: Tensor | None  # (U, c) bool: these again; None if there are none


class Grouping:
    """The examples of each unit of a physical batch. `owners`, int64 (examples,), in any order; see `Captured`."""

    def __init__(self, owners: Tensor, units: int) -> None:
        self.owners, self.units = owners, units
        self._buckets = list(_buckets(owners, units))
        self._single = len(self._buckets) == 1 and self._buckets[0].places.shape[1] == 1  # example each

    def squared_norms(self, uses: ParameterUses) -> Tensor:
        """As `ParameterUses.squared_norms`, of the units: (units,), float64."""
        if uses.linears or uses.softmaxes:
            squares = torch.zeros(self.units, dtype=torch.float64, device=self.owners.device)
            for bucket in self._buckets:
                squares[bucket.units] = self._within(bucket, uses).squared_norms(len(bucket.units)).double()
        else:  # nothing to pad
            everything = [*(self._added(built) for built in uses.builts), *self._relabelled(uses.lookups, self.owners)]
            squares = ParameterUses.of(everything).squared_norms(self.units).double()
        return squares + self._slack(uses.builts)

    def _slack(self, builts: list[Built]) -> Tensor | float:
        """For rows of a unit that cancel: their weighted sum is rounded by what they were. For the others,
        `ParameterUses` sees to it."""
        if not builts or self._single:
            return 0.0
        reach = torch.zeros(self.units, dtype=torch.float64, device=self.owners.device)
        for built in builts:
            reach.index_add_(0, self.owners, squared_rows(built.values).sqrt())
        return slack([*builts]) * reach.square()

    def _added(self, built: Built) -> Built:
        """In float64 on the way, so that large rows that cancel leave what is left exact."""
        total = torch.zeros(self.units, built.values.shape[1], dtype=torch.float64, device=built.values.device)
        return replace(built, values=total.index_add_(0, self.owners, built.values.double()).to(built.values.dtype))

    def _relabelled(self, lookups: list[Lookup], owners: Tensor) -> list[Use]:
        """Lookups of units: whoever has a negative number in `owners` is left out."""
        found: list[Use] = []
        for lookup in lookups:
            whose, ids, source, weight = owners[lookup.units], lookup.ids, lookup.source, lookup.weight
            if owners is not self.owners:
                inside = (whose >= 0).nonzero().squeeze(1)
                whose, ids = whose[inside], ids[inside]
                source = inside if source is None else source[inside]
                weight = None if weight is None else weight[inside]
            # Never one_each, and `source` is not `units`: a unit may have any number of positions and of bags.
            found.append(Lookup(ids, whose, lookup.grad, source, weight))
        return found

    def _within(self, bucket: Bucket, uses: ParameterUses) -> ParameterUses:
        """The uses by the units of a bucket, numbered from 0."""
        local = torch.full((self.units,), -1, dtype=torch.long, device=self.owners.device)
        local[bucket.units] = torch.arange(len(bucket.units), device=self.owners.device)
        linears = [
            Linear(
                linear.inputs[bucket.places].flatten(1, 2), _padded(linear.grad, bucket).flatten(1, 2), linear.offset
            )
            for linear in uses.linears
        ]
        builts = [replace(built, values=_total(built.values, bucket)) for built in uses.builts]
        softmaxes = [softmax.regrouped(bucket.places, bucket.missing) for softmax in uses.softmaxes]
        lookups = self._relabelled(uses.lookups, local[self.owners])
        return ParameterUses.of([*linears, *builts, *softmaxes, *lookups])


def _buckets(owners: Tensor, units: int) -> Iterator[Bucket]:
    counts = torch.bincount(owners, minlength=units)
    order = torch.argsort(owners, stable=True)
    begin = counts.cumsum(0) - counts
    size, left = 1, counts > 0  # a unit without examples has no gradient
    while left.any():
        mine = (left & (counts <= size)).nonzero().squeeze(1)
        left = left & (counts > size)
        if mine.numel():
            at = torch.arange(size, device=owners.device)
            missing = at >= counts[mine, None]
            places = order[begin[mine, None] + at.masked_fill(missing, 0)]
            yield Bucket(mine, places, missing if missing.any() else None)
        size *= 2


def _padded(values: Tensor, bucket: Bucket) -> Tensor:
    """The rows of `values` (examples, ...) as (U, c, ...), zeros where there are no examples."""
    found = values[bucket.places]
    if bucket.missing is not None:
        found[bucket.missing] = 0
    return found


def _total(values: Tensor, bucket: Bucket) -> Tensor:
    """The rows of `values` (examples, n), added up for each unit: (U, n). In float64 on the way, as in `_added`."""
    if bucket.places.shape[1] == 1:
        return values[bucket.places[:, 0]]
    return _padded(values, bucket).sum(1, dtype=torch.float64).to(values.dtype)
