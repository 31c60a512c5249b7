"""Slots of an engine over a pool of blocks: where its requests are, and how they leave before their end.

What ``state`` says holds here too, but for a few things. The decodes that need a block in a step are a
list, in order of admission, for each takes one of its own; so are those that end with one, for they give
theirs back one after the other. A preempted request keeps its slot until it comes back.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.block_pool import (
    FREE_BLOCKS,
    GIVEN_UP_TOKENS,
    BlockPool,
    Prompts,
    give_back,
)
from fastroof.compiled.simulation.state import (
    BASE,
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    DECODES,
    END,
    ENTERED,
    FINISH,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_STEP,
    FREE,
    FREE_SLOT,
    GONE,
    HEAD,
    HELD,
    IN_FLIGHT,
    KV_SUM,
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
"""More fields of a slot: its neighbours among those that need a block in the same steps."""
NUM_POOLED_FIELDS = NUM_FIELDS + 2

DUE_FIRST, DUE_LAST = 0, 1
DUE_ROWS = 2
"""Rows of ``due``: slots that need a block in the steps of one remainder."""

LAST_SLOT = 2
"""A row more of the calendar, below its first slots."""
POOLED_CALENDAR_ROWS = 3

EARLIEST = 7
"""Clock: until then no request that has a slot is timed out."""

OVER = -3
"""FINISH of a slot whose last token came too late, and which is in no bucket any more."""


@jit_stateful_inline
def link_last(state: EngineState, slot: int) -> None:
    """Put a slot behind all others in the order of admission."""
    scalars, slots = state.scalars, state.slots
    slots[ORDER_NEXT, slot] = NONE
    slots[ORDER_PREVIOUS, slot] = scalars[LAST]
    if scalars[LAST] != NONE:
        slots[ORDER_NEXT, scalars[LAST]] = slot
    scalars[LAST] = slot


@jit_stateful_inline
def unlink_order(state: EngineState, slot: int, newest: int) -> None:
    """Take a slot out of a list whose newest is a scalar: the order of admission, or those preempted."""
    slots = state.slots
    before, after = slots[ORDER_PREVIOUS, slot], slots[ORDER_NEXT, slot]
    if before != NONE:
        slots[ORDER_NEXT, before] = after
    if after != NONE:
        slots[ORDER_PREVIOUS, after] = before
    else:
        state.scalars[newest] = before


@jit_stateful_inline
def leave_decodes(state: EngineState, slot: int) -> None:
    """Take a request out of the decodes of the next step."""
    scalars, slots, due = state.scalars, state.slots, state.due
    base = slots[BASE, slot]
    scalars[DECODES] -= 1
    scalars[KV_SUM] -= base + scalars[STEP] + 1
    phase = (-base) % due.shape[1]
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
def _unlink_bucket(state: EngineState, slot: int) -> None:
    slots, calendar = state.slots, state.calendar
    place = slots[FINISH, slot] & (calendar.shape[1] - 1)
    before, after = slots[BUCKET_PREVIOUS, slot], slots[BUCKET_NEXT, slot]
    if before != NONE:
        slots[BUCKET_NEXT, before] = after
    else:
        calendar[FIRST_SLOT, place] = after
    if after != NONE:
        slots[BUCKET_PREVIOUS, after] = before
    else:
        calendar[LAST_SLOT, place] = before


@jit_stateful_inline
def release_slot(state: EngineState, slot: int) -> None:
    """Give a slot back."""
    state.slots[REQUEST, slot] = NONE
    state.slots[ORDER_NEXT, slot] = state.scalars[FREE_SLOT]
    state.scalars[FREE_SLOT] = slot


@jit_stateful_inline
def _known_tokens(state: EngineState, options: EngineOptions, requests: Requests, slot: int) -> int:
    """Tokens of a running request that were scheduled and known: those of its blocks that can be found."""
    scalars, slots = state.scalars, state.slots
    if slot == scalars[PARTIAL]:
        return int(scalars[PARTIAL_COMPUTED])
    finish, behind = slots[FINISH, slot], options.depth - 1
    if finish >= scalars[STEP]:
        if slots[ENTERED, slot] == scalars[STEP]:
            behind = 0
        return int(slots[BASE, slot] + scalars[STEP] - behind)
    # its last token is under way, or was too late
    request = slots[REQUEST, slot]
    if finish == NONE:
        behind = 0
    return int(requests.input_tokens[request] + requests.output_tokens[request] - 1 - behind)


@jit_stateful_inline
def _give_back_known(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    slot: int,
) -> None:
    request, size = state.slots[REQUEST, slot], options.block_size
    known = _known_tokens(state, options, requests, slot) // size
    give_back(pool, request, slot, state.slots[HELD, slot], known)
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
    """Preempt the last admitted request, to be the first that comes back."""
    scalars, slots, clock = state.scalars, state.slots, state.clock
    slot = scalars[LAST]
    request = slots[REQUEST, slot]
    scalars[PREEMPTIONS] += 1
    served.preemptions[request] += 1
    _give_back_known(state, pool, prompts, options, requests, slot)
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
        _unlink_bucket(state, slot)
        served.sent[request] = requests.output_tokens[request] - (finish - step + 1)
        if slots[ENTERED, slot] < step:
            served.last_us[request] = clock[END] if scalars[IN_FLIGHT] > 0 else clock[NOW]
        # the step of decodes that it was in last
        slots[FINISH, slot] = step - 1
    scalars[RUNNING] -= 1
    scalars[WAITING] += 1
    slots[HELD, slot] = 0
    slots[ORDER_NEXT, slot] = NONE
    slots[ORDER_PREVIOUS, slot] = scalars[PREEMPTED]
    if scalars[PREEMPTED] != NONE:
        slots[ORDER_NEXT, scalars[PREEMPTED]] = slot
    scalars[PREEMPTED] = slot
    return needs_block


@jit_stateful_inline
def is_late(options: EngineOptions, requests: Requests, request: int, now_us: float) -> bool:
    """Whether a request's client has given up before now."""
    return bool(requests.arrival_us[request] + options.timeout_us < now_us)


