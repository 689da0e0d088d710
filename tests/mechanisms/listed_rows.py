"""A mechanism as a user would write it, outside of the package: rows of a public list that enough units of a batch touch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import contribution_map
from sparsedp.mechanisms import Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.mechanisms.survivors import survival, survival_of_counts
from sparsedp.noise import RandomKey
from sparsedp.tables import TableSpec


@dataclass(frozen=True)
class ListedRows(Mechanism):
    """Trains the rows of `rows` whose number of units in the batch, with noise, reaches `least`. Half of a step pays for that."""

    name: ClassVar[str] = "listed_rows"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    prepares: ClassVar[bool] = True
    threshold_setting: ClassVar[str] = "least"
    contribution_clip: ClassVar[float] = 1.0  # type: ignore[assignment]
    rows: tuple[int, ...] = ()
    least: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(set(self.rows))))  # a configuration gives a list

    @property
    def guarantee(self) -> str:
        return (
            "(epsilon, delta)-differential privacy for the model after every step, and for which listed rows it trains"
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        return ("The list of rows was made without looking at the data.",)

    @property
    def not_covered(self) -> tuple[str, ...]:
        return ("Who made the list of rows.",)

    def gradient_noise(self, noise_multiplier: float) -> float:
        return math.sqrt(2) * noise_multiplier

    def step_event(self, noise_multiplier: float, sample_rate: float) -> dp_accounting.DpEvent:
        if noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        half = dp_accounting.GaussianDpEvent(math.sqrt(2) * noise_multiplier)
        return dp_accounting.PoissonSampledDpEvent(sample_rate, dp_accounting.ComposedDpEvent([half, half]))

    def prepare(
        self, tables: Mapping[str, TableSpec], count: object, key: RandomKey, memory: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        return {
            name: torch.tensor([row for row in self.rows if row < table.rows], dtype=torch.long)
            for name, table in tables.items()
        }

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        listed = space.join(step.prepared)
        noisy = torch.zeros(space.size, dtype=torch.float64)
        rows, values = contribution_map(batch, space, self.contribution_clip, listed)
        noisy[rows] = values
        noise = torch.from_numpy(step.key.generator().standard_normal(listed.numel()))
        noisy[listed] += math.sqrt(2) * step.noise_multiplier * noise
        return space.split(listed[noisy[listed] >= self.least])

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        std = math.sqrt(2) * noise_multiplier
        selected, kept = survival_of_counts(rows, self.least, std)
        false = rows.absent * survival(np.zeros(1), self.least, std)
        return Expected(rows.chosen * selected, rows.chosen * false, rows.chosen * kept)
