"""Normal numbers from a secret key: ChaCha8 and the Box-Muller transform, compiled by Numba for the CPU.

Every number is a function of the key and of its place alone, so that it can be drawn again, in any order and by any
process. In float32 it is the same, bit for bit, on every machine: nothing here leaves it to a compiler or to a
mathematical library how to round. (float64 takes its logarithm, sine and cosine from the platform.)

ChaCha (Bernstein 2008; RFC 8439) turns a key of 256 bits and a position of 128 bits into a block of 16 words of 32
bits. The best attack on record breaks 7 rounds, in 2^237 operations, and not the 8 used here (Aumasson 2019, "Too much
crypto", section 3.3). A block gives 16 normals in float32 or 8 in float64, two from each pair of uniform numbers u, v
(Box and Muller 1958):
    z = sqrt(-2 ln u) cos(2 pi v),   z' = sqrt(-2 ln u) sin(2 pi v).
The smallest u decides how far the tail reaches. Here it is 2^-65, so that |z| <= 9.493; a normal number lies beyond
that with probability 2.3e-21. With 32 bits for u that would be 6.76 and 1.3e-11; for torch's `normal_` on the CPU,
which has 24 bits, it is 5.77 and 8.0e-9.

The functions run on one thread, without the interpreter's lock: callers divide the work.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, int64, njit, types, uint32, uint64
from numba.extending import intrinsic

from sparsedp.errors import SparseDPError

ROUNDS = 8
# Blocks made at a time, few enough for the first-level cache. Word k of lane l lies at k * LANES + l: then each
# operation of the cipher is a loop over neighbours, and because the compiler knows its length and the distance of the
# words, it can tell that they do not overlap and uses vector instructions.
LANES = 64
_WORDS = 16 * LANES
_PAIRS = 8 * LANES
# "expand 32-byte k", the first four words of the cipher's state. The key is the next eight.
_SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
# Where the last four begin: the number of the block or row (64 bits), its purpose, and one that is not used.
_NUMBER, _PURPOSE = 12 * LANES, 14 * LANES
# Purposes never share a block. The lower 28 bits count the blocks of a row.
_ROW, _DOUBLE, _TAIL, _PLAIN = 1 << 28, 1 << 29, 1 << 30, 1 << 31
# A word below this, one in 65,536, gets 32 bits more: it is far in the tail, and its leading zeros leave it too few.
_SHORT = 1 << 16
# Below it, float32 has no digits left for what lies on the grid.
_SMALLEST_GRID = 2.0**-120


def stream_key(secret: bytes) -> np.ndarray:
    """The key (8,) uint32 that 32 secret bytes make."""
    if len(secret) != 32:
        raise SparseDPError(f"A key has 32 bytes, but {len(secret)} were given.")
    return np.frombuffer(secret, "<u4").astype(np.uint32)


def fill_normal(out: np.ndarray, std: float, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,) with N(0, std^2): numbers `first` to `first + n - 1` of the key's sequence.

    Work that is divided at multiples of 1024 wastes nothing.
    """
    _check(out, 1, key)
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The numbers of a sequence are counted from 0 to 2^63 - 1, but first is {first}.")
    _fill_sequence(out, out.dtype.type(std), key, first)


def add_normal(
    out: np.ndarray, std: float, grid: float, key: np.ndarray, first: int, width: int, rows: np.ndarray
) -> None:
    """Overwrites `out` (n,) with (out + N(0, std^2)), each rounded to a multiple of `grid`, a power of two.

    `out` is a part of a flat table with rows of `width` elements: its elements `first` to `first + n - 1`. Only the table's
    `rows`, ascending int64, count with what they hold; all others count as zero. The noise is that of `fill_normal` but for
    rounding: it has twice as many digits when it is added.
    """
    _check(out, 1, key)
    _check_grid(grid, out)
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The numbers of a sequence are counted from 0 to 2^63 - 1, but first is {first}.")
    if width < 1 or rows.ndim != 1 or rows.dtype != np.int64:
        raise SparseDPError(f"rows must be a vector of int64, not {rows.dtype} {rows.shape}, and width positive.")
    kind = out.dtype.type
    _add_sequence(out, kind(std / grid), kind(1 / grid), kind(grid), key, first, width, rows)


