"""Noise for single rows of tables: a number is a function of the key, the row's number and the column alone.

So the rows between those that get noise need not be drawn, and it does not matter who draws a row, nor when. The numbers are
those of `normals.py`, from blocks of their own. The functions run on one thread, without the interpreter's lock.
"""

from __future__ import annotations

import numpy as np
from numba import float64, uint32, uint64

from sparsedp.errors import SparseDPError
from sparsedp.kernels.cipher import (
    DOUBLE,
    LANES,
    NUMBER,
    PLAIN,
    PURPOSE,
    ROUNDS,
    ROW,
    TAIL,
    WORDS,
    check_key,
    make_blocks,
    start_state,
    switch_purpose,
)  # fmt: skip
from sparsedp.kernels.compiler import compile_loop
from sparsedp.kernels.normals import (
    SHORT,
    box_muller,
    box_muller_double,
    box_muller_tail,
    check_grid,
    check_out,
    fma,
    round_vector,
    working_memory,
)  # fmt: skip


def fill_rows(out: np.ndarray, rows: np.ndarray, std: float | np.ndarray, key: np.ndarray) -> None:
    """Overwrites out[i], of (n, dim), with N(0, std[i]^2): a function of the key, of rows[i] and of the column alone.

    `rows` (n,) are integers that are not negative; `std` is one number or (n,).
    """
    check_out(out, 2, key)
    if np.shape(rows) != out.shape[:1]:
        raise SparseDPError(f"rows must be {len(out)} integers, one for each row of out, not {np.shape(rows)}.")
    rows = _checked_rows(rows)
    _fill_rows(out.reshape(-1), out.shape[1], rows, _scales(std, rows, 1.0, out.dtype), key)


def fill_row_words(out: np.ndarray, rows: np.ndarray, key: np.ndarray) -> None:
    """Overwrites out[i], of (n,) uint64, with uniform bits: a function of the key and of rows[i] alone."""
    if out.ndim != 1 or out.dtype != np.uint64 or not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError(f"out must be a contiguous vector of uint64, not {out.dtype} of shape {out.shape}.")
    check_key(key)
    _fill_row_words(out, _checked_rows(rows), key)


def add_rows(
    table: np.ndarray, places: np.ndarray | None, std: float | np.ndarray, grid: float, key: np.ndarray,
    factor: np.ndarray | None = None, rows: np.ndarray | None = None,
) -> None:  # fmt: skip
    """table[places[i]], of (any, dim), becomes factor[i] times itself plus what `fill_rows` would draw for rows[i].

    Each element is rounded to a multiple of `grid`, a power of two. `places` (n,) are distinct, None: all of the table's, in
    their order; `factor` (n,) None: 1. `rows` (n,) None: a place in the table is the number of its row, as it is not where
    `table` holds a part of the rows.
    """
    check_out(table, 2, key)
    check_grid(grid, table)
    if places is None:
        places = np.arange(len(table))
        rows = places if rows is None else _numbers(rows, places)
    else:
        places = _checked_rows(places, len(table))
        rows = _numbers(rows, places)
    many = factor is not None or np.ndim(std) > 0
    factors = _scales(1.0 if factor is None else factor, rows, 1 / grid, table.dtype, many)
    scales = _scales(std, rows, 1 / grid, table.dtype, many)
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
        check_out(one, 2, keys[0])
    for grid in grids:
        if grid:
            check_grid(grid, table)
    check_key(keys[1])
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


def move_rows(
    table: np.ndarray, places: np.ndarray, factor: float, std: float, values: np.ndarray, step: float, grid: float,
    key: np.ndarray, rows: np.ndarray | None = None,
) -> None:  # fmt: skip
    """table[places[i]], of (any, dim), becomes factor table[places[i]] + std z + step values[i], out of exact numbers.

    z is what `fill_rows` draws for the row; all is computed in float64. The result is rounded as `add_rows` rounds: over the
    grid, a power of two, to the table's type, and then to an integer. `values` are (n, dim); `places` and `rows` are as there.
    """
    check_out(table, 2, key)
    check_grid(grid, table)
    places = _checked_rows(places, len(table))
    rows = _numbers(rows, places)
    if values.shape != (len(rows), table.shape[1]):
        raise SparseDPError(f"values must be {(len(rows), table.shape[1])}, not {values.shape}.")
    flat, kind = np.ascontiguousarray(values, table.dtype).reshape(-1), table.dtype.type
    in_steps = (factor / grid, std / grid, step / grid)
    _move_rows(table.reshape(-1), table.shape[1], places, rows, flat, *in_steps, kind(grid), key)


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


