"""The keyed normals: the cipher is ChaCha, places decide the numbers, and the numbers are normal far into the tail."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numba import njit
from scipy import stats

from sparsedp import chacha
from sparsedp.chacha import LANES, add_rows, fill_normal, fill_rows, stream_key
from sparsedp.errors import SparseDPError

KEY = stream_key(hashlib.shake_256(b"key").digest(32))
GROUP = 16 * LANES
ROW, DOUBLE, TAIL = 1 << 28, 1 << 29, 1 << 30
# Of what `digest` draws with `KEY`. It changes only if the numbers change, and then no run can be drawn again.
DIGEST = "66445dd7efe62805559d3417d69c4375fd069a0c2f13a99a7e3c46ff31521112"


def reference(key: np.ndarray, position: tuple[int, ...], rounds: int = 8) -> list[int]:
    """A block of ChaCha, as RFC 8439 (2.3) writes it, with any number of rounds."""
    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574, *map(int, key), *position]
    x = list(start)

    def rotate(d: int, a: int, n: int) -> None:
        word = x[d] ^ x[a]
        x[d] = ((word << n) | (word >> (32 - n))) & 0xFFFFFFFF

    def add(a: int, b: int) -> None:
        x[a] = (x[a] + x[b]) & 0xFFFFFFFF

    def quarter(a: int, b: int, c: int, d: int) -> None:
        for first, second in ((16, 12), (8, 7)):
            add(a, b)
            rotate(d, a, first)
            add(c, d)
            rotate(b, c, second)

    for _ in range(rounds // 2):
        for column in range(4):
            quarter(column, 4 + column, 8 + column, 12 + column)
        for diagonal in range(4):
            quarter(diagonal, 4 + (diagonal + 1) % 4, 8 + (diagonal + 2) % 4, 12 + (diagonal + 3) % 4)
    return [(a + b) & 0xFFFFFFFF for a, b in zip(x, start)]


def position(number: int, purpose: int = 0) -> tuple[int, int, int, int]:
    return number & 0xFFFFFFFF, number >> 32, purpose, 0


def reference_block(key: np.ndarray, number: int, purpose: int = 0) -> np.ndarray:
    """The 16 normals of a block: u is rounded to float32, and all that follows is float64."""
    words = np.array(reference(key, position(number, purpose)), np.uint32)
    more = np.array(reference(key, position(number, purpose ^ TAIL)), np.uint32)
    short = words[:8] + (more[:8] + 0.5) / 2**32
    usual = (words[:8] >> np.uint32(1)).astype(np.float32) * 2.0 + 1.0
    u = np.minimum((np.where(words[:8] < 1 << 16, short, usual) / 2**32).astype(np.float32), 1 - 2.0**-24)
    radius = np.sqrt(-2 * np.log(u.astype(np.float64)))
    return np.concatenate(radius * reference_circle(words[8:]))


def reference_circle(words: np.ndarray) -> np.ndarray:
    """Points (2, n) of the unit circle: bit 31 chooses left or right, and bit 30 swaps the axes."""
    angle = (words << np.uint32(2)).view(np.int32) * (np.pi / 2**33)
    points = np.stack([np.where(words >> np.uint32(31), -1, 1) * np.cos(angle), np.sin(angle)])
    return np.where((words >> np.uint32(30)) & np.uint32(1), points[::-1], points)


def blocks_of(key: np.ndarray, positions: np.ndarray, rounds: int) -> np.ndarray:
    """The kernel's words (16, LANES) at positions (4, LANES)."""
    start, words = chacha._start(key), np.empty(GROUP, np.uint32)
    start[12 * LANES :] = positions.reshape(-1)
    chacha._cipher(words, start, rounds)
    return words.reshape(16, LANES)


def sequence(n: int, key: np.ndarray = KEY, first: int = 0, std: float = 1.0, dtype: type = np.float32) -> np.ndarray:
    out = np.full(n, np.nan, dtype)
    fill_normal(out, std, key, first)
    return out


