"""What a batch holds beside one row for each example: found by collating, and compared with every batch that comes.

A value without an axis of examples may be a divisor of everybody's loss, such as the number of valid tokens of the batch:
one unit changes it, and with it every unit's gradient. It passes if it is the same for every batch, or declared public.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsedp.errors import UnsupportedError

_DEPTH = 16  # of objects within objects
_SCALARS = (bool, int, float, complex, str, bytes, np.generic, type(None))


class Step(NamedTuple):
    """From an object to one of its parts."""

    key: Any
    is_attribute: bool = False

    def __str__(self) -> str:
        return f".{self.key}" if self.is_attribute else f"[{self.key!r}]"

    def of(self, container: Any) -> Any:
        return getattr(container, self.key) if self.is_attribute else container[self.key]


@dataclass(frozen=True, eq=False)
class Entry:
    """One value of a batch that is not looked into any further, as it is in several batches."""

    steps: tuple[Step, ...]
    values: list[Any]

    @property
    def path(self) -> str:
        return "batch" + "".join(map(str, self.steps))

    def of(self, batch: Any) -> Any:
        for step in self.steps:
            batch = step.of(batch)
        return batch

    def of_or_none(self, batch: Any) -> Any:
        """None if a batch is made otherwise than those that were tried."""
        try:
            return self.of(batch)
        except (KeyError, IndexError, AttributeError, TypeError):
            return None

    def is_named(self, names: Sequence[str]) -> bool:
        """Whether one of `names` is its path, or the key of a part that it belongs to."""
        return self.path in names or any(step.key in names for step in self.steps if isinstance(step.key, str))

    @property
    def is_bookkeeping(self) -> bool:
        """A whole number that an object keeps for itself beside its tensors, such as the stride of jagged tensors."""
        hidden = any(step.is_attribute and step.key.startswith("_") for step in self.steps)
        return hidden and all(
            type(value) is int or (_is_numbers(value) and all(type(item) is int for item in value))
            for value in self.values
        )

    def has_units(self, sizes: Sequence[int]) -> bool:
        """Whether its first axis counts the examples of the batches, which are so many."""
        return all(_length(value) == size for value, size in zip(self.values, sizes))

    def axis_of_units(self, sizes: Sequence[int]) -> int | None:
        """The first axis if it counts the examples, or the only other one that does; None if there is no such axis."""
        if self.has_units(sizes):
            return 0
        shapes = [_shape(value) for value in self.values]
        axes = [
            axis
            for axis in range(min(map(len, shapes)))
            if all(shape[axis] == size for shape, size in zip(shapes, sizes))
        ]
        return axes[0] if len(axes) == 1 else None


@dataclass(frozen=True, eq=False)
class BatchLayout:
    """What is known of a collate function's batches. `constants` are the same in each; `offsets` say where rows begin."""

    constants: tuple[Entry, ...] = ()  # each with its one value
    offsets: tuple[Entry, ...] = ()
    axes: tuple[tuple[Entry, int | None], ...] = ()  # arrays, and on which axis their examples are; None: on none
    is_rows: bool = False  # whether nothing is in a batch but arrays with the examples on axis 0

    @property
    def constant_tensors(self) -> tuple[Tensor, ...]:
        return tuple(entry.values[0] for entry in self.constants if isinstance(entry.values[0], Tensor))

    def offsets_of(self, batch: Any) -> tuple[Tensor, ...]:
        return _tensors(self.offsets, batch)

    def constants_of(self, batch: Any) -> tuple[Tensor, ...]:
        return _tensors(self.constants, batch)

    def unit_axes_of(self, batch: Any) -> tuple[tuple[Tensor, int | None], ...]:
        """The tensors and arrays of a batch of which it is known on which axis the examples are, or that they are on none."""
        if self.is_rows:
            values: Iterator[tuple[Any, int | None]] = ((value, 0) for value in _arrays_in(batch, _DEPTH))
        else:
            values = ((value, axis) for entry, axis in self.axes if (value := entry.of_or_none(batch)) is not None)
        return tuple((tensor, axis) for value, axis in values if (tensor := _as_tensor(value)) is not None)

    def refuse_change(self, batch: Any) -> None:
        """Raises if a batch holds another value where those that were tried had a common one."""
        for entry in self.constants:
            try:
                value = entry.of(batch)
            except (KeyError, IndexError, AttributeError, TypeError):
                value = "nothing"
            if not same(value, entry.values[0]):
                raise _refusal(entry, "it is another in this batch than in those that were tried at first")


def _tensors(entries: Sequence[Entry], batch: Any) -> tuple[Tensor, ...]:
    return tuple(value for entry in entries if isinstance(value := entry.of(batch), Tensor))


def _as_tensor(value: Any) -> Tensor | None:
    """The same memory as a tensor; None if there is none."""
    if isinstance(value, np.ndarray):
        try:
            return torch.from_numpy(value) if value.flags.writeable else None
        except (TypeError, ValueError):  # a type that torch does not have, or steps backwards
            return None
    return value if isinstance(value, Tensor) and not value.is_nested and value.layout == torch.strided else None


