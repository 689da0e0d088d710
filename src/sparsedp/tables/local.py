"""An owner whose rows are owed nothing: a step gives them their gradients, noise included, through the user's optimizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from sparsedp._torch import optimizer_post_hooks, optimizer_pre_hooks
from sparsedp.kernels.loops import move_rows
from sparsedp.several_optimizers import SeveralOptimizers, parts_of
from sparsedp.tables.owner import Owner, Ownership


class LocalOwner(Owner):
    """Moves rows itself where the user's optimizer would merely move them; else it leaves them a sparse gradient."""

    def __init__(self, ownership: Ownership) -> None:
        super().__init__(ownership)
        self._rates: dict[int, float] = {}

    def advance(self) -> None:
        self._rates = plain_rates(self.run.optimizer)

    def apply(self, name: str, rows: Tensor, values: Tensor) -> None:
        parameter, first = self.run.parameters[name], self.run.first_in_memory(name)
        rows = rows - first if first else rows
        rate = self._rates.get(id(parameter))
        if rate is not None:
            move_rows(parameter.detach(), rows, values, -rate)
            return
        if parameter.grad is not None:  # an owner of other rows of the table has put theirs there
            before = parameter.grad
            rows, values = torch.cat([before._indices()[0], rows]), torch.cat([before._values(), values])
        parameter.grad = torch.sparse_coo_tensor(
            rows[None], values, parameter.shape, is_coalesced=True, check_invariants=False
        )


def plain_rates(optimizer: Optimizer) -> dict[int, float]:
    """The learning rates of the parameters, by their ids, that an optimizer merely moves against their gradients.

    Rows are then moved without it, to the same result: torch's sparse tensors take several times as long. Not if somebody
    watches the step, who may look at the gradients.
    """
    if watched(optimizer):
        return {}
    groups = [
        group for part in parts_of(optimizer) if type(part) is torch.optim.SGD for group in part.param_groups
        if not (group["momentum"] or group["weight_decay"] or group["maximize"] or group["differentiable"])
    ]  # fmt: skip
    return {id(parameter): float(group["lr"]) for group in groups for parameter in group["params"]}


def watched(optimizer: Optimizer) -> bool:
    """Whether somebody is called at each step of an optimizer, who may look at the gradients."""
    if isinstance(optimizer, SeveralOptimizers) and any(map(watched, optimizer.parts)):
        return True
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    hooks_of_all = optimizer_pre_hooks or optimizer_post_hooks
    return bool("step" in vars(optimizer) or hooks or hooks_of_all)
