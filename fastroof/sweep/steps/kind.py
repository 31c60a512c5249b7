"""Sweeps over decode steps: units, evaluation and summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fastroof.columns import Column
from fastroof.engines import load_engine
from fastroof.sweep.kind import SweepTotals
from fastroof.sweep.steps.spec import (
    BestStep,
    StepSpec,
    StepSummary,
    step_columns,
    step_units,
    with_standings,
)
from fastroof.sweep.units import UnitResult, WorkUnit, numbered_units

# Cutting a sweep into units needs neither numba nor pyarrow: these are imported when it runs.
if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.sweep.kind import GpuTables


@dataclass(frozen=True)
class StepSweep:
    """A sweep over decode steps, by the protocol :class:`fastroof.sweep.kind.SweepKind`.

    An evaluation is one decode step. A unit's rows are final: the best batch of a length does not depend on
    other lengths.
    """

    spec: StepSpec

    name: ClassVar[str] = "steps"
    steps_per_evaluation: ClassVar[int] = 1
    has_final_rows: ClassVar[bool] = True
    lost_whole: ClassVar[Mapping[str, str]] = {}

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of the results."""
        return step_columns(self.spec.keep)

    def units(self) -> list[WorkUnit]:
        """Cut the sweep into plans, and long ones into slices of their lengths."""
        return numbered_units(step_units(self.spec))

    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Time a unit's steps."""
        from fastroof.sweep.steps.evaluate import evaluate_steps

        return evaluate_steps(self.spec, unit, tables_by_gpu[unit.plan.gpu])

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Return the rows unchanged: units reduce their own."""
        return rows

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Return the rows unchanged, in the order of the units."""
        return rows

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Return no rows: units report the best step of their plan."""
        return rows.slice(0, 0)

    def summary(self, totals: SweepTotals) -> StepSummary:
        """Return the counts and the best step of each plan."""
        best = with_standings([BestStep(**step) for step in totals.for_summary])
        engine = load_engine(self.spec.engine).name
        return StepSummary.of(totals, best=best, engine=engine, plans=len(best), evaluations=totals.evaluated)
