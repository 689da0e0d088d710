"""What is known of the results of operations on activations, or on parameters alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sparsedp.capture.constants_by_place import by_place_refused, is_same_in, require_same_for_all
from sparsedp.capture.expressions import Expression, TableRows, is_repeated, is_shared_along, joined_origin
from sparsedp.capture.following import follow
from sparsedp.capture.forward_pass import ForwardPass
from sparsedp.capture.history import HiddenHistory
from sparsedp.capture.names import all_tensors, operands_of
from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.lookups import OTHER_ORDER, moved_ids, public_ids
from sparsedp.capture.ops.registry import Call, plain_name
from sparsedp.capture.ops.shape import SHAPE_ONLY
from sparsedp.capture.owned_rows import follow_rows, rows_made
from sparsedp.capture.places import Origins
from sparsedp.capture.tape import Tape
from sparsedp.capture.tensors import CONSTANT, DRAWN, DRAWN_ALIKE, SHARED, Derived, KnownTensors
from sparsedp.capture.unit_memory import UnitMemory
from sparsedp.capture.units import Info, UnitAxis, UnitData, WholeBatch
from sparsedp.errors import UnitsMixedError


class Results:
    """Runs operations that use no parameter, or nothing but parameters, and notes what is known of their results."""

    def __init__(
        self,
        current: ForwardPass,
        known: KnownTensors,
        memory: UnitMemory,
        history: HiddenHistory,
        tape: Tape,
        origins: Origins,
    ) -> None:
        self._current, self._known, self._memory = current, known, memory
        self._history, self._tape, self.origins = history, tape, origins

    def note_constants(self, name: str, args: tuple, kwargs: dict, out: Any, drawn: bool) -> None:
        """The result of an operation on constants."""
        known = self._known
        kind = (DRAWN_ALIKE if self._are_drawn_alike(name, args, kwargs) else DRAWN) if drawn else CONSTANT
        for tensor in (out,) if isinstance(out, Tensor) else all_tensors(out):
            if known.get(tensor) is None and id(tensor) not in known.private:
                known[tensor] = kind

    def _are_drawn_alike(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether drawn numbers have one law in all places: drawn without a tensor, or made of such numbers one by one."""
        operands = operands_of(args, kwargs)
        if not operands:
            return True
        one_by_one = name in POINTWISE or name in (
            "to",
            "long",
            "int",
            "float",
            "double",
            "clone",
            "detach",
            "contiguous",
        )
        has_arrays = any(isinstance(value, (list, np.ndarray)) for value in (*args, *kwargs.values()))
        return one_by_one and not has_arrays and all(self._known.get(tensor) == DRAWN_ALIKE for tensor in operands)

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
            if isinstance(info, UnitData) and info.axis is not None and torch.is_grad_enabled():
                self._require_constants_alike(plain_name(name), args, kwargs, data, tensor, info.axis)
            known[tensor] = info
            if tensor.is_nested:
                known.place_parts(tensor)
            if isinstance(info, UnitData):
                if info == UnitData(None):
                    self.origins.note(tensor, name, data)
                    self._tape.refuse_in_loss(tensor, origin=self.origins.of(tensor))
            elif not isinstance(info, WholeBatch):
                self.origins.note(tensor, name, data)
        if not torch.is_grad_enabled():
            for tensor in outputs:
                self._history.add(tensor)

    def _require_constants_alike(
        self, name: str, args: tuple, kwargs: dict, data: list[Tensor], out: Tensor, axis: UnitAxis
    ) -> None:
        """Constants that meet the units at `axis` of `out` are the same for all of them."""
        known = self._known
        constants = [
            tensor
            for tensor in operands_of(args, kwargs)
            if tensor.numel() > 1 and known.get(tensor) in (None, CONSTANT) and tensor is not out
        ]
        if constants:
            call = Call(name, args, kwargs, out, self._current.units, len(data))
            require_same_for_all(call, axis, constants, self._current.where)

    def require_written_alike(self, name: str, args: tuple, kwargs: dict, target: Tensor, info: Info) -> None:
        """As for results, of constants that were written into an activation."""
        if not isinstance(info, UnitData) or info.axis is None or not torch.is_grad_enabled():
            return
        if name == "setitem":
            value, units = args[2], self._current.units
            is_constant = isinstance(value, Tensor) and self._known.get(value) in (None, CONSTANT)
            if is_constant and not is_same_in(target, args[1], value, info.axis, units):
                raise by_place_refused(name, self._current.where)
        else:
            self._require_constants_alike(plain_name(name), args, kwargs, [target], target, info.axis)

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
        ids = None
        if len(expressions) == 1 and expressions[0].tensor is expressions[0].parameters[0][1]:
            ids = public_ids(func, args, kwargs)
        if shared and (ids is not None or name in ("embedding", "getitem", "index_select")):
            raise self._current.refuse(
                name, expressions[0].names, "its ids come from an input that does not have the units on axis 0",
                "give every unit its own ids, (batch, ...), or make ids that all units share inside of forward()",
            )  # fmt: skip
        parameters, rows = joined_origin(expressions)
        if ids is None and len(expressions) == 1 and expressions[0].ids is not None:
            ids = moved_ids(name, func, args, kwargs, expressions[0].tensor, expressions[0].ids)
        for tensor in all_tensors(out):
            if tensor.requires_grad and id(tensor) not in known.private:
                if ids is not None and not rows:
                    rows = (TableRows(parameters[0][0], ids, tensor.numel(), get_gradient_edge(tensor)),)
                is_drawn = drawn or any(e.drawn for e in expressions)
                alike = self._alike(name, args, kwargs, tensor, expressions) if is_drawn else frozenset()
                known[tensor] = Derived(parameters, ids, is_drawn, alike, rows)
        return out

    def _alike(
        self, name: str, args: tuple, kwargs: dict, out: Tensor, expressions: list[Expression]
    ) -> frozenset[int]:
        """Dimensions along which slices of a result, in which drawn numbers have a part, differ by these alone."""
        operands = operands_of(args, kwargs)
        private = {id(expression.tensor) for expression in expressions}
        constants = [tensor for tensor in operands if id(tensor) not in private]
        if name == "embedding" and len(constants) == 1:  # rows by drawn ids
            return frozenset(range(constants[0].ndim)) if self._known.get(constants[0]) == DRAWN_ALIKE else frozenset()
        has_arrays = any(isinstance(value, (list, np.ndarray)) for value in (*args, *kwargs.values()))
        if (name not in POINTWISE and "dropout" not in name) or has_arrays:
            return frozenset()

        def is_alike(dim: int) -> bool:
            places = [(tensor, dim - (out.ndim - tensor.ndim)) for tensor in operands]
            facing = {id(tensor): (tensor, at) for tensor, at in places if at >= 0 and tensor.shape[at] != 1}
            of_private = all(is_shared_along(e, facing[id(e.tensor)][1]) for e in expressions if id(e.tensor) in facing)
            of_constants = [facing[id(tensor)] for tensor in constants if id(tensor) in facing]
            return of_private and all(
                self._known.get(tensor) == DRAWN_ALIKE or is_repeated(tensor, at) for tensor, at in of_constants
            )

        return frozenset(filter(is_alike, range(out.ndim)))