def _scales(
    values: float | np.ndarray, rows: np.ndarray, unit: float, dtype: np.dtype, many: bool = True
) -> np.ndarray:
    """`unit` times the number of each row; `values` may be one for all, and is then one alone if not `many`."""
    if isinstance(values, float) or np.ndim(values) == 0:
        return np.full(len(rows), float(values) * unit, dtype) if many else np.array([float(values) * unit], dtype)
    if np.shape(values) != rows.shape:
        raise SparseDPError(
            f"std must be one number or one for each of {len(rows)} rows, not of shape {np.shape(values)}."
        )
    return np.multiply(values, unit, dtype=np.float64).astype(dtype)


@compile_loop()
def _fill_rows(out: np.ndarray, dim: int, rows: np.ndarray, std: np.ndarray, key: np.ndarray) -> None:
    start, words, radii, points = working_memory(key, out)
    moved = np.empty(WORDS, np.uint32)
    half, second = len(radii) // LANES, len(radii)
    width = 2 * half
    blocks, drawn = (dim + width - 1) // width, min(half, dim)
    i = block = 0  # kept along: a division for each block would take as long as drawing it
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


@compile_loop()
def _fill_row_words(out: np.ndarray, rows: np.ndarray, key: np.ndarray) -> None:
    start, words = start_state(key), np.empty(WORDS, np.uint32)
    for begin in range(0, len(rows), LANES):
        used = _place(start, rows, 1, begin)
        switch_purpose(start, PLAIN)
        make_blocks(words, start, ROUNDS)
        switch_purpose(start, PLAIN)
        for lane in range(used):
            out[begin + lane] = uint64(words[lane]) << uint64(32) | uint64(words[LANES + lane])


@compile_loop()
def _add_rows(
    out: np.ndarray, dim: int, places: np.ndarray, rows: np.ndarray, factor: np.ndarray, std: np.ndarray, grid: float,
    key: np.ndarray,
) -> None:  # fmt: skip
    """`std` and `factor` are in units of the grid, one of each for each row, or for all."""
    each = 1 if len(std) > 1 else 0
    start, words, radii, points = working_memory(key, out)
    moved = np.empty(WORDS, np.uint32)
    half, second = len(radii) // LANES, len(radii)
    width = 2 * half
    blocks, drawn = (dim + width - 1) // width, min(half, dim)
    i = block = 0  # kept along: a division for each block would take as long as drawing it
    for begin in range(0, len(rows) * blocks, LANES):
        used = _place(start, rows, blocks, begin)
        _draw_rows(radii, points, words, moved, start, drawn)
        for lane in range(used):
            # Unsigned, or each access would test for an index from the end.
            at, source = uint64(places[i] * dim + block * width), uint64(lane * drawn)
            scale, kept = std[each * i], factor[each * i]
            for side in range(2):
                angle = source + uint64(side * second)
                count = min(half, dim - block * width - side * half)
                if count == half:
                    round_vector(out, at, radii, source, points, angle, scale, kept, grid)
                else:
                    for k in range(uint64(max(count, 0))):
                        mean = kept * out[at + k]
                        out[at + k] = grid * np.rint(fma(scale * radii[source + k], points[angle + k], mean))
                at += uint64(half)
            block += 1
            if block == blocks:
                i, block = i + 1, 0


