"""Names and arguments of operations: what an operation is called, which tensors it takes, which it writes to."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from sparsedp.capture.inputs import slots_of

_IN_PLACE_OPERATORS = {"add", "sub", "mul", "truediv", "floordiv", "pow", "mod", "and", "or", "xor", "lshift", "rshift"}


@functools.lru_cache(maxsize=1024)
def operation_name(func: Callable) -> str:
    """'matmul' for torch.matmul, Tensor.matmul, Tensor.__matmul__; 'T' for the property.

    Others' operations that are called like one of torch's have their full name, so that none passes for it.
    """
    name = getattr(func, "__name__", str(func))
    whose = getattr(func, "namespace", None) or getattr(func, "_qualified_op_name", "::").split("::")[0]
    whose = whose or getattr(func, "__module__", None) or "torch"
    is_torchs = whose.split(".")[0] in ("aten", "prims", "prim", "torch", "sparsedp")
    if whose == "fbgemm" or (not is_torchs and any(hasattr(place, name) for place in (torch, Tensor, nn.functional))):
        return f"{whose}::{name}"
    if name == "__set__":
        return "set_" + str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if name == "__get__":
        return str(getattr(getattr(func, "__self__", None), "__name__", name))
    return name.strip("_") if name.startswith("__") else name


def written_tensor(name: str, args: tuple, kwargs: dict) -> Tensor | None:
    """The tensor that an operation changes in place, if any."""
    if kwargs and isinstance(kwargs.get("out"), Tensor):
        return kwargs["out"]
    return args[0] if is_in_place(name) and args and isinstance(args[0], Tensor) else None


def written_tensors(func: Callable, args: tuple, kwargs: dict) -> list[Tensor]:
    """All tensors that an operation would write to."""
    name = operation_name(func)
    written = written_tensor(name, args, kwargs)
    targets = [] if written is None else [written]
    return [*targets, *all_tensors(kwargs.get("out")), *(args[0] if is_foreach_in_place(name) else ())]


@functools.lru_cache(maxsize=1024)
def is_in_place(name: str) -> bool:
    if name in ("setitem", "set_data") or (name.endswith("_") and name != "requires_grad_"):
        return True
    return name.startswith("i") and name[1:] in _IN_PLACE_OPERATORS


@functools.lru_cache(maxsize=1024)
def is_foreach_in_place(name: str) -> bool:
    """Whether an operation changes each tensor of a list, its first argument, in place."""
    return name.startswith("_foreach_") and name.endswith("_")


def operands_of(args: tuple, kwargs: dict) -> list[Tensor]:
    """The tensors among an operation's arguments, also inside of lists, index tuples and slices."""
    operands: list[Tensor] = []
    for value in args if not kwargs else (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            operands.append(value)
        elif isinstance(value, (tuple, list, dict, slice)):
            operands += _nested_operands(value)
    return operands


def _nested_operands(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nested_operands(item)
    elif isinstance(value, dict):
        yield from _nested_operands(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _nested_operands((value.start, value.stop, value.step))


def slice_bounds(index: Any) -> list[Tensor]:
    """The tensors that the slices of an index begin or end with."""
    slices = [item for item in (index if isinstance(index, tuple) else (index,)) if isinstance(item, slice)]
    bounds = [bound for item in slices for bound in (item.start, item.stop, item.step)]
    return [bound for bound in bounds if isinstance(bound, Tensor)]


def all_tensors(value: Any, objects: bool = False) -> list[Tensor]:
    """The tensors in nested tuples, lists and mappings and, with `objects`, in the attributes of any object."""
    tensors: list[Tensor] = []
    _add_tensors(value, objects, tensors)
    return tensors


def _add_tensors(value: Any, objects: bool, tensors: list[Tensor]) -> None:
    if isinstance(value, Tensor):
        tensors.append(value)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _add_tensors(item, objects, tensors)
    elif isinstance(value, (dict, Mapping)):
        for item in value.values():
            _add_tensors(item, objects, tensors)
    elif objects and isinstance(value, (deque, Set)):
        for item in value:
            _add_tensors(item, objects, tensors)
    elif objects and not isinstance(value, (type, nn.Module)):
        for slot in slots_of(value):
            _add_tensors(getattr(value, slot, None), objects, tensors)
        if hasattr(value, "__dict__"):
            _add_tensors(vars(value), objects, tensors)
