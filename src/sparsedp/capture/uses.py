"""What one use of a parameter contributes to each unit's gradient, kept in factored form.

Every use addresses a contiguous block of its parameter W, in row-major order from `offset`:

- `Lookup`: rows of W, each with an output gradient. Unit b's gradient is the sum over its positions n of
  weight[n] * grad[source[n]] at row ids[n].
- `Linear`: the block as a matrix (O, I). Unit b's gradient is the sum over positions p of grad[b,p] outer inputs[b,p].
- `Built`: unit b's gradient on the block is written out, values[b].

A parameter's per-unit gradient is the sum of its uses, and its squared norm the sum of their pairwise inner products
(ghost clipping; DPFormer's Claim 4.1 for tied embeddings is the Lookup x Linear case). No tensor of size
units x rows x dim is formed for a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.kernels import squared_rows

# Elements that a temporary of the norm computation may have; larger ones are computed for some units at a time.
_TEMPORARY = 1 << 24


class RowSparse(NamedTuple):
    """Some rows of a table: `rows` (n,) distinct and ascending, `values` (n, dim)."""

    rows: Tensor
    values: Tensor


@dataclass
class Lookup:
    ids: Tensor  # (N,) rows of the table; -1 for a position without gradient (padding)
    units: Tensor  # (N,) the unit of each position
    grad: Tensor  # (M, d)
    source: Tensor | None = None  # (N,) row of `grad` for each position; None: position n has grad[n]
    weight: Tensor | None = None  # (N,) factor of each position; None: 1
    one_each: bool = False  # position n belongs to unit n, and N is the number of units

    def positions(self) -> Tensor:
        """The gradient of each position, (N, d)."""
        values = self.grad if self.source is None else self.grad[self.source]
        return values if self.weight is None else values * self.weight[:, None]

    def weighted(self, factors: Tensor) -> Tensor:
        """The gradient of each position times the factor of its unit, (N, d)."""
        scale = factors if self.one_each else factors[self.units]
        if self.weight is not None:
            scale = scale * self.weight
        values = self.grad if self.source is None else self.grad[self.source]
        return values * scale[:, None].to(values.dtype)


@dataclass
class Linear:
    inputs: Tensor  # (B, P, I)
    grad: Tensor  # (B, P, O)
    offset: int

    @property
    def rows(self) -> tuple[int, int]:
        """First row and one past the last, of W seen as rows of I elements."""
        first = self.offset // self.inputs.shape[2]
        return first, first + self.grad.shape[2]

    def build(self) -> Built:
        values = torch.einsum("bpo,bpi->boi", self.grad, self.inputs)
        return Built(values.flatten(1), self.offset)


@dataclass
class Built:
    values: Tensor  # (B, n)
    offset: int

    @property
    def span(self) -> tuple[int, int]:
        return self.offset, self.offset + self.values.shape[1]


Use = Lookup | Linear | Built


@dataclass
class ParameterUses:
    """All uses of one parameter by the units of one batch, merged so that there are few of them."""

    lookups: list[Lookup]
    linears: list[Linear]
    builts: list[Built]

    @staticmethod
    def of(uses: list[Use]) -> ParameterUses:
        return ParameterUses(
            [use for use in uses if isinstance(use, Lookup)],
            _merge_linears([use for use in uses if isinstance(use, Linear)]),
            _merge_builts([use for use in uses if isinstance(use, Built)]),
        )

    def squared_norms(self, units: int, known: RowNorms | None = None) -> Tensor:
        """Squared norm of each unit's gradient, (B,), never below the true one by more than rounding.

        `known` keeps row norms that parameters share, such as those of the output gradient of a weight and its bias.

        Where uses can cancel, rounding grows with the terms and not with the result. The slack, a multiple of the
        squared sum of the terms' norms, keeps a unit whose large terms cancel from passing as small.
        """
        pieces: list[Use] = [*self.linears, *self.builts]
        if self.lookups:
            pieces.append(merge_lookups(self.lookups))
        total = _own_square(pieces[0], units, RowNorms() if known is None else known)
        if len(pieces) == 1 and not _can_cancel(pieces[0]):
            return total
        reach = _reach(pieces[0], units)
        for index, piece in enumerate(pieces[1:], 1):
            total = total + _inner(piece, piece, units)
            reach = reach + _reach(piece, units)
            for other in pieces[:index]:
                total = total + 2 * _inner(piece, other, units)
        return total.double().clamp_min(0) + _slack(pieces) * reach.square()

    def weighted_sum(self, factors: Tensor, shape: torch.Size) -> Tensor | RowSparse:
        """The sum over units of factor times gradient; row-sparse if there are lookups only."""
        if not self.linears and not self.builts:
            return self._weighted_rows(factors)
        first = self.linears[0].grad if self.linears else self.builts[0].values
        dense = first.new_zeros(shape)
        self.add_weighted_sum(dense, factors)
        return dense

    def add_weighted_sum(self, out: Tensor, factors: Tensor) -> None:
        """Adds the sum over units of factor times gradient to `out`, of the parameter's shape and contiguous."""
        self._add_dense(out, factors)
        if self.lookups:
            sparse = self._weighted_rows(factors)
            out.index_add_(0, sparse.rows, sparse.values.view(-1, *out.shape[1:]))

    def _add_dense(self, out: Tensor, factors: Tensor) -> None:
        flat = out.view(-1)
        for linear in self.linears:
            height, width = linear.grad.shape[2], linear.inputs.shape[2]
            block = flat[linear.offset : linear.offset + height * width].view(height, width)
            _add_weighted_product(block, linear, factors)
        for built in self.builts:
            start, stop = built.span
            flat[start:stop].addmv_(built.values.mT, factors.to(built.values.dtype))

    def _weighted_rows(self, factors: Tensor) -> RowSparse:
        ids = _cat([lookup.ids for lookup in self.lookups])
        return sum_rows(ids, _cat([lookup.weighted(factors) for lookup in self.lookups]))

    def restricted(self, rows: Tensor, width: int) -> ParameterUses:
        """The uses of a table of rows of `width` elements, with everything outside of `rows` (ascending) set to zero."""

        def outside(ids: Tensor) -> Tensor:
            if rows.numel() == 0:
                return torch.ones_like(ids, dtype=torch.bool)
            at = torch.searchsorted(rows, ids.contiguous()).clamp_max(rows.numel() - 1)
            return rows[at] != ids

        def hidden(first: int, last: int) -> Tensor:
            return outside(torch.arange(first, last, device=rows.device))

        lookups = [replace(lookup, ids=lookup.ids.masked_fill(outside(lookup.ids), -1)) for lookup in self.lookups]
        linears = [replace(linear, grad=linear.grad.masked_fill(hidden(*linear.rows), 0)) for linear in self.linears]
        builts = []
        for built in self.builts:
            first, last = built.span
            unseen = hidden(first // width, (last - 1) // width + 1).repeat_interleave(width)
            start = first - first // width * width
            builts.append(replace(built, values=built.values.masked_fill(unseen[start : start + last - first], 0)))
        return ParameterUses(lookups, linears, builts)

    def touched_rows(self, count: int) -> Tensor:
        """The distinct rows in use, ascending: those of the lookups; all `count` of them if the table is used whole."""
        if self.linears or self.builts:
            return torch.arange(count)
        rows = torch.unique(_cat([lookup.ids for lookup in self.lookups]))
        return rows[1:] if rows.numel() and int(rows[0]) < 0 else rows

    def touched(self) -> tuple[Tensor, Tensor]:
        """The distinct (unit, row) pairs that lookups use: two tensors of equal length, sorted by unit, then row."""
        ids = _cat([lookup.ids for lookup in self.lookups])
        units = _cat([lookup.units for lookup in self.lookups])
        used = ids >= 0
        ids, units = ids[used], units[used]
        if len(self.lookups) == 1 and self.lookups[0].one_each:
            return units, ids
        width = int(ids.max()) + 1 if ids.numel() else 1
        keys = torch.unique(units * width + ids)
        return keys // width, keys % width


def sum_rows(ids: Tensor, values: Tensor) -> RowSparse:
    """Sums `values` (n, d) over equal ids; negative ids are dropped."""
    rows, inverse = torch.unique(ids, return_inverse=True)
    exact = values.to(_sum_dtype(values.dtype, ids.numel(), rows.numel()))
    summed = exact.new_zeros(rows.numel(), values.shape[1]).index_add_(0, inverse, exact).to(values.dtype)
    if rows.numel() and int(rows[0]) < 0:
        return RowSparse(rows[1:], summed[1:])
    return RowSparse(rows, summed)


def _sum_dtype(dtype: torch.dtype, terms: int, sums: int) -> torch.dtype:
    """float64 for long sums: in float32 they would lose more than a ten-thousandth of a single unit's part."""
    return torch.float64 if terms > 8 * max(sums, 1) else dtype


def _cat(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def merge_lookups(lookups: list[Lookup]) -> Lookup:
    if len(lookups) == 1:
        return lookups[0]
    return Lookup(
        ids=torch.cat([lookup.ids for lookup in lookups]),
        units=torch.cat([lookup.units for lookup in lookups]),
        grad=torch.cat([lookup.positions() for lookup in lookups]),
    )


def _merge_linears(linears: list[Linear]) -> list[Linear]:
    """Uses of the same block become one with all their positions."""
    groups: dict[tuple[int, int, int], list[Linear]] = {}
    for linear in linears:
        groups.setdefault((linear.offset, linear.inputs.shape[2], linear.grad.shape[2]), []).append(linear)
    return [
        group[0]
        if len(group) == 1
        else Linear(torch.cat([l.inputs for l in group], 1), torch.cat([l.grad for l in group], 1), group[0].offset)
        for group in groups.values()
    ]


def _merge_builts(builts: list[Built]) -> list[Built]:
    groups: dict[tuple[int, int], Built] = {}
    for built in builts:
        known = groups.get(built.span)
        groups[built.span] = built if known is None else Built(known.values + built.values, built.offset)
    return list(groups.values())


def _can_cancel(piece: Use) -> bool:
    """Whether terms of one unit are added up, so that large ones may cancel."""
    if isinstance(piece, Linear):
        return piece.inputs.shape[1] > 1
    return isinstance(piece, Lookup) and not piece.one_each


def _slack(pieces: list[Use]) -> float:
    dtype = pieces[0].values.dtype if isinstance(pieces[0], Built) else pieces[0].grad.dtype
    return 16 * torch.finfo(dtype).eps


def _norm(x: Tensor) -> Tensor:
    """Norm of each row, in float64."""
    return squared_rows(x).sqrt()


class RowNorms:
    """Squared row norms by tensor, so that none is read twice. For tensors that stay as they are meanwhile."""

    def __init__(self) -> None:
        # With the tensor itself: its memory must not be used for another one that would pass for it.
        self._known: dict[tuple, tuple[Tensor, Tensor]] = {}

    def squared(self, x: Tensor) -> Tensor:
        key = (x.data_ptr(), x.shape, x.stride())
        if key not in self._known:
            self._known[key] = (x, squared_rows(x))
        return self._known[key][1]


def _per_unit(values: Tensor, units: Tensor, count: int) -> Tensor:
    return values.new_zeros(count).index_add_(0, units, values)


def _reach(piece: Use, units: int) -> Tensor:
    """The sum of the norms of a piece's terms, (B,): what rounding errors are proportional to."""
    if isinstance(piece, Linear):
        return (_norm(piece.inputs) * _norm(piece.grad)).sum(1)
    if isinstance(piece, Built):
        return _norm(piece.values)
    norms = _norm(piece.grad)
    norms = norms if piece.source is None else norms[piece.source]
    norms = norms if piece.weight is None else norms * piece.weight.abs().double()
    return _per_unit(norms.masked_fill(piece.ids < 0, 0), piece.units, units)


def _coalesce(lookup: Lookup) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct (unit, row) keys of the positions: the index of each position's key, and the keys' units and rows.

    Padding (-1) is a row of its own; whoever uses the result leaves it out.
    """
    width = (int(lookup.ids.max()) if lookup.ids.numel() else 0) + 2
    keys, inverse = torch.unique(lookup.units * width + (lookup.ids + 1), return_inverse=True)
    return inverse, keys // width, keys % width - 1


def _lookup_norms(lookup: Lookup, units: int) -> Tensor:
    """Squared norms of lookups: equal ids of a unit are added up first."""
    if lookup.one_each:
        return squared_rows(lookup.grad).masked_fill(lookup.ids < 0, 0)
    inverse, key_units, key_rows = _coalesce(lookup)
    if lookup.source is not None and lookup.grad.shape[0] == units:
        # One bag per unit: every row gets a multiple of the same gradient, so only the multiples are added up.
        weight = lookup.weight if lookup.weight is not None else lookup.grad.new_ones(lookup.ids.shape)
        multiples = weight.new_zeros(key_rows.numel()).index_add_(0, inverse, weight)
        squares = multiples.double().square().masked_fill(key_rows < 0, 0)
        return _per_unit(squares, key_units, units) * squared_rows(lookup.grad)
    if key_rows.numel() == lookup.ids.numel():  # nothing repeats
        squares = squared_rows(lookup.positions()).masked_fill(lookup.ids < 0, 0)
        return _per_unit(squares, lookup.units, units)
    positions = lookup.positions().double()
    rows = positions.new_zeros(key_rows.numel(), positions.shape[1]).index_add_(0, inverse, positions)
    return _per_unit(squared_rows(rows).masked_fill(key_rows < 0, 0), key_units, units)


def _own_square(piece: Use, units: int, known: RowNorms) -> Tensor:
    """A use's squared norm. The commonest uses read their tensors once, if nobody did before."""
    if isinstance(piece, Built):
        return known.squared(piece.values)
    if isinstance(piece, Lookup) and piece.one_each:
        return known.squared(piece.grad).masked_fill(piece.ids < 0, 0)
    if isinstance(piece, Linear) and piece.inputs.shape[1] == 1:
        return known.squared(piece.inputs[:, 0]) * known.squared(piece.grad[:, 0])
    return _inner(piece, piece, units)


def _inner(one: Use, other: Use, units: int) -> Tensor:
    """Inner product of two uses' gradients, for each unit, (B,)."""
    if isinstance(one, Lookup):
        # All lookups were merged into one, so two of them are one with itself.
        return _lookup_norms(one, units) if isinstance(other, Lookup) else _lookup_inner(one, other, units)
    if isinstance(other, Lookup):
        return _lookup_inner(other, one, units)
    if isinstance(one, Linear) and isinstance(other, Linear):
        return _linear_inner(one, other)
    if isinstance(one, Built) and isinstance(other, Built):
        return _built_inner(one, other)
    linear, built = (one, other) if isinstance(one, Linear) else (other, one)
    assert isinstance(linear, Linear) and isinstance(built, Built)
    return _built_inner(linear.build(), built)


def _chunks(units: int, elements_per_unit: int) -> Iterator[slice]:
    size = max(1, _TEMPORARY // max(1, elements_per_unit))
    for start in range(0, units, size):
        yield slice(start, min(units, start + size))


def _linear_inner(one: Linear, other: Linear) -> Tensor:
    batch, p, width = one.inputs.shape
    q = other.inputs.shape[1]
    if batch == 0:
        return one.grad.new_zeros(0)
    if width != other.inputs.shape[2] or (one.offset - other.offset) % width:
        return _built_inner(one.build(), other.build())
    start, stop = max(one.rows[0], other.rows[0]), min(one.rows[1], other.rows[1])
    if start >= stop:
        return one.grad.new_zeros(batch)
    g = one.grad[:, :, start - one.rows[0] : stop - one.rows[0]]
    h = other.grad[:, :, start - other.rows[0] : stop - other.rows[0]]
    size = width * (stop - start)
    if one.inputs.dtype != torch.float64 and _out_of_range(one, other):
        # Products of four numbers: beyond float32's range, although each of them is within.
        one, other = (Linear(l.inputs.double(), l.grad.double(), l.offset) for l in (one, other))
        return _linear_inner(one, other)
    if p * q * (width + stop - start) <= (p + q) * size:
        parts = [
            ((one.inputs[s] @ other.inputs[s].mT) * (g[s] @ h[s].mT)).sum((1, 2)).double()
            for s in _chunks(batch, 2 * p * q)
        ]
    else:
        parts = []
        for s in _chunks(batch, 2 * size):
            mine = g[s].mT @ one.inputs[s]
            theirs = mine if one is other else h[s].mT @ other.inputs[s]
            parts.append((mine * theirs).sum((1, 2)))
    return _cat(parts)


def _out_of_range(*linears: Linear) -> bool:
    """Whether inputs or gradients are so large or small that products of four of them leave float32's range."""
    for linear in linears:
        for tensor in (linear.inputs, linear.grad):
            largest = float(tensor.abs().amax()) if tensor.numel() else 1.0
            if largest != 0 and not 1e-8 < largest < 1e8:
                return True
    return False


def _built_inner(one: Built, other: Built) -> Tensor:
    start, stop = max(one.offset, other.offset), min(one.span[1], other.span[1])
    if start >= stop:
        return one.values.new_zeros(one.values.shape[0])
    a = one.values[:, start - one.offset : stop - one.offset]
    return (a * other.values[:, start - other.offset : stop - other.offset]).sum(1)


def _lookup_inner(lookup: Lookup, other: Linear | Built, units: int) -> Tensor:
    positions = lookup.positions()
    if isinstance(other, Linear) and (other.inputs.shape[2] != positions.shape[1] or other.offset % positions.shape[1]):
        other = other.build()
    if isinstance(other, Linear):
        first, last = other.rows
        inside = ((lookup.ids >= first) & (lookup.ids < last)).nonzero().squeeze(1)
        rows, whose, values = lookup.ids[inside] - first, lookup.units[inside], positions[inside]
        parts = []
        for s in _chunks(rows.numel(), other.inputs.shape[1] * (positions.shape[1] + 1)):
            # grad[b, m, id_n] * (g_n . a[b, m]) summed over the m positions of the linear use
            weights = other.grad[whose[s], :, rows[s]]
            parts.append((weights * torch.einsum("nd,nmd->nm", values[s], other.inputs[whose[s]])).sum(1))
        dots = torch.cat(parts) if parts else values.new_zeros(0)
        return _per_unit(dots, whose, units)
    # Elements of the built block that each position's row covers; the rest of the row is outside the block.
    width = positions.shape[1]
    columns = lookup.ids[:, None] * width + torch.arange(width, device=lookup.ids.device) - other.offset
    outside = (columns < 0) | (columns >= other.values.shape[1]) | (lookup.ids < 0)[:, None]
    facing = other.values[lookup.units[:, None], columns.masked_fill(outside, 0)].masked_fill(outside, 0)
    return _per_unit((facing * positions).sum(1), lookup.units, units)


def _add_weighted_product(out: Tensor, linear: Linear, factors: Tensor) -> None:
    """Adds sum over b, p of factors[b] * grad[b,p] outer inputs[b,p], (O, I). The smaller side takes the factors."""
    a, g = linear.inputs, linear.grad
    scale = factors.to(g.dtype)[:, None, None]
    if g.shape[2] <= a.shape[2]:
        g = g * scale
    else:
        a = a * scale
    out.addmm_(g.reshape(-1, g.shape[2]).mT, a.reshape(-1, a.shape[2]))
