"""Replicas of an engine, and the router that says which of them serves a request.

A router looks at all replicas as they are when a request arrives: each has done what happens before. What
ends or begins at that very time has not happened yet.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.engine import advance
from fastroof.compiled.simulation.ranks import (
    WAITING_WEIGHT,
    RankGroup,
    advance_ranks,
    group_next_us,
    group_of,
    group_schedule,
    group_step_end,
    group_time_out,
    push_to_group,
    restart_group,
)
from fastroof.compiled.simulation.records import Record
from fastroof.compiled.simulation.state import (
    CODE_STOPPED,
    END,
    FREE,
    IN_FLIGHT,
    NUM_BLOCKS,
    NUM_FINISHED,
    NUM_TIMED_OUT,
    RUNNING,
    EngineOptions,
    EngineState,
    Requests,
    Served,
    engine_of,
    push_request,
)
from fastroof.compiled.steps import open_plan

__all__ = [
    "LEAST_KV",
    "LEAST_LOAD",
    "LEAST_OUTSTANDING",
    "POWER_OF_TWO",
    "ROUND_ROBIN",
    "Fleet",
    "Router",
    "closed_loop_run",
    "replicas_run",
    "share_run",
]

ROUND_ROBIN, LEAST_OUTSTANDING, LEAST_LOAD, LEAST_KV, POWER_OF_TWO = range(5)


class Router(NamedTuple):
    """How a replica is chosen.

    Attributes
    ----------
    rule
        One of the names above.
    drawn
        Two replicas a request, which may be one and the same, where the rule draws them.
    pushed
        How many requests each replica was sent, to be counted; 0.
    """

    rule: int
    drawn: Ints
    pushed: Longs


class Fleet(NamedTuple):
    """Replicas, and who sends them requests; each of ``num_blocks`` blocks a rank."""

    states: EngineState
    groups: RankGroup
    router: Router
    num_blocks: int


@jit_stateful_inline
def _ranks_of(fleet: Fleet, replica: int) -> EngineState:
    """The ranks of one replica."""
    states, ranks = fleet.states, fleet.groups.takes_part.shape[2]
    first, last = replica * ranks, (replica + 1) * ranks
    return EngineState(
        states.scalars[first:last],
        states.clock[first:last],
        states.slots[first:last],
        states.calendar[first:last],
        states.due[first:last],
        states.firsts[first:last],
        states.fresh[first:last],
    )


@jit_stateful_inline
def _outstanding(fleet: Fleet, replica: int) -> int:
    """Requests that wait at a replica or run."""
    there = fleet.router.pushed[replica]
    scalars = _ranks_of(fleet, replica).scalars
    for rank in range(scalars.shape[0]):
        there -= scalars[rank, NUM_FINISHED] + scalars[rank, NUM_TIMED_OUT]
    return int(there)


@jit_stateful_inline
def _running(fleet: Fleet, replica: int) -> int:
    """Requests that run at a replica."""
    running = 0
    scalars = _ranks_of(fleet, replica).scalars
    for rank in range(scalars.shape[0]):
        running += scalars[rank, RUNNING]
    return running


@jit_stateful_inline
def _blocks(fleet: Fleet, replica: int) -> int:
    """Blocks of KV cache that requests of a replica hold."""
    blocks = 0
    scalars = _ranks_of(fleet, replica).scalars
    for rank in range(scalars.shape[0]):
        blocks += scalars[rank, NUM_BLOCKS] - scalars[rank, FREE]
    return blocks


@jit_stateful
def _choose(fleet: Fleet, request: int) -> int:
    """Say which replica gets a request; of equals the first."""
    router = fleet.router
    replicas = len(router.pushed)
    if router.rule == ROUND_ROBIN:
        return request % replicas
    if router.rule == POWER_OF_TWO:
        first, second = router.drawn[0, request], router.drawn[1, request]
        return int(second) if _outstanding(fleet, second) < _outstanding(fleet, first) else int(first)
    least = 0
    least_load, least_waiting, least_running = 0, 0, 0
    for replica in range(replicas):
        running = _running(fleet, replica)
        waiting = _outstanding(fleet, replica) - running
        load = waiting + running
        if router.rule == LEAST_LOAD:
            load = WAITING_WEIGHT * waiting + running
        elif router.rule == LEAST_KV:
            load = _blocks(fleet, replica)
        is_less = load < least_load
        if router.rule == LEAST_KV and load == least_load:
            is_less = waiting < least_waiting or (waiting == least_waiting and running < least_running)
        if replica == 0 or is_less:
            least = replica
            least_load, least_waiting, least_running = load, waiting, running
    return least


@jit_stateful_inline
def _advance(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    replica: int,
    until_us: float,
) -> int:
    """Run a replica until its next event is not before a time. Returns a code."""
    states = fleet.states
    if fleet.groups.takes_part.shape[2] > 1:
        group = group_of(fleet.groups, replica)
        there = _ranks_of(fleet, replica)
        return int(advance_ranks(arena, options, there, group, requests, served, record, until_us))
    if states.scalars[replica, IN_FLIGHT] > 0 and states.clock[replica, END] >= until_us:
        return 0
    return int(advance(arena, options, engine_of(states, replica), requests, served, record, until_us))


@jit_stateful_inline
def _push(fleet: Fleet, requests: Requests, replica: int, request: int) -> None:
    """Send a request to a replica, where it waits for its arrival."""
    if fleet.groups.takes_part.shape[2] > 1:
        push_to_group(group_of(fleet.groups, replica), requests, request)
    else:
        push_request(engine_of(fleet.states, replica), requests, request)
    fleet.router.pushed[replica] += 1


@jit_stateful_inline
def _restart(fleet: Fleet) -> None:
    """Empty all replicas."""
    fleet.router.pushed[:] = 0
    for replica in range(len(fleet.router.pushed)):
        restart_group(_ranks_of(fleet, replica), group_of(fleet.groups, replica), fleet.num_blocks)


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
    """Serve those requests of a trace that are this replica's already. Returns a code.

    For rules that look at nothing, so that replicas run apart: the fleet is one of one.
    """
    _restart(fleet)
    for request in range(len(requests.arrival_us)):
        if replica_of[request] == replica:
            _push(fleet, requests, 0, request)
    return int(_advance(arena, options, fleet, requests, served, record, 0, math.inf))


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
    """Serve a trace by replicas of an engine. Returns a code.

    Arrays may hold anything but ``served`` and ``record``, which are as nothing has been served, and what the
    router draws.
    """
    _restart(fleet)
    replicas = len(fleet.router.pushed)
    for request in range(len(requests.arrival_us)):
        # replicas that need not advance do not look
        if options.stop[0] != 0:
            return CODE_STOPPED
        now_us = requests.arrival_us[request]
        for replica in range(replicas):
            code = _advance(arena, options, fleet, requests, served, record, replica, now_us)
            if code != 0:
                return code
        chosen = _choose(fleet, request)
        _push(fleet, requests, chosen, request)
        replica_of[request] = chosen
    for replica in range(replicas):
        code = _advance(arena, options, fleet, requests, served, record, replica, math.inf)
        if code != 0:
            return code
    return 0


@jit_stateful_inline
def _release(requests: Requests, released: int, count: int, at_us: float) -> int:
    """Let so many clients send their next requests. Returns how many were sent in all."""
    last = min(released + count, len(requests.arrival_us))
    for request in range(released, last):
        requests.arrival_us[request] = at_us
    return last


@jit_stateful
def _route_until(
    fleet: Fleet, requests: Requests, replica_of: Ints, next_sent: int, released: int, now_us: float
) -> int:
    """Route what has been sent until now. Returns the first request that has not."""
    while next_sent < released and requests.arrival_us[next_sent] <= now_us:
        chosen = _choose(fleet, next_sent)
        push_to_group(group_of(fleet.groups, chosen), requests, next_sent)
        fleet.router.pushed[chosen] += 1
        replica_of[next_sent] = chosen
        next_sent += 1
    return next_sent


@jit_stateful
def closed_loop_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    requests: Requests,
    served: Served,
    record: Record,
    replica_of: Ints,
    clients: int,
) -> int:
    """Serve the clients of a closed loop by replicas of an engine. Returns a code.

    As :func:`replicas_run`, with the events of all replicas in one order, of equals the first replica's
    first. When a step has ended, clients who do not think are back, and are routed, before the replica's
    next step is made. Engines know of no clients: it is the router who knows where a next request goes.
    """
    _restart(fleet)
    plan = open_plan(arena)
    released = _release(requests, 0, clients, 0.0)
    next_sent = 0
    while True:
        if options.stop[0] != 0:
            return CODE_STOPPED
        first = 0
        now_us = math.inf
        for replica in range(len(fleet.router.pushed)):
            next_us = group_next_us(_ranks_of(fleet, replica), group_of(fleet.groups, replica), requests)
            if next_us < now_us:
                first = replica
                now_us = next_us
        if next_sent < released and requests.arrival_us[next_sent] <= now_us:
            now_us = requests.arrival_us[next_sent]
            next_sent = _route_until(fleet, requests, replica_of, next_sent, released, now_us)
            continue
        if now_us == math.inf:
            return 0
        there, group = _ranks_of(fleet, first), group_of(fleet.groups, first)
        for is_late in range(2):
            if is_late:
                left = group_time_out(plan, options, there, group, requests, served, now_us)
            else:
                left = group_step_end(plan, options, there, group, requests, served, record, now_us)
            released = _release(requests, released, left, now_us + options.think_us)
            next_sent = _route_until(fleet, requests, replica_of, next_sent, released, now_us)
        code = group_schedule(arena, plan, options, there, group, requests, served, record, now_us)
        if code != 0:
            return int(code)
