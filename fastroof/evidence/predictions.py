"""Predictions of measured rows with the profile of their engine."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Final, NamedTuple

from fastroof.caching import BoundedCache
from fastroof.engines import EngineProfile, FrontEnd
from fastroof.errors import BatchError
from fastroof.evidence.rows import LARGEST_STEP, ServingRow
from fastroof.evidence.steps.measured_steps import MeasuredStep
from fastroof.models.layout import Layout
from fastroof.plan import StepPlan, compile_plan
from fastroof.plan.speculation import SpeculativeDecoding, mtp_draft
from fastroof.run import StepBatch
from fastroof.serving.disaggregated import estimate_disaggregated
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import STEADY
from fastroof.serving.serving_estimate import ServingEstimate
from fastroof.tables import Tables
from fastroof.units import US_PER_MS

PLANS_BYTES: Final = 2**29
"""Size of a cache of plans."""

LM_HEAD: Final = "lm_head"
"""Role of the operator that is not in a forward."""


class Plans:
    """Plans from one set of tables, each distinct plan compiled once."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._plans: BoundedCache[StepPlan] = BoundedCache(PLANS_BYTES)

    def get(self, row: ServingRow | MeasuredStep, profile: EngineProfile) -> StepPlan:
        """Return the plan of a row."""
        if isinstance(row, MeasuredStep):
            dtype, most = row.plan_dtype or row.dtype, max(LARGEST_STEP, sum(row.new_tokens))
            formats = {"dtype": dtype, "kv_dtype": row.kv_dtype}
            return self.compiled(row.model, profile, row.layout, **formats, max_num_batched_tokens=most)
        return self._of_row(row, row.layout, profile, exchange=row.exchange or None)

    def get_prefill(self, row: ServingRow, profile: EngineProfile) -> StepPlan | None:
        """Return the plan of a row's prefill workers; None if one engine does both."""
        if not row.is_disaggregated:
            return None
        layout = Layout(row.prefill_tp, row.pp, row.prefill_dp, row.prefill_ep)
        return self._of_row(row, layout, profile)

    def _of_row(self, row: ServingRow, layout: Layout, profile: EngineProfile, **more: Any) -> StepPlan:
        options = {"dtype": row.plan_dtype, "kv_dtype": row.kv_dtype, **more}
        options.setdefault("max_num_batched_tokens", max(LARGEST_STEP, 2 * row.max_num_batched_tokens))
        return self.compiled(row.model, row.on_its_clock(profile), layout, **options)

    def speculation(self, row: ServingRow, plan: StepPlan) -> SpeculativeDecoding | None:
        """Return the speculative decoding of a row, with its draft model's plan if it has one."""
        if row.speculation is None or not row.draft_model:
            return row.speculation
        # its kernels, for steps of the target's sizes
        engine = plan.profile.kernels_alone()
        sizes = {name: getattr(plan, name) for name in ("max_num_batched_tokens", "max_num_seqs")}
        draft = self.compiled(row.draft_model, engine, Layout(row.draft_tp), kv_dtype=row.kv_dtype, **sizes)
        return replace(row.speculation, draft=draft)

    def predict(self, row: ServingRow, profile: EngineProfile) -> RowPrediction:
        """Predict a row with its drafts."""
        plan = self.get(row, profile)
        return predict_row(row, plan, self.get_prefill(row, profile), self.speculation(row, plan))

    def drafter(self, step: MeasuredStep, plan: StepPlan) -> StepPlan | None:
        """Return the layer that drafts for a plan, if a step's drafting was timed."""
        if not step.drafted:
            return None
        return self._plans.get_or_raise(plan, lambda: mtp_draft(plan), _bytes_of)

    def compiled(self, model: str, profile: EngineProfile, layout: Layout, **options: Any) -> StepPlan:
        """Return the plan of a model, with further options of ``compile_plan``."""

        def plan() -> StepPlan:
            return compile_plan(
                model, self.tables.gpu, self.tables,
                tp=layout.tp, pp=layout.pp, dp=layout.dp, ep=layout.ep,
                engine=profile, allow_modelled=True, **options,
            )  # fmt: skip

        return self._plans.get_or_raise((model, profile, layout, *options.items()), plan, _bytes_of)


def _bytes_of(plan: StepPlan) -> int:
    return sum(each.arena.nbytes for each in (plan, *plan.stage_plans))


class RowPrediction(NamedTuple):
    """What a row's clients should have seen."""

    ttft_ms: float
    tpot_ms: float


