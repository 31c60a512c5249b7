"""Lookups in packed tables: one loop an operator and method.

Packed tables are padded (see fastroof.pack): every axis has a node below its measured range and one
far above it, so the loops only ever interpolate. Flags say what a node is: 0 measured, 2 filled or
padded, 4 modelled; a result takes the largest flag among the nodes it used.
"""

from __future__ import annotations

from fastroof.compiled.jit import Flags, Floats, Ints, jit
from fastroof.compiled.search import INTERPOLATED, bracket, curve_point, nearest_node

__all__ = [
    "curve_latency_us",
    "gemm_floor_us",
    "gemm_latency_us",
    "gemm_linear_mfu_us",
    "gemm_nearest_us",
    "grid_flag",
    "grid_latency_us",
    "grid_linear_mfu_us",
    "grid_node_us",
    "grid_value",
]

EXTRAPOLATED = 2


# A grid block of an arena: ny, nx, form, then the y axis, the x axis, ny * nx cells of six
# coefficients, ny * nx flags. A form other than 0 says that cells hold work / latency.
BLOCK_HEADER = 3
FORM_DECODE_RATE = 1
FORM_PREFILL_RATE = 2


@jit
def _grid_cell(arena: Floats, at: int, y: float, x: float) -> tuple[int, int, float, float]:
    """Row, column and offsets (v, u) of (y, x) in the grid block at ``arena[at]``."""
    ny = int(arena[at])
    nx = int(arena[at + 1])
    y_at = at + BLOCK_HEADER
    x_at = y_at + ny
    i = bracket(arena, y_at, x_at, y)
    j = bracket(arena, x_at, x_at + nx, x)
    return i - y_at, j - x_at, y - arena[i], x - arena[j]


@jit
def grid_value(arena: Floats, at: int, y: float, x: float) -> float:
    """Value at (y, x) of the grid block at ``arena[at]``.

    A cell is a polynomial of its offsets u = x - x0 and v = y - y0 from its lower corner:
    ``c0 + u (c1 + u c2) + v (c3 + u (c4 + u c5))``. At a node it is c0, the node itself.
    """
    ny = int(arena[at])
    nx = int(arena[at + 1])
    form = int(arena[at + 2])
    i, j, v, u = _grid_cell(arena, at, y, x)
    c = at + BLOCK_HEADER + ny + nx + (i * nx + j) * 6
    value: float = (
        arena[c]
        + u * (arena[c + 1] + u * arena[c + 2])
        + v * (arena[c + 3] + u * (arena[c + 4] + u * arena[c + 5]))
    )
    if form == FORM_DECODE_RATE:
        return y * x / value
    if form == FORM_PREFILL_RATE:
        return y * (x * (x + 1.0) * 0.5) / value
    return value


@jit
def grid_flag(arena: Floats, at: int, y: float, x: float) -> int:
    """How the value at (y, x) is made: the largest flag among the nodes it uses."""
    ny = int(arena[at])
    nx = int(arena[at + 1])
    i, j, v, u = _grid_cell(arena, at, y, x)
    f = at + BLOCK_HEADER + ny + nx + ny * nx * 6 + i * nx + j
    made = int(arena[f])
    if u != 0.0:
        made = max(made, int(arena[f + 1]), INTERPOLATED)
    if v != 0.0:
        made = max(made, int(arena[f + nx]), INTERPOLATED)
        if u != 0.0:
            made = max(made, int(arena[f + nx + 1]))
    return made


@jit
def grid_latency_us(arena: Floats, y: Floats, x: Floats, out: Floats, origin: Flags) -> None:
    """Look up every (y, x) in the grid block at the start of an arena, in roofline coordinates."""
    for p in range(len(out)):
        out[p] = grid_value(arena, 0, y[p], x[p])
        origin[p] = grid_flag(arena, 0, y[p], x[p])


