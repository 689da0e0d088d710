"""The gradient of one step: the clipped sums of its physical batches, to which noise is added on the selection."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from sparsedp.capture import Captured, RowSpace, RowSparse, TouchedRows
from sparsedp.kernels.loops import find
from sparsedp.noise import Sums, zero_others
from sparsedp.tables import Shard

# Numbers of a parameter. The memory of larger ones is given back after the step: the next forward pass needs room, and beside
# their matrix products it takes no time to get it again. That of tables is kept where they are most of the model.
_LARGE = 1 << 19

_NO_ROWS = torch.empty(0, dtype=torch.long)
_NO_SHARDS: Mapping[str, Shard] = MappingProxyType({})
_NO_WIDTHS: Mapping[str, int] = MappingProxyType({})


class NoisyGradient:
    """A buffer for each parameter that is not frozen: of its shape, or with the selected rows of a table alone.

    Sums come first. The noise is added to what they have become, and rounded together with it, in one pass (`noise.py`):
    what is rounded is then the exact sum of two numbers, whatever was rounded before. Rows without a sum are not written to
    before that. Selected rows of all tables lie in one piece of memory.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        space: RowSpace,
        selection: Mapping[str, Tensor] | None,
        dense: dict[str, Tensor],
        noise_on_rows: bool = True,
        shards: Mapping[str, Shard] = _NO_SHARDS,
        widths: Mapping[str, int] = _NO_WIDTHS,
    ) -> None:
        """`dense` keeps the buffers of parameters that change as a whole from step to step, but for those of large matrices.

        Without `noise_on_rows`, selected rows get no noise here: LazyDP gives it to them later. `shards` are those of tables of
        which `parameters` has a part alone, and `widths` how many columns these tables have. A parameter without memory (on
        "meta") is a table that is elsewhere.
        """
        self.space = space
        self._shards, self._widths = shards, widths
        self.selection = selection
        self.values: dict[str, Tensor] = {}  # of all when `sums` was asked for
        self.public: dict[str, Tensor] = {}  # of tables with a selection: what all rows get, which no unit decides
        self._parameters = parameters
        self._index: dict[str, int] = {}  # of the noise of parameters that change as a whole
        self._held: dict[str, Tensor | None] = {}  # those that hold sums: in which rows, ascending; None: in all
        self._selected: dict[str, int] = {}  # of the noise of tables of which selected rows change
        rows = selection or {}
        elements = {name: p.numel() for name, p in parameters.items() if p.requires_grad}
        of_tables = sum(elements.get(name, 0) for name in space.names)
        keeps_tables = of_tables >= 2 * (sum(elements.values()) - of_tables)
        for index, (name, parameter) in enumerate(parameters.items()):
            if name not in rows and parameter.requires_grad:
                if elements[name] < _LARGE or (name in space.names and keeps_tables):
                    self.values[name] = _buffer(dense, name, parameter)
                self._index[name] = index
            elif name in rows and noise_on_rows:
                self._selected[name] = index
        # The shapes of the selected rows of tables that are alike.
        alike: dict[tuple[torch.dtype, torch.device], dict[str, tuple[int, ...]]] = {}
        for name, numbers in rows.items():
            parameter = parameters[name]
            device = torch.device("cpu") if parameter.is_meta else parameter.device
            shapes = alike.setdefault((parameter.dtype, device), {})
            shapes[name] = (numbers.numel(), *parameter.shape[1:])
        for (dtype, device), shapes in alike.items():
            sizes = [math.prod(shape) for shape in shapes.values()]
            flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
            for (name, shape), part in zip(shapes.items(), flat.split_with_sizes(sizes)):
                self.values[name] = part.view(shape)

    def __contains__(self, name: str) -> bool:
        """Whether a parameter is not frozen."""
        return name in self._index or name in self.values

    def of(self, name: str) -> Tensor:
        """The sums of a parameter. Those of a large matrix have memory when they are first asked for."""
        if name not in self.values:
            self.values[name] = _buffer({}, name, self._parameters[name])
        return self.values[name]

    @property
    def sums(self) -> dict[int, Sums]:
        """What noise is to be added to, when all physical batches have been added, each under an index of its own."""
        dense = {
            i: Sums(self.of(name), self._held.get(name, _NO_ROWS), **self._shard_of(name, with_first=True))
            for name, i in self._index.items()
        }
        rows = self.selection or {}
        return dense | {
            i: Sums(self.values[name], numbers=rows[name], **self._shard_of(name)) for name, i in self._selected.items()
        }

    def _shard_of(self, name: str, with_first: bool = False) -> dict[str, Any]:
        """Which columns of a table there are, and with which row they begin, for `Sums`; nothing for a whole table."""
        if name not in self._shards:
            return {}
        shard, width = self._shards[name], self._widths[name]
        where: dict[str, Any] = {"first": shard.rows.start} if with_first else {}
        return where if len(shard.columns) == width else {**where, "columns": shard.columns, "width": width}

    def whole(self, name: str) -> Tensor:
        """The sums of a parameter that changes as a whole, with zeros where there are none."""
        self._hold(name, None)
        return self.of(name)

    def put(self, name: str, values: Tensor) -> None:
        """Sums of a parameter that changes as a whole, which others have added up."""
        self.of(name).copy_(values)
        self._held[name] = None

    def put_rows(self, name: str, sums: RowSparse) -> None:
        """Sums of rows of a table, by their numbers in the whole table, which others have added up."""
        if name not in self._index:
            assert self.selection is not None
            self.values[name][find(self.selection[name], sums.rows)] = sums.values
            return
        first = self._shards[name].rows.start if name in self._shards else 0
        places = sums.rows - first
        self.values[name][places] = sums.values
        self._held[name] = places

    def _hold(self, name: str, rows: Tensor | None) -> None:
        """Sets to zero what is about to get its first sum: some rows (ascending), or with None all of them.

        Of a parameter that changes as a whole: where selected rows change, they begin as zeros.
        """
        values, held = self.of(name), self._held.get(name, _NO_ROWS)
        if held is None:
            return
        if rows is None:
            zero_others(Sums(values, held))
        else:
            fresh = rows[find(held, rows) < 0] if held.numel() else rows
            values[fresh] = 0
            rows = torch.cat([held, fresh]).sort().values if held.numel() else rows
        self._held[name] = rows

    def add(self, captured: Captured, touched: TouchedRows, slots: Tensor | None, weights: Tensor) -> None:
        """Adds the sum over examples of weight times gradient.

        `weights` (examples,) are the clip factors of their units, over the divisor. The uses are dropped one by one, so that the
        sums of the next parameter find room where the uses of the last one were; looked-up rows, whose uses are small, come last.

        `slots` are the places of the touched rows in the selection; the other uses must be restricted to it already.
        """
        trained = [name for name in captured.uses if name in self]  # not frozen since forward
        kinds = {self._parameters[name].dtype for name in trained}
        if len(kinds) == 1:
            weights = weights.to(kinds.pop())  # once, and not for each parameter
        for name in trained:
            uses = captured.uses.pop(name)
            if name in touched.lookups:
                continue
            if name in self._index:
                self._hold(name, None)
            out = self.of(name)
            mine = weights.to(out.dtype)
            rows = None if self.selection is None else self.selection.get(name)
            if rows is None:
                uses.add_weighted_sum(out, mine)
            else:
                uses.add_weighted_rows(out, rows, mine, self._parameters[name].shape)
        looked_up = {name: self.of(name) for name in trained if name in touched.lookups}
        for name in looked_up:
            if name in self._index:
                self._hold(name, touched.of(name))
        touched.add_weighted_sums(looked_up, slots, weights)


def _buffer(kept: dict[str, Tensor], name: str, parameter: Tensor) -> Tensor:
    buffer = kept.get(name)
    if buffer is None or buffer.shape != parameter.shape or buffer.device != parameter.device:
        buffer = torch.empty_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        kept[name] = buffer
    return buffer
