"""What a step of several processes sends, and what each of them has to hold, before any of it is started.

The formulas follow the messages of `exchange.py`, `ranks.py` and `collections.py`, and of TorchRec's own lookups over gloo.
`tests/distributed/test_sizes.py` compares them with what the sockets of a real run count. All numbers are averages over steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from sparsedp.distributed.placement import PlacedShard
from sparsedp.mechanisms.base import Mechanism

ShardingType = Literal["row_wise", "table_wise", "column_wise", "table_row_wise", "data_parallel"]
# Tables by name: how they are divided, and where the parts are.
Placed = Mapping[str, tuple[ShardingType, tuple[PlacedShard, ...]]]

# Bytes of an id, a length, a row's number or a count; of an answer; of a number that a lookup gives.
_NUMBER, _MASK, _FLOAT = 8, 1, 4
# What gloo sends around a message, to each rank that it goes to: of an all-to-all or one piece of a sum, and of an all-gather.
_HEADER, _GATHER_HEADER = 144, 288
# Of each row of all tables, what a mechanism holds that chooses rows of them: counts, noise, scores, their order. FEST's peak of
# resident memory over 20 million rows was 43 bytes a row.
_PREPARING = 43


@dataclass(frozen=True)
class TableUse:
    """A table, and what a step does with it on one rank, on average. What is not known is taken to be one id an example."""

    name: str
    rows: int
    dim: int
    itemsize: int = 4
    features: float = 1.0  # how often an example's ids are looked up in it: the features that share it
    lookups: float = 1.0  # ids of an example, of all these features
    pooled: bool = True  # whether a feature's rows are added up where they are; otherwise each id's row travels
    weighted: bool = False  # whether ids have weights
    whole: bool = False  # whether every unit uses all rows, as in a softmax: then it cannot be divided
    touched: float | None = None  # distinct rows that a rank's units touch; None: as many as they have ids
    passed: float | None = None  # of these, the rows that are selected; None: all
    touched_by_all: float | None = (
        None  # distinct rows that the units of all ranks touch; None: no two ranks touch the same
    )
    read: float | None = None  # distinct rows that physical batches look up, each counted by itself; None: `touched`
    apart: bool = False  # in a collection of its own, as shard_tables makes them: each lookup has messages of its own

    @property
    def bytes(self) -> int:
        return self.rows * self.dim * self.itemsize

    def rows_touched(self, examples: float) -> float:
        return min(float(self.rows), self.lookups * examples) if self.touched is None else self.touched

    def rows_touched_by_all(self, examples: float, ranks: int) -> float:
        return (
            min(float(self.rows), ranks * self.rows_touched(examples))
            if self.touched_by_all is None
            else self.touched_by_all
        )

    def rows_passed(self, examples: float) -> float:
        return self.rows_touched(examples) if self.passed is None else self.passed

    def rows_read(self, examples: float) -> float:
        return self.rows_touched(examples) if self.read is None else self.read


@dataclass(frozen=True)
class Cluster:
    """The processes that train together: `hosts` with equally many ranks each, numbered host by host."""

    ranks: int
    hosts: int = 1

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts

    def ranks_of(self, host: int) -> range:
        return range(host * self.ranks_per_host, (host + 1) * self.ranks_per_host)


@dataclass(frozen=True)
class Work:
    """What a rank does in a step besides its tables."""

    examples: float  # of a rank's batch
    mechanism: Mechanism
    dense: int = 0  # trained parameters that are no tables
    physical_batches: int = 1


@dataclass
class Sent:
    """Bytes that each rank sends in a step, (ranks,) each, by what they are for."""

    ids: np.ndarray  # what is to be looked up
    lookups: np.ndarray  # the results
    settling: np.ndarray  # LazyDP: which rows are about to be read
    rows: np.ndarray  # which rows the rank's units touch
    counts: np.ndarray  # AdaFEST: how much they add to each
    picks: np.ndarray  # exponential selection: sums of rows before the choice, and their norms for all ranks
    mask: np.ndarray  # which of the rows may change
    clipped_rows: np.ndarray
    dense: np.ndarray  # the sum of the dense gradients
    agreement: np.ndarray  # sizes of what follows, step and batch, whether all went well
    headers: np.ndarray  # what gloo puts around each message

    @staticmethod
    def nothing(ranks: int) -> Sent:
        return Sent(*(np.zeros(ranks) for _ in fields(Sent)))

    def by_purpose(self) -> dict[str, np.ndarray]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    def total(self) -> np.ndarray:
        return np.sum(list(self.by_purpose().values()), axis=0)

    def add(self, other: Sent) -> None:
        for name, values in other.by_purpose().items():
            getattr(self, name).__iadd__(values)


def sent_for_table(
    table: TableUse, kind: ShardingType, parts: Sequence[PlacedShard], cluster: Cluster, work: Work
) -> Sent:
    """What all ranks send in a step for one table, placed like this."""
    ranks, examples, sent = cluster.ranks, work.examples, Sent.nothing(cluster.ranks)
    shares = np.array([len(part.shard.rows) / table.rows for part in parts])
    widths = np.array([len(part.shard.columns) for part in parts])
    owners = np.array([part.rank for part in parts])

    def to_others(of_part: np.ndarray) -> np.ndarray:
        """What each rank sends if every rank has `of_part` for each of the parts: nothing to itself."""
        return of_part.sum() - np.bincount(owners, of_part, ranks)

    def from_owners(of_part: np.ndarray) -> np.ndarray:
        """What each rank sends if the owner of each part has `of_part` for every rank."""
        return np.bincount(owners, of_part, ranks) * (ranks - 1)

    if kind != "data_parallel":
        ids = _NUMBER + (_FLOAT if table.weighted else 0)
        lengths = np.ones(len(parts)) * (
            work.physical_batches if table.apart else examples
        )  # apart, of all ids together
        sent.ids += to_others(lengths * table.features * _NUMBER + shares * table.lookups * examples * ids)
        vectors = examples * (table.features if table.pooled else table.lookups)
        if not table.pooled or kind in ("table_wise", "column_wise"):
            sent.lookups += from_owners(shares * widths * vectors * _FLOAT)
        else:
            sent.lookups += _reduce_scattered(ranks * vectors * table.dim * _FLOAT, owners, kind, cluster)
    touched, passed = table.rows_touched(examples), table.rows_passed(examples)
    row = widths * table.itemsize
    sent.rows += to_others(shares * touched * _NUMBER)
    sent.clipped_rows += to_others(shares * passed * row)
    mechanism = work.mechanism
    if mechanism.noise_waits:
        sent.settling += to_others(shares * table.rows_read(examples) * _NUMBER)
    if mechanism.contribution_clip is not None:
        sent.counts += to_others(shares * touched * _NUMBER)
    if mechanism.selects:
        sent.mask += from_owners(shares * touched * _MASK)
    if mechanism.selects_by_sum:
        sent.picks += to_others(shares * touched * row)
    return sent


def _most_owned(tables: Iterable[TableUse], placed: Placed, cluster: Cluster, work: Work) -> float:
    """Of the rows that any rank touches, those that one rank owns at most. All ranks are told as many numbers of each rank."""
    owned = np.zeros(cluster.ranks)
    for table in tables:
        kind, parts = placed[table.name]
        for part in parts[:1] if kind == "data_parallel" else parts:  # one of the copies speaks for all
            owned[part.rank] += (
                len(part.shard.rows) / table.rows * table.rows_touched_by_all(work.examples, cluster.ranks)
            )
    return float(owned.max())


def _reduce_scattered(size: float, owners: np.ndarray, kind: ShardingType, cluster: Cluster) -> np.ndarray:
    """What each rank sends to add parts of `size` bytes up and leave each its own. Gloo adds up everything everywhere."""
    if kind == "row_wise":
        return np.full(cluster.ranks, _summed(size, cluster.ranks))
    here = np.isin(np.arange(cluster.ranks), owners)  # the ranks of one host
    share, hosts = size / cluster.ranks_per_host, cluster.hosts
    return here * (_summed(size, cluster.ranks_per_host) + share * (hosts - 1) / hosts)


def _summed(size: float, ranks: int) -> float:
    """What a rank sends to add `size` bytes up over all ranks: round a ring, in pieces, twice."""
    return 2 * (ranks - 1) / ranks * size


def sent_in_step(
    tables: Iterable[TableUse],
    placed: Placed,
    cluster: Cluster,
    work: Work,
) -> Sent:
    """What each rank sends in a step."""
    ranks, mechanism, tables = cluster.ranks, work.mechanism, list(tables)
    others, sent = ranks - 1, Sent.nothing(ranks)
    for table in tables:
        sent.add(sent_for_table(table, *placed[table.name], cluster, work))
    sent.dense += _summed(work.dense * _FLOAT, ranks)
    if mechanism.selects_by_sum:
        sent.picks += 2 * _NUMBER * others * _most_owned(tables, placed, cluster, work)
    # In a physical batch: for each collection and kind, or for each time that a table is looked up which is apart.
    divided = [table for table in tables if placed[table.name][0] != "data_parallel"]
    apart = sum(table.features for table in divided if table.apart)
    lookups = apart + len({(table.pooled, placed[table.name][0]) for table in divided if not table.apart})
    collections = apart + len({table.pooled for table in tables if not table.apart})
    weighted = any(table.weighted for table in tables)
    batches = work.physical_batches
    shards = np.zeros(ranks)
    for _, parts in placed.values():
        shards += np.bincount([part.rank for part in parts], minlength=ranks)
    settlings = collections * batches if mechanism.noise_waits else 0
    exchanges = 1 if tables else 0
    # Sizes of the ids that follow, of the rows of each shard that follow; step, batch and a sum of bits; whether it went well.
    sent.agreement += lookups * batches * (3 + weighted) * _NUMBER * others
    sent.agreement += (exchanges + settlings / max(collections, 1)) * _NUMBER * (shards.sum() - shards)
    sent.agreement += (3 * _NUMBER + 1) * others
    # All-to-alls: sizes, lengths, ids and results of a lookup; sizes and rows of an exchange, and what is said of the rows.
    messages = lookups * batches * (4 + weighted) + 2 * settlings + 3 * exchanges
    messages += (mechanism.contribution_clip is not None) + mechanism.selects + mechanism.selects_by_sum
    messages += 2 if work.dense else 0  # a sum goes round the ring twice
    gathers = 2 + (2 if mechanism.selects_by_sum else 0)
    sent.headers += (messages * _HEADER + gathers * _GATHER_HEADER) * others
    return sent


def sent_once(tables: Iterable[TableUse], ranks: int, mechanism: Mechanism) -> float:
    """What a rank sends before the first step: the counts of a mechanism that counts rows of the data."""
    if not (mechanism.prepares and mechanism.setup_event() is not None):
        return 0.0
    return _summed(sum(table.rows for table in tables) * _NUMBER, ranks)


# ---------------------------------------------------------------------- memory


@dataclass(frozen=True)
class Held:
    """Bytes that a rank needs besides its shards, and for each byte and row of them."""

    process: int = 0  # Python with torch and TorchRec
    data: int = 0  # of the training and held-out data, that every rank reads
    dense: int = 0  # dense parameters with their gradients and optimizer state
    activations: int = 0  # of a rank's physical batch
    state_share: float = 0.0  # bytes of optimizer state for each byte of a table


def prepared_bytes(tables: Iterable[TableUse], mechanism: Mechanism) -> int:
    """What a mechanism that chooses rows ahead of the steps holds on every rank: for all rows, not for those of its shards."""
    return _PREPARING * sum(table.rows for table in tables) if mechanism.prepares else 0


def shard_bytes(table: TableUse, rows: int, columns: int, held: Held, mechanism: Mechanism) -> int:
    """A shard's weights, optimizer state, gradient where all rows have one, and the steps up to which LazyDP settled them."""
    weights = rows * columns * table.itemsize
    gradient = 0 if mechanism.selects else weights
    return round(weights * (1 + held.state_share)) + gradient + (4 * rows if mechanism.noise_waits else 0)


def lookup_bytes(
    table: TableUse, kind: ShardingType, parts: Sequence[PlacedShard], cluster: Cluster, work: Work
) -> np.ndarray:
    """What each rank holds of a lookup's ids and results for the batches of all ranks, and of rows on their way, (ranks,)."""
    examples = work.examples / work.physical_batches
    owned = np.zeros(cluster.ranks)
    vectors = examples * (table.features if table.pooled else table.lookups)
    own = vectors * table.dim * _FLOAT + table.rows_touched(work.examples) * (_NUMBER + table.dim * table.itemsize)
    for part in parts:
        share, width = len(part.shard.rows) / table.rows, len(part.shard.columns)
        arrived = cluster.ranks * share * table.rows_touched(work.examples) * (_NUMBER + width * table.itemsize)
        found = 0.0
        if kind != "data_parallel":
            divided = share if not table.pooled else 1.0  # a bag whose rows are divided has a sum on each rank
            found = cluster.ranks * (divided * vectors * width * _FLOAT + table.features * examples * _NUMBER)
            found *= 2 if table.pooled and share < 1 else 1  # gloo adds up in a copy
        owned[part.rank] += arrived + found
    return owned + own
