"""One engine over time: steps end, requests arrive and time out, steps are scheduled.

Runs of decode steps between two events go through ``run_decodes``, which keeps everything in registers.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.grids import axis_cell, line_at
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.layout import FORM_LATENCY
from fastroof.compiled.llvm import table_load
from fastroof.compiled.simulation.preemption import time_out
from fastroof.compiled.simulation.prefix_cache import release_chain
from fastroof.compiled.simulation.scheduling import held_prompts, make_step
from fastroof.compiled.simulation.sessions import coming_us, end_parent
from fastroof.compiled.simulation.slots import (
    begin_us,
    end_step,
    free_slot,
    record_prompt_token,
    record_step,
    see_arrivals,
    take_coming,
    unlink_order,
)
from fastroof.compiled.simulation.state import (
    ARRIVED,
    BELOW,
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    BUSY_US,
    CODE_STOPPED,
    CODE_STUCK,
    DEADLINE,
    DECODE_TOKENS,
    DECODES,
    DECODES_NEXT,
    DONE_PLACE,
    END,
    FETCHING,
    FILLED,
    FIRST_FIELDS,
    FIRST_REQUEST,
    FIRST_SLOT,
    FIRST_SLOT_OF,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FLIGHT_TOKENS,
    FLIGHT_US,
    FREE,
    FRESH,
    FRESH_AT,
    FRESH_REQUEST,
    FRESH_SLOT,
    GONE,
    HELD,
    HELD_UNTIL,
    IN_FLIGHT,
    IS_BACKLOGGED,
    KV_SUM,
    LAST,
    LAST_DECODE_END,
    LEAST_FREE,
    NONE,
    NOW,
    NUM_BLOCKS,
    NUM_FINISHED,
    OLDEST,
    PARTIAL,
    REQUEST,
    RUN_ALL,
    RUNNING,
    STEP,
    STEPS,
    TIMED_OUT,
    WAITING,
    WINDOW_SUM,
    BinPart,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    add_gaps,
    add_interval,
    add_part,
    bin_of,
    blocks_of,
    gap_bin,
    in_block,
    queue_all,
    release_next,
    restart,
)
from fastroof.compiled.simulation.tiers import fetched_us
from fastroof.compiled.steps import (
    PlanParts,
    WindowParts,
    decode_rows_us,
    open_plan,
    open_window,
    windowed_decode_step_us,
)


@jit_stateful_inline
def _is_steady(state: EngineState, options: EngineOptions, served: Served, plan: PlanParts) -> bool:
    """Whether every running request decodes, no waiting one can start, and the step in flight is the same."""
    scalars = state.scalars
    if scalars[DECODES] == 0 or scalars[PARTIAL] != NONE or scalars[FRESH] > 0:
        return False
    if plan.decode.form != FORM_LATENCY:
        return False
    waits = scalars[WAITING] > scalars[FETCHING]
    if options.num_tiers > 0 and scalars[FETCHING] > 0:
        waits |= fetched_us(state, served) <= state.clock[NOW]
    if waits and scalars[RUNNING] < options.max_seqs:
        return False
    if options.depth == 1:
        return True
    flight = scalars[OLDEST]
    return bool(
        scalars[IN_FLIGHT] == 1
        and scalars[FLIGHT_STEP + flight] == scalars[STEP] - 1
        and scalars[FLIGHT_FIRSTS + flight] == 0
        and scalars[FLIGHT_TOKENS + flight] == scalars[DECODES]
        and scalars[FLIGHT_DECODES + flight] == scalars[DECODES]
        and state.calendar[FIRST_SLOT, (scalars[STEP] - 1) & (state.calendar.shape[1] - 1)] == NONE
    )


@jit_stateful_inline
def run_decodes(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    served: Served,
    record: Record,
    horizon_us: float,
) -> None:
    """Run decode steps that end before ``horizon_us`` while nothing arrives."""
    if not _is_steady(state, options, served, plan):
        return
    scalars, clock = state.scalars, state.clock
    decodes, kv_sum = scalars[DECODES], scalars[KV_SUM]
    step, free = scalars[STEP], scalars[FREE]
    now_us, last_us, busy_us = clock[NOW], clock[LAST_DECODE_END], clock[BUSY_US]
    is_async = options.depth > 1
    end_us, flight_us = clock[END], clock[FLIGHT_US + scalars[OLDEST]]
    first_step = step
    mask = state.calendar.shape[1] - 1
    phase = in_block(step, options)
    takes_blocks = options.reserves_output == 0
    rows_us, batch = decode_rows_us(arena, plan, decodes), float(decodes)
    row = axis_cell(arena, plan.decode.y, batch)
    above = batch - table_load(arena, plan.decode.y.nodes_at + row)
    running, waiting, num_blocks = scalars[RUNNING], scalars[WAITING], scalars[NUM_BLOCKS]
    # the line segment that the mean kv_len is on, up to the next node; pending additions to a bin of gaps and
    # series
    at_zero_us, slope_us, line_end = 0.0, 0.0, 0.0
    gap_key, gaps = 0, 0
    window, window_sum, below = options.window, scalars[WINDOW_SUM], scalars[BELOW]
    within = WindowParts(0, 0.0, 0.0, plan.decode, plan.prefill, 0, False, 0.0)
    if window > 0:
        within = open_window(arena, 0)
    bin_at, bin_end_us = bin_of(record, now_us)
    part = BinPart(0.0, 0.0, 0)
    while state.calendar[FIRST_SLOT, step & mask] == NONE:
        need = state.due[phase] if takes_blocks else 0
        if need > free:
            break
        mean_kv = float(kv_sum) / batch
        if window > 0:
            step_us = windowed_decode_step_us(arena, plan, within, rows_us, decodes, mean_kv, window_sum)
        else:
            if mean_kv >= line_end:
                column = axis_cell(arena, plan.decode.x, mean_kv)
                at_zero_us, slope_us = line_at(arena, plan.decode, row, above, column)
                line_end = math.inf
                if column < plan.decode.x.last_cell:
                    line_end = table_load(arena, plan.decode.x.nodes_at + column + 1)
            step_us = (rows_us + at_zero_us) + slope_us * mean_kv
        step_us *= options.time_scale
        if not is_async:
            end_us = now_us + step_us
            flight_us = step_us
        if end_us >= horizon_us:
            break
        free -= need
        length_us = end_us - now_us
        blocks_us = length_us * float(num_blocks - free)
        if end_us < bin_end_us:
            part = BinPart(part.length_us + length_us, part.blocks_us + blocks_us, part.steps + 1)
        else:
            add_part(record, bin_at, part, running, waiting, decodes)
            part = BinPart(0.0, 0.0, 0)
            add_interval(record, now_us, end_us, running, waiting, num_blocks - free, (decodes, decodes))
            bin_at, bin_end_us = bin_of(record, end_us)
        key = gap_bin(end_us - last_us)
        if key != gap_key:
            record.gaps[gap_key] += gaps
            gap_key, gaps = key, 0
        gaps += decodes
        busy_us += flight_us
        last_us = end_us
        now_us = end_us
        if is_async:
            end_us = now_us + step_us
            flight_us = step_us
        kv_sum += decodes
        step += 1
        if window > 0:
            window_sum += below
            below -= state.calendar[FILLED, step & mask]
            state.calendar[FILLED, step & mask] = 0
        phase = phase + 1 if phase + 1 < options.block_size else 0
    record.gaps[gap_key] += gaps
    add_part(record, bin_at, part, running, waiting, decodes)
    if step == first_step:
        return
    scalars[KV_SUM], scalars[STEP], scalars[FREE] = kv_sum, step, free
    scalars[WINDOW_SUM], scalars[BELOW] = window_sum, below
    clock[NOW], clock[LAST_DECODE_END], clock[BUSY_US] = now_us, last_us, busy_us
    scalars[STEPS] += step - first_step
    if options.pause_steps > 0 and (scalars[IS_BACKLOGGED] == 1 or scalars[STEPS] > scalars[HELD_UNTIL]):
        # prompts were free to join the last of these steps
        scalars[IS_BACKLOGGED] = options.prefill_first == 0 and waiting > 0
    scalars[DECODE_TOKENS] += (step - first_step) * decodes
    scalars[LEAST_FREE] = min(scalars[LEAST_FREE], free)
    if is_async:
        clock[END] = end_us
        clock[FLIGHT_US + scalars[OLDEST]] = flight_us
        scalars[FLIGHT_STEP + scalars[OLDEST]] = step - 1


@jit_stateful_inline
def _finish(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, slot: int, now_us: float
) -> None:
    """End a request that has its last token."""
    slots = state.slots
    request = slots[REQUEST, slot]
    served.last_us[request] = now_us
    if slots[HELD, slot] != GONE:
        held = slots[HELD, slot]
        tokens = requests.input_tokens[request] + requests.output_tokens[request] - 1
        if not options.reserves_output:
            held = blocks_of(tokens, options)
        if options.has_cache > 0:
            release_chain(state, options, requests, request, held, tokens // options.block_size)
        else:
            state.scalars[FREE] += held
        unlink_order(state, slot, LAST)
    free_slot(state, slot)
    state.scalars[RUNNING] -= 1
    state.scalars[NUM_FINISHED] += 1
    if options.timeout_us < math.inf:
        served.place[request] = DONE_PLACE
    if options.clients > 0:
        release_next(state, requests, options, now_us)
    if options.has_parents > 0:
        end_parent(requests, request, now_us)


@jit_stateful_inline
def _end_decodes(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    record: Record,
    flight: int,
    now_us: float,
) -> None:
    """Record a token for every decode of a step; requests in the step's bucket end."""
    scalars = state.scalars
    decodes = scalars[FLIGHT_DECODES + flight]
    for i in range(scalars[FRESH]):
        # requests that prefilled since the last decode step
        request, slot = state.fresh[FRESH_REQUEST, i], state.fresh[FRESH_SLOT, i]
        if slot != NONE:
            state.slots[FRESH_AT, slot] = NONE
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
        if options.has_cache > 0:
            # blocks are freed in the order of entering, which buckets hold reversed
            while state.slots[BUCKET_NEXT, slot] != NONE:
                slot = state.slots[BUCKET_NEXT, slot]
            after_field = BUCKET_PREVIOUS
        else:
            after_field = BUCKET_NEXT
        while slot != NONE:
            after = state.slots[after_field, slot]
            _finish(state, options, requests, served, slot, now_us)
            slot = after


