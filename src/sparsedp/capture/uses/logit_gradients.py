"""The gradient of the logits of a softmax over the rows of a table, some of it at a time.

Position p of unit b has hidden state h, target t and cross-entropy log_sum - h . E[t], log_sum = log sum over j of
exp(h . E[j]). With `scale` the gradient on that cross-entropy, the gradient of the logits is
G[b,p] = scale (softmax - onehot(t)), as wide as the table has rows. It is computed for some positions and some rows at a
time, again wherever it is needed, in memory that stays in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.lengths import units_by_length
from sparsedp.capture.products import squared_products
from sparsedp.kernels.loops import squared_rows

# Elements of G that are worked on at a time: small enough for the processor's cache.
CHUNK = 1 << 21
# Elements of a unit's G up to which it is worked on as a whole; beyond, for some rows of the table at a time.
WHOLE = 1 << 24


class Scratch:
    """Memory for a part of G that is used again and again: to get it anew takes as long as to fill it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """(rows, columns), whatever was there before."""
        if self._memory is None or self._memory.numel() < rows * columns:
            self._memory = like.new_empty(rows * columns)
        return self._memory[: rows * columns].view(rows, columns)


class Part(NamedTuple):
    """Some units with about equally many positions that count, n at most."""

    units: Tensor  # (u,)
    at: Tensor  # (u, n) their positions; those that count come first
    hidden: Tensor  # (u n, d)
    inputs: Tensor  # (u, n, d), hidden times scale: 0 for positions that do not count


def parts(hidden: Tensor, target: Tensor, scale: Tensor, rows: int) -> Iterator[Part]:
    """The positions that count, unit by unit, for as many units at a time as CHUNK allows."""
    valid = target >= 0
    order = valid.logical_not().long().argsort(stable=True, dim=1)
    for units, n in units_by_length(valid.sum(1), rows, CHUNK):
        at = order[units, :n]
        states = hidden[units[:, None], at]
        yield Part(units, at, states.flatten(0, 1), states * scale[units[:, None], at, None])


def column_chunks(rows: int, positions: int, most: int) -> list[slice]:
    """Rows of the table that are worked on at a time for so many positions: at most `most` elements of G."""
    step = max(1, most // max(1, positions))
    return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]


def logits(hidden: Tensor, table: Tensor, left_out: int | None, columns: slice, scratch: Scratch) -> Tensor:
    """hidden (r, d) against some rows of the table, (r, v)."""
    rows = table[columns]
    products = scratch.take(hidden.shape[0], rows.shape[0], hidden)
    torch.mm(hidden, rows.mT, out=products)
    if left_out is not None and columns.start <= left_out < columns.stop:
        products[:, left_out - columns.start] = -torch.inf
    return products


def less_targets(softmax: Tensor, target: Tensor, columns: slice) -> Tensor:
    """G / scale (r, v) from the softmax, in place. `target` (r,) may lie outside of `columns`."""
    inside = (target >= columns.start) & (target < columns.stop)
    at = (target - columns.start).masked_fill(~inside, 0)
    return softmax.scatter_add_(1, at[:, None], -inside.to(softmax.dtype)[:, None])


def gradients(
    hidden: Tensor,
    table: Tensor,
    log_sum: Tensor,
    target: Tensor,
    left_out: int | None,
    columns: list[slice],
    scratch: Scratch,
) -> Iterator[tuple[slice, Tensor]]:
    """G / scale (r, v) for some rows of the table at a time: each is in the memory of the one before."""
    for c in columns:
        softmax = logits(hidden, table, left_out, c, scratch).sub_(log_sum).clamp_max_(0).exp_()
        yield c, less_targets(softmax, target, c)


class Measure:
    """Adds up what some units' norms are made of, over parts of their G / scale."""

    def __init__(self, inputs: Tensor) -> None:
        # Products of four numbers leave float32's range although each of them is within.
        norms = squared_rows(inputs)
        extreme = (norms > 0) & ~((norms > 1e-16) & (norms < 1e16))
        self._inputs = inputs.double() if bool(extreme.any()) else inputs
        self._type = inputs.dtype
        self._square = torch.zeros(inputs.shape[0], dtype=torch.float64, device=inputs.device)
        self._sizes = torch.zeros(inputs.shape[:2], dtype=torch.float64, device=inputs.device)

    def add(self, grad: Tensor) -> None:
        grad = grad.view(*self._inputs.shape[:2], -1)
        self._square += squared_products(self._inputs, grad.to(self._inputs.dtype), WHOLE)
        self._sizes += squared_rows(grad)

    def square(self) -> Tensor:
        """Each unit's squared norm of G outer hidden, (u,), float64."""
        return self._square

    def sizes(self) -> Tensor:
        """The norms of the rows of G / scale, (u, n)."""
        return self._sizes.sqrt().to(self._type)
