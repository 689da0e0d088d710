"""Linear maps by a block of a parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedp.capture import products
from sparsedp.capture.uses.base import Bucket, RowNorms, Use, not_among
from sparsedp.capture.uses.built import Built
from sparsedp.kernels.loops import add_products, add_weighted_rows, narrower_scaled, outer_products

# Elements of a matrix up to which its gradient may be written out for every unit.
_MAX_WRITTEN_OUT = 1 << 16


# The sum of units that are alike loses the same digits with each of them. Products of so many numbers are added up in float64;
# others in float32, as torch does it, but so many units at a time: some processors would add up hundreds one after another.
_CHEAP_IN_DOUBLE, _ADDED_AT_ONCE = 1 << 21, 128


@dataclass
class Linear(Use):
    """A block of W as a matrix (O, I), in row-major order from the element `offset` on.

    Unit b's gradient is the sum over positions p of grad[b,p] outer inputs[b,p].
    """

    inputs: Tensor  # (B, P, I)
    grad: Tensor  # (B, P, O)
    offset: int

    @staticmethod
    def merged(linears: list[Linear]) -> list[Linear]:
        """Uses of the same block become one with all their positions."""
        if len(linears) < 2:
            return linears
        groups: dict[tuple[int, int, int], list[Linear]] = {}
        for linear in linears:
            groups.setdefault((linear.offset, linear.inputs.shape[2], linear.grad.shape[2]), []).append(linear)
        return [
            same[0]
            if len(same) == 1
            else Linear(torch.cat([l.inputs for l in same], 1), torch.cat([l.grad for l in same], 1), same[0].offset)
            for same in groups.values()
        ]

    @property
    def rows(self) -> tuple[int, int]:
        """First row and one past the last, of W seen as rows of I elements."""
        first = self.offset // self.inputs.shape[2]
        return first, first + self.grad.shape[2]

    @property
    def like(self) -> Tensor:
        return self.grad

    @property
    def can_cancel(self) -> bool:
        return self.inputs.shape[1] > 1

    @property
    def is_smaller_built(self) -> bool:
        _, positions, width = self.inputs.shape
        height = self.grad.shape[2]
        return width * height <= min(_MAX_WRITTEN_OUT, positions * (width + height))

    def build(self) -> Built:
        """The same gradients, with the sums over positions written out."""
        if self.inputs.shape[1] == 1:
            return Built(outer_products(self.grad[:, 0], self.inputs[:, 0]), self.offset)
        values = torch.einsum("bpo,bpi->boi", self.grad, self.inputs)
        return Built(values.flatten(1), self.offset)

    def uncertainty(self) -> float:
        return products.uncertainty(self.inputs.shape[1], self.inputs.shape[2], self.grad.shape[2])

    def squared_norms(self, units: int, row_norms: RowNorms) -> Tensor:
        if self.inputs.shape[1] == 1:
            return row_norms.squared(self.inputs[:, 0]) * row_norms.squared(self.grad[:, 0])
        if not (self.inputs.numel() and self.grad.numel()):
            return self.grad.new_zeros(units)
        exact = self.in_float64() if self.is_out_of_range(row_norms) else self
        return products.squared_products(exact.inputs, exact.grad, products.TEMPORARY)

    def is_out_of_range(self, row_norms: RowNorms) -> bool:
        """Whether inputs or gradients are so large or small that products of four of them leave float32's range."""
        if self.inputs.dtype == torch.float64:
            return False
        for tensor in (self.inputs, self.grad):
            largest = float(row_norms.squared(tensor).amax()) if tensor.numel() else 1.0
            if largest != 0 and not 1e-16 < largest < 1e16:
                return True
        return False

    def in_float64(self) -> Linear:
        return Linear(self.inputs.double(), self.grad.double(), self.offset)

    def reach(self, units: int, row_norms: RowNorms) -> Tensor:
        return (row_norms.squared(self.inputs) * row_norms.squared(self.grad)).sqrt().sum(1)

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        """Inputs or gradients are multiplied by the factors, whichever are narrower."""
        positions, height, width = self.grad.shape[1], self.grad.shape[2], self.inputs.shape[2]
        grads, rows = self.grad.reshape(-1, height), self.inputs.reshape(-1, width)
        scale = factors.to(grads.dtype)[:, None].expand(-1, positions).reshape(-1)
        block = out[self.offset : self.offset + height * width]
        if min(height, width) > 1 and grads.shape[0] * height * width > _CHEAP_IN_DOUBLE:
            # Each part is multiplied when its turn comes, so that it is still in the processor's cache.
            for some, others, each in zip(*(tensor.split(_ADDED_AT_ONCE) for tensor in (grads, rows, scale))):
                some, others = narrower_scaled(some, others, each)
                block.view(height, width).addmm_(some.mT, others)
            return
        if height == 1:  # torch adds up a product with a vector one term after another, in float32
            add_weighted_rows(block, rows, grads[:, 0] * scale)
        elif width == 1:
            add_weighted_rows(block, grads, rows[:, 0] * scale)
        else:
            add_products(block.view(height, width), grads, rows, scale)

    def restricted(self, rows: Tensor, width: int) -> Linear | Built:
        inputs, grad = self.inputs, self.grad
        if width == 1 and grad.shape[2] == 1:  # a row of all elements is as well one element of every row
            inputs, grad = grad, inputs
        if inputs.shape[2] != width or self.offset % width:  # its rows are not W's
            return Linear(inputs, grad, self.offset).build().restricted(rows, width)
        first = self.offset // width
        return Linear(inputs, grad.masked_fill(not_among(rows, first, first + grad.shape[2]), 0), self.offset)

    def regrouped(self, bucket: Bucket) -> Linear:
        """The positions of a unit's examples as positions of the unit: (U, c P, I)."""
        inputs = self.inputs[bucket.places].flatten(1, 2)
        return Linear(inputs, bucket.padded(self.grad).flatten(1, 2), self.offset)

    def of_units(self, units: slice) -> Linear:
        return Linear(self.inputs[units], self.grad[units], self.offset)

    def gradient_at(self, units: Tensor | slice, ids: Tensor) -> Tensor:
        """grad[b, p, id] for units (u,) and rows of W, ids (u, n): (u, P, n); 0 for rows that are not in the block."""
        first, last = self.rows
        outside = ((ids < first) | (ids >= last))[:, None, :]
        columns = (ids[:, None, :] - first).masked_fill(outside, 0)
        if isinstance(units, slice):
            grad = self.grad[units]
            entries = grad.gather(2, columns.expand(-1, grad.shape[1], -1))
        else:  # not grad[units]: that would copy all of these units' gradients
            positions = torch.arange(self.grad.shape[1], device=ids.device)[:, None]
            entries = self.grad[units[:, None, None], positions, columns]
        return entries.masked_fill(outside, 0)