def fill_words(out: np.ndarray, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,) uint32 with words `first` to `first + n - 1` of the key's stream of bits.

    Work that is divided at multiples of 1024 wastes nothing.
    """
    if out.ndim != 1 or out.dtype != np.uint32 or not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError(f"out must be a contiguous vector of uint32, not {out.dtype} of shape {out.shape}.")
    _check_key(key)
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The words of a stream are counted from 0 to 2^63 - 1, but first is {first}.")
    _fill_words(out, key, first)


def fill_uniform(out: np.ndarray, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,) with uniform numbers on [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64.

    They are made of one or two words each of the key's stream of bits (`fill_words`), from word `first` on.
    """
    _check(out, 1, key)
    if not 0 <= first < (1 << 63) - 2 * out.size:
        raise SparseDPError(f"The words of a stream are counted from 0 to 2^63 - 1, but first is {first}.")
    _fill_uniform(out, key, first)


def fill_mask(out: np.ndarray, chance: float, value: float, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,), float32 or float64, with `value` or 0; out[i] is `value` with probability `chance`.

    It is so where word `first + i` of the key's stream of bits (`fill_words`) is below chance * 2^32.
    """
    _check(out, 1, key)
    if not 0 <= chance <= 1:
        raise SparseDPError(f"chance must be a probability, not {chance}.")
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The words of a stream are counted from 0 to 2^63 - 1, but first is {first}.")
    _fill_mask(out, uint64(round(chance * 2.0**32)), out.dtype.type(value), key, first)


def fill_rows(out: np.ndarray, rows: np.ndarray, std: float | np.ndarray, key: np.ndarray) -> None:
    """Overwrites out[i], of (n, dim), with N(0, std[i]^2): a function of the key, of rows[i] and of the column alone.

    `rows` (n,) are integers that are not negative; `std` is one number or (n,).
    """
    _check(out, 2, key)
    if np.shape(rows) != out.shape[:1]:
        raise SparseDPError(f"rows must be {len(out)} integers, one for each row of out, not {np.shape(rows)}.")
    rows = _checked_rows(rows)
    _fill_rows(out.reshape(-1), out.shape[1], rows, _scales(std, rows, 1.0, out.dtype), key)


def fill_row_words(out: np.ndarray, rows: np.ndarray, key: np.ndarray) -> None:
    """Overwrites out[i], of (n,) uint64, with uniform bits: a function of the key and of rows[i] alone."""
    if out.ndim != 1 or out.dtype != np.uint64 or not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError(f"out must be a contiguous vector of uint64, not {out.dtype} of shape {out.shape}.")
    _check_key(key)
    _fill_row_words(out, _checked_rows(rows), key)


def add_rows(
    table: np.ndarray, places: np.ndarray, std: float | np.ndarray, grid: float, key: np.ndarray,
    factor: np.ndarray | None = None, rows: np.ndarray | None = None,
) -> None:  # fmt: skip
    """table[places[i]], of (any, dim), becomes factor[i] times itself plus what `fill_rows` would draw for rows[i].

    Each element is rounded to a multiple of `grid`, a power of two. `places` (n,) are distinct; `factor` (n,) None: 1.
    `rows` (n,) None: a place in the table is the number of its row, as it is not where `table` holds a part of the rows.
    """
    _check(table, 2, key)
    _check_grid(grid, table)
    places = _checked_rows(places, len(table))
    rows = _numbers(rows, places)
    factors = _scales(1.0 if factor is None else factor, rows, 1 / grid, table.dtype)
    scales = _scales(std, rows, 1 / grid, table.dtype)
    _add_rows(table.reshape(-1), table.shape[1], places, rows, factors, scales, table.dtype.type(grid), key)


def move_pairs(
    table: np.ndarray, other: np.ndarray, places: np.ndarray, drift: np.ndarray, std: np.ndarray, shift: np.ndarray | None,
    grids: tuple[float, float], keys: tuple[np.ndarray, np.ndarray], rows: np.ndarray | None = None,
) -> None:  # fmt: skip
    """Moves rows of two tables (any, dim) together, by noise that they share:

        x = drift[0] table + drift[1] other + std[0] (z + shift)
        y = drift[2] table + drift[3] other + std[1] (z + shift) + std[2] z'

    become table[places[i]] and other[places[i]], rounded to multiples of the two grids, powers of two (0: not rounded).
    `drift` is (4, n) and `std` (3, n), float64; `shift` (n, dim) or None. z is what `fill_rows` draws for a row with the
    first key and z' with the second, but for rounding. All is computed in float64. `places` and `rows` are as in `add_rows`.
    """
    for one in (table, other):
        _check(one, 2, keys[0])
    for grid in grids:
        if grid:
            _check_grid(grid, table)
    _check_key(keys[1])
    places = _checked_rows(places, len(table))
    rows = _numbers(rows, places)
    if other.shape != table.shape or other.dtype != table.dtype:
        raise SparseDPError(
            f"Both tables must be alike, not {table.dtype} {table.shape} and {other.dtype} {other.shape}."
        )
    if drift.shape != (4, len(rows)) or std.shape != (3, len(rows)):
        raise SparseDPError(
            f"drift and std must be (4, {len(rows)}) and (3, {len(rows)}), not {drift.shape}, {std.shape}."
        )
    shifts = np.zeros((0, table.shape[1]), table.dtype) if shift is None else np.ascontiguousarray(shift, table.dtype)
    if shift is not None and shifts.shape != (len(rows), table.shape[1]):
        raise SparseDPError(f"shift must be {(len(rows), table.shape[1])}, not {shifts.shape}.")
    _move_pairs(
        table.reshape(-1), other.reshape(-1), table.shape[1], places, rows, np.ascontiguousarray(drift),
        np.ascontiguousarray(std), shifts, float(grids[0]), float(grids[1]), *keys,
    )  # fmt: skip


def _checked_rows(rows: np.ndarray, count: int | None = None) -> np.ndarray:
    """As int64, in a table of `count` rows."""
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise SparseDPError(f"rows must be a vector of integers, not {rows.dtype} {rows.shape}.")
    rows = np.ascontiguousarray(rows, np.int64)  # what is too large becomes negative
    if rows.size and rows.min() < 0:
        raise SparseDPError("rows must lie from 0 to 2^63 - 1, but some do not.")
    if count is not None and rows.size and rows.max() >= count:
        raise SparseDPError(f"The table has {count} rows, but row {rows.max()} is to get noise.")
    return rows


def _numbers(rows: np.ndarray | None, places: np.ndarray) -> np.ndarray:
    """The numbers of the rows at some places."""
    if rows is None:
        return places
    if np.shape(rows) != places.shape:
        raise SparseDPError(f"rows must be {len(places)} integers, one for each place, not {np.shape(rows)}.")
    return _checked_rows(rows)


def _scales(values: float | np.ndarray, rows: np.ndarray, unit: float, dtype: np.dtype) -> np.ndarray:
    """`unit` times one number for each row, or one for all."""
    if np.shape(values) not in ((), rows.shape):
        raise SparseDPError(
            f"std must be one number or one for each of {len(rows)} rows, not of shape {np.shape(values)}."
        )
    if np.ndim(values) == 0:
        return np.full(len(rows), float(values) * unit, dtype)
    return np.multiply(values, unit, dtype=np.float64).astype(dtype)


def _check_grid(grid: float, out: np.ndarray) -> None:
    if math.frexp(grid)[0] != 0.5 or not _SMALLEST_GRID <= grid <= 1 / _SMALLEST_GRID:
        raise SparseDPError(f"A grid is a power of two between 2^-120 and 2^120, not {grid}.")


def _check(out: np.ndarray, axes: int, key: np.ndarray) -> None:
    if out.ndim == 2 and out.shape[1] > 1 << 31:
        raise SparseDPError(f"A row has at most 2^31 columns, but these have {out.shape[1]}.")
    if out.ndim != axes or out.dtype not in (np.float32, np.float64):
        raise SparseDPError(f"out must be float32 or float64 with {axes} axes, not {out.dtype} of shape {out.shape}.")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError("out is written in place, so it must be contiguous and writeable. Pass a copy.")
    _check_key(key)


def _check_key(key: np.ndarray) -> None:
    if key.shape != (8,) or key.dtype != np.uint32:
        raise SparseDPError(f"A key is uint32 of shape (8,), as `stream_key` makes it, not {key.dtype} {key.shape}.")


@njit(cache=True, nogil=True)
def _fill_sequence(out: np.ndarray, std: float, key: np.ndarray, first: int) -> None:
    start, words, radii, points = _memory(key, out)
    half = len(radii)
    part, skip = first // half, first % half
    _number(start, part // 2)
    _draw(radii, points, words, start)
    done = 0
    while done < len(out):
        if part % 2 == 0 and done:
            _number(start, part // 2)
            _draw(radii, points, words, start)
        stop = min(len(out), done + half - skip)
        source, angle = radii[skip:], points[part % 2 * half + skip :]
        target = out[done:stop]
        for i in range(len(target)):
            target[i] = std * (source[i] * angle[i])
        done = stop
        part, skip = part + 1, 0


@njit(cache=True, nogil=True)
def _add_sequence(
    out: np.ndarray, std: float, scale: float, grid: float, key: np.ndarray, first: int, width: int, rows: np.ndarray
) -> None:
    """`std` is in units of the grid; `scale` is 1 / grid."""
    start, words, radii, points = _memory(key, out)
    half = len(radii)
    part, skip = first // half, first % half
    _number(start, part // 2)
    _draw(radii, points, words, start)
    row = np.searchsorted(rows, first // width)  # the next of `rows` that is not behind
    done = 0
    while done < len(out):
        if part % 2 == 0 and skip == 0 and done:
            _number(start, part // 2)
            _draw(radii, points, words, start)
        # Up to the next row with a sum, or to its end, or to that of the normals.
        begins = rows[row] * width - first if row < len(rows) else len(out)
        held = done >= begins
        stop = min(len(out), done + half - skip, begins + width if held else begins)
        source, angle, target = radii[skip:], points[part % 2 * half + skip :], out[done:stop]
        # The product of radius and point is exact, and rounded once together with the sum: what becomes of them depends on
        # their exact total alone.
        if held:
            for i in range(len(target)):
                target[i] = grid * np.rint(_fma(std * source[i], angle[i], target[i] * scale))
        else:
            for i in range(len(target)):
                target[i] = grid * np.rint((std * source[i]) * angle[i])
        if held and stop == begins + width:
            row += 1
        skip += stop - done
        done = stop
        if skip == half:
            part, skip = part + 1, 0


@njit(cache=True, nogil=True)
def _number(start: np.ndarray, group: int) -> None:
    """Turns the lanes to the blocks of a group of the sequence."""
    for lane in range(LANES):
        block = uint64(group * LANES + lane)
        start[_NUMBER + lane] = uint32(block)
        start[_NUMBER + LANES + lane] = uint32(block >> uint64(32))


@njit(cache=True, nogil=True)
def _memory(key: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The cipher's state, and working memory for its words and for the radii and points of the normals in them."""
    pairs = 32 // out.itemsize * LANES
    return _start(key), np.empty(_WORDS, np.uint32), np.empty(pairs, out.dtype), np.empty(2 * pairs, out.dtype)


