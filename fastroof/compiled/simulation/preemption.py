"""Requests that leave their slots early: preempted, or timed out."""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.prefix_cache import release_chain
from fastroof.compiled.simulation.sessions import end_parent
from fastroof.compiled.simulation.slots import free_slot, subtract_decode, unlink_bucket, unlink_order
from fastroof.compiled.simulation.state import (
    BASE,
    BELOW,
    DEADLINE,
    DONE_PLACE,
    END,
    ENTERED,
    FETCHING_PLACE,
    FILLED,
    FINISH,
    FIRST_FIELDS,
    FIRST_SLOT_OF,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FOUND,
    FREE,
    FRESH,
    FRESH_AT,
    FRESH_REQUEST,
    FRESH_SLOT,
    GIVEN_UP_TOKENS,
    GONE,
    HELD,
    IN_FLIGHT,
    LAST,
    LAST_DECODE_END,
    NONE,
    NUM_TIMED_OUT,
    OLDEST,
    PARTIAL,
    PARTIAL_COMPUTED,
    PREEMPTED,
    PREEMPTIONS,
    REQUEST,
    RUNNING,
    STEP,
    TIMED_OUT,
    WAITING,
    WAITING_PLACE,
    WINDOW_SUM,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    blocks_of,
    in_block,
    release_next,
)


@jit_stateful_inline
def leave_decodes(state: EngineState, slot: int, options: EngineOptions) -> None:
    """Subtract a request from the sums over decodes and from the counts of later steps."""
    base, window = state.slots[BASE, slot], options.window
    kv_len = subtract_decode(state, slot)
    state.due[in_block(-base, options)] -= 1
    if window > 0:
        state.scalars[WINDOW_SUM] -= min(kv_len, window)
        if kv_len < window:
            state.scalars[BELOW] -= 1
            filled = window - 1 - base
            if filled <= state.slots[FINISH, slot]:
                state.calendar[FILLED, filled & (state.calendar.shape[1] - 1)] -= 1


@jit_stateful_inline
def _is_draining(state: EngineState, slot: int) -> bool:
    """Whether a request, not a partial prompt, has its last token in flight."""
    finish = state.slots[FINISH, slot]
    return bool(finish < state.scalars[STEP])


@jit_stateful_inline
def _held_blocks(state: EngineState, options: EngineOptions, requests: Requests, slot: int) -> int:
    """Count the blocks that a running request holds."""
    if options.reserves_output:
        return int(state.slots[HELD, slot])
    if slot == state.scalars[PARTIAL]:
        return blocks_of(state.scalars[PARTIAL_COMPUTED], options)
    if _is_draining(state, slot):
        request = state.slots[REQUEST, slot]
        return blocks_of(requests.input_tokens[request] + requests.output_tokens[request] - 1, options)
    return blocks_of(state.slots[BASE, slot] + state.scalars[STEP], options)


@jit_stateful_inline
def _known_tokens(state: EngineState, options: EngineOptions, requests: Requests, slot: int) -> int:
    """Count tokens of a running request that are computed and known, whose blocks can be found."""
    scalars, slots = state.scalars, state.slots
    if slot == scalars[PARTIAL]:
        return int(scalars[PARTIAL_COMPUTED])
    finish, behind = slots[FINISH, slot], options.depth - 1
    if finish >= scalars[STEP]:
        if slots[ENTERED, slot] == scalars[STEP]:
            behind = 0
        return int(slots[BASE, slot] + scalars[STEP] - behind)
    # its last token is in flight
    request = slots[REQUEST, slot]
    if finish == NONE:
        behind = 0
    return int(requests.input_tokens[request] + requests.output_tokens[request] - 1 - behind)


@jit_stateful_inline
def _free_blocks(state: EngineState, options: EngineOptions, requests: Requests, slot: int) -> None:
    """Free the blocks of a running request."""
    scalars = state.scalars
    held = _held_blocks(state, options, requests, slot)
    if options.has_cache == 0:
        scalars[FREE] += held
        return
    known = _known_tokens(state, options, requests, slot) // options.block_size
    request = state.slots[REQUEST, slot]
    release_chain(state, options, requests, request, held, known)


@jit_stateful_inline
def _is_decode_awaited(state: EngineState) -> bool:
    """Whether the latest decode step is the running one."""
    scalars = state.scalars
    in_flight = scalars[FLIGHT_STEP + scalars[OLDEST]]
    return bool(scalars[IN_FLIGHT] > 0 and in_flight == scalars[STEP] - 1)


@jit_stateful_inline
def _leave_fresh(state: EngineState, slot: int) -> None:
    """Remove a slot from ``fresh``; the last one moves into its place, so that there is always room."""
    scalars = state.scalars
    at, last = state.slots[FRESH_AT, slot], scalars[FRESH] - 1
    moved = state.fresh[FRESH_SLOT, last]
    state.fresh[FRESH_REQUEST, at], state.fresh[FRESH_SLOT, at] = state.fresh[FRESH_REQUEST, last], moved
    if moved != NONE:
        state.slots[FRESH_AT, moved] = at
    state.slots[FRESH_AT, slot] = NONE
    scalars[FRESH] = last


