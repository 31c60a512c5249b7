"""An engine's next step: who is in it, and what it takes.

Running requests come first, in order of admission, then waiting ones; where prompts run ahead of decodes, a
step is prompts as long as one can be computed, and decodes otherwise. All decodes go on by a token in a step
of theirs, so they are looked at together; only prompts, and requests that begin or end, one by one.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats
from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.request_sums import StepSums, WindowSums, no_window_sums, with_request
from fastroof.compiled.simulation.leaving import leave_decodes, preempt_last
from fastroof.compiled.simulation.state import (
    BASE,
    BELOW,
    BUCKET_NEXT,
    BUCKET_PREVIOUS,
    CACHED_TOKENS,
    DECODE_TOKENS,
    DECODES,
    ENTERED,
    FILLED,
    FINISH,
    FIRST_SLOT,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_NEW,
    FLIGHT_STEP,
    FLIGHT_TOKENS,
    FLIGHT_US,
    FREE,
    FREE_SLOT,
    FRESH_AT,
    GOES_ON,
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
from fastroof.compiled.steps import PlanParts, open_window, summed_step_us, windowed_step_us


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
def _next_waiting(state: EngineState, requests: Requests, served: Served, now_us: float) -> int:
    """The first of those that wait, or NONE."""
    scalars = state.scalars
    while scalars[PREEMPTED] != NONE and served.status[scalars[PREEMPTED]] == TIMED_OUT:
        scalars[PREEMPTED] = served.next_preempted[scalars[PREEMPTED]]
    if scalars[PREEMPTED] != NONE:
        return int(scalars[PREEMPTED])
    while scalars[HEAD] != NONE and served.status[scalars[HEAD]] == TIMED_OUT:
        scalars[HEAD] = requests.next_arrived[scalars[HEAD]]
    if scalars[HEAD] != NONE and requests.arrival_us[scalars[HEAD]] <= now_us:
        return int(scalars[HEAD])
    return NONE


@jit_stateful_inline
def _take_slot(state: EngineState, options: EngineOptions, served: Served, request: int, held: int) -> int:
    """Take the first that waits off its queue and give it a slot, the last in the order of admission."""
    scalars, slots = state.scalars, state.slots
    slot = scalars[FREE_SLOT]
    scalars[FREE_SLOT] = slots[ORDER_NEXT, slot]
    slots[REQUEST, slot] = request
    slots[HELD, slot] = held
    slots[FRESH_AT, slot] = NONE
    slots[FINISH, slot] = NONE
    slots[ORDER_NEXT, slot] = NONE
    slots[ORDER_PREVIOUS, slot] = scalars[LAST]
    if scalars[LAST] != NONE:
        slots[ORDER_NEXT, scalars[LAST]] = slot
    scalars[LAST] = slot
    scalars[RUNNING] += 1
    scalars[WAITING] -= 1
    scalars[FREE] -= held
    if options.timeout_us < math.inf:
        served.place[request] = slot
    return int(slot)


@jit_stateful_inline
def _enter_decodes(
    state: EngineState, slot: int, whole: int, remaining: int, options: EngineOptions, window: int
) -> None:
    """Let a request whose ``whole`` tokens are computed decode from the next step on."""
    scalars, slots, step = state.scalars, state.slots, state.scalars[STEP]
    base = whole - step
    finish = step + remaining - 1
    mask = state.calendar.shape[1] - 1
    slots[BASE, slot] = base
    slots[FINISH, slot] = finish
    slots[ENTERED, slot] = step
    first = state.calendar[FIRST_SLOT, finish & mask]
    slots[BUCKET_NEXT, slot] = first
    slots[BUCKET_PREVIOUS, slot] = NONE
    if first != NONE:
        slots[BUCKET_PREVIOUS, first] = slot
    state.calendar[FIRST_SLOT, finish & mask] = slot
    scalars[DECODES] += 1
    scalars[KV_SUM] += whole + 1
    state.due[in_block(-base, options)] += 1
    if window > 0:
        scalars[WINDOW_SUM] += min(whole + 1, window)
        if whole + 1 < window:
            scalars[BELOW] += 1
            filled = window - 1 - base
            if filled <= finish:
                state.calendar[FILLED, filled & mask] += 1


@jit_stateful_inline
def _go_on(state: EngineState, options: EngineOptions, window: int) -> None:
    """After all decodes have been given a token: those of which it was the last leave, the others grow."""
    scalars, step = state.scalars, state.scalars[STEP]
    mask = state.calendar.shape[1] - 1
    slot = state.calendar[FIRST_SLOT, step & mask]
    while slot != NONE:
        leave_decodes(state, slot, options, window)
        slot = state.slots[BUCKET_NEXT, slot]
    scalars[KV_SUM] += scalars[DECODES]
    scalars[STEP] = step + 1
    if window > 0:
        scalars[WINDOW_SUM] += scalars[BELOW]
        scalars[BELOW] -= state.calendar[FILLED, (step + 1) & mask]
        state.calendar[FILLED, (step + 1) & mask] = 0


@jit_stateful_inline
def _have_room(
    state: EngineState, options: EngineOptions, requests: Requests, served: Served, window: int
) -> bool:
    """Allocate this step's blocks of the running requests; preempt from the last admitted if short."""
    scalars = state.scalars
    need = state.due[in_block(scalars[STEP], options)]
    partial_need = 0
    if scalars[PARTIAL] != NONE:
        computed = scalars[PARTIAL_COMPUTED]
        new = min(scalars[PARTIAL_WHOLE] - computed, options.budget - scalars[DECODES])
        partial_need = blocks_of(computed + new, options) - blocks_of(computed, options)
        need += partial_need
    if need <= scalars[FREE]:
        scalars[FREE] -= need
        return False
    while need > scalars[FREE]:
        need -= preempt_last(state, options, requests, served, window, partial_need)
    scalars[FREE] -= need
    return True


