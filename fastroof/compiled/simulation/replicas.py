"""Replicas of an engine, and the router that chooses one for each request.

A router sees every replica as it is when a request arrives: everything before that time has happened, and
what ends or starts at exactly that time has not.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.engine import advance
from fastroof.compiled.simulation.prefix_cache import find_blocks, settle
from fastroof.compiled.simulation.ranks import (
    WAITING_WEIGHT,
    RankGroup,
    advance_ranks,
    choose_rank,
    group_next_us,
    group_of,
    group_schedule,
    group_step_end,
    group_time_out,
    push_to_group,
    restart_group,
)
from fastroof.compiled.simulation.sessions import coming_us, pop_coming, push_coming
from fastroof.compiled.simulation.state import (
    CODE_STOPPED,
    END,
    FREE,
    GIVEN_UP_TOKENS,
    IN_FLIGHT,
    LOOKED_UP_TOKENS,
    NUM_BLOCKS,
    NUM_FINISHED,
    NUM_TIMED_OUT,
    RUNNING,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    blocks_of,
    engine_of,
    push_request,
)
from fastroof.compiled.steps import open_plan

ROUND_ROBIN, LEAST_OUTSTANDING, LEAST_LOAD, LEAST_KV, POWER_OF_TWO, PREFIX_AWARE = range(6)
"""Rules of routers. PREFIX_AWARE: where the fewest blocks come together."""


class Router(NamedTuple):
    """How a replica is chosen, and what was sent to engines: requests and prompt tokens.

    ``drawn`` are two random replicas for each request, ``turns`` its place among those that clients sent.
    """

    rule: int
    drawn: Ints
    turns: Longs
    pushed: Longs
    pushed_tokens: Longs


class Fleet(NamedTuple):
    """Engines and their router. ``waits`` is scratch space: one element per engine of a replica."""

    states: EngineState
    groups: RankGroup
    router: Router
    num_blocks: int
    waits: Longs


@jit_stateful_inline
def ranks_in(fleet: Fleet, engine: int) -> EngineState:
    """Return the states of one engine's ranks."""
    states, ranks = fleet.states, fleet.groups.takes_part.shape[2]
    first, last = engine * ranks, (engine + 1) * ranks
    return EngineState(
        states.scalars[first:last],
        states.clock[first:last],
        states.slots[first:last],
        states.calendar[first:last],
        states.due[first:last],
        states.firsts[first:last],
        states.fresh[first:last],
        states.cells[first:last],
    )


@jit_stateful_inline
def engines_each(fleet: Fleet) -> int:
    """Number of engines in a replica: ranks that step independently are engines."""
    return len(fleet.waits)


@jit_stateful_inline
def total_of(fleet: Fleet, replica: int, name: int) -> int:
    """Sum a scalar over all ranks of a replica."""
    each = engines_each(fleet) * fleet.groups.takes_part.shape[2]
    total = 0
    for rank in range(replica * each, (replica + 1) * each):
        total += fleet.states.scalars[rank, name]
    return int(total)


@jit_stateful_inline
def _sent(fleet: Fleet, replica: int) -> int:
    """Number of requests that a replica was sent."""
    sent = 0
    for engine in range(replica * engines_each(fleet), (replica + 1) * engines_each(fleet)):
        sent += fleet.router.pushed[engine]
    return int(sent)


@jit_stateful_inline
def outstanding_of(fleet: Fleet, replica: int) -> int:
    """Number of requests that wait or run at a replica."""
    gone = total_of(fleet, replica, NUM_FINISHED) + total_of(fleet, replica, NUM_TIMED_OUT)
    return _sent(fleet, replica) - gone


@jit_stateful_inline
def running_of(fleet: Fleet, replica: int) -> int:
    """Number of requests that run at a replica."""
    return total_of(fleet, replica, RUNNING)


@jit_stateful_inline
def held_blocks(fleet: Fleet, replica: int) -> int:
    """Number of KV blocks that requests hold at a replica."""
    return total_of(fleet, replica, NUM_BLOCKS) - total_of(fleet, replica, FREE)


class Load(NamedTuple):
    """What a router compares, in this order: less is better, and of equals the first replica."""

    load: int
    tie: int
    second_tie: int


@jit_stateful_inline
def is_less(one: Load, other: Load) -> bool:
    """Whether one load is less than another."""
    if one.load != other.load:
        return one.load < other.load
    return one.tie < other.tie or (one.tie == other.tie and one.second_tie < other.second_tie)


