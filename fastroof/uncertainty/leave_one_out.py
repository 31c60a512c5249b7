"""Errors of interpolation in a table: each node predicted from its two neighbours.

``e_i = ln(T interpolated from the neighbours of i) - ln T_i`` along one axis, clipped at +-0.35. The scale of
a bracket is half its surroundings, half the whole axis: ``s^2 = (l^2 + g^2) / 2`` with l the rms of e over
the two nodes on either side and g that of the table. By quartile, 80 % intervals of g alone cover 74 to 93 %,
of l alone 64 to 95 %. The error does not grow towards the middle of a bracket: it comes from noise and tile
edges, not curvature, and a factor 4 w (1 - w) covers 41 to 76 %. Errors of two axes do not add up: their root
sum of squares covers 86 to 93 %, the larger of the two covers 80 %.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Flags, Floats, Longs
from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_INTERPOLATED
from fastroof.pack.bands import ALIGNED, Bands, left_out_us
from fastroof.pack.curves import SMALLEST, sorted_points
from fastroof.pack.grids import latency_below, slopes_above

NORMAL_80: Final = 1.2816
"""Half-width in standard errors of the central 80 % of a normal distribution."""

CLIP: Final = 0.35
"""Errors are clipped to this: larger ones are outliers or another kernel."""

FAR_CLIP: Final = 1.0
"""Clip of errors beyond the outer nodes, which may be off by a factor."""

LEVEL: Final = 0.8
"""Share of errors that intervals are calibrated to hold."""

ALL_LINES: Final = 0.1
"""Weight of all lines, against a line and its neighbours, in the error of extrapolation."""

BELOW: Final = 0.10
"""Least relative standard error per octave below a table's first row.

Chosen on H100; fastroof/tables/README.md has the coverage.
"""

SPAN: Final = 2
"""Nodes on either side of a bracket that determine its local error."""


MAPE_TO_ERROR: Final = 1.25
"""Standard error over mean absolute error of a normal distribution."""

REPEATABILITY: Final = 0.018
"""Relative standard error of a measured point: 126 all-reduces of the H100 tables were measured twice."""

PREFIX: Final = MAPE_TO_ERROR * 0.093
"""Relative standard error of a prefix's price: 9.3 % off its only anchor, one new token in decode."""

UNKNOWN: Final = PREFIX
"""Relative standard error along an axis with too few nodes to leave one out."""

SPIKE: Final = 0.075
"""Relative standard error of an isolated spike, interpolated from its neighbours: 80 % of the 81 on H100 and
H200 are within 9.6 % of the same row of the other GPU, scaled by the neighbours. Of the 238 on B200, GB200,
B300 and GB300, which were not used to choose it, 80 % are within 3.1 % (7.6 % without vLLM's GEMMs on
B200)."""


@dataclass(frozen=True, eq=False)
class MeasuredGrid:
    """Measured points on the full grid of their sizes."""

    axes: tuple[Floats, ...]
    log_us: Floats
    bound_us: Floats
    is_additive: bool
    is_spike: Bools | None = None


class EdgeVariances(NamedTuple):
    """Squared relative standard error a factor of two beyond an axis' ends, at nodes of the others."""

    below: Floats
    above: Floats


@dataclass(frozen=True, eq=False)
class LocalErrors:
    """Squared relative standard errors of one table."""

    axes: tuple[Floats, ...]
    nodes: Floats
    inside: tuple[Floats, ...]
    beyond: tuple[EdgeVariances, ...]
    holes: Floats | None


def is_replaced(origin: Flags) -> Bools:
    """Whether rows are isolated spikes: neither measured nor scaled to what was."""
    return np.isin(origin, (ORIGIN_INTERPOLATED, ORIGIN_EXTRAPOLATED))


