"""What the columns of a file are, guessed from its header and its first rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sparsedp.data.tablecache import KEPT_MALFORMED, MalformedLine, ReadSummary
from sparsedp.data.tablecolumns import NO_TIME, as_number, is_missing, time_of_text
from sparsedp.data.tablefiles import first_rows
from sparsedp.errors import ConfigError, DataError, suggestion

Kind = Literal["label", "categorical", "numeric", "sequence", "text", "user", "item", "time", "nothing"]
_NEEDED: tuple[Kind, ...] = ("label", "user", "item", "time")  # of a column to learn from, a value may be missing
_LABELS = ("label", "click", "clicked", "is_click", "target", "y", "outcome", "converted", "conversion", "purchased", "bought",
           "response", "liked", "churn", "is_fraud", "class")  # fmt: skip
_CLASSES = ("sentiment", "category", "topic", "intent", "emotion", "isduplicate", "entailment", "relation")
_RATINGS = ("rating", "stars", "score", "grade", "overall")
_USERS = ("user", "userid", "uid", "customer", "customerid", "member", "memberid", "visitor", "visitorid", "reviewerid", "client",
          "clientid", "account", "accountid", "person", "personid", "patient", "patientid", "who")  # fmt: skip
_ITEMS = ("item", "itemid", "movieid", "asin", "productid", "product", "sku", "articleid", "article", "songid", "trackid",
          "venueid", "poi", "bookid", "isbn", "what")  # fmt: skip
_TIMES = (
    "time",
    "timestamp",
    "ts",
    "date",
    "datetime",
    "day",
    "when",
    "createdat",
    "unixreviewtime",
    "eventtime",
    "at",
)
_ACTORS: dict[Kind, tuple[str, ...]] = {"user": _USERS, "item": _ITEMS}
_ZERO_ONE = {"0", "1", "0.0", "1.0", "true", "false"}
_POSITIVE = (
    "yes",
    "y",
    "true",
    "t",
    "click",
    "clicked",
    "positive",
    "pos",
    "good",
    "buy",
    "bought",
    "spam",
    "ja",
    "oui",
    "si",
    "sí",
)
_ONE = {"1", "1.0", "true"}
_BINARY = [{"0", "1"}, {"true", "false"}, {"0.0", "1.0"}]
_YES_OR_NO = [{"yes", "no"}, {"y", "n"}, {"t", "f"}, {"ja", "nein"}, {"oui", "non"}, {"si", "no"}, {"sí", "no"}]
_FEW, _MANY, _COUNTED = 12, 1000, 20
_STRANGE = 100  # one value in so many may be another kind of value than the rest, and at least one of _COUNTED
_MOST_BAD = 0.5  # a file of which more lines are no rows is something else than it looks
_OFTEN = 50  # a value occurs often if one in so many is it
_SEPARATORS = ("|", ";", ",", " ")
_DATE = re.compile(r"\s*(\d{1,2}[./-]\d{1,2}[./-]\d{4}|\d{4}[./]\d{1,2}[./]\d{1,2})([ T,].*)?")
_GROUPED = re.compile(r"\s*[-+]?(\d{1,3}(,\d{3})+(\.\d+)?|\d{1,3}(\.\d{3})+(,\d+)?)\s*")
_FRACTION = re.compile(r",\d{3}\.\d|\.\d{3},\d")


@dataclass
class Guess:
    """A column as what, and why; `options` are those of its configuration. `lost` rows are left out because of it: nothing that
    it is read as fits them.
    """

    name: str
    kind: Kind
    why: str
    options: dict[str, Any] = field(default_factory=dict)
    lost: int = 0


@dataclass
class Sample:
    """The first rows of a file as text, None where a value is missing; lists stay lists."""

    names: list[str]
    has_header: bool
    rows: list[list[Any]]
    complete: bool  # whether these are all of the file
    bad: list[MalformedLine] = field(default_factory=list)  # lines among them that are no rows
    quotes: bool = False  # whether fields stand in quotes although tabs stand between them
    rows_in_all: int = 0  # about how many rows all files have, where somebody estimated it

    def column(self, place: int) -> list[Any]:
        return [row[place] for row in self.rows if row[place] not in (None, "", [])]

    @property
    def columns(self) -> dict[str, list[Any]]:
        """The values of each column that has a name: another one, such as the index that pandas writes, nobody can ask for."""
        return {name: self.column(i) for i, name in enumerate(self.names) if name}

    @property
    def unnamed(self) -> int:
        return self.names.count("")


def read_sample(path: Path, quotes: bool | None = True) -> Sample:
    """The header and the first rows; None for `quotes`: fields stand in quotes unless tabs stand between them."""
    first = first_rows(path, quotes=quotes)
    bad = [MalformedLine(path.name, line, reason) for line, reason in first.bad]
    if first.names is None:
        if not first.rows:
            raise ConfigError(f"{path}: is empty")
        fields, rows = [(name or "").strip() for name in first.rows[0]], first.rows[1:]
        header = _is_header(fields, rows, path)
        names = fields if header else [f"column_{i + 1}" for i in range(len(fields))]
        sample = Sample(names, header, rows if header else first.rows, first.complete, bad)
    else:
        sample = Sample(first.names, True, first.rows, first.complete)
    ReadSummary(len(sample.rows), len(bad), bad[:KEPT_MALFORMED]).check(_MOST_BAD)
    if not sample.rows:
        raise ConfigError(f"{path}: there are no rows under the header")
    return sample


def read_texts(path: Path) -> Sample:
    """The same of a file of texts. Between tabs, quotes are a part of a text, unless more lines are rows if they are not."""
    found: dict[bool, Sample | DataError] = {}
    for quotes in (False, True):
        try:
            found[quotes] = read_sample(path, quotes or None)
        except DataError as error:
            found[quotes] = error
    plain, quoted = found[False], found[True]
    if isinstance(quoted, Sample) and (
        isinstance(plain, DataError) or len(quoted.bad) < len(plain.bad) or _all_quoted(plain)
    ):
        quoted.quotes = True
        return quoted
    if isinstance(plain, DataError):
        raise plain
    return plain


def _all_quoted(sample: Sample) -> bool:
    return all(len(name) > 1 and name[0] == name[-1] == '"' for name in sample.names)


def _is_header(fields: Sequence[str], rows: Sequence[Sequence[Any]], path: Path) -> bool:
    """Whether a first line names columns: if no field of it is a number, and none is empty or there twice.

    With such a field it does if it stands above numbers: then it lacks a name, or has one twice, which is refused.
    """
    if any(map(_is_number, fields)):
        return False
    names = [name for name in fields if name]
    if len(names) == len(set(names)) == len(fields):
        return True
    columns = [[str(row[place]) for row in rows if row[place] is not None] for place, name in enumerate(fields) if name]
    if not any(values and sum(map(_is_number, values)) >= len(values) - _strays(len(values)) for values in columns):
        return False
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{path}: the header has {', '.join(twice)} twice: give every column a name of its own")
    return True


def guess_table(
    sample: Sample, label: str | None = None, *, text: bool = False, named: Mapping[Kind, str] = MappingProxyType({})
) -> list[Guess]:
    """What each column is. `label` names that of the label, and `named` those of users and times, by "user" and "time".

    With `text`, all that is written in words is text.
    """
    columns = sample.columns
    require_columns(columns, named)
    found = {name: _guess_feature(name, values, len(sample.rows), text) for name, values in columns.items()}
    chosen = _label({name: values for name, values in columns.items() if name not in named.values()}, label)
    found[chosen.name] = chosen
    _keep_one_of_each(found, named)
    count_lost(found.values(), columns, len(sample.rows))
    if not any(guess.kind in ("categorical", "numeric", "sequence", "text") for guess in found.values()):
        raise ConfigError(
            f"no column but the label, {chosen.name}, looks like one to learn from: {_listed(list(found.values()))}. Write a "
            "configuration by hand: sparsedp train table --show-config explains its keys"
        )
    return list(found.values())


def count_lost(
    guesses: Iterable[Guess], columns: Mapping[str, list[Any]], rows: int, *, needed: Sequence[Kind] = _NEEDED
) -> None:
    """Adds up, and says, how many rows are left out: those without one of the `needed` columns, and those where nothing fits.

    A column for which all of them would be is refused.
    """
    for guess in guesses:
        missing = rows - len(columns[guess.name])
        if guess.kind == "time":
            missing += sum(time_of_text(str(value)) is None for value in columns[guess.name])
        if guess.kind in needed:
            guess.lost += missing
        if guess.lost >= rows and guess.kind in needed:
            no_value = (
                f"its values are no times: each {NO_TIME}" if guess.kind == "time" else "no row has a value that fits"
            )
            raise ConfigError(f"{guess.name} as the {guess.kind}: {no_value}")
        if guess.lost:
            rows_have = "1 row has" if guess.lost == 1 else f"{guess.lost:,} rows have"
            guess.why += (
                f"; {rows_have} another value{' or none' if guess.kind in needed else ''}, and will be left out"
            )


def require_columns(columns: Mapping[str, Any], named: Mapping[Kind, str]) -> None:
    """Refuses columns that were named and are not there, and one that was named twice."""
    for kind, name in named.items():
        if name not in columns:
            raise ConfigError(f"--{kind} {name}: the columns are {', '.join(columns)}{suggestion(name, columns)}")
        twice = [other for other in named if other != kind and named[other] == name]
        if twice:
            raise ConfigError(f"--{kind} {name}: the same column as --{twice[0]}")


def _keep_one_of_each(found: dict[str, Guess], named: Mapping[Kind, str]) -> None:
    """Of several columns of users, or of times, the one that was named, or else the first one."""
    kinds: tuple[Kind, ...] = ("user", "time")
    for kind in kinds:
        if kind in named:
            found[named[kind]] = Guess(named[kind], kind, "you named it")
        guesses = [guess for guess in found.values() if guess.kind == kind]
        kept = named.get(kind, guesses[0].name if guesses else None)
        for other in guesses:
            if other.name != kept:
                found[other.name] = Guess(other.name, "nothing", f"there is another column for {kind} already")


def guess_texts(
    sample: Sample, label: str | None = None, named: Mapping[Kind, str] = MappingProxyType({})
) -> list[Guess] | None:
    """The same for a file with one or two columns in words and a label with a few classes; None if there is more to learn from.

    The label's options are its classes: how many, if they are whole numbers from 0, or their names.
    """
    columns = sample.columns
    if label is not None and label not in columns:
        raise ConfigError(f"--label {label}: the columns are {', '.join(columns)}{suggestion(label, columns)}")
    require_columns(columns, named)
    found = {name: _guess_feature(name, values, len(sample.rows), True) for name, values in columns.items()}
    _keep_one_of_each(found, named)
    called = [name for name in columns if _plain(name).removeprefix("gold") in map(_plain, (*_LABELS, *_CLASSES))]
    few = [
        name
        for name, values in columns.items()
        if found[name].kind == "categorical" and len(set(map(str, values))) <= _FEW
    ]
    chosen = label or next((name for name in [*called, *few] if name not in named.values()), None)
    if chosen is None:
        return None
    classes = _classes(columns[chosen])
    others = [guess for name, guess in found.items() if name != chosen]
    texts = [guess for guess in others if guess.kind == "text"]
    rest = [guess for guess in others if guess.kind not in ("text", "user", "nothing")]
    if classes is None or rest or not 1 <= len(texts) <= 2:
        return None
    many = classes if isinstance(classes, int) else len(classes)
    named_classes = list(map(str, range(classes))) if isinstance(classes, int) else classes
    lost = sum(_class_of(value) not in named_classes for value in columns[chosen])
    why = f"{'you named it; ' if label else ''}{many} classes"
    found[chosen] = Guess(chosen, "label", why, {"classes": classes}, lost)
    count_lost(found.values(), columns, len(sample.rows), needed=(*_NEEDED, "text"))
    return list(found.values())


def _classes(values: list[Any]) -> int | list[str] | None:
    """How many classes, if labels are whole numbers from 0; their names; None if these are too many or too few.

    Of numbers, a few that are none and a few that stand above a gap are no classes.
    """
    texts = Counter(_class_of(value) for value in values)
    missing = [text for text in texts if is_missing(text)]
    numbers = {int(text): count for text, count in texts.items() if text.isdecimal()}
    few = _strays(texts.total())
    strange = sum(count for text, count in texts.items() if not text.isdecimal() and text not in missing)
    if len(numbers) > 1 and strange <= few:
        known = sorted(numbers)
        gap = next((i for i in range(2, len(known)) if known[i] > known[i - 1] + 1), len(known))
        if strange + sum(numbers[number] for number in known[gap:]) <= few:
            known = known[:gap]
        if known[-1] < _FEW:
            return known[-1] + 1 if known[0] == 0 else list(map(str, known))  # stars from 1 to 5 have no class 0
    if sum(texts[text] for text in missing) <= few:
        texts = Counter({text: count for text, count in texts.items() if text not in missing})
    return sorted(texts) if 2 <= len(texts) <= _FEW else None


def _class_of(value: Any) -> str:
    """As the reader spells it: a whole number alike, whether its type is integer or floating."""
    return str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()


def _present(values: list[Any]) -> list[Any]:
    """Those that do not stand for a missing one, unless they are half of what there is, as in "none" and "click"."""
    present = [value for value in values if not is_missing(str(value))]
    return present if len(set(map(str, present))) != 1 or len(set(map(str, values))) > 2 else values


def _strays(values: int) -> int:
    """How many of so many values may be another kind than the rest."""
    return max(1, values // _STRANGE) if values >= _COUNTED else 0


def guess_actions(sample: Sample, named: Mapping[Kind, str] = MappingProxyType({})) -> dict[str, Guess]:
    """The columns of users, items and times; `named` has those that need no guess, by what they are."""
    columns = sample.columns
    require_columns(columns, named)
    found: dict[str, Guess] = {}
    for kind, names in _ACTORS.items():
        others = [name for name in columns if name not in named.values()]
        called = [name for name in others if _plain(name) in names] or [n for n in others if _plain(n).startswith(kind)]
        if kind in named:
            found[kind] = Guess(named[kind], kind, "you named it")
        elif called:
            found[kind] = Guess(called[0], kind, "by its name")
        else:
            a_kind = "an item" if kind == "item" else f"a {kind}"
            raise ConfigError(
                f"no column is called like {a_kind} ({', '.join(names[:4])}, ...); the columns are {', '.join(columns)}. "
                f"Name it: --{kind} COLUMN"
            )
    taken = {guess.name for guess in found.values()}
    times = [name for name, values in columns.items() if name not in taken and _is_time(name, values)]
    if "time" in named:
        found["time"] = Guess(named["time"], "time", "you named it")
    elif times:
        found["time"] = Guess(times[0], "time", _why_time(columns[times[0]]))
    count_lost(found.values(), columns, len(sample.rows))
    return found


def _label(columns: dict[str, list[Any]], wanted: str | None) -> Guess:
    if wanted is not None:
        if wanted not in columns:
            raise ConfigError(f"--label {wanted}: the columns are {', '.join(columns)}{suggestion(wanted, columns)}")
        guess = _as_label(wanted, columns[wanted], named=True)
        if guess is None:
            raise ConfigError(
                f"--label {wanted}: its values are neither two texts nor numbers, so that none means 1. Which of them do is "
                "yours to write, as data.positive: init with another column as --label writes the rest, and sparsedp train table "
                "--show-config explains the keys"
            )
        guess.why = f"you named it; {guess.why}"
        return guess
    named = [name for name in columns if _plain(name) in map(_plain, _LABELS)]
    rated = [name for name in columns if _plain(name) in _RATINGS]
    texts = {name: Counter(str(value).strip().lower() for value in _present(columns[name])) for name in columns}
    binary = [name for name in columns if set(texts[name]) in _BINARY]
    binary += [name for name in columns if set(texts[name]) in _YES_OR_NO]
    nearly = [name for name in columns if _is_nearly_binary(texts[name])]
    for name in (*named, *binary, *rated, *nearly):
        guess = _as_label(name, columns[name])
        if guess is not None:
            return guess
    raise ConfigError(
        f"no column looks like a label, with 0 and 1 or yes and no in it; the columns are {', '.join(columns)}. "
        "Name it: --label COLUMN. For what users did in order of time: --sequence"
    )


def _is_nearly_binary(texts: Counter[str]) -> bool:
    """Whether all values but a few are 0 and 1, or yes and no. More than one value in a hundred is each of them."""
    often = {text for text, count in texts.items() if count > _strays(texts.total())}
    strange = sum(count for text, count in texts.items() if text not in often)
    return strange <= _strays(texts.total()) and (often in _BINARY or often in _YES_OR_NO)


def _as_label(name: str, values: list[Any], *, named: bool = False) -> Guess | None:
    """As 0 and 1; as two texts, one of which means 1; as a number that is above the middle. A few values may be none of it.

    Numbers of which none occurs often are a label where somebody `named` it.
    """
    missing = len(values) - len(_present(values))
    texts = Counter(_class_of(value) for value in _present(values))
    count, few = texts.total(), _strays(texts.total())
    zero_one = {text for text in texts if text.lower() in _ZERO_ONE}
    strange = count - sum(texts[text] for text in zero_one)
    both = len({text.lower() in _ONE for text in zero_one}) == 2
    if zero_one and (not strange or (both and strange <= few)):
        why = (
            "its values are 0 and 1"
            if both
            else "all of its values here mean the same, from which nothing can be learned"
        )
        return Guess(name, "label", why, lost=strange + missing)
    if named and len({text.lower() in (*_ONE, *_POSITIVE) for text in texts}) == 2 and _are_yes_or_no(texts):
        options = {
            key: sorted(text for text in texts if (text.lower() in (*_ONE, *_POSITIVE)) is means_one)
            for key, means_one in (("positive", True), ("negative", False))
        }
        return Guess(name, "label", "its values mean yes and no, in several spellings", options, missing)
    first = [text for text, times in texts.most_common(2) if times > 1 or count < _COUNTED]
    strange = count - sum(texts[text] for text in first)
    numbers = sorted(float(text) for text in texts.elements() if _is_number(text))
    are_numbers = all(map(_is_number, first))
    rated = are_numbers and (not strange or _plain(name) in _RATINGS)
    if len(first) == 2 and strange <= few and not rated:
        return _of_two_texts(name, {text: texts[text] for text in first}, strange + missing)
    strange = count - len(numbers)
    if numbers and strange <= few:
        often = [number for number, times in Counter(numbers).items() if times * _OFTEN >= count]
        rating = _plain(name) in _RATINGS or len(often) > 2 or len(set(numbers)) == 2
        if not rating and not named:
            return None
        far = count // 200 if len(set(numbers)) > 2 else 0  # the lowest and the highest of each 200 may be strange
        low, high = numbers[far], numbers[-1 - far]
        middle, what = ((low + high) / 2, "middle") if rating else (numbers[len(numbers) // 2], "median")
        why = f"a number, 1 above the {what}, {middle:g}"
        return Guess(name, "label", why, {"label_above": middle}, strange + missing)
    return None


def _are_yes_or_no(texts: Iterable[str]) -> bool:
    return {text.lower() for text in texts} <= _ZERO_ONE.union(*_YES_OR_NO)


def _of_two_texts(name: str, texts: dict[str, int], lost: int) -> Guess:
    by_count = sorted(texts, key=lambda text: (texts[text], text))
    numbers = sorted(texts, key=float) if all(map(_is_number, texts)) else None
    one = numbers[1] if numbers else next((t for t in texts if t.lower() in _POSITIVE), by_count[0])
    options = {"positive": [one], "negative": [text for text in texts if text != one]}
    return Guess(name, "label", "it has two values; the one that means 1 stands below", options, lost)


def _guess_feature(name: str, values: list[Any], rows: int, text: bool) -> Guess:
    plain = _plain(name)
    if not values:
        return Guess(name, "nothing", "it is empty in these rows")
    if isinstance(values[0], list):
        return Guess(
            name, "sequence", "its values are lists", {"buckets": _buckets({str(v) for l in values for v in l})}
        )
    texts = [str(value) for value in values]
    distinct = set(texts)
    numbers = [text for text in texts if not is_missing(text)]
    if plain in _USERS:
        return Guess(name, "user", "by its name: whose a row is; it is protected, and not learned from")
    if _is_time(name, values):
        why = _why_time(values)
        if rows - sum(time_of_text(text) is not None for text in numbers) <= _strays(rows):
            return Guess(name, "time", why)
        return Guess(name, "nothing", f"{why}, but too many rows have none: they would be left out")
    if len(distinct) == 1 and rows > 1:
        return Guess(name, "nothing", "all rows have the same value")
    given = len(numbers)
    numbers = [value for value in numbers if _is_number(value)]
    strange = given - len(numbers)
    if numbers and strange <= _strays(given):
        whole = all(float(value).is_integer() for value in numbers)
        if (
            whole
            and rows >= _COUNTED
            and [float(v) for v in numbers] == list(range(int(float(numbers[0])), int(float(numbers[0])) + rows))
        ):
            return Guess(name, "nothing", "it counts the rows")
        if whole and re.search(r"(id|code|zip|plz|hash|key|number|no)$", plain):
            return _category(name, distinct, rows, "whole numbers that are names, as the column's name says")
        if whole and len(distinct) <= _FEW:
            return _category(name, distinct, rows, f"whole numbers, only {len(distinct)} of them")
        return Guess(name, "numeric", "its values are numbers", lost=strange)
    if (strange_form := _foreign_form(texts)) is not None:
        return Guess(name, "nothing", strange_form)
    separator = _separator(texts)
    if separator is not None and not text:
        tokens = {token for value in texts for token in re.split(re.escape(separator), value.strip("[](){} "))}
        options = {"separator": None if separator == " " else separator, "buckets": _buckets(tokens)}
        return Guess(
            name, "sequence", f"many values, with {'white space' if separator == ' ' else separator} between", options
        )
    words = sum(len(re.findall(r"\w+", value)) for value in texts) / len(texts)
    if words >= 3 or (text and words >= 2):
        return Guess(name, "text", f"{words:.0f} words in a value")
    return _category(name, distinct, rows, "text")


def _foreign_form(texts: Sequence[str]) -> str | None:
    """Of dates and numbers that are written as no reader here reads them: how to write them."""
    few = _strays(len(texts))
    dates = sum(time_of_text(text) is not None or bool(_DATE.fullmatch(text)) for text in texts)
    if len(texts) - dates <= few:
        return "its values look like dates; write them as in 2026-03-01 or 2026-03-01T12:00:00 to use them, and name it: --time"
    grouped = sum(_is_number(text) or is_missing(text) or bool(_GROUPED.fullmatch(text)) for text in texts)
    if len(texts) - grouped <= few and any(_FRACTION.search(text) for text in texts if _GROUPED.fullmatch(text)):
        return "numbers with separators between thousands: write them as in 1234.5 to use them"
    return None


def _category(name: str, distinct: set[str], rows: int, why: str) -> Guess:
    if len(distinct) == rows >= _COUNTED:
        return Guess(name, "nothing", "every row has another value, from which nothing can be learned")
    return Guess(name, "categorical", f"{why}; {len(distinct)} different values here", {"buckets": _buckets(distinct)})


def _buckets(distinct: set[str]) -> int:
    """Rows for hashing, far more than values: one of three sizes, so that it tells little about the data."""
    return 256 if len(distinct) <= 64 else 4096 if len(distinct) <= _MANY else 32768


def _separator(texts: Sequence[str]) -> str | None:
    """What stands between the ids of most values, if they are lists of ids."""
    for separator in _SEPARATORS:
        split = [[t.strip(" '\"") for t in value.strip("[](){} ").split(separator)] for value in texts]
        if sum(len(tokens) > 1 for tokens in split) < max(1, len(split) / 2):
            continue
        tokens = [token for part in split for token in part if token]
        ids = sum(bool(re.fullmatch(r"[\w.:/#-]*\d[\w.:/#-]*", token)) for token in tokens)
        short = all(" " not in token for token in tokens)
        if ids > 0.8 * len(tokens) or (separator in "|;" and short):
            return separator
    return None


def _is_time(name: str, values: list[Any]) -> bool:
    texts = [text for text in map(str, values[:200]) if not is_missing(text)][:100]
    times = [text for text in texts if time_of_text(text) is not None]
    if not times or len(texts) - len(times) > _strays(len(texts)):
        return False
    numbers = [text for text in times if _is_number(text)]
    named = _plain(name) in _TIMES or _plain(name).endswith(("time", "date", "timestamp"))
    return (named and all(float(text) > 1e8 for text in numbers)) if len(numbers) > len(times) / 2 else True


def _why_time(values: list[Any]) -> str:
    numbers = sum(_is_number(str(value)) for value in values[:200])
    return "its values are seconds, and its name says so" if 2 * numbers > len(values[:200]) else "its values are dates"


def _is_number(text: str) -> bool:
    try:
        return as_number(text) == as_number(text)  # not NaN
    except ValueError:
        return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _listed(guesses: Sequence[Guess]) -> str:
    return "; ".join(f"{guess.name} ({guess.kind}: {guess.why})" for guess in guesses)
