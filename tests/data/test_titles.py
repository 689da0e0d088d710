"""Titles: reading them, their words, and the rows that words and pairs of words are hashed to."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from sparsedp.data import read_titles, title_rows, title_words
from sparsedp.errors import DataError

TITLES = 'movie_id,title,genres\n1,Toy Story (1995),Animation\n7,"Postino, Il (1994)",Drama\n3,,None\n'


@pytest.mark.parametrize("zipped", [False, True])
def test_a_file_is_read(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "movies"
    path.write_bytes(gzip.compress(TITLES.encode()) if zipped else TITLES.encode())
    assert read_titles(path) == {"1": "Toy Story (1995)", "7": "Postino, Il (1994)", "3": ""}


def test_what_is_wrong_with_a_file(tmp_path: Path) -> None:
    path = tmp_path / "movies"
    with pytest.raises(DataError, match="no such file"):
        read_titles(path)
    for text, problem in (
        ("a,b\n1,2\n", r"line 1: expected a header with a column item and a column title"),
        ("movie_id,title\n1,x,y\n", r"line 2: 3 fields where the header has 2"),
        ("", r"line 1: expected a header"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=problem):
            read_titles(path)


def test_words() -> None:
    titles = {"1": "Toy Story (1995)", "7": "Postino, Il (1994)", "3": ""}
    words = title_words(titles, ["7", "3", "1", "unknown"])
    assert words.shape == (5, 3) and (words > 0).sum(1).tolist() == [0, 3, 0, 3, 0]
    alone = title_words({"a": "STORY toy"}, ["a"])
    assert alone[1].tolist() == [words[3, 1], words[3, 0]]  # a word's code depends on no other title
    with pytest.raises(DataError, match="none of the 2 items has a title"):
        title_words(titles, ["8", "9"])


@pytest.mark.parametrize("buckets", [1, 7, 5_000_000])
def test_rows(buckets: int) -> None:
    words = title_words({"a": "one two three", "b": "two one", "c": "three"}, ["a", "b", "c"])
    unigrams, bigrams = (title_rows(words, feature, buckets) for feature in ("unigrams", "bigrams"))
    assert unigrams.shape == (4, 3) and bigrams.shape == (4, 2)
    assert np.array_equal(unigrams > 0, words > 0) and (bigrams > 0).sum(1).tolist() == [0, 2, 1, 0]
    assert max(unigrams.max(), bigrams.max()) <= buckets
    assert unigrams[1, :2].tolist() == unigrams[2, [1, 0]].tolist()
    if buckets == 5_000_000:
        assert len(np.unique(unigrams)) == 4 and bigrams[1, 0] != bigrams[2, 0]  # "one two" is not "two one"
        assert unigrams[1].tolist() == RECORDED  # the same on every machine: a trained table depends on it
    assert title_rows(words[:, :1], "bigrams", buckets).tolist() == [[0]] * 4


def test_rows_are_spread_evenly() -> None:
    words = np.arange(20_000).reshape(-1, 2)
    for feature in ("unigrams", "bigrams"):
        rows = title_rows(words, feature, 10)
        counts = np.bincount(rows[rows > 0], minlength=11)[1:]
        expected = counts.sum() / 10
        assert ((counts - expected) ** 2 / expected).sum() < 27.9  # chi-squared with 9 degrees of freedom, beyond 0.001


RECORDED = [2520974, 441543, 4022788]
