"""What a waiting request finds in the prefix cache and its tiers, and what it takes when it is admitted."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.simulation.prefix_cache import (
    find_blocks,
    hold_chain,
    publish_blocks,
    publish_fetched,
    release_chain,
    settle,
)
from fastroof.compiled.simulation.state import (
    FIRST_FETCHING,
    FOUND,
    FOUND_AGAIN_TOKENS,
    FOUND_TOKENS,
    FREE,
    LOOKED_UP_TOKENS,
    NONE,
    NOW,
    PREEMPTED,
    REACHED,
    SHARED,
    TAIL_START,
    TIMED_OUT,
    WAITING,
    EngineOptions,
    EngineState,
    Requests,
    Served,
)
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
def find_cached(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, whole: int
) -> Found:
    """Find what a waiting request need not compute."""
    context = 0 if request == state.scalars[PREEMPTED] else int(requests.cached_tokens[request])
    if options.has_cache == 0 or context > 0:
        return Found(context, 0, 0, 0)
    settle(state.scalars, state.cells, options)
    found, in_use = find_blocks(state.cells, requests, request)
    most = (whole - 1) // options.block_size
    reached = found
    if options.num_tiers > 0:
        reached = ask_tiers(state, options, requests, request, found, most)
    return Found(min(reached, most) * options.block_size, found, in_use, reached)


@jit_stateful_inline
def find_fetched(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, whole: int
) -> Found:
    """Return what a request has whose fetch has ended, with what others have computed of its chain since."""
    reached = max(requests.rows[request, REACHED], find_blocks(state.cells, requests, request)[0])
    most = (whole - 1) // options.block_size
    return Found(min(reached, most) * options.block_size, 0, 0, reached)


@jit_stateful_inline
def hold_cached(state: EngineState, requests: Requests, request: int, found: Found) -> None:
    """Let an admitted request hold its cached blocks, and count what it found."""
    scalars = state.scalars
    hold_chain(state, requests, request, found.blocks)
    if requests.rows[request, FOUND] < 0:
        requests.rows[request, FOUND] = found.context
        scalars[LOOKED_UP_TOKENS] += requests.input_tokens[request]
        scalars[FOUND_TOKENS] += found.context
    else:
        scalars[FOUND_AGAIN_TOKENS] += found.context


@jit_stateful_inline
def start_fetch(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    request: int,
    found: Found,
    held: int,
) -> None:
    """Let the first waiting request, already off its queue, take its blocks and wait for a fetch."""
    state.scalars[FREE] -= held
    requests.rows[request, REACHED] = found.reached
    is_first = requests.rows[request, FOUND] < 0
    hold_cached(state, requests, request, found)
    publish_fetched(state, options, requests, request, found.blocks, found.reached)
    settle(state.scalars, state.cells, options)
    end_us, _ = fetch(state, options, requests, request, is_first)
    await_fetch(state, options, requests, served, request, found.blocks, end_us)


@jit_stateful_inline
def next_fetched(state: EngineState, options: EngineOptions, requests: Requests, served: Served) -> int:
    """Return the first request whose wait is over, or NONE; those that gave up free their blocks."""
    while fetched_us(state, served) <= state.clock[NOW]:
        request = state.scalars[FIRST_FETCHING]
        if served.status[request] != TIMED_OUT:
            return int(request)
        end_wait(state, served)
        state.scalars[WAITING] -= 1
        held = reserved_blocks(options, requests, served, request)
        release_chain(state, options, requests, request, held, requests.rows[request, REACHED])
    return NONE


@jit_stateful_inline
def free_reserved(
    state: EngineState,
    options: EngineOptions,
    requests: Requests,
    served: Served,
    request: int,
    found: Found,
    whole: int,
) -> None:
    """End a request's wait and free the blocks that it reserved, of which it takes those of a chunk again."""
    scalars, rows = state.scalars, requests.rows
    settle(scalars, state.cells, options)
    end_wait(state, served)
    shared = min(found.reached, rows[request, TAIL_START])
    scalars[FREE] += reserved_blocks(options, requests, served, request) + shared - rows[request, SHARED]
    rows[request, SHARED] = shared
    more = found.context - min(rows[request, REACHED], (whole - 1) // options.block_size) * options.block_size
    if served.preemptions[request] == 0:
        rows[request, FOUND] += more
        scalars[FOUND_TOKENS] += more
    else:
        scalars[FOUND_AGAIN_TOKENS] += more


@jit_stateful_inline
def publish_chunk(
    state: EngineState, options: EngineOptions, requests: Requests, request: int, context: int, tokens: int
) -> None:
    """Let the blocks of a chunk be found, if there is a cache."""
    if options.has_cache > 0:
        first, stop = context // options.block_size, tokens // options.block_size
        publish_blocks(state, options, requests, request, first, stop)
