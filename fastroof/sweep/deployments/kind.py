"""The kind of sweep that estimates deployments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fastroof.columns import Column
from fastroof.sweep.deployments.columns import COLUMNS
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.deployments.summary import DeploymentSummary
from fastroof.sweep.deployments.units import deployment_pieces
from fastroof.sweep.kind import SweepTotals
from fastroof.sweep.units import UnitResult, WorkUnit, numbered_units

# Cutting a sweep into units needs neither numba nor pyarrow; whatever needs them is imported when it runs.
if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.sweep.sources import GpuTables

__all__ = ["DeploymentSweep"]

_NO_LAYOUT: Final = "no number of total_gpus divides by tp into the workers that the mode needs"


@dataclass(frozen=True)
class DeploymentSweep:
    """A sweep over deployments: keeps :class:`fastroof.sweep.kind.SweepKind`.

    An evaluation is one candidate: a layout of a model on GPUs under one load. The best of a group may be
    in any unit, so that rows are put together.
    """

    spec: DeploymentSpec

    name: ClassVar[str] = "deployments"
    # decodes, mixed, and a prompt's full and last ones
    steps_per_evaluation: ClassVar[int] = 4
    lost_whole: ClassVar[Mapping[str, str]] = {"tp": "", "layout": _NO_LAYOUT, "tables": "", "plan": ""}

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
        """Columns of the results."""
        return COLUMNS

    @property
    def has_final_rows(self) -> bool:
        """Whether all rows are kept."""
        return self.spec.keep == "all"

    def units(self) -> list[WorkUnit]:
        """Cut the sweep into plans and modes, and long ones into slices of their candidates."""
        return numbered_units(deployment_pieces(self.spec))

    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Estimate a unit's candidates."""
        from fastroof.sweep.deployments.evaluate import evaluate_deployments

        return evaluate_deployments(self.spec, unit, tables_by_gpu[unit.plan.gpu])

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Drop rows that other rows of their group leave no place for; the order stays."""
        from fastroof.sweep.deployments.reductions import reduced_rows

        return reduced_rows(self.spec, rows)

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Put rows in the order of the results: by group, the best first, a front from end to end."""
        from fastroof.sweep.deployments.reductions import ordered_rows

        return ordered_rows(self.spec, rows)

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Take the best of each group that is within the limits."""
        from fastroof.sweep.deployments.reductions import best_rows

        return best_rows(self.spec, rows)

    def summary(self, totals: SweepTotals) -> DeploymentSummary:
        """Name the best of each group, and add the histograms up."""
        return DeploymentSummary(
            best=tuple(totals.best_rows),
            candidates=totals.evaluated,
            feasible=totals.evaluated - sum(totals.infeasible.values()),
            rows=totals.num_rows,
            infeasible=totals.infeasible,
            skipped=totals.skipped,
            histograms=_histograms(totals.for_summary),
            evaluate_s=totals.evaluate_s,
            total_s=totals.total_s,
            output=totals.output,
        )


def _histograms(parts: list[dict[str, Any]]) -> dict[tuple[Any, ...], list[int]]:
    """Add up the histograms of units, by group."""
    total: dict[tuple[Any, ...], list[int]] = {}
    for part in parts:
        group, counts = tuple(part["group"]), part["counts"]
        before = total.get(group, [0] * len(counts))
        total[group] = [a + b for a, b in zip(before, counts, strict=True)]
    return total