@jit_stateful_inline
def _forget_tokens(state: EngineState, slot: int) -> None:
    """Take a request's tokens out of the steps of decodes in flight, since nobody awaits them."""
    scalars, slots = state.scalars, state.slots
    for i in range(scalars[IN_FLIGHT]):
        flight = (scalars[OLDEST] + i) & 1
        if slots[ENTERED, slot] <= scalars[FLIGHT_STEP + flight] <= slots[FINISH, slot]:
            scalars[FLIGHT_DECODES + flight] -= 1


@jit_stateful_inline
def _end_in_vain(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, request: int
) -> None:
    served.status[request] = TIMED_OUT
    state.scalars[NUM_TIMED_OUT] += 1
    served.last_us[request] = math.nan
    if options.clients > 0:
        release_next(state, requests, options, state.clock[NOW])


@jit_stateful
def give_up(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
) -> None:
    """Drop requests whose clients have given up: those that run, in order of admission, then others."""
    scalars, slots, clock = state.scalars, state.slots, state.clock
    now_us, timeout_us = clock[NOW], options.timeout_us
    if clock[EARLIEST] <= now_us:
        earliest_us = math.inf
        # from the last admitted to the first, then back
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
                _give_back_known(state, pool, prompts, options, requests, slot)
                unlink_order(state, slot, LAST)
                if slot == scalars[PARTIAL]:
                    scalars[PARTIAL] = NONE
                else:
                    _forget_tokens(state, slot)
                    if slots[FINISH, slot] >= scalars[STEP]:
                        leave_decodes(state, slot)
                    if slots[FINISH, slot] >= 0:
                        _unlink_bucket(state, slot)
                release_slot(state, slot)
                scalars[RUNNING] -= 1
                _end_in_vain(state, options, requests, served, request)
            slot = after
        slot = scalars[PREEMPTED]
        while slot != NONE:
            after, request = slots[ORDER_PREVIOUS, slot], slots[REQUEST, slot]
            deadline_us = requests.arrival_us[request] + timeout_us
            if deadline_us > now_us:
                earliest_us = min(earliest_us, deadline_us)
            else:
                unlink_order(state, slot, PREEMPTED)
                release_slot(state, slot)
                scalars[WAITING] -= 1
                _end_in_vain(state, options, requests, served, request)
            slot = after
        clock[EARLIEST] = earliest_us
    while scalars[HEAD] != NONE and requests.arrival_us[scalars[HEAD]] + timeout_us <= now_us:
        request = scalars[HEAD]
        scalars[HEAD] = requests.next_arrived[request]
        scalars[WAITING] -= 1
        pool.counts[GIVEN_UP_TOKENS] += requests.input_tokens[request]
        _end_in_vain(state, options, requests, served, request)
