"""Several axes and their guides as two arrays: what ``guided_cell`` reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from fastroof.arrays import Floats, Longs
from fastroof.compiled.layout import GUIDE_HEADER
from fastroof.pack.keys import MANTISSA_BITS, axis_keys

__all__ = ["joined_axes"]


MOST_KEY_BITS: Final = 12
"""4,096 consecutive integers have keys of their own."""


def _guide(axis: Floats) -> tuple[int, int, Longs] | None:
    """First key, dropped bits, and the cell at the start of each key; None for nodes too close."""
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
    """Join padded axes, and guide them."""
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
