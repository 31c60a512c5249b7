"""Replicas of an engine over a pool of blocks each: routings that may ask what each holds of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fastroof.checks import one_of, whole_number
from fastroof.compiled.simulation import replicas as loops
from fastroof.compiled.simulation.pooled_replicas import PREFIX_AWARE, pooled_replicas_run
from fastroof.compiled.simulation.state import EngineState
from fastroof.errors import SimulationError
from fastroof.simulation.engine import (
    arrays_of,
    counters_of,
    new_record,
    new_served,
    options_of,
    raise_stuck,
    too_long,
    with_rejected,
)
from fastroof.simulation.outcomes import Outcomes, added_up
from fastroof.simulation.pooled_engine import new_pooled_arrays, pool_counters, refuse_none, run_pooled_engine
from fastroof.simulation.replicas import MOST_REPLICAS, ROUTINGS, ranks_of
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.trace import Trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan

__all__ = ["POOLED_ROUTINGS", "run_pooled_replicas"]

_RULES: Final = {
    "round_robin": loops.ROUND_ROBIN,
    "least_outstanding": loops.LEAST_OUTSTANDING,
    "least_load": loops.LEAST_LOAD,
    "least_kv": loops.LEAST_KV,
    "power_of_two": loops.POWER_OF_TWO,
    "prefix_aware": PREFIX_AWARE,
}

POOLED_ROUTINGS: Final = (*ROUTINGS, "prefix_aware")
"""Ways to choose the replica of a request: see :func:`run_pooled_replicas`."""


def run_pooled_replicas(
    plan: StepPlan,
    trace: Trace,
    settings: EngineSettings,
    replicas: int = 1,
    routing: str = "round_robin",
    *,
    time_scale: float = 1.0,
    seed: int = 0,
) -> Outcomes:
    """Serve a trace with replicas of an engine, each with a prefix cache of its own."""
    replicas = whole_number("replicas", replicas, most=MOST_REPLICAS, error=SimulationError)
    one_of("routing", routing, POOLED_ROUTINGS, SimulationError)
    if ranks_of(plan) > 1:
        raise SimulationError(
            "engines with ranks of attention data parallelism have no simulated pools of blocks: compile the "
            "plan with dp=1, or give what is cached"
        )
    if replicas == 1:
        return run_pooled_engine(plan, trace, settings, time_scale=time_scale)
    if trace.clients is not None:
        raise SimulationError(
            "clients of a closed loop are simulated with one engine over a pool of blocks: give one replica"
        )
    rejected = too_long(trace, settings)
    refuse_none(trace, settings, rejected)
    which = ~rejected if rejected.any() else None
    requests = arrays_of(trace, which)
    count = len(requests.arrival_us)
    states, pools, prompts = new_pooled_arrays(settings, trace, requests, which, replicas)
    served, record = new_served(settings, count), new_record()
    drawn = np.random.default_rng(seed).integers(0, replicas, (2, count), np.int32)
    router = loops.Router(_RULES[routing], drawn, np.zeros(replicas, np.int64))
    replica_of, pushed_tokens = np.zeros(count, np.int32), np.zeros(replicas, np.int64)
    fleet = (states, pools, prompts, requests, served, record, router, pushed_tokens, replica_of)
    raise_stuck(pooled_replicas_run(plan.arena, options_of(settings, trace, time_scale), *fleet))
    engines = [EngineState(*(array[one] for array in states)) for one in range(replicas)]
    counters = added_up([counters_of(engine) for engine in engines]) | pool_counters(pools)
    counters["num_gpu_blocks"] = replicas * settings.num_gpu_blocks
    outcomes = Outcomes(
        requests.arrival_us,
        served.first_us,
        served.last_us,
        served.preemptions,
        served.status,
        replica_of,
        record.gaps,
        record.series,
        float(record.width_us[0]),
        counters,
        prompts.found_tokens,
    )
    return outcomes if which is None else with_rejected(outcomes, trace, rejected)
