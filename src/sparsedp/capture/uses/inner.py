"""Inner products of two uses of one parameter, unit by unit.

A unit's gradient is the sum of its uses, so its squared norm is the sum of their inner products. For every two kinds, in either
order, summed over the positions l, m, p, q of the unit:

|         | Lookup                 | Linear                   | Softmax                  | Built            |
| ------- | ---------------------- | ------------------------ | ------------------------ | ---------------- |
| Lookup  | e_l . e'_m, equal ids  | g[p, id_l] (e_l . a_p)   | G[p, id_l] (e_l . h_p)   | e_l . v[id_l]    |
| Linear  |                        | (a_p . a'_q)(g_p . g'_q) | (a_p . h_q)(g_p . G_q)   | (g_p x a_p) . v  |
| Softmax |                        |                          | (h_p . h'_q)(G_p . G'_q) | (G_p x h_p) . v  |
| Built   |                        |                          |                          | v . v'           |

A lookup has the gradient e_l at row id_l, a linear map inputs a and output gradients g, a softmax hidden states h and the
gradient G of its logits; v is a gradient that is written out, and x the outer product.

- Lookup x Lookup is the first term of DPFormer's (4.1), and (B.3) of its proof, without the square that is printed in (4.1).
- Lookup x Linear and Lookup x Softmax are its last term and (B.6), the cross term of a tied table: phantom clipping.
- Linear x Linear is ghost clipping: (B.3) with inputs that need not be one-hot. It also gives the second term of (4.1) without
  a gradient of the size of the table. With one position it is |a|^2 |g|^2.

What is `Carried` is written out one unit at a time, and then `Built`. Nothing of the size units x rows x dim is formed for a
table. A use with itself is `Use.squared_norms`, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture import products
from sparsedp.capture.lengths import is_range, places_of, units_by_length
from sparsedp.capture.uses.base import RowNorms, Use, places_among, sum_by_unit
from sparsedp.capture.uses.built import Built
from sparsedp.capture.uses.carried import Carried
from sparsedp.capture.uses.linear import Linear
from sparsedp.capture.uses.lookup import Lookup, sum_rows
from sparsedp.capture.uses.softmax import Softmax


def inner(one: Use, other: Use, units: int, row_norms: RowNorms) -> Tensor:
    """The inner product of two uses' gradients for each unit, (B,)."""
    return INNER[type(one), type(other)](one, other, units, row_norms)


