"""The JSON schema of configurations, for editors: made from the same annotations that configurations are checked by."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.load import comment_on
from sparsedp.cli.config.schema import Address, OneOf, Range, annotations_of
from sparsedp.cli.config.sections import PrivacyConfig
from sparsedp.mechanisms import Mechanism, PublicCounts

_PLAIN: dict[Any, dict[str, Any]] = {
    Address: {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"},
    types.NoneType: {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Any: {},
}
# Settings of mechanisms that no configuration gives: what the engine sets, and what only Python can say.
_NOT_GIVEN = {"found", "inputs"}


def config_schema() -> dict[str, Any]:
    """Of a whole configuration. A file may leave out what is given with --set."""
    definitions: dict[str, Any] = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of SparseDP",
        **_of(Config, definitions),
        "$defs": definitions,
    }


def _of(hint: Any, definitions: dict[str, Any], path: str = "") -> dict[str, Any]:
    if dataclasses.is_dataclass(hint):
        return _of_dataclass(hint, definitions, path)
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return {"anyOf": [_of(member, definitions, path) for member in get_args(hint)]}
    if kind is Annotated:
        inner, *limits = get_args(hint)
        out = dict(_of(inner, definitions, path))
        for limit in limits:
            out |= {"enum": list(limit.names())} if isinstance(limit, OneOf) else _of_range(limit)
        return out
    if kind is Literal:
        return {"enum": list(get_args(hint))}
    if kind is list:
        return {"type": "array", "items": _of(get_args(hint)[0], definitions)}
    return {"type": "object"} if kind is dict else _PLAIN[kind]


def _of_mechanism(definitions: dict[str, Any]) -> dict[str, Any]:
    """By its name alone, with its settings, or a class of one's own, of whose settings nothing is known here."""
    kinds = [kind for kind in Mechanism.__subclasses__() if kind.__module__.startswith("sparsedp.")]
    names = [kind.name for kind in kinds]
    own = {"type": "string", "pattern": _PLAIN[Address]["pattern"]}
    return {
        "anyOf": [
            {"enum": names},
            own,
            *(_of_settings(kind, definitions) for kind in kinds),
            {"type": "object", "properties": {"name": own}, "required": ["name"], "additionalProperties": True},
        ]
    }


def _of_settings(kind: type[Mechanism], definitions: dict[str, Any]) -> dict[str, Any]:
    name = f"mechanism-{kind.name}"
    if name not in definitions:
        hints = {key: hint for key, hint in annotations_of(kind).items() if key not in _NOT_GIVEN}
        defaults = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        properties: dict[str, Any] = {"name": {"enum": [kind.name]}}
        for key, hint in hints.items():
            properties[key] = _with_default(_of_setting(hint, definitions), defaults[key])
        definitions[name] = _object(kind, properties, ["name"])
    return {"$ref": f"#/$defs/{name}"}


def _of_setting(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """As `_of`, in the words that stand for what a file cannot hold: public counts, which lie in a file of their own."""
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return {"anyOf": [_of_setting(member, definitions) for member in get_args(hint)]}
    if kind is PublicCounts:
        return {"enum": ["counts"]}
    if kind is Mapping:
        return {"enum": ["public"]}
    return _of_settings(kind, definitions) if _is_mechanism(kind) else _of(hint, definitions)


def _is_mechanism(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Mechanism)


def _of_range(limit: Range) -> dict[str, float]:
    out: dict[str, float] = {}
    if math.isfinite(limit.low):
        out["exclusiveMinimum" if limit.low_open else "minimum"] = limit.low
    if math.isfinite(limit.high):
        out["exclusiveMaximum" if limit.high_open else "maximum"] = limit.high
    return out


def _of_dataclass(kind: Any, definitions: dict[str, Any], path: str) -> dict[str, Any]:
    """`path` is the key that it stands at; "" for the whole configuration."""
    name = kind.__name__
    if name not in definitions:
        hints, fields = annotations_of(kind), {field.name: field for field in dataclasses.fields(kind)}
        properties: dict[str, Any] = {}
        definitions[name] = {}  # so that one that holds itself would end
        for key, hint in hints.items():
            below = f"{path}.{key}".lstrip(".")
            if kind is PrivacyConfig and key == "mechanism":
                value = _of_mechanism(definitions)
            elif (
                options := fields[key].metadata.get("values")
            ) is not None:  # of each entry of a mapping, which may be null
                entry = {"anyOf": [_of(options, definitions), _PLAIN[types.NoneType]]}
                names = {"type": "array", "items": _PLAIN[str], "uniqueItems": True}
                value = {"anyOf": [names, {"type": "object", "additionalProperties": entry}]}
            else:
                value = _of(hint, definitions, below)
            comment = _described(comment_on(below, _kind_of(hints)))
            properties[key] = {**_with_default(value, fields[key].default), **comment}
        missing = dataclasses.MISSING
        required = [k for k in hints if fields[k].default is missing and fields[k].default_factory is missing]
        definitions[name] = _object(kind, properties, required)
    return {"$ref": f"#/$defs/{name}"}


def _kind_of(hints: Mapping[str, Any]) -> str | None:
    """The name by which a configuration chooses a dataclass among others; None if it does not."""
    hint = hints.get("kind")
    return str(get_args(hint)[0]) if get_origin(hint) is Literal else None


def _described(text: str | None, unless: str = "\0") -> dict[str, str]:
    """As the description; not what a dataclass without a docstring gets for one, which begins with `unless`."""
    return {"description": text} if text and not text.startswith(unless) else {}


def _with_default(value: dict[str, Any], default: Any) -> dict[str, Any]:
    return {**value, "default": default} if isinstance(default, (bool, int, float, str)) else value


def _object(kind: Any, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        **_described((kind.__doc__ or "").strip().partition("\n")[0], unless=f"{kind.__name__}("),
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
