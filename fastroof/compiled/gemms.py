"""Loops over GEMM tables, one for each lookup method.

Packed tables are padded (see fastroof.pack): every axis has a node below its measured range and one
far above it, so the loops only ever interpolate. Flags say what a node is: 0 measured, 2 padded; a
result takes the largest flag among the nodes it used.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.compiled.guides import Guide, bracket, curve_point, guide_of, guided_cell, nearest_node
from fastroof.compiled.jit import jit, jit_inline
from fastroof.compiled.layout import EXTRAPOLATED, INTERPOLATED, PackedGemm
from fastroof.compiled.llvm import table_load

GemmGuides = tuple[Guide, Guide, Guide]
"""Sizes k, n and m."""


GemmSizes = tuple[Floats, Floats, Floats]
"""m, n and k of GEMMs or of a table's nodes. A NamedTuple would cost 1.1 us per call, a tuple 0.1."""


class GemmPoint(NamedTuple):
    """The row to search."""

    m: float
    n: float
    log2_m: float
    log2_n: float


class NearestNode(NamedTuple):
    """The nearest measured point so far: squared distance and position; node -1 for none."""

    squared: float
    row: int
    curve: int
    node: int


@jit_inline
def _curve_us(gemm: PackedGemm, curve: int, m: float) -> tuple[float, int]:
    """Latency at m on the curve of one (n, k)."""
    start, stop = gemm.curve_start[curve], gemm.curve_start[curve + 1]
    return curve_point(gemm.m_axis, gemm.value, gemm.flag, start, stop, m)


@jit_inline
def _row_us(gemm: PackedGemm, row: int, m: float, n: float) -> tuple[float, int]:
    """Latency at (m, n) in the row of one k."""
    i = bracket(gemm.n_axis, gemm.row_start[row], gemm.row_start[row + 1], n)
    y0, made = _curve_us(gemm, i, m)
    n0 = gemm.n_axis[i]
    if n == n0:
        return y0, made
    y1, other = _curve_us(gemm, i + 1, m)
    w = (n - n0) / (gemm.n_axis[i + 1] - n0)
    return y0 + (y1 - y0) * w, max(made, other, INTERPOLATED)


@jit_inline
def _ragged_us(gemm: PackedGemm, m: float, n: float, k: float) -> tuple[float, int]:
    """Latency at (m, n, k): along m and n in the rows of the two measured k around, then along k."""
    i = bracket(gemm.k_axis, 0, len(gemm.k_axis), k)
    y0, made = _row_us(gemm, i, m, n)
    k0 = gemm.k_axis[i]
    if k == k0:
        return y0, made
    y1, other = _row_us(gemm, i + 1, m, n)
    w = (k - k0) / (gemm.k_axis[i + 1] - k0)
    return y0 + (y1 - y0) * w, max(made, other, INTERPOLATED)


@jit
def _along_m(grid: Floats, node: int, w: float) -> float:
    """Latency between two m nodes of one curve."""
    y0: float = table_load(grid, node)
    y1: float = table_load(grid, node + 1)
    return y0 + (y1 - y0) * w


@jit
def _grid_us(gemm: PackedGemm, guides: GemmGuides, m: float, n: float, k: float) -> tuple[float, int]:
    """Latency at (m, n, k) in the full grid: the steps of ``_ragged_us`` in the same order."""
    axes, grid = gemm.axes, gemm.grid
    k_guide, n_guide, m_guide = guides
    i = guided_cell(axes, gemm.guides, k_guide, k)
    j = guided_cell(axes, gemm.guides, n_guide, n)
    h = guided_cell(axes, gemm.guides, m_guide, m)
    k0, n0, m0 = table_load(axes, i), table_load(axes, j), table_load(axes, h)
    wk = (k - k0) / (table_load(axes, i + 1) - k0)
    wn = (n - n0) / (table_load(axes, j + 1) - n0)
    wm = (m - m0) / (table_load(axes, h + 1) - m0)
    # where each axis begins also says how long the one before it is
    n_first, m_first = n_guide[0], m_guide[0]
    n_nodes = m_first - n_first
    m_nodes = len(axes) - m_first
    node = (i * n_nodes + (j - n_first)) * m_nodes + (h - m_first)
    above = node + n_nodes * m_nodes
    y00 = _along_m(grid, node, wm)
    y01 = _along_m(grid, node + m_nodes, wm)
    y10 = _along_m(grid, above, wm)
    y11 = _along_m(grid, above + m_nodes, wm)
    y0 = y00 + (y01 - y00) * wn
    y1 = y10 + (y11 - y10) * wn
    case = 2 * (m > m0) + 4 * (n > n0) + 8 * (k > k0)
    return y0 + (y1 - y0) * wk, (table_load(gemm.origins, node) >> case) & 3


