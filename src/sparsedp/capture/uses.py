"""What one use of a parameter contributes to each unit's gradient, kept in factored form.

Every use addresses a contiguous block of its parameter W, in row-major order from `offset`:

- `Lookup`: rows of W, each with an output gradient. Unit b's gradient is the sum over its positions n of
  weight[n] * grad[source[n]] at row ids[n].
- `Linear`: the block as a matrix (O, I). Unit b's gradient is the sum over positions p of grad[b,p] outer inputs[b,p].
- `Built`: unit b's gradient on the block is written out, values[b].
- `Softmax`: the block as logits of a softmax over its rows; a `Linear` whose grad is computed anew when it is needed.

A parameter's per-unit gradient is the sum of its uses, and its squared norm the sum of their pairwise inner products
(ghost clipping; DPFormer's Claim 4.1 for tied embeddings is the Lookup x Linear case). No tensor of size
units x rows x dim is formed for a table.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.lengths import is_range, places_of, units_by_length
from sparsedp.capture.products import chunks, dots, inner_products, squared_products, uncertainty
from sparsedp.capture.softmax import Softmax, merge_softmaxes
from sparsedp.errors import SparseDPError
from sparsedp.kernels.loops import group, outer_products, squared_rows, squared_sums

# Elements that a temporary of the norm computation may have; larger ones are computed for some units at a time.
_TEMPORARY = 1 << 24
# Elements of a matrix up to which its gradient may be written out for every unit.
_SMALL = 1 << 16


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

    def __post_init__(self) -> None:
        """Compiled loops trust these lengths."""
        if self.ids.dtype != torch.int64 or self.units.dtype != torch.int64:
            raise SparseDPError(f"A lookup has int64 ids and units, not {self.ids.dtype} and {self.units.dtype}.")
        count = len(self.grad) if self.source is None else len(self.source)
        if not len(self.ids) == len(self.units) == count or not (self.weight is None or len(self.weight) == count):
            raise SparseDPError(
                f"A lookup has a unit, a gradient and a weight for each of its ids, but {len(self.ids)} ids came with "
                f"{len(self.units)} units, {count} gradients and {count if self.weight is None else len(self.weight)} weights."
            )

    def positions(self) -> Tensor:
        """The gradient of each position, (N, d)."""
        values = self.grad if self.source is None else self.grad[self.source]
        return values if self.weight is None else values * self.weight[:, None]

    def taken(self, at: Tensor) -> Tensor:
        """The gradient of some positions, (n, d)."""
        values = self.grad[at if self.source is None else self.source[at]]
        return values if self.weight is None else values * self.weight[at, None]

    def squares(self, known: RowNorms) -> Tensor:
        """The squared norm of each position's gradient, (N,), float64."""
        found = known.squared(self.grad)
        found = found if self.source is None else found[self.source]
        return found if self.weight is None else found * self.weight.double().square()

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
        if self.inputs.shape[1] == 1:
            return Built(outer_products(self.grad[:, 0], self.inputs[:, 0]), self.offset)
        values = torch.einsum("bpo,bpi->boi", self.grad, self.inputs)
        return Built(values.flatten(1), self.offset)


@dataclass
class Built:
    values: Tensor  # (B, n)
    offset: int

    @property
    def span(self) -> tuple[int, int]:
        return self.offset, self.offset + self.values.shape[1]


Use = Lookup | Linear | Built | Softmax


