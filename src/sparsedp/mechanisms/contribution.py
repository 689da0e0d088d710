"""Which rows the units of a batch touch, over all tables together, and how much each unit may add to each.

Tables are laid end to end into one space of global rows: table t's row j is global row `starts[t] + j`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from sparsedp.capture import Captured


@dataclass(frozen=True)
class RowSpace:
    """The tables, end to end. 64-bit arithmetic: up to 2^62 rows in all."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(tables: Mapping[str, Tensor]) -> RowSpace:
        names = tuple(sorted(tables))
        return RowSpace(names, tuple(tables[name].shape[0] for name in names))

    @property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes))[:-1]

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Ascending global rows as rows of each table."""
        edges = torch.tensor([*self.starts, self.size], device=rows.device)
        at = torch.searchsorted(rows, edges).tolist()
        return {name: rows[begin:end] - start for name, start, begin, end in zip(self.names, self.starts, at, at[1:])}

    def join(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Rows of each table, ascending, as ascending global rows."""
        parts = [rows[name] + start for name, start in zip(self.names, self.starts) if name in rows]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)


def touched_pairs(captured: Captured, space: RowSpace) -> tuple[Tensor, Tensor]:
    """The distinct (unit, global row) pairs of a physical batch: two tensors of equal length."""
    units, rows = [], []
    for name, start, size in zip(space.names, space.starts, space.sizes):
        uses = captured.uses.get(name)
        if uses is None:
            continue
        if uses.linears or uses.builts:  # a linear map by the table, such as a full softmax, uses all of its rows
            units.append(torch.arange(captured.units).repeat_interleave(size))
            rows.append(torch.arange(start, start + size).repeat(captured.units))
        else:
            whose, which = uses.touched()
            units.append(whose)
            rows.append(which + start)
    if not units:
        return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
    return torch.cat(units), torch.cat(rows)


def contribution_map(
    batch: Sequence[Captured], space: RowSpace, clip: float, within: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The sum over units of their clipped contributions [v_i]_C1 (DP-AdaFEST, Algorithm 1, line 6, without its noise).

    A unit that touches n distinct rows, over all tables, adds min(1, C1 / sqrt(n)) to each of them, so its part has
    norm at most C1. `within` restricts everything to some global rows, ascending. Returns the touched global rows,
    distinct and ascending, and their values.
    """
    all_rows, all_values = [], []
    for captured in batch:
        units, rows = touched_pairs(captured, space)
        if within is not None:
            kept = _contains(within, rows)
            units, rows = units[kept], rows[kept]
        counts = torch.bincount(units, minlength=captured.units).double()
        shares = (clip / counts.clamp_min(1).sqrt()).clamp_max(1.0)
        all_rows.append(rows)
        all_values.append(shares[units])
    rows, inverse = torch.unique(torch.cat(all_rows), return_inverse=True)
    values = torch.zeros(rows.numel(), dtype=torch.float64).index_add_(0, inverse, torch.cat(all_values))
    return rows, values


def _contains(ascending: Tensor, values: Tensor) -> Tensor:
    if ascending.numel() == 0:
        return torch.zeros_like(values, dtype=torch.bool)
    at = torch.searchsorted(ascending, values).clamp_max(ascending.numel() - 1)
    return ascending[at] == values
