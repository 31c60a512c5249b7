"""Guides of sorted axes: the leading bits of a coordinate give its cell without a search."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs

MANTISSA_BITS: Final = 52
MOST_KEY_BITS: Final = 4
"""Maximum key bits; for nodes closer than 1/16 a loop takes the last steps."""


class AxisGuide(NamedTuple):
    """Cells of a sorted axis by key, the exponent and the leading mantissa bits of a coordinate."""

    shift: int
    first: int
    cells: Longs


class KeyColumns(NamedTuple):
    """Keys whose starts contain all nodes of an axis, so that a key determines the cell."""

    shift: int
    first: int
    starts: Floats


def axis_keys(x: Floats, key_bits: int) -> Longs:
    """Keys of coordinates: exponent and ``key_bits`` leading mantissa bits of each float64."""
    return np.ascontiguousarray(x, np.float64).view(np.int64) >> (MANTISSA_BITS - key_bits)


def axis_guide(axis: Floats) -> AxisGuide:
    """Guide of a padded axis with the fewest bits that leave at most one node per key."""
    inner = axis[1:-1]
    inner = inner[inner >= 1.0]
    for key_bits in range(MOST_KEY_BITS + 1):
        shift = MANTISSA_BITS - key_bits
        keys = axis_keys(inner, key_bits)
        within = keys[(keys << shift) != inner.view(np.int64)]
        if len(np.unique(within)) == len(within):
            break
    first = int(axis_keys(np.ones(1), key_bits)[0]) - 1
    last = max(first, int(keys[-1])) if len(keys) else first
    starts = (np.arange(first, last + 1) << shift).view(np.float64)
    cells = np.searchsorted(axis, starts, side="right") - 1
    cells[0] = 0
    return AxisGuide(shift, first, np.minimum(cells, len(axis) - 2))


def key_columns(axis: Floats) -> KeyColumns | None:
    """Find the coarsest keys that separate the cells of a padded axis for coordinates of at least 1."""
    inner = axis[1:-1]
    inner = np.r_[1.0, inner[inner >= 1.0]]
    for key_bits in range(MOST_KEY_BITS + 1):
        shift = MANTISSA_BITS - key_bits
        keys = axis_keys(inner, key_bits)
        if ((keys << shift) == inner.view(np.int64)).all():
            starts = (np.arange(keys[0], keys[-1] + 1) << shift).view(np.float64)
            return KeyColumns(shift, int(keys[0]), starts)
    return None


def key_start_above(x: float) -> float:
    """Find the smallest number >= ``x`` > 0 with at most MOST_KEY_BITS bits after its first."""
    step = 2.0 ** (math.floor(math.log2(x)) - MOST_KEY_BITS)
    return math.ceil(x / step) * step


def nearest_key_starts(sizes: Floats, key_bits: int) -> Floats:
    """Round sizes >= 1 to ``key_bits`` bits after their first; sorted, unique."""
    step = 2.0 ** (np.floor(np.log2(sizes)) - key_bits)
    return np.unique(np.round(sizes / step) * step)
