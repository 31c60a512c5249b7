"""Pipeline stages of a plan: micro-batches that follow each other through them, and the bubbles between.

A plan of several stages times one batch through all of them, one after another. While one stage works on a
batch the others can work on batches of their own: n micro-batches take ``n + pp - 1`` times a stage where all
are equal, of which ``pp - 1`` are the bubble, and otherwise what the recurrence gives,

    end[batch, stage] = max(end[batch - 1, stage], end[batch, stage - 1]) + time[batch, stage]

What a stage sends counts as its own time: nothing is taken to overlap with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastroof.arrays import Floats

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan
    from fastroof.run import StepBatch

__all__ = ["cycle_us", "makespan_us", "pipeline_us", "stage_times_us"]


def stage_times_us(plan: StepPlan, batch: StepBatch) -> Floats:
    """Time of every micro-batch in every stage, us: of shape (steps, pp)."""
    alike: dict[int, Floats] = {}
    for stage in plan.stages:
        if id(stage) not in alike:
            alike[id(stage)] = stage.step_us(batch)
    return np.stack([alike[id(stage)] for stage in plan.stages], axis=1)


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
    times_us = stage_times_us(plan, batch)
    if not times_us.size:
        return 0.0
    return float(max(times_us.sum(axis=0).max(), times_us.sum(axis=1).max()))
