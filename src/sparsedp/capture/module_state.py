"""The parameters and buffers of a module, in which nothing of private data may stay: they reach the state_dict without noise."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp._torch import without_subclasses
from sparsedp.capture.names import operation_name
from sparsedp.capture.tensors import memory_of
from sparsedp.errors import UnsupportedError

Storages = dict[int, list[tuple[str, Tensor]]]  # parameters and buffers by their memory


class ModuleState:
    """Watches what a forward pass, and the backward pass that follows, do to the parameters and buffers of `module`.

    `private` has the ids of the private parameters; `where` says for messages where in the module a pass is.
    """

    def __init__(self, module: nn.Module, private: Container[int], where: Callable[[], str]) -> None:
        self._module, self._private, self._where = module, private, where
        # Identity and version of each tensor as the pass began. Later, another tensor may stand in for one.
        self._versions: dict[str, tuple[int, int]] = {}
        self.storages: Storages = {}  # as the pass began; empty when it ended
        self.went_back = False  # whether a backward pass ran since the last forward pass that nobody collected
        self.taken_out = ""  # the operation that made a Python number or an array of units in this pass
        self.decided = ""  # the operation that made True or False of units in this pass
        # Numbers that a pass changes without looking at the batch, before it did, and by how much the first pass did.
        self._counters: dict[str, Tensor] = {}
        self._increments: dict[str, Tensor] = {}
        self._recomputed: dict[
            str, Tensor
        ] = {}  # what the last pass that computed a buffer anew from constants put there

    def begin(self) -> None:
        """Before a forward pass."""
        with without_subclasses():
            tensors = named_tensors(self._module)
            self.require_unwritten(tensors)
            self._versions, self.storages, self._counters = _versions(tensors), {}, {}
            self.went_back, self.taken_out, self.decided = False, "", ""
            for name, tensor in tensors:
                if tensor.layout != torch.strided:
                    raise UnsupportedError(
                        f"'{name}' is a sparse tensor. What it does to the units of a batch cannot be followed. Use a dense "
                        "one, or look rows up by their ids."
                    )
                if not tensor.is_meta:  # which has no memory
                    self.storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))

    def changed(self, is_constant: Callable[[Tensor], bool]) -> list[str]:
        """After a forward pass: the parameters and buffers that were changed in it. Raises if a counter counts the wrong things.

        `is_constant` says whether a tensor was seen to be made of constants alone.
        """
        with without_subclasses():
            tensors = named_tensors(self._module)
            versions = self._versions
            changed = [name for name, tensor in tensors if versions.get(name) != (id(tensor), tensor._version)]
            if changed:
                named = dict(tensors)
                changed = [name for name in changed if not self._is_recomputed(name, named[name], is_constant)]
            if self._counters:
                self._require_same_increments(dict(tensors))
        return changed

    def _is_recomputed(self, name: str, tensor: Tensor, is_constant: Callable[[Tensor], bool]) -> bool:
        """Whether a buffer that no state_dict holds was computed anew, with the values that it would have for any batch.

        Such as a bias by position, for longer sequences than before. Its sizes may depend on a batch. Python numbers are not
        followed, so its values must agree with those of the pass that computed it before, where both have any.
        """
        owner, _, last = name.rpartition(".")
        part = self._module.get_submodule(owner)
        before = self._versions.get(name)
        if last not in part._non_persistent_buffers_set or (before is not None and before[0] == id(tensor)):
            return False
        if tensor.requires_grad or self.taken_out or not is_constant(tensor):
            return False
        earlier = self._recomputed.get(name)
        if earlier is not None and not _agree(earlier, tensor):
            return False
        self._recomputed[name] = tensor.detach().clone()
        self._versions[name] = (id(tensor), tensor._version)
        return True

    def _require_same_increments(self, tensors: Mapping[str, Tensor]) -> None:
        """A counter may count forward passes, but not what is in them: Python numbers, such as len(x), are not followed."""
        for name, before in self._counters.items():
            now = tensors.get(name, before).detach()
            increment = now != before if before.dtype == torch.bool else now - before
            if increment.any() and not torch.equal(self._increments.setdefault(name, increment), increment):
                raise self.refuse_write(name)

    def write_constants(self, name: str, func: Callable, args: tuple, kwargs: dict, target: Tensor) -> Any:
        """An operation that changes parameter or buffer `name`, or a view of it, without looking at the batch."""
        if self.taken_out and not _sets_same_elements(func, args):
            raise UnsupportedError(
                f"'{name}' was changed during forward{self._where()}, after '{self.taken_out}' had made a Python value "
                "of the batch in the same pass. If the one comes from the other, private data reach the state_dict without "
                "noise. Set such state before training, from public data, or keep it outside of the module."
            )
        sharing = self.storages[target.untyped_storage().data_ptr()]
        for other, tensor in sharing:
            counts = not tensor.requires_grad and (tensor.numel() == 1 or not tensor.is_floating_point())
            if counts and other not in self._counters:
                self._counters[other] = tensor.detach().clone()
        out = func(*args, **kwargs)
        # Such as spectral_norm's vectors. Only these: elsewhere, something else may have happened.
        self._versions |= _versions(sharing)
        return out

    def refuse_write(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"'{name}' was changed during forward{self._where()}. What a buffer or a parameter keeps of private data reaches "
            "the state_dict without noise. Keep such state outside of the module, or freeze the layer with eval()."
        )

    def require_no_write(self, name: str) -> None:
        """Raises, as `name` was changed."""
        raise self.refuse_write(name)

    def require_unwritten(self, tensors: list[tuple[str, Tensor]] | None = None) -> None:
        """Raises if a backward pass, or what came after it, changed a parameter or a buffer.

        `tensors` are the module's `named_tensors`, where the caller has them already.
        """
        if not self.went_back:
            return
        with without_subclasses():
            versions, now = self._versions, named_tensors(self._module) if tensors is None else tensors
            changed = [name for name, tensor in now if versions.get(name) != (id(tensor), tensor._version)]
        if changed:
            raise UnsupportedError(
                f"'{changed[0]}' was changed between forward() and step(), in backward() or after it (by a custom function, a "
                "hook, or the loop?). What a buffer or a parameter keeps of gradients reaches the state_dict without noise, so "
                "it must not leave: begin anew, or load a checkpoint. Keep such state outside of the module. What does not "
                "depend on the batch may be changed after step()."
            )

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """While a checkpoint brings other parameters and buffers: what was changed before is gone, unless that fails."""
        went_back, self.went_back = self.went_back, False
        try:
            yield
        except BaseException:
            self.went_back = went_back
            raise

    def whose_memory(self, tensor: Tensor) -> str | None:
        """The parameter or buffer that had the tensor's memory when the forward pass began, if any."""
        sharing = self.storages.get(memory_of(tensor))
        return sharing[0][0] if sharing else None

    def private_memory(self, tensor: Tensor) -> str | None:
        """The private parameter whose memory a tensor has, if any."""
        if not tensor.numel():
            return None
        sharing = self.storages.get(memory_of(tensor), ())
        return next((name for name, parameter in sharing if id(parameter) in self._private), None)


