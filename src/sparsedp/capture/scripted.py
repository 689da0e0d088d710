"""Functions that `torch.jit.script` compiled: which operations they run is not seen, so they are tried.

One unit stays as it is, all others get its values. What then stays the same everywhere depends on the sizes of the
batch alone, and is constant. What stays the same for that unit has its units on axis 0. Anything else may mix them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsedp.capture.functions import copied, like_unit, tensors_in, unchanged, with_tensors
from sparsedp.capture.tracking import UnitAxis

if TYPE_CHECKING:
    from sparsedp.capture.capture import Capture

_CALL = torch.jit.ScriptFunction.__call__


class ScriptedFunctions:
    """Stands before every scripted function that a forward pass calls, from `begin` to `end`."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._outer: list[Callable] = []  # of private modules which call one another

    def begin(self) -> None:
        thread = threading.get_ident()

        def call(function: Any, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread and self._capture.is_watching():
                return self._call(function, args, kwargs)
            return _CALL(function, *args, **kwargs)

        self._outer.append(torch.jit.ScriptFunction.__call__)
        torch.jit.ScriptFunction.__call__ = call  # type: ignore[assignment, method-assign]

    def end(self) -> None:
        torch.jit.ScriptFunction.__call__ = self._outer.pop()  # type: ignore[method-assign]

    def _call(self, function: Any, args: tuple, kwargs: dict) -> Any:
        capture = self._capture
        given = list(tensors_in((args, kwargs)))
        if not any(map(capture.is_data, given)):
            return _CALL(function, *args, **kwargs)
        with torch._C.DisableTorchFunction():
            copies, versions = [copied(tensor) for tensor in given], [tensor._version for tensor in given]
        out = _CALL(function, *args, **kwargs)

        def run(inputs: list[Tensor]) -> list[Tensor]:
            again, named = with_tensors((args, kwargs), map(copied, inputs))
            return list(tensors_in(_CALL(function, *again, **named)))

        with torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]), torch.no_grad():
            for tensor, version in zip(given, versions):
                if tensor._version != version:
                    capture.lose(tensor)
            for tensor, place in zip(tensors_in(out), self._places(run, given, copies)):
                if not tensor.requires_grad and place != _CONSTANT:  # one with a history is refused as any unseen one
                    capture.place(tensor, place)
        return out

    def _places(self, run: Callable, given: list[Tensor], copies: list[Tensor]) -> Iterator[UnitAxis | None]:
        """Where the units are in each output: not known, on axis 0, or `_CONSTANT`."""
        units, axes = self._capture.units, [self._capture.known_axis(tensor) for tensor in given]
        is_known = all(axis is not None for tensor, axis in zip(given, axes) if self._capture.is_data(tensor))
        first = run(copies)
        others = {
            kept: run([like_unit(tensor, axis, units, kept) for tensor, axis in zip(copies, axes)])
            for kept in ((0, units - 1) if is_known and units > 1 else ())
        }
        for number, out in enumerate(first):
            fits = out.ndim > 0 and len(out) == units
            if is_known and units > 1 and all(unchanged(out, other[number]) for other in others.values()):
                yield _CONSTANT
            elif (
                is_known
                and fits
                and all(unchanged(out[k : k + 1], other[number][k : k + 1]) for k, other in others.items())
            ):
                yield UnitAxis(0)
            else:
                yield None


_CONSTANT = UnitAxis(-1)  # in no dimension
