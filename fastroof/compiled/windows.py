"""Layers that attend within a sliding window, of plans that have some.

A plan's blocks of decode and prefill attention hold all its kinds of layers, looked up at the mean kv_len of
the decodes and at equal chunks. That is exact for equal requests. Where lengths differ, windowed layers
cost the mean of min(kv_len, window), which is less than the mean's, and their chunks attend to fewer tokens
than equal ones: so such layers have blocks of their own besides, and a step takes the difference of two
lookups there. Both are one point where requests are equal, and the difference is 0.
"""

from __future__ import annotations

import math

from fastroof.compiled.jit import jit_inline
from fastroof.compiled.request_sums import WindowSums

__all__ = [
    "equal_window_sums",
    "mean_chunk_sums",
    "mean_seen",
    "no_window_sums",
    "prefix_in_window",
    "seen_before",
    "window_chunks",
    "window_prefix",
    "windowed_pairs",
    "with_request",
]

LEAST_SHORT = 2.0**-60
"""Less than any mean of whole numbers of tokens is short of a window; a window of 1 has none to divide by."""


@jit_inline
def no_window_sums() -> WindowSums:
    """Sums of a plan without windows, which nothing reads."""
    return WindowSums(0, 0, 0, 0)


@jit_inline
def _whole_pairs(tokens: int, window: int) -> int:
    within = min(tokens, window)
    return ((within * (within + 1)) >> 1) + (tokens - within) * window


@jit_inline
def windowed_pairs(tokens: float, window: float) -> float:
    """(query, key) pairs of a sequence's first ``tokens`` queries: the sum of min(i, window)."""
    within = min(tokens, window)
    return within * (within + 1.0) * 0.5 + (tokens - within) * window


@jit_inline
def window_prefix(new_tokens: int, context_len: int, window: int) -> tuple[int, int]:
    """Pairs of a chunk with tokens before it, and how many of those any query sees."""
    crossed = _whole_pairs(context_len + new_tokens, window) - _whole_pairs(context_len, window)
    return crossed - _whole_pairs(new_tokens, window), min(context_len, window - 1)


@jit_inline
def with_request(sums: WindowSums, new: int, context: int, window: int) -> WindowSums:
    """Sums with one request more."""
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
    """Mean of min(length, window) over lengths that are spread evenly around ``kv_len``."""
    high = kv_len + 0.5 * spread
    if high <= window:
        return kv_len
    if kv_len - 0.5 * spread >= window:
        return window
    return kv_len - 0.5 * (high - window) ** 2 / spread


@jit_inline
def seen_before(count: float, chunk: float, start: float, window: float) -> float:
    """Tokens before ``count`` chunks that any of their queries sees, where the first begins at ``start``."""
    most = window - 1.0
    if start >= most:
        return count * most
    growing = min(count, math.floor((most - start) / chunk) + 1.0)
    return growing * (start + 0.5 * chunk * (growing - 1.0)) + (count - growing) * most


@jit_inline
def prefix_in_window(window: float, new: float, cached: float, chunks: float) -> tuple[float, float]:
    """Pairs of ``new`` tokens with ``cached`` ones within a window, and how many of these chunks read."""
    crossed = windowed_pairs(cached + new, window) - windowed_pairs(cached, window)
    crossed -= windowed_pairs(new, window)
    size = new / chunks
    return crossed, seen_before(chunks, size, cached, window) - seen_before(chunks, size, 0.0, window)


@jit_inline
def mean_chunk_sums(count: float, chunk: float, isl: float, window: float) -> WindowSums:
    """Sums of ``count`` chunks anywhere in prompts of ``isl`` tokens, which are all cut into such chunks."""
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
    """Sums of equal decodes and equal chunks, as near as whole numbers come, where only sums are known."""
    some = max(chunks, 1)
    new, context = new_sum // some, prefix_sum // some
    crossed, read = window_prefix(new, context, window)
    own = _whole_pairs(new, window)
    return WindowSums(min(kv_sum, decodes * window), some * own, some * crossed, some * read)


@jit_inline
def window_chunks(new_sum: float, causal_pairs: float, window: float) -> tuple[float, float]:
    """Batch and q_len of equal chunks with as many tokens, and as many pairs within a window."""
    mean_seen = float(causal_pairs) / float(new_sum)
    short = 2.0 * mean_seen - 1.0
    # of q tokens window (window - 1) / 2 pairs are less than a window for each
    long = 0.5 * window * (window - 1.0) / max(window - mean_seen, LEAST_SHORT)
    q_len = long if short > window else short
    return float(new_sum) / q_len, q_len