def rows_of(
    rows: np.ndarray | list[int],
    dim: int,
    key: np.ndarray = KEY,
    std: float | np.ndarray = 1.0,
    dtype: type = np.float32,
) -> np.ndarray:
    out = np.full((len(rows), dim), np.nan, dtype)
    fill_rows(out, np.asarray(rows, np.int64), std, key)
    return out


# ---------------------------------------------------------------------- the cipher


@pytest.mark.parametrize(
    ("key", "place", "rounds", "expected"),
    [
        (  # RFC 8439, 2.3.2
            bytes(range(32)),
            (1, 0x09000000, 0x4A000000, 0),
            20,
            "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3"
            " 466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2",
        ),
        (  # draft-strombergson-chacha-test-vectors, TC1, 8 rounds (there as bytes)
            bytes(32),
            (0, 0, 0, 0),
            8,
            "2fef003e d6405f89 e8b85b7f a1a5091f c30e842c 3b7f9ace 88e11b18 1e1a71ef"
            " 72e14c98 416f21b9 6753449f 19566d45 a3424a31 01b086da b8fd7b38 42fe0c0e",
        ),
    ],
    ids=["rfc8439", "chacha8"],
)
def test_published_blocks(key: bytes, place: tuple[int, ...], rounds: int, expected: str) -> None:
    words = [int(word, 16) for word in expected.split()]
    assert reference(stream_key(key), place, rounds) == words
    positions = np.repeat(np.array(place, np.uint32)[:, None], LANES, 1)
    assert (blocks_of(stream_key(key), positions, rounds) == np.array(words, np.uint32)[:, None]).all()


def test_words_equal_the_reference() -> None:
    positions = np.random.default_rng(0).integers(0, 1 << 32, (4, LANES), dtype=np.uint32)
    words = blocks_of(KEY, positions, 8)
    for lane in range(LANES):
        assert words[:, lane].tolist() == reference(KEY, tuple(positions[:, lane].tolist()))


def test_key_is_little_endian() -> None:
    assert stream_key(bytes(range(32)))[:2].tolist() == [0x03020100, 0x07060504]


# ---------------------------------------------------------------------- which number is where


