"""One engine whose prefix cache is simulated block by block: plan, trace and settings in, outcomes out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fastroof.arrays import Bools
from fastroof.checks import shown
from fastroof.compiled.simulation.block_pool import (
    EVICTIONS,
    FOUND_AGAIN_TOKENS,
    FOUND_TOKENS,
    LOOKED_UP_TOKENS,
    NUM_COUNTS,
    NUM_LINKS,
    BlockPool,
    Prompts,
)
from fastroof.compiled.simulation.pooled_engine import pooled_engine_run
from fastroof.compiled.simulation.pooled_slots import DUE_ROWS, NUM_POOLED_FIELDS, POOLED_CALENDAR_ROWS
from fastroof.errors import SimulationError
from fastroof.simulation.engine import (
    arrays_of,
    counters_of,
    new_record,
    new_served,
    new_state,
    options_of,
    raise_stuck,
    too_long,
    with_rejected,
)
from fastroof.simulation.outcomes import Outcomes
from fastroof.simulation.prefix_sharing import prompt_blocks
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.trace import Trace

if TYPE_CHECKING:
    from fastroof.compiled.simulation.state import EngineState, Requests
    from fastroof.plan import StepPlan

__all__ = ["new_pooled_arrays", "pool_counters", "refuse_none", "run_pooled_engine"]

MOST_POOL_BLOCKS: Final = 2**30
"""Most blocks of a pool: each is simulated."""


def new_pooled_arrays(
    settings: EngineSettings,
    trace: Trace,
    requests: Requests,
    served: Bools | None = None,
    engines: int | None = None,
) -> tuple[EngineState, BlockPool, Prompts]:
    """Make what engines over pools of blocks need: of one, or of several along a first axis."""
    if settings.order != "mixed" or settings.reserve_output:
        raise SimulationError(
            "a pool of blocks is simulated as vLLM's: order must be mixed and reserve_output off, got "
            f"{settings.order} and {settings.reserve_output}"
        )
    if trace.hash_ids is not None and trace.cached_tokens.any():
        raise SimulationError(
            f"trace {shown(trace.name)} has hash_ids, by which blocks are found where they are, and "
            "cached_tokens, which say it beforehand: drop one of them"
        )
    size = settings.block_size
    prompts, num_keys = prompt_blocks(trace, size, served)
    blocks_each = -(-(requests.input_tokens.astype(np.int64) + requests.output_tokens) // size)
    # with as many as all take none is reused, so that more are never seen
    num_blocks = min(settings.num_gpu_blocks, int(blocks_each.sum()))
    if num_blocks > MOST_POOL_BLOCKS:
        raise SimulationError(
            f"num_gpu_blocks {settings.num_gpu_blocks:,} is more than a pool of blocks simulates, "
            f"{MOST_POOL_BLOCKS:,}: give fewer"
        )
    several = () if engines is None else (engines,)
    state = new_state(settings, len(requests.arrival_us), int(requests.output_tokens.max()), engines)
    slots, buckets = state.slots.shape[-1], state.calendar.shape[-1]
    state = state._replace(
        slots=np.zeros((*several, NUM_POOLED_FIELDS, slots), np.int64),
        calendar=np.zeros((*several, POOLED_CALENDAR_ROWS, buckets), np.int32),
        due=np.zeros((*several, DUE_ROWS, size), np.int32),
    )
    pool = BlockPool(
        counts=np.zeros((*several, NUM_COUNTS), np.int64),
        links=np.zeros((*several, num_blocks + 1, NUM_LINKS), np.int32),
        keys=np.zeros((*several, num_blocks), np.int64),
        oldest=np.zeros((*several, max(num_keys, 1)), np.int32),
        tables=np.zeros((*several, slots, int(blocks_each.max())), np.int32),
    )
    return state, pool, prompts


def pool_counters(pool: BlockPool) -> dict[str, Any]:
    """Return the counts of one pool, or of several together: see :func:`run_pooled_engine`."""
    counts = pool.counts.reshape(-1, NUM_COUNTS).sum(0)
    looked_up, found = int(counts[LOOKED_UP_TOKENS]), int(counts[FOUND_TOKENS])
    return {
        "looked_up_tokens": looked_up,
        "found_tokens": found,
        "found_again_tokens": int(counts[FOUND_AGAIN_TOKENS]),
        "evictions": int(counts[EVICTIONS]),
    }


def refuse_none(trace: Trace, settings: EngineSettings, rejected: Bools) -> None:
    """Raise where no request is left, for there is nothing to simulate."""
    if rejected.all():
        raise SimulationError(
            f"none of the {len(trace):,} requests has room in {settings.num_gpu_blocks:,} blocks of "
            f"{settings.block_size} tokens and steps of {settings.max_num_batched_tokens:,}: give more"
        )


def run_pooled_engine(
    plan: StepPlan, trace: Trace, settings: EngineSettings, *, time_scale: float = 1.0
) -> Outcomes:
    """Serve a trace with one engine whose prefix cache is a pool of blocks, least recently used first."""
    rejected = too_long(trace, settings)
    refuse_none(trace, settings, rejected)
    which = ~rejected if rejected.any() else None
    requests = arrays_of(trace, which)
    state, pool, prompts = new_pooled_arrays(settings, trace, requests, which)
    served, record = new_served(settings, len(requests.arrival_us)), new_record()
    options = options_of(settings, trace, time_scale)
    raise_stuck(pooled_engine_run(plan.arena, options, state, pool, prompts, requests, served, record))
    outcomes = Outcomes(
        requests.arrival_us,
        served.first_us,
        served.last_us,
        served.preemptions,
        served.status,
        np.zeros(len(requests.arrival_us), np.int32),
        record.gaps,
        record.series,
        float(record.width_us[0]),
        counters_of(state) | pool_counters(pool) | {"num_gpu_blocks": settings.num_gpu_blocks},
        prompts.found_tokens,
    )
    return outcomes if which is None else with_rejected(outcomes, trace, rejected)
