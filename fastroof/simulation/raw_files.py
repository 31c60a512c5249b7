"""Read the columns of a trace from CSV, JSON lines, Parquet or Arrow, detected by a file's first bytes."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from fastroof.checks import is_number, is_whole_number, shown
from fastroof.documents import parse_json
from fastroof.errors import TraceError
from fastroof.processors import usable_memory_bytes
from fastroof.simulation.trace import HASH_IDS
from fastroof.simulation.trace_columns import RawColumns
from fastroof.units import GIB, MS_PER_S, US_PER_S

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class TraceFormat:
    """Column names of a trace format by role, in the form of :func:`column_key`."""

    name: str
    arrivals: Mapping[str, float | None]
    """Columns of arrivals, and how many of their unit are a second; None if they must be dates."""
    input_tokens: tuple[str, ...]
    output_tokens: tuple[str, ...]
    cached_tokens: tuple[str, ...] = ()
    hash_ids: tuple[str, ...] = ()
    leaves_out_empty: bool = True
    """Whether rows without prompt or output are failed requests, which are counted and left out."""

    def has(self, keys: Iterable[str]) -> bool:
        """Whether columns have every required role of the format."""
        known = set(keys)
        roles = (self.arrivals, self.input_tokens, self.output_tokens)
        return all(any(name in known for name in role) for role in roles)


AZURE: Final = TraceFormat("azure", {"timestamp": None}, ("contexttokens",), ("generatedtokens",))
"""Azure LLM inference traces of 2023 and 2024 (github.com/Azure/AzurePublicDataset)."""

MOONCAKE: Final = TraceFormat(
    "mooncake",
    {"timestamp": MS_PER_S},
    ("input_length",),
    ("output_length",),
    hash_ids=(HASH_IDS,),
)
"""Mooncake (github.com/kvcache-ai/Mooncake, FAST25-release/traces): milliseconds, and ids of blocks."""

BURSTGPT: Final = TraceFormat("burstgpt", {"timestamp": 1.0}, ("request_tokens",), ("response_tokens",))
"""BurstGPT (github.com/HPMLL/BurstGPT): seconds; requests that failed have 0 response tokens."""

PLAIN: Final = TraceFormat(
    "plain",
    {
        "arrival_s": 1.0,
        "arrival_time_s": 1.0,
        "timestamp_s": 1.0,
        "arrived_at": 1.0,
        "arrival_ms": MS_PER_S,
        "arrival_time_ms": MS_PER_S,
        "timestamp_ms": MS_PER_S,
        "arrival_us": US_PER_S,
        "arrival_time_us": US_PER_S,
        "timestamp_us": US_PER_S,
        "arrival": None,
        "arrival_time": None,
        "timestamp": None,
        "datetime": None,
        "time": None,
    },
    (
        "input_tokens",
        "input_length",
        "input_len",
        "prompt_tokens",
        "prompt_len",
        "num_prompt_tokens",
        "num_prefill_tokens",
        "context_tokens",
        "isl",
    ),
    (
        "output_tokens",
        "output_length",
        "output_len",
        "completion_tokens",
        "generated_tokens",
        "num_output_tokens",
        "num_decode_tokens",
        "osl",
    ),
    ("cached_tokens", "num_cached_tokens"),
    (HASH_IDS,),
    leaves_out_empty=False,
)
"""Any other table: the columns of :data:`TRACE_COLUMNS`, or common other names."""

FORMATS: Final = {one.name: one for one in (AZURE, MOONCAKE, BURSTGPT, PLAIN)}
"""Formats by name, in order of detection."""


class NamedColumns(NamedTuple):
    """The columns of a file by role, with the file's names; empty without such a column."""

    format: TraceFormat
    arrival: str
    per_s: float | None
    input_tokens: str
    output_tokens: str
    cached_tokens: str
    hash_ids: str

    @property
    def needed(self) -> list[str]:
        """All columns to read."""
        roles = (self.arrival, self.input_tokens, self.output_tokens, self.cached_tokens, self.hash_ids)
        return [name for name in roles if name]


def column_key(name: str) -> str:
    """Normalize a column's name: lower-case letters and digits, with _ for everything else."""
    return re.sub(r"[^a-z0-9]+", "_", name.strip().lower()).strip("_")


def trace_format(name: str | None, columns: Iterable[str], what: str) -> TraceFormat:
    """Return the format by name or, by default, by its columns."""
    if name is None:
        keys = [column_key(column) for column in columns]
        return next((one for one in FORMATS.values() if one.has(keys)), PLAIN)
    if not isinstance(name, str) or name not in FORMATS:
        raise TraceError(f"{what}: format must be one of {', '.join(FORMATS)}, got {shown(name)}")
    return FORMATS[name]


def named_columns(
    columns: list[str], what: str, format: str | None = None, *, needs_arrival: bool = True
) -> NamedColumns:
    """Assign roles to columns."""
    meant = trace_format(format, columns, what)

    def found(role: str, names: Iterable[str], is_needed: bool) -> str:
        names = list(names)
        there = [column for column in columns if column_key(column) in names]
        # fastroof's own name takes precedence
        own = [column for column in there if column_key(column) == names[0]]
        there = own if own else there
        if len(there) > 1:
            raise TraceError(f"{what}: columns {' and '.join(map(repr, there))} all have {role}: keep one")
        if not there and is_needed:
            listed = ", ".join(repr(column)[:40] for column in columns[:12]) or "none"
            raise TraceError(
                f"{what} has no column of {role}: in {meant.name} traces it is {' or '.join(names[:5])}; "
                f"its columns are {listed}"
            )
        return there[0] if there else ""

    arrival = found("arrivals", meant.arrivals, needs_arrival)
    return NamedColumns(
        meant,
        arrival,
        meant.arrivals[column_key(arrival)] if arrival else None,
        found("prompts' tokens", meant.input_tokens, True),
        found("answers' tokens", meant.output_tokens, True),
        found("cached tokens", meant.cached_tokens, False) if meant.cached_tokens else "",
        found("ids of blocks", meant.hash_ids, False) if meant.hash_ids else "",
    )


