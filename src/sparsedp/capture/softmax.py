"""A softmax over all rows of a table, whose logits are never kept: `sparsedp.nn.table_softmax_loss` and its use of the table.

Position p of unit b has hidden state h, target t and cross-entropy log_sum - h . E[t], log_sum = log sum over j of
exp(h . E[j]). With s the gradient on that cross-entropy, the logits' gradient is G[b,p] = s (softmax - onehot(t)), as wide as
the table has rows. It is computed for some positions at a time, again wherever it is needed, in memory that stays in the
processor's cache. The loss of a unit has one gradient only, so what the forward pass computes of G is right up to that factor:
the gradient of the hidden states and the unit's norm need no second look at the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.lengths import units_by_length
from sparsedp.capture.products import squared_products
from sparsedp.kernels.loops import squared_rows

# Elements of G that are worked on at a time: small enough for the processor's cache.
CHUNK = 1 << 21
# Elements of a unit's G up to which it is worked on as a whole; beyond, for some rows of the table at a time.
WHOLE = 1 << 24
# Positions that are added up at a time at least, although then fewer rows of the table are: each time, these rows are read.
_TOGETHER = 256


class Room:
    """Memory for a part of G that is used again and again: to get it anew takes as long as to fill it."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None

    def take(self, rows: int, columns: int, like: Tensor) -> Tensor:
        """(rows, columns), whatever was there before."""
        if self._memory is None or self._memory.numel() < rows * columns:
            self._memory = like.new_empty(rows * columns)
        return self._memory[: rows * columns].view(rows, columns)


