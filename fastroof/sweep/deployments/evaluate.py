"""Evaluation of a unit of a sweep over deployments: candidates in, rows and counts out."""

from __future__ import annotations

import math
import time
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from fastroof.acceptance import MTP
from fastroof.arrays import Flags, Floats, Longs
from fastroof.compiled import closed_loops
from fastroof.compiled import deployments as loops
from fastroof.compiled.closed_loops import DeploymentOptions
from fastroof.compiled.deployments import BINS, Axes, BestTable, Fronts
from fastroof.compiled.serving_options import FrontEndTimes
from fastroof.errors import BatchError, MissingTableError, PlanError
from fastroof.memory.plan_memory import PlanMemory
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.calls import rank_rules
from fastroof.plan.speculation import SpeculatedPlan, SpeculativeDecoding, speculated
from fastroof.serving.estimate import LENGTH_SPREAD
from fastroof.serving.scenarios import steps_met
from fastroof.sweep.deployments.columns import OBJECTIVES
from fastroof.sweep.deployments.reductions import reduced_rows
from fastroof.sweep.deployments.rows import candidate_rows, no_rows
from fastroof.sweep.deployments.spec import DeploymentSpec
from fastroof.sweep.kind import GpuTables
from fastroof.sweep.unit_plans import Lost, lost, plan_columns, unit_plan
from fastroof.sweep.units import PlanKey, UnitResult, WorkUnit
from fastroof.units import SECONDS_PER_HOUR, US_PER_MS, US_PER_S

TOKENS_A_PRICE = 1e6
MORE_TOKENS = 8
"""Extra tokens of a plan: a full step's tokens are a sum of floats, which may round above the budget."""


def largest_plan(spec: DeploymentSpec, key: PlanKey, tables: GpuTables) -> StepPlan | Lost:
    """Compile the plan of a unit for the largest steps of a spec."""
    budget, seqs = spec.max_num_batched_tokens[-1], spec.max_num_seqs[-1]
    tokens = max(budget, seqs) + MORE_TOKENS
    return unit_plan(
        spec, key, tables, max_num_batched_tokens=tokens, max_num_seqs=seqs + budget + MORE_TOKENS
    )


def speculated_plan(
    spec: DeploymentSpec, plan: StepPlan, key: PlanKey, tables: GpuTables
) -> SpeculatedPlan | Lost:
    """Return a unit's plan with the spec's draft, in the form that the loops read."""
    try:
        return speculated(plan, drafts_of(spec, plan, key, tables))
    except (BatchError, MissingTableError, PlanError) as error:
        draft = spec.speculation.draft if spec.speculation is not None else ""
        return lost(f"{plan.model.name} on {plan.gpu.name} {key.words}, draft {draft}", error)


def drafts_of(
    spec: DeploymentSpec, plan: StepPlan, key: PlanKey, tables: GpuTables
) -> SpeculativeDecoding | None:
    """Return the draft tokens of a unit's plan; None without any."""
    requested = spec.speculation
    if requested is None:
        return None
    draft: StepPlan | str | None = MTP if requested.draft == MTP else None
    if requested.draft_model is not None:
        draft = compile_plan(
            requested.draft_model, key.gpu, tables.tables, tp=requested.draft_tp or plan.tp,
            dtype=requested.draft_dtype, kv_dtype=plan.kv_dtype, engine=key.engine, method=spec.method,
            max_num_batched_tokens=plan.max_num_batched_tokens, max_num_seqs=plan.max_num_seqs,
            curves=tables.curves,
        )  # fmt: skip
    return SpeculativeDecoding(requested.num_draft_tokens, requested.accepted, draft).for_model(
        plan.model.name
    )


def limits_to_try(spec: DeploymentSpec, plan: StepPlan) -> tuple[int, ...]:
    """Return the limits on concurrent requests that a plan's candidates choose from, the preferred first."""
    limit = plan.profile.scheduling.max_num_seqs
    # memory above the engine's own limit is unknown
    tried = [seqs for seqs in spec.max_num_seqs if seqs <= limit] or [spec.max_num_seqs[0]]
    return tuple(sorted(tried, reverse=True))