@jit_stateful_inline
def _end_firsts(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    record: Record,
    flight: int,
    now_us: float,
) -> None:
    """Record a token for every prompt that a step completed: its first, or the next after a preemption."""
    row = FIRST_FIELDS * flight
    for i in range(state.scalars[FLIGHT_FIRSTS + flight]):
        request, slot = state.firsts[row + FIRST_REQUEST, i], state.firsts[row + FIRST_SLOT_OF, i]
        if served.status[request] == TIMED_OUT:
            continue
        record_prompt_token(served, record, request, now_us)
        if slot != NONE and state.firsts[row + DECODES_NEXT, i] == 0:
            _finish(state, options, requests, served, slot, now_us)
        elif slot != NONE and options.prefill_first and state.slots[REQUEST, slot] == request:
            place = state.scalars[FRESH]
            state.slots[FRESH_AT, slot] = place
            state.fresh[FRESH_REQUEST, place], state.fresh[FRESH_SLOT, place] = request, slot
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
    """End the running step now and start the next one in flight."""
    scalars = state.scalars
    flight = scalars[OLDEST]
    if scalars[FLIGHT_STEP + flight] != NONE:
        _end_decodes(state, options, requests, served, record, flight, now_us)
    if scalars[FLIGHT_FIRSTS + flight] > 0:
        _end_firsts(state, options, requests, served, record, flight, now_us)
    end_step(state, flight, now_us)


