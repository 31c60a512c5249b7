"""Small bf16 GEMMs smoothed along m, for plans that ask for it; the rows themselves stay as measured.

In the memory-bound range the H100's bf16 GEMMs were measured in one of two states, some 17 % apart, at
random by point: 8192 x 8192 takes 51.6, 45.8, 53.9, 46.2 us at m = 1, 2, 4, 8. A running median of three
of latency / bytes takes most of it out. On held-out points (m <= 256, n and k at least 1024) the error
falls from 4.60 to 4.00 % where m was hidden and from 4.83 to 4.63 % where n was, and stays (4.00, 4.02)
where k was. fp8 GEMMs step where their tiles end, which this would smear: they are left alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from fastroof.flops import gemm_bytes, gemm_flops
from fastroof.pack.points import Floats

__all__ = ["LARGEST_SMOOTHED_M", "median_of_three"]

LARGEST_SMOOTHED_M: Final = 256


def median_of_three(
    m: Floats,
    n: Floats,
    k: Floats,
    latency_us: Floats,
    peak_flops_per_us: float,
    bytes_per_us: float,
    element_bytes: float,
) -> Floats:
    """Smooth memory-bound GEMMs of one (n, k) along m, up to m = 256.

    Parameters
    ----------
    m, n, k, latency_us : ndarray of float64, shape (rows,)
        Measured points in any order.
    peak_flops_per_us, bytes_per_us : float
        The dtype's peak and the memory bandwidth.
    element_bytes : float
        Bytes of an input element.

    Returns
    -------
    ndarray of float64, shape (rows,)
        Latencies: where r = latency / bytes, the median of r at an m and at the next smaller and larger
        one, times the bytes; at both ends the mean of two.
    """
    moved = gemm_bytes(m, n, k, element_bytes)
    is_small = (m <= LARGEST_SMOOTHED_M) & (moved / bytes_per_us > gemm_flops(m, n, k) / peak_flops_per_us)
    smoothed = latency_us.copy()
    order = np.lexsort((m, n, k))
    order = order[is_small[order]]
    is_new = np.r_[False, (np.diff(n[order]) != 0) | (np.diff(k[order]) != 0)] if len(order) else order > 0
    for rows in np.split(order, np.flatnonzero(is_new)):
        if len(rows) < 2:
            continue
        ratio = latency_us[rows] / moved[rows]
        middle = np.median(np.stack([ratio[:-2], ratio[1:-1], ratio[2:]]), axis=0)
        ratio = np.r_[ratio[:2].mean(), middle, ratio[-2:].mean()]
        smoothed[rows] = ratio * moved[rows]
    return smoothed
