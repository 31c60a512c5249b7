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

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.records import CACHED, HOLDERS, NEWER, OLDER, ROOT, Parts, Row, Rows
from fastroof.compiled.simulation.tiers import (
    end_of_queue,
    give_up,
    link_newest,
    store_evicted,
    store_freed,
    trim,
    unlink,
)


@jit_stateful_inline
def _queue(cells: Ints, rank: Row, end: int, cell: int) -> None:
    """Append a segment to the queue, if it has blocks."""
    if cells[cell, CACHED] == 0:
        return
    link_newest(cells, end, 0, cell)
    rank.queued += cells[cell, CACHED]


@jit_stateful_inline
def _unqueue(cells: Ints, rank: Row, cell: int) -> int:
    """Take a segment out of the queue. Returns how many blocks it has there."""
    blocks = cells[cell, CACHED]
    if blocks > 0:
        unlink(cells, 0, cell)
        rank.queued -= blocks
    return int(blocks)


@jit_stateful
def _evict(on: Parts, rank: Row, pool: Row, blocks: int) -> None:
    """Forget so many blocks of the queue, the longest unused first."""
    cells = on.cells
    end = end_of_queue(on, rank)
    rank.evictions += blocks
    rank.queued -= blocks
    while blocks > 0:
        cell = int(cells[end, NEWER])
        gone = min(int(cells[cell, CACHED]), blocks)
        cells[cell, CACHED] -= gone
        blocks -= gone
        if on.has.tiers > 0 and pool.num_tiers > 0:
            kept = cells[cell, CACHED]
            store_evicted(on, rank, pool, cell, kept, kept + gone)
        if cells[cell, CACHED] == 0:
            newer = cells[cell, NEWER]
            cells[end, NEWER] = newer
            cells[newer, OLDER] = end
    if on.has.tiers > 0 and pool.num_tiers > 0:
        trim(on, rank, pool)


@jit_stateful_inline
def settle(on: Parts, rank: Row, pool: Row) -> None:
    """Forget the blocks of the queue that were taken since."""
    beyond = rank.queued - rank.free
    if beyond > 0:
        _evict(on, rank, pool, beyond)


@jit_stateful
def find_blocks(cells: Ints, chains: Rows, segments: Rows, cells_at: int, request: int) -> tuple[int, int]:
    """Count the leading blocks of a request that are cached, and those of them that others hold."""
    tail = cells_at + len(segments) + request
    segment = int(chains[request].tail_parent)
    found = 0
    if cells[tail, CACHED] > 0:
        found = int(chains[request].tail_start + cells[tail, CACHED])
    else:
        while segment != ROOT and cells[cells_at + segment, CACHED] == 0:
            segment = int(segments[segment].parent)
        if segment != ROOT:
            found = int(segments[segment].start + cells[cells_at + segment, CACHED])
    while segment != ROOT and cells[cells_at + segment, HOLDERS] == 0:
        segment = int(segments[segment].parent)
    in_use = 0
    if segment != ROOT:
        in_use = int(segments[segment].start + cells[cells_at + segment, CACHED])
    return found, in_use


@jit_stateful
def hold_chain(on: Parts, rank: Row, request: int, found: int) -> None:
    """Let a request, which took all of its blocks, hold its chain, of which ``found`` are cached."""
    cells, segments, chain, first = on.cells, on.segments, on.chains[request], rank.cells_at
    tail = first + len(segments) + request
    _unqueue(cells, rank, tail)
    # they are the request's alone now, as those that it takes
    cells[tail, CACHED] = 0
    shared = min(found, int(chain.tail_start))
    chain.shared = shared
    segment = int(chain.tail_parent)
    while segment != ROOT:
        cells[first + segment, HOLDERS] += 1
        if cells[first + segment, HOLDERS] > 1:
            break
        shared -= _unqueue(cells, rank, first + segment)
        segment = int(segments[segment].parent)
    # those that others hold are not taken, and those that nobody held are free no more
    rank.free += shared


@jit_stateful
def publish_blocks(on: Parts, rank: Row, pool: Row, request: int, first: int, stop: int) -> None:
    """Let blocks of a request's chain be found, from ``first`` to ``stop``."""
    cells, segments, chain = on.cells, on.segments, on.chains[request]
    stop = min(stop, int(chain.tail_start))
    if stop <= first:
        return
    segment = int(chain.tail_parent)
    while segment != ROOT and segments[segment].stop > first:
        cell = rank.cells_at + segment
        filled = min(stop, int(segments[segment].stop)) - int(segments[segment].start)
        more = filled - int(cells[cell, CACHED])
        if more > 0:
            cells[cell, CACHED] = filled
            chain.shared += more
            if on.has.tiers > 0 and pool.num_tiers > 0:
                give_up(on, rank, pool, cell, filled)
        segment = int(segments[segment].parent)


@jit_stateful_inline
def publish_chunk(on: Parts, rank: Row, pool: Row, request: int, context: int, tokens: int) -> None:
    """Let the blocks of a chunk be found, if there is a cache."""
    if on.has.cache > 0 and pool.has_cache > 0:
        publish_blocks(on, rank, pool, request, context // pool.block_size, tokens // pool.block_size)


@jit_stateful
def publish_fetched(on: Parts, rank: Row, pool: Row, request: int, found: int, reached: int) -> None:
    """Let blocks of a request that are fetched, from ``found`` to ``reached``, be found in the GPU."""
    publish_blocks(on, rank, pool, request, found, reached)
    tail_blocks = reached - int(on.chains[request].tail_start)
    if tail_blocks > 0:
        give_up(on, rank, pool, rank.cells_at + len(on.segments) + request, tail_blocks)


@jit_stateful
def release_chain(
    on: Parts, rank: Row, pool: Row, requests: Rows, request: int, held: int, known: int
) -> None:
    """Free the ``held`` blocks of a request, of which ``known`` can be found."""
    settle(on, rank, pool)
    cells, segments, chain, first = on.cells, on.segments, on.chains[request], rank.cells_at
    end = end_of_queue(on, rank)
    tail_start = int(chain.tail_start)
    prompt = int(requests[request].input_tokens) // pool.block_size
    publish_blocks(on, rank, pool, request, 0, known)
    free = held - int(chain.shared)
    tail = first + len(segments) + request
    cells[tail, CACHED] = max(known - tail_start, 0)
    _queue(cells, rank, end, tail)
    if on.has.tiers > 0 and pool.num_tiers > 0:
        store_freed(on, rank, pool, tail, tail_start, prompt)
    segment = int(chain.tail_parent)
    while segment != ROOT:
        cell = first + segment
        cells[cell, HOLDERS] -= 1
        if cells[cell, HOLDERS] > 0:
            break
        free += int(cells[cell, CACHED])
        _queue(cells, rank, end, cell)
        if on.has.tiers > 0 and pool.num_tiers > 0:
            store_freed(on, rank, pool, cell, int(segments[segment].start), prompt)
        segment = int(segments[segment].parent)
    if on.has.tiers > 0 and pool.num_tiers > 0:
        trim(on, rank, pool)
    rank.free += free


@jit_stateful
def empty_cache(on: Parts, rank: Row) -> None:
    """Forget all blocks of a rank without requests."""
    first, end = rank.cells_at, end_of_queue(on, rank)
    on.cells[first : end + 1, CACHED] = 0
    on.cells[end, NEWER] = end
    on.cells[end, OLDER] = end
    rank.queued = 0
