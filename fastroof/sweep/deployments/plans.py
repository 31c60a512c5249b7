"""A unit's plan, and its candidates as the compiled loop reads them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from fastroof.acceptance import MTP
from fastroof.arrays import Floats
from fastroof.compiled.closed_loops import DeploymentOptions
from fastroof.compiled.deployments import Axes
from fastroof.config import load_gpu
from fastroof.errors import GpuError, MissingTableError, PlanError
from fastroof.models import Layout, load_model
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.rank_rules import rank_rules
from fastroof.serving.estimate import LENGTH_SPREAD
from fastroof.serving.scenarios import steps_met
from fastroof.serving.speculation import SpeculatedPlan, SpeculativeDecoding, speculated
from fastroof.sweep.deployments.layouts import layouts
from fastroof.sweep.deployments.spec import OBJECTIVES, DeploymentSpec
from fastroof.sweep.sources import GpuTables
from fastroof.sweep.units import PlanKey
from fastroof.units import US_PER_MS, US_PER_S

__all__ = ["Impossible", "candidate_axes", "candidate_options", "compiled_plan", "speculated_plan"]

SECONDS_AN_HOUR = 3600.0
TOKENS_A_PRICE = 1e6
MORE_TOKENS = 8
"""A full step's tokens are a sum of real numbers, which may be a rounding above its budget."""


class Impossible(NamedTuple):
    """Why there is no plan: the reason that its candidates are counted by, and what to say."""

    reason: str
    name: str


def compiled_plan(spec: DeploymentSpec, key: PlanKey, tables: GpuTables) -> StepPlan | Impossible:
    """Compile a unit's plan, large enough for any of the spec's steps."""
    model = load_model(key.model)
    name = f"{model.name} on {load_gpu(key.gpu).name} {key.words}"
    try:
        model.check_layout(Layout(key.tp, key.pp, key.dp, key.ep))
    except PlanError as error:
        return Impossible("tp", str(error))
    budget = spec.max_batched_tokens[-1]
    try:
        return compile_plan(
            model, key.gpu, tables.tables, dtype=key.dtype, kv_dtype=key.kv_dtype,
            runtime=key.runtime, method=spec.method, max_tokens=max(budget, spec.max_seqs) + MORE_TOKENS,
            max_seqs=spec.max_seqs + budget + MORE_TOKENS, curves=tables.curves,
            allow_modelled=spec.allow_modelled, **key.layout_options,
        )  # fmt: skip
    except MissingTableError as error:
        return Impossible("tables", f"{name}: {error}")
    except (PlanError, GpuError) as error:
        return Impossible("plan", f"{name}: {error}")


def speculated_plan(
    spec: DeploymentSpec, plan: StepPlan, key: PlanKey, tables: GpuTables
) -> SpeculatedPlan | Impossible:
    """Lay a unit's plan out as the loops read it, with the draft that the spec asks for."""
    asked = spec.speculation
    if asked is None:
        return speculated(plan, None)
    name = f"{plan.model.name} on {plan.gpu.name} {key.words}, draft {asked.draft}"
    draft: StepPlan | str | None = MTP if asked.draft == MTP else None
    try:
        if asked.draft_model is not None:
            draft = compile_plan(
                asked.draft_model, key.gpu, tables.tables, tp=asked.draft_tp or plan.tp,
                dtype=asked.draft_dtype, kv_dtype=plan.kv_dtype, runtime=key.runtime, method=spec.method,
                max_tokens=plan.max_tokens, max_seqs=plan.max_seqs, curves=tables.curves,
            )  # fmt: skip
        return speculated(plan, SpeculativeDecoding(asked.num_draft_tokens, asked.accepted, draft))
    except MissingTableError as error:
        return Impossible("tables", f"{name}: {error}")
    except PlanError as error:
        return Impossible("plan", f"{name}: {error}")


def candidate_axes(spec: DeploymentSpec, target: SpeculatedPlan, mode: str) -> Axes:
    """Axes of a plan's candidates; memory is that of each budget, whatever others the spec has."""
    plan = target.plan

    def floats(values: object) -> Floats:
        return np.array(values, np.float64)

    # each batch in flight is a replica or worker of its own: a rank's, or a stage's share of the room
    laid_out = floats(layouts(spec, mode, plan.layout.world_size)).reshape(-1, 3) * (
        plan.layout.batches_in_flight
    )
    room = [
        target.memory(plan.memory_of(max_tokens=budget, max_seqs=spec.max_seqs)).max_kv_tokens
        // plan.layout.pp
        for budget in spec.max_batched_tokens
    ]
    load = spec.concurrency if spec.request_rate is None else spec.request_rate
    return Axes(
        laid_out[:, 0].copy(), laid_out[:, 1].copy(), laid_out[:, 2].copy(),
        floats(spec.isl), floats(spec.osl), floats(load), floats(spec.max_batched_tokens),
        floats(room), floats(spec.prefix_hit),
    )  # fmt: skip


def candidate_options(spec: DeploymentSpec, target: SpeculatedPlan, mode: str) -> DeploymentOptions:
    """What a plan's candidates have in common."""
    plan, memory = target.plan, target.memory()
    limits = spec.constraints
    price = spec.price(plan.gpu.name)

    def limit(value: float | None) -> float:
        return math.inf if value is None else float(value)

    link = plan.gpu.nvlink_bytes_per_s if spec.link_bytes_per_s is None else spec.link_bytes_per_s
    model = plan.model
    a_sequence = target.whole_kv_bytes()
    return DeploymentOptions(
        is_disaggregated=mode == "disaggregated",
        is_rate=spec.request_rate is not None,
        tp=float(plan.tp),
        max_position=float(model.max_position),
        max_seqs=float(spec.max_seqs),
        osl_reserved=plan.engine.memory.osl_reserved,
        is_chunked=plan.engine.scheduling.chunked_prefill,
        # as estimate_disaggregated: all GPUs of a worker send at once
        transfer_us_per_token=a_sequence.token_bytes / (link * plan.tp * plan.layout.pp) * US_PER_S,
        us_per_ms=US_PER_MS,
        us_per_s=US_PER_S,
        gpu_price=math.nan if price is None else price / SECONDS_AN_HOUR * TOKENS_A_PRICE,
        ttft_ms=limit(limits.ttft_ms),
        tpot_ms=limit(limits.tpot_ms),
        request_ms=limit(limits.request_latency_ms),
        kv_share=limit(limits.kv_share),
        total_gpus=limit(limits.total_gpus),
        objective=OBJECTIVES.index(spec.objective),
        window=float(memory.window),
        window_share=memory.window_share,
        transfer_window_share=a_sequence.window_share,
        state_tokens=memory.state_tokens,
        transfer_state_tokens=a_sequence.state_tokens,
        is_prefill_first=plan.engine.scheduling.order == "prefill_first",
        length_spread=LENGTH_SPREAD,
        # requests of a rate do not follow on one another
        steps_met=steps_met(plan.engine, "closed" if spec.request_rate is None else "random"),
        rules=rank_rules(plan),
        batches=float(plan.layout.batches_in_flight),
    )
