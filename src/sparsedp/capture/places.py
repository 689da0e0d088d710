"""Places in the code of a model: the line that an operation was called from, and the statement there.

Frames are only walked where something is refused, or where the place of the units is lost: other operations pay nothing.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
import textwrap
import weakref
from collections.abc import Sequence
from itertools import islice
from types import CodeType, FrameType
from typing import NamedTuple

import torch
from torch import Tensor

from sparsedp.capture.tensors import KnownTensors

_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = (sysconfig.get_path("stdlib") + os.sep, sysconfig.get_path("platstdlib") + os.sep)
# Packages whose functions take tensors on behalf of a model: the line that calls them is the one to look at.
_HELPERS = {"einops", "opt_einsum", "jaxtyping", "beartype", "typeguard", "numpy", "wrapt", "decorator"}
_MODEL, _BETWEEN, _OWN_MODEL, _OUTSIDE = range(4)


class Place(NamedTuple):
    """A line of code that calls an operation."""

    code: CodeType
    line: int
    instruction: int  # of the code, that runs

    @property
    def file(self) -> str:
        return self.code.co_filename

    @property
    def function(self) -> str:
        return self.code.co_name

    @property
    def span(self) -> tuple[int | None, ...] | None:
        """First and last line, first and last column of the expression that runs; None where Python does not tell (3.10)."""
        if not hasattr(self.code, "co_positions"):
            return None
        return next(islice(self.code.co_positions(), self.instruction // 2, None), None)

    @property
    def statement(self) -> Statement | None:
        """The statement that the line is part of; None where there is no source."""
        lines = linecache.getlines(self.file)
        if not 0 < self.line <= len(lines):
            return None
        return _statement("".join(lines), self.line)


class Statement(NamedTuple):
    """A statement: its text without indentation, and its syntax tree."""

    text: str
    tree: ast.stmt


@functools.lru_cache(maxsize=8)
def _tree(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


@functools.lru_cache(maxsize=64)
def _statement(source: str, line: int) -> Statement | None:
    tree = _tree(source)
    if tree is None:
        return None
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and node.lineno <= line <= (node.end_lineno or node.lineno)
        and (not hasattr(node, "body") or node.lineno == line)
    ]
    if not around:
        return None
    inner = max(around, key=lambda node: (node.lineno, node.col_offset))
    last = inner.body[0].lineno - 1 if hasattr(inner, "body") else inner.end_lineno  # the head of an `if` or a `for`
    lines = source.splitlines()[inner.lineno - 1 : max(last or 0, inner.lineno)]
    return Statement(textwrap.dedent("\n".join(lines)), inner)


def place_in_code() -> Place | None:
    """The innermost line that runs now and is neither torch's nor SparseDP's, nor a helper's; None if there is none.

    Models that SparseDP brings along count where nothing else is there.
    """
    return _innermost(sys._getframe(1))


def place_of(error: BaseException) -> Place | None:
    """The innermost line of a model that an error came by."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return None if traceback is None else _innermost(traceback.tb_frame)


def _innermost(frame: FrameType | None) -> Place | None:
    in_package = None
    while frame is not None:
        whose = _whose(frame.f_code.co_filename)
        if whose == _OUTSIDE:
            break
        if whose == _MODEL or (whose == _OWN_MODEL and in_package is None):
            place = Place(frame.f_code, frame.f_lineno, frame.f_lasti)
            if whose == _MODEL:
                return place
            in_package = place
        frame = frame.f_back
    return in_package


@functools.lru_cache(maxsize=4096)
def _whose(file: str) -> int:
    if file.startswith(_HERE):
        inside = file[len(_HERE) :]
        if inside in ("check.py", "explain.py"):
            return _OUTSIDE  # these call the model: what called them is no part of it
        return _OWN_MODEL if inside.split(os.sep)[0] in ("models", "nn") else _BETWEEN
    if file.startswith((_TORCH, "<frozen", "<__array")):
        return _BETWEEN
    parts = file.split(os.sep)
    is_package = "site-packages" in parts or "dist-packages" in parts
    if is_package and any(part in _HELPERS for part in parts):
        return _BETWEEN
    return _BETWEEN if file.startswith(_STANDARD) and not is_package else _MODEL


class Origin(NamedTuple):
    """The operation that combined the units of a batch, or after which it was not known where they are."""

    operation: str
    place: Place | None
    shapes: tuple[tuple[int, ...], ...]  # of its operands
    axes: tuple[int | None, ...]  # the dimension that has the units in each

    def __str__(self) -> str:
        where = "" if self.place is None else f" ({self.place.file}:{self.place.line})"
        return f"'{self.operation}'{where}"


class Origins:
    """Where tensors come from whose units were combined, or are in a place that is not known, until they die."""

    def __init__(self, known: KnownTensors) -> None:
        self._known = known
        self._entries: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}

    def of(self, tensor: Tensor) -> Origin | None:
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def note(self, tensor: Tensor, operation: str, operands: Sequence[Tensor]) -> None:
        """`operation` on `operands` made `tensor`: its origin is there, or where one of the operands has its own."""
        earlier = [origin for origin in map(self.of, operands) if origin is not None]
        origin = earlier[0] if earlier else self._made(operation, operands)
        entries, key = self._entries, id(tensor)

        def forget(dead: weakref.ref) -> None:
            if key in entries and entries[key][0] is dead:
                del entries[key]

        entries[key] = (weakref.ref(tensor, forget), origin)

    def _made(self, operation: str, operands: Sequence[Tensor]) -> Origin:
        axes = [self._known.known_axis(operand) for operand in operands]
        dims = tuple(None if axis is None else axis.dim for axis in axes)
        shapes = tuple(() if operand.is_nested else tuple(operand.shape) for operand in operands)
        return Origin(operation, place_in_code(), shapes, dims)