def _lookup_lookup(one: Lookup, other: Lookup, units: int, row_norms: RowNorms) -> Tensor:
    """Sum over the rows that a unit has in both of the inner product of what it adds to them, float64."""
    width = 1 + max(int(lookup.ids.max()) if lookup.ids.numel() else 0 for lookup in (one, other))
    (keys, values), (other_keys, other_values) = (
        sum_rows((lookup.units * width + lookup.ids).masked_fill(lookup.ids < 0, -1), lookup.positions().double())
        for lookup in (one, other)
    )
    at = places_among(keys, other_keys)
    common = at >= 0
    products_of_rows = (values[at[common]] * other_values[common]).sum(1)
    return sum_by_unit(products_of_rows, other_keys[common] // width, units)


def _lookup_linear(lookup: Lookup, linear: Linear, units: int, row_norms: RowNorms) -> Tensor:
    width = lookup.grad.shape[1]
    if linear.inputs.shape[2] != width or linear.offset % width:  # its rows are not the table's
        return _lookup_built(lookup, linear.build(), units, row_norms)
    return _tied(lookup, linear.inputs, linear.gradient_at, units)


def _lookup_softmax(lookup: Lookup, softmax: Softmax, units: int, row_norms: RowNorms) -> Tensor:
    return _tied(lookup, softmax.hidden, softmax.gradient_at, units)


def _lookup_built(lookup: Lookup, built: Built, units: int, row_norms: RowNorms) -> Tensor:
    positions = lookup.positions()
    width = positions.shape[1]
    # Elements of the built block that each position's row covers; the rest of the row is outside the block.
    columns = lookup.ids[:, None] * width + torch.arange(width, device=lookup.ids.device) - built.offset
    outside = (columns < 0) | (columns >= built.values.shape[1]) | (lookup.ids < 0)[:, None]
    facing = built.values[lookup.units[:, None], columns.masked_fill(outside, 0)].masked_fill(outside, 0)
    return sum_by_unit((facing * positions).sum(1), lookup.units, units)


def _linear_linear(one: Linear, other: Linear, units: int, row_norms: RowNorms) -> Tensor:
    width = one.inputs.shape[2]
    if units == 0:
        return one.grad.new_zeros(0)
    if width != other.inputs.shape[2] or (one.offset - other.offset) % width:  # their rows are not the same
        return _built_built(one.build(), other.build(), units, row_norms)
    (first, last), (other_first, other_last) = one.rows, other.rows
    start, stop = max(first, other_first), min(last, other_last)
    if start >= stop:
        return one.grad.new_zeros(units)
    if one.is_out_of_range(row_norms) or other.is_out_of_range(row_norms):
        one, other = one.in_float64(), other.in_float64()
    grad = one.grad[:, :, start - first : stop - first]
    other_grad = other.grad[:, :, start - other_first : stop - other_first]
    return products.inner_products(one.inputs, grad, other.inputs, other_grad, products.TEMPORARY)


def _linear_built(linear: Linear, built: Built, units: int, row_norms: RowNorms) -> Tensor:
    return _built_built(linear.build(), built, units, row_norms)


def _built_built(one: Built, other: Built, units: int, row_norms: RowNorms) -> Tensor:
    start, stop = max(one.offset, other.offset), min(one.span[1], other.span[1])
    if start >= stop:
        return one.values.new_zeros(one.values.shape[0])
    values = one.values[:, start - one.offset : stop - one.offset]
    return (values * other.values[:, start - other.offset : stop - other.offset]).sum(1)


def _softmax_softmax(one: Softmax, other: Softmax, units: int, row_norms: RowNorms) -> Tensor:
    return _written_out(one, other.as_linear, _linear_linear, units)


def _softmax_linear(softmax: Softmax, linear: Linear, units: int, row_norms: RowNorms) -> Tensor:
    return _written_out(softmax, linear.of_units, _linear_linear, units)


def _softmax_built(softmax: Softmax, built: Built, units: int, row_norms: RowNorms) -> Tensor:
    return _written_out(softmax, built.of_units, _linear_built, units)


def _carried_other(carried: Carried, other: Use, units: int, row_norms: RowNorms) -> Tensor:
    parts = [inner(built, _of_unit(other, unit), 1, RowNorms()).double() for unit, built in enumerate(carried.each())]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _of_unit(use: Use, unit: int) -> Use:
    if isinstance(use, Lookup):
        return use.of_unit(unit)
    at = slice(unit, unit + 1)
    if isinstance(use, Softmax):
        return use.as_linear(at)
    assert isinstance(use, (Linear, Built))
    return use.of_units(at)


def _carried_carried(one: Carried, other: Carried, units: int, row_norms: RowNorms) -> Tensor:
    parts = [_built_built(mine, theirs, 1, row_norms).double() for mine, theirs in zip(one.each(), other.each())]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


# Takes two uses, the number of units, and row norms that are at hand. Gives the inner product for each unit, (B,).
Inner = Callable[[Any, Any, int, RowNorms], Tensor]


def _exchanged(pair: Inner) -> Inner:
    return lambda one, other, units, row_norms: pair(other, one, units, row_norms)


_PAIRS: dict[tuple[type[Use], type[Use]], Inner] = {
    (Lookup, Lookup): _lookup_lookup,
    (Lookup, Linear): _lookup_linear,
    (Lookup, Softmax): _lookup_softmax,
    (Lookup, Built): _lookup_built,
    (Linear, Linear): _linear_linear,
    (Linear, Built): _linear_built,
    (Softmax, Softmax): _softmax_softmax,
    (Softmax, Linear): _softmax_linear,
    (Softmax, Built): _softmax_built,
    (Built, Built): _built_built,
    (Carried, Lookup): _carried_other,
    (Carried, Linear): _carried_other,
    (Carried, Softmax): _carried_other,
    (Carried, Built): _carried_other,
    (Carried, Carried): _carried_carried,
}
INNER = {(other, one): _exchanged(pair) for (one, other), pair in _PAIRS.items()} | _PAIRS


# ---------------------------------------------------------------------- what several pairs share


def _tied(
    lookup: Lookup, inputs: Tensor, gradient_at: Callable[[Tensor | slice, Tensor], Tensor], units: int
) -> Tensor:
    """Sum over l, p of g[p, id_l] (e_l . a_p), float64: the last term of DPFormer's Claim 4.1.

    The a_p are `inputs` (B, P, d), the e_l those of `lookup`, and `gradient_at` gives g; see `Linear.gradient_at`.
    """
    grads = lookup.positions()
    lengths, places = places_of(lookup.units, units)
    begin = lengths.cumsum(0) - lengths
    total = torch.zeros(units, dtype=torch.float64, device=grads.device)
    per_position = 3 * inputs.shape[1] + 2 * grads.shape[1]
    for some, n in units_by_length(lengths, per_position, products.TEMPORARY):
        index: Tensor | slice = slice(int(some[0]), int(some[-1]) + 1) if is_range(some) else some
        step = torch.arange(n, device=places.device)
        missing = step >= lengths[some, None]
        at = places[(begin[some, None] + step).masked_fill(missing, 0)]
        ids = lookup.ids[at].masked_fill(missing, -1)
        # Both factors are (u, P, n).
        total[some] = (gradient_at(index, ids) * products.dots(inputs[index], grads[at])).sum((1, 2))
    return total


def _written_out(softmax: Softmax, other: Callable[[slice], Use], pair: Inner, units: int) -> Tensor:
    """With the gradient of the softmax's logits written out for some units at a time: these pairs are rare.

    `other` gives the other use for some units. float64.
    """
    parts = []
    elements = softmax.hidden.shape[1] * softmax.table().shape[0]
    for s in products.chunks(units, elements, products.TEMPORARY):
        parts.append(pair(softmax.as_linear(s), other(s), s.stop - s.start, RowNorms()).double())
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
