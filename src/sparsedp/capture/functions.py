"""Custom `torch.autograd.Function`s in forward. What they do on the way back is their own code, which capture cannot follow.

So they are tried: one unit stays as it is, all others are exchanged, their inputs and the gradients of their outputs alike. If
that changes the output or the input gradient of the one, the function mixes units and is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from sparsedp.capture.tracking import UnitAxis
from sparsedp.errors import UnitsMixedError, UnsupportedError
from sparsedp.generator import CipherGenerator
from sparsedp.noise import RandomKey

if TYPE_CHECKING:
    from sparsedp.capture.capture import Capture

# `Function.apply` ends in this one, also where a model keeps `apply` under a name of its own.
APPLY = torch._C._FunctionBase.__dict__["apply"]
_AGAIN = 1 / 32  # the share of later uses that are tried
_TRIED_UNITS = 2


class Functions:
    """Stands before every custom function that a forward pass applies, from `begin` to `end`.

    A function is tried at its first use in each module, and at the later ones that `generator` picks; without one, at all.
    """

    def __init__(self, capture: Capture, generator: CipherGenerator | None) -> None:
        self._capture, self._always = capture, generator is None
        self._generator = RandomKey.from_os().generator() if generator is None else generator
        self._seen: set[tuple[type, str]] = set()
        self._outer: Any = None
        self.is_running = False  # whether a function is in its forward()

    def begin(self) -> None:
        thread = threading.get_ident()

        def apply(function: type, *args: Any, **kwargs: Any) -> Any:
            def run(*values: Any) -> Any:
                return APPLY.__get__(None, function)(*values, **kwargs)

            if threading.get_ident() == thread and torch.is_grad_enabled() and self._capture.is_watching():
                return self._apply(function, run, args)
            return run(*args)

        self._outer = _SingleLevelFunction.__dict__.get("apply")
        _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]

    def end(self) -> None:
        if self._outer is None:
            del _SingleLevelFunction.apply  # type: ignore[attr-defined]
        else:  # that of a private module which called this one
            _SingleLevelFunction.apply = self._outer  # type: ignore[attr-defined]

    def _apply(self, function: type, run: Callable, args: tuple) -> Any:
        inputs = list(tensors_in(args))
        with torch._C.DisableTorchFunction():
            axes = self._input_axes(function, inputs)
            is_due = axes is not None and self._is_due(function)
            copies = [copied(tensor, tensor.requires_grad) for tensor in inputs] if is_due else None
        outer, self.is_running = self.is_running, True
        try:
            out = run(*args)
        finally:
            self.is_running = outer
        if axes is not None:
            with torch._C.DisableTorchFunction():
                outputs = list(tensors_in(out))
                self._follow(function, inputs, axes, outputs)
            if copies is not None:
                with torch._C.DisableTorchFunction(), torch.random.fork_rng(devices=[]):
                    self._try(function, _Trial(run, args, copies), axes, outputs)
        return out

    def _input_axes(self, function: type, inputs: list[Tensor]) -> list[UnitAxis | None] | None:
        """Where the units are in each input, None in constants; None where no gradient of a unit passes."""
        capture = self._capture
        capture.require_history()
        if function.__module__ == "torch.utils.checkpoint":
            raise UnsupportedError(
                "Gradient checkpointing runs a part of the module again inside of backward, where its uses would be counted "
                "twice. Train without checkpointing; max_physical_batch bounds memory instead."
            )
        for parameter in map(capture.expression, inputs):
            if parameter is not None:
                reason = f"it takes private parameter {parameter.names}, at which it would leave an ordinary gradient"
                raise self._refuse(function, reason)
        if not any(tensor.requires_grad for tensor in inputs) or not any(map(capture.is_data, inputs)):
            return None
        axes = [capture.known_axis(tensor) for tensor in inputs]
        if any(axis is None and capture.is_data(tensor) for tensor, axis in zip(inputs, axes)):
            raise self._refuse(function, "where the units are in its inputs is not known")
        return axes

    def _follow(self, function: type, inputs: list[Tensor], axes: list[UnitAxis | None], outputs: list[Tensor]) -> None:
        """Capture followed what forward() did, one operation after another. It knows where the units are, or they mix."""
        capture = self._capture
        capture.forget_history()
        for tensor in outputs:
            if not capture.is_data(tensor):  # an input that is given back as it is becomes another tensor
                same = [axis for given, axis in zip(inputs, axes) if axis is not None and _is_same(tensor, given)]
                capture.place(tensor, same[0] if same else None)
            if tensor.requires_grad and capture.known_axis(tensor) is None:
                raise self._refuse(function, "its forward() does not keep units apart in a way that can be followed")

    def _is_due(self, function: type) -> bool:
        if self._capture.units < 2:
            return False  # there is nobody to exchange
        use = (function, self._capture.where())
        if use not in self._seen:
            self._seen.add(use)
            return True
        return self._always or float(self._generator.random(1)[0]) < _AGAIN

    def _try(self, function: type, trial: _Trial, input_axes: list[UnitAxis | None], outputs: list[Tensor]) -> None:
        """Raises if one unit's output or input gradient changes with the other units'."""
        units, output_axes = self._capture.units, [self._capture.known_axis(tensor) for tensor in outputs]
        grads = [self._normal(tensor) if tensor.requires_grad else None for tensor in outputs]
        first, second = trial.run(trial.inputs, grads), trial.run(trial.inputs, grads)
        if not _all_equal(first.outputs + first.grads, second.outputs + second.grads):
            raise self._refuse(function, "the same inputs gave something else the second time (is it random?)")
        for kept in (self._generator.random(_TRIED_UNITS) * units).astype(int).tolist():

            def part(
                tensors: list[Tensor | None], axes: list[UnitAxis | None], kept: int = kept
            ) -> list[Tensor | None]:
                return [_only_unit(tensor, axis, units, kept) for tensor, axis in zip(tensors, axes)]

            inputs = [like_unit(tensor, axis, units, kept) for tensor, axis in zip(trial.inputs, input_axes)]
            other_grads = [
                None if grad is None or axis is None else _but_unit(grad, 3 * self._normal(grad), axis, units, kept)
                for grad, axis in zip(grads, output_axes)
            ]
            other = trial.run(inputs, other_grads)
            if not _all_equal(part(first.outputs, output_axes), part(other.outputs, output_axes)):
                raise self._mixes(function, "forward")
            if not _all_equal(part(first.grads, input_axes), part(other.grads, input_axes)):
                raise self._mixes(function, "backward")

    def _normal(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._generator.standard_normal(tuple(like.shape))).to(like)

    def _mixes(self, function: type, where: str) -> UnitsMixedError:
        return UnitsMixedError(
            f"torch.autograd.Function '{function.__name__}'{self._capture.where()} mixes units in its {where}(): what it gives "
            "to one unit changes with the others. Let it treat each unit by itself."
        )

    def _refuse(self, function: type, reason: str) -> UnsupportedError:
        return UnsupportedError(
            f"torch.autograd.Function '{function.__name__}'{self._capture.where()}: {reason}. Write it with torch operations, or "
            "let it take activations alone, with the batch on an axis of its own, and treat each unit by itself."
        )


class _Outcome(NamedTuple):
    outputs: list[Tensor | None]
    grads: list[Tensor | None]  # of the inputs


@dataclass(frozen=True)
class _Trial:
    """A function that runs again. `inputs` are copies of the tensors in `args`, as they were before it ran first."""

    function: Callable
    args: tuple
    inputs: list[Tensor]

    def run(self, inputs: list[Tensor], grads: list[Tensor | None]) -> _Outcome:
        """The outputs for these inputs, and the inputs' gradients for `grads` of the outputs."""
        leaves = [copied(tensor, was.requires_grad) for tensor, was in zip(inputs, self.inputs)]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            passed = iter([leaf.clone() for leaf in leaves])  # it may change them in place, which leaves do not allow
            outputs = list(tensors_in(self.function(*with_tensors(self.args, passed))))
        made = [(out, grad) for out, grad in zip(outputs, grads) if out.requires_grad and grad is not None]
        ends, weights = [out for out, _ in made], [grad for _, grad in made]
        found = iter(torch.autograd.grad(ends, wanted, weights, allow_unused=True) if made else [None] * len(wanted))
        back = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return _Outcome([out.detach() for out in outputs], back)


