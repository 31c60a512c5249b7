"""Loops over two-dimensional attention tables: the value of a cell, and each lookup method.

Packed grids are padded and without holes (see fastroof.pack), so the loops only ever interpolate. Flags
say what a node is: 0 measured, 2 filled or padded, 3 borrowed, 4 modelled; a result takes the largest
flag among the nodes it used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.compiled.guides import bracket, curve_point, guide_of, guided_node
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.layout import (
    EXTRAPOLATED,
    FORM_DECODE_RATE,
    FORM_PREFILL_RATE,
    INTERPOLATED,
    GridNodes,
    GuidedGrid,
)
from fastroof.compiled.llvm import float_bits, output_store, table_load

# a grid block of an arena: four slots for the y axis, four for the x axis, the form, then the y axis, the
# x axis, their guides, ny * nx cells of six coefficients, ny * nx flags.
Y, X, FORM, BLOCK_HEADER = 0, 4, 8, 9
# slots of an axis: its number of nodes, and its guide (see fastroof.pack.keys)
NODES, SHIFT, FIRST_KEY, KEYS = 0, 1, 2, 3


def x_axis_of(block: Floats) -> Floats:
    """Return where a block's x axis starts."""
    start = BLOCK_HEADER + int(block[Y + NODES])
    return block[start : start + int(block[X + NODES])]


def cells_of(block: Floats) -> slice:
    """Return where a block's coefficients start."""
    ny, nx = int(block[Y + NODES]), int(block[X + NODES])
    start = BLOCK_HEADER + ny + nx + int(block[Y + KEYS]) + int(block[X + KEYS])
    return slice(start, start + 6 * ny * nx)


class AxisSlots(NamedTuple):
    """An axis of a block: where its nodes and its guide start in the arena, and how a key is made."""

    nodes_at: int
    guide_at: int
    last_cell: int
    shift: int
    first_key: int
    last_key: int


class GridBlock(NamedTuple):
    """A block's header, read once before a loop; reading it inside would delay every step by 20 ns."""

    form: int
    y: AxisSlots
    x: AxisSlots
    nx: int
    cells_at: int
    flags_at: int


class GridPlace(NamedTuple):
    """A point's position in blocks with the same axes: its cell's coefficients and its offsets there."""

    coefficients: int
    v: float
    u: float


class GridLog2(NamedTuple):
    """log2 of a grid's nodes and of the points looked up."""

    y_axis: Floats
    x_axis: Floats
    y: Floats
    x: Floats


@jit_inline
def open_block(arena: Floats, at: int) -> GridBlock:
    """Read the header of the block at ``arena[at]``."""
    ny = int(arena[at + Y + NODES])
    nx = int(arena[at + X + NODES])
    y_keys = int(arena[at + Y + KEYS])
    x_keys = int(arena[at + X + KEYS])
    y_at = at + BLOCK_HEADER
    x_at = y_at + ny
    y_guide = x_at + nx
    x_guide = y_guide + y_keys
    cells = x_guide + x_keys
    return GridBlock(
        int(arena[at + FORM]),
        AxisSlots(
            y_at, y_guide, ny - 2, int(arena[at + Y + SHIFT]), int(arena[at + Y + FIRST_KEY]), y_keys - 1
        ),
        AxisSlots(
            x_at, x_guide, nx - 2, int(arena[at + X + SHIFT]), int(arena[at + X + FIRST_KEY]), x_keys - 1
        ),
        nx,
        cells,
        cells + ny * nx * 6,
    )


@jit_inline
def axis_cell(arena: Floats, axis: AxisSlots, x: float) -> int:
    """Index of the cell of an axis that x is in, clamped to the outer cells."""
    key = (float_bits(x) >> axis.shift) - axis.first_key
    i = int(table_load(arena, axis.guide_at + min(max(key, 0), axis.last_key)))
    while i < axis.last_cell and table_load(arena, axis.nodes_at + i + 1) <= x:
        i += 1
    return i


@jit_inline
def grid_place(arena: Floats, block: GridBlock, y: float, x: float) -> GridPlace:
    """Find the cell of a block that (y, x) is in."""
    i = axis_cell(arena, block.y, y)
    j = axis_cell(arena, block.x, x)
    v = y - table_load(arena, block.y.nodes_at + i)
    u = x - table_load(arena, block.x.nodes_at + j)
    return GridPlace((i * block.nx + j) * 6, v, u)


