"""Norms of sums of outer products: sum over p of grad[b,p] outer inputs[b,p], (O, I), for each unit b.

In pairs of positions, (a.a')(g.g') summed, or with the sums written out, for some units and some of O at a time: whichever
is less work. `temporary` bounds the elements of what is formed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsedp.kernels.loops import squared_rows

# Elements that a temporary of the norm computation may have; larger ones are computed for some units at a time.
TEMPORARY = 1 << 24
# Elements of sums that are written out for their norm alone: best if they stay in the processor's cache.
WRITTEN = 1 << 20
# Columns whose products are added up in float32: beyond, small ones would be lost beside large ones that cancel later.
BLOCK = 128


def chunks(units: int, elements_per_unit: int, temporary: int) -> Iterator[slice]:
    """Units that are worked on at a time: as many as `temporary` elements allow, and at least one."""
    size = max(1, temporary // max(1, elements_per_unit))
    for start in range(0, units, size):
        yield slice(start, min(units, start + size))


def squared_products(inputs: Tensor, grad: Tensor, temporary: int) -> Tensor:
    """Squared norms (B,), float64, of inputs (B, P, I) and grad (B, P, O)."""
    batch, p, width = inputs.shape
    height = grad.shape[2]
    total = torch.zeros(batch, dtype=torch.float64, device=grad.device)
    if p * (width + height) <= width * height:
        for s in chunks(batch, 4 * p * p, temporary):
            total[s] = (dots(inputs[s], inputs[s]) * dots(grad[s], grad[s])).sum((1, 2))
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
        for s in chunks(batch, 4 * p * q, temporary):
            total[s] = (dots(inputs[s], other_inputs[s]) * dots(grad[s], other_grad[s])).sum((1, 2))
        return total
    for s, c in _written(batch, height, width, temporary):
        products = (grad[s, :, c].mT @ inputs[s]) * (other_grad[s, :, c].mT @ other_inputs[s])
        total[s] += products.sum((1, 2), dtype=torch.float64)
    return total


def dots(x: Tensor, y: Tensor) -> Tensor:
    """x (B, P, n) against y (B, Q, n): inner products (B, P, Q), float64, with an error below BLOCK eps / 2 |x| |y|."""
    width = x.shape[2]
    if width <= BLOCK or x.dtype == torch.float64:
        return (x @ y.mT).double()
    total = torch.zeros(x.shape[0], x.shape[1], y.shape[1], dtype=torch.float64, device=x.device)
    for first in range(0, width, BLOCK):
        c = slice(first, first + BLOCK)
        total += x[:, :, c] @ y[:, :, c].mT
    return total


def uncertainty(positions: int, width: int, height: int) -> float:
    """A bound for the rounding error of a squared norm here, in eps times the squared sum of its terms' norms.

    The error of n products that are added up is at most n eps / 2 times the sum of their sizes, in whatever order.
    """
    in_pairs = (min(width, BLOCK) + min(height, BLOCK)) / 2
    return max(in_pairs, positions)


def _written(batch: int, height: int, width: int, temporary: int) -> Iterator[tuple[slice, slice]]:
    """Units and rows of their (height, width) sums that are written out at a time."""
    most = min(WRITTEN, temporary)
    rows = min(height, max(1, most // width))
    for s in chunks(batch, rows * width, most):
        for first in range(0, height, rows):
            yield s, slice(first, first + rows)
