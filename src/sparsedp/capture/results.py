"""What is known of the results of operations on activations, or on parameters alone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from sparsedp._torch import functorch_interpreter
from sparsedp.capture.constants_by_place import (
    are_joined_by_place,
    by_place_refused,
    is_index_alike,
    is_part_alike,
    is_same,
    meets_by_place,
    recipe_of,
    recipe_of_part,
    values_of,
    without_part,
    writes_alike,
    written_values,
)
from sparsedp.capture.expressions import Expression, TableRows, is_repeated, is_shared_along, joined_origin
from sparsedp.capture.following import follow
from sparsedp.capture.forward_pass import ForwardPass
from sparsedp.capture.history import HiddenHistory
from sparsedp.capture.module_state import ModuleState
from sparsedp.capture.names import all_tensors, operands_of
from sparsedp.capture.ops.elementwise import POINTWISE
from sparsedp.capture.ops.indexing import is_advanced
from sparsedp.capture.ops.lookups import OTHER_ORDER, moved_ids, public_ids
from sparsedp.capture.ops.losses import LOSSES
from sparsedp.capture.ops.registry import AXIS_RULES, JOINT, Call, plain_name
from sparsedp.capture.ops.shape import SHAPE_ONLY
from sparsedp.capture.owned_rows import LOST, follow_rows, rows_made
from sparsedp.capture.places import Origins
from sparsedp.capture.tape import Tape
from sparsedp.capture.tensors import CONSTANT, DRAWN_ALIKE, SHARED, Constant, Derived, KnownTensors, memory_of
from sparsedp.capture.unit_memory import UnitMemory
from sparsedp.capture.units import Info, Mixed, OneUnit, UnitAxis, UnitData, WholeBatch
from sparsedp.errors import UnitsMixedError

# What writes nothing but what it draws.
_FILLS = {"bernoulli", "uniform", "normal", "exponential", "random", "geometric", "cauchy", "log_normal"}
_FEW = 1 << 12  # numbers of a constant whose values are looked at to tell laws apart
_CONVERTING = {"to", "type_as", "long", "int", "float", "double", "clone", "detach", "contiguous"}
# Views of each number once at most.
_PARTS = {
    "view", "reshape", "flatten", "unflatten", "transpose", "permute", "movedim", "t", "unsqueeze", "squeeze", "select",
    "narrow", "chunk", "split", "unbind",
}  # fmt: skip


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
        state: ModuleState,
    ) -> None:
        self._current, self._known, self._memory, self._state = current, known, memory, state
        self._history, self._tape, self.origins = history, tape, origins

    def note_constants(self, name: str, args: tuple, kwargs: dict, out: Any, drawn: bool) -> None:
        """The result of an operation on constants."""
        known = self._known
        for tensor in (out,) if isinstance(out, Tensor) else all_tensors(out):
            if known.get(tensor) is None and id(tensor) not in known.private:
                known[tensor] = self._drawn(name, args, kwargs, tensor) if drawn else CONSTANT

    def note_drawn(
        self, name: str, args: tuple, kwargs: dict, target: Tensor, before: Collection[UnitAxis] | None
    ) -> None:
        """After numbers from the key, or what is made of them, were written into a constant.

        `before`: where units could be in it, and found the same or one law; None: nothing is left of that.
        """
        plain = plain_name(name)
        if name == "setitem":
            kind = self._written(args[1], args[2], target)
        elif plain in _FILLS:
            kind = self._drawn(plain, args[1:], kwargs, target)
        else:
            kind = self._drawn(plain, args, kwargs, target)
        if before is not None and plain not in _FILLS and not kind.alike:
            kind = Constant(drawn=True, even=kind.even.intersection(before))
        memory, units = memory_of(target), self._current.units
        for tensor in list(self._known.tensors()):
            if tensor is target or memory_of(tensor) != memory or not isinstance(self._known.get(tensor), Constant):
                continue
            # Draws that are alike leave a tensor even where they are in the same places of all units.
            kept = [
                axis for axis in self._even_axes(tensor, target) if is_part_alike(target, tensor, axis, units, [1.0])
            ]
            self._known[tensor] = Constant(drawn=True, even=frozenset(kept if kind.alike else ()))
        self._known[target] = kind

    def _written(self, index: Any, value: Any, target: Tensor) -> Constant:
        """What is drawn in a target after target[index] = value: where each unit got as much, of one law."""
        units, is_tensor = self._current.units, isinstance(value, Tensor)
        info = self._known.get(value) if is_tensor else None
        is_alike = isinstance(info, Constant) and info.alike
        axes = self.unit_axes(target)
        if self.is_by_units(index):  # a mask that is drawn has one law
            is_placed = is_tensor and value.ndim > 0 and not is_alike
            masks = operands_of((index,), {})
            even = [axis for axis in axes if all(self.is_alike(mask, axis, units) for mask in masks)]
            return Constant(drawn=True, even=frozenset(() if is_placed else even))
        even = [axis for axis in axes if writes_alike(target, index, 1 if is_alike else value, axis, units)]
        if is_tensor and isinstance(info, Constant) and info.drawn and not is_alike:
            even = [axis for axis in even if axis.shifted(value.ndim - target.ndim) in info.even]
        return Constant(drawn=True, even=frozenset(even))

    def unit_axes(self, tensor: Tensor) -> list[UnitAxis]:
        """Where units could be in a constant."""
        units = self._current.units
        if units < 2:
            return []
        inner = {1, *(size // units for size in tensor.shape if size and size % units == 0)}
        axes = [UnitAxis(dim, each) for dim in range(tensor.ndim) for each in inner]
        return [axis for axis in axes if axis.fits(tensor.shape, units)]

    def even_axes(self, tensor: Tensor) -> list[UnitAxis]:
        """Where units could be in a constant, and would find the same, or numbers of one law."""
        units = self._current.units
        return [axis for axis in self.unit_axes(tensor) if self.is_alike(tensor, axis, units)]

    def _even_axes(self, tensor: Tensor, written: Tensor) -> list[UnitAxis]:
        """The same, of what is in it beside a part that was written since."""
        info = self._known.get(tensor)
        if isinstance(info, Constant) and info.drawn:
            return [axis for axis in self.unit_axes(tensor) if info.alike or axis in info.even]
        rest = without_part(tensor, written)
        return [] if rest is None else [a for a in self.unit_axes(tensor) if is_same(rest, a, self._current.units)]

    def _drawn(self, name: str, args: tuple, kwargs: dict, out: Tensor) -> Constant:
        """What is known of the result of an operation that draws, or on numbers that were drawn."""
        law = recipe_of(name, args, kwargs, self._law)
        if self._are_drawn_alike(name, args, kwargs):
            return Constant(drawn=True, alike=True, law=law)
        return Constant(drawn=True, even=frozenset(self._even(name, args, kwargs, out)), law=law)

    def _law(self, tensor: Tensor) -> int | None:
        return self._recipe(tensor) if tensor.numel() <= _FEW else id(tensor)

    def _even(self, name: str, args: tuple, kwargs: dict, out: Tensor) -> Iterator[UnitAxis]:
        """Where a result has one law, or the same, for all units: by the operation's rule for units that were in an operand."""
        rule, units = AXIS_RULES.get(name), self._current.units
        if rule is None or units < 2:
            return
        operands = operands_of(args, kwargs)
        for tensor in operands if name in JOINT else operands[:1]:
            for axis in self.even_axes(tensor):
                call = Call(name, args, kwargs, out, units)
                moved = rule(call, tensor, axis)
                if isinstance(moved, UnitAxis) and not meets_by_place(call, [(tensor, axis)], moved, self):
                    yield moved

    def _are_drawn_alike(self, name: str, args: tuple, kwargs: dict) -> bool:
        """Whether drawn numbers have one law in all places: drawn without a tensor, or made of such numbers one by one."""
        operands = operands_of(args, kwargs)
        if not operands:
            return name != "randperm"  # whose numbers are not drawn each by itself
        has_arrays = any(isinstance(value, (list, np.ndarray)) for value in (*args, *kwargs.values()))
        is_view = name in _PARTS or (name == "getitem" and not any(map(is_advanced, _items(args[1]))))
        if not is_view and (has_arrays or (name not in POINTWISE and name not in _CONVERTING)):
            return False
        return all(self._known.get(tensor) == DRAWN_ALIKE for tensor in operands)

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
            else:  # a constant in the shape, or type, of an activation
                info = known.get(args[0])
                if isinstance(info, Constant) and info.drawn:
                    for tensor in outputs:
                        even = frozenset(self._even(name, args, kwargs, tensor))
                        known[tensor] = info if name in _CONVERTING else Constant(drawn=True, even=even)
                return
        if not data:
            for tensor in outputs:  # made of shared inputs and constants alone
                known[tensor] = SHARED
            return
        if func in OTHER_ORDER:
            name = f"torch.{name}"  # for which there is no rule
        if name == "_pack_padded_sequence":
            self._require_lengths_alike(name, args[1])
        made = rows_made(name, args, kwargs, outputs, known.info, self._current.units)
        # Once for all results: a split into many has as many sizes.
        has_constants = made is None and self._has_constants(args if not kwargs else (*args, *kwargs.values()))
        for number, tensor in enumerate(outputs):
            info = made[number] if made is not None else self.follow(name, args, kwargs, data, tensor, has_constants)
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

    def follow(
        self, name: str, args: tuple, kwargs: dict, data: list[Tensor], out: Tensor, has_constants: bool = True
    ) -> Info:
        """Where the units are in `out`, the result of an operation on the activations `data`.

        `has_constants`: whether there may be anything else than activations, parameters and numbers among the operands.
        """
        known = self._known
        operands: list[tuple[Tensor, Info]] = [(tensor, known[tensor]) for tensor in data]
        try:
            info = follow(name, args, kwargs, operands, out, self._current.units, self._current.where)
            if isinstance(operands[0][1], OneUnit) or isinstance(info, OneUnit):
                return self._of_one_unit(name, args, kwargs, operands, out, info)
            if has_constants:
                self.require_constants_alike(name, args, kwargs, out, info)
            return info
        except UnitsMixedError:
            if torch.is_grad_enabled():
                raise
            return LOST  # evaluation may mix units; training refuses what comes of it

    # ------------------------------------------------------------------ constants by place in the batch

    def is_constant(self, tensor: Any) -> bool:
        """Whether it is a tensor that no unit decides, and that was not drawn by one law."""
        if not isinstance(tensor, Tensor) or tensor.is_nested:
            return False
        info = self._known.get(tensor)
        is_even = isinstance(info, Constant) and info.alike
        is_parameter = torch.is_grad_enabled() and self._known.expression(tensor) is not None
        return (info is None or isinstance(info, Constant)) and not is_even and not is_parameter

    def is_alike(self, tensor: Tensor, axis: UnitAxis, units: int) -> bool:
        """Whether a constant is the same for all units, which would be at `axis` of it, or drawn by one law."""
        info = self._known.get(tensor)
        if isinstance(info, Constant) and (info.alike or (axis in info.even and units == self._current.units)):
            return True
        return is_same(tensor, axis, units)

    def is_by_units(self, index: Any) -> bool:
        """Whether what units decide, or what is drawn for each, has a part in an index."""
        infos = [self._known.get(tensor) for tensor in operands_of((index,), {})]
        return any(isinstance(info, (UnitData, Mixed)) or (isinstance(info, Constant) and info.drawn) for info in infos)

    def require_constants_alike(self, name: str, args: tuple, kwargs: dict, out: Tensor, info: Info) -> None:
        """Raises if units of the result, of which `info` is known, met different parts of a constant by their place."""
        units = self._current.units
        if units < 2 or not self._has_constants(args if not kwargs else (*args, *kwargs.values())):
            return
        is_sum = isinstance(info, Mixed) and plain_name(name) in (*LOSSES, "sequence_loss")
        axis = info.axis if isinstance(info, UnitData) else None
        if (axis is None and not is_sum) or functorch_interpreter() is not None:
            return
        operands = operands_of(args, kwargs)
        if any(self._known.rows(tensor) or self._are_numbers(tensor) for tensor in operands):
            return  # rows with owners have rules of their own
        placed = [(tensor, at) for tensor in operands if (at := self._known.known_axis(tensor)) is not None]
        call = Call(plain_name(name), args, kwargs, out, units, len(placed))
        if meets_by_place(call, placed, axis, self):
            raise self.by_place_refused(name)

    def require_used_alike(self, name: str, args: tuple, kwargs: dict, out: Tensor) -> None:
        """The same for a use of parameters; rows with owners, which meet them, stand for units."""
        info = self._known.get(out)
        rows = info.rows if isinstance(info, UnitData) else None
        if rows is None:
            self.require_constants_alike(name, args, kwargs, out, info)
            return
        call = Call(plain_name(name), args, kwargs, out, len(rows.owners.units))
        if self._current.units > 1 and meets_by_place(call, [], UnitAxis(rows.dim), self):
            raise self.by_place_refused(name)

    def _are_numbers(self, tensor: Tensor) -> bool:
        info = self._known.get(tensor)
        return isinstance(info, UnitData) and info.numbers is not None

    def _has_constants(self, values: tuple | list) -> bool:
        """Whether there is anything but activations, parameters and numbers among the operands."""
        entries, private = self._known.entries, self._known.private
        for value in values:
            if isinstance(value, Tensor):
                entry = entries.get(id(value))
                if entry is None:
                    if id(value) not in private or not torch.is_grad_enabled():
                        return True
                elif isinstance(entry[1], Constant):
                    return True
            elif isinstance(value, (tuple, list)) and (
                self._has_constants(value) or any(isinstance(item, (list, np.ndarray)) for item in value)
            ):
                return True
        return False

    def _require_lengths_alike(self, name: str, lengths: Tensor) -> None:
        """Raises if lengths of sequences are constants by place; Python numbers out of the units may be the units' own."""
        is_by_place = self.is_constant(lengths) and not is_same(lengths, UnitAxis(0), self._current.units)
        if is_by_place and not self._state.taken_out and torch.is_grad_enabled():
            raise self.by_place_refused(name)

    def by_place_refused(self, name: str) -> UnitsMixedError:
        return by_place_refused(name, self._current.where, self._state.taken_out)

    def is_written_alike(self, target: Tensor, index: Any, value: Any, axis: UnitAxis) -> bool:
        """Whether target[index] = value, with constants or activations, is the same for all units, at `axis` of the target."""
        units = self._current.units
        if self._known.is_data(value) or self.is_by_units(index):
            return is_index_alike(target, index, value, axis, units, self)
        return writes_alike(target, index, value if self.is_constant(value) else 1, axis, units)

    def written_by_place(self, name: str, args: tuple, kwargs: dict, part: Tensor) -> Iterator[Tensor]:
        """After constants were written into `part`: the activations with its memory of which it has more of some units."""
        known, units = self._known, self._current.units
        if units < 2 or not part.numel():
            return
        memory = memory_of(part)
        given = operands_of(args[2:] if name == "setitem" else args, kwargs)
        values = written_values(name, args, part, [t for t in given if t is not part and self.is_constant(t)])
        for whole in known.tensors():
            axis = known.known_axis(whole)
            if axis is None or memory_of(whole) != memory:
                continue
            if values is None or not is_part_alike(part, whole, axis, units, values):
                yield whole

    def _of_one_unit(
        self, name: str, args: tuple, kwargs: dict, operands: list[tuple[Tensor, Info]], out: Tensor, info: Info
    ) -> Info:
        """Of an operation on data of single units: notes what was done to each, and compares it where they are joined."""
        if isinstance(info, OneUnit):
            source, of_source = operands[0]
            is_taken = not isinstance(of_source, OneUnit)  # x[2], of all units
            recipe = recipe_of_part(out, source) if is_taken else recipe_of(name, args, kwargs, self._recipe)
            return OneUnit(None, unit=info.unit, recipe=recipe)
        has_python = self._state.taken_out or self._state.decided  # which units' own data may have decided
        recipes = [each.recipe for _, each in operands if isinstance(each, OneUnit)]
        if info != UnitData(None) and not has_python and are_joined_by_place(recipes, self._current.units):
            raise self.by_place_refused(name)
        return info

    def of_written_unit(self, name: str, args: tuple, kwargs: dict, before: OneUnit) -> OneUnit:
        """Of data of one unit into which constants were written."""
        return OneUnit(None, unit=before.unit, recipe=recipe_of(name, args, kwargs, self._recipe))

    def note_written_unit(self, target: Tensor, info: OneUnit) -> None:
        """After a write into data of one unit: what has the same memory was made otherwise from now on, too."""
        memory = memory_of(target)
        for tensor in self._known.tensors():
            other = self._known.get(tensor)
            if isinstance(other, OneUnit) and tensor is not target and memory_of(tensor) == memory:
                recipe = None if None in (info.recipe, other.recipe) else hash((info.recipe, other.recipe))
                self._known[tensor] = OneUnit(None, unit=other.unit, recipe=recipe)

    def _recipe(self, tensor: Tensor) -> int | None:
        info = self._known.get(tensor)
        if isinstance(info, OneUnit):
            return info.recipe
        if isinstance(info, Constant) and info.law is not None:
            return info.law
        return values_of(tensor) if isinstance(info, Constant) or self.is_constant(tensor) else 0

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


def _items(index: Any) -> tuple:
    return index if isinstance(index, tuple) else (index,)
