"""Which rank has which part of each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sparsedp.tables import Shard


def read_place(text: str) -> tuple[str, tuple[int, ...]]:
    """The kind of sharding and the ranks of the parts, of a text such as "row_wise", "table_wise 3" or "column_wise 0 2"."""
    kind, *numbers = text.split()
    ranks = tuple(int(number) for number in numbers if number.isdecimal())
    counted = {
        "row_wise": not ranks,
        "data_parallel": not ranks,
        "table_wise": len(ranks) == 1,
        "column_wise": bool(ranks),
    }
    if not counted.get(kind) or len(ranks) < len(numbers) or len(set(ranks)) < len(ranks):
        raise ValueError(
            f'expected "row_wise", "data_parallel", "table_wise R" or "column_wise R R ...", with numbers of ranks; got {text!r}'
        )
    return kind, ranks


@dataclass(frozen=True)
class PlacedShard:
    """A part of a table, on the rank that owns it."""

    rank: int
    shard: Shard


@dataclass(frozen=True)
class Placement:
    """All shards of all tables. A table that is `replicated` is on every rank as a whole."""

    ranks: int
    tables: Mapping[str, tuple[PlacedShard, ...]]
    replicated: frozenset[str] = field(default=frozenset())

    @cached_property
    def _of_rank(self) -> list[dict[str, Shard]]:
        shards: list[dict[str, Shard]] = [{} for _ in range(self.ranks)]
        for name, placed in self.tables.items():
            for part in placed:
                shards[part.rank][name] = part.shard
        return shards

    def of_rank(self, rank: int) -> dict[str, Shard]:
        """What a rank has: its shard of each of the tables that it has a part of."""
        return self._of_rank[rank]
