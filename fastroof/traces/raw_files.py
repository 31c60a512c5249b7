"""Read the columns of a trace from CSV, JSON lines, Parquet or Arrow, detected by a file's first bytes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyarrow import csv as arrow_csv

from fastroof.checks import is_number, is_whole_number, one_line, shown
from fastroof.documents import parse_json
from fastroof.errors import TraceError
from fastroof.given_arrays import is_masked
from fastroof.host import usable_memory_bytes
from fastroof.parquet import open_parquet, whole_table
from fastroof.traces import trace_agentx
from fastroof.traces.trace import HASH_IDS, MOST_SECONDS
from fastroof.traces.trace_agentx import BOM, MARK, agent_rows
from fastroof.traces.trace_columns import RawColumns, first_failing
from fastroof.traces.trace_formats import SESSION_NAMES, NamedColumns, Reading, aiperf_row, named_columns
from fastroof.units import GIB


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    """Turn Arrow's errors into a TraceError, except those of memory."""
    try:
        yield
    except MemoryError:
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError, OSError) as error:
        raise TraceError(f"{message} ({one_line(error)})") from None


def raw_table(source: Any) -> pa.Table:
    """Convert an Arrow source to a table."""
    with _refusing("the table cannot be read"):
        return pa.table(source)


def raw_arrays(
    source: Mapping[str, Any] | pa.Table, reading: Reading, *, what: str = "the arrays"
) -> tuple[RawColumns, NamedColumns]:
    """Return the columns of arrays or of a table, and their roles."""
    if isinstance(source, Mapping):
        given: Any = {str(name): values for name, values in source.items()}
        names = list(given)
    else:
        given, names = source, source.column_names
    columns = named_columns(names, what, reading)
    arrays = {name: arrow_column(what, name, given[name]) for name in columns.needed}
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise TraceError(f"{what} must have one length, got {listed}")
    return RawColumns(what, arrays, lambda row: f"row {row}"), columns


def arrow_column(what: str, name: str, values: Any) -> pa.ChunkedArray:
    """Return values as one column of Arrow."""
    if isinstance(values, bytes | bytearray | memoryview) or is_masked(type(values)):
        raise TraceError(f"{what}: {name} must be a column of numbers, got {type(values).__name__}")
    if isinstance(values, list | tuple) and np.bool_ in set(map(type, values)):
        raise TraceError(f"{what}: {name} must be a column of numbers, got bools")
    with _refusing(f"{what}: {name} must be a column of numbers"):
        # Arrow infers a common type of integers and floats only for lists
        if isinstance(values, np.ndarray) and not values.dtype.isnative:
            # Arrow does not read the other byte order
            values = values.astype(values.dtype.newbyteorder("="))
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])


def table_metadata(table: pa.Table) -> dict[str, Any]:
    """Return the metadata of a table made by :meth:`Trace.table`."""
    metadata = table.schema.metadata or {}
    facts: dict[str, Any] = {"name": _text(metadata.get(b"name")) or "table"}
    clients, think_s = _number(metadata.get(b"clients")), _number(metadata.get(b"think_s"))
    if is_whole_number(clients):
        facts["clients"] = clients
        if is_number(think_s) and think_s >= 0:
            facts["think_s"] = float(think_s)
    period_s = _number(metadata.get(b"period_s"))
    if is_number(period_s) and 0 <= period_s <= MOST_SECONDS:
        facts["period_s"] = float(period_s)
    if HASH_IDS in table.column_names:
        size = _number((table.schema.field(HASH_IDS).metadata or {}).get(b"hash_block_size"))
        if is_whole_number(size):
            facts["hash_block_size"] = size
    return facts


def _text(value: bytes | None) -> str:
    return (value or b"").decode(errors="replace")


def _number(value: bytes | None) -> Any:
    """Parse bytes as a number, None if they are not one."""
    for read in (int, float):
        try:
            return read(_text(value))
        except ValueError:
            continue
    return None


Found = tuple[RawColumns, NamedColumns, dict[str, Any]]

