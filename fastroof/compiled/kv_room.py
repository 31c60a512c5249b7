"""Room for KV cache: what a sequence takes of it, where some layers keep no more than a window, or a state.

Rooms are counted in tokens of sequences within the window, or in parts of such tokens: whole numbers that
leave nothing to rounding.
"""

from __future__ import annotations

from typing import Any

from fastroof.compiled.jit import jit_inline
from fastroof.compiled.request_sums import MAX_KV_LEN

__all__ = ["KvRoom", "held_parts", "held_tokens", "longest_held"]

KvRoom = Any
"""(parts that there are, parts a token of every layer's, parts a token within the window, the window, parts a
sequence).

A tuple of five integers, or such a row of an array; (tokens, 1, 0, 0, 0) without a window and a state.
"""


@jit_inline
def held_parts(room: KvRoom, kv_len: int) -> int:
    """Parts that a sequence takes."""
    return int(room[1]) * kv_len + int(room[2]) * min(kv_len, int(room[3])) + int(room[4])


@jit_inline
def longest_held(room: KvRoom, sequences: int) -> int:
    """Length of the longest sequences of which so many fit, at most MAX_KV_LEN."""
    parts, window = int(room[0]) // sequences - int(room[4]), int(room[3])
    if parts < 0:
        return 0
    if parts < (room[1] + room[2]) * window:
        return parts // int(room[1] + room[2])
    if room[1] == 0:
        return MAX_KV_LEN
    return min((parts - int(room[2]) * window) // int(room[1]), MAX_KV_LEN)


@jit_inline
def held_tokens(tokens: float, window: float, window_share: float, state_tokens: float) -> float:
    """Tokens' worth of KV cache of a sequence, a share of whose bytes is kept within a window, and state."""
    return tokens - window_share * max(tokens - window, 0.0) + state_tokens
