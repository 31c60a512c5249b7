"""Runs of a fleet whose replicas a rule starts and stops: open loops, closed loops and sessions."""

from __future__ import annotations

import math

from fastroof.arrays import Floats, Ints
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.autoscaling import (
    NUM_SERVING,
    ROUTED,
    SERVING,
    Scaler,
    begin,
    check_now,
    check_us,
    close,
    is_empty,
    wake,
)
from fastroof.compiled.simulation.ranks import (
    group_of,
    group_schedule,
    group_step_end,
    group_time_out,
)
from fastroof.compiled.simulation.replicas import (
    POWER_OF_TWO,
    ROUND_ROBIN,
    Fleet,
    Load,
    advance_engine,
    engine_in,
    engines_each,
    is_less,
    load_of,
    next_engine,
    outstanding_of,
    push_to_engine,
    ranks_in,
    release_clients,
    send_to_engine,
)
from fastroof.compiled.simulation.sessions import coming_us, pop_coming
from fastroof.compiled.simulation.state import (
    CODE_STOPPED,
    NONE,
    EngineOptions,
    Record,
    Requests,
    Served,
)
from fastroof.compiled.steps import open_plan


@jit_stateful
def _advance_up(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    scaler: Scaler,
    requests: Requests,
    served: Served,
    record: Record,
    until_us: float,
) -> int:
    """Run the engines of replicas that serve or drain until ``until_us``. Returns a code."""
    for replica in range(len(scaler.status)):
        if scaler.status[replica] < SERVING:
            continue
        for engine in range(replica * engines_each(fleet), (replica + 1) * engines_each(fleet)):
            code = advance_engine(arena, options, fleet, requests, served, record, engine, until_us)
            if code != 0:
                return int(code)
    return 0


@jit_stateful
def _serving(scaler: Scaler, place: int) -> int:
    """Return the replica at a place among those that serve."""
    for replica in range(len(scaler.status)):
        if scaler.status[replica] == SERVING:
            if place == 0:
                return replica
            place -= 1
    return NONE


@jit_stateful_inline
def _choose(fleet: Fleet, scaler: Scaler, options: EngineOptions, requests: Requests, request: int) -> int:
    """Choose the replica that serves a request, of those that serve, as the router's rule does."""
    router, serving = fleet.router, scaler.counts[NUM_SERVING]
    if router.rule == ROUND_ROBIN:
        return int(_serving(scaler, router.turns[request] % serving))
    if router.rule == POWER_OF_TWO:
        below = scaler.rule.drawn_from
        first = _serving(scaler, router.drawn[0, request] * serving // below)
        second = _serving(scaler, router.drawn[1, request] * serving // below)
        return int(second) if outstanding_of(fleet, second) < outstanding_of(fleet, first) else int(first)
    chosen, least = NONE, Load(0, 0, 0)
    for replica in range(len(scaler.status)):
        if scaler.status[replica] == SERVING:
            own = load_of(fleet, options, requests, replica, request)
            if chosen == NONE or is_less(own, least):
                chosen, least = replica, own
    return chosen


@jit_stateful_inline
def _route(
    fleet: Fleet,
    scaler: Scaler,
    options: EngineOptions,
    requests: Requests,
    replica_of: Ints,
    request: int,
    now_us: float,
) -> int:
    """Choose the engine that a request goes to now, and note its replica."""
    wake(scaler, now_us)
    replica = _choose(fleet, scaler, options, requests, request)
    scaler.counts[ROUTED] += 1
    replica_of[request] = replica
    return int(engine_in(fleet, replica))


@jit_stateful
def autoscaled_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    scaler: Scaler,
    requests: Requests,
    served: Served,
    record: Record,
    replica_of: Ints,
) -> int:
    """Serve a trace with replicas that a rule starts and stops. Returns a code."""
    begin(fleet, scaler)
    for request in range(len(requests.arrival_us) + 1):
        is_last = request == len(requests.arrival_us)
        now_us = math.inf if is_last else requests.arrival_us[request]
        while check_us(scaler) <= now_us:
            if options.stop[0] != 0:
                return CODE_STOPPED
            code = _advance_up(arena, options, fleet, scaler, requests, served, record, check_us(scaler))
            if code != 0:
                return int(code)
            if is_last and _are_empty(fleet):
                break
            code = check_now(fleet, scaler)
            if code != 0:
                return int(code)
        if is_last:
            break
        if options.stop[0] != 0:
            return CODE_STOPPED
        code = _advance_up(arena, options, fleet, scaler, requests, served, record, now_us)
        if code != 0:
            return int(code)
        engine = _route(fleet, scaler, options, requests, replica_of, request, now_us)
        push_to_engine(fleet, requests, engine, request)
    close(fleet, scaler)
    return 0


@jit_stateful
def _are_empty(fleet: Fleet) -> bool:
    """Whether all replicas are empty."""
    for replica in range(len(fleet.router.pushed) // engines_each(fleet)):  # noqa: SIM110  Numba takes no generator here
        if not is_empty(fleet, replica):
            return False
    return True


@jit_stateful_inline
def _route_until(
    fleet: Fleet, scaler: Scaler, options: EngineOptions, requests: Requests, replica_of: Ints, now_us: float
) -> None:
    """Route every request that comes by now."""
    while coming_us(requests) <= now_us:
        request = pop_coming(requests)
        engine = _route(fleet, scaler, options, requests, replica_of, request, now_us)
        send_to_engine(fleet, requests, engine, request)


@jit_stateful
def autoscaled_feedback_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    scaler: Scaler,
    requests: Requests,
    served: Served,
    record: Record,
    replica_of: Ints,
    clients: int,
) -> int:
    """Serve sessions, or a closed loop's clients, with replicas that a rule starts and stops."""
    begin(fleet, scaler)
    plan = open_plan(arena)
    released = 0
    if clients > 0:
        released = release_clients(requests, 0, clients, requests.arrival_us[0])
    while True:
        if options.stop[0] != 0:
            return CODE_STOPPED
        first, now_us = next_engine(fleet, options, requests, served)
        at_us = coming_us(requests)
        if at_us == math.inf and now_us == math.inf:
            close(fleet, scaler)
            return 0
        if check_us(scaler) <= min(at_us, now_us):
            code = check_now(fleet, scaler)
            if code != 0:
                return int(code)
            continue
        if at_us <= now_us:
            _route_until(fleet, scaler, options, requests, replica_of, at_us)
            continue
        there, group = ranks_in(fleet, first), group_of(fleet.groups, first)
        for is_late in range(2):
            if is_late:
                left = group_time_out(options, there, group, requests, served, now_us)
            else:
                left = group_step_end(options, there, group, requests, served, record, now_us)
            if clients > 0:
                released = release_clients(requests, released, left, now_us + options.think_us)
            _route_until(fleet, scaler, options, requests, replica_of, now_us)
        code = group_schedule(arena, plan, options, there, group, requests, served, record, now_us)
        if code != 0:
            return int(code)
