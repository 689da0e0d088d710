"""Tables: what is known of each without its weights, and who owns their rows."""

from sparsedp.tables.lazy import LazyOwner
from sparsedp.tables.local import LocalOwner
from sparsedp.tables.owner import Owner, Ownership, SeveralOwners
from sparsedp.tables.ranks import LocalExchange, OneRank, Ranks, RowExchange
from sparsedp.tables.spec import (
    Shard,
    TableSpec,
    dense_parameters,
    find_tables,
    sharded_parts,
    table_parameters,
    table_specs,
)  # fmt: skip

__all__ = [
    "LazyOwner",
    "LocalExchange",
    "LocalOwner",
    "OneRank",
    "Owner",
    "Ownership",
    "Ranks",
    "RowExchange",
    "SeveralOwners",
    "Shard",
    "TableSpec",
    "dense_parameters",
    "find_tables",
    "sharded_parts",
    "table_parameters",
    "table_specs",
]