@jit_stateful_inline
def _begin_chunk(
    state: EngineState, flight: int, request: int, slot: int, context: int, new: int, whole: int, firsts: int
) -> int:
    """Note how far a prompt is after a step. Returns how many prompts end with it by now."""
    scalars = state.scalars
    if context + new < whole:
        scalars[PARTIAL] = slot
        scalars[PARTIAL_COMPUTED] = context + new
        scalars[PARTIAL_WHOLE] = whole
        return firsts
    state.firsts[2 * flight, firsts] = request
    state.firsts[2 * flight + 1, firsts] = slot
    return firsts + 1


@jit_stateful_inline
def _end_prompts(
    state: EngineState,
    requests: Requests,
    served: Served,
    flight: int,
    firsts: int,
    options: EngineOptions,
    window: int,
) -> None:
    """Let those whose prompts a step completes decode from the next on, if they have more to say."""
    for i in range(firsts):
        request, slot = state.firsts[2 * flight, i], state.firsts[2 * flight + 1, i]
        sent = served.sent[request]
        remaining = requests.output_tokens[request] - sent - 1
        if remaining > 0:
            whole = requests.input_tokens[request] + sent
            _enter_decodes(state, slot, whole, remaining, options, window)
            state.firsts[2 * flight + 1, i] = GOES_ON - slot


@jit_stateful_inline
def _blocks_asked(
    requests: Requests, options: EngineOptions, request: int, tokens: int, whole: int
) -> tuple[int, int]:
    """Blocks that a request takes when it begins with so many of its ``whole`` tokens, and asks for."""
    if options.reserves_output:
        held = blocks_of(requests.input_tokens[request] + requests.output_tokens[request], options)
        return held, held
    held = blocks_of(tokens, options)
    return held, blocks_of(whole, options) if options.admits_whole else held


@jit_stateful_inline
def has_prompt(state: EngineState, options: EngineOptions, requests: Requests, served: Served) -> bool:
    """Whether an engine's next step could compute a prompt: one that was cut, or the first that waits."""
    scalars = state.scalars
    if scalars[PARTIAL] != NONE:
        return True
    left = options.budget - (scalars[DECODES] if options.prefill_first == 0 else 0)
    if left <= 0 or scalars[RUNNING] >= options.max_seqs:
        return False
    request = _next_waiting(state, requests, served, state.clock[NOW])
    if request == NONE:
        return False
    context = 0 if request == scalars[PREEMPTED] else requests.cached_tokens[request]
    whole = requests.input_tokens[request] + served.sent[request]
    if whole - context > left and options.is_chunked == 0:
        return False
    _, asked = _blocks_asked(requests, options, request, context + min(whole - context, left), whole)
    return bool(asked <= scalars[FREE])