@jit
def gemm_latency_us(gemm: PackedGemm, m: Floats, n: Floats, k: Floats, out: Floats, origin: Flags) -> None:
    """Look up every (m, n, k), in roofline coordinates."""
    if len(gemm.grid) == 0:
        for p in range(len(out)):
            out[p], origin[p] = _ragged_us(gemm, m[p], n[p], k[p])
        return
    guides = (guide_of(gemm.guides, 0), guide_of(gemm.guides, 1), guide_of(gemm.guides, 2))
    for p in range(len(out)):
        out[p], origin[p] = _grid_us(gemm, guides, m[p], n[p], k[p])


@jit
def _clamp(axis: Floats, start: int, stop: int, x: float) -> float:
    """Clamp x to the measured range of a padded axis."""
    low: float = axis[start + 1]
    high: float = axis[stop - 2]
    return min(max(x, low), high)


@jit_inline
def _row_rate(gemm: PackedGemm, row: int, m: float, n: float) -> float:
    """Work / latency at (m, n) in the row of one k, linear between nodes and held outside."""
    k = gemm.k_axis[row]
    start, stop = gemm.row_start[row], gemm.row_start[row + 1]
    nc = _clamp(gemm.n_axis, start, stop, n)
    i = bracket(gemm.n_axis, start, stop, nc)
    wn = (nc - gemm.n_axis[i]) / (gemm.n_axis[i + 1] - gemm.n_axis[i])
    rate: float = 0.0
    for side in range(2):
        weight = wn if side == 1 else 1.0 - wn
        if weight == 0.0:
            continue
        c0 = gemm.curve_start[i + side]
        c1 = gemm.curve_start[i + side + 1]
        mc = _clamp(gemm.m_axis, c0, c1, m)
        j = bracket(gemm.m_axis, c0, c1, mc)
        wm = (mc - gemm.m_axis[j]) / (gemm.m_axis[j + 1] - gemm.m_axis[j])
        work = gemm.n_axis[i + side] * k
        r0 = gemm.m_axis[j] * work / gemm.value[j]
        r1 = gemm.m_axis[j + 1] * work / gemm.value[j + 1]
        rate += weight * (r0 + wm * (r1 - r0))
    return rate


@jit
def gemm_linear_mfu_us(gemm: PackedGemm, m: Floats, n: Floats, k: Floats, out: Floats, origin: Flags) -> None:
    """Interpolate MFU linearly along m, n and k, held outside the measured range."""
    k_axis = gemm.k_axis
    gemm_latency_us(gemm, m, n, k, out, origin)
    for p in range(len(out)):
        if origin[p] == 0:
            continue
        kc = _clamp(k_axis, 0, len(k_axis), k[p])
        i = bracket(k_axis, 0, len(k_axis), kc)
        wk = (kc - k_axis[i]) / (k_axis[i + 1] - k_axis[i])
        rate = _row_rate(gemm, i, m[p], n[p])
        if wk != 0.0:
            rate += wk * (_row_rate(gemm, i + 1, m[p], n[p]) - rate)
        out[p] = m[p] * n[p] * k[p] / rate


