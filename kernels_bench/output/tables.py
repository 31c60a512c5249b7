"""Journals to tables: tidy CSV per operator with their provenance, in atomic writes."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from fastroof.arrays import Array
from fastroof.columns import GPU, KERNEL, LATENCY, OPTIONAL_COLUMNS, PROVIDER, QUANTISES, SPREAD_COLUMNS
from fastroof.config.gpu import GPU_FILE, GpuSpec, load_gpu
from fastroof.errors import GpuError, MeasureError
from fastroof.load.sources import PROVENANCE_FILE, list_sources
from fastroof.load.write import Format, write_source
from fastroof.operators.registry import OPERATORS
from fastroof.units import US_PER_S
from kernels_bench.journal import find_journals
from kernels_bench.output.provenance import of_engine, provenance_of, recorded_gpu
from kernels_bench.output.recorded import Recorded, read_journals

Columns = dict[str, Array]

MOST_IMPOSSIBLE: Final = 0.01
"""A larger share of rows above the peak is a wrong GPU, dtype or timer, not a glitch of single rows."""


@dataclass(frozen=True)
class WrittenTables:
    """What :func:`write_tables` wrote."""

    folder: Path
    gpu: str
    rows: Mapping[str, int]
    # Points that were tried and have no row.
    skipped: int
    # Keys of measured rows that no GPU of this kind can have done, and why; they are in no table.
    left_out: Mapping[str, str] = field(default_factory=dict)


def usable_tables(recorded: Recorded, gpu: GpuSpec | None) -> tuple[dict[str, Columns], dict[str, str]]:
    """Return the rows of journals that can be true as columns, and those that cannot, with why."""
    name = recorded_gpu(recorded)
    tables: dict[str, Columns] = {}
    left_out: dict[str, str] = {}
    for operator in OPERATORS:
        rows = {key: row for key, row in recorded.rows.items() if row["operator"] == operator}
        if not rows:
            continue
        columns = _columns(operator, list(rows.values()), name)
        impossible = _above_peak(operator, columns, gpu)
        _refuse_if_many(operator, len(rows), impossible, gpu)
        left_out |= {key: impossible[i] for i, key in enumerate(rows) if i in impossible}
        kept = np.array([i for i in range(len(rows)) if i not in impossible], np.int64)
        if len(kept):
            tables[operator] = {column: values[kept] for column, values in columns.items()}
    return tables, left_out


def known_columns(operator: str, columns: Mapping[str, Array]) -> Columns:
    """Return the columns that a table of the operator can hold; device state stays in the journal."""
    known = (*OPERATORS[operator].required, *OPTIONAL_COLUMNS)
    return {c.name: columns[c.name] for c in known if c.name in columns}


def _columns(operator: str, rows: Sequence[Mapping[str, Any]], gpu: str) -> Columns:
    columns: Columns = {}
    schema = OPERATORS[operator]
    for column in (*schema.keys, *schema.axes):
        cells = [row["values"][column.name] for row in rows]
        columns[column.name] = np.array(cells, object if column.kind == "text" else np.int64)
    columns[LATENCY.name] = np.array([row[LATENCY.name] for row in rows], np.float64)
    columns[GPU.name] = np.array([gpu] * len(rows), object)
    columns[PROVIDER.name] = np.array([row[PROVIDER.name] for row in rows], object)
    columns[KERNEL.name] = np.array([row.get(KERNEL.name) or row[PROVIDER.name] for row in rows], object)
    if all(QUANTISES.name in row for row in rows):
        columns[QUANTISES.name] = np.array([row[QUANTISES.name] for row in rows], np.int64)
    for column in SPREAD_COLUMNS:
        dtype = np.int64 if column.kind == "int" else np.float64
        columns[column.name] = np.array([row[column.name] for row in rows], dtype)
    return columns


def write_tables(
    journals: Sequence[Path],
    folder: Path,
    *,
    overwrite: bool = False,
    rank: int | None = None,
    engine: str = "",
    file_format: Format = "csv",
) -> WrittenTables:
    """Write the rows of journals as a source that ``fastroof.load_tables`` reads."""
    folder = Path(folder)
    if held := find_journals(folder):
        raise MeasureError(
            f"{folder} holds journals ({held[0].name}), and tables replace a folder as a whole; "
            "use a separate folder such as bench_data/<gpu>/kernels_bench"
        )
    recorded = read_journals(journals)
    gpu = recorded_gpu(recorded)
    spec = spec_beside(folder, gpu)
    tables, left_out = usable_tables(recorded, spec)
    provenance = provenance_of(recorded, tables, left_out, rank)
    if engine:
        provenance = of_engine(provenance, engine)
    try:
        write_source(folder, tables, provenance, format=file_format, overwrite=overwrite)
        carry_gpu_file(gpu, [Path(journal).parent for journal in journals], folder)
    except OSError as error:
        raise MeasureError(
            f"{folder} cannot be written: {error.strerror or error}; the journals keep every row: "
            f"make room, then run kernels-bench tables {' '.join(map(str, journals))} -o {folder}"
        ) from error
    rows = {operator: len(columns[LATENCY.name]) for operator, columns in tables.items()}
    return WrittenTables(folder, gpu, rows, len(recorded.skips), left_out)


def spec_beside(folder: Path, gpu: str) -> GpuSpec | None:
    """Return the GPU's facts, or None if unknown; refuse a folder of another GPU."""
    place = folder.resolve().parent / GPU_FILE
    if place.is_file():
        spec = load_gpu(place)
        if gpu not in (spec.name, *spec.aliases):
            raise MeasureError(
                f"{folder} is next to the gpu.toml of {spec.name}, but {gpu} was measured; "
                f"write to a folder of {gpu}"
            )
    else:
        try:
            spec = load_gpu(gpu)
        except GpuError:
            return None
    _refuse_source_of_another(folder, spec.name)
    return spec


