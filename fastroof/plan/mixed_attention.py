"""What decode attention takes at least in a step that prefills too, as an engine's profile says it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fastroof.arrays import Ints
from fastroof.columns import ORIGIN_MODELLED
from fastroof.config import GpuSpec
from fastroof.engines import EngineProfile
from fastroof.operators.calls import AttentionCall, MixerCall
from fastroof.plan.attention import AttentionTimes
from fastroof.units import NS_PER_US

if TYPE_CHECKING:
    from fastroof.plan.step_plan import StepPlan

__all__ = ["kinds_beside_prefill", "mixed_kv_us"]


def mixed_kv_us(
    calls: Sequence[AttentionCall | MixerCall], engine: EngineProfile, gpu: GpuSpec
) -> tuple[float, float]:
    """Price of a KV token beside prefill in layers of some calls."""
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
    plan: StepPlan, kv_len: Ints, kinds: Sequence[AttentionTimes]
) -> list[AttentionTimes]:
    """Decode attention of each kind of layers in one step that prefills too."""
    least_us = []
    for part in plan.attention:
        full_us, windowed_us = mixed_kv_us([part.call], plan.engine, plan.gpu)
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
