"""The cell of an axis from the leading bits of a coordinate: no search, whatever the axis' length."""

from __future__ import annotations

from fastroof.arrays import Floats, Ints
from fastroof.compiled.jit import jit
from fastroof.compiled.layout import GUIDE_HEADER
from fastroof.compiled.llvm import float_bits, table_load

__all__ = ["GUIDE_HEADER", "Guide", "guide_of", "guided_cell", "guided_node"]

# Several axes lie one after the other in one array, and so do their guides: a header an axis, then the
# cells. Header: first and last cell of the axis, place of its first key's cell, last key, key of the first,
# bits of a float64 to drop for a key. Places and cells count from the beginning of their array.
FIRST_CELL, LAST_CELL, CELLS_AT, LAST_KEY, FIRST_KEY, SHIFT = range(6)

Guide = tuple[int, int, int, int, int, int]


@jit
def guide_of(guides: Ints, axis: int) -> Guide:
    """Header of one axis, to be read once before a loop."""
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
