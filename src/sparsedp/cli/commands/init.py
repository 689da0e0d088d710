"""Looks at a file, guesses what its columns are, and writes a configuration that trains on it."""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparsedp.cli.files import write_text
from sparsedp.cli.guessing import Guess, Kind, Sample, guess_actions, guess_table, guess_texts, read_sample, read_texts
from sparsedp.data.tablefiles import find_sources
from sparsedp.errors import ConfigError

_MECHANISM = (
    "  # dpsgd puts noise on all rows of all tables: it needs no setting, keeps all that is learned of rare values, and costs",
    "  # next to nothing while tables are small. It is slow with large ones: what all would do, and which one to take, says",
    "  #   sparsedp plan THIS_FILE --compare --look-at-data",
    "  mechanism: dpsgd",
)

EPILOG = """examples:
  sparsedp init clicks.csv                   guesses the label and the columns; writes clicks.yaml
  sparsedp init 'days/*.parquet' --label bought
  sparsedp init --sequence ratings.csv       the next item, from what users did in order of time
  sparsedp init --sequence log.tsv.gz --user Nutzer --item Film --time wann
  sparsedp init --text reviews.tsv           a class, and a text or two
  sparsedp init --own-model                  writes own_model.py and own_model.yaml, to be changed

Only the first rows are looked at. They are private: that is why the configuration says that it was guessed, and the statement of
a run that uses it says so, too. No value is written into it but what tells labels that mean 1 from those that mean 0, and the
names of classes.
"""
_NAMED: tuple[Kind, ...] = ("user", "item", "time")
_BEGINNING = 1 << 20  # bytes of a file by which its rows are estimated
_SHARES = (0.01, 0.05, 0.2, 0.5, 1.0)
_COUNT_OF_USERS = 20  # with fewer in the first rows, a user is too large a unit for a first run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    parser.add_argument(
        "file", metavar="FILE", nargs="?", help="a file, a folder of files or a pattern; text, Parquet or Arrow"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--sequence", action="store_true", help="what users did in order of time: users, items, times")
    kind.add_argument("--text", action="store_true", help="a label, and columns that are written in words")
    kind.add_argument(
        "--own-model", action="store_true", help="a data set, a model and a loss of your own, as an example"
    )
    parser.add_argument(
        "--label", metavar="COLUMN", help="the column with the label, if the guess would be another one"
    )
    parser.add_argument("--user", metavar="COLUMN", help="the same for whose a row is")
    parser.add_argument("--item", metavar="COLUMN", help="with --sequence: for what users did it with")
    parser.add_argument("--time", metavar="COLUMN", help="for when it was")
    parser.add_argument("--to", metavar="CONFIG", type=Path, help="the file to write (<name of FILE>.yaml)")


def run(args: argparse.Namespace) -> int:
    if args.own_model:
        return _own_model(args)
    if args.file is None:
        raise ConfigError("FILE is missing: a file with rows to train on. For a model of your own: --own-model")
    if args.sequence and args.label is not None:
        raise ConfigError("--label: sequences have none; what is predicted is the next item")
    if args.item is not None and not args.sequence:
        raise ConfigError("--item: is for --sequence; elsewhere an item is a column to learn from")
    named: dict[Kind, str] = {kind: name for kind in _NAMED if (name := getattr(args, kind)) is not None}
    sources = find_sources(args.file)
    path = next((source for source in sources if source.stat().st_size), sources[0])
    target: Path = args.to or Path(f"{_stem(args.file)}.yaml")
    _require_new(target)
    sample = read_texts(path) if args.text else read_sample(path)
    sample.rows_in_all = _rows_in_all(sample, path, sources)
    if args.sequence:
        guesses = list(guess_actions(sample, named).values())
        text = _sequence_config(args.file, guesses, sample, path)
    elif args.text and (texts := guess_texts(sample, args.label, named)) is not None:
        guesses = texts
        text = _text_config(args.file, guesses, sample)
    else:
        if args.text:  # a table is read in another way than texts
            sample = replace(read_sample(path), rows_in_all=sample.rows_in_all)
        guesses = guess_table(sample, args.label, text=args.text, named=named)
        if args.text and not any(guess.kind == "text" for guess in guesses):
            raise ConfigError(
                f"--text: no column of {path.name} is written in words; the columns are {', '.join(sample.names)}. Without "
                "--text they are read as what they look like"
            )
        text = _table_config(args.file, guesses, sample)
    print(f"{path.name}: {len(sample.rows)} {'rows' if sample.complete else 'rows, the first ones,'} looked at")
    for note in _notes(sample, path, sources):
        print(f"  {note}")
    width = max(len(guess.name) for guess in guesses)
    for guess in guesses:
        what = "left out" if guess.kind == "nothing" else guess.kind
        print(f"  {guess.name:{width}}  {what:11}  {guess.why}")
    write_text(target, text)
    print(f"Written: {target}. Look through it, then: sparsedp train {target}")
    return 0


