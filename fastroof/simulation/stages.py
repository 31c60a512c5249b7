"""Run an engine whose plan has pipeline stages, or replicas of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fastroof.compiled.simulation import stages as loops
from fastroof.compiled.simulation.state import LEAST_FREE, NUM_BLOCKS, NUM_SCALARS, EngineState
from fastroof.errors import SimulationError
from fastroof.simulation.engine import (
    Outcomes,
    added_up,
    arrays_of,
    counters_of,
    new_record,
    new_served,
    new_state,
    options_of,
    outcomes_of,
    raise_stuck,
    too_long,
    with_rejected,
)
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import LRU
from fastroof.traces.trace import Trace

if TYPE_CHECKING:
    from fastroof.plan import StepPlan


def check_stages(plan: StepPlan, settings: EngineSettings, replicas: int, prefix_cache: str) -> None:
    """Raise an error if an engine with these pipeline stages is not simulated."""
    pp = plan.layout.pp
    if plan.layout.dp > 1:
        raise SimulationError(
            f"{pp} pipeline stages with dp {plan.layout.dp} are not simulated; use dp=1, or pp=1"
        )
    if replicas > 1:
        raise SimulationError(
            f"{replicas} replicas of {pp} pipeline stages are not simulated; use replicas=1 with a part of "
            "the requests, or pp=1"
        )
    if prefix_cache == LRU:
        raise SimulationError(
            "a simulated prefix cache is not supported with pipeline stages, whose batches compute the same "
            'blocks at once; give prefix_cache="given", or use pp=1'
        )
    if settings.pause_steps or settings.min_free_slots_delay:
        raise SimulationError(
            "prefill_schedule_interval, prefill_decode_interval and min_free_slots_delay are not simulated "
            "with pipeline stages; leave them out, or use pp=1"
        )


def run_stages(plan: StepPlan, trace: Trace, settings: EngineSettings, *, time_scale: float) -> Outcomes:
    """Serve a trace with an engine that has as many batches in flight as pipeline stages."""
    pp = plan.layout.pp
    rejected = too_long(trace, settings)
    requests = arrays_of(trace, ~rejected if rejected.any() else None)
    count = len(requests.arrival_us)
    served, record = new_served(settings, count), new_record()
    pipeline = _pipeline_of(settings, requests, int(trace.output_tokens.max()), pp)
    if count:
        arena = plan.bottleneck.arena
        options = options_of(arena, settings, trace, time_scale)._replace(depth=1)
        if not pipeline.shares_slots:
            options = options._replace(max_seqs=max(settings.max_num_seqs // pp, 1))
        arguments = (pipeline, requests, served, record, settings.num_gpu_blocks)
        raise_stuck(loops.stages_run(arena, options, options._replace(admits_whole=1), *arguments))
    replica_of = np.zeros(count, np.int32)
    outcomes = outcomes_of(requests, served, replica_of, record, _counters(pipeline))
    return with_rejected(outcomes, trace, rejected) if rejected.any() else outcomes


def _pipeline_of(settings: EngineSettings, requests: Any, longest: int, pp: int) -> loops.Pipeline:
    """Allocate the state of an engine with so many batches."""
    states = new_state(settings, requests, longest, pp)
    return loops.Pipeline(
        states,
        np.zeros(NUM_SCALARS, np.int64),
        np.zeros(pp, np.int64),
        np.zeros(pp),
        # SGLang limits each batch to its share
        int(settings.order == "mixed"),
    )


def _counters(pipeline: loops.Pipeline) -> dict[str, Any]:
    """Return the counters of all batches together."""
    states = pipeline.states
    batches = range(len(states.scalars))
    each = [counters_of(EngineState(*(array[at] for array in states))) for at in batches]
    counters = added_up(each)
    if pipeline.shares_slots:
        counters["peak_running"] = max(one["peak_running"] for one in each)
    blocks = int(states.scalars[0, NUM_BLOCKS])
    counters["num_gpu_blocks"] = blocks
    counters["peak_blocks"] = blocks - int(states.scalars[:, LEAST_FREE].min())
    return counters
