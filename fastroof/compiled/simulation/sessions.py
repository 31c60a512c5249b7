"""Requests that start after others: who waits for whom, and who comes next.

A request with parents starts ``delay_us`` after the last of them ended, and not before its own arrival. Until
their arrival is reached such requests are in a heap; requests without parents come in the order of the trace.
Of equal arrivals the first request comes first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline


class Sessions(NamedTuple):
    """Links between requests, and those to come. All arrays are empty where nothing uses them.

    ``roots`` have no parents; ``children[child_offsets[r]:]`` wait for request r; ``unended[r]`` parents of r
    have not ended; the first ``marks[IN_HEAP]`` elements of ``heap`` are requests to come.
    """

    roots: Ints
    children: Ints
    child_offsets: Longs
    unended: Ints
    delay_us: Floats
    heap: Ints
    marks: Longs


NEXT_ROOT, IN_HEAP = range(2)
NUM_MARKS = 2


@jit_stateful_inline
def _is_before(arrival_us: Floats, one: int, other: int) -> bool:
    """Whether a request comes before another."""
    one_us, other_us = arrival_us[one], arrival_us[other]
    return bool(one_us < other_us or (one_us == other_us and one < other))


@jit_stateful
def push_coming(sessions: Sessions, arrival_us: Floats, request: int) -> None:
    """Add a request, whose arrival is known, to those to come."""
    heap = sessions.heap
    at = sessions.marks[IN_HEAP]
    sessions.marks[IN_HEAP] = at + 1
    while at > 0:
        above = (at - 1) >> 1
        if not _is_before(arrival_us, request, heap[above]):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = request


@jit_stateful
def _pop_heap(sessions: Sessions, arrival_us: Floats) -> int:
    """Take the first request out of the heap."""
    heap = sessions.heap
    first = heap[0]
    count = sessions.marks[IN_HEAP] - 1
    sessions.marks[IN_HEAP] = count
    moved = heap[count]
    at = 0
    while 2 * at + 1 < count:
        below = 2 * at + 1
        if below + 1 < count and _is_before(arrival_us, heap[below + 1], heap[below]):
            below += 1
        if not _is_before(arrival_us, heap[below], moved):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = moved
    return int(first)


@jit_stateful_inline
def coming_us(sessions: Sessions, arrival_us: Floats) -> float:
    """Return the next arrival of a request to come, us, or inf."""
    at_us = math.inf
    if sessions.marks[NEXT_ROOT] < len(sessions.roots):
        at_us = arrival_us[sessions.roots[sessions.marks[NEXT_ROOT]]]
    if sessions.marks[IN_HEAP] > 0:
        at_us = min(at_us, arrival_us[sessions.heap[0]])
    return float(at_us)


@jit_stateful
def pop_coming(sessions: Sessions, arrival_us: Floats) -> int:
    """Return the next request to come, which there must be, and count it as sent."""
    marks, roots = sessions.marks, sessions.roots
    if marks[NEXT_ROOT] < len(roots):
        root = roots[marks[NEXT_ROOT]]
        if marks[IN_HEAP] == 0 or _is_before(arrival_us, root, sessions.heap[0]):
            marks[NEXT_ROOT] += 1
            return int(root)
    return int(_pop_heap(sessions, arrival_us))


@jit_stateful
def end_parent(sessions: Sessions, arrival_us: Floats, request: int, now_us: float) -> None:
    """Let requests come whose last parent ended now."""
    for place in range(sessions.child_offsets[request], sessions.child_offsets[request + 1]):
        child = sessions.children[place]
        sessions.unended[child] -= 1
        if sessions.unended[child] == 0:
            arrival_us[child] = max(arrival_us[child], now_us + sessions.delay_us[child])
            push_coming(sessions, arrival_us, child)
