"""Marks the inputs of a forward pass as data of its units, or as something that all units share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.capture.forward_pass import ForwardPass, HasUnits, UnannouncedBatch
from sparsedp.capture.inputs import NamedInput, PlainInputs, PublicInputs, has_units_first, named_inputs
from sparsedp.capture.jagged import JaggedInput, jagged_inputs
from sparsedp.capture.module_state import ModuleState
from sparsedp.capture.tensors import CONSTANT, EARLIER, SHARED, Constant, KnownTensors
from sparsedp.capture.units import Mixed, UnitAxis, UnitData, WholeBatch, rows_end_to_end
from sparsedp.errors import UnsupportedError


class InputMarks:
    """`public` says which inputs without an axis of units may meet units; None: all may."""

    def __init__(
        self, current: ForwardPass, known: KnownTensors, state: ModuleState, public: PublicInputs | None
    ) -> None:
        self._current, self._known, self._state, self._public = current, known, state, public
        self._plain_inputs = PlainInputs()

    def mark(self, module: nn.Module, name: str, args: tuple, kwargs: dict, inputs: list[Tensor]) -> None:
        """The tensors `inputs` among the arguments of the part `name` of the module, which is called."""
        known, batch, units = self._known, self._current.batch, self._current.units
        apart = not batch.offsets and not batch.constants  # whether every input has the units on axis 0
        fresh: set[int] = set()  # tensors of which nothing was known before
        for tensor in inputs:
            info = known.get(tensor)
            if isinstance(info, (UnitData, Mixed)) and info is not EARLIER:
                continue
            if not tensor.is_leaf and tensor.requires_grad:
                raise UnsupportedError(
                    "A module was called with a tensor that other operations made of private activations outside of "
                    "forward(), so its units cannot be followed. Make these operations part of the module's forward()."
                )
            fits = tensor.ndim > 0 and tensor.shape[0] == units and has_units_first(tensor, batch.unit_axes)
            if (tensor.requires_grad or not fits) and self._state.whose_memory(tensor) is not None:
                continue  # the module's own: one of its parts was called with it
            known[tensor] = UnitData(UnitAxis(0)) if fits else SHARED
            fresh.add(id(tensor))
            if tensor.is_nested:
                known.place_parts(tensor)
            apart = apart and fits
        are_tensors = _are_all_tensors(args, kwargs)
        if self._public is not None:
            if torch.is_grad_enabled():
                self._public.refuse_divisors(kwargs)
            if not apart or self._public.names or not are_tensors:
                self._judge(self._public, list(named_inputs(module.get_submodule(name), args, kwargs)))
        if not are_tensors:
            for jagged in jagged_inputs((args, kwargs), units):
                self._mark_rows(jagged, fresh)

    def _mark_rows(self, jagged: JaggedInput, fresh: set[int]) -> None:
        """Save of what is declared public, and of what is known from a pass before."""
        known = self._known
        of_rows = rows_end_to_end(jagged.owners, jagged.features)
        for tensor in jagged.rows:
            if id(tensor) in fresh and known.get(tensor) is not None:
                known[tensor] = of_rows
        lengths = jagged.lengths
        if lengths is not None and id(lengths) in fresh and known.get(lengths) is not None:
            known[lengths] = UnitData(UnitAxis(0))  # feature by feature, unit by unit

    def part_with_earlier_batches(self, inputs: list[Tensor]) -> None:
        """What a module kept of another batch is not this batch's: none of its units may meet it."""
        known = self._known
        for tensor in known.tensors():
            info = known.get(tensor)
            if isinstance(info, (UnitData, Mixed)):
                known[tensor] = EARLIER
            elif isinstance(info, Constant) and info.drawn:
                known[tensor] = CONSTANT  # no fresh numbers: units would meet the same ones in the same places again
        for tensor in inputs:
            if tensor.is_leaf or not tensor.requires_grad:
                known.forget(tensor)

    def _judge(self, public: PublicInputs, inputs: list[NamedInput]) -> None:
        """Tells inputs that are the same whoever is in the batch, which count as constants, from those that may not be."""
        known, batch = self._known, self._current.batch
        if torch.is_grad_enabled():
            self._plain_inputs.refuse(inputs, public, self._current.units)
        for named in inputs:
            tensor = named.value
            if not isinstance(tensor, Tensor):
                continue
            info = known.get(tensor)
            if public.declares(named) or _is_among(tensor, batch.constants):
                known.forget(tensor)
            elif _is_among(tensor, batch.offsets):
                known[tensor] = WholeBatch(named.path)
            elif info is SHARED:
                if public.holds(tensor):
                    known.forget(tensor)
                else:
                    known[tensor] = WholeBatch(named.path)


def batch_of(inputs: list[Tensor], expected: HasUnits | None, arguments: Any) -> HasUnits:
    """The batch that inputs are of: the `expected` one, if they may be, or else one with as many units as the first has.

    `arguments` are those that the inputs are in: flat values of jagged tensors tell nothing by their size.
    """
    sizes = [tensor.shape[0] for tensor in inputs if tensor.ndim > 0]
    if expected is not None and (
        expected.examples in sizes or len(set(sizes)) != 1 or any(jagged_inputs(arguments, expected.examples))
    ):
        return expected
    if not sizes:
        raise UnsupportedError(
            "The module was called without any tensor, so its units cannot be told apart. "
            "Pass the batch to forward() as tensors (or tuples, lists, dicts or dataclasses of them)."
        )
    return UnannouncedBatch(sizes[0])


def _are_all_tensors(args: tuple, kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()) if kwargs else args:  # noqa: SIM110  all() of a generator takes twice as long
        if not isinstance(value, Tensor):
            return False
    return True


def _is_among(tensor: Tensor, tensors: Iterable[Tensor]) -> bool:
    """Whether it is one of them, or shares the memory of one of its shape."""
    return any(
        tensor is other
        or (tensor.shape == other.shape and tensor.numel() > 0 and tensor.data_ptr() == other.data_ptr())
        for other in tensors
    )
