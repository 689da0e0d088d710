"""Files and frames with rows, as Arrow columns: text (CSV, TSV and their kind), Parquet, Arrow, gzip, zstd.

Text is cut into blocks at the ends of lines, and a block is parsed on its own, so that blocks can be parsed at once. A line with
another number of fields than the header is malformed; what a field means is settled later (`sparsedp.data.tablecolumns`).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet

from sparsedp.data.codes import Form
from sparsedp.errors import DataError, suggestion

_FIRST_BLOCK = 1 << 19  # small, so that a file of the wrong kind is refused at once
_BLOCK = 1 << 21
_LONGEST_LINE = 1 << 24
_BATCH_ROWS = 1 << 16
_BOM = b"\xef\xbb\xbf"
_SEPARATORS = "\t,;|"
_ZSTD, _GZIP, _PARQUET, _ARROW, _STREAM = b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_NOT_READ = {
    b"PK\x03\x04": "it is a zip file: unpack it, or write it as .gz or .zst",
    b"\xff\xfe": "it is text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "it is text in UTF-16: save it as UTF-8",
    b"FEA1": "it is Feather's first version, which few still read: write it again, as Parquet or Feather 2",
}
_LINE_END = re.compile(rb"\r\n|\n|\r")
# What some columns of a row are for; the others are known by their names.
LABEL, USER, TIME, PERIOD = "@label", "@user", "@time", "@period"
DICTIONARY = pa.dictionary(pa.int32(), pa.binary())

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
Separated = dict[str, int]  # from a column's name or use to its place in a row


@dataclass
class Piece:
    """Some rows: columns by their names, and by their uses LABEL, USER, TIME and PERIOD.

    `bad` holds (line, reason) of the first lines that are no rows; `lost` counts all of them.
    `lines_of(rows)` gives the lines at which rows stand in the file, from 1.
    """

    columns: dict[str, pa.Array]
    rows: int
    lines_of: Callable[[Sequence[int]], list[int]]
    bad: list[tuple[int, str]] = field(default_factory=list)
    lost: int = 0


@dataclass(frozen=True)
class Wanted:
    """Which columns are read: from what they are called here (a use, or their own name) to their names."""

    names: dict[str, str]
    numbers: Sequence[str] = ()  # those that are numbers in text files
    whole: Sequence[str] = ()  # of these, whole numbers of 32 bits
    plain: Sequence[str] = ()  # those that are not read as distinct values and their places
    columns: Sequence[str] = ()  # all of a file without a header
    mark: str = ""  # a first line with this name in it is a header even so
    separator: str | None = None
    quotes: bool | None = True  # None: fields stand in quotes unless tabs stand between them
    optional_periods: Sequence[str] = ()


@dataclass(frozen=True)
class Source:
    """One file, or a frame in memory. `columns` tells which of its columns are read; None: it is empty."""

    name: str
    columns: Separated | None
    pieces: Callable[[], Iterator[Callable[[], Piece]]]
    unit: str = "line"  # what `lines_of` counts


def find_sources(paths: Paths) -> list[Path]:
    """The files of a log in order: a file, a list, or a directory or glob pattern (day_2 before day_10).

    A directory is gone through with all that it holds, but for names that begin with "." or "_" and `*.json`, such as Spark's
    _SUCCESS: they tell of the data and are none. Of one that Hugging Face's `save_to_disk` wrote, these are the files that its
    state.json lists.
    """
    if not isinstance(paths, (str, os.PathLike)):
        named = [Path(path) for path in paths]
    elif has_magic(os.fspath(paths)) and not Path(paths).exists():
        named = sorted(map(Path, glob(os.fspath(paths), recursive=True)), key=_natural)
    else:
        named = [Path(paths)]
    sources = [file for path in named for file in (_files_within(path) if path.is_dir() else [path])]
    if not sources:
        raise DataError(f"no files found: {paths!r}")
    for path in sources:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    absolute = [path.absolute() for path in sources]
    patterned = isinstance(paths, (str, os.PathLike))  # which may match a folder and what is in it
    return list(dict.fromkeys(absolute)) if patterned else absolute


def _files_within(folder: Path) -> list[Path]:
    names = {path.name for path in folder.iterdir()}
    if "dataset_dict.json" in names:  # Hugging Face
        parts = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise DataError(
            f"{folder}: holds several data sets, which are not to be mixed: name one of its folders {parts}"
        )
    if {"state.json", "dataset_info.json"} <= names:
        try:
            return [
                folder / entry["filename"] for entry in json.loads((folder / "state.json").read_text())["_data_files"]
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / 'state.json'}: does not list the files of the data set: {error!r}") from error
    found: list[Path] = []
    for path in sorted(folder.iterdir(), key=_natural):
        if path.name.startswith((".", "_")) or path.suffix == ".json":
            continue
        if path.is_dir():
            found += _files_within(path)
        elif path.is_file():
            found.append(path)
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", str(path))]


def open_source(path: Path, wanted: Wanted) -> Source:
    """What is in a file, by its first bytes, not its name."""
    with open(path, "rb") as file:
        first = file.read(8)
    for magic, problem in _NOT_READ.items():
        if first.startswith(magic):
            raise DataError(f"{path}: cannot be read: {problem}")
    if first.startswith(_PARQUET):
        return _parquet(path, wanted)
    if first.startswith((_ARROW, _STREAM)):
        return _arrow(path, wanted, stream=first.startswith(_STREAM))
    return _text(path, wanted)


@dataclass(frozen=True)
class FirstRows:
    """The beginning of a file, to look at. Of text the names are None, a header is the first row, and fields are text, None where
    they are empty. `bad` holds (line, reason) of the lines among them that are no rows.
    """

    names: list[str] | None
    rows: list[list[Any]]
    complete: bool  # whether these are all
    bad: list[tuple[int, str]] = field(default_factory=list)


def first_rows(path: Path, rows: int = 5000, quotes: bool | None = True) -> FirstRows:
    """Read as in training, so that what is left out there is left out here. `quotes` as in `Wanted`."""
    with open(path, "rb") as file:
        first = file.read(8)
    for magic, problem in _NOT_READ.items():
        if first.startswith(magic):
            raise DataError(f"{path}: cannot be read: {problem}")
    if first.startswith(_PARQUET):
        with _arrow_errors(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
            batch = next(file.iter_batches(rows), None)
            names, total = file.schema_arrow.names, file.metadata.num_rows
    elif first.startswith((_ARROW, _STREAM)):
        with _arrow_errors(path, "Arrow"), pa.memory_map(str(path)) as mapped:
            reader = pyarrow.ipc.open_stream(mapped) if first.startswith(_STREAM) else pyarrow.ipc.open_file(mapped)
            table = reader.read_all()
            names, total = table.column_names, table.num_rows
            batch = next(iter(table.slice(0, rows).combine_chunks().to_batches()), None)
    else:
        return _first_rows_of_text(path, rows, quotes)
    columns = [] if batch is None else [column.to_pylist() for column in batch.columns]
    return FirstRows(list(names), [list(row) for row in zip(*columns)], total <= rows)


def _first_rows_of_text(path: Path, rows: int, quotes: bool | None) -> FirstRows:
    line = _first_line(path)
    if line is None:
        return FirstRows(None, [], True)
    separator = _separator_of(line, path)
    quotes = separator != "\t" if quotes is None else quotes
    fields = len(_fields(line, separator, quotes, path))
    columns = {str(place): place for place in range(fields)}
    wanted = Wanted(dict.fromkeys(columns, ""), plain=list(columns), quotes=quotes)
    with _open_text(path) as stream:
        blocks = _blocks(stream, path, _quoted_fields(separator) if quotes else None)
        block = next(blocks)
        complete = next(blocks, None) is None
    piece = _TextReader(_Layout(separator, fields, False, columns), wanted, kept=len(block)).parse(block, 0)
    taken = min(piece.rows, rows + 1)
    texts = [
        [None if value is None else value.decode() for value in piece.columns[use][:taken].to_pylist()]
        for use in columns
    ]
    last = piece.lines_of([taken - 1])[0] if taken else 0
    bad = piece.bad if taken == piece.rows else [(line, reason) for line, reason in piece.bad if line < last]
    return FirstRows(None, [list(row) for row in zip(*texts)], complete and taken == piece.rows, bad)


# ------------------------------------------------------------------ columns


def find_columns(names: Sequence[str], wanted: Wanted, where: str, *, header: bool = True) -> Separated:
    """The places of the schema's columns, by their names; if there is none that is spelled so, in small or capital letters."""
    exact: dict[str, list[int]] = {}
    folded: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        exact.setdefault(name, []).append(place)
        folded.setdefault(name.casefold(), []).append(place)
    what = "header" if header else "list of columns"
    lacking: list[str] = []

    def place_of(name: str) -> int:
        places = exact.get(name) or folded.get(name.casefold()) or []
        if len(places) > 1:
            raise DataError(f"{where}: the {what} repeats the columns {name.lower()}")
        if not places:
            lacking.append(name)
        return places[0] if places else -1

    found: Separated = {}
    for use, name in wanted.names.items():
        found[use] = place_of(name)
        if use == USER and found[use] < 0:
            if not header:
                raise DataError(f"{where}: there is no header, so that the user column {name!r} cannot be found")
            others = ", ".join(n for i, n in enumerate(names) if i not in found.values()) or "none"
            raise DataError(
                f"{where}: there is no user column {name!r} in the header; the others are {others}{suggestion(name, names)}"
            )
    if lacking:
        shown = ", ".join(names[:40]) + (", ..." if len(names) > 40 else "")
        hint = next(filter(None, (suggestion(name, names) for name in lacking)), "")
        raise DataError(f"{where}: the {what} lacks the columns {', '.join(lacking)}; it has {shown}{hint}")
    optional = [name for name in wanted.optional_periods if name in folded]
    if optional and PERIOD not in found:
        found[PERIOD] = folded[optional[0]][0]
    return found


