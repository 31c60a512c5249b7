"""Find the cell of an axis from the leading bits of a coordinate: no search, whatever the axis' length."""

from __future__ import annotations

from fastroof.arrays import Flags, Floats, Ints
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import GUIDE_HEADER, INTERPOLATED, PackedCurve
from fastroof.compiled.llvm import float_bits, table_load

# Several axes lie one after the other in one array, and so do their guides: a header per axis, then the
# cells. Header: first and last cell of the axis, place of its first key's cell, last key, key of the first,
# bits of a float64 to drop for a key. Places and cells count from the beginning of their array.
FIRST_CELL, LAST_CELL, CELLS_AT, LAST_KEY, FIRST_KEY, SHIFT = range(6)

Guide = tuple[int, int, int, int, int, int]


@jit
def guide_of(guides: Ints, axis: int) -> Guide:
    """Header of one axis, read once before a loop."""
    at = axis * GUIDE_HEADER
    return (
        guides[at + FIRST_CELL],
        guides[at + LAST_CELL],
        guides[at + CELLS_AT],
        guides[at + LAST_KEY],
        guides[at + FIRST_KEY],
        guides[at + SHIFT],
    )


@jit
def guided_node(axes: Floats, guides: Ints, guide: Guide, x: float) -> int:
    """Index of the last node of one axis at or below x, which is below the axis' end."""
    _, _, cells_at, last_key, first_key, shift = guide
    key = min(max((float_bits(x) >> shift) - first_key, 0), last_key)
    i = table_load(guides, cells_at + key)
    return int(i + (table_load(axes, i + 1) <= x))


@jit
def guided_cell(axes: Floats, guides: Ints, guide: Guide, x: float) -> int:
    """Index i with ``axes[i] <= x < axes[i + 1]``, clamped to the outer cells of one axis."""
    return min(guided_node(axes, guides, guide, x), guide[1])


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
    """Return the value at x of the curve through ``(axis, value)[start:stop]``, and its origin."""
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
