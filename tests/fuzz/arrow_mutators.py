"""Ways to mutate a table of Arrow: types, cells and columns; and tables as bytes of files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

NUMBERS: tuple[Any, ...] = (
    None, 0, -1, 1, 2, 2**31, 2**53 + 1, 2**63 - 1, 0.5, -0.0, 1e-320, 1e300, 1e308, -1e308, float("nan"),
    float("inf"),
)  # fmt: skip
TEXTS = (None, "", "x", " bf16 ", "BF16", "fp8", "a\0b", "日本", "x" * 3000, "1", "nan", "\n", '"', ",")
TYPES: tuple[pa.DataType, ...] = (
    pa.int8(), pa.int32(), pa.uint64(), pa.int64(), pa.float16(), pa.float32(), pa.float64(), pa.string(),
    pa.large_string(), pa.binary(), pa.bool_(), pa.timestamp("ns"), pa.duration("s"), pa.decimal128(38, 3),
    pa.date32(), pa.list_(pa.int64()), pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(),
    pa.int64()), pa.null(), pa.string_view(), pa.decimal256(60, 0),
)  # fmt: skip
NAMES = ("", "x", "m", "dtype", "latency_us", "kv_len", "rows", "a" * 1000, "LATENCY_US", " m", "m ", "note")


def mutated_table(table: pa.Table, random: Random, others: Sequence[pa.Table] = ()) -> pa.Table:
    """Mutate a table once to three times."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        if not table.num_columns:
            break
        at = random.randrange(table.num_columns)
        field, column = table.schema.field(at), table.column(at)
        try:
            match random.randrange(12):
                case 0 | 1 | 2:
                    cells = column.to_pylist()
                    if cells:
                        is_text = pa.types.is_string(column.type)
                        cells[random.randrange(len(cells))] = random.choice(TEXTS if is_text else NUMBERS)
                    table = table.set_column(at, field.name, pa.array(cells))
                case 3:
                    wanted = random.choice(TYPES)
                    cast = (
                        column.cast(wanted, safe=False)
                        if random.random() < 0.7
                        else pa.nulls(len(column), wanted)
                    )
                    table = table.set_column(at, field.name, cast)
                case 4:
                    table = table.remove_column(at)
                case 5:
                    names = table.column_names
                    names[at] = random.choice((*NAMES, *names))
                    table = table.rename_columns(names)
                case 6:
                    table = table.append_column(field.name, column)
                case 7:
                    table = table.slice(0, random.choice((0, 1, table.num_rows // 2)))
                case 8:
                    table = pa.concat_tables([table, table.slice(0, random.randrange(1, 6))])
                case 9:
                    table = table.set_column(at, field.name, _odd_text(table.num_rows))
                case 10 if others:
                    other = random.choice(others)
                    other_at = random.randrange(other.num_columns)
                    cells = (other.column(other_at).to_pylist() * (table.num_rows + 1))[: table.num_rows]
                    table = table.append_column(other.column_names[other_at], pa.array(cells))
                case _:
                    table = table.set_column(at, field.name, column.combine_chunks().dictionary_encode())
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            continue  # Arrow does not make such a table
    return table


def _odd_text(count: int) -> pa.Array:
    """Text that is not UTF-8, which Arrow takes from whoever lays it out."""
    offsets = pa.array(range(0, 2 * count + 1, 2), pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), count, [None, offsets, pa.py_buffer(b"\xff\xfe" * count)])


def parquet_bytes(table: pa.Table, random: Random) -> bytes:
    """Write a table as Parquet, in one of its ways."""
    file = io.BytesIO()
    pa.parquet.write_table(
        table,
        file,
        compression=random.choice(("none", "zstd", "snappy")),
        use_dictionary=random.random() < 0.5,
        row_group_size=random.choice((None, 1, 7)),
        store_schema=random.random() < 0.7,
    )
    return file.getvalue()


def csv_bytes(table: pa.Table) -> bytes:
    file = io.BytesIO()
    pa.csv.write_csv(table, file)
    return file.getvalue()


def stream_bytes(table: pa.Table, random: Random) -> bytes:
    """Write a table as a file of Arrow, or a stream."""
    file = io.BytesIO()
    make = pa.ipc.new_file if random.random() < 0.7 else pa.ipc.new_stream
    with make(file, table.schema) as writer:
        writer.write_table(table)
    return file.getvalue()
