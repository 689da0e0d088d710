"""Reads a configuration: from a file or by the name of a bundled one, with --set on top."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sparsedp.cli.config import ClickLogData, Config, FileVocabulary
from sparsedp.cli.schema import SchemaError, all_paths, build, suggestion
from sparsedp.errors import ConfigError

BUNDLED = Path(__file__).parent / "configs"


def add_config_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    names = ", ".join(bundled_names())
    parser.add_argument(
        "config", metavar="CONFIG", nargs=None if required else "?", help=f"a YAML file, or one of {names}"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="change a key, as in --set training.epochs=2 --set 'data.paths=[day_0.gz, day_1.gz]'",
    )


def bundled_names() -> list[str]:
    return sorted(path.stem for path in BUNDLED.glob("*.yaml"))


def load_config(source: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in the file `source`, or the bundled one of that name, with `key=value` changes."""
    path = _find(source)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping with the sections {', '.join(_sections())}")
    values.setdefault("name", path.stem)
    changed = [_override(values, text) for text in overrides]
    try:
        return _absolute(build(Config, values))
    except SchemaError as error:
        mine = [key for key in changed if f"{error.path}.".startswith(f"{key}.") or key.startswith(f"{error.path}.")]
        where = f"--set {mine[-1]}" if mine else path.name
        raise ConfigError(f"{where}: {error}{_elsewhere(error.path)}") from None


def dump_config(config: Config) -> str:
    return yaml.safe_dump(config.to_dict(), sort_keys=False)


def _find(source: str | Path) -> Path:
    path = Path(source)
    if path.is_file():
        return path
    if str(source) in bundled_names():
        return BUNDLED / f"{source}.yaml"
    hint = suggestion(str(source), bundled_names())
    names = ", ".join(bundled_names())
    raise ConfigError(f"{source} is neither a file nor a bundled configuration ({names}){hint}")


def _sections() -> list[str]:
    return [field.name for field in dataclasses.fields(Config)]


def _override(values: dict[str, Any], text: str) -> str:
    """Puts one key=value into the values; returns the key."""
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {text}: expected KEY=VALUE, as in training.epochs=2")
    at = values
    for depth, part in enumerate(parts[:-1], 1):
        if at.get(part) is None:
            at[part] = {}
        at = at[part]
        if not isinstance(at, dict):
            raise ConfigError(f"--set {key}: {'.'.join(parts[:depth])} is {at!r}, which has no keys")
    at[parts[-1]] = parse_yaml(value, f"--set {key}")
    return ".".join(parts)


def _elsewhere(path: str) -> str:
    """For a key that stands in the wrong section: where it belongs."""
    known = list(all_paths(Config))
    if path in known:
        return ""
    leaf = path.rpartition(".")[2]
    found = [other for other in known if other.rpartition(".")[2] == leaf]
    return f". There is {' and '.join(found)}" if found else ""


def _absolute(config: Config) -> Config:
    """With the paths of data made absolute, so that a run can be resumed from another directory."""
    data = config.data
    if not isinstance(data, ClickLogData):
        return config

    def absolute(path: str) -> str:
        return str(Path(path).expanduser().absolute())

    paths = absolute(data.paths) if isinstance(data.paths, str) else [absolute(path) for path in data.paths]
    data = dataclasses.replace(data, paths=paths, cache_dir=absolute(data.cache_dir))
    if isinstance(data.vocabulary, FileVocabulary):
        data = dataclasses.replace(
            data, vocabulary=dataclasses.replace(data.vocabulary, path=absolute(data.vocabulary.path))
        )
    return dataclasses.replace(config, data=data)


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
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source} is not valid YAML: {' '.join(str(error).split())}") from error
