"""How each torch operation uses a parameter: one rule per operation, found by the operation's name.

A rule runs the operation with its parameters detached, hands the output to `capture.record` together with a function
that turns the output's gradient into uses, and returns the output. To add an operation, write a rule and register it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsedp.capture.capture import Capture
from sparsedp.capture.expressions import Expression
from sparsedp.capture.rules import composite, convolution, elementwise, linear, lookups, normalisation, softmax
from sparsedp.capture.rules.lookups import public_ids
from sparsedp.capture.rules.registry import RULES, NotThisForm
from sparsedp.capture.rules.unit_by_unit import unit_by_unit

__all__ = [
    "composite",
    "convolution",
    "elementwise",
    "linear",
    "lookups",
    "normalisation",
    "public_ids",
    "run_use",
    "softmax",
]


def run_use(
    capture: Capture, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]
) -> Any:
    found = RULES.get(name)
    if found is not None:
        try:
            return found(capture, name, func, args, kwargs)
        except NotThisForm:
            pass
    return unit_by_unit(capture, name, func, args, kwargs, expressions)