def copied(tensor: Tensor, requires_grad: bool = False) -> Tensor:
    return tensor.detach().clone().requires_grad_(requires_grad)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(item)


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """`value` with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [with_tensors(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether both are the same elements of the same memory."""
    return tensor.data_ptr() == other.data_ptr() and tensor.shape == other.shape and tensor.stride() == other.stride()


def _unit_of(tensor: Tensor, axis: UnitAxis, units: int) -> Tensor:
    """The unit of each index along the dimension that has the units."""
    return torch.arange(tensor.shape[axis.dim], device=tensor.device) // axis.inner % units


def _only_unit(tensor: Tensor | None, axis: UnitAxis | None, units: int, kept: int) -> Tensor | None:
    """The part of one unit; None for what has no units."""
    if tensor is None or axis is None:
        return None
    return tensor.index_select(axis.dim, (_unit_of(tensor, axis, units) == kept).nonzero().squeeze(1))


def like_unit(tensor: Tensor, axis: UnitAxis | None, units: int, kept: int) -> Tensor:
    """The tensor with the values of one unit for all: values that the function surely takes."""
    if axis is None:
        return tensor
    index = torch.arange(tensor.shape[axis.dim], device=tensor.device)
    return tensor.index_select(axis.dim, index + (kept - _unit_of(tensor, axis, units)) * axis.inner)


def _but_unit(tensor: Tensor, others: Tensor, axis: UnitAxis, units: int, kept: int) -> Tensor:
    """One unit's part of `tensor`, and all others' of `others`."""
    is_kept = _unit_of(tensor, axis, units) == kept
    return torch.where(is_kept.view(-1, *(1,) * (tensor.ndim - 1 - axis.dim)), tensor, others)


def _all_equal(tensors: list[Tensor | None], others: list[Tensor | None]) -> bool:
    return len(tensors) == len(others) and all(map(unchanged, tensors, others))


def unchanged(tensor: Tensor | None, other: Tensor | None) -> bool:
    """Whether two results are the same, but for the last digits."""
    if tensor is None or other is None:
        return tensor is other
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    if not tensor.is_floating_point() or not tensor.numel():
        return torch.equal(tensor, other)
    atol = 16 * torch.finfo(tensor.dtype).eps * float(tensor.nan_to_num(0, 0, 0).abs().max())
    return torch.allclose(tensor, other, rtol=0, atol=atol, equal_nan=True)
