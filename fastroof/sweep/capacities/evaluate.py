"""Evaluation of a unit of a sweep over capacities: deployments in, rows and counts out."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, NamedTuple

import pyarrow as pa

from fastroof.arrow import arrow_schema
from fastroof.config import load_gpu
from fastroof.engines import load_engine
from fastroof.errors import GpuError, MissingTableError, PlanError, SimulationError
from fastroof.models import Layout, load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.simulation.capacity import capacity
from fastroof.sweep.capacities.spec import CapacitySpec, capacity_columns
from fastroof.sweep.kind import GpuTables
from fastroof.sweep.units import NO_ROUTING, PlanKey, UnitResult, WorkUnit


class _Lost(NamedTuple):
    """Why a deployment cannot be evaluated: the reason it is counted under, and the message."""

    reason: str
    why: str


def evaluate_capacities(spec: CapacitySpec, unit: WorkUnit, tables: GpuTables) -> UnitResult:
    """Find the capacities of a unit's deployments."""
    key = unit.plan
    counts: Counter[str] = Counter(evaluated=unit.size)
    counts["layout"] = unit.size - (unit.stop - unit.start)
    skipped: dict[tuple[str, str], None] = {}  # a dict as an ordered set
    deployments = spec.deployments(key.tp * key.pp * key.dp)[unit.start : unit.stop]
    engine = load_engine(key.engine).scheduling
    plans: dict[tuple[int, int], StepPlan | _Lost] = {}
    rows = []
    evaluate_s = 0.0
    for replicas, given_tokens, given_seqs in deployments:
        budget = engine.max_num_batched_tokens if given_tokens is None else given_tokens
        seqs = engine.max_num_seqs if given_seqs is None else given_seqs
        if (budget, seqs) not in plans:
            plans[budget, seqs] = _plan(spec, key, tables, budget, seqs)
        plan = plans[budget, seqs]
        began = time.perf_counter()
        row = plan if isinstance(plan, _Lost) else _row(spec, plan, replicas, budget, seqs)
        evaluate_s += time.perf_counter() - began
        if isinstance(row, _Lost):
            counts[row.reason] += 1
            skipped[row.reason, row.why] = None
            continue
        counts["limits"] += row["requests_per_s"] == 0.0
        rows.append(row)
    batch = pa.RecordBatch.from_pylist(rows, schema=arrow_schema(capacity_columns(spec), {}))
    there = {name: count for name, count in counts.items() if count or name == "evaluated"}
    return UnitResult(batch, there, tuple(skipped), (), evaluate_s)


def _plan(spec: CapacitySpec, key: PlanKey, tables: GpuTables, budget: int, seqs: int) -> StepPlan | _Lost:
    """Compile the plan of a deployment, or return why it cannot be compiled."""
    model = load_model(key.model)
    name = f"{model.name} on {load_gpu(key.gpu).name} {key.words}"
    try:
        model.check_layout(Layout(key.tp, key.pp, key.dp, key.ep))
    except PlanError as error:
        return _Lost("tp", str(error))
    try:
        return compile_plan(
            model, key.gpu, tables.tables, dtype=key.dtype, kv_dtype=key.kv_dtype, engine=key.engine,
            method=spec.method, max_tokens=max(budget, seqs), max_seqs=seqs, curves=tables.curves,
            allow_modelled=spec.allow_modelled, **key.layout_options,
        )  # fmt: skip
    except MissingTableError as error:
        return _Lost("tables", f"{name}: {error}")
    except (PlanError, GpuError) as error:
        return _Lost("plan", f"{name}: {error}")


def _row(spec: CapacitySpec, plan: StepPlan, replicas: int, budget: int, seqs: int) -> dict[str, Any] | _Lost:
    """Find the capacity of one deployment, as a row."""
    options: dict[str, Any] = {
        "max_num_batched_tokens": budget, "max_num_seqs": seqs, "block_size": None, **spec.slo
    }  # fmt: skip
    try:
        most = capacity(
            plan, spec.requests, replicas=replicas, routing=spec.router, tolerance=spec.tolerance,
            draws=spec.draws, **options,
        )  # fmt: skip
    except SimulationError as error:
        return _Lost("engine", f"{plan.model.name} on {plan.gpu.name} tp={plan.tp} {plan.dtype}: {error}")
    return {
        "model": plan.model.name,
        "gpu": plan.gpu.name,
        "tp": plan.tp,
        "pp": plan.layout.pp,
        "dp": plan.layout.dp,
        "ep": plan.layout.ep,
        "routing": plan.execution.routing if plan.model.has_experts else NO_ROUTING,
        "replicas": replicas,
        "total_gpus": most.gpus,
        "dtype": plan.dtype,
        "kv_dtype": plan.kv_dtype,
        "engine": plan.engine,
        "kernels": plan.kernels,
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
        "weight_bytes": plan.memory.weight_bytes,
        "max_kv_tokens": plan.memory.max_kv_tokens,
        **most.at_capacity,
    }
