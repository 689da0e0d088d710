"""Tables of users' own: formats, columns of every kind, strange files, what is refused, and what is taken from private data."""

from __future__ import annotations

import dataclasses
import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch

import sparsedp
from sparsedp.data import (
    CategoricalColumn,
    CountVocabulary,
    Form,
    GivenVocabulary,
    HashVocabulary,
    NumericColumn,
    SequenceColumn,
    Table,
    TableSchema,
    TextColumn,
    encode_rows,
    open_table,
    tablefiles,
)
from sparsedp.data.codes import codes_of
from sparsedp.errors import ConfigError, DataError, UnsupportedError

NAMES = ["clicked", "site", "price", "seen", "title", "who", "when"]
ROWS: list[list[Any]] = [
    [1, "a", 3.5, "x y z", "Red shoes, red!", "anna", "2026-03-01 10:00:00"],
    [0, "b", None, "", "", "bert", "2026-03-01 11:00:00"],
    [0, "größe, ß", -1.0, "y", "Größe 42", "anna", "2026-03-02 00:00:00"],
    [1, None, 0.0, "x x x x x", "?", "7", "2026-03-09 23:59:59"],
]
SCHEMA = TableSchema(
    label="clicked",
    categorical=(CategoricalColumn("site", CountVocabulary(1)),),
    numeric=(NumericColumn("price"),),
    sequence=(SequenceColumn("seen", 4, None, HashVocabulary(50)),),
    text=(TextColumn("title", 3, 100),),
    user="who",
    time="when",
)
PLAIN = TableSchema(label="y", categorical=(CategoricalColumn("a", CountVocabulary(1)),))


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def frame(rows: list[dict[str, Any]] | None = None) -> pd.DataFrame:
    return pd.DataFrame(ROWS, columns=NAMES) if rows is None else pd.DataFrame(rows)


def everything(table: Table) -> tuple[torch.Tensor, ...]:
    return table.collate(table.__getitems__(range(len(table))))


def same(one: Table, other: Table) -> bool:
    attributes = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ("users", "times", "periods"))
    return attributes and all(torch.equal(a, b) for a, b in zip(everything(one), everything(other)))


# ------------------------------------------------------------------ formats


def lists() -> pa.Table:
    """The table with its sequences as lists, as Parquet has them."""
    table = pa.Table.from_pandas(frame(), preserve_index=False)
    seen = pa.array([row[3].split() for row in ROWS])
    return table.set_column(3, "seen", seen)


def datasets() -> dict[str, Any]:
    """What can write the rows, by the name of the file it makes."""
    text = frame().to_csv(index=False)
    whole = lists()
    stamped = whole.set_column(6, "when", whole["when"].cast(pa.timestamp("ns")))

    def stream(path: Path) -> None:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, whole.schema) as writer:
            writer.write_table(whole)

    return {
        "a.csv": lambda p: write(p, text),
        "a.tsv": lambda p: write(p, frame().to_csv(index=False, sep="\t")),
        "semicolons.csv": lambda p: write(p, frame().to_csv(index=False, sep=";")),
        "windows.csv": lambda p: write(p, text.replace("\n", "\r\n")),
        "bom.csv": lambda p: write(p, b"\xef\xbb\xbf" + text.encode()),
        "a.csv.gz": lambda p: write(p, gzip.compress(text.encode())),
        "bom.gz": lambda p: write(p, gzip.compress(b"\xef\xbb\xbf" + text.encode())),
        "a.csv.zst": lambda p: write(p, zstd(text.encode())),
        "blank_lines_behind.csv": lambda p: write(p, text + "\n\r\n\n"),
        "without_the_last_newline.csv": lambda p: write(p, text.rstrip("\n")),
        "quoted.csv": lambda p: write(p, frame().to_csv(index=False, quoting=1)),
        "a.parquet": lambda p: pa.parquet.write_table(whole, p, row_group_size=2),
        "stamped.parquet": lambda p: pa.parquet.write_table(stamped, p),
        "dictionaries.parquet": lambda p: frame().astype({"site": "category"}).to_parquet(p),
        "a.feather": lambda p: pa.feather.write_feather(whole, str(p)),
        "a.arrow": lambda p: pa.feather.write_feather(whole, str(p), compression="uncompressed", chunksize=3),
        "a.arrows": stream,
    }


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("name", datasets())
def test_every_format_gives_the_same_table(tmp_path: Path, name: str) -> None:
    datasets()[name](tmp_path / name)
    expected = open_table(frame(), SCHEMA)
    assert same(open_table(tmp_path / name, SCHEMA), expected)
    cached = open_table(tmp_path / name, SCHEMA, cache_dir=tmp_path / "cache")
    assert same(cached, expected) and isinstance(cached._categories, np.memmap)
    assert same(pickle.loads(pickle.dumps(cached.subset([0, 2]))), expected.subset([0, 2]))
    assert same(pickle.loads(pickle.dumps(expected.subset([3]))), cached.subset([3]))


