"""Requests of an engine with a pool of blocks that leave early: preempted, or timed out.

The layout is that of ``state``, with two differences. ``due`` holds lists of slots in the order of entering
instead of counts, since each decode takes a block of its own from the pool. A preempted request keeps its
slot, in a list whose last one is PREEMPTED, until it is admitted again.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.block_pool import (
    FREE_BLOCKS,
    GIVEN_UP_TOKENS,
    BlockPool,
    Prompts,
    free_blocks,
)
from fastroof.compiled.simulation.slots import (
    free_slot,
    link_last,
    subtract_decode,
    unlink_bucket,
    unlink_order,
)
from fastroof.compiled.simulation.state import (
    BASE,
    END,
    ENTERED,
    FINISH,
    FLIGHT_DECODES,
    FLIGHT_STEP,
    FREE,
    GONE,
    HEAD,
    HELD,
    IN_FLIGHT,
    LAST,
    NONE,
    NOW,
    NUM_FIELDS,
    NUM_TIMED_OUT,
    OLDEST,
    ORDER_NEXT,
    ORDER_PREVIOUS,
    PARTIAL,
    PARTIAL_COMPUTED,
    PREEMPTED,
    PREEMPTIONS,
    REQUEST,
    RUNNING,
    STEP,
    TIMED_OUT,
    WAITING,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    release_next,
)

DUE_NEXT, DUE_PREVIOUS = NUM_FIELDS, NUM_FIELDS + 1
"""Two more fields of a slot: its neighbours among slots that need a block in the same steps."""
NUM_POOLED_FIELDS = NUM_FIELDS + 2

DUE_FIRST, DUE_LAST = 0, 1
DUE_ROWS = 2
"""Rows of ``due``: first and last slot of the list for each remainder of the step by the block size."""

EARLIEST = 7
"""Element of ``clock``: the earliest deadline of requests in slots."""

OVER = -3
"""FINISH of a slot whose last token came too late; it is in no bucket any more."""


@jit_stateful_inline
def leave_decodes(state: EngineState, slot: int) -> None:
    """Subtract a request from the decodes of the next step and those that a block is due for."""
    slots, due = state.slots, state.due
    subtract_decode(state, slot)
    phase = (-slots[BASE, slot]) % due.shape[1]
    before, after = slots[DUE_PREVIOUS, slot], slots[DUE_NEXT, slot]
    if before != NONE:
        slots[DUE_NEXT, before] = after
    else:
        due[DUE_FIRST, phase] = after
    if after != NONE:
        slots[DUE_PREVIOUS, after] = before
    else:
        due[DUE_LAST, phase] = before


@jit_stateful_inline
def _known_tokens(state: EngineState, options: EngineOptions, requests: Requests, slot: int) -> int:
    """Count tokens of a running request that are scheduled and known, whose blocks can be found."""
    scalars, slots = state.scalars, state.slots
    if slot == scalars[PARTIAL]:
        return int(scalars[PARTIAL_COMPUTED])
    finish, behind = slots[FINISH, slot], options.depth - 1
    if finish >= scalars[STEP]:
        if slots[ENTERED, slot] == scalars[STEP]:
            behind = 0
        return int(slots[BASE, slot] + scalars[STEP] - behind)
    # its last token is in flight, or was too late
    request = slots[REQUEST, slot]
    if finish == NONE:
        behind = 0
    return int(requests.input_tokens[request] + requests.output_tokens[request] - 1 - behind)


@jit_stateful_inline
def _free_slot_blocks(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    slot: int,
) -> None:
    request, size = state.slots[REQUEST, slot], options.block_size
    known = _known_tokens(state, options, requests, slot) // size
    free_blocks(pool, request, slot, state.slots[HELD, slot], known)
    state.scalars[FREE] = pool.counts[FREE_BLOCKS]


@jit_stateful
def preempt_last(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
) -> bool:
    """Preempt the last admitted request. Returns whether the step needs one block less for it."""
    scalars, slots, clock = state.scalars, state.slots, state.clock
    slot = scalars[LAST]
    request = slots[REQUEST, slot]
    scalars[PREEMPTIONS] += 1
    served.preemptions[request] += 1
    _free_slot_blocks(state, pool, prompts, options, requests, slot)
    unlink_order(state, slot, LAST)
    step, finish = scalars[STEP], slots[FINISH, slot]
    needs_block = False
    if slot == scalars[PARTIAL]:
        scalars[PARTIAL] = NONE
    elif finish < step:
        slots[HELD, slot] = GONE
        return False
    else:
        needs_block = (slots[BASE, slot] + step) % options.block_size == 0
        leave_decodes(state, slot)
        unlink_bucket(state, slot)
        served.sent[request] = requests.output_tokens[request] - (finish - step + 1)
        if slots[ENTERED, slot] < step:
            served.last_us[request] = clock[END] if scalars[IN_FLIGHT] > 0 else clock[NOW]
        # the last decode step that it was in
        slots[FINISH, slot] = step - 1
    scalars[RUNNING] -= 1
    scalars[WAITING] += 1
    slots[HELD, slot] = 0
    link_last(state, slot, PREEMPTED)
    return needs_block


@jit_stateful_inline
def is_late(options: EngineOptions, requests: Requests, request: int, now_us: float) -> bool:
    """Whether a request timed out before now."""
    return bool(requests.arrival_us[request] + options.timeout_us < now_us)


@jit_stateful_inline
def _forget_tokens(state: EngineState, slot: int) -> None:
    """Subtract a timed-out request's tokens from the decode steps in flight."""
    scalars, slots = state.scalars, state.slots
    for i in range(scalars[IN_FLIGHT]):
        flight = (scalars[OLDEST] + i) & 1
        if slots[ENTERED, slot] <= scalars[FLIGHT_STEP + flight] <= slots[FINISH, slot]:
            scalars[FLIGHT_DECODES + flight] -= 1