@compile_loop()
def _move_rows(
    out: np.ndarray, dim: int, places: np.ndarray, rows: np.ndarray, values: np.ndarray, factor: float, std: float,
    step: float, grid: float, key: np.ndarray,
) -> None:  # fmt: skip
    """`factor`, `std` and `step` are in units of the grid."""
    start, words, radii, points = working_memory(key, out)
    moved = np.empty(WORDS, np.uint32)
    half, second = len(radii) // LANES, len(radii)
    width = 2 * half
    blocks, drawn = (dim + width - 1) // width, min(half, dim)
    normals = np.empty(blocks * width, np.float64)  # of a row
    steps = np.empty(dim, out.dtype)  # of a row over the grid, in the type of the table
    i = block = 0
    for begin in range(0, len(rows) * blocks, LANES):
        used = _place(start, rows, blocks, begin)
        _draw_rows(radii, points, words, moved, start, drawn)
        for lane in range(used):
            for side in range(2):
                # Unsigned, or each access would test for an index from the end.
                source, angle = uint64(lane * drawn), uint64(lane * drawn + side * second)
                column = uint64(block * width + side * half)
                for k in range(uint64(drawn)):
                    normals[column + k] = float64(radii[source + k]) * float64(points[angle + k])
            block += 1
            if block < blocks:
                continue
            at, added = uint64(places[i] * dim), uint64(i * dim)
            for k in range(uint64(dim)):
                # Noise and sum first: a table of float64 may be so large that it takes either alone to another number.
                noisy = std * normals[k] + step * float64(values[added + k])
                steps[k] = factor * float64(out[at + k]) + noisy
            for k in range(uint64(dim)):
                out[at + k] = grid * np.rint(steps[k])
            i, block = i + 1, 0


@compile_loop()
def _move_pairs(
    table: np.ndarray, other: np.ndarray, dim: int, places: np.ndarray, rows: np.ndarray, drift: np.ndarray,
    std: np.ndarray, shift: np.ndarray, grid: float, other_grid: float, key: np.ndarray, other_key: np.ndarray,
) -> None:  # fmt: skip
    start, words, radii, points = working_memory(key, table)
    start2, words, radii2, points2 = working_memory(other_key, table)
    moved = np.empty(WORDS, np.uint32)
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


@compile_loop()
def _place(start: np.ndarray, rows: np.ndarray, blocks: int, begin: int) -> int:
    """Turns the lanes to the blocks of rows, from the block `begin` on: first all of the first row, then of the second.

    Returns how many lanes are in use.
    """
    used = min(LANES, len(rows) * blocks - begin)
    i, block = begin // blocks, begin % blocks
    for lane in range(used):
        start[NUMBER + lane] = uint32(rows[i])
        start[NUMBER + LANES + lane] = uint32(rows[i] >> 32)
        start[PURPOSE + lane] = uint32(ROW + block)
        block += 1
        if block == blocks:
            i, block = i + 1, 0
    return used


@compile_loop()
def _draw_rows(
    radii: np.ndarray, points: np.ndarray, words: np.ndarray, moved: np.ndarray, start: np.ndarray, drawn: int
) -> None:
    """As `_draw`, with the normals of a lane side by side: the first `drawn` pairs of lane l begin at l * drawn.

    A row is then written from neighbours. Pair k of a lane holds its numbers k and k + half, half the pairs of a block.
    `words` and `moved` are working memory.
    """
    if radii.itemsize == 8:
        switch_purpose(start, DOUBLE)
        make_blocks(words, start, ROUNDS)
        switch_purpose(start, DOUBLE)
        _gather(moved, words, 4, drawn)
        box_muller_double(moved, radii, points, LANES * drawn)
        return
    make_blocks(words, start, ROUNDS)
    _gather(moved, words, 2, drawn)
    box_muller(moved, radii, points, LANES * drawn)
    smallest = uint32(0xFFFFFFFF)
    for i in range(LANES * drawn):
        smallest = min(smallest, moved[i])
    if smallest < SHORT:
        more = np.empty(WORDS, np.uint32)
        switch_purpose(start, TAIL)
        make_blocks(words, start, ROUNDS)
        switch_purpose(start, TAIL)
        _gather(more, words, 2, drawn)
        box_muller_tail(moved, more, radii, LANES * drawn)


@compile_loop()
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
