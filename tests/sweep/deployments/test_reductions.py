"""The best k, Pareto fronts and histograms: equal to comparing all with all, in parts or at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof.compiled import deployments as reductions
from fastroof.compiled.deployments import BestTable, Fronts

pytestmark = pytest.mark.loops

# few values, so that many are equal
POINTS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 6)), max_size=40)


def best_table(groups: int, k: int) -> BestTable:
    return BestTable(np.empty((groups, k)), np.empty((groups, k), np.int64), np.zeros(groups, np.int64))


def fronts(groups: int, room: int) -> Fronts:
    shape = (groups, room)
    return Fronts(np.empty(shape), np.empty(shape), np.empty(shape, np.int64), np.zeros(groups, np.int64))


def columns(points: Any) -> tuple[Any, Any, Any]:
    array = np.array(points, np.float64).reshape(-1, 3)
    return array[:, 0].astype(np.int64), array[:, 1].copy(), array[:, 2].copy()


@settings(max_examples=30)
@given(POINTS, st.integers(1, 5))
def test_the_best_are_the_first_of_a_sort(points: Any, k: int) -> None:
    groups, values, _ = columns(points)
    table = best_table(3, k)
    reductions.reduce_best(groups, values, table)
    for group in range(3):
        mine = [i for i in range(len(points)) if groups[i] == group]
        expected = sorted(mine, key=lambda i: -values[i])[:k]
        assert table.at[group, : table.taken[group]].tolist() == expected
        assert table.value[group, : table.taken[group]].tolist() == [values[i] for i in expected]


@settings(max_examples=30)
@given(POINTS)
def test_a_front_is_what_no_other_beats(points: Any) -> None:
    groups, x, y = columns(points)
    found = fronts(3, 8)
    assert reductions.reduce_pareto(groups, x, y, 0, found) == len(points)
    for group in range(3):
        mine = [i for i in range(len(points)) if groups[i] == group]

        def beats(j: int, i: int) -> bool:
            as_much = x[j] >= x[i] and y[j] >= y[i]
            return bool(as_much and (x[j] > x[i] or y[j] > y[i] or j < i))

        expected = [i for i in mine if not any(beats(j, i) for j in mine if j != i)]
        assert sorted(found.at[group, : found.taken[group]].tolist()) == expected
        assert (np.diff(found.x[group, : found.taken[group]]) < 0).all()
        assert (np.diff(found.y[group, : found.taken[group]]) > 0).all()


@settings(max_examples=30)
@given(POINTS, st.integers(0, 40), st.integers(1, 3))
def test_parts_come_to_the_same_as_the_whole(points: Any, cut: int, k: int) -> None:
    groups, x, y = columns(points)

    def kept_best(rows: Any) -> list[int]:
        table = best_table(3, k)
        reductions.reduce_best(groups[rows], x[rows], table)
        taken = [table.at[group, : table.taken[group]] for group in range(3)]
        return sorted(rows[np.concatenate(taken)].tolist())

    def kept_front(rows: Any) -> list[int]:
        found = fronts(3, 8)
        reductions.reduce_pareto(groups[rows], x[rows], y[rows], 0, found)
        taken = [found.at[group, : found.taken[group]] for group in range(3)]
        return sorted(rows[np.concatenate(taken)].tolist())

    every = np.arange(len(points))
    for kept in (kept_best, kept_front):
        parts = kept(every[:cut]) + kept(every[cut:])
        assert kept(np.array(parts, np.int64)) == kept(every)


def test_a_full_front_returns_where_it_stopped_and_stays_unchanged() -> None:
    groups = np.zeros(3, np.int64)
    x, y = np.array([3.0, 2.0, 1.0]), np.array([1.0, 2.0, 3.0])
    found = fronts(1, 2)
    assert reductions.reduce_pareto(groups, x, y, 0, found) == 2
    assert found.at[0].tolist() == [0, 1]
    # one that beats others needs no more room
    assert reductions.keep_pareto(found, 0, 2.5, 4.0, 9)
    assert found.at[0, : found.taken[0]].tolist() == [0, 9]


def test_nan_is_never_the_best() -> None:
    table = best_table(1, 2)
    reductions.reduce_best(np.zeros(3, np.int64), np.array([math.nan, 1.0, math.nan]), table)
    assert table.at[0, : table.taken[0]].tolist() == [1]


def test_values_are_counted_in_quarters_of_a_doubling() -> None:
    counts = np.zeros((1, reductions.BINS), np.int64)
    for value in (1.0, 1.18, 1.2, 2.0, 1e-9, 1e30, 0.0, -1.0, math.nan):
        reductions.count_value(counts, 0, value)
    seen = {place: int(count) for place, count in enumerate(counts[0]) if count}
    assert seen == {80: 2, 81: 1, 84: 1, 0: 1, reductions.BINS - 1: 1}