@jit_inline
def latency_at(arena: Floats, block: GridBlock, place: GridPlace) -> float:
    """Evaluate a block's cell at a place: the latency, if the block holds latencies."""
    c, u = block.cells_at + place.coefficients, place.u
    value: float = (
        table_load(arena, c)
        + u * (table_load(arena, c + 1) + u * table_load(arena, c + 2))
        + place.v * (table_load(arena, c + 3) + u * (table_load(arena, c + 4) + u * table_load(arena, c + 5)))
    )
    return value


@jit_inline
def grid_value(arena: Floats, block: GridBlock, y: float, x: float) -> float:
    """Value at (y, x) of a grid block."""
    value = latency_at(arena, block, grid_place(arena, block, y, x))
    if block.form == FORM_DECODE_RATE:
        return y * x / value
    if block.form == FORM_PREFILL_RATE:
        return y * (x * (x + 1.0) * 0.5) / value
    return value


@jit_inline
def grid_line(arena: Floats, block: GridBlock, y: float, x: float) -> tuple[float, float]:
    """Return value at 0 and slope of the line along x through (y, x), in a block without curvature."""
    i = axis_cell(arena, block.y, y)
    v = y - table_load(arena, block.y.nodes_at + i)
    return line_at(arena, block, i, v, axis_cell(arena, block.x, x))


@jit_inline
def line_at(arena: Floats, block: GridBlock, i: int, v: float, j: int) -> tuple[float, float]:
    """:func:`grid_line` of the cell (i, j), ``v`` above its lower row."""
    c = block.cells_at + (i * block.nx + j) * 6
    slope = table_load(arena, c + 1) + v * table_load(arena, c + 4)
    x0 = table_load(arena, block.x.nodes_at + j)
    return (table_load(arena, c) + v * table_load(arena, c + 3)) - slope * x0, slope


@jit_inline
def grid_flag(arena: Floats, block: GridBlock, y: float, x: float) -> int:
    """Return the origin of the value at (y, x): the largest flag among the nodes it uses."""
    i = axis_cell(arena, block.y, y)
    j = axis_cell(arena, block.x, x)
    f = block.flags_at + i * block.nx + j
    made = int(table_load(arena, f))
    on_column = x == table_load(arena, block.x.nodes_at + j)
    if not on_column:
        made = max(made, int(table_load(arena, f + 1)), INTERPOLATED)
    if y != table_load(arena, block.y.nodes_at + i):
        made = max(made, int(table_load(arena, f + block.nx)), INTERPOLATED)
        if not on_column:
            made = max(made, int(table_load(arena, f + block.nx + 1)))
    return made


@jit
def grid_latency_us(arena: Floats, y: Floats, x: Floats, out: Floats, origin: Flags) -> None:
    """Look up every (y, x) in the grid block at the start of an arena, in roofline coordinates."""
    block = open_block(arena, 0)
    for p in range(len(out)):
        yp = float(table_load(y, p))
        xp = float(table_load(x, p))
        output_store(out, p, grid_value(arena, block, yp, xp))
        output_store(origin, p, np.uint8(grid_flag(arena, block, yp, xp)))


@jit
def grid_linear_mfu_us(
    arena: Floats, nodes: GridNodes, y: Floats, x: Floats, work: Floats, out: Floats, origin: Flags
) -> None:
    """Interpolate work / latency linearly between nodes, held outside the measured range."""
    block = open_block(arena, 0)
    y_axis, x_axis, cells = nodes.y_axis, nodes.x_axis, nodes.cells
    ny = len(y_axis)
    nx = len(x_axis)
    for p in range(len(out)):
        yc = min(max(y[p], y_axis[1]), y_axis[ny - 2])
        xc = min(max(x[p], x_axis[1]), x_axis[nx - 2])
        made = grid_flag(arena, block, yc, xc)
        inside = yc == y[p] and xc == x[p]
        if made == 0 and inside:
            out[p] = grid_value(arena, block, yc, xc)
            origin[p] = 0
            continue
        i = bracket(y_axis, 0, ny, yc)
        j = bracket(x_axis, 0, nx, xc)
        wy = (yc - y_axis[i]) / (y_axis[i + 1] - y_axis[i])
        wx = (xc - x_axis[j]) / (x_axis[j + 1] - x_axis[j])
        r0 = nodes.work[i, j] / cells[i, j, 0]
        r0 += wx * (nodes.work[i, j + 1] / cells[i, j + 1, 0] - r0)
        r1 = nodes.work[i + 1, j] / cells[i + 1, j, 0]
        r1 += wx * (nodes.work[i + 1, j + 1] / cells[i + 1, j + 1, 0] - r1)
        out[p] = work[p] / (r0 + wy * (r1 - r0))
        origin[p] = made if inside else max(made, EXTRAPOLATED)


