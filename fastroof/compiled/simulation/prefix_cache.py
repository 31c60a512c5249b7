"""A prefix cache: blocks of prompts that were computed stay findable until their room is needed.

Prompts form a tree. A *segment* is a run of blocks between two places where prompts part or end; a prompt is
a chain of segments from the root, and after it comes the request's own *tail*: the rest of its prompt, and
its output. Of a segment the first ``cached`` blocks are there. A request holds all segments of its chain
while it runs; segments that nobody holds are in a queue, the longest unused first.

* Blocks that hold nothing that can be found are used first. Then the queue's first segment loses its last
  block, and so on: the start of a prompt stays longest.
* A request gives its chain back from the tail to the root.
* Blocks are found once they are scheduled and known, and only whole ones. A prompt's last token is always
  computed; if its block is found, it is computed in place.
* With asynchronous scheduling the last token of a decode is not known yet.
* A request that is not admitted changes nothing.

These are the rules of vLLM V1 (vllm/v1/core/block_pool.py), with two differences: vLLM computes a last block
that is found again in another one, and reuses blocks without a key in the order in which they were freed.

An engine counts free blocks with those in the queue, and takes blocks without saying which. So the queue is
settled late: blocks that it holds beyond the free ones are gone. Decode steps cost nothing more. Blocks
that are gone may be in a tier (``tiers``).
"""

from __future__ import annotations

from fastroof.arrays import Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.state import (
    CACHED,
    EVICTIONS,
    FREE,
    HOLDERS,
    NEWER,
    OLDER,
    PARENT,
    QUEUED,
    ROOT,
    SHARED,
    START,
    STOP,
    TAIL_PARENT,
    TAIL_START,
    EngineOptions,
    EngineState,
    Requests,
)
from fastroof.compiled.simulation.tiers import give_up, link_newest, store_evicted, store_freed, trim, unlink


@jit_stateful_inline
def _queue(scalars: Longs, cells: Ints, segment: int) -> None:
    """Append a segment to the queue, if it has blocks."""
    if cells[segment, CACHED] == 0:
        return
    link_newest(cells, 0, segment)
    scalars[QUEUED] += cells[segment, CACHED]


@jit_stateful_inline
def _unqueue(scalars: Longs, cells: Ints, segment: int) -> int:
    """Take a segment out of the queue. Returns how many blocks it has there."""
    blocks = cells[segment, CACHED]
    if blocks > 0:
        unlink(cells, 0, segment)
        scalars[QUEUED] -= blocks
    return int(blocks)


@jit_stateful
def _evict(scalars: Longs, cells: Ints, options: EngineOptions, blocks: int) -> None:
    end = cells.shape[0] - 1
    scalars[EVICTIONS] += blocks
    scalars[QUEUED] -= blocks
    while blocks > 0:
        segment = cells[end, NEWER]
        gone = min(cells[segment, CACHED], blocks)
        cells[segment, CACHED] -= gone
        blocks -= gone
        if options.num_tiers > 0:
            kept = cells[segment, CACHED]
            store_evicted(scalars, cells, options, segment, kept, kept + gone)
        if cells[segment, CACHED] == 0:
            newer = cells[segment, NEWER]
            cells[end, NEWER] = newer
            cells[newer, OLDER] = end
    if options.num_tiers > 0:
        trim(scalars, cells, options)


@jit_stateful_inline
def settle(scalars: Longs, cells: Ints, options: EngineOptions) -> None:
    """Forget the blocks of the queue that were taken since."""
    beyond = scalars[QUEUED] - scalars[FREE]
    if beyond > 0:
        _evict(scalars, cells, options, beyond)


