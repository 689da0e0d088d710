"""The errors and warnings that SparseDP raises, and what their messages have in common."""

from __future__ import annotations

import difflib
import errno
import os
import pickle
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any


def suggestion(given: Any, allowed: Iterable[str]) -> str:
    """ ". Did you mean 'x'?", or nothing."""
    names = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(str(given).lower(), list(names), n=1)
    return f". Did you mean '{names[close[0]]}'?" if close else ""


def one_line(error: BaseException) -> str:
    """What an error says, in one line; with its type if it is not SparseDP's own, nor the operating system's."""
    if isinstance(error, pickle.UnpicklingError):  # torch would have its reader run what is in the file
        return "it holds other things than weights and plain values, which are not read: they could run code"
    if isinstance(error, OSError) and error.strerror:
        return _of_the_system(error)
    text = " ".join(str(error).split())
    if isinstance(error, SparseDPError) and error.refusal is not None:
        text = " ".join(f"{error.message} {error.refusal.location}".split())
    return text if isinstance(error, (SparseDPError, OSError)) else f"{type(error).__name__}: {text}"


_MENDS = {
    errno.EACCES: "Look who may read and write it, and its folder",
    errno.EPERM: "Look who may read and write it, and its folder",
    errno.EROFS: "Name a folder on another disk",
    errno.ENOSPC: "Make room on its disk",
}


def _of_the_system(error: OSError) -> str:
    """What an error of the operating system is about, what it says, and what to do."""
    about = "" if error.filename is None else f"{os.fsdecode(error.filename)}: "
    mend = _MENDS.get(error.errno or 0, "")
    return " ".join(f"{about}{error.strerror}{f'. {mend}' if mend else ''}".split())


_ALL_AT_ONCE = "  sparsedp.explain(model, loss_fn, batch) shows all refusals of a model at once."
_WIDTH = 120  # of a refusal that is printed for itself
# Words of reasons that say themselves why something is refused.
_SAYING_THE_RISK = ("clipping bounds nothing", "void the guarantee", "without noise")


@dataclass(frozen=True)
class Refusal:
    """One thing that private training refuses: what, where in the code, and what to write there instead."""

    error: str  # the name of the error's class
    reason: str  # what is wrong, in sentences
    risk: str = ""  # why it is refused, in one sentence
    operation: str = ""
    operands: tuple[str, ...] = ()  # their shapes; '*' is behind the size of the axis that has the units
    module: str = ""  # the innermost part of the model that ran, by its name
    file: str = ""  # of the user's or a package's code
    line: int = 0
    function: str = ""
    source: str = ""  # the statement there
    origin: str = ""  # the operation that combined the units before, or after which it is not known where they are
    suggestion: tuple[str, ...] = ()  # lines of source with '-' or '+' before them, or sentences

    @property
    def location(self) -> str:
        return f"({self.file}:{self.line})" if self.file else ""

    def details(self) -> str:
        """Everything but the reason, a line each."""
        lines = []
        if self.file:
            lines.append(f'File "{self.file}", line {self.line}, in {self.function}')
            lines += [f"  {line}" for line in self.source.splitlines()]
        if self.operands:
            legend = "   (* = axis of units)" if any("*" in operand for operand in self.operands) else ""
            lines.append(f"{self.operation}: {', '.join(self.operands)}{legend}")
        if self.origin:
            lines.append(f"This goes back to operation {self.origin}.")
        if self.risk and not any(words in self.reason for words in _SAYING_THE_RISK):
            lines.append(f"Risk: {self.risk}")
        if self.suggestion:
            lines += ["Suggestion:", *(f"  {line}" for line in self.suggestion)]
        return "\n".join(f"  {line}" for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """In plain values, for JSON."""
        return {**asdict(self), "operands": list(self.operands), "suggestion": list(self.suggestion)}

    def __str__(self) -> str:
        return "\n".join(filter(None, [*textwrap.wrap(f"{self.error}: {self.reason}", _WIDTH), self.details()]))


class SparseDPError(Exception):
    """Base of every error that SparseDP raises on purpose. One that comes from a place in a model's code tells it."""

    _refusal: Refusal | Callable[[], Refusal] | None = None

    @property
    def refusal(self) -> Refusal | None:
        """Where in a model's code it comes from, and what to write instead; None where that is not known."""
        if self._refusal is not None and not isinstance(self._refusal, Refusal):
            self._refusal = self._refusal()
        return self._refusal

    @property
    def is_located(self) -> bool:
        return self._refusal is not None

    def locate(self, refusal: Refusal | Callable[[], Refusal]) -> None:
        """Sets what `refusal` says; a function is called when somebody asks, as reading source takes a while."""
        self._refusal = refusal

    @property
    def message(self) -> str:
        """What it says, without the place."""
        return super().__str__()

    def __str__(self) -> str:
        details = "" if self.refusal is None else self.refusal.details()
        return f"{self.message}\n{details}\n{_ALL_AT_ONCE}" if details else self.message

    def __reduce__(self) -> Any:
        assert self.refusal is self._refusal  # which a function cannot be, in a pickle
        return super().__reduce__()


class UnsupportedError(SparseDPError):
    """A module, operation or setting whose privacy cannot be accounted for, refused by name."""


class UnitsMixedError(SparseDPError):
    """One unit's loss depends on another unit, so that clipping would bound nothing."""


class NonFiniteGradientError(SparseDPError):
    """A unit's gradient is NaN or infinite; the step was not taken."""


class DivergedError(SparseDPError):
    """The weights, or what the model makes of sound data, have grown beyond all bounds."""


class RankLostError(SparseDPError):
    """A process of a run of several did not answer."""


class ConfigError(SparseDPError):
    """A configuration has an unknown key, a wrong type or an impossible value."""


class DataError(SparseDPError):
    """A data file is malformed beyond the stated tolerance, or an example holds what the model or the loss does not take.

    It is said in one line: where in the code it was noticed is behind it, and nothing is to be written differently there.
    """

    places: tuple[int, ...] = ()  # of the examples in their batch, where they are known; the first ones
    places_of: int = 0  # how many examples that batch has

    def __str__(self) -> str:
        location = "" if self.refusal is None else self.refusal.location
        return f"{self.message} {location}" if location else self.message


def refuse_labels(labels: Any, error: RuntimeError) -> None:
    """Raises a `DataError` if it is the type of labels that a loss function stumbled over."""
    kind = str(getattr(labels, "dtype", "")).removeprefix("torch.")
    words = ("can't be cast", "dtype", "scalar type", "not implemented for")
    if kind and not kind.startswith(("float", "bfloat")) and any(word in str(error) for word in words):
        raise DataError(
            f"The labels are of type {kind}, which the loss function does not take: make them floating-point numbers in the data "
            "set, with labels.float(), if the loss compares numbers (as binary cross-entropy and squared errors do)."
        ) from error


class CheckpointError(SparseDPError):
    """A checkpoint is damaged, foreign, or belongs to another plan."""


class SparseDPWarning(UserWarning):
    """Something that weakens a guarantee or is probably not intended."""


class UtilityWarning(SparseDPWarning):
    """The run is private, and likely to learn little."""
