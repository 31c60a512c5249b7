"""The relative standard error of a point, from the table that it was looked up in.

What is not leave-one-out of the tables themselves is named below with where it comes from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.uncertainty.leave_one_out import (
    LocalErrors,
    MeasuredGrid,
    calibration,
    calibration_ratios,
    local_errors,
    neighbour_errors,
    reach,
)

__all__ = [
    "MAPE_TO_ERROR",
    "PREFIX",
    "REPEATABILITY",
    "UNKNOWN",
    "calibrated_errors",
    "calibration_factor",
    "relative_variance",
]

MAPE_TO_ERROR: Final = 1.25
"""Standard error over mean absolute error, of a normal distribution."""

REPEATABILITY: Final = 0.018
"""Relative standard error of a measured point: 126 all-reduces of the H100 tables were measured twice."""

PREFIX: Final = MAPE_TO_ERROR * 0.093
"""Of a prefix's price, a formula: 9.3 % off its only anchor, one new token in the decode table."""

UNKNOWN: Final = PREFIX
"""Along an axis with too few nodes to leave one out: as a formula does where there is an anchor."""

SPIKE: Final = 0.075
"""Of an isolated spike, which is served from its neighbours: 80 % of the 81 of H100 and H200 are within
9.6 % of the same row of the other GPU, scaled by the neighbours. Of the 238 of B200, GB200, B300 and GB300,
by which this was not chosen, 80 % are within 3.1 % (7.6 % without vLLM's GEMMs of B200)."""


def relative_variance(errors: LocalErrors, sizes: Iterable[Floats]) -> Floats:
    """Squared relative standard error at points of one table."""
    at: list[Any] = []
    cells: list[Any] = []
    corners: list[tuple[Any, Any]] = []
    clipped = []
    for axis, size in zip(errors.axes, sizes, strict=True):
        last = len(axis) - 1
        x = np.clip(size, axis[0], axis[-1])
        low = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(last - 1, 0))
        high = np.minimum(low + 1, last)
        at.append(np.where(x - axis[low] > axis[high] - x, high, low))
        cells.append(low)
        corners.append((np.where(x == axis[high], high, low), np.where(x == axis[low], low, high)))
        clipped.append((size, x))
    on_node = np.logical_and.reduce([low == high for low, high in corners])
    variance = np.where(on_node, errors.nodes[tuple(at)], 0.0)
    for a, (inside, (low, high)) in enumerate(zip(errors.inside, corners, strict=True)):
        where = tuple(cells[b] if b == a else at[b] for b in range(len(at)))
        np.maximum(variance, np.where(low != high, inside[where], 0.0), out=variance)
    if errors.holes is not None:
        variance += _hole_variance(errors.holes, corners)
    for a, (axis, (size, x)) in enumerate(zip(errors.axes, clipped, strict=True)):
        if (size == x).all():
            continue
        where = tuple(at[b] for b in range(len(at)) if b != a)
        for edge, away in zip(errors.beyond[a], (axis[0] / size, size / axis[-1]), strict=True):
            octaves = np.log2(np.maximum(away, 1.0))
            variance += edge[where] * reach(octaves)
    return np.maximum(variance, REPEATABILITY**2)


def _hole_variance(holes: Floats, corners: list[tuple[Any, Any]]) -> Floats:
    """Largest among the nodes that each point uses."""
    used = (
        holes[tuple(pair[corner >> a & 1] for a, pair in enumerate(corners))]
        for corner in range(2 ** len(corners))
    )
    return np.asarray(functools.reduce(np.maximum, used))


def _axes_errors(grid: MeasuredGrid) -> list[Floats]:
    return [neighbour_errors(grid, axis) for axis in range(len(grid.axes))]


def calibration_factor(grids: Iterable[MeasuredGrid]) -> float:
    """Scales of :func:`~fastroof.uncertainty.leave_one_out.axis_squares` that hold 80 % of the errors."""
    return _factor(map(_axes_errors, grids))


def _factor(tables_errors: Iterable[list[Floats]]) -> float:
    ratios = [calibration_ratios(e, axis) for errors in tables_errors for axis, e in enumerate(errors)]
    return calibration(ratios)


def calibrated_errors(
    grid: MeasuredGrid, factor: float | None = None, first: Floats | None = None
) -> LocalErrors:
    """Local errors of one table."""
    errors = _axes_errors(grid)
    if first is not None:
        errors[0] = first
    return local_errors(grid, errors, _factor([errors]) if factor is None else factor, UNKNOWN, SPIKE)
