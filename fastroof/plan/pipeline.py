"""Pipeline stages of a plan: micro-batches that follow each other through them, and the bubbles between.

A plan of several stages times one batch through all of them, one after another. While one stage works on a
batch the others can work on batches of their own: n micro-batches take ``n + pp - 1`` times a stage where all
are equal, of which ``pp - 1`` are the bubble, and otherwise what the recurrence gives,

    end[batch, stage] = max(end[batch - 1, stage], end[batch, stage - 1]) + time[batch, stage]

What a stage sends counts as its own time: nothing is taken to overlap with it.

As many batches as stages, each of which goes round as decodes do, come round in ``pp`` times the slowest
stage: that, not the time of one batch through all of them, is a step of an engine that keeps its stages busy,
and is what estimates and rates take (``plan.paced``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled import steps
from fastroof.plan.arena import scaled_block
from fastroof.run.evaluate import round_us

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan
    from fastroof.run import StepBatch


def in_each_stage(plan: StepPlan, times_us: Callable[[StepPlan], Floats]) -> Floats:
    """Times of steps in every stage, us, of shape (steps, pp); of stages that are alike one is asked."""
    alike: dict[int, Floats] = {}
    for stage in plan.stages:
        if id(stage) not in alike:
            alike[id(stage)] = times_us(stage)
    return np.stack([alike[id(stage)] for stage in plan.stages], axis=1)


def stage_times_us(plan: StepPlan, batch: StepBatch) -> Floats:
    """Time of every micro-batch in every stage, us: of shape (steps, pp)."""
    return in_each_stage(plan, lambda stage: stage.step_us(batch))


def makespan_us(times_us: Floats) -> float:
    """From the first micro-batch's start to the last one's end, us, by the times of each in each stage."""
    end = np.zeros(times_us.shape[1])
    for of_batch in times_us:
        before = 0.0
        for stage, us in enumerate(of_batch):
            before = end[stage] = max(end[stage], before) + us
    return float(end[-1]) if len(end) else 0.0


def pipeline_us(plan: StepPlan, batch: StepBatch) -> float:
    """Answer ``plan.pipeline_us``."""
    return makespan_us(stage_times_us(plan, batch))


def cycle_us(plan: StepPlan, batch: StepBatch) -> float:
    """Answer ``plan.cycle_us``: no less than any stage needs for all, nor than any batch for all stages."""
    return round_us(stage_times_us(plan, batch))


TYPICAL_BATCH: Final = 64
TYPICAL_KV_LEN: Final = 2048
"""Decodes that say which stage is the slowest: it is the one with the LM head, or with a layer more."""

_TIMES: Final = (
    steps.TOKENS_AT,
    steps.DECODE_TOKENS_AT,
    steps.LOGITS_AT,
    steps.EXPERT_AT,
    steps.DECODE_EXPERT_AT,
)
"""Sections of times; 0 where a plan has no such section."""
_BLOCKS: Final = (steps.DECODE_AT, steps.PREFILL_AT, steps.WINDOW_DECODE_AT, steps.WINDOW_PREFILL_AT)
_ORIGINS: Final = (steps.TOKENS_ORIGIN_AT, steps.DECODE_TOKENS_ORIGIN_AT, steps.LOGITS_ORIGIN_AT)
_CONSTANTS: Final = (
    steps.NUM_LAYERS,
    steps.STEP_US,
    steps.SEQUENCE_US,
    steps.PREFILL_US,
    steps.PREFILL_FLOOR_US,
    steps.PREFIX_PAIR_US,
    steps.PREFIX_TOKEN_US,
    steps.WINDOW_PAIR_US,
    steps.WINDOW_TOKEN_US,
    steps.MIXED_KV_US,
    steps.MIXED_WINDOW_KV_US,
)


def paced_plan(plan: StepPlan) -> StepPlan:
    """Answer ``plan.paced`` of a plan with stages: the slowest one, as often as there are stages."""
    batch, times = min(TYPICAL_BATCH, plan.max_tokens, plan.max_seqs), len(plan.stages)
    slowest = max(plan.stages, key=lambda stage: stage.decode_us(batch, TYPICAL_KV_LEN))
    attention = (
        part._replace(
            call=replace(part.call, times=part.call.times * times),
            decode_block=None if part.decode_block is None else scaled_block(part.decode_block, times),
            prefill_block=None if part.prefill_block is None else scaled_block(part.prefill_block, times),
            prefix_us=part.prefix_us.times(times),
        )
        for part in slowest.attention
    )
    return replace(
        plan,
        arena=_scaled_arena(slowest.arena, times),
        row_curves=tuple(curve.in_layers(times) for curve in slowest.row_curves),
        attention=tuple(attention),
    )


def _scaled_arena(arena: Floats, times: int) -> Floats:
    """An arena whose steps take so many times as long."""
    scaled = arena.copy()
    scaled[list(_CONSTANTS)] *= times
    starts = sorted({int(arena[slot]) for slot in (*_TIMES, *_BLOCKS, *_ORIGINS)} - {0})
    ends = dict(zip(starts, [*starts[1:], int(arena[steps.ARENA_SIZE])], strict=True))
    for start in {int(arena[slot]) for slot in _TIMES} - {0}:
        scaled[start : ends[start]] *= times
    for start in {int(arena[slot]) for slot in _BLOCKS}:
        scaled[start : ends[start]] = scaled_block(arena[start : ends[start]], times)
    scaled.flags.writeable = False
    return scaled
