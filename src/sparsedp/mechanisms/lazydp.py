"""LazyDP: DP-SGD whose noise on a row of a table waits until the row is read (LazyDP, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import touched_rows, warn_of_whole_tables
from sparsedp.errors import UnsupportedError
from sparsedp.mechanisms.base import Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.tables import LazyOwner, Owner, Ownership


@dataclass(frozen=True)
class LazyDP(Mechanism):
    """Noise on all rows, in effect. A step costs what the rows cost that the batch reads.

    Pending noise is settled before a row is read, and before weights leave the process. With `aggregate` it is one draw of
    the right variance ("aggregated noise sampling"); without, the sum of each step's own noise, which replays DP-SGD
    exactly. Takes torch.optim.SGD only, with any learning-rate schedule, momentum and weight decay.
    """

    name: ClassVar[str] = "lazydp"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    takes_ranks: ClassVar[bool] = True
    noise_waits: ClassVar[bool] = True
    aggregate: bool = True

    @property
    def guarantee(self) -> str:
        return (
            "(epsilon, delta)-differential privacy, as DP-SGD's, for settled weights: what state_dict, checkpoints, copies "
            "and the module's outputs give. The memory of the training process between steps is not covered"
        )

    @property
    def rounded(self) -> str:
        return "each sum with its noise, and each settled row of a table,"

    def refuse_optimizer(
        self, optimizer: Optimizer, tables: Collection[str], parameters: Mapping[str, nn.Parameter]
    ) -> None:
        if type(optimizer) is not torch.optim.SGD:
            raise UnsupportedError(
                f"LazyDP adds up the noise of many steps, which takes an update that is linear in it: torch.optim.SGD, with any "
                f"learning-rate schedule, momentum and weight decay. {type(optimizer).__name__} is not. Use SGD, for the tables "
                "alone if you like (optimizer=[SGD(tables), Adam(others)], in a configuration "
                "optimizer.tables), or AdaFEST or FEST with Adagrad."
            )
        for group in optimizer.param_groups:
            if group["dampening"]:
                raise UnsupportedError(
                    "LazyDP has no rule for dampening, whose first step differs from the others. Set it to 0."
                )
            if group["differentiable"]:
                raise UnsupportedError("LazyDP has no rule for SGD(differentiable=True). Leave it off.")

    def owner(self, ownership: Ownership) -> Owner:
        return LazyOwner(ownership, self.aggregate)

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        return rows.all_chosen()

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        """The rows that have a gradient. All others change by noise alone, later."""
        space = RowSpace.of(step.tables)
        if step.first:
            warn_of_whole_tables(batch, space, "all of its rows are settled in every step")
        return space.split(step.exchange(space, touched_rows(batch, space)).rows)
