"""The mechanism that a configuration names: by its registered name, or by the address of a class of the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparsedp.cli.config.trust import Code
from sparsedp.errors import ConfigError
from sparsedp.mechanisms import Mechanism


def mechanism_addresses(values: Mapping[str, Any], key: str) -> dict[str, str]:
    """The keys in the section `key` that name mechanisms of the user's own, and what they name.

    One may stand among the settings of another, as AdaFEST's `preselect` does.
    """
    return {where: name for where, name in _names(values, key) if isinstance(name, str) and ":" in name}


def with_registered_names(values: Mapping[str, Any], key: str, code: Code) -> dict[str, Any]:
    """What `mechanism_from_dict` takes, for the section `key`. An address is found where `code` may come from, or refused."""
    addresses = mechanism_addresses(values, key)
    return _renamed(values, key, {where: _find(code, address, where) for where, address in addresses.items()})


def _names(values: Mapping[str, Any], key: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if name == "name":
            yield f"{key}.name", value
        elif isinstance(value, Mapping):
            yield from _names(value, f"{key}.{name}")


def _renamed(values: Mapping[str, Any], key: str, names: Mapping[str, str]) -> dict[str, Any]:
    """The values with registered names in place of addresses."""
    return {
        name: _renamed(value, f"{key}.{name}", names)
        if isinstance(value, Mapping)
        else names.get(f"{key}.{name}", value)
        for name, value in values.items()
    }


def _find(code: Code, address: str, key: str) -> str:
    """The name that the mechanism at "package.module:name" is registered by."""
    mechanism = code.find(address, key)
    if not (isinstance(mechanism, type) and issubclass(mechanism, Mechanism) and "name" in vars(mechanism)):
        raise ConfigError(f"{key}: {address} is no sparsedp.Mechanism with a name of its own")
    return mechanism.name
