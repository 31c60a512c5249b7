"""Read columns of one CSV or Parquet file, and reject invalid values."""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from fastroof.arrays import Array, Bools, Longs
from fastroof.checks import one_line
from fastroof.columns import Column
from fastroof.errors import TableError
from fastroof.file_access import is_file, read_bytes
from fastroof.operators.operator import Operator
from fastroof.parquet import PARQUET_ERRORS, fault_of, open_parquet, open_words, whole_table

ENDINGS = (".parquet", ".csv")
"""Suffixes of files that :func:`read_columns` reads."""

_PARQUET_MAGIC = b"PAR1"
_EXACT_INT = 2.0**53
MOST_INT: Final = 2**40 - 1
"""Largest value of an int column; packed tables end at 2^40."""


def read_columns(
    path: Path,
    columns: Sequence[Column],
    optional: Sequence[Column] = (),
    names: Sequence[str] | None = None,
    label: str | None = None,
    *,
    sha256: str = "",
) -> dict[str, Array]:
    """Read and check the named columns of one table."""
    path = Path(path)
    label = label or str(path)
    content = _content(path, label, sha256)
    reader = _Reader(path, label, None if names is None else tuple(names), content)
    return reader.read(columns, optional)


def _content(path: Path, label: str, sha256: str) -> bytes:
    """All bytes of a file, checked against its hash."""
    if not is_file(path):
        raise TableError(f"{label}: no such file")
    if path.suffix not in ENDINGS:
        raise TableError(f"{label}: cannot read {path.suffix!r} files, only .csv and .parquet")
    try:
        content = read_bytes(path)
    except OSError as error:
        raise TableError(f"{label} cannot be read: {error.strerror or error}") from None
    if not content:
        raise TableError(f"{label}: the file is empty; need a header and at least one row")
    found = hashlib.sha256(content).hexdigest() if sha256 else sha256
    if found != sha256:
        raise TableError(
            f"{label}: SHA-256 {found:.12}.. differs from {sha256:.12}.. in provenance.toml: the file was "
            f"damaged or changed after it was written; copy it again, or remove "
            f'[files."{path.name}"] there if it was changed on purpose'
        )
    return content


