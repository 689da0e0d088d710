"""Tells of an error in a forward pass where in the model's code it comes from, on which tensors, and what to write instead."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture import suggestions
from sparsedp.capture.constants_by_place import BY_PLACE
from sparsedp.capture.forward_pass import ForwardPass
from sparsedp.capture.hooks import LISTENING
from sparsedp.capture.marked_shapes import described
from sparsedp.capture.names import is_in_place, operands_of, operation_name, written_tensors
from sparsedp.capture.ops.losses import OF_CLASSES
from sparsedp.capture.places import Origin, Origins, Place, place_in_code
from sparsedp.capture.tensors import KnownTensors
from sparsedp.capture.trials import tensors_in, with_tensors
from sparsedp.capture.units import VALID_POSITIONS, Mixed, UnitData
from sparsedp.errors import DataError, Refusal, SparseDPError, UnitsMixedError, UnsupportedError

_OPERANDS = 6  # that a message shows


class Refusals:
    """Adds to errors what is known of the operation that they come from."""

    def __init__(self, current: ForwardPass, known: KnownTensors, origins: Origins) -> None:
        self._current, self._known, self._origins = current, known, origins

    def of_operation(self, error: Exception, func: Callable, args: tuple, kwargs: dict) -> Exception:
        """The error to raise for one that came up when an operation ran: the same one, or ours if capture is to blame."""
        name = operation_name(func)
        if not isinstance(error, SparseDPError):
            if not self._fails_in_capture_alone(error, name, func, args, kwargs):
                return error
            error = UnsupportedError(
                f"Operation '{name}'{self._current.where()} cannot be followed in this form: capture failed on it with "
                f"{type(error).__name__}: {error}. Write it in another way, and please report it."
            )
        if isinstance(error, DataError) and not error.is_located:
            error.args = (error.message + self._current.rows_of(error),)
        if not error.is_located:
            operands = operands_of(args, kwargs)
            place = place_in_code()
            origin = next((o for o in map(self._origins.of, operands) if o is not None), None)
            write = self._writer_of_suggestion(error, name, operands, place, origin)
            self._tell(error, name, operands, place, origin, write)
        return error

    def locate(
        self, error: SparseDPError, operation: str = "", place: Place | None = None, suggestion: tuple[str, ...] = ()
    ) -> SparseDPError:
        """Adds the line that runs now, or `place`, to an error of something that is no operation of torch's."""
        if not error.is_located:
            self._tell(error, operation, [], place or place_in_code(), None, lambda: suggestion)
        return error

    def _tell(
        self,
        error: SparseDPError,
        name: str,
        operands: list[Tensor],
        place: Place | None,
        origin: Origin | None,
        write: Callable[[], tuple[str, ...]],
    ) -> None:
        kind, reason, risk = type(error).__name__, error.message, risk_of(error)
        shapes = tuple(described(tensor, self._known) for tensor in operands[:_OPERANDS])
        module = next((module for module in reversed(self._current.modules) if module), "")
        is_elsewhere = origin is not None and (origin.operation != name or origin.place != place)
        before = str(origin) if is_elsewhere else ""
        error.locate(
            lambda: Refusal(kind, reason, risk, name, shapes, module, **_at(place), origin=before, suggestion=write())
        )

    def _writer_of_suggestion(
        self, error: SparseDPError, name: str, operands: list[Tensor], place: Place | None, origin: Origin | None
    ) -> Callable[[], tuple[str, ...]]:
        """What makes the suggestion, when somebody asks for it: it does not hold on to tensors."""
        reason = error.message
        if name in LISTENING:
            return partial(suggestions.removed, place)
        if is_in_place(name) and re.search(r"in place|writes|through x\.data", reason):
            return partial(suggestions.without_writing, place, name)
        if "takes other arguments" in reason:
            return partial(suggestions.functional, place, name)
        if "acts on a sum or mean" in reason:
            return partial(suggestions.mean_of_all, place)
        if origin is not None:
            if origin.operation in OF_CLASSES and any(self._is_mean_of_valid(tensor) for tensor in operands):
                return partial(suggestions.over_all_positions, origin.place, origin.operation)
            reduced = suggestions.Reduced(origin.operation, origin.shapes[0], origin.axes[0])
            return partial(suggestions.per_unit, origin.place, reduced)
        if isinstance(error, UnitsMixedError) and BY_PLACE not in reason:
            if name in OF_CLASSES:
                return partial(suggestions.over_all_positions, place, name)
            first = next((tensor for tensor in operands if self._known.is_data(tensor)), None)
            axis = None if first is None else self._known.known_axis(first)
            if first is not None and axis is not None:
                return partial(suggestions.per_unit, place, suggestions.Reduced(name, tuple(first.shape), axis.dim))
        return tuple

    def _is_mean_of_valid(self, tensor: Tensor) -> bool:
        info = self._known.get(tensor)
        return isinstance(info, Mixed) and info.operation == VALID_POSITIONS

    def _fails_in_capture_alone(self, error: Exception, name: str, func: Callable, args: tuple, kwargs: dict) -> bool:
        """Whether an operation that raised an error which is not ours runs when capture does not look."""
        if name == "backward" or not any(map(self._is_followed, operands_of(args, kwargs))):
            return False
        written = written_tensors(func, args, kwargs)
        if written and isinstance(error, RuntimeError):
            return False  # such as that of a write to a leaf
        copies = {id(tensor): tensor.detach().clone() for tensor in written}  # it must not write twice
        again, named = with_tensors((args, kwargs), iter([copies.get(id(t), t) for t in tensors_in((args, kwargs))]))
        try:
            with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled() and not written):
                func(*again, **named)
        except Exception:
            return False
        return True

    def _is_followed(self, tensor: Tensor) -> bool:
        return isinstance(self._known.get(tensor), (UnitData, Mixed)) or self._known.expression(tensor) is not None


def located_refusal(error: SparseDPError, operation: str, shape: str, place: Place) -> SparseDPError:
    """An error of a backward pass, with the line of the forward pass that it goes back to."""
    kind, reason, risk, shapes = type(error).__name__, error.message, risk_of(error), (shape,) if shape else ()
    error.locate(lambda: Refusal(kind, reason, risk, operation, shapes, **_at(place)))
    return error


def _at(place: Place | None) -> dict[str, Any]:
    """What a refusal says of a place."""
    if place is None:
        return {}
    statement = place.statement
    text = "" if statement is None else statement.text
    return {"file": place.file, "line": place.line, "function": place.function, "source": text}


def risk_of(error: SparseDPError) -> str:
    """Why something is refused, in one sentence."""
    if isinstance(error, DataError):
        return ""  # it is the data that are wrong
    if isinstance(error, UnitsMixedError) or re.search("mix (its units|the units)", error.message):
        return "A unit's gradient would depend on other units, so that clipping it bounds nothing."
    if "on parameter" in error.message:
        return (
            "Which unit a part of the parameter's gradient belongs to would not be known, so it could not be clipped."
        )
    return "What capture cannot follow could bring private data to the weights without clipping or noise."
