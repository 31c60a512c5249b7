"""Packed attention grids of one head shape: holes filled, edges padded, cells as polynomials."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats
from fastroof.caching import lazy_property
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.pack.curves import (
    SIZE_LIMIT,
    FirstNodes,
    carried_below,
    origin_between,
    sorted_origins,
    sorted_points,
)
from fastroof.pack.keys import axis_guide


class BatchBound(NamedTuple):
    """Roofline bound B of one table: ``launch + batch (square x^2 + slope x + fixed)``, all in us."""

    launch_us: float
    square_us: float
    slope_us: float
    fixed_us: float
    window: float = math.inf
    beyond_us: float = 0.0

    def __call__(self, batch: Any, x: Any) -> Floats:
        """Return B at (batch, x), in us."""
        b = np.asarray(batch, dtype=np.float64)
        x = np.asarray(x, dtype=np.float64)
        if self.window < math.inf:
            within = np.minimum(x, self.window)
            own = (self.square_us * within + self.slope_us) * within + self.fixed_us
            return np.asarray(self.launch_us + b * (own + self.beyond_us * (x - within)))
        return np.asarray(self.launch_us + b * ((self.square_us * x + self.slope_us) * x + self.fixed_us))

    def cell_terms(self, x_axis: Floats) -> tuple[Floats, Floats]:
        """Return the square and slope terms of B within each cell of an axis, up to a common factor."""
        within = x_axis[1:] <= self.window
        return np.where(within, self.square_us, 0.0), np.where(within, self.slope_us, 1.0)


def slopes_above(latency_us: Floats, bound_us: Floats, *, is_length: bool) -> Floats:
    """Slope of each line beyond its last known node, relative to B."""
    known = ~np.isnan(latency_us)
    line = np.arange(latency_us.shape[1])
    first = np.argmax(known, axis=0)
    last = len(known) - 1 - np.argmax(known[::-1], axis=0)
    edge_us, edge_bound_us = latency_us[last, line], bound_us[last, line]
    added_us = edge_bound_us - bound_us[first, line]
    is_line = (last > first) & (added_us > 0.0)
    chord = np.where(is_line, (edge_us - latency_us[first, line]) / np.where(is_line, added_us, 1.0), 1.0)
    slope = np.minimum(0.5 * (1.0 + chord), edge_us / edge_bound_us) if is_length else chord
    return np.fmax(slope, 1.0)


def latency_below(
    sizes: Floats, latency_us: Floats, bound_us: Floats, to_us: Any, launch_us: float, *, is_additive: bool
) -> Floats:
    """Latency of lines along the first axis below their first known nodes, where B is ``to_us``."""
    first = FirstNodes.of(sizes, latency_us, bound_us)
    edge_us, edge_bound_us = first.latency_us[0], first.bound_us[0]
    if is_additive:
        held_us = np.maximum(edge_us + (to_us - edge_bound_us), launch_us)
    else:
        held_us = edge_us * to_us / edge_bound_us
    return carried_below(held_us, to_us, first, launch_us)


@dataclass(frozen=True, eq=False)
class PackedGrid:
    """A two-dimensional attention table, padded and without holes, as polynomial cells.

    Attributes
    ----------
    y_axis : ndarray of float64, shape (ny,)
        Batch nodes.
    x_axis : ndarray of float64, shape (nx,)
        kv_len or q_len nodes.
    cells : ndarray of float64, shape (ny, nx, 6)
        Coefficients of the cell above each node; ``cells[..., 0]`` is the node.
    flags : ndarray of uint8, shape (ny, nx)
        Origin of each node: 0 measured, 1 the end of a window between measured nodes or an isolated spike,
        2 filled, 3 borrowed, 4 modelled.
    roofline : BatchBound
        B of the table, us.
    form : int
        Whether cells hold latencies, or work / latency: see :mod:`fastroof.compiled.grids`.
    """

    y_axis: Floats
    x_axis: Floats
    cells: Floats
    flags: Flags
    roofline: BatchBound
    form: int = 0

    @lazy_property
    def arena(self) -> Floats:
        """The grid as one block for the compiled loops."""
        head: list[float] = []
        cells = []
        for axis in (self.y_axis, self.x_axis):
            guide = axis_guide(axis)
            head += [len(axis), guide.shift, guide.first, len(guide.cells)]
            cells.append(guide.cells)
        head.append(self.form)
        parts: list[Any] = [head, self.y_axis, self.x_axis, *cells, self.cells.ravel(), self.flags.ravel()]
        return np.concatenate(parts, dtype=np.float64)

    @property
    def longest_ratio(self) -> float:
        """Latency / B of the longest measured or scaled sequence at its smallest batch, at least 1."""
        measured = np.argwhere(np.isin(self.flags.T, (ORIGIN_MEASURED, ORIGIN_BORROWED)))
        j, i = measured[measured[:, 0] == measured[:, 0].max()][0]
        return max(1.0, float(self.cells[i, j, 0] / self.roofline(self.y_axis[i], self.x_axis[j])))


def _neighbours(known: Bools, at: int) -> list[int]:
    """The nearest known nodes on either side of ``at`` in one row or column (one or two)."""
    where = np.flatnonzero(known)
    return [int(i) for i in (*where[where < at][-1:], *where[where > at][:1])]


def _fill_holes(
    batch: Floats, x: Floats, latency_us: Floats, roofline: BatchBound, is_additive: bool
) -> tuple[Floats, Flags]:
    """Fill the NaNs of a measured grid; return flags of filled nodes too."""
    known = ~np.isnan(latency_us)
    bound = roofline(batch[:, None], x[None, :])
    by_column = slopes_above(latency_us, bound, is_length=False)
    by_row = slopes_above(latency_us.T, bound.T, is_length=True)
    filled = latency_us.copy()
    below_batch, below_x = (
        latency_below(sizes, us, own, own, roofline.launch_us, is_additive=is_additive)
        for sizes, us, own in ((batch, latency_us, bound), (x, latency_us.T, bound.T))
    )
    for i, j in np.argwhere(~known):
        along_batch = [(row, j) for row in _neighbours(known[:, j], i)]
        along_x = [(i, column) for column in _neighbours(known[i], j)]
        between = next((line for line in (along_x, along_batch) if len(line) == 2), None)
        if between is not None:
            low, high = between
            rise = bound[high] - bound[low]
            # beyond a window B does not grow along kv_len
            weight = (
                (bound[i, j] - bound[low]) / rise if rise else (x[j] - x[low[1]]) / (x[high[1]] - x[low[1]])
            )
            filled[i, j] = latency_us[low] + (latency_us[high] - latency_us[low]) * weight
            continue
        lines = [(edge, by_column[j], below_batch[i, j]) for edge in along_batch]
        lines += [(edge, by_row[i], below_x[j, i]) for edge in along_x]
        found, smaller = [], [0.0]
        for edge, slope, low_us in lines:
            if edge > (i, j):
                found.append(low_us)
            elif is_additive:
                found.append(latency_us[edge] + slope * (bound[i, j] - bound[edge]))
                smaller.append(latency_us[edge])
            else:
                found.append(latency_us[edge] * bound[i, j] / bound[edge])
        filled[i, j] = max(float(np.mean(found)), *smaller) if is_additive else found[0]
    return filled, np.where(known, ORIGIN_MEASURED, ORIGIN_EXTRAPOLATED).astype(np.uint8)


def _pad(axes: tuple[Floats, Floats], table: Floats, roofline: BatchBound, is_additive: bool) -> Floats:
    """Add the outer rows (batch 0 and SIZE_LIMIT) and columns (x 0 and SIZE_LIMIT) of a filled grid."""
    batch, x = axes
    for direction in (1, 0):
        y_axis, x_axis = (batch[1:-1], x) if direction else (batch, x)
        bound = roofline(y_axis[:, None], x_axis[None, :])
        lines, bound = (table.T, bound.T) if direction else (table, bound)
        inner, sizes = bound[1:-1], axes[direction][1:-1]
        low = latency_below(sizes, lines, inner, bound[0], roofline.launch_us, is_additive=is_additive)
        if is_additive:
            slope = slopes_above(lines, inner, is_length=bool(direction))
            high = np.maximum(lines[-1] + slope * (bound[-1] - inner[-1]), roofline.launch_us)
        else:
            high = lines[-1] * bound[-1] / inner[-1]
        lines = np.concatenate([low[None], lines, high[None]])
        table = lines.T if direction else lines
    return table


def grid_cells(y_axis: Floats, x_axis: Floats, table: Floats, roofline: BatchBound) -> Floats:
    """Polynomial coefficients of each cell, from its four nodes and the roofline's curvature in x."""
    cells = np.zeros((*table.shape, 6))
    cells[..., 0] = table
    x0, dx = x_axis[:-1], np.diff(x_axis)
    square, slope = roofline.cell_terms(x_axis)
    linear = 2.0 * square * x0 + slope
    whole = dx * (square * dx + linear)
    rise = np.diff(table, axis=1)
    cells[:, :-1, 1] = rise * (linear / whole)
    cells[:, :-1, 2] = rise * (square / whole)
    cells[:-1, :, 3:] = np.diff(cells[..., :3], axis=0) / np.diff(y_axis)[:, None, None]
    return cells


