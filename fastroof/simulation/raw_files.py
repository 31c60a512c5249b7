"""Columns of a trace out of files: CSV, JSON lines, Parquet and Arrow, told apart by how they begin."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from fastroof.checks import shown
from fastroof.documents import parse_json
from fastroof.errors import TraceError
from fastroof.processors import usable_memory_bytes
from fastroof.simulation.raw_tables import arrow_column, raw_arrays, said_of_table
from fastroof.simulation.trace_columns import RawColumns
from fastroof.simulation.trace_formats import NamedColumns, named_columns
from fastroof.units import GIB

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["raw_file"]

Found = tuple[RawColumns, NamedColumns, dict[str, Any]]

_PARQUET: Final = b"PAR1"
_ARROW: Final = b"ARROW1"
_BOM: Final = b"\xef\xbb\xbf"
_LONGEST_HEADER: Final = 2**20
_PART: Final = 2**26


def raw_file(path: Path, format: str | None, *, needs_arrival: bool = True) -> Found:
    """Read a file's columns."""
    import pyarrow as pa

    what = f"trace {path}"
    # os.path answers False where Path.is_dir raises: a name longer than a file name may be
    if os.path.isdir(path):
        raise TraceError(f"{what} is a folder, need a file")
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            content = _whole(stream)
    except MemoryError:
        raise
    except (OSError, pa.ArrowException, ValueError) as error:
        number = getattr(error, "errno", None)
        reason = os.strerror(number) if number else str(error)
        raise TraceError(f"{what} cannot be read ({reason:.200})") from None
    start = content[:8]
    if not content:
        raise TraceError(f"{what} is empty")
    name = re.sub(r"\.(gz|zst|bz2|lz4)$", "", path.name).rpartition(".")[0] or path.name
    if start.startswith((_PARQUET, _ARROW)):
        table = _table(what, content, is_parquet=start.startswith(_PARQUET))
        raw, columns = raw_arrays(table, format, what=what, needs_arrival=needs_arrival)
        return raw, columns, {**said_of_table(table), "name": name}
    is_json = start.removeprefix(_BOM).lstrip().startswith((b"{", b"["))
    raw, columns = (_json_lines if is_json else _csv)(what, content, format, needs_arrival)
    return raw, columns, {"name": name}


def _whole(stream: Any) -> bytes:
    """All of a file; one that is compressed may be larger than it looks."""
    whole, usable = io.BytesIO(), usable_memory_bytes()
    while part := stream.read(_PART):
        if whole.tell() + len(part) > usable:
            raise MemoryError(f"over {usable / GIB:,.3g} GiB of it, which are usable")
        whole.write(part)
    return whole.getvalue()


def _table(what: str, content: bytes, *, is_parquet: bool) -> pa.Table:
    """Read all of a binary table: which columns are needed is told by their names."""
    import pyarrow as pa

    try:
        if not is_parquet:
            table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
            table.validate(full=True)
            return table
        from fastroof.parquet import open_parquet, whole_table

        return whole_table(open_parquet(content))
    except MemoryError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError) as error:
        kind = "Parquet" if is_parquet else "Arrow"
        raise TraceError(f"{what} is no whole {kind} file ({error!s:.200})") from None