def _notes(sample: Sample, path: Path, sources: Sequence[Path]) -> list[str]:
    """What a look at the columns does not show."""
    notes = []
    if len(sources) > 1:
        notes.append(f"the first of {len(sources)} files; the others were not looked at")
    if not sample.has_header:
        notes.append("the first line is taken for a row, not for a header")
    if sample.unnamed:
        notes.append(f"{'a column' if sample.unnamed == 1 else f'{sample.unnamed} columns'} without a name: left out")
    if sample.bad:
        lines = "1 line is no row" if len(sample.bad) == 1 else f"{len(sample.bad):,} lines are no rows"
        notes.append(f"{lines} and will be left out, the first: {sample.bad[0]}")
    return notes


def _own_model(args: argparse.Namespace) -> int:
    if args.file is not None or any(getattr(args, name) is not None for name in ("label", *_NAMED)):
        raise ConfigError("--own-model looks at no file: leave FILE, --label, --user, --item and --time out")
    if args.to is not None:
        raise ConfigError("--own-model writes own_model.py and own_model.yaml here: leave --to out")
    bundled = files("sparsedp") / "cli" / "configs"
    targets = [Path("own_model.py"), Path("own_model.yaml")]
    for target in targets:
        _require_new(target)
    for target in targets:
        write_text(target, (bundled / target.name).read_text())
    print("Written: own_model.py and own_model.yaml. Change them, then: sparsedp train own_model.yaml")
    return 0


def _require_new(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} is there already, and is not overwritten. Name another file: --to FILE")
    if target.suffix not in (".yaml", ".yml") and target.name != "own_model.py":
        raise ConfigError(f"--to {target}: expected a name that ends in .yaml")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--to {target}: there is no folder {target.parent}")


def _stem(file: str) -> str:
    name = Path(file).name.split(".")[0].strip("*") or Path(file).parent.name
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in name).strip("_") or "table"


def _value(value: Any) -> str:
    """A value in YAML: JSON is that."""
    return json.dumps(value, ensure_ascii=False)


def _options(options: dict[str, Any]) -> str:
    return "{" + ", ".join(f"{key}: {_value(value)}" for key, value in options.items()) + "}"


