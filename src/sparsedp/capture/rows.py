"""Rows of several tables in one numbering, and the lookups of a batch grouped by them.

Tables are laid end to end: table t's row j is global row `starts[t] + j`. Whatever is done to each touched row
(counting, selecting, adding up) is done once for all tables, instead of once per table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsedp.capture.uses import Lookup, ParameterUses, RowNorms, slack
from sparsedp.kernels import loops
from sparsedp.kernels.threads import on_all_cores, split


@dataclass(frozen=True)
class RowSpace:
    """The tables, end to end. 64-bit arithmetic: up to 2^62 rows in all."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(tables: Mapping[str, Any]) -> RowSpace:
        """`tables` are tensors or specs: whatever has a shape."""
        names = tuple(sorted(tables))
        return _row_space(names, tuple([tables[name].shape[0] for name in names]))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        return (0, *accumulate(self.sizes))[:-1]

    @cached_property
    def size(self) -> int:
        return sum(self.sizes)

    @cached_property
    def _bounds(self) -> np.ndarray:
        """The first global row of each table, and one past the last of all."""
        return np.array((*self.starts, self.size))

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """Ascending global rows as rows of each table."""
        edges = self.edges(rows)
        return {
            name: _moved(rows[begin:end], -start) for name, start, (begin, end) in zip(self.names, self.starts, edges)
        }

    def edges(self, rows: Tensor) -> list[tuple[int, int]]:
        """Where the rows of each table begin and end among ascending global rows."""
        return list(pairwise(rows.cpu().numpy().searchsorted(self._bounds).tolist()))

    def join(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Rows of each table, ascending, as ascending global rows."""
        parts = [_moved(rows[name], start) for name, start in zip(self.names, self.starts) if name in rows]
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.long)


@lru_cache(maxsize=16)
def _row_space(names: tuple[str, ...], sizes: tuple[int, ...]) -> RowSpace:
    """The same object for the same tables: what it works out once serves all steps."""
    return RowSpace(names, sizes)


class TouchedRows:
    """The lookups of the tables that a physical batch uses by lookups alone, grouped by row.

    Positions are numbered over all tables; padding is left out. `owners` is as in `Captured`: lookups are by example.
    """

    def __init__(
        self, uses: Mapping[str, ParameterUses], space: RowSpace, units: int, owners: Tensor | None = None
    ) -> None:
        self.space = space
        self.units = units
        self._owners = owners
        self.lookups: dict[str, Lookup] = {}
        self.used_in_full: list[
            str
        ] = []  # tables that are used otherwise, too, such as by a full softmax: all of their rows
        for name in space.names:
            if name in uses and uses[name].is_used_in_full:
                self.used_in_full.append(name)
            elif name in uses:
                (self.lookups[name],) = uses[name].lookups
        lookups = list(self.lookups.values())
        # Whether each unit looks up one row of every table, or none.
        self._one_row_each = owners is None and all(lookup.one_each for lookup in lookups)
        lengths = [lookup.ids.numel() for lookup in lookups]
        self._firsts = dict(zip(self.lookups, (0, *accumulate(lengths))))
        self._count = sum(lengths)
        every = [lookup.ids for lookup in lookups] or [torch.empty(0, dtype=torch.long)]
        ids = every[0] if len(every) == 1 else torch.cat(every)
        starts = dict(zip(space.names, space.starts))
        shifts = [starts[name] for name in self.lookups]
        keys = ids + _repeated(shifts, lengths, ids) if any(shifts) else ids
        self._used: Tensor | None = None  # the positions that are not padding; None if all are used
        if self._count and int(ids.min()) < 0:
            self._used = (ids >= 0).nonzero().squeeze(1)
            keys = keys[self._used]
        self.rows, self.begin, order = loops.group(keys)  # the distinct global rows; see `group`
        self.order = order if self._used is None else self._used[order]
        self._edges = dict(zip(space.names, space.edges(self.rows)))

    @cached_property
    def _by_unit(self) -> _ByUnit:
        row = loops.numbered(self.begin)
        units = [lookup.units for lookup in self.lookups.values()]
        unit = (units[0] if len(units) == 1 else torch.cat(units))[self.order]
        if self._owners is not None:
            unit = self._owners[unit]
        if self._one_row_each:
            return _ByUnit(unit, row, self.order, None)
        keys, begin, order = loops.group(row * self.units + unit)
        return _ByUnit(keys % self.units, keys // self.units, self.order[order], begin)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """The distinct (unit, index into `rows`) pairs: two tensors of equal length."""
        if not self.lookups:
            return torch.empty(0, dtype=torch.long), torch.empty(0, dtype=torch.long)
        return self._by_unit.unit, self._by_unit.row

    def of(self, name: str) -> Tensor:
        """The touched rows of one table, distinct and ascending."""
        begin, end = self._edges[name]
        return _moved(self.rows[begin:end], -self.space.starts[self.space.names.index(name)])

    def slots(self, selection: Mapping[str, Tensor]) -> Tensor:
        """The place of each of `rows` among the selected rows of its table; -1 if it is not selected."""
        chosen = self.space.join(selection)
        at = loops.find(chosen, self.rows)
        if len(self.space.names) == 1:
            return at
        firsts = [first for first, _ in self.space.edges(chosen)]
        lengths = [end - begin for begin, end in self._edges.values()]
        return (at - _repeated(firsts, lengths, at)).clamp_min_(-1)

    def squared_norms(self, slots: Tensor | None, row_norms: RowNorms) -> LookupNorms | None:
        """For the tables that are used by lookups alone; None if there are none."""
        if not self.lookups:
            return None
        if not self._one_row_each:
            return self._added_norms(slots, row_norms)
        every = loops.squared_rows_of_each([lookup.grad for lookup in self.lookups.values()])
        if slots is None and self._used is None:
            return LookupNorms(list(self.lookups), every, every)
        chosen = torch.zeros_like(self.rows) if slots is None else slots
        selected = loops.in_slots(every.view(-1), chosen, self.begin, self.order).view_as(every)
        return LookupNorms(list(self.lookups), every, selected)

    def add_weighted_sums(self, outs: Mapping[str, Tensor], slots: Tensor | None, factors: Tensor) -> None:
        """Adds the sums over units of factor times gradient to `outs`, for some tables, on all cores.

        outs[name] holds the selected rows of the table, which `slots` refer to; without slots, all of its rows.
        """
        pieces, operations = [], 0
        for name, out in outs.items():
            lookup, (begin, end) = self.lookups[name], self._edges[name]
            factor = factors.to(out.dtype)
            factor = factor if lookup.one_each else factor[lookup.units]
            if lookup.weight is not None:
                factor = factor * lookup.weight
            out = out.view(-1, lookup.grad.shape[1])
            places = self.of(name) if slots is None else slots[begin:end]
            work = lookup.grad.shape[1] * lookup.ids.numel()
            operations += work
            for part in split(end - begin, work // max(1, end - begin)):
                edges = self.begin[begin + part.start : begin + part.stop + 1]
                pieces.append(
                    (out, places[part], edges, self.order, self._firsts[name], lookup.grad, lookup.source, factor)
                )
        on_all_cores(lambda piece: loops.add_rows(*piece), pieces, operations)

    def _added_norms(self, slots: Tensor | None, row_norms: RowNorms) -> LookupNorms:
        """As `ParameterUses.squared_norms`, for all tables at once.

        What a unit adds to a row is added up first, unless it is one position: then its norm is that of the position.
        """
        lookups, tables = list(self.lookups.values()), len(self.lookups)
        unit, row, at, begin = self._by_unit
        assert begin is not None
        sizes = begin.diff()
        key = loops.numbered(begin)
        lengths = [end - first for first, end in (self._edges[name] for name in self.lookups)]
        table = loops.repeated(torch.arange(tables, device=at.device), row.new_tensor(lengths))[row]
        single = torch.cat([lookup.squares(row_norms) for lookup in lookups])[at]
        square = single[begin[:-1]]
        several = (sizes > 1).nonzero().squeeze(1)
        pieces = []
        edges = torch.searchsorted(table[several], torch.arange(tables + 1, device=at.device)).tolist()
        for (first, end), (name, lookup) in zip(pairwise(edges), self.lookups.items()):
            weight = lookup.grad.shape[1] * lookup.ids.numel() // max(1, end - first)
            pieces += [(several[first:end][part], self._firsts[name], lookup) for part in split(end - first, weight)]

        def add_up(piece: tuple[Tensor, int, Lookup]) -> None:
            keys, first, lookup = piece
            square[keys] = loops.squared_sums(
                begin[keys], begin[keys + 1], at, first, lookup.grad, lookup.source, lookup.weight
            )

        on_all_cores(add_up, pieces)
        cell, room = table * self.units + unit, tables * self.units
        rounding = max(slack([lookup]) for lookup in lookups)

        def total(kept: Tensor | None) -> Tensor:
            squares, terms = square, single.sqrt()
            if kept is not None:
                squares, terms = squares.masked_fill(~kept, 0), terms.masked_fill_(~kept[key], 0)
            reach = torch.bincount(cell[key], terms, room).double()
            return (torch.bincount(cell, squares, room).double() + rounding * reach.square()).view(tables, self.units)

        every = total(None)
        return LookupNorms(list(self.lookups), every, every if slots is None else total(slots[row] >= 0))


def _moved(rows: Tensor, by: int) -> Tensor:
    """Not a copy where nothing moves: nobody changes rows in place."""
    return rows + by if by else rows


def _repeated(values: list[int], counts: list[int], like: Tensor) -> Tensor:
    return loops.repeated(like.new_tensor(values), like.new_tensor(counts))


class _ByUnit(NamedTuple):
    """The distinct (unit, row) pairs, by row, and the positions of each."""

    unit: Tensor  # (K,)
    row: Tensor  # (K,) index into `rows`
    at: Tensor  # (P,) the positions, those of a pair together
    begin: Tensor | None  # (K + 1,) where each pair's begin; None: each has one


class LookupNorms(NamedTuple):
    """Squared norms per unit of some tables, (tables, B), float64: of all rows, and of the selected ones."""

    names: list[str]
    every: Tensor
    selected: Tensor
