"""What both engines share: slots and their lists, arrivals, and the step that is made, in flight or ended.

A slot is a column of ``state.slots``. Free slots are a list through ORDER_NEXT. Slots in use are a doubly
linked list in order of admission, whose last one is the scalar LAST. Slots whose last token falls due in the
same step are another list, a bucket, whose newest is in row FIRST_SLOT of the calendar.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.request_sums import StepSums, WindowSums
from fastroof.compiled.simulation.sessions import coming_us, pop_coming
from fastroof.compiled.simulation.state import (
    ARRIVED,
    BASE,
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    BUSY_US,
    DECODE_TOKENS,
    DECODES,
    DECODES_NEXT,
    END,
    ENTERED,
    FINISH,
    FIRST_FIELDS,
    FIRST_REQUEST,
    FIRST_SLOT,
    FIRST_SLOT_OF,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_HOST_US,
    FLIGHT_NEW,
    FLIGHT_STEP,
    FLIGHT_TOKENS,
    FLIGHT_US,
    FREE,
    FREE_SLOT,
    HEAD,
    IN_FLIGHT,
    KV_SUM,
    LAST,
    LEAST_FREE,
    MIXED_STEPS,
    NONE,
    NOW,
    NUM_BLOCKS,
    OLDEST,
    ORDER_NEXT,
    ORDER_PREVIOUS,
    PARTIAL,
    PARTIAL_COMPUTED,
    PARTIAL_WHOLE,
    PEAK_RUNNING,
    PEAK_WAITING,
    PREFILL_STEPS,
    PREFILL_TOKENS,
    REQUEST,
    RUNNING,
    STEP,
    STEPS,
    WAITING,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    add_gaps,
    add_interval,
    push_request,
)
from fastroof.compiled.steps import PlanParts, open_window, summed_step_us, windowed_step_us, with_floor


@jit_stateful_inline
def link_last(state: EngineState, slot: int, last: int) -> None:
    """Append a slot to a list whose last slot is the scalar ``last``."""
    scalars, slots = state.scalars, state.slots
    slots[ORDER_NEXT, slot] = NONE
    slots[ORDER_PREVIOUS, slot] = scalars[last]
    if scalars[last] != NONE:
        slots[ORDER_NEXT, scalars[last]] = slot
    scalars[last] = slot


@jit_stateful_inline
def unlink_order(state: EngineState, slot: int, last: int) -> None:
    """Remove a slot from a list whose last slot is the scalar ``last``."""
    slots = state.slots
    before, after = slots[ORDER_PREVIOUS, slot], slots[ORDER_NEXT, slot]
    if before != NONE:
        slots[ORDER_NEXT, before] = after
    if after != NONE:
        slots[ORDER_PREVIOUS, after] = before
    else:
        state.scalars[last] = before


@jit_stateful_inline
def take_free_slot(state: EngineState, request: int) -> int:
    """Take a free slot for a request; there is one while fewer than ``max_seqs`` run."""
    slot = state.scalars[FREE_SLOT]
    state.scalars[FREE_SLOT] = state.slots[ORDER_NEXT, slot]
    state.slots[REQUEST, slot] = request
    return int(slot)


@jit_stateful_inline
def free_slot(state: EngineState, slot: int) -> None:
    """Return a slot, already removed from its lists, to the free ones."""
    state.slots[REQUEST, slot] = NONE
    state.slots[ORDER_NEXT, slot] = state.scalars[FREE_SLOT]
    state.scalars[FREE_SLOT] = slot


@jit_stateful_inline
def admit(state: EngineState, slot: int) -> None:
    """Let a waiting request, now in a slot, run as the last admitted."""
    link_last(state, slot, LAST)
    state.slots[FINISH, slot] = NONE
    state.scalars[RUNNING] += 1
    state.scalars[WAITING] -= 1


@jit_stateful_inline
def enter_decodes(state: EngineState, slot: int, whole: int, remaining: int) -> None:
    """Let a request with ``whole`` computed tokens decode ``remaining`` more, from the next step on."""
    scalars, slots, calendar = state.scalars, state.slots, state.calendar
    step = scalars[STEP]
    finish = step + remaining - 1
    slots[BASE, slot] = whole - step
    slots[FINISH, slot] = finish
    slots[ENTERED, slot] = step
    place = finish & (calendar.shape[1] - 1)
    first = calendar[FIRST_SLOT, place]
    slots[BUCKET_NEXT, slot] = first
    slots[BUCKET_PREVIOUS, slot] = NONE
    if first != NONE:
        slots[BUCKET_PREVIOUS, first] = slot
    calendar[FIRST_SLOT, place] = slot
    scalars[DECODES] += 1
    scalars[KV_SUM] += whole + 1


@jit_stateful_inline
def subtract_decode(state: EngineState, slot: int) -> int:
    """Subtract a request from the sums over decodes. Returns the kv_len it had in them."""
    kv_len = state.slots[BASE, slot] + state.scalars[STEP] + 1
    state.scalars[DECODES] -= 1
    state.scalars[KV_SUM] -= kv_len
    return int(kv_len)


@jit_stateful_inline
def unlink_bucket(state: EngineState, slot: int) -> None:
    """Remove a slot from the bucket of the step with its last token."""
    slots, calendar = state.slots, state.calendar
    before, after = slots[BUCKET_PREVIOUS, slot], slots[BUCKET_NEXT, slot]
    if after != NONE:
        slots[BUCKET_PREVIOUS, after] = before
    if before != NONE:
        slots[BUCKET_NEXT, before] = after
    else:
        calendar[FIRST_SLOT, slots[FINISH, slot] & (calendar.shape[1] - 1)] = after


@jit_stateful_inline
def see_arrivals(state: EngineState, requests: Requests, now_us: float) -> None:
    """Count requests that have arrived by now as waiting."""
    scalars = state.scalars
    while scalars[ARRIVED] != NONE and requests.arrival_us[scalars[ARRIVED]] <= now_us:
        scalars[ARRIVED] = requests.next_arrived[scalars[ARRIVED]]
        scalars[WAITING] += 1
    scalars[PEAK_WAITING] = max(scalars[PEAK_WAITING], scalars[WAITING])


@jit_stateful_inline
def begin_us(state: EngineState, requests: Requests) -> float:
    """Time at which an idle engine starts again, us: its next arrival, or inf."""
    scalars = state.scalars
    if scalars[HEAD] == NONE:
        return math.inf
    return float(max(state.clock[NOW], requests.arrival_us[scalars[HEAD]]))


@jit_stateful_inline
def take_coming(state: EngineState, requests: Requests, now_us: float, is_strict: bool) -> None:
    """Queue requests of sessions that have arrived by now or, if ``is_strict``, before."""
    while True:
        at_us = coming_us(requests)
        if at_us > now_us or at_us == math.inf or (is_strict and at_us == now_us):
            return
        push_request(state, requests, pop_coming(requests))


class StepCounts(NamedTuple):
    """What a step computes: decodes, chunks of prompts, prompts that end in it, tokens of all chunks."""

    decodes: int
    chunks: int
    firsts: int
    prompt_tokens: int


@jit_stateful_inline
def with_chunk(sums: StepSums, new: int, context: int) -> StepSums:
    """Add a chunk to a step's sums; one token after a context counts as a decode."""
    if new == 1 and context > 0:
        return StepSums(
            sums.decodes + 1,
            sums.kv_sum + context + 1,
            sums.new_sum,
            sums.causal_pairs,
            sums.prefix_pairs,
            sums.prefix_sum,
        )
    return StepSums(
        sums.decodes,
        sums.kv_sum,
        sums.new_sum + new,
        sums.causal_pairs + ((new * (new + 1)) >> 1),
        sums.prefix_pairs + new * context,
        sums.prefix_sum + context,
    )


