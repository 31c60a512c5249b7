"""KV caches on their way from prefill engines to decode engines: queues by time, and links."""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Flags, Floats, Ints, Longs
from fastroof.compiled.jit import jit, jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.sessions import pop_heap, push_heap
from fastroof.compiled.simulation.state import Record, add_gaps

_US_PER_S = 1e6


class LinkOptions(NamedTuple):
    """How prompts are sent and clients answered; flags are 0 or 1.

    ``layers`` is the number of layers that are sent one by one, 0 if all are sent together.
    """

    latency_us: float
    is_shared: int
    layers: int
    reserves: int
    clients: int
    has_parents: int
    think_us: float
    timeout_us: float


class Line(NamedTuple):
    """Requests between the pools, an element each, and engines of the decode pool.

    ``home`` is the rank of the prefill pool that computed a prompt, NONE once its blocks are free, ``engine``
    the decode engine that it goes to, ``next_wanting`` the next one that wants to be sent there. ``heaps``
    are requests whose transfers begin, and end, next. ``wanting`` are first and last requests that want to be
    sent to an engine, and the number on the way to it.
    """

    takes_us: Floats
    goes_on: Flags
    ready_us: Floats
    step_us: Floats
    there_us: Floats
    home: Longs
    engine: Longs
    next_wanting: Longs
    heaps: Longs
    wanting: Longs
    free_us: Floats
    scalars: Longs


# rows of wanting
FIRST_WANTING, LAST_WANTING, ON_THE_WAY = range(3)

# scalars: sizes of both heaps; requests that decode engines were sent, that ended, that clients sent
BEGINNING, ENDING, HANDED, ENDED, RELEASED = range(5)
NUM_LINE_SCALARS = 5


@jit_stateful
def push_transfer(line: Line, which: int, times_us: Floats, request: int) -> None:
    """Add a request to a heap."""
    push_heap(line.heaps[which], line.scalars[which], times_us, request)
    line.scalars[which] += 1


@jit_stateful
def pop_transfer(line: Line, which: int, times_us: Floats) -> int:
    """Take the first request out of a heap."""
    line.scalars[which] -= 1
    return int(pop_heap(line.heaps[which], line.scalars[which], times_us))


@jit_stateful_inline
def next_transfer_us(line: Line, which: int, times_us: Floats) -> float:
    """Return the time of the first request in a heap, us, or inf."""
    return float(times_us[line.heaps[which, 0]]) if line.scalars[which] > 0 else math.inf


@jit_stateful
def send(line: Line, link: LinkOptions, replica: int, request: int, at_us: float) -> None:
    """Begin a transfer at ``at_us``, or when the link is free."""
    begin_us = max(at_us, line.free_us[replica]) if link.is_shared > 0 else at_us
    end_us = begin_us + line.takes_us[request]
    line.free_us[replica] = end_us
    # as a trace in seconds has it
    line.there_us[request] = end_us / _US_PER_S * _US_PER_S
    push_transfer(line, ENDING, line.there_us, request)


@jit_stateful
def send_layers(line: Line, link: LinkOptions, replica: int, ranks: int, first: int) -> None:
    """Send the prompts of a step layer by layer: one layer of each in turn, once it is computed.

    They are ``first`` and those after it that became ready in the same step, of an engine's ``ranks``.
    """
    ready_us = line.ready_us[first]
    # the end of the other heap, which grows by these prompts, holds them meanwhile
    sent = line.heaps[ENDING]
    waiting = line.scalars[ENDING]
    sent[waiting] = first
    count = 1
    while line.scalars[BEGINNING] > 0:
        request = line.heaps[BEGINNING, 0]
        if line.ready_us[request] != ready_us or line.home[request] // ranks != line.home[first] // ranks:
            break
        sent[waiting + count] = pop_transfer(line, BEGINNING, line.ready_us)
        count += 1
    layers, step_us = link.layers, line.step_us[first]
    if link.is_shared > 0:
        sent_us = line.free_us[replica]
        for layer in range(layers):
            computed_us = ready_us - step_us * (layers - 1 - layer) / layers
            for at in range(waiting, waiting + count):
                request = sent[at]
                sent_us = max(sent_us, computed_us) + line.takes_us[request] / layers
                line.there_us[request] = sent_us
        line.free_us[replica] = sent_us
    else:
        for at in range(waiting, waiting + count):
            request = sent[at]
            sent_us = 0.0
            for layer in range(layers):
                computed_us = ready_us - step_us * (layers - 1 - layer) / layers
                sent_us = max(sent_us, computed_us) + line.takes_us[request] / layers
            line.there_us[request] = sent_us
    for at in range(waiting, waiting + count):
        request = sent[at]
        line.there_us[request] = (line.there_us[request] + link.latency_us) / _US_PER_S * _US_PER_S
        push_transfer(line, ENDING, line.there_us, request)


@jit
def link_ends(
    ready_us: Floats, takes_us: Floats, link: Ints, order: Longs, free_us: Floats, out: Floats
) -> None:
    """Find when each transfer ends, us: a link sends one at a time, in ``order``."""
    for i in range(len(order)):
        transfer = order[i]
        at = link[transfer]
        begin_us = max(ready_us[transfer], free_us[at])
        free_us[at] = begin_us + takes_us[transfer]
        out[transfer] = free_us[at]


@jit
def count_gaps(gaps_us: Floats, record: Record) -> None:
    """Count gaps between tokens of several lengths."""
    for i in range(len(gaps_us)):
        add_gaps(record, gaps_us[i], 1)
