"""The memory that units of a batch were written to: whatever tensor has it may hold units."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsedp._torch import StorageWeakRef, without_functions
from sparsedp.capture.forward_pass import ForwardPass, HasUnits
from sparsedp.capture.module_state import ModuleState
from sparsedp.capture.tensors import CONSTANT, EARLIER, KnownTensors, memory_of
from sparsedp.capture.units import UnitData
from sparsedp.errors import UnsupportedError


class HandedOut(NamedTuple):
    """Memory of units that somebody outside of torch can write to."""

    operation: str  # that handed it out
    tensor: Tensor  # which has the memory
    values: Tensor  # as they were then, byte by byte


class UnitMemory:
    """Memory by its address, in this forward pass and in earlier ones."""

    def __init__(self, tensors: KnownTensors, state: ModuleState, current: ForwardPass) -> None:
        self._tensors, self._state, self._current = tensors, state, current
        # In this forward pass. The tensors keep the memory from being given to others.
        self._written: dict[int, Tensor] = {}
        # In earlier passes, as long as it lives, and of which batch the units were.
        self._earlier: dict[int, tuple[StorageWeakRef, HasUnits]] = {}
        self.handed_out: dict[int, HandedOut] = {}  # in this forward pass, until its uses are collected
        # Tensors with the memory of activations that count their changes by themselves, by their id, in this pass. They are
        # held: the base of a view would be another object once it had died.
        self.aliases: dict[int, Tensor] = {}

    def begin(self) -> None:
        """Before a forward pass."""
        if self._earlier:
            self._earlier = {memory: entry for memory, entry in self._earlier.items() if not entry[0].expired()}
        self._written, self.handed_out, self.aliases = {}, {}, {}

    def end(self) -> None:
        """After a forward pass."""
        self.require_unchanged()
        for memory, tensor in self._written.items():
            self._earlier[memory] = StorageWeakRef(tensor.untyped_storage()), self._current.batch
        self._written, self.aliases = {}, {}

    def clear(self) -> None:
        """Lets go of the memory of this pass, whose uses are collected."""
        self.require_unchanged()
        self._written, self.handed_out = {}, {}

    def add(self, tensor: Tensor) -> int:
        """Units are in the memory of a tensor, and others may share it unseen."""
        memory = memory_of(tensor)
        self._written[memory] = tensor.detach()
        return memory

    def hand_out(self, tensor: Tensor, operation: str) -> None:
        """An operation gives the memory of a tensor to somebody who can write to it unseen, such as numpy."""
        memory = self.add(tensor)
        if memory > 0:
            self.handed_out[memory] = HandedOut(operation, tensor.detach(), _values(tensor).clone())

    def require_unchanged(self, tensor: Tensor | None = None) -> None:
        """Raises if memory that was handed out was changed unseen: that of a tensor, or any."""
        if not self.handed_out:
            return
        entries = self.handed_out.values() if tensor is None else [self.handed_out.get(memory_of(tensor))]
        for entry in entries:
            if entry is not None and not _is_equal(_values(entry.tensor), entry.values):
                raise UnsupportedError(
                    f"The memory of an activation was given away by '{entry.operation}' and then changed where capture does not "
                    "see it, which may mix units. Change a copy, such as x.numpy().copy(), or use torch operations."
                )

    def add_alias(self, tensor: Tensor) -> None:
        """A tensor has the memory of an activation, and autograd does not hear of changes to it: x.data, for one."""
        self.aliases[id(tensor)] = tensor

    def refuse_unheard_write(self, target: Tensor, operation: str) -> None:
        """After a write that may have moved units: raises if autograd, and what uses kept, did not hear of it."""
        with without_functions():
            whole = target if target._base is None else target._base
        if id(whole) in self.aliases:
            raise UnsupportedError(
                f"Operation '{operation}'{self._current.where()} changes an activation through x.data, or through another tensor "
                "that has its memory, of which autograd does not hear: gradients of other units might be made of what it writes. "
                "Change the activation itself, or a copy: x.detach().clone()."
            )

    def note_write(self, target: Tensor) -> None:
        """An operation that was seen changed a tensor in place."""
        entry = self.handed_out.get(memory_of(target))
        if entry is not None:
            entry.values.copy_(_values(entry.tensor))

    def lose(self, tensor: Tensor) -> None:
        """Units may have been written anywhere into a tensor."""
        self._tensors[tensor] = UnitData(None)
        self.lose_aliases(tensor)

    def lose_aliases(self, target: Tensor) -> None:
        """After units were written where they were not: in other tensors with the same memory, their place is not known."""
        memory = self.add(target)
        for tensor in self._tensors.tensors():
            if tensor is not target and memory_of(tensor) == memory:
                self._tensors[tensor] = UnitData(None)

    def _same_elements(self, tensor: Tensor) -> UnitData | None:
        """What is known of activations that are the same elements in the same order, as in torch.BoolTensor(mask).

        Not for memory that units were written to in an unknown way, or that was handed out.
        """
        tensors = self._tensors
        same = {
            tensors[other]
            for other in tensors.tensors()
            if isinstance(tensors.get(other), UnitData) and _elements(other) == _elements(tensor)
        }
        return same.pop() if len(same) == 1 else None

    def is_shared_by(self, tensor: Tensor) -> bool:
        """Whether a tensor of unknown origin has memory that units were written to, or that one of their tensors has.

        `torch.Tensor(t)`, `nn.Parameter(t)` and the like make such tensors unseen. What is known of the tensor is noted: if it
        has no such memory, it is a constant.
        """
        tensors = self._tensors
        if tensor.requires_grad or id(tensor) in tensors.private:
            return False
        memory = memory_of(tensor)
        if tensor.is_nested:
            tensors[tensor] = UnitData(None)  # made of a list of tensors where that is not seen
            return True
        if memory in self._state.storages or memory <= 0:
            return False
        earlier = self._earlier.get(memory)
        if earlier is not None and not earlier[0].expired():
            tensors[tensor] = EARLIER if earlier[1] is not self._current.batch else UnitData(None)
        elif memory not in self._written and (same := self._same_elements(tensor)) is not None:
            tensors[tensor] = same
        elif memory in self._written or any(
            memory_of(other) == memory for other in tensors.tensors() if tensors.is_data(other)
        ):
            tensors[tensor] = UnitData(None)
        else:
            tensors[tensor] = CONSTANT
            return False
        self.add_alias(tensor)
        return True


def _values(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor is a view of."""
    with without_functions():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.detach().untyped_storage())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    with without_functions():
        return torch.equal(one, other)


def _elements(tensor: Tensor) -> tuple:
    with without_functions():
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