@jit
def grid_linear_mfu_us(
    arena: Floats,
    y_axis: Floats,
    x_axis: Floats,
    cells: Floats,
    node_work: Floats,
    y: Floats,
    x: Floats,
    work: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Interpolate work / latency linearly between nodes, held outside the measured range."""
    ny = len(y_axis)
    nx = len(x_axis)
    for p in range(len(out)):
        yc = min(max(y[p], y_axis[1]), y_axis[ny - 2])
        xc = min(max(x[p], x_axis[1]), x_axis[nx - 2])
        made = grid_flag(arena, 0, yc, xc)
        inside = yc == y[p] and xc == x[p]
        if made == 0 and inside:
            out[p] = grid_value(arena, 0, yc, xc)
            origin[p] = 0
            continue
        i = bracket(y_axis, 0, ny, yc)
        j = bracket(x_axis, 0, nx, xc)
        wy = (yc - y_axis[i]) / (y_axis[i + 1] - y_axis[i])
        wx = (xc - x_axis[j]) / (x_axis[j + 1] - x_axis[j])
        r0 = node_work[i, j] / cells[i, j, 0]
        r0 += wx * (node_work[i, j + 1] / cells[i, j + 1, 0] - r0)
        r1 = node_work[i + 1, j] / cells[i + 1, j, 0]
        r1 += wx * (node_work[i + 1, j + 1] / cells[i + 1, j + 1, 0] - r1)
        out[p] = work[p] / (r0 + wy * (r1 - r0))
        origin[p] = made if inside else max(made, EXTRAPOLATED)


@jit
def grid_node_us(
    y_axis: Floats,
    x_axis: Floats,
    cells: Floats,
    flags: Floats,
    node_work: Floats,
    is_floor: bool,
    y: Floats,
    x: Floats,
    work: Floats,
    log2_y_axis: Floats,
    log2_x_axis: Floats,
    log2_y: Floats,
    log2_x: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Take the MFU of one measured node: the nearest in log2, or the floor along both axes."""
    ny = len(y_axis)
    nx = len(x_axis)
    for p in range(len(out)):
        best_i = -1
        best_j = -1
        if is_floor:
            for i in range(1, ny - 1):
                if y_axis[i] > y[p] and best_i >= 0:
                    break
                for j in range(1, nx - 1):
                    if x_axis[j] > x[p] and best_i == i:
                        break
                    if flags[i, j] == 0:
                        best_i = i
                        best_j = j
        else:
            least = 0.0
            for i in range(1, ny - 1):
                for j in range(1, nx - 1):
                    if flags[i, j] != 0:
                        continue
                    dy = log2_y_axis[i] - log2_y[p]
                    dx = log2_x_axis[j] - log2_x[p]
                    distance = dy * dy + dx * dx
                    if best_i < 0 or distance < least:
                        least = distance
                        best_i = i
                        best_j = j
        node = cells[best_i, best_j, 0]
        exact = y[p] == y_axis[best_i] and x[p] == x_axis[best_j]
        out[p] = node if exact else node * (work[p] / node_work[best_i, best_j])
        origin[p] = 0 if exact else EXTRAPOLATED


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
def gemm_latency_us(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
    flag: Flags,
    m: Floats,
    n: Floats,
    k: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Look up every (m, n, k), in roofline coordinates."""
    for p in range(len(out)):
        out[p], origin[p] = _gemm_point(
            k_axis, row_start, n_axis, curve_start, m_axis, value, flag, m[p], n[p], k[p]
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
    m: Floats,
    n: Floats,
    k: Floats,
    out: Floats,
    origin: Flags,
) -> None:
    """Interpolate MFU linearly along m, n and k, held outside the measured range."""
    nk = len(k_axis)
    for p in range(len(out)):
        exact, made = _gemm_point(
            k_axis, row_start, n_axis, curve_start, m_axis, value, flag, m[p], n[p], k[p]
        )
        origin[p] = made
        if made == 0:
            out[p] = exact
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
def gemm_nearest_us(
    k_axis: Floats,
    row_start: Ints,
    n_axis: Floats,
    curve_start: Ints,
    m_axis: Floats,
    value: Floats,
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

    Measured (n, k) pairs may be scattered, so every curve is a candidate; one that is too far along
    n and k alone is passed over.
    """
    for p in range(len(out)):
        best_k = 0
        best_n = 0
        best = -1
        least = 0.0
        for i in range(1, len(k_axis) - 1):
            dk = log2_k_axis[i] - log2_k[p]
            for j in range(row_start[i] + 1, row_start[i + 1] - 1):
                dn = log2_n_axis[j] - log2_n[p]
                apart = dk * dk + dn * dn
                if best >= 0 and apart >= least:
                    continue
                node = nearest_node(m_axis, curve_start[j] + 1, curve_start[j + 1] - 1, m[p])
                dm = log2_m_axis[node] - log2_m[p]
                apart += dm * dm
                if best < 0 or apart < least:
                    least = apart
                    best = node
                    best_n = j
                    best_k = i
        exact = k[p] == k_axis[best_k] and n[p] == n_axis[best_n] and m[p] == m_axis[best]
        scale = m[p] * n[p] * k[p] / (m_axis[best] * n_axis[best_n] * k_axis[best_k])
        out[p] = value[best] if exact else value[best] * scale
        origin[p] = 0 if exact else EXTRAPOLATED


@jit
def curve_latency_us(axis: Floats, value: Floats, flag: Flags, x: Floats, out: Floats, origin: Flags) -> None:
    """Look up every x on one curve."""
    for p in range(len(out)):
        out[p], origin[p] = curve_point(axis, value, flag, 0, len(axis), x[p])
