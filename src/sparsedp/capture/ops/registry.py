"""Where operations are registered, each in one file of this folder: what is known of an operation is found by its name.

- `axis_rule`: how the unit axis goes through it. An operation without such a rule makes it unknown where the units are,
  and a parameter that meets an activation with unknown units is refused.
- `use_rule`: how it uses parameters. A rule runs the operation with its parameters detached, hands the output to
  `capture.record` together with a function that turns the output's gradient into uses, and returns the output.
- `reads_rows`: which rows of a table it reads, if it reads only some.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.ops.protocol import CaptureForRules
from sparsedp.capture.units import Mixed, UnitAxis


class Call(NamedTuple):
    """One operation on activations."""

    name: str
    args: tuple
    kwargs: dict
    out: Tensor
    units: int
    data: int = 1  # how many of the operands depend on the batch

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def numbers(self, position: int, *names: str) -> list[int]:
        """Sizes or dimensions, given as view(2, 3), view((2, 3)) or by name."""
        value = self.argument(position, *names)
        if isinstance(value, (tuple, list, torch.Size)):
            return list(value)
        rest = [v for v in self.args[position:] if isinstance(v, int)]
        return rest if rest else ([] if value is None else [value])


# A rule gives the axis in the result for one operand and its axis: None if it is lost, Mixed if units are combined.
AxisRule = Callable[[Call, Tensor, UnitAxis], "UnitAxis | Mixed | None"]
AXIS_RULES: dict[str, AxisRule] = {}
# Operations whose operands all carry units: each is followed, and they must agree.
JOINT: set[str] = set()
# Operations whose form that ends in "_" changes values and keeps the shape: followed as if it made a new tensor.
VALUES_IN_PLACE: set[str] = set()
# Operations whose form that ends in "_" changes the shape alone.
SHAPE_IN_PLACE: set[str] = set()


def axis_rule(*names: str, joint: bool = False, in_place: bool = False) -> Callable[[AxisRule], AxisRule]:
    """Registers how the unit axis goes through the operations `names`.

    Where the rule is for all operands that depend on the batch, and not for the first alone, the operation is `joint`. The
    rule is good for its form `in_place`, too, if that keeps the shape of what it changes.
    """

    def register(rule: AxisRule) -> AxisRule:
        for name in names:
            AXIS_RULES[name] = rule
        if joint:
            JOINT.update(names)
        if in_place:
            VALUES_IN_PLACE.update(names)
        return rule

    return register


@functools.lru_cache(maxsize=1024)
def plain_name(name: str) -> str:
    """The name without the underscore of in-place operations."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def batch_first(call: Call, source: Tensor, axis: UnitAxis) -> UnitAxis | None:
    """An axis rule for layers that take (batch, channels, ...), and treat each item of the batch by itself."""
    return axis if axis.dim == 0 and source.ndim >= 2 else None


# A rule takes the capture, the name of the operation, the function that was called and its arguments, and returns its result.
UseRule = Callable[[CaptureForRules, str, Callable, tuple, dict], Any]
USE_RULES: dict[str, UseRule] = {}


class NotThisForm(Exception):
    """A use rule does not cover this form of its operation; `unit_by_unit` may."""


def use_rule(*names: str) -> Callable[[UseRule], UseRule]:
    """Registers how the operations `names` use parameters."""

    def register(rule: UseRule) -> UseRule:
        for name in names:
            USE_RULES[name] = rule
        return rule

    return register


class RowsRead(NamedTuple):
    """A lookup reads `table[ids]`, and nothing else of the table."""

    table: Any
    ids: Any
    padding: int | None = None  # the id whose row gets no gradient
    result_is_rows: bool = True  # whether the result is table[ids], and its gradient what `padding` says


# By the function itself: two with the same name may take their arguments in another order.
RowsRule = Callable[[tuple, dict], "RowsRead | None"]
ROWS_RULES: dict[Callable, RowsRule] = {}


def reads_rows(*functions: Callable) -> Callable[[RowsRule], RowsRule]:
    """Registers which rows of a table `functions` read; a rule gives None for a form that may read others."""

    def register(rule: RowsRule) -> RowsRule:
        for function in functions:
            ROWS_RULES[function] = rule
        return rule

    return register


def rows_read(func: Callable, args: tuple, kwargs: dict) -> RowsRead | None:
    """The rows that a lookup by integer ids reads; None for any other operation."""
    rule = ROWS_RULES.get(func)
    rows = None if rule is None else rule(args, kwargs)
    if rows is None or not isinstance(rows.ids, Tensor) or rows.ids.dtype not in (torch.int64, torch.int32):
        return None
    return rows