@jit_stateful_inline
def note_chunk(
    state: EngineState, flight: int, request: int, slot: int, tokens: int, whole: int, firsts: int
) -> int:
    """Note a chunk that ends after ``tokens`` of ``whole``. Returns how many prompts the step completes."""
    scalars = state.scalars
    if tokens < whole:
        scalars[PARTIAL] = slot
        scalars[PARTIAL_COMPUTED] = tokens
        scalars[PARTIAL_WHOLE] = whole
        return firsts
    row = FIRST_FIELDS * flight
    state.firsts[row + FIRST_REQUEST, firsts] = request
    state.firsts[row + FIRST_SLOT_OF, firsts] = slot
    state.firsts[row + DECODES_NEXT, firsts] = 0
    return firsts + 1


@jit_stateful_inline
def _host_us(
    plan: PlanParts, options: EngineOptions, state: EngineState, flight: int, new_tokens: int
) -> float:
    """Return the minimum time of a step with prefill, us: launching its kernels, as far as the GPU waits.

    With asynchronous scheduling the host starts as the step before does, or when it has launched that.
    """
    if new_tokens == 0:
        return 0.0
    host_us = plan.prefill_floor_us * options.time_scale
    if plan.hides_host and options.depth > 1 and state.scalars[IN_FLIGHT] > 0:
        before = 1 - flight
        host_us -= state.clock[FLIGHT_US + before] - state.clock[FLIGHT_HOST_US + before]
    return max(host_us, 0.0)


