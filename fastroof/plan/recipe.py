"""What plans of one architecture have in common, whatever their depth; laid out in one arena each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastroof.arrays import Array, Flags, Floats
from fastroof.compiled import steps
from fastroof.compiled.grids import FORM, FORM_LATENCY
from fastroof.config import GpuSpec
from fastroof.errors import PlanError
from fastroof.lazy_property import lazy_property
from fastroof.models import ModelSpec
from fastroof.models.execution import Execution
from fastroof.models.stages import Stage, stages_of
from fastroof.operators.calls import Role
from fastroof.plan.attention import PlanAttention
from fastroof.plan.blocks import scaled_block, sum_blocks
from fastroof.plan.context_parallel import (
    check_context_parallel,
)
from fastroof.plan.curves import CurveSource, RowCurve, num_allreduces
from fastroof.plan.exchange import check_engine_layout, check_expert_blocks
from fastroof.plan.execution import execution_of
from fastroof.plan.finite_arenas import check_arena
from fastroof.plan.looked_up import LayerAttention, looked_up
from fastroof.plan.mixed_attention import mixed_kv_us
from fastroof.plan.options import PlanOptions
from fastroof.plan.prefill_graphs import padded_steps
from fastroof.plan.rows import ONCE, Ranks, RowCall, RowSums, origins_of, sums_of
from fastroof.plan.step_error import ErrorSource
from fastroof.plan.step_plan import StepPlan

__all__ = ["PlanRecipe", "plan_recipe"]


@dataclass(frozen=True, eq=False)
class PlanRecipe:
    """Curves, blocks and origins of every plan that differs in its numbers of layers alone."""

    gpu: GpuSpec
    options: PlanOptions
    execution: Execution
    tables_hash: str
    method: str
    calls: tuple[RowCall, ...]
    attention: tuple[LayerAttention, ...]
    error_source: ErrorSource

    def row_sums(self, counts: Sequence[Sequence[int]]) -> RowSums:
        """Sum the calls of plans with these numbers of layers of each kind, in the order of the step."""
        are_alike = self.options.dp > 1 and self.execution.dp_imbalance == 1.0
        return sums_of(self.calls, counts, self.options.max_tokens, self.options.max_seqs, are_alike)

    @lazy_property
    def _origins(self) -> dict[str, Flags]:
        """Origins of the calls of each section: the same in every plan."""
        tokens, seqs = self.options.max_tokens, self.options.max_seqs
        return {
            "tokens": origins_of(self.calls, "tokens", tokens),
            "decode_tokens": origins_of(self.calls, "decode_tokens", tokens),
            "sequences": origins_of(self.calls, "sequences", seqs),
        }

    def plan(self, model: ModelSpec, sums: RowSums, row: int, stage: int | None = None) -> StepPlan:
        """Compile the plan of one model, or of a pipeline stage, from its row of :meth:`row_sums`."""
        counts = [*(group.count for group in model.layers), 1]  # ONCE is the last
        row_curves = tuple(call.curve.in_layers(counts[call.kind]) for call in self.calls)
        attention = tuple(_all_layers(part, counts[part.kind]) for part in self.attention)
        options = self.options
        return StepPlan(
            model=model,
            gpu=self.gpu,
            layout=options.layout,
            dtype=options.dtype,
            kv_dtype=options.kv_dtype,
            execution=self.execution,
            engine=options.runtime,
            method=self.method,
            max_tokens=options.max_tokens,
            max_seqs=options.max_seqs,
            tables_hash=self.tables_hash,
            arena=self._arena(model, attention, sums.of_plan(row), row_curves),
            row_curves=row_curves,
            # one kind's blocks are the arena's
            attention=attention if len(attention) > 1 else tuple(part.without_blocks() for part in attention),
            error_source=self.error_source,
            stage=stage,
            stage_plans=self._stage_plans(model) if options.pp > 1 and stage is None else (),
        )

    def _stage_plans(self, model: ModelSpec) -> tuple[StepPlan, ...]:
        """Plans of a model's pipeline stages; those that are alike are one."""
        made: dict[tuple[tuple[int, ...], bool, bool], StepPlan] = {}
        plans = []
        for stage in stages_of(model, self.options.pp):
            alike = (stage.counts, stage.is_first, stage.is_last)
            if alike not in made:
                made[alike] = self._stage_plan(model, stage)
            plans.append(made[alike])
        return tuple(plans)

    def _stage_plan(self, model: ModelSpec, stage: Stage) -> StepPlan:
        """The plan of one stage: its layers, what it sends on, and the embedding or the LM head."""
        kinds = [kind for kind, count in enumerate(stage.counts) if count]
        calls, places = [], [0]
        for call in self.calls:
            if call.kind == ONCE and _runs_in(call.curve.operator.role, stage):
                calls.append(call._replace(curve=call.curve.once()))
            elif call.kind in kinds:
                calls.append(call._replace(kind=kinds.index(call.kind)))
            places.append(len(calls))
        attention = tuple(
            part._replace(kind=kinds.index(part.kind), before=places[part.before])
            for part in self.attention
            if part.kind in kinds
        )
        options = self.options
        if not stage.is_last:
            # sequences are sampled by the last one
            costs = replace(options.runtime.costs, sequence_us=0.0)
            options = options._replace(runtime=replace(options.runtime, costs=costs))
        recipe = replace(self, options=options, calls=tuple(calls), attention=attention)
        part = stage.model(model)
        return recipe.plan(part, recipe.row_sums([[g.count for g in part.layers]]), 0, stage.number)

    def _arena(
        self,
        model: ModelSpec,
        attention: Sequence[PlanAttention],
        sums: RowSums,
        row_curves: Sequence[RowCurve],
    ) -> Floats:
        """Lay a plan out as the step loops read it."""
        options, costs = self.options, self.options.runtime.costs
        allreduces = num_allreduces(row_curves)
        sections: dict[int, Array] = {
            steps.TOKENS_AT: sums.tokens_us,
            steps.LOGITS_AT: sums.logits_us,
            steps.TOKENS_ORIGIN_AT: self._origins["tokens"],
            steps.LOGITS_ORIGIN_AT: self._origins["sequences"],
        }
        if sums.decode_tokens_us is not sums.tokens_us:
            sections[steps.DECODE_TOKENS_AT] = sums.decode_tokens_us
            sections[steps.DECODE_TOKENS_ORIGIN_AT] = self._origins["decode_tokens"]
        if sums.expert_us is not None and sums.decode_expert_us is not None:
            sections[steps.EXPERT_AT] = sums.expert_us
            if sums.decode_expert_us is not sums.expert_us:
                sections[steps.DECODE_EXPERT_AT] = sums.decode_expert_us
        sections[steps.DECODE_AT] = sum_blocks([part.decode_block for part in attention])
        sections[steps.PREFILL_AT] = sum_blocks([part.prefill_block for part in attention])
        windowed = [part for part in attention if part.call.window]
        if 0 < len(windowed) < len(attention):
            # on the axes of all layers' blocks: a step finds a point's cell once for both
            for slot, whole, blocks in (
                (steps.WINDOW_DECODE_AT, steps.DECODE_AT, [part.decode_block for part in windowed]),
                (steps.WINDOW_PREFILL_AT, steps.PREFILL_AT, [part.prefill_block for part in windowed]),
            ):
                sections[slot] = sum_blocks(blocks, like=sections[whole])
        header = np.zeros(steps.HEADER_SIZE)
        starts = steps.HEADER_SIZE + np.cumsum([0, *(len(section) for section in sections.values())])
        header[[*sections, steps.ARENA_SIZE]] = starts
        if steps.DECODE_TOKENS_AT not in sections:
            header[steps.DECODE_TOKENS_AT] = header[steps.TOKENS_AT]
            header[steps.DECODE_TOKENS_ORIGIN_AT] = header[steps.TOKENS_ORIGIN_AT]
        if steps.EXPERT_AT in sections:
            header[steps.RANKS] = options.dp
            if steps.DECODE_EXPERT_AT not in sections:
                header[steps.DECODE_EXPERT_AT] = header[steps.EXPERT_AT]
        if steps.WINDOW_DECODE_AT not in sections:
            header[steps.WINDOW_DECODE_AT] = header[steps.DECODE_AT]
            header[steps.WINDOW_PREFILL_AT] = header[steps.PREFILL_AT]
        # summed apart: a kind's price has parts of both
        pair_us, token_us, window_pair_us, window_token_us = (
            sum(prices) for prices in zip(*(part.prefix_us for part in attention), strict=True)
        )
        header[[steps.MIXED_KV_US, steps.MIXED_WINDOW_KV_US]] = mixed_kv_us(
            [part.call for part in attention], options.runtime, self.gpu
        )
        if windowed:
            header[steps.WINDOW] = windowed[0].call.window
            header[[steps.WINDOW_PAIR_US, steps.WINDOW_TOKEN_US]] = window_pair_us, window_token_us
        header[: steps.PREFIX_TOKEN_US + 1] = (
            steps.ARENA_MAGIC, steps.ARENA_FORMAT, options.max_tokens, options.max_seqs, model.num_layers,
            costs.of_step_us(model.architecture, model.num_blocks, allreduces), pair_us, token_us,
        )  # fmt: skip
        header[steps.SEQUENCE_US : steps.PREFILL_FLOOR_US + 1] = (
            costs.sequence_us, costs.of_prefill_us(model.num_blocks),
            costs.prefill_floor_layer_us * model.num_blocks,
        )  # fmt: skip
        arena = np.concatenate([header, *sections.values()], dtype=np.float64)
        check_arena(arena, f"the plan of {model.name} on {self.gpu.name}")
        arena.flags.writeable = False
        return arena