class _Reader:
    """One file: its name in errors, and the conversion of its cells to arrays."""

    def __init__(self, path: Path, label: str, names: tuple[str, ...] | None, content: bytes) -> None:
        self.path = path
        self.label = label
        self.names = names
        self.content = content

    def read(self, columns: Sequence[Column], optional: Sequence[Column]) -> dict[str, Array]:
        table = (self._csv if self.path.suffix == ".csv" else self._parquet)(columns, optional)
        if table.num_rows == 0:
            raise self._no_rows()
        present = [c for c in (*columns, *optional) if c.name in table.column_names]
        return {c.name: self._array(c, table.column(c.name).combine_chunks()) for c in present}

    # -- files to Arrow ------------------------------------------------------------------------

    def _no_rows(self) -> TableError:
        return TableError(f"{self.label}: the table has no rows; need at least one measured row")

    def _positions(
        self, header: Sequence[str], columns: Sequence[Column], optional: Sequence[Column]
    ) -> dict[str, int]:
        """Position of each column; missing or repeated ones are errors."""
        missing = [c.name for c in columns if c.name not in header]
        if missing:
            have = " ".join(", ".join(header).split()) or "none"
            raise TableError(f"{self.label}: missing column {', '.join(missing)}; the file has {have}")
        positions = {}
        for column in (*columns, *optional):
            count = header.count(column.name)
            if count > 1:
                raise TableError(f"{self.label}: column {column.name} occurs {count} times; keep one")
            if count:
                positions[column.name] = header.index(column.name)
        return positions

    def _csv(self, columns: Sequence[Column], optional: Sequence[Column]) -> pa.Table:
        header, skip = self._header()
        positions = self._positions(header, columns, optional)
        # read cells as text, so that errors can quote them
        labels = [str(i) for i in range(len(header))]
        picked = [str(i) for i in positions.values()]
        try:
            table = pacsv.read_csv(
                pa.BufferReader(self.content),
                read_options=pacsv.ReadOptions(column_names=labels, skip_rows=skip),
                convert_options=pacsv.ConvertOptions(
                    include_columns=picked,
                    column_types=dict.fromkeys(picked, pa.string()),
                    strings_can_be_null=False,
                ),
            )
        except pa.ArrowInvalid as error:
            if "Empty CSV file" in str(error):
                raise self._no_rows() from None
            self._raise_for_ragged_row(len(header))
            raise TableError(f"{self.label}: not a CSV file of UTF-8 text: {one_line(error)}") from error
        return table.rename_columns(list(positions))

    def _header(self) -> tuple[list[str], int]:
        """Column names, and the number of lines before the first row."""
        if self.names is not None:
            return list(self.names), 0
        try:
            lines = csv.reader(self._lines())
            for cells in lines:
                if cells:
                    return [cell.strip() for cell in cells], lines.line_num
        except (UnicodeDecodeError, csv.Error) as error:
            raise TableError(f"{self.label}: not a CSV file of UTF-8 text: {one_line(error)}") from error
        raise TableError(f"{self.label}: the file is empty; need a header and at least one row")

    def _lines(self, errors: str = "strict") -> io.TextIOWrapper:
        return io.TextIOWrapper(io.BytesIO(self.content), "utf-8-sig", errors, newline="")

    def _raise_for_ragged_row(self, width: int) -> None:
        lines = csv.reader(self._lines("replace"))
        rows = (cells for cells in lines if cells)
        if self.names is None:
            next(rows)
        for number, cells in enumerate(rows, 1):
            if len(cells) != width:
                raise TableError(
                    f"{self.label}, row {number} (line {lines.line_num}): "
                    f"found {len(cells)} cells, need {width}"
                )

    def _parquet(self, columns: Sequence[Column], optional: Sequence[Column]) -> pa.Table:
        if not self.content.startswith(_PARQUET_MAGIC):
            raise TableError(f"{self.label}: not a Parquet file; use the suffix .csv for a CSV file")
        if not self.content.endswith(_PARQUET_MAGIC):
            raise TableError(f"{self.label}: the Parquet file is truncated; copy or download it again")
        try:
            file = open_words(self.content)
            names = file.schema_arrow.names
        except PARQUET_ERRORS as error:
            raise self._damaged(error) from error
        positions = self._positions(names, columns, optional)
        try:
            return whole_table(file, list(positions))
        except PARQUET_ERRORS as error:
            raise self._damaged(error) from error

    def _damaged(self, error: BaseException) -> TableError:
        if isinstance(error, MemoryError):
            return TableError(f"{self.label}: the Parquet file {fault_of(error)}")
        return TableError(f"{self.label}: the Parquet file is damaged: {one_line(error)}")

    # -- Arrow to NumPy ------------------------------------------------------------------------

    def _array(self, column: Column, cells: pa.Array) -> Array:
        is_encoded = pa.types.is_dictionary(cells.type)
        if is_encoded and (column.kind != "text" or cells.dictionary.null_count):
            cells, is_encoded = cells.cast(cells.type.value_type), False
        if cells.null_count:
            self._refuse(column, cells, np.asarray(cells.is_null()))
        kind = cells.type.value_type if is_encoded else cells.type
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if column.kind == "text":
            if not text:
                self._refuse(column, cells, np.ones(len(cells), bool))
            encoded = cells if is_encoded else cells.dictionary_encode()
            words = np.array(_words(encoded.dictionary), dtype=object)
            codes = encoded.indices
            texts: Array = words[_flat(codes if codes.type in _FLAT_TYPES else codes.cast(pa.int64()))]
            if "" in words and (empty := texts == "").any():
                self._refuse(column, _trimmed(cells.cast(kind)), empty)
            return texts
        if text:
            cells = _trimmed(cells)
        if text and self.path.suffix != ".csv":
            self._refuse(column, cells, np.ones(len(cells), bool))
        values = self._numbers(column, cells)
        low = values < column.minimum if column.kind == "int" or column.minimum == 0 else values <= 0
        if column.kind == "int":
            low |= values > MOST_INT
        if column.within is not None:
            low |= beyond_limits(column, values)
        if low.any():
            self._refuse(column, cells, low)
        return values

    def _numbers(self, column: Column, cells: pa.Array) -> Array:
        if column.kind == "int":
            try:
                if cells.type == pa.int64():
                    return _flat(cells)
                if not pa.types.is_boolean(cells.type):
                    return _flat(cells.cast(pa.int64()))
            except pa.ArrowInvalid:
                pass
        number = pa.types.is_integer(cells.type) or pa.types.is_floating(cells.type)
        try:
            if not number and not pa.types.is_string(cells.type):
                self._refuse(column, cells, np.ones(len(cells), bool))
            values = _flat(cells if cells.type == pa.float64() else cells.cast(pa.float64()))
        except pa.ArrowInvalid:
            self._refuse(column, cells, np.array([not _is_number(cell) for cell in cells.to_pylist()]))
        wrong = ~np.isfinite(values)
        if column.kind == "int":
            wrong |= (values != np.floor(values)) | (np.abs(values) > _EXACT_INT)
        if wrong.any():
            self._refuse(column, cells, wrong)
        return values.astype(np.int64) if column.kind == "int" else values

    # -- refusals ------------------------------------------------------------------------------

    def _refuse(self, column: Column, cells: pa.Array, wrong: Bools) -> NoReturn:
        """Raise TableError for the first invalid cell."""
        row = int(np.argmax(wrong))
        cell = cells[row].as_py()
        got = "nothing" if cell is None or cell == "" else repr(cell)
        raise TableError(
            f"{self.label}, row {row + 1}{self._line_of(row)}, column {column.name}: "
            f"found {got}, need {need(column)}"
        )

    def _line_of(self, row: int) -> str:
        """Line number of a row in a CSV file, where empty lines are no rows."""
        if self.path.suffix != ".csv":
            return ""
        lines = csv.reader(self._lines())
        last = -1 if self.names is None else 0
        for cells in lines:
            last += bool(cells)
            if last == row + 1:
                break
        return f" (line {lines.line_num})"


