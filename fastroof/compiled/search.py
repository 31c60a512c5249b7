"""Finding the cell of a sorted axis, and reading a piecewise linear curve."""

from __future__ import annotations

from fastroof.arrays import Flags, Floats
from fastroof.compiled.guides import guide_of, guided_cell
from fastroof.compiled.jit import jit
from fastroof.compiled.llvm import table_load
from fastroof.compiled.origins import INTERPOLATED
from fastroof.compiled.packed import PackedCurve

__all__ = ["bracket", "curve_latency_us", "curve_point", "nearest_node"]


@jit
def bracket(axis: Floats, start: int, stop: int, x: float) -> int:
    """Index i of the cell with ``axis[i] <= x < axis[i + 1]``, clamped to the outer cells."""
    low = start
    high = stop - 1
    while high - low > 1:
        middle = (low + high) >> 1
        if axis[middle] <= x:
            low = middle
        else:
            high = middle
    return low


@jit
def nearest_node(axis: Floats, start: int, stop: int, x: float) -> int:
    """Index of the node nearest to x in log2; a tie goes to the smaller node."""
    if stop - start < 2 or x <= axis[start]:
        return start
    i = bracket(axis, start, stop, x)
    # x / axis[i] <= axis[i + 1] / x, without the division
    return i if x * x <= axis[i] * axis[i + 1] else i + 1


@jit
def curve_point(
    axis: Floats, value: Floats, flag: Flags, start: int, stop: int, x: float
) -> tuple[float, int]:
    """Value at x of the curve through ``(axis, value)[start:stop]``, and how it was made."""
    i = bracket(axis, start, stop, x)
    x0 = axis[i]
    y0 = value[i]
    if x == x0:
        return y0, flag[i]
    w = (x - x0) / (axis[i + 1] - x0)
    return y0 + (value[i + 1] - y0) * w, max(flag[i], flag[i + 1], INTERPOLATED)


@jit
def curve_latency_us(curve: PackedCurve, x: Floats, out: Floats, origin: Flags) -> None:
    """Look up every x on one curve: ``curve_point`` without its search, and without a branch."""
    axis, value, flag, guides = curve
    if len(guides) == 0:
        for p in range(len(out)):
            out[p], origin[p] = curve_point(axis, value, flag, 0, len(axis), x[p])
        return
    guide = guide_of(guides, 0)
    for p in range(len(out)):
        i = guided_cell(axis, guides, guide, x[p])
        x0 = table_load(axis, i)
        y0 = table_load(value, i)
        u = x[p] - x0
        w = u / (table_load(axis, i + 1) - x0)
        out[p] = y0 + (table_load(value, i + 1) - y0) * w
        made = table_load(flag, i)
        origin[p] = made if u == 0.0 else max(made, table_load(flag, i + 1), INTERPOLATED)