def _table_config(file: str, guesses: list[Guess], sample: Sample) -> str:
    label = next(guess for guess in guesses if guess.kind == "label")
    user = next((guess for guess in guesses if guess.kind == "user"), None)
    time = next((guess for guess in guesses if guess.kind == "time"), None)
    units = _units(sample, None if user is None else user.name)
    by_user = user is not None and units >= _COUNT_OF_USERS
    lines = [
        f"# Written by `sparsedp init`, which guessed what the columns of {Path(file).name} are. Change what is wrong, then:",
        "#   sparsedp train THIS_FILE",
        "# The keys that are not here have their defaults: sparsedp train THIS_FILE --show-config explains all.",
        "",
        "data:",
        "  kind: table",
        f"  paths: {_value(str(Path(file).absolute()))}",
        f"  label: {_value(label.name)}  # {label.why}",
    ]
    lines += [f"  {key}: {_value(value)}" for key, value in label.options.items()]
    if not sample.has_header:
        lines.append(f"  columns: {_value(sample.names)}  # there is no header: give them names")
    for kind in ("categorical", "numeric", "sequence", "text"):
        chosen = [guess for guess in guesses if guess.kind == kind]
        if chosen:
            lines.append(f"  {kind}:")
            lines += [f"    {_value(guess.name)}: {_options(guess.options)}  # {guess.why}" for guess in chosen]
    if user is not None:
        lines.append(f"  user: {_value(user.name)}  # whose a row is; it is not learned from")
    if time is not None:
        lines.append(f"  time: {_value(time.name)}  # the last rows in time are held out")
    lines += [f"  # {guess.name} is left out: {guess.why}" for guess in guesses if guess.kind == "nothing"]
    lines += [
        *_max_malformed(guesses, sample),
        "  held_out: 0.1  # the last share of the rows",
        "  guessed: true  # by looking at private data, which the statement tells; false if you would have written it unseen",
        "",
        "model:",
        "  kind: pctr  # one table for each column, and a network",
        "  hidden: 64",
        "  hidden_layers: 1",
        "  dim: 8  # of every table",
        "",
        "optimizer:",
        "  name: Adagrad",
        "  lr: 0.05",
        "",
        *_training(units, epochs=5),
        "privacy:",
        "  target_epsilon: 3.0  # smaller is safer",
        "  max_grad_norm: 1.0",
        f"  unit: {'user' if by_user else 'example'}  # what is protected: an example, or a user with all of their examples",
        *_MECHANISM,
    ]
    return "\n".join(lines) + "\n"


def _text_config(file: str, guesses: list[Guess], sample: Sample) -> str:
    label = next(guess for guess in guesses if guess.kind == "label")
    user = next((guess for guess in guesses if guess.kind == "user"), None)
    texts = [guess.name for guess in guesses if guess.kind == "text"]
    units = _units(sample, None if user is None else user.name)
    by_user = user is not None and units >= _COUNT_OF_USERS
    lines = [
        f"# Written by `sparsedp init --text`, which guessed what columns {Path(file).name} has. Change what is wrong, then:",
        "#   sparsedp train THIS_FILE",
        "# The keys that are not here have their defaults: sparsedp train THIS_FILE --show-config explains all.",
        "",
        "data:",
        "  kind: text",
        f"  paths: {_value(str(Path(file).absolute()))}",
        *([] if sample.has_header else [f"  columns: {_value(sample.names)}  # there is no header: give them names"]),
        f"  text: {_value(texts[0])}",
        *(f"  second: {_value(name)}" for name in texts[1:]),
        f"  label: {_value(label.name)}",
        *(["  quotes: true  # fields stand in quotes"] if sample.quotes else []),
        f"  classes: {_value(label.options['classes'])}  # {label.why}; leave_out: [...] leaves rows with other labels out",
        *([] if user is None else [f"  user: {_value(user.name)}  # whose a row is; it is not learned from"]),
        *(f"  # {guess.name} is left out: {guess.why}" for guess in guesses if guess.kind == "nothing"),
        "  buckets: 20000  # rows that words are hashed to; or name a folder with a tokenizer, tokenizer: FOLDER",
        "  length: 64  # the first words of each text that are looked at",
        *_max_malformed(guesses, sample),
        "  held_out: 0.1  # the last share of the rows, or a file",
        "  guessed: true  # by looking at private data, which the statement tells; false if you would have written it unseen",
        "",
        "model:",
        "  kind: text_bag  # docs/language.md: how to start from pretrained rows, and pretrained encoders",
        "  dim: 64",
        *(["  pair: towers"] if len(texts) == 2 else []),
        "",
        "loss: cross_entropy",
        "",
        "optimizer:",
        "  name: Adagrad",
        "  lr: 0.1",
        "",
        *_training(units, epochs=5),
        "privacy:",
        "  target_epsilon: 3.0  # smaller is safer",
        "  max_grad_norm: 1.0",
        f"  unit: {'user' if by_user else 'example'}  # what is protected: an example, or a user with all of their examples",
        *_MECHANISM,
    ]
    return "\n".join(lines) + "\n"


