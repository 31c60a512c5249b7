"""Isolated spikes: rows several times slower than both neighbours, without similar siblings.

A point of a table is a spike if all of this holds along one axis of its operator:

  * it takes at least :data:`LEAST_RATIO` times as long as the slower of its two neighbours. For the first
  point of a line, the neighbour with more work is enough, since less work of one kernel does not take three
  times as long. The last point is never a spike: its growth may be real; * none of its siblings takes
  :data:`SHARED_RATIO` times as long as its own neighbours. A sibling has the same size along the axis, and
  the next smaller or larger value of one other column. A tile's edge, a slow path or another kernel shows in
  siblings too; * at least :data:`FEWEST_SIBLINGS` siblings are known.

The rows stay in the table, and :class:`fastroof.Tables` interpolates their points. bench_data/README.md has
the error rate of the rule and the error of these points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from fastroof.arrays import Array, Bools, Floats, Longs
from fastroof.caching import lazy_property
from fastroof.operators.operator import Operator

LEAST_RATIO: Final = 3.0
"""Least ratio of a spike to its slower neighbour."""

SHARED_RATIO: Final = 1.5
"""Least ratio of a sibling that shares the effect."""

FEWEST_SIBLINGS: Final = 3
"""Fewest siblings needed to judge a point."""

MOST_CODES: Final = 2**62


class Spikes(NamedTuple):
    """The isolated spikes of one table, arrays of shape (points,) sorted by row."""

    row: Longs
    before: Longs
    after: Longs
    axis: Longs
    ratio: Floats
    latency_us: Floats
    before_us: Floats
    after_us: Floats
    of_row: Longs

    @property
    def every_row(self) -> Bools:
        """Mask of the table's rows that are spikes."""
        return self.of_row >= 0


class _Lines(NamedTuple):
    """Neighbours of points along one axis (-1 for none), and their ratios to the slower one."""

    before: Longs
    after: Longs
    ratio: Floats


def find_spikes(
    operator: Operator, columns: Mapping[str, Array], groups: Mapping[tuple[Any, ...], Longs]
) -> Spikes:
    """Find the isolated spikes of one table."""
    count = len(columns["latency_us"])
    kernel = np.empty(count, np.int64)
    for number, rows in enumerate(groups.values()):
        kernel[rows] = number
    sizes = [_ranks(values) for values in operator.independent_axes(columns).values()]
    place, places = _joined(sizes, MOST_CODES // max(len(groups), 1))
    cell = kernel * places + place
    order = np.argsort(cell, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(cell[order]) != 0][:count])
    row = order[starts]
    latency_us = _medians(columns["latency_us"], order, starts)
    kernel, sizes = kernel[row], [size[row] for size in sizes]
    lines = [
        _lines([kernel, *sizes[:axis], *sizes[axis + 1 :]], sizes[axis], latency_us)
        for axis in range(len(sizes))
    ]
    largest, along = np.zeros(len(row)), np.zeros(len(row), np.int64)
    kernels = _Kernels(list(groups), cell[row], places)
    for axis, line in enumerate(lines):
        # NaN compares false
        points = np.flatnonzero(line.ratio >= LEAST_RATIO)
        if not len(points):
            continue
        siblings = kernels.siblings(kernel[points], place[row[points]])
        for other in (*lines[:axis], *lines[axis + 1 :]):
            siblings += [other.before[points], other.after[points]]
        ratios = np.stack([np.where(of >= 0, line.ratio[of], np.nan) for of in siblings])
        is_shared = (ratios >= SHARED_RATIO).any(axis=0)
        is_known = (~np.isnan(ratios)).sum(axis=0) >= FEWEST_SIBLINGS
        points = points[is_known & ~is_shared & (line.ratio[points] > largest[points])]
        largest[points], along[points] = line.ratio[points], axis
    found = np.flatnonzero(largest)
    found = found[np.argsort(row[found])]
    spike = np.full(len(row), -1)
    spike[found] = np.arange(len(found))
    of_row = np.empty(count, np.int64)
    of_row[order] = np.repeat(spike, np.diff(np.r_[starts, count]))
    before, after = (np.empty(len(found), np.int64) for _ in range(2))
    for axis, line in enumerate(lines):
        here = along[found] == axis
        before[here], after[here] = line.before[found[here]], line.after[found[here]]
    is_first = before < 0
    return Spikes(
        row[found],
        np.where(is_first, -1, row[before]),
        row[after],
        along[found],
        largest[found],
        latency_us[found],
        np.where(is_first, np.nan, latency_us[before]),
        latency_us[after],
        of_row,
    )


