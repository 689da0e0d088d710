"""Reads a configuration: from a file or by the name of a bundled one, with --set on top."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.schema import SchemaError, all_paths, build, keys_of, suggestion
from sparsedp.cli.config.trust import Code, add_trust_argument
from sparsedp.errors import ConfigError, one_line

BUNDLED = Path(__file__).parents[1] / "configs"


def add_set_argument(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help=text)


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    names = ", ".join(bundled_names())
    parser.add_argument(
        "config", metavar="CONFIG", nargs=None if required else "?", help=f"a YAML file, or one of {names}"
    )
    add_set_argument(parser, "change a key, as in --set training.epochs=2 --set 'data.paths=[day_0.gz, day_1.gz]'")
    add_trust_argument(parser)
    parser.add_argument(
        "--show-config", action="store_true", help="print all keys with their values and explanations, and stop"
    )


def bundled_names() -> list[str]:
    return sorted(path.stem for path in BUNDLED.glob("*.yaml"))


def load_config(
    source: str | Path, overrides: Sequence[str] = (), trust: Sequence[str] = (), code: Code | None = None
) -> Config:
    """The configuration in the file `source`, or the bundled one of that name, with `key=value` changes.

    It may name code beside that file, and of the packages `trust`; with `code`, what that says.
    """
    path = find_config(source)
    values = read_values(path)
    changed = [put_text(values, text) for text in overrides]
    code = Code(path, tuple(trust)) if code is None else code
    return make_config(values, path.name, {key: f"--set {key}" for key in changed}, code)


def read_values(path: Path) -> dict[str, Any]:
    """What a configuration file says, unchecked."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        sections = ", ".join(keys_of(Config))
        raise ConfigError(f"{path}: expected a mapping with the sections {sections}{_data_file(path)}")
    values.setdefault("name", path.stem)
    _expand_mechanism(values)
    return values


def read_yaml(path: Path) -> Any:
    """What is in a file of YAML."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(one_line(error)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no configuration, which is YAML in UTF-8{_data_file(path)}") from error


def _data_file(path: Path) -> str:
    """For a file that is no configuration, and by its name holds data."""
    return "" if path.suffix in (".yaml", ".yml") else f". Of a file with data: sparsedp init {path}"


def make_config(values: dict[str, Any], source: str, changed: Mapping[str, str], code: Code) -> Config:
    """Values as a configuration. An error names `source`, or what `changed` says of the key that was put in later."""
    try:
        return dataclasses.replace(build(Config, values).with_absolute_paths(), code=code)
    except SchemaError as error:
        sources = [
            where
            for key, where in changed.items()
            if f"{error.path}.".startswith(f"{key}.") or key.startswith(f"{error.path}.")
        ]
        where, problem = sources[-1] if sources else source, str(error)
        if where.endswith(f" {error.path}"):  # --set names the key already
            problem = problem.removeprefix(f"{error.path}: ")
        raise ConfigError(f"{where}: {problem}{_belongs_to(error.path)}") from None


def dump_config(config: Config | dict[str, Any]) -> str:
    return yaml.safe_dump(
        config.to_dict() if isinstance(config, Config) else config, sort_keys=False, allow_unicode=True
    )


@functools.cache
def _comments() -> dict[tuple[str, str | None], str | None]:
    """What the bundled configurations say about keys, by their paths and the `kind` of the section that they are in.

    The first one that has a key decides, the demo before all others: a later one may speak of its own case.
    """
    found: dict[tuple[str, str | None], str | None] = {}
    for name in ("demo", *bundled_names()):
        text = (BUNDLED / f"{name}.yaml").read_text()
        values = yaml.safe_load(text)
        for _, path, comment in _key_lines(text):
            section = values.get(path.partition(".")[0])
            kind = section.get("kind") if isinstance(section, dict) and path.count(".") == 1 else None
            found.setdefault((path, kind), comment)
    return found


def comment_on(path: str, kind: str | None = None) -> str | None:
    """What the bundled configurations say about a key, of a section of that `kind` if there are several; None: nothing."""
    return _comments().get((path, kind))


def explain_config(config: Config) -> str:
    """The configuration as YAML, every key with its value and what the bundled ones say about it."""
    comments: dict[str, str | None] = {}
    for name in ("demo", *bundled_names()):  # the demo's comments come first; the others add those of further keys
        for _, path, comment in _key_lines((BUNDLED / f"{name}.yaml").read_text()):
            comments.setdefault(path, comment)
    text = dump_config(config)
    lines = text.splitlines()
    for number, path, _ in _key_lines(text):
        if comments.get(path):
            lines[number] += f"  # {comments[path]}"
    return "\n".join(lines) + "\n"


def _key_lines(text: str) -> Iterator[tuple[int, str, str | None]]:
    """The lines of YAML that begin with a key: their numbers, full paths and comments."""
    above: list[tuple[int, str]] = []  # indentation and key of the mappings around a line
    for number, line in enumerate(text.splitlines()):
        match = re.match(r"( *)(\w+):(?: .*?)?(?:  # (.*))?$", line)
        if match:
            indent = len(match[1])
            above = [*(entry for entry in above if entry[0] < indent), (indent, match[2])]
            yield number, ".".join(key for _, key in above), match[3]


def find_config(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if str(source) in bundled_names():
        return BUNDLED / f"{source}.yaml"
    hint = suggestion(str(source), bundled_names())
    names = ", ".join(bundled_names())
    raise ConfigError(f"{source} is neither a file nor a bundled configuration ({names}){hint}")


def put_text(values: dict[str, Any], text: str) -> str:
    """Puts one key=value into the values; returns the key."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text}: expected KEY=VALUE, as in training.epochs=2")
    put(values, key, parse_yaml(value, f"--set {key}"), f"--set {key}")
    return key


def put(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Puts a value at the full path of its key; `where` is said in an error."""
    parts = key.split(".")
    section = values
    for depth, part in enumerate(parts[:-1], 1):
        if section.get(part) is None:
            section[part] = {}
        section = section[part]
        if not isinstance(section, dict):
            raise ConfigError(f"{where}: {'.'.join(parts[:depth])} is {section!r}, which has no keys")
    section[parts[-1]] = value
    _expand_mechanism(values)


def _expand_mechanism(values: dict[str, Any]) -> None:
    """A mechanism's bare name becomes the mapping that it stands for, so that settings can join it."""
    privacy = values.get("privacy")
    if isinstance(privacy, dict) and isinstance(privacy.get("mechanism"), str):
        privacy["mechanism"] = {"name": privacy["mechanism"]}


def covers(key: str, other: str) -> bool:
    """Whether giving `key` gives `other` too."""
    return f"{other}.".startswith(f"{key}.")


def _belongs_to(path: str) -> str:
    """For a key that stands in the wrong section: where it belongs."""
    paths = list(all_paths(Config))
    if path in paths:
        return ""
    leaf = path.rpartition(".")[2]
    others = [other for other in paths if other.rpartition(".")[2] == leaf]
    return f". There is {' and '.join(others)}" if others else ""


class _Loader(yaml.SafeLoader):
    """YAML 1.1 with numbers such as 1e-5, which it would read as text, and without repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands here twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def parse_yaml(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = "" if mark is None or "\n" not in text.strip() else f", line {mark.line + 1}, column {mark.column + 1},"
        problem = error.problem or error.context or ""
        hint = ". Look at how far the lines there are indented" if "<block" in problem else ""
        raise ConfigError(f"{source}{at} is not valid YAML: {problem}{hint}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
