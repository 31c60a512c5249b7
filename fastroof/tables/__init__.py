"""Tables of one GPU: measured rows and, made when first asked for, their packed form; lookups in them."""

from fastroof.tables.lookup import Lookup
from fastroof.tables.table_set import Tables, load_tables

__all__ = ["Lookup", "Tables", "load_tables"]
