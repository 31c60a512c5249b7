"""Leave-one-out errors of tables with bands or residues along m (:mod:`fastroof.pack.bands`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from fastroof.arrays import Floats
from fastroof.pack.bands import ALIGNED, Bands, left_out_us
from fastroof.uncertainty.leave_one_out import (
    CLIP,
    MAPE_TO_ERROR,
    LocalErrors,
    MeasuredGrid,
    neighbour_errors,
)

SHAPE: Final = MAPE_TO_ERROR * 0.070
"""Relative standard error between a band's first and last row if nothing in between was measured.

vLLM 0.14.0 measured m = 384 of fp8 on H100: the table of 0.24.0, scaled to it at 256 and 512, is 7.0 % off
(240 shapes of n k >= 2^22; a line from 257 to 512 is 7.9 % off).
"""


def band_errors(grid: MeasuredGrid, bands: Bands) -> Floats:
    """Error of each node left out along m, the grid's first axis, predicted with bands."""
    m, log_us = grid.axes[0], grid.log_us.reshape(len(grid.axes[0]), -1)
    errors = np.full(log_us.shape, np.nan)
    patterns, which = np.unique(~np.isnan(log_us.T), axis=0, return_inverse=True)
    for number, pattern in enumerate(patterns):
        rows, curves = np.flatnonzero(pattern), np.flatnonzero(which.ravel() == number)
        known = log_us[np.ix_(rows, curves)]
        us = np.exp(known)
        for i in range(1, len(rows) - 1):
            errors[rows[i], curves] = np.log(left_out_us(bands, m[rows], us, i)) - known[i]
    return np.asarray(np.clip(errors, -CLIP, CLIP)).reshape(grid.log_us.shape)


def residue_errors(grid: MeasuredGrid, above: float) -> Floats:
    """Error of each node left out along m if multiples of 4 above an m have a separate curve."""
    m = grid.axes[0]
    errors = np.full(grid.log_us.shape, np.nan)
    for is_aligned in (False, True):
        own = (m <= above) | ((m % ALIGNED == 0) == is_aligned)
        axes = (m[own], *grid.axes[1:])
        curve = replace(grid, axes=axes, log_us=grid.log_us[own], bound_us=grid.bound_us[own])
        errors[own] = neighbour_errors(curve, 0)
    return errors


def with_unmeasured_bands(errors: LocalErrors, grid: MeasuredGrid, bands: Bands) -> LocalErrors:
    """Raise errors to at least :data:`SHAPE` within bands without a measured row."""
    m, log_us = grid.axes[0], grid.log_us
    inside = errors.inside[0].copy()
    step = np.zeros(log_us.shape[1:])
    for i in range(len(m) - 1):
        first, last = float(m[i]), float(m[i + 1])
        if i and m[i - 1] == first - 1 and bands.starts_at(first):
            step = np.abs(log_us[i] - log_us[i - 1])
        if bands.starts_at(first) and bands.end(first) == last:
            apart = np.abs(log_us[i] - log_us[i + 1])
        elif last > first + 1 and bands.end(first + 1) < last:
            apart = step
        else:
            continue
        np.fmax(inside[i], np.minimum(apart, SHAPE) ** 2, out=inside[i])
    return replace(errors, inside=(inside, *errors.inside[1:]))
