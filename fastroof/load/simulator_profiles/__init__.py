"""Convert profiles measured by simulators into sources in fastroof's own schema.

Common to them: CSV files below a folder per GPU, a layer or operation per column or row, and float16 by
default. ``vidur`` and ``llmservingsim`` define the columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from fastroof.arrays import Array, Bools, Floats
from fastroof.columns import MEASURED_US
from fastroof.config.gpu import GpuSpec
from fastroof.config.paths import user_tables_root
from fastroof.errors import TableError
from fastroof.load.families import codes_of
from fastroof.load.package_rows import select
from fastroof.load.write import sort_rows, write_source
from fastroof.operators.external_rows import ExternalRows
from fastroof.operators.registry import OPERATORS
from fastroof.units import ACTIVATION_BYTES, US_PER_MS, US_PER_S

EXTERNAL_RANK: Final = 300
"""Rank of external simulators' profiles: after shipped tables (100) and your own (50)."""

HALF_DTYPES: Final = ("bf16", "fp16")
"""Dtypes under which float16 rows can be stored: plans use bf16, with the same bytes and peak."""

NO_PLAIN_ROWS: Final = "prompts after a prefix, of heads of which no prompt without one was measured"

FEW: Final = 1e-3
"""Share of a file's rows that may exceed the peak: broken measurements, which are left out."""

NO_TIME: Final = "took no time that the profiler resolves, or was not timed"
UNSPLIT: Final = "fewer heads or columns than GPUs"
EMBEDDING: Final = "embedding: a gather, no elementwise kernel"


def profile_folder(folder: str | Path, needed: str, dtype: str = "bf16") -> Path:
    """Check a folder of profiles and the dtype under which its float16 rows are stored."""
    root = Path(folder)
    if not root.is_dir():
        raise TableError(f"{root} is not a folder; need {needed}")
    if dtype not in HALF_DTYPES:
        raise TableError(f"dtype must be {' or '.join(HALF_DTYPES)} for rows in float16, got {dtype!r}")
    return root


@dataclass
class Profile:
    """Rows of one GPU collected from files, and what was left out."""

    program: str
    gpu: GpuSpec
    root: Path
    rows: dict[str, list[dict[str, Array]]] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)

    def add(self, path: Path, operator: str, rows: ExternalRows) -> None:
        """Add rows of one operator from one file."""
        about = self._about(path)
        if not len(rows.columns["latency_us"]):
            return
        timed = ~np.isnan(rows.columns["latency_us"]) & (rows.columns["latency_us"] > 0.0)
        # rows count by their first reason, and rows without a time have no other one
        us = np.where(timed, rows.columns["latency_us"], 1.0)
        out = {NO_TIME: ~timed, **rows.left_out}
        rows = ExternalRows({**rows.columns, "latency_us": us}, out)
        self._check_rates(path, operator, rows)
        columns, left_out = select(operator, rows, self.gpu)
        for reason, count in left_out.items():
            self.leave_out(path, reason, count)
        if len(columns["latency_us"]):
            about[operator] = about.get(operator, 0) + len(columns["latency_us"])
            self.rows.setdefault(operator, []).append(columns)

    def _check_rates(self, path: Path, operator: str, rows: ExternalRows) -> None:
        """Reject a file with times or sizes in another unit, or of another GPU."""
        keep = ~np.any([*rows.left_out.values()], axis=0)
        columns = {name: values[keep] for name, values in rows.columns.items()}
        work = OPERATORS[operator].work(columns, self.gpu)
        too_fast = work.flops > columns["latency_us"] / US_PER_S * work.peak_flops_per_s
        if too_fast.sum() > FEW * len(too_fast):
            raise TableError(
                f"{path}: {int(too_fast.sum()):,} of {len(too_fast):,} rows of {operator} are faster than "
                f"the peak of {self.gpu.title}: wrong GPU (--gpu) or unit of time"
            )

    def leave_out(self, path: Path, reason: str, count: int | None = None) -> None:
        """Record why a file, or ``count`` of its rows, is left out."""
        about = self._about(path)
        if count is None:
            about["ignored"] = reason
        elif count:
            reasons = about.setdefault("left_out", {})
            reasons[reason] = reasons.get(reason, 0) + count

    def _about(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.root).as_posix()
        if name not in self.files:
            self.files[name] = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        return self.files[name]

    def write(self, output: Path | None, provenance: Mapping[str, Any], overwrite: bool = False) -> Path:
        """Write ``<output>/<gpu>/<program>/`` atomically (default output: the user's folder)."""
        if not self.rows:
            why = "; ".join(f"{name}: {about.get('ignored', 'no row')}" for name, about in self.files.items())
            raise TableError(f"{self.root} has no row to import: {why or 'no profile file'}")
        columns = {
            operator: sort_rows(operator, {n: np.concatenate([p[n] for p in parts]) for n in parts[0]})
            for operator, parts in self.rows.items()
        }
        operators: dict[str, dict[str, Any]] = {}
        for operator, rows in list(columns.items()):
            keep = _of_kernels_with_plain_rows(operator, rows)
            columns[operator] = {name: values[keep] for name, values in rows.items()}
            operators[operator] = {"rows": int(keep.sum())}
            if not keep.all():
                operators[operator]["left_out"] = {NO_PLAIN_ROWS: int((~keep).sum())}
            if not keep.any():
                del columns[operator]
        if not columns:
            raise TableError(f"{self.root} has no usable row: {NO_PLAIN_ROWS}")
        about = {
            "gpu": self.gpu.name,
            "rank": EXTERNAL_RANK,
            "name": self.program,
            "program": self.program,
            **provenance,
            "models": sorted(self.models),
            "operators": operators,
            "imported": self.files,
        }
        root = user_tables_root() if output is None else output
        return write_source(root / self.gpu.name / self.program, columns, about, overwrite=overwrite)


