"""Plain values into frozen dataclasses. What does not fit is refused, by the full path of its key."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

from sparsedp.errors import ConfigError
from sparsedp.errors import suggestion as suggestion

T = TypeVar("T")
# The address of a user's own callable, "package.module:name".
Address = NewType("Address", str)


class SchemaError(ConfigError):
    """What is wrong at the key `path`."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"{path}: {problem}" if path else problem)
        self.path = path


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; the ends belong to it unless they are `open`."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return above and below and math.isfinite(value)

    def __str__(self) -> str:
        low = f"{'above' if self.low_open else 'of at least'} {self.low:g}" if math.isfinite(self.low) else ""
        high = f"{'below' if self.high_open else 'of at most'} {self.high:g}" if math.isfinite(self.high) else ""
        return " and ".join(filter(None, (low, high)))


@dataclass(frozen=True)
class OneOf:
    """Text that is one of the `names` of a registry, as they are when a value is read: others may be registered until then."""

    names: Callable[[], Iterable[str]]

    def __contains__(self, value: str) -> bool:
        return value in self.names()

    def __str__(self) -> str:
        return " or ".join(self.names())


def build(kind: type[T], values: Any, path: str = "") -> T:
    """The mapping `values` as the dataclass `kind`, whose `__post_init__` may raise SchemaError for a key."""
    if not isinstance(values, Mapping):
        raise SchemaError(path, f"expected {_keys_in_words(kind)}; got {_shown(values)}")
    hints = annotations_of(kind)
    for key in values:
        if key not in hints:
            raise SchemaError(
                _join(path, key), f"unknown key; expected one of {', '.join(hints)}{suggestion(key, hints)}"
            )
    given = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        where = _join(path, field.name)
        if field.name not in hints:
            continue
        if field.name in values:
            given[field.name] = convert(hints[field.name], values[field.name], where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise SchemaError(where, f"missing; expected {expected(hints[field.name])}")
    try:
        return kind(**given)
    except SchemaError as error:
        problem = str(error).removeprefix(f"{error.path}: ")
        raise SchemaError(_join(path, error.path), problem) from None


def convert(hint: Any, value: Any, path: str) -> Any:
    """The value as the annotation says, or SchemaError with what was expected."""
    members = _members(hint)
    dataclass_members: list[Any] = [m for m in members if dataclasses.is_dataclass(m)]
    if dataclass_members and value is not None:
        if len(dataclass_members) == 1:
            return build(dataclass_members[0], value, path)
        return build(_by_kind(dataclass_members, value, path), value, path)
    for member in members:
        if dataclasses.is_dataclass(member):  # the value is null, which another member may allow
            continue
        converted = _rule(member).convert(member, value, path)
        if converted is not _NO:
            return converted
    quotes = ", which yes and no, on and off are without quotes" if isinstance(value, bool) and str in members else ""
    raise SchemaError(path, f"expected {expected(hint)}; got {_shown(value)}{quotes}{_closest(members, value)}")


def expected(hint: Any) -> str:
    """The annotation in words."""
    return " or ".join(
        _keys_in_words(member) if dataclasses.is_dataclass(member) else _rule(member).describe(member)
        for member in _members(hint)
    )


# ------------------------------------------------------------------ a rule for each type

_NO = object()


@dataclass(frozen=True)
class _Rule:
    convert: Callable[[Any, Any, str], Any]  # (annotation, value, path): the value as the annotation says, or _NO
    describe: Callable[[Any], str]  # the annotation in words


def _annotated(hint: Any, value: Any, path: str) -> Any:
    inner, *limits = get_args(hint)
    converted = _rule(inner).convert(inner, value, path)
    return converted if converted is not _NO and all(converted in limit for limit in limits) else _NO


def _describe_annotated(hint: Any) -> str:
    inner, *limits = get_args(hint)
    if any(isinstance(limit, OneOf) for limit in limits):
        return " and ".join(map(str, limits))  # the names say it all
    return " ".join([expected(inner), *map(str, limits)])


def _list(hint: Any, value: Any, path: str) -> Any:
    if not isinstance(value, list):
        return _NO
    (item,) = get_args(hint)
    return [convert(item, entry, f"{path}[{i}]") for i, entry in enumerate(value)]


def _dict(hint: Any, value: Any, path: str) -> Any:
    return dict(value) if isinstance(value, Mapping) and all(isinstance(k, str) for k in value) else _NO


def _address(hint: Any, value: Any, path: str) -> Any:
    module, colon, name = value.partition(":") if isinstance(value, str) else ("", "", "")
    names = [*module.split("."), *name.split(".")]
    return value if colon and all(part.isidentifier() for part in names) else _NO


def _int(hint: Any, value: Any, path: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _NO
    return int(value) if isinstance(value, int) or value.is_integer() else _NO  # 1e6 is a whole number


def _float(hint: Any, value: Any, path: str) -> Any:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else _NO


def _instance(kind: type) -> Callable[[Any, Any, str], Any]:
    return lambda hint, value, path: value if isinstance(value, kind) else _NO


_RULES: dict[Any, _Rule] = {
    Annotated: _Rule(_annotated, _describe_annotated),
    Literal: _Rule(
        lambda hint, value, path: value if value in get_args(hint) else _NO,
        lambda hint: " or ".join(map(str, get_args(hint))),
    ),
    list: _Rule(_list, lambda hint: f"a list, each {expected(get_args(hint)[0])}"),
    dict: _Rule(_dict, lambda hint: "a mapping"),
    Address: _Rule(_address, lambda hint: "'package.module:name'"),
    types.NoneType: _Rule(_instance(types.NoneType), lambda hint: "null"),
    bool: _Rule(_instance(bool), lambda hint: "true or false"),
    int: _Rule(_int, lambda hint: "a whole number"),
    float: _Rule(_float, lambda hint: "a number"),
    str: _Rule(_instance(str), lambda hint: "text"),
}


def _rule(hint: Any) -> _Rule:
    """The rule for an annotation that is neither a union nor a dataclass."""
    kind = get_origin(hint) or hint
    if kind not in _RULES:
        raise TypeError(f"the schema has no rule for {hint!r}")
    return _RULES[kind]


def _keys_in_words(kind: Any) -> str:
    return f"a mapping with the keys {', '.join(keys_of(kind))}"


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _by_kind(members: list[Any], values: Any, path: str) -> Any:
    """The dataclass whose `kind` is that of the values."""
    if not isinstance(values, Mapping):
        raise SchemaError(path, f"expected a mapping with the key kind; got {_shown(values)}")
    hints = {member: get_type_hints(member, include_extras=True)["kind"] for member in members}
    wanted = " or ".join(expected(hint) for hint in hints.values())
    where = _join(path, "kind")
    if "kind" not in values:
        raise SchemaError(where, f"missing; expected {wanted}")
    for member, hint in hints.items():
        if _rule(hint).convert(hint, values["kind"], where) is not _NO:
            return member
    problem = f"expected {wanted}; got {_shown(values['kind'])}{_closest(hints.values(), values['kind'])}"
    raise SchemaError(where, problem)


def _closest(members: Iterable[Any], value: Any) -> str:
    return suggestion(value, [choice for member in members for choice in _choices(member)])


def _choices(hint: Any) -> Iterable[str]:
    """The texts that an annotation allows, if it lists them."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    limits = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return [name for limit in limits if isinstance(limit, OneOf) for name in limit.names()]


def keys_of(kind: Any) -> list[str]:
    return list(annotations_of(kind))


def annotations_of(kind: Any) -> dict[str, Any]:
    """The annotations of the fields that can be given: all but those whose metadata say `given: False`."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.metadata.get("given", True)}


def all_paths(kind: Any, path: str = "") -> Iterator[str]:
    """The full path of every key that a dataclass, or one nested in it, can have."""
    for name, hint in annotations_of(kind).items():
        where = _join(path, name)
        yield where
        for member in _members(hint):
            if dataclasses.is_dataclass(member):
                yield from all_paths(member, where)


def _join(path: str, key: Any) -> str:
    return ".".join(filter(None, (path, str(key))))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
