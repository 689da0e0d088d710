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
_ROW, _DOUBLE, _TAIL = 1 << 28, 1 << 29, 1 << 30
# A word below this, one in 65,536, gets 32 bits more: it is far in the tail, and its leading zeros leave it too few.
_SHORT = 1 << 16


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


def fill_rows(out: np.ndarray, rows: np.ndarray, std: float | np.ndarray, key: np.ndarray) -> None:
    """Overwrites out[i], of (n, dim), with N(0, std[i]^2): a function of the key, of rows[i] and of the column alone.

    `rows` (n,) are integers that are not negative; `std` is one number or (n,).
    """
    _check(out, 2, key)
    if np.shape(rows) != out.shape[:1]:
        raise SparseDPError(f"rows must be {len(out)} integers, one for each row of out, not {np.shape(rows)}.")
    rows = _checked_rows(rows)
    _draw_rows(out.reshape(-1), out.shape[1], np.arange(len(out)), rows, _scales(std, rows, out), key, False)


def add_rows(table: np.ndarray, rows: np.ndarray, std: float | np.ndarray, key: np.ndarray) -> None:
    """Adds to table[rows[i]], of (any, dim), what `fill_rows` would draw for that row. `rows` (n,) are distinct."""
    _check(table, 2, key)
    rows = _checked_rows(rows)
    if rows.size and rows.max() >= len(table):
        raise SparseDPError(f"The table has {len(table)} rows, but row {rows.max()} is to get noise.")
    _draw_rows(table.reshape(-1), table.shape[1], rows, rows, _scales(std, rows, table), key, True)


def _checked_rows(rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows)
    if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
        raise SparseDPError(f"rows must be a vector of integers, not {rows.dtype} {rows.shape}.")
    rows = np.ascontiguousarray(rows, np.int64)  # what is too large becomes negative
    if rows.size and rows.min() < 0:
        raise SparseDPError("rows must lie from 0 to 2^63 - 1, but some do not.")
    return rows


def _scales(std: float | np.ndarray, rows: np.ndarray, out: np.ndarray) -> np.ndarray:
    if np.shape(std) not in ((), rows.shape):
        raise SparseDPError(
            f"std must be one number or one for each of {len(rows)} rows, not of shape {np.shape(std)}."
        )
    return np.full(rows.shape, std, out.dtype)


def _check(out: np.ndarray, axes: int, key: np.ndarray) -> None:
    if out.ndim == 2 and out.shape[1] > 1 << 31:
        raise SparseDPError(f"A row has at most 2^31 columns, but these have {out.shape[1]}.")
    if out.ndim != axes or out.dtype not in (np.float32, np.float64):
        raise SparseDPError(f"out must be float32 or float64 with {axes} axes, not {out.dtype} of shape {out.shape}.")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError("out is written in place, so it must be contiguous and writeable. Pass a copy.")
    if key.shape != (8,) or key.dtype != np.uint32:
        raise SparseDPError(f"A key is uint32 of shape (8,), as `stream_key` makes it, not {key.dtype} {key.shape}.")


