"""What the columns of a file are, guessed from its header and its first rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sparsedp.data.tablecolumns import as_number, is_missing, time_of_text
from sparsedp.data.tablefiles import first_rows
from sparsedp.errors import ConfigError, suggestion

Kind = Literal["label", "categorical", "numeric", "sequence", "text", "user", "item", "time", "nothing"]
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
_YES_OR_NO = [{"yes", "no"}, {"y", "n"}, {"t", "f"}, {"ja", "nein"}, {"oui", "non"}, {"si", "no"}, {"sí", "no"}]
_FEW, _MANY, _COUNTED = 12, 1000, 20
_SEPARATORS = ("|", ";", ",", " ")


@dataclass
class Guess:
    """A column as what, and why; `options` are those of its configuration."""

    name: str
    kind: Kind
    why: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Sample:
    """The first rows of a file as text, None where a value is missing; lists stay lists."""

    names: list[str]
    has_header: bool
    rows: list[list[Any]]
    complete: bool  # whether these are all of the file
    rows_in_all: int = 0  # about how many rows all files have, where somebody estimated it

    def column(self, place: int) -> list[Any]:
        return [row[place] for row in self.rows if row[place] not in (None, "", [])]


def read_sample(path: Path) -> Sample:
    """The header and the first rows. A first line is a header if no field of it is a number, empty, or there twice."""
    names, rows, complete = first_rows(path)
    if names is None:
        if not rows:
            raise ConfigError(f"{path}: is empty")
        first = [field or "" for field in rows[0]]
        header = all(first) and len(set(first)) == len(first) and not any(_is_number(field) for field in first)
        names = [field.strip() for field in first] if header else [f"column_{i + 1}" for i in range(len(first))]
        rows = [row for row in rows[header:] if len(row) == len(names)]
        sample = Sample(names, header, rows, complete)
    else:
        sample = Sample(names, True, rows, complete)
    if not sample.rows:
        raise ConfigError(f"{path}: there are no rows under the header")
    return sample


def guess_table(
    sample: Sample, label: str | None = None, *, text: bool = False, named: Mapping[Kind, str] = MappingProxyType({})
) -> list[Guess]:
    """What each column is. `label` names that of the label, and `named` those of users and times, by "user" and "time".

    With `text`, all that is written in words is text.
    """
    columns = {name: sample.column(i) for i, name in enumerate(sample.names)}
    require_columns(columns, named)
    found = {name: _guess_feature(name, values, len(sample.rows), text) for name, values in columns.items()}
    chosen = _label({name: values for name, values in columns.items() if name not in named.values()}, label)
    found[chosen.name] = chosen
    _keep_one_of_each(found, named)
    if not any(guess.kind in ("categorical", "numeric", "sequence", "text") for guess in found.values()):
        raise ConfigError(
            f"no column but the label, {chosen.name}, looks like one to learn from: {_listed(list(found.values()))}. Write a "
            "configuration by hand: sparsedp train table --show-config explains its keys"
        )
    return list(found.values())


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
    columns = {name: sample.column(i) for i, name in enumerate(sample.names)}
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
    found[chosen] = Guess(chosen, "label", f"{'you named it; ' if label else ''}{many} classes", {"classes": classes})
    return list(found.values())


def _classes(values: list[Any]) -> int | list[str] | None:
    """How many classes, if labels are whole numbers from 0; their names; None if these are too many or too few."""
    texts = {str(value).strip() for value in values}
    if not 2 <= len(texts) <= _FEW:
        return None
    if all(text.isdecimal() for text in texts) and (most := max(map(int, texts))) < _FEW:
        return max(2, most + 1)
    return sorted(texts)


def guess_actions(sample: Sample, named: Mapping[Kind, str] = MappingProxyType({})) -> dict[str, Guess]:
    """The columns of users, items and times; `named` has those that need no guess, by what they are."""
    columns = {name: sample.column(i) for i, name in enumerate(sample.names)}
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
        found["time"] = Guess(times[0], "time", "its values are dates or seconds, and its name says so")
    return found


def _label(columns: dict[str, list[Any]], wanted: str | None) -> Guess:
    if wanted is not None:
        if wanted not in columns:
            raise ConfigError(f"--label {wanted}: the columns are {', '.join(columns)}{suggestion(wanted, columns)}")
        guess = _as_label(wanted, columns[wanted])
        if guess is None:
            raise ConfigError(f"--label {wanted}: its values are neither two texts nor numbers, so that none means 1")
        return Guess(wanted, "label", f"you named it; {guess.why}", guess.options)
    named = [name for name in columns if _plain(name) in map(_plain, _LABELS)]
    rated = [name for name in columns if _plain(name) in _RATINGS]
    texts = {name: {str(value).strip().lower() for value in values} for name, values in columns.items()}
    binary = [name for name in columns if texts[name] in _binary_sets()]
    binary += [name for name in columns if texts[name] in _YES_OR_NO]
    for name in (*named, *binary, *rated):
        guess = _as_label(name, columns[name])
        if guess is not None:
            return guess
    raise ConfigError(
        f"no column looks like a label, with 0 and 1 or yes and no in it; the columns are {', '.join(columns)}. "
        "Name it: --label COLUMN. For what users did in order of time: --sequence"
    )


def _binary_sets() -> list[set[str]]:
    return [{"0", "1"}, {"true", "false"}, {"0.0", "1.0"}]


def _as_label(name: str, values: list[Any]) -> Guess | None:
    """As 0 and 1; as two texts, one of which means 1; as a number that is above the middle."""
    texts = Counter(str(value) for value in values)
    if set(map(str.lower, texts)) <= _ZERO_ONE:
        return Guess(name, "label", "its values are 0 and 1")
    if all(_is_number(text) for text in texts):
        low, high = (f(float(text) for text in texts) for f in (min, max))
        return Guess(
            name, "label", f"a number, 1 above the middle, {(low + high) / 2:g}", {"label_above": (low + high) / 2}
        )
    if len(texts) == 2:
        one = next(
            (text for text in texts if text.strip().lower() in _POSITIVE), min(texts, key=lambda t: (texts[t], t))
        )
        return Guess(name, "label", "it has two values; the one that means 1 stands below", {"positive": [one]})
    return None


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
        return Guess(name, "time", "its values are dates or seconds, and its name says so")
    if len(distinct) == 1 and rows > 1:
        return Guess(name, "nothing", "all rows have the same value")
    if numbers and all(_is_number(value) for value in numbers):
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
        return Guess(name, "numeric", "its values are numbers")
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
    texts = [str(value) for value in values[:100]]
    if not texts or any(time_of_text(text) is None for text in texts):
        return False
    numbers = all(_is_number(text) for text in texts)
    named = _plain(name) in _TIMES or _plain(name).endswith(("time", "date", "timestamp"))
    return (named and all(float(text) > 1e8 for text in texts)) if numbers else True


def _is_number(text: str) -> bool:
    try:
        return as_number(text) == as_number(text)  # not NaN
    except ValueError:
        return False


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _listed(guesses: Sequence[Guess]) -> str:
    return "; ".join(f"{guess.name} ({guess.kind}: {guess.why})" for guess in guesses)