@dataclass
class ParameterUses:
    """All uses of one parameter by the units of one batch, merged so that there are few of them."""

    lookups: list[Lookup]
    linears: list[Linear]
    builts: list[Built]
    softmaxes: list[Softmax] = field(default_factory=list)

    @staticmethod
    def of(uses: list[Use]) -> ParameterUses:
        return ParameterUses(
            merge_lookups([use for use in uses if isinstance(use, Lookup)]),
            _merge_linears([use for use in uses if isinstance(use, Linear)]),
            _merge_builts([use for use in uses if isinstance(use, Built)]),
            merge_softmaxes([use for use in uses if isinstance(use, Softmax)]),
        )

    def written_out(self) -> ParameterUses:
        """Linear uses of a small matrix at many positions become `Built`, which is smaller; norm and sum share the work.

        For the uses that sums are made of as well, so that both see the same rounded numbers.
        """
        small = [linear for linear in self.linears if _is_smaller_built(linear)]
        if not small:
            return self
        kept = [linear for linear in self.linears if not _is_smaller_built(linear)]
        builts = _merge_builts([*self.builts, *(linear.build() for linear in small)])
        return replace(self, linears=kept, builts=builts)

    @property
    def whole(self) -> bool:
        """Whether there are other uses than lookups: of a table, all of its rows are in use then."""
        return bool(self.linears or self.builts or self.softmaxes)

    def squared_norms(self, units: int, known: RowNorms | None = None) -> Tensor:
        """Squared norm of each unit's gradient, (B,), never below the true one by more than rounding.

        `known` keeps row norms that parameters share, such as those of the output gradient of a weight and its bias.

        Where uses can cancel, rounding grows with the terms and not with the result. The slack, a multiple of the
        squared sum of the terms' norms, keeps a unit whose large terms cancel from passing as small.
        """
        pieces: list[Use] = [*self.linears, *self.builts, *self.softmaxes, *merge_lookups(self.lookups)]
        known = RowNorms() if known is None else known
        squares = [_own_square(piece, units, known).double() for piece in pieces]
        if len(pieces) == 1 and not _can_cancel(pieces[0]):
            return squares[0]
        total = torch.stack(squares).sum(0)
        reach = torch.stack([_reach(piece, units, known).double() for piece in pieces]).sum(0)
        for index, piece in enumerate(pieces):
            for other in pieces[:index]:
                total = total + 2 * _inner(piece, other, units, known)
        rounding = slack(pieces)
        found = total.clamp_min(0) + rounding * reach.square()
        if self.softmaxes:
            # What a softmax may differ by counts times whatever it is multiplied with, also if that cancels.
            drift = torch.stack([softmax.drift() for softmax in self.softmaxes]).sum(0)
            sizes = torch.stack(squares).clamp_min(0).sqrt().sum(0) + rounding**0.5 * reach
            found = found + 2 * drift * sizes + drift.square()
        return found

    def weighted_sum(self, factors: Tensor, shape: torch.Size) -> Tensor | RowSparse:
        """The sum over units of factor times gradient; row-sparse if there are lookups only."""
        if not self.whole:
            return self._weighted_rows(factors)
        pieces: list[Use] = [*self.linears, *self.builts, *self.softmaxes]
        first = _values(pieces[0])
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
        for softmax in self.softmaxes:
            softmax.add_weighted_sum(flat.view(-1, softmax.width), factors)

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
        linears, written = [], []
        for linear in self.linears:
            if width == 1 and linear.grad.shape[2] == 1:  # a row of all elements is as well one element of every row
                linear = Linear(linear.grad, linear.inputs, linear.offset)
            if linear.inputs.shape[2] == width and linear.offset % width == 0:
                linears.append(replace(linear, grad=linear.grad.masked_fill(hidden(*linear.rows), 0)))
            else:  # its rows are not the table's
                written.append(linear.build())
        builts = []
        for built in [*self.builts, *written]:
            first, last = built.span
            unseen = hidden(first // width, (last - 1) // width + 1).repeat_interleave(width)
            start = first - first // width * width
            builts.append(replace(built, values=built.values.masked_fill(unseen[start : start + last - first], 0)))
        return ParameterUses(lookups, linears, builts, [softmax.restricted(rows) for softmax in self.softmaxes])

    def touched_rows(self, count: int) -> Tensor:
        """The distinct rows in use, ascending: those of the lookups; all `count` of them if the table is used whole."""
        if self.whole:
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


def merge_lookups(lookups: list[Lookup]) -> list[Lookup]:
    if len(lookups) < 2:
        return lookups
    return [
        Lookup(
            ids=torch.cat([lookup.ids for lookup in lookups]),
            units=torch.cat([lookup.units for lookup in lookups]),
            grad=torch.cat([lookup.positions() for lookup in lookups]),
        )
    ]


def _merge_linears(linears: list[Linear]) -> list[Linear]:
    """Uses of the same block become one with all their positions."""
    groups: dict[tuple[int, int, int], list[Linear]] = {}
    for linear in linears:
        groups.setdefault((linear.offset, linear.inputs.shape[2], linear.grad.shape[2]), []).append(linear)
    return [
        same[0]
        if len(same) == 1
        else Linear(torch.cat([l.inputs for l in same], 1), torch.cat([l.grad for l in same], 1), same[0].offset)
        for same in groups.values()
    ]


def _is_smaller_built(linear: Linear) -> bool:
    _, positions, width = linear.inputs.shape
    height = linear.grad.shape[2]
    return width * height <= min(_SMALL, positions * (width + height))


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
    return isinstance(piece, Softmax) or (isinstance(piece, Lookup) and not piece.one_each)


def slack(pieces: list[Use]) -> float:
    """What the squared sum of the terms' norms is multiplied by; see `ParameterUses.squared_norms`."""
    return (16 + max(map(_uncertainty, pieces))) * torch.finfo(_values(pieces[0]).dtype).eps


def _uncertainty(piece: Use) -> float:
    if isinstance(piece, Linear):
        return uncertainty(piece.inputs.shape[1], piece.inputs.shape[2], piece.grad.shape[2])
    if isinstance(piece, Softmax):
        return uncertainty(piece.hidden.shape[1], piece.hidden.shape[2], piece.size)
    return 0.0  # added up in float64, or written out


def _values(piece: Use) -> Tensor:
    """A tensor of the use's type and device."""
    if isinstance(piece, Softmax):
        return piece.hidden
    return piece.values if isinstance(piece, Built) else piece.grad


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


def _reach(piece: Use, units: int, known: RowNorms) -> Tensor:
    """The sum of the norms of a piece's terms, (B,): what rounding errors are proportional to."""
    if isinstance(piece, Linear):
        return (known.squared(piece.inputs) * known.squared(piece.grad)).sqrt().sum(1)
    if isinstance(piece, Built):
        return known.squared(piece.values).sqrt()
    if isinstance(piece, Softmax):
        return piece.reach()
    norms = known.squared(piece.grad).sqrt()
    norms = norms if piece.source is None else norms[piece.source]
    norms = norms if piece.weight is None else norms * piece.weight.abs().double()
    return _per_unit(norms.masked_fill(piece.ids < 0, 0), piece.units, units)


def _lookup_norms(lookup: Lookup, units: int) -> Tensor:
    """Squared norms of lookups: equal ids of a unit are added up first."""
    if lookup.one_each:
        return squared_rows(lookup.grad).masked_fill(lookup.ids < 0, 0)
    width = (int(lookup.ids.max()) if lookup.ids.numel() else 0) + 2
    keys, begin, order = group(lookup.units * width + (lookup.ids + 1))
    key_units, key_rows = keys // width, keys % width - 1  # padding (-1) is a row of its own, which is left out
    if lookup.source is not None and lookup.source is lookup.units and lookup.grad.shape[0] == units:
        # One bag per unit: every row gets a multiple of the same gradient, so only the multiples are added up.
        multiples = lookup.grad.new_ones(lookup.ids.shape) if lookup.weight is None else lookup.weight
        squares = squared_sums(begin[:-1], begin[1:], order, 0, multiples[:, None], None, None).masked_fill_(
            key_rows < 0, 0
        )
        return _per_unit(squares, key_units, units) * squared_rows(lookup.grad)
    squares = squared_sums(begin[:-1], begin[1:], order, 0, lookup.grad, lookup.source, lookup.weight)
    return _per_unit(squares.masked_fill_(key_rows < 0, 0), key_units, units)


def _own_square(piece: Use, units: int, known: RowNorms) -> Tensor:
    """A use's squared norm. The commonest uses read their tensors once, if nobody did before."""
    if isinstance(piece, Built):
        return known.squared(piece.values)
    if isinstance(piece, Lookup) and piece.one_each:
        return known.squared(piece.grad).masked_fill(piece.ids < 0, 0)
    if isinstance(piece, Linear) and piece.inputs.shape[1] == 1:
        return known.squared(piece.inputs[:, 0]) * known.squared(piece.grad[:, 0])
    return _inner(piece, piece, units, known)


def _inner(one: Use, other: Use, units: int, known: RowNorms) -> Tensor:
    """Inner product of two uses' gradients, for each unit, (B,)."""
    if isinstance(one, Lookup):
        # All lookups were merged into one, so two of them are one with itself.
        return _lookup_norms(one, units) if isinstance(other, Lookup) else _lookup_inner(one, other, units)
    if isinstance(other, Lookup):
        return _lookup_inner(other, one, units)
    if isinstance(one, Softmax):
        return one.squared_norms() if one is other else _softmax_inner(one, other, units)
    if isinstance(other, Softmax):
        return _softmax_inner(other, one, units)
    if isinstance(one, Linear) and isinstance(other, Linear):
        return _linear_inner(one, other, known)
    if isinstance(one, Built) and isinstance(other, Built):
        return _built_inner(one, other)
    linear, built = (one, other) if isinstance(one, Linear) else (other, one)
    assert isinstance(linear, Linear) and isinstance(built, Built)
    return _built_inner(linear.build(), built)


def _linear_inner(one: Linear, other: Linear, known: RowNorms) -> Tensor:
    batch, _, width = one.inputs.shape
    if batch == 0:
        return one.grad.new_zeros(0)
    if width != other.inputs.shape[2] or (one.offset - other.offset) % width:
        return _built_inner(one.build(), other.build())
    start, stop = max(one.rows[0], other.rows[0]), min(one.rows[1], other.rows[1])
    if start >= stop:
        return one.grad.new_zeros(batch)
    same = one is other
    if one.inputs.dtype != torch.float64 and (_out_of_range(one, known) or (not same and _out_of_range(other, known))):
        # Products of four numbers: beyond float32's range, although each of them is within.
        one = Linear(one.inputs.double(), one.grad.double(), one.offset)
        other = one if same else Linear(other.inputs.double(), other.grad.double(), other.offset)
    if same:
        return squared_products(one.inputs, one.grad, _TEMPORARY)
    g = one.grad[:, :, start - one.rows[0] : stop - one.rows[0]]
    h = other.grad[:, :, start - other.rows[0] : stop - other.rows[0]]
    return inner_products(one.inputs, g, other.inputs, h, _TEMPORARY)


def _softmax_inner(softmax: Softmax, other: Linear | Built | Softmax, units: int) -> Tensor:
    """With other whole uses of the table, which is rare: the logits' gradient is written out for some units at a time."""
    parts = []
    positions, offset = softmax.hidden.shape[1], softmax.first * softmax.width
    for s in chunks(units, positions * softmax.table().shape[0], _TEMPORARY):
        mine: Use = Linear(softmax.hidden[s], softmax.dense(s), offset)
        if isinstance(other, Softmax):
            theirs: Use = Linear(other.hidden[s], other.dense(s), other.first * other.width)
        elif isinstance(other, Linear):
            theirs = Linear(other.inputs[s], other.grad[s], other.offset)
        else:
            theirs = Built(other.values[s], other.offset)
        parts.append(_inner(mine, theirs, s.stop - s.start, RowNorms()).double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _out_of_range(linear: Linear, known: RowNorms) -> bool:
    """Whether inputs or gradients are so large or small that products of four of them leave float32's range."""
    for tensor in (linear.inputs, linear.grad):
        largest = float(known.squared(tensor).amax()) if tensor.numel() else 1.0
        if largest != 0 and not 1e-16 < largest < 1e16:
            return True
    return False


def _built_inner(one: Built, other: Built) -> Tensor:
    start, stop = max(one.offset, other.offset), min(one.span[1], other.span[1])
    if start >= stop:
        return one.values.new_zeros(one.values.shape[0])
    a = one.values[:, start - one.offset : stop - one.offset]
    return (a * other.values[:, start - other.offset : stop - other.offset]).sum(1)


def _lookup_inner(lookup: Lookup, other: Linear | Built | Softmax, units: int) -> Tensor:
    positions = lookup.positions()
    width = positions.shape[1]
    if isinstance(other, Linear) and (other.inputs.shape[2] != width or other.offset % width):
        other = other.build()
    if isinstance(other, (Linear, Softmax)):
        return _tied_inner(lookup, positions, other, units)
    # Elements of the built block that each position's row covers; the rest of the row is outside the block.
    columns = lookup.ids[:, None] * width + torch.arange(width, device=lookup.ids.device) - other.offset
    outside = (columns < 0) | (columns >= other.values.shape[1]) | (lookup.ids < 0)[:, None]
    facing = other.values[lookup.units[:, None], columns.masked_fill(outside, 0)].masked_fill(outside, 0)
    return _per_unit((facing * positions).sum(1), lookup.units, units)


def _tied_inner(lookup: Lookup, values: Tensor, other: Linear | Softmax, units: int) -> Tensor:
    """Sum over l, m of G[m, id_l] (g_l . a_m): the last term of DPFormer's Claim 4.1. `values` (N, d) are the g_l."""
    inputs = other.inputs if isinstance(other, Linear) else other.hidden
    lengths, places = places_of(lookup.units, units)
    begin = lengths.cumsum(0) - lengths
    total = torch.zeros(units, dtype=torch.float64, device=values.device)
    for whose, n in units_by_length(lengths, 3 * inputs.shape[1] + 2 * values.shape[1], _TEMPORARY):
        own: Tensor | slice = slice(int(whose[0]), int(whose[-1]) + 1) if is_range(whose) else whose
        step = torch.arange(n, device=places.device)
        missing = step >= lengths[whose, None]
        at = places[(begin[whose, None] + step).masked_fill(missing, 0)]
        ids = lookup.ids[at].masked_fill(missing, -1)
        total[whose] = (_facing(other, own, ids) * dots(inputs[own], values[at])).sum((1, 2))  # each (u, P, n)
    return total


def _facing(use: Linear | Softmax, units: Tensor | slice, ids: Tensor) -> Tensor:
    """G[b, p, id] for units (u,) and rows of the table, ids (u, n): (u, P, n); 0 for rows that the use does not have."""
    if isinstance(use, Softmax):
        return use.at(units, ids)
    first, last = use.rows
    outside = ((ids < first) | (ids >= last))[:, None, :]
    columns = (ids[:, None, :] - first).masked_fill(outside, 0)
    if isinstance(units, slice):
        grad = use.grad[units]
        found = grad.gather(2, columns.expand(-1, grad.shape[1], -1))
    else:  # not grad[units]: that would copy all of these units' gradients
        found = use.grad[units[:, None, None], torch.arange(use.grad.shape[1], device=ids.device)[:, None], columns]
    return found.masked_fill(outside, 0)


def _add_weighted_product(out: Tensor, linear: Linear, factors: Tensor) -> None:
    """Adds sum over b, p of factors[b] * grad[b,p] outer inputs[b,p], (O, I). The smaller side takes the factors."""
    a, g = linear.inputs, linear.grad
    scale = factors.to(g.dtype)[:, None, None]
    if g.shape[2] <= a.shape[2]:
        g = g * scale
    else:
        a = a * scale
    out.addmm_(g.reshape(-1, g.shape[2]).mT, a.reshape(-1, a.shape[2]))
