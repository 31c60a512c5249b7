"""One engine over time: steps end, requests arrive, steps are scheduled."""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.completion import complete_step
from fastroof.compiled.simulation.decode_run import run_decodes
from fastroof.compiled.simulation.leaving import time_out
from fastroof.compiled.simulation.records import Record, add_interval
from fastroof.compiled.simulation.scheduling import make_step
from fastroof.compiled.simulation.state import (
    ARRIVED,
    CODE_STOPPED,
    CODE_STUCK,
    DEADLINE,
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
    PEAK_WAITING,
    RUNNING,
    WAITING,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    queue_all,
    restart,
)
from fastroof.compiled.steps import PlanParts, open_plan

__all__ = ["advance", "engine_run"]


@jit_stateful_inline
def see_arrivals(state: EngineState, requests: Requests, now_us: float) -> None:
    """Count those that have come as waiting."""
    scalars = state.scalars
    while scalars[ARRIVED] != NONE and requests.arrival_us[scalars[ARRIVED]] <= now_us:
        scalars[ARRIVED] = requests.next_arrived[scalars[ARRIVED]]
        scalars[WAITING] += 1
    scalars[PEAK_WAITING] = max(scalars[PEAK_WAITING], scalars[WAITING])


@jit_stateful_inline
def begin_us(state: EngineState, requests: Requests) -> float:
    """When an idle engine has something to do: at its next arrival, or never."""
    scalars = state.scalars
    if scalars[HEAD] == NONE:
        return math.inf
    return float(max(state.clock[NOW], requests.arrival_us[scalars[HEAD]]))


@jit_stateful_inline
def _next_event_us(state: EngineState, options: EngineOptions, requests: Requests, until_us: float) -> float:
    """When something else than the end of a step happens: an arrival, a time-out, or ``until_us``."""
    scalars = state.scalars
    event_us = until_us
    if scalars[ARRIVED] != NONE:
        event_us = min(event_us, requests.arrival_us[scalars[ARRIVED]])
    if options.timeout_us < math.inf and scalars[DEADLINE] != NONE:
        event_us = min(event_us, requests.arrival_us[scalars[DEADLINE]] + options.timeout_us)
    return event_us


@jit_stateful_inline
def _at_instant(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> None:
    """What happens between two steps: arrivals, time-outs, scheduling."""
    scalars, clock = state.scalars, state.clock
    now_us = clock[NOW]
    see_arrivals(state, requests, now_us)
    if options.timeout_us < math.inf:
        time_out(state, options, requests, served, plan.window, now_us, False)
    run_decodes(arena, plan, options, state, record, _next_event_us(state, options, requests, until_us))
    now_us = clock[NOW]
    while scalars[IN_FLIGHT] < options.depth:
        was_idle = scalars[IN_FLIGHT] == 0
        step_us = make_step(arena, plan, options, state, requests, served, True)
        if step_us == 0.0:
            break
        if was_idle:
            clock[END] = now_us + step_us
    if scalars[IN_FLIGHT] > 0:
        flight = scalars[OLDEST]
        tokens = (
            scalars[FLIGHT_TOKENS + flight],
            scalars[FLIGHT_DECODES + flight] + scalars[FLIGHT_FIRSTS + flight],
        )
        blocks = scalars[NUM_BLOCKS] - scalars[FREE]
        add_interval(record, now_us, clock[END], scalars[RUNNING], scalars[WAITING], blocks, tokens)


@jit_stateful
def advance(
    arena: Floats,
    options: EngineOptions,
    state: EngineState,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> int:
    """Run an engine until its next event is not before ``until_us``. Returns a code."""
    plan = open_plan(arena)
    scalars, clock = state.scalars, state.clock
    while True:
        # read again each time: every store of the loop might be to it
        if options.stop[0] != 0:
            return CODE_STOPPED
        if scalars[IN_FLIGHT] > 0:
            now_us = clock[END]
            if now_us >= until_us:
                return 0
            clock[NOW] = now_us
            if options.timeout_us < math.inf:
                see_arrivals(state, requests, now_us)
                time_out(state, options, requests, served, plan.window, now_us, True)
            complete_step(state, options, requests, served, record, now_us)
        else:
            if scalars[WAITING] > 0:
                return CODE_STUCK
            now_us = begin_us(state, requests)
            if now_us >= until_us:
                return 0
            clock[NOW] = now_us
        _at_instant(arena, plan, options, state, requests, served, record, until_us)


@jit_stateful
def engine_run(
    arena: Floats,
    options: EngineOptions,
    state: EngineState,
    requests: Requests,
    served: Served,
    record: Record,
    num_blocks: int,
) -> int:
    """Serve all requests of a trace with one engine. Returns a code."""
    restart(state, num_blocks)
    queue_all(state, requests, options)
    return advance(arena, options, state, requests, served, record, math.inf)
