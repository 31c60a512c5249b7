"""Measured rows -> packed tables: sorted, contiguous arrays that the compiled loops only interpolate in.

Everything outside the measured range is settled here, once, as padded nodes: each axis gets a node at
0 and one at :data:`SIZE_LIMIT`, and holes of a grid are filled. Two rules do it, both in the
coordinates of the operator's roofline ``B = t_launch + flops / peak + bytes / bandwidth``:

* *add*: ``T = T_edge + (B - B_edge)``, what the roofline adds. Decode attention.
* *hold*: ``T = T_edge * B / B_edge``, the edge's distance to the roofline. Everything else.

B is linear in m, n, k, batch and kv_len, and quadratic in q_len, so one far node carries a rule
exactly. Which of several neighbours fills a hole was decided on held-out points of the H100 tables
(hiding the outer 1, 2 and 3 measured nodes): decode takes the larger of the two additions along kv
and along batch (3.2, 4.2, 6.2 %; along kv alone 3.3, 4.7, 6.8; their mean 4.6, 6.8, 8.6), prefill
holds along batch at equal q_len (2.2, 3.0, 3.6 %; along q_len 8.7, 14.6, 19.0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.roofline import Roofline

__all__ = [
    "SIZE_LIMIT",
    "PackedCurve",
    "PackedGemm",
    "PackedGrid",
    "grid_cells",
    "pack_curve",
    "pack_gemm",
    "pack_grid",
]

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.uint8]

SIZE_LIMIT = float(2**40)
"""Last node of every axis: beyond any size that an entry point accepts."""


class PackedCurve(NamedTuple):
    """One sorted curve, padded at both ends: latency against m, message bytes or tokens."""

    axis: Floats
    value: Floats
    flag: Flags


class PackedGemm(NamedTuple):
    """All GEMMs of one dtype, ragged: a row of n nodes for each k, a curve over m for each (n, k).

    The n nodes of row i are ``n_axis[row_start[i]:row_start[i + 1]]``, the points of curve j
    ``m_axis[curve_start[j]:curve_start[j + 1]]``. Published tables hold scattered (n, k) pairs, so
    nothing here needs a full grid.
    """

    k_axis: Floats
    row_start: npt.NDArray[np.int64]
    n_axis: Floats
    curve_start: npt.NDArray[np.int64]
    m_axis: Floats
    value: Floats
    flag: Flags


@dataclass(frozen=True, eq=False)
class PackedGrid:
    """A two-dimensional attention table, padded and without holes, as one arena of polynomial cells.

    Attributes
    ----------
    arena : ndarray of float64
        ny, nx, form, then the parts below one after the other: what ``grid_value`` reads.
    roofline : Roofline
        B of the table, us.
    """

    arena: Floats
    roofline: Roofline

    @classmethod
    def of(
        cls, y_axis: Floats, x_axis: Floats, cells: Floats, flags: Any, roofline: Roofline, form: int = 0
    ) -> PackedGrid:
        """Join the parts of a grid into one arena."""
        head = (len(y_axis), len(x_axis), form)
        return cls(np.concatenate([head, y_axis, x_axis, cells.ravel(), np.ravel(flags)]), roofline)

    @property
    def y_axis(self) -> Floats:
        """Batch nodes, shape (ny,)."""
        return self.arena[3 : 3 + int(self.arena[0])]

    @property
    def x_axis(self) -> Floats:
        """kv_len or q_len nodes, shape (nx,)."""
        start = 3 + int(self.arena[0])
        return self.arena[start : start + int(self.arena[1])]

    @property
    def cells(self) -> Floats:
        """Coefficients of the cell above each node, shape (ny, nx, 6); ``cells[..., 0]`` is the node."""
        ny, nx = len(self.y_axis), len(self.x_axis)
        start = 3 + ny + nx
        return self.arena[start : start + 6 * ny * nx].reshape(ny, nx, 6)

    @property
    def flags(self) -> Floats:
        """What each node is, shape (ny, nx): 0 measured, 2 filled, 3 borrowed, 4 modelled."""
        ny, nx = len(self.y_axis), len(self.x_axis)
        return self.arena[-ny * nx :].reshape(ny, nx)

    @property
    def longest_ratio(self) -> float:
        """Latency / B of the longest measured sequence, at the smallest batch that has it; at least 1."""
        measured = np.argwhere(self.flags.T == ORIGIN_MEASURED)
        j, i = measured[measured[:, 0] == measured[:, 0].max()][0]
        return max(1.0, float(self.cells[i, j, 0] / self.roofline(self.y_axis[i], self.x_axis[j])))


def _median_of_duplicates(
    coordinates: tuple[Floats, ...], latency_us: Floats
) -> tuple[tuple[Floats, ...], Floats]:
    """Sort points by their coordinates, the first one slowest; equal points become their median."""
    order = np.lexsort(coordinates[::-1])
    sorted_axes = [c[order].astype(np.float64) for c in coordinates]
    latency_us = latency_us[order]
    new = np.zeros(len(order), dtype=bool)
    new[0] = True
    for axis in sorted_axes:
        new[1:] |= axis[1:] != axis[:-1]
    if new.all():
        return tuple(sorted_axes), latency_us
    starts = np.flatnonzero(new)
    medians = np.array([np.median(part) for part in np.split(latency_us, starts[1:])])
    return tuple(a[starts] for a in sorted_axes), medians


def pack_curve(x: Floats, latency_us: Floats, roofline_us: Callable[[Floats], Floats]) -> PackedCurve:
    """Pack one curve; beyond its ends latency / B is held.

    Parameters
    ----------
    x : ndarray of float64, shape (rows,)
        Sizes, at least 1, in any order; of duplicates the median counts.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us.
    roofline_us : callable
        B at an array of sizes, us.

    Returns
    -------
    PackedCurve
        Rows sorted, with a node at 0 and one at SIZE_LIMIT.
    """
    (axis,), value = _median_of_duplicates((x,), latency_us)
    ends = np.array([0.0, SIZE_LIMIT])
    edge = np.array([axis[0], axis[-1]])
    padded = np.array([value[0], value[-1]]) * roofline_us(ends) / roofline_us(edge)
    flag = np.full(len(axis) + 2, ORIGIN_MEASURED, np.uint8)
    flag[[0, -1]] = ORIGIN_EXTRAPOLATED
    return PackedCurve(np.r_[0.0, axis, SIZE_LIMIT], np.r_[padded[0], value, padded[1]], flag)


def pack_gemm(
    m: Floats,
    n: Floats,
    k: Floats,
    latency_us: Floats,
    peak_flops_per_us: float,
    bytes_per_us: float,
    element_bytes: float,
    output_bytes: float = 2,
) -> PackedGemm:
    """Pack the GEMMs of one dtype; beyond the measured m, n or k latency / B is held.

    Parameters
    ----------
    m, n, k : ndarray of float64, shape (rows,)
        Sizes in any order.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us.
    peak_flops_per_us, bytes_per_us : float
        The dtype's peak and the memory bandwidth.
    element_bytes, output_bytes : float
        Bytes of an input and of an output element.

    Returns
    -------
    PackedGemm
        Two more rows than measured k, two more n a row, two more m a curve.
    """
    (k, n, m), latency_us = _median_of_duplicates((k, n, m), latency_us)
    t_launch = float(latency_us.min())

    def roofline(m: Any, n: Any, k: Any) -> Any:
        moved = element_bytes * (m * k + n * k) + output_bytes * m * n
        return t_launch + 2.0 * m * n * k / peak_flops_per_us + moved / bytes_per_us

    new_curve = np.r_[True, (k[1:] != k[:-1]) | (n[1:] != n[:-1])]
    starts = np.flatnonzero(new_curve)
    stops = np.r_[starts[1:], len(m)]
    k_axis: list[float] = [0.0]
    rows: list[list[tuple[float, Floats, Floats, Flags]]] = [[]]
    for start, stop in zip(starts, stops, strict=True):
        kk, nn = float(k[start]), float(n[start])
        if kk != k_axis[-1]:
            k_axis.append(kk)
            rows.append([])
        mm = m[start:stop]
        ends = np.array([0.0, SIZE_LIMIT])
        held = latency_us[[start, stop - 1]] / roofline(mm[[0, -1]], nn, kk) * roofline(ends, nn, kk)
        flag = np.full(len(mm) + 2, ORIGIN_MEASURED, np.uint8)
        flag[[0, -1]] = ORIGIN_EXTRAPOLATED
        axis = np.r_[0.0, mm, SIZE_LIMIT]
        rows[-1].append((nn, axis, np.r_[held[0], latency_us[start:stop], held[1]], flag))

    def held_curve(
        curve: tuple[float, Floats, Floats, Flags], n_from: float, k_from: float, n_to: float, k_to: float
    ) -> tuple[float, Floats, Floats, Flags]:
        _, axis, value, flag = curve
        scale = roofline(axis, n_to, k_to) / roofline(axis, n_from, k_from)
        return n_to, axis, value * scale, np.full_like(flag, ORIGIN_EXTRAPOLATED)

    for kk, row in zip(k_axis[1:], rows[1:], strict=True):
        first, last = row[0], row[-1]
        row.insert(0, held_curve(first, first[0], kk, 0.0, kk))
        row.append(held_curve(last, last[0], kk, SIZE_LIMIT, kk))
    rows[0] = [held_curve(c, c[0], k_axis[1], c[0], 0.0) for c in rows[1]]
    rows.append([held_curve(c, c[0], k_axis[-1], c[0], SIZE_LIMIT) for c in rows[-1]])
    k_axis.append(SIZE_LIMIT)

    curves = [curve for row in rows for curve in row]
    return PackedGemm(
        k_axis=np.array(k_axis),
        row_start=np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int64),
        n_axis=np.array([c[0] for c in curves]),
        curve_start=np.r_[0, np.cumsum([len(c[1]) for c in curves])].astype(np.int64),
        m_axis=np.concatenate([c[1] for c in curves]),
        value=np.concatenate([c[2] for c in curves]),
        flag=np.concatenate([c[3] for c in curves]),
    )


def _neighbours(known: npt.NDArray[np.bool_], at: int) -> list[int]:
    """The nearest known places on either side of ``at`` in one row or column: one or two of them."""
    where = np.flatnonzero(known)
    return [int(i) for i in (*where[where < at][-1:], *where[where > at][:1])]


def _fill_holes(
    batch: Floats, x: Floats, latency_us: Floats, roofline: Roofline, is_decode: bool
) -> tuple[Floats, Flags]:
    """Fill the NaNs of a measured grid, and say which nodes were filled."""
    known = ~np.isnan(latency_us)
    bound = roofline(batch[:, None], x[None, :])
    filled = latency_us.copy()
    for i, j in np.argwhere(~known):
        along_batch = [(row, j) for row in _neighbours(known[:, j], i)]
        along_x = [(i, column) for column in _neighbours(known[i], j)]
        between = next((line for line in (along_x, along_batch) if len(line) == 2), None)
        if between is not None:
            low, high = between
            weight = (bound[i, j] - bound[low]) / (bound[high] - bound[low])
            filled[i, j] = latency_us[low] + (latency_us[high] - latency_us[low]) * weight
        elif is_decode:
            added = [latency_us[edge] + (bound[i, j] - bound[edge]) for edge in (*along_batch, *along_x)]
            filled[i, j] = max(roofline.t_launch_us, *added)
        else:
            edge = (*along_batch, *along_x)[0]
            filled[i, j] = latency_us[edge] * bound[i, j] / bound[edge]
    return filled, np.where(known, ORIGIN_MEASURED, ORIGIN_EXTRAPOLATED).astype(np.uint8)


def _pad(axes: tuple[Floats, Floats], table: Floats, roofline: Roofline, is_decode: bool) -> Floats:
    """Add the outer rows (batch 0 and SIZE_LIMIT) and columns (x 0 and SIZE_LIMIT) of a filled grid."""
    batch, x = axes
    for direction in (1, 0):
        y_axis, x_axis = (batch[1:-1], x) if direction else (batch, x)
        bound = roofline(y_axis[:, None], x_axis[None, :])
        inner = bound[:, 1:-1] if direction else bound[1:-1, :]
        edge, edge_bound = table.take([0, -1], direction), inner.take([0, -1], direction)
        outer_bound = bound.take([0, -1], direction)
        if is_decode:
            outer = np.maximum(edge + (outer_bound - edge_bound), roofline.t_launch_us)
        else:
            outer = edge * outer_bound / edge_bound
        first, last = np.split(outer, 2, direction)
        table = np.concatenate([first, table, last], direction)
    return table


def grid_cells(y_axis: Floats, x_axis: Floats, table: Floats, roofline: Roofline) -> Floats:
    """Polynomial coefficients of each cell, from its four nodes and the roofline's curvature in x."""
    cells = np.zeros((*table.shape, 6))
    cells[..., 0] = table
    x0, dx = x_axis[:-1], np.diff(x_axis)
    linear = 2.0 * roofline.square_us * x0 + roofline.slope_us
    whole = dx * (roofline.square_us * dx + linear)
    rise = np.diff(table, axis=1)
    cells[:, :-1, 1] = rise * (linear / whole)
    cells[:, :-1, 2] = rise * (roofline.square_us / whole)
    slope = np.diff(cells[..., :3], axis=0) / np.diff(y_axis)[:, None, None]
    cells[:-1, :, 3:] = slope
    return cells


