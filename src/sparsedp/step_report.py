"""What a step did, for the developer. Derived from private data without noise: not for release."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
    touches: int | None = None  # pairs of a unit and a row that it touches; None: not counted, as after the first steps

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
        self._touches: list[int] | None = None  # of each table, if they are counted
        self._masses: list[tuple[Tensor, Tensor]] = []  # squared norms on tables, and what the selection left of them

    def add(self, units: int, examples: int, touched: Tensor, norms: Tensor) -> None:
        """Counts a physical batch, with the global rows that it touches and the norms of its units' gradients."""
        self.units += units
        self.examples += examples
        self._touched = touched if self._touched is None else torch.unique(torch.cat([self._touched, touched]))
        self._norms.append(norms)

    def add_touches(self, counts: list[int]) -> None:
        """The number of pairs of a unit and a row that it touches, of each table."""
        self._touches = counts if self._touches is None else [a + b for a, b in zip(self._touches, counts)]

    def add_mass(self, every: Tensor, selected: Tensor) -> None:
        """Squared norms of gradients on tables: of all rows, and of the selected ones."""
        self._masses.append((every, selected))

    @property
    def touched(self) -> Tensor:
        """Global rows, distinct and ascending."""
        return torch.empty(0, dtype=torch.long) if self._touched is None else self._touched

    @property
    def touches(self) -> list[int] | None:
        """Pairs of a unit and a row, of each table; None if they were not counted."""
        return self._touches

    def numbers(
        self, space: RowSpace, touched: Tensor, selection: Mapping[str, Tensor] | None, max_norm: float,
        counts: Callable[[str], bool],
    ) -> Tensor:  # fmt: skip
        """What a report is made of, float64. Those of several processes, each with its own units and rows, add up.

        Rows are those of the tables that this process `counts`: the global rows `touched`, and the selected ones (None: all).
        """
        chosen = None if selection is None else space.join(selection)
        hits = touched if chosen is None else touched[find(chosen, touched) >= 0]
        of_tables = [
            _counts(space, touched),
            _counts(space, touched if chosen is None else chosen),
            _counts(space, hits),
        ]
        mine = torch.tensor([counts(name) for name in space.names], dtype=torch.float64)
        of_units = [
            self.units,
            self.examples,
            sum(int((norms > max_norm).sum()) for norms in self._norms),
            sum(float(norms.sum()) for norms in self._norms),
            sum(float(every.sum()) for every, _ in self._masses),
            sum(float(left.sum()) for _, left in self._masses),
        ]
        rows = torch.tensor(of_tables, dtype=torch.float64).reshape(3, -1) * mine
        return torch.cat([torch.tensor(of_units, dtype=torch.float64), rows.flatten()])


def report_of(
    numbers: Tensor, step: int, space: RowSpace, tables: Mapping[str, TableSpec], selects: bool,
    touches: Sequence[int] | None,
) -> StepReport:  # fmt: skip
    """The report that `numbers` make; unless the step `selects` rows, all are selected. `touches` of each table, if counted."""
    units, examples, clipped, norms, mass, kept = numbers[:6].tolist()
    reports = {}
    pairs: Sequence[int | None] = [None] * len(space.names) if touches is None else touches
    for name, touched, selected, hits, counted in zip(space.names, *numbers[6:].long().reshape(3, -1).tolist(), pairs):
        table = tables[name]
        selected = selected if selects else table.rows
        reports[name] = TableStep(table.rows, table.dim, touched, selected, selected - hits, counted)
    share = kept / mass if mass > 0 else 1.0
    divisor = max(units, 1)
    return StepReport(step, int(units), clipped / divisor, norms / divisor, share, reports, int(examples))


def _counts(space: RowSpace, rows: Tensor) -> list[int]:
    """How many of ascending global rows each table has."""
    return [end - begin for begin, end in space.edges(rows)]
