"""Replicas of an engine over a pool of blocks each, and a router that may ask what their pools hold.

As ``replicas``: the router looks at all as they are when a request arrives, and what ends or begins at that
very time has not happened yet. What a replica holds of a prompt is what it would find now, though the request
may wait there until some of it is gone.
"""

from __future__ import annotations

import math

from fastroof.arrays import Floats, Ints, Longs
from fastroof.compiled.jit import jit_stateful, jit_stateful_inline
from fastroof.compiled.simulation.block_pool import (
    GIVEN_UP_TOKENS,
    LOOKED_UP_TOKENS,
    BlockPool,
    Prompts,
    held_tokens,
    pool_of,
)
from fastroof.compiled.simulation.pooled_engine import advance_pooled, restart_pooled
from fastroof.compiled.simulation.ranks import WAITING_WEIGHT
from fastroof.compiled.simulation.replicas import (
    LEAST_KV,
    LEAST_LOAD,
    POWER_OF_TWO,
    ROUND_ROBIN,
    Router,
)
from fastroof.compiled.simulation.state import (
    CODE_STOPPED,
    END,
    FREE,
    IN_FLIGHT,
    NUM_BLOCKS,
    NUM_FINISHED,
    NUM_TIMED_OUT,
    RUNNING,
    EngineOptions,
    EngineState,
    Record,
    Requests,
    Served,
    blocks_of,
    engine_of,
    push_request,
)

PREFIX_AWARE = POWER_OF_TWO + 1
"""A rule more: see :func:`fastroof.simulation.replicas.run_pooled_replicas`."""


@jit_stateful_inline
def _outstanding(states: EngineState, router: Router, replica: int) -> int:
    """Requests that wait at a replica or run."""
    scalars = states.scalars[replica]
    return int(router.pushed[replica] - scalars[NUM_FINISHED] - scalars[NUM_TIMED_OUT])


@jit_stateful_inline
def _blocks_to_come(
    states: EngineState,
    pools: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    pushed_tokens: Longs,
    replica: int,
    request: int,
) -> int:
    """Blocks in use at a replica, those of prompts that wait there, and what it would compute of one more."""
    scalars, tokens = states.scalars[replica], requests.input_tokens[request]
    held = held_tokens(pools, prompts, replica, request, tokens, options.block_size)
    counts = pools.counts[replica]
    waiting = pushed_tokens[replica] - counts[LOOKED_UP_TOKENS] - counts[GIVEN_UP_TOKENS]
    return int(scalars[NUM_BLOCKS] - scalars[FREE] + blocks_of(waiting + tokens - held, options))


@jit_stateful
def _choose(
    states: EngineState,
    pools: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    router: Router,
    pushed_tokens: Longs,
    request: int,
) -> int:
    """Say which replica gets a request; of equals the first."""
    replicas = len(router.pushed)
    if router.rule == ROUND_ROBIN:
        return request % replicas
    if router.rule == POWER_OF_TWO:
        first, second = router.drawn[0, request], router.drawn[1, request]
        is_less = _outstanding(states, router, second) < _outstanding(states, router, first)
        return int(second) if is_less else int(first)
    least, least_load, least_waiting, least_running = 0, 0, 0, 0
    for replica in range(replicas):
        running = int(states.scalars[replica, RUNNING])
        waiting = _outstanding(states, router, replica) - running
        load = waiting + running
        if router.rule == LEAST_LOAD:
            load = WAITING_WEIGHT * waiting + running
        elif router.rule == LEAST_KV:
            load = int(states.scalars[replica, NUM_BLOCKS] - states.scalars[replica, FREE])
        elif router.rule == PREFIX_AWARE:
            load = _blocks_to_come(states, pools, prompts, options, requests, pushed_tokens, replica, request)
        is_less = load < least_load
        if router.rule == PREFIX_AWARE and load == least_load:
            # so that prompts without a place of their own are spread
            is_less = router.pushed[replica] < router.pushed[least]
        elif router.rule == LEAST_KV and load == least_load:
            is_less = waiting < least_waiting or (waiting == least_waiting and running < least_running)
        if replica == 0 or is_less:
            least, least_load, least_waiting, least_running = replica, load, waiting, running
    return least


@jit_stateful
def pooled_replicas_run(
    arena: Floats,
    options: EngineOptions,
    states: EngineState,
    pools: BlockPool,
    prompts: Prompts,
    requests: Requests,
    served: Served,
    record: Record,
    router: Router,
    pushed_tokens: Longs,
    replica_of: Ints,
) -> int:
    """Serve a trace by replicas of an engine over a pool each. Returns a code."""
    replicas = len(router.pushed)
    router.pushed[:] = 0
    pushed_tokens[:] = 0
    for replica in range(replicas):
        restart_pooled(engine_of(states, replica), pool_of(pools, replica))
    count = len(requests.arrival_us)
    # once more after the last request, until all have ended
    for request in range(count + 1):
        if options.stop[0] != 0:
            return CODE_STOPPED
        until_us = requests.arrival_us[request] if request < count else math.inf
        for replica in range(replicas):
            if states.scalars[replica, IN_FLIGHT] > 0 and states.clock[replica, END] >= until_us:
                continue
            state, pool = engine_of(states, replica), pool_of(pools, replica)
            code = advance_pooled(arena, options, state, pool, prompts, requests, served, record, until_us)
            if code != 0:
                return int(code)
        if request < count:
            chosen = _choose(states, pools, prompts, options, requests, router, pushed_tokens, request)
            push_request(engine_of(states, chosen), requests, request)
            router.pushed[chosen] += 1
            pushed_tokens[chosen] += requests.input_tokens[request]
            replica_of[request] = chosen
    return 0
