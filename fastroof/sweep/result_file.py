"""Writing of results: Parquet, CSV or JSON lines, atomically."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from fastroof.atomic_files import whole_file
from fastroof.columns import guarded_columns
from fastroof.errors import SweepError
from fastroof.parquet import CHECKED_PAGES
from fastroof.sweep.identity import _FORMATS, ROWS_A_GROUP


class _Writer(Protocol):
    """A writer of tables to one file."""

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        """Append rows."""

    def close(self) -> None:
        """Finish the file."""


class _JsonLines:
    """Writer of one JSON object per row; NaN becomes null."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        """Append rows."""
        for row in table.to_pylist():
            plain = {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in row.items()
            }
            self._file.write(json.dumps(plain, allow_nan=False) + "\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class _Csv:
    """Writer of CSV in which no text is read as a formula by spreadsheets."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = pacsv.CSVWriter(path, schema, write_options=pacsv.WriteOptions(quoting_style="needed"))

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        """Append rows."""
        self._file.write_table(guarded_columns(table), row_group_size)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class ResultFile:
    """A results file while it is written; it appears under its name only when complete."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        if path.suffix not in _FORMATS:
            raise SweepError(f"output {path} must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
        # os.path returns False where Path.is_dir raises: on names that are too long
        if os.path.isdir(path):
            raise SweepError(
                f"output {path} is a folder, need a file's name, like {path / 'results.parquet'}"
            )
        self.path = path
        self.schema = schema
        self.num_rows = 0
        self._held: list[pa.Table] = []
        self._whole = contextlib.ExitStack()
        self._unfinished = path
        self._writer: Any = None

    def __enter__(self) -> Self:
        try:
            self._unfinished = self._whole.enter_context(whole_file(self.path))
            self._writer = self._opened()
        except BaseException as error:
            self._drop(error)
            if isinstance(error, OSError):
                raise self._failed(error) from None
            raise
        return self

    def _opened(self) -> _Writer:
        if self.path.suffix == ".jsonl":
            return _JsonLines(self._unfinished)
        if self.path.suffix == ".csv":
            writer: _Writer = _Csv(self._unfinished, self.schema)
        else:
            writer = pq.ParquetWriter(self._unfinished, self.schema, compression="zstd", **CHECKED_PAGES)
        return writer

    def write(self, rows: Iterable[pa.RecordBatch]) -> None:
        """Append rows of the schema; they are written once a row group is full."""
        table = pa.Table.from_batches(list(rows), self.schema)
        self._held.append(table)
        self.num_rows += table.num_rows
        if sum(held.num_rows for held in self._held) >= ROWS_A_GROUP:
            self._write_held()

    def add_metadata(self, metadata: Mapping[str, str]) -> None:
        """Add metadata that is known only at the end of a Parquet file."""
        if self.path.suffix == ".parquet":
            self._writer.add_key_value_metadata(dict(metadata))

    def _write_held(self) -> None:
        held, self._held = self._held, []
        try:
            table = pa.concat_tables([self.schema.empty_table(), *held]).combine_chunks()
            self._writer.write_table(table, ROWS_A_GROUP)
        except OSError as error:
            raise self._failed(error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._write_held()
            self._writer.close()
            if kind is None:
                self._whole.close()
        except OSError as failure:
            if kind is None:
                raise self._failed(failure) from None
        finally:
            self._drop(error)

    def _drop(self, error: BaseException | None) -> None:
        """Remove an unfinished file."""
        # a writer that failed to close would retry on garbage collection
        if isinstance(self._writer, _JsonLines):
            with contextlib.suppress(OSError):
                self._writer.close()
        elif getattr(self._writer, "is_open", False):
            self._writer.is_open = False
        error = error or SweepError("not finished")
        self._whole.__exit__(type(error), error, error.__traceback__)

    def _failed(self, error: OSError) -> SweepError:
        folder = self.path.parent
        if not os.path.isdir(folder):
            return SweepError(
                f"output {self.path}: folder {folder} does not exist; create it or give another path"
            )
        reason = error.strerror or str(error)
        return SweepError(f"output {self.path} cannot be written ({reason}); no partial file is left")
