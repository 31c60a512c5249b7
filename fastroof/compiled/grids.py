"""Loops over two-dimensional attention tables: the value of a cell, and every lookup method.

Packed grids are padded and without holes (see fastroof.pack), so the loops only ever interpolate. Flags
say what a node is: 0 measured, 2 filled or padded, 3 borrowed, 4 modelled; a result takes the largest
flag among the nodes it used.
"""

from __future__ import annotations

from fastroof.compiled.jit import Flags, Floats, jit
from fastroof.compiled.search import INTERPOLATED, bracket

__all__ = [
    "BLOCK_HEADER",
    "FORM_DECODE_RATE",
    "FORM_PREFILL_RATE",
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