# ------------------------------------------------------------------ text


@dataclass(frozen=True)
class _Layout:
    separator: str
    fields: int
    has_header: bool
    columns: Separated


class _TextReader:
    """Parses blocks of one file. Numbers are parsed with the block, until there is one that is none."""

    def __init__(self, layout: _Layout, wanted: Wanted, kept: int) -> None:
        self._layout, self._wanted, self._kept = layout, wanted, kept
        self._numbers = dict.fromkeys(wanted.numbers, pa.float64()) | dict.fromkeys(wanted.whole, pa.int32())
        self._are_numbers = True

    def parse(self, block: bytes, lines_before: int) -> Piece:
        table: pa.Table | None = None
        bad: list[tuple[int, int, int]] = []
        block, unreadable = _without_foreign(block)
        if self._are_numbers and not (self._wanted.whole and _may_hold_hex_prefix(block)):
            try:
                table, bad = self._parsed(block, self._numbers)
            except pa.ArrowInvalid:
                self._are_numbers = False
        if table is None:
            table, bad = self._parsed(block, {})
        columns = {use: _whole(table.column(f"{place}")) for use, place in self._layout.columns.items()}
        rows = _Rows(block, lines_before, bool(self._wanted.quotes), [row for row, _, _ in bad])
        named = [(lines_before + line, f"is not {Form.TEXT.says}") for line in unreadable[: self._kept]]
        expected = self._layout.fields
        named += [(rows.line(row), f"{fields} fields, expected {expected}") for row, fields, _ in bad[: self._kept]]
        lost = len(unreadable) + sum(extent for _, _, extent in bad)
        return Piece(columns, table.num_rows, rows.lines_of, sorted(named), lost)

    def _parsed(self, block: bytes, numbers: dict[str, pa.DataType]) -> tuple[pa.Table, list[tuple[int, int, int]]]:
        """The columns, and (row, fields, lines) of each row that has a wrong number of fields."""
        bad: list[tuple[int, int, int]] = []

        def note(row: Any) -> str:
            # A quote that is not closed swallows lines. They are all lost.
            bad.append((row.number - 1, row.actual_columns, 1 + row.text.rstrip("\r\n").count("\n")))
            return "skip"

        places = self._layout.columns
        table = pyarrow.csv.read_csv(
            pa.py_buffer(block),
            pyarrow.csv.ReadOptions(
                use_threads=False,
                block_size=len(block) + 1,
                column_names=[str(i) for i in range(self._layout.fields)],
            ),
            pyarrow.csv.ParseOptions(
                delimiter=self._layout.separator,
                quote_char='"' if self._wanted.quotes else False,
                newlines_in_values=bool(self._wanted.quotes),
                invalid_row_handler=note,
            ),
            pyarrow.csv.ConvertOptions(
                check_utf8=False,  # it was
                column_types=self._types(numbers),
                include_columns=list(dict.fromkeys(str(place) for place in places.values())),
                null_values=[""],
                strings_can_be_null=True,
            ),
        )
        return table, bad

    def _types(self, numbers: dict[str, pa.DataType]) -> dict[str, pa.DataType]:
        """Of each field that is read. One that is several things, and not always a number, is read as text."""
        types: dict[str, pa.DataType] = {}
        for use, place in self._layout.columns.items():
            kind = numbers.get(use, pa.binary() if use in self._wanted.plain else DICTIONARY)
            types[str(place)] = kind if types.get(str(place), kind) == kind else DICTIONARY
        return types