@jit_stateful
def find_blocks(cells: Ints, requests: Requests, request: int) -> tuple[int, int]:
    """Count the leading blocks of a request that are cached, and those of them that others hold."""
    segments = requests.segments
    tail = segments.shape[0] + request
    segment = requests.rows[request, TAIL_PARENT]
    found = 0
    if cells[tail, CACHED] > 0:
        found = requests.rows[request, TAIL_START] + cells[tail, CACHED]
    else:
        while segment != ROOT and cells[segment, CACHED] == 0:
            segment = segments[segment, PARENT]
        if segment != ROOT:
            found = segments[segment, START] + cells[segment, CACHED]
    while segment != ROOT and cells[segment, HOLDERS] == 0:
        segment = segments[segment, PARENT]
    in_use = 0
    if segment != ROOT:
        in_use = segments[segment, START] + cells[segment, CACHED]
    return int(found), int(in_use)


@jit_stateful
def hold_chain(state: EngineState, requests: Requests, request: int, found: int) -> None:
    """Let a request, which took all of its blocks, hold its chain, of which ``found`` are cached."""
    scalars, cells, segments = state.scalars, state.cells, requests.segments
    tail = segments.shape[0] + request
    _unqueue(scalars, cells, tail)
    # they are the request's alone now, as those that it takes
    cells[tail, CACHED] = 0
    shared = min(found, requests.rows[request, TAIL_START])
    requests.rows[request, SHARED] = shared
    segment = requests.rows[request, TAIL_PARENT]
    while segment != ROOT:
        cells[segment, HOLDERS] += 1
        if cells[segment, HOLDERS] > 1:
            break
        shared -= _unqueue(scalars, cells, segment)
        segment = segments[segment, PARENT]
    # those that others hold are not taken, and those that nobody held are free no more
    scalars[FREE] += shared


@jit_stateful
def publish_blocks(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, first: int, stop: int
) -> None:
    """Let blocks of a request's chain be found, from ``first`` to ``stop``."""
    cells, segments = state.cells, requests.segments
    stop = min(stop, requests.rows[request, TAIL_START])
    if stop <= first:
        return
    segment = requests.rows[request, TAIL_PARENT]
    while segment != ROOT and segments[segment, STOP] > first:
        filled = min(stop, segments[segment, STOP]) - segments[segment, START]
        more = filled - cells[segment, CACHED]
        if more > 0:
            cells[segment, CACHED] = filled
            requests.rows[request, SHARED] += more
            if options.num_tiers > 0:
                give_up(state.scalars, cells, options, segment, filled)
        segment = segments[segment, PARENT]


@jit_stateful
def publish_fetched(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, found: int, reached: int
) -> None:
    """Let blocks of a request that are fetched, from ``found`` to ``reached``, be found in the GPU."""
    publish_blocks(state, options, requests, request, found, reached)
    tail_blocks = reached - requests.rows[request, TAIL_START]
    if tail_blocks > 0:
        tail = requests.segments.shape[0] + request
        give_up(state.scalars, state.cells, options, tail, tail_blocks)


@jit_stateful
def release_chain(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, held: int, known: int
) -> None:
    """Free the ``held`` blocks of a request, of which ``known`` can be found."""
    scalars, cells, segments = state.scalars, state.cells, requests.segments
    settle(scalars, cells, options)
    tail_start = requests.rows[request, TAIL_START]
    prompt = requests.input_tokens[request] // options.block_size
    publish_blocks(state, options, requests, request, 0, known)
    free = held - requests.rows[request, SHARED]
    tail = segments.shape[0] + request
    cells[tail, CACHED] = max(known - tail_start, 0)
    _queue(scalars, cells, tail)
    if options.num_tiers > 0:
        store_freed(scalars, cells, options, tail, tail_start, prompt)
    segment = requests.rows[request, TAIL_PARENT]
    while segment != ROOT:
        cells[segment, HOLDERS] -= 1
        if cells[segment, HOLDERS] > 0:
            break
        free += cells[segment, CACHED]
        _queue(scalars, cells, segment)
        if options.num_tiers > 0:
            store_freed(scalars, cells, options, segment, segments[segment, START], prompt)
        segment = segments[segment, PARENT]
    if options.num_tiers > 0:
        trim(scalars, cells, options)
    scalars[FREE] += free
