"""Integer sums over the requests of one step: all that its time depends on, whatever their order."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Ints
from fastroof.compiled.jit import jit_inline
from fastroof.compiled.llvm import table_load
from fastroof.compiled.request_lanes import TILE, bit_count, lowest_bit, request_lanes

__all__ = ["MAX_KV_LEN", "StepSums", "WindowSums", "decode_sums", "request_sums"]

MAX_KV_LEN = 2**28
"""Longest sequence that an entry point accepts, tokens."""

HIGH_BITS = ~(MAX_KV_LEN - 1)
MANY_CHUNKS = 16
"""Of 64 requests, from which on all are added up as chunks: one by one a chunk takes four times as long."""


class StepSums(NamedTuple):
    """Sums over the requests of a step: its decodes and their KV, the new tokens of its prefill chunks."""

    decodes: int
    kv_sum: int
    new_sum: int
    causal_pairs: int
    prefix_pairs: int
    prefix_sum: int


class WindowSums(NamedTuple):
    """Sums over the requests of a step, of layers that attend within a window."""

    kv_sum: Any
    causal_pairs: Any
    prefix_pairs: Any
    prefix_sum: Any


class ChunkSums(NamedTuple):
    """Sums over chunks, those without tokens included, and of what a window has room for beyond them."""

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
    """Sums with a chunk more; a chunk without tokens adds to none of a step's."""
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
    """Sums over one step's requests, all and within a window, and whether all are possible in any plan."""
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
    # all that were added up without being chunks have no tokens: their room is a window's
    less = (window * room) >> 1  # pairs that a window's first queries see less than a window
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
    """Sums of one step's contexts and of min(kv_len, window), and whether all requests can decode."""
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
