"""One engine over time, its KV blocks in a pool: as ``engine``, with blocks that requests share."""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.block_pool import FREE_BLOCKS, BlockPool, Prompts, free_blocks, restart_pool
from fastroof.compiled.simulation.pooled_preemption import EARLIEST, OVER, is_late, time_out_pooled
from fastroof.compiled.simulation.pooled_scheduling import make_pooled_step
from fastroof.compiled.simulation.slots import (
    begin_us,
    end_step,
    free_slot,
    record_prompt_token,
    record_step,
    see_arrivals,
    unlink_order,
)
from fastroof.compiled.simulation.state import (
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    CODE_STOPPED,
    CODE_STUCK,
    END,
    ENTERED,
    FINISH,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FREE,
    GONE,
    HELD,
    IN_FLIGHT,
    LAST,
    LAST_END,
    NONE,
    NOW,
    NUM_FINISHED,
    NUM_TIMED_OUT,
    OLDEST,
    ORDER_PREVIOUS,
    PREEMPTED,
    REQUEST,
    RUNNING,
    TIMED_OUT,
    WAITING,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    add_gaps,
    queue_all,
    release_next,
    restart,
)
from fastroof.compiled.steps import open_plan


@jit_stateful_inline
def restart_pooled(state: EngineState, pool: BlockPool) -> None:
    """Reset an engine and its pool; ``oldest`` and ``tables`` must be 0, other arrays may hold anything."""
    restart_pool(pool)
    restart(state, pool.counts[FREE_BLOCKS])
    state.due[:] = NONE
    state.clock[EARLIEST] = math.inf


@jit_stateful_inline
def _end_request(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    slot: int,
) -> None:
    """End a request with its last token, or as timed out if the token is late and its blocks are gone."""
    slots, scalars, now_us = state.slots, state.scalars, state.clock[NOW]
    request, size = slots[REQUEST, slot], options.block_size
    if slots[HELD, slot] == GONE and is_late(options, requests, request, now_us):
        served.status[request] = TIMED_OUT
        scalars[NUM_TIMED_OUT] += 1
        served.last_us[request] = math.nan
    else:
        served.last_us[request] = now_us
        scalars[NUM_FINISHED] += 1
    if slots[HELD, slot] != GONE:
        prompt = requests.input_tokens[request]
        known = (prompt + requests.output_tokens[request] - 1) // size
        free_blocks(pool, request, slot, slots[HELD, slot], known)
        scalars[FREE] = pool.counts[FREE_BLOCKS]
        unlink_order(state, slot, LAST)
    free_slot(state, slot)
    scalars[RUNNING] -= 1
    if options.clients > 0:
        release_next(state, requests, options, now_us)


@jit_stateful
def _late_decodes(
    state: EngineState, options: EngineOptions, requests: Requests, step: int, now_us: float
) -> int:
    """Count tokens of the ending decode step whose requests have timed out before it."""
    slots = state.slots
    late = 0
    for newest in (LAST, PREEMPTED):
        slot = state.scalars[newest]
        while slot != NONE:
            if slots[ENTERED, slot] <= step <= slots[FINISH, slot]:
                late += is_late(options, requests, slots[REQUEST, slot], now_us)
            slot = slots[ORDER_PREVIOUS, slot]
    slot = state.calendar[FIRST_SLOT, step & (state.calendar.shape[1] - 1)]
    while slot != NONE:
        if slots[HELD, slot] == GONE:
            late += is_late(options, requests, slots[REQUEST, slot], now_us)
        slot = slots[BUCKET_NEXT, slot]
    return late


@jit_stateful_inline
def _complete_step(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    record: Record,
) -> None:
    """End the running step now: record its tokens and start the next one in flight."""
    scalars, clock, slots, calendar = state.scalars, state.clock, state.slots, state.calendar
    flight, now_us = scalars[OLDEST], clock[NOW]
    step, decodes = scalars[FLIGHT_STEP + flight], scalars[FLIGHT_DECODES + flight]
    is_strict = clock[EARLIEST] < now_us
    if step != NONE:
        if is_strict:
            decodes -= _late_decodes(state, options, requests, step, now_us)
        if decodes > 0:
            # all of them were in the step before, too
            add_gaps(record, now_us - clock[LAST_END], decodes)
        place = step & (calendar.shape[1] - 1)
        slot = calendar[FIRST_SLOT, place]
        calendar[FIRST_SLOT, place] = NONE
        # end requests in the order they entered, as their blocks are freed in that order; buckets hold them
        # reversed
        while slot != NONE and slots[BUCKET_NEXT, slot] != NONE:
            slot = slots[BUCKET_NEXT, slot]
        while slot != NONE:
            after = slots[BUCKET_PREVIOUS, slot]
            if (
                is_strict
                and slots[HELD, slot] != GONE
                and is_late(options, requests, slots[REQUEST, slot], now_us)
            ):
                slots[FINISH, slot] = OVER
            else:
                _end_request(state, pool, prompts, options, requests, served, slot)
            slot = after
    for i in range(scalars[FLIGHT_FIRSTS + flight]):
        request, slot = state.firsts[2 * flight, i], state.firsts[2 * flight + 1, i]
        if served.status[request] == TIMED_OUT:
            continue
        if is_late(options, requests, request, now_us):
            if slot != NONE and slots[HELD, slot] == GONE:
                _end_request(state, pool, prompts, options, requests, served, slot)
            continue
        record_prompt_token(served, record, request, now_us)
        if slot != NONE:
            _end_request(state, pool, prompts, options, requests, served, slot)
    clock[LAST_END] = now_us
    end_step(state, flight, now_us)


@jit_stateful
def advance_pooled(
    arena: Floats,
    options: EngineOptions,
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> int:
    """Run an engine until its next event is at or after ``until_us``. Returns a code."""
    plan = open_plan(arena)
    scalars, clock = state.scalars, state.clock
    while True:
        if options.stop[0] != 0:
            return CODE_STOPPED
        if scalars[IN_FLIGHT] > 0:
            if clock[END] >= until_us:
                return 0
            clock[NOW] = clock[END]
            _complete_step(state, pool, prompts, options, requests, served, record)
        else:
            if scalars[WAITING] > 0:
                return CODE_STUCK
            now_us = begin_us(state, requests)
            if now_us >= until_us:
                return 0
            clock[NOW] = now_us
        now_us = clock[NOW]
        see_arrivals(state, requests, now_us)
        if options.timeout_us < math.inf:
            time_out_pooled(state, pool, prompts, options, requests, served)
            see_arrivals(state, requests, now_us)
        while scalars[IN_FLIGHT] < options.depth:
            is_idle = scalars[IN_FLIGHT] == 0
            step_us = make_pooled_step(arena, plan, options, state, pool, prompts, requests, served)
            if step_us == 0.0:
                break
            if is_idle:
                clock[END] = now_us + step_us
        record_step(state, record, now_us)


@jit_stateful
def pooled_engine_run(
    arena: Floats,
    options: EngineOptions,
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    requests: Requests,
    served: Served,
    record: Record,
) -> int:
    """Serve all requests of a trace with one engine. Returns a code."""
    restart_pooled(state, pool)
    queue_all(state, requests, options)
    return advance_pooled(arena, options, state, pool, prompts, requests, served, record, math.inf)