def raw_table(source: Any) -> pa.Table:
    """Convert an Arrow source to a table."""
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
    """Return the columns of arrays or of a table, and their roles."""
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
        raise TraceError(f"{what}: {name} must be a column of numbers, got {type(values).__name__}")
    if isinstance(values, list | tuple) and np.bool_ in set(map(type, values)):
        raise TraceError(f"{what}: {name} must be a column of numbers, got bools")
    try:
        # Arrow infers a common type of integers and floats only for lists
        if isinstance(values, np.ndarray) and not values.dtype.isnative:
            # Arrow does not read the other byte order
            values = values.astype(values.dtype.newbyteorder("="))
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)
        return array if isinstance(array, pa.ChunkedArray) else pa.chunked_array([array])
    except MemoryError:
        raise
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise TraceError(f"{what}: {name} must be a column of numbers ({error!s:.200})") from None


def table_metadata(table: pa.Table) -> dict[str, Any]:
    """Return the metadata of a table made by :meth:`Trace.table`."""
    metadata = table.schema.metadata or {}
    facts: dict[str, Any] = {"name": _text(metadata.get(b"name")) or "table"}
    clients, think_s = _number(metadata.get(b"clients")), _number(metadata.get(b"think_s"))
    if is_whole_number(clients):
        facts["clients"] = clients
        if is_number(think_s) and think_s >= 0:
            facts["think_s"] = float(think_s)
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
_BOM: Final = b"\xef\xbb\xbf"
_LONGEST_HEADER: Final = 2**20
_PART: Final = 2**26


def raw_file(path: Path, format: str | None, *, needs_arrival: bool = True) -> Found:
    """Read a file's columns."""
    import pyarrow as pa

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
        raw, columns = raw_arrays(table, format, what=what, needs_arrival=needs_arrival)
        return raw, columns, {**table_metadata(table), "name": name}
    is_json = start.removeprefix(_BOM).lstrip().startswith((b"{", b"["))
    raw, columns = (_json_lines if is_json else _csv)(what, content, format, needs_arrival)
    return raw, columns, {"name": name}


def _read_all(stream: Any) -> bytes:
    """Read all of a file; a compressed one may be larger than it looks."""
    whole, usable = io.BytesIO(), usable_memory_bytes()
    while part := stream.read(_PART):
        if whole.tell() + len(part) > usable:
            raise MemoryError(f"over the {usable / GIB:,.3g} GiB that are usable")
        whole.write(part)
    return whole.getvalue()


def _table(what: str, content: bytes, *, is_parquet: bool) -> pa.Table:
    """Read a binary table with all of its columns."""
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
        raise TraceError(f"{what} is not a complete {kind} file ({error!s:.200})") from None


def _csv(
    what: str, content: bytes, format: str | None, needs_arrival: bool
) -> tuple[RawColumns, NamedColumns]:
    import pyarrow as pa

    names = _csv_header(what, content)
    columns = named_columns(names, what, format, needs_arrival=needs_arrival)
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
        table = _parse_csv(content, columns, dict.fromkeys(filter(None, sizes), pa.int64()))
        is_text = False
    except MemoryError:
        raise
    except pa.ArrowException:
        # again, slowly, as text: this finds the invalid row
        try:
            table, is_text = _parse_csv(content, columns, {}, use_threads=False), True
        except MemoryError:
            raise
        except pa.ArrowException as error:
            if row := re.search(r"Row #([0-9]+): (.*)", str(error), re.DOTALL):
                label = row_label(int(row[1]) - 2)
                raise TraceError(f"{what}, {label}: {row[2].strip():.120}") from None
            raise TraceError(f"{what} is not a CSV file ({error!s:.200})") from None
    arrays = {name: table[name] for name in columns.needed}
    return RawColumns(what, arrays, row_label, is_text), columns


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
        raise TraceError(f"{what} has no header: CSV must start with the names of its columns")
    return names


def _json_lines(
    what: str, content: bytes, format: str | None, needs_arrival: bool
) -> tuple[RawColumns, NamedColumns]:
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

    def row_label(row: int) -> str:
        return f"line {numbers[row]}"

    arrays = {}
    for name, column in values.items():
        try:
            arrays[name] = arrow_column(what, name, column)
        except TraceError:
            row_index, found = _odd_one(what, name, column)
            raise TraceError(f"{what}, {row_label(row_index)}: {name} cannot be {shown(found)}") from None
    return RawColumns(what, arrays, row_label), columns


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


def _odd_one(what: str, name: str, column: list[Any]) -> tuple[int, Any]:
    """Find, by bisection, the first value that does not fit in a column with those before it."""
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
    """Yield lines and their numbers from 1; the last may lack a line end."""
    yield from enumerate(io.BytesIO(content), start=1)