def _may_hold_hex_prefix(block: bytes) -> bool:
    """Arrow takes 0x1F for a whole number. A single byte is looked for ten times faster than two."""
    return (b"x" in block and b"0x" in block) or (b"X" in block and b"0X" in block)


def _without_foreign(block: bytes) -> tuple[bytes, list[int]]:
    """The text with lines that are not in UTF-8 made blank, and which these are, from 1."""
    try:
        if not block.isascii():
            block.decode()
        return block, []
    except UnicodeDecodeError:
        lines, foreign = block.split(b"\n"), []
        for i, line in enumerate(lines):
            try:
                line.decode()
            except UnicodeDecodeError:
                lines[i] = b""
                foreign.append(i + 1)
        return b"\n".join(lines), foreign


class _Rows:
    """At which lines the rows of a block stand. Counted when somebody asks."""

    def __init__(self, block: bytes, lines_before: int, quotes: bool, bad: Sequence[int]) -> None:
        self._block, self._before, self._quotes, self._bad = block, lines_before, quotes, set(bad)
        self._lines: list[int] | None = None

    def line(self, row: int) -> int:
        """Of a row among all that are not blank."""
        if self._lines is None:
            if self._quotes and b'"' in self._block:
                self._lines = self._of_quoted()
            else:
                self._lines = [i for i, line in enumerate(_LINE_END.split(self._block), 1) if line]
        return self._before + self._lines[min(row, len(self._lines) - 1)]

    def lines_of(self, rows: Sequence[int]) -> list[int]:
        """Of rows among those with the right number of fields."""
        if not len(rows):
            return []
        good, row, found = -1, -1, []
        for wanted in sorted(rows):
            while good < wanted:
                row += 1
                good += row not in self._bad
            found.append(self.line(row))
        return found

    def _of_quoted(self) -> list[int]:
        lines, inside, row_begins = [], False, True
        for i, line in enumerate(_LINE_END.split(self._block), 1):
            if not inside and line and row_begins:
                lines.append(i)
            inside ^= line.count(b'"') % 2 == 1
            row_begins = not inside
        return lines or [1]


