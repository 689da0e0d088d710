"""Generated click logs: deterministic, skewed, learnable as planted, drifting, and the same after writing."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from sparsedp.data import (
    CRITEO_VOCABULARY,
    MISSING_INTEGER,
    CountVocabulary,
    GivenVocabulary,
    auc,
    generated_click_log,
    log_loss,
    open_click_log,
    write_click_log,
)
from sparsedp.data.generated import category_code
from sparsedp.errors import ConfigError


def everything(log) -> tuple[torch.Tensor, ...]:  # type: ignore[no-untyped-def]
    return log.collate(log.__getitems__(range(len(log))))


def test_the_same_seed_gives_the_same_log_and_another_does_not() -> None:
    first, again, other = (generated_click_log(3000, seed=s, scale=0.1, days=3, drift=0.3) for s in (5, 5, 6))
    for a, b in zip(everything(first), everything(again)):
        assert torch.equal(a, b)
    assert np.array_equal(first.planted_logits, again.planted_logits)
    assert not torch.equal(everything(first)[1], everything(other)[1])
    # Pinned, so that a change of the law is noticed: figures elsewhere rest on it.
    pinned = generated_click_log(4, seed=0)
    assert pinned._categories[:, 0].tolist() == [540, 668, 1304, 1038]
    assert pinned._numbers[:, 4].tolist() == [2907, 35, 137, 1]
    assert pinned.labels.tolist() == [0, 1, 0, 1]


def test_shape_and_types() -> None:
    log = generated_click_log(500)
    integers, categories, labels = everything(log)
    assert (integers.shape, categories.shape, labels.shape) == ((500, 13), (500, 26), (500,))
    assert (integers.dtype, categories.dtype, labels.dtype) == (torch.float32, torch.int64, torch.float32)
    assert log.vocabulary_sizes == list(CRITEO_VOCABULARY)
    assert (categories >= 0).all() and (categories < torch.tensor(log.vocabulary_sizes)).all()
    assert log.periods is None and not log.vocabulary_is_private


def test_sizes_and_scale() -> None:
    assert generated_click_log(10, scale=0.01).vocabulary_sizes[:3] == [15, 6, 827]
    assert min(generated_click_log(10, scale=1e-9).vocabulary_sizes) == 3
    assert generated_click_log(10, vocabulary_sizes=[50] * 26, scale=0.5).vocabulary_sizes == [25] * 26


@pytest.mark.parametrize("options", [{}, {"scale": 0.01, "seed": 3}, {"days": 4, "drift": 0.5, "scale": 0.05}])
def test_planted_auc_and_click_rate(options: dict) -> None:
    log = generated_click_log(50_000, **options)
    assert 0.78 < log.planted_auc < 0.82
    assert 0.22 < log.labels.mean() < 0.28
    assert log.planted_auc == auc(log.labels, log.planted_logits)
    # The logits are calibrated: no constant shift or scale of them predicts better.
    best = log_loss(log.labels, log.planted_logits)
    for worse in (0.9 * log.planted_logits, 1.1 * log.planted_logits, log.planted_logits + 0.1):
        assert log_loss(log.labels, worse) > best


def test_click_rate_is_settable() -> None:
    log = generated_click_log(50_000, scale=0.01, click_rate=0.03)
    assert 0.02 < log.labels.mean() < 0.04
    assert 0.76 < log.planted_auc < 0.84


def test_popularity_follows_the_skew() -> None:
    log = generated_click_log(200_000, vocabulary_sizes=[1000] * 26, skew=1.1)
    counts = np.sort(np.bincount(everything(log)[1][:, 0], minlength=1000))[::-1]
    expected = np.arange(1, 1001) ** -1.1
    expected *= len(log) / expected.sum()
    assert np.allclose(counts[:10], expected[:10], rtol=0.05)
    flat = np.bincount(everything(generated_click_log(50_000, vocabulary_sizes=[10] * 26, skew=0.0))[1][:, 0])
    assert np.allclose(flat, 5000, rtol=0.06)


def test_integers_have_heavy_tails_and_gaps() -> None:
    log = generated_click_log(100_000, scale=0.01)
    stored = log._numbers
    assert np.allclose((stored == MISSING_INTEGER).mean(0)[[0, 1, 11]], [0.45, 0, 0.77], atol=0.01)
    fifth = stored[:, 4][stored[:, 4] != MISSING_INTEGER]
    assert fifth.max() > 1000 * np.median(fifth) > 0
    assert stored[:, 1].min() == -2
    integers = everything(log)[0]
    assert integers[torch.from_numpy(stored == MISSING_INTEGER)].eq(0).all()


def test_drift_changes_popularity_and_effects() -> None:
    def top(log, day: int) -> set[int]:  # type: ignore[no-untyped-def]
        categories = everything(log.subset(np.flatnonzero(log.periods == day)))[1][:, 2]
        return set(np.argsort(np.bincount(categories, minlength=827))[-20:].tolist())

    still = generated_click_log(60_000, scale=0.01, days=3)
    moving = generated_click_log(60_000, scale=0.01, days=3, drift=0.5)
    assert still.periods.tolist() == sorted(still.periods) and np.bincount(still.periods).tolist() == [20_000] * 3
    assert len(top(still, 0) & top(still, 2)) >= 15 > len(top(moving, 0) & top(moving, 2))


def test_subset_and_pickle_keep_the_planted_logits() -> None:
    log = generated_click_log(1000, scale=0.01, days=2)
    training, held_out = log.split([1], by="periods")
    assert len(held_out) == 500 and np.array_equal(held_out.planted_logits, log.planted_logits[500:])
    again = pickle.loads(pickle.dumps(held_out))
    assert again.planted_auc == held_out.planted_auc
    assert all(torch.equal(a, b) for a, b in zip(everything(again), everything(held_out)))
    assert training.periods.max() == 0


@pytest.mark.parametrize("name", ["log.tsv", "log.tsv.gz"])
def test_written_and_read_again(tmp_path: Path, name: str) -> None:
    log = generated_click_log(700, scale=0.01)
    (path,) = write_click_log(log, tmp_path / name)
    assert path.read_bytes()[:2] == b"\x1f\x8b" if name.endswith(".gz") else b"\t" in path.read_bytes()
    values = [[f"{code:08x}" for code in category_code(j, np.arange(v))] for j, v in enumerate(log.vocabulary_sizes)]
    read = open_click_log(path, cache_dir=tmp_path / "cache", vocabulary=GivenVocabulary(values))
    assert np.array_equal(read._numbers, log._numbers)
    assert np.array_equal(read._categories, log._categories + 2)  # 0 and 1: out of vocabulary, missing
    assert np.array_equal(read.labels, log.labels)
    assert read.vocabulary_sizes == [v + 2 for v in log.vocabulary_sizes]


def test_one_file_per_day(tmp_path: Path) -> None:
    log = generated_click_log(300, scale=0.01, days=12)
    files = write_click_log(log, tmp_path / "day_{day}.csv.gz", separator=",", header=True)
    assert [f.name for f in files] == [f"day_{d}.csv.gz" for d in range(12)]
    assert gzip.decompress(files[0].read_bytes()).startswith(b"label,I1,")
    read = open_click_log(tmp_path, cache_dir=tmp_path / "cache", vocabulary=CountVocabulary(1))
    assert np.array_equal(read.periods, log.periods) and np.array_equal(read.labels, log.labels)
    # A subset is written as itself.
    (only,) = write_click_log(log.split([3], by="periods")[1], tmp_path / "only_{day}.tsv")
    assert only.name == "only_3.tsv" and len(only.read_text().splitlines()) == 25
    with pytest.raises(ConfigError, match=r"must hold \{day\}"):
        write_click_log(log, tmp_path / "log.tsv")


@pytest.mark.parametrize(
    "options",
    [
        {"rows": 0},
        {"rows": 3, "days": 4},
        {"rows": 9, "drift": 1.5},
        {"rows": 9, "click_rate": 1.0},
        {"rows": 9, "scale": 0.0},
        {"rows": 9, "vocabulary_sizes": [5] * 3},
    ],
)
def test_impossible_arguments_are_refused(options: dict) -> None:
    with pytest.raises(ConfigError, match="generated_click_log"):
        generated_click_log(**options)
