"""A digest of a Python value that tells it from others, by what pickle would write of it."""

from __future__ import annotations

import copyreg
import hashlib
import os
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp._torch import without_subclasses
from sparsedp.tables.guard import unguarded_class, without_guard

# How much of one value is looked at: a module may refer to a whole program.
_VALUES, _BYTES = 100_000, 1 << 26
_PROTOCOL = 4
_NESTED_SETS = 64  # sets within sets whose items are put in an order of their own
UNKNOWN = "?"  # at the end of the digest of a value with a part that pickle cannot write


def fingerprint(value: Any, names: Mapping[Any, str], name_of: Callable[[nn.Module], str | None]) -> str:
    """Tells values apart, whatever they are, by what pickle would write.

    Tensors that lie in memory of `names` (by `place_of`, or by its first element) count by name and shape, as do modules of
    which `name_of` has a name. Of a very large value the first part counts, so that a module that refers to a data set does
    not make us read it.
    """
    reader = _Reader(names, name_of)
    reader.read(value)
    return reader.digest.hexdigest() + UNKNOWN * reader.has_unknown


def place_of(value: Any) -> Any:
    """Where a tensor is, and its shape; None if it is no ordinary tensor, or has no memory."""
    if not isinstance(value, Tensor):
        return None
    with without_subclasses():
        if value.is_nested or value.layout != torch.strided:
            return None if value.is_nested else (value.layout, tuple(value.shape))
        storage = value.untyped_storage().data_ptr()
        return storage, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def python_state(tensor: Tensor) -> Any:
    """The Python attributes of a tensor, which are pickled along with it; something empty if there are none."""
    with without_subclasses():
        state = getattr(tensor, "__getstate__", lambda: vars(tensor))()
    return without_guard(tensor, state)


def parts_for_pickle(value: Any) -> tuple[Any, ...]:
    """What pickle writes of an object: a function, its arguments, a state, items of a list and of a dict, a second function."""
    kind: Any = type(value)
    if kind in copyreg.dispatch_table:
        made = copyreg.dispatch_table[kind](value)
    elif isinstance(value, nn.Module):
        made = kind.__reduce_ex__(value, _PROTOCOL)  # that of the object may be the watch's own
    else:
        made = value.__reduce_ex__(_PROTOCOL)
    return (made, (), None, None, None, None) if isinstance(made, str) else (*made, None, None, None, None)[:6]


