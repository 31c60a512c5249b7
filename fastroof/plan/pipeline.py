"""Pipeline stages of a plan: their times, and a plan of equal stages at the pace of the slowest.

A micro-batch passes the stages:

    end[batch, stage] = max(end[batch - 1, stage], end[batch, stage - 1]) + time[batch, stage]

Sends count as the sending stage's time, without overlap. ``n`` equal micro-batches in equal stages take
``n + pp - 1`` times a stage. ``pp`` batches that cycle, as decodes do, take ``pp`` times the slowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled import steps
from fastroof.plan.arena import BLOCKS
from fastroof.plan.attention import scaled_block
from fastroof.plan.plan_data import PlanData
from fastroof.run.batch import StepBatch
from fastroof.run.evaluate import step_us

PlanT = TypeVar("PlanT", bound=PlanData)


def in_each_stage(plan: PlanT, times_us: Callable[[PlanT], Floats]) -> Floats:
    """Times of steps in every stage, us, of shape (steps, pp); equal stages are timed once."""
    stages: Sequence[Any] = plan.stage_plans or (plan,)
    times = {id(stage): times_us(stage) for stage in {id(stage): stage for stage in stages}.values()}
    return np.stack([times[id(stage)] for stage in stages], axis=1)


def stage_times_us(plan: PlanData, batch: StepBatch) -> Floats:
    """Time of every micro-batch in every stage, us, of shape (steps, pp)."""
    return in_each_stage(plan, lambda stage: step_us(stage, batch, 1))


def makespan_us(times_us: Floats) -> float:
    """From the first micro-batch's start to the last one's end, us, by their times in each stage."""
    end = np.zeros(times_us.shape[1])
    for of_batch in times_us:
        before = 0.0
        for stage, us in enumerate(of_batch):
            before = end[stage] = max(end[stage], before) + us
    return float(end[-1]) if len(end) else 0.0


TYPICAL_BATCH: Final = 64
TYPICAL_KV_LEN: Final = 2048
"""Decodes that decide which stage is the slowest: the one with the LM head, or with one more layer."""

_TIMES: Final = (
    steps.TOKENS_AT,
    steps.DECODE_TOKENS_AT,
    steps.LOGITS_AT,
    steps.EXPERT_AT,
    steps.DECODE_EXPERT_AT,
)
"""Header slots of sections of times; 0 if a plan has no such section."""
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
    steps.SHARED_LAUNCH_US,
)


def at_the_pace_of(plan: PlanT, slowest: PlanT) -> PlanT:
    """Return a plan of equal stages: its slowest one, as often as it has stages."""
    times = len(plan.stage_plans)
    return replace(
        plan,
        arena=_scaled_arena(slowest.arena, times),
        row_curves=tuple(curve.in_layers(times) for curve in slowest.row_curves),
        attention=tuple(part.in_layers(times) for part in slowest.attention),
    )


def _scaled_arena(arena: Floats, times: int) -> Floats:
    """An arena whose steps take ``times`` as long."""
    scaled = arena.copy()
    scaled[list(_CONSTANTS)] *= times
    starts = sorted({int(arena[slot]) for slot in (*_TIMES, *BLOCKS.values(), *_ORIGINS)} - {0})
    ends = dict(zip(starts, [*starts[1:], int(arena[steps.ARENA_SIZE])], strict=True))
    for start in {int(arena[slot]) for slot in _TIMES} - {0}:
        scaled[start : ends[start]] *= times
    for start in {int(arena[slot]) for slot in BLOCKS.values()}:
        scaled[start : ends[start]] = scaled_block(arena[start : ends[start]], times)
    scaled.flags.writeable = False
    return scaled