def measured_grid(
    points: tuple[Floats, ...],
    latency_us: Floats,
    roofline_us: Callable[..., Any],
    *,
    is_spike: Bools | None = None,
    is_additive: bool = False,
) -> MeasuredGrid:
    """Place measured points, in any order, on the full grid of their sizes."""
    sorted_axes, latency_us = sorted_points(points, latency_us)
    nodes_and_places = [np.unique(axis, return_inverse=True) for axis in sorted_axes]
    axes = tuple(axis for axis, _ in nodes_and_places)
    log_us = np.full([len(axis) for axis in axes], np.nan)
    at = tuple(place for _, place in nodes_and_places)
    log_us[at] = np.log(latency_us)
    bound_us = np.broadcast_to(roofline_us(*np.ix_(*axes)), log_us.shape)
    if is_spike is None or not is_spike.any():
        return MeasuredGrid(axes, log_us, bound_us, is_additive)
    spikes = np.zeros(log_us.shape, np.bool_)
    spikes[at] = sorted_points(points, is_spike.astype(np.float64))[1] > 0.0
    log_us[spikes] = np.nan
    return MeasuredGrid(axes, log_us, bound_us, is_additive, spikes)


def _nearest_measured(known: Bools) -> tuple[Longs, Longs]:
    """Last measured node at or before each node along the last axis, and first at or after it."""
    count = known.shape[-1]
    place = np.arange(count)
    before = np.maximum.accumulate(np.where(known, place, -1), axis=-1)
    after = np.minimum.accumulate(np.where(known, place, count)[..., ::-1], axis=-1)[..., ::-1]
    return before, after


def neighbour_errors(grid: MeasuredGrid, axis: int) -> Floats:
    """Error of each node left out along one axis, clipped; NaN without two neighbours."""
    log_us, bound_us = (np.moveaxis(a, axis, -1) for a in (grid.log_us, grid.bound_us))
    known = ~np.isnan(log_us)
    at_or_before, at_or_after = _nearest_measured(known)
    before = np.full(known.shape, -1)
    before[..., 1:] = at_or_before[..., :-1]
    after = np.full(known.shape, known.shape[-1])
    after[..., :-1] = at_or_after[..., 1:]
    inner = known & (before >= 0) & (after < known.shape[-1])
    before, after = np.where(inner, before, 0), np.where(inner, after, 0)
    low, high = (np.take_along_axis(bound_us, at, -1) for at in (before, after))
    rises = inner & (high > low)
    weight = (bound_us - low) / np.where(rises, high - low, 1.0)
    if not rises[inner].all():
        # beyond a window B does not grow, so the size itself is the weight
        size = grid.axes[axis]
        apart = np.where(inner, size[after] - size[before], 1.0)
        weight = np.where(rises, weight, (size - size[before]) / apart)
    first, second = (np.exp(np.take_along_axis(log_us, at, -1)) for at in (before, after))
    with np.errstate(invalid="ignore"):
        error = np.log(first + (second - first) * weight) - log_us
    return np.moveaxis(np.where(inner, np.clip(error, -CLIP, CLIP), np.nan), -1, axis)


def reach(octaves: Any) -> Any:
    """Factor on the variance a factor of two beyond the end, at this many octaves beyond it."""
    return np.where(octaves > 0.0, np.maximum(octaves, 1.0) ** 2, 0.0)


def _near_lines(squares: Floats, whole: float) -> Floats:
    """Mean over each line and its neighbours, blended with a tenth of the mean over all."""
    local = squares
    for axis in range(squares.ndim):
        along = np.moveaxis(local, axis, 0)
        line = np.arange(len(along))
        starts, stops = np.maximum(line - 1, 0), np.minimum(line + 2, len(along))
        local = np.moveaxis(_window_squares(np.sqrt(along), starts, stops), 0, axis)
    return np.where(np.isnan(local), whole, ALL_LINES * whole + (1.0 - ALL_LINES) * local)


