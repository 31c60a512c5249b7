"""Attention of a plan's kinds of layers, each by itself; the plan's arena has their sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats
from fastroof.compiled import steps
from fastroof.compiled.grids import grid_latency_us
from fastroof.operators.attention_work import HeadShape, pairs_within, prefix_within
from fastroof.operators.calls import AttentionCall, MixerCall
from fastroof.operators.prefix_price import PrefixUs
from fastroof.plan.mixers import step_attention
from fastroof.plan.step_attention import StepAttention

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan

__all__ = [
    "AttentionTimes",
    "PlanAttention",
    "WindowPoints",
    "attention_times",
    "heads_of",
    "window_points",
]


class PlanAttention(NamedTuple):
    """Attention of the layers of one kind."""

    call: AttentionCall | MixerCall
    before: int
    decode_block: Any
    prefill_block: Any
    prefix_us: PrefixUs
    sources: tuple[str, str]

    def phase(self, is_decode: bool) -> StepAttention:
        """Decodes or prompts, as tables know them."""
        return step_attention(self.call, is_decode)

    def prefixes_us(self, new_tokens: Any, context_len: Any) -> Any:
        """Price of each chunk's prefix in all of the layers, us."""
        price, window = self.prefix_us, self.call.window
        total = price.pair * (new_tokens * context_len) + price.token * context_len
        if window:
            pairs, tokens = prefix_within(new_tokens, new_tokens + context_len, window)
            total = total + (price.window_pair * pairs + price.window_token * tokens)
        return total

    def without_blocks(self) -> PlanAttention:
        """Itself as the only kind of a plan, whose arena has the blocks."""
        return self._replace(decode_block=None, prefill_block=None)


class AttentionTimes(NamedTuple):
    """Attention of the layers of one kind in some steps, us, without the price of prefixes."""

    own_us: Floats
    origin: Flags
    launch_us: float


class WindowPoints(NamedTuple):
    """Where layers within a window are looked up for requests of different lengths."""

    batch: Floats
    x: Floats
    is_other: Bools


def heads_of(call: AttentionCall) -> HeadShape:
    """What the tables of attention are keyed by."""
    return HeadShape(call.kv_dtype, call.num_q_heads, call.num_kv_heads, call.head_dim, call.window)


def window_points(
    window: int, is_decode: bool, batch: Any, x: Any, new_sum: Any, seen_sum: Any
) -> WindowPoints:
    """Find where steps of decodes, or of chunks, are looked up by layers within a window."""
    batch, x = np.asarray(batch, np.float64), np.asarray(x, np.float64)
    new, seen = np.asarray(new_sum, np.float64), np.asarray(seen_sum, np.float64)
    if is_decode:
        mean_seen = seen / new
        is_other = mean_seen != np.minimum(x, window)
        return WindowPoints(batch, np.where(is_other, mean_seen, x), is_other)
    is_other = batch * pairs_within(x, window) != seen
    # as fastroof.compiled.windows.window_chunks
    q_len = 2.0 * seen / new - 1.0
    long = q_len > window
    short_of_window = np.where(long, window - seen / new, 1.0)
    q_len = np.where(long, 0.5 * window * (window - 1.0) / short_of_window, q_len)
    return WindowPoints(np.where(is_other, new / q_len, batch), np.where(is_other, q_len, x), is_other)


def attention_times(
    plan: StepPlan, number: int, is_decode: bool, batch: Any, x: Any, within: WindowPoints | None = None
) -> AttentionTimes:
    """Look up one kind's attention at (batch, kv_len or q_len)."""
    part = plan.attention[number]
    block = part.decode_block if is_decode else part.prefill_block
    if block is None:
        slot = steps.DECODE_AT if is_decode else steps.PREFILL_AT
        block = plan.arena[int(plan.arena[slot]) :]
    own_us, origin = _look_up(block, np.r_[np.asarray(batch, np.float64), 0.0], np.r_[np.asarray(x), 1.0])
    launch_us = float(own_us[-1]) / part.call.times
    own_us, origin = own_us[:-1], origin[:-1]
    if part.call.window and within is not None and within.is_other.any():
        # as the step loops: a step of all layers' sizes, and the difference of two within the window
        there = _look_up(block, within.batch, within.x)
        instead = np.minimum(x, part.call.window) if is_decode else np.asarray(x)
        more_us = there[0] - _look_up(block, np.asarray(batch), instead)[0]
        own_us = own_us + np.where(within.is_other, more_us, 0.0)
        origin = np.where(within.is_other, np.maximum(origin, there[1]), origin)
    return AttentionTimes(own_us, origin, launch_us)


def _look_up(block: Floats, batch: Any, x: Any) -> tuple[Floats, Flags]:
    own_us, origin = np.empty(len(batch)), np.empty(len(batch), np.uint8)
    grid_latency_us(block, batch.astype(np.float64), x.astype(np.float64), own_us, origin)
    return own_us, origin
