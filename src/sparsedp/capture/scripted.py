"""Functions that `torch.jit.script` compiled: which operations they run is not seen, so they are tried.

A half of the units stays as it is, all others get the values of one of them. What then stays the same everywhere depends on
the sizes of the batch alone, and is constant. What stays the same for that half has its units on axis 0. Anything else may mix
them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsedp._torch import without_functions
from sparsedp.capture.trials import copied, exchanged, tensors_in, unchanged, unchanged_units, with_tensors
from sparsedp.capture.units import UnitAxis

if TYPE_CHECKING:
    from sparsedp.capture.capture import Capture

_CALL = torch.jit.ScriptFunction.__call__


class ScriptedFunctions:
    """Stands before every scripted function that a forward pass calls, from `begin` to `end`."""

    def __init__(self, capture: Capture, halves: Callable[[int, bool], list[Tensor]]) -> None:
        self._capture, self._halves = capture, halves
        self._seen: set[tuple[int, str]] = set()
        self._outer: list[Callable] = []  # what `begin` replaced, several where private modules call one another

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
        with without_functions():
            copies, versions = [copied(tensor) for tensor in given], [tensor._version for tensor in given]
        out = _CALL(function, *args, **kwargs)

        def run(inputs: list[Tensor]) -> list[Tensor]:
            again, named = with_tensors((args, kwargs), map(copied, inputs))
            return list(tensors_in(_CALL(function, *again, **named)))

        with without_functions(), torch.random.fork_rng(devices=[]), torch.no_grad():
            for tensor, version in zip(given, versions):
                if tensor._version != version:
                    capture.lose(tensor)
            use = (id(function), capture.where())
            is_first = use not in self._seen
            self._seen.add(use)
            for tensor, place in zip(tensors_in(out), self._places(run, given, copies, is_first)):
                if not tensor.requires_grad and place != _CONSTANT:  # one with a history is refused as any unseen one
                    capture.place(tensor, place)
        return out

    def _places(
        self, run: Callable, given: list[Tensor], copies: list[Tensor], is_first: bool
    ) -> Iterator[UnitAxis | None]:
        """Where the units are in each output: not known, on axis 0, or `_CONSTANT`."""
        units, axes = self._capture.units, [self._capture.known_axis(tensor) for tensor in given]
        is_known = all(axis is not None for tensor, axis in zip(given, axes) if self._capture.is_data(tensor))
        first = run(copies)
        others = []
        for kept in self._halves(units, is_first) if is_known and units > 1 else ():
            source = torch.where(kept, torch.arange(units), kept.nonzero()[0])
            others.append((kept, run([exchanged(tensor, axis, source) for tensor, axis in zip(copies, axes)])))
        if is_known and units == 1:  # no other unit to exchange it for: its own values in another order
            turned = [tensor.flip(-1) if tensor.ndim else tensor for tensor in copies]
            others.append((torch.zeros(1, dtype=torch.bool), run(turned)))
        # In another order, units must get the same: constants by place in the batch would stay where they are.
        order = torch.arange(units).roll(1)
        given_in_order = [exchanged(tensor, axis, order) for tensor, axis in zip(copies, axes)]
        moved = run(given_in_order) if is_known and units > 1 else None
        for number, out in enumerate(first):
            if others and all(unchanged(out, other[number]) for _, other in others):
                yield _CONSTANT
            elif others and all(unchanged_units(out, other[number], UnitAxis(0), kept) for kept, other in others):
                is_alike = len(out) == units and (moved is None or unchanged(out[order], moved[number]))
                yield UnitAxis(0) if is_alike else None
            else:
                yield None


_CONSTANT = UnitAxis(-1)  # in no dimension
