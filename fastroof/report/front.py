"""Which rows of a sweep matter: Pareto fronts, the best of each setting, and a sample of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from fastroof.arrays import Bools, Floats, Longs
from fastroof.report.results_file import RateColumns, Results

__all__ = ["ChosenRows", "choose_rows", "in_turns", "pareto_front"]


MOST_LEADERS: Final = 200
"""Rows whose steps are broken down at most."""
CURVE_POINTS: Final = 25
"""Points of a curve that are kept where not all rows are."""


def pareto_front(x: Floats, y: Floats, group: Longs | None = None) -> Bools:
    """Find the points of each group that no other point beats in both rates."""
    usable = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
    groups = np.zeros(len(x), np.int64) if group is None else group
    order = usable[np.lexsort((-y[usable], -x[usable], groups[usable]))]
    on_front = np.zeros(len(x), bool)
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    for members in np.split(order, edges):
        before = np.maximum.accumulate(np.concatenate([[-np.inf], y[members]]))[:-1]
        on_front[members[y[members] > before]] = True
    return on_front


class ChosenRows(NamedTuple):
    """Rows of a results file that a report shows."""

    indices: Longs
    leaders: Longs


def choose_rows(results: Results, most: int) -> ChosenRows:
    """Choose at most so many rows: all, or what matters and an even sample of the rest."""
    x, y = results.numbers(RateColumns.USER), results.numbers(RateColumns.GPU)
    within = results.is_within()
    if not within.any():
        within = np.isfinite(x) & np.isfinite(y)
    rate = np.where(within, y, np.nan)
    load = results.load()
    workload = results.have(results.kind.workload)
    front = pareto_front(x, rate, results.groups(["model", *workload]))
    best = _best(rate, results.groups(results.have((*results.kind.settings, *results.kind.workload))))
    top = _best(rate, results.groups(["model", *workload]))
    leaders = _leaders((top, front, best), y)
    if results.num_rows <= most:
        return ChosenRows(np.arange(results.num_rows), leaders)
    curve = results.groups(results.series(load))
    outline = _outlines(curve, results.numbers(load))
    chosen = np.zeros(results.num_rows, bool)
    chosen[leaders[:most]] = True
    led = outline & np.isin(curve, curve[chosen])
    everything = np.ones(results.num_rows, bool)
    for wanted, share in ((front, 2), (led, 1), (best, 1), (outline, 1), (within, 1), (everything, 1)):
        room = (most - int(chosen.sum())) // share
        chosen[_spread(np.flatnonzero(wanted & ~chosen), room)] = True
    return ChosenRows(np.flatnonzero(chosen), leaders[:most])


def _leaders(wanted: Sequence[Bools], rate: Floats) -> Longs:
    """Of each kind an even choice: half of the room for the first, half of the rest, and so on."""
    is_leader = np.zeros(len(rate), bool)
    for i, mask in enumerate(wanted, 1):
        room = MOST_LEADERS - int(is_leader.sum())
        share = room if i == len(wanted) else room // 2
        is_leader[_spread(_by_rate(np.flatnonzero(mask & ~is_leader), rate), share)] = True
    return _by_rate(np.flatnonzero(is_leader), rate)


def _best(rate: Floats, group: Longs) -> Bools:
    """The first of the highest rates of each group."""
    usable = np.flatnonzero(np.isfinite(rate))
    order = usable[np.lexsort((-rate[usable], group[usable]))]
    is_first = np.diff(group[order], prepend=-1) != 0
    is_best = np.zeros(len(rate), bool)
    is_best[order[is_first]] = True
    return is_best


def _outlines(curve: Longs, load: Floats) -> Bools:
    """Both ends of each curve, and points at even distances between them."""
    order = np.lexsort((load, curve))
    starts = np.flatnonzero(np.diff(curve[order], prepend=-1))
    sizes = np.diff(np.append(starts, len(order)))
    size = np.repeat(sizes, sizes)
    rank = np.arange(len(order)) - np.repeat(starts, sizes)
    part = rank * (CURVE_POINTS - 1) // np.maximum(size - 1, 1)
    before = (rank - 1) * (CURVE_POINTS - 1) // np.maximum(size - 1, 1)
    is_outline = np.zeros(len(order), bool)
    is_outline[order] = (rank == 0) | (part != before)
    return is_outline


def in_turns(labels: Sequence[Hashable], rates: Sequence[float]) -> list[int]:
    """Order things by rate so that each label has its turn: the best of each, then the second best, ..."""
    seen: Counter[Hashable] = Counter()
    turns = []
    for i in sorted(range(len(labels)), key=lambda i: -rates[i]):
        turns.append((seen[labels[i]], -rates[i], i))
        seen[labels[i]] += 1
    return [i for _, _, i in sorted(turns)]


def _by_rate(indices: Longs, rate: Floats) -> Longs:
    return indices[np.argsort(-rate[indices], kind="stable")]


def _spread(indices: Longs, most: int) -> Longs:
    """All of them, or so many at even distances, the first among them."""
    if len(indices) <= most:
        return indices
    return indices[np.arange(most) * len(indices) // max(most, 1)]
