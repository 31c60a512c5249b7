"""What a results file says of its sweep, and what tells two sweeps apart."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from fastroof._version import __version__
from fastroof.atomic_files import whole_file
from fastroof.columns import guarded_columns
from fastroof.config import load_gpu
from fastroof.documents import parse_json
from fastroof.engines import load_engine
from fastroof.errors import SweepError
from fastroof.models import load_model
from fastroof.parquet import CHECKED_PAGES
from fastroof.sweep.kind import GpuTables, SweepKind, sources_hash, tables_hash

IDENTITY_KEYS: Final = (
    "fastroof.version",
    "fastroof.kind",
    "fastroof.spec",
    "fastroof.tables_hash",
    "fastroof.sources_hash",
    "fastroof.inputs_hash",
)
"""Metadata that are the same for all pieces of one sweep."""

_MEANT: Final = {
    "fastroof.version": "fastroof's version",
    "fastroof.kind": "kind of sweep",
    "fastroof.tables_hash": "the tables' hash",
    "fastroof.sources_hash": "hash of all sources of tables",
    "fastroof.inputs_hash": "hash of the models, GPUs, runtimes and requests",
}
_SHOWN: Final = 60


def file_metadata(sweep: SweepKind, tables_by_gpu: Mapping[str, GpuTables]) -> dict[str, str]:
    """What a results file says about where it comes from."""
    return {
        "fastroof.version": __version__,
        "fastroof.tables_hash": tables_hash(tables_by_gpu),
        "fastroof.sources_hash": sources_hash(tables_by_gpu),
        "fastroof.inputs_hash": inputs_hash(sweep),
        "fastroof.gpu": " ".join(load_gpu(gpu).name for gpu in tables_by_gpu),
        "fastroof.kind": sweep.name,
        "fastroof.spec": sweep.spec.model_dump_json(),
    }


def inputs_hash(sweep: SweepKind) -> str:
    """Hash what the models, GPUs, runtimes and requests of a spec are, which may be files that change."""
    meant = [
        *map(load_model, sweep.spec.all_models),
        *map(load_gpu, sweep.gpus),
        *map(load_engine, sweep.runtimes),
    ]
    return hashlib.sha256("\n".join([*map(repr, meant), *sweep.spec.other_inputs]).encode()).hexdigest()


def differences(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Say what differs between the identities of two sweeps; nothing where they are the same sweep."""
    differing = []
    for key in IDENTITY_KEYS:
        if there.get(key) == here.get(key):
            continue
        if key == "fastroof.spec":
            differing += _spec_differences(there.get(key), here.get(key))
        else:
            differing.append(f"{_MEANT[key]}: {_short(there.get(key))} there, {_short(here.get(key))} here")
    return differing


def _spec_differences(there: Any, here: Any) -> list[str]:
    old, new = _spec_of(there), _spec_of(here)
    if old is None or new is None:
        return [f"spec: {_short(there)} there, {_short(here)} here"]
    return [
        f"{key}: {_short(old.get(key))} there, {_short(new.get(key))} here"
        for key in {**new, **old}
        if old.get(key) != new.get(key)
    ]


def _spec_of(text: Any) -> dict[str, Any] | None:
    """Parse a spec stored in a file; None if it is not valid, for example in an edited file."""
    if not isinstance(text, str):
        return None
    try:
        spec = parse_json(text, "the spec of a sweep", SweepError)
    except SweepError:
        return None
    return spec if isinstance(spec, dict) else None


def _short(value: Any) -> str:
    said = "none" if value is None else str(value)
    return said if len(said) <= _SHOWN else f"{said[:_SHOWN]}..."


_FORMATS: Final = (".parquet", ".csv", ".jsonl")
ROWS_A_GROUP: Final = 2**15
"""Rows of a row group: up to 15 MB that are held until they are there."""


class _Writer(Protocol):
    """What writes tables to one file."""

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        """Append rows."""

    def close(self) -> None:
        """Finish the file."""


class _JsonLines:
    """One JSON object per row; NaN becomes null."""

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
    """Rows of CSV, in which no text is a formula to who opens it."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._file = pacsv.CSVWriter(path, schema, write_options=pacsv.WriteOptions(quoting_style="needed"))

    def write_table(self, table: pa.Table, row_group_size: int) -> None:
        """Append rows."""
        self._file.write_table(guarded_columns(table), row_group_size)

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


class ResultFile:
    """A results file that is being written."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        if path.suffix not in _FORMATS:
            raise SweepError(f"output {path} must end in {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}")
        # os.path answers False where Path.is_dir raises: a name longer than a file name may be
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
        """Append rows of the schema; they are written when there are enough for a row group."""
        table = pa.Table.from_batches(list(rows), self.schema)
        self._held.append(table)
        self.num_rows += table.num_rows
        if sum(held.num_rows for held in self._held) >= ROWS_A_GROUP:
            self._write_held()

    def add_metadata(self, metadata: Mapping[str, str]) -> None:
        """Add to a Parquet file's metadata what is known at its end."""
        if self.path.suffix == ".parquet":
            self._writer.add_key_value_metadata(dict(metadata))

    def _write_held(self) -> None:
        held, self._held = self._held, []
        try:
            whole = pa.concat_tables([self.schema.empty_table(), *held]).combine_chunks()
            self._writer.write_table(whole, ROWS_A_GROUP)
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
        """Leave nothing of a file that did not get its name."""
        # a writer that failed to close would try again when it is collected
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
        return SweepError(f"output {self.path} cannot be written ({reason}); no half of it is left there")