class LikeHuggingFace:
    """What is used of `datasets.Dataset`: columns, and batches as Arrow tables."""

    def __init__(self, table: pa.Table) -> None:
        self._table, self.column_names = table, table.column_names

    def __len__(self) -> int:
        return self._table.num_rows

    def with_format(self, form: str) -> LikeHuggingFace:
        assert form == "arrow"
        return self

    def iter(self, size: int) -> Any:
        return (self._table.slice(i, 3) for i in range(0, self._table.num_rows, 3))


def test_frames() -> None:
    expected = open_table(frame(), SCHEMA)
    polars = pytest.importorskip("polars", reason="polars is not installed")
    for other in (lists(), polars.from_arrow(lists()), polars.from_pandas(frame()), LikeHuggingFace(lists())):
        assert same(open_table(other, SCHEMA), expected)
    with pytest.raises(DataError, match="the DataFrame: the header lacks the columns site"):
        open_table(frame().drop(columns="site"), SCHEMA)
    with pytest.raises(DataError, match=r"got int$"):
        open_table(3, SCHEMA)
    with pytest.raises(DataError, match=r"got LazyFrame: collect\(\) it first"):
        open_table(polars.from_arrow(lists()).lazy(), SCHEMA)


def test_what_is_read() -> None:
    table = open_table(frame(), SCHEMA)
    numbers, categories, seen, title, label = everything(table)
    assert label.tolist() == [1, 0, 0, 1]
    assert torch.allclose(numbers[:, 0], torch.tensor([np.log1p(3.5), 0, -np.log1p(1), 0], dtype=torch.float32))
    # Counted: ties by the code of the value; 1 is missing.
    rows = table.vocabularies["site"].as_dict()["site"]
    assert sorted(rows) == ["a", "b", "größe, ß"] and sorted(rows.values()) == [2, 3, 4]
    assert categories[:, 0].tolist() == [rows["a"], rows["b"], rows["größe, ß"], 1]
    assert table.vocabulary_sizes == [5] and table.category_names == ["site"] and table.number_names == ["price"]
    x, y, z = seen[0, :3].tolist()
    assert seen.tolist() == [[x, y, z, 0], [0] * 4, [y, 0, 0, 0], [x] * 4]  # the last four of five
    assert len({x, y, z, 0}) == 4 and [bag.rows for bag in table.bags] == [50, 100]
    assert title[0, 0] == title[0, 2] != title[0, 1] and title[1].tolist() == [0] * 3 == title[3].tolist()
    assert table.users is not None and table.users[0] == table.users[2] != table.users[1] and table.users[3] == 7
    assert table.periods is not None and (table.periods - table.periods[0]).tolist() == [0, 0, 1, 8]
    training, held_out = table.split(0.25)
    assert held_out.labels.tolist() == [1] and len(training) == 3
    assert len(table.split([int(table.periods[2])], by="periods")[1]) == 1


