"""How far back in a cache a trace's prompts find their blocks, for all sizes of it at once.

Served one after the other, a prompt finds a block in a cache of C blocks if fewer than C others have been
used since (Mattson et al., Evaluation techniques for storage hierarchies, 1970): so one pass tells the hits
of every size. A prompt uses its blocks from its last to its first, so that its head lives longest.
"""

from __future__ import annotations

from fastroof.arrays import Ints, Longs
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.simulation.block_pool import Prompts

__all__ = ["stack_distances"]


@jit_inline
def _add(tree: Ints, place: int, value: int) -> None:
    """Add at a place, from 1 on, of a Fenwick tree."""
    while place < len(tree):
        tree[place] += value
        place += place & -place


@jit_inline
def _count(tree: Ints, place: int) -> int:
    """Sum of the places from 1 to this one."""
    total = 0
    while place > 0:
        total += tree[place]
        place &= place - 1
    return total


@jit
def stack_distances(
    prompts: Prompts, input_tokens: Ints, block_size: int, used: Longs, tree: Ints, hits: Longs
) -> None:
    """Count, in ``hits[d]``, blocks that are found where d others have been used since."""
    now, keys_used, per_id = 0, 0, prompts.blocks_per_id
    for request in range(len(input_tokens)):
        first = prompts.offsets[request]
        findable = (input_tokens[request] - 1) // block_size
        for place in range(findable):
            key = prompts.ids[first + place // per_id] * per_id + place % per_id
            if used[key] == 0:
                # nor are those behind it
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
