"""An engine with pipeline stages: as many batches as stages are on their way through them.

A request stays in the batch that admitted it. When a batch leaves the last stage, its tokens are seen, its
next step is scheduled, and then those of batches without requests; all share the waiting requests and the
blocks. Every stage takes an equal part of a step's time, and takes batches one after the other:

    end[batch, stage] = max(end[batch - 1, stage], end[batch, stage - 1]) + time[batch] / stages

A batch that lacks blocks preempts its own last request, maybe its only one. If that one started again with
room for a chunk alone, batches could take each other's blocks forever. So nothing starts ahead of preempted
requests, and these only with room for all of their tokens: until a token comes, few preemptions remain.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.engine import complete_step
from fastroof.compiled.simulation.preemption import drop_request
from fastroof.compiled.simulation.scheduling import make_step
from fastroof.compiled.simulation.sessions import coming_us, end_parent
from fastroof.compiled.simulation.slots import see_arrivals, take_coming
from fastroof.compiled.simulation.state import (
    ARRIVED,
    BUSY_US,
    CODE_STOPPED,
    CODE_STUCK,
    DEADLINE,
    DONE_PLACE,
    END,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_TOKENS,
    FREE,
    HEAD,
    IN_FLIGHT,
    NONE,
    NOW,
    NUM_BLOCKS,
    OLDEST,
    PREEMPTED,
    RELEASED,
    REQUEST,
    RUN_ALL,
    RUNNING,
    TAIL,
    TIMED_OUT,
    WAITING,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    add_interval,
    engine_of,
    queue_all,
    release_next,
    restart,
)
from fastroof.compiled.steps import PlanParts, open_plan


class Pipeline(NamedTuple):
    """The batches of an engine, each with its own state along the first axis, and what they share.

    ``shared`` are scalars of the engine, by the names of a state's. ``queue`` are batches in flight, a ring
    from OLDEST on, ``free_us[stage]`` when each stage has ended its last one. ``shares_slots`` is 1 if the
    number of running requests is limited in all, 0 if in each batch.
    """

    states: EngineState
    shared: Longs
    queue: Longs
    free_us: Floats
    shares_slots: int


@jit_stateful_inline
def _enter(pipeline: Pipeline, batch: int) -> EngineState:
    """Return a batch's state, with what it shares as it is now."""
    state = engine_of(pipeline.states, batch)
    shared = pipeline.shared
    for name in (HEAD, TAIL, ARRIVED, DEADLINE, RELEASED, PREEMPTED, WAITING, FREE):
        state.scalars[name] = shared[name]
    if pipeline.shares_slots > 0:
        state.scalars[RUNNING] = shared[RUNNING]
    return state


@jit_stateful_inline
def _leave(pipeline: Pipeline, state: EngineState) -> None:
    """Note what a batch has changed of what it shares."""
    shared = pipeline.shared
    for name in (HEAD, TAIL, ARRIVED, DEADLINE, RELEASED, PREEMPTED, WAITING, FREE, RUNNING):
        shared[name] = state.scalars[name]


@jit_stateful_inline
def _arrive(
    pipeline: Pipeline, options: EngineOptions, requests: Requests, now_us: float, is_strict: bool
) -> None:
    """Let requests wait that have arrived by now; of sessions, if ``is_strict``, before."""
    state = _enter(pipeline, 0)
    if options.has_parents > 0:
        take_coming(state, requests, now_us, is_strict)
    see_arrivals(state, requests, now_us)
    _leave(pipeline, state)


@jit_stateful_inline
def _batch_of(pipeline: Pipeline, served: Served, request: int) -> int:
    """Return the batch that a request runs in, or the first one if it waits."""
    slot = served.place[request]
    if slot >= 0:
        for batch in range(pipeline.states.scalars.shape[0]):
            if pipeline.states.slots[batch, REQUEST, slot] == request:
                return batch
    return 0


@jit_stateful
def _time_out(
    pipeline: Pipeline,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    now_us: float,
    is_strict: bool,
) -> None:
    """Drop requests whose deadline is before now or, unless ``is_strict``, now."""
    shared = pipeline.shared
    while shared[DEADLINE] != NONE:
        request = shared[DEADLINE]
        deadline_us = requests.arrival_us[request] + options.timeout_us
        if deadline_us > now_us or (is_strict and deadline_us == now_us):
            return
        shared[DEADLINE] = requests.next_arrived[request]
        if served.place[request] != DONE_PLACE:
            state = _enter(pipeline, _batch_of(pipeline, served, request))
            # a preempted request has no token in flight
            drop_request(state, options, requests, served, request, math.nan)
            if options.clients > 0:
                release_next(state, requests, options, now_us)
            if options.has_parents > 0:
                end_parent(requests, request, now_us)
            _leave(pipeline, state)


@jit_stateful_inline
def _has_preempted(pipeline: Pipeline, served: Served) -> bool:
    """Whether a preempted request waits."""
    request = pipeline.shared[PREEMPTED]
    while request != NONE and served.status[request] == TIMED_OUT:
        request = served.next_preempted[request]
    return bool(request != NONE)


