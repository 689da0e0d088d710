"""Loops over the rows of lookups that torch has no single operation for, compiled by Numba for the CPU.

Each is one function with a plain torch path beside it, which gives the same result up to rounding and which other
devices run. Numba's own threads are not used: they would compete with torch's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsedp.kernels.compiler import compile_loop
from sparsedp.kernels.threads import on_all_cores, split

LARGEST = 1e30  # that the norm of a unit's gradient may be, and that of each factor of it
_COMPILED_TYPES = {torch.float32, torch.float64, torch.int64, torch.int32, torch.bool}
# Elements that are computed sooner than a thread is woken.
_FEW = 1 << 17
_NONE = np.empty(0, np.int64)
_NO_FACTORS = np.empty(0, np.float64)


def compiled(*tensors: Tensor) -> bool:
    """Whether the compiled path can take these tensors."""
    for tensor in tensors:  # noqa: SIM110 - all() takes twice as long, many times a step
        if not tensor.is_cpu or tensor.dtype not in _COMPILED_TYPES:
            return False
    return True


def group(keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct keys (R,), ascending; where each one's positions begin, (R + 1,); the positions by key, (P,).

    `keys` (P,) are not negative. Positions of a key keep their order.
    """
    bits = max(1, keys.numel() - 1).bit_length()
    if keys.is_cpu and keys.numel():
        # One sort of 64-bit numbers that hold key and position: numpy's is several times faster than an argsort.
        fits, packed = _packed(keys.numpy(), bits)
        if fits:
            packed.sort()
            distinct, begin, positions = _unpacked(packed, bits)
            return torch.from_numpy(distinct), torch.from_numpy(begin), torch.from_numpy(positions)
    ascending, order = torch.sort(keys, stable=True)
    distinct, counts = torch.unique_consecutive(ascending, return_counts=True)
    return distinct, torch.cat([counts.new_zeros(1), counts.cumsum(0)]), order


def distinct_with_places(keys: Tensor) -> tuple[Tensor, Tensor]:
    """As torch.unique(keys, return_inverse=True), of keys that are not negative."""
    ascending, begin, positions = group(keys)
    places = torch.empty_like(positions)
    places[positions] = numbered(begin)
    return ascending, places


def numbered(begin: Tensor) -> Tensor:
    """The group of each position, (P,), where group r has the positions begin[r] to begin[r + 1] - 1."""
    if compiled(begin):
        return torch.from_numpy(_numbered(begin.numpy()))
    return torch.arange(len(begin) - 1, device=begin.device).repeat_interleave(begin.diff())


def repeated(values: Tensor, counts: Tensor) -> Tensor:
    """values[i] counts[i] times, for each i."""
    if compiled(values, counts):  # numpy's takes a quarter of the time of torch's
        return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))
    return values.repeat_interleave(counts)


def find(ascending: Tensor, wanted: Tensor) -> Tensor:
    """The place of each of `wanted` in `ascending`, both ascending and distinct; -1 for what is not there."""
    if compiled(ascending, wanted):
        return torch.from_numpy(_find(ascending.numpy(), wanted.numpy()))
    if ascending.numel() == 0:
        return torch.full_like(wanted, -1)
    at = torch.searchsorted(ascending, wanted).clamp_max(ascending.numel() - 1)
    return at.masked_fill(ascending[at] != wanted, -1)


def squared_rows(x: Tensor) -> Tensor:
    """Squared norm of each row of x (..., d), float64, beyond the range of float32, too; infinite from LARGEST on.

    A factor of a gradient that is larger than that may meet one that is so small, times a clip factor, that float32 has few
    digits left for it.
    """
    if not compiled(x):
        norms = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        return norms.masked_fill_(~(norms < LARGEST), torch.inf).square()
    # In float64: a float32 sum over a long row loses all elements that are small beside the largest.
    flat, stride = _flat(x.flatten(0, -2))
    *shape, width = x.shape
    squares = np.empty(shape, np.float64)
    each = squares.reshape(-1)
    pieces = split(len(each), width)
    on_all_cores(lambda part: _squared_rows(flat, stride, width, part.start, part.stop, each), pieces)
    return torch.from_numpy(squares)