def candidate_axes(spec: DeploymentSpec, target: SpeculatedPlan, mode: str) -> Axes:
    """Return the axes of a plan's candidates; each budget and limit on requests has its own KV memory."""
    plan = target.plan

    def floats(values: object) -> Floats:
        return np.array(values, np.float64)

    def memory(tokens: int, seqs: int) -> PlanMemory:
        return target.memory(max_num_batched_tokens=tokens, max_num_seqs=seqs)

    # each batch in flight counts as a replica or worker: one per rank, or per stage with its share of the KV
    laid_out = floats(spec.layouts(mode, plan.layout.world_size)).reshape(-1, 3) * (
        plan.layout.batches_in_flight
    )
    limits = limits_to_try(spec, plan)
    room = [
        [memory(budget, seqs).max_kv_tokens // plan.layout.pp for seqs in limits]
        for budget in spec.max_num_batched_tokens
    ]
    # an engine does not start with more requests than it has state for
    most = max(spec.max_num_batched_tokens)
    running = [memory(most, seqs).most_running(seqs) for seqs in limits]
    load = spec.clients if spec.rate is None else spec.rate
    return Axes(
        laid_out[:, 0].copy(), laid_out[:, 1].copy(), laid_out[:, 2].copy(),
        floats(spec.isl), floats(spec.osl), floats(load), floats(spec.max_num_batched_tokens),
        floats(spec.prefix_hit), np.floor(floats(running)), floats(room),
    )  # fmt: skip


def candidate_options(spec: DeploymentSpec, target: SpeculatedPlan, mode: str) -> DeploymentOptions:
    """Return the options that all candidates of a plan share."""
    plan = target.plan
    memory = target.memory(
        max_num_batched_tokens=max(spec.max_num_batched_tokens), max_num_seqs=spec.max_num_seqs[-1]
    )
    limits = spec.constraints
    price = spec.price(plan.gpu.name)

    def limit(value: float | None) -> float:
        return math.inf if value is None else float(value)

    link = plan.gpu.nvlink_bytes_per_s if spec.link_bytes_per_s is None else spec.link_bytes_per_s
    model = plan.model
    a_sequence = target.whole_kv_bytes()
    return DeploymentOptions(
        is_disaggregated=mode == "disaggregated",
        is_rate=spec.rate is not None,
        tp=float(plan.tp),
        max_position=float(model.max_position),
        osl_reserved=plan.profile.memory.osl_reserved,
        is_chunked=plan.profile.scheduling.chunked_prefill,
        # as in estimate_disaggregated: all GPUs of a worker send concurrently
        transfer_us_per_token=a_sequence.token_bytes / (link * plan.tp * plan.layout.pp) * US_PER_S,
        us_per_ms=US_PER_MS,
        us_per_s=US_PER_S,
        gpu_price=math.nan if price is None else price / SECONDS_PER_HOUR * TOKENS_A_PRICE,
        ttft_ms=limit(limits.ttft_ms),
        # both means are equal
        tpot_ms=min(limit(limits.tpot_ms), limit(limits.itl_ms)),
        request_ms=limit(limits.request_latency_ms),
        kv_share=limit(limits.kv_share),
        total_gpus=limit(limits.total_gpus),
        objective=OBJECTIVES.index(spec.objective),
        window=float(memory.window_tokens),
        transfer_window=float(a_sequence.window_tokens),
        window_share=memory.window_share,
        transfer_window_share=a_sequence.window_share,
        state_tokens=memory.state_tokens + memory.open_tokens,
        transfer_state_tokens=a_sequence.state_tokens,
        is_prefill_first=plan.profile.scheduling.order == "prefill_first",
        length_spread=LENGTH_SPREAD,
        # at a given rate, requests do not wait for one another
        steps_met=steps_met(plan.profile, "closed" if spec.rate is None else "random"),
        rules=rank_rules(plan),
        batches=float(plan.layout.batches_in_flight),
        front_end=FrontEndTimes(*plan.profile.front_end.times_us),
    )


CODE_NAMES: Final = (
    "feasible", "memory", "context", "rate", "ttft", "tpot", "request_latency", "kv_share", "total_gpus",
    "plan size", "whole_prompt",
)  # fmt: skip
"""Outcomes of a candidate, in the order of the compiled loop's codes."""

_LAYOUT_COLUMNS: Final = ("replicas", "prefill_workers", "decode_workers", "total_gpus")
FIRST_FRONT: Final = 8
"""Initial capacity of a front, in points; it grows."""


def evaluate_deployments(spec: DeploymentSpec, unit: WorkUnit, tables: GpuTables) -> UnitResult:
    """Estimate a unit's candidates, and return the rows that the spec selects."""
    plan = largest_plan(spec, unit.plan, tables)
    if isinstance(plan, Lost):
        return _no_rows(spec, unit, plan)
    target = speculated_plan(spec, plan, unit.plan, tables)
    if isinstance(target, Lost):
        return _no_rows(spec, unit, target)
    counts = {"evaluated": unit.size}
    impossible = unit.size - (unit.stop - unit.start)
    if impossible:
        counts["layout"] = impossible
    axes = candidate_axes(spec, target, unit.mode)
    candidates = _Candidates(
        target.arena, axes, candidate_options(spec, target, unit.mode), closed_loops.new_scratch()
    )
    # joules are not an answer of the loops: all rows are made, then reduced
    is_each_made = spec.keep == "all" or spec.objective == "energy"
    is_reduced = not is_each_made or spec.histogram
    # compilation is not part of the evaluation time
    candidates.estimated(np.empty(0, np.int64))
    if is_reduced:
        candidates.reduced(0, 0, _reduction(1, 1, False, False))
    began = time.perf_counter()
    histograms: tuple[dict[str, Any], ...] = ()
    numbers = np.arange(unit.start, unit.stop)
    if is_reduced:
        empty = _empty_reduction(spec, unit, plan)
        by_code, reduction = candidates.reduced(unit.start, unit.stop, empty)
        histograms = _histograms(spec, unit, plan, reduction)
        numbers = numbers if is_each_made else _selected_numbers(reduction)
    answers, codes = candidates.estimated(numbers)
    if is_each_made:
        by_code = np.bincount(codes, minlength=closed_loops.CODES)
        valid = codes == closed_loops.FEASIBLE
        if spec.keep == "all":
            valid |= (codes >= closed_loops.TTFT) & (codes <= closed_loops.GPUS)
        numbers, answers, codes = numbers[valid], answers[:, valid], codes[valid]
    evaluate_s = time.perf_counter() - began
    by_name = dict(zip(CODE_NAMES[1:], by_code.tolist()[1:], strict=True))
    counts |= {name: count for name, count in by_name.items() if count}
    rows = candidate_rows(spec, unit, target, axes, numbers, answers, codes)
    if is_each_made and spec.keep != "all" and len(numbers):
        rows = reduced_rows(spec, pa.Table.from_batches([rows])).combine_chunks().to_batches()[0]
    return UnitResult(rows, counts, (), histograms, evaluate_s)


def _no_rows(spec: DeploymentSpec, unit: WorkUnit, why: Lost) -> UnitResult:
    """Return the result of a unit without a plan: only counts."""
    counts = {"evaluated": unit.size, why.reason: unit.size}
    skipped = (why,) if unit.start == 0 else ()
    return UnitResult(no_rows(spec), counts, skipped)


class _Candidates(NamedTuple):
    """A plan's candidates as the loops read them."""

    arena: Floats
    axes: Axes
    options: DeploymentOptions
    scratch: closed_loops.Scratch

    def estimated(self, numbers: Longs) -> tuple[Floats, Flags]:
        """Estimate candidates by their numbers; return answers and codes."""
        answers, codes = np.empty((closed_loops.ANSWERS, len(numbers))), np.empty(len(numbers), np.uint8)
        loops.evaluate_candidates(*self[:3], numbers, self.scratch, answers, codes)
        return answers, codes

    def reduced(self, start: int, stop: int, into: loops.Reduction) -> tuple[Longs, loops.Reduction]:
        """Reduce candidates and count them by code; full fronts are enlarged."""
        counts = np.zeros(closed_loops.CODES, np.int64)
        while True:
            start = loops.reduce_candidates(*self[:3], start, stop, self.scratch, into, counts)
            if start == stop:
                return counts, into
            into = into._replace(fronts=grown(into.fronts))


def _reduction(groups: int, k: int, is_pareto: bool, has_histogram: bool) -> loops.Reduction:
    best = (0, 1) if is_pareto else (groups, k)
    front = (groups, FIRST_FRONT) if is_pareto else (0, 1)
    return loops.Reduction(
        is_pareto,
        np.zeros(1, np.int64),
        np.zeros(5, np.int64),
        BestTable(np.empty(best), np.empty(best, np.int64), np.zeros(best[0], np.int64)),
        Fronts(np.empty(front), np.empty(front), np.empty(front, np.int64), np.zeros(front[0], np.int64)),
        np.zeros((groups if has_histogram else 0, BINS), np.int64),
    )


def _empty_reduction(spec: DeploymentSpec, unit: WorkUnit, plan: StepPlan) -> loops.Reduction:
    """Return empty tables of selected rows, one row per group of the plan's candidates."""
    groups = 1
    strides = np.zeros(5, np.int64)
    for i, (name, values) in reversed(list(enumerate(spec.load_axes.items()))):
        if name in spec.per:
            strides[i] = groups
            groups *= len(values)
    keys = _layout_keys(spec, unit, plan)
    kinds = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    layout_group = np.array([kinds[key] * groups for key in keys], np.int64)
    groups *= max(len(kinds), 1)
    k = 1 if spec.keep == "all" else spec.k
    reduction = _reduction(groups, k, spec.keep == "pareto", spec.histogram)
    return reduction._replace(layout_group=layout_group, strides=strides)


def _layout_keys(spec: DeploymentSpec, unit: WorkUnit, plan: StepPlan) -> list[tuple[int, ...]]:
    """Return the grouping key of each layout."""
    columns = [name for name in _LAYOUT_COLUMNS if name in spec.per]
    gpus_each = plan.layout.world_size
    return [
        tuple(
            layout.total_gpus(plan.layout.world_size) if name == "total_gpus" else getattr(layout, name)
            for name in columns
        )
        for layout in spec.layouts(unit.mode, gpus_each)
    ]


def grown(fronts: Fronts) -> Fronts:
    """Return fronts with twice the capacity."""
    x, y, at = (np.concatenate([values, np.empty_like(values)], axis=1) for values in fronts[:3])
    return Fronts(x, y, at, fronts.taken)


def _selected_numbers(reduction: loops.Reduction) -> Longs:
    """Return the numbers of the selected candidates, in order."""
    table: BestTable | Fronts = reduction.fronts if reduction.is_pareto else reduction.best
    is_filled = np.arange(table.at.shape[1]) < table.taken[:, None]
    return np.sort(table.at[is_filled])


def _histograms(
    spec: DeploymentSpec, unit: WorkUnit, plan: StepPlan, reduction: loops.Reduction
) -> tuple[dict[str, Any], ...]:
    """Return the non-empty histograms: the values of the ``per`` columns, and the counts."""
    if not spec.histogram:
        return ()
    fixed = {"mode": unit.mode, **plan_columns(plan)}
    axes = {name: values for name, values in spec.load_axes.items() if name in spec.per}
    sizes = [len(values) for values in axes.values()]
    layout_columns = [name for name in _LAYOUT_COLUMNS if name in spec.per]
    keys = list(dict.fromkeys(_layout_keys(spec, unit, plan)))
    histograms = []
    for group in np.flatnonzero(reduction.histogram.any(axis=1)).tolist():
        places = np.unravel_index(group % math.prod(sizes), sizes) if sizes else ()
        values = fixed | {
            name: axis[int(place)] for (name, axis), place in zip(axes.items(), places, strict=True)
        }
        values |= dict(zip(layout_columns, keys[group // math.prod(sizes)], strict=True))
        counts = reduction.histogram[group].tolist()
        histograms.append({"group": [values[name] for name in spec.per], "counts": counts})
    return tuple(histograms)
