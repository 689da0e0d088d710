"""The memory that units of a batch were written to: whatever tensor has it may hold units."""

from __future__ import annotations

from torch import Tensor

from sparsedp._torch import StorageWeakRef, without_subclasses
from sparsedp.capture.forward_pass import ForwardPass, HasUnits
from sparsedp.capture.module_state import ModuleState
from sparsedp.capture.tensors import CONSTANT, EARLIER, KnownTensors, memory_of
from sparsedp.capture.units import UnitData


class UnitMemory:
    """Memory by its address, in this forward pass and in earlier ones."""

    def __init__(self, known: KnownTensors, state: ModuleState, current: ForwardPass) -> None:
        self._known, self._state, self._current = known, state, current
        # In this forward pass. The tensors keep the memory from being given to others.
        self._written: dict[int, Tensor] = {}
        # In earlier passes, as long as it lives, and of which batch the units were.
        self._earlier: dict[int, tuple[StorageWeakRef, HasUnits]] = {}

    def begin(self) -> None:
        """Before a forward pass."""
        if self._earlier:
            self._earlier = {memory: entry for memory, entry in self._earlier.items() if not entry[0].expired()}
        self._written = {}

    def end(self) -> None:
        """After a forward pass."""
        for memory, tensor in self._written.items():
            self._earlier[memory] = StorageWeakRef(tensor.untyped_storage()), self._current.batch
        self._written = {}

    def clear(self) -> None:
        """Lets go of the memory of this pass."""
        self._written = {}

    def add(self, tensor: Tensor) -> int:
        """Units are in the memory of a tensor, and others may share it unseen."""
        memory = memory_of(tensor)
        self._written[memory] = tensor.detach()
        return memory

    def lose(self, tensor: Tensor) -> None:
        """Units may have been written anywhere into a tensor."""
        self._known[tensor] = UnitData(None)
        self.lose_aliases(tensor)

    def lose_aliases(self, target: Tensor) -> None:
        """After units were written where they were not: in other tensors with the same memory, their place is not known."""
        memory = self.add(target)
        for tensor in self._known.tensors():
            if tensor is not target and memory_of(tensor) == memory:
                self._known[tensor] = UnitData(None)

    def _same_elements(self, tensor: Tensor) -> UnitData | None:
        """What is known of activations that are the same elements in the same order, as in torch.BoolTensor(mask)."""
        known = self._known
        same = {
            known[other]
            for other in known.tensors()
            if isinstance(known.get(other), UnitData) and _elements(other) == _elements(tensor)
        }
        return same.pop() if len(same) == 1 else None

    def is_shared_by(self, tensor: Tensor) -> bool:
        """Whether a tensor of unknown origin has memory that units were written to, or that one of their tensors has.

        `torch.Tensor(t)`, `nn.Parameter(t)` and the like make such tensors unseen. What is known of the tensor is noted: if it
        has no such memory, it is a constant.
        """
        known = self._known
        if tensor.requires_grad or id(tensor) in known.private:
            return False
        memory = memory_of(tensor)
        if tensor.is_nested:
            known[tensor] = UnitData(None)  # made of a list of tensors where that is not seen
            return True
        if memory in self._state.storages or memory <= 0:
            return False
        earlier = self._earlier.get(memory)
        if earlier is not None and not earlier[0].expired():
            known[tensor] = EARLIER if earlier[1] is not self._current.batch else UnitData(None)
        elif (same := self._same_elements(tensor)) is not None:
            known[tensor] = same
        elif memory in self._written or any(
            memory_of(other) == memory for other in known.tensors() if known.is_data(other)
        ):
            known[tensor] = UnitData(None)
        else:
            known[tensor] = CONSTANT
            return False
        return True


def _elements(tensor: Tensor) -> tuple:
    with without_subclasses():
        return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
