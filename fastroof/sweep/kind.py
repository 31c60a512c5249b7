"""The protocol that each kind of sweep implements, and the tables and totals they share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from fastroof.columns import Column
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import TableError
from fastroof.sweep.spec import DATASHEET, SweepSpec
from fastroof.sweep.units import UnitResult, WorkUnit

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan.curves import DatasheetCurves
    from fastroof.tables import Tables


# Cutting a sweep into units needs neither numba nor pyarrow: these are imported when tables are loaded.


class GpuTables(NamedTuple):
    """Inputs of one GPU's plans: its tables, or the datasheet model's curves."""

    gpu: GpuSpec
    tables: Tables | None
    curves: DatasheetCurves | None = None


def load_tables_by_gpu(sweep: SweepKind) -> dict[str, GpuTables]:
    """Load the tables of each GPU of a sweep, keyed by the GPU's name in the spec."""
    from fastroof.load.by_name import missing_tables
    from fastroof.plan.curves import DatasheetCurves
    from fastroof.tables.table_set import load_gpu_tables, load_tables

    tables_by_gpu, spec = {}, sweep.spec
    for name in spec.all_gpus:
        gpu, tables = load_gpu(name), None
        if spec.tables != DATASHEET:
            tables = (
                load_tables(spec.tables, gpu=gpu.name, source=spec.source)
                if spec.tables
                else load_gpu_tables(name, source=spec.source)
            )
            if tables is None and not spec.allow_modelled:
                raise TableError(missing_tables(gpu.name))
        curves = DatasheetCurves(gpu) if tables is None else None
        tables_by_gpu[name] = GpuTables(gpu, tables, curves)
    return tables_by_gpu


def tables_hash(tables_by_gpu: Mapping[str, GpuTables]) -> str:
    """Return the hashes of each GPU's tables, joined by spaces."""
    return " ".join(
        "" if each.tables is None else each.tables.content_hash for each in tables_by_gpu.values()
    )


def sources_hash(tables_by_gpu: Mapping[str, GpuTables]) -> str:
    """Return the hashes of all latency sources, including those used by only some kernels or engines."""
    return " ".join(
        "" if each.tables is None else each.tables.sources_hash for each in tables_by_gpu.values()
    )


class SweepTotals(NamedTuple):
    """Totals over all units of a sweep, for its summary."""

    evaluated: int
    infeasible: dict[str, int]
    skipped: dict[str, tuple[str, ...]]
    for_summary: list[dict[str, Any]]
    best_rows: list[dict[str, Any]]
    num_rows: int
    evaluate_s: float
    total_s: float
    output: Path


class SweepKind(Protocol):
    """A kind of sweep: its spec, and how to evaluate it. Small and picklable."""

    @property
    def name(self) -> str: ...  # noqa: D102 - attributes, which the docstring of the class explains
    @property
    def spec(self) -> SweepSpec: ...  # noqa: D102
    @property
    def columns(self) -> tuple[Column, ...]: ...  # noqa: D102
    @property
    def steps_per_evaluation(self) -> int: ...  # noqa: D102
    @property
    def has_final_rows(self) -> bool: ...  # noqa: D102
    @property
    def lost_whole(self) -> Mapping[str, str]: ...  # noqa: D102

    def units(self) -> list[WorkUnit]:
        """Cut the sweep into units, deterministically and in the order of the rows."""

    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Evaluate one unit; the result does not depend on other units or on where it runs."""

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Drop rows that cannot be in the results, given rows of some units in order; keep the order."""

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Sort the remaining rows of all units into the order of the results."""

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Return the rows that the summary names; may be applied to parts and then to their results."""

    def summary(self, totals: SweepTotals) -> Any:
        """Return the sweep's summary."""
