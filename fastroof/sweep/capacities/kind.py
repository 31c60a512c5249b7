"""Sweeps over capacities: units, their evaluation, reduction of rows, and summary."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from fastroof.columns import Column
from fastroof.engines import load_engine
from fastroof.errors import SimulationError
from fastroof.models import load_model
from fastroof.sweep.capacities.spec import COLUMNS, CapacitySpec, capacity_columns
from fastroof.sweep.kind import GpuTables, SweepKind, SweepTotals
from fastroof.sweep.result_rows import CandidateSummary
from fastroof.sweep.units import PlanKey, UnitResult, WorkUnit, numbered_units, plan_units

if TYPE_CHECKING:
    import pyarrow as pa

    from fastroof.plan import StepPlan
    from fastroof.sweep.unit_plans import Lost

# Cutting a sweep into units needs neither numba nor pyarrow: these are imported when it runs.


MODE: Final = "capacity"
DEPLOYMENTS_A_UNIT: Final = 8
"""A fraction of a second of work."""


def capacity_units(spec: CapacitySpec) -> Iterator[WorkUnit]:
    """Yield units in the order of the rows: models, GPUs, splits, formats, engines, deployments."""
    formats = {one: spec.formats(*one) for one in itertools.product(spec.models, spec.gpus)}
    for model, gpu, (tp, split) in itertools.product(spec.models, spec.gpus, spec.splits):
        gpus_each = tp * split.pp * split.dp
        possible, impossible = len(spec.deployments(gpus_each)), spec.num_impossible(gpus_each)
        for dtype, kv_dtype, engine in formats[model, gpu]:
            key = PlanKey(model, gpu, tp, dtype, kv_dtype, engine, *split)
            yield from plan_units(key, MODE, possible, DEPLOYMENTS_A_UNIT, lost=impossible)


LOST: Final = {
    "tp": "the model does not divide by tp",
    "layout": "the GPUs do not divide into replicas",
    "tables": "no measured table",
    "plan": "the model cannot be compiled into a plan",
    "engine": "the engine has no room for a request, or its settings contradict each other",
    "limits": "no rate is within the limits",
}
"""Descriptions of the reasons why deployments are infeasible."""


@dataclass(frozen=True)
class CapacitySummary(CandidateSummary):
    """Counts of a sweep over capacities, and of each group the deployment with the most requests/s per GPU.

    A deployment is feasible if some rate is within the limits. ``infeasible`` and ``skipped`` are by a key
    of :data:`LOST`.
    """

    kind: ClassVar[str] = "capacities"

    def best_columns(self) -> tuple[Column, ...]:
        """Return the fixed columns, then one for each percentile with a limit."""
        limited = dict.fromkeys(name for row in self.best for name in row)
        for column in COLUMNS:
            limited.pop(column.name, None)
        return (*COLUMNS, *(Column(name, "float", "ms", "at requests_per_s", 0) for name in limited))


@dataclass(frozen=True)
class CapacitySweep(SweepKind):
    """A sweep over capacities.

    An evaluation is one deployment: a search by about ten simulations of all requests.
    """

    spec: CapacitySpec

    name: ClassVar[str] = "capacities"
    # about ten simulations of thousands of requests
    steps_per_evaluation: ClassVar[int] = 10**6
    lost_whole: ClassVar[Mapping[str, str]] = {
        "tp": "",
        "layout": "no number of total_gpus divides into replicas",
        "tables": "",
        "plan": "",
        "engine": "",
    }

    @property
    def columns(self) -> tuple[Column, ...]:
        """Return the columns of the results, including those of the limits."""
        return capacity_columns(self.spec)

    @property
    def has_final_rows(self) -> bool:
        """Return False: rows are ranked at the end."""
        return False

    def units(self) -> list[WorkUnit]:
        """Cut the sweep into plans, and long ones into slices of their deployments."""
        return numbered_units(capacity_units(self.spec))

    def evaluate(self, unit: WorkUnit, tables_by_gpu: Mapping[str, GpuTables]) -> UnitResult:
        """Find a unit's capacities."""
        return _evaluated(self.spec, unit, tables_by_gpu[unit.plan.gpu])

    def reduced(self, rows: pa.Table) -> pa.Table:
        """Drop rows that others of their group beat; keep the order."""
        if self.spec.keep == "all":
            return rows
        return _taken(rows, sorted(at for group in self._groups(rows) for at in group[: self.spec.k]))

    def ordered(self, rows: pa.Table) -> pa.Table:
        """Sort rows into the order of the results: groups as they first appear, best first."""
        return _taken(rows, [at for group in self._groups(rows) for at in group])

    def best_rows(self, rows: pa.Table) -> pa.Table:
        """Return the best row of each group with a capacity above 0."""
        per_gpu = rows["requests_per_s_per_gpu"].to_pylist()
        return _taken(rows, sorted(group[0] for group in self._groups(rows) if per_gpu[group[0]] > 0.0))

    def summary(self, totals: SweepTotals) -> CapacitySummary:
        """Return the counts and the best of each group."""
        return CapacitySummary.of(totals)

    def _groups(self, rows: pa.Table) -> list[list[int]]:
        """Return each group's row indices, highest requests/s per GPU first; ties keep their order."""
        per_gpu = rows["requests_per_s_per_gpu"].to_pylist()
        keys = [rows[name].to_pylist() for name in self.spec.per]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for at, key in enumerate(zip(*keys, strict=True) if keys else [()] * rows.num_rows):
            groups.setdefault(key, []).append(at)
        return [sorted(group, key=lambda at: -per_gpu[at]) for group in groups.values()]


