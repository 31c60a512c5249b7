"""Time the attention of each kind of layers separately; the arena has only their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Ints
from fastroof.columns import ORIGIN_MODELLED
from fastroof.compiled import steps
from fastroof.compiled.grids import grid_latency_us
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.operators.attention_work import pairs_within
from fastroof.operators.calls import AttentionCall, MixerCall
from fastroof.plan.plan_data import PlanData
from fastroof.units import NS_PER_US


class AttentionTimes(NamedTuple):
    """Attention of one kind's layers in some steps, us, without the time of prefixes.

    ``launch_us`` is the smallest call of one layer.
    """

    own_us: Floats
    origin: Flags
    launch_us: float


class WindowPoints(NamedTuple):
    """Where layers with a window are looked up for requests of different lengths.

    ``is_other`` are the steps whose sizes differ from those of all other layers.
    """

    batch: Floats
    x: Floats
    is_other: Bools


def window_points(
    window: int, is_decode: bool, batch: Any, x: Any, new_sum: Any, seen_sum: Any
) -> WindowPoints:
    """Find where layers with a window are looked up, for decode steps or steps of chunks."""
    batch, x = np.asarray(batch, np.float64), np.asarray(x, np.float64)
    new, seen = np.asarray(new_sum, np.float64), np.asarray(seen_sum, np.float64)
    if is_decode:
        mean_seen = seen / new
        is_other = mean_seen != np.minimum(x, window)
        return WindowPoints(batch, np.where(is_other, mean_seen, x), is_other)
    is_other = batch * pairs_within(x, window) != seen
    # as fastroof.compiled.request_sums.window_chunks
    q_len = 2.0 * seen / new - 1.0
    long = q_len > window
    short_of_window = np.where(long, window - seen / new, 1.0)
    q_len = np.where(long, 0.5 * window * (window - 1.0) / short_of_window, q_len)
    return WindowPoints(np.where(is_other, new / q_len, batch), np.where(is_other, q_len, x), is_other)


def attention_times(
    plan: PlanData, number: int, is_decode: bool, batch: Any, x: Any, within: WindowPoints | None = None
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
        # as the step loops do: all layers' sizes, plus the difference of two lookups within the window
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


def mixed_kv_us(
    calls: Sequence[AttentionCall | MixerCall], engine: EngineProfile, gpu: GpuSpec
) -> tuple[float, float]:
    """Minimum us per KV token of decodes in a step with prefill: (full, windowed) layers."""
    full_us = windowed_us = 0.0
    for call in calls:
        ns = 0.0
        if isinstance(call, AttentionCall):
            ns = engine.kernels.mixed_attention_ns(gpu.name, call.head_dim, call.kv_dtype)
        if ns == 0.0 or not isinstance(call, AttentionCall):
            return 0.0, 0.0
        price_us = ns / NS_PER_US * call.num_q_heads * call.times
        if call.window:
            windowed_us += price_us
        else:
            full_us += price_us
    return full_us, windowed_us


def kinds_beside_prefill(
    plan: PlanData, kv_len: Ints, kinds: Sequence[AttentionTimes]
) -> list[AttentionTimes]:
    """Decode attention of each kind of layers in one step that also prefills."""
    least_us = []
    for part in plan.attention:
        full_us, windowed_us = mixed_kv_us([part.call], plan.profile, plan.gpu)
        if full_us == windowed_us == 0.0:
            return list(kinds)
        seen = np.minimum(kv_len, part.call.window) if part.call.window else kv_len
        least_us.append((full_us + windowed_us) * float(seen.sum()))
    if sum(least_us) <= sum(float(kind.own_us[0]) for kind in kinds):
        return list(kinds)
    return [
        kind._replace(own_us=np.array([least]), origin=np.full_like(kind.origin, ORIGIN_MODELLED))
        for kind, least in zip(kinds, least_us, strict=True)
    ]
