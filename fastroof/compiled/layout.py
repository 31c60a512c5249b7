"""Layout constants that packing needs too, and vector widths; this module does not import numba."""

from __future__ import annotations

import sys
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Flags, Floats, Longs

GUIDE_HEADER = 6
"""Slots of an axis' header in its guides, see :mod:`fastroof.compiled.guides`."""

# A grid block's cells hold latencies, or work / latency.
FORM_LATENCY, FORM_DECODE_RATE, FORM_PREFILL_RATE = 0, 1, 2

LANES = 8
"""Elements that ``line_lanes`` processes at once, see :mod:`fastroof.compiled.llvm`."""

LINE_BYTES = 64
"""Bytes of a cache line, which ``streamed_lanes`` writes at once."""

TILE = 64
"""Maximum number of requests of ``request_lanes``, see :mod:`fastroof.compiled.llvm`."""


Origins = npt.NDArray[np.uint16]


class PackedCurve(NamedTuple):
    """One sorted curve, padded at both ends: latency against m, message bytes or tokens.

    Attributes
    ----------
    axis, value, flag : ndarray, shape (nodes,)
    Sizes, latencies in us, and each node's flag.
    guides : ndarray of int64
        The axis' guide; empty where nodes are too close for one.
    """

    axis: Floats
    value: Floats
    flag: Flags
    guides: Longs


class PackedGemm(NamedTuple):
    """All GEMMs of one dtype, ragged: a row of n nodes for each k, a curve over m for each (n, k).

    The n nodes of row i are ``n_axis[row_start[i]:row_start[i + 1]]``, the points of curve j
    ``m_axis[curve_start[j]:curve_start[j + 1]]``. Published tables hold scattered (n, k) pairs, so
    nothing here needs a full grid.

    Lookups in roofline coordinates are faster in one, so every curve is also stated at all m of the
    table, and every row at all n: nodes in between change neither latencies nor origins.

    Attributes
    ----------
    k_axis, row_start, n_axis, curve_start, m_axis, value, flag : ndarray
        The table as measured, padded: latencies in us, flags as in an origin.
    axes, guides : ndarray
        All k, all n and all m of the table, and their guides.
    grid : ndarray of float64
        Latency at every (k, n, m) of ``axes``, us; empty if there are too many,
        or nodes too close for a guide.
    origins : ndarray of uint16
        Origins of the points of the cell above each node, see :func:`fastroof.pack.curves.cell_origins`.
    """

    k_axis: Floats
    row_start: Longs
    n_axis: Floats
    curve_start: Longs
    m_axis: Floats
    value: Floats
    flag: Flags
    axes: Floats
    guides: Longs
    grid: Floats
    origins: Origins


class GuidedGrid(NamedTuple):
    """A two-dimensional attention table for many points at once."""

    axes: Floats
    guides: Longs
    cells: Floats
    origins: Origins


class GridNodes(NamedTuple):
    """A two-dimensional attention table node by node."""

    y_axis: Floats
    x_axis: Floats
    cells: Floats
    flags: Flags
    work: Floats


INTERPOLATED = 1
EXTRAPOLATED = 2
MODELLED = 4


_chosen: list[bool] = []


def run_plain() -> bool:
    """Run all loops of this process as Python, unless some were already imported as compiled ones."""
    if f"{__package__}.jit" not in sys.modules:
        _chosen[:] = [True]
    return is_plain()


def is_plain() -> bool:
    """Whether :func:`run_plain` makes this process's loops run as Python."""
    return bool(_chosen)
