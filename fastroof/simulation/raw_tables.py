"""Columns of a trace out of arrays and of tables that speak Arrow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.checks import is_number, is_whole_number
from fastroof.errors import TraceError
from fastroof.simulation.trace import HASH_IDS
from fastroof.simulation.trace_columns import RawColumns
from fastroof.simulation.trace_formats import NamedColumns, named_columns

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["arrow_column", "raw_arrays", "raw_table", "said_of_table"]


def raw_table(source: Any) -> pa.Table:
    """Return what speaks Arrow as a table."""
    import pyarrow as pa

    try:
        return pa.table(source)
    except MemoryError:
        raise
    except (pa.ArrowException, TypeError, ValueError, OSError) as error:
        raise TraceError(f"the table cannot be read ({error!s:.200})") from None


def raw_arrays(
    source: Mapping[str, Any] | pa.Table,
    format: str | None,
    *,
    what: str = "the arrays",
    needs_arrival: bool = True,
) -> tuple[RawColumns, NamedColumns]:
    """Return columns of arrays or of a table, and which role each has."""
    if isinstance(source, Mapping):
        given: Any = {str(name): values for name, values in source.items()}
        names = list(given)
    else:
        given, names = source, source.column_names
    columns = named_columns(names, what, format, needs_arrival=needs_arrival)
    arrays = {name: arrow_column(what, name, given[name]) for name in columns.needed}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise TraceError(f"{what} must have one length, got {listed}")
    return RawColumns(what, arrays, lambda row: f"row {row}"), columns


def arrow_column(what: str, name: str, values: Any) -> pa.ChunkedArray:
    """Return values as one column of Arrow."""
    import pyarrow as pa

    if isinstance(values, bytes | bytearray | memoryview | np.ma.MaskedArray):
        raise TraceError(f"{what}: {name} is no column of numbers, it is {type(values).__name__}")
    if isinstance(values, list | tuple) and np.bool_ in set(map(type, values)):
        raise TraceError(f"{what}: {name} is no column of numbers, there are bools in it")
    try:
        # a sum type of whole numbers and floats is found for lists, and not for anything else
        if isinstance(values, np.ndarray) and not values.dtype.isnative:
            # of the other byte order, which Arrow does not read
            values = values.astype(values.dtype.newbyteorder("="))
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    except MemoryError:
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{what}: {name} is no column of numbers ({error!s:.200})") from None


def said_of_table(table: pa.Table) -> dict[str, Any]:
    """Return what a table that :meth:`Trace.table` made says of itself."""
    metadata = table.schema.metadata or {}
    said: dict[str, Any] = {"name": _text(metadata.get(b"name")) or "table"}
    clients, think_s = _number(metadata.get(b"clients")), _number(metadata.get(b"think_s"))
    if is_whole_number(clients):
        said["clients"] = clients
        if is_number(think_s) and think_s >= 0:
            said["think_s"] = float(think_s)
    if HASH_IDS in table.column_names:
        size = _number((table.schema.field(HASH_IDS).metadata or {}).get(b"hash_block_size"))
        if is_whole_number(size):
            said["hash_block_size"] = size
    return said


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _number(value: bytes | None) -> Any:
    """Return the number that bytes say, None where they say none."""
    for read in (int, float):
        try:
            return read(_text(value))
        except ValueError:
            continue
    return None