def test_codes_are_pinned() -> None:
    """Rows must not change between versions: a trained table would be shuffled."""
    values = [b"a", b"", "größe".encode(), b"12345678", b"123456789", b"x" * 100]
    codes = codes_of(pa.array(values, pa.binary()), Form.TEXT)[0]
    one_by_one = [codes_of(pa.array([b"?", value], pa.binary()).slice(1), Form.TEXT)[0][0] for value in values]
    assert codes.tolist() == one_by_one == PINNED and (codes >= 0).all()


PINNED = [
    2245105075474771320,
    8147104208329303767,
    5136762614210547186,
    4687043882262883670,
    6374848143914539805,
    5355248764128422442,
]


def test_time_orders_what_is_held_out(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", "y,a,t\n1,last,1700000300\n0,first,1700000000\n1,second,1700000100000\n")
    schema = TableSchema(label="y", categorical=(CategoricalColumn("a", CountVocabulary(1)),), time="t", every="hour")
    table = open_table(path, schema)
    assert table.times is not None and table.times.tolist() == [1700000300, 1700000000, 1700000100]  # the last in ms
    training, held_out = table.split(0.3)
    assert held_out.times.tolist() == [1700000300] and training.times.tolist() == [1700000000, 1700000100]  # type: ignore[union-attr]


def test_a_folder_of_days(tmp_path: Path) -> None:
    for day, rows in ((2, "1,b\n0,a\n"), (10, "1,c\n"), (1, "")):
        write(tmp_path / "days" / f"day_{day}.csv", ("y,a\n" if rows else "") + rows)
    pa.parquet.write_table(pa.table({"a": ["z"], "y": [True]}), tmp_path / "days" / "day_11.parquet")
    for paths in (tmp_path / "days", str(tmp_path / "days" / "*.*")):
        table = open_table(paths, PLAIN)
        assert table.periods is not None and table.periods.tolist() == [1, 1, 2, 3]  # day_1 is empty
        assert table.labels.tolist() == [1, 0, 1, 1]


def test_a_folder_within_a_folder_is_read_and_what_is_no_data_is_not(tmp_path: Path) -> None:
    """Partitions as Spark and Hive write them: `day=2` before `day=10`, _SUCCESS and hidden files beside them."""
    for day, row in ((10, "0,c\n"), (2, "1,b\n")):
        write(tmp_path / "log" / f"day={day}" / "part-0.csv", f"y,a\n{row}")
    write(tmp_path / "log" / "last.csv", "y,a\n1,z\n")
    for name in (
        "_SUCCESS",
        "day=2/.part-0.csv.crc",
        "_delta/1.csv",
        ".hidden/.x.csv",
        "schema.json",
        "day=2/_metadata",
    ):
        write(tmp_path / "log" / name, "no table")
    for paths in (tmp_path / "log", str(tmp_path / "lo*"), [tmp_path / "log"], str(tmp_path / "**" / "[pl]*.csv")):
        table = open_table(paths, PLAIN)
        assert table.labels.tolist() == [1, 0, 1] and table.periods is not None
        assert table.periods.tolist() == [0, 1, 2], paths
    with pytest.raises(DataError, match="no files found"):
        open_table(tmp_path / "log" / ".hidden", PLAIN)


@pytest.mark.models
def test_hugging_faces_data_sets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    data = datasets.Dataset(lists())
    expected = open_table(frame(), SCHEMA)
    assert same(open_table(data, SCHEMA), expected)
    shuffled = data.select([2, 0, 3, 1])
    assert open_table(shuffled, SCHEMA).labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(DataError, match=r"the IterableDataset is a stream, .* without streaming=True"):
        open_table(data.to_iterable_dataset(), SCHEMA)
    both = datasets.DatasetDict(train=data, test=shuffled)
    with pytest.raises(DataError, match=r"the DatasetDict holds several data sets: give one of 'train', 'test'"):
        open_table(both, SCHEMA)
    data.save_to_disk(tmp_path / "saved", num_shards=2)
    write(tmp_path / "saved" / "cache-1.arrow", "of a map that was tried")
    assert open_table(tmp_path / "saved", SCHEMA).labels.tolist() == expected.labels.tolist()
    both.save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="name one of its folders test, train"):
        open_table(tmp_path / "both", SCHEMA)
    assert same(open_table(tmp_path / "both" / "train", SCHEMA), expected)


