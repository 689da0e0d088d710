"""Inputs of forward() that have no axis of units: what they are called, and which of them may meet the units of a batch."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsedp.errors import UnsupportedError

# Numbers that libraries count on the batch and pass to forward(), to divide the loss by.
_DIVISORS = ("num_items_in_batch",)


class NamedInput(NamedTuple):
    """A tensor among the arguments of forward(), such as ids['user'] in the argument ids: keys are ('ids', 'user')."""

    path: str
    keys: tuple[str, ...]
    tensor: Tensor


@dataclass(frozen=True, eq=False)
class PublicInputs:
    """Which inputs without an axis of units may meet units: those in `names`, and what equals one of `constants`."""

    names: Sequence[str] = ()  # by path or key, as was declared
    constants: Sequence[Tensor] = ()  # the same for every batch

    def declares(self, named: NamedInput) -> bool:
        return named.path in self.names or any(key in self.names for key in named.keys)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it equals a constant of the batches."""
        return any(
            tensor.shape == constant.shape and tensor.dtype == constant.dtype and torch.equal(tensor.cpu(), constant)
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


def advice(name: str) -> str:
    """What to do about an input that nobody knows to be public."""
    start = (
        "One unit changes it, and with it everybody's gradient, and clipping bounds nothing. Give each unit its own value, "
        "(batch, ...), average within each unit first, and divide by constants only. "
    )
    if name in _DIVISORS:
        return start + "With transformers' Trainer, override compute_loss, as docs/pitfalls.md shows."
    return start + (
        "If it is the same whoever is in the batch (a mask for all, a temperature), declare it: "
        f"make_private(..., public_inputs=({name!r},))."
    )


def named_inputs(module: nn.Module, args: tuple, kwargs: dict) -> Iterator[NamedInput]:
    """The tensors among the arguments of a module's forward(), by the names that it gives them."""
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
    if isinstance(value, Tensor):
        yield NamedInput(path, keys, value)
    elif isinstance(value, (tuple, list, deque, Set)):
        for place, item in enumerate(value):
            yield from _named(item, f"{path}[{place}]", keys)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _named(item, f"{path}[{key!r}]", (*keys, str(key)))
    elif not isinstance(value, (type, nn.Module)):
        parts = {slot: getattr(value, slot, None) for slot in slots_of(value)} | getattr(value, "__dict__", {})
        for key, item in parts.items():
            yield from _named(item, f"{path}.{key}", (*keys, key))


def slots_of(value: Any) -> list[str]:
    """The names of attributes that an object keeps in slots, such as those of dataclass(slots=True)."""
    found: list[str] = []
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in found if name not in ("__dict__", "__weakref__")]
