"""Tables: what is known of each without its weights, and who owns their rows."""

from sparsedp.tables.lazy import LazyOwner
from sparsedp.tables.local import LocalOwner
from sparsedp.tables.owner import Owner, Ownership, SeveralOwners
from sparsedp.tables.spec import TableSpec, find_tables, table_specs

__all__ = [
    "LazyOwner",
    "LocalOwner",
    "Owner",
    "Ownership",
    "SeveralOwners",
    "TableSpec",
    "find_tables",
    "table_specs",
]