@njit(cache=True, nogil=True)
def _fill_words(out: np.ndarray, key: np.ndarray, first: int) -> None:
    start, words = _start(key), np.empty(_WORDS, np.uint32)
    _switch(start, _PLAIN)
    group, skip = first // _WORDS, first % _WORDS
    done = 0
    while done < len(out):
        _number(start, group)
        _cipher(words, start, ROUNDS)
        source = words[skip : skip + len(out) - done]
        target = out[done : done + len(source)]
        for i in range(len(target)):
            target[i] = source[i]
        done += len(source)
        group, skip = group + 1, 0


@njit(cache=True, nogil=True)
def _fill_uniform(out: np.ndarray, key: np.ndarray, first: int) -> None:
    words = np.empty(_WORDS, np.uint32)
    each = out.itemsize // 4
    size = _WORDS // each
    for begin in range(0, len(out), size):
        target = out[begin : begin + size]
        _fill_words(words[: each * len(target)], key, first + each * begin)
        if each == 1:
            for i in range(len(target)):
                target[i] = float32(int32(uint32(words[i] >> uint32(8)))) * float32(2.0**-24)
        else:
            for i in range(len(target)):
                high, low = uint64(words[2 * i]) >> uint64(6), uint64(words[2 * i + 1]) >> uint64(5)
                target[i] = float64(int64((high << uint64(27)) | low)) * 2.0**-53


