"""GEMMs and curves, packed: points sorted and padded, scattered (n, k) pairs kept ragged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_MEASURED
from fastroof.pack.points import SIZE_LIMIT, Flags, Floats, sorted_points

__all__ = ["PackedCurve", "PackedGemm", "pack_curve", "pack_gemm"]


class PackedCurve(NamedTuple):
    """One sorted curve, padded at both ends: latency against m, message bytes or tokens."""

    axis: Floats
    value: Floats
    flag: Flags


class PackedGemm(NamedTuple):
    """All GEMMs of one dtype, ragged: a row of n nodes for each k, a curve over m for each (n, k).

    The n nodes of row i are ``n_axis[row_start[i]:row_start[i + 1]]``, the points of curve j
    ``m_axis[curve_start[j]:curve_start[j + 1]]``. Published tables hold scattered (n, k) pairs, so
    nothing here needs a full grid.
    """

    k_axis: Floats
    row_start: npt.NDArray[np.int64]
    n_axis: Floats
    curve_start: npt.NDArray[np.int64]
    m_axis: Floats
    value: Floats
    flag: Flags


def pack_curve(x: Floats, latency_us: Floats, roofline_us: Callable[[Floats], Floats]) -> PackedCurve:
    """Pack one curve; beyond its ends latency / B is held.

    Parameters
    ----------
    x : ndarray of float64, shape (rows,)
        Sizes, at least 1, in any order; of duplicates the median counts.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us.
    roofline_us : callable
        B at an array of sizes, us.

    Returns
    -------
    PackedCurve
        Rows sorted, with a node at 0 and one at SIZE_LIMIT.
    """
    (axis,), value = sorted_points((x,), latency_us)
    ends = np.array([0.0, SIZE_LIMIT])
    edge = np.array([axis[0], axis[-1]])
    padded = np.array([value[0], value[-1]]) * roofline_us(ends) / roofline_us(edge)
    flag = np.full(len(axis) + 2, ORIGIN_MEASURED, np.uint8)
    flag[[0, -1]] = ORIGIN_EXTRAPOLATED
    return PackedCurve(np.r_[0.0, axis, SIZE_LIMIT], np.r_[padded[0], value, padded[1]], flag)


def pack_gemm(
    m: Floats,
    n: Floats,
    k: Floats,
    latency_us: Floats,
    peak_flops_per_us: float,
    bytes_per_us: float,
    element_bytes: float,
    output_bytes: float = 2,
) -> PackedGemm:
    """Pack the GEMMs of one dtype; beyond the measured m, n or k latency / B is held.

    Parameters
    ----------
    m, n, k : ndarray of float64, shape (rows,)
        Sizes in any order.
    latency_us : ndarray of float64, shape (rows,)
        Measured latencies, us.
    peak_flops_per_us, bytes_per_us : float
        The dtype's peak and the memory bandwidth.
    element_bytes, output_bytes : float
        Bytes of an input and of an output element.

    Returns
    -------
    PackedGemm
        Two more rows than measured k, two more n a row, two more m a curve.
    """
    (k, n, m), latency_us = sorted_points((k, n, m), latency_us)
    t_launch = float(latency_us.min())

    def roofline(m: Any, n: Any, k: Any) -> Any:
        moved = element_bytes * (m * k + n * k) + output_bytes * m * n
        return t_launch + 2.0 * m * n * k / peak_flops_per_us + moved / bytes_per_us

    new_curve = np.r_[True, (k[1:] != k[:-1]) | (n[1:] != n[:-1])]
    starts = np.flatnonzero(new_curve)
    stops = np.r_[starts[1:], len(m)]
    k_axis: list[float] = [0.0]
    rows: list[list[tuple[float, Floats, Floats, Flags]]] = [[]]
    for start, stop in zip(starts, stops, strict=True):
        kk, nn = float(k[start]), float(n[start])
        if kk != k_axis[-1]:
            k_axis.append(kk)
            rows.append([])
        mm = m[start:stop]
        ends = np.array([0.0, SIZE_LIMIT])
        held = latency_us[[start, stop - 1]] / roofline(mm[[0, -1]], nn, kk) * roofline(ends, nn, kk)
        flag = np.full(len(mm) + 2, ORIGIN_MEASURED, np.uint8)
        flag[[0, -1]] = ORIGIN_EXTRAPOLATED
        axis = np.r_[0.0, mm, SIZE_LIMIT]
        rows[-1].append((nn, axis, np.r_[held[0], latency_us[start:stop], held[1]], flag))

    def held_curve(
        curve: tuple[float, Floats, Floats, Flags], n_from: float, k_from: float, n_to: float, k_to: float
    ) -> tuple[float, Floats, Floats, Flags]:
        _, axis, value, flag = curve
        scale = roofline(axis, n_to, k_to) / roofline(axis, n_from, k_from)
        return n_to, axis, value * scale, np.full_like(flag, ORIGIN_EXTRAPOLATED)

    for kk, row in zip(k_axis[1:], rows[1:], strict=True):
        first, last = row[0], row[-1]
        row.insert(0, held_curve(first, first[0], kk, 0.0, kk))
        row.append(held_curve(last, last[0], kk, SIZE_LIMIT, kk))
    rows[0] = [held_curve(c, c[0], k_axis[1], c[0], 0.0) for c in rows[1]]
    rows.append([held_curve(c, c[0], k_axis[-1], c[0], SIZE_LIMIT) for c in rows[-1]])
    k_axis.append(SIZE_LIMIT)

    curves = [curve for row in rows for curve in row]
    return PackedGemm(
        k_axis=np.array(k_axis),
        row_start=np.r_[0, np.cumsum([len(row) for row in rows])].astype(np.int64),
        n_axis=np.array([c[0] for c in curves]),
        curve_start=np.r_[0, np.cumsum([len(c[1]) for c in curves])].astype(np.int64),
        m_axis=np.concatenate([c[1] for c in curves]),
        value=np.concatenate([c[2] for c in curves]),
        flag=np.concatenate([c[3] for c in curves]),
    )
