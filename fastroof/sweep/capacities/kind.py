"""The kind of sweep that finds capacities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fastroof.columns import Column
from fastroof.sweep.capacities.columns import capacity_columns
from fastroof.sweep.capacities.spec import CapacitySpec
from fastroof.sweep.capacities.summary import CapacitySummary
from fastroof.sweep.capacities.units import capacity_pieces
from fastroof.sweep.kind import SweepTotals
from fastroof.sweep.units import UnitResult, WorkUnit, numbered_units

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.sweep.sources import GpuTables

__all__ = ["CapacitySweep"]


@dataclass(frozen=True)
class CapacitySweep:
    """A sweep over capacities: keeps :class:`fastroof.sweep.kind.SweepKind`.

    An evaluation is one deployment: a search by some ten simulations of all requests.
    """

    spec: CapacitySpec

    name: ClassVar[str] = "capacities"
    # some ten simulations of some thousand requests
    steps_per_evaluation: ClassVar[int] = 10**6
    lost_whole: ClassVar[Mapping[str, str]] = {
        "tp": "",
        "layout": "no number of total_gpus divides into replicas",
        "tables": "",
        "plan": "",
        "engine": "",
    }

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs that the spec names."""
        return self.spec.gpus

    @property
    def runtimes(self) -> tuple[str, ...]:
        """The runtimes that the spec names."""
        return self.spec.runtime

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the results, those of the limits included."""
        return capacity_columns(self.spec)

    @property
    def has_final_rows(self) -> bool:
        """Never: rows are ranked."""
        return False

    def units(self) -> list[WorkUnit]:
        """Cut the sweep into plans, and long ones into slices of their deployments."""
        return numbered_units(capacity_pieces(self.spec))

    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Find a unit's capacities."""
        from fastroof.sweep.capacities.evaluate import evaluate_capacities

        return evaluate_capacities(self.spec, unit, tables_by_gpu[unit.plan.gpu])

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Drop rows that other rows of their group leave no place for; the order stays."""
        from fastroof.sweep.capacities.reductions import reduced_rows

        return reduced_rows(self.spec, rows)

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Put rows in the order of the results: by group, the best first."""
        from fastroof.sweep.capacities.reductions import ordered_rows

        return ordered_rows(self.spec, rows)

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Take the best of each group that serves anything."""
        from fastroof.sweep.capacities.reductions import best_rows

        return best_rows(self.spec, rows)

    def summary(self, totals: SweepTotals) -> CapacitySummary:
        """Name the best of each group."""
        return CapacitySummary(
            best=tuple(totals.best_rows),
            candidates=totals.evaluated,
            feasible=totals.evaluated - sum(totals.infeasible.values()),
            rows=totals.num_rows,
            infeasible=totals.infeasible,
            skipped=totals.skipped,
            evaluate_s=totals.evaluate_s,
            total_s=totals.total_s,
            output=totals.output,
        )
