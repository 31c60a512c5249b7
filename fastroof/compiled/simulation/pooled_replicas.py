"""Replicas of an engine with a pool of KV blocks each, and a router that may look into their pools.

As :mod:`replicas`, plus the prefix-aware rule. What a replica holds of a prompt is what the prompt would find
now; part of it may be gone by the time the request is admitted.
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
from fastroof.compiled.simulation.replicas import POWER_OF_TWO, Fleet, Load, choose_replica, is_less
from fastroof.compiled.simulation.state import (
    CODE_STOPPED,
    END,
    FREE,
    IN_FLIGHT,
    NUM_BLOCKS,
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
"""Rule: send a request where the fewest blocks come together."""


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
    """Count blocks in use at a replica, those its waiting prompts need, and those that one more would add."""
    scalars, tokens = states.scalars[replica], requests.input_tokens[request]
    held = held_tokens(pools, prompts, replica, request, tokens, options.block_size)
    counts = pools.counts[replica]
    waiting = pushed_tokens[replica] - counts[LOOKED_UP_TOKENS] - counts[GIVEN_UP_TOKENS]
    return int(scalars[NUM_BLOCKS] - scalars[FREE] + blocks_of(waiting + tokens - held, options))


@jit_stateful
def _choose(
    fleet: Fleet,
    pools: BlockPool,
    prompts: Prompts,
    options: EngineOptions,
    requests: Requests,
    pushed_tokens: Longs,
    request: int,
) -> int:
    """Choose the replica that serves a request."""
    router = fleet.router
    if router.rule != PREFIX_AWARE:
        return int(choose_replica(fleet, request))
    chosen, least = 0, Load(0, 0, 0)
    for replica in range(len(router.pushed)):
        blocks = _blocks_to_come(
            fleet.states, pools, prompts, options, requests, pushed_tokens, replica, request
        )
        # of equals the one sent fewest requests, so that prompts nobody holds are spread
        own = Load(blocks, router.pushed[replica], 0)
        if replica == 0 or is_less(own, least):
            chosen, least = replica, own
    return chosen


@jit_stateful
def pooled_replicas_run(
    arena: Floats,
    options: EngineOptions,
    fleet: Fleet,
    pools: BlockPool,
    prompts: Prompts,
    requests: Requests,
    served: Served,
    record: Record,
    pushed_tokens: Longs,
    replica_of: Ints,
) -> int:
    """Serve a trace with replicas of an engine, each with a pool of blocks. Returns a code."""
    states, pushed = fleet.states, fleet.router.pushed
    pushed[:] = 0
    pushed_tokens[:] = 0
    for replica in range(len(pushed)):
        restart_pooled(engine_of(states, replica), pool_of(pools, replica))
    count = len(requests.arrival_us)
    # one round more after the last request, until all have ended
    for request in range(count + 1):
        if options.stop[0] != 0:
            return CODE_STOPPED
        until_us = requests.arrival_us[request] if request < count else math.inf
        for replica in range(len(pushed)):
            if states.scalars[replica, IN_FLIGHT] > 0 and states.clock[replica, END] >= until_us:
                continue
            state, pool = engine_of(states, replica), pool_of(pools, replica)
            code = advance_pooled(arena, options, state, pool, prompts, requests, served, record, until_us)
            if code != 0:
                return int(code)
        if request < count:
            chosen = _choose(fleet, pools, prompts, options, requests, pushed_tokens, request)
            push_request(engine_of(states, chosen), requests, request)
            pushed[chosen] += 1
            pushed_tokens[chosen] += requests.input_tokens[request]
            replica_of[request] = chosen
    return 0
