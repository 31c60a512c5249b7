"""Integer sums over the requests of one step: a step's time depends on nothing else."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.layout import TILE
from fastroof.compiled.llvm import bit_count, lowest_bit, request_lanes, table_load

MAX_KV_LEN = 2**28
"""Longest sequence that entry points accept, tokens."""

HIGH_BITS = ~(MAX_KV_LEN - 1)
MANY_CHUNKS = 16
"""With as many chunks among 64 requests, all are summed as chunks; one by one, a chunk takes 4x as long."""


class StepSums(NamedTuple):
    """Sums over the requests of a step: its decodes and their KV, the new tokens of its prefill chunks."""

    decodes: int
    kv_sum: int
    new_sum: int
    causal_pairs: int
    prefix_pairs: int
    prefix_sum: int


class WindowSums(NamedTuple):
    """Sums over the requests of a step, for layers that attend within a window."""

    kv_sum: Any
    causal_pairs: Any
    prefix_pairs: Any
    prefix_sum: Any


class ChunkSums(NamedTuple):
    """Sums over chunks, including empty ones, and over the room that a window has beyond them."""

    count: Any
    new: Any
    squares: Any
    prefix_pairs: Any
    prefix: Any
    own_room: Any
    pairs_room: Any
    prefix_room: Any


@jit_inline
def _no_chunks() -> ChunkSums:
    return ChunkSums(0, 0, 0, 0, 0, 0, 0, 0)


@jit_inline
def _added(sums: ChunkSums, new: int, context: int, room: int) -> ChunkSums:
    """Add a chunk to sums; a chunk without tokens adds nothing to a step's."""
    own, before, all_room = max(room - new, 0), max(room - context, 0), max(room - context - new, 0)
    return ChunkSums(
        sums.count + 1,
        sums.new + new,
        sums.squares + new * new,
        sums.prefix_pairs + new * context,
        sums.prefix + context,
        sums.own_room + own * (own + 1),
        sums.pairs_room + (all_room * (all_room + 1) - before * (before + 1)),
        sums.prefix_room + before,
    )


@jit_inline
def request_sums(
    new_tokens: Ints, context_len: Ints, start: int, stop: int, window: int
) -> tuple[StepSums, WindowSums, bool]:
    """Sum over one step's requests, in all and within a window. Returns also whether all are valid."""
    room = window - 1
    context_sum: Any = 0
    room_sum: Any = 0
    high: Any = 0
    chunks: Any = 0
    sums = _no_chunks()
    for tile in range(start, stop, TILE):
        size = min(stop - tile, TILE)
        bits, contexts, rooms, high_bits = request_lanes(new_tokens, context_len, tile, size, room)
        context_sum += contexts
        room_sum += rooms
        high |= high_bits
        if bits == 0:
            continue
        count = bit_count(bits)
        chunks += count
        if count > MANY_CHUNKS:
            for r in range(tile, tile + size):
                # Python's integers with the JIT off: NumPy's do not mix with those beyond 64 bits
                new: Any = int(np.int64(table_load(new_tokens, r)))
                context: Any = int(np.int64(table_load(context_len, r)))
                is_chunk: Any = (new != 1) | (context == 0)
                sums = _added(sums, new if is_chunk else 0, context if is_chunk else 0, room)
            continue
        while bits != 0:
            at = tile + lowest_bit(bits)
            bits &= bits - 1
            a_new: Any = int(np.int64(table_load(new_tokens, at)))
            a_context: Any = int(np.int64(table_load(context_len, at)))
            sums = _added(sums, a_new, a_context, room)
    decodes = stop - start - chunks
    of_all = StepSums(
        decodes,
        context_sum - sums.prefix + decodes,
        sums.new,
        (sums.squares + sums.new) >> 1,
        sums.prefix_pairs,
        sums.prefix,
    )
    # requests that were summed without being chunks have no tokens: their room is the whole window
    less = (window * room) >> 1  # pairs that a window's first queries see less than a full window
    own = sums.new * window - sums.count * less + (sums.own_room >> 1)
    in_window = WindowSums(
        decodes * window - (room_sum - (sums.prefix_room - (sums.count - chunks) * room)),
        own,
        sums.new * window + (sums.pairs_room >> 1) - own,
        sums.count * room - sums.prefix_room,
    )
    return of_all, in_window, high & HIGH_BITS == 0


@jit_inline
def decode_sums(
    new_tokens: Ints, context_len: Ints, start: int, stop: int, window: int
) -> tuple[int, int, bool]:
    """Sum one step's contexts and min(kv_len, window). Returns also whether all requests can decode."""
    context_sum: Any = 0
    room_sum: Any = 0
    other: Any = 0
    for tile in range(start, stop, TILE):
        bits, contexts, rooms, high = request_lanes(
            new_tokens, context_len, tile, min(stop - tile, TILE), window - 1
        )
        context_sum += contexts
        room_sum += rooms
        other |= bits | (high & HIGH_BITS)
    return context_sum, (stop - start) * window - room_sum, other == 0


