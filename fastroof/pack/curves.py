"""Packed GEMMs and curves: points sorted and padded, scattered (n, k) pairs stay ragged."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.arrays import Flags, Floats, Longs
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_EXTRAPOLATED, ORIGIN_INTERPOLATED, ORIGIN_MEASURED
from fastroof.compiled.layout import GUIDE_HEADER, PackedCurve, PackedGemm
from fastroof.pack.bands import banded_points, bands_of
from fastroof.pack.keys import MANTISSA_BITS, axis_keys

MOST_KEY_BITS: Final = 12
"""Maximum key bits: 4,096 consecutive integers get separate keys."""


def _guide(axis: Floats) -> tuple[int, int, Longs] | None:
    """First key, dropped bits, and the cell at the start of each key; None if nodes are too close."""
    inner = axis[1:-1]
    for key_bits in range(MOST_KEY_BITS + 1):
        first = int(axis_keys(np.ones(1), key_bits)[0]) - 1
        keys = np.maximum(axis_keys(inner, key_bits), first)
        shift = MANTISSA_BITS - key_bits
        starts = (np.arange(first + 1, keys.max(initial=first) + 1) << shift).view(np.float64)
        cells = np.r_[0, np.searchsorted(axis, starts, side="right") - 1]
        ends = np.r_[np.searchsorted(axis, starts, side="left") - 1, len(axis) - 2]
        if (ends - cells).max() <= 1:
            return first, shift, cells
    return None


def joined_axes(axes: Iterable[Floats]) -> tuple[Floats, Longs]:
    """Join padded axes and their guides."""
    axes = list(axes)
    headers: list[int] = []
    cells: list[Longs] = []
    node, place = 0, GUIDE_HEADER * len(axes)
    for axis in axes:
        guide = _guide(axis)
        if guide is None:
            return np.concatenate(axes), np.empty(0, np.int64)
        first, shift, own = guide
        headers += [node, node + len(axis) - 2, place, len(own) - 1, first, shift]
        cells.append(own + node)
        node += len(axis)
        place += len(own)
    return np.concatenate(axes), np.concatenate([headers, *cells], dtype=np.int64)


SIZE_LIMIT = float(2**40)
"""Last node of every axis, beyond every valid size."""

SMALLEST: Final = 2.0
"""Nothing is asked below a first node up to this: tables of decode start at a kv_len of 2."""

LAUNCH_US: Final = 1.5
"""Latency without any work: the smallest latencies in the tables of six GPUs are 1.5 to 2.5 us."""


class FirstNodes(NamedTuple):
    """Size of the first node of lines, and latency and B of the first three, shape (3, ...), us.

    The last one is repeated in lines with fewer nodes.
    """

    size: Any
    latency_us: Floats
    bound_us: Floats

    @classmethod
    def of(cls, sizes: Floats, latency_us: Floats, bound_us: Floats) -> FirstNodes:
        """Find those of lines along the first axis; nodes that were not measured are NaN."""
        rank = np.cumsum(~np.isnan(latency_us), axis=0)
        at = np.stack([np.argmax(rank >= np.minimum(nth, rank[-1]), axis=0) for nth in (1, 2, 3)])
        return cls(sizes[at[0]], *(np.take_along_axis(us, at, 0) for us in (latency_us, bound_us)))


def carried_below(held_us: Any, to_us: Any, first: FirstNodes, launch_us: float) -> Floats:
    """Latency below the first nodes of lines, where B is ``to_us``; ``held_us`` if they are up to SMALLEST.

    The line falls with the median of three slopes: to the second node, to the third, and that of constant
    latency / B. Without work it is not below LAUNCH_US.
    """
    (first_us, *other_us), (bound_us, *other_bounds) = first.latency_us, first.bound_us
    held, slopes = first_us / bound_us, []
    with np.errstate(divide="ignore", invalid="ignore"):
        for us, bound in zip(other_us, other_bounds, strict=True):
            chord = np.maximum((us - first_us) / (bound - bound_us), 0.0)
            slopes.append(np.where(bound > bound_us, chord, held))
        most = np.maximum(first_us - LAUNCH_US, 0.0) / np.maximum(bound_us - launch_us, 0.0)
    low, high = np.minimum(*slopes), np.maximum(*slopes)
    slope = np.fmin(np.clip(held, low, high), most)
    below_us = first_us + slope * (to_us - bound_us)
    return np.asarray(np.where(np.asarray(first.size) > SMALLEST, below_us, held_us))


def sorted_points(coordinates: tuple[Floats, ...], latency_us: Floats) -> tuple[tuple[Floats, ...], Floats]:
    """Sort points by their coordinates, the first one slowest; duplicates become their median."""
    order = np.lexsort(coordinates[::-1])
    sorted_axes = [c[order].astype(np.float64) for c in coordinates]
    latency_us = latency_us[order]
    new = np.zeros(len(order), dtype=bool)
    new[0] = True
    for axis in sorted_axes:
        new[1:] |= axis[1:] != axis[:-1]
    if new.all():
        return tuple(sorted_axes), latency_us
    starts = np.flatnonzero(new)
    medians = np.array([np.median(part) for part in np.split(latency_us, starts[1:])])
    return tuple(a[starts] for a in sorted_axes), medians


def sorted_origins(coordinates: tuple[Floats, ...], origin: Flags | None, count: int) -> Flags:
    """Origins of ``count`` points in the order of :func:`sorted_points` (default: measured)."""
    if origin is None or not origin.any():
        return np.full(count, ORIGIN_MEASURED, np.uint8)
    return sorted_points(coordinates, origin.astype(np.float64))[1].astype(np.uint8)


def origin_between(origin: Flags | None) -> int:
    """Origin of points between rows with these origins: interpolated, or borrowed if some rows are."""
    is_borrowed = origin is not None and bool((origin == ORIGIN_BORROWED).any())
    return ORIGIN_BORROWED if is_borrowed else ORIGIN_INTERPOLATED


LARGEST_GRID: Final = 2**22
"""Maximum nodes of the full grid of a table of scattered GEMMs: 32 MiB."""

Curve = tuple[float, Floats, Floats, Flags]
"""n, its m nodes, latencies in us, and origins."""


def pack_curve(
    sizes: Floats,
    latency_us: Floats,
    roofline_us: Callable[[Floats], Floats],
    origin: Flags | None = None,
    *,
    is_linear: bool = True,
) -> PackedCurve:
    """Pack one curve; latency / B is constant above its end, and below by :func:`carried_below`.

    Parameters
    ----------
    sizes : ndarray of float64, shape (rows,)
        Sizes of at least 1 in any order; duplicates become their median.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us.
    roofline_us : callable
        B at an array of sizes, us.
    origin : ndarray of uint8, shape (rows,), optional
        Origin of each row (default: measured).
    is_linear : bool
        Whether B is linear in the size; else the curve's coordinate is B.

    Returns
    -------
    PackedCurve
        Rows sorted, with a node at 0 and one at SIZE_LIMIT.
    """
    (nodes,), value = sorted_points((sizes,), latency_us)
    bound, ends = roofline_us(nodes), np.array([0.0, SIZE_LIMIT])
    low, high = roofline_us(ends) if is_linear else ends
    first, launch_us = FirstNodes.of(nodes, value, bound), float(latency_us.min())
    below_us = carried_below(value[0] * low / bound[0], low, first, launch_us)
    flag = np.full(len(nodes) + 2, ORIGIN_EXTRAPOLATED, np.uint8)
    flag[1:-1] = sorted_origins((sizes,), origin, len(nodes))
    axis, guides = joined_axes([np.r_[0.0, nodes if is_linear else bound, SIZE_LIMIT]])
    return PackedCurve(axis, np.r_[below_us, value, value[-1] * high / bound[-1]], flag, guides)


def cell_origins(flags: Flags) -> npt.NDArray[np.uint16]:
    """Origins of the points of each cell, from those of its nodes."""
    cases = [flags]
    for axis in reversed(range(flags.ndim)):
        for seen in list(cases):
            above = np.full_like(seen, ORIGIN_EXTRAPOLATED)
            inner = [slice(None)] * flags.ndim
            inner[axis] = slice(None, -1)
            upper = [slice(None)] * flags.ndim
            upper[axis] = slice(1, None)
            above[tuple(inner)] = seen[tuple(upper)]
            cases.append(np.maximum(np.maximum(seen, above), ORIGIN_INTERPOLATED))
    origins = np.zeros(flags.shape, np.uint16)
    for number, case in enumerate(cases):
        origins |= case.astype(np.uint16) << (2 * number)
    return origins


def _restated(nodes: Floats, axis: Floats, value: Floats, flag: Flags) -> tuple[Floats, Flags]:
    """Interpolate values and flags along the first axis, at more nodes than ``axis``."""
    if len(nodes) == len(axis):
        return value, flag
    i = np.minimum(np.searchsorted(axis, nodes, side="right") - 1, len(axis) - 2)
    w = ((nodes - axis[i]) / (axis[i + 1] - axis[i])).reshape(-1, *[1] * (value.ndim - 1))
    between = np.maximum(np.maximum(flag[i], flag[i + 1]), ORIGIN_INTERPOLATED)
    return value[i] + (value[i + 1] - value[i]) * w, np.where(w == 0.0, flag[i], between)


def _row_us(row: list[Curve], n: float, m_axis: Floats) -> Floats:
    """Latencies at n and some m from the padded curves of one k."""
    nodes = [curve[0] for curve in row]
    j = min(bisect.bisect_right(nodes, n), len(row) - 1) - 1
    low, high = (np.interp(m_axis, *curve[1:3]) for curve in row[j : j + 2])
    return np.asarray(low + (high - low) * ((n - nodes[j]) / (nodes[j + 1] - nodes[j])))


def _full_grid(k_axis: Floats, rows: list[list[Curve]]) -> tuple[Any, ...]:
    """Axes (k, n, m), guides, latencies and origins of a ragged table on the full grid."""
    n_axis = np.unique([curve[0] for row in rows for curve in row])
    m_axis = np.unique(np.concatenate([curve[1] for row in rows for curve in row]))
    axes, guides = joined_axes([k_axis, n_axis, m_axis])
    shape = (len(k_axis), len(n_axis), len(m_axis))
    if not len(guides) or math.prod(shape) > LARGEST_GRID:
        return axes, guides, np.empty(0), np.empty(0, np.uint16)
    grid, flags = np.empty(shape), np.empty(shape, np.uint8)
    for i, row in enumerate(rows):
        curves = [_restated(m_axis, *curve[1:]) for curve in row]
        value, flag = (np.stack(parts) for parts in zip(*curves, strict=True))
        grid[i], flags[i] = _restated(n_axis, np.array([curve[0] for curve in row]), value, flag)
    return axes, guides, grid.ravel(), cell_origins(flags).ravel()


def pack_gemm(
    m: Floats,
    n: Floats,
    k: Floats,
    latency_us: Floats,
    roofline_us: Callable[[Any, Any, Any], Any],
    origin: Flags | None = None,
    *,
    has_bands: bool = True,
) -> PackedGemm:
    """Pack the GEMMs of one dtype; latency / B is constant above the measured m, n or k.

    If the steps along m show bands, their nodes are added, see :mod:`fastroof.pack.bands`.

    Parameters
    ----------
    m, n, k : ndarray of float64, shape (rows,)
        Sizes in any order.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us.
    roofline_us : callable
        B at (m, n, k), which broadcast, us.
    origin : ndarray of uint8, shape (rows,), optional
        Origin of each row (default: measured).
    has_bands : bool
        Add the nodes of bands.

    Returns
    -------
    PackedGemm
        Two more rows than measured k, two more n a row, two more m a curve.
    """
    coordinates, launch_us = (k, n, m), float(roofline_us(0.0, 0.0, 0.0))
    (k, n, m), latency_us = sorted_points(coordinates, latency_us)
    flags = made = sorted_origins(coordinates, origin, len(m))
    bands = bands_of(m, n, k, latency_us) if has_bands else None
    if bands is not None:
        m, n, k, latency_us, flags = banded_points(bands, m, n, k, latency_us)
        is_row = flags == ORIGIN_MEASURED
        flags[~is_row] = origin_between(origin)
        flags[is_row] = made
    new_curve = np.r_[True, (k[1:] != k[:-1]) | (n[1:] != n[:-1])]
    starts = np.flatnonzero(new_curve)
    stops = np.r_[starts[1:], len(m)]
    # all curves at once, each with a node at 0 and one at SIZE_LIMIT: a table has hundreds of curves
    before = 2 * np.arange(len(starts))
    inner = np.arange(len(m)) + np.repeat(before + 1, stops - starts)
    m_axis, value_us = np.empty(len(m) + 2 * len(starts)), np.empty(len(m) + 2 * len(starts))
    flag = np.full(len(m_axis), ORIGIN_EXTRAPOLATED, np.uint8)
    m_axis[inner], value_us[inner], flag[inner] = m, latency_us, flags
    sizes = n[starts], k[starts]
    for end, node, size in ((starts + before, starts, 0.0), (stops + before + 1, stops - 1, SIZE_LIMIT)):
        m_axis[end] = size
        value_us[end] = latency_us[node] / roofline_us(m[node], *sizes) * roofline_us(m_axis[end], *sizes)
    below, three = starts + before, np.minimum(starts + np.arange(3)[:, None], stops - 1)
    nodes = FirstNodes(m[starts], latency_us[three], roofline_us(m[three], *sizes))
    value_us[below] = carried_below(value_us[below], roofline_us(0.0, *sizes), nodes, launch_us)
    k_axis: list[float] = [0.0]
    rows: list[list[Curve]] = [[]]
    for nn, kk, start, stop in zip(
        n[starts].tolist(), k[starts].tolist(), starts + before, stops + before + 2, strict=True
    ):
        if kk != k_axis[-1]:
            k_axis.append(kk)
            rows.append([])
        rows[-1].append((nn, m_axis[start:stop], value_us[start:stop], flag[start:stop]))

    def held_curve(curve: Curve, n_from: float, k_from: float, n_to: float, k_to: float) -> Curve:
        _, axis, value, flag = curve
        scale = roofline_us(axis, n_to, k_to) / roofline_us(axis, n_from, k_from)
        return n_to, axis, value * scale, np.full_like(flag, ORIGIN_EXTRAPOLATED)

    def below_curve(first: Curve, lines: list[tuple[list[Curve], float, float]], *to: float) -> Curve:
        """The curve at an n or k of 0: ``lines`` are the rows, n and k of the first three sizes."""
        held, axis, sizes = held_curve(first, *lines[0][1:], *to), first[1], [line[1:] for line in lines]
        size = max(at for at, end in zip(sizes[0], to, strict=True) if not end)
        if size <= SMALLEST:
            return held
        us = np.stack([_row_us(row, n_at, axis) for row, n_at, _ in lines])
        nodes = FirstNodes(size, us, np.stack([roofline_us(axis, *at) for at in sizes]))
        below_us = carried_below(held[2], roofline_us(axis, *to), nodes, launch_us)
        return (*held[:2], below_us, held[3])

    for kk, row in zip(k_axis[1:], rows[1:], strict=True):
        first, last = row[0], row[-1]
        n_nodes = [curve[0] for curve in (*row, last, last)[:3]]
        row.append(held_curve(last, last[0], kk, SIZE_LIMIT, kk))
        row.insert(0, below_curve(first, [(row, nn, kk) for nn in n_nodes], 0.0, kk))
    three = [*zip(rows[1:], k_axis[1:], strict=True), *[(rows[-1], k_axis[-1])] * 2][:3]
    rows[0] = [below_curve(c, [(row, c[0], kk) for row, kk in three], c[0], 0.0) for c in rows[1]]
    rows.append([held_curve(c, c[0], k_axis[-1], c[0], SIZE_LIMIT) for c in rows[-1]])
    k_axis.append(SIZE_LIMIT)

    curves = [curve for row in rows for curve in row]
    axes, guides, grid, origins = _full_grid(np.array(k_axis), rows)
    return PackedGemm(
        k_axis=np.array(k_axis),
        row_start=np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int64),
        n_axis=np.array([c[0] for c in curves]),
        curve_start=np.r_[0, np.cumsum([len(c[1]) for c in curves])].astype(np.int64),
        m_axis=np.concatenate([c[1] for c in curves]),
        value=np.concatenate([c[2] for c in curves]),
        flag=np.concatenate([c[3] for c in curves]),
        axes=axes,
        guides=guides,
        grid=grid,
        origins=origins,
    )