def _ranks(values: Array) -> Longs:
    """Ranks of a column's values."""
    if values.dtype.kind == "i" and len(values) and 0 <= values.min() <= values.max() < 16 * len(values):
        # a lookup table takes a fifth of the time of sorting 107,188 sizes
        is_there = np.zeros(int(values.max()) + 1, np.bool_)
        is_there[values] = True
        return (np.cumsum(is_there) - 1)[values]
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _joined(columns: Iterable[Longs], most: int = MOST_CODES) -> tuple[Longs, int]:
    """Lexicographic code of several columns, and the number of codes."""
    codes, count = np.zeros(1, np.int64), 1
    for column in columns:
        width = int(column.max(initial=0)) + 1
        if count * width > most:
            codes = _ranks(codes)
            count = int(codes.max(initial=0)) + 1
        codes, count = codes * width + column, count * width
    if count > most:
        codes = _ranks(codes)
        count = int(codes.max(initial=0)) + 1
    return codes, count


def _medians(latency_us: Floats, order: Longs, starts: Longs) -> Floats:
    """Median latency of each point, whose rows are contiguous in ``order``."""
    ordered = latency_us[order]
    if len(starts) == len(ordered):
        return ordered
    point = np.cumsum(np.isin(np.arange(len(ordered)), starts)) - 1
    ordered = ordered[np.lexsort((ordered, point))]
    counts = np.diff(np.r_[starts, len(ordered)])
    return np.asarray((ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) / 2.0)


def _lines(others: Sequence[Longs], sizes: Longs, latency_us: Floats) -> _Lines:
    """Neighbours of each point along an axis, at equal values of the others."""
    width = int(sizes.max(initial=0)) + 1
    line, _ = _joined([np.zeros_like(sizes), *others], MOST_CODES // width)
    order = np.argsort(line * width + sizes, kind="stable")
    line, ordered_us = line[order], latency_us[order]
    is_last = np.r_[line[1:] != line[:-1], True]
    is_first = np.r_[True, is_last[:-1]]
    slower_us = np.r_[ordered_us[1:], np.nan]
    np.maximum(slower_us[1:], ordered_us[:-1], out=slower_us[1:], where=~is_first[1:])
    slower_us[is_last] = np.nan
    before, after, ratio = np.empty_like(order), np.empty_like(order), np.empty(len(order))
    before[order] = np.where(is_first, -1, np.r_[-1, order[:-1]])
    after[order] = np.where(is_last, -1, np.r_[order[1:], -1])
    ratio[order] = ordered_us / slower_us
    return _Lines(before, after, ratio)


class _Kernels:
    """Points of neighbouring kernels, which differ in one key by one value."""

    def __init__(self, keys: Sequence[tuple[Any, ...]], cells: Longs, places: int) -> None:
        self.keys = keys
        self.cells = cells
        self.places = places

    @lazy_property
    def neighbours(self) -> list[Longs]:
        """Kernel before and after each kernel along each key; -1 for none."""
        columns = [_ranks(np.array(column)) for column in zip(*self.keys, strict=True)]
        ones = np.ones(len(self.keys))
        found = []
        for number, column in enumerate(columns):
            line = _lines([*columns[:number], *columns[number + 1 :]], column, ones)
            found += [line.before, line.after]
        return found

    def siblings(self, kernel: Longs, place: Longs) -> list[Longs]:
        """Points at the same sizes of neighbouring kernels; -1 for none."""
        found = []
        for neighbours in self.neighbours:
            cells = neighbours[kernel] * self.places + place
            at = np.minimum(np.searchsorted(self.cells, cells), len(self.cells) - 1)
            found.append(np.where((cells >= 0) & (self.cells[at] == cells), at, -1))
        return found
