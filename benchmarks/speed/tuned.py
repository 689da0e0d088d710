"""The best step without privacy on the private step's own code: what privacy itself costs, apart from the kernels.

Layers are autograd's. Tables are looked up without autograd, the gradients of what was looked up are added up by row for all
tables in one grouping, and the touched rows are moved: as EANA does it, without norms, clipping and noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.steps import Workload
from benchmarks.speed.timing import Stopwatch
from sparsedp.capture.kernels import move_rows
from sparsedp.capture.rows import RowSpace, TouchedRows
from sparsedp.capture.uses import Lookup, ParameterUses

_RATE = 0.01


def tuned_step(workload: Workload, watch: Stopwatch) -> Callable[[], None]:
    """For models whose tables are each looked up once, one row for each unit."""
    module = workload.make(True)
    tables = {name: part for name, part in module.named_modules() if isinstance(part, nn.Embedding)}
    found: dict[str, ParameterUses] = {}
    for name, table in tables.items():
        table.forward = functools.partial(_look_up, name, table.weight.detach(), found)  # type: ignore[method-assign]
    weights = {name: table.weight.detach() for name, table in tables.items()}
    space = RowSpace.of(weights)
    own = {id(table.weight) for table in tables.values()}
    optimizer = torch.optim.SGD([p for p in module.parameters() if id(p) not in own], lr=_RATE)

    def update_tables() -> None:
        units = len(workload.batch[-1])
        touched = TouchedRows(found, space, units)
        rows = {name: touched.of(name) for name in weights}
        sums = {name: weights[name].new_zeros(len(own_rows), weights[name].shape[1]) for name, own_rows in rows.items()}
        touched.add_weighted_sums(sums, touched.slots(rows), torch.ones(units))
        for name, weight in weights.items():
            move_rows(weight, rows[name], sums[name], -_RATE)
        found.clear()

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


def _look_up(name: str, weight: Tensor, found: dict[str, ParameterUses], ids: Tensor) -> Tensor:
    """The rows `ids` (B,) of a table; keeps their gradients in `found` when these are there."""
    rows = F.embedding(ids, weight).requires_grad_()

    def keep(grad: Tensor) -> None:
        found[name] = ParameterUses([Lookup(ids, torch.arange(len(ids)), grad, one_each=True)], [], [])

    rows.register_hook(keep)
    return rows