@jit_stateful
def _blocks_to_come(
    fleet: Fleet, options: EngineOptions, requests: Requests, replica: int, request: int
) -> int:
    """Count blocks in use at a replica, those its waiting prompts need, and those that one more would add."""
    tokens = requests.input_tokens[request]
    waiting, found = 0, 0
    for engine in range(replica * engines_each(fleet), (replica + 1) * engines_each(fleet)):
        waiting += fleet.router.pushed_tokens[engine]
        ranks = ranks_in(fleet, engine)
        for rank in range(ranks.scalars.shape[0]):
            scalars, cells = ranks.scalars[rank], ranks.cells[rank]
            settle(scalars, cells, options)
            found = max(found, find_blocks(cells, requests, request)[0])
            waiting -= scalars[LOOKED_UP_TOKENS] + scalars[GIVEN_UP_TOKENS]
    held = min(found, (tokens - 1) // options.block_size) * options.block_size
    return int(held_blocks(fleet, replica) + blocks_of(waiting + tokens - held, options))


@jit_stateful_inline
def load_of(fleet: Fleet, options: EngineOptions, requests: Requests, replica: int, request: int) -> Load:
    """Return a replica's load as the router's rule compares it for a request."""
    rule = fleet.router.rule
    running = running_of(fleet, replica)
    waiting = outstanding_of(fleet, replica) - running
    if rule == LEAST_LOAD:
        return Load(WAITING_WEIGHT * waiting + running, 0, 0)
    if rule == LEAST_KV:
        return Load(held_blocks(fleet, replica), waiting, running)
    if rule == PREFIX_AWARE:
        # of equals the one sent fewest requests, so that prompts in no cache are spread
        return Load(_blocks_to_come(fleet, options, requests, replica, request), _sent(fleet, replica), 0)
    return Load(waiting + running, 0, 0)


@jit_stateful
def choose_replica(fleet: Fleet, options: EngineOptions, requests: Requests, request: int, turn: int) -> int:
    """Choose the replica that serves a request; ``turn`` counts the requests that the router saw before."""
    router = fleet.router
    replicas = len(router.pushed) // engines_each(fleet)
    if router.rule == ROUND_ROBIN:
        return int(router.turns[turn] % replicas)
    if router.rule == POWER_OF_TWO:
        first, second = router.drawn[0, turn], router.drawn[1, turn]
        return int(second) if outstanding_of(fleet, second) < outstanding_of(fleet, first) else int(first)
    chosen, least = 0, Load(0, 0, 0)
    for replica in range(replicas):
        own = load_of(fleet, options, requests, replica, request)
        if replica == 0 or is_less(own, least):
            chosen, least = replica, own
    return chosen


@jit_stateful
def engine_in(fleet: Fleet, replica: int) -> int:
    """Choose the engine of a replica that gets its next request."""
    each = engines_each(fleet)
    if each == 1:
        return replica
    first = replica * each
    pushed, waits = fleet.router.pushed[first : first + each], fleet.waits
    scalars = fleet.states.scalars[first : first + each]
    given = 0
    for one in range(each):
        given += pushed[one]
        waits[one] = (
            pushed[one] - scalars[one, NUM_FINISHED] - scalars[one, NUM_TIMED_OUT] - scalars[one, RUNNING]
        )
    return first + choose_rank(scalars, waits, given, fleet.groups.rules.assignment)


@jit_stateful_inline
def advance_engine(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    engine: int,
    until_us: float,
) -> int:
    """Run an engine until its next event is at or after ``until_us``. Returns a code."""
    states = fleet.states
    if fleet.groups.takes_part.shape[2] > 1:
        group = group_of(fleet.groups, engine)
        there = ranks_in(fleet, engine)
        return int(advance_ranks(arena, options, there, group, requests, served, record, until_us))
    if states.scalars[engine, IN_FLIGHT] > 0 and states.clock[engine, END] >= until_us:
        return 0
    return int(advance(arena, options, engine_of(states, engine), requests, served, record, until_us))


@jit_stateful_inline
def push_to_engine(fleet: Fleet, requests: Requests, engine: int, request: int) -> None:
    """Send a request to an engine before or when it arrives."""
    if fleet.groups.takes_part.shape[2] > 1:
        push_to_group(group_of(fleet.groups, engine), requests, request)
    else:
        push_request(engine_of(fleet.states, engine), requests, request)
    fleet.router.pushed[engine] += 1
    fleet.router.pushed_tokens[engine] += requests.input_tokens[request]


@jit_stateful_inline
def restart_fleet(fleet: Fleet) -> None:
    """Reset all engines."""
    fleet.router.pushed[:] = 0
    fleet.router.pushed_tokens[:] = 0
    for engine in range(len(fleet.router.pushed)):
        restart_group(ranks_in(fleet, engine), group_of(fleet.groups, engine), fleet.num_blocks)


@jit_stateful_inline
def _advance_all(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> int:
    """Run all engines until ``until_us``. Returns a code."""
    for engine in range(len(fleet.router.pushed)):
        code = advance_engine(arena, options, fleet, requests, served, record, engine, until_us)
        if code != 0:
            return code
    return 0


@jit_stateful
def share_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    replica: int,
    replica_of: Ints,
) -> int:
    """Serve the requests of a trace that are already assigned to this replica. Returns a code."""
    restart_fleet(fleet)
    for request in range(len(requests.arrival_us)):
        if replica_of[request] == replica:
            if engines_each(fleet) > 1:
                now_us = requests.arrival_us[request]
                code = _advance_all(arena, options, fleet, requests, served, record, now_us)
                if code != 0:
                    return code
            push_to_engine(fleet, requests, engine_in(fleet, 0), request)
    return int(_advance_all(arena, options, fleet, requests, served, record, math.inf))


@jit_stateful
def replicas_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    replica_of: Ints,
) -> int:
    """Serve a trace with replicas of an engine. Returns a code."""
    restart_fleet(fleet)
    for request in range(len(requests.arrival_us)):
        # a replica that need not advance does not check this itself
        if options.stop[0] != 0:
            return CODE_STOPPED
        now_us = requests.arrival_us[request]
        code = _advance_all(arena, options, fleet, requests, served, record, now_us)
        if code != 0:
            return code
        replica = choose_replica(fleet, options, requests, request, request)
        push_to_engine(fleet, requests, engine_in(fleet, replica), request)
        replica_of[request] = replica
    return int(_advance_all(arena, options, fleet, requests, served, record, math.inf))