@dataclass
class Softmax:
    """The rows of a table in a softmax: unit b's gradient is the sum over positions p of G[b,p] outer hidden[b,p]."""

    hidden: Tensor  # (B, P, d), 0 at positions that do not count
    target: Tensor  # (B, P), rows of `table`; -1 for a position that does not count
    log_sum: Tensor  # (B, P)
    scale: Tensor  # (B, P), the gradient on each position's cross-entropy; 0 where it does not count
    table: Callable[[], Tensor]  # (V, d), as it was in the forward pass
    first: int  # the row of the parameter at which `table` begins
    left_out: int | None = None  # a row that is not in the softmax
    # (n,) rows of `table`, ascending, outside of which the gradient counts as zero; None: all
    rows: Tensor | None = None
    square: Tensor | None = None  # (B,) squared norm of each unit's gradient, once it is known
    sizes: Tensor | None = None  # (B, P) norms of the rows of G / scale, likewise

    @property
    def width(self) -> int:
        return self.hidden.shape[2]

    @property
    def size(self) -> int:
        """How many rows of the table count."""
        return self.table().shape[0] if self.rows is None else self.rows.numel()

    # ------------------------------------------------------------------ norms

    def squared_norms(self) -> Tensor:
        """(B,), float64."""
        self._measure()
        assert self.square is not None
        return self.square

    def reach(self) -> Tensor:
        """The sum of the norms of each unit's terms, (B,), float64."""
        self._measure()
        assert self.sizes is not None
        return (squared_rows(self.hidden).sqrt() * self.scale.abs().double() * self.sizes.double()).sum(1)

    def drift(self) -> Tensor:
        """By how much a unit's sum may differ from what was measured, (B,): each time, the logits are rounded anew.

        A product of d numbers is off by up to d eps / 2 times the norms of its factors, whatever it comes to. And no entry of
        G / scale is beyond 1.
        """
        self._measure()
        assert self.sizes is not None
        inside = (self.target >= 0) if self.rows is None else _place(self.rows, self.target) >= 0
        norms = squared_rows(self.hidden).sqrt()
        largest = squared_rows(self.table()).amax().sqrt()
        rounding = 8 * (1 + self.log_sum.abs().double()) + self.width * norms * largest
        exponent, most = torch.finfo(self.hidden.dtype).eps * rounding, self.size**0.5 + 2
        error = (torch.expm1(exponent.clamp_max(50)) * (self.sizes.double() + inside)).clamp_max(most)
        return (norms * self.scale.abs().double() * error.masked_fill(exponent > 50, most)).sum(1)

    def _measure(self) -> None:
        if self.square is not None:
            return
        units = self.target.shape[0]
        self.square = torch.zeros(units, dtype=torch.float64, device=self.hidden.device)
        self.sizes = torch.zeros_like(self.log_sum)
        table, target = self._counted()
        room = Room()
        for part in _parts(self.hidden, self.target, self.scale, table.shape[0]):
            log_sum = self.log_sum[part.units[:, None], part.at].reshape(-1, 1)
            measure = _Measure(part.inputs)
            wanted = target[part.units[:, None], part.at].flatten()
            columns = _column_chunks(table.shape[0], len(part.hidden), CHUNK)
            for _, grad in _gradients(part.hidden, table, log_sum, wanted, self._blank, columns, room):
                measure.add(grad)
            self.square[part.units] = measure.square()
            self.sizes[part.units[:, None], part.at] = measure.sizes()

    @property
    def _blank(self) -> int | None:
        """The row that is not in the softmax, among those of `_counted`. A selection does not contain it."""
        return self.left_out if self.rows is None else None

    def _counted(self) -> tuple[Tensor, Tensor]:
        """The rows of the table that count, (n, d), and each position's target among them, -1 if it is not."""
        if self.rows is None:
            return self.table(), self.target
        return self.table()[self.rows], _place(self.rows, self.target)

    def at(self, units: Tensor | slice, ids: Tensor) -> Tensor:
        """G[b, p, id] for units (u,) and rows of the parameter, ids (u, n): (u, P, n). 0 for rows that do not count."""
        own = ids - self.first
        table = self.table()
        outside = (own < 0) | (own >= table.shape[0])
        if self.left_out is not None:
            outside |= own == self.left_out
        if self.rows is not None:
            outside |= _place(self.rows, own) < 0
        facing = table[own.masked_fill(outside, 0)]
        log_sum, scale, target = self.log_sum[units], self.scale[units], self.target[units]
        grad = torch.baddbmm(-log_sum[:, :, None], self.hidden[units], facing.mT).clamp_max_(0).exp_()
        grad -= (target[:, :, None] == own[:, None, :]).to(grad.dtype)
        silent = outside[:, None, :] | (target < 0)[:, :, None]
        return (grad * scale[:, :, None]).masked_fill_(silent, 0)

    def dense(self, units: slice) -> Tensor:
        """G of some units, (u, P, V): for the few cases that need all of it."""
        rows = self.first + torch.arange(self.table().shape[0], device=self.hidden.device)
        return self.at(units, rows.expand(self.hidden[units].shape[0], -1))

    # ------------------------------------------------------------------ sums

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum over units of factor times gradient to `out`, (rows of the parameter, d)."""
        table, target = self._counted()
        kept = (self.target >= 0).flatten().nonzero().squeeze(1)
        hidden, log_sum = self.hidden.flatten(0, 1)[kept], self.log_sum.flatten()[kept, None]
        weight = (self.scale * factors[:, None].to(self.scale.dtype)).flatten()[kept, None]
        target = target.flatten()[kept]
        block = out[self.first : self.first + self.table().shape[0]]
        total = block if self.rows is None else out.new_zeros(table.shape)
        room = Room()
        step = max(_TOGETHER, CHUNK // max(1, table.shape[0]))
        for start in range(0, kept.numel(), step):
            s = slice(start, start + step)
            inputs = hidden[s] * weight[s]
            columns = _column_chunks(table.shape[0], len(inputs), CHUNK)
            for c, grad in _gradients(hidden[s], table, log_sum[s], target[s], self._blank, columns, room):
                total[c].addmm_(grad.mT, inputs)
        if self.rows is not None:
            block.index_add_(0, self.rows, total)

    # ------------------------------------------------------------------ others

    def restricted(self, rows: Tensor) -> Softmax:
        """With everything outside of `rows` of the parameter (ascending) set to zero."""
        own = rows - self.first
        own = own[(own >= 0) & (own < self.table().shape[0])]
        if self.left_out is not None:
            own = own[own != self.left_out]
        if self.rows is not None:
            own = own[_place(self.rows, own) >= 0]
        return replace(self, rows=own, square=None, sizes=None)

    def regrouped(self, places: Tensor, missing: Tensor | None) -> Softmax:
        """The positions of several units as those of one: `places` (U, c) of units, which count unless `missing`."""

        def gather(values: Tensor) -> Tensor:
            return values[places].flatten(1, 2)

        target, scale = self.target[places], self.scale[places]
        if missing is not None:
            target[missing], scale[missing] = -1, 0
        return replace(
            self, hidden=gather(self.hidden), target=target.flatten(1), log_sum=gather(self.log_sum),
            scale=scale.flatten(1), square=None, sizes=None,
        )  # fmt: skip


def merge_softmaxes(softmaxes: list[Softmax]) -> list[Softmax]:
    """Uses of the same block become one with all their positions."""
    groups: dict[tuple, list[Softmax]] = {}
    for softmax in softmaxes:
        key = (softmax.first, softmax.table().data_ptr(), softmax.table().shape, softmax.left_out)
        groups.setdefault(key, []).append(softmax)
    return [same[0] if len(same) == 1 else _joined(same) for same in groups.values()]


def _joined(softmaxes: list[Softmax]) -> Softmax:
    def cat(name: str) -> Tensor:
        return torch.cat([getattr(softmax, name) for softmax in softmaxes], 1)

    return replace(
        softmaxes[0], hidden=cat("hidden"), target=cat("target"), log_sum=cat("log_sum"), scale=cat("scale"),
        square=None, sizes=None,
    )  # fmt: skip


# ---------------------------------------------------------------------- G, some of it at a time


class _Part(NamedTuple):
    """Some units with about equally many positions that count, n at most."""

    units: Tensor  # (u,)
    at: Tensor  # (u, n) their positions; those that count come first
    hidden: Tensor  # (u n, d)
    inputs: Tensor  # (u, n, d), hidden times scale: 0 for positions that do not count


def _parts(hidden: Tensor, target: Tensor, scale: Tensor, rows: int) -> Iterator[_Part]:
    """The positions that count, unit by unit, for as many units at a time as CHUNK allows."""
    valid = target >= 0
    order = valid.logical_not().long().argsort(stable=True, dim=1)
    for units, n in units_by_length(valid.sum(1), rows, CHUNK):
        at = order[units, :n]
        own = hidden[units[:, None], at]
        yield _Part(units, at, own.flatten(0, 1), own * scale[units[:, None], at, None])


def _column_chunks(rows: int, positions: int, most: int) -> list[slice]:
    """Rows of the table that are worked on at a time for so many positions."""
    step = max(1, most // max(1, positions))
    return [slice(first, min(rows, first + step)) for first in range(0, rows, step)]


def _logits(hidden: Tensor, table: Tensor, left_out: int | None, columns: slice, room: Room) -> Tensor:
    """hidden (r, d) against some rows of the table, (r, v)."""
    own = table[columns]
    logits = room.take(hidden.shape[0], own.shape[0], hidden)
    torch.mm(hidden, own.mT, out=logits)
    if left_out is not None and columns.start <= left_out < columns.stop:
        logits[:, left_out - columns.start] = -torch.inf
    return logits


def _less_targets(softmax: Tensor, target: Tensor, columns: slice) -> Tensor:
    """G / scale (r, v) from the softmax, in place. `target` (r,) may lie outside of `columns`."""
    inside = (target >= columns.start) & (target < columns.stop)
    at = (target - columns.start).masked_fill(~inside, 0)
    return softmax.scatter_add_(1, at[:, None], -inside.to(softmax.dtype)[:, None])


def _gradients(
    hidden: Tensor,
    table: Tensor,
    log_sum: Tensor,
    target: Tensor,
    left_out: int | None,
    columns: list[slice],
    room: Room,
) -> Iterator[tuple[slice, Tensor]]:
    """G / scale (r, v) for some rows of the table at a time: each is in the memory of the one before."""
    for c in columns:
        yield c, _less_targets(_logits(hidden, table, left_out, c, room).sub_(log_sum).clamp_max_(0).exp_(), target, c)


class _Measure:
    """Adds up what some units' norms are made of, over parts of their G / scale."""

    def __init__(self, inputs: Tensor) -> None:
        # Products of four numbers leave float32's range although each of them is within.
        norms = squared_rows(inputs)
        odd = (norms > 0) & ~((norms > 1e-16) & (norms < 1e16))
        self._inputs = inputs.double() if bool(odd.any()) else inputs
        self._type = inputs.dtype
        self._square = torch.zeros(inputs.shape[0], dtype=torch.float64, device=inputs.device)
        self._sizes = torch.zeros(inputs.shape[:2], dtype=torch.float64, device=inputs.device)

    def add(self, grad: Tensor) -> None:
        grad = grad.view(*self._inputs.shape[:2], -1)
        self._square += squared_products(self._inputs, grad.to(self._inputs.dtype), WHOLE)
        self._sizes += squared_rows(grad)

    def square(self) -> Tensor:
        return self._square

    def sizes(self) -> Tensor:
        return self._sizes.sqrt().to(self._type)


