"""Result rows of a sweep over deployments, and what bounds their mean steps."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np
import pyarrow as pa

from fastroof.arrays import Flags, Floats, Longs
from fastroof.arrow import arrow_schema
from fastroof.columns import ORIGINS
from fastroof.compiled import closed_loops, steps
from fastroof.compiled import deployments as loops
from fastroof.errors import PlanError
from fastroof.operators.calls import Rows
from fastroof.plan import StepPlan
from fastroof.plan.arena import attention_times
from fastroof.plan.calls import Ranks
from fastroof.plan.curves import RowCurve, per_row, row_cost, row_values
from fastroof.plan.speculation import SpeculatedPlan
from fastroof.plan.step_error import decode_origins
from fastroof.serving.energy import MeanLoad, joules_per_token
from fastroof.sweep.deployments.columns import columns_of
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.unit_plans import named_column, plan_columns
from fastroof.sweep.units import WorkUnit
from fastroof.units import US_PER_MS, US_PER_S

BOUNDS: Final = ("compute", "memory", "launch", "communication", "host")
"""What can bound a step, in the order of the codes."""
_COMMUNICATION, _HOST = 3, 4


def mean_bounds(target: SpeculatedPlan, answers: Floats, new_tokens: Floats, budget: Floats) -> Flags:
    """Find what bounds most of the mean step's time, weighted over decode-only and mixed steps."""
    plan, arena, queries = target.plan, target.plan.arena, float(target.tokens)
    tokens = _by_bound(plan, "tokens", "decode_only", plan.max_num_batched_tokens)
    decode_tokens = _by_bound(plan, "tokens", "with_prefill", plan.max_num_batched_tokens)
    head_rows = plan.max_num_seqs if queries == 1.0 else max(plan.max_num_batched_tokens, plan.max_num_seqs)
    logits = _by_bound(plan, "sequences", "", head_rows)
    decodes, prefill = answers[closed_loops.DECODES], answers[closed_loops.PREFILL_TOKENS]
    decode_us = answers[closed_loops.DECODE_STEP_MS] * US_PER_MS
    mixed_us = answers[closed_loops.MIXED_STEP_MS] * US_PER_MS
    # one client with an output of one token: all steps are chunks of its prompt
    is_single = (decode_us == 0.0) & (mixed_us == 0.0)
    own_us = answers[closed_loops.TTFT_MS] * US_PER_MS / np.ceil(new_tokens / budget)
    mixed_us = np.where(is_single, own_us, mixed_us)
    prefill = np.where(is_single, np.minimum(new_tokens, budget), prefill)
    share = np.where(is_single, 1.0, answers[closed_loops.MIXED_SHARE])

    verified = decodes * (queries - 1.0)

    def rows_us(of_tokens: Floats, m: Floats, seqs: Floats) -> Floats:
        at = [np.rint(rows + verified).astype(np.int64) for rows in (m, seqs)]
        bound_us = of_tokens[:, np.minimum(at[0], plan.max_num_batched_tokens)] + logits[:, at[1]]
        bound_us[_HOST] += arena[steps.STEP_US] + arena[steps.SEQUENCE_US] * seqs
        return bound_us

    total = np.where(decode_us > 0.0, rows_us(decode_tokens, decodes, decodes), 0.0)
    drafted = _of_draft(target, decodes, answers[closed_loops.KV_LEN])
    total += np.where(decode_us > 0.0, drafted, 0.0)
    attention_us = decode_us - total.sum(axis=0)
    left_us = np.where(decode_us > 0.0, attention_us, 0.0)
    of_decodes = _attention(plan, True, np.maximum(decodes, 1.0), answers[closed_loops.KV_LEN], left_us)
    total += of_decodes
    mixed = rows_us(tokens, decodes + prefill, decodes + answers[closed_loops.PROMPTS])
    # decodes may take longer when mixed with prefill
    kv_tokens = decodes * answers[closed_loops.KV_LEN]
    least_us = arena[steps.MIXED_KV_US] * kv_tokens
    window = arena[steps.WINDOW]
    if window > 0.0:
        attended = decodes * np.minimum(answers[closed_loops.KV_LEN], window)
        least_us = least_us + arena[steps.MIXED_WINDOW_KV_US] * attended
    own_us = of_decodes.sum(axis=0)
    longer = np.where(
        own_us > 0.0, np.maximum(least_us / np.maximum(own_us, np.finfo(np.float64).tiny), 1.0), 1.0
    )
    mixed += of_decodes * longer + drafted
    mixed[_HOST] += arena[steps.PREFILL_US]
    chunk = np.clip(np.minimum(new_tokens, prefill), 1.0, None)
    mixed += _attention(plan, False, prefill / chunk, chunk, mixed_us - mixed.sum(axis=0))
    floor_us = arena[steps.PREFILL_FLOOR_US]
    on_host = np.where(np.arange(len(BOUNDS))[:, None] == _HOST, mixed_us, 0.0)
    mixed = np.where(mixed_us <= floor_us, on_host, mixed)
    most: Flags = np.argmax((1.0 - share) * total + share * mixed, axis=0).astype(np.uint8)
    return most