def beyond_limits(column: Column, values: Array) -> Bools:
    """Values of a float column outside its limits."""
    least, most = column.within or (-np.inf, np.inf)
    outside: Bools = ~((least <= values) & (values <= most))
    return outside


def _is_number(cell: Any) -> bool:
    try:
        pa.scalar(cell).cast(pa.float64())
    except pa.ArrowInvalid:
        return False
    return True


def need(column: Column) -> str:
    """Description of a column's valid values."""
    unit = f" in {column.unit}" if column.unit else ""
    if column.kind == "text":
        return f"text ({column.meaning})"
    if column.kind == "int":
        return f"a whole number of at least {column.minimum}{unit} and below 2^40"
    if column.within is not None:
        least, most = column.within
        return f"a number from {least:g} to {most:g}{unit}"
    return f"a finite number {'of at least' if column.minimum == 0 else 'above'} 0{unit}"


def _words(dictionary: pa.Array) -> list[str]:
    """Distinct words, without whitespace around them."""
    words: list[str] = dictionary.to_pylist()
    if all(word.isascii() and word.isprintable() and word == word.strip() for word in words):
        return words
    return _trimmed(dictionary).to_pylist()  # type: ignore[no-any-return]


def _trimmed(cells: pa.Array) -> pa.Array:
    # imported here: it makes its functions in 40 ms, and words of shipped tables need no trimming
    import pyarrow.compute as pc

    return pc.utf8_trim_whitespace(cells)


_FLAT_TYPES: Final = {pa.int32(): np.int32, pa.int64(): np.int64, pa.float64(): np.float64}


def _flat(cells: pa.Array) -> Array:
    """NumPy view of Arrow numbers without nulls."""
    dtype = np.dtype(_FLAT_TYPES[cells.type])
    return np.frombuffer(cells.buffers()[1], dtype, len(cells), cells.offset * dtype.itemsize)


def count_rows(path: Path) -> int:
    """Number of rows of a table's file, without reading them from Parquet."""
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as file:
                return int(file.metadata.num_rows)
        return int(pacsv.read_csv(path).num_rows)
    except PARQUET_ERRORS as error:
        raise TableError(f"{path} cannot be read: {error!s:.200}") from None


def word_codes(words: Array) -> Longs:
    """Codes of a text column in alphabetical order."""
    # ten times as fast as np.unique, since a column has few distinct values
    listed = words.tolist()
    if not listed or listed.count(listed[0]) == len(listed):
        return np.zeros(len(listed), np.int64)
    code = {word: i for i, word in enumerate(sorted(set(listed)))}
    return np.fromiter(map(code.__getitem__, listed), np.int64, len(listed))


_AT_MOST: Final = (
    ("q_len", "kv_len", "kv_len counts the prefix and the new tokens"),
    ("topk", "num_experts", "a token goes to different experts"),
    ("num_experts", "num_slots", "every expert has a slot"),
    ("num_nodes", "num_gpus", "every node has a GPU"),
)
"""Sizes, their upper bounds, and the reason."""


class ImpossibleSizes(NamedTuple):
    """Rows that one rule rejects."""

    rows: Bools
    size: str
    largest: str
    why: str


def impossible_sizes(operator: Operator, columns: Mapping[str, Array]) -> Iterator[ImpossibleSizes]:
    """Yield rows with inconsistent sizes in two columns."""
    names = {column.name for column in (*operator.keys, *operator.axes)}
    for size, largest, why in _AT_MOST:
        if names.issuperset((size, largest)):
            rows = columns[size] > columns[largest]
            if rows.any():
                yield ImpossibleSizes(rows, size, largest, why)
