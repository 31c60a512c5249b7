"""The tree of a trace's prompts, by which a prefix cache finds equal ones."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Ints, Longs
from fastroof.checks import one_of, shown
from fastroof.compiled.simulation.records import ROOT, SEGMENT
from fastroof.errors import SimulationError, TraceError
from fastroof.traces.trace import Trace

GIVEN, LRU = "given", "lru"
"""Prefix hits as the trace gives them, or of a simulated cache."""

PREFIX_CACHES: Final = ("auto", GIVEN, LRU)
"""Sources of prefix hits: given with the trace, or a simulated cache; auto is what the trace has."""


def source_of_hits(trace: Trace, prefix_cache: str, router: str = "") -> str:
    """Return where prefix hits come from: a simulated cache if the trace identifies equal prompts."""
    one_of("prefix_cache", prefix_cache, PREFIX_CACHES, SimulationError)
    if prefix_cache == "auto":
        prefix_cache = LRU if has_identities(trace) else GIVEN
    if prefix_cache == GIVEN and router == "prefix_aware":
        raise SimulationError('router="prefix_aware" needs a simulated prefix cache: give prefix_cache="lru"')
    return prefix_cache


class Tree(NamedTuple):
    """Segments with their parents and blocks, and where the chain of each prompt ends."""

    parent: Longs
    start: Longs
    stop: Longs
    tail_parent: Longs
    tail_start: Longs


def has_identities(trace: Trace) -> bool:
    """Whether a trace identifies equal prompts, and does not state what was cached."""
    if trace.hash_ids is not None:
        return not trace.cached_tokens.any()
    return trace.history_tokens is not None


class PromptTree(NamedTuple):
    """The tree of a trace's prompts as the loops read it, and the chain of each."""

    segments: Any
    tail_parent: Ints
    tail_start: Ints


def prompt_tree(trace: Trace, block_size: int) -> PromptTree:
    """Return the tree of a trace's prompts, made once for each size of blocks."""
    if trace.hash_ids is not None and trace.cached_tokens.any():
        raise SimulationError(
            f"trace {shown(trace.name)} has both hash_ids, by which blocks are found, and cached_tokens, "
            "which state the result: drop one of them"
        )
    trees: dict[int, PromptTree] = trace.__dict__.setdefault("_trees", {})
    if block_size not in trees:
        tree = _tree(trace, block_size)
        segments = np.zeros(len(tree.parent), SEGMENT)
        segments["parent"], segments["start"], segments["stop"] = tree.parent, tree.start, tree.stop
        tails = tree.tail_parent.astype(np.int32), tree.tail_start.astype(np.int32)
        trees[block_size] = PromptTree(segments, *tails)
    return trees[block_size]


def _distinct(values: Longs) -> Longs:
    """Return the values once each, sorted; NumPy 2.4's unique, by hashes, takes ten times as long."""
    ranked = np.sort(values)
    distinct: Longs = ranked[np.concatenate([[True], ranked[1:] != ranked[:-1]])[: len(ranked)]]
    return distinct


def _tree(trace: Trace, block_size: int) -> Tree:
    if trace.hash_ids is not None and trace.hash_offsets is not None:
        return _tree_of_ids(trace, block_size)
    if trace.history_tokens is not None:
        return _tree_of_sessions(trace, block_size)
    empty = np.zeros(0, np.int64)
    return Tree(empty, empty, empty, np.full(len(trace), ROOT), np.zeros(len(trace), np.int64))


class _Nodes(NamedTuple):
    """The node of each id of a trace, and of each node the one before it and its place in a prompt."""

    of_id: Longs
    before: Longs
    place: Longs