def _edge_variances(grid: MeasuredGrid, axis: int) -> EdgeVariances:
    """Error of extrapolating an axis a factor of two beyond its ends."""
    log_us, bound_us = (np.moveaxis(a, axis, -1) for a in (grid.log_us, grid.bound_us))
    octaves = np.log2(grid.axes[axis])
    known = ~np.isnan(log_us)
    there = known.sum(axis=-1) > 1
    ends = []
    for step in (1, -1):
        # from the outside inwards: the first measured node, and the one after it
        rank = np.cumsum(known[..., ::step], axis=-1)
        edge, inner = (np.argmax(rank == nth, axis=-1)[..., None] for nth in (1, 2))
        log_edge, log_inner, edge_us, inner_us = (
            np.take_along_axis(values[..., ::step], at, -1)[..., 0]
            for values in (log_us, bound_us)
            for at in (edge, inner)
        )
        apart = np.abs(octaves[::step][edge] - octaves[::step][inner])[..., 0]
        others = np.moveaxis(np.where(rank == 1, np.nan, np.exp(log_us[..., ::step]))[..., ::step], -1, 0)
        bounds, least_us = np.moveaxis(bound_us, -1, 0), float(np.exp(np.nanmin(log_us)))
        is_late = step > 0 and grid.axes[axis][0] > SMALLEST
        if is_late:
            nodes = grid.axes[axis], others, bounds
            guess = latency_below(*nodes, edge_us, least_us, is_additive=grid.is_additive)
        elif grid.is_additive:
            slope = 1.0 if step > 0 else slopes_above(others, bounds, is_length=axis == 1)
            guess = np.maximum(np.exp(log_inner) + slope * (edge_us - inner_us), least_us)
        else:
            guess = np.exp(log_inner) * edge_us / inner_us
        error = np.clip(np.log(guess) - log_edge, -FAR_CLIP, FAR_CLIP)
        square = np.where(there, error**2 / reach(np.where(there, apart, 1.0)), np.nan)
        whole = float(np.mean(square[there])) if there.any() else UNKNOWN**2
        ends.append(_near_lines(square, whole) + (BELOW**2 if is_late else 0.0))
    return EdgeVariances(*ends)


def _root_mean_square(errors: Floats) -> float:
    """Root mean square of the known errors; 0 without any."""
    there = errors[~np.isnan(errors)]
    return float(np.sqrt(np.mean(there**2))) if len(there) else 0.0


def _window_squares(errors: Floats, starts: Longs, stops: Longs) -> Floats:
    """Mean square of ``errors[start:stop]`` along the first axis for each pair; NaN without errors."""
    there = ~np.isnan(errors)
    wide = (len(errors) + 1, *errors.shape[1:])
    sums, counts = np.zeros(wide), np.zeros(wide)
    np.cumsum(np.where(there, errors, 0.0) ** 2, axis=0, out=sums[1:])
    np.cumsum(there, axis=0, out=counts[1:])
    count = counts[stops] - counts[starts]
    total = np.maximum(sums[stops] - sums[starts], 0.0)
    return np.where(count > 0, total / np.maximum(count, 1.0), np.nan)


def axis_squares(errors: Floats, axis: int) -> Floats:
    """Squared scale of each bracket of one axis, at the nodes of the others."""
    along = np.moveaxis(errors, axis, 0)
    whole = _root_mean_square(along) ** 2
    bracket = np.arange(max(len(along) - 1, 1))
    starts, stops = np.maximum(bracket - SPAN + 1, 0), np.minimum(bracket + SPAN + 1, len(along))
    local = _window_squares(along, starts, stops)
    return np.moveaxis(np.where(np.isnan(local), whole, 0.5 * (local + whole)), 0, axis)


def calibration_ratios(errors: Floats, axis: int) -> Floats:
    """Error of each node over the scale from its neighbours' errors, without its own."""
    along = np.moveaxis(errors, axis, 0)
    whole = _root_mean_square(along) ** 2
    node = np.arange(len(along))
    starts, stops = np.maximum(node - SPAN, 0), np.minimum(node + SPAN + 1, len(along))
    left, right = _window_squares(along, starts, node), _window_squares(along, node + 1, stops)
    there = ~np.isnan(along)
    counts = np.zeros((len(along) + 1, *along.shape[1:]))
    np.cumsum(there, axis=0, out=counts[1:])
    before, after = counts[node] - counts[starts], counts[stops] - counts[node + 1]
    count = before + after
    total = np.where(before > 0, left, 0.0) * before + np.where(after > 0, right, 0.0) * after
    square = np.where(count > 0, 0.5 * (total / np.maximum(count, 1.0) + whole), whole)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.abs(along) / np.sqrt(square)
    return np.asarray(ratio[there & (square > 0.0)])