@jit_stateful_inline
def next_event_us(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, until_us: float
) -> float:
    """Return the time of the next arrival, time-out or end of a fetch, or ``until_us``."""
    scalars = state.scalars
    event_us = until_us
    if scalars[ARRIVED] != NONE:
        event_us = min(event_us, requests.arrival_us[scalars[ARRIVED]])
    if options.has_parents > 0:
        event_us = min(event_us, coming_us(requests))
    if options.timeout_us < math.inf and scalars[DEADLINE] != NONE:
        event_us = min(event_us, requests.arrival_us[scalars[DEADLINE]] + options.timeout_us)
    if options.num_tiers > 0 and fetched_us(state, served) > state.clock[NOW]:
        event_us = min(event_us, fetched_us(state, served))
    return event_us


@jit_stateful_inline
def idle_until_us(state: EngineState, options: EngineOptions, requests: Requests, served: Served) -> float:
    """Return when an engine without a step goes on, some of whose requests wait for fetches, us."""
    now_us = state.clock[NOW]
    if fetched_us(state, served) <= now_us:
        return float(now_us)
    return float(max(now_us, next_event_us(state, options, requests, served, math.inf)))


@jit_stateful_inline
def _between_steps(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> None:
    """Handle everything between two steps: arrivals, time-outs, scheduling."""
    scalars, clock = state.scalars, state.clock
    now_us = clock[NOW]
    if options.has_parents > 0:
        take_coming(state, requests, now_us, False)
    see_arrivals(state, requests, now_us)
    if options.timeout_us < math.inf:
        time_out(state, options, requests, served, now_us, False)
        if options.has_parents > 0:
            take_coming(state, requests, now_us, False)
            see_arrivals(state, requests, now_us)
    horizon_us = next_event_us(state, options, requests, served, until_us)
    run_decodes(arena, plan, options, state, served, record, horizon_us)
    now_us = clock[NOW]
    while scalars[IN_FLIGHT] < options.depth:
        was_idle = scalars[IN_FLIGHT] == 0
        holds = RUN_ALL
        if options.pause_steps > 0 or options.min_free_slots > 0:
            holds = held_prompts(state, options)
        step_us = make_step(arena, plan, options, state, requests, served, holds)
        if step_us == 0.0:
            break
        if was_idle:
            clock[END] = now_us + step_us
    record_step(state, record, now_us)


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
    """Run an engine until its next event is at or after ``until_us``. Returns a code."""
    plan = open_plan(arena)
    scalars, clock = state.scalars, state.clock
    while True:
        # reloaded each time: to the compiler, any store of the loop may change it
        if options.stop[0] != 0:
            return CODE_STOPPED
        if scalars[IN_FLIGHT] > 0:
            now_us = clock[END]
            if now_us >= until_us:
                return 0
            clock[NOW] = now_us
            if options.timeout_us < math.inf:
                if options.has_parents > 0:
                    take_coming(state, requests, now_us, True)
                see_arrivals(state, requests, now_us)
                time_out(state, options, requests, served, now_us, True)
            complete_step(state, options, requests, served, record, now_us)
        else:
            if options.num_tiers > 0 and scalars[FETCHING] > 0:
                now_us = idle_until_us(state, options, requests, served)
            elif scalars[WAITING] > 0:
                return CODE_STUCK
            else:
                now_us = begin_us(state, requests)
                if options.has_parents > 0:
                    now_us = min(now_us, max(clock[NOW], coming_us(requests)))
            if now_us >= until_us:
                return 0
            clock[NOW] = now_us
        _between_steps(arena, plan, options, state, requests, served, record, until_us)


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