class Stream(LikeHuggingFace):
    def __init__(self) -> None:
        self.column_names = None  # as `IterableDataset` has where nobody knows them


def test_a_stream_of_hugging_face_is_refused_by_name() -> None:
    with pytest.raises(DataError, match="the Stream is a stream, which is neither sampled from nor read twice"):
        open_table(Stream(), SCHEMA)


def test_a_folder_that_save_to_disk_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    write(folder / "dataset_info.json", "{}")
    write(folder / "state.json", json.dumps({"_data_files": [{"filename": "data-0.arrow"}]}))
    with pa.OSFile(str(folder / "data-0.arrow"), "wb") as file, pa.ipc.new_stream(file, lists().schema) as writer:
        writer.write_table(lists())
    write(folder / "cache-1.arrow", "of a map that was tried")
    assert same(open_table(folder, SCHEMA), open_table(frame(), SCHEMA))
    write(folder / "state.json", "[]")
    with pytest.raises(DataError, match=r"state.json: does not list the files"):
        open_table(folder, SCHEMA)
    write(tmp_path / "both" / "dataset_dict.json", "{}")
    for part in ("train", "test"):
        (tmp_path / "both" / part).mkdir()
    with pytest.raises(DataError, match=r"holds several data sets, .*: name one of its folders test, train"):
        open_table(tmp_path / "both", SCHEMA)


@pytest.mark.parametrize("make", [lists, frame], ids=["arrow", "pandas"])
def test_a_frame_is_no_data_set_of_examples(make: Any) -> None:
    model = torch.nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match=r"is no data set of examples: .* sparsedp.data.open_table"):
        sparsedp.PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(make(), batch_size=2),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )


def test_raw_rows_are_encoded_as_in_training(tmp_path: Path) -> None:
    """What stands before a model that serves: requests, one by one or many, give the inputs that the table gave."""
    schema = dataclasses.replace(
        SCHEMA, numeric=(NumericColumn("price"), NumericColumn("age", "buckets", boundaries=(10.0, 30.0)))
    )
    rows = [{**dict(zip(NAMES, row)), "age": age} for row, age in zip(ROWS, (5, 20, 40, None))]
    frame(rows).to_csv(tmp_path / "log.csv", index=False)
    for table in (
        open_table(tmp_path / "log.csv", schema),
        open_table(tmp_path / "log.csv", schema, cache_dir=tmp_path / "c"),
    ):
        expected = everything(table)[:-1]
        got = encode_rows(rows, schema, table.vocabularies)
        assert len(got) == len(expected) and all(torch.equal(a, b) for a, b in zip(got, expected))
        for i, row in enumerate(rows):
            asked = {
                name: value
                for name, value in row.items()
                if name not in ("clicked", "who", "when") and value is not None
            }
            alone = encode_rows([asked], schema, table.vocabularies)
            assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, expected)), row
        as_frame = encode_rows(frame(rows).drop(columns=["clicked", "who", "when"]), schema, table.vocabularies)
        assert all(torch.equal(a, b) for a, b in zip(as_frame, expected))
    hashed = dataclasses.replace(schema, categorical=(CategoricalColumn("site"),), vocabulary=HashVocabulary(30))
    wanted = everything(open_table(tmp_path / "log.csv", hashed))[:-1]
    assert all(torch.equal(a, b) for a, b in zip(encode_rows(rows, hashed), wanted)), "hashes need no vocabularies"
    # A value that was not there in training has the row of those.
    unseen = encode_rows([{"site": "never seen"}], schema, table.vocabularies)[1][0, 0]
    assert unseen not in expected[1][:, 0] and 0 <= unseen < table.vocabulary_sizes[0]
    with pytest.raises(ConfigError, match="the vocabulary of site was counted in training: give vocabularies"):
        encode_rows(rows, schema)
    with pytest.raises(DataError, match=r"row 1 has no column 'sites' to be read. Did you mean 'site'"):
        encode_rows([{"sites": "a"}], schema, table.vocabularies)
    with pytest.raises(DataError, match="price is not a number"):
        encode_rows([{"price": "much"}], schema, table.vocabularies)


