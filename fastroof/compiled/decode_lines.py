"""Steps of equal decodes, tabulated: for each batch size the straight lines along kv_len.

Between two kv nodes a step of ``batch_size`` equal decodes takes ``at_zero + slope * kv_len``, so a step
costs one load of a pair, one multiplication and one addition. A table holds the pair of every batch
size and every key of the kv axis (see fastroof.pack.keys), 300 KB at 1024 sequences: beyond the first
cache, but in the second, which is faster than five gathers from the first. Measured on a Zen 5,
10 M random steps: 5 gathers 1.37 ns a step, 3 gathers 1.06, four coefficients by vector loads 0.58,
pairs by vector loads 0.54, of which prefetching the streamed inputs gives 0.1.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fastroof.compiled.grids import grid_line
from fastroof.compiled.jit import Floats, Ints, jit
from fastroof.compiled.llvm import LANES, float_bits, line_lanes, output_store, prefetch, table_load
from fastroof.compiled.steps import CODE_SIZES, MAX_KV_LEN, open_plan, step_rows_us

__all__ = ["LINES_HEADER", "decode_steps_us", "fill_decode_lines"]

# Header slots of a table of lines; pairs (at_zero_us, slope_us) follow, a row a batch size from 0.
MAX_BATCH, COLUMNS, SHIFT, FIRST_KEY = 0, 1, 2, 3
LINES_HEADER = 8

CHUNK = 128
"""Steps whose lines are found before they are read: more no longer stay in the first cache."""

AHEAD = 1024
"""How far ahead inputs are fetched, elements."""
LINE = 8
"""Elements a cache line holds at least."""


@jit
def fill_decode_lines(arena: Floats, starts: Floats, lines: Floats) -> None:
    """Fill a table whose header is set; ``starts`` are the kv_len at which its columns start."""
    plan = open_plan(arena)
    columns = len(starts)
    for batch in range(1, int(lines[MAX_BATCH]) + 1):
        rows_us = step_rows_us(arena, plan, batch, batch)
        for column in range(columns):
            at_zero_us, slope_us = grid_line(arena, plan.decode, float(batch), table_load(starts, column))
            at = LINES_HEADER + 2 * (batch * columns + column)
            output_store(lines, at, rows_us + at_zero_us)
            output_store(lines, at + 1, slope_us)


@jit
def decode_steps_us(lines: Floats, batch_size: Ints, kv_len: Ints, line_at: Any, out: Floats) -> int:
    """Time steps of equal decodes: ``batch_size`` requests at ``kv_len`` each. Returns a code.

    ``line_at`` is scratch, CHUNK entries of uint32. Stops at the first chunk that holds a step which
    the plan cannot time; ``out`` must not overlap the inputs.
    """
    max_batch = np.uint64(lines[MAX_BATCH])
    columns = np.int64(lines[COLUMNS])
    shift = np.int64(lines[SHIFT])
    first_key = np.int64(lines[FIRST_KEY])
    for start in range(0, len(out), CHUNK):
        count = min(CHUNK, len(out) - start)
        for i in range(start, start + count, LINE):
            prefetch(batch_size, i + AHEAD)
            prefetch(kv_len, i + AHEAD)
        largest_batch = np.uint64(0)
        largest_kv = np.uint64(0)
        for i in range(count):
            batch = np.int64(table_load(batch_size, start + i))
            kv = np.int64(table_load(kv_len, start + i))
            # as unsigned numbers, sizes below 1 are the largest
            largest_batch = max(largest_batch, np.uint64(batch - 1))
            largest_kv = max(largest_kv, np.uint64(kv - 1))
            column = min((float_bits(float(kv)) >> shift) - first_key, columns - 1)
            output_store(line_at, i, np.uint32(LINES_HEADER + 2 * (batch * columns + column)))
        if largest_batch >= max_batch or largest_kv >= np.uint64(MAX_KV_LEN):
            return CODE_SIZES
        whole = count - count % LANES
        for i in range(0, whole, LANES):
            line_lanes(lines, line_at, i, kv_len, start + i, out)
        for i in range(whole, count):
            at = np.int64(line_at[i])
            out[start + i] = lines[at] + lines[at + 1] * float(kv_len[start + i])
    return 0
