"""Attention of a plan's kinds of layers, each by itself; the plan's arena has their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.compiled import steps
from fastroof.compiled.grids import grid_latency_us
from fastroof.operators.attention_work import HeadShape
from fastroof.operators.calls import AttentionCall

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan

__all__ = ["AttentionTimes", "PlanAttention", "attention_times", "heads_of"]


class PlanAttention(NamedTuple):
    """Attention of the layers of one kind.

    Attributes
    ----------
    call : AttentionCall
        Its shape on one GPU, and how many layers run it.
    before : int
        Which of the plan's row curves follows it in a step.
    decode_block, prefill_block : ndarray of float64 or None
        Grid blocks of these layers; None where they are all the plan has: the arena's.
    prefix_us : tuple of float
        Price of a prefix in all of them: us a (query, prefix token) pair, us a prefix token.
    sources : tuple of str
        Which measured tables decodes and prompts come from.
    """

    call: AttentionCall
    before: int
    decode_block: Any
    prefill_block: Any
    prefix_us: tuple[float, float]
    sources: tuple[str, str]

    def without_blocks(self) -> PlanAttention:
        """Itself as the only kind of a plan, whose arena has the blocks."""
        return self._replace(decode_block=None, prefill_block=None)


class AttentionTimes(NamedTuple):
    """Attention of the layers of one kind in some steps, us, without the price of prefixes.

    Attributes
    ----------
    own_us : ndarray of float64
        All its layers.
    origin : ndarray of uint8
        How each is made.
    launch_us : float
        The smallest call of one layer.
    """

    own_us: Floats
    origin: Flags
    launch_us: float


def heads_of(call: AttentionCall) -> HeadShape:
    """What the tables of attention are keyed by."""
    return HeadShape(call.kv_dtype, call.num_q_heads, call.num_kv_heads, call.head_dim)


def attention_times(plan: StepPlan, number: int, is_decode: bool, batch: Any, x: Any) -> AttentionTimes:
    """Look up one kind's attention at (batch, kv_len or q_len).

    Parameters
    ----------
    plan : StepPlan
        Whose attention.
    number : int
        Which of ``plan.attention``.
    is_decode : bool
        Decode or prefill.
    batch, x : array_like of float
        Real sizes of as many steps.
    """
    part = plan.attention[number]
    block = part.decode_block if is_decode else part.prefill_block
    if block is None:
        slot = steps.DECODE_AT if is_decode else steps.PREFILL_AT
        block = plan.arena[int(plan.arena[slot]) :]
    y = np.r_[np.asarray(batch, np.float64), 0.0]
    own_us, origin = np.empty(len(y)), np.empty(len(y), np.uint8)
    grid_latency_us(block, y, np.r_[np.asarray(x, np.float64), 1.0], own_us, origin)
    return AttentionTimes(own_us[:-1], origin[:-1], float(own_us[-1]) / part.call.times)