@njit(cache=True, nogil=True)
def _fill_mask(out: np.ndarray, below: np.uint64, value: float, key: np.ndarray, first: int) -> None:
    words = np.empty(min(len(out), _WORDS), np.uint32)
    zero = value - value
    for begin in range(0, len(out), _WORDS):
        target = out[begin : begin + _WORDS]
        _fill_words(words[: len(target)], key, first + begin)
        for i in range(len(target)):
            target[i] = value if uint64(words[i]) < below else zero


@njit(cache=True, nogil=True)
def _fill_rows(out: np.ndarray, dim: int, rows: np.ndarray, std: np.ndarray, key: np.ndarray) -> None:
    start, words, radii, points = _memory(key, out)
    moved = np.empty(_WORDS, np.uint32)
    half, second = len(radii) // LANES, len(radii)
    width = 2 * half
    blocks, drawn = (dim + width - 1) // width, min(half, dim)
    i = block = 0  # counted on: a division for each block would take as long as drawing it
    for begin in range(0, len(rows) * blocks, LANES):
        used = _place(start, rows, blocks, begin)
        _draw_rows(radii, points, words, moved, start, drawn)
        for lane in range(used):
            scale = std[i]
            for side in range(2):
                column = block * width + side * half
                target = out[i * dim + column : i * dim + min(dim, column + half)]
                source, angle = radii[lane * drawn :], points[side * second + lane * drawn :]
                for k in range(len(target)):
                    target[k] = scale * (source[k] * angle[k])
                if column + half >= dim:
                    break
            block += 1
            if block == blocks:
                i, block = i + 1, 0


