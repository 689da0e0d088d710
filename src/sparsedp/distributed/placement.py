"""Which rank has which part of each table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sparsedp.tables import Shard


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
