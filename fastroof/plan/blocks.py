"""Grid blocks of one layer made blocks of many, and blocks of several kinds of layers made one.

A packed attention cell is a polynomial of its offsets from its lower corner, so kinds add up on the union
of their axes when a plan is compiled: the sum of two lookups to 4e-16, at the cost of one. Nodes that one
kind has and another has not cut the other's cells without bending them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Floats
from fastroof.columns import ORIGIN_INTERPOLATED
from fastroof.compiled import grids
from fastroof.errors import PlanError
from fastroof.pack.keys import axis_guide

__all__ = ["scaled_block", "sum_blocks"]


class _Grid(NamedTuple):
    """A block taken apart."""

    form: int
    y_axis: Floats
    x_axis: Floats
    cells: Floats
    flags: Floats


def scaled_block(block: Floats, num_layers: float) -> Floats:
    """Make a block of one call one of all layers, or of a share: cells are latencies, or work / latency."""
    scaled = block.copy()
    cells = scaled[grids.cells_of(scaled)]
    if block[grids.FORM] == grids.FORM_LATENCY:
        cells *= num_layers
    else:
        cells /= num_layers
    return scaled


def sum_blocks(blocks: Sequence[Floats], like: Floats | None = None) -> Floats:
    """Add up blocks of the same form."""
    if len(blocks) == 1 and like is None:
        return blocks[0]
    opened = [_open(block) for block in blocks]
    axes = opened if like is None else [_open(like)]
    y_axis = np.unique(np.concatenate([grid.y_axis for grid in axes]))
    x_axis = np.unique(np.concatenate([grid.x_axis for grid in axes]))
    parts = [_on_axes(grid, y_axis, x_axis) for grid in opened]
    form = opened[0].form
    if form == grids.FORM_LATENCY:
        cells = np.sum([cells for cells, _ in parts], axis=0)
    elif any(grid.cells[..., 1:].any() for grid in opened):
        raise PlanError(
            "method='linear_mfu' interpolates the MFU of one table, and this model has layers of several "
            "kinds; roofline, nearest and floor time them"
        )
    else:
        # work / latency of each, without slopes: their latencies add up
        cells = np.zeros_like(parts[0][0])
        cells[..., 0] = 1.0 / np.sum([1.0 / part[..., 0] for part, _ in parts], axis=0)
    flags = np.max([flags for _, flags in parts], axis=0)
    return _block(_Grid(form, y_axis, x_axis, cells, flags))


def _open(block: Floats) -> _Grid:
    ny, nx = int(block[grids.Y]), int(block[grids.X])
    place = grids.cells_of(block)
    y_axis = block[grids.BLOCK_HEADER : grids.BLOCK_HEADER + ny]
    cells = block[place].reshape(ny, nx, 6)
    flags = block[place.stop : place.stop + ny * nx].reshape(ny, nx)
    return _Grid(int(block[grids.FORM]), y_axis, grids.x_axis_of(block), cells, flags)


def _block(grid: _Grid) -> Floats:
    head: list[float] = []
    guides = []
    for axis in (grid.y_axis, grid.x_axis):
        guide = axis_guide(axis)
        head += [len(axis), guide.shift, guide.first, len(guide.cells)]
        guides.append(guide.cells)
    parts: list[Any] = [
        [*head, grid.form],
        grid.y_axis,
        grid.x_axis,
        *guides,
        grid.cells.ravel(),
        grid.flags.ravel(),
    ]
    return np.concatenate(parts, dtype=np.float64)


def _on_axes(grid: _Grid, y_axis: Floats, x_axis: Floats) -> tuple[Floats, Floats]:
    """A grid's cells and flags at the nodes of finer axes: each polynomial moved to its new corner."""
    # every axis starts at 0
    i = np.searchsorted(grid.y_axis, y_axis, side="right") - 1
    j = np.searchsorted(grid.x_axis, x_axis, side="right") - 1
    v = (y_axis - grid.y_axis[i])[:, None]
    u = (x_axis - grid.x_axis[j])[None, :]
    c = np.moveaxis(grid.cells[np.ix_(i, j)], 2, 0)
    low = (c[0] + u * (c[1] + u * c[2]), c[1] + 2.0 * u * c[2], c[2])
    rise = (c[3] + u * (c[4] + u * c[5]), c[4] + 2.0 * u * c[5], c[5])
    cells = np.stack([*(a + v * b for a, b in zip(low, rise, strict=True)), *rise], axis=2)
    above_i, above_j = np.minimum(i + 1, len(grid.y_axis) - 1), np.minimum(j + 1, len(grid.x_axis) - 1)
    off_row, off_column = v > 0.0, u > 0.0
    flags = grid.flags[np.ix_(i, j)]
    for rows, columns, used in (
        (i, above_j, off_column & (v == v)),
        (above_i, j, off_row & (u == u)),
        (above_i, above_j, off_row & off_column),
    ):
        seen = np.maximum(grid.flags[np.ix_(rows, columns)], ORIGIN_INTERPOLATED)
        flags = np.where(used, np.maximum(flags, seen), flags)
    return cells, flags
