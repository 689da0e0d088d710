"""Gradients of a large parameter that reach it through a computed copy, written out for one unit at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsedp.capture.uses.base import Bucket, RowNorms, Use
from sparsedp.capture.uses.built import Built
from sparsedp.kernels.loops import squared_rows


@dataclass(frozen=True)
class Part:
    """The use of one copy. `gradient` gives that of some examples on the copy, (k, ...), `carry` takes it to W, (k, size)."""

    gradient: Callable[[slice], Tensor]
    carry: Callable[[Tensor], Tensor]
    memory: tuple[Tensor, ...]  # what `gradient` reads


@dataclass
class Carried(Use):
    """Unit b's gradient is the sum over its examples and over `parts` of what each part carries to W.

    There is one at a time, when it is needed. Norms and sums see the same rounded numbers, because both carry each example by
    itself: the sum of all units' gradients on the copy would take one way back, but what cancels there is not what cancels in a
    norm.
    """

    parts: list[Part]
    size: int  # elements of W
    empty: Tensor  # (0,), of W's type and device
    places: Tensor  # (B, c): the examples of each unit
    missing: Tensor | None = None  # (B, c) bool: examples that are not there
    rows: Tensor | None = None  # (n,) rows of W, ascending, outside of which the gradient counts as zero; None: all
    width: int = 0  # elements of a row
    square: Tensor | None = None  # (B,) squared norm of each unit's gradient, once it is known

    @staticmethod
    def of(part: Part, parameter: Tensor, examples: int) -> Carried:
        """A use of `parameter` in which each example is a unit."""
        empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
        return Carried([part], parameter.numel(), empty, torch.arange(examples, device=parameter.device)[:, None])

    @staticmethod
    def merged(carrieds: list[Carried]) -> list[Carried]:
        """All as one: what they carry is added up unit by unit."""
        if len(carrieds) < 2:
            return carrieds
        return [replace(carrieds[0], parts=[part for carried in carrieds for part in carried.parts], square=None)]

    @property
    def like(self) -> Tensor:
        return self.empty

    @property
    def can_cancel(self) -> bool:
        return False

    def each(self) -> Iterator[Built]:
        """The gradient of one unit after the other."""
        for unit in range(len(self.places)):
            yield self._written(unit)

    def _written(self, unit: int) -> Built:
        examples = self.places[unit]
        if self.missing is not None:
            examples = examples[~self.missing[unit]]
        if len(examples) == 1:
            values = self._of_example(int(examples[0]))
        else:  # in float64, as `Built` adds up a unit's examples: where large ones cancel, what is left is exact
            total = torch.zeros(1, self.size, dtype=torch.float64, device=self.like.device)
            for example in examples.tolist():
                total += self._of_example(example)
            values = total.to(self.like.dtype)
        built = Built(values, 0)
        return built if self.rows is None else built.restricted(self.rows, self.width)

    def _of_example(self, example: int) -> Tensor:
        values = [part.carry(part.gradient(slice(example, example + 1))) for part in self.parts]
        return values[0] if len(values) == 1 else torch.stack(values).sum(0)

    def squared_norms(self, units: int, row_norms: RowNorms) -> Tensor:
        if self.square is None:
            squares = [squared_rows(built.values) for built in self.each()]
            self.square = torch.cat(squares) if squares else self.like.new_zeros(0, dtype=torch.float64)
        return self.square

    def reach(self, units: int, row_norms: RowNorms) -> Tensor:
        return self.squared_norms(units, row_norms).sqrt()

    def example_norms(self) -> Tensor:
        """The norm of each example's gradient, (examples,), float64, of a use in which each example is a unit."""
        return self.squared_norms(len(self.places), RowNorms()).sqrt()

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        for built, factor in zip(self.each(), factors.tolist()):
            out.add_(built.values[0], alpha=factor)

    def restricted(self, rows: Tensor, width: int) -> Carried:
        if self.rows is not None:
            rows = rows[torch.isin(rows, self.rows)]
        return replace(self, rows=rows, width=width, square=None)

    def regrouped(self, bucket: Bucket) -> Carried:
        """The examples of each unit of the bucket, of a use in which each example is a unit."""
        return replace(self, places=self.places[bucket.places, 0], missing=bucket.missing, square=None)
