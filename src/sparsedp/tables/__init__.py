"""Tables: what is known of each, and who owns their rows."""

from sparsedp.tables.spec import TableSpec, find_tables, table_specs

__all__ = ["TableSpec", "find_tables", "table_specs"]