@jit
def _floor_node(axis: Floats, start: int, stop: int, x: float) -> int:
    """Last measured node of a padded axis at or below x, or its first."""
    if x < axis[start + 1]:
        return start + 1
    return min(bracket(axis, start, stop, x), stop - 2)


@jit_inline
def _scaled_us(
    gemm: PackedGemm, row: int, curve: int, node: int, m: float, n: float, k: float
) -> tuple[float, int]:
    """Latency at (m, n, k) with the MFU of one measured point."""
    node_k, node_n, node_m = gemm.k_axis[row], gemm.n_axis[curve], gemm.m_axis[node]
    if k == node_k and n == node_n and m == node_m:
        return gemm.value[node], int(gemm.flag[node])
    return gemm.value[node] * (m * n * k / (node_m * node_n * node_k)), EXTRAPOLATED


@jit
def gemm_floor_us(gemm: PackedGemm, m: Floats, n: Floats, k: Floats, out: Floats, origin: Flags) -> None:
    """Take the MFU of the measured point below: the floor along k, then n, then m."""
    for p in range(len(out)):
        row = _floor_node(gemm.k_axis, 0, len(gemm.k_axis), k[p])
        curve = _floor_node(gemm.n_axis, gemm.row_start[row], gemm.row_start[row + 1], n[p])
        node = _floor_node(gemm.m_axis, gemm.curve_start[curve], gemm.curve_start[curve + 1], m[p])
        out[p], origin[p] = _scaled_us(gemm, row, curve, node, m[p], n[p], k[p])


@jit_inline
def _nearest_in_row(
    gemm: PackedGemm, log2_axes: GemmSizes, row: int, point: GemmPoint, along_k: float, nearest: NearestNode
) -> NearestNode:
    """The nearest point so far or in the row of one k."""
    log2_m_axis, log2_n_axis, _ = log2_axes
    squared, best_row, best_curve, best = nearest
    start, stop = gemm.row_start[row], gemm.row_start[row + 1]
    cell = bracket(gemm.n_axis, start, stop, point.n)
    for step in (-1, 1):
        j = cell if step < 0 else cell + 1
        while start < j < stop - 1:
            dn = log2_n_axis[j] - point.log2_n
            apart = along_k + dn * dn
            if apart > squared:
                break
            node = nearest_node(gemm.m_axis, gemm.curve_start[j] + 1, gemm.curve_start[j + 1] - 1, point.m)
            dm = log2_m_axis[node] - point.log2_m
            apart += dm * dm
            if best < 0 or apart < squared or (apart == squared and j < best_curve):
                squared, best_row, best_curve, best = apart, row, j, node
            j += step
    return NearestNode(squared, best_row, best_curve, best)


@jit
def gemm_nearest_us(
    gemm: PackedGemm,
    log2_axes: GemmSizes,
    sizes: GemmSizes,
    log2_sizes: GemmSizes,
    out: Floats,
    origin: Flags,
) -> None:
    """Take the MFU of the measured point nearest in log2 of m, n and k; of a tie the smaller."""
    m, n, k = sizes
    log2_m, log2_n, log2_k = log2_sizes
    log2_k_axis = log2_axes[2]
    last = len(gemm.k_axis) - 1
    for p in range(len(out)):
        point = GemmPoint(m[p], n[p], log2_m[p], log2_n[p])
        nearest = NearestNode(np.inf, 0, 0, -1)
        cell = bracket(gemm.k_axis, 0, last + 1, k[p])
        for step in (-1, 1):
            i = cell if step < 0 else cell + 1
            while 0 < i < last:
                dk = log2_k_axis[i] - log2_k[p]
                if dk * dk > nearest.squared:
                    break
                nearest = _nearest_in_row(gemm, log2_axes, i, point, dk * dk, nearest)
                i += step
        out[p], origin[p] = _scaled_us(gemm, nearest.row, nearest.curve, nearest.node, m[p], n[p], k[p])
