"""Requests that start after others: who waits for whom, and who comes next.

A request with parents starts ``delay_us`` after the last of them ended, and not before its own arrival. Until
their arrival is reached such requests are in a heap; requests without parents come in the order of the trace.
Of equal arrivals the first request comes first.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.state import (
    COMING,
    FOLLOWERS_AT,
    IN_HEAP,
    NEXT_ROOT,
    NUM_ROOTS,
    UNENDED,
    Requests,
)


@jit_stateful_inline
def _is_before(requests: Requests, one: int, other: int) -> bool:
    """Whether a request comes before another."""
    one_us, other_us = requests.arrival_us[one], requests.arrival_us[other]
    return bool(one_us < other_us or (one_us == other_us and one < other))


@jit_stateful
def push_coming(requests: Requests, request: int) -> None:
    """Add a request, whose arrival is known, to those to come."""
    rows = requests.rows
    last = rows.shape[0] - 1
    at = rows[last, IN_HEAP]
    rows[last, IN_HEAP] = at + 1
    while at > 0:
        above = (at - 1) >> 1
        if not _is_before(requests, request, rows[above, COMING]):
            break
        rows[at, COMING] = rows[above, COMING]
        at = above
    rows[at, COMING] = request


@jit_stateful
def _pop_heap(requests: Requests) -> int:
    """Take the first request out of the heap."""
    rows = requests.rows
    last = rows.shape[0] - 1
    first = rows[0, COMING]
    count = rows[last, IN_HEAP] - 1
    rows[last, IN_HEAP] = count
    moved = rows[count, COMING]
    at = 0
    while 2 * at + 1 < count:
        below = 2 * at + 1
        if below + 1 < count and _is_before(requests, rows[below + 1, COMING], rows[below, COMING]):
            below += 1
        if not _is_before(requests, rows[below, COMING], moved):
            break
        rows[at, COMING] = rows[below, COMING]
        at = below
    rows[at, COMING] = moved
    return int(first)


@jit_stateful_inline
def coming_us(requests: Requests) -> float:
    """Return the next arrival of a request to come, us, or inf."""
    rows = requests.rows
    last = rows.shape[0] - 1
    at_us = math.inf
    if rows[last, NEXT_ROOT] < rows[last, NUM_ROOTS]:
        at_us = requests.arrival_us[requests.followers[rows[last, NEXT_ROOT]]]
    if rows[last, IN_HEAP] > 0:
        at_us = min(at_us, requests.arrival_us[rows[0, COMING]])
    return float(at_us)


@jit_stateful
def pop_coming(requests: Requests) -> int:
    """Return the next request to come, which there must be, and count it as sent."""
    rows = requests.rows
    last = rows.shape[0] - 1
    if rows[last, NEXT_ROOT] < rows[last, NUM_ROOTS]:
        root = requests.followers[rows[last, NEXT_ROOT]]
        if rows[last, IN_HEAP] == 0 or _is_before(requests, root, rows[0, COMING]):
            rows[last, NEXT_ROOT] += 1
            return int(root)
    return int(_pop_heap(requests))


@jit_stateful
def end_parent(requests: Requests, request: int, now_us: float) -> None:
    """Let requests come whose last parent ended now."""
    rows = requests.rows
    for place in range(rows[request, FOLLOWERS_AT], rows[request + 1, FOLLOWERS_AT]):
        child = requests.followers[place]
        rows[child, UNENDED] -= 1
        if rows[child, UNENDED] == 0:
            at_us = now_us + requests.delay_us[child]
            requests.arrival_us[child] = max(requests.arrival_us[child], at_us)
            push_coming(requests, child)
