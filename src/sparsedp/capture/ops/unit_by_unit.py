"""Any other operation, on small parameters: `vmap` runs it unit by unit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.expressions import SMALL, Expression
from sparsedp.capture.ops.elementwise import tap
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.units import UnitAxis


def unit_by_unit(
    capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]
) -> Tensor:
    """An operation without a rule, on small tensors: each unit gets its own copy, and `vmap` keeps units apart."""
    names = ", ".join(e.names for e in expressions)
    instead = (
        "write the computation with nn.Linear, nn.Embedding, F.linear, x @ W or elementwise operations, or freeze the "
        "parameter with requires_grad_(False)"
    )
    if any(expression.tensor.numel() > SMALL for expression in expressions):
        raise capture.refuse(name, names, "capture has no rule for this operation on a large parameter", instead)
    if name.endswith("_") or name == "setitem" or kwargs.get("out") is not None:
        raise capture.refuse(name, names, "it writes in place", "use the form that returns a new tensor")
    units = capture.units
    moved: list[Tensor] = []

    def prepare(value: Any) -> Any:
        """Replaces a batch tensor or parameter by its place in `moved`."""
        expression = capture.expression(value)
        if expression is not None:
            moved.append(tap(capture, name, expression, UnitAxis(0), expression.tensor.ndim + 1, units))
        elif capture.is_data(value):
            axis = capture.axis(value, name, names)
            if axis != UnitAxis(0) or value.shape[0] != units:
                raise capture.refuse(name, names, "units are not on axis 0 of its input", "keep the batch first")
            moved.append(value[:, None])
        else:
            return value
        return _Place(len(moved) - 1)

    spots, named = _each(args, prepare), _each(kwargs, prepare)

    def one(*values: Tensor) -> Tensor:
        def fill(value: Any) -> Any:
            return values[value.index] if isinstance(value, _Place) else value

        result = func(*_each(spots, fill), **_each(named, fill))
        if not isinstance(result, Tensor) or result.shape[:1] != (1,):
            raise capture.refuse(name, names, "its result does not have the units on axis 0", instead)
        return result[0]

    if units == 0:
        with torch.no_grad():
            plain = func(*_each(args, _detached), **_each(kwargs, _detached))
        return capture.record(plain, lambda grad: [], UnitAxis(0))
    try:
        out = torch.func.vmap(one, randomness="different")(*moved)
    except RuntimeError as error:
        raise capture.refuse(name, names, f"it cannot run unit by unit ({error})", instead) from error
    with torch.no_grad():
        plain = func(*_each(args, _detached), **_each(kwargs, _detached))
    closeness = 1e-4 * float(plain.abs().amax()) if plain.numel() else 0.0
    if plain.shape != out.shape or not torch.allclose(plain, out, rtol=1e-3, atol=closeness, equal_nan=True):
        raise capture.refuse(name, names, "its result for one unit depends on the others", instead)
    return capture.place(out, UnitAxis(0))


class _Place:
    """Stands in an argument list for the tensor that `vmap` hands over."""

    def __init__(self, index: int) -> None:
        self.index = index


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """`value` with everything changed that its lists, tuples and dicts hold.

    Not a function within a function: one that calls itself there is a cycle, and what it refers to waits for the collector.
    """
    if isinstance(value, dict):
        return {key: _each(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_each(item, change) for item in value)
    return change(value)


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
