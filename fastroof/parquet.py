"""Parquet files whose pages are written with checksums and verified when read.

Arrow verifies a page only on request, and only if it carries a checksum: otherwise a flipped bit becomes
another number. A damaged file raises one of :data:`PARQUET_ERRORS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from fastroof.processors import usable_memory_bytes
from fastroof.units import GIB

CHECKED_PAGES: Final[dict[str, Any]] = {"write_page_checksum": True}
"""Options of every writer of Parquet."""

PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError)
"""What a damaged or foreign file raises when it is opened or read: text that is no UTF-8 is a ValueError."""


def open_parquet(file: str | Path | bytes) -> pq.ParquetFile:
    """Open a Parquet file whose pages are read against their checksums."""
    source = pa.BufferReader(file) if isinstance(file, bytes) else file
    opened = pq.ParquetFile(source, page_checksum_verification=True)
    try:
        _check_row_counts(opened.metadata)
    except BaseException:
        opened.close()
        raise
    return opened


def _check_row_counts(metadata: pq.FileMetaData) -> None:
    """Refuse a footer, which has no checksum, whose numbers of rows differ: fewer would be read."""
    rows = sum(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise pa.ArrowInvalid(f"it has {metadata.num_rows} rows by its footer, and {rows} by its row groups")


def fault_of(error: BaseException) -> str:
    """Return what is wrong with a file that raised an error: damage, or that memory does not hold it."""
    if isinstance(error, MemoryError):
        return f"needs more memory than there is ({error!s:.200})"
    return f"is damaged ({error!s:.200})"


def _least_bytes(file: pq.ParquetFile, columns: Sequence[str] | None) -> int:
    """Bytes that columns take in memory at least, by what the file says of itself."""
    bits = 0
    for field in file.schema_arrow:
        if columns is None or field.name in columns:
            try:
                bits += field.type.bit_width
            except ValueError:  # text and lists, of any length
                bits += 32
    return int(file.metadata.num_rows) * bits // 8


def _memory_needed(file: pq.ParquetFile, columns: Sequence[str] | None) -> str:
    """Say what columns take, and refuse what memory does not hold before the system ends the process."""
    needed, usable = _least_bytes(file, columns), usable_memory_bytes()
    rows = file.metadata.num_rows
    words = f"{rows:,} rows take at least {needed / GIB:,.3g} GiB, {usable / GIB:,.3g} GiB are usable"
    if needed > usable:
        raise MemoryError(words)
    return words


def whole_table(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of an open file, and look at each value: text is UTF-8, codes have words."""
    needed = _memory_needed(file, columns)
    try:
        table = file.read(columns=None if columns is None else list(columns))
        table.validate(full=True)
    except MemoryError as error:
        raise MemoryError(f"{needed}; {error}") from None
    return table


def read_parquet(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of a file, as :func:`open_parquet` and :func:`whole_table` do."""
    with open_parquet(path) as file:
        return whole_table(file, columns)


def write_parquet(table: pa.Table, path: Path, **options: Any) -> None:
    """Write a table, its pages with checksums."""
    # a writer whose file fails tries again when it is collected, and prints that: this one writes to memory
    whole = pa.BufferOutputStream()
    pq.write_table(table, whole, **CHECKED_PAGES, **options)
    with open(path, "wb") as file:
        file.write(whole.getvalue())