def pack_grid(
    batch: Floats,
    x: Floats,
    latency_us: Floats,
    roofline: BatchBound,
    *,
    is_additive: bool,
    origin: Flags | None = None,
) -> PackedGrid:
    """Pack an attention table of one head shape: holes filled, edges padded, cells computed.

    Parameters
    ----------
    batch, x : ndarray of float64, shape (rows,)
        Batch sizes, and kv_len (decode) or q_len (prefill), in any order.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us; duplicates become their median.
    roofline : BatchBound
        B of the operator at this head shape.
    is_additive : bool
        Extrapolate by the *line* rule instead of the *hold* rule.
    origin : ndarray of uint8, shape (rows,), optional
        Origin of each row (default: measured).

    Returns
    -------
    PackedGrid
        Two nodes more per axis than measured.
    """
    coordinates = (batch, x)
    (batch, x), latency_us = sorted_points(coordinates, latency_us)
    batch_nodes, rows = np.unique(batch, return_inverse=True)
    # the end of a window is a node, so that no cell has a kink or reaches from there to SIZE_LIMIT
    ends = [roofline.window] if roofline.window < np.inf else []
    x_nodes = np.union1d(x, ends)
    columns = np.searchsorted(x_nodes, x)
    table = np.full((len(batch_nodes), len(x_nodes)), np.nan)
    table[rows, columns] = latency_us
    known = ~np.isnan(table)
    table, flags = _fill_holes(batch_nodes, x_nodes, table, roofline, is_additive)
    for end in np.searchsorted(x_nodes, ends):
        between = ~known[:, end] & known[:, :end].any(axis=1) & known[:, end:].any(axis=1)
        flags[between, end] = origin_between(origin)
    flags[rows, columns] = sorted_origins(coordinates, origin, len(rows))
    y_axis = np.r_[0.0, batch_nodes, SIZE_LIMIT]
    x_axis = np.r_[0.0, x_nodes, SIZE_LIMIT]
    table = _pad((y_axis, x_axis), table, roofline, is_additive)
    flags = np.pad(flags, 1, constant_values=ORIGIN_EXTRAPOLATED)
    return PackedGrid(y_axis, x_axis, grid_cells(y_axis, x_axis, table, roofline), flags, roofline)