def _place(rows: Tensor, wanted: Tensor) -> Tensor:
    """The place of each of `wanted` among `rows`, ascending; -1 if it is not there."""
    if rows.numel() == 0:
        return torch.full_like(wanted, -1)
    at = torch.searchsorted(rows, wanted.contiguous()).clamp_max(rows.numel() - 1)
    return at.masked_fill(rows[at] != wanted, -1)


# ---------------------------------------------------------------------- the forward pass


def checked_targets(target: Tensor, rows: int, ignore: int) -> tuple[Tensor, int | None]:
    """Targets with -1 for `ignore`, and the row that is not in the softmax: `ignore`, if it is one."""
    if not isinstance(ignore, int):
        raise ValueError(f"ignore must be an int, the same for every batch, not {type(ignore).__name__}")
    left_out = ignore if 0 <= ignore < rows else None
    if rows < (1 if left_out is None else 2):
        raise ValueError(f"a softmax over {rows} rows, of which {ignore} is left out, has none")
    wanted = target.detach().long()
    ignored = wanted == ignore
    wanted = wanted.masked_fill(ignored, 0)
    if wanted.numel():
        lowest, highest = (int(value) for value in wanted.aminmax())
        if lowest < 0 or highest >= rows:
            raise ValueError(
                f"targets lie between {lowest} and {highest}; they must be rows of the table, from 0 to {rows - 1}, or "
                f"ignore={ignore}"
            )
    return wanted.masked_fill(ignored, -1), left_out


