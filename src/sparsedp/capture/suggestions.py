"""What to write instead of a statement that is refused: the old line and the new one, where one can be made.

A suggestion keeps what the statement is for as far as one can tell, and is accepted in its place.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import NamedTuple

from sparsedp.capture.names import is_in_place
from sparsedp.capture.ops.losses import OF_CLASSES
from sparsedp.capture.ops.reductions import ALONG, REDUCTIONS
from sparsedp.capture.places import Place, Statement

_MANY_DIMS = {"sum", "mean", "std", "var", "amax", "amin", "logsumexp", "nanmean", "nansum", "norm", "vector_norm"}
_RENAMED = {"max": "amax", "min": "amin"}  # which take several dimensions
_SAME_SHAPE = {"softmax", "log_softmax", "softmin", "normalize", "cumsum", "logcumsumexp"}


class Reduced(NamedTuple):
    """An operation that combined units: its name, and the first operand's shape and dimension of the units."""

    operation: str
    shape: tuple[int, ...]
    dim: int | None


def removed(place: Place | None) -> tuple[str, ...]:
    """The suggestion to take a statement out."""
    statement = None if place is None else place.statement
    return () if statement is None or not isinstance(statement.tree, ast.Expr) else _old(statement)


def without_writing(place: Place | None, operation: str) -> tuple[str, ...]:
    """The form of an operation in place that returns a new tensor: x.add_(y) becomes x = x.add(y)."""
    if not is_in_place(operation):
        return ()
    return _patch(place, lambda tree: _not_in_place(tree, operation, place))


def per_unit(place: Place | None, reduced: Reduced) -> tuple[str, ...]:
    """A reduction, or what acts along a dimension, over the axes of each unit instead of over the units."""
    if reduced.dim is None:
        return ()
    others = tuple(dim for dim in range(len(reduced.shape)) if dim != reduced.dim)
    name = _RENAMED.get(reduced.operation, reduced.operation)
    fits = (name in _MANY_DIMS or len(others) == 1) if name in REDUCTIONS else name in _SAME_SHAPE
    if not others or not fits:
        return ()
    return _patch(place, lambda tree: _along(tree, reduced.operation, name, others, place))


def over_all_positions(place: Place | None, operation: str) -> tuple[str, ...]:
    """A loss that divides by the number of all positions, not by that of the valid ones of the batch."""
    if operation not in OF_CLASSES:
        return ()
    return _patch(place, lambda tree: _mean_of_each(tree, operation, place))


def mean_of_all(place: Place | None) -> tuple[str, ...]:
    """A mean over all positions in place of a sum that is divided by a number of the batch: x.sum() / count."""

    def change(tree: ast.stmt) -> ast.stmt | None:
        divisions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)]
        total = divisions[0].left if len(divisions) == 1 else None
        if not isinstance(total, ast.Call) or _called(total) != "sum" or not isinstance(total.func, ast.Attribute):
            return None
        if total.keywords or len(total.args) != (0 if _is_method(total) else 1):
            return None
        total.func.attr = "mean"
        return _replaced(tree, divisions[0], total)

    return _patch(place, change)


def functional(place: Place | None, operation: str) -> tuple[str, ...]:
    """torch.nn.functional.embedding in place of torch.embedding, which takes the table first."""

    def change(tree: ast.stmt) -> ast.stmt | None:
        call = _call_of(tree, operation, place)
        if operation != "embedding" or call is None or len(call.args) != 2 or call.keywords:
            return None
        call.func = ast.parse("torch.nn.functional.embedding", mode="eval").body
        call.args.reverse()
        return tree

    return _patch(place, change)


# ---------------------------------------------------------------------- statements


def _patch(place: Place | None, change: Callable[[ast.stmt], ast.stmt | None]) -> tuple[str, ...]:
    statement = None if place is None else place.statement
    if statement is None or hasattr(statement.tree, "body"):
        return ()
    changed = change(copy.deepcopy(statement.tree))
    if changed is None:
        return ()
    new = ast.unparse(ast.fix_missing_locations(changed))
    return (*_old(statement), *(f"+ {line}" for line in new.splitlines()))


