"""Operations that write in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsedp._torch import functorch_interpreter
from sparsedp.capture.expressions import Expression
from sparsedp.capture.forward_pass import ForwardPass
from sparsedp.capture.history import HiddenHistory
from sparsedp.capture.module_state import ModuleState
from sparsedp.capture.ops.indexing import is_by_numbers, written_axis
from sparsedp.capture.ops.registry import SHAPE_IN_PLACE, VALUES_IN_PLACE, plain_name
from sparsedp.capture.owned_rows import is_shared_along
from sparsedp.capture.results import Results
from sparsedp.capture.tensors import Constant, Derived, KnownTensors, memory_of
from sparsedp.capture.unit_memory import UnitMemory
from sparsedp.capture.units import Info, Mixed, OneUnit, UnitAxis, UnitData

_OVERWRITING = {"copy_", "zero_", "fill_"}  # whatever was there before

RunUse = Callable[[str, Callable, tuple, dict, list[Expression]], Any]


class Writes:
    """Runs operations that write in place, and notes where units are afterwards. `run_use` runs one that uses a parameter."""

    def __init__(
        self,
        current: ForwardPass,
        known: KnownTensors,
        state: ModuleState,
        memory: UnitMemory,
        history: HiddenHistory,
        results: Results,
        run_use: RunUse,
    ) -> None:
        self._current, self._known, self._state, self._memory = current, known, state, memory
        self._history, self._results, self._run_use = history, results, run_use

    def run(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict,
        target: Tensor,
        data: list[Tensor],
        expressions: list[Expression],
        shared: bool,
        drawn: bool,
    ) -> Any:
        """An operation that changes `target` in place. It takes activations `data`, parameters and, if `shared`, inputs that
        all units share; if `drawn`, numbers from the key have a part in it."""
        protected = self._state.whose_memory(target)
        if protected is not None:
            if data or shared:
                raise self._state.refuse_write(protected)
            return self._state.write_constants(protected, func, args, kwargs, target)
        if expressions:
            return self._run_with_parameters(name, func, args, kwargs, target, data, expressions)
        before = self._known.info(target)
        if plain_name(name) in SHAPE_IN_PLACE and isinstance(before, UnitData):
            return self._change_shape(name, func, args, kwargs, target, before)
        is_looked_at = (data or drawn) and self._results.is_constant(target)
        alike = self._axes_alike(name, kwargs, target) if is_looked_at else None
        out = func(*args, **kwargs)
        if data:
            after = self._after(name, args, kwargs, target, before, data)
            after = self._unless_by_place(name, args, kwargs, target, data, after, alike)
            self._known[target] = after
            if not _is_placed(after):
                self._results.origins.note(target, name, data)
            if after != before or (not _is_placed(after) and not _writes_constants(name, target, data)):
                self._memory.lose_aliases(target)
            if not torch.is_grad_enabled():
                self._history.add(target, target.grad_fn)
        elif drawn and not shared:
            self._results.note_drawn(name, args, kwargs, target, alike)
        return out

    def _run_with_parameters(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict,
        target: Tensor,
        data: list[Tensor],
        expressions: list[Expression],
    ) -> Any:
        if kwargs.get("out") is not None:
            reason = "it writes into a tensor that is there already"
        elif not data:
            return self._write_parameters(func, args, kwargs, target, expressions)
        elif any(expression.tensor is target for expression in expressions):
            reason = "it changes a copy of the parameter in place"
        else:
            return self._run_use(name, func, args, kwargs, expressions)
        raise self._current.refuse(name, expressions[0].names, reason, "use the form that returns a new tensor")

    def _write_parameters(
        self, func: Callable, args: tuple, kwargs: dict, target: Tensor, expressions: list[Expression]
    ) -> Any:
        """Changes a copy of parameters, or writes one into a constant: what has its memory is computed from them all.

        Autograd follows such writes, also into views. Uses before the write refuse in backward (`expressions.py`).
        """
        out = func(*args, **kwargs)
        parameters = tuple(dict(pair for e in expressions for pair in e.parameters).items())
        drawn = any(e.drawn for e in expressions)
        memory = memory_of(target)
        for tensor in [target, *self._known.tensors()]:
            if not tensor.requires_grad or (tensor is not target and memory_of(tensor) != memory):
                continue
            before = self._known.get(tensor)
            if isinstance(before, Derived):
                self._known[tensor] = Derived(_joined(before.parameters, parameters), None, before.drawn or drawn)
            elif before is None or isinstance(before, Constant):
                self._known[tensor] = Derived(
                    parameters, None, drawn or (isinstance(before, Constant) and before.drawn)
                )
        return out

    def _change_shape(
        self, name: str, func: Callable, args: tuple, kwargs: dict, target: Tensor, before: UnitData
    ) -> Any:
        """`transpose_` and the like: the same memory in another shape, followed from a view that keeps the one before."""
        view = target.detach()
        self._known[view] = before
        out = func(*args, **kwargs)
        self._known[target] = self._results.follow(plain_name(name), (view, *args[1:]), kwargs, [view], target)
        return out

    def _after(self, name: str, args: tuple, kwargs: dict, target: Tensor, before: Any, data: list[Tensor]) -> Info:
        """Where the units are in `target` after the operation; `before` says what was known of it."""
        written = [tensor for tensor in data if tensor is not target]
        if name != "setitem" and plain_name(name) not in VALUES_IN_PLACE:
            return UnitData(None)  # resize_, set_ and the like
        if isinstance(before, UnitData) and (before.rows is not None or before.numbers is not None):
            return self._results.follow(plain_name(name), args, kwargs, data, target)
        if isinstance(before, OneUnit) and not written:
            return self._results.of_written_unit(name, args, kwargs, before)
        if isinstance(before, UnitData) and not written and name == "setitem":
            return before  # a constant was written
        if self._current.units == 1 and _is_placed(before) and all(_is_unit(self._known[tensor]) for tensor in written):
            return before  # whatever was written is of the only unit
        if name == "setitem" and written:
            of_rows = self._results.follow_rows(name, args, kwargs, data, target)
            if of_rows is not None:
                return of_rows
        if name == "setitem" and is_by_numbers(args[1]):
            return self._results.follow("index_put", args, kwargs, data, target)
        if name == "setitem" and len(written) == 1 and self._is_mask_of(written[0], args[1], before):
            # A constant was written where a mask of the same units says. One that differs from place to place is given to
            # a place by how many others have.
            return before if _is_same_everywhere(target, *args[1:]) else UnitData(None)
        if name == "setitem" and len(written) == 1 and isinstance(args[2], Tensor) and args[2] is written[0]:
            info = self._known[written[0]]
            if isinstance(info, Mixed) or info.axis is None:
                return UnitData(None)
            axis = written_axis(target, args[1], info.axis, written[0], self._current.units)
            fits = before is None or (isinstance(before, UnitData) and before.axis == axis)
            return UnitData(axis if fits else None)
        return self._results.follow(plain_name(name), args, kwargs, data, target)

    def _axes_alike(self, name: str, kwargs: dict, target: Tensor) -> list[UnitAxis] | None:
        """Where units may be in a constant that they are about to be written into, and find the same; None: anywhere."""
        if kwargs.get("out") is target or name in _OVERWRITING or self._current.units < 2:
            return None
        return None if functorch_interpreter() is not None else self._results.even_axes(target)

    def _unless_by_place(
        self, name: str, args: tuple, kwargs: dict, target: Tensor, data: list[Tensor], after: Info,
        alike: list[UnitAxis] | None,
    ) -> Info:  # fmt: skip
        """`after`, unless units met constants by their place in the batch: refused, or without a place if no gradient passes.

        `alike` is where the target had the same for all units before.
        """
        results = self._results
        by_place: list[Tensor] = []
        if functorch_interpreter() is not None:
            return after
        if isinstance(after, UnitData) and after.axis is not None:
            was_alike = alike is None or after.axis in alike
            if not was_alike or (
                name == "setitem" and not results.is_written_alike(target, args[1], args[2], after.axis)
            ):
                by_place = [target]
        elif _writes_constants(name, target, data):
            by_place = list(results.written_by_place(name, args, kwargs, target))
        if by_place and torch.is_grad_enabled():
            raise results.by_place_refused(name)
        for tensor in by_place:
            results.origins.note(tensor, name, data)
            self._known[tensor] = UnitData(None)
        if isinstance(after, OneUnit):
            results.note_written_unit(target, after)
        return UnitData(None) if any(tensor is target for tensor in by_place) else after

    def _is_mask_of(self, tensor: Tensor, index: Any, before: Any) -> bool:
        """Whether it is the first part of an index, a mask, with its units where those of the indexed tensor are."""
        first = index[0] if isinstance(index, tuple) and index else index
        return tensor is first and tensor.dtype == torch.bool and self._known.get(tensor) == before

    def refuse_many(self, targets: Any) -> None:
        """Before an operation that changes many tensors in place, some of it by data of the batch."""
        for tensor in targets:
            protected = self._state.whose_memory(tensor)
            if protected is not None:
                raise self._state.refuse_write(protected)
            self._memory.lose(tensor)


def _joined(one: tuple[tuple[str, Tensor], ...], other: tuple[tuple[str, Tensor], ...]) -> tuple:
    return tuple({**dict(one), **dict(other)}.items())


def _writes_constants(name: str, target: Tensor, data: list[Tensor]) -> bool:
    alone = all(tensor is target for tensor in data)
    return alone and (name == "setitem" or plain_name(name) in VALUES_IN_PLACE)


def _is_same_everywhere(target: Tensor, index: Any, value: Any) -> bool:
    """Whether all places that target[mask, ...] = value writes to get the same."""
    if not isinstance(value, Tensor):
        return True
    ndim = target.ndim - (index[0] if isinstance(index, tuple) else index).ndim + 1
    return value.ndim < ndim or is_shared_along(value, value.ndim - ndim)


def _is_unit(info: Info) -> bool:
    return isinstance(info, UnitData)


def _is_placed(info: Any) -> bool:
    return isinstance(info, UnitData) and info.axis is not None
