"""Inputs of forward() that have no axis of units: what they are called, and which of them may meet the units of a batch."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sparsedp._torch import without_subclasses
from sparsedp.errors import UnsupportedError

# Numbers that libraries count on the batch and pass to forward(), to divide the loss by.
_DIVISORS = ("num_items_in_batch",)
_SCALARS = (int, float, complex, str, bytes, np.generic)


class NamedInput(NamedTuple):
    """A tensor, an array or a list of numbers or texts among the arguments of forward(), such as ids['user'] in the
    argument ids: keys are ('ids', 'user')."""

    path: str
    keys: tuple[str, ...]
    value: Any


@dataclass(frozen=True, eq=False)
class PublicInputs:
    """Which inputs without an axis of units may meet units: those in `names`, and what equals one of `constants`."""

    names: Sequence[str] = ()  # by path or key, as was declared
    constants: Sequence[Tensor] = ()  # the same for every batch

    def declares(self, named: NamedInput) -> bool:
        return named.path in self.names or any(key in self.names for key in named.keys)

    def holds(self, value: Any) -> bool:
        """Whether it equals a constant of the batches."""
        return isinstance(value, Tensor) and any(
            value.shape == constant.shape and value.dtype == constant.dtype and torch.equal(value.cpu(), constant)
            for constant in self.constants
        )

    def refuse_divisors(self, kwargs: Mapping[str, Any]) -> None:
        """Raises for numbers that are known to be counted on the batch: as Python numbers they cannot be followed."""
        for name in _DIVISORS:
            if isinstance(kwargs.get(name), (int, float)) and name not in self.names:
                raise UnsupportedError(
                    f"forward() was called with {name}, which somebody counted on the batch (transformers' Trainer does) to "
                    f"divide the loss by. {advice(name)}"
                )


def has_units_first(tensor: Tensor, unit_axes: Sequence[tuple[Tensor, int | None]]) -> bool:
    """Whether axis 0 of an input, which is as long as there are units, is theirs and has not that length by chance.

    `unit_axes` has the tensors of the batch, and on which axis their units are. A view of one of them tells by its strides
    where the units went. A copy tells only by its values; they are looked at if another axis is as long. False if the units
    are elsewhere, or on no axis; True if nothing is known.
    """
    units = tensor.shape[0]
    if units < 2 or not tensor.numel() or tensor.layout != torch.strided:
        return True
    for source, axis in unit_axes:
        if tensor is source:
            return axis == 0
    memory = _memory_of(tensor)
    with without_subclasses():
        shared = [(source, axis) for source, axis in unit_axes if _memory_of(source) == memory]
        if shared:
            return any(axis is not None and _rows_are_units(tensor, source, axis) for source, axis in shared)
        others = [axis for axis in range(1, tensor.ndim) if tensor.shape[axis] == units]
        rows = [source.movedim(axis, 0) for source, axis in unit_axes if axis is not None] if others else []
        return any(_equal(tensor, row) for row in rows) or not any(
            _equal(moved, row)
            for row in rows
            for axis in others
            for moved in (tensor.transpose(0, axis), tensor.movedim(axis, 0))
        )


def _memory_of(tensor: Tensor) -> int:
    with without_subclasses():
        return tensor.untyped_storage().data_ptr()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other.to(one.device, one.dtype))


def _rows_are_units(view: Tensor, source: Tensor, axis: int) -> bool:
    """Whether each row of `view` lies in the same unit of `source`, whose memory it shares and whose units are on `axis`."""
    size = source.element_size()
    strides = [(size * source.stride(a), source.shape[a], a) for a in range(source.ndim) if source.shape[a] > 1]
    strides.sort(reverse=True)

    def unit_of(place: int) -> int:
        """The unit that a byte of `source` belongs to."""
        unit = 0
        for stride, length, a in strides:
            index = min(place // stride, length - 1) if stride else 0
            place -= index * stride
            unit = index if a == axis else unit
        return unit if 0 <= place < size else -1

    size_here = view.element_size()
    first = int(view.storage_offset()) * size_here - int(source.storage_offset()) * size
    steps = [(size_here * stride, length) for stride, length in zip(view.stride(), view.shape)]
    if first < 0 or steps[0][0] != size * source.stride(axis) or view.shape[0] != source.shape[axis]:
        return False
    inner = [(stride, length) for stride, length in steps[1:] if length > 1]
    last = first + sum(stride * (length - 1) for stride, length in inner) + size_here - 1
    places = [first, last, *(first + stride * n for stride, length in inner for n in {1, length - 1})]
    return all(unit_of(place) == 0 for place in places)


class PlainInputs:
    """Arrays, and lists with as many items as the batch has units: no tensors, so that what is made of them is not followed."""

    def __init__(self) -> None:
        self._earlier: dict[
            str, tuple[int, Any]
        ] = {}  # by path: the number of units that it came with first, and itself

    def refuse(self, inputs: Iterable[NamedInput], public: PublicInputs, units: int) -> None:
        """Raises for those that may be the units' own, unless they are declared, or came with another number of units, too."""
        for named in inputs:
            value = named.value
            if isinstance(value, Tensor) or not len(value) or public.declares(named) or public.holds(value):
                continue
            first_units, first = self._earlier.setdefault(named.path, (units, value))
            is_setting = first_units != units and type(first) is type(value) and _same(first, value)
            if not is_setting and units > 1 and len(value) == units:
                kind = "an array" if isinstance(value, np.ndarray) else f"a {type(value).__name__} of numbers or texts"
                raise UnsupportedError(
                    f"forward() was given '{named.path}', {kind} with as many items as the batch has units. What is made of it "
                    "cannot be followed, and could mix units. Make tensors in collate_fn, (batch, ...). If it does not depend "
                    f"on who is in the batch, declare it: make_private(..., public_inputs=({named.path!r},))."
                )


