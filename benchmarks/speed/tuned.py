"""The best step without privacy on the private step's own code: what privacy itself costs, apart from the kernels.

Layers are autograd's. Tables are looked up without autograd, the gradients of what was looked up are added up by row for all
tables in one grouping, and the touched rows are moved: as EANA does it, without norms, clipping and noise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.steps import Workload
from benchmarks.speed.timing import Stopwatch
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.uses import Lookup, ParameterUses
from sparsedp.kernels.loops import move_rows

_RATE = 0.01


class _Table(nn.Module):
    """Looks rows up outside of autograd's graph of the weights; keeps their gradients in `uses` when these are there."""

    def __init__(self, name: str, weight: Tensor, uses: dict[str, ParameterUses]) -> None:
        super().__init__()
        self.weight: Tensor
        self.register_buffer("weight", weight.detach())
        self._name, self._uses = name, uses

    def forward(self, ids: Tensor) -> Tensor:
        """The rows `ids` (B,)."""
        rows = F.embedding(ids, self.weight).requires_grad_()

        def keep(grad: Tensor) -> None:
            lookup = Lookup(ids, torch.arange(len(ids)), grad, one_each=True)
            self._uses[self._name] = ParameterUses([lookup], [], [])

        rows.register_hook(keep)
        return rows


def tuned_step(workload: Workload, watch: Stopwatch) -> Callable[[], None]:
    """For models whose tables are each looked up once, one row for each unit."""
    module = workload.make(True)
    weights = {name: part.weight.detach() for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    uses: dict[str, ParameterUses] = {}
    for name, weight in weights.items():
        module.set_submodule(name, _Table(name, weight, uses))
    space = RowSpace.of(weights)
    optimizer = torch.optim.SGD(module.parameters(), lr=_RATE)

    def update_tables() -> None:
        units = len(workload.batch[-1])
        touched = TouchedRows(uses, space, units)
        rows = {name: touched.of(name) for name in weights}
        sums = {name: weight.new_zeros(len(rows[name]), weight.shape[1]) for name, weight in weights.items()}
        touched.add_weighted_sums(sums, touched.slots(rows), torch.ones(units))
        for name, weight in weights.items():
            move_rows(weight, rows[name], sums[name], -_RATE)
        uses.clear()

    def run() -> None:
        optimizer.zero_grad()
        with watch("forward"):
            loss = workload.loss(module, workload.batch)
        with watch("backward"):
            loss.backward()
        with watch("update"):
            update_tables()
            optimizer.step()
        watch.lap()

    return run