def _arrays_in(value: Any, depth: int) -> Iterator[Any]:
    """The tensors and arrays of a batch of default_collate."""
    if isinstance(value, (Tensor, np.ndarray)):
        yield value
    elif depth and isinstance(value, (Mapping, tuple, list)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _arrays_in(item, depth - 1)


def layout_of(
    batches: Sequence[Any], sizes: Sequence[int], public: Sequence[str] = ()
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The entries with an axis of examples, those that are the same in all `batches` of `sizes` examples, and other arrays.

    Raises for what differs and has no such axis, save what is declared `public`, by key or path, and arrays whose size
    follows the batch: flat ids of bags, or a batch on the second axis. Capture lets these meet nothing but each other.
    """
    rows, constants, others = [], [], []
    for entry in _entries(list(batches), list(sizes), (), _DEPTH):
        values = entry.values
        if entry.has_units(sizes):
            rows.append(entry)
        elif entry.is_named(public) or entry.is_bookkeeping:
            continue
        elif all(same(value, values[0]) for value in values[1:]):
            value = values[0].detach().clone() if isinstance(values[0], Tensor) else values[0]
            constants.append(Entry(entry.steps, [value]))
        elif len({type(value) for value in values}) > 1:
            raise _refusal(entry, f"it is a {type(values[0]).__name__} in one batch and something else in another")
        elif not _is_array(values[0]) or len({_shape(value) for value in values}) == 1:
            raise _refusal(entry, f"this {_kind(values[0])} differs from batch to batch")
        else:
            others.append(entry)
    return rows, constants, others


def _refusal(entry: Entry, why: str) -> UnsupportedError:
    path, name = (
        entry.path,
        next((repr(s.key) for s in reversed(entry.steps) if isinstance(s.key, str)), repr(entry.path)),
    )
    return UnsupportedError(
        f"collate_fn puts {path} into a batch, which has no axis of examples and depends on who is in the batch: {why}. If the "
        "loss uses it (as the number of valid tokens of the batch, or a sum of weights, to divide by), one unit changes "
        "everybody's gradient, and clipping bounds nothing. Give each example its own value, (batch, ...), and average within "
        "each example first; divide by a constant; take sizes from the shapes of tensors. If it does not depend on the "
        f"data, declare it: public_inputs=({name},)."
    )


def _kind(value: Any) -> str:
    """What kind of value it is, for messages. Not the value itself: it is private, and messages end up in logs."""
    if _is_array(value) and _shape(value):
        return f"tensor of shape {_shape(value)}" if isinstance(value, Tensor) else f"array of shape {_shape(value)}"
    return type(value).__name__


# ---------------------------------------------------------------------- several batches side by side


def _entries(values: list[Any], sizes: list[int], steps: tuple[Step, ...], depth: int) -> Iterator[Entry]:
    parts = _parts(values, sizes) if depth else None
    if parts is None:
        yield Entry(steps, values)
        return
    for step in parts:
        yield from _entries([step.of(value) for value in values], sizes, (*steps, step), depth - 1)


def equal_batches(one: Any, other: Any) -> bool:
    """Whether two batches hold the same values."""
    return all(same(*entry.values) for entry in _entries([one, other], [-1, -1], (), _DEPTH))


def _parts(values: list[Any], sizes: list[int]) -> list[Step] | None:
    """What to look into; None for a value that is one entry: a tensor, a number, a list with an item for each example."""
    first = values[0]
    if isinstance(first, (Tensor, np.ndarray, *_SCALARS)) or len({type(value) for value in values}) > 1:
        return None
    if isinstance(first, Mapping):
        return [Step(key) for key in first] if all(value.keys() == first.keys() for value in values) else None
    if isinstance(first, (tuple, list)):
        if hasattr(first, "_fields"):
            return [Step(name, True) for name in first._fields]
        lengths = [len(value) for value in values]
        return [Step(place) for place in range(lengths[0])] if lengths != sizes and len(set(lengths)) == 1 else None
    if is_dataclass(first) and not isinstance(first, type):
        return [Step(field.name, True) for field in fields(first)]
    names = getattr(first, "__dict__", None)
    if not names or callable(first) or any(vars(value).keys() != names.keys() for value in values):
        return None
    return [Step(name, True) for name in names]


def _is_numbers(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(type(item) in (int, float, bool) for item in value)


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) or _is_numbers(value)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, (Tensor, np.ndarray)) else (len(value),)


def _length(value: Any) -> int | None:
    """The length of the first axis; None if there is none."""
    if isinstance(value, Tensor):
        return value.size(0) if value.dim() else None
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, (list, tuple)) and not hasattr(value, "_fields") else None


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, of one type and shape; NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if one.dtype != other.dtype or one.is_nested or one.shape != other.shape or one.layout != other.layout:
            return False
        one, other = (value.detach().cpu().to_dense().contiguous().reshape(-1) for value in (one, other))
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if isinstance(one, np.ndarray):
        equal = one.dtype == other.dtype and one.shape == other.shape
        return equal and (one.tolist() == other.tolist() if one.dtype.hasobject else one.tobytes() == other.tobytes())
    if isinstance(one, (float, np.floating)) and one != one:
        return bool(other != other)
    try:
        return bool(one == other)
    except Exception:  # of an object that compares element by element, say
        return False


# ---------------------------------------------------------------------- rows of examples


def as_rows(value: Any) -> np.ndarray | None:
    """A tensor, an array or a list with a row for each example as an array; None if it cannot be one."""
    if isinstance(value, Tensor):
        if value.is_nested or value.layout != torch.strided:
            return None
        value = value.detach().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    if isinstance(value, np.ndarray):
        return value
    plain = value and all(isinstance(item, (int, float, str, bytes)) for item in value)
    return np.asarray(value) if plain else None


def are_offsets(array: np.ndarray) -> bool:
    """Whether it ascends, as the offsets of bags and positions do: these do not turn around with the examples."""
    return array.ndim == 1 and array.dtype.kind in "iu" and bool((np.diff(array.astype(np.int64)) >= 0).all())


def counted_rows(array: np.ndarray) -> Counter[bytes]:
    return Counter(row.tobytes() for row in np.ascontiguousarray(array))