def test_columns_without_a_header(tmp_path: Path) -> None:
    schema = TableSchema(label="y", categorical=(CategoricalColumn("a", CountVocabulary(1)),), columns=("a", "x", "y"))
    path = write(tmp_path / "a.csv", "p,?,1\nq,?,0\n")
    assert open_table(path, schema).labels.tolist() == [1, 0]
    with pytest.raises(DataError, match=r"lacks the columns y, a; it has 1, p. If that line is a row and no header"):
        open_table(write(tmp_path / "b.csv", "1,p\n0,q\n"), PLAIN)


def test_whole_numbers_are_one_category_whatever_their_type(tmp_path: Path) -> None:
    schema = TableSchema(label="y", categorical=(CategoricalColumn("a", HashVocabulary(1000)),))
    texts = open_table(write(tmp_path / "a.csv", "y,a\n1,5\n0,\n"), schema)
    for values in (np.array([5.0, np.nan]), pd.array([5, None], "Int64"), ["5", ""]):
        assert torch.equal(
            everything(open_table(pd.DataFrame({"y": [1, 0], "a": values}), schema))[1], everything(texts)[1]
        )


def test_a_million_distinct_values(tmp_path: Path) -> None:
    """Memory follows them, and nothing is lost; a tenth of a million, for the sake of time."""
    n = 100_000
    path = write(tmp_path / "a.csv", "y,a\n" + "".join(f"{i % 2},value {i}\n" for i in range(n)))
    table = open_table(path, PLAIN, cache_dir=tmp_path / "cache")
    assert table.vocabulary_sizes == [n + 2]
    assert sorted(table._categories[:, 0].tolist()) == list(range(2, n + 2))
    again = open_table(path, PLAIN, vocabularies=table.vocabularies)
    assert np.array_equal(again._categories, table._categories) and again.vocabulary_is_private
    unseen = open_table(
        write(tmp_path / "b.csv", "y,a\n1,new\n0,value 7\n0,\n"), PLAIN, vocabularies=table.vocabularies
    )
    assert unseen._categories[:, 0].tolist() == [0, int(table._categories[7, 0]), 1]


# ------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("column", "wanted"),
    [
        (NumericColumn("x"), [np.log1p(1), -np.log1p(20), 0, np.log1p(50.5)]),
        (NumericColumn("x", "none"), [1, -20, 0, 50.5]),
        (NumericColumn("x", "scale", 0, 10), [-0.8, -1, 0, 1]),
    ],
)
def test_transforms(tmp_path: Path, column: NumericColumn, wanted: list[float]) -> None:
    schema = TableSchema(label="y", numeric=(column,))
    for missing in ("", "NA", "null", "NaN"):
        table = open_table(write(tmp_path / "a.csv", f"y,x\n1,1\n1,-20\n0,{missing}\n0,50.5\n"), schema)
        assert np.allclose(everything(table)[0][:, 0], wanted)


