"""Loops over GEMM tables: one a lookup method.

Packed tables are padded (see fastroof.pack): every axis has a node below its measured range and one
far above it, so the loops only ever interpolate. Flags say what a node is: 0 measured, 2 padded; a
result takes the largest flag among the nodes it used.
"""

from __future__ import annotations

import numpy as np

from fastroof.compiled.guides import Guide, guide_of, guided_cell
from fastroof.compiled.jit import Flags, Floats, Ints, jit
from fastroof.compiled.llvm import table_load
from fastroof.compiled.search import INTERPOLATED, bracket, curve_point, nearest_node

__all__ = [
    "gemm_floor_us",
    "gemm_latency_us",
    "gemm_linear_mfu_us",
    "gemm_nearest_us",
]

EXTRAPOLATED = 2


@jit
def _gemm_row_us(
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    start: int,
    stop: int,
    m: float,
    n: float,
) -> tuple[float, int]:
    """Latency at (m, n) in the row of one k, whose n nodes are ``n_axis[start:stop]``."""
    i = bracket(n_axis, start, stop, n)
    y0, made = curve_point(m_axis, value, flag, curve_start[i], curve_start[i + 1], m)
    n0 = n_axis[i]
    if n == n0:
        return y0, made
    y1, other = curve_point(m_axis, value, flag, curve_start[i + 1], curve_start[i + 2], m)
    w = (n - n0) / (n_axis[i + 1] - n0)
    return y0 + (y1 - y0) * w, max(made, other, INTERPOLATED)


@jit
def _gemm_point(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    m: float,
    n: float,
    k: float,
) -> tuple[float, int]:
    """Latency at (m, n, k): along m and n in the rows of the two measured k around, then along k."""
    i = bracket(k_axis, 0, len(k_axis), k)
    y0, made = _gemm_row_us(n_axis, curve_start, m_axis, value, flag, row_start[i], row_start[i + 1], m, n)
    k0 = k_axis[i]
    if k == k0:
        return y0, made
    y1, other = _gemm_row_us(
        n_axis, curve_start, m_axis, value, flag, row_start[i + 1], row_start[i + 2], m, n
    )
    w = (k - k0) / (k_axis[i + 1] - k0)
    return y0 + (y1 - y0) * w, max(made, other, INTERPOLATED)


@jit
def _along_m(grid: Floats, node: int, w: float) -> float:
    """Latency between two m nodes of one curve."""
    y0: float = table_load(grid, node)
    y1: float = table_load(grid, node + 1)
    return y0 + (y1 - y0) * w


@jit
def _gemm_grid_point(
    axes: Floats,
    guides: Ints,
    grid: Floats,
    origins: Ints,
    k_guide: Guide,
    n_guide: Guide,
    m_guide: Guide,
    m: float,
    n: float,
    k: float,
) -> tuple[float, int]:
    """Latency at (m, n, k) in the full grid: the steps of ``_gemm_point`` in the same order.

    Without a branch: at a node the weight is 0, and what lies above it counts for nothing. Predicted 8 ns
    a point, measured 6.9, against 210. Kept scalar: with eight points at a time 17 gathers take 9.7.
    Three products with stored 1 / (x1 - x0) in place of the divisions gain 0.2 and lose last bits.
    """
    i = guided_cell(axes, guides, k_guide, k)
    j = guided_cell(axes, guides, n_guide, n)
    h = guided_cell(axes, guides, m_guide, m)
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
    return y0 + (y1 - y0) * wk, (table_load(origins, node) >> case) & 3


