"""Takes what units say of rows to the ranks that own the rows, and the owners' selection back (`tables/ranks.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsedp.capture import RowSpace, RowSparse
from sparsedp.errors import SparseDPError
from sparsedp.kernels.loops import distinct_with_places, find
from sparsedp.tables import RowExchange

if TYPE_CHECKING:
    from sparsedp.distributed.ranks import ProcessRanks


class ProcessExchange(RowExchange):
    """The rows that one batch touches, between processes.

    A rank sends each of its units' rows to every rank that has a part of that row; what it says of a row later goes the same
    way, in the same order, without its number. In a message, rows come shard by shard of the receiver, in the order of the
    tables' names, ascending.
    """

    def __init__(self, ranks: ProcessRanks, space: RowSpace, rows: Tensor) -> None:
        self.space, self._ranks = space, ranks
        self._own_rows = rows
        self._shards = [ranks.shards_in(space, rank) for rank in range(ranks.count)]
        # Where the rows of each rank's shards begin and end among `rows`.
        bounds = torch.tensor([bound for shards in self._shards for s in shards for bound in (s.first, s.end)])
        edges = torch.searchsorted(rows, bounds).view(-1, 2)
        sizes = [len(shards) for shards in self._shards]
        mine = len(self._shards[ranks.rank])
        counts = ranks.all_to_all(edges.diff(dim=1).flatten(), sizes, [mine] * ranks.count)
        self._edges = [part.tolist() for part in edges.split(sizes)]
        # How many rows each rank sent of each of this rank's shards: (ranks, shards).
        self._counts = counts.view(ranks.count, mine)
        self._at = torch.cat([torch.arange(b, e) for edges in self._edges for b, e in edges] or [rows.new_empty(0)])
        self._sent = [sum(e - b for b, e in edges) for edges in self._edges]
        self._received = self._counts.sum(1).tolist()
        arrived = ranks.all_to_all(rows[self._at], self._sent, self._received)
        self.rows, self._places = distinct_with_places(arrived)
        # Of what is sent and of what arrives: whether the row is selected. None: all are.
        self._own_mask: Tensor | None = None
        self._mask: Tensor | None = None

    def owned(self, name: str) -> range:
        return self._ranks.owned(name)

    def add_up(self, values: Tensor) -> Tensor:
        arrived = self._ranks.all_to_all(values[self._at], self._sent, self._received)
        # Numbers of one row are added up in the order of the ranks: whoever else has a part of the row gets the same.
        return arrived.new_zeros(len(self.rows)).index_add_(0, self._places, arrived)

    def of_own_units(self, selection: Mapping[str, Tensor]) -> dict[str, Tensor]:
        is_selected = find(self.space.join(selection), self.rows) >= 0
        self._mask = is_selected[self._places]
        answers = self._ranks.all_to_all(self._mask.to(torch.uint8), self._received, self._sent)
        self._own_mask = torch.zeros(len(self._own_rows), dtype=torch.bool)
        self._own_mask[self._at] = answers.bool()
        return self.space.split(self._own_rows[self._own_mask])

    def add_up_rows(self, sums: Mapping[str, RowSparse]) -> dict[str, RowSparse]:
        kept = self._own_mask
        rows = self._own_rows if kept is None else self._own_rows[kept]
        given = self.space.join({name: total.rows for name, total in sums.items()})
        if not torch.equal(given, rows):
            raise SparseDPError("Sums were given of other rows than the owners were told of.")
        pieces, lengths = self._pieces(sums, kept)
        mine, mask = self._shards[self._ranks.rank], self._mask
        counts = self._counts
        if mask is not None:
            edges = [0, *accumulate(counts.flatten().tolist())]
            passed = torch.cat([mask.new_zeros(1, dtype=torch.long), mask.long().cumsum(0)])
            counts = passed[torch.tensor(edges)].diff().view_as(counts)
        widths = torch.tensor([len(shard.columns) for shard in mine], dtype=torch.long)
        arrived = self._ranks.all_to_all(pieces, lengths, (counts * widths).sum(1).tolist())
        return self._merged(arrived, counts)

    def _pieces(self, sums: Mapping[str, RowSparse], kept: Tensor | None) -> tuple[Tensor, list[int]]:
        """What goes to each rank, end to end, and how many numbers that is."""
        numbers = None if kept is None else torch.cat([kept.new_zeros(1, dtype=torch.long), kept.long().cumsum(0)])
        firsts = dict(zip(self.space.names, self.space.edges(self._own_rows)))
        pieces, lengths = [], []
        for shards, edges in zip(self._shards, self._edges):
            length = 0
            for shard, (begin, end) in zip(shards, edges):
                first = firsts[shard.name][0]
                if numbers is not None:
                    first, begin, end = numbers[[first, begin, end]].tolist()
                if shard.name in sums and end > begin:
                    part = sums[shard.name].values[begin - first : end - first]
                    part = part[:, shard.columns.start : shard.columns.stop].reshape(-1)
                    pieces.append(part)
                    length += part.numel()
            lengths.append(length)
        return torch.cat(pieces) if pieces else self._ranks.no_numbers(), lengths

    def _merged(self, arrived: Tensor, counts: Tensor) -> dict[str, RowSparse]:
        """What arrived, `counts` (ranks, shards) rows of each of this rank's shards, added up by row."""
        mine = self._shards[self._ranks.rank]
        places = self._places if self._mask is None else self._places[self._mask]
        # The places of each shard's rows, and their numbers, rank by rank.
        flat = counts.flatten().tolist()
        by_part = dict(zip(((r, s) for r in range(len(counts)) for s in range(len(mine))), places.split(flat)))
        widths = [len(shard.columns) for shard in mine] * len(counts)
        values = dict(zip(by_part, arrived.split([count * width for count, width in zip(flat, widths)])))
        bounds = dict(zip(self.space.names, self.space.edges(self.rows)))
        merged = {}
        for s, shard in enumerate(mine):
            begin, end = bounds[shard.name]
            at = torch.cat([by_part[r, s] for r in range(len(counts))]) - begin
            total = arrived.new_zeros(end - begin, len(shard.columns))
            total.index_add_(
                0, at, torch.cat([values[r, s] for r in range(len(counts))]).view(len(at), len(shard.columns))
            )
            rows = self.rows[begin:end] - shard.table_first
            if self._mask is not None:
                touched = torch.zeros(end - begin, dtype=torch.bool)
                touched[at] = True
                rows, total = rows[touched], total[touched]
            merged[shard.name] = RowSparse(rows, total)
        return merged

    def on_all_ranks(self, rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        if self._ranks.rank > 0 and self._ranks.placement.replicated:  # one of the copies speaks for all
            kept = torch.ones(len(rows), dtype=torch.bool)
            for name, (begin, end) in zip(self.space.names, self.space.edges(rows)):
                if name in self._ranks.placement.replicated:
                    kept[begin:end] = False
            rows, values = rows[kept], values[kept]
        # In one message: the bits of the numbers lie behind the rows.
        pairs = [part.view(2, -1) for part in self._ranks.gather(torch.cat([rows, values.double().view(torch.int64)]))]
        every_row, bits = torch.cat(pairs, 1)
        every_value = bits.view(torch.float64)
        ascending, places = distinct_with_places(every_row)
        return ascending, every_value.new_zeros(len(ascending)).index_add_(0, places, every_value)


def split_by(values: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The parts of a tensor that have these sizes, end to end."""
    return [values[begin:end] for begin, end in pairwise((0, *accumulate(sizes)))]
