"""Whatever is drawn for a row is a function of the key, the step, the table, the row's number and the column alone.

So it does not matter who draws it, nor together with which other rows.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from sparsedp import noise as noise_module
from sparsedp.mechanisms.exponential import top_k_gumbel
from sparsedp.mechanisms.survivors import draw_survivors
from sparsedp.noise import (
    GaussianNoise,
    RandomKey,
    Sums,
    draw_marked_rows,
    draw_rows,
    one_gumbel_each,
    one_normal_each,
)

KEY = RandomKey.from_seed(8)
CUTS = [(0, 1000), (0, 300, 1000), (0, 700, 700, 1000), (0, 1, 2, 17, 512, 513, 999, 1000)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 5, 8, 16, 37, 64])
def test_noise_on_selected_rows_is_each_rows_own(dim: int, dtype: torch.dtype) -> None:
    rows = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:700].sort().values
    sums = torch.randn(len(rows), dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    everyone = sums.clone()
    GaussianNoise(KEY).add({2: Sums(everyone, numbers=rows)}, 0.3, 5)
    assert not torch.equal(everyone, sums)
    for chosen in (torch.arange(0, 700, 3), torch.tensor([699]), torch.empty(0, dtype=torch.long)):
        some = sums[chosen].clone()
        GaussianNoise(KEY).add({2: Sums(some, numbers=rows[chosen])}, 0.3, 5)
        assert torch.equal(some, everyone[chosen])
    for index, step, key in ((3, 5, KEY), (2, 6, KEY), (2, 5, RandomKey.from_seed(9))):
        other = sums.clone()
        GaussianNoise(key).add({index: Sums(other, numbers=rows)}, 0.3, step)
        assert float((other == everyone).double().mean()) < 0.02
    noise = (everyone - sums).double().flatten().numpy()
    assert stats.kstest(noise / 0.3, "norm").pvalue > 1e-4


@pytest.mark.parametrize("cuts", CUTS)
def test_noise_on_all_rows_is_each_rows_own(cuts: tuple[int, ...]) -> None:
    random = torch.Generator().manual_seed(0)
    for held in (None, torch.arange(0, 1000, 7)):
        for dtype in (torch.float32, torch.float64):
            sums = torch.randn(1000, 33, generator=random).to(dtype)
            whole = sums.clone()
            GaussianNoise(KEY).add({2: Sums(whole, held)}, 0.3, 5)
            parts = sums.clone()
            for begin, end in pairwise(cuts):
                own = None if held is None else held[(held >= begin) & (held < end)] - begin
                GaussianNoise(KEY).add({2: Sums(parts[begin:end], own, first=begin)}, 0.3, 5)
            assert torch.equal(parts, whole)


@pytest.mark.parametrize("block", [1 << 32, 64])
@pytest.mark.parametrize("log_p", [-0.1, -1.0, -4.0])
def test_drawn_rows_do_not_depend_on_the_range(monkeypatch: pytest.MonkeyPatch, block: int, log_p: float) -> None:
    monkeypatch.setattr(noise_module, "_BLOCK", block)
    whole = draw_rows(KEY, 0, 1000, log_p)
    rows, marks = draw_marked_rows(KEY, 0, 1000, log_p)
    assert np.array_equal(whole, rows) and ((marks > 0) & (marks < 1)).all()
    for cuts in CUTS:
        parts = [draw_rows(KEY, begin, end, log_p) for begin, end in pairwise(cuts)]
        assert np.array_equal(np.concatenate(parts), whole)
        marked = [draw_marked_rows(KEY, begin, end, log_p)[1] for begin, end in pairwise(cuts)]
        assert np.array_equal(np.concatenate(marked), marks)
    p, draws = np.exp(log_p), 400
    drawn = [draw_rows(KEY.child(i), 0, 1000, log_p) for i in range(draws)]
    scores = (np.bincount(np.concatenate(drawn), minlength=1000) - draws * p) / (draws * p * (1 - p)) ** 0.5
    assert abs(scores.mean()) < 5 / 1000**0.5 and abs(scores.var() - 1) < 0.25 and abs(scores).max() < 5.5
    pairs = np.mean([np.isin(np.arange(0, 1000, 2), one) == np.isin(np.arange(1, 1000, 2), one) for one in drawn])
    assert abs(pairs - (p**2 + (1 - p) ** 2)) < 6 * 0.5 / (500 * draws) ** 0.5


@pytest.mark.parametrize("preselected", [False, True])
def test_survivors_do_not_depend_on_who_owns_the_rows(preselected: bool) -> None:
    random = np.random.default_rng(0)
    within = np.sort(random.choice(1000, 400, replace=False)) if preselected else None
    rows = np.sort(random.choice(1000 if within is None else within, 60, replace=False))
    values = random.random(60) * 3
    whole = draw_survivors(rows, values, range(1000), 1.0, 1.0, KEY, within)
    assert 50 < len(whole) < 400
    for cuts in CUTS:
        parts = []
        for begin, end in pairwise(cuts):
            own = (rows >= begin) & (rows < end)
            parts.append(draw_survivors(rows[own], values[own], range(begin, end), 1.0, 1.0, KEY, within))
        assert np.array_equal(np.concatenate(parts), whole)
    # Nor on who else was touched.
    fewer = draw_survivors(rows[::2], values[::2], range(1000), 1.0, 1.0, KEY, within)
    assert np.array_equal(np.setdiff1d(fewer, rows), np.setdiff1d(whole, rows))
    assert np.array_equal(np.intersect1d(fewer, rows[::2]), np.intersect1d(whole, rows[::2]))


def test_numbers_of_single_rows() -> None:
    rows = np.sort(np.random.default_rng(0).choice(10**12, 5000, replace=False))
    for draw in (one_normal_each, one_gumbel_each):
        whole = draw(KEY, rows)
        assert np.array_equal(draw(KEY, rows[::3]), whole[::3]) and not np.array_equal(draw(KEY.child(1), rows), whole)
    assert stats.kstest(one_normal_each(KEY, rows), "norm").pvalue > 1e-4
    assert stats.kstest(one_gumbel_each(KEY, rows), "gumbel_r").pvalue > 1e-4


def test_largest_rows_of_several_tables_are_the_largest_of_each() -> None:
    """What one owner of all tables picks is what is left of the picks of one owner for each table."""
    keys, sizes = [KEY.child(i) for i in range(3)], (100, 40, 300)
    starts = (0, 100, 140)
    rows, scores = np.array([3, 50, 120, 141, 439]), np.array([2.0, 0.1, 5.0, 0.0, 9.0])
    picked = top_k_gumbel(rows, scores, sizes, 25, keys)
    for start, size, key in zip(starts, sizes, keys):
        own = (rows >= start) & (rows < start + size)
        mine = top_k_gumbel(rows[own] - start, scores[own], (size,), 25, [key], of=sum(sizes))
        here = picked[(picked >= start) & (picked < start + size)] - start
        assert set(here) <= set(mine)
