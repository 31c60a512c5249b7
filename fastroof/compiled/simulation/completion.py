"""The end of a step: its tokens are there, and requests that had their last give back what they held."""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.simulation.leaving import free_slot, unlink_order
from fastroof.compiled.simulation.records import Record, add_gaps
from fastroof.compiled.simulation.state import (
    BUCKET_NEXT,
    BUSY_US,
    DONE_PLACE,
    END,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FLIGHT_US,
    FREE,
    FRESH,
    FRESH_AT,
    GOES_ON,
    GONE,
    HELD,
    IN_FLIGHT,
    LAST_DECODE_END,
    NONE,
    NUM_FINISHED,
    OLDEST,
    PREEMPTED_FRESH,
    REQUEST,
    TIMED_OUT,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    blocks_of,
    release_next,
)

__all__ = ["complete_step"]


@jit_stateful_inline
def _finish(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, slot: int, now_us: float
) -> None:
    """A request has its last token."""
    slots = state.slots
    request = slots[REQUEST, slot]
    served.last_us[request] = now_us
    if slots[HELD, slot] != GONE:
        held = slots[HELD, slot]
        if not options.reserves_output:
            tokens = requests.input_tokens[request] + requests.output_tokens[request] - 1
            held = blocks_of(tokens, options)
        state.scalars[FREE] += held
        unlink_order(state, slot)
    free_slot(state, slot)
    state.scalars[NUM_FINISHED] += 1
    if options.timeout_us < math.inf:
        served.place[request] = DONE_PLACE
    if options.clients > 0:
        release_next(state, requests, options, now_us)


@jit_stateful_inline
def _say_decodes(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    record: Record,
    flight: int,
    now_us: float,
) -> None:
    """Every decode of a step has a token; it is the last of those in the step's bucket."""
    scalars = state.scalars
    decodes = scalars[FLIGHT_DECODES + flight]
    for i in range(scalars[FRESH]):
        # those that have prefilled since the last step of decodes
        slot = state.fresh[i]
        if slot >= 0:
            request = state.slots[REQUEST, slot]
            state.slots[FRESH_AT, slot] = NONE
        else:
            request = PREEMPTED_FRESH - slot
        decodes -= 1
        if served.status[request] != TIMED_OUT:
            add_gaps(record, now_us - served.last_us[request], 1)
            served.last_us[request] = now_us
    scalars[FRESH] = 0
    if decodes > 0:
        add_gaps(record, now_us - state.clock[LAST_DECODE_END], decodes)
    state.clock[LAST_DECODE_END] = now_us
    place = scalars[FLIGHT_STEP + flight] & (state.calendar.shape[1] - 1)
    slot = state.calendar[FIRST_SLOT, place]
    if slot != NONE:
        state.calendar[FIRST_SLOT, place] = NONE
        while slot != NONE:
            after = state.slots[BUCKET_NEXT, slot]
            _finish(state, options, requests, served, slot, now_us)
            slot = after


@jit_stateful_inline
def _say_firsts(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    record: Record,
    flight: int,
    now_us: float,
) -> None:
    """Every prompt that a step has completed has a token: its first, or the next after it was preempted."""
    for i in range(state.scalars[FLIGHT_FIRSTS + flight]):
        request, slot = state.firsts[2 * flight, i], state.firsts[2 * flight + 1, i]
        if served.status[request] == TIMED_OUT:
            continue
        if math.isnan(served.first_us[request]):
            served.first_us[request] = now_us
        else:
            add_gaps(record, now_us - served.last_us[request], 1)
        if slot >= 0:
            _finish(state, options, requests, served, slot, now_us)
            continue
        served.last_us[request] = now_us
        if options.prefill_first and state.slots[REQUEST, GOES_ON - slot] == request:
            state.slots[FRESH_AT, GOES_ON - slot] = state.scalars[FRESH]
            state.fresh[state.scalars[FRESH]] = GOES_ON - slot
            state.scalars[FRESH] += 1


@jit_stateful_inline
def complete_step(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    record: Record,
    now_us: float,
) -> None:
    """End the running step now; the next in flight begins."""
    scalars, clock = state.scalars, state.clock
    flight = scalars[OLDEST]
    if scalars[FLIGHT_STEP + flight] != NONE:
        _say_decodes(state, options, requests, served, record, flight, now_us)
    if scalars[FLIGHT_FIRSTS + flight] > 0:
        _say_firsts(state, options, requests, served, record, flight, now_us)
    clock[BUSY_US] += clock[FLIGHT_US + flight]
    scalars[OLDEST] = 1 - flight
    scalars[IN_FLIGHT] -= 1
    if scalars[IN_FLIGHT] > 0:
        clock[END] = now_us + clock[FLIGHT_US + scalars[OLDEST]]