def squared_rows_of_each(tensors: list[Tensor]) -> Tensor:
    """`squared_rows` of each of some tensors (n, d), with d of their own, as (tensors, n)."""
    one = tensors[0]
    if len(tensors) == 1:
        return squared_rows(one)[None]
    begins = [tensor.storage_offset() for tensor in tensors]
    widths = [tensor.shape[1] for tensor in tensors]
    if not (compiled(one) and one.numel() and all(_beside(one, x) for x in tensors)):
        return torch.stack([squared_rows(tensor) for tensor in tensors])
    # Parts of one matrix, such as the gradient of what was concatenated: every row of it is read from end to end.
    (rows, _), stride, first = one.shape, one.stride(0), min(begins)
    last = (rows - 1) * stride + max(begin + width for begin, width in zip(begins, widths))
    flat = one.as_strided((last - first,), (1,), first).numpy()
    places, lengths = np.array(begins) - first, np.array(widths)
    squares = np.empty((len(tensors), rows), np.float64)
    pieces = split(rows, sum(widths))
    on_all_cores(lambda part: _squared_parts(flat, stride, places, lengths, part.start, part.stop, squares), pieces)
    return torch.from_numpy(squares)


def _beside(one: Tensor, other: Tensor) -> bool:
    """Whether two matrices are columns of a common one."""
    return (
        one.dtype == other.dtype
        and one.shape[0] == other.shape[0]
        and one.stride(0) == other.stride(0) > 0
        and one.stride(1) == other.stride(1) == 1
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )


def in_slots(values: Tensor, slots: Tensor, begin: Tensor, order: Tensor) -> Tensor:
    """`values` (n,) at the positions of rows that have a slot (not -1), else 0. Row r has order[begin[r] : begin[r + 1]]."""
    if compiled(values, slots, begin, order):
        return torch.from_numpy(_in_slots(values.numpy(), slots.numpy(), begin.numpy(), order.numpy()))
    without_slot = torch.ones(values.shape, dtype=torch.bool, device=order.device)
    without_slot[order] = (slots < 0).repeat_interleave(begin.diff())
    return values.masked_fill(without_slot, 0)


def outer_products(a: Tensor, b: Tensor) -> Tensor:
    """a[n, i] b[n, j] for a (N, I) and b (N, J), as (N, I J)."""
    if a.numel() * b.shape[1] <= _FEW and a.dtype == b.dtype and compiled(a, b):  # torch would wake its threads for it
        return torch.from_numpy(_outer_products(a.contiguous().numpy(), b.contiguous().numpy()))
    return (a[:, :, None] * b[:, None, :]).flatten(1)


def scaled_rows(x: Tensor, factors: Tensor) -> Tensor:
    """factors[n] * x[n] for x (N, d)."""
    if x.numel() <= _FEW and x.dtype == factors.dtype and compiled(x, factors):  # torch would wake its threads for it
        flat, stride = _flat(x)
        return torch.from_numpy(_scaled_rows(flat, stride, x.shape[1], factors.numpy()))
    return x * factors[:, None]