def _node_variances(errors: list[Floats]) -> Floats:
    """Variances of measured nodes: one that disagrees with its neighbours along every axis is off."""
    if len(errors) == 1:
        return np.zeros(errors[0].shape)
    least = np.full(errors[0].shape, np.inf)
    for error in errors:
        np.fmin(least, np.abs(error), out=least)
    return np.where(np.isinf(least), 0.0, least**2 / 1.5)


def _hole_variances(grid: MeasuredGrid, beyond: list[EdgeVariances]) -> Floats | None:
    """Variances of unmeasured nodes, along the grid line with the least."""
    known = ~np.isnan(grid.log_us)
    if known.all():
        return None
    variance = np.full(known.shape, np.inf)
    is_between = np.zeros(known.shape, np.bool_)
    for axis, nodes in enumerate(grid.axes):
        octaves = np.log2(nodes)
        before, after = _nearest_measured(np.moveaxis(known, axis, -1))
        last = len(nodes) - 1
        away = (
            np.where(before >= 0, octaves - octaves[np.maximum(before, 0)], np.inf),
            np.where(after <= last, octaves[np.minimum(after, last)] - octaves, np.inf),
        )
        is_between |= np.moveaxis((before >= 0) & (after <= last), -1, axis)
        for distance, edge in zip(away, (beyond[axis].above, beyond[axis].below), strict=True):
            along = np.moveaxis(distance, -1, axis)
            reached = np.isfinite(along)
            along_line = np.expand_dims(edge, axis) * reach(np.where(reached, along, 0.0))
            np.minimum(variance, np.where(reached, along_line, np.inf), out=variance)
    # a node on no measured line is as bad as the worst one that is
    variance = np.where(np.isinf(variance), variance[np.isfinite(variance)].max(), variance)
    if grid.is_spike is None:
        return variance
    return np.where(grid.is_spike, np.where(is_between, 0.0, variance) + SPIKE**2, variance)


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
    """Largest variance among the nodes that each point uses."""
    used = (
        holes[tuple(pair[corner >> a & 1] for a, pair in enumerate(corners))]
        for corner in range(2 ** len(corners))
    )
    return np.asarray(functools.reduce(np.maximum, used))


def _axes_errors(grid: MeasuredGrid) -> list[Floats]:
    return [neighbour_errors(grid, axis) for axis in range(len(grid.axes))]


def calibration_factor(grids: Iterable[MeasuredGrid]) -> float:
    """Calibration over grids: number of scales of :func:`axis_squares` that hold 80 % of the errors."""
    return _factor(map(_axes_errors, grids))


def _factor(tables_errors: Iterable[list[Floats]]) -> float:
    """Return the number of scales that hold 80 % of the errors; 1 without errors."""
    ratios = [calibration_ratios(e, axis) for errors in tables_errors for axis, e in enumerate(errors)]
    joined = np.concatenate([np.empty(0), *ratios])
    return float(np.quantile(joined, LEVEL)) if len(joined) else 1.0


def calibrated_errors(
    grid: MeasuredGrid, factor: float | None = None, first: Floats | None = None
) -> LocalErrors:
    """Local errors of one table; ``first`` replaces the errors along the first axis."""
    errors = _axes_errors(grid)
    if first is not None:
        errors[0] = first
    if factor is None:
        factor = _factor([errors])
    inside = []
    for axis, error in enumerate(errors):
        square = axis_squares(error, axis) * (factor / NORMAL_80) ** 2
        inside.append(square if square.any() else np.full_like(square, UNKNOWN**2))
    beyond = [_edge_variances(grid, axis) for axis in range(len(grid.axes))]
    nodes = _node_variances(errors)
    return LocalErrors(grid.axes, nodes, tuple(inside), tuple(beyond), _hole_variances(grid, beyond))


# -- bands and residues along m (fastroof.pack.bands) ------------------------------------------

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