def _of_draft(target: SpeculatedPlan, decodes: Floats, kv_len: Floats) -> Floats:
    """Return the time of the draft's steps before a verification, by bound, in us."""
    draft = target.draft
    if draft is None:
        return np.zeros((len(BOUNDS), len(decodes)))
    batch, passes = np.maximum(decodes, 1.0), target.passes
    most = draft.max_num_batched_tokens
    tokens_us = _by_bound(draft, "tokens", "with_prefill", most)
    head_us = _by_bound(draft, "sequences", "", max(most, draft.max_num_seqs))
    kinds = (attention_times(draft, i, True, batch, kv_len).own_us for i in range(len(draft.attention)))
    attention_us = _attention(draft, True, batch, kv_len, np.sum(list(kinds), axis=0))

    def pass_us(tokens: int, with_head: int) -> Floats:
        at = [np.minimum(np.rint(batch * each), most).astype(np.int64) for each in (tokens, with_head)]
        return tokens_us[:, at[0]] + head_us[:, at[1]] + attention_us

    drafted: Floats = (passes.steps - 1) * pass_us(passes.later, passes.later_head)
    return drafted + pass_us(passes.first, passes.first_head) if passes.first else drafted


def _largest_term(plan: StepPlan, compute_s: Any, moved_bytes: Any, launch_us: float) -> Any:
    memory_us = np.asarray(moved_bytes / plan.gpu.hbm_bytes_per_s * US_PER_S)
    terms = np.broadcast_arrays(np.asarray(compute_s * US_PER_S), memory_us, launch_us)
    return np.argmax(np.stack(terms), axis=0)


def _by_bound(plan: StepPlan, rows: Rows, left_out: str, limit: int) -> Floats:
    """Return the time of operators over tokens or sequences, by bound and number of rows, in us."""
    bound_us = np.zeros((len(BOUNDS), limit + 1))
    at, ranks = np.arange(limit + 1), Ranks.of(plan.layout, plan.execution)
    for curve in plan.row_curves:
        call = curve.operator
        if (call.rows == "sequences") != (rows == "sequences") or call.steps == left_out:
            continue
        rows_of_call = ranks.rows(call, limit)
        latency_us = row_values(curve, int(rows_of_call[-1]))[0][rows_of_call]
        bound_us[_curve_bound(plan, curve, rows_of_call.astype(np.float64)), at] += call.times * latency_us
    bound_us[:, 0] = 0.0
    return bound_us


def _curve_bound(plan: StepPlan, curve: RowCurve, rows: Any) -> Any:
    operator = per_row(curve.operator)
    if operator.over_link:
        return np.full(len(rows), _COMMUNICATION)
    work, moved = operator.row_work(curve.operator, rows)
    return _largest_term(plan, work / plan.gpu.peak(row_cost(curve.operator).dtype), moved, curve.launch_us)


def _attention(plan: StepPlan, is_decode: bool, batch: Floats, x: Floats, left_us: Floats) -> Floats:
    """Split attention time by bound, in us: kinds of layers share it in proportion to their own times."""
    left_us = np.maximum(left_us, 0.0)
    kinds = [attention_times(plan, i, is_decode, batch, x) for i in range(len(plan.attention))]
    all_us = np.sum([kind.own_us for kind in kinds], axis=0)
    bound_us = np.zeros((len(BOUNDS), len(left_us)))
    for part, kind in zip(plan.attention, kinds, strict=True):
        does = part.phase(is_decode).work_at(plan.gpu, batch, x)
        bound = _largest_term(plan, np.asarray(does.flops / does.peak), does.moved_bytes, kind.launch_us)
        share = kind.own_us / all_us if len(kinds) > 1 else 1.0
        bound_us[bound, np.arange(len(left_us))] += left_us * share
    return bound_us