def _taken(rows: pa.Table, indices: list[int]) -> pa.Table:
    """Return the rows at some indices, possibly none."""
    import numpy as np

    return rows.take(np.array(indices, np.int64))


def _evaluated(spec: CapacitySpec, unit: WorkUnit, tables: GpuTables) -> UnitResult:
    """Find the capacities of a unit's deployments."""
    import pyarrow as pa

    from fastroof.arrow import arrow_schema
    from fastroof.sweep.unit_plans import Lost, unit_plan

    key = unit.plan
    counts: Counter[str] = Counter(evaluated=unit.size)
    counts["layout"] = unit.size - (unit.stop - unit.start)
    skipped: dict[tuple[str, str], None] = {}  # a dict as an ordered set
    deployments = spec.deployments(key.tp * key.pp * key.dp)[unit.start : unit.stop]
    ranks = load_model(key.model).ranks(key.dp)
    engine = load_engine(key.engine).on(tables.gpu, ranks).scheduling
    plans: dict[tuple[int, int], StepPlan | Lost] = {}
    rows = []
    evaluate_s = 0.0
    for replicas, given_tokens, given_seqs in deployments:
        budget, seqs, _ = engine.step_limits(given_tokens, given_seqs)
        if (budget, seqs) not in plans:
            plans[budget, seqs] = unit_plan(spec, key, tables, **engine.plan_sizes(budget, seqs))
        plan = plans[budget, seqs]
        began = time.perf_counter()
        row = plan if isinstance(plan, Lost) else _row(spec, plan, replicas, budget, seqs)
        evaluate_s += time.perf_counter() - began
        if isinstance(row, Lost):
            counts[row.reason] += 1
            skipped[row.reason, row.message] = None
            continue
        counts["limits"] += row["requests_per_s"] == 0.0
        rows.append(row)
    batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(capacity_columns(spec), {}))
    present = {name: count for name, count in counts.items() if count or name == "evaluated"}
    return UnitResult(batch, present, tuple(skipped), (), evaluate_s)


def _row(spec: CapacitySpec, plan: StepPlan, replicas: int, budget: int, seqs: int) -> dict[str, Any] | Lost:
    """Find the capacity of one deployment, as a row."""
    from fastroof.simulation.capacity import capacity
    from fastroof.sweep.unit_plans import Lost, plan_columns

    options: dict[str, Any] = {
        "max_num_batched_tokens": budget, "max_num_seqs": seqs, "block_size": None, **spec.slo
    }  # fmt: skip
    try:
        most = capacity(
            plan, spec.requests, replicas=replicas, router=spec.router, tolerance=spec.tolerance,
            draws=spec.draws, steady=spec.steady, **options,
        )  # fmt: skip
    except SimulationError as error:
        return Lost("engine", f"{plan.model.name} on {plan.gpu.name} tp={plan.tp} {plan.dtype}: {error}")
    return {
        **plan_columns(plan),
        "max_kv_tokens": plan.memory_of(max_num_batched_tokens=budget, max_num_seqs=seqs).max_kv_tokens,
        "replicas": replicas,
        "total_gpus": most.gpus,
        "max_num_batched_tokens": budget,
        "max_num_seqs": seqs,
        "requests_per_s_per_gpu": most.requests_per_s_per_gpu,
        "requests_per_s": most.requests_per_s,
        "limit": most.limit,
        "low": most.low,
        "high": most.high,
        "relative_error": most.relative_error,
        "sampling_error": most.sampling_error,
        "simulations": most.simulations,
        **most.at_capacity,
    }