def _tree_of_ids(trace: Trace, block_size: int) -> Tree:
    assert trace.hash_ids is not None
    assert trace.hash_offsets is not None
    per_id, starts = _blocks_per_id(trace, block_size), trace.hash_offsets[:-1]
    nodes = _nodes(trace.hash_ids, trace.hash_offsets)
    # whole ids of each prompt, and blocks of the one after them
    whole, more = np.divmod(trace.input_tokens.astype(np.int64) // block_size, per_id)
    place = np.arange(len(trace.hash_ids)) - np.repeat(starts, np.diff(trace.hash_offsets))
    is_whole = place < np.repeat(whole, np.diff(trace.hash_offsets))
    width = per_id + 1
    is_full = np.zeros(len(nodes.before), bool)
    is_full[nodes.of_id[is_whole]] = True
    full = np.flatnonzero(is_full) * width + per_id
    part = more > 0
    ends = np.full(len(trace), -1)
    ends[part] = nodes.of_id[(starts + whole)[part]] * width + more[part]
    at_id = (more == 0) & (whole > 0)
    ends[at_id] = nodes.of_id[(starts + whole - 1)[at_id]] * width + per_id
    pieces = _distinct(np.concatenate([full, ends[part]]))
    node, stop = np.divmod(pieces, width)
    follows = np.concatenate([[False], node[1:] == node[:-1]])
    start = np.where(follows, np.concatenate([[0], stop[:-1]]), 0)
    before = nodes.before[node]
    parent = np.where(before < 0, ROOT, np.searchsorted(pieces, before * width + per_id))
    parent = np.where(follows, np.arange(len(pieces)) - 1, parent)
    first = nodes.place[node] * per_id
    chain = np.where(ends < 0, ROOT, np.searchsorted(pieces, ends))
    tails = whole * per_id + more
    return _merged(Tree(parent, first + start, first + stop, chain, tails))


def _blocks_per_id(trace: Trace, block_size: int) -> int:
    if trace.hash_block_size % block_size:
        raise TraceError(
            f"trace {shown(trace.name)} has an id for every {trace.hash_block_size} tokens of a prompt; "
            f"block_size must divide that, got {block_size}"
        )
    return trace.hash_block_size // block_size


def _nodes(ids: Longs, offsets: Longs) -> _Nodes:
    """Give equal starts of prompts equal nodes; an id is a node if the same ids always come before it."""
    counts = np.diff(offsets)
    _, first, of_id = np.unique(ids, return_index=True, return_inverse=True)
    place = np.arange(len(ids)) - np.repeat(offsets[:-1], counts)
    is_start = place == 0
    before = np.concatenate([[-1], of_id[:-1]])[: len(ids)]
    before[is_start] = -1
    if np.array_equal(before, before[first][of_id]):
        return _Nodes(of_id, before[first], place[first])
    # ids that come after different ones: a node for each, place by place
    node = np.full(len(ids), -1)
    earlier, places, total = [], [], 0
    for at in range(int(counts.max(initial=0))):
        rows = offsets[:-1][counts > at] + at
        last = node[rows - 1] if at else np.full(len(rows), -1)
        keys, same = np.unique((last + 1) * (of_id.max() + 1) + of_id[rows], return_inverse=True)
        node[rows] = total + same
        earlier.append(keys // (of_id.max() + 1) - 1)
        places.append(np.full(len(keys), at))
        total += len(keys)
    return _Nodes(node, np.concatenate(earlier), np.concatenate(places))


def _merged(tree: Tree) -> Tree:
    """Make one segment of those that always follow each other."""
    count = len(tree.parent)
    if not count:
        return tree
    has_parent = tree.parent != ROOT
    children = np.bincount(tree.parent[has_parent], minlength=count)
    is_end = np.zeros(count, bool)
    is_end[tree.tail_parent[tree.tail_parent != ROOT]] = True
    goes_on = (children == 1) & ~is_end
    joins = has_parent & goes_on[tree.parent]
    top = np.where(joins, tree.parent, np.arange(count))
    while not np.array_equal(top[top], top):
        top = top[top]
    tops = np.flatnonzero(top == np.arange(count))
    number = np.full(count, ROOT)
    number[tops] = np.arange(len(tops))
    stop = np.zeros(count, np.int64)
    np.maximum.at(stop, top, tree.stop)
    parent = tree.parent[tops]
    return Tree(
        np.where(parent == ROOT, ROOT, number[top[parent]]),
        tree.start[tops],
        stop[tops],
        np.where(tree.tail_parent == ROOT, ROOT, number[top[tree.tail_parent]]),
        tree.tail_start,
    )


def _tree_of_sessions(trace: Trace, block_size: int) -> Tree:
    """Return the tree of prompts that start with their first parent's prompt and answer.

    A prompt's shared blocks are those of a request before it, its owner, or of all sessions. The owner's own
    blocks are cut where prompts part from it.
    """
    assert trace.history_tokens is not None
    count = len(trace)
    before = np.full(count, -1)
    if trace.parents is not None and trace.parent_offsets is not None:
        has_parent = np.diff(trace.parent_offsets) > 0
        before[has_parent] = trace.parents[trace.parent_offsets[:-1][has_parent]]
    context = trace.input_tokens.astype(np.int64) + trace.output_tokens - 1
    shared = np.minimum(trace.history_tokens, trace.input_tokens).astype(np.int64)
    shared = np.where(before < 0, shared, np.minimum(shared, context[before])) // block_size
    owner = before.copy()
    while True:
        is_older = (owner >= 0) & (shared <= shared[owner])
        if not is_older.any():
            break
        owner[is_older] = before[owner[is_older]]
    width = int(shared.max(initial=0)) + 1
    keys = (owner + 1) * width + shared
    pieces = _distinct(keys[shared > 0])
    stretch, stop = pieces // width - 1, pieces % width
    follows = np.concatenate([[False], stretch[1:] == stretch[:-1]])[: len(pieces)]
    chain = np.where(shared > 0, np.searchsorted(pieces, keys), ROOT)
    begin = np.where(stretch < 0, 0, shared[stretch])
    start = np.where(follows, np.concatenate([[0], stop[:-1]])[: len(pieces)], begin)
    parent = np.where(follows, np.arange(len(pieces)) - 1, np.where(stretch < 0, ROOT, chain[stretch]))
    tail_parent, tail_start = chain.copy(), shared.copy()
    is_last = np.concatenate([stretch[1:] != stretch[:-1], [True]])[: len(pieces)] & (stretch >= 0)
    tail_parent[stretch[is_last]] = np.flatnonzero(is_last)
    tail_start[stretch[is_last]] = stop[is_last]
    return Tree(parent, start, stop, tail_parent, tail_start)