_LIMIT_NAMES: Final = ("ttft", "tpot", "request_latency", "kv_share", "total_gpus")
_ANSWER_COLUMNS: Final = {
    "clients": closed_loops.CONCURRENCY,
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


@cache
def _schema(objective: str) -> pa.Schema:
    return arrow_schema(columns_of(objective), {})


def no_rows(spec: DeploymentSpec) -> pa.RecordBatch:
    """Return an empty batch with the results' columns."""
    return pa.RecordBatch.from_pylist([], schema=_schema(spec.objective))


def candidate_rows(
    spec: DeploymentSpec,
    unit: WorkUnit,
    target: SpeculatedPlan,
    axes: loops.Axes,
    numbers: Longs,
    answers: Floats,
    codes: Flags,
) -> pa.RecordBatch:
    """Return candidates and their estimates as rows."""
    count, plan, speculation = len(numbers), target.plan, spec.speculation
    if not count:
        return no_rows(spec)
    schema = _schema(spec.objective)
    sizes = (len(axes.replicas), *map(len, spec.load_axes.values()))
    layout, isl, osl, _, budget, hit = np.unravel_index(numbers, sizes)
    columns: dict[str, Any] = {
        name: pa.array(answers[row], from_pandas=True) for name, row in _ANSWER_COLUMNS.items()
    }
    fixed = plan_columns(plan) | {
        "mode": unit.mode,
        "weight_bytes": target.memory().weight_bytes,
        "num_draft_tokens": target.tokens - 1,
        "accepted": target.accepted,
        "draft": None if speculation is None else speculation.draft,
    }
    for name, value in fixed.items():
        columns[name] = pa.repeat(pa.scalar(value, schema.field(name).type), count)
    workers = {
        name: getattr(axes, name)[layout] / plan.layout.batches_in_flight
        for name in ("replicas", "prefill_workers", "decode_workers")
    }
    new_tokens = np.maximum(axes.isl[isl] * (1.0 - axes.prefix_hit[hit]), 1.0)
    kept_all = np.ones(count, bool)
    kept_all[(codes >= closed_loops.TTFT) & (codes <= closed_loops.GPUS)] = False
    seqs = answers[closed_loops.MAX_SEQS]
    if plan.profile.memory.room == "all":  # vLLM starts with at most as many requests as tokens of a step
        seqs = np.minimum(seqs, axes.budget[budget])
    all_columns = {
        **workers,
        "total_gpus": plan.layout.world_size * sum(workers.values()),
        "isl": axes.isl[isl],
        "osl": axes.osl[osl],
        "max_num_batched_tokens": axes.budget[budget],
        "max_num_seqs": seqs,
        "max_kv_tokens": answers[closed_loops.ROOM],
    }
    columns |= {name: pa.array(np.asarray(values).astype(np.int64)) for name, values in all_columns.items()}
    columns["prefix_hit"] = pa.array(axes.prefix_hit[hit])
    columns["bound"] = named_column(mean_bounds(target, answers, new_tokens, axes.budget[budget]), BOUNDS)
    means = answers[closed_loops.DECODES], answers[closed_loops.KV_LEN]
    columns["origin"] = named_column(decode_origins(plan, *means, has_drafts=target.tokens > 1), ORIGINS)
    columns["exceeds"] = named_column(codes - closed_loops.TTFT, _LIMIT_NAMES, kept_all)
    errors = _relative_error(plan, answers) if target.tokens == 1 else pa.nulls(count, pa.float64())
    columns["relative_error"] = errors
    if spec.objective == "energy":
        sizes_of = axes.isl[isl], new_tokens, axes.osl[osl], axes.budget[budget]
        load = _mean_load(answers, *sizes_of, axes.replicas[layout])
        is_prefill_first = plan.profile.scheduling.order == "prefill_first"
        columns["joules_per_token"] = pa.array(joules_per_token(plan, load, is_prefill_first))
    return pa.RecordBatch.from_arrays([columns[field.name] for field in schema], schema=schema)


def _mean_load(
    answers: Floats, isl: Floats, new: Floats, osl: Floats, budget: Floats, replicas: Floats
) -> MeanLoad:
    """Return candidates' mean steps, of one replica."""
    loops = closed_loops
    return MeanLoad(
        answers[loops.DECODES], answers[loops.PREFILL_TOKENS], answers[loops.KV_LEN], isl, new, osl, budget,
        answers[loops.CONCURRENCY] / replicas, answers[loops.REQUEST_MS] * US_PER_MS, answers[loops.PER_GPU],
    )  # fmt: skip


def _relative_error(plan: StepPlan, answers: Floats) -> pa.Array:
    """Return the relative standard error of the mean decode step; null if the plan has no errors."""
    decodes = np.rint(np.maximum(answers[closed_loops.DECODES], 1.0)).astype(np.int64)
    kv_len = np.rint(answers[closed_loops.KV_LEN]).astype(np.int64)
    try:
        error = np.asarray(plan.decode_error(decodes, kv_len))
    except PlanError:
        return pa.nulls(answers.shape[1], pa.float64())
    return pa.array(error, mask=answers[closed_loops.DECODE_STEP_MS] == 0.0)
