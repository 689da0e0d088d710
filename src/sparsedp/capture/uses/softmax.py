"""A softmax over all rows of a table, whose logits are never kept: the use of the table by `nn.table_softmax_loss`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsedp.capture import products
from sparsedp.capture.uses import logit_gradients
from sparsedp.capture.uses.base import Bucket, RowNorms, Use, places_among
from sparsedp.capture.uses.linear import Linear
from sparsedp.capture.uses.logit_gradients import Measure, Scratch, column_chunks, gradients, parts
from sparsedp.kernels.loops import squared_rows

# Positions that are added up at a time at least, although then fewer rows of the table are: each time, these rows are read.
_TOGETHER = 256


@dataclass
class Softmax(Use):
    """The rows of a table in a softmax: unit b's gradient is the sum over positions p of G[b,p] outer hidden[b,p].

    A `Linear` whose output gradient G, see `logit_gradients.py`, is computed anew when it is needed.
    """

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

    @staticmethod
    def merged(softmaxes: list[Softmax]) -> list[Softmax]:
        """Uses of the same block become one with all their positions."""
        if len(softmaxes) < 2:
            return softmaxes
        groups: dict[tuple, list[Softmax]] = {}
        for softmax in softmaxes:
            key = (softmax.first, softmax.table().data_ptr(), softmax.table().shape, softmax.left_out)
            groups.setdefault(key, []).append(softmax)
        return [same[0] if len(same) == 1 else _joined(same) for same in groups.values()]

    @property
    def width(self) -> int:
        return self.hidden.shape[2]

    @property
    def size(self) -> int:
        """How many rows of the table count."""
        return self.table().shape[0] if self.rows is None else self.rows.numel()

    @property
    def like(self) -> Tensor:
        return self.hidden

    @property
    def can_cancel(self) -> bool:
        return True

    # ------------------------------------------------------------------ norms

    def uncertainty(self) -> float:
        return products.uncertainty(self.hidden.shape[1], self.width, self.size)

    def squared_norms(self, units: int, row_norms: RowNorms) -> Tensor:
        return self._measured()[0]

    def reach(self, units: int, row_norms: RowNorms) -> Tensor:
        _, sizes = self._measured()
        return (squared_rows(self.hidden).sqrt() * self.scale.abs().double() * sizes.double()).sum(1)

    def drift(self) -> Tensor:
        """By how much a unit's sum may differ from what was measured, (B,): each time, the logits are rounded anew.

        A product of d numbers is off by up to d eps / 2 times the norms of its factors, whatever it comes to. And no entry of
        G / scale is beyond 1.
        """
        _, sizes = self._measured()
        inside = (self.target >= 0) if self.rows is None else places_among(self.rows, self.target) >= 0
        norms = squared_rows(self.hidden).sqrt()
        largest = squared_rows(self.table()).amax().sqrt()
        rounding = 8 * (1 + self.log_sum.abs().double()) + self.width * norms * largest
        exponent, most = torch.finfo(self.hidden.dtype).eps * rounding, self.size**0.5 + 2
        error = (torch.expm1(exponent.clamp_max(50)) * (sizes.double() + inside)).clamp_max(most)
        return (norms * self.scale.abs().double() * error.masked_fill(exponent > 50, most)).sum(1)

    def _measured(self) -> tuple[Tensor, Tensor]:
        """`square` and `sizes`, worked out if they are not known yet."""
        if self.square is None or self.sizes is None:
            square = torch.zeros(self.target.shape[0], dtype=torch.float64, device=self.hidden.device)
            sizes = torch.zeros_like(self.log_sum)
            table, target = self._counted()
            scratch = Scratch()
            for part in parts(self.hidden, self.target, self.scale, table.shape[0]):
                where = (part.units[:, None], part.at)
                measure = Measure(part.inputs)
                log_sum, wanted = self.log_sum[where].reshape(-1, 1), target[where].flatten()
                columns = column_chunks(table.shape[0], len(part.hidden), logit_gradients.CHUNK)
                for _, grad in gradients(part.hidden, table, log_sum, wanted, self._blank, columns, scratch):
                    measure.add(grad)
                square[part.units], sizes[where] = measure.square(), measure.sizes()
            self.square, self.sizes = square, sizes  # only now: what is half measured must not pass for the norm
        return self.square, self.sizes

    @property
    def _blank(self) -> int | None:
        """The row that is not in the softmax, among those of `_counted`. A selection does not contain it."""
        return self.left_out if self.rows is None else None

    def _counted(self) -> tuple[Tensor, Tensor]:
        """The rows of the table that count, (n, d), and each position's target among them, -1 if it is not."""
        if self.rows is None:
            return self.table(), self.target
        return self.table()[self.rows], places_among(self.rows, self.target)

    def gradient_at(self, units: Tensor | slice, ids: Tensor) -> Tensor:
        """G[b, p, id] for units (u,) and rows of the parameter, ids (u, n): (u, P, n). 0 for rows that do not count."""
        places = ids - self.first
        table = self.table()
        outside = (places < 0) | (places >= table.shape[0])
        if self.left_out is not None:
            outside |= places == self.left_out
        if self.rows is not None:
            outside |= places_among(self.rows, places) < 0
        facing = table[places.masked_fill(outside, 0)]
        log_sum, scale, target = self.log_sum[units], self.scale[units], self.target[units]
        grad = torch.baddbmm(-log_sum[:, :, None], self.hidden[units], facing.mT).clamp_max_(0).exp_()
        grad -= (target[:, :, None] == places[:, None, :]).to(grad.dtype)
        silent = outside[:, None, :] | (target < 0)[:, :, None]
        return (grad * scale[:, :, None]).masked_fill_(silent, 0)

    def as_linear(self, units: slice) -> Linear:
        """The use by some units as a `Linear` with G (u, P, V) written out: for the few cases that need all of it."""
        hidden = self.hidden[units]
        ids = self.first + torch.arange(self.table().shape[0], device=hidden.device)
        return Linear(hidden, self.gradient_at(units, ids.expand(hidden.shape[0], -1)), self.first * self.width)

    # ------------------------------------------------------------------ sums

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        block = out[self.first * self.width :][: self.table().numel()].view(self.table().shape)
        if self.rows is None:
            self._add_to(block, factors)
        else:
            total = out.new_zeros(self.rows.numel(), self.width)
            self._add_to(total, factors)
            block.index_add_(0, self.rows, total)

    def add_weighted_rows(self, out: Tensor, rows: Tensor, factors: Tensor, shape: torch.Size) -> None:
        """Of a selection, nothing as large as the table is formed."""
        mine = self.restricted(rows, self.width)
        assert mine.rows is not None
        if torch.equal(mine.rows + self.first, rows):
            mine._add_to(out.view(len(rows), self.width), factors)
            return
        total = out.new_zeros(mine.rows.numel(), self.width)
        mine._add_to(total, factors)
        out.view(len(rows), self.width).index_add_(0, places_among(rows, mine.rows + self.first), total)

    def _add_to(self, total: Tensor, factors: Tensor) -> None:
        """Adds the weighted sum to `total`, (n, d), of the rows that count."""
        table, target = self._counted()
        kept = (self.target >= 0).flatten().nonzero().squeeze(1)
        hidden, log_sum = self.hidden.flatten(0, 1)[kept], self.log_sum.flatten()[kept, None]
        weight = (self.scale * factors[:, None].to(self.scale.dtype)).flatten()[kept, None]
        target = target.flatten()[kept]
        scratch = Scratch()
        step = max(_TOGETHER, logit_gradients.CHUNK // max(1, table.shape[0]))
        for start in range(0, kept.numel(), step):
            s = slice(start, start + step)
            inputs = hidden[s] * weight[s]
            columns = column_chunks(table.shape[0], len(inputs), logit_gradients.CHUNK)
            for c, grad in gradients(hidden[s], table, log_sum[s], target[s], self._blank, columns, scratch):
                total[c].addmm_(grad.mT, inputs)

    # ------------------------------------------------------------------ other uses made of it

    def restricted(self, rows: Tensor, width: int) -> Softmax:
        places = rows - self.first
        places = places[(places >= 0) & (places < self.table().shape[0])]
        if self.left_out is not None:
            places = places[places != self.left_out]
        if self.rows is not None:
            places = places[places_among(self.rows, places) >= 0]
        return replace(self, rows=places, square=None, sizes=None)

    def regrouped(self, bucket: Bucket) -> Softmax:
        """The positions of a unit's examples as positions of the unit: (U, c P)."""

        def gather(values: Tensor) -> Tensor:
            return values[bucket.places].flatten(1, 2)

        target, scale = self.target[bucket.places], self.scale[bucket.places]
        if bucket.missing is not None:
            target[bucket.missing], scale[bucket.missing] = -1, 0
        return replace(
            self, hidden=gather(self.hidden), target=target.flatten(1), log_sum=gather(self.log_sum),
            scale=scale.flatten(1), square=None, sizes=None,
        )  # fmt: skip


def _joined(softmaxes: list[Softmax]) -> Softmax:
    def cat(name: str) -> Tensor:
        return torch.cat([getattr(softmax, name) for softmax in softmaxes], 1)

    return replace(
        softmaxes[0], hidden=cat("hidden"), target=cat("target"), log_sum=cat("log_sum"), scale=cat("scale"),
        square=None, sizes=None,
    )  # fmt: skip