@pytest.mark.parametrize("group", [0, 3, (1 << 32) // LANES - 1, (1 << 32) // LANES, (1 << 57) // LANES])
def test_sequence_equals_the_reference(group: int) -> None:
    """Number k of block b is number k * LANES + b % LANES of a group of LANES blocks; b goes beyond 2^32."""
    drawn = sequence(GROUP, first=group * GROUP)
    expected = np.stack([reference_block(KEY, group * LANES + lane) for lane in range(LANES)], 1).reshape(-1)
    np.testing.assert_allclose(drawn, expected, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("row", [0, 1, (1 << 32) - 1, 1 << 32, (1 << 62) + 12345])
def test_rows_equal_the_reference(row: int) -> None:
    drawn = rows_of([row], 40)[0]
    expected = np.concatenate([reference_block(KEY, row, ROW + block) for block in range(3)])[:40]
    np.testing.assert_allclose(drawn, expected, rtol=3e-7, atol=3e-7)


def test_double_precision_equals_the_reference() -> None:
    drawn = sequence(GROUP // 2, dtype=np.float64).reshape(8, LANES)
    by_row = rows_of([9], 8, dtype=np.float64)[0]
    for got, number, purpose in ((drawn[:, 5], 5, DOUBLE), (by_row, 9, ROW + DOUBLE)):
        words = np.array(reference(KEY, position(number, purpose)), np.float64).reshape(4, 4)
        radius = np.sqrt(-2 * np.log(words[0] / 2**32 + words[1] / 2**64))
        angle = 2 * np.pi * (words[2] / 2**32 + words[3] / 2**64)
        expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_sequence_can_begin_and_end_anywhere(dtype: type) -> None:
    whole = sequence(5 * GROUP, dtype=dtype)
    for first, n in (
        (0, 0),
        (0, 1),
        (1, 1),
        (1, GROUP),
        (GROUP - 1, 2),
        (GROUP, GROUP),
        (GROUP // 2, 17),
        (2500, 2000),
    ):
        assert np.array_equal(sequence(n, first=first, dtype=dtype), whole[first : first + n])
    across = (1 << 36) - 100  # where the block counter needs its upper word
    assert np.array_equal(sequence(100, first=across + 100), sequence(300, first=across)[100:200])
    assert sequence(10, first=(1 << 63) - 11).std() > 0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 8, 16, 17, 64])
def test_a_row_does_not_depend_on_its_company(dim: int, dtype: type) -> None:
    whole = rows_of(np.arange(200), dim, dtype=dtype)
    assert np.array_equal(rows_of([5, 3], dim, dtype=dtype), whole[[5, 3]])
    shuffled = np.random.default_rng(1).permutation(200)
    assert np.array_equal(rows_of(shuffled, dim, dtype=dtype), whole[shuffled])
    assert np.array_equal(rows_of([7, 7, 199], dim, dtype=dtype), whole[[7, 7, 199]])
    assert np.array_equal(whole, rows_of(np.arange(200), 100, dtype=dtype)[:, :dim])  # nor on the number of columns


def test_nothing_to_fill() -> None:
    assert sequence(0).shape == (0,)
    assert rows_of([], 5).shape == (0, 5)
    assert rows_of([1, 2], 0).shape == (2, 0)
    out = np.empty((0, 3), np.float32)
    fill_rows(out, np.array([]), np.array([]), KEY)  # numpy's empty array is of floats


def test_deviation() -> None:
    unit, std = rows_of(np.arange(100), 20), np.linspace(0, 3, 100)
    assert np.array_equal(rows_of(np.arange(100), 20, std=std), std.astype(np.float32)[:, None] * unit)
    assert np.array_equal(rows_of(np.arange(100), 20, std=2.5), np.float32(2.5) * unit)
    assert np.array_equal(sequence(100, std=2.5), np.float32(2.5) * sequence(100))
    assert np.array_equal(sequence(100, std=2.5, dtype=np.float64), 2.5 * sequence(100, dtype=np.float64))


def test_two_threads_draw_what_one_draws() -> None:
    n, rows, dim = 300_000, np.random.default_rng(2).integers(0, 1 << 40, 5000), 33
    out, table = np.empty(n, np.float32), np.empty((len(rows), dim), np.float32)
    with ThreadPoolExecutor(2) as pool:
        for begin in range(0, n, 50_000):
            pool.submit(fill_normal, out[begin : begin + 50_000], 1.0, KEY, begin)
        for begin in range(0, len(rows), 1000):
            pool.submit(fill_rows, table[begin : begin + 1000], rows[begin : begin + 1000], 1.0, KEY)
    assert np.array_equal(out, sequence(n))
    assert np.array_equal(table, rows_of(rows, dim))


def digest() -> str:
    drawn = sequence(1 << 20).tobytes() + rows_of(np.arange(3000), 17).tobytes()
    return hashlib.sha256(drawn).hexdigest()


def test_the_same_bits_everywhere() -> None:
    assert digest() == DIGEST


@pytest.mark.slow
def test_the_same_bits_without_vectors(tmp_path: Path) -> None:
    """Compiled for the oldest CPU of its kind, which has neither wide vectors nor a fused multiplication."""
    environment = os.environ | {
        "NUMBA_CPU_NAME": "generic",
        "NUMBA_CPU_FEATURES": "",
        "NUMBA_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
    }
    command = [sys.executable, "-c", "import test_chacha; print(test_chacha.digest())"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == digest()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stream_key(b"short"), "32 bytes"),
        (lambda: fill_normal(np.zeros(10, np.float32)[::2], 1.0, KEY), "contiguous"),
        (lambda: fill_rows(np.zeros((4, 6), np.float32)[:, :3], np.arange(4), 1.0, KEY), "contiguous"),
        (lambda: fill_rows(np.zeros((4, 6), np.float32, order="F"), np.arange(4), 1.0, KEY), "contiguous"),
        (lambda: fill_normal(np.frombuffer(bytes(8), np.float32), 1.0, KEY), "writeable"),
        (lambda: fill_normal(np.zeros(10, np.float16), 1.0, KEY), "float16"),
        (lambda: fill_normal(np.zeros((2, 2), np.float32), 1.0, KEY), "1 axes"),
        (lambda: fill_normal(np.zeros(2, np.float32), 1.0, KEY[:4]), "key"),
        (lambda: fill_normal(np.zeros(2, np.float32), 1.0, KEY.astype(np.int64)), "key"),
        (lambda: fill_normal(np.zeros(2, np.float32), 1.0, KEY, first=-1), "first is -1"),
        (lambda: fill_normal(np.zeros(2, np.float32), 1.0, KEY, first=(1 << 63) - 1), "first is"),
        (lambda: fill_rows(np.zeros((2, 2), np.float32), np.array([0, -1]), 1.0, KEY), "2\\^63"),
        (lambda: fill_rows(np.zeros((2, 2), np.float32), np.array([0, 1 << 63], np.uint64), 1.0, KEY), "2\\^63"),
        (lambda: fill_rows(np.zeros((2, 2), np.float32), np.array([0.0, 1.0]), 1.0, KEY), "integers"),
        (lambda: fill_rows(np.zeros((2, 2), np.float32), np.arange(3), 1.0, KEY), "2 integers"),
        (lambda: add_rows(np.zeros((2, 2), np.float32), np.array([2]), 1.0, 0.5, KEY), "2 rows"),
        (lambda: add_rows(np.zeros((2, 2), np.float32), np.array([-1]), 1.0, 0.5, KEY), "2\\^63"),
        (lambda: add_rows(np.zeros((2, 2), np.float32), np.array([[0]]), 1.0, 0.5, KEY), "vector"),
        (lambda: add_rows(np.zeros((2, 2), np.float32), np.array([0]), 1.0, 0.3, KEY), "power of two"),
        (lambda: add_rows(np.zeros((2, 2), np.float32), np.array([0]), 1.0, 0.0, KEY), "power of two"),
        (lambda: chacha.add_normal(np.zeros(2, np.float32), 1.0, 2.0**-130, KEY, 0, 1, np.arange(2)), "power of two"),
        (lambda: chacha.add_normal(np.zeros(2, np.float32), 1.0, 0.5, KEY, 0, 1, np.arange(2.0)), "int64"),
        (lambda: chacha.add_normal(np.zeros(2, np.float32), 1.0, 0.5, KEY, -1, 1, np.arange(2)), "first is -1"),
        (lambda: fill_rows(np.zeros((2, 2), np.float32), np.arange(2), np.ones(3), KEY), "std"),
    ],
)
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(SparseDPError, match=message):
        call()


# ---------------------------------------------------------------------- the law


def uncorrelated(streams: np.ndarray) -> bool:
    """Whether no two of the streams (k, n) are correlated, nor their squares: 6 deviations, over all pairs."""
    bound = 6 / np.sqrt(streams.shape[1])
    return all(np.abs(np.corrcoef(values) - np.eye(len(streams))).max() < bound for values in (streams, streams**2))


def test_keys_give_unrelated_numbers() -> None:
    """Keys that differ in one bit, at either end and in the middle; and the key's words in another order."""
    keys = [KEY, np.roll(KEY, 1)]
    for word, bit in ((0, 0), (3, 17), (7, 31)):
        keys.append(KEY.copy())
        keys[-1][word] ^= np.uint32(1 << bit)
    streams = np.stack([sequence(50_000, key) for key in keys])
    assert uncorrelated(streams)
    assert all((streams[i] == streams[j]).mean() < 1e-3 for i in range(len(keys)) for j in range(i))


def test_places_give_unrelated_numbers() -> None:
    """Neighbouring numbers, pairs and blocks of the sequence; neighbouring rows and columns; all purposes."""
    long = sequence(60_000).astype(np.float64)
    assert uncorrelated(np.stack([long[lag : lag + 50_000] for lag in (0, 1, 2, 8, LANES, 8 * LANES, GROUP)]))
    table = rows_of(np.arange(20_000), 40).astype(np.float64)
    assert uncorrelated(table.T)
    far = rows_of(np.arange(20_000) + (1 << 32), 40)
    assert uncorrelated(np.stack([table[:-1].ravel(), table[1:].ravel(), far[:-1].ravel()]))
    doubled = rows_of(np.arange(20_000), 40, dtype=np.float64)
    n = table.size
    streams = [table.ravel(), doubled.ravel(), sequence(n), sequence(n, dtype=np.float64)]
    assert uncorrelated(np.stack(streams))
    assert len(np.unique(table)) > 0.95 * n  # float32 has too few numbers for all to differ
    assert len(np.unique(doubled)) == n


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", ["sequence", "rows"])
def test_law(kind: str, dtype: type) -> None:
    n = 1 << 21
    drawn = sequence(n, dtype=dtype) if kind == "sequence" else rows_of(np.arange(n // 64), 64, dtype=dtype).ravel()
    check_moments_and_tails([drawn.astype(np.float64)])
    sample = drawn[:200_000].astype(np.float64)
    assert stats.kstest(sample, "norm").pvalue > 1e-3
    assert stats.kstest(sample * 1.02, "norm").pvalue < 1e-3  # so the test would see 2 %
    if dtype is np.float64:
        assert (drawn != drawn.astype(np.float32)).mean() > 0.99


@pytest.mark.slow
def test_law_of_many() -> None:
    check_moments_and_tails(sequence(1 << 24, first=part << 24).astype(np.float64) for part in range(1, 17))


def check_moments_and_tails(parts: Iterable[np.ndarray]) -> None:
    """The first four moments and the tails of all parts together lie within 4 deviations of the normal law's."""
    limits = np.arange(1, 7)
    n, powers, beyond = 0, np.zeros(4), np.zeros(len(limits))
    for part in parts:
        n += len(part)
        square = part * part
        powers += [part.sum(), square.sum(), (square * part).sum(), (square * square).sum()]
        beyond += [np.count_nonzero(square > limit * limit) for limit in limits]
    expected, variance = np.array([0, 1, 0, 3]), np.array([1, 2, 15, 96])
    assert (np.abs(powers / n - expected) < 4 * np.sqrt(variance / n)).all()
    for count, limit in zip(beyond, limits):
        chance = 2 * stats.norm.sf(limit)
        assert min(stats.binom.cdf(count, n, chance), stats.binom.sf(count - 1, n, chance)) > 1e-4, limit


# ---------------------------------------------------------------------- from words to normals


@njit
def _logs(u: np.ndarray) -> np.ndarray:
    out = np.empty_like(u)
    for i in range(len(u)):
        out[i] = chacha._log(u[i])
    return out


@njit
def _circles(words: np.ndarray) -> np.ndarray:
    out = np.empty((2, len(words)), np.float32)
    for i in range(len(words)):
        out[0, i], out[1, i] = chacha._circle(words[i])
    return out


def test_logarithm() -> None:
    """Within 3 units in the last place, down to the smallest u and next to 1, where the logarithm goes to 0."""
    spread = np.exp2(-np.linspace(0, 65, 500_000)).astype(np.float32)
    near_one = 1 - np.arange(1, 100_000, dtype=np.float32) * np.float32(2.0**-24)
    u = np.concatenate([spread[spread < 1], near_one])
    exact = np.log(u.astype(np.float64))
    assert np.abs(_logs(u) / exact - 1).max() < 3 * 2.0**-24


def test_circle() -> None:
    axes = np.arange(4) << 30
    words = np.concatenate([np.random.default_rng(3).integers(0, 1 << 32, 500_000), axes, axes + (1 << 29)])
    words = words.astype(np.uint32)
    drawn = _circles(words).astype(np.float64)
    assert np.abs(drawn - reference_circle(words)).max() < 1.2e-7
    assert np.abs(np.hypot(*drawn) - 1).max() < 1.5e-7
    assert stats.kstest(np.arctan2(*drawn) / (2 * np.pi) + 0.5, "uniform").pvalue > 1e-3


def test_extreme_words() -> None:
    """No word gives u = 0 or u = 1: the radius is finite and positive, and at most 9.493."""
    words, more = np.zeros(GROUP, np.uint32), np.zeros(GROUP, np.uint32)
    radii, points = np.empty(GROUP // 2, np.float32), np.empty(GROUP, np.float32)
    half = GROUP // 2
    words[:6] = 0xFFFFFFFF, 0xFFFFFF00, 1 << 16, (1 << 16) - 1, 1, 0
    more[3] = 0xFFFFFFFF
    chacha._box_muller(words, radii, points, half)
    chacha._box_muller_tail(words, more, radii, half)
    normals = np.tile(radii, 2) * points
    radius = np.hypot(normals[:half], normals[half:]).astype(np.float64)
    u = [1 - 2.0**-24, 1 - 2.0**-24, 2.0**-16 + 2.0**-32, 2.0**-16, 2.0**-32, 2.0**-65]
    np.testing.assert_allclose(radius[:6], np.sqrt(-2 * np.log(u)), rtol=3e-7)
    assert np.isfinite(normals).all() and radius.max() < 9.493
    assert 2 * stats.norm.sf(radius.max()) == pytest.approx(2.3e-21, rel=0.05)


def test_short_words_get_more_bits() -> None:
    """Among a million numbers, some words are short; their normals have the radius that 64 bits give."""
    n, found = 1 << 20, 0
    drawn = sequence(n).reshape(-1, 16, LANES)
    start, words = chacha._start(KEY), np.empty(GROUP, np.uint32)
    for group in range(len(drawn)):
        start[12 * LANES : 13 * LANES] = np.arange(LANES) + group * LANES
        chacha._cipher(words, start, 8)
        for word, lane in np.argwhere(words.reshape(16, LANES)[:8] < 1 << 16):
            expected = reference_block(KEY, group * LANES + int(lane))
            got = drawn[group, [word, word + 8], lane]
            np.testing.assert_allclose(got, expected[[word, word + 8]], rtol=3e-7, atol=3e-7)
            assert np.hypot(*got) > 4.7
            found += 1
    assert found > 2


# ---------------------------------------------------------------------- added to something, and rounded

GRID = 2.0**-11


def parts_of(group: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Radii and points of a group of the sequence, whose products are its normals."""
    start, words, radii, points = chacha._memory(KEY, np.empty(0, dtype))
    chacha._number(start, group)
    chacha._draw(radii, points, words, start)
    return np.tile(radii, 2), points


def assert_rounded(got: np.ndarray, exact: np.ndarray, grid: float = GRID) -> None:
    """`got` lies on the grid, next to what it was rounded from, save where that is next to the middle of two of its points."""
    assert (got / grid == np.rint(got / grid)).all()
    assert np.abs(got - exact).max() <= 0.501 * grid
    assert (np.rint(exact / grid) * grid == got).mean() > 0.99


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("dim", [1, 16, 37])
@pytest.mark.parametrize("decays", [False, True])
def test_rows_are_added_where_they_belong(dtype: type, dim: int, decays: bool) -> None:
    random = np.random.default_rng(0)
    rows, std, factor = random.permutation(300)[:90], random.random(90), random.random(90)
    table = random.random((300, dim)).astype(dtype)
    noise = np.empty((90, dim), dtype)
    fill_rows(noise, rows, std, KEY)
    before = table.copy()
    add_rows(table, rows, std, GRID, KEY, factor if decays else None)
    assert_rounded(table[rows], (factor[:, None] if decays else 1) * before[rows].astype(float) + noise)
    others = np.setdiff1d(np.arange(300), rows)
    np.testing.assert_array_equal(table[others], before[others])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [1, 3, 64, 700, 2500])
@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_sums_count_in_their_rows_alone(dtype: type, width: int, share: float) -> None:
    """However the work is divided."""
    count, random = 7000 // width, np.random.default_rng(1)
    rows = np.sort(random.choice(count, int(share * count), replace=False))
    sums = np.full((count, width), np.nan, dtype)  # what is left from another step
    sums[rows] = random.standard_normal((len(rows), width))
    expected = np.nan_to_num(sums).astype(float).reshape(-1) + sequence(sums.size, std=0.7, dtype=dtype)
    whole = sums.copy().reshape(-1)
    chacha.add_normal(whole, 0.7, GRID, KEY, 0, width, rows)
    assert_rounded(whole, expected)
    for size in (GROUP, 1000, 4096):
        parts = sums.copy().reshape(-1)
        for first in range(0, len(parts), size):
            chacha.add_normal(parts[first : first + size], 0.7, GRID, KEY, first, width, rows)
        np.testing.assert_array_equal(parts, whole)


def test_sum_and_noise_are_rounded_from_their_exact_total() -> None:
    """The total is exact, rounded to float32 and then to the grid: a function of it alone, whatever its parts are.

    Were the noise, or noise plus sum, rounded to float32 before, the total would have holes that depend on the sum.
    """
    radii, points = parts_of(0, np.float32)
    sums = np.random.default_rng(2).standard_normal(GROUP).astype(np.float32) * np.float32(1e-3)
    got = sums.copy()
    chacha.add_normal(got, 0.7, GRID, KEY, 0, GROUP, np.zeros(1, np.int64))
    scaled = np.float32(0.7 / GRID) * radii
    for i in range(GROUP):
        total = Fraction(float(scaled[i])) * Fraction(float(points[i])) + Fraction(float(sums[i])) / Fraction(GRID)
        single = np.float32(float(total))  # of 48 + 24 bits that overlap: float64 rounds far below float32's last bit
        assert got[i] == np.rint(single) * np.float32(GRID)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shifted", [False, True])
def test_pairs_move_together(dtype: type, shifted: bool) -> None:
    random = np.random.default_rng(3)
    rows, dim = random.permutation(40)[:25], 37
    table, other = (random.standard_normal((40, dim)).astype(dtype) for _ in range(2))
    drift, std = random.standard_normal((4, 25)), random.standard_normal((3, 25))
    std[2, ::3] = 0
    shift = random.standard_normal((25, dim)).astype(dtype) if shifted else None
    second = stream_key(bytes(32))
    z, rest = rows_of(rows, dim, dtype=dtype).astype(float), rows_of(rows, dim, second, dtype=dtype).astype(float)
    z = z if shift is None else z + shift
    w, v = table[rows].astype(float), other[rows].astype(float)
    x = drift[0, :, None] * w + drift[1, :, None] * v + std[0, :, None] * z
    y = drift[2, :, None] * w + drift[3, :, None] * v + std[1, :, None] * z + std[2, :, None] * rest
    chacha.move_pairs(table, other, rows, drift, std, shift, (GRID, 2 * GRID), (KEY, second))
    assert_rounded(table[rows], x)
    assert_rounded(other[rows], y, 2 * GRID)


def test_pairs_without_a_grid_are_not_rounded() -> None:
    table, other = np.full((1, 3), 0.1), np.full((1, 3), 0.3)
    drift, std = np.array([[1.0], [0.0], [0.0], [1.0]]), np.zeros((3, 1))
    chacha.move_pairs(table, other, np.array([0]), drift, std, None, (0.0, 0.0), (KEY, KEY))
    np.testing.assert_array_equal(np.concatenate([table, other]), [[0.1] * 3, [0.3] * 3])
