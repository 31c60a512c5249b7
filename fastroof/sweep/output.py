"""A sweep's results as a file: Parquet or CSV, whole or not at all."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from fastroof.columns import SWEEP_COLUMNS, Column
from fastroof.errors import SweepError
from fastroof.results import arrow_schema

__all__ = ["ResultFile", "result_columns", "result_schema"]

_FORMATS: Final = (".parquet", ".csv")


def result_columns(keep: Literal["best", "all"]) -> tuple[Column, ...]:
    """Columns of a results file: ``limited_by`` is there for the best steps, ``exceeds`` for all of them."""
    left_out = "exceeds" if keep == "best" else "limited_by"
    return tuple(c for c in SWEEP_COLUMNS if c.name != left_out)


def result_schema(keep: Literal["best", "all"], metadata: Mapping[str, str]) -> pa.Schema:
    """Arrow schema of a results file: every field has its unit and meaning, the file its metadata."""
    return arrow_schema(result_columns(keep), dict(metadata))


class ResultFile:
    """A results file that is being written.

    A context manager: rows go to a hidden file beside ``path``, which takes the name ``path`` when the
    block ends, and is removed when the block raises. A reader never sees half a file.

    Parameters
    ----------
    path : Path
        Ends in .parquet or .csv; a file of that name is replaced at the end.
    schema : pyarrow.Schema
        Of the rows. CSV keeps the column names only.

    Raises
    ------
    SweepError
        If the file cannot be written, at the start or, from :meth:`write` or the block's end, later.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        if path.suffix not in _FORMATS:
            raise SweepError(f"output {path} must end in {' or '.join(_FORMATS)}")
        # os.path answers False where Path.is_dir raises: a name longer than a file name may be
        if os.path.isdir(path):
            raise SweepError(
                f"output {path} is a folder, need a file's name, like {path / 'results.parquet'}"
            )
        self.path = path
        self.schema = schema
        self.num_rows = 0
        self._building = path.parent / f".{path.name}.{uuid.uuid4().hex}"
        self._writer: Any = None

    def __enter__(self) -> Self:
        try:
            if self.path.suffix == ".csv":
                options = pacsv.WriteOptions(quoting_style="needed")
                self._writer = pacsv.CSVWriter(self._building, self.schema, write_options=options)
            else:
                self._writer = pq.ParquetWriter(self._building, self.schema, compression="zstd")
        except OSError as error:
            self._remove()
            raise self._failed(error) from None
        return self

    def write(self, rows: Sequence[pa.RecordBatch]) -> None:
        """Append rows of the schema, as one row group."""
        table = pa.Table.from_batches(rows, self.schema)
        try:
            self._writer.write_table(table, max(1, table.num_rows))
        except OSError as error:
            raise self._failed(error) from None
        self.num_rows += table.num_rows

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.close()
            if kind is None:
                os.replace(self._building, self.path)
        except OSError as failure:
            if kind is None:
                raise self._failed(failure) from None
        finally:
            self._remove()

    def _remove(self) -> None:
        # a writer that failed to close would try again when it is collected
        if getattr(self._writer, "is_open", False):
            self._writer.is_open = False
        with contextlib.suppress(OSError):
            self._building.unlink()

    def _failed(self, error: OSError) -> SweepError:
        folder = self.path.parent
        if not os.path.isdir(folder):
            return SweepError(f"output {self.path}: there is no folder {folder}; make it, or name another")
        reason = error.strerror or str(error)
        return SweepError(f"output {self.path} cannot be written ({reason}); nothing is left of it")