def _sequence_config(file: str, guesses: list[Guess], sample: Sample, path: Path) -> str:
    if not sample.has_header:
        raise ConfigError(
            f"{path}: there is no header, which has to name the columns. Formats without one: data.format"
        )
    by_kind = {guess.kind: guess.name for guess in guesses}
    users = _units(sample, by_kind["user"])
    lines = [
        f"# Written by `sparsedp init --sequence`, which guessed what columns {Path(file).name} has. Change what is wrong:",
        "#   sparsedp train THIS_FILE",
        "# The keys that are not here have their defaults: sparsedp train THIS_FILE --show-config explains all.",
        "",
        "data:",
        "  kind: sequences",
        f"  path: {_value(str(Path(file).absolute()))}",
        f"  user: {_value(by_kind['user'])}",
        f"  item: {_value(by_kind['item'])}",
        f"  time: {_value(by_kind.get('time'))}  # null: the rows are in order of time",
        "  min_actions: 1  # users and items with fewer are dropped",
        "  length: 50  # the last items of each user that are looked at",
        *_max_malformed(guesses, sample),
        "",
        "model:",
        "  kind: transformer",
        "  dim: 32",
        "  blocks: 1",
        "",
        "loss: softmax",
        "",
        "optimizer:",
        "  name: Adam",
        "  lr: 0.003",
        "",
        *_training(users, epochs=10),
        "privacy:",
        "  target_epsilon: 8.0  # smaller is safer",
        "  max_grad_norm: 1.0",
        "  clipping: automatic",
        "  unit: user  # a sequence is all that a user did",
        *_MECHANISM,
    ]
    return "\n".join(lines) + "\n"


def _max_malformed(guesses: Sequence[Guess], sample: Sample) -> list[str]:
    """Twice the share of the rows that were left out here, as one of few shares, so that it tells little about the data."""
    lost = sum(guess.lost for guess in guesses) + len(sample.bad)
    if not lost:
        return []
    share = min(1.0, 2 * lost / (len(sample.rows) + len(sample.bad)))
    limit = next(limit for limit in _SHARES if share <= limit)
    return [
        f"  max_malformed: {limit:g}  # rows that do not fit are left out, and more than this share of them is an error"
    ]


def _rows_in_all(sample: Sample, path: Path, sources: Sequence[Path]) -> int:
    """About how many rows the files have: the lines in a byte of the first file's beginning, times the bytes of all.

    Of formats without lines, as many as were looked at.
    """
    if sample.complete and len(sources) == 1:
        return len(sample.rows)
    with open(path, "rb") as file:
        start = file.read(_BEGINNING)
    try:
        text = zlib.decompressobj(wbits=31).decompress(start) if start.startswith(b"\x1f\x8b") else start
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end < len(text) - 4:  # not the last letter, which was cut
            return len(sample.rows)
    except zlib.error:
        return len(sample.rows)
    return max(len(sample.rows), text.count(b"\n") * sum(source.stat().st_size for source in sources) // len(start))


def _units(sample: Sample, user: str | None) -> int:
    """About how many rows there are, or users: those that were looked at, unless each user's rows lie together."""
    if user is None:
        return sample.rows_in_all
    ids = [str(value) for value in sample.column(sample.names.index(user))]
    users = len(set(ids))
    together = 1 + sum(one != other for one, other in pairwise(ids)) == users < len(ids)
    return users * sample.rows_in_all // len(sample.rows) if together else users


def _training(units: int, epochs: int) -> list[str]:
    """The batch is one of few sizes, so that it tells little about how many units there are."""
    batch = next(
        (size for size in (8192, 1024, 256, 64) if units >= 10 * size), 16 if units >= 20 else 4 if units >= 5 else 1
    )
    return [
        "training:",
        f"  epochs: {epochs}",
        f"  batch_size: {batch}  # expected; larger ones, up to a few percent of all, learn more at the same epsilon",
        "  threads: 1",
        "  init_seed: 0",
        "",
    ]
