"""Write a source atomically: measured tables and their provenance, as one folder."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from fastroof.arrays import Array
from fastroof.atomic_files import whole_file, whole_folder, write_whole
from fastroof.columns import OPTIONAL_COLUMNS, Column
from fastroof.documents import read_toml
from fastroof.errors import TableError
from fastroof.load.measured import FILES, rows_sha256
from fastroof.load.rows import beyond_limits, need, word_codes
from fastroof.load.sources import PROVENANCE_FILE
from fastroof.operators.registry import OPERATORS, unknown_operator
from fastroof.parquet import write_parquet

Format = Literal["parquet", "csv"]

Codec = Literal["zstd", "brotli"]

LEVELS: Final[Mapping[Codec, int]] = {"zstd": 19, "brotli": 11}
"""Highest usual level of each codec. Brotli's files are 7 % smaller, take 8 times as long to write and 1.4
times as long to read: for shipped tables only."""

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ARROW_TYPES = {"int": pa.int64(), "float": pa.float64(), "text": pa.string()}


def write_source(
    folder: Path,
    tables: Mapping[str, Mapping[str, Array]],
    provenance: Mapping[str, Any],
    format: Format = "parquet",
    overwrite: bool = False,
    *,
    codec: Codec = "zstd",
    compression_level: int | None = None,
) -> Path:
    """Write one source in fastroof's own schema."""
    folder = Path(folder)
    if folder.exists() and not overwrite:
        raise TableError(f"{folder} exists; pass overwrite=True, or another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / PROVENANCE_FILE).is_file():
        raise TableError(f"{folder} has no {PROVENANCE_FILE}, so it is not a source and is not replaced")
    check_replaceable(folder)
    if not provenance.get("gpu"):
        raise TableError("provenance needs gpu, the folder name under bench_data")
    if format not in ("parquet", "csv"):
        raise TableError(f"format must be parquet or csv, got {format!r}")
    arrow = {operator: _arrow_table(operator, columns) for operator, columns in tables.items()}
    toml_text(provenance)  # raises before anything is written

    with whole_folder(folder) as unfinished:
        files = {}
        for operator, table in arrow.items():
            name = f"{operator}.{format}"
            files[name] = _write_table(unfinished / name, operator, table, codec, compression_level)
        write_whole(unfinished / PROVENANCE_FILE, toml_text({**provenance, FILES: files}))
    return folder


def write_imported_table(
    folder: Path, operator: str, columns: Mapping[str, Array], *, compression_level: int
) -> None:
    """Write one table of an existing source, and its hashes where provenance.toml has others."""
    name, provenance_file = f"{operator}.parquet", folder / PROVENANCE_FILE
    table = _arrow_table(operator, columns)
    with whole_file(folder / name) as unfinished:
        hashes = _write_table(unfinished, operator, table, "zstd", compression_level)
    provenance = read_toml(provenance_file, TableError)
    if provenance[FILES][name] != hashes:
        # another release of pyarrow writes other bytes
        provenance[FILES][name] = hashes
        write_whole(provenance_file, toml_text(provenance))
    # 20 to 35 MB less at the peak of a first step that converts several tables
    pa.default_memory_pool().release_unused()


def check_replaceable(folder: Path) -> None:
    """Raise TableError for a source whose folder has other files."""
    about = {
        PROVENANCE_FILE,
        *(f"{operator}.{suffix}" for operator in OPERATORS for suffix in get_args(Format)),
    }
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if name not in about:
            raise TableError(
                f"{folder} has {name!r}, which is not a table: move it away to replace the source"
            )


def sort_rows(operator: str, columns: Mapping[str, Array]) -> dict[str, Array]:
    """Sort rows by keys, then axes, then latency, as in written tables."""
    keys = [columns[c.name] for c in reversed(OPERATORS[operator].required)]
    order = np.lexsort([word_codes(key) if key.dtype == object else key for key in keys])
    return {name: np.asarray(values)[order] for name, values in columns.items()}


def _arrow_table(operator: str, columns: Mapping[str, Array]) -> pa.Table:
    """Sorted rows with columns in schema order."""
    schema = OPERATORS.get(operator)
    if schema is None:
        raise TableError(unknown_operator(operator))
    known = (*schema.required, *OPTIONAL_COLUMNS)
    missing = [c.name for c in schema.required if c.name not in columns]
    if missing:
        raise TableError(f"table {operator} lacks column {', '.join(missing)}")
    unknown = sorted(set(columns) - {c.name for c in known})
    if unknown:
        have = ", ".join(c.name for c in known)
        raise TableError(f"table {operator} has unknown column {', '.join(unknown)}; use {have}")
    lengths = {name: len(values) for name, values in columns.items()}
    rows = lengths["latency_us"]
    if rows == 0 or set(lengths.values()) != {rows}:
        raise TableError(f"table {operator} needs columns of one length above 0, got {lengths}")
    columns = sort_rows(operator, columns)
    fields, arrays = [], []
    for column in known:
        if column.name in columns:
            fields.append(pa.field(column.name, _ARROW_TYPES[column.kind], nullable=False))
            try:
                arrays.append(pa.array(columns[column.name], fields[-1].type))
            except (pa.ArrowException, TypeError) as error:
                raise TableError(
                    f"table {operator}, column {column.name}: need {column.kind}: {error}"
                ) from None
            if column.within is not None:
                _refuse_beyond_limits(operator, column, columns[column.name])
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def _refuse_beyond_limits(operator: str, column: Column, values: Array) -> None:
    """Raise TableError for values that could not be read again."""
    outside = beyond_limits(column, values)
    if outside.any():
        row = int(np.argmax(outside))
        raise TableError(
            f"table {operator}, row {row + 1}, column {column.name}: got {values[row]:g}, need {need(column)}"
        )


def _write_table(
    path: Path, operator: str, table: pa.Table, codec: Codec, compression_level: int | None
) -> dict[str, str]:
    """Write a file, and return its hashes."""
    if path.suffix == ".csv":
        pacsv.write_csv(table, path, pacsv.WriteOptions(quoting_style="needed"))
    else:
        _write_parquet(path, table, codec, compression_level)
    # not through file_access, which would record a file that no result depends on
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return {"sha256": sha256, "rows_sha256": rows_sha256(operator, columns)}


def _write_parquet(path: Path, table: pa.Table, codec: Codec, compression_level: int | None) -> None:
    floats = [f.name for f in table.schema if pa.types.is_floating(f.type)]
    # the smallest encoding is the same for both codecs, and Brotli takes long to try
    trial_level = LEVELS["zstd"] if compression_level is None else compression_level
    ways = {name: _smallest_encoding(table.column(name), trial_level) for name in floats}
    in_bytes = {name: way for name, way in ways.items() if way != _DICTIONARY}
    write_parquet(
        table,
        path,
        compression=codec,
        compression_level=LEVELS[codec] if compression_level is None else compression_level,
        # sorted sizes are long runs
        use_dictionary=[f.name for f in table.schema if f.name not in in_bytes],
        column_encoding=in_bytes or None,
        row_group_size=table.num_rows,
        write_statistics=True,
        store_schema=False,
    )


_DICTIONARY = "RLE_DICTIONARY"


def _smallest_encoding(column: pa.ChunkedArray, compression_level: int) -> str:
    """Smallest encoding of a column of latencies, by trying all."""
    sizes = {}
    for way in ("BYTE_STREAM_SPLIT", "PLAIN", _DICTIONARY):
        file = io.BytesIO()
        encoding = None if way == _DICTIONARY else {"x": way}
        pq.write_table(
            pa.table({"x": column}), file, compression="zstd", compression_level=compression_level,
            use_dictionary=way == _DICTIONARY, column_encoding=encoding, row_group_size=len(column),
        )  # fmt: skip
        sizes[way] = file.tell()
    return min(sizes, key=lambda way: sizes[way])


# -- TOML ----------------------------------------------------------------------------------------


def toml_text(values: Mapping[str, Any]) -> str:
    """Format a dict of str, int, float, bool, list and dict as TOML that reads back equal."""
    text = "\n".join(_toml_lines(values, ())).strip("\n") + "\n"
    return text if values else ""


def _toml_lines(values: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {k: v for k, v in values.items() if not isinstance(v, Mapping)}
    if path and (plain or not values):
        yield f"\n[{'.'.join(map(_toml_key, path))}]"
    for key, value in plain.items():
        yield f"{_toml_key(key)} = {_toml_value(value, (*path, key))}"
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _toml_lines(value, (*path, key))


def _toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml_string(key)


def _toml_string(text: str) -> str:
    # JSON escapes what TOML requires, except DEL; lone surrogates are invalid text
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_value(value: Any, path: tuple[str, ...]) -> str:
    if isinstance(value, str):
        return _toml_string(value)
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, int | np.integer):
        return str(int(value))
    if isinstance(value, float | np.floating):
        return repr(float(value)) if math.isfinite(value) else str(float(value))
    if isinstance(value, Mapping):
        inside = (f"{_toml_key(k)} = {_toml_value(v, (*path, k))}" for k, v in value.items())
        return "{ " + ", ".join(inside) + " }"
    if isinstance(value, Sequence):
        return _toml_list(value, path)
    raise TableError(
        f"provenance {'.'.join(path)} must be str, int, float, bool, list or dict, got {value!r}"
    )


def _toml_list(values: Sequence[Any], path: tuple[str, ...]) -> str:
    cells = [_toml_value(v, path) for v in values]
    line = f"[{', '.join(cells)}]"
    if len(line) <= 90:
        return line
    return "[\n" + "".join(f"  {cell},\n" for cell in cells) + "]"