@jit_stateful_inline
def _save_last_token(state: EngineState, served: Served, slot: int) -> None:
    """Save the time of the latest token of a request that loses its slot; it may be in flight."""
    scalars, clock = state.scalars, state.clock
    request, fresh_at = state.slots[REQUEST, slot], state.slots[FRESH_AT, slot]
    is_awaited = state.slots[ENTERED, slot] < scalars[STEP] and _is_decode_awaited(state)
    if fresh_at != NONE and is_awaited:
        # its gap differs from that of other decodes
        state.fresh[FRESH_SLOT, fresh_at] = NONE
    elif fresh_at != NONE:
        _leave_fresh(state, slot)
    elif is_awaited:
        served.last_us[request] = clock[END]
    elif state.slots[ENTERED, slot] < scalars[STEP]:
        served.last_us[request] = clock[LAST_DECODE_END]
    # else its prompt's own step makes that token, and saves the time when it ends


@jit_stateful
def preempt_last(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    partial_need: int,
) -> int:
    """Preempt the last admitted request. Returns how many blocks fewer the step needs now."""
    scalars, slots = state.scalars, state.slots
    slot = scalars[LAST]
    request = slots[REQUEST, slot]
    _free_blocks(state, options, requests, slot)
    scalars[PREEMPTIONS] += 1
    served.preemptions[request] += 1
    unlink_order(state, slot, LAST)
    less = 0
    if slot == scalars[PARTIAL]:
        scalars[PARTIAL] = NONE
        less = partial_need
    elif _is_draining(state, slot):
        slots[HELD, slot] = GONE
        return 0
    else:
        step = scalars[STEP]
        if in_block(slots[BASE, slot] + step, options) == 0:
            less = 1
        served.sent[request] = requests.output_tokens[request] - (slots[FINISH, slot] - step + 1)
        _save_last_token(state, served, slot)
        leave_decodes(state, slot, options)
        unlink_bucket(state, slot)
    free_slot(state, slot)
    scalars[RUNNING] -= 1
    served.next_preempted[request] = scalars[PREEMPTED]
    scalars[PREEMPTED] = request
    scalars[WAITING] += 1
    if options.timeout_us < math.inf:
        served.place[request] = WAITING_PLACE
    return less


@jit_stateful
def _forget_tokens(state: EngineState, slot: int) -> None:
    """Remove a timed-out request's tokens from the steps in flight."""
    scalars, slots = state.scalars, state.slots
    for i in range(scalars[IN_FLIGHT]):
        flight = (scalars[OLDEST] + i) & 1
        step = scalars[FLIGHT_STEP + flight]
        if slots[FINISH, slot] == NONE:
            row = FIRST_FIELDS * flight + FIRST_SLOT_OF
            for k in range(scalars[FLIGHT_FIRSTS + flight]):
                if state.firsts[row, k] == slot:
                    state.firsts[row, k] = NONE
        elif step != NONE and slots[ENTERED, slot] <= step <= slots[FINISH, slot]:
            scalars[FLIGHT_DECODES + flight] -= 1


@jit_stateful
def drop_request(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    request: int,
    ending_us: float,
) -> None:
    """Drop a timed-out request, wherever it is; ``ending_us`` is now if a step ends now, else nan."""
    scalars, slots = state.scalars, state.slots
    slot, last_us = served.place[request], served.last_us[request]
    served.place[request] = DONE_PLACE
    served.status[request] = TIMED_OUT
    scalars[NUM_TIMED_OUT] += 1
    served.last_us[request] = math.nan
    if slot == WAITING_PLACE:
        # the queue skips it
        scalars[WAITING] -= 1
        if options.has_cache > 0 and requests.rows[request, FOUND] < 0:
            scalars[GIVEN_UP_TOKENS] += requests.input_tokens[request]
        if last_us == ending_us:
            # it was preempted while its token was in flight, in the step that ends now
            scalars[FLIGHT_DECODES + scalars[OLDEST]] -= 1
        return
    if slot == FETCHING_PLACE:
        # its blocks are freed when its fetch has ended
        return
    if slots[HELD, slot] != GONE:
        _free_blocks(state, options, requests, slot)
        unlink_order(state, slot, LAST)
    if slot == scalars[PARTIAL]:
        scalars[PARTIAL] = NONE
    else:
        _forget_tokens(state, slot)
        if slots[FRESH_AT, slot] != NONE:
            _leave_fresh(state, slot)
        if not _is_draining(state, slot):
            leave_decodes(state, slot, options)
        if slots[FINISH, slot] != NONE:
            unlink_bucket(state, slot)
    free_slot(state, slot)
    scalars[RUNNING] -= 1


@jit_stateful
def time_out(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    now_us: float,
    is_strict: bool,
) -> None:
    """Drop requests whose deadline is before now or, unless ``is_strict``, now."""
    scalars = state.scalars
    ending_us = now_us if is_strict else math.nan
    while scalars[DEADLINE] != NONE:
        request = scalars[DEADLINE]
        deadline_us = requests.arrival_us[request] + options.timeout_us
        if deadline_us > now_us or (is_strict and deadline_us == now_us):
            return
        scalars[DEADLINE] = requests.next_arrived[request]
        if served.place[request] != DONE_PLACE:
            drop_request(state, options, requests, served, request, ending_us)
            if options.clients > 0:
                release_next(state, requests, options, now_us)
            if options.has_parents > 0:
                end_parent(requests, request, now_us)
