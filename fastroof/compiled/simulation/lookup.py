"""What a waiting request finds in the prefix cache and its tiers, and what it takes when it is admitted."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.simulation.prefix_cache import (
    find_blocks,
    hold_chain,
    publish_fetched,
    release_chain,
    settle,
)
from fastroof.compiled.simulation.records import NONE, TIMED_OUT, Parts, Row, Rows
from fastroof.compiled.simulation.tiers import (
    ask_tiers,
    await_fetch,
    end_wait,
    fetch,
    fetched_us,
    reserved_blocks,
)


class Found(NamedTuple):
    """What a waiting request need not compute.

    Tokens of context, cached blocks, those of them in use, and blocks of the cache and its tiers.
    """

    context: int
    blocks: int
    in_use: int
    reached: int


@jit_stateful_inline
def find_cached(on: Parts, rank: Row, pool: Row, requests: Rows, request: int, whole: int) -> Found:
    """Find what a waiting request need not compute."""
    context = 0 if request == rank.preempted else int(requests[request].cached_tokens)
    found, in_use, reached = 0, 0, 0
    if on.has.cache > 0 and pool.has_cache > 0 and context == 0:
        settle(on, rank, pool)
        found, in_use = find_blocks(on.cells, on.chains, on.segments, rank.cells_at, request)
        most = (whole - 1) // pool.block_size
        reached = found
        if on.has.tiers > 0 and pool.num_tiers > 0:
            reached = ask_tiers(on, rank, pool, request, found, most)
        context = min(reached, most) * pool.block_size
    return Found(context, found, in_use, reached)


@jit_stateful_inline
def find_fetched(on: Parts, rank: Row, pool: Row, request: int, whole: int) -> Found:
    """Return what a request has whose fetch has ended, with what others have computed of its chain since."""
    cached = find_blocks(on.cells, on.chains, on.segments, rank.cells_at, request)[0]
    reached = max(int(on.chains[request].reached), cached)
    most = (whole - 1) // pool.block_size
    return Found(min(reached, most) * pool.block_size, 0, 0, reached)


@jit_stateful_inline
def hold_cached(on: Parts, rank: Row, requests: Rows, request: int, found: Found) -> None:
    """Let an admitted request hold its cached blocks, and count what it found."""
    hold_chain(on, rank, request, found.blocks)
    chain = on.chains[request]
    if chain.found < 0:
        chain.found = found.context
        rank.looked_up_tokens += requests[request].input_tokens
        rank.found_tokens += found.context
    else:
        rank.found_again_tokens += found.context


@jit_stateful_inline
def start_fetch(
    on: Parts, rank: Row, pool: Row, requests: Rows, request: int, found: Found, held: int, now_us: float
) -> None:
    """Let the first waiting request, already off its queue, take its blocks and wait for a fetch."""
    rank.free -= held
    on.chains[request].reached = found.reached
    is_first = on.chains[request].found < 0
    hold_cached(on, rank, requests, request, found)
    publish_fetched(on, rank, pool, request, found.blocks, found.reached)
    settle(on, rank, pool)
    end_us, _ = fetch(on, rank, pool, request, is_first, now_us)
    await_fetch(on, rank, requests, request, found.blocks, end_us, now_us)


@jit_stateful_inline
def next_fetched(on: Parts, rank: Row, pool: Row, requests: Rows, now_us: float) -> int:
    """Return the first request whose wait is over, or NONE; those that gave up free their blocks."""
    while fetched_us(rank, on.chains) <= now_us:
        request = int(rank.first_fetching)
        if requests[request].status != TIMED_OUT:
            return request
        end_wait(rank, requests)
        rank.waiting -= 1
        held = reserved_blocks(pool, requests, request)
        release_chain(on, rank, pool, requests, request, held, int(on.chains[request].reached))
    return NONE


@jit_stateful_inline
def free_reserved(
    on: Parts, rank: Row, pool: Row, requests: Rows, request: int, found: Found, whole: int
) -> None:
    """End a request's wait and free the blocks that it reserved, of which it takes those of a chunk again."""
    chain = on.chains[request]
    settle(on, rank, pool)
    end_wait(rank, requests)
    shared = min(found.reached, int(chain.tail_start))
    rank.free += reserved_blocks(pool, requests, request) + shared - chain.shared
    chain.shared = shared
    more = found.context - min(int(chain.reached), (whole - 1) // pool.block_size) * pool.block_size
    if requests[request].preemptions == 0:
        chain.found += more
        rank.found_tokens += more
    else:
        rank.found_again_tokens += more
