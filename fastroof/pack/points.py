"""Rows in any order -> sorted points, one a coordinate; and how far every axis reaches."""

from __future__ import annotations

import numpy as np

from fastroof.arrays import Flags, Floats
from fastroof.columns import ORIGIN_MEASURED

__all__ = ["SIZE_LIMIT", "sorted_origins", "sorted_points"]


SIZE_LIMIT = float(2**40)
"""Last node of every axis: beyond any size that an entry point accepts."""


def sorted_points(coordinates: tuple[Floats, ...], latency_us: Floats) -> tuple[tuple[Floats, ...], Floats]:
    """Sort points by their coordinates, the first one slowest; equal points become their median."""
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
    """Origins of ``count`` points in the order of :func:`sorted_points`; measured where none are given."""
    if origin is None or not origin.any():
        return np.full(count, ORIGIN_MEASURED, np.uint8)
    return sorted_points(coordinates, origin.astype(np.float64))[1].astype(np.uint8)
