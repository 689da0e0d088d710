"""The laws of what the stream cipher draws, against scipy; each test of a law also rejects one that is slightly wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from scipy import stats

from sparsedp import generator
from sparsedp.errors import SparseDPError
from sparsedp.generator import CipherGenerator
from sparsedp.grid import grid_of, round_to
from sparsedp.kernels import normals
from sparsedp.noise import RandomKey

N = 200_000
PASS, FAIL = 1e-4, 1e-9  # p-values that a right law exceeds and a wrong one falls short of


def cipher(seed: int = 0) -> CipherGenerator:
    return RandomKey.from_seed(seed).generator()


# ---------------------------------------------------------------------- continuous laws

LAWS: dict[str, tuple[Callable[[CipherGenerator], np.ndarray], stats.rv_continuous, float]] = {
    "uniform": (lambda g: g.random(N), stats.uniform, 0.05),
    "normal": (lambda g: g.standard_normal(N), stats.norm, 0.05),
    "exponential": (lambda g: g.standard_exponential(N), stats.expon, 0.05),
    "gumbel": (lambda g: g.gumbel(N), stats.gumbel_r, 0.05),
}


@pytest.mark.parametrize("law", LAWS)
def test_continuous_laws(law: str) -> None:
    draw, expected, off = LAWS[law]
    drawn = draw(cipher())
    assert stats.kstest(drawn, expected.cdf).pvalue > PASS
    assert stats.kstest((1 + off) * drawn, expected.cdf).pvalue < FAIL
    assert stats.kstest(drawn + off, expected.cdf).pvalue < FAIL
    mean, variance = expected.stats(moments="mv")
    assert abs(drawn.mean() - mean) < 5 * math.sqrt(variance / N)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 5 / math.sqrt(N)  # neighbours are independent


@pytest.mark.parametrize("law", ["normal", "exponential", "gumbel"])
def test_tails(law: str) -> None:
    """Beyond each of some quantiles of both tails lie as many numbers as should."""
    draw, expected, _ = LAWS[law]
    g, rounds = cipher(1), 20
    drawn = np.concatenate([draw(g) for _ in range(rounds)])
    for tail in (1e-2, 1e-3, 1e-4, 1e-5):
        for beyond in ((drawn > expected.isf(tail)).sum(), (drawn < expected.ppf(tail)).sum()):
            assert stats.binomtest(int(beyond), rounds * N, tail).pvalue > PASS
            assert tail < 1e-3 or stats.binomtest(int(beyond), rounds * N, 1.2 * tail).pvalue < PASS


def words_of(values: list[int], monkeypatch: pytest.MonkeyPatch) -> CipherGenerator:
    """A generator whose 64-bit words are these."""
    left = iter(values)
    g = cipher()
    monkeypatch.setattr(g, "words", lambda count: np.array([next(left) for _ in range(count)], dtype=np.uint64))
    return g


def test_exponentials_are_exact_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """-log((word + 1/2) / 2^64) to the last bits of float64: neither u = 0 nor u = 1 occurs, and nothing is lost near 1."""
    words = [0, 1, 2, 12345, 2**63 - 1, 2**63, 2**64 - 12345, 2**64 - 3, 2**64 - 2, 2**64 - 1]
    with mpmath.workdps(60):
        exact = [float(-mpmath.log((mpmath.mpf(word) + 0.5) / mpmath.mpf(2) ** 64)) for word in words]
    drawn = words_of(words, monkeypatch).standard_exponential(len(words))
    np.testing.assert_allclose(drawn, exact, rtol=4e-16)
    assert drawn[-1] == 2.0**-65 and 45.0 < drawn[0] < 45.1
    gumbel = words_of([0, 2**64 - 1], monkeypatch).gumbel(2)
    assert np.isfinite(gumbel).all() and gumbel[1] > 45


def test_uniform_numbers_lie_below_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert words_of([0, 2**64 - 1], monkeypatch).random(2).tolist() == [0.0, 1 - 2.0**-53]


# ---------------------------------------------------------------------- integers, permutations, samples


@pytest.mark.parametrize("high", [1, 2, 7, 1000, 2**40 + 1, 3 * 2**61, 2**63])
def test_integers_are_uniform(high: int) -> None:
    drawn = cipher().integers(high, N)
    assert drawn.dtype == np.int64 and drawn.min() >= 0 and drawn.max() < high
    bins = min(high, 50)
    seen = np.bincount((drawn.astype(object) * bins // high).astype(int), minlength=bins)
    exact = np.diff([-(-high * i // bins) for i in range(bins + 1)]) / high
    if bins > 1:
        assert stats.chisquare(seen, N * exact).pvalue > PASS
        assert stats.chisquare(np.sort(seen) + np.linspace(-1, 1, bins) * 0.03 * N / bins, N * exact).pvalue < PASS


def test_integers_are_not_biased_towards_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2^64 words 2^62 would be one too many for the smallest of 3 * 2^61 numbers: they are drawn again."""
    high = 3 * 2**61
    g = words_of([2 * high - 1, 2 * high, 2**64 - 1, 5], monkeypatch)
    assert g.integers(high, 2).tolist() == [high - 1, 5]


