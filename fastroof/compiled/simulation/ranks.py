"""Ranks of attention data parallelism: each has its own scheduler, and their steps start together.

A step of all ranks takes as long as the longest rank's. Its experts compute the tokens of all ranks, or more,
depending on the engine's rules (fastroof.compiled.expert_rows); a rank without requests waits. A request is
assigned to a rank when the engine sees it. Prompts may wait for those of other ranks. A single rank is a
plain engine.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Longs
from fastroof.compiled.expert_rows import (
    FEWEST_TOKENS,
    TAKES_TURNS,
    RankRules,
    seen_tokens,
    wait_for_others_us,
)
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.engine import complete_step, idle_until_us
from fastroof.compiled.simulation.preemption import time_out
from fastroof.compiled.simulation.scheduling import (
    decodes_run,
    has_prompt,
    held_prompts,
    make_step,
    slots_hold,
)
from fastroof.compiled.simulation.slots import see_arrivals
from fastroof.compiled.simulation.state import (
    CODE_STOPPED,
    CODE_STUCK,
    DECODES,
    END,
    FETCHING,
    FLIGHT_DECODES,
    FLIGHT_FIRSTS,
    FLIGHT_HOST_US,
    FLIGHT_NEW,
    FLIGHT_TOKENS,
    FLIGHT_US,
    FREE,
    HOLD_NEW,
    HOLD_PROMPTS,
    IN_FLIGHT,
    IS_BACKLOGGED,
    NONE,
    NOW,
    NUM_BLOCKS,
    NUM_FINISHED,
    NUM_TIMED_OUT,
    OLDEST,
    RUN_ALL,
    RUNNING,
    WAITING,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    add_interval,
    engine_of,
    push_request,
    restart,
)
from fastroof.compiled.steps import EXPERT_AT, PlanParts, open_plan

WAITING_WEIGHT = 4
"""How many running requests a waiting one counts as when loads are compared."""


class RankGroup(NamedTuple):
    """The shared state of an engine's ranks, or all engines' along the first axis.

    ``scalars`` and ``clock`` are indexed by the names below; ``takes_part[flight, rank]`` says which ranks
    have requests in each of two steps in flight.
    """

    scalars: Longs
    clock: Floats
    takes_part: Longs
    rules: RankRules


# scalars: first, last and number of the requests not yet assigned to a rank; steps in flight and which is the
# oldest; steps; requests assigned so far; steps that prompts have waited for those of other ranks; steps
# since all ranks were idle, and the number of them from which prompts are free to start
FIRST_SENT, LAST_SENT, SENT, GROUP_IN_FLIGHT, GROUP_OLDEST, GROUP_STEPS, GIVEN, HELD_STEPS = range(8)
STEPS_IN_A_ROW, GROUP_HELD_UNTIL = 8, 9
GROUP_SCALARS = 10

# clock, us
GROUP_END, GROUP_FLIGHT_US = 0, 1
GROUP_CLOCKS = 4


@jit_stateful_inline
def group_of(groups: RankGroup, replica: int) -> RankGroup:
    """Return one engine's group."""
    return RankGroup(groups.scalars[replica], groups.clock[replica], groups.takes_part[replica], groups.rules)


@jit_stateful_inline
def restart_group(states: EngineState, group: RankGroup, num_blocks: int) -> None:
    """Reset all ranks, whose arrays may hold anything."""
    group.scalars[:] = 0
    group.scalars[FIRST_SENT] = NONE
    group.clock[:] = 0.0
    for rank in range(states.scalars.shape[0]):
        restart(engine_of(states, rank), num_blocks)


@jit_stateful_inline
def push_to_group(group: RankGroup, requests: Requests, request: int) -> None:
    """Send a request, after all that arrive before it; it gets a rank when the engine sees it."""
    scalars = group.scalars
    requests.next_arrived[request] = NONE
    if scalars[FIRST_SENT] == NONE:
        scalars[FIRST_SENT] = request
    else:
        requests.next_arrived[scalars[LAST_SENT]] = request
    scalars[LAST_SENT] = request
    scalars[SENT] += 1


