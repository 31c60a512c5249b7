"""Points of an attention table in roofline coordinates: the loop behind raw lookups."""

from __future__ import annotations

from fastroof.arrays import Flags, Floats
from fastroof.compiled.guides import guide_of, guided_node
from fastroof.compiled.jit import jit
from fastroof.compiled.llvm import table_load
from fastroof.compiled.packed import GuidedGrid

__all__ = ["grid_points_us"]


@jit
def grid_points_us(grid: GuidedGrid, y: Floats, x: Floats, out: Floats, origin: Flags) -> None:
    """Look up every (y, x): the polynomials of ``grid_value``, their terms in the same order."""
    axes, guides, cells, origins = grid
    y_guide, x_guide = guide_of(guides, 0), guide_of(guides, 1)
    x_first = x_guide[0]
    nx = len(axes) - x_first
    for p in range(len(out)):
        yp = table_load(y, p)
        xp = table_load(x, p)
        # a grid has a cell above its last node too, which no size reaches
        i = guided_node(axes, guides, y_guide, yp)
        j = guided_node(axes, guides, x_guide, xp)
        v = yp - table_load(axes, i)
        u = xp - table_load(axes, j)
        node = i * nx + (j - x_first)
        c = node * 6
        out[p] = (
            table_load(cells, c)
            + u * (table_load(cells, c + 1) + u * table_load(cells, c + 2))
            + v * (table_load(cells, c + 3) + u * (table_load(cells, c + 4) + u * table_load(cells, c + 5)))
        )
        case = 2 * (u > 0.0) + 4 * (v > 0.0)
        origin[p] = (table_load(origins, node) >> case) & 3