def _runs_in(role: Role, stage: Stage) -> bool:
    """Whether a stage runs a call that runs once a step."""
    if role == "embedding":
        return stage.is_first
    return not stage.is_last if role == "stage_send" else stage.is_last


def _all_layers(part: LayerAttention, count: int) -> PlanAttention:
    return PlanAttention(
        replace(part.call, times=part.call.times * count),
        part.before,
        scaled_block(part.decode_block, part.call.times * count),
        scaled_block(part.prefill_block, part.call.times * count),
        part.prefix_us.times(count),
        part.sources,
    )


def plan_recipe(
    model: ModelSpec, gpu: GpuSpec, options: PlanOptions, curves: CurveSource, tables_hash: str
) -> PlanRecipe:
    """Look up every curve and block that plans of a model's architecture need."""
    layout = options.layout
    model.check_layout(layout)
    check_engine_layout(model, layout, options.runtime, options.exchange, gpu)
    check_context_parallel(
        model,
        layout,
        options.runtime.name,
        options.runtime.layout.context_parallel,
        options.two_batch_overlap,
    )
    execution = execution_of(model, options, curves)
    check_expert_blocks(model, layout, execution)
    row_limit = max(options.max_tokens, options.max_seqs)
    padded = padded_steps(model, layout, execution, options.runtime, row_limit)
    rows, attention = looked_up(
        model, layout, execution, curves, row_limit if padded is None else padded.limit
    )
    if padded is not None:
        rows, attention = padded.calls(rows, attention, Ranks.of(layout, execution))
    _check_windows(model, attention)
    if any(part.call.window and part.decode_block[FORM] != FORM_LATENCY for part in attention):
        raise PlanError(
            f"method={curves.method!r} holds MFU, and {model.name} attends within a window, beyond which "
            "work does not grow with kv_len; method='roofline' times it"
        )
    return PlanRecipe(
        gpu=gpu,
        options=options,
        execution=execution,
        tables_hash=tables_hash,
        method=curves.method,
        calls=tuple(rows),
        attention=tuple(attention),
        error_source=ErrorSource.of(curves),
    )


def _check_windows(model: ModelSpec, attention: Sequence[LayerAttention]) -> None:
    """Refuse several sizes beyond which attention costs no more, of windows or of what indexers pick."""
    windows = sorted({part.call.window for part in attention} - {0})
    if len(windows) > 1:
        raise PlanError(
            f"{model.name} has attention whose cost caps at {' and at '.join(map(str, windows))} tokens, and "
            "a plan times one such size beside attention that always grows"
        )
