"""The JSON schema of configurations, for editors: made from the same annotations that configurations are checked by."""

from __future__ import annotations

import dataclasses
import math
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from sparsedp.cli.config.config import Config
from sparsedp.cli.config.schema import Address, OneOf, Range, annotations_of

_PLAIN: dict[Any, dict[str, Any]] = {
    Address: {"type": "string", "pattern": r"^[\w.]+:[\w.]+$"},
    types.NoneType: {"type": "null"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    Any: {},
}
# What may be written in another way than the annotation says, and is put right before it is checked.
_SPELLED_OTHERWISE = {"mechanism": {"type": "string"}}


def config_schema() -> dict[str, Any]:
    """Of a whole configuration. A file may leave out what is given with --set."""
    definitions: dict[str, Any] = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A configuration of SparseDP",
        **_of(Config, definitions),
        "$defs": definitions,
    }


def _of(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if dataclasses.is_dataclass(hint):
        return _of_dataclass(hint, definitions)
    kind = get_origin(hint) or hint
    if kind in (Union, types.UnionType):
        return {"anyOf": [_of(member, definitions) for member in get_args(hint)]}
    if kind is Annotated:
        inner, *limits = get_args(hint)
        out = dict(_of(inner, definitions))
        for limit in limits:
            out |= {"enum": list(limit.names())} if isinstance(limit, OneOf) else _of_range(limit)
        return out
    if kind is Literal:
        return {"enum": list(get_args(hint))}
    if kind is list:
        return {"type": "array", "items": _of(get_args(hint)[0], definitions)}
    return {"type": "object"} if kind is dict else _PLAIN[kind]


def _of_range(limit: Range) -> dict[str, float]:
    out: dict[str, float] = {}
    if math.isfinite(limit.low):
        out["exclusiveMinimum" if limit.low_open else "minimum"] = limit.low
    if math.isfinite(limit.high):
        out["exclusiveMaximum" if limit.high_open else "maximum"] = limit.high
    return out


def _of_dataclass(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in definitions:
        hints, defaults = annotations_of(kind), {field.name: field for field in dataclasses.fields(kind)}
        properties: dict[str, Any] = {}
        definitions[name] = {}  # so that one that holds itself would end
        for key, hint in hints.items():
            value = _of(hint, definitions)
            if key in _SPELLED_OTHERWISE:
                value = {"anyOf": [value, _SPELLED_OTHERWISE[key]]}
            default = defaults[key].default
            if isinstance(default, (bool, int, float, str)):
                value = {**value, "default": default}
            properties[key] = value
        missing = dataclasses.MISSING
        required = [k for k in hints if defaults[k].default is missing and defaults[k].default_factory is missing]
        definitions[name] = {
            "type": "object",
            "description": (kind.__doc__ or "").strip().partition("\n")[0],
            "properties": properties,
            "required": required,
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}