def _agree(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same where both have values: from their beginnings, or to their ends."""
    if one.ndim != other.ndim or one.dtype != other.dtype:
        return False
    sizes = [min(pair) for pair in zip(one.shape, other.shape)]
    for side in (lambda size, common: slice(0, common), lambda size, common: slice(size - common, size)):
        parts = [tensor[tuple(map(side, tensor.shape, sizes))] for tensor in (one, other)]
        if torch.equal(*parts):
            return True
    return False


def _versions(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, tuple[int, int]]:
    return {name: (id(tensor), tensor._version) for name, tensor in tensors}


def named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's parameters and buffers: torch's own generators take ten times as long."""
    tensors: list[tuple[str, Tensor]] = []
    waiting, seen = [("", module)], set()
    while waiting:
        prefix, part = waiting.pop()
        if part in seen:
            continue
        seen.add(part)
        for group in (part._parameters, part._buffers):
            if group:
                tensors += [(prefix + name, tensor) for name, tensor in group.items() if tensor is not None]
        if part._modules:
            waiting += [(f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None]
    return tensors


def _sets_same_elements(func: Callable, args: tuple) -> bool:
    """Whether an operation is x.data = y with the very elements that x has, as in module.to(dtype) where it has that dtype."""
    if operation_name(func) != "set_data" or len(args) != 2 or not isinstance(args[1], Tensor):
        return False
    one, other = (
        (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.numel() > 0) for tensor in args
    )
    return one == other and one[-1]
