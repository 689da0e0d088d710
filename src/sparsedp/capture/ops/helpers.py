"""What rules for uses of parameters share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparsedp.capture.expressions import MAX_CARRIED, Expression, carried_elements
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.units import UnitAxis, unit_first


def bind(names: Sequence[str], args: tuple, kwargs: dict) -> dict[str, Any]:
    return {**dict(zip(names, args)), **kwargs}


def plain(capture: CaptureForRules, value: Any) -> Any:
    """A parameter without its history; anything else as it is."""
    return value.detach() if capture.expression(value) is not None else value


def positions(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """(B, P, last): units first, the last dimension last, all others merged."""
    moved = unit_first(tensor, axis, units)
    return moved.reshape(units, math.prod(moved.shape[1:-1]) if units else 0, moved.shape[-1])


def names_of(capture: CaptureForRules, operands: list[Tensor]) -> str:
    return ", ".join(e.names for e in map(capture.expression, operands) if e is not None)


def require_functional(capture: CaptureForRules, name: str, func: Callable, functional: Callable, args: tuple) -> None:
    """torch.x and torch.nn.functional.x may share a name, but not the order of their arguments."""
    if func is not functional:
        names = names_of(capture, [value for value in args if isinstance(value, Tensor)])
        raise capture.refuse(name, names, f"torch.{name} takes other arguments", f"use torch.nn.functional.{name}")


def require_affordable(capture: CaptureForRules, name: str, expression: Expression, copies: int = 1) -> None:
    """Raises if one unit's gradient through a computed copy is too large to be written out; `copies` are in the expression."""
    elements = carried_elements(expression, copies)
    if elements > MAX_CARRIED:
        raise capture.refuse(
            name,
            expression.names,
            "the parameter is used through a computed copy or an unusual view, and the gradient of one unit would have "
            f"{elements:,} elements, more than the {MAX_CARRIED:,} that are written out at a time",
            "apply the computation to the activations, or use nn.Linear, nn.Embedding, F.linear or x @ W on "
            "the parameter",
        )
