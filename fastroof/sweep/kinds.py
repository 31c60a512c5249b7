"""Evaluating a unit of any sweep, wherever that may be: what a local thread, a job or a worker runs."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from fastroof.sweep.deployments.evaluate import evaluate_deployments
from fastroof.sweep.deployments.rows import ordered_rows, reduced_rows
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.sources import GpuTables
from fastroof.sweep.spec import SweepSpec
from fastroof.sweep.steps import evaluate_steps
from fastroof.sweep.units import UnitResult, WorkUnit

__all__ = ["evaluate_unit", "final_rows", "thinned_rows"]


def evaluate_unit(
    spec: SweepSpec | DeploymentSpec, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]
) -> UnitResult:
    """Evaluate one unit of a sweep.

    Parameters
    ----------
    spec : SweepSpec or DeploymentSpec
        What to sweep.
    unit : WorkUnit
        One of ``work_units(spec)``.
    tables_by_gpu : mapping
        What :func:`fastroof.sweep.sources.load_tables_by_gpu` returns.

    Returns
    -------
    UnitResult
        The same whatever else was evaluated, and wherever.
    """
    tables = tables_by_gpu[unit.plan.gpu]
    if isinstance(spec, SweepSpec):
        return evaluate_steps(spec, unit, tables)
    return evaluate_deployments(spec, unit, tables)


def thinned_rows(spec: SweepSpec | DeploymentSpec, rows: pa.Table) -> pa.Table:
    """Drop rows that cannot be kept, out of those of some units in their order; the order stays.

    It may be done at any time, any number of times: the result is the same in the end.
    """
    return rows if isinstance(spec, SweepSpec) else reduced_rows(spec, rows)


def final_rows(spec: SweepSpec | DeploymentSpec, rows: pa.Table) -> pa.Table:
    """What the results file holds of all units' rows, in its order."""
    return rows if isinstance(spec, SweepSpec) else ordered_rows(spec, reduced_rows(spec, rows))
