"""What a step did, for the developer. Derived from private data without noise: not for release."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparsedp.capture import RowSpace
from sparsedp.kernels.loops import find
from sparsedp.tables import TableSpec


@dataclass(frozen=True)
class TableStep:
    """What one step did to one table."""

    rows: int
    dim: int
    rows_touched: int
    rows_selected: int
    rows_false: int  # selected, but not touched

    @property
    def gradient_size(self) -> int:
        """Coordinates of the table's gradient that may differ from zero."""
        return self.rows_selected * self.dim


@dataclass(frozen=True)
class StepReport:
    """What the last step did. Derived from private data without noise: for the developer, not for release."""

    step: int
    units: int
    clipped_share: float
    mean_norm: float
    kept_mass: float  # share of the tables' squared gradient norms that the selection left
    tables: dict[str, TableStep] = field(default_factory=dict)
    examples: int = 0  # of these units

    @property
    def rows_touched(self) -> int:
        return sum(table.rows_touched for table in self.tables.values())

    @property
    def gradient_size(self) -> int:
        """Coordinates of the tables' gradients that may differ from zero."""
        return sum(table.gradient_size for table in self.tables.values())

    @property
    def reduction(self) -> float:
        """How many times smaller the tables' gradient is than a dense one."""
        return self.dense_size / max(self.gradient_size, 1)

    @property
    def dense_size(self) -> int:
        """Gradient size of a step in which every row of every table changes."""
        return sum(table.rows * table.dim for table in self.tables.values())


class StepTally:
    """What the physical batches of one logical batch add up to, as far as the report needs it."""

    def __init__(self) -> None:
        self.units = 0
        self.examples = 0
        self._touched: Tensor | None = None  # global rows; None before the first physical batch
        self._norms: list[Tensor] = []  # of the units' gradients
        self._masses: list[tuple[Tensor, Tensor]] = []  # squared norms on tables, and what the selection left of them

    def add(self, units: int, examples: int, touched: Tensor, norms: Tensor) -> None:
        """Counts a physical batch, with the global rows that it touches and the norms of its units' gradients."""
        self.units += units
        self.examples += examples
        self._touched = touched if self._touched is None else torch.unique(torch.cat([self._touched, touched]))
        self._norms.append(norms)

    def add_mass(self, every: Tensor, selected: Tensor) -> None:
        """Squared norms of gradients on tables: of all rows, and of the selected ones."""
        self._masses.append((every, selected))

    def report(
        self, step: int, space: RowSpace, selection: Mapping[str, Tensor] | None, tables: Mapping[str, TableSpec],
        max_norm: float,
    ) -> StepReport:  # fmt: skip
        """`selection` None: all rows changed."""
        all_touched = torch.empty(0, dtype=torch.long) if self._touched is None else self._touched
        touched = _counts(space, all_touched)
        selected, hits = list(space.sizes), touched
        if selection is not None:
            chosen = space.join(selection)
            selected = _counts(space, chosen)
            hits = _counts(space, all_touched[find(chosen, all_touched) >= 0])
        reports = {
            name: TableStep(tables[name].rows, tables[name].dim, rows, all_selected, all_selected - hit)
            for name, rows, all_selected, hit in zip(space.names, touched, selected, hits)
        }
        units = max(self.units, 1)
        clipped = sum(int((norms > max_norm).sum()) for norms in self._norms)
        mean = sum(float(norms.sum()) for norms in self._norms) / units
        mass = sum(float(every.sum()) for every, _ in self._masses)
        kept = sum(float(left.sum()) for _, left in self._masses) / mass if mass > 0 else 1.0
        return StepReport(step, self.units, clipped / units, mean, kept, reports, self.examples)


def _counts(space: RowSpace, rows: Tensor) -> list[int]:
    """How many of ascending global rows each table has."""
    return [end - begin for begin, end in space.edges(rows)]
