"""What leaves a module beside its parameters and buffers has to be what it was before training.

`get_extra_state`, hooks on `state_dict` and methods that override it can put anything beside the weights, and a module that is
pickled takes its Python attributes along: a count of rows, the last batch. No noise is on them, and nobody paid for them. What
has not changed since `make_private` cannot hold private data and passes; what has changed is refused by name.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp.errors import UnsupportedError

# How much of one value is looked at: a module may refer to a whole program.
_VALUES, _BYTES = 100_000, 1 << 26
_TORCH = frozenset(vars(nn.Module())) | {"state_dict"}  # attributes that torch's own modules have


def watch(module: nn.Module, before: Callable[[], None]) -> None:
    """From now on, `state_dict` and pickling of the module and of its parts refuse what changed. They call `before` first."""
    for name, part in module.named_modules():
        if not isinstance(vars(part).get("state_dict"), _Watched):  # one that an earlier engine left knows of a change
            vars(part)["state_dict"] = _Watched(part, name)
        vars(part)["state_dict"].before.append(before)


def unwatch(module: nn.Module) -> None:
    """Makes modules ordinary again, but for those that something has changed in: they would let it out."""
    for one in reversed(list(_watched(module))):  # parts before what they are parts of
        if not one.changed():
            one.remove()


def loading(module: nn.Module) -> Callable[[], None]:
    """To call before a checkpoint is loaded; the function that it returns is to be called afterwards.

    What the checkpoint brings is as good as what was there: it was written under watch. What had changed before stays refused.
    """
    before = [(one, one.changed_attributes()) for one in _watched(module)]

    def loaded() -> None:
        for one, changed in reversed(before):  # parts before what they are parts of
            one.renew(changed)

    return loaded


def _watched(module: nn.Module) -> Iterator[_Watched]:
    for part in module.modules():
        if isinstance(one := vars(part).get("state_dict"), _Watched):
            yield one


class _Watched:
    """Stands in a module's attribute `state_dict`, where it is called by the module's user, its parent, and pickle."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before: list[Callable[[], None]] = []
        self.own = vars(module).get("state_dict")  # somebody may have put another function there
        self.extras = self._extras(self._call())
        self.attributes = self._attributes()

    def _call(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        if self.own is not None:
            return self.own(*args, **kwargs)
        return type(self.module).state_dict(self.module, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._require()
        found = self._call(*args, **kwargs)
        prefix = args[1] if len(args) > 1 else kwargs.get("prefix", "")
        changed = _different(self.extras, self._extras(found, prefix))
        if changed:
            raise UnsupportedError(
                f"The state_dict of {self._title()} holds '{changed[0]}', which is neither a parameter nor a buffer of it "
                "(get_extra_state or a hook on state_dict put it there, or took it away) and has changed since make_private: "
                "it may tell of private data, without noise. Keep it outside of the module, or set it back to what it was."
            )
        return found

    def _require(self) -> None:
        for require in self.before:
            require()

    def changed(self) -> bool:
        """Whether anything here, or in the `state_dict` of a part, is not what it was."""
        try:
            self()
        except UnsupportedError:
            return True
        return bool(self.changed_attributes())

    def changed_attributes(self) -> list[str]:
        return _different(self.attributes, self._attributes())

    def renew(self, but: Iterable[str]) -> None:
        """Takes what is there now for what was there before training, but for some attributes."""
        self.extras = self._extras(self._call())
        kept = {name: self.attributes.get(name) for name in but}
        now = {**self._attributes(), **kept}
        self.attributes = {name: value for name, value in now.items() if value is not None}

    def remove(self) -> None:
        if self.own is None:
            del vars(self.module)["state_dict"]
        else:
            vars(self.module)["state_dict"] = self.own

    def __deepcopy__(self, memo: dict) -> _Watched:
        """A copy of the module is watched, too; what training does to the module does nothing to the copy."""
        self._require()
        other = _Watched.__new__(_Watched)
        memo[id(self)] = other
        other.module, other.name = copy.deepcopy(self.module, memo), self.name
        other.before, other.own = [], copy.deepcopy(self.own, memo)
        other.extras, other.attributes = dict(self.extras), dict(self.attributes)
        return other

    def __reduce__(self) -> Any:
        """Where a module is pickled: it will be an ordinary one."""
        self._require()
        if changed := self.changed_attributes():
            raise UnsupportedError(
                f"Attribute '{changed[0]}' of {self._title()} has changed since make_private: it may hold private data, and "
                "pickling the module would let them out. Save model.state_dict(), or set the attribute back to what it was."
            )
        if self.own is not None:
            return copy.copy, (self.own,)
        return getattr, (self.module, "state_dict")  # of its class: its attributes are not there yet

    def _title(self) -> str:
        return f"module '{self.name}' ({type(self.module).__name__})" if self.name else type(self.module).__name__

    def _extras(self, found: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
        """What `state_dict` gave beside parameters and buffers under their own names, and which of these are missing."""
        standard = _standard(self.module)
        missing = {name: "missing" for name in standard if prefix + name not in found}
        entries = {key[len(prefix) :]: value for key, value in found.items() if key.startswith(prefix)}
        extras = {
            name: value
            for name, value in entries.items()
            if not (name in standard and _place(value) == _place(standard[name]))
        }
        versions = {
            f"{key[len(prefix) :]} (metadata)": _fingerprint(value, {})
            for key, value in getattr(found, "_metadata", {}).items()
            if key.startswith(prefix) or key == prefix[:-1]
        }
        return missing | versions | _fingerprints(extras, self.module)

    def _attributes(self) -> dict[str, str]:
        """What pickling takes along beside `state_dict`: Python attributes, and buffers that are not persistent."""
        own = vars(self.module)
        kept = {name: own["_buffers"].get(name) for name in own["_non_persistent_buffers_set"]}
        values = {name: value for name, value in own.items() if name not in _TORCH}
        return _fingerprints(values, self.module) | {name: _fingerprint(value, {}) for name, value in kept.items()}


def _fingerprints(values: Mapping[str, Any], module: nn.Module) -> dict[str, str]:
    memory = _memory(module) if values else {}
    return {name: _fingerprint(value, memory) for name, value in values.items()}


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]


def _standard(module: nn.Module) -> dict[str, Tensor]:
    """What torch's own `state_dict` has."""
    found: dict[str, Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        kept = {name: own for name, own in part._buffers.items() if name not in part._non_persistent_buffers_set}
        found.update((prefix + name, own) for name, own in (part._parameters | kept).items() if own is not None)
    return found


def _memory(module: nn.Module) -> dict[Any, str]:
    """The names of parameters and buffers by where they are."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {place: name for name, tensor in tensors if (place := _place(tensor)) is not None}


def _place(value: Any) -> Any:
    """Where a tensor is, and its shape; None if it is no ordinary tensor."""
    if not isinstance(value, Tensor):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if value.layout != torch.strided:
            return value.layout, tuple(value.shape)
        storage = value.untyped_storage().data_ptr()
        return storage, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def _fingerprint(value: Any, memory: Mapping[Any, str]) -> str:
    """Tells values apart, whatever they are. Parameters and buffers count by their names, other modules not at all.

    Of a very large value the first part counts, so that a module that refers to a data set does not make us read it.
    """
    digest, seen, values, room = hashlib.sha256(), set(), _VALUES, _BYTES
    waiting = [value]
    while waiting and values > 0:
        value, values = waiting.pop(), values - 1
        digest.update(f"{type(value).__module__}.{type(value).__qualname__};".encode())
        if isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)) or value is None:
            digest.update(repr(value).encode())
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and (name := memory.get(_place(value))) is not None:
            digest.update(name.encode())
        elif isinstance(value, Tensor) and value.layout != torch.strided:
            waiting.extend(_parts_of(value))
        elif isinstance(value, (Tensor, np.ndarray)):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            if value.nbytes <= room:
                room -= value.nbytes
                digest.update(_bytes_of(value))
        elif isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            digest.update(b"%d;" % len(value))
            items: Iterable[Any] = value.items() if isinstance(value, dict) else value
            waiting.extend(sorted(items, key=repr) if isinstance(value, (set, frozenset)) else islice(items, values))
        elif hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)):
            waiting.append(dict(vars(value)))
    return digest.hexdigest()


def _parts_of(sparse: Tensor) -> list[Tensor]:
    with torch._C.DisableTorchFunctionSubclass():
        sparse = sparse.detach()
        if sparse.layout == torch.sparse_coo:
            return [sparse._indices(), sparse._values()]
        by_row = sparse.layout in (torch.sparse_csr, torch.sparse_bsr)
        ends = (
            [sparse.crow_indices(), sparse.col_indices()] if by_row else [sparse.ccol_indices(), sparse.row_indices()]
        )
        return [*ends, sparse.values()]


def _bytes_of(value: Tensor | np.ndarray) -> Any:
    if isinstance(value, np.ndarray):
        return pickle.dumps(value) if value.dtype.hasobject else np.ascontiguousarray(value).tobytes()
    with torch._C.DisableTorchFunctionSubclass():
        return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
