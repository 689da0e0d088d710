"""The unit axis through the operations that torch itself tests, with torch's own inputs: never kept where units mix."""

from __future__ import annotations

import itertools
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparsedp.capture.capture import Capture
from sparsedp.errors import SparseDPError
from support import Apply

# What is not the same for a unit alone: random numbers, and operations that drop or move an axis of length 1.
_NOT_COMPARABLE = {
    "H", "T", "mH", "mT", "transpose", "squeeze", "expand", "broadcast_to", "bernoulli", "normal",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout", "nn.functional.scaled_dot_product_attention",
}  # fmt: skip


def _operations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", stub)  # which torch's list needs, and does not come with torch
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes and op.supports_autograd and "jiterator" not in op.name]


def _calls(operation: Any) -> Iterator[tuple[Callable[..., Any], Tensor, tuple]]:
    """The operation on inputs whose first axis may be one of units, and its other arguments."""
    for sample in itertools.islice(operation.sample_inputs("cpu", torch.float32), 40):
        x, rest = sample.input, sample.args
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.ndim < 2 or len(x) < 2:
            continue
        nested = [value for value in (*rest, *sample.kwargs.values()) if isinstance(value, (tuple, list))]
        if any(isinstance(value, Tensor) for value in itertools.chain(*nested, sample.kwargs.values())):
            continue
        if all(len(value) == len(x) for value in rest if isinstance(value, Tensor) and value.ndim):
            yield lambda *args, named=sample.kwargs: operation.op(*args, **named), x.detach(), rest


def _first(out: Any) -> Tensor | None:
    if isinstance(out, (tuple, list)):
        return next((item for item in out if isinstance(item, Tensor)), None)
    return out if isinstance(out, Tensor) else None


def _is_apart(function: Callable[..., Any], x: Tensor, rest: tuple) -> bool | None:
    """Whether each unit's result is what it is alone; None if its place on axis 0 is not kept, or it does not run alone."""
    try:
        together = _first(function(x, *rest))
        if together is None or not together.ndim or len(together) != len(x) or not together.is_floating_point():
            return None
        for i in range(len(x)):
            mine = [v[i : i + 1] if isinstance(v, Tensor) and v.ndim else v for v in (x, *rest)]
            alone = _first(function(*mine))
            if alone is None or alone.shape != together[i : i + 1].shape:
                return False
            if not torch.allclose(alone, together[i : i + 1], rtol=1e-3, atol=1e-4, equal_nan=True):
                return False
    except (RuntimeError, IndexError, ValueError, TypeError):
        return None
    return True


def _is_followed(function: Callable[..., Any], x: Tensor, rest: tuple) -> bool:
    """Whether capture knows where the units are in the result."""
    module = Apply(lambda m, x, *rest: function(x * m.scale, *rest), scale=nn.Parameter(torch.ones(())))
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    try:
        out = _first(module(x, *rest))
        return out is not None and capture.known_axis(out) is not None
    except SparseDPError:
        return False
    finally:
        capture.detach()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_units_are_not_taken_to_be_apart_where_they_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    followed, mixing = set(), set()
    for operation in _operations(monkeypatch):
        for function, x, rest in _calls(operation):
            is_apart = _is_apart(function, x, rest)
            if is_apart is None:
                continue
            is_followed = _is_followed(function, x, rest)
            if is_apart and is_followed:
                followed.add(operation.name)
            if not is_apart:
                mixing.add(operation.name)
                assert not is_followed or operation.name in _NOT_COMPARABLE, (operation.name, x.shape, rest)
    assert len(followed) > 200 and len(mixing) > 20, (len(followed), len(mixing))
