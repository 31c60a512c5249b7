"""Scheduling: the requests of an engine's next step, and the step's time.

Running requests come first, in order of admission, then waiting ones. In engines that run prompts ahead of
decodes, a step holds only prompts while one can be computed, else only decodes. Every decode advances by one
token per step, so decodes are handled as sums; only prompts and requests that start or end are handled one by
one.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.request_sums import StepSums, WindowSums, no_window_sums, with_request
from fastroof.compiled.simulation.lookup import (
    Found,
    find_cached,
    find_fetched,
    free_reserved,
    hold_cached,
    next_fetched,
    publish_chunk,
    start_fetch,
)
from fastroof.compiled.simulation.preemption import leave_decodes, preempt_last
from fastroof.compiled.simulation.prefix_cache import publish_fetched
from fastroof.compiled.simulation.slots import (
    StepCounts,
    admit,
    enter_decodes,
    note_chunk,
    start_step,
    take_free_slot,
    with_chunk,
)
from fastroof.compiled.simulation.state import (
    BASE,
    BELOW,
    BUCKET_NEXT,
    CACHED_TOKENS,
    DECODES,
    DECODES_NEXT,
    FILLED,
    FINISH,
    FIRST_FIELDS,
    FIRST_REQUEST,
    FIRST_SLOT,
    FIRST_SLOT_OF,
    FOUND,
    FREE,
    FRESH_AT,
    HEAD,
    HELD,
    HELD_UNTIL,
    HOLD_NEW,
    HOLD_PROMPTS,
    IN_FLIGHT,
    IS_BACKLOGGED,
    KV_SUM,
    NONE,
    NOW,
    OLDEST,
    PARTIAL,
    PARTIAL_COMPUTED,
    PARTIAL_WHOLE,
    PREEMPTED,
    REQUEST,
    RUN_ALL,
    RUNNING,
    STEP,
    STEPS,
    TIMED_OUT,
    WAITING,
    WINDOW_SUM,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    blocks_of,
    in_block,
)
from fastroof.compiled.simulation.tiers import (
    fetch,
    is_waited_for,
    reserved_blocks,
    step_begins_us,
    wait_in_step,
)
from fastroof.compiled.steps import PlanParts


@jit_stateful_inline
def _next_waiting(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, now_us: float
) -> int:
    """Return the first waiting request, or NONE."""
    scalars = state.scalars
    while scalars[PREEMPTED] != NONE and served.status[scalars[PREEMPTED]] == TIMED_OUT:
        scalars[PREEMPTED] = served.next_preempted[scalars[PREEMPTED]]
    if scalars[PREEMPTED] != NONE and options.has_reserved == 0:
        return int(scalars[PREEMPTED])
    while scalars[HEAD] != NONE and served.status[scalars[HEAD]] == TIMED_OUT:
        scalars[HEAD] = requests.next_arrived[scalars[HEAD]]
    if scalars[HEAD] != NONE and requests.arrival_us[scalars[HEAD]] <= now_us:
        return int(scalars[HEAD])
    # NONE, unless arrivals go first
    return int(scalars[PREEMPTED])


@jit_stateful_inline
def _take_slot(state: EngineState, options: EngineOptions, served: Served, request: int, held: int) -> int:
    """Give the first waiting request, already off its queue, a slot and its blocks."""
    slot = take_free_slot(state, request)
    state.slots[HELD, slot] = held
    state.slots[FRESH_AT, slot] = NONE
    admit(state, slot)
    state.scalars[FREE] -= held
    if options.timeout_us < math.inf:
        served.place[request] = slot
    return slot


@jit_stateful_inline
def _count_decode(state: EngineState, slot: int, whole: int, remaining: int, options: EngineOptions) -> None:
    """Let a request with ``whole`` computed tokens decode; count when blocks are due and its window fills."""
    enter_decodes(state, slot, whole, remaining)
    base, window = state.slots[BASE, slot], options.window
    state.due[in_block(-base, options)] += 1
    if window > 0:
        state.scalars[WINDOW_SUM] += min(whole + 1, window)
        if whole + 1 < window:
            state.scalars[BELOW] += 1
            filled = window - 1 - base
            if filled <= state.slots[FINISH, slot]:
                state.calendar[FILLED, filled & (state.calendar.shape[1] - 1)] += 1


@jit_stateful_inline
def _advance_decodes(state: EngineState, options: EngineOptions) -> None:
    """Advance all decodes by a token: those with their last one leave, the others grow."""
    scalars, step = state.scalars, state.scalars[STEP]
    mask = state.calendar.shape[1] - 1
    slot = state.calendar[FIRST_SLOT, step & mask]
    while slot != NONE:
        leave_decodes(state, slot, options)
        slot = state.slots[BUCKET_NEXT, slot]
    scalars[KV_SUM] += scalars[DECODES]
    scalars[STEP] = step + 1
    if options.window > 0:
        scalars[WINDOW_SUM] += scalars[BELOW]
        scalars[BELOW] -= state.calendar[FILLED, (step + 1) & mask]
        state.calendar[FILLED, (step + 1) & mask] = 0


@jit_stateful_inline
def _reserve_blocks(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    is_held: bool,
) -> bool:
    """Allocate the blocks that running requests need in this step; preempt the last admitted if short.

    A cut prompt needs none if it ``is_held``.
    """
    scalars = state.scalars
    need = state.due[in_block(scalars[STEP], options)]
    partial_need = 0
    if scalars[PARTIAL] != NONE and not is_held:
        computed = scalars[PARTIAL_COMPUTED]
        new = min(scalars[PARTIAL_WHOLE] - computed, options.budget - scalars[DECODES])
        partial_need = blocks_of(computed + new, options) - blocks_of(computed, options)
        need += partial_need
    if need <= scalars[FREE]:
        scalars[FREE] -= need
        return False
    # decodes take what is free before the next request is preempted, so that a prefix cache forgets those
    # blocks first; a cut prompt takes its blocks last, and is preempted first
    taken = min(need - partial_need, scalars[FREE])
    while need > scalars[FREE]:
        scalars[FREE] -= taken
        need -= taken
        need -= preempt_last(state, options, requests, served, partial_need)
        taken = min(need, scalars[FREE])
    scalars[FREE] -= need
    return True


@jit_stateful_inline
def _end_prompts(
    state: EngineState,
    requests: Requests,
    served: Served,
    flight: int,
    firsts: int,
    options: EngineOptions,
) -> None:
    """Let requests whose prompts a step completes decode from the next step on, if tokens remain."""
    row = FIRST_FIELDS * flight
    for i in range(firsts):
        request, slot = state.firsts[row + FIRST_REQUEST, i], state.firsts[row + FIRST_SLOT_OF, i]
        sent = served.sent[request]
        remaining = requests.output_tokens[request] - sent - 1
        if remaining > 0:
            whole = requests.input_tokens[request] + sent
            _count_decode(state, slot, whole, remaining, options)
            state.firsts[row + DECODES_NEXT, i] = 1


@jit_stateful_inline
def blocks_needed(
    requests: Requests, options: EngineOptions, request: int, tokens: int, whole: int
) -> tuple[int, int]:
    """Count the blocks a request takes if it starts with ``tokens`` of ``whole``, and those it needs free."""
    if options.reserves_output:
        held = blocks_of(requests.input_tokens[request] + requests.output_tokens[request], options)
        return held, held
    held = blocks_of(tokens, options)
    return held, blocks_of(whole, options) if options.admits_whole else held


@jit_stateful_inline
def _find_cached(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, whole: int
) -> Found:
    """Find what a waiting request need not compute; reserved blocks are in use already."""
    found = find_cached(state, options, requests, request, whole)
    if options.has_reserved > 0 and request != state.scalars[PREEMPTED]:
        return Found(found.context, 0, blocks_needed(requests, options, request, whole, whole)[0], 0)
    return found


@jit_stateful_inline
def has_prompt(state: EngineState, options: EngineOptions, requests: Requests, served: Served) -> bool:
    """Whether an engine's next step could compute a prompt: a cut one, or the first that waits."""
    scalars = state.scalars
    if scalars[PARTIAL] != NONE:
        return True
    left = options.budget - (scalars[DECODES] if options.prefill_first == 0 else 0)
    if left <= 0 or scalars[RUNNING] >= options.max_seqs:
        return False
    if options.num_tiers > 0 and next_fetched(state, options, requests, served) != NONE:
        return True
    request = _next_waiting(state, options, requests, served, state.clock[NOW])
    if request == NONE:
        return False
    whole = requests.input_tokens[request] + served.sent[request]
    context, _, in_use, _ = _find_cached(state, options, requests, request, whole)
    if whole - context > left and options.is_chunked == 0:
        return False
    _, needed = blocks_needed(requests, options, request, context + min(whole - context, left), whole)
    return bool(needed - in_use <= scalars[FREE])


