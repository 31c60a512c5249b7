"""Requests that start after others: who waits for whom, and who comes next.

A request with parents starts ``delay_us`` after the last of them ended, and not before its own arrival. Until
their arrival is reached such requests are in a heap; requests without parents come in the order of the trace.
Of equal arrivals the first request comes first.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats, Ints, Longs
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
def _is_before(times_us: Floats, one: int, other: int) -> bool:
    """Whether a request comes before another."""
    return bool(times_us[one] < times_us[other] or (times_us[one] == times_us[other] and one < other))


@jit_stateful
def push_heap(heap: Ints | Longs, size: int, times_us: Floats, request: int) -> None:
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
def pop_heap(heap: Ints | Longs, size: int, times_us: Floats) -> int:
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


@jit_stateful
def push_coming(requests: Requests, request: int) -> None:
    """Add a request, whose arrival is known, to those to come."""
    rows = requests.rows
    last = rows.shape[0] - 1
    push_heap(rows[:, COMING], rows[last, IN_HEAP], requests.arrival_us, request)
    rows[last, IN_HEAP] += 1


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
        if rows[last, IN_HEAP] == 0 or _is_before(requests.arrival_us, root, rows[0, COMING]):
            rows[last, NEXT_ROOT] += 1
            return int(root)
    rows[last, IN_HEAP] -= 1
    return int(pop_heap(rows[:, COMING], rows[last, IN_HEAP], requests.arrival_us))


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