class _Reader:
    """Goes through a value as pickle does, without its recursion, and within limits."""

    def __init__(self, names: Mapping[Any, str], name_of: Callable[[nn.Module], str | None]) -> None:
        self.names, self.name_of = names, name_of
        self.digest = hashlib.sha256()
        self.has_unknown = False
        self._values, self._room = _VALUES, _BYTES
        self._seen: dict[Any, tuple[int, Any]] = {}  # with the objects, so that no other gets their ids
        self._nested = 0

    def read(self, value: Any) -> None:
        waiting = [value]
        while waiting and self._values > 0:
            value = waiting.pop()
            self._values -= 1
            kind = unguarded_class(value)
            self._write(f"{kind.__module__}.{kind.__qualname__}")
            if not self._is_plain(value) and (kind is tuple or self._is_new(id(value), value)):
                waiting += self._next_parts(value)

    def _next_parts(self, value: Any) -> list[Any]:
        """What is to be read next, the last first."""
        try:
            return list(islice(self._parts(value), self._values))[::-1]
        except Exception:  # an object that cannot be inspected: it equals nothing, not even itself
            self.digest.update(os.urandom(16))
            return []

    def _write(self, text: str) -> None:
        self.digest.update(f"{len(text)}:{text}".encode(errors="surrogatepass"))

    def _write_bytes(self, data: Any) -> None:
        """Writes the bytes, or their first part if there is not room for all."""
        view = memoryview(data).cast("B")
        self._write(str(view.nbytes))
        self.digest.update(view[: self._room])
        self._room -= min(self._room, view.nbytes)

    def _is_plain(self, value: Any) -> bool:
        """Writes a number or a text; False for any other value. Subclasses of these may have attributes: they are others."""
        kind = type(value)
        if value is None or kind is bool or kind is float or kind is complex:
            self._write(repr(value))
        elif kind is int:
            self._write(hex(value))  # repr refuses very large ones
        elif kind is str:
            self._write_bytes(value.encode(errors="surrogatepass"))
        elif kind is bytes or kind is bytearray:
            self._write_bytes(value)
        else:
            return False
        return True

    def _is_new(self, key: Any, value: Any) -> bool:
        """Whether a value is read for the first time. If not, a reference to the first time is written."""
        if key in self._seen:
            self._write(f"again {self._seen[key][0]}")
            return False
        self._seen[key] = len(self._seen), value
        return True

    def _parts(self, value: Any) -> Iterable[Any]:
        """Writes what can be written of a value at once, and gives its parts, which are yet to be read."""
        kind = type(value)
        if kind is dict:
            self._write(str(len(value)))
            return chain.from_iterable(value.items())
        if kind is list or kind is tuple:
            self._write(str(len(value)))
            return value
        if kind in (set, frozenset):
            return self._items_of_a_set(value)
        if kind is array:
            self._write(value.typecode)
            self._write_bytes(value)
            return ()
        if isinstance(value, Tensor):
            return self._parts_of_a_tensor(value)
        if isinstance(value, (torch.UntypedStorage, torch.storage.TypedStorage)):
            self._write_storage(value if isinstance(value, torch.UntypedStorage) else value._untyped_storage)
            return ()
        if isinstance(value, np.ndarray) and (kind is np.ndarray or value.nbytes > self._room):
            return self._parts_of_an_array(value)
        if isinstance(value, type):
            self._write(f"{value.__module__}.{value.__qualname__}")
            return ()
        if isinstance(value, FunctionType):  # pickle writes their names
            self._write(f"{value.__module__}.{value.__qualname__}")
            return [vars(value)] if vars(value) else []
        if isinstance(value, nn.Module) and (name := self.name_of(value)) is not None:
            self._write(f"module {name}")
            return ()
        return self._parts_for_pickle(value)

    def _parts_for_pickle(self, value: Any) -> Iterable[Any]:
        try:
            made_by, made_of, state, items, pairs, set_by = parts_for_pickle(value)
        except Exception as error:  # pickle cannot write it either
            self.has_unknown = True
            self._write(type(error).__name__)
            return ()
        listed = [] if items is None else list(islice(items, self._values))
        mapped = [] if pairs is None else list(islice(pairs, self._values))
        return [made_by, made_of, state, listed, mapped, set_by]

    def _items_of_a_set(self, value: Iterable[Any]) -> Iterable[Any]:
        """In an order of their own: that of the set depends on where its items are in memory."""
        if self._nested >= _NESTED_SETS:
            return value
        outer, before, digests = self.digest, len(self._seen), []
        self._nested += 1
        for item in islice(value, self._values):
            self.digest = hashlib.sha256()
            self.read(item)
            digests.append(self.digest.digest())
            while len(self._seen) > before:  # what one item holds is not known to the next, whichever that is
                self._seen.popitem()
        self._nested -= 1
        self.digest = outer
        return sorted(digests)

    def _parts_of_a_tensor(self, value: Tensor) -> Iterable[Any]:
        state = python_state(value)
        with without_subclasses():
            place = place_of(value)
            name = None if place is None else self.names.get(place)
            if name is not None:
                self._write(name)
                return [state] if state else []
            if not isinstance(place, tuple) or isinstance(place[0], torch.layout) or value.device.type == "meta":
                return self._parts_for_pickle(value)
            self._write(f"{value.device} {place[1:]} {value.requires_grad} {value.is_conj()} {value.is_neg()}")
            name = self.names.get(place[0]) if place[0] else None
            if name is not None:
                self._write(name)  # a view of it
            elif self._is_new(("memory", place[0]), value):
                self._write_storage(value.untyped_storage())  # pickle writes what is beside a view, too
        return [state] if state else []

    def _write_storage(self, storage: torch.UntypedStorage) -> None:
        self._write(str(storage.nbytes()))
        if 0 < storage.nbytes() <= self._room and storage.device.type != "meta":
            content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            self._write_bytes(content.cpu().numpy())

    def _parts_of_an_array(self, value: np.ndarray) -> Iterable[Any]:
        self._write(f"{value.shape} {value.flags.fnc}")
        if value.dtype.hasobject:
            return chain([value.dtype], value.flat)
        if value.nbytes <= self._room:
            self._write_bytes(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
        return [value.dtype]