@dataclass(frozen=True)
class Passed:
    """What a forward pass computes, at a gradient of 1 on each unit's loss."""

    hidden: Tensor  # (B, P, d) its own copy: norms and sums must be of the same numbers. 0 where positions do not count
    log_sum: Tensor  # (B, P); 0 at positions that do not count
    scale: Tensor  # (B, P), 1 / the number of a unit's positions that count
    hidden_grad: Tensor | None  # (B, P, d)
    square: Tensor | None  # (B,) squared norm of each unit's gradient of the table
    sizes: Tensor | None  # (B, P) norms of the rows of G / scale


def softmax_pass(
    hidden: Tensor, table: Tensor, target: Tensor, left_out: int | None, *, gradient: bool, norms: bool
) -> tuple[Tensor, Passed]:
    """hidden (B, P, d), table (V, d), target (B, P) with -1 where a position does not count.

    Returns losses (B,), each unit's mean cross-entropy over the positions that count, 0 without any, and the rest apart:
    whoever keeps it must not hold on to the losses, which are about to be part of the graph.
    """
    hidden = hidden.detach().masked_fill((target < 0)[..., None], 0)
    counts = (target >= 0).sum(1)
    scale = (target >= 0).to(hidden.dtype) / counts.clamp_min(1)[:, None]
    losses, log_sum = hidden.new_zeros(hidden.shape[0]), torch.zeros_like(scale)
    grads = torch.zeros_like(hidden) if gradient else None
    square = torch.zeros(hidden.shape[0], dtype=torch.float64, device=hidden.device) if norms else None
    sizes = torch.zeros_like(scale) if norms else None
    room = Room()
    for part in _parts(hidden, target, scale, table.shape[0]):
        where = (part.units[:, None], part.at)
        wanted, shares = target[where], scale[where]
        columns = _column_chunks(table.shape[0], len(part.hidden), WHOLE)
        if len(columns) == 1:
            found = _logits(part.hidden, table, left_out, columns[0], room)
            highest = found.amax(1)
            torch.softmax(found, 1, out=found)
            sums = highest - found.amax(1).log()  # the largest is exp(highest - log_sum)
            pieces: Any = iter([(columns[0], _less_targets(found, wanted.flatten(), columns[0]))])
        else:
            sums = torch.stack(
                [_logits(part.hidden, table, left_out, c, room).logsumexp(1) for c in columns]
            ).logsumexp(0)
            pieces = _gradients(part.hidden, table, sums[:, None], wanted.flatten(), left_out, columns, room)
        own = (part.hidden * table[wanted.flatten().clamp_min(0)]).sum(1)
        losses[part.units] = ((sums - own).clamp_min(0).view_as(shares) * shares).sum(1)
        log_sum[where] = sums.view_as(shares).masked_fill(wanted < 0, 0)
        if not (gradient or norms):
            continue
        mine = torch.zeros_like(part.hidden)
        measure = _Measure(part.inputs)
        for c, grad in pieces:
            if norms:
                measure.add(grad)
            if gradient:
                mine.addmm_(grad, table[c])
        if grads is not None:
            grads[where] = mine.view_as(part.inputs) * shares[..., None]
        if square is not None and sizes is not None:
            square[part.units], sizes[where] = measure.square(), measure.sizes()
    return losses, Passed(hidden, log_sum, scale, grads, square, sizes)


