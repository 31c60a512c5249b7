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

from fastroof.checks import one_line
from fastroof.host import usable_memory_bytes
from fastroof.units import GIB

CHECKED_PAGES: Final[dict[str, Any]] = {"write_page_checksum": True}
"""Options of every Parquet writer: pages carry checksums."""

PARQUET_ERRORS: Final = (pa.ArrowException, OSError, ValueError, TypeError, LookupError, MemoryError)
"""Errors of opening or reading a damaged or foreign file; invalid UTF-8 is a ValueError."""


def open_parquet(file: str | Path | bytes) -> pq.ParquetFile:
    """Open a Parquet file and verify the checksum of each page that is read."""
    source = pa.BufferReader(file) if isinstance(file, bytes) else file
    opened = pq.ParquetFile(source, page_checksum_verification=True)
    try:
        _check_row_counts(opened.metadata)
    except BaseException:
        opened.close()
        raise
    return opened


def open_words(content: bytes) -> pq.ParquetFile:
    """Open a Parquet file as :func:`open_parquet` does, but columns of text come as codes of their words."""
    opened = open_parquet(content)
    words = [field.name for field in opened.schema_arrow if pa.types.is_string(field.type)]
    return pq.ParquetFile(
        pa.BufferReader(content),
        metadata=opened.metadata,
        page_checksum_verification=True,
        read_dictionary=words,
    )


def _check_row_counts(metadata: pq.FileMetaData) -> None:
    """Reject a footer with inconsistent row counts: it has no checksum, and rows would be lost silently."""
    rows = sum(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise pa.ArrowInvalid(f"its footer counts {metadata.num_rows} rows, its row groups {rows}")


def fault_of(error: BaseException) -> str:
    """Describe why reading a file failed: it is damaged, or larger than the memory."""
    if isinstance(error, MemoryError):
        return f"needs more memory than is available ({one_line(error)})"
    return f"is damaged ({one_line(error)})"


def _least_bytes(file: pq.ParquetFile, columns: Sequence[str] | None) -> int:
    """Return a lower bound of the bytes that columns take in memory, from the file's own metadata."""
    bits = 0
    for field in file.schema_arrow:
        if columns is None or field.name in columns:
            try:
                bits += field.type.bit_width
            except ValueError:  # text and lists have no fixed width
                bits += 32
    return int(file.metadata.num_rows) * bits // 8


def _memory_needed(file: pq.ParquetFile, columns: Sequence[str] | None) -> str:
    """Describe the memory that columns need; raise if it is not available, before the system kills us."""
    needed, usable = _least_bytes(file, columns), usable_memory_bytes()
    rows = file.metadata.num_rows
    text = f"{rows:,} rows take at least {needed / GIB:,.3g} GiB, {usable / GIB:,.3g} GiB are usable"
    if needed > usable:
        raise MemoryError(text)
    return text


def whole_table(file: pq.ParquetFile, columns: Sequence[str] | None = None) -> pa.Table:
    """Read columns of an open file and validate every value, such as UTF-8 text and dictionary codes."""
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
    """Write a table to a Parquet file with page checksums."""
    # a writer whose file fails retries on garbage collection and prints an error: this one writes to memory
    whole = pa.BufferOutputStream()
    pq.write_table(table, whole, **CHECKED_PAGES, **options)
    with open(path, "wb") as file:
        file.write(whole.getvalue())
