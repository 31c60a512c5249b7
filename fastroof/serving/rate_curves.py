"""What one replica does under every number of clients: requests a second, and what its clients see."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.compiled import sizing as loops
from fastroof.compiled.serving import most_admitted
from fastroof.serving.estimate import estimate
from fastroof.serving.scenarios import EngineLimits
from fastroof.serving.speculation import SpeculatedPlan, SpeculativeDecoding

__all__ = ["RATE_LIMITS", "RateCurve", "ReplicaAsked", "client_loads", "rate_curve"]

RATE_LIMITS: Final = ("throughput", "ttft", "tpot", "request_latency", "kv_cache", "max_seqs", "budget")
"""What can keep a replica from more requests a second, in the order of the codes of LeastGpus.

Of ``throughput`` more clients only wait longer; ``kv_cache``, ``max_seqs`` and ``budget`` (of tokens in a
step) are what more clients do not fit in; the others are limits that were given.
"""

FINE: Final = 64
"""Up to as many clients, numbers of clients lie a 64th of the power of two below apart; then one."""


def client_loads(most: float) -> Floats:
    """Clients that are tried at once, whole numbers or between, from 1 to ``most``, rising."""
    octaves = 2.0 ** np.arange(np.log2(FINE))
    fine = (octaves[:, None] * (1.0 + np.arange(FINE) / FINE)).reshape(-1)
    clients = np.concatenate([fine, np.arange(float(FINE), most), [most]])
    return np.unique(np.minimum(clients, most))


class RateCurve(NamedTuple):
    """What one replica does, and the place in RATE_LIMITS of what more clients do not fit in."""

    replica: loops.ReplicaCurve
    room: int


class ReplicaAsked(NamedTuple):
    """What all replicas are estimated with."""

    engine: EngineLimits
    kv_reservation: str | None
    speculation: SpeculativeDecoding | None
    prefix_hit: float


def rate_curve(target: SpeculatedPlan, isl: float, osl: float, asked: ReplicaAsked) -> RateCurve:
    """Estimate a replica under every number of clients that run at once."""
    plan, engine = target.plan, asked.engine
    memory = target.memory(max_seqs=engine.max_seqs)
    layout = plan.layout
    room = float(memory.max_kv_tokens) / layout.pp
    budget = float(engine.max_batched_tokens)
    new = max(isl * (1.0 - asked.prefix_hit), 1.0)
    begun = most_admitted(new, budget, engine.is_chunked, float(target.tokens), engine.is_prefill_first)
    held = memory.held_tokens
    for limit, is_over in (("kv_cache", held(isl + osl) > room), ("budget", begun < 1.0)):
        if is_over:
            return RateCurve(loops.ReplicaCurve(*np.empty((5, 0))), RATE_LIMITS.index(limit))
    fit = {
        "kv_cache": room / held(isl + engine.osl_reserved * osl),
        "max_seqs": engine.max_seqs,
        "budget": begun,
    }
    tightest = min(fit, key=lambda name: fit[name])
    clients = client_loads(fit[tightest])
    estimates = estimate(
        plan, isl, osl, clients * layout.batches_in_flight, budget, engine.is_chunked,
        kv_reservation=asked.kv_reservation, max_seqs=engine.max_seqs, speculation=asked.speculation,
        prefix_hit=asked.prefix_hit, arrivals="random",
    )  # fmt: skip
    times = (estimates.ttft_ms, estimates.tpot_ms, estimates.request_latency_ms)
    rate = estimates.tokens_per_s_per_gpu * (layout.world_size / osl)
    clients = clients * layout.batches_in_flight
    return RateCurve(loops.ReplicaCurve(clients, rate, *times), RATE_LIMITS.index(tightest))
