"""Uniform and normal numbers from a secret key: the stream cipher and the Box-Muller transform, compiled by Numba for the CPU.

Every number is a function of the key and of its place alone, so that it can be drawn again, in any order and by any
process. In float32 it is the same, bit for bit, on every machine: nothing here leaves it to a compiler or to a
mathematical library how to round. (float64 takes its logarithm, sine and cosine from the platform.)

A block of the cipher gives 16 normals in float32 or 8 in float64, two from each pair of uniform numbers u, v
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
from llvmlite import ir
from numba import float32, float64, int32, int64, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from sparsedp.errors import SparseDPError
from sparsedp.kernels.cipher import (
    DOUBLE,
    LANES,
    ROUNDS,
    TAIL,
    WORDS,
    check_key,
    compiled_fill_words,
    make_blocks,
    number_lanes,
    start_state,
    switch_purpose,
)  # fmt: skip
from sparsedp.kernels.compiler import compile_loop

PAIRS = 8 * LANES
# A word below this, one in 65,536, gets 32 bits more: it is far in the tail, and its leading zeros leave it too few.
SHORT = 1 << 16
# Below it, float32 has no digits left for what lies on the grid.
_SMALLEST_GRID = 2.0**-120


def fill_normal(out: np.ndarray, std: float, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,) with N(0, std^2): numbers `first` to `first + n - 1` of the key's sequence.

    Work that is divided at multiples of 1024 wastes nothing.
    """
    check_out(out, 1, key)
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
    check_out(out, 1, key)
    check_grid(grid, out)
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The numbers of a sequence are counted from 0 to 2^63 - 1, but first is {first}.")
    if width < 1 or rows.ndim != 1 or rows.dtype != np.int64:
        raise SparseDPError(f"rows must be a vector of int64, not {rows.dtype} {rows.shape}, and width positive.")
    kind = out.dtype.type
    _add_sequence(out, kind(std / grid), kind(1 / grid), kind(grid), key, first, width, rows)


