"""Attention of steps that decode and prefill, naively: token by token, head by head, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastroof.plan.arena import attention_times

Request = tuple[int, int]


def is_decode(request: Request) -> bool:
    """Whether a request is one new token after a context."""
    return request[0] == 1 and request[1] > 0


def kv_token_us(plan: Any, window: int = 0) -> float:
    """Price of a KV token in the layers of a plan with that window, us; of a GPU with one figure."""
    total = 0.0
    for figure in plan.profile.kernels.mixed_attention:
        if figure.gpu not in ("", plan.gpu.name):
            continue
        for part in plan.attention:
            if part.call.window == window:
                for _ in range(part.call.times):
                    total += figure.ns / 1000 * part.call.num_q_heads
    return total


def least_us(plan: Any, requests: Sequence[Request]) -> float:
    """What the decodes of a step attend for at least, us: 0 in a step without decodes or without prefill."""
    if all(map(is_decode, requests)):
        return 0.0
    total = 0.0
    for new, context in requests:
        if is_decode((new, context)):
            for window in {part.call.window for part in plan.attention}:
                seen = min(context + 1, window or context + 1)
                total += seen * kv_token_us(plan, window)
    return total


def saved_us(plan: Any, requests: Sequence[Request]) -> float:
    """What one call for a step's chunks and decodes saves, us; 0 in a step without either."""
    return launches_saved_us(plan) if len({*map(is_decode, requests)}) == 2 else 0.0


def launches_saved_us(plan: Any) -> float:
    """What one call for chunks and decodes saves, us: in every layer, the shorter launch of both."""
    total = 0.0
    if plan.gpu.name not in plan.profile.kernels.one_attention_call:
        return total
    for number, part in enumerate(plan.attention):
        launches = [attention_times(plan, number, phase, [], []).launch_us for phase in (True, False)]
        for _ in range(part.call.times):
            total += min(launches)
    return total


def step_us(alone: Any, plan: Any, requests: Sequence[Request]) -> tuple[float, float, float]:
    """A step of ``plan``, its decode and prefill attention, us, from parts of ``alone``, without either."""
    from fastroof import StepBatch

    times = alone.run(StepBatch.from_requests([requests]))
    tokens, logits, decode, prefill, _ = (float(part[0]) for part in times.components)
    decode = max(decode, least_us(plan, requests))
    prefill = max(prefill - saved_us(plan, requests), 0.0)
    costs = plan.profile.costs
    total = tokens + logits + decode + prefill + costs.step_us + costs.sequence_us * len(requests)
    if any(not is_decode(request) for request in requests):
        floor_us = costs.prefill_floor_layer_us * plan.model.num_layers
        total = max(total + costs.prefill_us, floor_us)
    return total, decode, prefill