def _old(statement: Statement) -> tuple[str, ...]:
    return tuple(f"- {line}" for line in statement.text.splitlines())


def _call_of(tree: ast.AST, name: str, place: Place | None) -> ast.Call | None:
    """The call of a function or method `name` that runs at `place`; None if there is none, or it cannot be told."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == name]
    span = None if place is None else place.span
    if len(calls) > 1 and span is not None:
        calls = [c for c in calls if (c.lineno, c.end_lineno, c.col_offset, c.end_col_offset) == span]
    return calls[0] if len(calls) == 1 else None


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _is_method(call: ast.Call) -> bool:
    """Whether it is x.mean(), as against torch.mean(x) or F.softmax(x)."""
    base = call.func.value if isinstance(call.func, ast.Attribute) else None
    names = {"torch", "F", "functional", "linalg", "nn"}
    is_module = (isinstance(base, ast.Name) and base.id in names) or (
        isinstance(base, ast.Attribute) and base.attr in names
    )
    return base is not None and not is_module


def _not_in_place(tree: ast.stmt, operation: str, place: Place | None) -> ast.stmt | None:
    if isinstance(tree, ast.AugAssign):
        value = ast.BinOp(_loaded(tree.target), tree.op, tree.value)
        return ast.Assign([tree.target], value) if isinstance(tree.target, (ast.Name, ast.Attribute)) else None
    call = _call_of(tree, operation, place)
    if call is None or not isinstance(call.func, ast.Attribute) or not _is_method(call):
        return None
    call.func.attr = operation.rstrip("_")
    base = call.func.value
    if isinstance(base, ast.Attribute) and base.attr == "data":
        call.func.value = base = base.value
    if not isinstance(tree, ast.Expr):
        return tree
    is_target = isinstance(base, (ast.Name, ast.Attribute)) and tree.value is call
    return ast.Assign([base], call) if is_target else None


def _loaded(target: ast.expr) -> ast.expr:
    return ast.parse(ast.unparse(target), mode="eval").body


def _along(tree: ast.stmt, operation: str, name: str, dims: tuple[int, ...], place: Place | None) -> ast.stmt | None:
    """The call of `operation` in a statement, as `name` along `dims`."""
    call = _call_of(tree, operation, place)
    if call is None:
        return None
    position, _ = REDUCTIONS.get(operation) or ALONG[operation]
    position -= _is_method(call)
    call.args = call.args[:position]
    call.keywords = [word for word in call.keywords if word.arg not in ("dim", "axis", "keepdim")]
    if isinstance(call.func, ast.Attribute):
        call.func.attr = name
    elif isinstance(call.func, ast.Name):
        call.func.id = name
    along = dims[-1:] if name in _SAME_SHAPE else dims
    value: ast.expr = ast.Constant(along[0])
    if len(along) > 1:
        value = ast.Tuple([ast.Constant(dim) for dim in along], ast.Load())
    call.keywords.append(ast.keyword("dim", value))
    if name in ("norm", "vector_norm"):  # of a penalty: a mean over units of what each has
        return _replaced(tree, call, ast.Call(ast.Attribute(copy.copy(call), "mean", ast.Load()), [], []))
    if name not in _SAME_SHAPE:
        call.keywords.append(ast.keyword("keepdim", ast.Constant(True)))
    return tree


def _mean_of_each(tree: ast.stmt, operation: str, place: Place | None) -> ast.stmt | None:
    call = _call_of(tree, operation, place)
    if call is None:
        return None
    call.keywords = [word for word in call.keywords if word.arg != "reduction"]
    call.keywords.append(ast.keyword("reduction", ast.Constant("none")))
    return _replaced(tree, call, ast.Call(ast.Attribute(copy.copy(call), "mean", ast.Load()), [], []))


def _replaced(tree: ast.stmt, old: ast.expr, new: ast.expr) -> ast.stmt:
    class Replace(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            return new if node is old else self.generic_visit(node)

    changed = Replace().visit(tree)
    assert isinstance(changed, ast.stmt)
    return changed
