"""The errors and warnings that SparseDP raises, and what their messages have in common."""

from __future__ import annotations

import difflib
import pickle
from collections.abc import Iterable
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
    text = " ".join(str(error).split())
    return text if isinstance(error, (SparseDPError, OSError)) else f"{type(error).__name__}: {text}"


class SparseDPError(Exception):
    """Base of every error that SparseDP raises on purpose."""


class UnsupportedError(SparseDPError):
    """A module, operation or setting whose privacy cannot be accounted for, refused by name."""


class UnitsMixedError(SparseDPError):
    """One unit's loss depends on another unit, so that clipping would bound nothing."""


class NonFiniteGradientError(SparseDPError):
    """A unit's gradient is NaN or infinite; the step was not taken."""


class ConfigError(SparseDPError):
    """A configuration has an unknown key, a wrong type or an impossible value."""


class DataError(SparseDPError):
    """A data file is malformed beyond the stated tolerance."""


class CheckpointError(SparseDPError):
    """A checkpoint is damaged, foreign, or belongs to another plan."""


class SparseDPWarning(UserWarning):
    """Something that weakens a guarantee or is probably not intended."""
