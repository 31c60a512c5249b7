"""Sweeps over decode steps: units, evaluation and summary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fastroof.columns import Column
from fastroof.engines import load_engine
from fastroof.sweep.kind import GpuTables, SweepKind, SweepTotals
from fastroof.sweep.steps.spec import (
    BestStep,
    StepSpec,
    StepSummary,
    step_columns,
    step_units,
    with_standings,
)
from fastroof.sweep.units import UnitResult, WorkUnit, numbered_units


@dataclass(frozen=True)
class StepSweep(SweepKind):
    """A sweep over decode steps. An evaluation is one decode step.

    A unit's rows are final: the best batch of a length does not depend on other lengths.
    """

    spec: StepSpec

    name: ClassVar[str] = "steps"
    steps_per_evaluation: ClassVar[int] = 1

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

    def summary(self, totals: SweepTotals) -> StepSummary:
        """Return the counts and the best step of each plan."""
        best = with_standings([BestStep(**step) for step in totals.for_summary])
        engine = load_engine(self.spec.engine).name
        fields = {**totals.fields, "evaluations": totals.evaluated}
        return StepSummary(best=best, engine=engine, plans=len(best), **fields)
