"""Norms of units that have several examples each: users.

Uses keep the examples of a batch apart, on an axis of their own. A weighted sum over units is one over examples, each with
its unit's factor. A norm is not: that of a unit is the norm of the sum of its examples' gradients. So the examples of
a unit become positions of it, as if the unit were one long example, and `ParameterUses` does the rest:

- `Linear` (examples, P, I): units with about equally many examples together, (units, c P, I), zeros where there are fewer
- `Softmax` (examples, P, d): likewise
- `Built` (examples, n): added up, (units, n)
- `Carried`: likewise, one unit at a time
- `Lookup`: the positions stay as they are and get another unit
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsedp.capture.uses import Bucket, Built, Carried, ParameterUses, slack
from sparsedp.kernels.loops import squared_rows


class Grouping:
    """The examples of each unit of a physical batch. `owners`, int64 (examples,), in any order; see `Captured`."""

    def __init__(self, owners: Tensor, units: int) -> None:
        self.owners, self.units = owners, units
        self._buckets = list(_buckets(owners, units))
        self._one_example_each = len(self._buckets) == 1 and self._buckets[0].places.shape[1] == 1

    def squared_norms(self, uses: ParameterUses) -> Tensor:
        """As `ParameterUses.squared_norms`, of the units: (units,), float64."""
        if uses.linears or uses.softmaxes or uses.carrieds:
            squares = torch.zeros(self.units, dtype=torch.float64, device=self.owners.device)
            for bucket in self._buckets:
                of_bucket = ParameterUses.of([use.regrouped(bucket) for use in uses.all])
                squares[bucket.units] = of_bucket.squared_norms(len(bucket.units)).double()
        else:  # nothing to pad
            builts = [built.of_owners(self.owners, self.units) for built in uses.builts]
            lookups = [lookup.of_owners(self.owners) for lookup in uses.lookups]
            squares = ParameterUses.of([*builts, *lookups]).squared_norms(self.units).double()
        return squares + self._slack(uses.builts, uses.carrieds)

    def _slack(self, builts: list[Built], carrieds: list[Carried]) -> Tensor | float:
        """For written-out examples of a unit that cancel: their weighted sum is rounded by what they were.

        `ParameterUses` sees to the other kinds.
        """
        if not (builts or carrieds) or self._one_example_each:
            return 0.0
        reach = torch.zeros(self.units, dtype=torch.float64, device=self.owners.device)
        for built in builts:
            reach.index_add_(0, self.owners, squared_rows(built.values).sqrt())
        for carried in carrieds:
            reach.index_add_(0, self.owners, carried.example_norms())
        return slack([*builts, *carrieds]) * reach.square()


def _buckets(owners: Tensor, units: int) -> Iterator[Bucket]:
    counts = torch.bincount(owners, minlength=units)
    order = torch.argsort(owners, stable=True)
    begin = counts.cumsum(0) - counts
    size, left = 1, counts > 0  # a unit without examples has no gradient
    while left.any():
        members = (left & (counts <= size)).nonzero().squeeze(1)
        left = left & (counts > size)
        if members.numel():
            at = torch.arange(size, device=owners.device)
            missing = at >= counts[members, None]
            places = order[begin[members, None] + at.masked_fill(missing, 0)]
            numbers = torch.full((units,), -1, dtype=torch.long, device=owners.device)
            numbers[members] = torch.arange(len(members), device=owners.device)
            yield Bucket(members, places, missing if missing.any() else None, numbers[owners])
        size *= 2
