"""The sweep loops: every step of a grid timed, and reduced before it leaves the loop."""

from __future__ import annotations

from typing import Any

from fastroof.compiled.jit import jit
from fastroof.compiled.steps import general_decode_steps_us

__all__ = [
    "LIMITED_BY_BATCH_GRID",
    "LIMITED_BY_MEMORY",
    "LIMITED_BY_THROUGHPUT",
    "LIMITED_BY_TPOT",
    "best_decode_batches",
]

LIMITED_BY_BATCH_GRID = 0
LIMITED_BY_MEMORY = 1
LIMITED_BY_TPOT = 2
LIMITED_BY_THROUGHPUT = 3


@jit
def best_decode_batches(
    arena: Any,
    batch_size: Any,
    kv_len: Any,
    max_kv_tokens: int,
    limit_us: float,
    row_kv_len: Any,
    row_us: Any,
    best: Any,
    best_us: Any,
    limited_by: Any,
    exceeds: Any,
) -> int:
    """Time every (kv_len, batch_size), and keep for each kv_len the batch with the most tokens a second.

    ``batch_size`` rises. ``best`` gets the position of the batch, -1 where none keeps within
    ``max_kv_tokens`` and ``limit_us``; ``limited_by`` what stops the next larger one, or the smallest
    where there is none; ``exceeds[0]`` and ``exceeds[1]`` grow by the steps beyond memory, and by the
    others beyond the limit. ``row_kv_len`` and ``row_us`` are scratch, one entry a batch. Returns a code.
    """
    code = 0
    last = len(batch_size) - 1
    for i in range(len(kv_len)):
        kv = kv_len[i]
        row_kv_len[:] = kv
        code |= general_decode_steps_us(arena, batch_size, row_kv_len, row_us)
        found = -1
        most = 0.0
        for j in range(last + 1):
            if batch_size[j] * kv > max_kv_tokens:
                exceeds[0] += 1
            elif not row_us[j] <= limit_us:
                exceeds[1] += 1
            elif found < 0 or batch_size[j] / row_us[j] > most:
                found = j
                most = batch_size[j] / row_us[j]
        best[i] = found
        best_us[i] = row_us[max(found, 0)]
        if found == last:
            limited_by[i] = LIMITED_BY_BATCH_GRID
        elif batch_size[found + 1] * kv > max_kv_tokens:
            limited_by[i] = LIMITED_BY_MEMORY
        elif not row_us[found + 1] <= limit_us:
            limited_by[i] = LIMITED_BY_TPOT
        else:
            limited_by[i] = LIMITED_BY_THROUGHPUT
    return code