@njit(cache=True, nogil=True)
def _fill_sequence(out: np.ndarray, std: float, key: np.ndarray, first: int) -> None:
    start, words = _start(key), np.empty(_WORDS, np.uint32)
    normals = np.empty(4 * _WORDS // out.itemsize, out.dtype)
    group, skip = first // len(normals), first % len(normals)
    done = 0
    while done < len(out):
        for lane in range(LANES):
            block = uint64(group * LANES + lane)
            start[_NUMBER + lane] = uint32(block)
            start[_NUMBER + LANES + lane] = uint32(block >> uint64(32))
        _draw(normals, words, start)
        source = normals[skip : skip + len(out) - done]
        target = out[done : done + len(source)]
        for i in range(len(target)):
            target[i] = std * source[i]
        done += len(source)
        group, skip = group + 1, 0


@njit(cache=True, nogil=True)
def _draw_rows(
    out: np.ndarray, dim: int, places: np.ndarray, rows: np.ndarray, std: np.ndarray, key: np.ndarray, add: bool
) -> None:
    """Row i goes to the elements from places[i] * dim on of `out`, which is flat; with `add` it is added to them.

    The lanes take the blocks of the first row, then those of the second, and so on.
    """
    start, words = _start(key), np.empty(_WORDS, np.uint32)
    width = 64 // out.itemsize
    normals = np.empty(width * LANES, out.dtype)
    blocks = (dim + width - 1) // width
    for begin in range(0, len(rows) * blocks, LANES):
        used = min(LANES, len(rows) * blocks - begin)
        i, block = begin // blocks, begin % blocks
        for lane in range(used):
            start[_NUMBER + lane] = uint32(rows[i])
            start[_NUMBER + LANES + lane] = uint32(rows[i] >> 32)
            start[_PURPOSE + lane] = uint32(_ROW + block)
            block += 1
            if block == blocks:
                i, block = i + 1, 0
        _draw(normals, words, start)
        i, block = begin // blocks, begin % blocks
        for lane in range(used):
            scale = std[i]
            at = uint64(
                places[i] * dim + block * width
            )  # unsigned, or each access would test for an index from the end
            count = min(width, dim - block * width)
            if add:
                for k in range(count):
                    out[at + uint64(k)] += scale * normals[k * LANES + lane]
            else:
                for k in range(count):
                    out[at + uint64(k)] = scale * normals[k * LANES + lane]
            block += 1
            if block == blocks:
                i, block = i + 1, 0


@njit(cache=True, nogil=True)
def _draw(normals: np.ndarray, words: np.ndarray, start: np.ndarray) -> None:
    """Standard normals of LANES blocks, number k of lane l at k * LANES + l. `words` is working memory."""
    if normals.itemsize == 8:
        _switch(start, _DOUBLE)
        _cipher(words, start, ROUNDS)
        _switch(start, _DOUBLE)
        _box_muller_double(words, normals)
        return
    _cipher(words, start, ROUNDS)
    _box_muller(words, normals)
    smallest = uint32(0xFFFFFFFF)
    for i in range(_PAIRS):
        smallest = min(smallest, words[i])
    if smallest < _SHORT:
        more = np.empty(_WORDS, np.uint32)
        _switch(start, _TAIL)
        _cipher(more, start, ROUNDS)
        _switch(start, _TAIL)
        _box_muller_tail(words, more, normals)


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
def _box_muller(words: np.ndarray, normals: np.ndarray) -> None:
    """Pair i has u from word i, within [2^-32, 1 - 2^-24], and its angle from the word _PAIRS further on."""
    for i in range(_PAIRS):
        u = _fma(float32(int32(uint32(words[i] >> uint32(1)))), float32(2.0**-31), float32(2.0**-32))
        normals[i], normals[_PAIRS + i] = _pair(min(u, float32(1 - 2.0**-24)), words[_PAIRS + i])


@njit(cache=True, nogil=True)
def _box_muller_tail(words: np.ndarray, more: np.ndarray, normals: np.ndarray) -> None:
    """Again, with 64 bits for u, where a word is short: u lies within [2^-65, 2^-16]."""
    for i in range(_PAIRS):
        if words[i] < _SHORT:
            long = (uint64(words[i]) << uint64(33)) | (uint64(more[i]) << uint64(1)) | uint64(1)
            normals[i], normals[_PAIRS + i] = _pair(float32(int64(long)) * float32(2.0**-65), words[_PAIRS + i])


@njit(cache=True, nogil=True)
def _box_muller_double(words: np.ndarray, normals: np.ndarray) -> None:
    """Four words make a pair: 64 bits for u, within [2^-65, 1 - 2^-53], and 64 bits for the angle."""
    n = _PAIRS // 2
    for i in range(n):
        u = float64(words[i]) * 2.0**-32 + (float64(words[n + i]) + 0.5) * 2.0**-64
        angle = 2 * math.pi * (float64(words[2 * n + i]) * 2.0**-32 + float64(words[3 * n + i]) * 2.0**-64)
        radius = math.sqrt(-2 * math.log(min(u, 1 - 2.0**-53)))
        normals[i] = radius * math.cos(angle)
        normals[n + i] = radius * math.sin(angle)


@njit(cache=True, nogil=True)
def _pair(u: float, word: np.uint32) -> tuple[float, float]:
    radius = np.sqrt(float32(-2) * _log(u))
    x, y = _circle(word)
    return radius * x, radius * y


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

    return types.float32(types.float32, types.float32, types.float32), generate


def _reinterpreted(typing: Any, x: Any) -> Any:
    other = types.uint32 if x == types.float32 else types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(other))

    return other(x), generate


# a * b + c, rounded once: by an instruction, or, on a CPU without one, by a function with the same result.
_fma: Any = intrinsic(_fused)
# The uint32 with the bits of a float32, and the reverse.
_bits: Any = intrinsic(_reinterpreted)
