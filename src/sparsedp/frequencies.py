"""How often each row of each table is looked up, released once with noise. Re-attention needs it (DPFormer, remark C.1)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import dp_accounting
import torch
from torch import Tensor

from sparsedp.accounting import calibrate
from sparsedp.capture import Captured, RowSpace
from sparsedp.contribution import Contribution, digest_of
from sparsedp.grid import grid_of, round_to
from sparsedp.noise import RandomKey
from sparsedp.tables import TableSpec


@dataclass(frozen=True)
class FrequencyRelease:
    """One release of all frequencies with Gaussian noise, at a cost of (`epsilon`, `delta`), which enters the ledger exactly.

    What a unit adds to the n distinct rows that it looks up is a `Contribution`, to whose sensitivity, `clip`, the noise is
    proportional. A `clip` below sqrt(n) makes frequencies too small.
    `inputs(batch)` gives the arguments of the module for a batch of the loader; by default all but the last element.

    `drawn` are the frequencies of a release that was made before, by `sparsedp.advise` or `sparsedp plan --release`: the run
    takes them in place of new ones, and its ledger pays for them.
    """

    epsilon: float = 0.5
    delta: float = 1e-7
    clip: float = 1.0
    inputs: Callable[[Any], Any] | None = field(default=None, compare=False, repr=False)
    drawn: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name, high in (("epsilon", math.inf), ("delta", 1), ("clip", math.inf)):
            if not 0 < getattr(self, name) < high:
                raise ValueError(f"{name} must lie between 0 and {high}, not {getattr(self, name)}")

    @property
    def noise_multiplier(self) -> float:
        return _noise_multiplier(self.epsilon, self.delta)

    @property
    def event(self) -> dp_accounting.DpEvent:
        return dp_accounting.GaussianDpEvent(self.noise_multiplier)

    def draw(
        self, counts: dict[str, Tensor], units: int, tables: Mapping[str, TableSpec], key: RandomKey
    ) -> dict[str, Tensor]:
        """The share of `units` that looks up each row, (rows,), with noise: it may be negative, or above 1.

        Counts and noise are rounded together, to the grid of the noise, before they are divided. The noise on a row's count
        is its own: that at the row's place in a sequence of the table's.
        """
        std = self.noise_multiplier * Contribution(self.clip).sensitivity
        noisy = {
            name: count + torch.from_numpy(std * key.generator(tables[name].index).standard_normal(len(count)))
            for name, count in counts.items()
        }
        return {name: round_to(count, grid_of(std)) / units for name, count in noisy.items()}

    def drawn_for(self, tables: Mapping[str, TableSpec]) -> dict[str, Tensor]:
        """The frequencies that were released before, if they are those of these tables."""
        assert self.drawn is not None
        wanted = {name: (table.rows,) for name, table in tables.items()}
        given = {name: tuple(values.shape) for name, values in self.drawn.items()}
        if wanted != given:
            raise ValueError(f"the frequencies that were released before are of other tables: {given}, not {wanted}")
        return {name: values.double() for name, values in self.drawn.items()}

    def to_dict(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in ("epsilon", "delta", "clip")}
        return values if self.drawn is None else {**values, "drawn": digest_of(self.drawn)}


@functools.cache
def _noise_multiplier(epsilon: float, delta: float) -> float:
    return calibrate(dp_accounting.GaussianDpEvent, epsilon, delta)


def count_lookups(uses: Iterator[Captured], space: RowSpace, clip: float) -> dict[str, Tensor]:
    """For each table, the sum of the units' contributions to each row, (rows,) float64, as in `FrequencyRelease`.

    Unlike `count_touches`, it leaves out that a table is used whole: a softmax uses all rows for every unit.
    """
    sums = torch.zeros(space.size, dtype=torch.float64)
    for captured in uses:
        pairs = [torch.empty(0, dtype=torch.long)]
        for name, start in zip(space.names, space.starts):
            if name in captured.uses and captured.uses[name].lookups:
                units, rows = captured.uses[name].touched()
                units = units if captured.owners is None else captured.owners[units]
                pairs.append(units * space.size + rows + start)
        distinct = torch.unique(torch.cat(pairs))
        units, rows = distinct // space.size, distinct % space.size
        rows_each = torch.bincount(units, minlength=captured.units)
        shares = Contribution(clip).shares(rows_each)
        sums.index_add_(0, rows, shares[units])
    return dict(zip(space.names, sums.split(list(space.sizes))))
