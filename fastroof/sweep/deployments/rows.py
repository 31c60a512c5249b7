"""Rows of a deployment sweep: candidates and answers as columns, and which of many rows are kept."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.columns import DEPLOYMENT_COLUMNS, ORIGINS
from fastroof.compiled import closed_loops
from fastroof.compiled import deployments as loops
from fastroof.compiled.reductions import BestTable, Fronts, reduce_best, reduce_pareto
from fastroof.engines import load_engine
from fastroof.errors import PlanError
from fastroof.models import load_model
from fastroof.plan import StepPlan
from fastroof.results import arrow_schema
from fastroof.sweep.deployments.bounds import BOUNDS, mean_bounds
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.units import WorkUnit

__all__ = ["no_rows", "ordered_rows", "reduced_rows", "rows_of"]


_LIMIT_NAMES: Final = ("ttft", "tpot", "request_latency", "kv_share", "total_gpus")
_SCHEMA: Final = arrow_schema(DEPLOYMENT_COLUMNS, {})
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


def rows_of(
    spec: DeploymentSpec,
    unit: WorkUnit,
    plan: StepPlan,
    axes: loops.Axes,
    numbers: Longs,
    answers: Floats,
    codes: Flags,
    origins: Flags,
) -> pa.RecordBatch:
    """Lay candidates and their answers out as rows."""
    count = len(numbers)
    if not count:
        return no_rows()
    sizes = (len(axes.replicas), *map(len, spec.grid.values()))
    layout, isl, osl, _, budget, hit = np.unravel_index(numbers, sizes)
    columns: dict[str, Any] = {
        name: pa.array(answers[row], from_pandas=True) for name, row in _ANSWER_COLUMNS.items()
    }
    fixed = {"model": plan.model.name, "gpu": plan.gpu.name, "mode": unit.mode, "dtype": plan.dtype,
             "kv_dtype": plan.kv_dtype, "runtime": plan.runtime}  # fmt: skip
    columns |= {name: pa.repeat(pa.scalar(value, pa.string()), count) for name, value in fixed.items()}
    workers = {
        name: getattr(axes, name)[layout] for name in ("replicas", "prefill_workers", "decode_workers")
    }
    new_tokens = np.maximum(axes.isl[isl] * (1.0 - axes.prefix_hit[hit]), 1.0)
    kept_all = np.ones(count, bool)
    kept_all[(codes >= closed_loops.TTFT) & (codes <= closed_loops.GPUS)] = False
    whole = {
        **workers,
        "tp": np.full(count, plan.tp),
        "total_gpus": plan.tp * sum(workers.values()),
        "isl": axes.isl[isl],
        "osl": axes.osl[osl],
        "max_batched_tokens": axes.budget[budget],
        "weight_bytes": np.full(count, plan.memory.weight_bytes),
        "max_kv_tokens": axes.max_kv_tokens[budget],
    }
    columns |= {name: pa.array(np.asarray(values).astype(np.int64)) for name, values in whole.items()}
    columns["prefix_hit"] = pa.array(axes.prefix_hit[hit])
    columns["bound"] = _names(mean_bounds(plan, answers, new_tokens, axes.budget[budget]), BOUNDS)
    columns["origin"] = _names(origins, ORIGINS)
    columns["exceeds"] = _names(codes - closed_loops.TTFT, _LIMIT_NAMES, kept_all)
    columns["relative_error"] = _relative_error(plan, answers)
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


def _groups(spec: DeploymentSpec, rows: pa.Table) -> Longs:
    """Number the group of each row, in the order of the spec's names and of numbers."""
    orders: dict[str, list[str]] = {
        "model": [load_model(name).name for name in spec.models],
        "gpu": list(spec.gpu_names),
        "mode": list(spec.mode),
        "dtype": list(spec.dtype),
        "kv_dtype": list(spec.kv_dtype),
        "runtime": [load_engine(name).name for name in spec.runtime],
    }
    found = np.zeros(rows.num_rows, np.int64)
    for name in spec.per:
        if name in orders:
            codes = pc.index_in(rows[name], value_set=pa.array(orders[name])).to_numpy().astype(np.int64)
        else:
            codes = np.unique(rows[name].to_numpy(), return_inverse=True)[1]
        found = np.unique(found * (int(codes.max()) + 1) + codes, return_inverse=True)[1]
    return found


def _column(rows: pa.Table, name: str) -> Floats:
    return np.asarray(rows[name].to_numpy(), np.float64)


def _objective(spec: DeploymentSpec, rows: pa.Table) -> Floats:
    """What there should be most of; -inf where a row is not within the limits, or has none of it."""
    name = {"cost": "cost_per_million_tokens", "goodput": "tokens_per_s"}.get(spec.objective, spec.objective)
    values = _column(rows, name) * (-1.0 if spec.objective == "cost" else 1.0)
    exceeds = rows["exceeds"].is_valid().to_numpy()
    return np.where(exceeds | np.isnan(values), -np.inf, values)


def reduced_rows(
    spec: DeploymentSpec, rows: pa.Table, keep: str | None = None, k: int | None = None
) -> pa.Table:
    """Keep what the spec asks for of rows in the order of their units; their order stays.

    Reducing parts of them first makes no difference.
    """
    keep = spec.keep if keep is None else keep
    k = spec.k if k is None else k
    if keep == "all" or not rows.num_rows:
        return rows
    groups = _groups(spec, rows)
    count = int(groups.max()) + 1
    if keep == "best":
        # no group keeps more rows than it has
        shape = (count, min(k, int(np.bincount(groups).max())))
        table = BestTable(np.empty(shape), np.empty(shape, np.int64), np.zeros(count, np.int64))
        reduce_best(groups, _objective(spec, rows), table)
        kept = table.at[np.arange(shape[1]) < table.taken[:, None]]
    else:
        shape = (count, int(np.bincount(groups).max()))
        fronts = Fronts(
            np.empty(shape), np.empty(shape), np.empty(shape, np.int64), np.zeros(count, np.int64)
        )
        per_user = np.nan_to_num(_column(rows, "tokens_per_s_per_user"), nan=0.0)
        reduce_pareto(groups, per_user, _column(rows, "tokens_per_s_per_gpu"), 0, fronts)
        kept = fronts.at[np.arange(shape[1]) < fronts.taken[:, None]]
    return rows.take(pa.array(np.sort(kept)))


def ordered_rows(spec: DeploymentSpec, rows: pa.Table) -> pa.Table:
    """Put the kept rows in the order of the file: by group, the best first, a front from end to end."""
    if spec.keep == "all" or not rows.num_rows:
        return rows
    groups = _groups(spec, rows)
    if spec.keep == "best":
        value = -_objective(spec, rows)
    else:
        value = np.nan_to_num(_column(rows, "tokens_per_s_per_user"), nan=0.0)
    return rows.take(pa.array(np.lexsort((np.arange(len(groups)), value, groups))))
