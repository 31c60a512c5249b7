"""Requests between their clients and engines: API servers, and then what no request waits for.

A request is routed when its client sends it, and takes the API servers of its replica in turn. Requests share
a server's thread equally, of which each takes ``server_us``: as all take the same, the first leaves first.
``request_us + token_us * tokens`` later a request reaches its engine, unless its client gives up before; its
server finishes it all the same.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.lanes import push_request
from fastroof.compiled.simulation.records import NONE, TIMED_OUT, Fleet, Row, Rows
from fastroof.compiled.simulation.router import (
    choose_replica,
    count_pushed,
    engine_of,
    push_to_engine,
    send_to_pool,
)
from fastroof.compiled.simulation.transfers import (
    coming_us,
    deadline_us,
    end_request,
    has_front_end,
    in_trace_us,
    pop,
    pop_coming,
    push,
)

# -- one thread --------------------------------------------------------------------------------------


@jit_stateful_inline
def _set_leaving(server: Row, passing: Rows, server_us: float) -> None:
    """Find when the first request leaves a server if no other comes."""
    server.leaves_us = math.inf
    if server.count > 0:
        rest_us = passing[server.first].received_us + server_us - server.got_us
        server.leaves_us = max(server.now_us, server.now_us + rest_us * server.count)


@jit_stateful_inline
def _enter(server: Row, passing: Rows, requests: Rows, request: int, server_us: float, now_us: float) -> None:
    """Let a request share a server's thread."""
    if server.count > 0:
        server.got_us += (now_us - server.now_us) / server.count
        requests[server.last].next_sent = request
    else:
        server.got_us = 0.0
        server.first = request
    requests[request].next_sent = NONE
    server.last = request
    server.now_us = now_us
    server.count += 1
    passing[request].received_us = server.got_us
    _set_leaving(server, passing, server_us)


@jit_stateful_inline
def _leave(server: Row, passing: Rows, requests: Rows, server_us: float) -> int:
    """Take the first request from a server, at ``leaves_us``."""
    request = int(server.first)
    server.got_us = passing[request].received_us + server_us
    server.now_us = server.leaves_us
    server.first = requests[request].next_sent
    server.count -= 1
    _set_leaving(server, passing, server_us)
    return request


@jit_stateful_inline
def _go_on(line: Row, passing: Rows, requests: Rows, request: int, left_us: float) -> float:
    """Return when a request that has left its server reaches its engine."""
    own_us = line.request_us + line.token_us * requests[request].input_tokens
    return float(in_trace_us(left_us + own_us))


# -- of all replicas ---------------------------------------------------------------------------------


@jit_stateful_inline
def front_end_us(fleet: Fleet) -> float:
    """Return when the next thing happens in the front end, us, or inf."""
    line = fleet.line[0]
    at_us = math.inf
    if has_front_end(fleet):
        at_us = line.leaves_us
        if line.passing_size > 0:
            at_us = min(at_us, fleet.passing[fleet.passed[0]].due_us)
    return float(at_us)


@jit_stateful_inline
def _give_up_us(fleet: Fleet, server: Row) -> float:
    """Return when the next client of a request in a server gives up, us, or inf."""
    if fleet.has.timeouts > 0 and server.waits != NONE:
        return float(deadline_us(fleet, server.waits))
    return math.inf


@jit_stateful_inline
def _note_next(fleet: Fleet) -> None:
    """Find when the next thing happens in a server."""
    next_us = math.inf
    for place in range(len(fleet.servers)):
        server = fleet.servers[place]
        next_us = min(next_us, server.leaves_us, _give_up_us(fleet, server))
    fleet.line[0].leaves_us = next_us


@jit_stateful_inline
def _push_passed(fleet: Fleet, request: int, left_us: float) -> None:
    """Let a request go on that has left its server."""
    line, row = fleet.line[0], fleet.passing[request]
    row.due_us = _go_on(line, fleet.passing, fleet.requests[0], request, left_us)
    if fleet.has.timeouts > 0:
        row.due_us = min(row.due_us, deadline_us(fleet, request))
    push(fleet.passed, line.passing_size, fleet.passing.due_us, request)
    line.passing_size += 1


@jit_stateful
def _send_through(fleet: Fleet, request: int, now_us: float) -> None:
    """Route a request, which is sent now, into the front end of its replica."""
    replica, line = choose_replica(fleet, 0, request, now_us), fleet.line[0]
    one, row = fleet.replicas[replica], fleet.passing[request]
    row.sent_us, row.replica = now_us, replica
    place = replica * line.servers_each + one.given % line.servers_each
    one.given += 1
    one.passing += 1
    one.passing_tokens += fleet.requests[0, request].input_tokens
    if line.server_us == 0.0:
        _push_passed(fleet, request, now_us)
        return
    server = fleet.servers[place]
    _enter(server, fleet.passing, fleet.requests[0], request, line.server_us, now_us)
    if server.waits == NONE:
        server.waits = request
    _note_next(fleet)


@jit_stateful_inline
def _leave_replica(fleet: Fleet, request: int) -> None:
    """Count a request no longer as one in the front end of its replica."""
    one = fleet.replicas[fleet.passing[request].replica]
    one.passing -= 1
    one.passing_tokens -= fleet.requests[0, request].input_tokens


