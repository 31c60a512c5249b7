"""Tables of equal decode steps: for each batch size, line segments along kv_len.

Between two kv nodes a step of ``batch_size`` equal decodes takes ``at_zero + slope * kv_len``, so a step
costs one load of a pair, one multiplication and one addition. A table holds the pair for every batch size
and every key of the kv axis (see fastroof.pack.keys): 300 KB at 1024 sequences, which fits L2, and that is
faster than five gathers from L1. Measured on a Zen 5, 10 M random steps: 5 gathers 1.37 ns a step, 3 gathers
1.06, four coefficients by vector loads 0.58, pairs by vector loads 0.54; prefetching the inputs saves 0.1 of
that.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Ints
from fastroof.compiled.grids import AxisSlots, GridBlock
from fastroof.compiled.guides import bracket
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import LANES
from fastroof.compiled.llvm import (
    float_bits,
    line_lanes,
    output_store,
    prefetch,
    store_fence,
    streamed_lanes,
    table_load,
)
from fastroof.compiled.request_sums import MAX_KV_LEN
from fastroof.compiled.steps import CODE_SIZES, decode_rows_us, open_plan

# header slots of a table of lines; then pairs (at_zero_us, slope_us), a row for each batch size from 0
MAX_BATCH, COLUMNS, SHIFT, FIRST_KEY = 0, 1, 2, 3
LINES_HEADER = 8

CHUNK = 128
"""Steps whose lines are located before they are read; more do not stay in L1."""

AHEAD = 1024
"""Prefetch distance of inputs, elements."""
LINE = 8
"""Minimum number of elements per cache line."""


class LineCell(NamedTuple):
    """The coefficients of one decode-grid cell's lines along kv_len."""

    batch_start: float
    kv_start: float
    at_start_us: float
    slope_us: float
    batch_us: float
    batch_slope_us: float


@jit
def line_cell(arena: Floats, block: GridBlock, row: int, column: int) -> LineCell:
    """Read a cell of a block without curvature."""
    c = block.cells_at + (row * block.nx + column) * 6
    return LineCell(
        table_load(arena, block.y.nodes_at + row),
        table_load(arena, block.x.nodes_at + column),
        table_load(arena, c),
        table_load(arena, c + 1),
        table_load(arena, c + 3),
        table_load(arena, c + 4),
    )


@jit
def cell_line(cell: LineCell, rows_us: float, batch_size: float) -> tuple[float, float]:
    """Return a line's value at 0 and slope, us; identical to :func:`fastroof.compiled.grids.grid_line`."""
    v = batch_size - cell.batch_start
    slope = cell.slope_us + v * cell.batch_slope_us
    return rows_us + ((cell.at_start_us + v * cell.batch_us) - slope * cell.kv_start), slope


@jit
def cell_at(arena: Floats, axis: AxisSlots, x: float) -> int:
    """Index of the cell of a block's axis that x is in, by bisection."""
    return bracket(arena, axis.nodes_at, axis.nodes_at + axis.last_cell + 2, x) - axis.nodes_at


@jit
def fill_decode_lines(arena: Floats, starts: Floats, lines: Floats) -> None:
    """Fill a table whose header is set; ``starts`` are the kv_len at which its columns start."""
    plan = open_plan(arena)
    columns = len(starts)
    end = int(lines[MAX_BATCH]) + 1
    first = 1
    while first < end:
        row = cell_at(arena, plan.decode.y, float(first))
        stop = min(int(np.ceil(arena[plan.decode.y.nodes_at + row + 1])), end)
        for column in range(columns):
            cell = line_cell(arena, plan.decode, row, cell_at(arena, plan.decode.x, starts[column]))
            for batch in range(first, stop):
                rows_us = decode_rows_us(arena, plan, batch)
                at_zero_us, slope_us = cell_line(cell, rows_us, float(batch))
                at = LINES_HEADER + 2 * (batch * columns + column)
                output_store(lines, at, at_zero_us)
                output_store(lines, at + 1, slope_us)
        first = stop


@jit
def decode_steps_us(
    lines: Floats, batch_size: Ints, kv_len: Ints, line_at: Any, out: Floats, streamed: bool | None = None
) -> int:
    """Time steps of equal decodes: ``batch_size`` requests at ``kv_len`` each. Returns a code.

    With ``streamed``, a version of its own stores past the caches; ``out`` must begin a cache line. A line is
    then not read before it is written, and does not compete with lines of the table for the second cache.
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
            # None is a type: Numba drops the other branch before it compiles
            if streamed is None:
                line_lanes(lines, line_at, i, kv_len, start + i, out)
            else:
                streamed_lanes(lines, line_at, i, kv_len, start + i, out)
        for i in range(whole, count):
            at = np.int64(line_at[i])
            out[start + i] = lines[at] + lines[at + 1] * float(kv_len[start + i])
    if streamed is not None:
        store_fence()
    return 0