_PARQUET: Final = b"PAR1"
_ARROW: Final = b"ARROW1"
_LONGEST_HEADER: Final = 2**20
_DELIMITERS: Final = (",", ";", "\t", "|")
_PART: Final = 2**26


def raw_file(path: Path, reading: Reading) -> Found:
    """Read a file's columns."""
    what = f"trace {path}"
    # os.path.isdir returns False where Path.is_dir raises: for names that are too long
    if os.path.isdir(path):
        raise TraceError(f"{what} is a folder; give a file")
    try:
        with pa.input_stream(str(path), compression="detect") as stream:
            content = _read_all(stream)
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
        raw, columns = raw_arrays(table, reading, what=what)
        return raw, columns, {**table_metadata(table), "name": name}
    is_json = start.removeprefix(BOM).lstrip().startswith((b"{", b"["))
    if is_json and MARK in content:
        rows = agent_rows(what, content, reading)
        arrays = {column: arrow_column(what, column, values) for column, values in rows.values.items()}
        facts = {"hash_block_size": rows.block_size, "name": name}
        return RawColumns(what, arrays, lambda row: rows.labels[row]), trace_agentx.COLUMNS, facts
    raw, columns = (_json_lines if is_json else _csv)(what, content, reading)
    return raw, columns, {"name": name}


def _read_all(stream: Any) -> bytes:
    """Read all of a file; a compressed one may be larger than it looks."""
    buffer, usable = io.BytesIO(), usable_memory_bytes()
    while part := stream.read(_PART):
        if buffer.tell() + len(part) > usable:
            raise MemoryError(f"over the {usable / GIB:,.3g} GiB that are usable")
        buffer.write(part)
    return buffer.getvalue()


def _table(what: str, content: bytes, *, is_parquet: bool) -> pa.Table:
    """Read a binary table with all of its columns."""
    with _refusing(f"{what} is not a complete {'Parquet' if is_parquet else 'Arrow'} file"):
        if is_parquet:
            return whole_table(open_parquet(content))
        table = pa.ipc.open_file(pa.BufferReader(content)).read_all()
        table.validate(full=True)
        return table


def _csv(what: str, content: bytes, reading: Reading) -> tuple[RawColumns, NamedColumns]:
    columns, delimiter = _csv_columns(what, content, reading)
    if columns.hash_ids:
        raise TraceError(
            f"{what}: {columns.hash_ids} are lists, which CSV has not: use JSON lines or Parquet"
        )

    def row_label(row: int) -> str:
        # the header is the first non-blank line, and blank lines are not rows
        written = [number for number, line in enumerate(content.splitlines(), start=1) if line.strip()]
        return f"line {written[row + 1]}" if row + 1 < len(written) else f"row {row + 1}"

    sizes = (columns.input_tokens, columns.output_tokens, columns.cached_tokens)
    try:
        table = _parse_csv(content, columns, delimiter, dict.fromkeys(filter(None, sizes), pa.int64()))
        is_text = False
    except MemoryError:
        raise
    except pa.ArrowException:
        # again, slowly, as text: this finds the invalid row
        try:
            table, is_text = _parse_csv(content, columns, delimiter, {}, use_threads=False), True
        except MemoryError:
            raise
        except pa.ArrowException as error:
            if row := re.search(r"Row #([0-9]+): (.*)", str(error), re.DOTALL):
                label = row_label(int(row[1]) - 2)
                raise TraceError(f"{what}, {label}: {one_line(row[2], 120)}") from None
            raise TraceError(f"{what} is not a CSV file ({one_line(error)})") from None
    arrays = {name: table[name] for name in columns.needed}
    return RawColumns(what, arrays, row_label, is_text), columns


def _parse_csv(
    content: bytes, columns: NamedColumns, delimiter: str, types: dict[str, Any], *, use_threads: bool = True
) -> pa.Table:
    needed = columns.needed
    return arrow_csv.read_csv(
        pa.BufferReader(content),
        read_options=arrow_csv.ReadOptions(use_threads=use_threads),
        parse_options=arrow_csv.ParseOptions(delimiter=delimiter),
        convert_options=arrow_csv.ConvertOptions(
            include_columns=needed, column_types={**dict.fromkeys(needed, pa.string()), **types}
        ),
    )


