"""A pool of KV blocks: full blocks are shared, and free blocks keep their contents until they are reused.

A block has a number, a count of the requests that hold it and, once all of its tokens are known, the key of
its contents. Free blocks form a queue, the longest free at its head. New blocks are taken from the head; a
request that finds its tokens in free blocks takes those out of the queue wherever they are.

The rules are those of vLLM V1 (Apache-2.0; vllm/v1/core/block_pool.py@c59cb7941357,
kv_cache_manager.py@003df2961dd8, sched/scheduler.py@00024d314514, sched/async_scheduler.py@014b23503270;
its behaviour, not its code):

* a request frees its blocks from last to first, each to the tail of the queue, so that the start of a prompt
  is kept longest. (The first of these files, a proposal, puts blocks without a key at the head.)
* a block gets its key when its last token is scheduled and known, not when the step ends: a prompt admitted
  in the same step finds it. A token whose step is in flight is not known yet.
* only full blocks are found, and never a prompt's last token; found blocks that are free count as needed.
* a block that is computed again becomes a twin with the same key. The oldest twin is found.
* a request that is not admitted changes nothing.

Keys are integers. A key from 0 on is a prompt's block: equal keys are equal prompts up to the block's end. A
key of OWN or less is a block that only its request can find, made from its request and its position.
"""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Ints, Longs
from fastroof.compiled.jit import jit, jit_inline, jit_stateful, jit_stateful_inline

NO_KEY = -1
OWN = -2
PLACE_BITS = 28
"""Bits of an own key that hold a block's position; the longest sequence has as many tokens."""

# columns of ``links``: neighbours in the free queue, a ring closed by the extra block after the last;
# neighbours in the ring of blocks with the same key; number of holders
NEXT_FREE, PREVIOUS_FREE, NEXT_TWIN, PREVIOUS_TWIN, HOLDERS = range(5)
NUM_LINKS = 5

# counts of a pool. LOOKED_UP: prompt tokens when first admitted, of which FOUND; FOUND_AGAIN: after a
# preemption; GIVEN_UP: prompt tokens of requests that timed out before they were admitted
FREE_BLOCKS, EVICTIONS, LOOKED_UP_TOKENS, FOUND_TOKENS, FOUND_AGAIN_TOKENS, GIVEN_UP_TOKENS = range(6)
NUM_COUNTS = 8


class BlockPool(NamedTuple):
    """One engine's pool, or all replicas' along the first axis.

    ``counts[count]``; ``links[block, link]``; ``keys[block]``; ``oldest[key]``, the oldest block of a key
    plus 1, or 0; ``tables[slot, place]``, the block at a position of a slot's request.
    """

    counts: Longs
    links: Ints
    keys: Longs
    oldest: Ints
    tables: Ints


class Prompts(NamedTuple):
    """Which prompts are equal: the ids of request r are ``ids[offsets[r]:]``, integers from 0."""

    ids: Ints
    offsets: Longs
    blocks_per_id: int
    found_tokens: Ints


@jit_stateful_inline
def pool_of(pools: BlockPool, replica: int) -> BlockPool:
    """Return one replica's pool."""
    return BlockPool(
        pools.counts[replica],
        pools.links[replica],
        pools.keys[replica],
        pools.oldest[replica],
        pools.tables[replica],
    )


@jit_stateful
def restart_pool(pool: BlockPool) -> None:
    """Empty a pool whose ``oldest`` is 0 everywhere; its other arrays may hold anything."""
    links, end = pool.links, len(pool.keys)
    pool.counts[:] = 0
    pool.counts[FREE_BLOCKS] = end
    pool.keys[:] = NO_KEY
    links[:, HOLDERS] = 0
    for block in range(end + 1):
        links[block, NEXT_FREE] = block + 1 if block < end else 0
        links[block, PREVIOUS_FREE] = block - 1 if block > 0 else end


@jit_stateful_inline
def own_key(request: int, place: int) -> int:
    """Return the key of a block that only its own request can find."""
    return OWN - ((request << PLACE_BITS) | place)


