"""Gradients of units that are written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.capture.uses.base import Bucket, RowNorms, Use, not_among
from sparsedp.kernels.loops import add_weighted_rows


@dataclass
class Built(Use):
    """Unit b's gradient is values[b], on the elements of W from `offset` on, in row-major order."""

    values: Tensor  # (B, n)
    offset: int

    @staticmethod
    def merged(builts: list[Built]) -> list[Built]:
        """Uses of the same block are added up."""
        if len(builts) < 2:
            return builts
        merged: dict[tuple[int, int], Built] = {}
        for built in builts:
            before = merged.get(built.span)
            merged[built.span] = built if before is None else Built(before.values + built.values, built.offset)
        return list(merged.values())

    @property
    def span(self) -> tuple[int, int]:
        """The first element of W and one past the last."""
        return self.offset, self.offset + self.values.shape[1]

    @property
    def like(self) -> Tensor:
        return self.values

    @property
    def can_cancel(self) -> bool:
        return False

    def squared_norms(self, units: int, row_norms: RowNorms) -> Tensor:
        return row_norms.squared(self.values)

    def reach(self, units: int, row_norms: RowNorms) -> Tensor:
        return row_norms.squared(self.values).sqrt()

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        start, stop = self.span
        add_weighted_rows(out[start:stop], self.values, factors.to(self.values.dtype))

    def restricted(self, rows: Tensor, width: int) -> Built:
        first, last = self.span
        first_row = first // width
        hidden = not_among(rows, first_row, (last - 1) // width + 1).repeat_interleave(width)
        start = first - first_row * width
        return Built(self.values.masked_fill(hidden[start : start + last - first], 0), self.offset)

    def regrouped(self, bucket: Bucket) -> Built:
        """The sums of each unit's examples, added up in float64: where large ones cancel, what is left is exact."""
        if bucket.places.shape[1] == 1:
            return Built(self.values[bucket.places[:, 0]], self.offset)
        return Built(bucket.padded(self.values).sum(1, dtype=torch.float64).to(self.values.dtype), self.offset)

    def of_owners(self, owners: Tensor, count: int) -> Built:
        """The sums of the units of each of `count` owners, added up in float64 as well: `owners` (B,)."""
        total = torch.zeros(count, self.values.shape[1], dtype=torch.float64, device=self.values.device)
        return Built(total.index_add_(0, owners, self.values.double()).to(self.values.dtype), self.offset)

    def of_units(self, units: slice) -> Built:
        return Built(self.values[units], self.offset)