@jit_stateful_inline
def start_step(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    flight: int,
    counts: StepCounts,
    step: int,
    sums: StepSums,
    in_window: WindowSums,
) -> float:
    """Time a step, us, and put it in flight; ``step`` is its decode step, or NONE."""
    scalars, decodes, chunks = state.scalars, counts.decodes, counts.chunks
    host_us = _host_us(plan, options, state, flight, sums.new_sum)
    plan = with_floor(plan, 0.0)
    if options.window > 0:
        step_us = windowed_step_us(arena, plan, open_window(arena, 0), decodes + chunks, sums, in_window)
    else:
        step_us = summed_step_us(arena, plan, decodes + chunks, sums)
    step_us = max(step_us * options.time_scale, host_us)
    scalars[FLIGHT_STEP + flight] = step
    scalars[FLIGHT_DECODES + flight] = decodes
    scalars[FLIGHT_FIRSTS + flight] = counts.firsts
    scalars[FLIGHT_TOKENS + flight] = decodes + counts.prompt_tokens
    scalars[FLIGHT_NEW + flight] = sums.new_sum
    state.clock[FLIGHT_US + flight] = step_us
    state.clock[FLIGHT_HOST_US + flight] = host_us
    scalars[IN_FLIGHT] += 1
    scalars[STEPS] += 1
    scalars[MIXED_STEPS] += chunks > 0 and decodes > 0
    scalars[PREFILL_STEPS] += chunks > 0 and decodes == 0
    scalars[PREFILL_TOKENS] += counts.prompt_tokens
    scalars[DECODE_TOKENS] += decodes
    scalars[PEAK_RUNNING] = max(scalars[PEAK_RUNNING], scalars[RUNNING])
    scalars[LEAST_FREE] = min(scalars[LEAST_FREE], scalars[FREE])
    return float(step_us)


@jit_stateful_inline
def record_step(state: EngineState, record: Record, now_us: float) -> None:
    """Add the running step, if there is one, to the series."""
    scalars, clock = state.scalars, state.clock
    if scalars[IN_FLIGHT] > 0:
        flight = scalars[OLDEST]
        made = scalars[FLIGHT_DECODES + flight] + scalars[FLIGHT_FIRSTS + flight]
        tokens = scalars[FLIGHT_TOKENS + flight], made
        blocks = scalars[NUM_BLOCKS] - scalars[FREE]
        add_interval(record, now_us, clock[END], scalars[RUNNING], scalars[WAITING], blocks, tokens)


@jit_stateful_inline
def record_prompt_token(served: Served, record: Record, request: int, now_us: float) -> None:
    """Record the token of a step that completes a prompt: its first, or one after a preemption."""
    if math.isnan(served.first_us[request]):
        served.first_us[request] = now_us
    else:
        add_gaps(record, now_us - served.last_us[request], 1)
    served.last_us[request] = now_us


@jit_stateful_inline
def end_step(state: EngineState, flight: int, now_us: float) -> None:
    """Take the running step out of flight; the next one, if any, starts now."""
    scalars, clock = state.scalars, state.clock
    clock[BUSY_US] += clock[FLIGHT_US + flight]
    scalars[OLDEST] = 1 - flight
    scalars[IN_FLIGHT] -= 1
    if scalars[IN_FLIGHT] > 0:
        clock[END] = now_us + clock[FLIGHT_US + scalars[OLDEST]]
