"""The base of all kinds of sweep, and the tables and totals they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from fastroof.columns import Column
from fastroof.config import GpuSpec, load_gpu
from fastroof.defaults import MEASURED
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
    from fastroof.plan.curves import DatasheetCurves
    from fastroof.tables.table_set import chosen_tables

    tables_by_gpu, spec = {}, sweep.spec
    for name in spec.all_gpus:
        gpu, tables = load_gpu(name), chosen_tables(spec.tables or MEASURED, name, spec.source)
        curves = DatasheetCurves(gpu) if tables is None else None
        tables_by_gpu[name] = GpuTables(gpu, tables, curves)
    return tables_by_gpu


class SweepTotals(NamedTuple):
    """Totals over all units of a sweep; ``fields`` are those of every summary, by name."""

    evaluated: int
    for_summary: list[dict[str, Any]]
    best_rows: list[dict[str, Any]]
    fields: dict[str, Any]


class SweepKind(ABC):
    """A kind of sweep: its spec, and how to evaluate it. Small and picklable.

    Attributes
    ----------
    steps_per_evaluation : int
        Work of an evaluation, in steps.
    has_final_rows : bool
        Whether the rows of units are final; else those of all units are reduced together.
    lost_whole : mapping of str to str
        Reasons for which all candidates may be lost; the text describes those without a message.
    """

    spec: Any
    name: ClassVar[str]
    steps_per_evaluation: ClassVar[int]
    lost_whole: ClassVar[Mapping[str, str]] = {}

    @property
    def has_final_rows(self) -> bool:
        """Return whether the rows of units are final."""
        return True

    @property
    @abstractmethod
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of the results."""

    @abstractmethod
    def units(self) -> list[WorkUnit]:
        """Cut the sweep into units, deterministically and in the order of the rows."""

    @abstractmethod
    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Evaluate one unit; the result does not depend on other units or on where it runs."""

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Drop rows that cannot be in the results, given rows of some units in order; keep the order."""
        return rows

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Sort the remaining rows of all units into the order of the results."""
        return rows

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Return the rows that the summary names; may be applied to parts and then to their results."""
        return rows.slice(0, 0)

    @abstractmethod
    def summary(self, totals: SweepTotals) -> Any:
        """Return the sweep's summary."""
