"""Arrow columns as the numbers that a model takes, and which rows are malformed: of every row or none, whatever their type."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sparsedp.data.codes import MISSING, Form, codes_of
from sparsedp.data.tablefiles import DICTIONARY, LABEL, PERIOD, TIME, USER, Piece
from sparsedp.data.tableschema import NumericColumn, SequenceColumn, TableSchema, TextColumn
from sparsedp.data.vocabulary import ColumnVocabulary, HashedColumn, ValueCounter
from sparsedp.sampling.periods import SECONDS

MISSING_INTEGER = -(2**31)  # how a missing whole number is stored
NEITHER = "is neither 0 nor 1"
NO_TIME = "is neither seconds since 1970 nor a date as in 2026-03-01 or 2026-03-01T12:00:00"
IN_NO_LIST = "is neither in data.positive nor in data.negative"
_MISSING_TEXTS = {"", "na", "n/a", "nan", "null", "none", "\\n", "?", "-", "#n/a"}
_TRUE, _FALSE = {"true", "t"}, {"false", "f"}
_USER_DIGITS = 18
_HASHED_USER = np.int64(1) << 62  # users that are no numbers stand above those that are
_EARLIEST = np.int64(-(2**62))
_TOKEN_MARKS = " \t'\"[](){}"


@dataclass
class Values:
    """Some values of a column by what is distinct about them: value `places[i]` of `distinct`, MISSING for none.

    `places` is [rows], or [rows, length] where a row has many.
    """

    distinct: pa.Array  # binary
    places: np.ndarray  # int64


@dataclass
class Counted:
    """Values of a column whose vocabulary is being counted."""

    values: Values
    codes: np.ndarray
    counts: np.ndarray

    def number(self, counter: ValueCounter) -> np.ndarray:
        """The counter's numbers, MISSING where there is no value."""
        numbers = counter.count(self.codes, self.counts, self.values.distinct)
        return np.append(numbers, np.int32(MISSING))[self.values.places]

    def keep(self, rows: np.ndarray, form: Form) -> Counted:
        """Those of some rows, with counts that are theirs."""
        places = self.values.places[rows]
        return count(Values(self.values.distinct, places), self.codes)


@dataclass
class Encoded:
    """The rows of a piece that are not malformed."""

    labels: np.ndarray  # uint8 [n]
    numbers: np.ndarray  # float32 [n, numbers]; int32 where they are whole
    rows: dict[str, np.ndarray | Counted]  # of each column with a vocabulary: int32 [n] or [n, length]
    buckets: np.ndarray  # int32 [n, bucketed columns]
    users: np.ndarray | None = None  # int64 [n]
    times: np.ndarray | None = None  # int64 [n], seconds since 1970
    periods: np.ndarray | None = None  # int32 [n]
    bad: list[tuple[int, str]] = field(default_factory=list)  # (line, reason) of malformed rows, the first ones
    malformed: int = 0


