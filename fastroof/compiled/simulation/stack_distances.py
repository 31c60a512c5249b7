"""Hits of an ideal prefix cache of any size, from the distances between uses of equal blocks."""

from __future__ import annotations

from typing import NamedTuple

from fastroof.arrays import Ints, Longs
from fastroof.compiled.jit import jit, jit_inline


class BlockIds(NamedTuple):
    """Which prompts are equal: the ids of request r are ``ids[offsets[r]:]``, integers from 0."""

    ids: Ints
    offsets: Longs
    blocks_per_id: int


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
    prompts: BlockIds, input_tokens: Ints, block_size: int, used: Longs, tree: Ints, hits: Longs
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