def _refuse_source_of_another(folder: Path, gpu: str) -> None:
    if (folder / PROVENANCE_FILE).is_file() and (held := list_sources(folder)[0].gpu) != gpu:
        raise MeasureError(f"{folder} holds tables of {held}, but {gpu} was measured; give another folder")


def carry_gpu_file(gpu: str, places: Iterable[Path], folder: Path) -> None:
    """Copy the gpu.toml of a GPU that fastroof does not know next to its tables, which need it to load."""
    beside = folder.resolve().parent / GPU_FILE
    try:
        load_gpu(gpu)
    except GpuError:
        held = next((place / GPU_FILE for place in places if (place / GPU_FILE).is_file()), None)
        if held is not None and not beside.exists():
            shutil.copyfile(held, beside)


def _above_peak(operator: str, columns: Columns, gpu: GpuSpec | None) -> dict[int, str]:
    """Return the rows that are faster than the GPU's peak, by index, with their MFU as text."""
    if gpu is None:
        return {}
    work = OPERATORS[operator].work(columns, gpu)
    mfu = work.flops * US_PER_S / (columns[LATENCY.name] * work.limit_flops_per_s)
    return {int(i): f"MFU {mfu[i]:.3f} of {gpu.title}" for i in np.flatnonzero(mfu > 1.0)}


def _refuse_if_many(operator: str, rows: int, impossible: Mapping[int, str], gpu: GpuSpec | None) -> None:
    # Of few rows a single glitch is more than a hundredth: one is let go.
    if gpu is None or len(impossible) <= max(1.0, MOST_IMPOSSIBLE * rows):
        return
    raise MeasureError(
        f"{len(impossible)} of {rows} rows of {operator} are faster than the peak of {gpu.title} allows "
        f"({next(iter(impossible.values()))}): the journal's GPU, dtype or timer is wrong"
    )