@jit_stateful_inline
def _give_up(fleet: Fleet, request: int, now_us: float) -> None:
    """End a request in the front end whose client gives up."""
    _leave_replica(fleet, request)
    fleet.requests[0, request].status = TIMED_OUT
    end_request(fleet, request, now_us)


@jit_stateful
def _serve_next(fleet: Fleet, now_us: float) -> None:
    """Let happen what happens next in a server: its first request leaves, or a client gives up."""
    requests, line = fleet.requests[0], fleet.line[0]
    place = 0
    while min(fleet.servers[place].leaves_us, _give_up_us(fleet, fleet.servers[place])) > now_us:
        place += 1
    server = fleet.servers[place]
    if fleet.has.timeouts > 0 and _give_up_us(fleet, server) <= now_us:
        request = int(server.waits)
        server.waits = requests[request].next_sent
        _give_up(fleet, request, now_us)
    else:
        request = _leave(server, fleet.passing, requests, line.server_us)
        if server.waits == request:
            server.waits = server.first
        if requests[request].status != TIMED_OUT:
            _push_passed(fleet, request, now_us)
    _note_next(fleet)


@jit_stateful
def hand_on(fleet: Fleet, now_us: float) -> None:
    """Let the next thing happen in the front end, which is due now."""
    line = fleet.line[0]
    if line.leaves_us <= now_us:
        _serve_next(fleet, now_us)
        return
    line.passing_size -= 1
    request = pop(fleet.passed, line.passing_size, fleet.passing.due_us)
    if fleet.has.timeouts > 0 and deadline_us(fleet, request) <= now_us:
        _give_up(fleet, request, now_us)
        return
    _leave_replica(fleet, request)
    fleet.requests[0, request].arrival_us = now_us
    index = engine_of(fleet, fleet.pools[0], fleet.passing[request].replica)
    count_pushed(fleet, 0, index, request)
    push_to_engine(fleet, 0, index, request, now_us)


# -- requests come -----------------------------------------------------------------------------------


@jit_stateful_inline
def send_on(fleet: Fleet, at: int, request: int, now_us: float) -> int:
    """Send a request, which comes now, to a pool, or into its front end. Returns its engine, or NONE."""
    if has_front_end(fleet) and at == 0:
        _send_through(fleet, request, now_us)
        return NONE
    return int(send_to_pool(fleet, at, request, now_us))


@jit_stateful_inline
def _route_due(fleet: Fleet, index: int, now_us: float) -> bool:
    is_elsewhere = False
    while coming_us(fleet) <= now_us:
        to = send_on(fleet, 0, pop_coming(fleet), now_us)
        is_elsewhere |= to != NONE and to != index
    return is_elsewhere


@jit_stateful_inline
def route_due(fleet: Fleet, index: int, now_us: float) -> bool:
    """Route requests that come by now. Returns whether another engine got one, which may be next."""
    return coming_us(fleet) <= now_us and _route_due(fleet, index, now_us)


@jit_stateful_inline
def queue_all(fleet: Fleet) -> None:
    """Send all requests of an open loop, which come in the order of the trace, to the only engine."""
    requests, line, engine = fleet.requests[0], fleet.line[0], fleet.engines[0]
    rank, count = fleet.ranks[engine.first_rank], len(fleet.requests[0])
    if has_front_end(fleet):
        _pass_all(line, fleet.servers, fleet.passing, fleet.passed, requests, rank)
    else:
        for request in range(count):
            requests[request].next_sent = request + 1
        requests[count - 1].next_sent = NONE
        rank.head, rank.arrived, rank.deadline, rank.tail = 0, 0, 0, count - 1
    for request in range(count):
        requests[request].engine = 0
    engine.pushed, engine.next_us = count, requests[rank.head].arrival_us
    line.next_root = count


@jit_stateful
def _pass_all(line: Row, servers: Rows, passing: Rows, passed: Rows, requests: Rows, rank: Row) -> None:
    """Let all requests pass the only API server, and queue them at the only rank by arrival."""
    server, server_us, size, next_us = servers[0], line.server_us, 0, -math.inf
    for request in range(len(requests) + 1):
        next_us = requests[request].arrival_us if request < len(requests) else math.inf
        while server.leaves_us <= next_us and server.count > 0:
            left_us = server.leaves_us
            one = _leave(server, passing, requests, server_us)
            passing[one].due_us = _go_on(line, passing, requests, one, left_us)
            push(passed, size, passing.due_us, one)
            size += 1
        while size > 0 and passing[passed[0]].due_us <= next_us:
            size -= 1
            one = pop(passed, size, passing.due_us)
            requests[one].arrival_us = passing[one].due_us
            push_request(rank, requests, one)
        if request < len(requests):
            passing[request].sent_us = next_us
            if server_us > 0.0:
                _enter(server, passing, requests, request, server_us, next_us)
            else:
                passing[request].due_us = _go_on(line, passing, requests, request, next_us)
                push(passed, size, passing.due_us, request)
                size += 1
