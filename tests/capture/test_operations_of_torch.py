"""The unit axis through the operations that torch itself tests, with torch's own inputs and the units in many places.

Where capture says that the units of a result lie on an axis, each unit's part of it must not change with the other units' inputs;
what it takes to be constant must not change with any unit's. Whatever it does not follow it refuses in its own words.
"""

from __future__ import annotations

import itertools
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from sparsedp.capture.capture import Capture
from sparsedp.capture.ops.registry import AXIS_RULES
from sparsedp.capture.tensors import Derived
from sparsedp.capture.units import Mixed, UnitAxis, UnitData, unit_first
from sparsedp.errors import SparseDPError
from support import Apply

UNITS = 3
SAMPLES = 5  # of torch's inputs for each operation
PARTS = 8  # of the list, for processes that share the work
# Whose results are not decided by their inputs: memory that nobody wrote to.
_NOT_WRITTEN = {
    "empty",
    "empty_like",
    "empty_strided",
    "empty_permuted",
    "new_empty",
    "new_empty_strided",
    "resize_",
    "resize_as_",
}
# Whose numbers come from capture's key instead of torch's generator.
_DRAWN = {
    "bernoulli", "cauchy", "exponential", "geometric", "log_normal", "multinomial", "normal", "normal_", "uniform", "rand_like",
    "randint_like", "randn_like", "randint", "randn", "rrelu",
    "nn.functional.alpha_dropout", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
    "nn.functional.feature_alpha_dropout", "nn.functional.rrelu", "nn.functional.fractional_max_pool2d",
    "nn.functional.fractional_max_pool3d", "nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward",
}  # fmt: skip


class Place(NamedTuple):
    """Where an input has its units: on an axis of their own, or joined with the positions of another one."""

    axis: int
    joined: Literal["", "units outside", "units inside"] = ""

    def of(self, x: Tensor) -> Tensor:
        """The tensor (units, ...) with its units there."""
        axis = min(self.axis, x.ndim - 1)
        if not self.joined or x.ndim < 2:
            return x.movedim(0, axis)
        axis = min(axis, x.ndim - 2)
        return x.movedim(0, axis if self.joined == "units outside" else axis + 1).flatten(axis, axis + 1)


PLACES = (
    Place(0), Place(1), Place(9), Place(0, "units outside"), Place(0, "units inside"), Place(9, "units inside"),
)  # fmt: skip


@dataclass
class Call:
    """An operation on the units' tensors, (units, ...) each, `mine`; `others` are such tensors of other units."""

    name: str
    function: Callable[[Sequence[Tensor]], Any]  # of the tensors with their units in their places
    place: Place
    mine: list[Tensor]
    others: list[Tensor]

    def on(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The results, as a flat list."""
        return pytree.tree_leaves(self.function([self.place.of(tensor.clone()) for tensor in tensors]))

    def with_other_units_than(self, unit: int) -> list[Any]:
        """The results if all units but one are others."""
        return self.on([_exchanged(one, other, unit) for one, other in zip(self.mine, self.others)])


def _exchanged(mine: Tensor, others: Tensor, unit: int) -> Tensor:
    out = others.clone()
    out[unit] = mine[unit]
    return out


# ---------------------------------------------------------------------- torch's operations and inputs


def _operations(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    stub = types.ModuleType("expecttest")
    stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", stub)  # which torch's list needs, and does not come with torch
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if "jiterator" not in op.name and op.name not in _NOT_WRITTEN | _DRAWN]


def _dtype(operation: Any) -> torch.dtype:
    wanted = (torch.float64, torch.float32, torch.int64, torch.bool)
    return next((dtype for dtype in wanted if dtype in operation.dtypes), torch.complex64)


def _samples(operation: Any, seed: int) -> list[list[Any]]:
    """Of each sample the flat list of its inputs; the trees of all seeds are alike."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    samples = itertools.islice(operation.sample_inputs("cpu", _dtype(operation), set_seed=False), SAMPLES)
    return [[sample.input, sample.args, sample.kwargs] for sample in samples]


def _calls(operation: Any) -> Iterator[Call]:
    """The operation and its form in place, on samples that are stacked, and on samples one of whose own axes is of units."""
    functions = {operation.name: operation.op}
    if operation.inplace_variant is not None:
        functions[f"{operation.name}_"] = operation.inplace_variant
    drawn = [_samples(operation, seed) for seed in range(2 * UNITS)]
    for of_seeds in zip(*drawn):
        leaves, tree = zip(*map(pytree.tree_flatten, of_seeds))
        if len({str(each) for each in tree}) > 1:
            continue
        is_tensor = [isinstance(leaf, Tensor) and leaf.layout == torch.strided for leaf in leaves[0]]
        chosen = [i for i, fits in enumerate(is_tensor) if fits]
        if any(leaves[s][i].shape != leaves[0][i].shape for s in range(len(leaves)) for i in chosen if is_tensor[i]):
            continue
        for name, function in functions.items():
            yield from _stacked(name, function, leaves, tree[0], chosen)
            yield from _along_own_axes(name, function, leaves, tree[0], chosen)


def _with(
    function: Callable[..., Any], leaves: list[Any], tree: Any, chosen: list[int]
) -> Callable[[Sequence[Tensor]], Any]:
    """The function of the chosen leaves; the others are constants."""

    def call(tensors: Sequence[Tensor]) -> Any:
        filled = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for i, tensor in zip(chosen, tensors):
            filled[i] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, tree)
        return function(first, *args, **kwargs)

    return call