@jit_stateful_inline
def group_next_us(
    states: EngineState, options: EngineOptions, group: RankGroup, requests: Requests, served: Served
) -> float:
    """Return the next time: a step's end or, if idle, the next arrival or end of a fetch, or inf."""
    if group.scalars[GROUP_IN_FLIGHT] > 0:
        return float(group.clock[GROUP_END])
    next_us = math.inf
    if group.scalars[FIRST_SENT] != NONE:
        next_us = max(float(states.clock[0, NOW]), float(requests.arrival_us[group.scalars[FIRST_SENT]]))
    if options.num_tiers > 0:
        for rank in range(states.scalars.shape[0]):
            if states.scalars[rank, FETCHING] > 0:
                state = engine_of(states, rank)
                next_us = min(next_us, idle_until_us(state, options, requests, served))
    return next_us


@jit_stateful_inline
def choose_rank(scalars: Longs, waits: Longs, given: int, rule: int) -> int:
    """Choose the rank that gets a request, the first of equals, from the ranks' scalars."""
    ranks = scalars.shape[0]
    if rule == TAKES_TURNS:
        return int(given % ranks)
    active, most = 0, 0
    for rank in range(ranks):
        has = waits[rank] + scalars[rank, RUNNING]
        active += has
        most = max(most, has)
    # an even share of the requests, including this one
    share = max((active + ranks) // ranks, most)
    least = 0
    least_load = math.inf
    for rank in range(ranks):
        if rule == FEWEST_TOKENS:
            if waits[rank] + scalars[rank, RUNNING] >= share:
                continue
            load = scalars[rank, NUM_BLOCKS] - scalars[rank, FREE]
        else:
            load = WAITING_WEIGHT * waits[rank] + scalars[rank, RUNNING]
        if load < least_load:
            least = rank
            least_load = load
    return least


@jit_stateful_inline
def see_sent(states: EngineState, group: RankGroup, requests: Requests, now_us: float) -> None:
    """Assign requests that have arrived to ranks by the engine's rule."""
    scalars = group.scalars
    while scalars[FIRST_SENT] != NONE and requests.arrival_us[scalars[FIRST_SENT]] <= now_us:
        request = scalars[FIRST_SENT]
        scalars[FIRST_SENT] = requests.next_arrived[request]
        scalars[SENT] -= 1
        rank = choose_rank(states.scalars, states.scalars[:, WAITING], scalars[GIVEN], group.rules.assignment)
        scalars[GIVEN] += 1
        state = engine_of(states, rank)
        push_request(state, requests, request)
        see_arrivals(state, requests, now_us)


@jit_stateful_inline
def group_step_end(
    options: EngineOptions,
    states: EngineState,
    group: RankGroup,
    requests: Requests,
    served: Served,
    record: Record,
    now_us: float,
) -> int:
    """Go to the next event, which may end a step. Returns how many requests left."""
    scalars, clock = group.scalars, group.clock
    left = 0
    has_step = scalars[GROUP_IN_FLIGHT] > 0
    flight = scalars[GROUP_OLDEST]
    if has_step:
        scalars[GROUP_OLDEST] = 1 - flight
        scalars[GROUP_IN_FLIGHT] -= 1
        clock[GROUP_END] = now_us
        if scalars[GROUP_IN_FLIGHT] > 0:
            clock[GROUP_END] += clock[GROUP_FLIGHT_US + scalars[GROUP_OLDEST]]
    for rank in range(states.scalars.shape[0]):
        state = engine_of(states, rank)
        state.clock[NOW] = now_us
        before = state.scalars[NUM_FINISHED] + state.scalars[NUM_TIMED_OUT]
        if has_step and options.timeout_us < math.inf:
            time_out(state, options, requests, served, now_us, True)
        if has_step and group.takes_part[flight, rank]:
            complete_step(state, options, requests, served, record, now_us)
        if has_step:
            # the next step takes as long as the longest rank's
            state.clock[END] = clock[GROUP_END]
        left += state.scalars[NUM_FINISHED] + state.scalars[NUM_TIMED_OUT] - before
    return left


@jit_stateful_inline
def group_time_out(
    options: EngineOptions,
    states: EngineState,
    group: RankGroup,
    requests: Requests,
    served: Served,
    now_us: float,
) -> int:
    """Assign arrivals and drop timed-out requests. Returns how many were dropped."""
    see_sent(states, group, requests, now_us)
    left = 0
    if options.timeout_us < math.inf:
        for rank in range(states.scalars.shape[0]):
            state = engine_of(states, rank)
            before = state.scalars[NUM_TIMED_OUT]
            time_out(state, options, requests, served, now_us, False)
            left += state.scalars[NUM_TIMED_OUT] - before
    return left


@jit_stateful_inline
def _prompts_begin(
    options: EngineOptions, states: EngineState, group: RankGroup, requests: Requests, served: Served
) -> bool:
    """Whether waiting prompts may start now, if they wait for those of other ranks (``balance_steps``)."""
    all_have, all_decode = True, True
    for rank in range(states.scalars.shape[0]):
        state = engine_of(states, rank)
        all_have &= has_prompt(state, options, requests, served)
        all_decode &= state.scalars[DECODES] > 0
    scalars = group.scalars
    if not all_have:
        scalars[HELD_STEPS] += 1
        if all_decode and scalars[HELD_STEPS] < group.rules.balance_steps:
            return False
    scalars[HELD_STEPS] = 0
    return True


@jit_stateful_inline
def _held_prompts(options: EngineOptions, state: EngineState, group: RankGroup) -> int:
    """Return which prompts one of the ranks, which pause together, holds back from the next step."""
    if group.takes_part.shape[1] == 1:
        return held_prompts(state, options)
    row = group.scalars[STEPS_IN_A_ROW]
    if options.prefill_first:
        if row < group.scalars[GROUP_HELD_UNTIL]:
            return HOLD_PROMPTS
    elif row % (options.pause_steps + 1) > 0 and state.scalars[IS_BACKLOGGED] == 0 and decodes_run(state):
        return HOLD_PROMPTS
    return slots_hold(state, options)


@jit_stateful_inline
def _note_pause(options: EngineOptions, states: EngineState, group: RankGroup, flight: int) -> None:
    """Count a step, and let prompts of engines that run them first pause after one with prompts."""
    scalars = group.scalars
    scalars[STEPS_IN_A_ROW] += 1
    for rank in range(states.scalars.shape[0]):
        state = states.scalars[rank]
        own = (state[OLDEST] + state[IN_FLIGHT] - 1) & 1
        if group.takes_part[flight, rank] and state[FLIGHT_TOKENS + own] > state[FLIGHT_DECODES + own]:
            scalars[GROUP_HELD_UNTIL] = scalars[STEPS_IN_A_ROW] + options.pause_steps


@jit_stateful_inline
def _together_us(
    arena: Floats, plan: PlanParts, options: EngineOptions, states: EngineState, group: RankGroup, flight: int
) -> float:
    """Time a step of all ranks, us: the longest rank's, with experts that compute the tokens of all ranks."""
    rules = group.rules
    ranks = states.scalars.shape[0]
    total, fullest, new = 0, 0, 0
    for rank in range(ranks):
        if group.takes_part[flight, rank]:
            state = engine_of(states, rank)
            own = (state.scalars[OLDEST] + state.scalars[IN_FLIGHT] - 1) & 1
            tokens = state.scalars[FLIGHT_TOKENS + own]
            total += tokens
            fullest = max(fullest, tokens)
            new += state.scalars[FLIGHT_NEW + own]
        else:
            total += rules.idle_tokens
    is_decode = new == 0
    seen = seen_tokens(rules, float(total), float(fullest), is_decode)
    has_experts = arena[plan.header_at + EXPERT_AT] > 0.0
    longest_us = 0.0
    for rank in range(ranks):
        if group.takes_part[flight, rank]:
            state = engine_of(states, rank)
            own = (state.scalars[OLDEST] + state.scalars[IN_FLIGHT] - 1) & 1
            step_us = state.clock[FLIGHT_US + own]
            if has_experts:
                own_new = state.scalars[FLIGHT_NEW + own]
                own_tokens = float(state.scalars[FLIGHT_TOKENS + own])
                waits_us = wait_for_others_us(arena, plan, own_tokens, own_new == 0, seen, is_decode)
                step_us += waits_us * options.time_scale
                step_us = max(step_us, state.clock[FLIGHT_HOST_US + own])
                state.clock[FLIGHT_US + own] = step_us
            longest_us = max(longest_us, step_us)
    return longest_us


@jit_stateful_inline
def group_schedule(
    arena: Floats,
    plan: PlanParts,
    options: EngineOptions,
    states: EngineState,
    group: RankGroup,
    requests: Requests,
    served: Served,
    record: Record,
    now_us: float,
) -> int:
    """Schedule steps of all ranks until one runs and, with asynchronous scheduling, a second is ready."""
    scalars, clock = group.scalars, group.clock
    ranks = states.scalars.shape[0]
    see_sent(states, group, requests, now_us)
    while scalars[GROUP_IN_FLIGHT] < options.depth:
        flight = (scalars[GROUP_OLDEST] + scalars[GROUP_IN_FLIGHT]) & 1
        holds = RUN_ALL
        if group.rules.balance_steps > 0 and not _prompts_begin(options, states, group, requests, served):
            holds = HOLD_NEW
        has_step = False
        for rank in range(ranks):
            one = engine_of(states, rank)
            if options.pause_steps > 0 or options.min_free_slots > 0:
                holds = _held_prompts(options, one, group)
            step_us = make_step(arena, plan, options, one, requests, served, holds)
            group.takes_part[flight, rank] = step_us > 0.0
            has_step |= step_us > 0.0
        if not has_step:
            is_over = scalars[STEPS_IN_A_ROW] < scalars[GROUP_HELD_UNTIL]
            if scalars[GROUP_IN_FLIGHT] == 0:
                # without a request that decodes, prompts are free at once
                scalars[STEPS_IN_A_ROW], scalars[GROUP_HELD_UNTIL] = 0, 0
                if is_over:
                    continue
            break
        if options.pause_steps > 0 or options.min_free_slots > 0:
            _note_pause(options, states, group, flight)
        longest_us = _together_us(arena, plan, options, states, group, flight)
        clock[GROUP_FLIGHT_US + flight] = longest_us
        if scalars[GROUP_IN_FLIGHT] == 0:
            clock[GROUP_END] = now_us + longest_us
            for rank in range(ranks):
                states.clock[rank, END] = clock[GROUP_END]
        scalars[GROUP_IN_FLIGHT] += 1
        scalars[GROUP_STEPS] += 1
    running, waiting, fetching, blocks, new_tokens, tokens = 0, 0, 0, 0, 0, 0
    oldest = scalars[GROUP_OLDEST]
    for rank in range(ranks):
        state = engine_of(states, rank).scalars
        running += state[RUNNING]
        waiting += state[WAITING]
        fetching += state[FETCHING]
        blocks += state[NUM_BLOCKS] - state[FREE]
        if scalars[GROUP_IN_FLIGHT] > 0 and group.takes_part[oldest, rank]:
            flight = state[OLDEST]
            new_tokens += state[FLIGHT_TOKENS + flight]
            tokens += state[FLIGHT_DECODES + flight] + state[FLIGHT_FIRSTS + flight]
    if scalars[GROUP_IN_FLIGHT] > 0:
        add_interval(record, now_us, clock[GROUP_END], running, waiting, blocks, (new_tokens, tokens))
        return 0
    return CODE_STUCK if waiting > 0 and fetching == 0 else 0


@jit_stateful
def advance_ranks(
    arena: Floats,
    options: EngineOptions,
    states: EngineState,
    group: RankGroup,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> int:
    """Run ranks until their next event is at or after ``until_us``. Returns a code."""
    plan = open_plan(arena)
    while True:
        if options.stop[0] != 0:
            return CODE_STOPPED
        now_us = group_next_us(states, options, group, requests, served)
        if now_us >= until_us:
            return 0
        group_step_end(options, states, group, requests, served, record, now_us)
        group_time_out(options, states, group, requests, served, now_us)
        code = group_schedule(arena, plan, options, states, group, requests, served, record, now_us)
        if code != 0:
            return int(code)
