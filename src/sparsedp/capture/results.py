"""What is known of the results of operations on activations, or on parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.expressions import Expression, LookedUp, joined_lookups
from sparsedp.capture.following import follow
from sparsedp.capture.forward_pass import ForwardPass
from sparsedp.capture.history import HiddenHistory
from sparsedp.capture.names import all_tensors, operands_of
from sparsedp.capture.ops.lookups import OTHER_ORDER, moved_ids, public_ids
from sparsedp.capture.ops.registry import Call
from sparsedp.capture.ops.shape import SHAPE_ONLY
from sparsedp.capture.owned_rows import follow_rows, rows_made
from sparsedp.capture.tape import Tape
from sparsedp.capture.tensors import CONSTANT, DRAWN, SHARED, Derived, KnownTensors
from sparsedp.capture.unit_memory import UnitMemory
from sparsedp.capture.units import Info, UnitData
from sparsedp.errors import UnitsMixedError


class Results:
    """Runs operations that use no parameter, or nothing but parameters, and notes what is known of their results."""

    def __init__(
        self, current: ForwardPass, known: KnownTensors, memory: UnitMemory, history: HiddenHistory, tape: Tape
    ) -> None:
        self._current, self._known, self._memory = current, known, memory
        self._history, self._tape = history, tape

    def note_constants(self, out: Any, drawn: bool) -> None:
        """The result of an operation on constants."""
        known = self._known
        for tensor in (out,) if isinstance(out, Tensor) else all_tensors(out):
            if known.get(tensor) is None and id(tensor) not in known.private:
                known[tensor] = DRAWN if drawn else CONSTANT

    def note(self, name: str, func: Callable, args: tuple, kwargs: dict, data: list[Tensor], out: Any) -> None:
        """Where the units are in the result of an operation on activations, `data`, and inputs that all units share."""
        known = self._known
        outputs = [
            tensor
            for tensor in ((out,) if isinstance(out, Tensor) else all_tensors(out))
            if id(tensor) not in known.private
        ]
        if not outputs:
            return
        if name.startswith("new_"):  # which takes from its first operand nothing but type and device
            data = [tensor for tensor in data if tensor is not args[0]]
            if not data:
                return
        if name in SHAPE_ONLY:
            if known.is_data(args[0]):
                data = [args[0]]
            elif known.get(args[0]) is SHARED:
                data = []
            else:
                return  # a constant in the shape of an activation
        if not data:
            for tensor in outputs:  # made of shared inputs and constants alone
                known[tensor] = SHARED
            return
        if func in OTHER_ORDER:
            name = f"torch.{name}"  # for which there is no rule
        made = rows_made(name, args, kwargs, outputs, known.info, self._current.units)
        for number, tensor in enumerate(outputs):
            info = made[number] if made is not None else self.follow(name, args, kwargs, data, tensor)
            known[tensor] = info
            if info == UnitData(None):
                self._tape.refuse_in_loss(tensor)
        if not torch.is_grad_enabled():
            for tensor in outputs:
                self._history.add(tensor)

    def follow(self, name: str, args: tuple, kwargs: dict, data: list[Tensor], out: Tensor) -> Info:
        """Where the units are in `out`, the result of an operation on the activations `data`."""
        known = self._known
        operands: list[tuple[Tensor, Info]] = [(tensor, known[tensor]) for tensor in data]
        try:
            return follow(name, args, kwargs, operands, out, self._current.units, self._current.where)
        except UnitsMixedError:
            if torch.is_grad_enabled():
                raise
            return UnitData(None)  # evaluation may mix units; training refuses what comes of it

    def follow_rows(self, name: str, args: tuple, kwargs: dict, data: list[Tensor], out: Tensor) -> Info | None:
        """What is known of `out` by the owners of rows; None where other rules say."""
        operands: list[tuple[Tensor, Info]] = [(tensor, self._known[tensor]) for tensor in data]
        call = Call(name, args, kwargs, out, self._current.units, len(operands))
        return follow_rows(call, operands, self._current.where)

    def run_unfollowed(self, name: str, func: Callable, args: tuple, kwargs: dict, data: list[Tensor]) -> Any:
        """An operation on units without a rule, which may change its operands although its name does not say so."""
        operands = operands_of(args, kwargs)
        versions = [tensor._version for tensor in operands]
        out = func(*args, **kwargs)
        for tensor, version in zip(operands, versions):
            if tensor._version != version:
                self._memory.lose(tensor)
        self.note(name, func, args, kwargs, data, out)
        return out

    def run_on_parameters(
        self,
        name: str,
        func: Callable,
        args: tuple,
        kwargs: dict,
        expressions: list[Expression],
        shared: bool,
        drawn: bool,
    ) -> Any:
        """An operation on private parameters and constants; `shared`: and on inputs that all units share."""
        known = self._known
        out = func(*args, **kwargs)
        ids, looked_up = None, joined_lookups(expressions)
        if len(expressions) == 1 and expressions[0].tensor is expressions[0].parameters[0][1]:
            ids = public_ids(func, args, kwargs)
        if shared and (ids is not None or name in ("embedding", "getitem", "index_select")):
            raise self._current.refuse(
                name, expressions[0].names, "its ids come from an input that does not have the units on axis 0",
                "give every unit its own ids, (batch, ...), or make ids that all units share inside of forward()",
            )  # fmt: skip
        parameters = tuple(dict(pair for e in expressions for pair in e.parameters).items())
        if ids is not None and isinstance(out, Tensor) and out.requires_grad:
            looked_up = (LookedUp(*expressions[0].parameters[0], out, ids),)
        if ids is None and len(expressions) == 1 and expressions[0].ids is not None:
            ids = moved_ids(name, func, args, kwargs, expressions[0].tensor, expressions[0].ids)
        for tensor in all_tensors(out):
            if tensor.requires_grad and id(tensor) not in known.private:
                known[tensor] = Derived(parameters, ids, drawn or any(e.drawn for e in expressions), looked_up)
        return out