def _of_kernels_with_plain_rows(operator: str, columns: Mapping[str, Array]) -> Bools:
    """Rows of kernels with at least one plain row."""
    schema = OPERATORS[operator]
    codes = codes_of(columns[key.name] for key in schema.keys)
    return np.isin(codes, codes[schema.plain_rows(columns)])


# -- cells -----------------------------------------------------------------------------------------


def median_us(
    path: Path, names: Sequence[str], us: float = US_PER_MS, *, is_needed: bool = False
) -> dict[str, Floats]:
    """Times of a CSV file in us, of the columns that it has, or an error if it lacks one that is needed."""
    try:
        table = pacsv.read_csv(
            path,
            convert_options=pacsv.ConvertOptions(
                include_columns=list(names),
                include_missing_columns=True,
                column_types={name: pa.float64() for name in names},
                null_values=[""],
            ),
        )
    except (pa.ArrowInvalid, OSError) as error:
        raise TableError(f"{path}: {error}") from None
    times = {}
    for name in names:
        cells = table.column(name).combine_chunks()
        if cells.null_count == len(cells):
            if is_needed:
                raise TableError(f"{path} has no column {name}")
            continue
        is_known = ~np.asarray(cells.is_null())
        values = np.asarray(cells.fill_null(0.0), np.float64)
        wrong = is_known & ~((values >= 0.0) & (values <= MEASURED_US[1] / us))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise TableError(
                f"{path}, row {row + 1}, column {name}: found {values[row]}, need a number from 0 to "
                f"{MEASURED_US[1] / us:g}"
            )
        times[name] = np.where(is_known, values * us, np.nan)
    return times


def booleans(path: Path, column: str, cells: Array, meanings: Mapping[str, bool]) -> Bools:
    """Text cells as booleans."""
    unknown = sorted(set(cells) - set(meanings))
    if unknown:
        raise TableError(f"{path}, column {column}: found {unknown[0]!r}, need {' or '.join(meanings)}")
    return np.array([meanings[cell] for cell in cells], bool)


# -- rows ------------------------------------------------------------------------------------------


def rows_of(latency_us: Floats, left_out: Mapping[str, Bools], **columns: Any) -> ExternalRows:
    """Rows by their columns, of which a text or a number holds for all rows."""
    count = len(latency_us)
    arrays = {
        name: np.full(count, value, object)
        if isinstance(value, str)
        else np.broadcast_to(np.asarray(value), count).copy()
        for name, value in columns.items()
    }
    return ExternalRows({**arrays, "latency_us": latency_us}, dict(left_out))


def gemm_rows(m: Array, n: Any, k: Any, latency_us: Floats, dtype: str) -> ExternalRows:
    """GEMMs by their sizes on one GPU; sizes below 1 are layers that cannot be split."""
    unsplit = np.broadcast_to((np.asarray(n) < 1) | (np.asarray(k) < 1), len(m))
    return rows_of(latency_us, {UNSPLIT: unsplit}, m=m, n=n, k=k, dtype=dtype, kernel="linear")


def streaming_rows(kind: str, m: Array, width: Any, passes: int, latency_us: Floats) -> ExternalRows:
    """Elementwise kernels that move ``passes`` times ``m`` rows of ``width`` two-byte elements."""
    io_bytes, unsplit = passes * ACTIVATION_BYTES * m * width, np.broadcast_to(np.asarray(width) < 1, len(m))
    return rows_of(
        latency_us, {UNSPLIT: unsplit}, kind=kind, m=m, width=width, io_bytes=io_bytes, kernel=kind
    )


def silu_rows(m: Array, intermediate: Any, latency_us: Floats) -> ExternalRows:
    """Activation of a gated MLP: two halves in, one out."""
    return streaming_rows("silu_and_mul", m, intermediate, 3, latency_us)


def rope_rows(m: Array, heads_width: Any, latency_us: Floats) -> ExternalRows:
    """Rotary embedding of queries and keys, in place."""
    return streaming_rows("rope", m, heads_width, 2, latency_us)
