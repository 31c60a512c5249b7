"""What an engine leaves of a GPU for KV cache, by the rule of its profile."""

from __future__ import annotations

from typing import Final, NamedTuple

from fastroof.config import GpuSpec
from fastroof.engines import KvMemory
from fastroof.models import Layout

__all__ = ["VISIBLE_SHARE", "LeftForKv", "left_for_kv"]

VISIBLE_SHARE: Final = 0.99
"""Share of a datasheet's memory that CUDA says a GPU has.

79.10 to 79.33 of 80 GiB on H100 and A100, 139.81 of 141 on H200, 44.42 of 44.99 on L40S, 94.97 of 95.59 on
RTX PRO 6000 (logs of engines, bench_data/kv_room.csv and beside it): 0.987 to 0.994.
"""


class LeftForKv(NamedTuple):
    """A GPU's memory by what it is for, bytes."""

    room_bytes: int
    activation_bytes: int
    context_bytes: int
    reserve_bytes: int


def left_for_kv(
    rule: KvMemory,
    gpu: GpuSpec,
    layout: Layout,
    weight_bytes: int,
    working_bytes: int,
    max_tokens: int,
    logits: int,
) -> LeftForKv:
    """Work out what an engine leaves for KV cache."""
    gpu_bytes = gpu.hbm_bytes
    if rule.room == "datasheet":
        usable = int(gpu_bytes * rule.fraction)
        room = max(0, usable - weight_bytes - working_bytes)
        return LeftForKv(room, working_bytes, 0, gpu_bytes - usable)
    visible = int(gpu_bytes * VISIBLE_SHARE)
    context = rule.context_bytes(gpu.nvlink_bytes_per_s, layout.world_size)
    if rule.room == "static":
        base, fraction = visible - context, rule.fraction
        if not fraction and rule.reserve is not None:
            kept = rule.reserve.bytes(gpu_bytes, max_tokens, layout.tp, layout.pp, layout.dp)
            fraction = max(1 - kept / gpu_bytes, 0.0)
        budget = int(base * fraction)
        return LeftForKv(max(0, budget - weight_bytes), 0, context, gpu_bytes - context - budget)
    run = round(max(rule.activation * working_bytes, rule.sample_bytes * logits))
    taken = weight_bytes + run + context
    if rule.room == "all":
        budget = int(visible * rule.fraction)
        return LeftForKv(max(0, budget - taken), run, context, gpu_bytes - budget)
    room = int(max(0, visible - taken) * rule.fraction)
    return LeftForKv(room, run, context, max(0, gpu_bytes - taken - room))