def test_buckets_are_categories(tmp_path: Path) -> None:
    schema = TableSchema(label="y", numeric=(NumericColumn("x", "buckets", boundaries=(0.0, 10.0)),))
    table = open_table(write(tmp_path / "a.csv", "y,x\n1,-5\n1,0\n0,\n0,9.9\n1,10\n"), schema)
    assert table._categories[:, 0].tolist() == [1, 2, 0, 2, 3] and table.vocabulary_sizes == [4]
    assert table.number_count == 0 and not table.vocabulary_is_private


# ------------------------------------------------------------------ labels and malformed lines


@pytest.mark.parametrize("label", ["0.5", "2", "-1", "nan", "", "click", "inf", "1e30"])
def test_a_label_that_is_neither_0_nor_1(tmp_path: Path, label: str) -> None:
    path = write(tmp_path / "log.csv", f"a,y\np,1\n\nq,{label}\nr,0\n")
    with pytest.raises(DataError, match=r"log.csv, line 4: y is (neither 0 nor 1|infinite)") as error:
        open_table(path, PLAIN)
    assert label not in str(error.value).split("y is")[1] or label in ("", "1", "2", "0.5", "inf")
    assert "data.positive" in str(error.value) or label == "inf"
    assert open_table(path, PLAIN, max_malformed=0.5).labels.tolist() == [1, 0]


def test_labels_that_mean_one(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "a,y,r\np,yes,5\nq,no,1\nr,Yes,3\n")
    columns = (CategoricalColumn("a"),)
    assert open_table(path, TableSchema("y", columns, positive=("yes",))).labels.tolist() == [1, 0, 0]
    assert open_table(path, TableSchema("r", columns, label_above=2)).labels.tolist() == [1, 0, 1]
    words = write(tmp_path / "words.csv", "a,y\np,True\nq,false\n")
    assert open_table(words, PLAIN).labels.tolist() == [1, 0]
    with pytest.raises(DataError, match="line 3: y is empty"):
        open_table(write(tmp_path / "gap.csv", "a,y\np,yes\nq,\n"), TableSchema("y", columns, positive=("yes",)))


def test_labels_that_mean_neither_one_nor_zero_are_malformed(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "a,y\np,yes\nq,no\nr,perhaps\n")
    schema = TableSchema("y", (CategoricalColumn("a"),), positive=("yes",), negative=("no",))
    with pytest.raises(DataError, match=r"line 4: y is neither in data\.positive nor in data\.negative"):
        open_table(path, schema)
    assert open_table(path, schema, max_malformed=0.5).labels.tolist() == [1, 0]
    with pytest.raises(ConfigError, match=r"\(positive\) beside those that mean 0"):
        dataclasses.replace(schema, positive=())
    with pytest.raises(ConfigError, match="the label 'yes' means 1"):
        dataclasses.replace(schema, negative=("no", "yes"))


def test_malformed_lines_of_every_kind(tmp_path: Path) -> None:
    lines = [
        "1,a,3.5,x,t,anna,2026-03-01",
        "1,a,cheap,x,t,anna,2026-03-01",
        "1,a,3.5,x,t,,2026-03-01",
        "1,a,3.5,x,t,anna,yesterday",
        "1,a,3.5",
        '1,"a ""quoted"" one,\nin two lines",1e400,x,t,anna,2026-03-01',
        "1,a,3.5,x,t,anna,2026-03-01,more",
        "0,b,inf,x,t,anna,2026-03-01",
        "0,b,1,x,t,anna,2026-03-01T01:00:00Z",
    ]
    path = write(tmp_path / "log.csv", ",".join(NAMES) + "\n" + "\n".join(lines) + "\n")
    table = open_table(path, SCHEMA, max_malformed=0.9)
    assert table.labels.tolist() == [1, 0]
    assert [(line.line, line.reason) for line in table.summary.first] == [
        (3, "price is not a number"),
        (4, "who is empty"),
        (5, "when is neither seconds since 1970 nor a date as in 2026-03-01 or 2026-03-01T12:00:00"),
        (6, "3 fields, expected 7"),
        (7, "price is infinite"),
        (9, "8 fields, expected 7"),
        (10, "price is infinite"),
    ]
    assert table.summary.malformed == 7 and set(table.vocabularies["site"].as_dict()["site"]) == {"a", "b"}
    pa.parquet.write_table(pa.table({"y": [1, 3, None], "a": ["p", "q", "r"]}), tmp_path / "a.parquet")
    with pytest.raises(
        DataError, match=r"2 of 3 lines .*\n  a.parquet, row 2: y is neither 0 nor 1;\n  a.parquet, row 3"
    ):
        open_table(tmp_path / "a.parquet", PLAIN)


