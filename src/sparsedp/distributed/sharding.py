"""Which part of which table goes to which rank: a plan that is made of sizes alone, without TorchRec.

TorchRec's own planner does not know of private training, and on CPUs it never divides the rows of bags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsedp.distributed.placement import PlacedShard
from sparsedp.distributed.sizes import (
    Cluster,
    Held,
    Sent,
    ShardingType,
    TableUse,
    Work,
    lookup_bytes,
    prepared_bytes,
    sent_for_table,
    sent_in_step,
    sent_once,
    shard_bytes,
)
from sparsedp.errors import UnsupportedError
from sparsedp.mechanisms import DPSGD
from sparsedp.tables import Shard

_COLUMNS = 4  # FBGEMM's kernels take shards whose columns are a multiple of this; its "dense" ones take any
_FULL = 0.9  # of a host's memory that is planned with: the rest is the operating system's, and what estimates leave out


@dataclass(frozen=True)
class TableSharding:
    """Where a table is, in TorchRec's words."""

    kind: ShardingType
    ranks: tuple[int, ...]  # of its parts, in order; of a replicated table all
    parts: tuple[PlacedShard, ...]
    host: int | None = None  # of "table_row_wise"

    @property
    def kernel(self) -> str:
        return "dense" if any(len(part.shard.columns) % _COLUMNS for part in self.parts) else "fused"

    @property
    def place(self) -> str:
        """As `shard_tables` reads it: "row_wise", "table_wise 3", "column_wise 0 2"."""
        numbered = self.kind in ("table_wise", "column_wise")
        return " ".join([self.kind, *(map(str, self.ranks) if numbered else ())])

    def for_torchrec(self) -> Any:
        """What TorchRec's `construct_module_sharding_plan` takes for the table."""
        from torchrec.distributed import sharding_plan as torchrec

        if self.kind == "row_wise":
            return torchrec.row_wise(compute_kernel=self.kernel)
        if self.kind == "table_wise":
            return torchrec.table_wise(rank=self.ranks[0], compute_kernel=self.kernel)
        if self.kind == "column_wise":
            return torchrec.column_wise(ranks=list(self.ranks), compute_kernel=self.kernel)
        if self.kind == "table_row_wise":
            assert self.host is not None
            return torchrec.table_row_wise(host_index=self.host, compute_kernel=self.kernel)
        return torchrec.data_parallel()


@dataclass(frozen=True)
class Sharding:
    """A placement of all tables, and what follows from it for each rank."""

    tables: Mapping[str, TableSharding]
    cluster: Cluster
    memory: Mapping[str, np.ndarray]  # bytes of each rank, (ranks,), by what they are for
    sent: Sent
    sent_once: float  # by a rank before the first step
    limit: float | None  # bytes of memory that a rank may plan with
    advice: str | None = None  # why it does not fit, and what would; None: it fits, or nobody said into what

    @property
    def places(self) -> dict[str, str]:
        """Of each table, as `shard_tables` takes it."""
        return {name: choice.place for name, choice in self.tables.items()}

    @property
    def memory_of_ranks(self) -> np.ndarray:
        return np.sum(list(self.memory.values()), axis=0)

    @property
    def fits(self) -> bool:
        return self.advice is None

    def require_fits(self) -> Sharding:
        if self.advice is not None:
            raise UnsupportedError(self.advice)
        return self


def choose_sharding(
    tables: Iterable[TableUse], ranks: int, hosts: int = 1, memory: float | None = None, *,
    work: Work | None = None, held: Held | None = None, by_shard_tables: bool = False,
) -> Sharding:  # fmt: skip
    """For each table the kind of sharding, and the ranks, that send least among those that fit.

    `memory` is that of each host, in bytes; None: it is not limited. What is not said of the `work` of a step is taken to be
    DP-SGD with 64 examples on a rank. Whether the result fits is for the caller to ask: `fits`, or `require_fits()`. With
    `by_shard_tables` there is nothing in it that `shard_tables` cannot do: no table_row_wise, and tables are divided only if
    their columns are a multiple of 4.
    """
    if ranks < 1 or hosts < 1 or ranks % hosts:
        raise UnsupportedError(
            f"{ranks} ranks cannot be divided evenly among {hosts} hosts: every host has as many ranks."
        )
    cluster, held = Cluster(ranks, hosts), Held() if held is None else held
    work = Work(64.0, DPSGD()) if work is None else work
    ordered = sorted(tables, key=lambda table: (-table.bytes, table.name))
    limit = None if memory is None else _FULL * memory / cluster.ranks_per_host
    best = None
    for by_memory in (False, True):  # with the least traffic on one rank, or where there is most room
        chosen = _Chooser(ordered, cluster, work, held, limit, by_memory, by_shard_tables).choose()
        best = chosen if best is None or chosen.memory_of_ranks.max() < best.memory_of_ranks.max() else best
        if chosen.fits:
            return chosen
    assert best is not None
    return best