def encode(piece: Piece, schema: TableSchema, vocabularies: dict[str, ColumnVocabulary], kept: int) -> Encoded:
    """The rows of a piece as numbers; up to `kept` malformed ones are named."""
    faults = Faults(piece.rows)
    columns = piece.columns
    labels = _labels(columns[LABEL], schema, faults)
    numbers = np.empty((piece.rows, len(schema.numbers)), np.int32 if schema.are_whole else np.float32)
    for j, column in enumerate(schema.numbers):
        numbers[:, j] = _transformed(columns[column.name], column, faults)
    buckets = np.empty((piece.rows, len(schema.bucketed)), np.int32)
    for j, column in enumerate(schema.bucketed):
        x = _numbers(columns[column.name], column.name, faults)
        place = np.searchsorted(np.array(column.boundaries), x, side="right") + 1
        buckets[:, j] = np.where(np.isnan(x), 0, place)
    rows: dict[str, np.ndarray | Counted] = {}
    values: dict[str, Values] = {}
    for c in schema.categorical:
        cells, hashed = columns[c.name], vocabularies[c.name]
        if c.form is Form.HEX and isinstance(hashed, HashedColumn) and cells.type == pa.binary():
            rows[c.name], no_numbers = hashed.encode_hex(cells)
            if no_numbers is not None:
                faults.add(no_numbers, f"{c.name} is not {c.form.says}")
        else:
            values[c.name] = distinct_values(cells)
    values |= {c.name: _of_sequence(columns[c.name], c, faults) for c in schema.sequence}
    values |= {c.name: _of_words(columns[c.name], c) for c in schema.text}
    forms = {c.name: c.form for c in schema.categorical}
    for name, found in values.items():
        form = forms.get(name, Form.TEXT)
        codes, wrong = codes_of(found.distinct, form)
        if wrong.any():
            faults.add(np.append(wrong, False)[found.places], f"{name} is not {form.says}")
            codes = np.where(wrong, 0, codes)
        vocabulary = vocabularies[name]
        if isinstance(vocabulary, ValueCounter):
            rows[name] = count(found, codes)
        else:
            row_of = np.append(vocabulary.encode(codes), np.int32(vocabulary.missing_row))
            rows[name] = row_of[found.places]
    out = Encoded(labels, numbers, rows, buckets)
    if USER in columns:
        out.users = _users(columns[USER], schema, faults)
    if TIME in columns:
        out.times = times_of(columns[TIME], schema.time or "time", faults)
    if PERIOD in columns:
        periods = _numbers(columns[PERIOD], schema.period or "period", faults)
        name = schema.period or "period"
        faults.add(~_fits(periods), f"{name} is not a whole number of 32 bits")
        out.periods = np.where(_fits(periods), periods, 0).astype(np.int32)
    elif out.times is not None:
        out.periods = (out.times // SECONDS[schema.every]).astype(np.int32)
    return _without_faults(out, faults, piece, kept)


def count(values: Values, codes: np.ndarray) -> Counted:
    present = values.places[values.places != MISSING]
    counts = np.bincount(present, minlength=len(values.distinct))
    seen = counts > 0
    if seen.all():
        return Counted(values, codes, counts)
    place_of = np.append(np.cumsum(seen) - 1, MISSING)
    distinct = values.distinct.filter(pa.array(seen))
    return Counted(Values(distinct, place_of[values.places]), codes[seen], counts[seen])


class Faults:
    """Which rows are malformed, each with the first reason that was found."""

    def __init__(self, rows: int) -> None:
        self.wrong: np.ndarray = np.zeros(rows, bool)
        self._reasons: list[tuple[np.ndarray, str]] = []

    def add(self, wrong: np.ndarray, reason: str) -> None:
        """`wrong` is [rows] or [rows, length]."""
        rows = wrong if wrong.ndim == 1 else wrong.any(1)
        if rows.any():
            self._reasons.append((np.flatnonzero(rows & ~self.wrong), reason))
            self.wrong |= rows

    def first(self, kept: int) -> list[tuple[int, str]]:
        """(row, reason) of the first rows."""
        found = [(row, reason) for rows, reason in self._reasons for row in rows[:kept].tolist()]
        return sorted(found)[:kept]


def _without_faults(out: Encoded, faults: Faults, piece: Piece, kept: int) -> Encoded:
    wrong = int(np.count_nonzero(faults.wrong))
    out.malformed = piece.lost + wrong
    out.bad = piece.bad[:kept]
    if wrong:
        named = faults.first(kept)
        lines = piece.lines_of([row for row, _ in named])
        out.bad = sorted([*out.bad, *((line, reason) for line, (_, reason) in zip(lines, named))])[:kept]
        good = np.flatnonzero(~faults.wrong)
        for name in ("labels", "numbers", "buckets", "users", "times", "periods"):
            array = getattr(out, name)
            if array is not None:
                setattr(out, name, array[good])
        out.rows = {
            name: rows.keep(good, Form.TEXT) if isinstance(rows, Counted) else rows[good]
            for name, rows in out.rows.items()
        }
    return out


# ------------------------------------------------------------------ labels, numbers, users, times


def _labels(column: pa.Array, schema: TableSchema, faults: Faults) -> np.ndarray:
    if schema.positive:
        values = distinct_values(column)
        means_one = set(schema.positive)
        texts = [_text_of(value) for value in values.distinct.to_pylist()]
        labels = np.array([text in means_one for text in texts] + [False])
        if schema.negative:
            known = means_one | set(schema.negative)
            unknown = np.array([text not in known for text in texts] + [False])
            faults.add(unknown[values.places], f"{schema.label} {IN_NO_LIST}")
        faults.add(values.places == MISSING, f"{schema.label} is empty")
        return labels[values.places].astype(np.uint8)
    if schema.label_above is not None:
        x = _numbers(column, schema.label, faults)
        faults.add(np.isnan(x), f"{schema.label} is empty")
        return (x > schema.label_above).astype(np.uint8)
    x = _numbers(column, schema.label, faults, _as_label, NEITHER)
    faults.add((x != 0) & (x != 1), f"{schema.label} {NEITHER}")
    return (x == 1).astype(np.uint8)


def _as_label(text: str) -> float:
    folded = text.strip().lower()
    return 1.0 if folded in _TRUE else 0.0 if folded in _FALSE else as_number(text)


def is_missing(text: str) -> bool:
    """Whether a text stands for a number that is missing."""
    return text.strip().lower() in _MISSING_TEXTS


def as_number(text: str) -> float:
    """NaN where it is missing; ValueError where it is no number."""
    if is_missing(text):
        return np.nan
    if "_" in text:
        raise ValueError
    return float(text)


def _numbers(
    column: pa.Array,
    name: str,
    faults: Faults,
    parse: Callable[[str], float] = as_number,
    otherwise: str = "is not a number",
) -> np.ndarray:
    """float64 [n]: NaN where it is missing, or malformed."""
    kind = column.type
    if (
        pa.types.is_boolean(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_decimal(kind)
    ):
        x = _plain(column.cast(pa.float64(), safe=False), np.nan)
    else:
        values = distinct_values(column)
        parsed = np.full(len(values.distinct) + 1, np.nan)
        wrong = np.zeros(len(parsed), bool)
        for i, value in enumerate(values.distinct.to_pylist()):
            try:
                parsed[i] = parse(_text_of(value))
            except ValueError:
                wrong[i] = True
        x = parsed[values.places]
        faults.add(wrong[values.places], f"{name} {otherwise}")
    infinite = np.isinf(x)
    if infinite.any():
        faults.add(infinite, f"{name} is infinite")
        x = np.where(infinite, np.nan, x)
    return x


def _plain(column: pa.Array, missing: float) -> np.ndarray:
    """The values of a column of float64 or int32, with `missing` where there is none. Arrow's own way loads pandas."""
    n = len(column)
    validity, data = column.buffers()
    kind = np.float64 if column.type == pa.float64() else np.int32
    values: np.ndarray = np.frombuffer(data, kind)[column.offset : column.offset + n]
    if not column.null_count:
        return values
    present = np.unpackbits(np.frombuffer(validity, np.uint8), count=column.offset + n, bitorder="little")
    return np.where(present[column.offset :].view(bool), values, kind(missing))


def _fits(x: np.ndarray) -> np.ndarray:
    """Which are whole numbers of 32 bits. The lowest one stands for a missing one."""
    with np.errstate(invalid="ignore"):
        return (np.abs(x) < 2**31) & (x == np.floor(x))


def _transformed(column: pa.Array, spec: NumericColumn, faults: Faults) -> np.ndarray:
    if spec.transform == "whole" and column.type == pa.int32():
        return _plain(column, MISSING_INTEGER)
    x = _numbers(
        column,
        spec.name,
        faults,
        otherwise="is not a " + ("whole number of 32 bits" if spec.transform == "whole" else "number"),
    )
    if spec.transform == "whole":
        missing, fits = np.isnan(x), _fits(x)
        faults.add(~missing & ~fits, f"{spec.name} is not a whole number of 32 bits")
        return np.where(fits, x, MISSING_INTEGER).astype(np.int32)
    if spec.transform == "log":
        x = np.sign(x) * np.log1p(np.abs(x))
    elif spec.transform == "scale":
        assert spec.low is not None and spec.high is not None
        x = 2 * (np.clip(x, spec.low, spec.high) - spec.low) / (spec.high - spec.low) - 1
    with np.errstate(over="ignore"):
        out = x.astype(np.float32)
    faults.add(np.isinf(out), f"{spec.name} is too large for 32 bits")
    return out


def _users(column: pa.Array, schema: TableSchema, faults: Faults) -> np.ndarray:
    """A number of at most 18 digits stands for itself, and any other text for a hash of it."""
    values = distinct_values(column)
    faults.add(values.places == MISSING, f"{schema.user} is empty")
    codes = codes_of(values.distinct, Form.TEXT)[0]
    ids = np.zeros(len(codes) + 1, np.int64)
    wrong = np.zeros(len(ids), bool)
    for i, value in enumerate(values.distinct.to_pylist()):
        whole = value.isdigit() and len(value) <= _USER_DIGITS
        wrong[i] = schema.whole_users and not whole
        plain = whole and (schema.whole_users or value == b"0" or not value.startswith(b"0"))
        ids[i] = int(value) if plain else (codes[i] >> np.int64(1)) | _HASHED_USER
    faults.add(wrong[values.places], f"{schema.user} is not a whole number of at most {_USER_DIGITS} digits")
    return ids[values.places]


def times_of(column: pa.Array, name: str, faults: Faults) -> np.ndarray:
    """Seconds since 1970, in UTC where nothing else is said."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        seconds = column.cast(pa.timestamp("s"), safe=False).cast(pa.int64())
        missing = seconds.is_null().to_numpy(zero_copy_only=False)
        faults.add(missing, f"{name} is empty")
        return seconds.fill_null(0).to_numpy(zero_copy_only=False)
    values = distinct_values(column)
    parsed = np.array([time_of(_text_of(value)) for value in values.distinct.to_pylist()] + [_EARLIEST], np.int64)
    out = parsed[values.places]
    faults.add(out == _EARLIEST, f"{name} {NO_TIME}")
    return np.where(out == _EARLIEST, 0, out)


def time_of(text: str) -> int:
    """Seconds since 1970 of a date, or of a number of seconds, milliseconds, micro- or nanoseconds, by its size."""
    try:
        number = float(text)
    except ValueError:
        try:
            moment = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
        except ValueError:
            return int(_EARLIEST)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=timezone.utc)
        return int(moment.timestamp() // 1)
    if not np.isfinite(number) or abs(number) >= 1e20:
        return int(_EARLIEST)
    while abs(number) >= 1e11:  # the year 5138, in seconds
        number /= 1000
    return int(number // 1)


def time_of_text(text: str) -> int | None:
    """Seconds since 1970; None if the text is no time."""
    seconds = time_of(text)
    return None if seconds == _EARLIEST else seconds


def period_of(text: str, every: str) -> int | None:
    """The number of the period that a date is in; None if it is no date."""
    seconds = time_of_text(text)
    return None if seconds is None else seconds // SECONDS[every]


# ------------------------------------------------------------------ distinct values


def distinct_values(column: pa.Array) -> Values:
    """The distinct values as text: a whole number is spelled alike, whether its type is integer or floating."""
    if column.type != DICTIONARY:
        column = _as_text(column)
        # An empty text is a missing value, whatever wrote it.
        column = pc.if_else(pc.equal(pc.binary_length(column), 0), None, column).dictionary_encode()
    places = column.indices.fill_null(MISSING) if column.null_count else column.indices
    return Values(column.dictionary, places.to_numpy(zero_copy_only=False))


def _as_text(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _as_text(column.dictionary_decode())
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_nan(column), None, column)
        x = column.drop_null()
        if pc.all(pc.equal(x, pc.floor(x))).as_py() is not False and not len(x.filter(pc.greater(pc.abs(x), 2.0**62))):
            column = column.cast(pa.int64())
    return column.cast(pa.string()).cast(pa.binary()) if kind != pa.binary() else column


def _text_of(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _of_sequence(column: pa.Array, spec: SequenceColumn, faults: Faults) -> Values:
    """The last `length` values of each row."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type) or pa.types.is_fixed_size_list(column.type):
        return _last_of_lists(column, None, spec.length)
    cells = distinct_values(column)
    wrong = codes_of(cells.distinct, Form.TEXT)[1]
    if wrong.any():
        faults.add(np.append(wrong, False)[cells.places], f"{spec.name} is not {Form.TEXT.says}")
        texts = pa.array([_text_of(value) for value in cells.distinct.to_pylist()], pa.string())
    else:
        texts = cells.distinct.cast(pa.string())
    texts = pc.utf8_trim(texts, characters=_TOKEN_MARKS)
    lists = pc.utf8_split_whitespace(texts) if spec.separator is None else pc.split_pattern(texts, spec.separator)
    return _last_of_lists(lists, cells.places, spec.length)


def _last_of_lists(lists: pa.Array, cells: np.ndarray | None, length: int) -> Values:
    """The last values of lists, [lists, length]; `cells` says which list each row has."""
    sizes = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    tokens = lists.flatten()
    if pa.types.is_string(tokens.type):
        tokens = pc.utf8_trim(tokens, characters=_TOKEN_MARKS)
    values = distinct_values(tokens)
    present = values.places != MISSING
    owner = np.repeat(np.arange(len(sizes)), sizes)[present]
    return Values(values.distinct, _padded(values.places[present], owner, len(sizes), length, last=True, cells=cells))


def _of_words(column: pa.Array, spec: TextColumn) -> Values:
    """The first `length` words of each row."""
    cells = distinct_values(column)
    words = [re.findall(r"\w+", _text_of(text).lower())[: spec.length] for text in cells.distinct.to_pylist()]
    owner = np.repeat(np.arange(len(words)), [len(split) for split in words])
    values = distinct_values(pa.array([word for split in words for word in split], pa.string()))
    return Values(
        values.distinct, _padded(values.places, owner, len(words), spec.length, last=False, cells=cells.places)
    )


def _padded(
    places: np.ndarray, owner: np.ndarray, owners: int, length: int, *, last: bool, cells: np.ndarray | None
) -> np.ndarray:
    """The first or last values of each owner, [owners, length], MISSING behind; rows are owners in order, so ordered by owner."""
    sizes = np.bincount(owner, minlength=owners) if len(owner) else np.zeros(owners, np.int64)
    ends = np.cumsum(sizes)
    at = np.arange(len(owner)) - (ends - sizes)[owner]
    if last:
        at = at - np.maximum(sizes - length, 0)[owner]
    kept = (at >= 0) & (at < length)
    out = np.full((owners + 1, length), MISSING, np.int64)
    out[owner[kept], at[kept]] = places[kept]
    return out[:-1] if cells is None else out[cells]