@jit_stateful_inline
def _schedule(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    whole_options: EngineOptions,
    pipeline: Pipeline,
    requests: Requests,
    served: Served,
    first: int,
    now_us: float,
) -> None:
    """Send the next steps of idle batches, from ``first`` on, into the stages."""
    count, shared = pipeline.states.scalars.shape[0], pipeline.shared
    for i in range(count):
        batch = (first + i) % count
        state = _enter(pipeline, batch)
        if state.scalars[IN_FLIGHT] > 0:
            continue
        state.clock[NOW] = now_us
        chosen = whole_options if _has_preempted(pipeline, served) else options
        step_us = make_step(arena, plan, chosen, state, requests, served, RUN_ALL)
        _leave(pipeline, state)
        if step_us == 0.0:
            continue
        at_us = now_us
        for stage in range(count):
            at_us = max(at_us, pipeline.free_us[stage]) + step_us / count
            pipeline.free_us[stage] = at_us
        state.clock[END] = at_us
        pipeline.queue[(shared[OLDEST] + shared[IN_FLIGHT]) % count] = batch
        shared[IN_FLIGHT] += 1


@jit_stateful_inline
def _record(pipeline: Pipeline, record: Record, batch: int, now_us: float, end_us: float) -> None:
    """Add the time until the oldest batch ends to the series."""
    state, shared = pipeline.states.scalars[batch], pipeline.shared
    running = shared[RUNNING]
    if pipeline.shares_slots == 0:
        running = 0
        for one in range(pipeline.states.scalars.shape[0]):
            running += pipeline.states.scalars[one, RUNNING]
    flight = state[OLDEST]
    tokens = state[FLIGHT_TOKENS + flight], state[FLIGHT_DECODES + flight] + state[FLIGHT_FIRSTS + flight]
    blocks = state[NUM_BLOCKS] - shared[FREE]
    add_interval(record, now_us, end_us, running, shared[WAITING], blocks, tokens)


@jit_stateful_inline
def _next_us(pipeline: Pipeline, options: EngineOptions, requests: Requests, now_us: float) -> float:
    """Return when the oldest batch ends or, if the stages are idle, the next request comes; us, or inf."""
    if pipeline.shared[IN_FLIGHT] > 0:
        return float(pipeline.states.clock[pipeline.queue[pipeline.shared[OLDEST]], END])
    at_us = math.inf
    if pipeline.shared[ARRIVED] != NONE:
        at_us = requests.arrival_us[pipeline.shared[ARRIVED]]
    if options.has_parents > 0:
        at_us = min(at_us, coming_us(requests))
    return max(now_us, float(at_us))


@jit_stateful
def stages_run(
    arena: Floats,
    options: EngineOptions,
    whole_options: EngineOptions,
    pipeline: Pipeline,
    requests: Requests,
    served: Served,
    record: Record,
    num_blocks: int,
) -> int:
    """Serve all requests of a trace with an engine of pipeline stages. Returns a code.

    ``whole_options`` are ``options`` that admit requests only with room for their whole prompts.
    """
    plan = open_plan(arena)
    states, shared = pipeline.states, pipeline.shared
    count = states.scalars.shape[0]
    for batch in range(count):
        restart(engine_of(pipeline.states, batch), num_blocks)
    pipeline.free_us[:] = 0.0
    state = engine_of(states, 0)
    queue_all(state, requests, options)
    _leave(pipeline, state)
    shared[OLDEST], shared[IN_FLIGHT] = 0, 0
    now_us, busy_us = 0.0, 0.0
    while True:
        if options.stop[0] != 0:
            return CODE_STOPPED
        next_us = _next_us(pipeline, options, requests, now_us)
        if next_us == math.inf:
            break
        first = 0
        if shared[IN_FLIGHT] > 0:
            first = pipeline.queue[shared[OLDEST]]
            _record(pipeline, record, first, now_us, next_us)
            busy_us += next_us - now_us
            now_us = next_us
            shared[OLDEST], shared[IN_FLIGHT] = (shared[OLDEST] + 1) % count, shared[IN_FLIGHT] - 1
            if options.timeout_us < math.inf:
                _arrive(pipeline, options, requests, now_us, True)
                _time_out(pipeline, options, requests, served, now_us, True)
            state = _enter(pipeline, first)
            state.clock[NOW] = now_us
            complete_step(state, options, requests, served, record, now_us)
            _leave(pipeline, state)
        now_us = next_us
        _arrive(pipeline, options, requests, now_us, False)
        if options.timeout_us < math.inf:
            _time_out(pipeline, options, requests, served, now_us, False)
            _arrive(pipeline, options, requests, now_us, False)
        for _ in range(2):
            _schedule(arena, plan, options, whole_options, pipeline, requests, served, first, now_us)
            if shared[IN_FLIGHT] > 0 or shared[WAITING] == 0:
                break
            # a request that ran alone gave its blocks back, and starts again
        if shared[IN_FLIGHT] == 0 and shared[WAITING] > 0:
            return CODE_STUCK
    states.clock[:, BUSY_US] = 0.0
    states.clock[0, BUSY_US] = busy_us
    return 0