def _csv_columns(what: str, content: bytes, reading: Reading) -> tuple[NamedColumns, str]:
    """Return the columns of a header, and the delimiter with which it has all that are needed."""
    head = content[:_LONGEST_HEADER].removeprefix(BOM)
    header = next((line for line in head.splitlines() if line.strip()), b"")
    names = {}
    for delimiter in _DELIMITERS:
        with suppress(UnicodeDecodeError, csv.Error):
            names[delimiter] = next(csv.reader([header.decode()], delimiter=delimiter), [])
    if not any(names.values()):
        raise TraceError(f"{what} has no header: CSV must start with the names of its columns")
    ranked = sorted(names, key=lambda one: -len(names[one]))
    for delimiter in ranked:
        with suppress(TraceError):
            return named_columns(names[delimiter], what, reading), delimiter
    return named_columns(names[ranked[0]], what, reading), ranked[0]


def _json_lines(what: str, content: bytes, reading: Reading) -> tuple[RawColumns, NamedColumns]:
    # pyarrow's reader (26.0.1) crashes on lists nested a hundred thousand deep, and Python's json reports
    # what is wrong, and where
    numbers: list[int] = []
    values: dict[str, list[Any]] = {}
    columns: NamedColumns | None = None
    quoted: list[bytes] = []
    for number, line in _lines(content):
        if not line.strip():
            continue
        place = f"{what}, line {number}"
        row = aiperf_row(_json_row(place, line.removeprefix(BOM) if number == 1 else line))
        if not row and b'"warmup"' in line:
            continue
        if columns is None:
            columns = _json_columns(what, content, row, reading)
            values = {name: [] for name in columns.needed}
            quoted = [json.dumps(name).encode() for name in columns.needed]
        if any(line.count(name) > 1 for name in quoted):
            _refuse_repeated(place, line)
        for name, column in values.items():
            column.append(row.get(name))
        numbers.append(number)
    if columns is None:
        raise TraceError(f"{what} is empty")

    def row_label(row: int) -> str:
        return f"line {numbers[row]}"

    arrays = {}
    for name, column in values.items():

        def convert(_: int, stop: int, name: str = name, column: list[Any] = column) -> Any:
            return arrow_column(what, name, column[:stop])

        try:
            arrays[name] = convert(0, len(column))
        except TraceError:
            # the first value that does not fit in a column with those before it
            odd = first_failing(len(column), convert)
            raise TraceError(f"{what}, {row_label(odd)}: {name} cannot be {shown(column[odd])}") from None
    return RawColumns(what, arrays, row_label), columns


def _json_columns(what: str, content: bytes, first: Mapping[str, Any], reading: Reading) -> NamedColumns:
    """Return the columns of the first row or, if it lacks some, as that of a failed request, of all rows.

    The first request of a session has no delay and no parent.
    """
    try:
        columns = named_columns(list(first), what, reading)
        is_whole = not any(json.dumps(name).encode() in content for name in SESSION_NAMES)
    except TraceError:
        is_whole = False
    if is_whole:
        return columns
    keys = dict.fromkeys(first)
    for number, line in _lines(content):
        if line.strip():
            keys |= dict.fromkeys(aiperf_row(_json_row(f"{what}, line {number}", line.removeprefix(BOM))))
    return named_columns(list(keys), what, reading)


def _json_row(place: str, line: bytes) -> dict[str, Any]:
    row = parse_json(line, place, TraceError)
    if not isinstance(row, dict):
        raise TraceError(f"{place}: JSON lines need one object per line, got {type(row).__name__}")
    return row


def _refuse_repeated(place: str, line: bytes) -> None:
    """Refuse a line with a repeated name; a name may also be a value."""
    names = parse_json(line, place, TraceError, pairs=lambda pairs: [name for name, _ in pairs])
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TraceError(f"{place}: {shown(twice)} is repeated")


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield lines and their numbers from 1; the last may lack a line end."""
    yield from enumerate(io.BytesIO(content), start=1)