def _text(path: Path, wanted: Wanted) -> Source:
    first_line = _first_line(path)
    if first_line is None:
        return Source(path.name, None, lambda: iter(()))  # an empty file: a day without rows
    separator = wanted.separator or _separator_of(first_line, path)
    if wanted.quotes is None:
        wanted = replace(wanted, quotes=separator != "\t")
    layout = _layout(first_line, separator, path, wanted)
    return Source(path.name, layout.columns, partial(_text_pieces, path, layout, wanted))


def _first_line(path: Path) -> str | None:
    """None of a file without any text."""
    with _open_text(path) as stream:
        line = _read_line(stream)
        if not line.strip():
            if any(piece.strip() for piece in iter(lambda: stream.read(_FIRST_BLOCK), b"")):
                raise DataError(f"{path}: the first line is blank; a header or a row is expected there")
            return None
    try:
        return line.rstrip(b"\r\n").decode()
    except UnicodeDecodeError:
        raise DataError(f"{path}, line 1: is not text in UTF-8. Save the file as UTF-8") from None


def _separator_of(line: str, path: Path) -> str:
    separator = guess_separator(line)
    if separator is None:
        raise DataError(f"{path}: the first line has neither tabs nor commas; this is not a table")
    return separator


def _fields(line: str, separator: str, quotes: bool | None, path: Path) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=separator)) if quotes else line.split(separator)
    except csv.Error as error:  # a very long field, or what looks like one
        raise DataError(f"{path}, line 1: cannot be read: {error}") from error


def _layout(line: str, separator: str, path: Path, wanted: Wanted) -> _Layout:
    names = [name.strip() for name in _fields(line, separator, wanted.quotes, path)]
    label = wanted.mark.casefold()
    if wanted.columns and label not in [name.casefold() for name in names]:
        columns = find_columns(wanted.columns, wanted, str(path), header=False)
        return _Layout(separator, len(wanted.columns), False, columns)
    try:
        columns = find_columns(names, wanted, str(path))
    except DataError as error:
        if wanted.columns:
            raise
        end = "" if str(error).endswith("?") else "."
        hint = f"{end} If that line is a row and no header, name the columns in order: data.columns"
        raise DataError(f"{error}{hint if label not in map(str.casefold, names) else ''}") from None
    return _Layout(separator, len(names), True, columns)