def _stacked(
    name: str, function: Callable[..., Any], leaves: Sequence[list[Any]], tree: Any, tensors: list[int]
) -> Iterator[Call]:
    """All tensors are of units, and the first alone is; in each of the places."""
    for chosen in [tensors, tensors[:1]] if len(tensors) > 1 else [tensors[:1]]:
        if not chosen:
            continue
        mine, others = (
            [torch.stack([leaves[seed][i].detach() for seed in seeds]) for i in chosen]
            for seeds in (range(UNITS), range(UNITS, 2 * UNITS))
        )
        for place in PLACES if chosen == tensors[:1] else PLACES[:3]:
            if place.axis < 2 or mine[0].ndim > 2:
                yield Call(name, _with(function, leaves[0], tree, chosen), place, mine, others)


def _along_own_axes(
    name: str, function: Callable[..., Any], leaves: Sequence[list[Any]], tree: Any, tensors: list[int]
) -> Iterator[Call]:
    """Axis k of the first tensor is of units, and axis k of the others where it is as long."""
    if not tensors or leaves[0][tensors[0]].ndim == 0:
        return
    shape = leaves[0][tensors[0]].shape
    for axis in {0, 1, len(shape) - 1} & set(range(len(shape))):
        if not 2 <= shape[axis] <= 6:
            continue
        alike = [i for i in tensors if leaves[0][i].ndim > axis and leaves[0][i].shape[axis] == shape[axis]]
        for chosen in [alike, tensors[:1]] if len(alike) > 1 else [tensors[:1]]:
            mine, others = ([leaves[seed][i].detach().movedim(axis, 0).contiguous() for i in chosen] for seed in (0, 1))
            yield Call(name, _with(function, leaves[0], tree, chosen), Place(axis), mine, others)


# ---------------------------------------------------------------------- what capture says, and what is so


@dataclass
class Findings:
    followed: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)


def _followed(call: Call) -> tuple[list[Any], list[Any]]:
    """The results under capture, and what it knows of each."""
    results: list[Any] = []

    def forward(module: nn.Module, *inputs: Tensor) -> list[Any]:
        scaled = [x * module.scale if x.is_floating_point() else x for x in inputs]
        results.extend(call.on(scaled))
        return results

    module = Apply(forward, scale=nn.Parameter(torch.ones((), dtype=torch.float64)))
    capture = Capture(module, dict(module.named_parameters()))
    capture.attach()
    try:
        module(*call.mine)
        axes = [capture.known_axis(out) if isinstance(out, Tensor) else None for out in results]
        return results, [
            axis or (capture.info(out) if isinstance(out, Tensor) else None) for axis, out in zip(axes, results)
        ]
    finally:
        capture.detach()


def _judge(call: Call, findings: Findings) -> None:
    if all(torch.equal(one, other) for one, other in zip(call.mine, call.others)):
        return  # inputs that are not drawn: nothing would change
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)  # some operations take only what needs no gradient
    try:
        together = call.on([x * scale if x.is_floating_point() else x for x in call.mine])
        exchanged = [call.with_other_units_than(unit) for unit in range(len(call.mine[0]))]
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError, AssertionError):
        return  # which the operation itself does not take
    words = f"{call.name} on {[tuple(x.shape) for x in call.mine]}, {call.place}"
    try:
        results, infos = _followed(call)
    except SparseDPError:
        findings.refused.add(call.name)
        return
    except Exception as error:
        findings.wrong.append(f"{words}: {type(error).__name__}: {error}")
        return
    findings.compared += 1
    for place, (result, info) in enumerate(zip(results, infos)):
        variants = [out[place] for out in exchanged if len(out) > place]
        if isinstance(info, UnitAxis):
            findings.followed.add(call.name)
            changed = [
                u for u, other in enumerate(variants) if not _same_part(together[place], other, info, u, len(variants))
            ]
            if changed:
                findings.wrong.append(f"{words}: result {place}, {info}: units {changed} change with the others")
            continue
        is_refused_in_losses = isinstance(result, Tensor) and result.requires_grad
        if isinstance(info, (UnitData, Mixed, Derived)) or is_refused_in_losses:
            continue
        if not all(_same(together[place], variant) for variant in variants):
            findings.wrong.append(f"{words}: result {place} is taken to be constant ({info}), and is not")


def _same_part(one: Tensor, other: Tensor, axis: UnitAxis, unit: int, units: int) -> bool:
    return one.shape == other.shape and _same(unit_first(one, axis, units)[unit], unit_first(other, axis, units)[unit])


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one == other
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() and not one.is_complex():
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-5, atol=1e-7, equal_nan=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_units_are_where_capture_takes_them_to_be(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    findings = Findings()
    for operation in _operations(monkeypatch)[part::PARTS]:
        for call in _calls(operation):
            _judge(call, findings)
    assert not findings.wrong, "\n".join(findings.wrong)
    assert len(findings.followed) > 30 and findings.compared > 500, (len(findings.followed), findings.compared)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cumsum", "flip", "softmax"])
def test_a_rule_that_is_wrong_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AXIS_RULES, name, AXIS_RULES["sin"])
    findings = Findings()
    for operation in _operations(monkeypatch):
        if operation.name == name:
            for call in _calls(operation):
                _judge(call, findings)
    assert any("change with the others" in words for words in findings.wrong)