def test_integers_below_different_numbers() -> None:
    limits = np.tile(np.arange(1, 6), N // 5)
    drawn = cipher().integers(limits, len(limits))
    for high in range(2, 6):
        assert stats.chisquare(np.bincount(drawn[limits == high], minlength=high)).pvalue > PASS
    with pytest.raises(SparseDPError, match="at least 1"):
        cipher().integers(np.array([1, 0]), 2)


def test_permutations_are_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    """All 24 orders of 4 are equally likely, also where the places are drawn in several pieces."""
    for pieces in (1 << 20, 2):
        monkeypatch.setattr(generator, "_SWAPS", pieces)
        g, seen = cipher(), {}
        for _ in range(5000):
            order = tuple(g.permutation(4).tolist())
            seen[order] = seen.get(order, 0) + 1
        assert len(seen) == 24 and stats.chisquare(list(seen.values())).pvalue > PASS
    large = cipher().permutation(100_000)
    assert np.array_equal(np.sort(large), np.arange(100_000))
    assert abs(np.corrcoef(large, np.arange(100_000))[0, 1]) < 5 / math.sqrt(100_000)
    assert cipher().permutation(0).tolist() == [] and cipher().permutation(1).tolist() == [0]


@pytest.mark.parametrize("size, count", [(6, 2), (6, 3), (6, 4), (6, 6), (6, 0)])
def test_samples_without_replacement_are_uniform(size: int, count: int) -> None:
    g, seen = cipher(), {}
    for _ in range(6000):
        chosen = tuple(g.choice(size, count).tolist())
        assert len(chosen) == count and all(a < b for a, b in pairwise(chosen))
        seen[chosen] = seen.get(chosen, 0) + 1
    assert len(seen) == math.comb(size, count)
    if len(seen) > 1:
        assert stats.chisquare(list(seen.values())).pvalue > PASS


def test_large_samples_and_impossible_ones() -> None:
    chosen = cipher().choice(10**12, 10_000)
    assert len(np.unique(chosen)) == 10_000 and stats.kstest(chosen / 1e12, "uniform").pvalue > PASS
    assert len(cipher().choice(1000, 900)) == 900
    with pytest.raises(SparseDPError, match="7 of 6"):
        cipher().choice(6, 7)


@pytest.mark.parametrize("p", [0.001, 0.05, 0.5, 0.95, 0.999])
def test_ones_have_the_law_of_independent_bits(p: float) -> None:
    """Their number is binomial, their places are uniform, and neighbouring bits are independent."""
    size, draws = 400, 3000
    g, bits = cipher(), np.zeros((3000, 400), bool)
    for row in bits:
        row[g.ones(size, math.log(p))] = True
    total = int(bits.sum())
    assert stats.binomtest(total, bits.size, p).pvalue > PASS
    rarer = min(p, 1 - p)  # of ones and zeros: were they a third more likely, it would be seen
    assert stats.binomtest(total, bits.size, p + math.copysign(rarer / 3, 0.5 - p)).pvalue < 1e-3
    counts = bits.sum(1)
    assert abs(counts.var() / (size * p * (1 - p)) - 1) < 6 * math.sqrt(2 / draws + 1 / (draws * size * p * (1 - p)))
    each = bits.sum(0)
    assert stats.chisquare(each if p < 0.5 else draws - each).pvalue > PASS
    pairs = (bits[:, 1:] & bits[:, :-1]).sum()
    assert abs(pairs - (size - 1) * draws * p**2) < 6 * math.sqrt(size * draws * p**2 * (1 - p**2)) * math.sqrt(3)


def test_gaps_of_rare_ones_are_geometric() -> None:
    p, size = 1e-6, 10**10
    places = cipher().ones(size, math.log(p))
    gaps = np.diff(places)
    assert stats.kstest(gaps, stats.expon(scale=1 / p).cdf).pvalue > PASS
    assert stats.kstest(1.2 * gaps, stats.expon(scale=1 / p).cdf).pvalue < FAIL
    assert abs(len(places) - size * p) < 5 * math.sqrt(size * p)


def test_ones_at_the_edges() -> None:
    g = cipher()
    assert g.ones(0, -1.0).size == 0 and g.ones(-3, -1.0).size == 0
    assert g.ones(5, 0.0).tolist() == [0, 1, 2, 3, 4]
    assert g.ones(2**62, -math.inf).size == 0 and g.ones(2**62, -701.0).size == 0
    assert sum(g.ones(1000, -699.0).size for _ in range(100)) == 0
    assert g.ones(1, math.log(1 - 2.0**-53)).tolist() == [0]


# ---------------------------------------------------------------------- one sequence


def test_calls_go_on_and_places_can_be_restored() -> None:
    g, same = cipher(), cipher()
    parts = np.concatenate([g.words(3), g.words(5), g.words(2000)])
    assert np.array_equal(parts, same.words(2008)) and len(np.unique(parts)) == 2008
    normals = np.concatenate([g.standard_normal(5), g.standard_normal((2, 3)).ravel()])
    assert np.array_equal(normals, same.standard_normal(11))
    state = g.state()
    ahead = g.random(4), g.standard_normal(4)
    other = cipher()
    other.restore(state)
    assert np.array_equal(other.random(4), ahead[0]) and np.array_equal(other.standard_normal(4), ahead[1])
    assert g.random((2, 3)).shape == g.gumbel((2, 3)).shape == (2, 3) and g.standard_normal(0).shape == (0,)


def test_many_normals_are_those_of_one_thread() -> None:
    g = cipher()
    g.standard_normal(77)
    parts = np.empty(200_077)
    normals.fill_normal(parts, 1.0, g._key)
    assert np.array_equal(g.standard_normal(200_000), parts[77:])


def test_paths_have_streams_of_their_own() -> None:
    key = RandomKey.from_seed(0)
    drawn = [key.generator(*path).words(4).tolist() for path in ((), (0,), (1,), (0, 0), (0, 1))]
    assert len({tuple(words) for words in drawn}) == 5
    normal = np.empty(8)
    normals.fill_normal(normal, 1.0, key.stream(0))
    assert not np.array_equal(key.generator(0).standard_normal(8), normal)  # nor those of the noise


# ---------------------------------------------------------------------- the grid of released numbers


@pytest.mark.parametrize("std", [1.0, 0.75, 1.999, 2.0, 3.7e-9, 5e12])
def test_the_grid_is_a_thousandth_of_the_noise(std: float) -> None:
    grid = grid_of(std)
    assert math.frexp(grid)[0] == 0.5 and std / 2**11 < grid <= std / 2**10
    values = std * cipher().standard_normal(1000)
    rounded = round_to(values, grid)
    assert np.array_equal(rounded / grid, np.rint(values / grid)) and np.abs(rounded - values).max() <= grid / 2
    assert not np.array_equal(rounded, values)


def test_without_noise_there_is_no_grid() -> None:
    values = np.array([0.1, 1 / 3])
    assert grid_of(0.0) == 0.0 and round_to(values, 0.0) is values
    for wrong in (-1.0, math.inf, math.nan):
        with pytest.raises(SparseDPError, match="deviation"):
            grid_of(wrong)