def guess_separator(line: str) -> str | None:
    """That of tabs, commas, semicolons and bars that a line has most of, outside of quotes; None if it has none."""
    bare = re.sub(r'"[^"]*"', "", line)
    most = max(_SEPARATORS, key=bare.count)
    return most if bare.count(most) else None


def _text_pieces(path: Path, layout: _Layout, wanted: Wanted, kept: int = 20) -> Iterator[Callable[[], Piece]]:
    reader = _TextReader(layout, wanted, kept)
    quoted = _quoted_fields(layout.separator) if wanted.quotes else None
    lines_before = 0
    with _open_text(path) as stream:
        if layout.has_header:
            _read_line(stream)
            lines_before = 1
        for block in _blocks(stream, path, quoted, lines_before):
            yield partial(reader.parse, block, lines_before)
            lines_before += block.count(b"\n")


def _blocks(stream: BinaryIO, path: Path, quoted: re.Pattern[bytes] | None, lines_before: int = 0) -> Iterator[bytes]:
    """Pieces of the text that end with a line, and not within quotes. `quoted` finds fields in quotes, if there may be any."""
    carry = b""
    size = _FIRST_BLOCK
    while piece := stream.read(size):
        size = _BLOCK
        if quoted is None and (end := piece.rfind(b"\n") + 1):  # one copy of the text, not two
            yield b"".join((carry, memoryview(piece)[:end]))
            carry = piece[end:]
            continue
        piece = carry + piece
        end = _end_of_rows(piece, quoted)
        if end == 0 and len(piece) > max(_LONGEST_LINE, size):
            raise DataError(f"{path}: a line of more than {max(_LONGEST_LINE, size)} bytes; this is not a table")
        if end:
            yield piece[:end]
            lines_before += piece.count(b"\n", 0, end)
        carry = piece[end:]
    if quoted is not None and (opened := _open_quote(carry, quoted)) is not None:
        line = lines_before + carry.count(b"\n", 0, opened) + 1
        raise DataError(
            f"{path}, line {line}: a quote begins there that is never closed, so that the rest would be one field"
        )
    if carry.strip(b"\r\n"):
        yield carry + b"\n"


def _quoted_fields(separator: str) -> re.Pattern[bytes]:
    """Finds fields in quotes, which begin with one; group 1 is the quote that closes it."""
    return re.compile(rb"(?:\A|(?<=[\r\n" + re.escape(separator.encode()) + rb']))"(?:[^"]+|"")*("|\Z)')


def _open_quote(text: bytes, quoted: re.Pattern[bytes]) -> int | None:
    """Where a field in quotes begins that does not end."""
    return next((m.start() for m in quoted.finditer(text) if not m[1]), None) if b'"' in text else None


def _end_of_rows(text: bytes, quoted: re.Pattern[bytes] | None) -> int:
    """Behind the last line that does not end within quotes; 0 if there is none."""
    end = text.rfind(b"\n") + 1
    if quoted is None or text.count(b'"', 0, end) % 2 == 0:
        return end
    for field_in_quotes in quoted.finditer(text):  # there may also be quotes that stand within fields, and mean nothing
        if field_in_quotes.start() < end and (end < field_in_quotes.end() or not field_in_quotes[1]):
            return text.rfind(b"\n", 0, field_in_quotes.start()) + 1
    return end


def _read_line(stream: BinaryIO) -> bytes:
    return stream.readline(_LONGEST_LINE)


@contextmanager
def _open_text(path: Path) -> Iterator[BinaryIO]:
    """A plain or compressed file without a byte order mark."""
    with open(path, "rb") as file:
        first = file.read(4)
    kind = "gzip" if first.startswith(_GZIP) else "zstd" if first == _ZSTD else None
    try:
        with ExitStack() as stack:
            stream: Any = stack.enter_context((gzip.open if kind == "gzip" else open)(path, "rb"))
            if kind == "zstd":
                inner = stack.enter_context(pa.CompressedInputStream(stream, "zstd"))
                stream = stack.enter_context(io.BufferedReader(inner, 1 << 16))
            if stream.peek(len(_BOM)).startswith(_BOM):
                stream.read(len(_BOM))
            yield stream
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: the gzip file is damaged or cut short: {error}") from error
    except (pa.ArrowException, OSError) as error:
        if kind is None or isinstance(error, FileNotFoundError):
            raise
        raise DataError(f"{path}: the {kind} file is damaged or cut short: {error}") from error


# ------------------------------------------------------------------ Parquet, Arrow, frames


