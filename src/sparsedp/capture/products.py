"""Norms of sums of outer products: sum over p of grad[b,p] outer inputs[b,p], (O, I), for each unit b.

In pairs of positions, (a.a')(g.g') summed, or with the sums written out, for some units and some of O at a time: whichever
is less work. `temporary` bounds the elements of what is formed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsedp.capture.kernels import squared_rows

# Elements of sums that are written out for their norm alone: best if they stay in the processor's cache.
WRITTEN = 1 << 20


def chunks(units: int, elements_per_unit: int, temporary: int) -> Iterator[slice]:
    size = max(1, temporary // max(1, elements_per_unit))
    for start in range(0, units, size):
        yield slice(start, min(units, start + size))


def squared_products(inputs: Tensor, grad: Tensor, temporary: int) -> Tensor:
    """Squared norms (B,), float64, of inputs (B, P, I) and grad (B, P, O)."""
    batch, p, width = inputs.shape
    height = grad.shape[2]
    total = torch.zeros(batch, dtype=torch.float64, device=grad.device)
    if p * (width + height) <= width * height:
        for s in chunks(batch, 2 * p * p, temporary):
            total[s] = ((inputs[s] @ inputs[s].mT) * (grad[s] @ grad[s].mT)).sum((1, 2))
        return total
    for s, c in _written(batch, height, width, temporary):
        total[s] += squared_rows(grad[s, :, c].mT @ inputs[s]).sum(1)
    return total


def inner_products(inputs: Tensor, grad: Tensor, other_inputs: Tensor, other_grad: Tensor, temporary: int) -> Tensor:
    """Inner products (B,), float64, of two such sums, with P and Q positions."""
    batch, p, width = inputs.shape
    q, height = other_inputs.shape[1], grad.shape[2]
    total = torch.zeros(batch, dtype=torch.float64, device=grad.device)
    if p * q * (width + height) <= (p + q) * width * height:
        for s in chunks(batch, 2 * p * q, temporary):
            total[s] = ((inputs[s] @ other_inputs[s].mT) * (grad[s] @ other_grad[s].mT)).sum((1, 2))
        return total
    for s, c in _written(batch, height, width, temporary):
        total[s] += ((grad[s, :, c].mT @ inputs[s]) * (other_grad[s, :, c].mT @ other_inputs[s])).sum((1, 2))
    return total


def _written(batch: int, height: int, width: int, temporary: int) -> Iterator[tuple[slice, slice]]:
    """Units and rows of their (height, width) sums that are written out at a time."""
    most = min(WRITTEN, temporary)
    rows = min(height, max(1, most // width))
    for s in chunks(batch, rows * width, most):
        for first in range(0, height, rows):
            yield s, slice(first, first + rows)