@njit(cache=True, nogil=True)
def _fill_row_words(out: np.ndarray, rows: np.ndarray, key: np.ndarray) -> None:
    start, words = _start(key), np.empty(_WORDS, np.uint32)
    for begin in range(0, len(rows), LANES):
        used = _place(start, rows, 1, begin)
        _switch(start, _PLAIN)
        _cipher(words, start, ROUNDS)
        _switch(start, _PLAIN)
        for lane in range(used):
            out[begin + lane] = uint64(words[lane]) << uint64(32) | uint64(words[LANES + lane])


@njit(cache=True, nogil=True)
def _add_rows(
    out: np.ndarray, dim: int, places: np.ndarray, rows: np.ndarray, factor: np.ndarray, std: np.ndarray, grid: float,
    key: np.ndarray,
) -> None:  # fmt: skip
    """`std` and `factor` are in units of the grid."""
    start, words, radii, points = _memory(key, out)
    moved = np.empty(_WORDS, np.uint32)
    half, second = len(radii) // LANES, len(radii)
    width = 2 * half
    blocks, drawn = (dim + width - 1) // width, min(half, dim)
    i = block = 0  # counted on: a division for each block would take as long as drawing it
    for begin in range(0, len(rows) * blocks, LANES):
        used = _place(start, rows, blocks, begin)
        _draw_rows(radii, points, words, moved, start, drawn)
        for lane in range(used):
            # Unsigned, or each access would test for an index from the end.
            at, source = uint64(places[i] * dim + block * width), uint64(lane * drawn)
            scale, kept, count = std[i], factor[i], uint64(min(width, dim - block * width))
            for k in range(min(count, uint64(half))):
                own = kept * out[at + k]
                out[at + k] = grid * np.rint(_fma(scale * radii[source + k], points[source + k], own))
            at, angle = at + uint64(half), source + uint64(second)
            for k in range(max(count, uint64(half)) - uint64(half)):
                own = kept * out[at + k]
                out[at + k] = grid * np.rint(_fma(scale * radii[source + k], points[angle + k], own))
            block += 1
            if block == blocks:
                i, block = i + 1, 0


