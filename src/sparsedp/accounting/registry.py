"""What an accountant is, and where accountants are known by their names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from dp_accounting import DpEvent

from sparsedp.errors import ConfigError, suggestion


class Accountant(ABC):
    """Says what composed events cost. A subclass is made known by its `name` with `@register_accountant`.

    `leaves` are distinct events and how often each of them was composed, as `canonical` gives them: at least one, and none
    that is without noise; those cases are answered before an accountant is asked. An answer must be an upper bound, within
    about `relative_error` of the least one if the accountant can choose how exact it is. An event that it does not know must
    raise `UnsupportedError`.
    """

    name: ClassVar[str]
    summary: ClassVar[str]  # what it is, for help texts, in a few words
    # Whether the statement shows dp_accounting's epsilon too, where that is more than a tenth above this one's.
    compared_with_dp_accounting: ClassVar[bool] = True
    out_of_reach: ClassVar[str] = ""  # what calibration adds when no noise reaches a target, a sentence

    @abstractmethod
    def epsilon(self, leaves: Mapping[DpEvent, int], delta: float, relative_error: float) -> float:
        """An epsilon for which the composition is (epsilon, delta)-DP; 0 < delta < 1."""

    @abstractmethod
    def delta(self, leaves: Mapping[DpEvent, int], epsilon: float, relative_error: float) -> float:
        """A delta for which the composition is (epsilon, delta)-DP; epsilon >= 0."""


class UnknownAccountantError(ConfigError, ValueError):
    """No accountant has this name."""


_ACCOUNTANTS: dict[str, Accountant] = {}
_Class = TypeVar("_Class", bound=type[Accountant])


def register_accountant(cls: _Class) -> _Class:
    """Class decorator: makes an accountant known by its `name`, wherever an accountant can be named."""
    name, summary = getattr(cls, "name", None), getattr(cls, "summary", None)
    if not isinstance(name, str) or not name.isidentifier() or not isinstance(summary, str):
        raise ConfigError(
            f"{cls.__name__}: an accountant needs a name, an identifier, and a summary; got {name!r}, {summary!r}"
        )
    registered = _ACCOUNTANTS.get(name)
    if registered is not None and type(registered) is not cls:
        raise ConfigError(
            f"{cls.__name__}: another accountant, {type(registered).__name__}, is already known as {name!r}"
        )
    _ACCOUNTANTS[name] = cls()
    return cls


def accountant_names() -> tuple[str, ...]:
    """The names of all accountants, in the order in which they were registered."""
    return tuple(_ACCOUNTANTS)


def find_accountant(name: Any) -> Accountant:
    """The accountant of this name, or an error with the names that there are."""
    if not isinstance(name, str) or name not in _ACCOUNTANTS:
        hint = suggestion(name, _ACCOUNTANTS)
        raise UnknownAccountantError(f"accountant must be one of {', '.join(_ACCOUNTANTS)}; got {name!r}{hint}")
    return _ACCOUNTANTS[name]


def describe_accountants() -> str:
    """One line for help texts: every name with its summary."""
    return "; ".join(f"{name}: {accountant.summary}" for name, accountant in _ACCOUNTANTS.items())
