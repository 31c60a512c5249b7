"""Results of a sweep: rows reduced as they arrive, then written atomically as Parquet, CSV or JSON lines."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from fastroof.atomic_files import whole_file
from fastroof.columns import guarded_columns
from fastroof.errors import SweepError
from fastroof.parquet import CHECKED_PAGES
from fastroof.sweep.kind import SweepKind, SweepTotals
from fastroof.sweep.units import UnitResult, WorkUnit

_FORMATS: Final = (".parquet", ".csv", ".jsonl")
ROWS_A_GROUP: Final = 2**15
"""Rows per row group: up to 15 MB held in memory."""


def _json_lines(table: pa.Table) -> Iterable[str]:
    """Return one JSON object per row; NaN becomes null."""
    for row in table.to_pylist():
        plain = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in row.items()
        }
        yield json.dumps(plain, allow_nan=False) + "\n"


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
        self._write_table: Callable[[pa.Table], object] = lambda table: None

    def __enter__(self) -> Self:
        try:
            self._unfinished = self._whole.enter_context(whole_file(self.path))
            self._writer, self._write_table = self._opened()
        except BaseException as error:
            self._drop(error)
            if isinstance(error, OSError):
                raise self._failed(error) from None
            raise
        return self

    def _opened(self) -> tuple[Any, Callable[[pa.Table], object]]:
        """Return a writer, and what writes a table with it."""
        if self.path.suffix == ".jsonl":
            lines = self._unfinished.open("w", encoding="utf-8")
            return lines, lambda table: lines.writelines(_json_lines(table))
        if self.path.suffix == ".csv":
            options = pacsv.WriteOptions(quoting_style="needed")
            cells = pacsv.CSVWriter(self._unfinished, self.schema, write_options=options)
            # no text is read as a formula by spreadsheets
            return cells, lambda table: cells.write_table(guarded_columns(table))
        writer = pq.ParquetWriter(self._unfinished, self.schema, compression="zstd", **CHECKED_PAGES)
        return writer, lambda table: writer.write_table(table, ROWS_A_GROUP)

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
            self._write_table(pa.concat_tables([self.schema.empty_table(), *held]).combine_chunks())
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
        if self._writer is not None and self.path.suffix == ".jsonl":
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


HELD_ROWS: Final = 2**16
"""Rows to hold in memory before reducing them."""


class Collected:
    """Results of units, combined in order."""

    def __init__(self, sweep: SweepKind, results: ResultFile) -> None:
        self.sweep = sweep
        self.results = results
        self.counts: Counter[str] = Counter()
        self.skipped: dict[str, dict[str, None]] = {}  # dicts as ordered sets
        self.for_summary: list[dict[str, Any]] = []
        self.evaluate_s = 0.0
        self._held: list[pa.RecordBatch] = []
        self._block = 0
        self._final = self._table([])
        self._best: pa.Table | None = None

    def add(self, unit: WorkUnit, result: UnitResult) -> None:
        """Add the next unit's result."""
        self.counts.update(result.counts)
        for reason, name in result.skipped:
            self.skipped.setdefault(reason, {})[name] = None
        self.for_summary += result.for_summary
        self.evaluate_s += result.evaluate_s
        if self.sweep.has_final_rows:
            self._write(self._table([result.rows]))
            return
        if unit.block > self._block:
            self._finish_block()
            self._block = unit.block
        self._held.append(result.rows)
        if sum(rows.num_rows for rows in self._held) > HELD_ROWS:
            self._held = self._reduced().to_batches()

    def finish(self) -> None:
        """Write the held rows, and the counts as metadata."""
        lost = self.sweep.lost_whole
        if self.counts["evaluated"] == sum(self.counts[reason] for reason in lost):
            reasons = [f"{reason}: {', '.join(names)}" for reason, names in self.skipped.items()]
            reasons += [text for reason, text in lost.items() if text and self.counts[reason]]
            raise SweepError(f"nothing to evaluate: {'; '.join(reasons)}")
        if not self.sweep.has_final_rows:
            self._finish_block()
            self._write(self._final)
        self.results.add_metadata({"fastroof.counts": json.dumps(dict(self.counts))})

    def totals(self, total_s: float) -> SweepTotals:
        """Return the inputs of the sweep's summary."""
        infeasible = dict(self.counts)
        evaluated = infeasible.pop("evaluated", 0)
        fields = {
            "infeasible": infeasible,
            "skipped": {reason: tuple(names) for reason, names in self.skipped.items()},
            "rows": self.results.num_rows,
            "evaluate_s": self.evaluate_s,
            "total_s": total_s,
            "output": self.results.path,
        }
        best = [] if self._best is None else self._best.to_pylist()
        return SweepTotals(evaluated, self.for_summary, best, fields)

    def _finish_block(self) -> None:
        """Write what a block of groups keeps, as whole row groups; the rest waits for the next block."""
        rows = pa.concat_tables([self._final, self.sweep.ordered(self._reduced())])
        self._held = []
        whole = rows.num_rows - rows.num_rows % ROWS_A_GROUP
        if whole:
            self._write(rows.slice(0, whole))
        self._final = rows.slice(whole)

    def _write(self, rows: pa.Table) -> None:
        """Write rows, and remember the best of all written rows."""
        self.results.write(rows.to_batches())
        best = self.sweep.best_rows(rows)
        self._best = (
            best if self._best is None else self.sweep.best_rows(pa.concat_tables([self._best, best]))
        )

    def _table(self, rows: list[pa.RecordBatch]) -> pa.Table:
        return pa.Table.from_batches(rows, self.results.schema.remove_metadata())

    def _reduced(self) -> pa.Table:
        return self.sweep.reduced(self._table(self._held))