def narrower_scaled(left: Tensor, right: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Two matrices, of which the one with fewer columns has its rows multiplied by the factors."""
    if left.shape[1] <= right.shape[1]:
        return scaled_rows(left, factors), right
    return left, scaled_rows(right, factors)


def add_rows(
    out: Tensor, slots: Tensor, begin: Tensor, order: Tensor, first: int, grad: Tensor, source: Tensor | None,
    factor: Tensor,
) -> None:  # fmt: skip
    """Adds to out[slots[r]] the sum over the positions n of row r of factor[n] * grad[source[n]], rows with slot -1 left out.

    Row r has the positions order[begin[r] : begin[r + 1]] - first. `source` None: grad[n].
    """
    if compiled(out, grad, factor):
        places = _NONE if source is None else source.numpy()
        flat, stride = _flat(grad)
        _add_rows(out.numpy(), slots.numpy(), begin.numpy(), order.numpy(), first, flat, stride, places, factor.numpy())
        return
    position = order[begin[0] : begin[-1]] - first
    slot = slots.repeat_interleave(begin.diff())
    kept = slot >= 0
    position, slot = position[kept], slot[kept]
    values = grad[position if source is None else source[position]].double() * factor[position, None].double()
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device).index_add_(0, slot, values)
    out.add_(total.to(out.dtype))


def add_weighted_rows(out: Tensor, values: Tensor, factors: Tensor) -> None:
    """Adds the sum over k of factors[k] * values[k] to `out` (n,), for `values` (K, n), added up in float64.

    In float32 thousands of equal terms lose the same last digits one after another, which may come to as much as a term.
    """
    if compiled(out, values, factors):
        flat, stride = _flat(values)
        target, weights = out.numpy(), factors.numpy()
        pieces = split(*reversed(values.shape))
        on_all_cores(lambda part: _add_weighted_rows(target, flat, stride, weights, part.start, part.stop), pieces)
        return
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    size = max(1, _FEW // max(1, values.shape[1]))
    for first in range(0, len(values), size):
        total.addmv_(values[first : first + size].double().mT, factors[first : first + size].double())
    out.add_(total.to(out.dtype))


def add_products(out: Tensor, left: Tensor, right: Tensor, factors: Tensor) -> None:
    """Adds the sum over n of factors[n] * left[n] outer right[n] to `out` (H, W), for left (N, H) and right (N, W), in float64.

    The products are those of `narrower_scaled`.
    """
    if compiled(out, left, right, factors):  # torch would convert both, and wake its threads for it
        (one, stride), (other, other_stride) = _flat(left), _flat(right)
        scales_left = left.shape[1] <= right.shape[1]
        _add_products(out.numpy(), one, stride, other, other_stride, factors.numpy(), scales_left)
        return
    left, right = narrower_scaled(left, right, factors)
    out.add_(left.mT.double() @ right.double())


def squared_sums(
    begin: Tensor, end: Tensor, order: Tensor, first: int, grad: Tensor, source: Tensor | None, weight: Tensor | None
) -> Tensor:
    """Squared norms (R,), float64, of the sums over the positions n of each group of weight[n] * grad[source[n]].

    Group r has the positions order[begin[r] : end[r]] - first. `source` None: grad[n]; `weight` None: 1.
    """
    if compiled(grad):
        places = _NONE if source is None else source.numpy()
        factors = _NO_FACTORS if weight is None else weight.numpy()
        flat, stride = _flat(grad)
        return torch.from_numpy(
            _squared_sums(
                begin.numpy(), end.numpy(), order.numpy(), first, flat, stride, grad.shape[1], places, factors
            )
        )
    lengths = end - begin
    group = torch.arange(begin.numel(), device=begin.device).repeat_interleave(lengths)
    within = torch.arange(group.numel(), device=begin.device) - (lengths.cumsum(0) - lengths)[group]
    position = order[begin[group] + within] - first
    values = grad[position if source is None else source[position]].double()
    if weight is not None:
        values = values * weight[position, None].double()
    sums = torch.zeros(begin.numel(), grad.shape[1], dtype=torch.float64, device=grad.device)
    return sums.index_add_(0, group, values).square().sum(1)


def move_rows(table: Tensor, rows: Tensor, values: Tensor, step: float) -> None:
    """table[rows] += step * values, in place; `rows` are distinct."""
    if compiled(table, values) and table.is_contiguous():
        width = table.shape[1:].numel()
        _move_rows(table.numpy().reshape(-1, width), rows.numpy(), values.numpy().reshape(-1, width), step)
        torch.autograd.graph.increment_version(table)
        return
    table.index_add_(0, rows, values, alpha=step)


def move_rows_within(table: Tensor, rows: Tensor, values: Tensor, step: float, limit: float) -> Tensor:
    """table[rows] += step * values, in place, where all numbers of the row are smaller than `limit`; `rows` are distinct.

    Returns the places among `rows` of those that stayed as they are.
    """
    if compiled(table, values) and table.is_contiguous():
        width = table.shape[1:].numel()
        flat = table.numpy().reshape(-1, width)
        left = _move_rows_within(flat, rows.numpy(), values.numpy().reshape(-1, width), step, flat.dtype.type(limit))
        torch.autograd.graph.increment_version(table)
        return torch.from_numpy(left)
    beyond = (table[rows].abs() >= limit).flatten(1).any(1)
    table.index_add_(0, rows[~beyond], values[~beyond], alpha=step)
    return beyond.nonzero()[:, 0]


def claim(since: Tensor, ids: Tensor, now: int) -> tuple[Tensor, Tensor] | None:
    """The distinct ids whose `since` lies before `now`, and what it was; it becomes `now` for all of `ids`.

    None, and nothing is changed, if some id is negative or too large.
    """
    if compiled(since, ids):
        inside, distinct, since_when = _claim(since.numpy(), ids.numpy(), now)
        return (torch.from_numpy(distinct), torch.from_numpy(since_when)) if inside else None
    rows = torch.unique(ids)
    if rows.numel() and (int(rows[0]) < 0 or int(rows[-1]) >= len(since)):
        return None
    before = since[rows].long()
    rows, before = rows[before < now], before[before < now]
    since[rows] = now
    return rows, before


def _flat(x: Tensor) -> tuple[np.ndarray, int]:
    """x (n, d) as the memory it lies in and the distance of its rows, so that the compiler sees rows without gaps."""
    if x.is_contiguous():
        return x.numpy().reshape(-1), x.shape[1]
    if x.stride(1) != 1 or x.stride(0) < 0:
        x = x.contiguous()
    size = (x.shape[0] - 1) * x.stride(0) + x.shape[1] if x.numel() else 0
    return x.as_strided((size,), (1,)).numpy(), x.stride(0)


@compile_loop()
def _packed(keys: np.ndarray, bits: int) -> tuple[bool, np.ndarray]:
    """Numbers that hold keys, and positions in their last `bits` bits; whether all keys are small enough for that."""
    packed, largest = np.empty(len(keys), np.int64), np.int64(0)
    for k in range(len(keys)):
        largest = max(largest, keys[k])
        packed[k] = keys[k] << bits | k
    return largest < 1 << (63 - bits), packed


@compile_loop()
def _unpacked(packed: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of ascending numbers that hold keys and `bits` bits of positions, what `group` returns."""
    positions, mask = np.empty(len(packed), np.int64), (1 << bits) - 1
    distinct, begin = np.empty(len(packed), np.int64), np.empty(len(packed) + 1, np.int64)
    count = 0
    for k in range(len(packed)):
        positions[k] = packed[k] & mask
        key = packed[k] >> bits
        if k == 0 or key != distinct[count - 1]:
            distinct[count], begin[count] = key, k
            count += 1
    begin[count] = len(packed)
    return distinct[:count], begin[: count + 1], positions


@compile_loop()
def _numbered(begin: np.ndarray) -> np.ndarray:
    groups = np.empty(begin[-1], np.int64)
    for r in range(len(begin) - 1):
        for k in range(begin[r], begin[r + 1]):
            groups[k] = r
    return groups


@compile_loop()
def _find(ascending: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    at = np.full(len(wanted), -1, np.int64)
    if len(ascending) > 16 * len(wanted):
        places = np.searchsorted(ascending, wanted)
        for i in range(len(wanted)):
            if places[i] < len(ascending) and ascending[places[i]] == wanted[i]:
                at[i] = places[i]
        return at
    k = 0
    for i in range(len(wanted)):
        while k < len(ascending) and ascending[k] < wanted[i]:
            k += 1
        if k < len(ascending) and ascending[k] == wanted[i]:
            at[i] = k
    return at


@compile_loop(fastmath={"reassoc"})
def _squared_norm(row: np.ndarray) -> float:
    total = 0.0
    for j in range(len(row)):
        value = np.float64(row[j])
        total += value * value
    return total if total < LARGEST**2 else np.inf


@compile_loop(fastmath={"reassoc"})
def _squared_rows(x: np.ndarray, stride: int, width: int, begin: int, end: int, squares: np.ndarray) -> None:
    for i in range(begin, end):
        squares[i] = _squared_norm(x[i * stride : i * stride + width])


@compile_loop(fastmath={"reassoc"})
def _squared_parts(
    x: np.ndarray, stride: int, places: np.ndarray, widths: np.ndarray, begin: int, end: int, squares: np.ndarray
) -> None:
    for i in range(begin, end):
        for k in range(len(places)):
            first = i * stride + places[k]
            squares[k, i] = _squared_norm(x[first : first + widths[k]])


@compile_loop()
def _in_slots(values: np.ndarray, slots: np.ndarray, begin: np.ndarray, order: np.ndarray) -> np.ndarray:
    in_slot = np.zeros(len(values), values.dtype)
    for r in range(len(slots)):
        if slots[r] >= 0:
            for k in range(begin[r], begin[r + 1]):
                in_slot[order[k]] = values[order[k]]
    return in_slot


@compile_loop()
def _outer_products(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    (rows, height), width = a.shape, b.shape[1]
    out = np.empty((rows, height * width), a.dtype)
    for n in range(rows):
        for i in range(height):
            for j in range(width):
                out[n, i * width + j] = a[n, i] * b[n, j]
    return out


@compile_loop()
def _scaled_rows(x: np.ndarray, stride: int, width: int, factors: np.ndarray) -> np.ndarray:
    out = np.empty((len(factors), width), x.dtype)
    for n in range(len(factors)):
        factor, row, target = factors[n], x[n * stride : n * stride + width], out[n]
        for j in range(width):
            target[j] = factor * row[j]
    return out


@compile_loop()
def _add_weighted_rows(
    out: np.ndarray, values: np.ndarray, stride: int, factors: np.ndarray, first: int, last: int
) -> None:
    total = np.zeros(last - first, np.float64)
    for k in range(len(factors)):
        factor, row = np.float64(factors[k]), values[k * stride + first : k * stride + last]
        for j in range(last - first):
            total[j] += factor * np.float64(row[j])
    for j in range(last - first):
        out[first + j] += total[j]


@compile_loop()
def _add_products(
    out: np.ndarray, left: np.ndarray, stride: int, right: np.ndarray, other_stride: int, factors: np.ndarray,
    scales_left: bool,
) -> None:  # fmt: skip
    """Four n and two rows of `out` at a time, so that the sums are read and written less often."""
    # Unsigned, or each access would test for an index from the end.
    height, width = np.uint64(out.shape[0]), np.uint64(out.shape[1])
    even = height + height % np.uint64(2)
    total = np.zeros(even * width, np.float64)
    a, b = np.zeros(4 * even, np.float64), np.zeros(4 * width, np.float64)  # four rows of left, and of right
    one = factors.dtype.type(1)
    for first in range(0, len(factors), 4):
        last = min(first + 4, len(factors))
        if last < first + 4:
            a[:] = 0.0
        for n in range(first, last):
            for_left, for_right = (factors[n], one) if scales_left else (one, factors[n])
            source, to = np.uint64(n * stride), np.uint64(n - first) * even
            for i in range(height):
                a[to + i] = for_left * left[source + i]
            source, to = np.uint64(n * other_stride), np.uint64(n - first) * width
            for j in range(width):
                b[to + j] = for_right * right[source + j]
        for i in range(np.uint64(0), even, np.uint64(2)):
            a0, a1, a2, a3 = a[i], a[even + i], a[2 * even + i], a[3 * even + i]
            c0, c1, c2, c3 = a[i + 1], a[even + i + 1], a[2 * even + i + 1], a[3 * even + i + 1]
            at = i * width
            for j in range(width):
                b0, b1, b2, b3 = b[j], b[width + j], b[2 * width + j], b[3 * width + j]
                total[at + j] += (a0 * b0 + a1 * b1) + (a2 * b2 + a3 * b3)
                total[at + width + j] += (c0 * b0 + c1 * b1) + (c2 * b2 + c3 * b3)
    for i in range(height):
        for j in range(width):
            out[i, j] += total[i * width + j]


@compile_loop()
def _add_rows(
    out: np.ndarray, slots: np.ndarray, begin: np.ndarray, order: np.ndarray, first: int, grad: np.ndarray,
    stride: int, source: np.ndarray, factor: np.ndarray,
) -> None:  # fmt: skip
    width = out.shape[1]
    total = np.empty(width, np.float64)
    for r in range(len(slots)):
        slot = slots[r]
        if slot < 0:
            continue
        row = out[slot]
        if begin[r + 1] == begin[r] + 1:  # the commonest: nothing to add up
            position = order[begin[r]] - first
            scale = factor[position]
            at = (source[position] if len(source) else position) * stride
            value = grad[at : at + width]  # a slice, or each access would test for an index from the end
            for j in range(width):
                row[j] += scale * value[j]
            continue
        total[:] = 0.0
        for k in range(begin[r], begin[r + 1]):
            position = order[k] - first
            scale = np.float64(factor[position])
            at = (source[position] if len(source) else position) * stride
            value = grad[at : at + width]
            for j in range(width):
                total[j] += scale * value[j]
        for j in range(width):
            row[j] += total[j]


@compile_loop(fastmath={"reassoc"})
def _squared_sums(
    begin: np.ndarray, end: np.ndarray, order: np.ndarray, first: int, grad: np.ndarray, stride: int, width: int,
    source: np.ndarray, factor: np.ndarray,
) -> np.ndarray:  # fmt: skip
    squares = np.zeros(len(begin), np.float64)
    total = np.empty(width, np.float64)
    for r in range(len(squares)):
        total[:] = 0.0
        for k in range(begin[r], end[r]):
            position = order[k] - first
            scale = np.float64(factor[position]) if len(factor) else 1.0
            at = (source[position] if len(source) else position) * stride
            row = grad[at : at + width]
            for j in range(width):
                total[j] += scale * row[j]
        square = 0.0
        for j in range(width):
            square += total[j] * total[j]
        squares[r] = square
    return squares


@compile_loop()
def _move_rows(table: np.ndarray, rows: np.ndarray, values: np.ndarray, step: float) -> None:
    for i in range(len(rows)):
        row, value = table[rows[i]], values[i]
        for j in range(len(row)):
            row[j] += step * value[j]


@compile_loop()
def _move_rows_within(table: np.ndarray, rows: np.ndarray, values: np.ndarray, step: float, limit: float) -> np.ndarray:
    left, remaining = np.empty(len(rows), np.int64), 0
    for i in range(len(rows)):
        row, value = table[rows[i]], values[i]
        beyond = 0  # of all: the compiler makes vectors of it, as it does not of a loop that ends early
        for j in range(len(row)):
            beyond += abs(row[j]) >= limit
        if beyond:
            left[remaining] = i
            remaining += 1
            continue
        for j in range(len(row)):
            row[j] += step * value[j]
    return left[:remaining]


@compile_loop()
def _claim(since: np.ndarray, ids: np.ndarray, now: int) -> tuple[bool, np.ndarray, np.ndarray]:
    rows, before = np.empty(len(ids), np.int64), np.empty(len(ids), np.int64)
    count = 0
    for i in range(len(ids)):
        if ids[i] < 0 or ids[i] >= len(since):
            return False, rows[:0], before[:0]
    for i in range(len(ids)):
        row = ids[i]
        if since[row] < now:
            rows[count], before[count] = row, since[row]
            since[row] = now
            count += 1
    return True, rows[:count], before[:count]
