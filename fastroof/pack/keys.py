"""Guides of sorted axes: from the leading bits of a coordinate to its cell, without a search."""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Floats, Longs

__all__ = [
    "MANTISSA_BITS",
    "AxisGuide",
    "KeyColumns",
    "axis_guide",
    "axis_keys",
    "key_columns",
    "key_start_above",
    "nearest_key_starts",
]

MANTISSA_BITS: Final = 52
MOST_KEY_BITS: Final = 4
"""A finer guide would only grow; where nodes are closer than 1/16, a loop takes the last steps."""


class AxisGuide(NamedTuple):
    """Cells of a sorted axis by key, the exponent and the leading mantissa bits of a coordinate.

    Attributes
    ----------
    shift : int
        Bits of a float64 to drop, which leaves its key.
    first : int
        Key of ``cells[0]``: everything below 1. ``cells[-1]`` is everything from the last inner node's
        key on.
    cells : ndarray of int64, shape (keys,)
        Index of the cell at the start of each key.
    """

    shift: int
    first: int
    cells: Longs


class KeyColumns(NamedTuple):
    """Keys at whose starts all of an axis' nodes are: no coordinate needs more than its key.

    Attributes
    ----------
    shift, first : int
        As in :class:`AxisGuide`, but ``first`` is the key of 1.
    starts : ndarray of float64, shape (keys,)
        Smallest coordinate of each key; the last reaches to infinity.
    """

    shift: int
    first: int
    starts: Floats


def axis_keys(x: Floats, key_bits: int) -> Longs:
    """Keys of coordinates: exponent and ``key_bits`` leading bits of the mantissa of each float64."""
    return np.ascontiguousarray(x, np.float64).view(np.int64) >> (MANTISSA_BITS - key_bits)


def axis_guide(axis: Floats) -> AxisGuide:
    """Guide of a padded axis, with the fewest bits that leave at most one node inside a key.

    Parameters
    ----------
    axis : ndarray of float64, shape (nodes,)
        Sorted, from at most 0 to beyond any coordinate.

    Returns
    -------
    AxisGuide
        For coordinates of at least 0.
    """
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
    """Find the coarsest keys that separate the cells of a padded axis for coordinates of at least 1.

    Returns
    -------
    KeyColumns or None
        None where a node has more than MOST_KEY_BITS bits after its first.
    """
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
    """Find the smallest number of at least ``x``, above 0, with at most MOST_KEY_BITS bits after its first.

    Examples
    --------
    >>> key_start_above(4096.0), key_start_above(4097.0)
    (4096.0, 4352.0)
    """
    step = 2.0 ** (math.floor(math.log2(x)) - MOST_KEY_BITS)
    return math.ceil(x / step) * step


def nearest_key_starts(sizes: Floats, key_bits: int) -> Floats:
    """Move sizes of at least 1 to the nearest with at most so many bits after their first; sorted, each once.

    Examples
    --------
    >>> import numpy as np
    >>> nearest_key_starts(np.array([2.0, 5.0, 1025.0, 1537.0, 10001.0, 10241.0]), 2).tolist()
    [2.0, 5.0, 1024.0, 1536.0, 10240.0]
    """
    step = 2.0 ** (np.floor(np.log2(sizes)) - key_bits)
    return np.unique(np.round(sizes / step) * step)
