"""What a plan needs to time steps of several tokens a request: laid out after it, in one arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled import steps
from fastroof.compiled import verification as loops
from fastroof.plan.attention import attention_times
from fastroof.plan.curves import row_values

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan

__all__ = ["verification_arena"]


def verification_arena(
    plan: StepPlan,
    tokens: int = 1,
    accepted: float = 1.0,
    draft_steps: int = 0,
    draft: StepPlan | None = None,
) -> Floats:
    """Lay a plan out with what :mod:`fastroof.compiled.verification` reads beside it."""
    head = _head_us(plan)
    bounds = np.array([_bound(plan, number) for number in range(len(plan.attention))])
    head_at = len(plan.arena) + loops.SPECULATION_HEADER
    bounds_at = head_at + len(head)
    draft_at = 0 if draft is None else bounds_at + bounds.size
    header = np.zeros(loops.SPECULATION_HEADER)
    header[[loops.TOKENS, loops.ACCEPTED, loops.DRAFT_STEPS]] = tokens, accepted, draft_steps
    header[[loops.HEAD_AT, loops.HEAD_LAST]] = head_at, len(head) - 1
    header[[loops.BOUNDS_AT, loops.BOUNDS, loops.DRAFT_AT]] = bounds_at, len(bounds), draft_at
    parts = [plan.arena, header, head, bounds.ravel()]
    arena = np.concatenate(parts if draft is None else [*parts, draft.arena])
    arena[steps.SPECULATION_AT] = len(plan.arena)
    arena.flags.writeable = False
    return arena


def _head_us(plan: StepPlan) -> Floats:
    """The LM head at every number of rows that a step's tokens can have; the plan's own up to max_seqs."""
    own = plan.arena[int(plan.arena[steps.LOGITS_AT]) :][: plan.max_seqs + 1]
    head = np.zeros(max(plan.max_tokens, plan.max_seqs) + 1)
    for curve in plan.row_curves:
        if curve.operator.rows == "sequences":
            head += curve.operator.times * row_values(curve, len(head) - 1)[0]
    head[: len(own)] = own
    return head


def _bound(plan: StepPlan, number: int) -> tuple[float, ...]:
    """Roofline of one kind's decode attention, all its layers, in the order of the loops' slots."""
    part = plan.attention[number]
    times = part.call.times
    launch_us = attention_times(plan, number, True, [], []).launch_us
    bound = part.phase(True).query_bound(plan.gpu)
    return times * launch_us, times * bound.pair, times * bound.query, times * bound.kv, bound.window