class _Chooser:
    """Places tables one after another, the largest first."""

    def __init__(
        self, tables: Sequence[TableUse], cluster: Cluster, work: Work, held: Held, limit: float | None, by_memory: bool,
        by_shard_tables: bool,
    ) -> None:  # fmt: skip
        self.tables, self.cluster, self.work, self.held, self.limit = tables, cluster, work, held, limit
        self.by_memory, self.by_shard_tables = by_memory, by_shard_tables
        fixed = {name: getattr(held, name) for name in ("process", "data", "dense", "activations")}
        fixed["rows chosen beforehand"] = prepared_bytes(tables, work.mechanism)
        self.fixed = fixed
        self.used = np.full(cluster.ranks, float(sum(fixed.values())))  # bytes of memory
        self.sent = np.zeros(cluster.ranks)

    def choose(self) -> Sharding:
        cluster, work, placed = self.cluster, self.work, {}
        shards, lookups = np.zeros(cluster.ranks), np.zeros(cluster.ranks)
        for table in self.tables:
            choice, needs, sent = self._place(table)
            placed[table.name] = choice
            shards += needs[0]
            lookups += needs[1]
            self.used += sum(needs)
            self.sent += sent
        kinds = {name: (choice.kind, choice.parts) for name, choice in placed.items()}
        memory = {"tables": shards, "lookups": lookups}
        memory |= {name: np.full(cluster.ranks, float(size)) for name, size in self.fixed.items() if size}
        return Sharding(
            tables=placed,
            cluster=cluster,
            memory=memory,
            sent=sent_in_step(self.tables, kinds, cluster, work),
            sent_once=sent_once(self.tables, cluster.ranks, work.mechanism),
            limit=self.limit,
            advice=self._advice(),
        )

    def _place(self, table: TableUse) -> tuple[TableSharding, tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Where a table goes, and what each rank holds of it and sends for it; if nothing fits, what needs least of a rank."""
        tried = []
        for choice in self._choices(table):
            needs = self._needs(table, choice)
            sent = sent_for_table(table, choice.kind, choice.parts, self.cluster, self.work).total
            most = float((self.used + sum(needs)).max())
            over = self.limit is not None and most > self.limit
            tried.append((over, most if over else 0.0, float(sent.sum()), choice, needs, sent))
        _, _, _, choice, needs, sent = min(tried, key=lambda one: one[:3])
        return choice, needs, sent

    def _needs(self, table: TableUse, choice: TableSharding) -> tuple[np.ndarray, np.ndarray]:
        shards = np.zeros(self.cluster.ranks)
        for part in choice.parts:
            rows, columns = len(part.shard.rows), len(part.shard.columns)
            shards[part.rank] += shard_bytes(table, rows, columns, self.held, self.work.mechanism)
        return shards, lookup_bytes(table, choice.kind, choice.parts, self.cluster, self.work)

    def _choices(self, table: TableUse) -> Iterable[TableSharding]:
        """All kinds of sharding that a table can have, each on the ranks that have least so far."""
        ranks, local, rows, dim = self.cluster.ranks, self.cluster.ranks_per_host, range(table.rows), range(table.dim)
        loads = self.used if self.by_memory else self.sent
        order = np.lexsort((self.used, loads)).tolist()
        everywhere = tuple(PlacedShard(rank, Shard(rows, dim)) for rank in range(ranks))
        is_divided = not table.whole and not (self.by_shard_tables and table.dim % _COLUMNS)
        if is_divided:
            yield TableSharding("table_wise", (order[0],), (PlacedShard(order[0], Shard(rows, dim)),))
        if self._copies(table):
            yield TableSharding("data_parallel", tuple(range(ranks)), everywhere)
        elif not is_divided:
            raise UnsupportedError(
                f"Table '{table.name}' has {table.dim} columns, and what is divided has a multiple of {_COLUMNS} (of a bundled "
                f"model: model.dim). {self.work.mechanism.name} cannot train copies: a rank that reads rows would settle them, "
                "and the others would not hear of it."
            )
        if not is_divided:
            return
        for count in range(2, min(ranks, table.dim // _COLUMNS) + 1):
            if table.dim % (count * _COLUMNS) == 0:
                owners, width = order[:count], table.dim // count
                columns = [range(at * width, (at + 1) * width) for at in range(count)]
                parts = tuple(PlacedShard(rank, Shard(rows, cut)) for rank, cut in zip(owners, columns))
                yield TableSharding("column_wise", tuple(owners), parts)
        if table.pooled and 1 < local < ranks and not self.by_shard_tables:  # TorchRec has it for bags alone
            host = min(range(self.cluster.hosts), key=lambda host: max(loads[r] for r in self.cluster.ranks_of(host)))
            yield TableSharding(
                "table_row_wise", tuple(self.cluster.ranks_of(host)), _by_rows(table, self.cluster.ranks_of(host)), host
            )
        if ranks > 1:
            yield TableSharding("row_wise", tuple(range(ranks)), _by_rows(table, range(ranks)))

    def _copies(self, table: TableUse) -> bool:
        """Whether every rank may have the table as a whole: not one that is looked up where it is, if noise waits for that."""
        return not (self.by_shard_tables and table.apart and self.work.mechanism.noise_waits)

    def _advice(self) -> str | None:
        """What is too much for the fullest rank, and what would help."""
        if self.limit is None or self.used.max() <= self.limit:
            return None
        cluster, fixed = self.cluster, float(sum(self.fixed.values()))
        divided = sum(float(self._needs(t, _evenly(t, cluster))[0].sum()) for t in self.tables if not t.whole)
        copied = fixed + sum(float(self._needs(t, _evenly(t, cluster))[0].max()) for t in self.tables if t.whole)
        text = (
            f"It does not fit: the fullest of {cluster.ranks} ranks needs {in_bytes(self.used.max())}, and a rank may plan with "
            f"{in_bytes(self.limit)} ({_FULL:.0%} of its host's memory, divided by {cluster.ranks_per_host})."
        )
        if copied < self.limit:
            hosts = math.ceil(divided / ((self.limit - copied) * cluster.ranks_per_host))
            while hosts <= cluster.hosts:
                hosts += 1
            text += f" With {hosts} such hosts it may (--hosts {hosts} --nproc {hosts * cluster.ranks_per_host})"
        else:
            largest = max(self.fixed, key=lambda name: self.fixed[name])
            text += (
                f" What every rank has to hold as a whole is {in_bytes(copied)} already (most of it: {largest}), so more hosts "
                "alone do not help: fewer ranks on a host may"
            )
        largest_table = max(self.tables, key=lambda table: table.bytes)
        narrower = largest_table.dim // 2 // _COLUMNS * _COLUMNS
        if narrower and not largest_table.whole:
            text += f", or a smaller dim: '{largest_table.name}' has {largest_table.dim}"
        if largest_table.dim % (2 * _COLUMNS) and not largest_table.whole:
            text += f" (a multiple of {2 * _COLUMNS} could be divided by columns, too)"
        if self.work.mechanism.prepares:
            text += f", or a mechanism that does not choose rows beforehand: {self.work.mechanism.name} counts all on every rank"
        return text + "."


def _by_rows(table: TableUse, ranks: Sequence[int]) -> tuple[PlacedShard, ...]:
    """Equal blocks of rows, as TorchRec makes them; the last ranks may have less, or nothing."""
    block = math.ceil(table.rows / len(ranks))
    blocks = [range(min(at * block, table.rows), min((at + 1) * block, table.rows)) for at in range(len(ranks))]
    return tuple(PlacedShard(rank, Shard(rows, range(table.dim))) for rank, rows in zip(ranks, blocks) if len(rows))


def _evenly(table: TableUse, cluster: Cluster) -> TableSharding:
    everyone = tuple(range(cluster.ranks))
    if table.whole:
        parts = tuple(PlacedShard(rank, Shard(range(table.rows), range(table.dim))) for rank in everyone)
        return TableSharding("data_parallel", everyone, parts)
    return TableSharding("row_wise", everyone, _by_rows(table, everyone))


# ---------------------------------------------------------------------- amounts of memory


_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def parse_bytes(text: str) -> int:
    """Bytes of an amount such as 256GB (10^9) or 256GiB (2^30)."""
    number = text.strip().rstrip("BKMGTikmgtb").strip()
    unit = text.strip()[len(number) :].strip()
    known = {name.lower(): size for name, size in _UNITS.items()}
    try:
        size = float(number) * known[unit.lower() or "b"]
        if not 1 <= size < math.inf:
            raise ValueError
    except (KeyError, ValueError):
        shown = ", ".join(_UNITS)
        raise ValueError(
            f"expected an amount of memory such as 256GB or 256GiB (units: {shown}); got {text!r}"
        ) from None
    return round(size)


def in_bytes(count: float) -> str:
    """An amount as people read it: 12.3 GB."""
    for unit in ("TB", "GB", "MB", "kB"):
        if count >= _UNITS[unit]:
            return f"{count / _UNITS[unit]:,.1f} {unit}"
    return f"{count:,.0f} B"
