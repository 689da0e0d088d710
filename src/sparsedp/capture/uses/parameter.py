"""All uses of one parameter together: the squared norm of each unit's gradient, and weighted sums over units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.uses.base import RowNorms, Use, slack
from sparsedp.capture.uses.built import Built
from sparsedp.capture.uses.carried import Carried
from sparsedp.capture.uses.inner import inner
from sparsedp.capture.uses.linear import Linear
from sparsedp.capture.uses.lookup import Lookup, RowSparse
from sparsedp.capture.uses.softmax import Softmax


@dataclass
class ParameterUses:
    """All uses of one parameter by the units of one batch, merged so that there are few of them: `of`."""

    lookups: list[Lookup]  # one at most: they are merged
    linears: list[Linear]
    builts: list[Built]
    softmaxes: list[Softmax] = field(default_factory=list)
    carrieds: list[Carried] = field(default_factory=list)  # one at most: they are merged

    @staticmethod
    def of(uses: Sequence[Use]) -> ParameterUses:
        lookups, linears, builts, softmaxes, carrieds = _by_kind(uses)
        if len(uses) == 1:  # as in most models
            return ParameterUses(lookups, linears, builts, softmaxes, carrieds)
        return ParameterUses(
            Lookup.merged(lookups),
            Linear.merged(linears),
            Built.merged(builts),
            Softmax.merged(softmaxes),
            Carried.merged(carrieds),
        )

    def written_out(self) -> ParameterUses:
        """Linear uses of a small matrix at many positions become `Built`, which is smaller; norm and sum share the work.

        For the uses that sums are made of as well, so that both see the same rounded numbers.
        """
        if not self.linears:
            return self
        kept, builts = [], [*self.builts]
        for linear in self.linears:
            if linear.is_smaller_built:
                builts.append(linear.build())
            else:
                kept.append(linear)
        if len(kept) == len(self.linears):
            return self
        return ParameterUses(self.lookups, kept, Built.merged(builts), self.softmaxes, self.carrieds)

    @property
    def is_used_in_full(self) -> bool:
        """Whether there are other uses than lookups: of a table, all of its rows are in use then."""
        return bool(self.linears or self.builts or self.softmaxes or self.carrieds)

    @property
    def all(self) -> list[Use]:
        return [*self.linears, *self.builts, *self.softmaxes, *self.carrieds, *self.lookups]

    def squared_norms(self, units: int, row_norms: RowNorms | None = None) -> Tensor:
        """Squared norm of each unit's gradient, (B,), float64, never below the true one by more than rounding.

        `row_norms` keeps those that parameters share, such as of the output gradient of a weight and its bias.

        Where uses can cancel, rounding grows with the terms and not with the result. The slack, a multiple of the
        squared sum of the terms' norms, keeps a unit whose large terms cancel from passing as small.
        """
        uses = self.all
        row_norms = RowNorms() if row_norms is None else row_norms
        squares = [use.squared_norms(units, row_norms).double() for use in uses]
        if len(uses) == 1 and not uses[0].can_cancel:
            return squares[0]
        total = torch.stack(squares).sum(0)
        reach = torch.stack([use.reach(units, row_norms).double() for use in uses]).sum(0)
        for index, use in enumerate(uses):
            for other in uses[:index]:
                total = total + 2 * inner(use, other, units, row_norms)
        rounding = slack(uses)
        bound = total.clamp_min(0) + rounding * reach.square()
        if self.softmaxes:
            # What a softmax may differ by counts times whatever it is multiplied with, also if that cancels.
            drift = torch.stack([softmax.drift() for softmax in self.softmaxes]).sum(0)
            sizes = torch.stack(squares).clamp_min(0).sqrt().sum(0) + rounding**0.5 * reach
            bound = bound + 2 * drift * sizes + drift.square()
        return bound

    def weighted_sum(self, factors: Tensor, shape: torch.Size) -> Tensor | RowSparse:
        """The sum over units of factor times gradient; row-sparse if there are lookups only."""
        if not self.is_used_in_full:
            (lookup,) = self.lookups
            return lookup.weighted_rows(factors)
        total = self.all[0].like.new_zeros(shape)
        self.add_weighted_sum(total, factors)
        return total

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum over units of factor times gradient to `out`, of the parameter's shape and contiguous."""
        flat = out.view(-1)
        for use in self.all:
            use.add_weighted_sum(flat, factors)

    def add_weighted_rows(self, out: Tensor, rows: Tensor, factors: Tensor, shape: torch.Size) -> None:
        """As `add_weighted_sum`, of some rows (ascending) of a parameter of that shape alone, into `out` (rows, ...)."""
        if len(rows) == shape[0]:
            self.add_weighted_sum(out, factors)
            return
        for use in self.all:
            use.add_weighted_rows(out, rows, factors, shape)

    def restricted(self, rows: Tensor, width: int) -> ParameterUses:
        """The uses of a table of rows of `width` elements, with everything outside of `rows` (ascending) set to zero."""
        return ParameterUses(*_by_kind(use.restricted(rows, width) for use in self.all))

    def touched(self) -> tuple[Tensor, Tensor]:
        """The distinct (unit, row) pairs that lookups use: two tensors of equal length, sorted by unit, then row."""
        (lookup,) = self.lookups
        return lookup.touched()


def add_use(uses: list[Use], use: Use) -> None:
    """Adds a use to those of one parameter so far: to the lookup before it, where that is at the same positions."""
    before = uses[-1] if uses else None
    both = before.plus(use) if isinstance(before, Lookup) and isinstance(use, Lookup) else None
    if both is None:
        uses.append(use)
    else:
        uses[-1] = both


def _by_kind(
    uses: Iterable[Use],
) -> tuple[list[Lookup], list[Linear], list[Built], list[Softmax], list[Carried]]:
    kinds: dict[type[Use], list[Any]] = {Lookup: [], Linear: [], Built: [], Softmax: [], Carried: []}
    for use in uses:
        kinds[type(use)].append(use)
    return kinds[Lookup], kinds[Linear], kinds[Built], kinds[Softmax], kinds[Carried]
