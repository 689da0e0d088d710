"""Which rows the units of a batch touch, over all tables together, and how much each unit may add to each.

AdaFEST's map, FEST's counts, released frequencies and predictions all add up contributions of units to rows. How much a unit
adds, and the bound that noise is calibrated to, is said here and nowhere else.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsedp.capture import Captured, RowSpace
from sparsedp.errors import SparseDPWarning
from sparsedp.kernels import loops
from sparsedp.kernels.compiler import compile_loop


@dataclass(frozen=True)
class Contribution:
    """A unit adds min(1, clip / sqrt(n)) to each of the n distinct rows that it touches, over all tables; 1 without a clip."""

    clip: float | None

    @property
    def sensitivity(self) -> float:
        """The largest l2 norm of what a unit adds: sqrt(n) min(1, clip / sqrt(n)) <= clip."""
        return math.inf if self.clip is None else self.clip

    def shares(self, touched: Tensor) -> Tensor:
        """What units that touch so many rows add to each of them, float64, of the same shape."""
        return (self.sensitivity / touched.double().clamp_min(1).sqrt()).clamp_max(1.0)

    def sums(self, units: Tensor, at: Tensor, many: int, places: int) -> Tensor:
        """What `many` units add to each of the `places`, (places,) float64: unit units[k] touches at[k]; pairs are distinct."""
        if loops.compiled(units, at):
            return torch.from_numpy(_sums(units.numpy(), at.numpy(), self.sensitivity, many, places))
        shares = self.shares(torch.bincount(units, minlength=many))
        return torch.zeros(places, dtype=torch.float64, device=at.device).index_add_(0, at, shares[units])


@compile_loop()
def _sums(units: np.ndarray, at: np.ndarray, clip: float, many: int, places: int) -> np.ndarray:
    """As `Contribution.shares`, in one loop."""
    shares, total = np.zeros(many, np.float64), np.zeros(places, np.float64)
    for k in range(len(units)):
        shares[units[k]] += 1
    for i in range(many):
        shares[i] = min(1.0, clip / np.sqrt(max(1.0, shares[i])))
    for k in range(len(at)):
        total[at[k]] += shares[units[k]]
    return total


def touched_rows(batch: Sequence[Captured], space: RowSpace) -> Tensor:
    """The global rows that any unit of a logical batch touches, distinct and ascending."""
    parts = [captured.touched(space).rows for captured in batch]
    for name in {name for captured in batch for name in captured.touched(space).used_in_full}:
        parts.append(_all_rows(name, space))
    return parts[0] if len(parts) == 1 else torch.unique(torch.cat(parts))


def touched_pairs(captured: Captured, space: RowSpace) -> tuple[Tensor, Tensor, Tensor]:
    """The touched global rows of a physical batch, distinct and ascending, and the distinct (unit, row) pairs.

    The pairs come as two tensors of equal length: the units, and the places of their rows among the touched ones.
    """
    touched = captured.touched(space)
    rows, (units, at) = touched.rows, touched.pairs()
    if not touched.used_in_full:
        return rows, units, at
    for name in touched.used_in_full:
        every = _all_rows(name, space)
        units = torch.cat([units, torch.arange(captured.units).repeat_interleave(every.numel())])
        at = torch.cat([at, (rows.numel() + torch.arange(every.numel())).repeat(captured.units)])
        rows = torch.cat([rows, every])
    rows, order = rows.sort()
    return rows, units, torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))[at]


def touched_counts(captured: Captured, space: RowSpace) -> list[int]:
    """How many pairs of a unit and a row that it touches each table has."""
    touched = captured.touched(space)
    _, at = touched.pairs()
    before = [0, *torch.bincount(at, minlength=touched.rows.numel()).cumsum(0).tolist()]
    counts = [before[end] - before[begin] for begin, end in space.edges(touched.rows)]
    for name in touched.used_in_full:
        table = space.names.index(name)
        counts[table] = captured.units * space.sizes[table]
    return counts


def warn_of_whole_tables(batch: Sequence[Captured], space: RowSpace, consequence: str) -> None:
    used_in_full = sorted({name for captured in batch for name in captured.touched(space).used_in_full})
    if used_in_full:
        warnings.warn(
            f"Table {', '.join(map(repr, used_in_full))} is used whole (a softmax over the vocabulary?), so {consequence}, and "
            "the gradient is dense. Score sampled candidates instead (sparsedp.nn.candidate_scores).",
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

    What a unit adds is a `Contribution` with C1 = `clip`, so its part has norm at most C1. `within` restricts everything to some
    global rows, ascending. Returns the touched global rows, distinct and ascending, and their values.
    """
    all_rows, all_values = [], []
    for captured in batch:
        if captured.touched(space).used_in_full:
            rows, values = _with_whole_tables(captured, space, clip, within)
            all_rows.append(rows)
            all_values.append(values)
            continue
        rows, units, at = touched_pairs(captured, space)
        kept = None if within is None else loops.find(within, rows) >= 0
        if kept is not None:
            inside = kept[at]
            units, at = units[inside], at[inside]
        values = Contribution(clip).sums(units, at, captured.units, rows.numel())
        all_rows.append(rows if kept is None else rows[kept])
        all_values.append(values if kept is None else values[kept])
    if len(batch) == 1:
        return all_rows[0], all_values[0]
    rows, inverse = torch.unique(torch.cat(all_rows), return_inverse=True)
    return rows, torch.zeros(rows.numel(), dtype=torch.float64).index_add_(0, inverse, torch.cat(all_values))


def _with_whole_tables(
    captured: Captured, space: RowSpace, clip: float, within: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `contribution_map`, of a batch in which some tables are used whole: their rows are not listed for every unit.

    All units add their share to each of these rows, so that the rows of such tables all have the same value.
    """
    touched = captured.touched(space)
    rows, (units, at) = touched.rows, touched.pairs()
    whole = torch.cat([_all_rows(name, space) for name in touched.used_in_full])
    if within is not None:
        kept = loops.find(within, rows) >= 0
        inside, places = kept[at], kept.cumsum(0) - 1
        rows, units, at = rows[kept], units[inside], places[at[inside]]
        whole = whole[loops.find(within, whole) >= 0]
    shares = Contribution(clip).shares(torch.bincount(units, minlength=captured.units) + whole.numel())
    values = torch.zeros(rows.numel(), dtype=torch.float64, device=rows.device).index_add_(0, at, shares[units])
    every = shares.sum().expand(whole.numel())
    rows, order = torch.cat([rows, whole]).sort()
    return rows, torch.cat([values, every])[order]


def digest_of(counts: Mapping[str, Any]) -> str:
    """A digest of counts or shares, a vector for each table."""
    digest = hashlib.sha256()
    for name in sorted(counts):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(np.asarray(counts[name], dtype=np.float64)).tobytes())
    return digest.hexdigest()
