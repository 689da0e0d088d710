"""Row-wise Adagrad: one number of state for each row of a table, of dense gradients and of row-sparse ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class RowWiseAdagrad(Optimizer):
    """Adagrad whose step of a row is divided by the root of one sum, of the means of the squares of the row's gradients.

    For a row w with gradient g of d columns::

        sum += |g|^2 / d
        w   -= lr / (1 + (step - 1) lr_decay) * g / (sqrt(sum) + eps)

    as TorchRec's class of this name and FBGEMM's EXACT_ROWWISE_ADAGRAD do, with the state of the former. Of a gradient that is
    row-sparse, the rows that it has are moved and no others. A parameter of one dimension has a row for each of its numbers.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        """`weight_decay` adds that much of the weights to their gradients, which have to be dense."""
        defaults = {
            "lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps,
            "initial_accumulator_value": initial_accumulator_value, "maximize": maximize,
        }  # fmt: skip
        for name, value in defaults.items():
            if not value >= 0:
                raise ValueError(f"{name} is a number of at least 0, not {value}")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            shape = parameter.shape[:1] + (1,) * (parameter.ndim - 1)
            state["sum"] = parameter.new_full(shape, group["initial_accumulator_value"], requires_grad=False)
        state["step"] += 1
        rate = group["lr"] / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        rate = rate if group["maximize"] else -rate
        if not gradient.is_sparse:
            if group["weight_decay"]:
                sign = -1 if group["maximize"] else 1
                gradient = gradient.add(parameter, alpha=sign * group["weight_decay"])
            state["sum"] += _mean_squares(gradient)
            parameter.addcdiv_(gradient, state["sum"].sqrt().add_(group["eps"]), value=rate)
            return
        if group["weight_decay"]:
            raise RuntimeError("weight_decay changes all rows, which a row-sparse gradient cannot")
        if gradient.sparse_dim() != 1:
            raise RuntimeError("a sparse gradient has to be sparse by rows: values of whole rows")
        gradient = gradient.coalesce()
        rows, values = gradient._indices()[0], gradient._values()
        sums = state["sum"].index_select(0, rows).add_(_mean_squares(values))
        state["sum"].index_copy_(0, rows, sums)
        parameter.index_add_(0, rows, values / sums.sqrt().add_(group["eps"]), alpha=rate)


def _mean_squares(gradient: Tensor) -> Tensor:
    """For each row the mean of the squares of its gradient, with as many dimensions as the gradient has."""
    if gradient.ndim < 2:
        return gradient.square()
    return gradient.square().mean(dim=tuple(range(1, gradient.ndim)), keepdim=True)
