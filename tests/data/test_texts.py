"""Texts with labels out of files: columns, classes, pairs, what is malformed; and from a text to rows of a table."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from torch.utils.data import DataLoader

from sparsedp.data import HashedWords, TextColumns, TextDataset, TokenizerFolder, WordList, open_texts
from sparsedp.errors import ConfigError, DataError
from words import WORDS, write_tokenizer

TEXTS = ["a good film", 'a "bad" one', "Good, not bad", "film"]
LABELS = [1, 0, 1, 0]
COLUMNS = TextColumns("sentence", "label")


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("".join(f"{word}\n" for word in WORDS))
    return path


def write_tsv(path: Path, rows: list[tuple[Any, ...]], header: str = "sentence\tlabel") -> Path:
    path.write_text("\n".join([header, *("\t".join(map(str, row)) for row in rows)]) + "\n")
    return path


def rows_of(words: str) -> list[int]:
    return [WORDS.index(word) for word in words.split()]


def without_padding(dataset: TextDataset, place: int = 0) -> list[list[int]]:
    return [[row for row in text if row != dataset.padding] for text in dataset.arrays[place].tolist()]


@pytest.mark.parametrize("kind", ["tsv", "csv", "gzip", "parquet", "arrow", "frame"])
def test_every_kind_of_file_gives_the_same(kind: str, tmp_path: Path, vocabulary: Path) -> None:
    rows = list(zip(TEXTS, LABELS))
    table = pa.table({"label": LABELS, "sentence": TEXTS})
    path: Any = tmp_path / f"data.{kind}"
    if kind == "tsv":
        write_tsv(path, rows)
    elif kind == "csv":
        quoted = [f'"{text.replace(chr(34), chr(34) * 2)}",{label}' for text, label in rows]
        path.write_text("\n".join(["sentence,label", *quoted]) + "\n")
    elif kind == "gzip":
        path.write_bytes(gzip.compress(write_tsv(tmp_path / "plain.tsv", rows).read_bytes()))
    elif kind == "parquet":
        pa.parquet.write_table(table, path)
    elif kind == "arrow":
        pa.feather.write_feather(table, path)
    else:
        path = table
    read = open_texts(path, COLUMNS, WordList(vocabulary), length=4)
    expected = ["a good film", "a bad one", "good , not bad", "film"]
    assert without_padding(read) == [rows_of(text) for text in expected]
    assert read.labels.tolist() == LABELS and read.arrays[0].shape == (4, 4) and read.summary.malformed == 0


def test_classes_have_names_and_some_rows_are_left_out(tmp_path: Path, vocabulary: Path) -> None:
    rows = [("good", "yes"), ("bad", "-"), ("", "-"), ("film", "no"), ("one", "maybe")]
    columns = TextColumns("sentence", "label", classes=["no", "maybe", "yes"], leave_out=["-"])
    read = open_texts(write_tsv(tmp_path / "a.tsv", rows), columns, WordList(vocabulary))
    assert read.labels.tolist() == [2, 0, 1] and read.classes == ["no", "maybe", "yes"]
    assert read.summary.malformed == 0 and read.summary.rows == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("good", "2"), "line 3: the label '2' is no class; expected 0 to 1"),
        (("good", "yes"), "the label 'yes' is no class"),
        (("good", "-1"), "the label '-1' is no class"),
        (("good", "nan"), "the label 'nan' is no class"),
        (("good", ""), "line 3: label is empty"),
        ((" ", "1"), "line 3: sentence is empty"),
        (("", "1"), "line 3: sentence is empty"),
        (("good",), "line 3: 1 fields, expected 2"),
    ],
)
def test_what_is_malformed_is_named_by_its_line(
    row: tuple[str, ...], reason: str, tmp_path: Path, vocabulary: Path
) -> None:
    path = write_tsv(tmp_path / "a.tsv", [("good", 1), row, ("bad", 0)])
    with pytest.raises(DataError) as error:
        open_texts(path, COLUMNS, WordList(vocabulary), max_malformed=0)
    assert reason in str(error.value)
    read = open_texts(path, COLUMNS, WordList(vocabulary), max_malformed=0.5)
    assert len(read) == 2 and read.summary.malformed == 1 and read.labels.tolist() == [1, 0]


def test_a_column_that_lacks_is_named(tmp_path: Path, vocabulary: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", [("good", 1)])
    with pytest.raises(DataError, match="lacks the columns text; it has sentence, label"):
        open_texts(path, TextColumns("text", "label"), WordList(vocabulary))
    with pytest.raises(ConfigError, match="named twice"):
        TextColumns("a", "b", second="a")
    with pytest.raises(ConfigError, match="none twice"):
        TextColumns("a", "b", classes=["x", "x"])
    with pytest.raises(ConfigError, match="left out as well"):
        TextColumns("a", "b", classes=["x", "y"], leave_out=["y"])


def test_pairs_users_and_whole_numbers_that_are_floating(tmp_path: Path, vocabulary: Path) -> None:
    table = pa.table({"q": ["good", "bad"], "s": ["film", "one"], "label": [1.0, 0.0], "who": ["x", "x"]})
    columns = TextColumns("q", "label", second="s", user="who")
    read = open_texts(table, columns, WordList(vocabulary), length=2)
    assert read.texts == 2 and without_padding(read, 0) == [rows_of("good"), rows_of("bad")]
    assert without_padding(read, 1) == [rows_of("film"), rows_of("one")] and read.users is not None
    assert read.labels.tolist() == [1, 0] and read.users.tolist() == [0, 0]


def test_subsets_batches_and_empty_batches(tmp_path: Path, vocabulary: Path) -> None:
    read = open_texts(write_tsv(tmp_path / "a.tsv", list(zip(TEXTS, LABELS))), COLUMNS, WordList(vocabulary), length=3)
    training, held_out = read.split(0.25)
    assert (len(training), len(held_out)) == (3, 1) and held_out.labels.tolist() == [0]
    assert training.padding == read.padding and training.classes == read.classes
    ids, labels = next(iter(DataLoader(training, batch_size=3, collate_fn=training.collate)))
    assert torch.equal(ids, read.arrays[0][:3]) and labels.tolist() == [1, 0, 1]
    ids, labels = training.collate([])
    assert ids.shape == (0, 3) and labels.shape == (0,)


def test_the_first_rows_alone_are_what_the_file_begins_with(tmp_path: Path, vocabulary: Path) -> None:
    path = write_tsv(tmp_path / "a.tsv", [*zip(TEXTS, LABELS), *zip(TEXTS, LABELS)])
    whole, some = (open_texts(path, COLUMNS, WordList(vocabulary), length=4, rows=rows) for rows in (None, 3))
    assert len(whole) == 8 and torch.equal(some.arrays[0], whole.arrays[0][:3]) and some.labels.tolist() == LABELS[:3]


def test_words_and_white_space(tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    path.write_text("don\n'\nt\ndon't\nnaïve\n.\n")
    texts = ["Don't. NAÏVE unknown"]
    assert WordList(path).encode(texts, 8).tolist() == [[0, 1, 2, 5, 4, 6, 6, 6]]
    assert WordList(path, "whitespace").encode(["Don't . naïve"], 4).tolist() == [[3, 5, 4, 6]]
    assert WordList(path).rows == 7 and WordList(path).encode([], 3).shape == (0, 3)


def test_hashed_words_are_the_same_everywhere() -> None:
    words = HashedWords(100)
    one, two = words.encode(["a good film", "Good"], 4), words.encode(["film"], 4)
    assert one[0, 1] == one[1, 0] and one[0, 2] == two[0, 0] and (one[1, 1:] == 0).all()
    assert one.max() < words.rows == 100 and one[0].min() == 0 < one[0, :3].min()


@pytest.mark.models
def test_a_tokenizer_of_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    folder = write_tokenizer(tmp_path / "tokenizer")
    tokens = TokenizerFolder(folder)
    assert tokens.padding == 0 and tokens.has_padding and tokens.rows == len(WORDS)
    assert tokens.encode(["a good film", ""], 2).tolist() == [rows_of("a good"), [0, 0]]
    ids, types = tokens.encode_joined(["a good film"], ["not bad"], 8)
    assert ids.tolist() == [rows_of("[CLS] a good film [SEP] not bad [SEP]")]
    assert types.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    ids, _ = tokens.encode_joined(["a good film"], ["not bad"], 6)  # the longer one is cut, and then both
    assert ids.tolist() == [rows_of("[CLS] a good [SEP] not [SEP]")]
    assert tokens.encode_joined(["a"], None, 4)[0].tolist() == [[*rows_of("[CLS] a [SEP]"), 0]]
    assert TokenizerFolder(folder / "tokenizer.json").rows == tokens.rows


@pytest.mark.models
def test_a_tokenizer_without_padding_has_a_row_more(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    tokens = TokenizerFolder(write_tokenizer(tmp_path / "t", words=["[UNK]", "a", "good"]))
    assert (tokens.rows, tokens.padding, tokens.has_padding) == (4, 3, False)
    assert tokens.encode(["good"], 2).tolist() == [[2, 3]]


@pytest.mark.models
def test_tokenizers_and_vocabularies_that_cannot_be_read(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    with pytest.raises(ConfigError, match="there is no such folder"):
        TokenizerFolder(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        TokenizerFolder(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        WordList(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match="is empty"):
        WordList(tmp_path / "empty.txt")


def test_a_private_loader_reads_whole_batches(tmp_path: Path, vocabulary: Path) -> None:
    read = open_texts(write_tsv(tmp_path / "a.tsv", list(zip(TEXTS, LABELS))), COLUMNS, WordList(vocabulary), length=3)
    ids, labels = read.read_columns(np.array([2, 0]))
    assert torch.equal(ids, read.arrays[0][[2, 0]]) and labels.tolist() == [1, 1]
