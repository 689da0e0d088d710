"""Custom functions as the operations of their forward(): for those that take private parameters.

Their backward() would leave an ordinary gradient at the parameter, and may be made of anything. So it does not run: forward()
runs as if it were a part of the module, its operations are followed as any others, and ordinary autograd makes the gradients of
what is computed from parameters. That is the same wherever backward() gives the derivative of forward(), which is compared; a
function that gives something else (a straight-through estimate, a gradient that is scaled) is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.trials import copied, tensors_in, with_tensors


class PlainContext:
    """Stands for `ctx` in a forward() that no backward() follows."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple = ()
        self.to_save: tuple = ()
        self.constants: list[Tensor] = []  # outputs without a gradient
        self.changed: list[Tensor] = []  # inputs that forward() says it changes

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = self.to_save = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        pass

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.constants += tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        self.changed += tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


def run_plainly(function: Any, args: tuple) -> Any:
    """What forward() of a custom function gives for `args`, with a history of its operations; raises if it cannot be so run."""
    context = PlainContext(tuple(isinstance(value, Tensor) and value.requires_grad for value in args))
    if function.setup_context is torch.autograd.Function.setup_context:
        out = function.forward(context, *args)
    else:
        out = function.forward(*args)
        function.setup_context(context, args, out)
    if context.changed:
        raise ValueError("it changes its inputs in place")
    constants = {id(tensor) for tensor in context.constants}
    if isinstance(out, tuple):
        return tuple(value.detach() if id(value) in constants else value for value in out)
    return out.detach() if id(out) in constants else out


def is_derivative(function: Any, run: Callable, args: tuple, normal: Callable[[Tensor], Tensor]) -> bool:
    """Whether backward() gives the derivative of forward(), at these inputs and for gradients that `normal` draws."""
    inputs = list(tensors_in(args))

    def gradients(apply: Callable[[tuple], Any], weights: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """The outputs, and the gradients of all inputs. `weights` are drawn first, and used again."""
        leaves = [copied(tensor, tensor.requires_grad) for tensor in inputs]
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        with torch.enable_grad():
            given = iter([leaf.clone() for leaf in leaves])
            outputs = [out for out in tensors_in(apply(with_tensors(args, given))) if out.requires_grad]
        if not weights:
            weights += [normal(out) for out in outputs]
        return [out.detach() for out in outputs], list(
            torch.autograd.grad(outputs, wanted, weights[: len(outputs)], allow_unused=True)
        )

    weights: list[Tensor] = []
    outputs, its = gradients(lambda values: run(*values), weights)
    again, plain = gradients(lambda values: run_plainly(function, values), weights)
    return len(outputs) == len(again) and all(map(_are_close, outputs + its, again + plain))


def _are_close(one: Tensor | None, other: Tensor | None) -> bool:
    """But for rounding; None is zero."""
    if one is None or other is None:
        return all(tensor is None or not tensor.any() for tensor in (one, other))
    if one.shape != other.shape or not one.numel():
        return one.shape == other.shape
    tolerance = torch.finfo(one.dtype).eps ** 0.5 * float(other.abs().max())
    return bool(((one - other).abs() <= tolerance).all())