@jit_stateful
def release_clients(requests: Requests, released: int, count: int, at_us: float) -> int:
    """Let ``count`` clients send their next requests. Returns how many requests were sent so far."""
    last = min(released + count, len(requests.arrival_us))
    for request in range(released, last):
        requests.arrival_us[request] = at_us
        push_coming(requests, request)
    return last


@jit_stateful_inline
def send_to_engine(fleet: Fleet, requests: Requests, engine: int, request: int) -> None:
    """Send a request, which arrives now, to an engine of a loop with feedback."""
    push_to_group(group_of(fleet.groups, engine), requests, request)
    fleet.router.pushed[engine] += 1
    fleet.router.pushed_tokens[engine] += requests.input_tokens[request]


@jit_stateful_inline
def next_engine(
    fleet: Fleet, options: EngineOptions, requests: Requests, served: Served
) -> tuple[int, float]:
    """Return the engine with the next event, the first of equals, and its time, us, or inf."""
    first, now_us = 0, math.inf
    for engine in range(len(fleet.router.pushed)):
        group = group_of(fleet.groups, engine)
        next_us = group_next_us(ranks_in(fleet, engine), options, group, requests, served)
        if next_us < now_us:
            first, now_us = engine, next_us
    return first, now_us


@jit_stateful
def _route_until(
    fleet: Fleet, options: EngineOptions, requests: Requests, replica_of: Ints, now_us: float
) -> None:
    """Route every request that comes by now."""
    while coming_us(requests) <= now_us:
        request = pop_coming(requests)
        replica = choose_replica(fleet, options, requests, request, request)
        send_to_engine(fleet, requests, engine_in(fleet, replica), request)
        replica_of[request] = replica


@jit_stateful
def feedback_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    replica_of: Ints,
    clients: int,
) -> int:
    """Serve sessions, or a closed loop's clients, with replicas of an engine. Returns a code."""
    restart_fleet(fleet)
    plan = open_plan(arena)
    released = 0
    if clients > 0:
        released = release_clients(requests, 0, clients, requests.arrival_us[0])
    while True:
        if options.stop[0] != 0:
            return CODE_STOPPED
        first, now_us = next_engine(fleet, options, requests, served)
        at_us = coming_us(requests)
        if at_us <= now_us and at_us < math.inf:
            _route_until(fleet, options, requests, replica_of, at_us)
            continue
        if now_us == math.inf:
            return 0
        there, group = ranks_in(fleet, first), group_of(fleet.groups, first)
        for is_late in range(2):
            if is_late:
                left = group_time_out(options, there, group, requests, served, now_us)
            else:
                left = group_step_end(options, there, group, requests, served, record, now_us)
            if clients > 0:
                released = release_clients(requests, released, left, now_us + options.think_us)
            _route_until(fleet, options, requests, replica_of, now_us)
        code = group_schedule(arena, plan, options, there, group, requests, served, record, now_us)
        if code != 0:
            return int(code)
