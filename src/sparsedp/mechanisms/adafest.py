"""DP-AdaFEST: at every step, noise only on rows that enough units of the batch touch (DP-AdaFEST, Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import dp_accounting
import numpy as np
import torch
from torch import Tensor

from sparsedp.accounting import split_multiplier
from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import Contribution, contribution_map, warn_of_whole_tables
from sparsedp.mechanisms.base import Count, CountedData, Mechanism, Step
from sparsedp.mechanisms.expectation import Expected, RowCounts
from sparsedp.mechanisms.fest import FEST
from sparsedp.mechanisms.survivors import draw_survivors, survival, survival_of_counts
from sparsedp.noise import RandomKey
from sparsedp.tables import TableSpec


@dataclass(frozen=True)
class AdaFEST(Mechanism):
    """Selects the rows whose noisy contribution reaches `threshold` (tau).

    The map of contributions is clipped to `map_clip` (C1) per unit and has noise C1 sigma1. The gradient is masked,
    clipped to C2 and has noise C2 sigma2. sigma1 / sigma2 = `noise_ratio`, and (sigma1^-2 + sigma2^-2)^(-1/2) is the
    step's noise multiplier: both are on one sample, so a step costs what DP-SGD costs with it (section 3.3).
    """

    name: ClassVar[str] = "adafest"
    selects: ClassVar[bool] = True
    takes_users: ClassVar[bool] = True
    takes_ranks: ClassVar[bool] = True
    threshold_setting: ClassVar[str] = "threshold"
    threshold: float = 10.0
    noise_ratio: float = 5.0
    map_clip: float = 1.0
    preselect: FEST | None = None  # AdaFEST+: only rows of this selection can be selected

    def __post_init__(self) -> None:
        if not math.isfinite(self.threshold):
            raise ValueError(f"threshold must be a number, not {self.threshold}")
        for name in ("noise_ratio", "map_clip"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, not {getattr(self, name)}")
        if self.preselect is not None and not isinstance(self.preselect, FEST):
            raise TypeError(f"preselect must be a FEST(...), not {self.preselect!r}")

    @property
    def inputs(self) -> Callable[[Any], Any] | None:  # type: ignore[override]
        return None if self.preselect is None else self.preselect.inputs

    @property
    def prepares(self) -> bool:  # type: ignore[override]
        return self.preselect is not None and self.preselect.prepares

    @property
    def guarantee(self) -> str:
        return "(epsilon, delta)-differential privacy for the model after every step, all of them together"

    def gradient_noise(self, noise_multiplier: float) -> float:
        return split_multiplier(noise_multiplier, self.noise_ratio)[1]

    @property
    def counted_data(self) -> CountedData:
        return "all" if self.preselect is None else self.preselect.counted_data

    def prepare(
        self, tables: Mapping[str, TableSpec], count: Count, key: RandomKey, memory: dict[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        return {} if self.preselect is None else self.preselect.prepare(tables, count, key, memory)

    def for_tables(self, rows: Mapping[str, int]) -> AdaFEST:
        return self if self.preselect is None else replace(self, preselect=self.preselect.for_tables(rows))

    def refuse_tables(self, names: Collection[str]) -> None:
        if self.preselect is not None:
            self.preselect.refuse_tables(names)

    def setup_event(self) -> dp_accounting.DpEvent | None:
        return None if self.preselect is None else self.preselect.setup_event()

    @property
    def contribution_clip(self) -> float:
        return self.map_clip

    def _map_std(self, noise_multiplier: float) -> float:
        """Deviation of the noise on the map: C1 sigma1."""
        return split_multiplier(noise_multiplier, self.noise_ratio)[0] * Contribution(self.map_clip).sensitivity

    def expected_selection(self, rows: RowCounts, noise_multiplier: float) -> Expected:
        std = self._map_std(noise_multiplier)
        selected, kept = survival_of_counts(rows, self.threshold, std)
        false = rows.absent * survival(np.zeros(1), self.threshold, std)
        return Expected(rows.chosen * selected, rows.chosen * false, rows.chosen * kept)

    def select(self, batch: Sequence[Captured], step: Step) -> dict[str, Tensor]:
        space = RowSpace.of(step.tables)
        if step.first:
            warn_of_whole_tables(
                batch, space, "every unit touches all of its rows: AdaFEST selects among them by noise alone"
            )
        within = None if self.preselect is None else space.join(step.prepared)
        rows, values = contribution_map(batch, space, self.map_clip, within)
        exchange = step.exchange(space, rows)
        rows, values = exchange.rows, exchange.add_up(values)
        std = self._map_std(step.noise_multiplier)
        selection = {}
        for name, start, (begin, end) in zip(space.names, space.starts, space.edges(rows)):
            table = step.tables[name]
            eligible = None if within is None else step.prepared[name].numpy()
            kept = draw_survivors(
                rows[begin:end].numpy() - start, values[begin:end].numpy(), exchange.owned(name), self.threshold, std,
                step.key.child(table.index), eligible,
            )  # fmt: skip
            selection[name] = torch.from_numpy(kept)
        return selection