@jit
def _scaled_us(nodes: GridNodes, i: int, j: int, y: float, x: float, work: float) -> tuple[float, int]:
    """Latency at (y, x) with the MFU of one measured node."""
    latency_us = nodes.cells[i, j, 0]
    if y == nodes.y_axis[i] and x == nodes.x_axis[j]:
        return latency_us, 0
    return latency_us * (work / nodes.work[i, j]), EXTRAPOLATED


@jit
def grid_floor_us(nodes: GridNodes, y: Floats, x: Floats, work: Floats, out: Floats, origin: Flags) -> None:
    """Take the MFU of the measured node below: the floor along y, then along x."""
    for p in range(len(out)):
        best_i, best_j = -1, -1
        for i in range(1, len(nodes.y_axis) - 1):
            if nodes.y_axis[i] > y[p] and best_i >= 0:
                break
            for j in range(1, len(nodes.x_axis) - 1):
                if nodes.x_axis[j] > x[p] and best_i == i:
                    break
                if nodes.flags[i, j] == 0:
                    best_i, best_j = i, j
        out[p], origin[p] = _scaled_us(nodes, best_i, best_j, y[p], x[p], work[p])


@jit
def grid_nearest_us(
    nodes: GridNodes, log2: GridLog2, y: Floats, x: Floats, work: Floats, out: Floats, origin: Flags
) -> None:
    """Take the MFU of the measured node nearest in log2 of y and x; of a tie the smaller."""
    for p in range(len(out)):
        best_i, best_j = -1, -1
        least = 0.0
        for i in range(1, len(nodes.y_axis) - 1):
            for j in range(1, len(nodes.x_axis) - 1):
                if nodes.flags[i, j] != 0:
                    continue
                dy = log2.y_axis[i] - log2.y[p]
                dx = log2.x_axis[j] - log2.x[p]
                distance = dy * dy + dx * dx
                if best_i < 0 or distance < least:
                    least = distance
                    best_i, best_j = i, j
        out[p], origin[p] = _scaled_us(nodes, best_i, best_j, y[p], x[p], work[p])


@jit
def curve_rows(axis: Floats, value: Floats, flag: Flags, out: Floats, origin: Flags) -> None:
    """Look one curve up at 0, 1, 2, ...; entry 0, no work, is not written."""
    last = len(axis) - 1
    i = 0
    out[:1] = 0.0
    origin[:1] = 0
    for x in range(1, len(out)):
        while i < last - 1 and axis[i + 1] <= x:
            i += 1
        out[x], origin[x] = curve_point(axis, value, flag, i, i + 2, float(x))


@jit
def sum_rows(values: Floats, times: Floats, sums: Floats) -> None:
    """Sum operators, a row per plan: ``sums[plan] = sum of times[plan, operator] * values[operator]``."""
    for plan in range(len(sums)):
        row = sums[plan]
        for operator in range(len(values)):
            value = values[operator]
            factor = times[plan, operator]
            for x in range(len(row)):
                row[x] += factor * value[x]


@jit
def grid_points_us(grid: GuidedGrid, y: Floats, x: Floats, out: Floats, origin: Flags) -> None:
    """Look up every (y, x): the polynomials of ``grid_value``, their terms in the same order."""
    axes, guides, cells, origins = grid
    y_guide, x_guide = guide_of(guides, 0), guide_of(guides, 1)
    x_first = x_guide[0]
    nx = len(axes) - x_first
    for p in range(len(out)):
        yp = table_load(y, p)
        xp = table_load(x, p)
        # a grid has a cell above its last node, too, which no size reaches
        i = guided_node(axes, guides, y_guide, yp)
        j = guided_node(axes, guides, x_guide, xp)
        v = yp - table_load(axes, i)
        u = xp - table_load(axes, j)
        node = i * nx + (j - x_first)
        c = node * 6
        out[p] = (
            table_load(cells, c)
            + u * (table_load(cells, c + 1) + u * table_load(cells, c + 2))
            + v * (table_load(cells, c + 3) + u * (table_load(cells, c + 4) + u * table_load(cells, c + 5)))
        )
        case = 2 * (u > 0.0) + 4 * (v > 0.0)
        origin[p] = (table_load(origins, node) >> case) & 3