@jit_stateful_inline
def make_step(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    state: EngineState,
    requests: Requests,
    served: Served,
    admits: bool,
) -> float:
    """Schedule an engine's next step, behind those in flight. Returns its time, us; 0 if there is none."""
    scalars = state.scalars
    window = plan.window
    flight = (scalars[OLDEST] + scalars[IN_FLIGHT]) & 1
    decodes_too = options.prefill_first == 0
    is_short = False
    if decodes_too and options.reserves_output == 0:
        is_short = _have_room(state, options, requests, served, window)
    left = options.budget - (scalars[DECODES] if decodes_too else 0)
    sums = StepSums(0, 0, 0, 0, 0, 0)
    in_window = no_window_sums()
    chunks, firsts, prompt_tokens = 0, 0, 0
    slot = scalars[PARTIAL]
    if slot != NONE:
        # the prompt that an earlier step has cut
        context, whole = scalars[PARTIAL_COMPUTED], scalars[PARTIAL_WHOLE]
        new = min(whole - context, left)
        if not decodes_too and options.reserves_output == 0:
            scalars[FREE] -= blocks_of(context + new, options) - blocks_of(context, options)
        left -= new
        chunks = 1
        prompt_tokens = new
        sums = _with_chunk(sums, new, context)
        if window > 0:
            in_window = with_request(in_window, new, context, window)
        scalars[PARTIAL] = NONE
        firsts = _begin_chunk(state, flight, state.slots[REQUEST, slot], slot, context, new, whole, firsts)
    while admits and left > 0 and not is_short and scalars[RUNNING] < options.max_seqs:
        request = _next_waiting(state, requests, served, state.clock[NOW])
        if request == NONE:
            break
        comes_back = request == scalars[PREEMPTED]
        context = 0 if comes_back else requests.cached_tokens[request]
        whole = requests.input_tokens[request] + served.sent[request]
        new = whole - context
        if new > left:
            if options.is_chunked == 0:
                break
            new = left
        held, asked = _blocks_asked(requests, options, request, context + new, whole)
        if asked > scalars[FREE]:
            break
        if comes_back:
            scalars[PREEMPTED] = served.next_preempted[request]
        else:
            scalars[HEAD] = requests.next_arrived[request]
        slot = _take_slot(state, options, served, request, held)
        scalars[CACHED_TOKENS] += context
        left -= new
        chunks += 1
        prompt_tokens += new
        sums = _with_chunk(sums, new, context)
        if window > 0:
            in_window = with_request(in_window, new, context, window)
        firsts = _begin_chunk(state, flight, request, slot, context, new, whole, firsts)
    if not decodes_too and chunks == 0:
        decodes_too = True
        if options.reserves_output == 0:
            _have_room(state, options, requests, served, window)
    decodes = scalars[DECODES] if decodes_too else 0
    seqs = decodes + chunks
    if seqs == 0:
        return 0.0
    of_all = StepSums(
        sums.decodes + decodes,
        sums.kv_sum + (scalars[KV_SUM] if decodes_too else 0),
        sums.new_sum,
        sums.causal_pairs,
        sums.prefix_pairs,
        sums.prefix_sum,
    )
    if window > 0:
        seen = WindowSums(
            in_window.kv_sum + (scalars[WINDOW_SUM] if decodes_too else 0),
            in_window.causal_pairs,
            in_window.prefix_pairs,
            in_window.prefix_sum,
        )
        step_us = windowed_step_us(arena, plan, open_window(arena, 0), seqs, of_all, seen)
    else:
        step_us = summed_step_us(arena, plan, seqs, of_all)
    step_us *= options.time_scale
    scalars[FLIGHT_STEP + flight] = scalars[STEP] if decodes_too else NONE
    scalars[FLIGHT_DECODES + flight] = decodes
    scalars[FLIGHT_FIRSTS + flight] = firsts
    scalars[FLIGHT_TOKENS + flight] = decodes + prompt_tokens
    scalars[FLIGHT_NEW + flight] = sums.new_sum
    state.clock[FLIGHT_US + flight] = step_us
    scalars[IN_FLIGHT] += 1
    scalars[STEPS] += 1
    scalars[MIXED_STEPS] += chunks > 0 and decodes > 0
    scalars[PREFILL_STEPS] += chunks > 0 and decodes == 0
    scalars[PREFILL_TOKENS] += prompt_tokens
    scalars[DECODE_TOKENS] += decodes
    scalars[PEAK_RUNNING] = max(scalars[PEAK_RUNNING], scalars[RUNNING])
    scalars[LEAST_FREE] = min(scalars[LEAST_FREE], scalars[FREE])
    if decodes_too:
        _go_on(state, options, window)
    if firsts > 0:
        _end_prompts(state, requests, served, flight, firsts, options, window)
    return float(step_us)
