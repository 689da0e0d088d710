"""Which rows noise selects, against noise on all rows."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtr

from sparsedp.generator import CipherGenerator
from sparsedp.mechanisms.survivors import _joined, draw_survivors
from sparsedp.noise import _BLOCK, RandomKey, draw_rows


def test_joined_is_what_sets_say() -> None:
    g = np.random.default_rng(0)
    for _ in range(3000):
        size = int(g.integers(1, 12))
        rows, untouched = np.flatnonzero(g.random(size) < g.random()), np.flatnonzero(g.random(size) < g.random())
        touched = rows[g.random(len(rows)) < g.random()]
        wanted = np.sort(np.concatenate([touched, np.setdiff1d(untouched, rows)]))
        assert np.array_equal(_joined(touched, untouched, rows), wanted)


LAWS: dict[str, tuple[list[int], list[float], range, float, float, list[int] | None]] = {
    "no row touched": ([], [], range(12), 0.8, 1.0, None),
    "all touched": (list(range(12)), list(np.linspace(0, 3, 12)), range(12), 1.5, 1.0, None),
    "the first": ([0], [1.0], range(12), 1.0, 1.0, None),
    "the last": ([11], [1.0], range(12), 1.0, 1.0, None),
    "one row, untouched": ([], [], range(1), 0.5, 1.0, None),
    "one row, touched": ([0], [1.0], range(1), 0.5, 1.0, None),
    "all survive": ([3], [1.0], range(12), -40.0, 1.0, None),
    "none does": ([3], [1.0], range(12), 60.0, 1.0, None),
    "most do": ([3], [1.0], range(12), -2.5, 1.0, None),
    "listed": ([1, 4, 8], [1.0, 0.5, 2.0], range(12), 1.0, 1.0, [0, 1, 4, 5, 8, 11]),
    "one listed": ([4], [0.5], range(12), 1.0, 1.0, [4]),
    "none listed": ([], [], range(12), 1.0, 1.0, []),
    "a part of the table": ([5], [1.0], range(4, 9), 1.0, 1.0, None),
    "no part": ([], [], range(4, 4), 1.0, 1.0, None),
    "no noise": ([3], [1.0], range(6), 0.5, 0.0, None),
}


@pytest.mark.parametrize("case", LAWS)
def test_law_of_the_survivors(case: str) -> None:
    """Every row's frequency, and every two rows', against noise on all rows."""
    touched, counts, owned, threshold, std, listed = LAWS[case]
    rows, values, size, draws = np.array(touched, np.int64), np.array(counts, float), owned.stop, 2500
    within = None if listed is None else np.array(listed, np.int64)
    full = np.zeros(size)
    full[rows] = values
    p = ndtr((full - threshold) / std) if std else (full >= threshold).astype(float)
    p[: owned.start] = 0
    if within is not None:
        p[np.setdiff1d(np.arange(size), within)] = 0
    hits, key = np.zeros((draws, size), bool), RandomKey.from_seed(len(case))
    for i in range(draws):
        chosen = draw_survivors(rows, values, owned, threshold, std, key.child(i), within)
        assert (np.diff(chosen) > 0).all()
        hits[i, chosen] = True
    certain = (p < 1e-12) | (p > 1 - 1e-12)
    assert np.array_equal(hits.sum(0)[certain], draws * np.round(p[certain]))
    open_, q = ~certain, p[~certain]
    if len(q):
        chi = ((hits.sum(0)[open_] - draws * q) ** 2 / (draws * q * (1 - q))).sum()
        assert 1e-4 < stats.chi2.sf(chi, len(q)) < 1 - 1e-4
    for a, b in itertools.combinations(np.flatnonzero(open_), 2):
        both = p[a] * p[b]
        assert abs((hits[:, a] & hits[:, b]).sum() - draws * both) < 5 * math.sqrt(draws * both * (1 - both)) + 5


def test_untouched_survivors_do_not_depend_on_who_was_touched() -> None:
    key, g = RandomKey.from_seed(5), np.random.default_rng(0)
    alone = draw_survivors(np.empty(0, np.int64), np.empty(0), range(5000), 1.5, 1.0, key)
    for _ in range(20):
        rows = np.flatnonzero(g.random(5000) < 0.1)
        chosen = draw_survivors(rows, 3 * g.random(len(rows)), range(5000), 1.5, 1.0, key)
        assert np.array_equal(np.setdiff1d(chosen, rows), np.setdiff1d(alone, rows))


@pytest.mark.parametrize("end", [_BLOCK - 1, _BLOCK, _BLOCK + 1, 2 * _BLOCK + 3])
def test_blocks_may_be_divided_anywhere(end: int) -> None:
    key = RandomKey.from_seed(1)
    whole = draw_rows(key, 0, end, -12.0)
    for cut in (0, 1, _BLOCK // 2, _BLOCK - 1, min(_BLOCK, end), end):
        assert np.array_equal(np.concatenate([draw_rows(key, 0, cut, -12.0), draw_rows(key, cut, end, -12.0)]), whole)


@pytest.mark.parametrize(
    ("count", "log_p"), [(1, -0.1), (7, -1e-17), (1000, -0.5), (1000, -0.50001), (5000, -3.0), (2**40, -22.9)]
)
def test_positions_are_those_of_one_gap_after_another(count: int, log_p: float) -> None:
    rate = -math.log1p(-math.exp(log_p)) if log_p < -0.5 else -math.log(-math.expm1(log_p))
    for seed in range(20):
        key = np.arange(8, dtype=np.uint32) + seed
        words, wanted, at = CipherGenerator(key), [], -1
        while True:
            word = int(words.words(1)[0])
            e = (
                -math.log1p(-((2**64 - 1 - word) + 0.5) * 2.0**-64)
                if word >> 63
                else -math.log((word + 0.5) * 2.0**-64)
            )
            at += math.floor(e / rate) + 1
            if at >= count:
                break
            wanted.append(at)
        assert CipherGenerator(key).ones(count, log_p).tolist() == wanted
