"""Tables of one GPU: measured rows, their packed form (made on first use), and lookups."""

from fastroof.tables.lookup import Lookup
from fastroof.tables.table_set import Tables, load_tables

__all__ = ["Lookup", "Tables", "load_tables"]
