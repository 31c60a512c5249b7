"""The next step of an engine over a pool of blocks: who is in it, and what it takes.

As ``scheduling``, of an engine that mixes prompts and decodes; a step costs what it takes of blocks, and
where layers attend within a window, a look at every decode.
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
    keep_shared,
    take_found,
    take_new,
)
from fastroof.compiled.simulation.pooled_slots import (
    DUE_FIRST,
    DUE_LAST,
    DUE_NEXT,
    DUE_PREVIOUS,
    EARLIEST,
    LAST_SLOT,
    leave_decodes,
    link_last,
    preempt_last,
    unlink_order,
)
from fastroof.compiled.simulation.state import (
    BASE,
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    CACHED_TOKENS,
    DECODE_TOKENS,
    DECODES,
    ENTERED,
    FINISH,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_STEP,
    FLIGHT_TOKENS,
    FLIGHT_US,
    FREE,
    FREE_SLOT,
    HEAD,
    HELD,
    IN_FLIGHT,
    KV_SUM,
    LAST,
    LEAST_FREE,
    MIXED_STEPS,
    NONE,
    NOW,
    OLDEST,
    ORDER_NEXT,
    ORDER_PREVIOUS,
    PARTIAL,
    PARTIAL_COMPUTED,
    PARTIAL_WHOLE,
    PEAK_RUNNING,
    PREEMPTED,
    PREFILL_STEPS,
    PREFILL_TOKENS,
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
from fastroof.compiled.steps import PlanParts, open_window, summed_step_us, windowed_step_us


@jit_stateful_inline
def _have_room(
    state: EngineState,
    pool: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    partial_tokens: int,
) -> bool:
    """Give running requests the blocks that they need in this step, from the last admitted if they lack."""
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
        take_new(pool, slot, held, held + 1)
        slots[HELD, slot] = held + 1
        slot = slots[DUE_NEXT, slot]
    return bool(is_full)


@jit_stateful_inline
def _window_sum(state: EngineState, window: int) -> int:
    """Tokens within the window of all decodes of the next step."""
    slots, step = state.slots, state.scalars[STEP]
    total = 0
    slot = state.scalars[LAST]
    while slot != NONE:
        if slots[FINISH, slot] >= step:
            total += min(slots[BASE, slot] + step + 1, window)
        slot = slots[ORDER_PREVIOUS, slot]
    return total


@jit_stateful_inline
def _enter_decodes(state: EngineState, slot: int, whole: int, remaining: int) -> None:
    """Let a request whose ``whole`` tokens are computed decode from the next step on."""
    scalars, slots, due, calendar = state.scalars, state.slots, state.due, state.calendar
    step = scalars[STEP]
    base, finish = whole - step, step + remaining - 1
    slots[BASE, slot] = base
    slots[FINISH, slot] = finish
    slots[ENTERED, slot] = step
    scalars[DECODES] += 1
    scalars[KV_SUM] += whole + 1
    place = finish & (calendar.shape[1] - 1)
    before = calendar[LAST_SLOT, place]
    slots[BUCKET_NEXT, slot] = NONE
    slots[BUCKET_PREVIOUS, slot] = before
    if before != NONE:
        slots[BUCKET_NEXT, before] = slot
    else:
        calendar[FIRST_SLOT, place] = slot
    calendar[LAST_SLOT, place] = slot
    phase = (-base) % due.shape[1]
    before = due[DUE_LAST, phase]
    slots[DUE_NEXT, slot] = NONE
    slots[DUE_PREVIOUS, slot] = before
    if before != NONE:
        slots[DUE_NEXT, before] = slot
    else:
        due[DUE_FIRST, phase] = slot
    due[DUE_LAST, phase] = slot


@jit_stateful_inline
def _grow_decodes(state: EngineState) -> None:
    """After all decodes have been given a token: those of which it was the last leave, the others grow."""
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
    """Take the first that waits off its queue; where it has kept none, into a slot."""
    scalars, slots = state.scalars, state.slots
    if slot != NONE:
        unlink_order(state, slot, PREEMPTED)
    else:
        scalars[HEAD] = requests.next_arrived[request]
        slot = scalars[FREE_SLOT]
        scalars[FREE_SLOT] = slots[ORDER_NEXT, slot]
        slots[REQUEST, slot] = request
        if options.timeout_us < math.inf:
            deadline_us = requests.arrival_us[request] + options.timeout_us
            state.clock[EARLIEST] = min(state.clock[EARLIEST], deadline_us)
    link_last(state, slot)
    slots[FINISH, slot] = NONE
    slots[ENTERED, slot] = 0
    scalars[RUNNING] += 1
    scalars[WAITING] -= 1
    return int(slot)


@jit_stateful_inline
def _with_chunk(sums: StepSums, new: int, context: int) -> StepSums:
    """Sums with one chunk more, which counts as a decode where it is one token after others."""
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
    """Schedule the next step, behind those in flight. Returns what it takes, us; 0 without requests."""
    scalars, slots = state.scalars, state.slots
    window, size = plan.window, options.block_size
    flight = (scalars[OLDEST] + scalars[IN_FLIGHT]) & 1
    computed = scalars[PARTIAL_COMPUTED]
    # no more may run than the budget has tokens: at least one of a prompt that was cut is in every step
    partial_new = min(scalars[PARTIAL_WHOLE] - computed, options.budget - scalars[DECODES])
    is_full = _have_room(state, pool, prompts, options, requests, served, computed + partial_new)
    decodes = scalars[DECODES]
    seen = _window_sum(state, window) if window > 0 else 0
    left = options.budget - decodes
    sums = StepSums(decodes, scalars[KV_SUM], 0, 0, 0, 0)
    in_window = no_window_sums()
    in_window = WindowSums(seen, in_window.causal_pairs, in_window.prefix_pairs, in_window.prefix_sum)
    chunks, firsts, prompt_tokens = 0, 0, 0
    comes_on = scalars[PARTIAL] != NONE
    while left > 0:
        if comes_on:
            slot = scalars[PARTIAL]
            request = slots[REQUEST, slot]
            context, whole, new = scalars[PARTIAL_COMPUTED], scalars[PARTIAL_WHOLE], partial_new
            found = slots[HELD, slot]
            scalars[PARTIAL] = NONE
            comes_on = False
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
            if new > left:
                if options.is_chunked == 0:
                    break
                new = left
            asked = whole if options.admits_whole else context + new
            if blocks_of(asked, options) - in_use > pool.counts[FREE_BLOCKS]:
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
        tokens = context + new
        held = blocks_of(tokens, options)
        take_new(pool, slot, found, held)
        keep_shared(
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
        sums = _with_chunk(sums, new, context)
        if window > 0:
            in_window = with_request(in_window, new, context, window)
        if tokens < whole:
            scalars[PARTIAL] = slot
            scalars[PARTIAL_COMPUTED] = tokens
            scalars[PARTIAL_WHOLE] = whole
            break
        state.firsts[2 * flight, firsts] = request
        state.firsts[2 * flight + 1, firsts] = slot
        firsts += 1
    scalars[FREE] = pool.counts[FREE_BLOCKS]
    seqs = decodes + chunks
    if seqs == 0:
        return 0.0
    if window > 0:
        step_us = windowed_step_us(arena, plan, open_window(arena, 0), seqs, sums, in_window)
    else:
        step_us = summed_step_us(arena, plan, seqs, sums)
    step_us *= options.time_scale
    scalars[FLIGHT_STEP + flight] = scalars[STEP] if decodes > 0 else NONE
    scalars[FLIGHT_DECODES + flight] = decodes
    scalars[FLIGHT_FIRSTS + flight] = firsts
    scalars[FLIGHT_TOKENS + flight] = decodes + prompt_tokens
    state.clock[FLIGHT_US + flight] = step_us
    scalars[IN_FLIGHT] += 1
    scalars[STEPS] += 1
    scalars[MIXED_STEPS] += chunks > 0 and decodes > 0
    scalars[PREFILL_STEPS] += chunks > 0 and decodes == 0
    scalars[PREFILL_TOKENS] += prompt_tokens
    scalars[DECODE_TOKENS] += decodes
    scalars[PEAK_RUNNING] = max(scalars[PEAK_RUNNING], scalars[RUNNING])
    scalars[LEAST_FREE] = min(scalars[LEAST_FREE], scalars[FREE])
    if decodes > 0:
        _grow_decodes(state)
    for i in range(firsts):
        request, slot = state.firsts[2 * flight, i], state.firsts[2 * flight + 1, i]
        sent = served.sent[request]
        remaining = requests.output_tokens[request] - sent - 1
        if remaining > 0:
            _enter_decodes(state, slot, requests.input_tokens[request] + sent, remaining)
            state.firsts[2 * flight + 1, i] = NONE
    return float(step_us)
