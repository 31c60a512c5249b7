"""Inverse questions, naively: every size is tried, and the largest that will do is taken."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fastroof.serving import estimate


def largest_batch(plan: Any, kv_len: int, limits_us: Any) -> list[int]:
    """Largest batch size whose KV cache fits and whose step keeps each limit."""
    batches = np.arange(1, min(plan.max_tokens, plan.max_seqs) + 1)
    batches = batches[batches * kv_len <= plan.memory.max_kv_tokens]
    times = plan.decode_us(batches, kv_len)
    return [int(batches[times <= limit].max(initial=0)) for limit in limits_us]


def largest_context(plan: Any, batch_size: int, limits_us: Any, longest: int) -> list[int]:
    """Largest length whose KV cache fits and whose step keeps each limit."""
    lengths = np.arange(1, longest + 1)
    lengths = lengths[batch_size * lengths <= plan.memory.max_kv_tokens]
    times = plan.decode_us(batch_size, lengths)
    return [int(lengths[times <= limit].max(initial=0)) for limit in limits_us]


def fewest_replicas(
    plan: Any, rate_per_s: float, isl: float, osl: float, limits_ms: tuple[float, float, float], clients: Any
) -> tuple[int, float, float]:
    """Fewest replicas, the fewest clients of one of them, and the most requests a second of all.

    ``clients`` are the numbers of clients that are tried; limits are of TTFT, TPOT and requests.
    """
    best = 0.0
    places = []
    for c in clients:
        found = estimate(plan, isl, osl, c, plan.max_tokens, arrivals="random")
        times = (found.ttft_ms, found.tpot_ms, found.request_latency_ms)
        rate = found.tokens_per_s_per_gpu * (plan.tp / osl)
        if any(time > limit for time, limit in zip(times, limits_ms, strict=True)):
            continue
        places.append((c, rate))
        # nothing but rounding is no more
        best = rate if rate > best * (1 + 1e-9) else best
    if not places:
        return 0, math.nan, 0.0
    replicas = 1
    while replicas * best < rate_per_s:
        replicas += 1
    return replicas, next(c for c, rate in places if replicas * rate >= rate_per_s), replicas * best
