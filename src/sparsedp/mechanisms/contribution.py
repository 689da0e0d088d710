"""Which rows the units of a batch touch, over all tables together, and how much each unit may add to each."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsedp.capture import Captured, RowSpace
from sparsedp.capture.kernels import clipped_counts, find
from sparsedp.errors import SparseDPWarning


def touched_rows(batch: Sequence[Captured], space: RowSpace) -> Tensor:
    """The global rows that any unit of a logical batch touches, distinct and ascending."""
    parts = [captured.touched(space).rows for captured in batch]
    for name in {name for captured in batch for name in captured.touched(space).whole}:
        parts.append(_all_rows(name, space))
    return parts[0] if len(parts) == 1 else torch.unique(torch.cat(parts))


def touched_pairs(captured: Captured, space: RowSpace) -> tuple[Tensor, Tensor, Tensor]:
    """The touched global rows of a physical batch, distinct and ascending, and the distinct (unit, row) pairs.

    The pairs come as two tensors of equal length: the units, and the places of their rows among the touched ones.
    """
    touched = captured.touched(space)
    rows, (units, at) = touched.rows, touched.pairs()
    if not touched.whole:
        return rows, units, at
    for name in touched.whole:
        every = _all_rows(name, space)
        units = torch.cat([units, torch.arange(captured.units).repeat_interleave(every.numel())])
        at = torch.cat([at, (rows.numel() + torch.arange(every.numel())).repeat(captured.units)])
        rows = torch.cat([rows, every])
    rows, order = rows.sort()
    return rows, units, torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))[at]


def warn_of_whole_tables(batch: Sequence[Captured], space: RowSpace, consequence: str) -> None:
    whole = sorted({name for captured in batch for name in captured.touched(space).whole})
    if whole:
        warnings.warn(
            f"Table {', '.join(map(repr, whole))} is used whole (a softmax over the vocabulary?), so {consequence}, and the "
            "gradient is dense. Score sampled candidates instead (sparsedp.nn.candidate_scores).",
            SparseDPWarning,
            stacklevel=3,
        )


def _all_rows(name: str, space: RowSpace) -> Tensor:
    table = space.names.index(name)
    return torch.arange(space.starts[table], space.starts[table] + space.sizes[table])


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
        rows, units, at = touched_pairs(captured, space)
        kept = None if within is None else find(within, rows) >= 0
        if kept is not None:
            inside = kept[at]
            units, at = units[inside], at[inside]
        values = clipped_counts(units, at, clip, captured.units, rows.numel())
        all_rows.append(rows if kept is None else rows[kept])
        all_values.append(values if kept is None else values[kept])
    if len(batch) == 1:
        return all_rows[0], all_values[0]
    rows, inverse = torch.unique(torch.cat(all_rows), return_inverse=True)
    return rows, torch.zeros(rows.numel(), dtype=torch.float64).index_add_(0, inverse, torch.cat(all_values))
