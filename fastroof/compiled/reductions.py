"""Reductions that a sweep's loops end in: the best k of a group, its Pareto front, counts of values.

Each is associative, and of equals the first stays: reducing parts in order, and then what they kept, keeps
what reducing everything at once keeps. Values come one by one, so that candidates never pile up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fastroof.arrays import Floats, Longs
from fastroof.compiled.jit import jit

__all__ = [
    "BINS",
    "BINS_A_DOUBLING",
    "FIRST_DOUBLING",
    "BestTable",
    "Fronts",
    "count_value",
    "keep_best",
    "keep_pareto",
    "reduce_best",
    "reduce_pareto",
]


BINS_A_DOUBLING = 4
FIRST_DOUBLING = -20
BINS = 240
"""Bins of a histogram: four a doubling, from 2**-20 to 2**40; what lies outside is in the outermost."""


class BestTable(NamedTuple):
    """The best of each group, best first: a row a group, of which ``taken`` places are."""

    value: Floats
    at: Longs
    taken: Longs


class Fronts(NamedTuple):
    """The Pareto front of each group, x falling and y rising: a row a group, of which ``taken`` are."""

    x: Floats
    y: Floats
    at: Longs
    taken: Longs


@jit
def keep_best(table: BestTable, group: int, value: float, at: int) -> None:
    """Keep a value if it is among the highest of its group; NaN never is."""
    most = table.value.shape[1]
    count = table.taken[group]
    if not value >= -math.inf or (count == most and not value > table.value[group, most - 1]):
        return
    if count < most:
        table.taken[group] = count + 1
        place = count
    else:
        place = most - 1
    while place > 0 and value > table.value[group, place - 1]:
        table.value[group, place] = table.value[group, place - 1]
        table.at[group, place] = table.at[group, place - 1]
        place -= 1
    table.value[group, place] = value
    table.at[group, place] = at


@jit
def keep_pareto(fronts: Fronts, group: int, x: float, y: float, at: int) -> bool:
    """Keep a point unless another of its group has as much of both, and drop those that it beats."""
    count = fronts.taken[group]
    # the first with less x: all before it have at least as much, the last of those the most y
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        if fronts.x[group, middle] >= x:
            low = middle + 1
        else:
            high = middle
    if low > 0 and fronts.y[group, low - 1] >= y:
        return True
    # one of the same x has less y
    start = low - 1 if low > 0 and fronts.x[group, low - 1] == x else low
    stop = low
    while stop < count and fronts.y[group, stop] <= y:
        stop += 1
    if start == stop:
        if count == fronts.x.shape[1]:
            return False
        for i in range(count, start, -1):
            fronts.x[group, i] = fronts.x[group, i - 1]
            fronts.y[group, i] = fronts.y[group, i - 1]
            fronts.at[group, i] = fronts.at[group, i - 1]
        fronts.taken[group] = count + 1
    else:
        gone = stop - start - 1
        for i in range(stop, count):
            fronts.x[group, i - gone] = fronts.x[group, i]
            fronts.y[group, i - gone] = fronts.y[group, i]
            fronts.at[group, i - gone] = fronts.at[group, i]
        fronts.taken[group] = count - gone
    fronts.x[group, start] = x
    fronts.y[group, start] = y
    fronts.at[group, start] = at
    return True


@jit
def count_value(counts: Longs, group: int, value: float) -> None:
    """Count a value above 0 in its group's histogram; others are not counted."""
    if value > 0.0:
        place = math.floor((math.log2(value) - FIRST_DOUBLING) * BINS_A_DOUBLING)
        counts[group, int(min(max(place, 0), BINS - 1))] += 1


@jit
def reduce_best(groups: Longs, values: Floats, table: BestTable) -> None:
    """Keep the highest values of each group."""
    for i in range(len(groups)):
        keep_best(table, groups[i], values[i], i)


@jit
def reduce_pareto(groups: Longs, x: Floats, y: Floats, start: int, fronts: Fronts) -> int:
    """Keep each group's front, from ``start`` on: returns where a row was full, or the number of points."""
    for i in range(start, len(groups)):
        if not keep_pareto(fronts, groups[i], x[i], y[i], i):
            return i
    return len(groups)
