"""Requests that leave their slots before their end: preempted, or given up by their clients."""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.state import (
    BASE,
    BELOW,
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    DEADLINE,
    DECODES,
    DONE_PLACE,
    END,
    ENTERED,
    FILLED,
    FINISH,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FREE,
    FREE_SLOT,
    FRESH,
    FRESH_AT,
    GONE,
    HELD,
    IN_FLIGHT,
    KV_SUM,
    LAST,
    LAST_DECODE_END,
    NONE,
    NUM_TIMED_OUT,
    OLDEST,
    ORDER_NEXT,
    ORDER_PREVIOUS,
    PARTIAL,
    PARTIAL_COMPUTED,
    PREEMPTED,
    PREEMPTED_FRESH,
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
def unlink_order(state: EngineState, slot: int) -> None:
    """Take a request out of the order of admission."""
    slots = state.slots
    before, after = slots[ORDER_PREVIOUS, slot], slots[ORDER_NEXT, slot]
    if before != NONE:
        slots[ORDER_NEXT, before] = after
    if after != NONE:
        slots[ORDER_PREVIOUS, after] = before
    else:
        state.scalars[LAST] = before


@jit_stateful_inline
def free_slot(state: EngineState, slot: int) -> None:
    """Give a slot back, out of the order of admission already."""
    state.slots[REQUEST, slot] = NONE
    state.slots[ORDER_NEXT, slot] = state.scalars[FREE_SLOT]
    state.scalars[FREE_SLOT] = slot
    state.scalars[RUNNING] -= 1


@jit_stateful_inline
def leave_decodes(state: EngineState, slot: int, options: EngineOptions, window: int) -> None:
    """Take a request out of the sums over decodes."""
    scalars = state.scalars
    base, step = state.slots[BASE, slot], scalars[STEP]
    kv_len = base + step + 1
    scalars[DECODES] -= 1
    scalars[KV_SUM] -= kv_len
    state.due[in_block(-base, options)] -= 1
    if window > 0:
        scalars[WINDOW_SUM] -= min(kv_len, window)
        if kv_len < window:
            scalars[BELOW] -= 1
            filled = window - 1 - base
            if filled <= state.slots[FINISH, slot]:
                state.calendar[FILLED, filled & (state.calendar.shape[1] - 1)] -= 1


@jit_stateful_inline
def _unlink_bucket(state: EngineState, slot: int) -> None:
    slots = state.slots
    before, after = slots[BUCKET_PREVIOUS, slot], slots[BUCKET_NEXT, slot]
    if after != NONE:
        slots[BUCKET_PREVIOUS, after] = before
    if before != NONE:
        slots[BUCKET_NEXT, before] = after
    else:
        state.calendar[FIRST_SLOT, slots[FINISH, slot] & (state.calendar.shape[1] - 1)] = after


@jit_stateful_inline
def _is_draining(state: EngineState, slot: int) -> bool:
    """Whether a request that is no partial prompt only awaits its last token."""
    finish = state.slots[FINISH, slot]
    return bool(finish < state.scalars[STEP])


@jit_stateful_inline
def _held_blocks(state: EngineState, options: EngineOptions, requests: Requests, slot: int) -> int:
    """Blocks of a running request."""
    if options.reserves_output:
        return int(state.slots[HELD, slot])
    if slot == state.scalars[PARTIAL]:
        return blocks_of(state.scalars[PARTIAL_COMPUTED], options)
    if _is_draining(state, slot):
        request = state.slots[REQUEST, slot]
        return blocks_of(requests.input_tokens[request] + requests.output_tokens[request] - 1, options)
    return blocks_of(state.slots[BASE, slot] + state.scalars[STEP], options)


@jit_stateful_inline
def _is_decode_awaited(state: EngineState) -> bool:
    """Whether the latest step of decodes is the one that runs."""
    scalars = state.scalars
    in_flight = scalars[FLIGHT_STEP + scalars[OLDEST]]
    return bool(scalars[IN_FLIGHT] > 0 and in_flight == scalars[STEP] - 1)


@jit_stateful_inline
def _leave_fresh(state: EngineState, slot: int) -> None:
    """Take a slot out of ``fresh``, where the last then has its place: no more are there than slots."""
    scalars = state.scalars
    at, last = state.slots[FRESH_AT, slot], scalars[FRESH] - 1
    moved = state.fresh[last]
    state.fresh[at] = moved
    if moved >= 0:
        state.slots[FRESH_AT, moved] = at
    state.slots[FRESH_AT, slot] = NONE
    scalars[FRESH] = last


@jit_stateful_inline
def _keep_last_token(state: EngineState, served: Served, slot: int) -> None:
    """Keep when a request that loses its slot has, or will have, its latest token."""
    scalars, clock = state.scalars, state.clock
    request, fresh_at = state.slots[REQUEST, slot], state.slots[FRESH_AT, slot]
    is_awaited = state.slots[ENTERED, slot] < scalars[STEP] and _is_decode_awaited(state)
    if fresh_at != NONE and is_awaited:
        # its gap is not that of other decodes
        state.fresh[fresh_at] = PREEMPTED_FRESH - request
    elif fresh_at != NONE:
        _leave_fresh(state, slot)
    elif is_awaited:
        served.last_us[request] = clock[END]
    elif state.slots[ENTERED, slot] < scalars[STEP]:
        served.last_us[request] = clock[LAST_DECODE_END]
    # else its prompt's own step has it, and keeps it when it ends


@jit_stateful
def preempt_last(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    window: int,
    partial_need: int,
) -> int:
    """Preempt the last admitted request. Returns how many blocks fewer the step needs now."""
    scalars, slots = state.scalars, state.slots
    slot = scalars[LAST]
    request = slots[REQUEST, slot]
    scalars[FREE] += _held_blocks(state, options, requests, slot)
    scalars[PREEMPTIONS] += 1
    served.preemptions[request] += 1
    unlink_order(state, slot)
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
        _keep_last_token(state, served, slot)
        leave_decodes(state, slot, options, window)
        _unlink_bucket(state, slot)
    free_slot(state, slot)
    served.next_preempted[request] = scalars[PREEMPTED]
    scalars[PREEMPTED] = request
    scalars[WAITING] += 1
    if options.timeout_us < math.inf:
        served.place[request] = WAITING_PLACE
    return less


@jit_stateful
def _forget_tokens(state: EngineState, slot: int) -> None:
    """Take a request's tokens out of the steps in flight, since nobody awaits them."""
    scalars, slots = state.scalars, state.slots
    for i in range(scalars[IN_FLIGHT]):
        flight = (scalars[OLDEST] + i) & 1
        step = scalars[FLIGHT_STEP + flight]
        if slots[FINISH, slot] == NONE:
            for k in range(scalars[FLIGHT_FIRSTS + flight]):
                if state.firsts[2 * flight + 1, k] == slot:
                    state.firsts[2 * flight + 1, k] = NONE
        elif step != NONE and slots[ENTERED, slot] <= step <= slots[FINISH, slot]:
            scalars[FLIGHT_DECODES + flight] -= 1


@jit_stateful
def _drop(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    window: int,
    request: int,
    ending_us: float,
) -> None:
    """Forget a request, wherever it is; ``ending_us`` is when the running step ends, where that is now."""
    scalars, slots = state.scalars, state.slots
    slot, last_us = served.place[request], served.last_us[request]
    served.place[request] = DONE_PLACE
    served.status[request] = TIMED_OUT
    scalars[NUM_TIMED_OUT] += 1
    served.last_us[request] = math.nan
    if slot == WAITING_PLACE:
        # the queue passes over it
        scalars[WAITING] -= 1
        if last_us == ending_us:
            # it was preempted while a token was under way, in the step that ends now
            scalars[FLIGHT_DECODES + scalars[OLDEST]] -= 1
        return
    if slots[HELD, slot] != GONE:
        scalars[FREE] += _held_blocks(state, options, requests, slot)
        unlink_order(state, slot)
    if slot == scalars[PARTIAL]:
        scalars[PARTIAL] = NONE
    else:
        _forget_tokens(state, slot)
        if slots[FRESH_AT, slot] != NONE:
            _leave_fresh(state, slot)
        if not _is_draining(state, slot):
            leave_decodes(state, slot, options, window)
        if slots[FINISH, slot] != NONE:
            _unlink_bucket(state, slot)
    free_slot(state, slot)


@jit_stateful
def time_out(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    window: int,
    now_us: float,
    is_strict: bool,
) -> None:
    """Drop requests whose clients have given up: before now, or at it too."""
    scalars = state.scalars
    ending_us = now_us if is_strict else math.nan
    while scalars[DEADLINE] != NONE:
        request = scalars[DEADLINE]
        deadline_us = requests.arrival_us[request] + options.timeout_us
        if deadline_us > now_us or (is_strict and deadline_us == now_us):
            return
        scalars[DEADLINE] = requests.next_arrived[request]
        if served.place[request] != DONE_PLACE:
            _drop(state, options, requests, served, window, request, ending_us)
            if options.clients > 0:
                release_next(state, requests, options, now_us)
