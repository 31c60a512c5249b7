"""Ragged tables: each axis has separate sizes below each node of the axis before it.

Blocks of sparse attention are measured at (batch, new tokens, prefix) with other prefixes at every batch and
number of tokens. On the union of all sizes most nodes would be holes, and filling them turned 70 us into 8.
Here each innermost row is interpolated over its points, then between rows of neighbouring sizes. Beyond the
end of a row latency / B is constant: hiding the outer node of every row of the H100 tables of MLA, that is
1.6 to 14 % off (36 in one table, with broken rows); adding the roofline's rise is 5 to 42 % off and worse in
every table.

NumPy only: hot loops never look up these tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastroof.arrays import Array, Flags, Floats, Longs
from fastroof.columns import ORIGIN_EXTRAPOLATED, ORIGIN_INTERPOLATED
from fastroof.pack.curves import FirstNodes, carried_below, sorted_origins, sorted_points

WorkUs = Callable[..., Floats]
"""B without launch floor at coordinates that broadcast, us."""

Segment = Callable[..., Array]
"""Which kernel runs at coordinates; there is no interpolation between kernels."""


class RaggedLevel(NamedTuple):
    """Nodes of one axis: its sizes below each node of the axis before it."""

    sizes: Floats
    rank: Longs
    keys: Longs
    starts: Longs


@dataclass(frozen=True, eq=False)
class RaggedTable:
    """Measured points of one kernel as a ragged table."""

    levels: tuple[RaggedLevel, ...]
    latency_us: Floats
    origin: Flags
    launch_us: float
    work_us: WorkUs
    segment: Segment | None = None

    def points(self) -> tuple[Floats, ...]:
        """Coordinates of every measured point, one array per axis."""
        columns = []
        node = np.arange(len(self.latency_us))
        for level in reversed(self.levels):
            columns.append(level.sizes[level.rank[node]])
            node = np.searchsorted(level.starts, node, side="right") - 1
        return tuple(reversed(columns))

    def latency(self, sizes: Sequence[Floats], out: Floats, origin: Flags, method: str = "roofline") -> None:
        """Look up points."""
        roots = np.zeros(len(sizes[0]), np.int64)
        out[:], origin[:] = self._below(0, roots, list(sizes), method)

    def _below(self, depth: int, parent: Longs, at: list[Floats], method: str) -> tuple[Floats, Flags]:
        """Latency at ``at`` from nodes below ``parent``; coordinates before ``depth`` are nodes already."""
        if depth == len(self.levels):
            return self.latency_us[parent], self.origin[parent]
        level = self.levels[depth]
        size = at[depth]
        low, high = self._neighbours(depth, parent, at)
        if method in ("nearest", "floor"):
            low_size, high_size = _sizes_of(level, low), _sizes_of(level, high)
            # beyond the geometric mean of its neighbours; a tie goes to the smaller one
            is_high = (method == "nearest") & (size * size > low_size * high_size)
            low = high = np.where(is_high, high, low)
        us, flag = self._below(depth + 1, low, self._moved(depth, at, low), method)
        here, start = self.work_us(*at), self.work_us(*self._moved(depth, at, low))
        alone = (low == high) & (_sizes_of(level, low) != size)
        if alone.any():
            launch_us = self.launch_us if method == "roofline" else 0.0
            carried = us * ((launch_us + here) / (launch_us + start))
            us = np.where(alone, carried, us)
            late = np.flatnonzero((size < _sizes_of(level, low)) & (low == level.starts[parent]))
            if method == "roofline" and len(late):
                us[late] = self._carried_below(depth, parent[late], [a[late] for a in at], us[late])
            flag = np.where(alone, ORIGIN_EXTRAPOLATED, flag).astype(np.uint8)
        between = np.flatnonzero(low != high)
        if len(between):
            some = [a[between] for a in at]
            above = self._moved(depth, some, high[between])
            second, other = self._below(depth + 1, high[between], above, method)
            low_size, high_size = _sizes_of(level, low[between]), _sizes_of(level, high[between])
            by_size = (some[depth] - low_size) / (high_size - low_size)
            first, end = us[between], self.work_us(*above)
            rise = end - start[between]
            if method == "linear_mfu":
                rate = start[between] / first
                us[between] = here[between] / (rate + (end / second - rate) * by_size)
            else:
                flat = rise <= 0.0
                weight = np.where(flat, by_size, (here - start)[between] / np.where(flat, 1.0, rise))
                us[between] = first + (second - first) * weight
            flag[between] = np.maximum(np.maximum(flag[between], other), ORIGIN_INTERPOLATED)
        return us, flag

    def _carried_below(self, depth: int, parent: Longs, at: list[Floats], held_us: Floats) -> Floats:
        """Latency below the first node of an axis."""
        level = self.levels[depth]
        first, last = level.starts[parent], level.starts[parent + 1] - 1
        us, bounds = [], []
        for after in range(3):
            node = np.minimum(first + after, last)
            there = self._moved(depth, at, node)
            us.append(self._below(depth + 1, node, there, "roofline")[0])
            bounds.append(self.launch_us + self.work_us(*there))
        nodes = FirstNodes(_sizes_of(level, first), np.stack(us), np.stack(bounds))
        return carried_below(held_us, self.launch_us + self.work_us(*at), nodes, self.launch_us)

    def _neighbours(self, depth: int, parent: Longs, at: list[Floats]) -> tuple[Longs, Longs]:
        """Nodes on either side of each point below its parent; the same one twice on a node or outside."""
        level = self.levels[depth]
        first, last = level.starts[parent], level.starts[parent + 1] - 1
        below = np.searchsorted(level.sizes, at[depth], side="right")
        node = np.searchsorted(level.keys, parent * (len(level.sizes) + 1) + below, side="right") - 1
        low, high = np.clip(node, first, last), np.clip(node + 1, first, last)
        high = np.where(_sizes_of(level, low) == at[depth], low, high)
        return self._of_one_kernel(depth, at, low, high)

    def _moved(self, depth: int, at: list[Floats], node: Longs) -> list[Floats]:
        """Coordinates with those of one axis replaced by its nodes."""
        level = self.levels[depth]
        return [*at[:depth], _sizes_of(level, node), *at[depth + 1 :]]

    def _of_one_kernel(self, depth: int, at: list[Floats], low: Longs, high: Longs) -> tuple[Longs, Longs]:
        """Drop the neighbour that runs another kernel than the point, if the other one runs the same."""
        if self.segment is None or (low == high).all():
            return low, high
        here = self.segment(*at)
        low_is_same, high_is_same = (self.segment(*self._moved(depth, at, n)) == here for n in (low, high))
        one_is = low_is_same != high_is_same
        return np.where(one_is & high_is_same, high, low), np.where(one_is & low_is_same, low, high)


def _sizes_of(level: RaggedLevel, node: Longs) -> Floats:
    """Sizes of nodes of an axis."""
    sizes: Floats = level.sizes[level.rank[node]]
    return sizes


def pack_ragged(
    points: tuple[Floats, ...],
    latency_us: Floats,
    work_us: WorkUs,
    segment: Segment | None = None,
    origin: Flags | None = None,
) -> RaggedTable:
    """Pack measured points, in any order, as a ragged table."""
    axes, latency_us = sorted_points(points, latency_us)
    count = len(latency_us)
    parent = np.zeros(count, np.int64)
    parents = 1
    levels = []
    for axis in axes:
        sizes, rank = np.unique(axis, return_inverse=True)
        code = parent * (len(sizes) + 1) + rank + 1
        first = np.flatnonzero(np.r_[True, code[1:] != code[:-1]])
        starts = np.searchsorted(parent[first], np.arange(parents + 1))
        levels.append(RaggedLevel(sizes, rank[first], code[first], starts))
        parent = np.cumsum(np.r_[True, code[1:] != code[:-1]]) - 1
        parents = len(first)
    made = sorted_origins(points, origin, count)
    return RaggedTable(tuple(levels), latency_us, made, float(latency_us.min()), work_us, segment)