@jit_stateful_inline
def decodes_run(state: EngineState) -> bool:
    """Whether a request runs whose prompt is computed; its last token may be in flight."""
    return bool(state.scalars[RUNNING] > (state.scalars[PARTIAL] != NONE))


@jit_stateful_inline
def slots_hold(state: EngineState, options: EngineOptions) -> int:
    """Return HOLD_NEW while prompts wait for more free slots, else RUN_ALL; a cut prompt goes on first."""
    scalars = state.scalars
    free = options.max_seqs - scalars[RUNNING]
    if free >= options.min_free_slots or scalars[PARTIAL] != NONE or not decodes_run(state):
        return RUN_ALL
    return HOLD_NEW


@jit_stateful_inline
def held_prompts(state: EngineState, options: EngineOptions) -> int:
    """Return which prompts an engine by itself holds back from its next step."""
    scalars = state.scalars
    if scalars[STEPS] < scalars[HELD_UNTIL] and scalars[IS_BACKLOGGED] == 0 and decodes_run(state):
        return HOLD_PROMPTS
    return slots_hold(state, options)


@jit_stateful_inline
def make_step(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    requests: Requests,
    served: Served,
    holds: int,
) -> float:
    """Schedule an engine's next step, after those in flight. Returns its time, us; 0 without requests."""
    scalars = state.scalars
    if options.num_tiers > 0:
        next_fetched(state, options, requests, served)
    window = options.window
    flight = (scalars[OLDEST] + scalars[IN_FLIGHT]) & 1
    decodes_too = options.prefill_first == 0
    is_short = False
    is_held = holds == HOLD_PROMPTS
    if decodes_too and options.reserves_output == 0:
        is_short = _reserve_blocks(state, options, requests, served, is_held)
    left = options.budget - (scalars[DECODES] if decodes_too else 0)
    sums = StepSums(0, 0, 0, 0, 0, 0)
    in_window = no_window_sums()
    chunks, firsts, prompt_tokens = 0, 0, 0
    slot = scalars[PARTIAL]
    if slot != NONE and not is_held:
        # the prompt that an earlier step cut
        context, whole = scalars[PARTIAL_COMPUTED], scalars[PARTIAL_WHOLE]
        new = min(whole - context, left)
        if not decodes_too and options.reserves_output == 0:
            more = blocks_of(context + new, options) - blocks_of(context, options)
            if more > scalars[FREE]:
                # decode steps between its chunks took the blocks; it is the last admitted
                more = preempt_last(state, options, requests, served, 0)
                new, is_short = 0, True
            scalars[FREE] -= more
        if new > 0:
            left -= new
            chunks = 1
            prompt_tokens = new
            sums = with_chunk(sums, new, context)
            if window > 0:
                in_window = with_request(in_window, new, context, window)
            scalars[PARTIAL] = NONE
            publish_chunk(state, options, requests, state.slots[REQUEST, slot], context, context + new)
            firsts = note_chunk(state, flight, state.slots[REQUEST, slot], slot, context + new, whole, firsts)
    is_cut = chunks > 0
    fetched_all_us, fetched_before_us = 0.0, 0.0
    while holds != HOLD_NEW and left > 0 and not is_short and scalars[RUNNING] < options.max_seqs:
        request = NONE
        if options.num_tiers > 0:
            request = next_fetched(state, options, requests, served)
        is_fetched = request != NONE
        if not is_fetched:
            request = _next_waiting(state, options, requests, served, state.clock[NOW])
        if request == NONE:
            break
        is_preempted = request == scalars[PREEMPTED]
        whole = requests.input_tokens[request] + served.sent[request]
        if options.num_tiers > 0 and is_fetched:
            found = find_fetched(state, options, requests, request, whole)
        else:
            found = _find_cached(state, options, requests, request, whole)
        context = found.context
        new = whole - context
        # a prompt with one token to compute is a decode to vLLM, which holds back the others
        if is_held and (new > 1 or options.prefill_first == 1 or scalars[PARTIAL] != NONE):
            break
        if new > left:
            if options.is_chunked == 0:
                break
            new = left
        held, needed = blocks_needed(requests, options, request, context + new, whole)
        is_waited = False
        if options.num_tiers > 0 and is_fetched:
            free_reserved(state, options, requests, served, request, found, whole)
        else:
            if options.num_tiers > 0 and found.reached > 0 and is_waited_for(state, options):
                is_waited = True
                needed = reserved_blocks(options, requests, served, request)
            if needed - found.in_use > scalars[FREE]:
                break
            if is_preempted:
                scalars[PREEMPTED] = served.next_preempted[request]
            else:
                scalars[HEAD] = requests.next_arrived[request]
        if options.num_tiers > 0 and is_waited:
            start_fetch(state, options, requests, served, request, found, needed)
            continue
        slot = _take_slot(state, options, served, request, held)
        if options.has_reserved > 0:
            scalars[FREE] += found.in_use
        if options.has_cache > 0:
            if not is_fetched:
                is_first = requests.rows[request, FOUND] < 0
                hold_cached(state, requests, request, found)
                if options.num_tiers > 0 and found.reached > found.blocks:
                    publish_fetched(state, options, requests, request, found.blocks, found.reached)
                    end_us, before_us = fetch(state, options, requests, request, is_first)
                    fetched_all_us = max(fetched_all_us, end_us)
                    fetched_before_us = max(fetched_before_us, before_us)
            publish_chunk(state, options, requests, request, context, context + new)
        scalars[CACHED_TOKENS] += context
        left -= new
        chunks += 1
        prompt_tokens += new
        sums = with_chunk(sums, new, context)
        if window > 0:
            in_window = with_request(in_window, new, context, window)
        firsts = note_chunk(state, flight, request, slot, context + new, whole, firsts)
    if not decodes_too and chunks == 0:
        decodes_too = True
        if options.reserves_output == 0:
            _reserve_blocks(state, options, requests, served, is_held)
    if options.pause_steps > 0:
        carries = is_cut or prompt_tokens > chunks or scalars[PARTIAL] != NONE or options.prefill_first == 1
        if carries and chunks > 0:
            scalars[HELD_UNTIL] = scalars[STEPS] + 1 + options.pause_steps
        if options.prefill_first == 0 and not is_held and not is_short:
            scalars[IS_BACKLOGGED] = scalars[WAITING] > 0
    decodes = scalars[DECODES] if decodes_too else 0
    if decodes + chunks == 0:
        return 0.0
    of_all = StepSums(
        sums.decodes + decodes,
        sums.kv_sum + (scalars[KV_SUM] if decodes_too else 0),
        sums.new_sum,
        sums.causal_pairs,
        sums.prefix_pairs,
        sums.prefix_sum,
    )
    if window > 0 and decodes_too:
        in_window = WindowSums(
            in_window.kv_sum + scalars[WINDOW_SUM],
            in_window.causal_pairs,
            in_window.prefix_pairs,
            in_window.prefix_sum,
        )
    step = scalars[STEP] if decodes_too else NONE
    counts = StepCounts(decodes, chunks, firsts, prompt_tokens)
    begins_us = step_begins_us(state)
    step_us = start_step(arena, plan, options, state, flight, counts, step, of_all, in_window)
    if options.num_tiers > 0 and fetched_all_us > begins_us:
        step_us = wait_in_step(state, options, flight, begins_us, fetched_all_us, fetched_before_us)
    if decodes_too:
        _advance_decodes(state, options)
    if firsts > 0:
        _end_prompts(state, requests, served, flight, firsts, options)
    return step_us