def test_values_of_malformed_lines_are_not_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "y,a\n" + "1,p\n" * 5 + "7,q\n" * 5)
    table = open_table(path, TableSchema("y", (CategoricalColumn("a", CountVocabulary(2)),)), max_malformed=0.5)
    assert table.vocabularies["a"].as_dict() == {"a": {"p": 2}}


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", b"y,a\n1,gr\xf6\xdfe\n0,b\n")
    with pytest.raises(DataError, match=r"log.csv, line 2: is not text in UTF-8\.\nSave the file as UTF-8"):
        open_table(path, PLAIN)
    assert open_table(path, PLAIN, max_malformed=0.5).labels.tolist() == [0]


def test_a_quote_that_is_not_closed_loses_no_lines_silently(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "y,a\n1,p\n" + '1,"q\n' + "0,r\n" * 50)
    with pytest.raises(DataError, match=r"log.csv, line 3: a quote begins there that is never closed"):
        open_table(path, PLAIN)
    inches = "".join(f'{i % 2},pipe of 5" and more\n' for i in range(51))  # quotes within fields mean nothing
    assert len(open_table(write(tmp_path / "inches.csv", "y,a\n" + inches), PLAIN)) == 51


def test_quoted_lines_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = "y,a\n" + "".join(f'{i % 2},"line {i},\nand ""more"" of it"\n' for i in range(40))
    path = write(tmp_path / "log.csv", content)
    expected = open_table(path, PLAIN)
    monkeypatch.setattr(tablefiles, "_FIRST_BLOCK", 50)
    monkeypatch.setattr(tablefiles, "_BLOCK", 100)
    pieces = open_table(path, PLAIN)
    assert len(pieces) == 40 and pieces.summary.malformed == 0
    assert torch.equal(everything(pieces)[1], everything(expected)[1])


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no rows in log"),
        (b"\n\n", "no rows in log"),
        (b"\n1,2\n", "the first line is blank"),
        (b"y,a\n", "no rows in log"),
        (b"\xef\xbb\xbf", "no rows in log"),
        (b"hello\n", "neither tabs nor commas"),
        (b"y,b\n1,2\n", r"lacks the columns a; it has y, b"),
        (b"y,a,A,a\n1,2,3,4\n", "repeats the columns a"),
        (b"PK\x03\x04zip", "it is a zip file: unpack it"),
        ("y,a\n1,2\n".encode("utf-16"), "UTF-16: save it as UTF-8"),
        (b"PAR1 but no more", "cannot be read as Parquet"),
        (b"ARROW1 but no more", "cannot be read as Arrow"),
        (gzip.compress(b"y,a\n" + b"1,2\n" * 9000)[:-9], "the gzip file is damaged or cut short"),
        (zstd(b"y,a\n" + bytes(range(32, 127)) * 900)[:-9], "the zstd file is damaged or cut short"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",  # gzip writes the time
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_table(write(tmp_path / "log", content), PLAIN, cache_dir=tmp_path / "cache")
    assert [p for p in (tmp_path / "cache").glob("*") if not p.name.endswith(".lock")] == []


def test_the_nearest_name_is_suggested(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "clicked,site,price\n1,a,2\n")
    with pytest.raises(DataError, match=r"log.csv: the header lacks the columns sites; .* Did you mean 'site'\?"):
        open_table(path, TableSchema("clicked", (CategoricalColumn("sites"),)))
    assert len(open_table(path, TableSchema("Clicked", (CategoricalColumn("SITE"),)))) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TableSchema("y"), "a column to learn from"),
        (lambda: TableSchema("y", (CategoricalColumn("y"),)), "y is named twice"),
        (
            lambda: TableSchema("y", (CategoricalColumn("a"),), user="a"),
            "the user column 'a' is read as something else",
        ),
        (lambda: NumericColumn("x", "scale"), "low and high"),
        (lambda: NumericColumn("x", "scale", 2, 1), "low must be below high"),
        (lambda: NumericColumn("x", "buckets", boundaries=(1, 1)), "must rise"),
        (lambda: NumericColumn("x", "buckets"), "buckets have boundaries"),
        (lambda: open_table([], PLAIN), "no files"),
    ],
)
def test_impossible_schemas_are_refused(make: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        make()


# ------------------------------------------------------------------ what the data decide


def shape_of(table: Table) -> Any:
    """All that a model is built from, and what is said of the table."""
    return table.vocabulary_sizes, table.bags, table.number_count, table.vocabulary_is_private, table.category_names


def test_public_choices_do_not_depend_on_anybodys_row(tmp_path: Path) -> None:
    """Neighbours: one row more, with values, lengths and words that nobody else has. Everybody else's row, and all that the model is
    built from, stay the same, unless a vocabulary is counted, which is said.
    """
    strange = [
        1,
        "seen never before",
        1e9,
        " ".join(f"item{i}" for i in range(99)),
        "many words " * 99,
        "zoe",
        "1970-01-01",
    ]
    with_one = pd.DataFrame([*ROWS, strange], columns=NAMES)
    public = TableSchema(
        label="clicked",
        categorical=(
            CategoricalColumn("site", HashVocabulary(30)),
            CategoricalColumn("who_", GivenVocabulary([["anna"]])),
        ),
        numeric=(NumericColumn("price", "scale", 0, 10),),
        sequence=SCHEMA.sequence,
        text=SCHEMA.text,
        user="who",
        time="when",
    )
    for schema, is_public in ((public, True), (SCHEMA, False)):
        tables = [open_table(rows.assign(who_=rows["who"]), schema) for rows in (frame(), with_one)]
        assert tables[0].vocabulary_is_private != is_public
        if is_public:
            assert shape_of(tables[0]) == shape_of(tables[1])
            assert same(tables[0], tables[1].subset(range(4)))
        else:
            assert shape_of(tables[0]) != shape_of(tables[1])


def test_vocabulary_files(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", "y,a\n1,p\n0,q\n1,\n0,s\n")
    words = write(tmp_path / "words.txt", "\ufeffq\r\n\r\np\r\n")
    table = open_table(path, PLAIN, vocabularies={"a": GivenVocabulary.of_values(words)})
    assert table._categories[:, 0].tolist() == [3, 2, 1, 0] and not table.vocabulary_is_private
    whole = write(tmp_path / "words.json", json.dumps({"a": {"p": 2, "q": 2}}))
    table = open_table(path, PLAIN, vocabularies={"a": GivenVocabulary(whole)})
    assert table._categories[:, 0].tolist() == [2, 2, 1, 0] and table.vocabulary_sizes == [3]
    with pytest.raises(ConfigError, match="cannot be read as lines"):
        GivenVocabulary.of_values(tmp_path / "no")


def test_canaries_go_into_a_batch() -> None:
    from sparsedp.noise import RandomKey

    table = open_table(frame(), SCHEMA)
    canary = table.make_canary(RandomKey.from_seed(1).generator())
    assert [part.shape for part in table.collate([table[0], canary])] == [(2, 1), (2, 1), (2, 4), (2, 3), (2,)]
    assert [part.shape for part in table.collate([])] == [(0, 1), (0, 1), (0, 4), (0, 3), (0,)]
