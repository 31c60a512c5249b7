"""Tables that are no grid, looked up at a grid's nodes: what a plan's loops read of them.

Between nodes a cell goes as the table's own law does along its rows: by B, a polynomial of the length where
no kink of B lies within the cell. So a measured point comes back, and points along a measured row do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_EXTRAPOLATED
from fastroof.pack import SIZE_LIMIT, PackedGrid
from fastroof.roofline import BatchBound

__all__ = ["LENGTHS", "constant_block", "sampled_block"]

LENGTHS: Final = tuple(2.0**i for i in range(21))
"""Lengths of a grid's nodes where tables name none."""

Latency = Callable[[Floats, Floats], tuple[Floats, Flags]]
"""(batch, length) to latency, us, and its origin."""

WorkUs = Callable[[Floats, Floats], Floats]
"""(batch, length) to B less its launch floor, us."""

_NO_BOUND: Final = BatchBound(math.nan, math.nan, math.nan, math.nan)


def constant_block(latency_us: float) -> Floats:
    """Grid block of a kernel that takes the same whatever runs, such as none at all."""
    axis = np.array([0.0, SIZE_LIMIT])
    cells = np.zeros((2, 2, 6))
    cells[..., 0] = latency_us
    return PackedGrid(axis, axis, cells, np.zeros((2, 2), np.uint8), _NO_BOUND).arena


def sampled_block(latency: Latency, work_us: WorkUs, batch: Floats, length: Floats) -> Floats:
    """Grid block of a law, from its values at nodes."""
    y_axis, x_axis = np.r_[0.0, batch, SIZE_LIMIT], np.r_[0.0, length, SIZE_LIMIT]
    yy, xx = (a.ravel() for a in np.meshgrid(y_axis, x_axis, indexing="ij"))
    shape = len(y_axis), len(x_axis)
    latency_us, origin = latency(yy, xx)
    table, flags = latency_us.reshape(shape), origin.reshape(shape).copy()
    # the outer nodes are no sizes that anything was measured at
    for edge in (flags[0], flags[-1], flags[:, 0], flags[:, -1]):
        np.maximum(edge, ORIGIN_EXTRAPOLATED, out=edge)
    cells = np.zeros((*shape, 6))
    cells[..., 0] = table
    linear, square = _rises(work_us, y_axis, x_axis)
    rise = np.diff(table, axis=1)
    cells[:, :-1, 1], cells[:, :-1, 2] = rise * linear, rise * square
    cells[:-1, :, 3:] = np.diff(cells[..., :3], axis=0) / np.diff(y_axis)[:, None, None]
    return PackedGrid(y_axis, x_axis, cells, flags, _NO_BOUND).arena


def _rises(work_us: WorkUs, y_axis: Floats, x_axis: Floats) -> tuple[Any, Any]:
    """Terms of the weight along each cell, by which it rises from 0 to 1 with B; plainly where B does not."""
    x0, dx = x_axis[:-1], np.diff(x_axis)

    def at(x: Floats) -> Floats:
        yy, xx = np.meshgrid(y_axis, x, indexing="ij")
        return work_us(yy.ravel(), xx.ravel()).reshape(yy.shape)

    first, middle, last = at(x0), at(x0 + dx / 2.0), at(x0 + dx)
    whole = last - first
    with np.errstate(divide="ignore", invalid="ignore"):
        # share of the rise that lies in the first half: 1/2 of a line, 1/4 of a square
        half = (middle - first) / whole
    # a parabola that never falls, else there is a kink
    bends = np.isfinite(half) & (whole > 0.0) & (half >= 0.25) & (half <= 0.75)
    curve = np.where(bends, 2.0 - 4.0 * np.where(bends, half, 0.5), 0.0)
    return (1.0 - curve) / dx, curve / (dx * dx)