@jit_stateful_inline
def _time_out(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, request: int
) -> None:
    served.status[request] = TIMED_OUT
    state.scalars[NUM_TIMED_OUT] += 1
    served.last_us[request] = math.nan
    if options.clients > 0:
        release_next(state, requests, options, state.clock[NOW])


@jit_stateful
def time_out_pooled(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
) -> None:
    """Drop timed-out requests: running ones in order of admission, then preempted, then waiting ones."""
    scalars, slots, clock = state.scalars, state.slots, state.clock
    now_us, timeout_us = clock[NOW], options.timeout_us
    if clock[EARLIEST] <= now_us:
        earliest_us = math.inf
        # walk from the last admitted to the first, then back
        slot = scalars[LAST]
        first = slot
        while slot != NONE:
            first, slot = slot, slots[ORDER_PREVIOUS, slot]
        slot = first
        while slot != NONE:
            after, request = slots[ORDER_NEXT, slot], slots[REQUEST, slot]
            deadline_us = requests.arrival_us[request] + timeout_us
            if deadline_us > now_us:
                earliest_us = min(earliest_us, deadline_us)
            else:
                _free_slot_blocks(state, pool, prompts, options, requests, slot)
                unlink_order(state, slot, LAST)
                if slot == scalars[PARTIAL]:
                    scalars[PARTIAL] = NONE
                else:
                    _forget_tokens(state, slot)
                    if slots[FINISH, slot] >= scalars[STEP]:
                        leave_decodes(state, slot)
                    if slots[FINISH, slot] >= 0:
                        unlink_bucket(state, slot)
                free_slot(state, slot)
                scalars[RUNNING] -= 1
                _time_out(state, options, requests, served, request)
            slot = after
        slot = scalars[PREEMPTED]
        while slot != NONE:
            after, request = slots[ORDER_PREVIOUS, slot], slots[REQUEST, slot]
            deadline_us = requests.arrival_us[request] + timeout_us
            if deadline_us > now_us:
                earliest_us = min(earliest_us, deadline_us)
            else:
                unlink_order(state, slot, PREEMPTED)
                free_slot(state, slot)
                scalars[WAITING] -= 1
                _time_out(state, options, requests, served, request)
            slot = after
        clock[EARLIEST] = earliest_us
    while scalars[HEAD] != NONE and requests.arrival_us[scalars[HEAD]] + timeout_us <= now_us:
        request = scalars[HEAD]
        scalars[HEAD] = requests.next_arrived[request]
        scalars[WAITING] -= 1
        pool.counts[GIVEN_UP_TOKENS] += requests.input_tokens[request]
        _time_out(state, options, requests, served, request)