def _csv(
    what: str, content: bytes, format: str | None, needs_arrival: bool
) -> tuple[RawColumns, NamedColumns]:
    import pyarrow as pa

    names = _csv_header(what, content)
    columns = named_columns(names, what, format, needs_arrival=needs_arrival)
    if columns.hash_ids:
        raise TraceError(f"{what}: CSV has no lists, such as {columns.hash_ids}: need JSON lines or Parquet")

    def row_words(row: int) -> str:
        # the header is the first line that is not blank, and blank ones are no rows
        written = [number for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
        return f"line {written[row + 1]}" if row + 1 < len(written) else f"row {row + 1}"

    sizes = (columns.input_tokens, columns.output_tokens, columns.cached_tokens)
    try:
        table = _parse_csv(content, columns, dict.fromkeys(filter(None, sizes), pa.int64()))
        is_text = False
    except MemoryError:
        raise
    except pa.ArrowException:
        # again, slowly: text can be told row by row where it is wrong
        try:
            table, is_text = _parse_csv(content, columns, {}, use_threads=False), True
        except MemoryError:
            raise
        except pa.ArrowException as error:
            if row := re.search(r"Row #([0-9]+): (.*)", str(error), re.DOTALL):
                words = row_words(int(row[1]) - 2)
                raise TraceError(f"{what}, {words}: {row[2].strip():.120}") from None
            raise TraceError(f"{what} is no CSV ({error!s:.200})") from None
    arrays = {name: table[name] for name in columns.needed}
    return RawColumns(what, arrays, row_words, is_text), columns


def _parse_csv(
    content: bytes, columns: NamedColumns, types: dict[str, Any], *, use_threads: bool = True
) -> pa.Table:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    needed = columns.needed
    return arrow_csv.read_csv(
        pa.BufferReader(content),
        read_options=arrow_csv.ReadOptions(use_threads=use_threads),
        convert_options=arrow_csv.ConvertOptions(
            include_columns=needed, column_types={**dict.fromkeys(needed, pa.string()), **types}
        ),
    )


def _csv_header(what: str, content: bytes) -> list[str]:
    head = content[:_LONGEST_HEADER].removeprefix(_BOM)
    header = next((line for line in head.splitlines() if line.strip()), b"")
    try:
        names = next(csv.reader([header.decode()]), [])
    except (UnicodeDecodeError, csv.Error):
        names = []
    if not names:
        raise TraceError(f"{what} has no header: CSV begins with the names of its columns")
    return names


def _json_lines(
    what: str, content: bytes, format: str | None, needs_arrival: bool
) -> tuple[RawColumns, NamedColumns]:
    # pyarrow's reader ends the process on lists nested a hundred thousand deep (26.0.1), and Python's json
    # says what is wrong, and where
    numbers: list[int] = []
    values: dict[str, list[Any]] = {}
    columns: NamedColumns | None = None
    quoted: list[bytes] = []
    for number, line in _lines(content):
        if not line.strip():
            continue
        place = f"{what}, line {number}"
        row = _json_row(place, line.removeprefix(_BOM) if number == 1 else line)
        if columns is None:
            columns = named_columns(list(row), what, format, needs_arrival=needs_arrival)
            values = {name: [] for name in columns.needed}
            quoted = [json.dumps(name).encode() for name in columns.needed]
        if any(line.count(name) > 1 for name in quoted):
            _refuse_repeated(place, line)
        for name, column in values.items():
            if name not in row:
                raise TraceError(f"{place}: {name} is missing")
            column.append(row[name])
        numbers.append(number)
    if columns is None:
        raise TraceError(f"{what} is empty")

    def row_words(row: int) -> str:
        return f"line {numbers[row]}"

    arrays = {}
    for name, column in values.items():
        try:
            arrays[name] = arrow_column(what, name, column)
        except TraceError:
            row_index, found = _odd_one(what, name, column)
            raise TraceError(f"{what}, {row_words(row_index)}: {name} cannot be {shown(found)}") from None
    return RawColumns(what, arrays, row_words), columns


def _json_row(place: str, line: bytes) -> dict[str, Any]:
    row = parse_json(line, place, TraceError)
    if not isinstance(row, dict):
        raise TraceError(f"{place}: need JSON lines, one object a line, got {type(row).__name__}")
    return row


def _refuse_repeated(place: str, line: bytes) -> None:
    """Refuse a line that says one thing twice; a name may well be a value too."""
    names = parse_json(line, place, TraceError, pairs=lambda pairs: [name for name, _ in pairs])
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{place}: {shown(twice)} is there twice")


def _odd_one(what: str, name: str, column: list[Any]) -> tuple[int, Any]:
    """Return the first value that makes no column with those before it: by halves."""
    good, bad = 0, len(column)
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            arrow_column(what, name, column[:middle])
            good = middle
        except TraceError:
            bad = middle
    return good, column[good]


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield lines and their numbers, from 1; the last may have no end."""
    yield from enumerate(io.BytesIO(content), start=1)