def _parquet(path: Path, wanted: Wanted) -> Source:
    with _arrow_errors(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
        names = file.schema_arrow.names
        empty = file.metadata.num_rows == 0
    places = find_columns(names, wanted, str(path))
    used = _used(names, places)

    def batches() -> Iterator[pa.RecordBatch]:
        with _arrow_errors(path, "Parquet"), pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(_BATCH_ROWS, columns=used)

    return Source(path.name, None if empty else places, partial(_pieces_of, batches, names, places), "row")


def _arrow(path: Path, wanted: Wanted, stream: bool) -> Source:
    def batches(used: list[str]) -> Iterator[pa.RecordBatch]:
        with _arrow_errors(path, "Arrow"), pa.memory_map(str(path)) as file:
            reader = pyarrow.ipc.open_stream(file) if stream else pyarrow.ipc.open_file(file)
            if stream:
                yield from (batch.select(used) for batch in reader)
            else:
                yield from (reader.get_batch(i).select(used) for i in range(reader.num_record_batches))

    with _arrow_errors(path, "Arrow"), pa.memory_map(str(path)) as file:
        opened = pyarrow.ipc.open_stream(file) if stream else pyarrow.ipc.open_file(file)
        names = opened.schema.names
    places = find_columns(names, wanted, str(path))
    return Source(path.name, places, partial(_pieces_of, partial(batches, _used(names, places)), names, places), "row")


def open_frame(frame: Any, wanted: Wanted) -> Source:
    """A pandas or polars frame, a Hugging Face data set, or an Arrow table."""
    if hasattr(frame, "with_format"):  # Hugging Face
        if frame.column_names is None or not hasattr(frame, "__len__"):
            raise DataError(
                f"the {type(frame).__name__} is a stream, which is neither sampled from nor read twice: load the data set "
                "without streaming=True, or save it as Parquet"
            )
        if isinstance(frame.column_names, dict):
            parts = ", ".join(map(repr, frame.column_names))
            raise DataError(
                f"the {type(frame).__name__} holds several data sets: give one of {parts}, as in data['train']"
            )
        names, taken = list(frame.column_names), frame.with_format("arrow")

        def batches(used: list[str]) -> Iterator[pa.RecordBatch]:
            for table in taken.iter(_BATCH_ROWS):
                yield from table.select(used).to_batches()
    else:
        table = as_table(frame)
        names = table.column_names

        def batches(used: list[str]) -> Iterator[pa.RecordBatch]:
            yield from table.select(used).to_batches(_BATCH_ROWS)

    where = f"the {type(frame).__name__}"
    places = find_columns([str(name) for name in names], wanted, where)
    return Source(where, places, partial(_pieces_of, partial(batches, _used(names, places)), names, places), "row")


def as_table(frame: Any) -> pa.Table:
    """A frame as an Arrow table, as far as possible without a copy."""
    if isinstance(frame, pa.Table):
        return frame
    try:
        if hasattr(frame, "iloc"):  # pandas
            return pa.Table.from_pandas(frame, preserve_index=False)
        if hasattr(frame, "__arrow_c_stream__") or isinstance(frame, dict):
            return pa.table(frame)
    except (pa.ArrowException, TypeError) as error:
        raise DataError(f"the {type(frame).__name__} cannot be made into an Arrow table: {error}") from error
    collect = ": collect() it first" if hasattr(frame, "collect") else ""  # polars' LazyFrame
    raise DataError(
        "expected files, a pandas or polars frame, a Hugging Face data set or an Arrow table; got "
        f"{type(frame).__name__}{collect}"
    )


def _used(names: Sequence[str], places: Separated) -> list[str]:
    return list(dict.fromkeys(names[place] for place in places.values()))


def _pieces_of(
    batches: Callable[[], Iterator[pa.RecordBatch]], names: Sequence[str], places: Separated
) -> Iterator[Callable[[], Piece]]:
    before = 0
    for whole in batches():
        for begin in range(0, whole.num_rows, _BATCH_ROWS):
            batch = whole.slice(begin, _BATCH_ROWS)
            yield partial(_piece_of, batch, names, places, before)
            before += batch.num_rows


def _piece_of(batch: pa.RecordBatch, names: Sequence[str], places: Separated, before: int) -> Piece:
    columns = {use: batch.column(names[place]) for use, place in places.items()}
    return Piece(columns, batch.num_rows, lambda rows: [before + row + 1 for row in sorted(rows)])


@contextmanager
def _arrow_errors(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {what}: {' '.join(str(error).split())}") from error


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column in one piece."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