def estimate_row(
    row: ServingRow,
    plan: StepPlan,
    speculation: SpeculativeDecoding | None = None,
    *,
    with_error: bool = False,
) -> ServingEstimate:
    """Return the mean steps of a row's engine and what its clients see; no error is known with drafts."""
    rounds = STEADY if math.isnan(row.requests_per_client) else row.requests_per_client
    return estimate(
        plan, row.mean_isl, row.mean_osl, row.concurrency,
        **row.schedule, requests_per_client=rounds, speculation=speculation,
        with_error=with_error and speculation is None,
    )  # fmt: skip


def predict_row(
    row: ServingRow,
    plan: StepPlan,
    prefill_plan: StepPlan | None = None,
    speculation: SpeculativeDecoding | None = None,
) -> RowPrediction:
    """Predict one row."""
    if prefill_plan is not None:
        # prefill workers run whole prompts
        apart = estimate_disaggregated(
            prefill_plan, plan, row.mean_isl, row.mean_osl, row.concurrency, row.prefill_workers,
            row.decode_workers, row.schedule["max_num_batched_tokens"], speculation=speculation,
        )  # fmt: skip
        return RowPrediction(apart.ttft_ms, apart.tpot_ms)
    predicted = estimate_row(row, plan, speculation)
    ttft_ms = predicted.ttft_ms
    if row.prefix_tokens > 0:
        if not row.is_single:
            raise BatchError("a prefix cache with more than one client is not modelled")
        new_tokens, context_len = round(row.mean_isl - row.prefix_tokens), round(row.prefix_tokens)
        batch = StepBatch.from_requests([[(new_tokens, context_len)]])
        ttft_ms = float(plan.step_us(batch)[0]) / US_PER_MS + front_end_ms(plan.profile.front_end, row)
    return RowPrediction(ttft_ms, predicted.tpot_ms)


def front_end_ms(front_end: FrontEnd, row: ServingRow) -> float:
    """Return the mean time that a front end adds to a run's TTFT, ms, below the API server's limit."""
    together = 0.0
    if not (math.isnan(row.requests_per_client) or row.is_disaggregated):
        # the first requests of a rank's clients share its API server
        together = max(row.concurrency / row.dp - 1.0, 0.0) / row.requests_per_client
    server_ms = front_end.server_ms * (1.0 + together)
    return front_end.request_ms + server_ms + front_end.token_us * row.mean_isl / US_PER_MS


def predict_step_ms(step: MeasuredStep, plan: StepPlan, draft: StepPlan | None = None) -> float:
    """Predict one whole step, ms: what was timed of it, with the passes of its drafter."""
    batch = StepBatch.from_requests([step.requests])
    drafting_us = 0.0 if draft is None else _drafting_us(step, batch, draft)
    if step.num_draft_tokens:
        total_us, head_us = _verified_us(step, plan)
    elif step.timed == "forward":
        times = plan.run(batch)
        total_us, head_us = float(times.latency_us[0]), float(times.components.logits_us[0])
    else:
        every = StepBatch.from_requests([step.requests, *step.timed_together])
        return float(plan.step_us(every).mean()) / US_PER_MS
    return (total_us - (head_us if step.timed == "forward" else 0.0) + drafting_us) / US_PER_MS


def _verified_us(step: MeasuredStep, plan: StepPlan) -> tuple[float, float]:
    """Time a step that verifies drafts, at its mean context, and its LM head."""
    tokens = 1 + step.num_draft_tokens
    verified = plan.explain_verification(len(step.new_tokens), step.mean_kv, tokens)
    head_us = sum(part.total_us for part in verified.operators if part.role == LM_HEAD)
    return verified.total_us, head_us


def _drafting_us(step: MeasuredStep, batch: StepBatch, draft: StepPlan) -> float:
    """Time a drafter: a pass over the step's tokens, then one token per request and further draft token.

    Each pass ends in the LM head of one row per request, from which the drafts are taken.
    """
    requests = len(step.new_tokens)
    if step.num_draft_tokens:
        first_us, head_us = _verified_us(step, draft)
        one = StepBatch.from_requests([[(1, step.mean_kv)] * requests])
        first_us += float(draft.run(one).components.logits_us[0]) - head_us
    else:
        first_us = float(draft.step_us(batch)[0])
    return first_us + (step.drafted - 1) * draft.decode_us(requests, step.mean_kv + 1)