@jit
def gemm_latency_us(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    axes: Floats,
    guides: Ints,
    grid: Floats,
    origins: Ints,
    m: Floats,
    n: Floats,
    k: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Look up every (m, n, k), in roofline coordinates."""
    if len(grid) == 0:
        for p in range(len(out)):
            out[p], origin[p] = _gemm_point(
                k_axis, row_start, n_axis, curve_start, m_axis, value, flag, m[p], n[p], k[p]
            )
        return
    k_guide, n_guide, m_guide = guide_of(guides, 0), guide_of(guides, 1), guide_of(guides, 2)
    for p in range(len(out)):
        out[p], origin[p] = _gemm_grid_point(
            axes, guides, grid, origins, k_guide, n_guide, m_guide, m[p], n[p], k[p]
        )


@jit
def _clamp(axis: Floats, start: int, stop: int, x: float) -> float:
    """X moved into the measured range of a padded axis."""
    low: float = axis[start + 1]
    high: float = axis[stop - 2]
    return min(max(x, low), high)


@jit
def _gemm_row_rate(
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    start: int,
    stop: int,
    m: float,
    n: float,
    k: float,
) -> float:
    """Work / latency at (m, n) in the row of one k, linear between nodes and held outside."""
    nc = _clamp(n_axis, start, stop, n)
    i = bracket(n_axis, start, stop, nc)
    wn = (nc - n_axis[i]) / (n_axis[i + 1] - n_axis[i])
    rate: float = 0.0
    for side in range(2):
        weight = wn if side == 1 else 1.0 - wn
        if weight == 0.0:
            continue
        c0 = curve_start[i + side]
        c1 = curve_start[i + side + 1]
        mc = _clamp(m_axis, c0, c1, m)
        j = bracket(m_axis, c0, c1, mc)
        wm = (mc - m_axis[j]) / (m_axis[j + 1] - m_axis[j])
        work = n_axis[i + side] * k
        r0 = m_axis[j] * work / value[j]
        r1 = m_axis[j + 1] * work / value[j + 1]
        rate += weight * (r0 + wm * (r1 - r0))
    return rate


@jit
def gemm_linear_mfu_us(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    axes: Floats,
    guides: Ints,
    grid: Floats,
    origins: Ints,
    m: Floats,
    n: Floats,
    k: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Interpolate MFU linearly along m, n and k, held outside the measured range."""
    nk = len(k_axis)
    gemm_latency_us(
        k_axis, row_start, n_axis, curve_start, m_axis, value, flag, axes, guides, grid, origins,
        m, n, k, out, origin,
    )  # fmt: skip
    for p in range(len(out)):
        if origin[p] == 0:
            continue
        kc = _clamp(k_axis, 0, nk, k[p])
        i = bracket(k_axis, 0, nk, kc)
        wk = (kc - k_axis[i]) / (k_axis[i + 1] - k_axis[i])
        rate = _gemm_row_rate(
            n_axis, curve_start, m_axis, value, row_start[i], row_start[i + 1], m[p], n[p], k_axis[i]
        )
        if wk != 0.0:
            other = _gemm_row_rate(
                n_axis, curve_start, m_axis, value, row_start[i + 1], row_start[i + 2], m[p], n[p],
                k_axis[i + 1],
            )  # fmt: skip
            rate += wk * (other - rate)
        out[p] = m[p] * n[p] * k[p] / rate


@jit
def _floor_node(axis: Floats, start: int, stop: int, x: float) -> int:
    """Last measured node of a padded axis at or below x, or its first."""
    if x < axis[start + 1]:
        return start + 1
    return min(bracket(axis, start, stop, x), stop - 2)


@jit
def gemm_floor_us(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    axes: Floats,
    guides: Ints,
    grid: Floats,
    origins: Ints,
    m: Floats,
    n: Floats,
    k: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Take the MFU of the measured point below: the floor along k, then n, then m."""
    for p in range(len(out)):
        i = _floor_node(k_axis, 0, len(k_axis), k[p])
        j = _floor_node(n_axis, row_start[i], row_start[i + 1], n[p])
        node = _floor_node(m_axis, curve_start[j], curve_start[j + 1], m[p])
        exact = k[p] == k_axis[i] and n[p] == n_axis[j] and m[p] == m_axis[node]
        scale = m[p] * n[p] * k[p] / (m_axis[node] * n_axis[j] * k_axis[i])
        out[p] = value[node] if exact else value[node] * scale
        origin[p] = 0 if exact else EXTRAPOLATED


@jit
def _nearest_in_row(
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    log2_n_axis: Floats,
    log2_m_axis: Floats,
    start: int,
    stop: int,
    m: float,
    n: float,
    log2_m: float,
    log2_n: float,
    along_k: float,
    found: tuple[float, int, int],
) -> tuple[float, int, int]:
    """Squared distance, curve and node of the nearest point found so far or in the row of one k."""
    least, best_n, best = found
    cell = bracket(n_axis, start, stop, n)
    for step in (-1, 1):
        j = cell if step < 0 else cell + 1
        while start < j < stop - 1:
            dn = log2_n_axis[j] - log2_n
            apart = along_k + dn * dn
            if apart > least:
                break
            node = nearest_node(m_axis, curve_start[j] + 1, curve_start[j + 1] - 1, m)
            dm = log2_m_axis[node] - log2_m
            apart += dm * dm
            if best < 0 or apart < least or (apart == least and j < best_n):
                least, best_n, best = apart, j, node
            j += step
    return least, best_n, best


@jit
def gemm_nearest_us(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    axes: Floats,
    guides: Ints,
    grid: Floats,
    origins: Ints,
    log2_k_axis: Floats,
    log2_n_axis: Floats,
    log2_m_axis: Floats,
    m: Floats,
    n: Floats,
    k: Floats,
    log2_m: Floats,
    log2_n: Floats,
    log2_k: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Take the MFU of the measured point nearest in log2 of m, n and k; of a tie the smaller.

    Measured (n, k) pairs may be scattered, so the walk goes outwards from (n, k), along k and in each
    row along n, until what lies ahead is too far along k, or along k and n, alone. Predicted 10 times as
    fast as trying every curve, measured 6 (760 to 122 ns a point): 2.5 curves are left, each searched.
    """
    last = len(k_axis) - 1
    for p in range(len(out)):
        found = (np.inf, 0, -1)
        best_k = 0
        cell = bracket(k_axis, 0, last + 1, k[p])
        for step in (-1, 1):
            i = cell if step < 0 else cell + 1
            while 0 < i < last:
                dk = log2_k_axis[i] - log2_k[p]
                if dk * dk > found[0]:
                    break
                nearer = _nearest_in_row(
                    n_axis, curve_start, m_axis, log2_n_axis, log2_m_axis, row_start[i], row_start[i + 1],
                    m[p], n[p], log2_m[p], log2_n[p], dk * dk, found,
                )  # fmt: skip
                if nearer[2] != found[2]:
                    best_k = i
                found = nearer
                i += step
        _, best_n, best = found
        exact = k[p] == k_axis[best_k] and n[p] == n_axis[best_n] and m[p] == m_axis[best]
        scale = m[p] * n[p] * k[p] / (m_axis[best] * n_axis[best_n] * k_axis[best_k])
        out[p] = value[best] if exact else value[best] * scale
        origin[p] = 0 if exact else EXTRAPOLATED
