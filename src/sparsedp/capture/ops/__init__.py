"""Operations by family: for each, in one place, how the unit axis goes through it, how it uses parameters, which rows it reads.

To add an operation, write its rules and register them (`registry.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparsedp.capture.expressions import Expression
from sparsedp.capture.ops import (
    attention,
    convolution,
    elementwise,
    grouped,
    indexing,
    linear,
    lookups,
    losses,
    matrices,
    normalisation,
    recurrent,
    reductions,
    shape,
    softmax,
)
from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.ops.registry import USE_RULES, NotThisForm
from sparsedp.capture.ops.unit_by_unit import unit_by_unit

__all__ = [
    "attention", "convolution", "elementwise", "grouped", "indexing", "linear", "lookups", "losses", "matrices", "normalisation",
    "recurrent", "reductions", "run_use", "shape", "softmax",
]  # fmt: skip


def run_use(
    capture: CaptureForRules, name: str, func: Callable, args: tuple, kwargs: dict, expressions: list[Expression]
) -> Any:
    """The result of an operation in which data and the parameters of `expressions` meet; its uses are recorded."""
    rule = USE_RULES.get(name)
    if rule is not None:
        try:
            return rule(capture, name, func, args, kwargs)
        except NotThisForm:
            pass
    return unit_by_unit(capture, name, func, args, kwargs, expressions)
