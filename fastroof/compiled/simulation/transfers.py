"""Requests between engines: those to come, clients and sessions, and KV caches on their way to the next pool.

A request of a session starts ``delay_us`` after the last of its parents ended, and not before its own
arrival. Until their arrival is reached such requests are in a heap; others, those of clients too, come in the
order of the trace. Of equal times the first request comes first.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.records import NONE, Fleet, Row, Rows

_US_PER_S = 1e6


@jit_stateful_inline
def _is_before(times_us: Floats, one: int, other: int) -> bool:
    """Whether a request comes before another."""
    return bool(times_us[one] < times_us[other] or (times_us[one] == times_us[other] and one < other))


@jit_stateful
def push(heap: Longs, size: int, times_us: Floats, request: int) -> None:
    """Add a request to a heap of ``size``, by time."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not _is_before(times_us, request, heap[above]):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = request


@jit_stateful
def pop(heap: Longs, size: int, times_us: Floats) -> int:
    """Take the first request out of a heap, which then has ``size``."""
    first, moved = heap[0], heap[size]
    at = 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and _is_before(times_us, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(times_us, heap[below], moved):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = moved
    return int(first)


@jit_stateful_inline
def is_coupled(fleet: Fleet) -> bool:
    """Whether what engines do feeds back to others."""
    if fleet.has.clients > 0 or fleet.has.sessions > 0 or fleet.has.pools > 0:
        return bool(fleet.line[0].is_coupled > 0)
    return False


@jit_stateful_inline
def has_front_end(fleet: Fleet) -> bool:
    """Whether requests pass a front end before they reach engines."""
    return bool(fleet.has.front > 0 and fleet.line[0].servers_each > 0)


@jit_stateful_inline
def in_trace_us(at_us: float) -> float:
    """Return a time as a trace in seconds has it."""
    return at_us / _US_PER_S * _US_PER_S


@jit_stateful_inline
def deadline_us(fleet: Fleet, request: int) -> float:
    """Return when a request's client gives up, wherever it is, us."""
    sent_us = fleet.requests[0, request].arrival_us
    if has_front_end(fleet):
        sent_us = fleet.passing[request].sent_us
    return float(sent_us + fleet.pools[0].timeout_us)


@jit_stateful_inline
def has_late_first(fleet: Fleet, at: int) -> bool:
    """Whether requests reach engines of a pool in another order than that in which clients give up."""
    return bool(fleet.has.pools > 0 and at > 0) or has_front_end(fleet)


# -- requests to come --------------------------------------------------------------------------------


@jit_stateful_inline
def _next_root(fleet: Fleet, line: Row) -> int:
    """Return the next request that waits for no other, or NONE."""
    if line.next_root >= line.num_roots:
        return NONE
    if fleet.has.sessions > 0 and line.sessions > 0:
        return int(fleet.children[line.next_root])
    return int(line.next_root)


@jit_stateful_inline
def coming_us(fleet: Fleet) -> float:
    """Return the next arrival of a request to come, us, or inf."""
    line = fleet.line[0]
    at_us = math.inf
    root = _next_root(fleet, line)
    if root != NONE:
        at_us = fleet.requests[0, root].arrival_us
    if fleet.has.sessions > 0 and line.coming_size > 0:
        at_us = min(at_us, fleet.requests[0, fleet.coming[0]].arrival_us)
    return float(at_us)


@jit_stateful_inline
def pop_coming(fleet: Fleet) -> int:
    """Return the next request to come, which there must be, and count it as sent."""
    line = fleet.line[0]
    root = _next_root(fleet, line)
    if fleet.has.sessions > 0:
        arrivals_us = fleet.requests[0].arrival_us
        if root == NONE or (line.coming_size > 0 and not _is_before(arrivals_us, root, fleet.coming[0])):
            line.coming_size -= 1
            return int(pop(fleet.coming, line.coming_size, arrivals_us))
    line.next_root += 1
    return root


@jit_stateful_inline
def release_clients(fleet: Fleet, count: int, at_us: float) -> None:
    """Let ``count`` clients send their next requests at a time, which is not before that of others."""
    line, requests = fleet.line[0], fleet.requests[0]
    for _ in range(min(count, len(requests) - line.num_roots)):
        requests[line.num_roots].arrival_us = at_us
        line.num_roots += 1


@jit_stateful
def _end_parent(
    line: Row, coming: Longs, requests: Rows, followers: Rows, children: Ints, request: int, now_us: float
) -> None:
    """Let requests come whose last parent ended now, and the next session of a client whose last one did."""
    for place in range(followers[request].children_at, followers[request + 1].children_at):
        child = int(children[place])
        follower = followers[child]
        follower.unended -= 1
        if follower.unended == 0 and child > len(requests):
            # of a session of a client, which starts its next one
            if line.num_roots < followers[0].children_at:
                requests[children[line.num_roots]].arrival_us = now_us + follower.delay_us
                line.num_roots += 1
        elif follower.unended == 0:
            row = requests[child]
            row.arrival_us = max(row.arrival_us, now_us + follower.delay_us)
            push(coming, line.coming_size, requests.arrival_us, child)
            line.coming_size += 1


@jit_stateful_inline
def end_request(fleet: Fleet, request: int, now_us: float) -> None:
    """Let whoever waits for a request's end go on."""
    line = fleet.line[0]
    line.ended += 1
    if fleet.has.clients > 0 and line.clients > 0:
        release_clients(fleet, 1, now_us + line.think_us)
    if fleet.has.sessions > 0 and line.sessions > 0:
        requests, followers = fleet.requests[0], fleet.followers
        _end_parent(line, fleet.coming, requests, followers, fleet.children, request, now_us)


# -- transfers ---------------------------------------------------------------------------------------


@jit_stateful_inline
def begin_us(fleet: Fleet) -> float:
    """Return when the next transfer may begin, us, or inf."""
    return float(fleet.transfers[fleet.begins[0]].ready_us) if fleet.line[0].begin_size > 0 else math.inf


@jit_stateful_inline
def there_us(fleet: Fleet) -> float:
    """Return when the next transfer ends, us, or inf."""
    return float(fleet.transfers[fleet.ends[0]].there_us) if fleet.line[0].end_size > 0 else math.inf


@jit_stateful_inline
def next_transfer_us(fleet: Fleet) -> float:
    """Return when the next transfer begins or ends, us, or inf."""
    return min(begin_us(fleet), there_us(fleet))


@jit_stateful_inline
def push_begin(fleet: Fleet, request: int) -> None:
    """Add a prompt that is ready."""
    line = fleet.line[0]
    push(fleet.begins, line.begin_size, fleet.transfers.ready_us, request)
    line.begin_size += 1


@jit_stateful_inline
def pop_begin(fleet: Fleet) -> int:
    """Take the next prompt that is ready."""
    line = fleet.line[0]
    line.begin_size -= 1
    return int(pop(fleet.begins, line.begin_size, fleet.transfers.ready_us))


@jit_stateful_inline
def pop_there(fleet: Fleet) -> int:
    """Take the request whose transfer ends next."""
    line = fleet.line[0]
    line.end_size -= 1
    return int(pop(fleet.ends, line.end_size, fleet.transfers.there_us))


@jit_stateful_inline
def _push_there(fleet: Fleet, request: int, end_us: float) -> None:
    """Add a transfer that ends at a time."""
    line = fleet.line[0]
    fleet.transfers[request].there_us = in_trace_us(end_us)
    push(fleet.ends, line.end_size, fleet.transfers.there_us, request)
    line.end_size += 1


@jit_stateful_inline
def send(fleet: Fleet, request: int, at_us: float) -> None:
    """Begin a transfer at ``at_us``, or when the link of its replica is free."""
    engine = fleet.engines[fleet.requests[0, request].engine]
    replica = fleet.replicas[engine.replica]
    sent_us = max(at_us, replica.link_free_us) if fleet.line[0].is_shared > 0 else at_us
    end_us = sent_us + fleet.transfers[request].takes_us
    replica.link_free_us = end_us
    _push_there(fleet, request, end_us)


@jit_stateful
def send_layers(fleet: Fleet, first: int) -> None:
    """Send the prompts of a step layer by layer: one layer of each in turn, once it is computed.

    They are ``first`` and those after it that became ready in the same step of an engine.
    """
    line = fleet.line[0]
    of_first = fleet.transfers[first]
    index = int(fleet.requests[0, first].engine)
    replica = fleet.replicas[fleet.engines[index].replica]
    ready_us, step_us, layers = of_first.ready_us, of_first.step_us, line.layers
    fleet.ready[0] = first
    count = 1
    while line.begin_size > 0:
        request = fleet.begins[0]
        if fleet.transfers[request].ready_us != ready_us or fleet.requests[0, request].engine != index:
            break
        fleet.ready[count] = pop_begin(fleet)
        count += 1
    sent_us = replica.link_free_us
    for layer in range(layers):
        computed_us = ready_us - step_us * (layers - 1 - layer) / layers
        for at in range(count):
            one = fleet.transfers[fleet.ready[at]]
            if line.is_shared == 0:
                # each has a link of its own
                sent_us = one.there_us if layer > 0 else 0.0
            sent_us = max(sent_us, computed_us) + one.takes_us / layers
            one.there_us = sent_us
    replica.link_free_us = sent_us
    for at in range(count):
        request = fleet.ready[at]
        _push_there(fleet, request, fleet.transfers[request].there_us + line.latency_us)
