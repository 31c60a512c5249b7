"""Rows of a sweep over deployments: candidates and answers as columns."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.columns import ORIGINS
from fastroof.compiled import closed_loops
from fastroof.compiled import deployments as loops
from fastroof.errors import PlanError
from fastroof.plan import StepPlan
from fastroof.serving.speculation import SpeculatedPlan
from fastroof.sweep.columns import NO_ROUTING
from fastroof.sweep.deployments.columns import COLUMNS
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.deployments.step_bounds import BOUNDS, mean_bounds
from fastroof.sweep.units import WorkUnit

__all__ = ["candidate_rows", "no_rows", "split_values"]


_LIMIT_NAMES: Final = ("ttft", "tpot", "request_latency", "kv_share", "total_gpus")
_SCHEMA: Final = arrow_schema(COLUMNS, {})
_ANSWER_COLUMNS: Final = {
    "concurrency": closed_loops.CONCURRENCY,
    "request_rate_per_s": closed_loops.REQUEST_RATE,
    "ttft_ms": closed_loops.TTFT_MS,
    "tpot_ms": closed_loops.TPOT_MS,
    "itl_ms": closed_loops.TPOT_MS,
    "request_latency_ms": closed_loops.REQUEST_MS,
    "tokens_per_s": closed_loops.TOKENS_PER_S,
    "tokens_per_s_per_gpu": closed_loops.PER_GPU,
    "tokens_per_s_per_user": closed_loops.PER_USER,
    "requests_per_s": closed_loops.REQUESTS_PER_S,
    "cost_per_million_tokens": closed_loops.COST,
    "effective_concurrency": closed_loops.EFFECTIVE,
    "decode_step_ms": closed_loops.DECODE_STEP_MS,
    "mixed_step_ms": closed_loops.MIXED_STEP_MS,
    "mixed_share": closed_loops.MIXED_SHARE,
    "wait_ms": closed_loops.WAIT_MS,
    "kv_share": closed_loops.KV_SHARE,
}


def no_rows() -> pa.RecordBatch:
    """Return a batch of the results' columns without a row."""
    return pa.RecordBatch.from_pylist([], schema=_SCHEMA)


def split_values(plan: StepPlan) -> dict[str, Any]:
    """How a plan's model is split beside tp, by column."""
    routing = plan.execution.routing if plan.model.has_experts else NO_ROUTING
    return {"pp": plan.layout.pp, "dp": plan.layout.dp, "ep": plan.layout.ep, "routing": routing}


def candidate_rows(
    spec: DeploymentSpec,
    unit: WorkUnit,
    target: SpeculatedPlan,
    axes: loops.Axes,
    numbers: Longs,
    answers: Floats,
    codes: Flags,
    origins: Flags,
) -> pa.RecordBatch:
    """Lay candidates and their answers out as rows."""
    count, plan, speculation = len(numbers), target.plan, spec.speculation
    if not count:
        return no_rows()
    sizes = (len(axes.replicas), *map(len, spec.load_axes.values()))
    layout, isl, osl, _, budget, hit = np.unravel_index(numbers, sizes)
    columns: dict[str, Any] = {
        name: pa.array(answers[row], from_pandas=True) for name, row in _ANSWER_COLUMNS.items()
    }
    fixed = {"model": plan.model.name, "gpu": plan.gpu.name, "mode": unit.mode, "dtype": plan.dtype,
             "kv_dtype": plan.kv_dtype, "runtime": plan.runtime, "kernels": plan.kernels}  # fmt: skip
    columns |= {name: pa.repeat(pa.scalar(value, pa.string()), count) for name, value in fixed.items()}
    workers = {
        name: getattr(axes, name)[layout] / plan.layout.batches_in_flight
        for name in ("replicas", "prefill_workers", "decode_workers")
    }
    new_tokens = np.maximum(axes.isl[isl] * (1.0 - axes.prefix_hit[hit]), 1.0)
    kept_all = np.ones(count, bool)
    kept_all[(codes >= closed_loops.TTFT) & (codes <= closed_loops.GPUS)] = False
    whole = {
        **workers,
        "tp": np.full(count, plan.tp),
        "total_gpus": plan.layout.world_size * sum(workers.values()),
        "isl": axes.isl[isl],
        "osl": axes.osl[osl],
        "max_batched_tokens": axes.budget[budget],
        "weight_bytes": np.full(count, target.memory().weight_bytes),
        "num_draft_tokens": np.full(count, target.tokens - 1),
        "max_kv_tokens": axes.max_kv_tokens[budget],
    }
    columns |= {name: pa.array(np.asarray(values).astype(np.int64)) for name, values in whole.items()}
    of_split = split_values(plan)
    for name, value in of_split.items():
        columns[name] = pa.repeat(pa.scalar(value, _SCHEMA.field(name).type), count)
    columns["prefix_hit"] = pa.array(axes.prefix_hit[hit])
    columns["accepted"] = pa.repeat(1.0 if speculation is None else speculation.acceptance_length, count)
    draft = None if speculation is None else speculation.draft
    columns["draft"] = pa.repeat(pa.scalar(draft, pa.string()), count)
    columns["bound"] = _names(mean_bounds(target, answers, new_tokens, axes.budget[budget]), BOUNDS)
    columns["origin"] = _names(origins, ORIGINS)
    columns["exceeds"] = _names(codes - closed_loops.TTFT, _LIMIT_NAMES, kept_all)
    errors = _relative_error(plan, answers) if target.tokens == 1 else pa.nulls(count, pa.float64())
    columns["relative_error"] = errors
    return pa.RecordBatch.from_arrays([columns[field.name] for field in _SCHEMA], schema=_SCHEMA)


def _relative_error(plan: StepPlan, answers: Floats) -> pa.Array:
    """Relative standard error of the mean step of decodes, where the plan knows its errors."""
    decodes = np.rint(np.maximum(answers[closed_loops.DECODES], 1.0)).astype(np.int64)
    kv_len = np.rint(answers[closed_loops.KV_LEN]).astype(np.int64)
    try:
        error = np.asarray(plan.decode_error(decodes, kv_len))
    except PlanError:
        return pa.nulls(answers.shape[1], pa.float64())
    return pa.array(error, mask=answers[closed_loops.DECODE_STEP_MS] == 0.0)


def _names(codes: Flags, names: tuple[str, ...], missing: Bools | None = None) -> pa.Array:
    """Text column of coded names; null where missing."""
    indices = pa.array(codes.astype(np.int8), mask=missing)
    return pa.DictionaryArray.from_arrays(indices, pa.array(names)).dictionary_decode()
