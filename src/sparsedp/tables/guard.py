"""Stands before a lazy table's weights: whatever torch operation reads them, they are settled first.

A guarded table is the same parameter object with another class, so that torch calls `__torch_function__` for every
operation on it: `state_dict`, `deepcopy`, pickling, `.to()`, export, printing. What shares its memory (`.data`, `.detach()`,
a slice, the values of a `state_dict`) is guarded too, because training may go on before it is read.

Other ways fall short. A `TorchFunctionMode` sees operations only while it is entered, so not a `state_dict` or a pickle after
training. Hooks on `state_dict` miss `.data`, slices, `deepcopy` and printing. A new parameter in the module's place is not the
one that the user's optimizer, ties and other references hold. Dispatch keys act below autograd, where the rows that a lookup
asks for are no longer told from a read of the whole table. So the object stays and its class changes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp._torch import without_subclasses
from sparsedp.capture.ops.registry import rows_read
from sparsedp.tables.owner import Owner

# What tells something about a tensor, but nothing of its values.
_METADATA = {
    "size", "dim", "numel", "nelement", "ndimension", "stride", "storage_offset", "is_contiguous", "element_size", "__len__",
    "is_floating_point", "is_complex", "get_device", "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
    "requires_grad_", "__hash__", "is_same_size", "has_names", "is_pinned", "is_shared", "is_signed", "is_inference",
}  # fmt: skip
# Attributes that are other views of the values. All others, such as shape and grad, are not.
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}


class _Guarded:
    """What guarded tables and their aliases share."""

    table_owner: Owner
    table_name: str

    def settle_table(self) -> None:
        self.table_owner.before_read(self.table_name, None)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if not _is_metadata(func):
            settle_before(func, args, kwargs)
        with without_subclasses():
            out = func(*args, **kwargs)
            if isinstance(out, Tensor) or type(out) in (tuple, list):
                return _with_aliases_guarded(out, _guarded_in((args, kwargs)))
            return out

    def as_subclass(self, cls: type) -> Any:
        """torch does not ask `__torch_function__` about this one."""
        self.settle_table()
        with without_subclasses():
            return _with_aliases_guarded(torch.Tensor.as_subclass(self, cls), [self])  # type: ignore[arg-type]

    def __copy__(self) -> Any:
        return self.detach()  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict) -> Tensor:
        """An ordinary tensor with settled values."""
        with without_subclasses():
            self.settle_table()
            copy = _plain(self).clone()
            result: Tensor = nn.Parameter(copy, self.requires_grad) if isinstance(self, LazyTable) else copy
        memo[id(self)] = result
        return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.settle_table()
        with without_subclasses():
            plain = _plain(self)
            result: Tensor = nn.Parameter(plain, self.requires_grad) if isinstance(self, LazyTable) else plain
            return result.__reduce_ex__(protocol)


class LazyTable(_Guarded, nn.Parameter):
    """A table that is owed noise. `guard` turns a parameter into one."""


class LazyAlias(_Guarded, torch.Tensor):
    """Something that shares its memory with a lazy table."""


def guard(parameter: nn.Parameter, owner: Owner, name: str) -> None:
    """Guards a table, or the shard of it that a parameter holds; `owner` has all rows there."""
    parameter.__class__ = LazyTable
    parameter.table_owner, parameter.table_name = owner, name  # type: ignore[attr-defined]


def guarded_alias(tensor: Tensor, owner: Owner, name: str) -> LazyAlias:
    """The same memory, guarded as the table is: a momentum waits for its noise as the weights do."""
    alias = torch.Tensor.as_subclass(tensor, LazyAlias)
    alias.table_owner, alias.table_name = owner, name
    return alias


def unguard(parameter: nn.Parameter) -> None:
    """Makes a settled table an ordinary parameter again."""
    if isinstance(parameter, LazyTable):
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        del parameter.table_owner, parameter.table_name


def without_guard(tensor: Tensor, state: Any) -> Any:
    """The Python attributes of a tensor without those that `guard` gave it."""
    if not isinstance(tensor, _Guarded) or not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if name not in ("table_owner", "table_name")}


def unguarded_class(value: Any) -> type:
    """What a value is an instance of, or will be again when it is not guarded any more."""
    if isinstance(value, _Guarded):
        return nn.Parameter if isinstance(value, LazyTable) else torch.Tensor
    return type(value)


def settle_before(func: Callable, args: tuple, kwargs: dict) -> None:
    """Settles what an operation is about to read: the rows that it looks up, or all rows."""
    for tensor in _guarded_in((args, kwargs)):
        owner, name, places = tensor.table_owner, tensor.table_name, looked_up(func, args, kwargs, tensor)
        first = owner.run.first_in_memory(name)
        owner.before_read(name, places + first if first and places is not None else places)


def looked_up(func: Callable, args: tuple, kwargs: dict, table: Any) -> Tensor | None:
    """The rows that a lookup in `table` reads; None if it is not a lookup, or one that is not recognised."""
    if not isinstance(table, LazyTable):
        return None
    rows = rows_read(func, args, kwargs)
    if rows is None or rows.table is not table:
        return None
    with without_subclasses():
        return rows.ids.detach().long()


@functools.lru_cache(maxsize=1024)
def _is_metadata(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in _VALUES
    if name == "__set__":
        return getattr(getattr(func, "__self__", None), "__name__", "") != "data"
    return name in _METADATA


def _guarded_in(values: Iterable[Any]) -> list[Any]:
    """The guarded tables and aliases among some values, also in nested tuples, lists and dicts."""
    guarded: list[Any] = []
    for value in values:
        if isinstance(value, _Guarded):
            guarded.append(value)
        elif isinstance(value, (tuple, list)):
            guarded += _guarded_in(value)
        elif isinstance(value, dict):
            guarded += _guarded_in(value.values())
    return guarded


def _with_aliases_guarded(out: Any, guarded: list[Any]) -> Any:
    if isinstance(out, _Guarded) or not guarded:
        return out
    if isinstance(out, Tensor) and out.layout == torch.strided:
        memory = out.untyped_storage().data_ptr()
        for table in guarded:
            if memory and memory == table.untyped_storage().data_ptr():
                return guarded_alias(out, table.table_owner, table.table_name)
        return out
    if type(out) in (tuple, list):
        return type(out)(_with_aliases_guarded(item, guarded) for item in out)
    return out


def _plain(tensor: Any) -> Tensor:
    """The same memory as an ordinary tensor, without history. Call with torch functions of subclasses disabled."""
    return torch.Tensor.as_subclass(tensor.detach(), torch.Tensor)
