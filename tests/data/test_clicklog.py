"""Reading click logs: formats, malformed lines, the cache, vocabularies, and use by loaders."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.utils.data import DataLoader

from sparsedp.data import (
    MISSING_INTEGER,
    CountVocabulary,
    Form,
    GivenVocabulary,
    HashVocabulary,
    generated_click_log,
    open_click_log,
    tablecache,
    tablefiles,
    write_click_log,
)
from sparsedp.data.clicklog import COLUMNS
from sparsedp.data.generated import write_rows
from sparsedp.errors import ConfigError, DataError


def line(label="1", integers=("3",) * 13, categories=("0a",) * 26, separator="\t") -> str:  # type: ignore[no-untyped-def]
    return separator.join([label, *integers, *categories])


def text(rows: int, separator: str = "\t") -> str:
    return "".join(line(str(i % 2), [str(i)] * 13, [f"{i % 7:08x}"] * 26, separator) + "\n" for i in range(rows))


def write(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def everything(log) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    return log.collate(log.__getitems__(range(len(log))))


def leftovers(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if not p.name.endswith(".lock"))


# Parsing ------------------------------------------------------------------------------------------

WITH_DAY = ["note", *COLUMNS, "day"]
FIELD = st.one_of(
    st.sampled_from(["", "0", "1", "-1", "12", "3.0", "3.", "-2.00", "05db9164", "ABCDEF", "-.", "+", "1.5", "x"]),
    st.sampled_from(["2147483647", "2147483648", "00000000001", "f" * 15, "f" * 16, "g", "1-", "0x1", "1_0"]),
    st.sampled_from(["\x00", "é", "99999999999999999999999", "a" * 40, '"1"', '"', "inf", "-inf"]),
)


@st.composite
def lines(draw, fields: int) -> list[str]:  # type: ignore[no-untyped-def]
    """Lines that are mostly right, with strange fields, too few or too many of them, and odd endings."""
    out = []
    for _ in range(draw(st.integers(0, 6))):
        values = ["1"] * fields
        for place, value in draw(st.lists(st.tuples(st.integers(0, fields - 1), FIELD), max_size=4)):
            values[place] = value
        values = values[: draw(st.sampled_from([fields] * 6 + [2, fields - 1]))]
        values += draw(st.sampled_from([[]] * 6 + [["1"], [""], ["", "x"]]))
        separator = "\t" if fields == 40 else ","
        out.append(separator.join(values) + draw(st.sampled_from(["\n"] * 4 + ["\r\n", "\n\n"])))
    return out


def plain_reading(lines: list[str], names: list[str]) -> tuple[list[list[int]], list[tuple[int, str]]]:
    """The rows (label, integers, codes, day) of lines, and (line, reason) of those that are malformed: what the reader must find."""
    rows, bad, number = [], [], 0
    for line in lines:
        number += 1
        text = line.rstrip("\r\n")
        here, number = number, number + line.count("\n") - 1
        values = dict(zip(names, fields := text.split("\t" if len(names) == 40 else ",")))
        if len(fields) != len(names):
            bad.append((here, f"{len(fields)} fields, expected {len(names)}"))
            continue
        row, reasons = [], []
        for name in [*COLUMNS, *(["day"] if "day" in names else [])]:
            value = values[name]
            whole = re.fullmatch(r"(-?[0-9]+)(\.0*)?", value)
            if name[0] == "C":
                if value and not re.fullmatch("[0-9a-fA-F]{1,15}", value):
                    reasons.append(f"{name} is not a hex number of at most 15 digits")
                row.append(int(value, 16) if value and not reasons else -1)
            elif name == "label":
                if not whole or int(whole[1]) not in (0, 1):
                    reasons.append("label is neither 0 nor 1")
                row.append(int(whole[1]) if whole else 0)
            else:
                fits = whole is not None and abs(int(whole[1])) < 2**31
                if not fits and (value or name == "day"):
                    reasons.append(f"{'period' if name == 'day' else name} is not a whole number of 32 bits")
                row.append(int(whole[1]) if fits and whole else MISSING_INTEGER)
        if reasons:
            bad.append((here, ""))
        else:
            rows.append(row)
    return rows, bad


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.tuples(st.just(COLUMNS), lines(40)), st.tuples(st.just(WITH_DAY), lines(42))))
def test_the_reader_finds_what_a_plain_parser_finds(tmp_path_factory: pytest.TempPathFactory, case) -> None:  # type: ignore[no-untyped-def]
    names, drawn = case
    first = ["\t".join(names) + "\n" if names is COLUMNS else ",".join(names) + "\n", *drawn]
    rows, bad = plain_reading(drawn, names)
    folder = tmp_path_factory.mktemp("plain")
    path = write(folder / "log.txt", "".join(first))
    if not rows:
        with pytest.raises(DataError, match=r"no rows|malformed"):
            open_click_log(path, cache_dir=folder, max_malformed=1)
        return
    log = open_click_log(path, cache_dir=folder, vocabulary=CountVocabulary(1), max_malformed=1)
    code_of = [{1: -1, **{row: int(code, 16) for code, row in v.items()}} for v in log.vocabulary.as_dict().values()]
    codes = [[code_of[j][row] for j, row in enumerate(found)] for found in log._categories.tolist()]
    days = log.periods.tolist() if names is WITH_DAY else []
    found = [
        [int(label), *numbers, *of_row, *days[i : i + 1]]
        for i, (label, numbers, of_row) in enumerate(zip(log.labels, log._numbers.tolist(), codes))
    ]
    assert found == rows
    assert [(line.line - 1, line.reason) for line in log.summary.first if "fields" in line.reason] == [
        b for b in bad if b[1]
    ]
    assert [line.line - 1 for line in log.summary.first] == [line for line, _ in bad]
    assert log.summary.malformed == len(bad)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    path = folder / "log.tsv"
    path.write_bytes(text(2).encode() + data + b"\n")
    log = open_click_log(path, cache_dir=folder, max_malformed=1)
    assert len(log) == 2 and everything(log)[2].tolist() == [0, 1]


def test_fields_and_missing_values(tmp_path: Path) -> None:
    integers = ["", "-2", "2147483647", "3.0", *["0"] * 9]
    categories = ["", "05db9164", "FFFFFFFF", "a", *["0"] * 22]
    path = write(tmp_path / "log", line("0", integers, categories) + "\r\n\n" + line() + "\n")
    log = open_click_log(path, cache_dir=tmp_path / "cache", vocabulary=CountVocabulary(1))
    assert log.labels.tolist() == [0, 1] and log.summary.malformed == 0
    assert log._numbers[0, :5].tolist() == [MISSING_INTEGER, -2, 2147483647, 3, 0]
    spelled = [{row: value for value, row in values.items()} for values in log.vocabulary.as_dict().values()]
    assert [spelled[j].get(row) for j, row in enumerate(log._categories[0, :4])] == [
        None,
        "05db9164",
        "ffffffff",
        "0000000a",
    ]


# Formats ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", ["\t", ","])
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("header", [False, True])
@pytest.mark.parametrize("bom", ["", "\ufeff"])
def test_formats(tmp_path: Path, separator: str, suffix: str, header: bool, bom: str) -> None:
    names = separator.join(COLUMNS) + "\n" if header else ""
    path = write(tmp_path / f"log.txt{suffix}", bom + names + text(20, separator))
    log = open_click_log(path, cache_dir=tmp_path / "cache", vocabulary=CountVocabulary(1))
    integers, categories, labels = everything(log)
    assert integers.tolist() == [[float(i)] * 13 for i in range(20)]
    assert labels.tolist() == [float(i % 2) for i in range(20)]
    # 0..5 occur three times and 6 twice: rows in the order of frequency, then of value.
    assert categories[:, 25].tolist() == [2 + i % 7 for i in range(20)]
    assert log.periods is None and log.vocabulary_sizes == [9] * 26


def test_columns_are_found_by_name_and_others_ignored(tmp_path: Path) -> None:
    names = ["id", *reversed(COLUMNS), "block"]
    rows = [["x?", *[f"{c}"] * 26, *[f"{i}"] * 13, "1", f"{b}"] for c, i, b in (("a", 5, 7), ("b", 6, 9))]
    path = write(tmp_path / "log.csv", "\n".join(",".join(r) for r in [names, *rows]))
    log = open_click_log(path, cache_dir=tmp_path / "cache", vocabulary=GivenVocabulary([["b", "a"]] * 26))
    assert log.periods.tolist() == [7, 9]
    integers, categories, _ = everything(log)
    assert integers[:, 0].tolist() == [5, 6] and categories[:, 0].tolist() == [3, 2]


def test_an_incomplete_header_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "log.csv", ",".join([*COLUMNS[:-2], "C26"]) + "\n")
    with pytest.raises(DataError, match="lacks the columns C25"):
        open_click_log(path, cache_dir=tmp_path / "cache")
    path = write(tmp_path / "log.csv", ",".join([*COLUMNS, "I3"]) + "\n")
    with pytest.raises(DataError, match="repeats the columns i3"):
        open_click_log(path, cache_dir=tmp_path / "cache")


def test_one_file_per_day_in_natural_order(tmp_path: Path) -> None:
    for day in range(11):
        write(tmp_path / "days" / f"day_{day}.gz", text(day % 3) if day % 3 else "")  # some days are empty
    expected = [day for day in range(11) for _ in range(day % 3)]
    for paths in (
        tmp_path / "days",
        str(tmp_path / "days" / "day_*.gz"),
        [tmp_path / "days" / f"day_{day}.gz" for day in range(11)],
    ):
        assert open_click_log(paths, cache_dir=tmp_path / "cache").periods.tolist() == expected
    assert len(leftovers(tmp_path / "cache")) == 1  # the same files, so the same cache


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "no rows"), ("hello\n", "neither tabs nor commas"), (",".join(COLUMNS) + "\n", "no rows")],
)
def test_files_without_rows(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_click_log(write(tmp_path / "log", content), cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for paths in (tmp_path / "no", [tmp_path / "no"], str(tmp_path / "*.gz"), []):
        with pytest.raises(DataError, match=r"no such file|no files"):
            open_click_log(paths, cache_dir=tmp_path / "cache")


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "log.gz", text(3000))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match=r"log\.gz: the gzip file is damaged"):
        open_click_log(path, cache_dir=tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def test_small_blocks_give_the_same_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "log.tsv", text(100) + "bad\n" + text(30).rstrip("\n"))  # no newline at the end
    options = {"vocabulary": CountVocabulary(3), "max_malformed": 0.1}
    whole = open_click_log(path, cache_dir=tmp_path / "a", **options)
    monkeypatch.setattr(tablefiles, "_FIRST_BLOCK", 500)
    monkeypatch.setattr(tablefiles, "_BLOCK", 1000)
    monkeypatch.setattr(tablecache, "_PIECE_ROWS", 7)
    pieces = open_click_log(path, cache_dir=tmp_path / "b", **options)
    assert all(torch.equal(a, b) for a, b in zip(everything(whole), everything(pieces)))
    assert len(whole) == 130 and whole.summary == pieces.summary
    monkeypatch.setattr(tablefiles, "_BLOCK", 100)
    monkeypatch.setattr(tablefiles, "_LONGEST_LINE", 100)
    monkeypatch.setattr(tablefiles, "_FIRST_BLOCK", 100)
    with pytest.raises(DataError, match="a line of more than 100 bytes"):
        open_click_log(path, cache_dir=tmp_path / "c", **options)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_written_rows_are_read_again(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 6))
    labels = data.draw(arrays(np.uint8, n, elements=st.integers(0, 1)))
    whole = st.one_of(st.just(MISSING_INTEGER), st.integers(-(2**31) + 1, 2**31 - 1))
    integers = data.draw(arrays(np.int32, (n, 13), elements=whole))
    codes = data.draw(arrays(np.int64, (n, 26), elements=st.integers(-1, 2**32 - 1)))
    folder = tmp_path_factory.mktemp("round")
    name = data.draw(st.sampled_from(["log.tsv", "log.tsv.gz"]))
    separator, header = data.draw(st.sampled_from("\t,")), data.draw(st.booleans())
    write_rows(folder / name, labels, integers, codes, separator=separator, header=header)
    log = open_click_log(folder / name, cache_dir=folder, vocabulary=CountVocabulary(1))
    assert np.array_equal(log.labels, labels) and np.array_equal(log._numbers, integers)
    row_to_code = [{row: int(code, 16) for code, row in v.items()} for v in log.vocabulary.as_dict().values()]
    read = [[{1: -1, **row_to_code[j]}[row] for j, row in enumerate(rows)] for rows in log._categories.tolist()]
    assert read == codes.tolist()


# Malformed lines ----------------------------------------------------------------------------------


BAD = {
    "12 fields, expected 40": "\t".join(["1"] * 12),
    "label is neither 0 nor 1": line("2"),
    "I5 is not a whole number of 32 bits": line(integers=["3"] * 4 + ["x"] + ["3"] * 8),
    "C26 is not a hex number of at most 15 digits": line(categories=["0"] * 25 + ["0xg"]),
}


def test_malformed_lines_are_counted_and_named(tmp_path: Path) -> None:
    first = write(tmp_path / "a.tsv", text(10) + "\n".join(BAD.values()) + "\n" + text(10))
    second = write(tmp_path / "b.csv", ",".join(COLUMNS) + "\n" + text(5, ",") + line("") + "\n")
    log = open_click_log([first, second], cache_dir=tmp_path / "cache", max_malformed=0.2)
    assert len(log) == log.summary.rows == 25 and log.summary.malformed == 5
    named = [(bad.file, bad.line, bad.reason) for bad in log.summary.first]
    assert named == [
        *(("a.tsv", 11 + i, reason) for i, reason in enumerate(BAD)),
        ("b.csv", 7, "1 fields, expected 40"),
    ]
    # What is wrong is named, what it says is not: it is somebody's data.
    with pytest.raises(DataError, match=r"5 of 30 lines .* max_malformed=0.001") as error:
        open_click_log([first, second], cache_dir=tmp_path / "cache")  # also from the cache of a lenient call
    assert "a.tsv, line 12: label is neither 0 nor 1" in str(error.value) and "0xg" not in str(error.value)


def test_the_first_twenty_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "log.tsv", text(100) + "bad\n" * 50)
    log = open_click_log(path, cache_dir=tmp_path / "cache", max_malformed=0.5)
    assert log.summary.malformed == 50
    assert [bad.line for bad in log.summary.first] == list(range(101, 121))
    with pytest.raises(DataError, match="and 30 more"):
        open_click_log(path, cache_dir=tmp_path / "other")


def test_the_tolerance_is_a_share(tmp_path: Path) -> None:
    path = write(tmp_path / "log.tsv", text(999) + "bad\n")
    assert len(open_click_log(path, cache_dir=tmp_path / "cache", max_malformed=0.001)) == 999
    with pytest.raises(DataError, match="1 of 1000"):
        open_click_log(path, cache_dir=tmp_path / "cache", max_malformed=0.0009)
    with pytest.raises(ConfigError, match="max_malformed"):
        open_click_log(path, cache_dir=tmp_path / "cache", max_malformed=2)


def test_a_hopeless_file_is_stopped_early(tmp_path: Path) -> None:
    path = write(tmp_path / "log.tsv", "some\tother\tfile\n" * 200_000)
    reads: list[int] = []
    with pytest.raises(DataError, match=r"stopped early.*\n  log.tsv, line 1: 3 fields, expected 40") as error:
        open_click_log(path, cache_dir=tmp_path / "cache", progress=reads.append)
    assert "of 200000 lines" not in str(error.value) and reads == []
    assert leftovers(tmp_path / "cache") == []


# The cache ----------------------------------------------------------------------------------------


class Reads(list):
    """A progress callback that remembers."""

    __call__ = list.append


def test_a_cache_is_reused_until_source_or_options_change(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "log.tsv", text(60)), tmp_path / "cache"

    def rebuilt(**options) -> bool:  # type: ignore[no-untyped-def]
        reads = Reads()
        log = open_click_log(path, cache_dir=cache, progress=reads, **options)
        assert reads in ([], [len(log)])
        return bool(reads)

    assert rebuilt()
    assert not rebuilt()
    assert not rebuilt(max_malformed=0.5)  # decided on what the summary says, not by reading again
    assert rebuilt(vocabulary=HashVocabulary(50)) and not rebuilt(vocabulary=HashVocabulary([50] * 26))
    assert rebuilt(vocabulary=CountVocabulary(2)) and rebuilt(vocabulary=CountVocabulary(3))
    assert rebuilt(vocabulary=GivenVocabulary([["a"]] * 26)) and rebuilt(vocabulary=GivenVocabulary([["b"]] * 26))
    assert rebuilt(vocabulary=GivenVocabulary([["b"]] * 26, private=True))
    stamp = path.stat()
    write(path, text(61))
    assert rebuilt() and not rebuilt()
    write(path, text(60).replace("00000001", "0000000f"))  # the same size, another time
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1_000_000))
    assert rebuilt() and not rebuilt()


def test_a_damaged_cache_is_built_again(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "log.tsv", text(60)), tmp_path / "cache"
    before = everything(open_click_log(path, cache_dir=cache))
    (directory,) = (cache / name for name in leftovers(cache))
    for name, damage in (("labels.bin", b"\0" * 59), ("header.json", b"{")):
        (directory / name).write_bytes(damage)
        assert all(torch.equal(a, b) for a, b in zip(before, everything(open_click_log(path, cache_dir=cache))))
    assert leftovers(cache) == [directory.name]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("vocabulary", [HashVocabulary(9), CountVocabulary(1)])
def test_an_interrupted_build_leaves_nothing(tmp_path: Path, kind: type[BaseException], vocabulary) -> None:  # type: ignore[no-untyped-def]
    path, cache = write(tmp_path / "log.tsv", text(60)), tmp_path / "cache"

    def interrupt(rows: int) -> None:
        assert any(name.endswith(".partial") for name in leftovers(cache))
        raise kind

    with pytest.raises(kind):
        open_click_log(path, cache_dir=cache, vocabulary=vocabulary, progress=interrupt)
    assert leftovers(cache) == []
    assert len(open_click_log(path, cache_dir=cache, vocabulary=vocabulary)) == 60


def test_what_killed_builds_left_is_ignored_and_removed(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "log.tsv", text(60)), tmp_path / "cache"
    open_click_log(path, cache_dir=cache)
    (name,) = leftovers(cache)
    (cache / name).rename(cache / f".{name}.partial")  # of the same log, killed before the last step
    (cache / ".table-other.partial").mkdir()
    (cache / ".table-other.partial" / "labels.bin").write_bytes(b"\0")
    assert len(open_click_log(path, cache_dir=cache)) == 60
    assert leftovers(cache) == [name]


def test_the_build_of_another_process_is_left_alone(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    path, cache = write(tmp_path / "log.tsv", text(60)), tmp_path / "cache"
    (cache / ".table-other.partial").mkdir(parents=True)
    with open(cache / ".table-other.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        open_click_log(path, cache_dir=cache)
    assert ".table-other.partial" in leftovers(cache)


def test_two_who_open_at_once_build_once(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    path = write(tmp_path / "log.tsv", text(60))
    reads, lengths = Reads(), []
    threads = [
        threading.Thread(
            target=lambda: lengths.append(len(open_click_log(path, cache_dir=tmp_path / "c", progress=reads)))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lengths == [60] * 4 and reads == [60]


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path, cache = write(tmp_path / "log.tsv", text(60)), tmp_path / "cache"
    with pytest.raises(DataError, match="changed while it was read"):
        open_click_log(path, cache_dir=cache, progress=lambda rows: path.write_text(text(70)) and None)
    assert leftovers(cache) == []


# Vocabularies -------------------------------------------------------------------------------------


def column_log(tmp_path: Path, values: list[str], **options):  # type: ignore[no-untyped-def]
    """A log whose C1 holds `values` and whose other categories are missing."""
    rows = "".join(line(categories=[value, *[""] * 25]) + "\n" for value in values)
    return open_click_log(write(tmp_path / "log.tsv", rows), cache_dir=tmp_path / "cache", **options)


def test_hashing(tmp_path: Path) -> None:
    log = column_log(tmp_path, ["", "05db9164", "68fd1e64", "5DB9164"], vocabulary=HashVocabulary(1000))
    # Pinned: a hash that changes between versions would silently shuffle a trained table.
    assert log._categories[:, 0].tolist() == [0, 836, 165, 836]
    assert log._categories[:, 1].tolist() == [0] * 4  # missing
    assert log.vocabulary_sizes == [1000] * 26 and not log.vocabulary_is_private
    codes = np.arange(50_000)

    def encoded(vocabulary: HashVocabulary) -> np.ndarray:
        columns = vocabulary.for_columns([f"C{j}" for j in range(26)], [Form.HEX] * 26)
        return np.stack([column.encode(codes) for column in columns], 1)

    rows = encoded(HashVocabulary(list(range(2, 28))))
    assert rows.min() == 1 and rows.max(0).tolist() == list(range(1, 27))
    spread = np.bincount(encoded(HashVocabulary(101))[:, 3], minlength=101)[1:]
    assert spread.min() > 380 and spread.max() < 640
    assert not np.array_equal(rows[:, 25], encoded(HashVocabulary(27))[:, 0])  # one hash per feature


def test_counting(tmp_path: Path) -> None:
    values = ["c"] * 3 + ["a"] * 2 + ["b"] * 2 + ["d", "", "e"]
    log = column_log(tmp_path, values, vocabulary=CountVocabulary(2))
    assert log._categories[:, 0].tolist() == [2, 2, 2, 3, 3, 4, 4, 0, 1, 0]
    assert log._categories[:, 1].tolist() == [1] * 10
    assert log.vocabulary_sizes == [5, *[2] * 25]
    assert log.vocabulary_is_private and log.vocabulary.is_private  # nobody accounts for looking at the data


def test_a_counted_vocabulary_reads_another_log(tmp_path: Path) -> None:
    first = column_log(tmp_path / "1", ["a", "a", "b"], vocabulary=CountVocabulary(1))
    second = column_log(tmp_path / "2", ["b", "f", "", "a"], vocabulary=first.vocabulary)
    assert second._categories[:, 0].tolist() == [3, 0, 1, 2]
    assert second.vocabulary_sizes == first.vocabulary_sizes and second.vocabulary_is_private
    first.vocabulary.save(tmp_path / "vocabulary.json")
    again = GivenVocabulary(tmp_path / "vocabulary.json")
    assert again.is_private and again.options() == first.vocabulary.options()


def test_given(tmp_path: Path) -> None:
    values = {f"C{j + 1}": ["b", "a"] for j in range(26)}
    (tmp_path / "vocabulary.json").write_text(json.dumps(values))
    grouped = [{"b": 2, "a": 3, "c": 3}] + [["b", "a"]] * 25
    for given_values in (values, list(values.values()), tmp_path / "vocabulary.json", grouped):
        log = column_log(tmp_path, ["a", "0B", "", "d"], vocabulary=GivenVocabulary(given_values))
        assert log._categories[:, 0].tolist() == [3, 2, 1, 0]
        assert log.vocabulary_sizes == [4] * 26 and not log.vocabulary_is_private
    assert GivenVocabulary([[]] * 26).sizes == [2] * 26


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HashVocabulary(1), "at least 2"),
        (lambda: HashVocabulary([5, 5]), "one number or 26"),
        (lambda: CountVocabulary(0), "at least 1"),
        (lambda: GivenVocabulary([["a"]]), "26 features"),
        (lambda: GivenVocabulary({"C1": ["a"]}), "C1 to C26"),
        (lambda: GivenVocabulary([["a", "0A"]] + [[]] * 25), "C1 holds a value twice"),
        (lambda: GivenVocabulary([["-a"]] + [[]] * 25), "C1 holds '-a'"),
        (lambda: GivenVocabulary([{"a": 1}] + [[]] * 25), "rows of 2 or more"),
        (lambda: GivenVocabulary("no such file"), "cannot be read"),
        (lambda: GivenVocabulary("text"), "cannot be read"),
        (lambda: GivenVocabulary(["text"] + [[]] * 25), "neither a list"),
        (lambda: GivenVocabulary([[1]] + [[]] * 25), "write them in quotes"),
    ],
)
def test_impossible_vocabularies_are_refused(make, message, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        column_log(tmp_path, ["a"], vocabulary=make())


# As a data set ------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path):  # type: ignore[no-untyped-def]
    generated = generated_click_log(400, scale=0.01, days=4)
    files = write_click_log(generated, tmp_path / "day_{day}.tsv")
    return open_click_log(files, cache_dir=tmp_path / "cache", vocabulary=HashVocabulary(64))


def test_items_and_batches(log) -> None:  # type: ignore[no-untyped-def]
    integers, categories, label = log[-1]
    assert (integers.dtype, categories.dtype, label.dtype) == (torch.float32, torch.int64, torch.float32)
    assert (integers.shape, categories.shape, label.shape) == ((13,), (26,), ())
    where = [5, 399, 5, 0]
    batch = log.__getitems__(where)
    singly = [log[i] for i in where]
    for together, stacked in zip(log.collate(batch), log.collate(singly)):
        assert torch.equal(together, stacked) and len(together) == 4
    assert len(batch) == 4 and len(batch[1:3]) == 2 and torch.equal(batch[1][0], log[399][0])
    # The batch also reads as a list of items, so that torch's own collate works.
    assert torch.equal(torch.utils.data.default_collate(batch)[1], log.collate(batch)[1])
    with pytest.raises(IndexError):
        log[400]
    with pytest.raises(IndexError):
        log.__getitems__([400])
    assert sum(1 for _ in log) == 400


def test_empty_batches(log) -> None:  # type: ignore[no-untyped-def]
    for empty in (
        log.collate([]),
        log.collate(log.__getitems__([])),
        everything(log.subset([])),
    ):
        assert [tuple(part.shape) for part in empty] == [(0, 13), (0, 26), (0,)]
        assert [part.dtype for part in empty] == [torch.float32, torch.int64, torch.float32]


def test_missing_integers_read_as_zero(log) -> None:  # type: ignore[no-untyped-def]
    missing = torch.from_numpy(np.array(log._numbers) == MISSING_INTEGER)
    assert missing.any() and everything(log)[0][missing].eq(0).all()


def test_splits(log) -> None:  # type: ignore[no-untyped-def]
    train, test = log.split(0.1)
    assert (len(train), len(test)) == (360, 40) and torch.equal(test[0][1], log[360][1])
    train, test = log.split(0.25, by="random", seed=3)
    again = log.split(0.25, by="random", seed=3)[1]
    other = log.split(0.25, by="random", seed=4)[1]
    assert len(test) == 100 and np.array_equal(test._indices, again._indices)
    assert not np.array_equal(test._indices, other._indices)
    assert sorted([*train._indices, *test._indices]) == list(range(400))
    train, test = log.split([1, 3], by="periods")
    assert set(train.periods) == {0, 2} and set(test.periods) == {1, 3}
    assert test.vocabulary_sizes == log.vocabulary_sizes and test.summary == log.summary
    nested = test.split(0.5)[1].subset([-1, 0])
    assert nested.periods.tolist() == [3, 3] and torch.equal(nested[0][0], log[399][0])
    assert np.array_equal(nested.labels, log.labels[[399, 300]])


@pytest.mark.parametrize(
    "options",
    [
        {"held_out": 1.5},
        {"by": "day"},
        {"by": "random"},
        {"seed": 1},
        {"held_out": 0.1, "by": "periods"},
        {"held_out": [9], "by": "periods"},
        {"held_out": [1]},
    ],
)
def test_impossible_splits_are_refused(log, options) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="split"):
        log.split(**options)


def test_impossible_subsets_are_refused(log) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(IndexError):
        log.subset([400])
    with pytest.raises(ConfigError, match="mask"):
        log.subset(log.labels == 1)


def test_pickling_copies_no_rows(log) -> None:  # type: ignore[no-untyped-def]
    part = log.subset([7, 3])
    for original in (log, part):
        data = pickle.dumps(original)
        again = pickle.loads(data)
        assert len(data) < 1000 and isinstance(again._numbers, np.memmap)
        assert all(torch.equal(a, b) for a, b in zip(everything(again), everything(original)))


def test_workers(log) -> None:  # type: ignore[no-untyped-def]
    part = log.split(0.5)[1]
    loader = DataLoader(part, batch_size=64, num_workers=2, collate_fn=part.collate)
    batches = list(loader)
    assert [len(y) for _, _, y in batches] == [64, 64, 64, 8]
    for place, whole in enumerate(everything(part)):
        assert torch.equal(torch.cat([batch[place] for batch in batches]), whole)


# The real thing -----------------------------------------------------------------------------------


@pytest.fixture
def criteo() -> Path:
    folder = os.environ.get("SPARSEDP_DATA")
    if not folder or not (Path(folder) / "criteo").is_dir():
        pytest.skip("set SPARSEDP_DATA to a folder that holds criteo/kaggle_sample_137k.csv.gz")
    return Path(folder) / "criteo"


def test_the_kaggle_sample(criteo: Path, tmp_path: Path) -> None:
    path = criteo / "kaggle_sample_137k.csv.gz"
    log = open_click_log(path, cache_dir=tmp_path, vocabulary=CountVocabulary(1))
    assert len(log) == 137_139 and log.summary.malformed == 0
    assert log.labels.sum() == 35_213
    assert log.periods.min() == 0 and log.periods.max() == 82 and (np.diff(log.periods) >= 0).all()
    assert [size - 2 for size in log.vocabulary_sizes[:6]] == [616, 528, 61763, 32222, 154, 11]
    assert sum(log.vocabulary_sizes) - 2 * 26 == 316_179
    stored = np.array(log._numbers)
    assert np.allclose((stored == MISSING_INTEGER).mean(0)[[0, 1, 11]], [0.451, 0, 0.765], atol=5e-4)
    assert stored.max(0)[[0, 4]].tolist() == [425, 2071071]
    assert stored[:, 1].min() == -2
    # Row 2 is the most frequent value.
    counts = np.bincount(log._categories[:, 2], minlength=log.vocabulary_sizes[2])
    assert (np.diff(counts[2:]) <= 0).all() and counts[0] == 0


def test_the_terabyte_sample(criteo: Path, tmp_path: Path) -> None:
    log = open_click_log(criteo / "terabyte_day0_10k.tsv.gz", cache_dir=tmp_path, vocabulary=CountVocabulary(1))
    assert len(log) == 10_000 and log.labels.sum() == 265
    assert sum(log.vocabulary_sizes) - 2 * 26 == 31_655
