"""The stream cipher: blocks of ChaCha8 under a secret key, compiled by Numba for the CPU.

ChaCha (Bernstein 2008; RFC 8439) turns a key of 256 bits and a position of 128 bits into a block of 16 words of 32
bits. The best attack on record breaks 7 rounds, in 2^237 operations, and not the 8 used here (Aumasson 2019, "Too much
crypto", section 3.3). Every word is a function of the key and of its place alone, so that it can be drawn again, in any
order and by any process.

The functions run on one thread, without the interpreter's lock: callers divide the work.
"""

from __future__ import annotations

import numpy as np
from numba import uint32, uint64

from sparsedp.errors import SparseDPError
from sparsedp.kernels.compiler import compile_loop

ROUNDS = 8
# Blocks made at a time, few enough for the first-level cache. Word k of lane l lies at k * LANES + l: then each
# operation of the cipher is a loop over neighbours, and because the compiler knows its length and the distance of the
# words, it can tell that they do not overlap and uses vector instructions.
LANES = 64
WORDS = 16 * LANES
# "expand 32-byte k", the first four words of the cipher's state. The key is the next eight.
_SIGMA = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
# Where the last four begin: the number of the block or row (64 bits), its purpose, and one that is not used.
NUMBER, PURPOSE = 12 * LANES, 14 * LANES
# Purposes never share a block. The lower 28 bits count the blocks of a row.
ROW, DOUBLE, TAIL, PLAIN = 1 << 28, 1 << 29, 1 << 30, 1 << 31


def stream_key(secret: bytes) -> np.ndarray:
    """The key (8,) uint32 that 32 secret bytes make."""
    if len(secret) != 32:
        raise SparseDPError(f"A key has 32 bytes, but {len(secret)} were given.")
    return np.frombuffer(secret, "<u4").astype(np.uint32)


def check_key(key: np.ndarray) -> None:
    if key.shape != (8,) or key.dtype != np.uint32:
        raise SparseDPError(f"A key is uint32 of shape (8,), as `stream_key` makes it, not {key.dtype} {key.shape}.")


def fill_words(out: np.ndarray, key: np.ndarray, first: int = 0) -> None:
    """Overwrites `out` (n,) uint32 with words `first` to `first + n - 1` of the key's stream of bits.

    Work that is divided at multiples of 1024 wastes nothing.
    """
    if out.ndim != 1 or out.dtype != np.uint32 or not (out.flags.c_contiguous and out.flags.writeable):
        raise SparseDPError(f"out must be a contiguous vector of uint32, not {out.dtype} of shape {out.shape}.")
    check_key(key)
    if not 0 <= first < (1 << 63) - out.size:
        raise SparseDPError(f"The words of a stream are counted from 0 to 2^63 - 1, but first is {first}.")
    compiled_fill_words(out, key, first)


@compile_loop()
def compiled_fill_words(out: np.ndarray, key: np.ndarray, first: int) -> None:
    start, words = start_state(key), np.empty(WORDS, np.uint32)
    switch_purpose(start, PLAIN)
    group, skip = first // WORDS, first % WORDS
    done = 0
    while done < len(out):
        number_lanes(start, group)
        make_blocks(words, start, ROUNDS)
        source = words[skip : skip + len(out) - done]
        target = out[done : done + len(source)]
        for i in range(len(target)):
            target[i] = source[i]
        done += len(source)
        group, skip = group + 1, 0


@compile_loop()
def number_lanes(start: np.ndarray, group: int) -> None:
    """Turns the lanes to the blocks of a group of the sequence."""
    for lane in range(LANES):
        block = uint64(group * LANES + lane)
        start[NUMBER + lane] = uint32(block)
        start[NUMBER + LANES + lane] = uint32(block >> uint64(32))


@compile_loop()
def switch_purpose(start: np.ndarray, purpose: int) -> None:
    """Turns all lanes to the blocks of another purpose, and back."""
    for lane in range(LANES):
        start[PURPOSE + lane] ^= uint32(purpose)


# Numba computes with 64 bits unless told otherwise; the casts keep words at 32, which are twice as many in a vector.


@compile_loop()
def start_state(key: np.ndarray) -> np.ndarray:
    """The state (16 * LANES,) before the rounds, with position 0 in each lane."""
    start = np.zeros(WORDS, np.uint32)
    for k in range(4):
        start[k * LANES : (k + 1) * LANES] = _SIGMA[k]
    for k in range(8):
        start[(4 + k) * LANES : (5 + k) * LANES] = key[k]
    return start


@compile_loop()
def make_blocks(words: np.ndarray, start: np.ndarray, rounds: int) -> None:
    """The blocks that belong to the states `start`."""
    for i in range(WORDS):
        words[i] = start[i]
    for _ in range(rounds // 2):
        _double_round(words)
    for i in range(WORDS):
        words[i] += start[i]


@compile_loop()
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


@compile_loop()
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


@compile_loop()
def _rotated(x: np.uint32, n: int) -> np.uint32:
    return uint32(uint32(x << uint32(n)) | uint32(x >> uint32(32 - n)))