LEAST_SHORT = 2.0**-60
"""Smaller than any nonzero shortfall of a mean length from a window; avoids a division by 0."""


@jit_inline
def no_window_sums() -> WindowSums:
    """Return empty sums for plans without windows, which nothing reads."""
    return WindowSums(0, 0, 0, 0)


@jit_inline
def _whole_pairs(tokens: int, window: int) -> int:
    within = min(tokens, window)
    return ((within * (within + 1)) >> 1) + (tokens - within) * window


@jit_inline
def windowed_pairs(tokens: float, window: float) -> float:
    """Count (query, key) pairs of a sequence's first ``tokens`` queries: the sum of min(i, window)."""
    within = min(tokens, window)
    return within * (within + 1.0) * 0.5 + (tokens - within) * window


@jit_inline
def window_prefix(new_tokens: int, context_len: int, window: int) -> tuple[int, int]:
    """Count a chunk's pairs with earlier tokens, and the earlier tokens that any query sees."""
    crossed = _whole_pairs(context_len + new_tokens, window) - _whole_pairs(context_len, window)
    return crossed - _whole_pairs(new_tokens, window), min(context_len, window - 1)


@jit_inline
def with_request(sums: WindowSums, new: int, context: int, window: int) -> WindowSums:
    """Add one request to sums."""
    if new == 1 and context > 0:
        kv_sum = sums.kv_sum + min(context + 1, window)
        return WindowSums(kv_sum, sums.causal_pairs, sums.prefix_pairs, sums.prefix_sum)
    crossed, read = window_prefix(new, context, window)
    return WindowSums(
        sums.kv_sum,
        sums.causal_pairs + _whole_pairs(new, window),
        sums.prefix_pairs + crossed,
        sums.prefix_sum + read,
    )


@jit_inline
def mean_seen(kv_len: float, spread: float, window: float) -> float:
    """Return the mean of min(length, window) over lengths spread evenly around ``kv_len``."""
    high = kv_len + 0.5 * spread
    if high <= window:
        return kv_len
    if kv_len - 0.5 * spread >= window:
        return window
    return kv_len - 0.5 * (high - window) ** 2 / spread


@jit_inline
def seen_before(count: float, chunk: float, start: float, window: float) -> float:
    """Count tokens before ``count`` chunks that any of their queries sees; the first starts at ``start``."""
    most = window - 1.0
    if start >= most:
        return count * most
    growing = min(count, math.floor((most - start) / chunk) + 1.0)
    return growing * (start + 0.5 * chunk * (growing - 1.0)) + (count - growing) * most


@jit_inline
def prefix_in_window(window: float, new: float, cached: float, chunks: float) -> tuple[float, float]:
    """Count pairs of ``new`` with ``cached`` tokens within a window, and the cached tokens read."""
    crossed = windowed_pairs(cached + new, window) - windowed_pairs(cached, window)
    crossed -= windowed_pairs(new, window)
    size = new / chunks
    return crossed, seen_before(chunks, size, cached, window) - seen_before(chunks, size, 0.0, window)


@jit_inline
def mean_chunk_sums(count: float, chunk: float, isl: float, window: float) -> WindowSums:
    """Sum ``count`` chunks anywhere in prompts of ``isl`` tokens that are cut into such chunks."""
    own = windowed_pairs(chunk, window)
    crossed = chunk * (windowed_pairs(isl, window) / isl) - own
    pieces = isl / chunk
    return WindowSums(
        0.0, count * own, count * crossed, count * (seen_before(pieces, chunk, 0.0, window) / pieces)
    )


@jit_inline
def equal_window_sums(
    decodes: int, kv_sum: int, new_sum: int, chunks: int, prefix_sum: int, window: int
) -> WindowSums:
    """Approximate window sums by equal decodes and equal chunks if only the other sums are known."""
    some = max(chunks, 1)
    new, context = new_sum // some, prefix_sum // some
    crossed, read = window_prefix(new, context, window)
    own = _whole_pairs(new, window)
    return WindowSums(min(kv_sum, decodes * window), some * own, some * crossed, some * read)


@jit_inline
def window_chunks(new_sum: float, causal_pairs: float, window: float) -> tuple[float, float]:
    """Return batch and q_len of equal chunks with as many tokens and as many pairs within a window."""
    mean_seen = float(causal_pairs) / float(new_sum)
    short = 2.0 * mean_seen - 1.0
    # of q tokens, window (window - 1) / 2 pairs are missing to a full window each
    long = 0.5 * window * (window - 1.0) / max(window - mean_seen, LEAST_SHORT)
    q_len = long if short > window else short
    return float(new_sum) / q_len, q_len