class SoftmaxLoss(torch.autograd.Function):
    """losses (B,) of hidden (B, P, d), table (V, d) and target (B, P), -1 where a position does not count.

    `passed` receives the forward pass, with the units' norms, for whoever keeps the use of the table.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, table: Tensor, target: Tensor, left_out: int | None, passed: list[Passed] | None
    ) -> Tensor:
        gradient = ctx.needs_input_grad[0]
        losses, found = softmax_pass(hidden, table, target, left_out, gradient=gradient, norms=passed is not None)
        if passed is not None:
            passed.append(found)
        ctx.left_out = left_out
        of_table = (found.hidden, table, target, found.log_sum, found.scale) if ctx.needs_input_grad[1] else [None] * 5
        ctx.save_for_backward(found.hidden_grad, *of_table)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_grad, hidden, table, target, log_sum, scale = ctx.saved_tensors
        of_hidden = None if hidden_grad is None else hidden_grad * grads[0][:, None, None]
        of_table = None
        if table is not None:
            of_table = torch.zeros_like(table, memory_format=torch.contiguous_format)
            use = Softmax(hidden, target, log_sum, scale, lambda: table, 0, ctx.left_out)
            use.add_weighted_sum(of_table, grads[0])
        return of_hidden, of_table, None, None, None
