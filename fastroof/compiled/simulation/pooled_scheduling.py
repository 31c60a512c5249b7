"""Scheduling of an engine with a pool of blocks: the requests of its next step, and the step's time.

As ``scheduling`` for engines that mix prompts and decodes. The cost of a step grows with the blocks it takes
and, in models with windowed layers, with its decodes.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.request_sums import StepSums, WindowSums, no_window_sums, with_request
from fastroof.compiled.simulation.block_pool import (
    FOUND_AGAIN_TOKENS,
    FOUND_TOKENS,
    FREE_BLOCKS,
    LOOKED_UP_TOKENS,
    BlockPool,
    Prompts,
    find_blocks,
    publish_blocks,
    take_blocks,
    take_found,
)
from fastroof.compiled.simulation.pooled_preemption import (
    DUE_FIRST,
    DUE_LAST,
    DUE_NEXT,
    DUE_PREVIOUS,
    EARLIEST,
    leave_decodes,
    preempt_last,
)
from fastroof.compiled.simulation.scheduling import held_prompts
from fastroof.compiled.simulation.slots import (
    StepCounts,
    admit,
    enter_decodes,
    note_chunk,
    start_step,
    take_free_slot,
    unlink_order,
    with_chunk,
)
from fastroof.compiled.simulation.state import (
    BASE,
    BUCKET_NEXT,
    CACHED_TOKENS,
    DECODES,
    ENTERED,
    FINISH,
    FIRST_SLOT,
    FREE,
    HEAD,
    HELD,
    HELD_UNTIL,
    HOLD_PROMPTS,
    IN_FLIGHT,
    IS_BACKLOGGED,
    KV_SUM,
    LAST,
    NONE,
    NOW,
    OLDEST,
    ORDER_PREVIOUS,
    PARTIAL,
    PARTIAL_COMPUTED,
    PARTIAL_WHOLE,
    PREEMPTED,
    REQUEST,
    RUNNING,
    STEP,
    STEPS,
    WAITING,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    blocks_of,
)
from fastroof.compiled.steps import PlanParts


@jit_stateful_inline
def _take_due_blocks(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    partial_tokens: int,
) -> bool:
    """Give running requests the blocks they need in this step; preempt the last admitted if short."""
    scalars, slots = state.scalars, state.slots
    phase = scalars[STEP] % options.block_size
    need = 0
    slot = state.due[DUE_FIRST, phase]
    while slot != NONE:
        need += 1
        slot = slots[DUE_NEXT, slot]
    partial_need = 0
    if scalars[PARTIAL] != NONE:
        partial_need = blocks_of(partial_tokens, options) - slots[HELD, scalars[PARTIAL]]
        need += partial_need
    is_full = need > pool.counts[FREE_BLOCKS]
    while need > pool.counts[FREE_BLOCKS]:
        if scalars[LAST] == scalars[PARTIAL]:
            need -= partial_need
        if preempt_last(state, pool, prompts, options, requests, served):
            need -= 1
    slot = state.due[DUE_FIRST, phase]
    while slot != NONE:
        held = slots[HELD, slot]
        take_blocks(pool, slot, held, held + 1)
        slots[HELD, slot] = held + 1
        slot = slots[DUE_NEXT, slot]
    return bool(is_full)


@jit_stateful_inline
def _window_sum(state: EngineState, window: int) -> int:
    """Sum the tokens within the window over all decodes of the next step."""
    slots, step = state.slots, state.scalars[STEP]
    total = 0
    slot = state.scalars[LAST]
    while slot != NONE:
        if slots[FINISH, slot] >= step:
            total += min(slots[BASE, slot] + step + 1, window)
        slot = slots[ORDER_PREVIOUS, slot]
    return total


@jit_stateful_inline
def _append_decode(state: EngineState, slot: int, whole: int, remaining: int) -> None:
    """Let a request with ``whole`` computed tokens decode; blocks are due for it in the order of entering."""
    enter_decodes(state, slot, whole, remaining)
    slots, due = state.slots, state.due
    phase = (-slots[BASE, slot]) % due.shape[1]
    before = due[DUE_LAST, phase]
    slots[DUE_NEXT, slot] = NONE
    slots[DUE_PREVIOUS, slot] = before
    if before != NONE:
        slots[DUE_NEXT, before] = slot
    else:
        due[DUE_FIRST, phase] = slot
    due[DUE_LAST, phase] = slot


@jit_stateful_inline
def _advance_decodes(state: EngineState) -> None:
    """Advance all decodes by a token: those with their last one leave, the others grow."""
    scalars, calendar = state.scalars, state.calendar
    slot = calendar[FIRST_SLOT, scalars[STEP] & (calendar.shape[1] - 1)]
    while slot != NONE:
        leave_decodes(state, slot)
        slot = state.slots[BUCKET_NEXT, slot]
    scalars[KV_SUM] += scalars[DECODES]
    scalars[STEP] += 1


@jit_stateful_inline
def _take_slot(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, slot: int
) -> int:
    """Admit the first waiting request: into the slot it kept when preempted, or else a free one."""
    scalars = state.scalars
    if slot != NONE:
        unlink_order(state, slot, PREEMPTED)
    else:
        scalars[HEAD] = requests.next_arrived[request]
        slot = take_free_slot(state, request)
        if options.timeout_us < math.inf:
            deadline_us = requests.arrival_us[request] + options.timeout_us
            state.clock[EARLIEST] = min(state.clock[EARLIEST], deadline_us)
    admit(state, slot)
    state.slots[ENTERED, slot] = 0
    return slot


@jit_stateful_inline
def make_pooled_step(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    requests: Requests,
    served: Served,
) -> float:
    """Schedule the next step, after those in flight. Returns its time, us; 0 without requests."""
    scalars, slots = state.scalars, state.slots
    window, size = plan.window, options.block_size
    flight = (scalars[OLDEST] + scalars[IN_FLIGHT]) & 1
    computed = scalars[PARTIAL_COMPUTED]
    # at most as many requests run as the budget has tokens, so a cut prompt gets at least one in every step
    partial_new = min(scalars[PARTIAL_WHOLE] - computed, options.budget - scalars[DECODES])
    is_held = options.pause_steps > 0 and held_prompts(state, options) == HOLD_PROMPTS
    if is_held:
        partial_new = 0
    is_full = _take_due_blocks(state, pool, prompts, options, requests, served, computed + partial_new)
    decodes = scalars[DECODES]
    seen = _window_sum(state, window) if window > 0 else 0
    left = options.budget - decodes
    sums = StepSums(decodes, scalars[KV_SUM], 0, 0, 0, 0)
    in_window = no_window_sums()
    in_window = WindowSums(seen, in_window.causal_pairs, in_window.prefix_pairs, in_window.prefix_sum)
    chunks, firsts, prompt_tokens, carries = 0, 0, 0, False
    is_partial = scalars[PARTIAL] != NONE
    while left > 0:
        if is_partial and not is_held:
            slot = scalars[PARTIAL]
            request = slots[REQUEST, slot]
            context, whole, new = scalars[PARTIAL_COMPUTED], scalars[PARTIAL_WHOLE], partial_new
            found = slots[HELD, slot]
            scalars[PARTIAL] = NONE
            is_partial = False
            carries = True
        else:
            if is_full or scalars[RUNNING] == options.max_seqs:
                break
            slot, request = scalars[PREEMPTED], scalars[HEAD]
            if slot != NONE:
                request = slots[REQUEST, slot]
            elif request == NONE or requests.arrival_us[request] > state.clock[NOW]:
                break
            prompt = requests.input_tokens[request]
            whole = prompt + served.sent[request]
            is_new = prompts.found_tokens[request] < 0
            context = requests.cached_tokens[request] if is_new else 0
            found, in_use = 0, 0
            if context == 0:
                found, in_use = find_blocks(pool, prompts, request, slot, prompt // size, (whole - 1) // size)
                context = found * size
            new = whole - context
            if is_held and (new > 1 or is_partial):
                break
            is_prompt = new > 1
            if new > left:
                if options.is_chunked == 0:
                    break
                new = left
            needed = whole if options.admits_whole else context + new
            if blocks_of(needed, options) - in_use > pool.counts[FREE_BLOCKS]:
                break
            slot = _take_slot(state, options, requests, request, slot)
            take_found(pool, prompts, request, slot, prompt // size, found)
            if is_new:
                prompts.found_tokens[request] = context
                pool.counts[LOOKED_UP_TOKENS] += prompt
                pool.counts[FOUND_TOKENS] += context
            else:
                pool.counts[FOUND_AGAIN_TOKENS] += context
            scalars[CACHED_TOKENS] += context
            carries |= is_prompt
        tokens = context + new
        held = blocks_of(tokens, options)
        take_blocks(pool, slot, found, held)
        publish_blocks(
            pool,
            prompts,
            request,
            slot,
            requests.input_tokens[request] // size,
            context // size,
            tokens // size,
        )
        slots[HELD, slot] = held
        left -= new
        chunks += 1
        prompt_tokens += new
        sums = with_chunk(sums, new, context)
        if window > 0:
            in_window = with_request(in_window, new, context, window)
        firsts = note_chunk(state, flight, request, slot, tokens, whole, firsts)
        if tokens < whole:
            break
    scalars[FREE] = pool.counts[FREE_BLOCKS]
    if options.pause_steps > 0:
        if carries:
            scalars[HELD_UNTIL] = scalars[STEPS] + 1 + options.pause_steps
        if not is_held and not is_full:
            scalars[IS_BACKLOGGED] = scalars[WAITING] > 0
    if decodes + chunks == 0:
        return 0.0
    step = scalars[STEP] if decodes > 0 else NONE
    counts = StepCounts(decodes, chunks, firsts, prompt_tokens)
    step_us = start_step(arena, plan, options, state, flight, counts, step, sums, in_window)
    if decodes > 0:
        _advance_decodes(state)
    for i in range(firsts):
        request, slot = state.firsts[2 * flight, i], state.firsts[2 * flight + 1, i]
        sent = served.sent[request]
        remaining = requests.output_tokens[request] - sent - 1
        if remaining > 0:
            _append_decode(state, slot, requests.input_tokens[request] + sent, remaining)
            state.firsts[2 * flight + 1, i] = NONE
    return step_us