@jit_stateful_inline
def _key_of(prompts: Prompts, request: int, prompt_blocks: int, place: int) -> int:
    """Return the key of a request's block; its prompt fills ``prompt_blocks`` blocks."""
    per_id = prompts.blocks_per_id
    if per_id > 0 and place < prompt_blocks:
        number = prompts.ids[prompts.offsets[request] + place // per_id]
        return int(number) * per_id + place % per_id
    return own_key(request, place)


@jit_stateful_inline
def _held_block(pool: BlockPool, slot: int, place: int, key: int) -> int:
    """Return the block with a key, or -1; a block with an own key can only be in the request's slot."""
    if key >= 0:
        return int(pool.oldest[key]) - 1
    if slot < 0:
        return -1
    block = int(pool.tables[slot, place])
    return block if pool.keys[block] == key else -1


@jit_stateful_inline
def _leading(
    pool: BlockPool,
    prompts: Prompts,
    request: int,
    slot: int,
    prompt_blocks: int,
    most: int,
    in_use: bool,
) -> int:
    """Count how many of a request's first ``most`` blocks are in the pool or, if ``in_use``, held."""
    low, high = 0, most
    while low < high:
        place = (low + high) >> 1
        block = _held_block(pool, slot, place, _key_of(prompts, request, prompt_blocks, place))
        if block >= 0 and (not in_use or pool.links[block, HOLDERS] > 0):
            low = place + 1
        else:
            high = place
    return low


@jit_stateful
def find_blocks(
    pool: BlockPool, prompts: Prompts, request: int, slot: int, prompt_blocks: int, most: int
) -> tuple[int, int]:
    """Count the leading blocks of a request that the pool holds, up to ``most``, and those others hold."""
    found = _leading(pool, prompts, request, slot, prompt_blocks, most, False)
    return found, _leading(pool, prompts, request, slot, prompt_blocks, found, True)


@jit_stateful
def held_tokens(
    pools: BlockPool, prompts: Prompts, replica: int, request: int, input_tokens: int, block_size: int
) -> int:
    """Count the leading tokens of a prompt that a replica's pool holds, for a router; changes nothing."""
    if prompts.blocks_per_id == 0:
        return 0
    pool = pool_of(pools, replica)
    most = (input_tokens - 1) // block_size
    return block_size * _leading(pool, prompts, request, -1, input_tokens // block_size, most, False)


@jit_stateful_inline
def _forget(pool: BlockPool, block: int) -> None:
    """Remove a block's key."""
    key, links = pool.keys[block], pool.links
    pool.keys[block] = NO_KEY
    if key < 0:
        return
    after = links[block, NEXT_TWIN]
    if after == block:
        pool.oldest[key] = 0
        return
    before = links[block, PREVIOUS_TWIN]
    links[before, NEXT_TWIN] = after
    links[after, PREVIOUS_TWIN] = before
    if pool.oldest[key] == block + 1:
        pool.oldest[key] = after + 1


@jit_stateful_inline
def _unlink_free(pool: BlockPool, block: int) -> None:
    links = pool.links
    before, after = links[block, PREVIOUS_FREE], links[block, NEXT_FREE]
    links[before, NEXT_FREE] = after
    links[after, PREVIOUS_FREE] = before


@jit_stateful
def take_blocks(pool: BlockPool, slot: int, first: int, stop: int) -> None:
    """Fill a slot's positions from ``first`` to ``stop`` with the longest-free blocks; there are enough."""
    if stop <= first:
        return
    links, end = pool.links, len(pool.keys)
    block = links[end, NEXT_FREE]
    evictions = 0
    for place in range(first, stop):
        links[block, HOLDERS] = 1
        if pool.keys[block] != NO_KEY:
            evictions += 1
            _forget(pool, block)
        pool.tables[slot, place] = block
        block = links[block, NEXT_FREE]
    links[end, NEXT_FREE] = block
    links[block, PREVIOUS_FREE] = end
    pool.counts[EVICTIONS] += evictions
    pool.counts[FREE_BLOCKS] -= stop - first


@jit_stateful
def take_found(
    pool: BlockPool, prompts: Prompts, request: int, slot: int, prompt_blocks: int, found: int
) -> None:
    """Let a slot hold the first ``found`` blocks of its request, which are in the pool."""
    links = pool.links
    for place in range(found):
        block = _held_block(pool, slot, place, _key_of(prompts, request, prompt_blocks, place))
        if links[block, HOLDERS] == 0:
            _unlink_free(pool, block)
            pool.counts[FREE_BLOCKS] -= 1
        links[block, HOLDERS] += 1
        pool.tables[slot, place] = block


@jit_stateful
def publish_blocks(
    pool: BlockPool, prompts: Prompts, request: int, slot: int, prompt_blocks: int, first: int, stop: int
) -> None:
    """Give full blocks of a prompt their keys, so that others find them; own keys are set when freed."""
    per_id = prompts.blocks_per_id
    if per_id == 0:
        return
    links = pool.links
    at, part = prompts.offsets[request] + first // per_id, first % per_id
    for place in range(first, min(stop, prompt_blocks)):
        # a division for each would take as long as all the rest
        if part == per_id:
            at, part = at + 1, 0
        key = prompts.ids[at] * per_id + part
        part += 1
        block = pool.tables[slot, place]
        pool.keys[block] = key
        oldest = pool.oldest[key] - 1
        if oldest < 0:
            pool.oldest[key] = block + 1
            links[block, NEXT_TWIN] = block
            links[block, PREVIOUS_TWIN] = block
        else:
            newest = links[oldest, PREVIOUS_TWIN]
            links[newest, NEXT_TWIN] = block
            links[block, PREVIOUS_TWIN] = newest
            links[block, NEXT_TWIN] = oldest
            links[oldest, PREVIOUS_TWIN] = block


@jit_stateful
def free_blocks(pool: BlockPool, request: int, slot: int, held: int, known: int) -> None:
    """Free a slot's ``held`` blocks, last first; all tokens of the first ``known`` blocks are known."""
    links, end = pool.links, len(pool.keys)
    newest = links[end, PREVIOUS_FREE]
    freed = 0
    for place in range(held - 1, -1, -1):
        block = pool.tables[slot, place]
        if place < known and pool.keys[block] == NO_KEY:
            pool.keys[block] = own_key(request, place)
        holders = links[block, HOLDERS] - 1
        links[block, HOLDERS] = holders
        if holders == 0:
            links[newest, NEXT_FREE] = block
            links[block, PREVIOUS_FREE] = newest
            newest = block
            freed += 1
    links[newest, NEXT_FREE] = end
    links[end, PREVIOUS_FREE] = newest
    pool.counts[FREE_BLOCKS] += freed


@jit_inline
def _add(tree: Ints, place: int, value: int) -> None:
    """Add to an element of a Fenwick tree; elements count from 1."""
    while place < len(tree):
        tree[place] += value
        place += place & -place


@jit_inline
def _count(tree: Ints, place: int) -> int:
    """Sum the elements 1 to ``place`` of a Fenwick tree."""
    total = 0
    while place > 0:
        total += tree[place]
        place &= place - 1
    return total


@jit
def stack_distances(
    prompts: Prompts, input_tokens: Ints, block_size: int, used: Longs, tree: Ints, hits: Longs
) -> None:
    """Count hits by stack distance: ``hits[d]`` blocks are found again after d others were used."""
    now, keys_used, per_id = 0, 0, prompts.blocks_per_id
    for request in range(len(input_tokens)):
        first = prompts.offsets[request]
        findable = (input_tokens[request] - 1) // block_size
        for place in range(findable):
            key = prompts.ids[first + place // per_id] * per_id + place % per_id
            if used[key] == 0:
                # the blocks after it are not found either
                break
            hits[keys_used - _count(tree, used[key])] += 1
        for place in range(input_tokens[request] // block_size - 1, -1, -1):
            key = prompts.ids[first + place // per_id] * per_id + place % per_id
            if used[key] > 0:
                _add(tree, used[key], -1)
            else:
                keys_used += 1
            now += 1
            used[key] = now
            _add(tree, now, 1)
