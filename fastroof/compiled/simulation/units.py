"""Tokens in blocks."""

from __future__ import annotations

from fastroof.compiled.jit import jit_stateful_inline
from fastroof.compiled.simulation.records import Row


@jit_stateful_inline
def blocks_of(tokens: int, pool: Row) -> int:
    """Count the KV blocks that ``tokens`` of one request take."""
    if pool.block_shift >= 0:
        return int((tokens + pool.block_size - 1) >> pool.block_shift)
    return int((tokens + pool.block_size - 1) // pool.block_size)


@jit_stateful_inline
def in_block(tokens: int, pool: Row) -> int:
    """Return ``tokens`` modulo the block size, at least 0 also for negative numbers."""
    if pool.block_shift >= 0:
        return int(tokens & (pool.block_size - 1))
    return int(tokens % pool.block_size)