@njit(cache=True, nogil=True)
def _move_pairs(
    table: np.ndarray, other: np.ndarray, dim: int, places: np.ndarray, rows: np.ndarray, drift: np.ndarray,
    std: np.ndarray, shift: np.ndarray, grid: float, other_grid: float, key: np.ndarray, other_key: np.ndarray,
) -> None:  # fmt: skip
    start, words, radii, points = _memory(key, table)
    start2, words, radii2, points2 = _memory(other_key, table)
    moved = np.empty(_WORDS, np.uint32)
    half, second_half = len(radii) // LANES, len(radii)
    width = 2 * half
    blocks, drawn = (dim + width - 1) // width, min(half, dim)
    for begin in range(0, len(rows) * blocks, LANES):
        used = _place(start, rows, blocks, begin)
        _draw_rows(radii, points, words, moved, start, drawn)
        second = False
        for lane in range(used):
            second |= std[2, (begin + lane) // blocks] != 0
        if second:
            _place(start2, rows, blocks, begin)
            _draw_rows(radii2, points2, words, moved, start2, drawn)
        for lane in range(used):
            i, block = (begin + lane) // blocks, (begin + lane) % blocks
            column, count = block * width, min(width, dim - block * width)
            at = uint64(places[i] * dim + column)
            for k in range(count):
                radius = lane * drawn + k % half
                point = radius + second_half * (k // half)
                z = float64(radii[radius]) * float64(points[point])
                if len(shift):
                    z += float64(shift[i, column + k])
                w, v = float64(table[at + uint64(k)]), float64(other[at + uint64(k)])
                x = drift[0, i] * w + drift[1, i] * v + std[0, i] * z
                y = drift[2, i] * w + drift[3, i] * v + std[1, i] * z
                if std[2, i] != 0:
                    y += std[2, i] * (float64(radii2[radius]) * float64(points2[point]))
                table[at + uint64(k)] = grid * np.rint(x / grid) if grid else x
                other[at + uint64(k)] = other_grid * np.rint(y / other_grid) if other_grid else y


@njit(cache=True, nogil=True)
def _place(start: np.ndarray, rows: np.ndarray, blocks: int, begin: int) -> int:
    """Turns the lanes to the blocks of rows, from the block `begin` on: first all of the first row, then of the second.

    Returns how many lanes are in use.
    """
    used = min(LANES, len(rows) * blocks - begin)
    i, block = begin // blocks, begin % blocks
    for lane in range(used):
        start[_NUMBER + lane] = uint32(rows[i])
        start[_NUMBER + LANES + lane] = uint32(rows[i] >> 32)
        start[_PURPOSE + lane] = uint32(_ROW + block)
        block += 1
        if block == blocks:
            i, block = i + 1, 0
    return used


@njit(cache=True, nogil=True)
def _draw(radii: np.ndarray, points: np.ndarray, words: np.ndarray, start: np.ndarray) -> None:
    """Standard normals of LANES blocks, radius times point; number k of lane l at k * LANES + l of the points.

    The second half of the points has the same radii as the first. `words` is working memory.
    """
    if radii.itemsize == 8:
        _switch(start, _DOUBLE)
        _cipher(words, start, ROUNDS)
        _switch(start, _DOUBLE)
        _box_muller_double(words, radii, points, _PAIRS // 2)
        return
    _cipher(words, start, ROUNDS)
    _box_muller(words, radii, points, _PAIRS)
    smallest = uint32(0xFFFFFFFF)
    for i in range(_PAIRS):
        smallest = min(smallest, words[i])
    if smallest < _SHORT:
        more = np.empty(_WORDS, np.uint32)
        _switch(start, _TAIL)
        _cipher(more, start, ROUNDS)
        _switch(start, _TAIL)
        _box_muller_tail(words, more, radii, _PAIRS)


@njit(cache=True, nogil=True)
def _draw_rows(
    radii: np.ndarray, points: np.ndarray, words: np.ndarray, moved: np.ndarray, start: np.ndarray, drawn: int
) -> None:
    """As `_draw`, with the normals of a lane side by side: the first `drawn` pairs of lane l begin at l * drawn.

    A row is then written from neighbours. Pair k of a lane holds its numbers k and k + half, half the pairs of a block.
    `words` and `moved` are working memory.
    """
    if radii.itemsize == 8:
        _switch(start, _DOUBLE)
        _cipher(words, start, ROUNDS)
        _switch(start, _DOUBLE)
        _gather(moved, words, 4, drawn)
        _box_muller_double(moved, radii, points, LANES * drawn)
        return
    _cipher(words, start, ROUNDS)
    _gather(moved, words, 2, drawn)
    _box_muller(moved, radii, points, LANES * drawn)
    smallest = uint32(0xFFFFFFFF)
    for i in range(LANES * drawn):
        smallest = min(smallest, moved[i])
    if smallest < _SHORT:
        more = np.empty(_WORDS, np.uint32)
        _switch(start, _TAIL)
        _cipher(words, start, ROUNDS)
        _switch(start, _TAIL)
        _gather(more, words, 2, drawn)
        _box_muller_tail(moved, more, radii, LANES * drawn)


@njit(cache=True, nogil=True)
def _gather(moved: np.ndarray, words: np.ndarray, parts: int, drawn: int) -> None:
    """Puts the words of a lane side by side, in each of so many parts the first `drawn`."""
    each = 16 // parts
    for part in range(parts):
        target, source = moved[part * each * LANES :], words[part * each * LANES :]
        if drawn == 8:
            for lane in range(LANES):
                for k in range(8):
                    target[lane * 8 + k] = source[k * LANES + lane]
        else:
            for lane in range(LANES):
                for k in range(drawn):
                    target[lane * drawn + k] = source[k * LANES + lane]


@njit(cache=True, nogil=True)
def _switch(start: np.ndarray, purpose: int) -> None:
    """Turns all lanes to the blocks of another purpose, and back."""
    for lane in range(LANES):
        start[_PURPOSE + lane] ^= uint32(purpose)


# The cipher. Numba computes with 64 bits unless told otherwise; the casts keep words at 32, which are twice as many
# in a vector.


@njit(cache=True, nogil=True)
def _start(key: np.ndarray) -> np.ndarray:
    """The state (16 * LANES,) before the rounds, with position 0 in each lane."""
    start = np.zeros(_WORDS, np.uint32)
    for k in range(4):
        start[k * LANES : (k + 1) * LANES] = _SIGMA[k]
    for k in range(8):
        start[(4 + k) * LANES : (5 + k) * LANES] = key[k]
    return start


@njit(cache=True, nogil=True)
def _cipher(words: np.ndarray, start: np.ndarray, rounds: int) -> None:
    """The blocks that belong to the states `start`."""
    for i in range(_WORDS):
        words[i] = start[i]
    for _ in range(rounds // 2):
        _double_round(words)
    for i in range(_WORDS):
        words[i] += start[i]


@njit(cache=True, nogil=True)
def _double_round(w: np.ndarray) -> None:
    n = LANES
    for i in range(LANES):
        x0, x1, x2, x3 = w[i], w[n + i], w[2 * n + i], w[3 * n + i]
        x4, x5, x6, x7 = w[4 * n + i], w[5 * n + i], w[6 * n + i], w[7 * n + i]
        x8, x9, x10, x11 = w[8 * n + i], w[9 * n + i], w[10 * n + i], w[11 * n + i]
        x12, x13, x14, x15 = w[12 * n + i], w[13 * n + i], w[14 * n + i], w[15 * n + i]
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
        w[i], w[n + i], w[2 * n + i], w[3 * n + i] = x0, x1, x2, x3
        w[4 * n + i], w[5 * n + i], w[6 * n + i], w[7 * n + i] = x4, x5, x6, x7
        w[8 * n + i], w[9 * n + i], w[10 * n + i], w[11 * n + i] = x8, x9, x10, x11
        w[12 * n + i], w[13 * n + i], w[14 * n + i], w[15 * n + i] = x12, x13, x14, x15


@njit(cache=True, nogil=True)
def _quarter_round(
    a: np.uint32, b: np.uint32, c: np.uint32, d: np.uint32
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    a = uint32(a + b)
    d = _rotated(uint32(d ^ a), 16)
    c = uint32(c + d)
    b = _rotated(uint32(b ^ c), 12)
    a = uint32(a + b)
    d = _rotated(uint32(d ^ a), 8)
    c = uint32(c + d)
    b = _rotated(uint32(b ^ c), 7)
    return a, b, c, d


@njit(cache=True, nogil=True)
def _rotated(x: np.uint32, n: int) -> np.uint32:
    return uint32(uint32(x << uint32(n)) | uint32(x >> uint32(32 - n)))


# From words to normals.


@njit(cache=True, nogil=True)
def _box_muller(words: np.ndarray, radii: np.ndarray, points: np.ndarray, count: int) -> None:
    """Pair i of `count` has u from word i, within [2^-32, 1 - 2^-24], and its angle from the word _PAIRS further on."""
    for i in range(count):
        u = _fma(float32(int32(uint32(words[i] >> uint32(1)))), float32(2.0**-31), float32(2.0**-32))
        radii[i] = _radius(min(u, float32(1 - 2.0**-24)))
        points[i], points[_PAIRS + i] = _circle(words[_PAIRS + i])


@njit(cache=True, nogil=True)
def _box_muller_tail(words: np.ndarray, more: np.ndarray, radii: np.ndarray, count: int) -> None:
    """The radii again, with 64 bits for u, where a word is short: u lies within [2^-65, 2^-16]."""
    for i in range(count):
        if words[i] < _SHORT:
            long = (uint64(words[i]) << uint64(33)) | (uint64(more[i]) << uint64(1)) | uint64(1)
            radii[i] = _radius(float32(int64(long)) * float32(2.0**-65))


@njit(cache=True, nogil=True)
def _box_muller_double(words: np.ndarray, radii: np.ndarray, points: np.ndarray, count: int) -> None:
    """Four words make one of `count` pairs: 64 bits for u, within [2^-65, 1 - 2^-53], and 64 bits for the angle."""
    n = _PAIRS // 2
    for i in range(count):
        u = float64(words[i]) * 2.0**-32 + (float64(words[n + i]) + 0.5) * 2.0**-64
        angle = 2 * math.pi * (float64(words[2 * n + i]) * 2.0**-32 + float64(words[3 * n + i]) * 2.0**-64)
        radii[i] = math.sqrt(-2 * math.log(min(u, 1 - 2.0**-53)))
        points[i], points[n + i] = math.cos(angle), math.sin(angle)


@njit(cache=True, nogil=True)
def _radius(u: float) -> float:
    return np.sqrt(float32(-2) * _log(u))


@njit(cache=True, nogil=True)
def _log(u: float) -> float:
    """ln u in float32: u = 2^e (1 + z) with 1 + z between sqrt(1/2) and sqrt(2), and Cephes' polynomial in z."""
    shifted = uint32(_bits(u) + uint32(0x3F800000 - 0x3F3504F3))  # the bits of 1 and of sqrt(1/2)
    e = float32(int32(uint32(shifted >> uint32(23)))) - float32(127)
    z = _bits(uint32(uint32(shifted & uint32(0x007FFFFF)) + uint32(0x3F3504F3))) - float32(1)
    p = _fma(float32(7.0376836292e-2), z, float32(-1.1514610310e-1))
    p = _fma(p, z, float32(1.1676998740e-1))
    p = _fma(p, z, float32(-1.2420140846e-1))
    p = _fma(p, z, float32(1.4249322787e-1))
    p = _fma(p, z, float32(-1.6668057665e-1))
    p = _fma(p, z, float32(2.0000714765e-1))
    p = _fma(p, z, float32(-2.4999993993e-1))
    p = _fma(p, z, float32(3.3333331174e-1))
    p = _fma(p, z, float32(-0.5))
    return _fma(e, float32(math.log(2)), _fma(z * z, p, z))


@njit(cache=True, nogil=True)
def _circle(word: np.uint32) -> tuple[float, float]:
    """A point of the unit circle: 30 bits are an angle of up to 45 degrees either way from an axis, two bits the axis."""
    x = float32(int32(uint32(word << uint32(2)))) * float32(math.pi * 2.0**-33)
    square = x * x
    s = _fma(_fma(float32(-1.9515295891e-4), square, float32(8.3321608736e-3)), square, float32(-1.6666654611e-1))
    s = _fma(s * square, x, x)
    c = _fma(float32(2.443315711809948e-5), square, float32(-1.388731625493765e-3))
    c = _fma(_fma(_fma(c, square, float32(4.166664568298827e-2)), square, float32(-0.5)), square, float32(1))
    c = _bits(uint32(_bits(c) ^ uint32(word & uint32(0x80000000))))  # its sign
    swap = uint32(word & uint32(0x40000000)) != uint32(0)
    return (s if swap else c), (c if swap else s)


def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return a(a, b, c), generate


def _reinterpreted(typing: Any, x: Any) -> Any:
    other = types.uint32 if x == types.float32 else types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(other))

    return other(x), generate


# a * b + c, rounded once: by an instruction, or, on a CPU without one, by a function with the same result.
_fma: Any = intrinsic(_fused)
# The uint32 with the bits of a float32, and the reverse.
_bits: Any = intrinsic(_reinterpreted)
