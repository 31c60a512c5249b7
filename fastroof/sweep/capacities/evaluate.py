"""Evaluation of a unit of a sweep over capacities: deployments in, rows and counts out."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pyarrow as pa

from fastroof.arrow import arrow_schema
from fastroof.engines import load_engine
from fastroof.errors import SimulationError
from fastroof.plan import StepPlan
from fastroof.simulation.capacity import capacity
from fastroof.sweep.capacities.spec import CapacitySpec, capacity_columns
from fastroof.sweep.kind import GpuTables
from fastroof.sweep.unit_plans import Lost, plan_columns, unit_plan
from fastroof.sweep.units import UnitResult, WorkUnit


def evaluate_capacities(spec: CapacitySpec, unit: WorkUnit, tables: GpuTables) -> UnitResult:
    """Find the capacities of a unit's deployments."""
    key = unit.plan
    counts: Counter[str] = Counter(evaluated=unit.size)
    counts["layout"] = unit.size - (unit.stop - unit.start)
    skipped: dict[tuple[str, str], None] = {}  # a dict as an ordered set
    deployments = spec.deployments(key.tp * key.pp * key.dp)[unit.start : unit.stop]
    engine = load_engine(key.engine).on(tables.gpu).scheduling
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
    options: dict[str, Any] = {
        "max_num_batched_tokens": budget, "max_num_seqs": seqs, "block_size": None, **spec.slo
    }  # fmt: skip
    try:
        most = capacity(
            plan, spec.requests, replicas=replicas, routing=spec.router, tolerance=spec.tolerance,
            draws=spec.draws, steady=spec.steady, **options,
        )  # fmt: skip
    except SimulationError as error:
        return Lost("engine", f"{plan.model.name} on {plan.gpu.name} tp={plan.tp} {plan.dtype}: {error}")
    return {
        **plan_columns(plan),
        "max_kv_tokens": plan.memory_of(max_tokens=budget, max_seqs=seqs).max_kv_tokens,
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