def fill_uniform(out: np.ndarray, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,) with uniform numbers on [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64.

    They are made of one or two words each of the key's stream of bits (`fill_words`), from word `first` on.
    """
    check_out(out, 1, key)
    if not 0 <= first < (1 << 63) - 2 * out.size:
        raise SparseDPError(f"The words of a stream are counted from 0 to 2^63 - 1, but first is {first}.")
    _fill_uniform(out, key, first)


def fill_mask(out: np.ndarray, chance: float, value: float, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,), float32 or float64, with `value` or 0; out[i] is `value` with probability `chance`.

    It is so where word `first + i` of the key's stream of bits (`fill_words`) is below chance * 2^32.
    """
    check_out(out, 1, key)
    if not 0 <= chance <= 1:
        raise SparseDPError(f"chance must be a probability, not {chance}.")
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The words of a stream are counted from 0 to 2^63 - 1, but first is {first}.")
    _fill_mask(out, uint64(round(chance * 2.0**32)), out.dtype.type(value), key, first)


def check_grid(grid: float, out: np.ndarray) -> None:
    if math.frexp(grid)[0] != 0.5 or not _SMALLEST_GRID <= grid <= 1 / _SMALLEST_GRID:
        raise SparseDPError(f"A grid is a power of two between 2^-120 and 2^120, not {grid}.")


def check_out(out: np.ndarray, axes: int, key: np.ndarray) -> None:
    if out.ndim == 2 and out.shape[1] > 1 << 31:
        raise SparseDPError(f"A row has at most 2^31 columns, but these have {out.shape[1]}.")
    if out.ndim != axes or out.dtype not in (np.float32, np.float64):
        raise SparseDPError(f"out must be float32 or float64 with {axes} axes, not {out.dtype} of shape {out.shape}.")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError("out is written in place, so it must be contiguous and writeable. Pass a copy.")
    check_key(key)


@compile_loop()
def _fill_sequence(out: np.ndarray, std: float, key: np.ndarray, first: int) -> None:
    start, words, radii, points = working_memory(key, out)
    half = len(radii)
    part, skip = first // half, first % half
    number_lanes(start, part // 2)
    draw(radii, points, words, start)
    done = 0
    while done < len(out):
        if part % 2 == 0 and done:
            number_lanes(start, part // 2)
            draw(radii, points, words, start)
        stop = min(len(out), done + half - skip)
        source, angle = radii[skip:], points[part % 2 * half + skip :]
        target = out[done:stop]
        for i in range(len(target)):
            target[i] = std * (source[i] * angle[i])
        done = stop
        part, skip = part + 1, 0


@compile_loop()
def _add_sequence(
    out: np.ndarray, std: float, scale: float, grid: float, key: np.ndarray, first: int, width: int, rows: np.ndarray
) -> None:
    """`std` is in units of the grid; `scale` is 1 / grid."""
    start, words, radii, points = working_memory(key, out)
    half = len(radii)
    part, skip = first // half, first % half
    number_lanes(start, part // 2)
    draw(radii, points, words, start)
    row = np.searchsorted(rows, first // width)  # the next of `rows` that is not behind
    done = 0
    while done < len(out):
        if part % 2 == 0 and skip == 0 and done:
            number_lanes(start, part // 2)
            draw(radii, points, words, start)
        # Up to the next row with a sum, or to its end, or to that of the normals.
        begins = rows[row] * width - first if row < len(rows) else len(out)
        held = done >= begins
        stop = min(len(out), done + half - skip, begins + width if held else begins)
        source, angle, target = radii[skip:], points[part % 2 * half + skip :], out[done:stop]
        # The product of radius and point is exact, and rounded once together with the sum: what becomes of them depends on
        # their exact total alone.
        if held:
            for i in range(len(target)):
                target[i] = grid * np.rint(fma(std * source[i], angle[i], target[i] * scale))
        else:
            for i in range(len(target)):
                target[i] = grid * np.rint((std * source[i]) * angle[i])
        if held and stop == begins + width:
            row += 1
        skip += stop - done
        done = stop
        if skip == half:
            part, skip = part + 1, 0


@compile_loop()
def working_memory(key: np.ndarray, out: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The cipher's state, and working memory for its words and for the radii and points of the normals in them."""
    pairs = 32 // out.itemsize * LANES
    return start_state(key), np.empty(WORDS, np.uint32), np.empty(pairs, out.dtype), np.empty(2 * pairs, out.dtype)


@compile_loop()
def _fill_uniform(out: np.ndarray, key: np.ndarray, first: int) -> None:
    words = np.empty(WORDS, np.uint32)
    each = out.itemsize // 4
    size = WORDS // each
    for begin in range(0, len(out), size):
        target = out[begin : begin + size]
        compiled_fill_words(words[: each * len(target)], key, first + each * begin)
        if each == 1:
            for i in range(len(target)):
                target[i] = float32(int32(uint32(words[i] >> uint32(8)))) * float32(2.0**-24)
        else:
            for i in range(len(target)):
                high, low = uint64(words[2 * i]) >> uint64(6), uint64(words[2 * i + 1]) >> uint64(5)
                target[i] = float64(int64((high << uint64(27)) | low)) * 2.0**-53


@compile_loop()
def _fill_mask(out: np.ndarray, below: np.uint64, value: float, key: np.ndarray, first: int) -> None:
    words = np.empty(min(len(out), WORDS), np.uint32)
    zero = value - value
    for begin in range(0, len(out), WORDS):
        target = out[begin : begin + WORDS]
        compiled_fill_words(words[: len(target)], key, first + begin)
        for i in range(len(target)):
            target[i] = value if uint64(words[i]) < below else zero


@compile_loop()
def draw(radii: np.ndarray, points: np.ndarray, words: np.ndarray, start: np.ndarray) -> None:
    """Standard normals of LANES blocks, radius times point; number k of lane l at k * LANES + l of the points.

    The second half of the points has the same radii as the first. `words` is working memory.
    """
    if radii.itemsize == 8:
        switch_purpose(start, DOUBLE)
        make_blocks(words, start, ROUNDS)
        switch_purpose(start, DOUBLE)
        box_muller_double(words, radii, points, PAIRS // 2)
        return
    make_blocks(words, start, ROUNDS)
    box_muller(words, radii, points, PAIRS)
    smallest = uint32(0xFFFFFFFF)
    for i in range(PAIRS):
        smallest = min(smallest, words[i])
    if smallest < SHORT:
        more = np.empty(WORDS, np.uint32)
        switch_purpose(start, TAIL)
        make_blocks(more, start, ROUNDS)
        switch_purpose(start, TAIL)
        box_muller_tail(words, more, radii, PAIRS)


# From words to normals.


@compile_loop()
def box_muller(words: np.ndarray, radii: np.ndarray, points: np.ndarray, count: int) -> None:
    """Pair i of `count` has u from word i, within [2^-32, 1 - 2^-24], and its angle from the word PAIRS further on."""
    for i in range(count):
        u = fma(float32(int32(uint32(words[i] >> uint32(1)))), float32(2.0**-31), float32(2.0**-32))
        radii[i] = _radius(min(u, float32(1 - 2.0**-24)))
        points[i], points[PAIRS + i] = _circle(words[PAIRS + i])


@compile_loop()
def box_muller_tail(words: np.ndarray, more: np.ndarray, radii: np.ndarray, count: int) -> None:
    """The radii again, with 64 bits for u, where a word is short: u lies within [2^-65, 2^-16]."""
    for i in range(count):
        if words[i] < SHORT:
            long = (uint64(words[i]) << uint64(33)) | (uint64(more[i]) << uint64(1)) | uint64(1)
            radii[i] = _radius(float32(int64(long)) * float32(2.0**-65))


@compile_loop()
def box_muller_double(words: np.ndarray, radii: np.ndarray, points: np.ndarray, count: int) -> None:
    """Four words make one of `count` pairs: 64 bits for u, within [2^-65, 1 - 2^-53], and 64 bits for the angle."""
    n = PAIRS // 2
    for i in range(count):
        u = float64(words[i]) * 2.0**-32 + (float64(words[n + i]) + 0.5) * 2.0**-64
        angle = 2 * math.pi * (float64(words[2 * n + i]) * 2.0**-32 + float64(words[3 * n + i]) * 2.0**-64)
        radii[i] = math.sqrt(-2 * math.log(min(u, 1 - 2.0**-53)))
        points[i], points[n + i] = math.cos(angle), math.sin(angle)


@compile_loop()
def _radius(u: float) -> float:
    return np.sqrt(float32(-2) * _log(u))


@compile_loop()
def _log(u: float) -> float:
    """ln u in float32: u = 2^e (1 + z) with 1 + z between sqrt(1/2) and sqrt(2), and Cephes' polynomial in z."""
    shifted = uint32(_bits(u) + uint32(0x3F800000 - 0x3F3504F3))  # the bits of 1 and of sqrt(1/2)
    e = float32(int32(uint32(shifted >> uint32(23)))) - float32(127)
    z = _bits(uint32(uint32(shifted & uint32(0x007FFFFF)) + uint32(0x3F3504F3))) - float32(1)
    p = fma(float32(7.0376836292e-2), z, float32(-1.1514610310e-1))
    p = fma(p, z, float32(1.1676998740e-1))
    p = fma(p, z, float32(-1.2420140846e-1))
    p = fma(p, z, float32(1.4249322787e-1))
    p = fma(p, z, float32(-1.6668057665e-1))
    p = fma(p, z, float32(2.0000714765e-1))
    p = fma(p, z, float32(-2.4999993993e-1))
    p = fma(p, z, float32(3.3333331174e-1))
    p = fma(p, z, float32(-0.5))
    return fma(e, float32(math.log(2)), fma(z * z, p, z))


@compile_loop()
def _circle(word: np.uint32) -> tuple[float, float]:
    """A point of the unit circle: 30 bits are an angle of up to 45 degrees either way from an axis, two bits the axis."""
    x = float32(int32(uint32(word << uint32(2)))) * float32(math.pi * 2.0**-33)
    square = x * x
    s = fma(fma(float32(-1.9515295891e-4), square, float32(8.3321608736e-3)), square, float32(-1.6666654611e-1))
    s = fma(s * square, x, x)
    c = fma(float32(2.443315711809948e-5), square, float32(-1.388731625493765e-3))
    c = fma(fma(fma(c, square, float32(4.166664568298827e-2)), square, float32(-0.5)), square, float32(1))
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


def _rounded_vector(
    typing: Any, out: Any, at: Any, radii: Any, source: Any, points: Any, angle: Any, scale: Any, kept: Any, grid: Any
) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.get_value_type(out.dtype)
        bits = 32 if out.dtype == types.float32 else 64
        count = 256 // bits
        vector, index = ir.VectorType(number, count), ir.IntType(32)

        def pointer(place: int) -> Any:
            array = context.make_array(signature.args[place])(context, builder, arguments[place])
            return builder.bitcast(builder.gep(array.data, [arguments[place + 1]]), vector.as_pointer())

        def load(place: int) -> Any:
            return builder.load(pointer(place), align=bits // 8)

        def spread(value: Any) -> Any:
            first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(index, 0))
            zeros = ir.Constant(ir.VectorType(index, count), None)
            return builder.shuffle_vector(first, ir.Constant(vector, ir.Undefined), zeros)

        def call(name: str, *values: Any) -> Any:
            kind = ir.FunctionType(vector, [vector] * len(values))
            name = f"llvm.{name}.v{count}f{bits}"
            return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)

        radius = builder.fmul(spread(arguments[6]), load(2))
        total = call("fma", radius, load(4), builder.fmul(spread(arguments[7]), load(0)))
        builder.store(builder.fmul(spread(arguments[8]), call("rint", total)), pointer(0), align=bits // 8)
        return context.get_dummy_value()

    return types.void(out, at, radii, source, points, angle, scale, kept, grid), generate


# A vector of `out` (256 bits) from the place `at` on becomes grid * rint(fma(scale * radii, points, kept * out)), its operands
# from places of their own on: what a loop over single numbers gives, which the compiler does not turn into vectors by itself.
round_vector: Any = intrinsic(_rounded_vector)
# a * b + c, rounded once: by an instruction, or, on a CPU without one, by a function with the same result.
fma: Any = intrinsic(_fused)
# The uint32 with the bits of a float32, and the reverse.
_bits: Any = intrinsic(_reinterpreted)
