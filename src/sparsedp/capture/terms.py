"""Terms of the loss that depend on parameters alone, such as a penalty on their norm: they are no unit's.

`loss = errors.mean() + 0.01 * weight.norm()` in forward() adds such a term to a value that was summed over the units. Its
gradient is public as the parameters are: it needs no clipping, and joins the update after the noise. Three things have to be
true of it, because nothing bounds it: it is made of parameters and constants, it reaches the loss with the factor 1, and it is
the same function of the parameters in every step. Python numbers are not followed, so the last is seen from its history: the
operations, and the constants that they keep for the gradient, must be those of the first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture.expressions import Expression
from sparsedp.capture.forward_pass import HasUnits
from sparsedp.capture.places import Place
from sparsedp.capture.refused import located_refusal
from sparsedp.capture.units import Mixed
from sparsedp.errors import SparseDPError, UnsupportedError

# What adds a term to a value, and what the term is multiplied by where it comes first or second.
_SIGNS = {"add": (1, 1), "radd": (1, 1), "iadd": (1, 1), "add_": (1, 1), "sub": (1, -1), "isub": (1, -1), "sub_": (1, -1),
          "subtract": (1, -1), "rsub": (-1, 1)}  # fmt: skip
_SUMS = {"sum", "mean"}  # over the units: what a loss is made of


@dataclass(eq=False)
class PublicTerm:
    """A term of the loss. `expression` has the history of its gradient, which ends at the parameters."""

    expression: Expression
    sign: int
    batch: HasUnits
    operation: str
    factor: Tensor | None = None  # the gradient that arrived: what the loss multiplies it by
    place: Place | None = None  # in the model's code

    def require_plain(self) -> None:
        """Raises if the loss has the term with another factor than 1: units might decide it."""
        if self.factor is None or not bool((self.factor == 1).all()):
            error = SparseDPError(
                f"The term of the loss that depends on parameter {self.expression.names} alone, and is joined to it by "
                f"'{self.operation}', does not reach the loss with the factor 1. Its gradient is not clipped, so nothing that a "
                "unit decides may have a part in its factor. Write the factor into the term itself, "
                "loss = errors.mean() + 0.01 * penalty, let nothing scale the loss after that, and call backward() once. "
                "Nothing was written."
            )
            raise error if self.place is None else located_refusal(error, self.operation, "", self.place)

    def gradients(self) -> dict[str, Tensor]:
        """Of each parameter that it depends on, by ordinary autograd."""
        tensor, parameters = self.expression.tensor, self.expression.parameters
        grads = torch.autograd.grad(
            tensor,
            [parameter for _, parameter in parameters],
            torch.full_like(tensor, float(self.sign)),
            retain_graph=True,
            allow_unused=True,
        )
        return {
            name: grad.to_dense() if grad.layout != torch.strided else grad
            for (name, _), grad in zip(parameters, grads)
            if grad is not None
        }

    def digest(self) -> str:
        """The same for two terms that are the same function of the parameters, as far as their gradients tell."""
        names = {id(parameter): name for name, parameter in self.expression.parameters}
        text = hashlib.blake2b(f"{self.sign} {tuple(self.expression.tensor.shape)}".encode())
        numbers: dict[Any, int] = {}
        waiting: list[Any] = [self.expression.tensor.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in numbers:
                text.update(f"again {numbers[node]}".encode())
                continue
            numbers[node] = len(numbers)
            variable = getattr(node, "variable", None)
            text.update(f"{node.name()} {'' if variable is None else names.get(id(variable))}".encode())
            for attribute in sorted(filter(lambda name: name.startswith("_saved_"), dir(node))):
                text.update(f"{attribute} ".encode())
                _add_saved(text, getattr(node, attribute))
            text.update(str([number for _, number in node.next_functions]).encode())
            waiting += [following for following, _ in node.next_functions if following is not None]
        return text.hexdigest()


def _add_saved(text: Any, value: Any) -> None:
    """What a node keeps for the gradient: numbers and constants by their values, what depends on parameters not."""
    if isinstance(value, (tuple, list)):
        for item in value:
            _add_saved(text, item)
    elif not isinstance(value, Tensor):
        text.update(repr(value).encode())
    elif value.requires_grad:
        text.update(b"computed")
    else:
        text.update(f"{value.dtype} {tuple(value.shape)}".encode())
        text.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def sign_of_term(
    name: str, args: tuple, kwargs: dict, data: Iterable[Any], expressions: list[Expression]
) -> tuple[int, int] | None:
    """Whether an operation adds a term to a sum over units: its place among the operands, and its sign. None if not.

    `data` says what is known of the operands that depend on the batch.
    """
    signs = _SIGNS.get(name)
    if signs is None or len(args) != 2 or len(expressions) != 1 or kwargs.get("alpha", 1) != 1:
        return None
    if set(kwargs) - {"alpha"}:
        return None
    if not all(type(info) is Mixed and info.operation in _SUMS for info in data):
        return None
    place = next((i for i, operand in enumerate(args) if operand is expressions[0].tensor), None)
    return None if place is None else (place, signs[place])


def require_public(expression: Expression, name: str, taken_out: str, where: Callable[[], str]) -> None:
    """Raises if something other than parameters and constants may have a part in a term."""
    if expression.drawn:
        raise UnsupportedError(
            f"Operation '{name}'{where()} adds a term to the loss that depends on parameter {expression.names} and on random "
            "numbers. A term without units must be a function of parameters and constants alone."
        )
    if taken_out:
        raise UnsupportedError(
            f"Operation '{name}'{where()} adds a term to the loss that depends on parameter {expression.names} alone, after "
            f"'{taken_out}' had made a Python value of the batch in the same pass. If the one comes from the other, private data "
            "reach the weights without noise. Make no such value, or use weight_decay for penalties."
        )


def join_digests(terms: Iterable[PublicTerm]) -> tuple[str, ...]:
    return tuple(sorted(term.digest() for term in terms))