def pack_grid(
    batch: Floats, x: Floats, latency_us: Floats, roofline: Roofline, *, is_decode: bool
) -> PackedGrid:
    """Pack an attention table of one head shape: holes filled, edges padded, cells computed.

    Parameters
    ----------
    batch, x : ndarray of float64, shape (rows,)
        Batch sizes, and kv_len (decode) or q_len (prefill), in any order.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us; of duplicates the median counts.
    roofline : Roofline
        B of the operator at this head shape.
    is_decode : bool
        Extrapolate by the *add* rule instead of the *hold* rule.

    Returns
    -------
    PackedGrid
        Two more nodes an axis than were measured.
    """
    (batch, x), latency_us = _median_of_duplicates((batch, x), latency_us)
    batch_nodes, rows = np.unique(batch, return_inverse=True)
    x_nodes, columns = np.unique(x, return_inverse=True)
    table = np.full((len(batch_nodes), len(x_nodes)), np.nan)
    table[rows, columns] = latency_us
    table, flags = _fill_holes(batch_nodes, x_nodes, table, roofline, is_decode)
    y_axis = np.r_[0.0, batch_nodes, SIZE_LIMIT]
    x_axis = np.r_[0.0, x_nodes, SIZE_LIMIT]
    table = _pad((y_axis, x_axis), table, roofline, is_decode)
    flags = np.pad(flags, 1, constant_values=ORIGIN_EXTRAPOLATED)
    return PackedGrid.of(y_axis, x_axis, grid_cells(y_axis, x_axis, table, roofline), flags, roofline)