def _same(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def advice(name: str) -> str:
    """What to do about an input that nobody knows to be public."""
    start = (
        "One unit changes it, and with it everybody's gradient, and clipping bounds nothing. Give each unit its own value, "
        "(batch, ...), average within each unit first, and divide by constants only. "
    )
    if name in _DIVISORS:
        return start + "With transformers' Trainer, override compute_loss, as docs/pitfalls.md shows."
    return start + (
        "If the loop transposed a tensor of the batch, do that inside of forward(), where it is followed. "
        "If it is the same whoever is in the batch (a mask for all, a temperature), declare it: "
        f"make_private(..., public_inputs=({name!r},))."
    )


def named_inputs(module: nn.Module, args: tuple, kwargs: dict) -> Iterator[NamedInput]:
    """The tensors, arrays and lists among the arguments of a module's forward(), by the names that it gives them."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        arguments: dict[str, Any] = {"args": args, **kwargs}
    else:
        arguments = {}
        for name, value in bound.arguments.items():
            kind = bound.signature.parameters[name].kind
            arguments |= value if kind is inspect.Parameter.VAR_KEYWORD else {name: value}
    for name, value in arguments.items():
        yield from _named(value, name, (name,))


def _named(value: Any, path: str, keys: tuple[str, ...]) -> Iterator[NamedInput]:
    if isinstance(value, Tensor) or _is_plain(value):
        yield NamedInput(path, keys, value)
    if isinstance(value, (Tensor, np.ndarray, *_SCALARS)):
        return
    if isinstance(value, (tuple, list, deque, Set)):
        for place, item in enumerate(value):
            yield from _named(item, f"{path}[{place}]", keys)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{path}[{key!r}]", (*keys, str(key)))
    elif not isinstance(value, (type, nn.Module)):
        parts = {slot: getattr(value, slot, None) for slot in slots_of(value)} | getattr(value, "__dict__", {})
        if is_jagged(value):  # whose lists, such as the names of features, are as long as it has features
            parts = {key: parts[key] for key in JAGGED_FIELDS}
        for key, item in parts.items():
            yield from _named(item, f"{path}.{key}", (*keys, key))


def _is_plain(value: Any) -> bool:
    """Whether it is an array, or a list of numbers or texts, also of lists of them."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return (
        isinstance(value, (tuple, list)) and bool(value) and all(isinstance(v, _SCALARS) or _is_plain(v) for v in value)
    )


# What a jagged tensor is known by (`jagged.py`).
JAGGED_FIELDS = ("_values", "_weights", "_lengths", "_offsets")


def is_jagged(value: Any) -> bool:
    return all(hasattr(value, field) for field in JAGGED_FIELDS) and isinstance(value._values, Tensor)


def slots_of(value: Any) -> list[str]:
    """The names of attributes that an object keeps in slots, such as those of dataclass(slots=True)."""
    names: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]
