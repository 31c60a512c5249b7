"""Ragged tables: each row over its own points, then rows with each other; against the naive recursion."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.pack.ragged import RaggedTable, pack_ragged
from tests.reference.ragged import ragged

SIZES = (1, 2, 5, 16, 64, 300, 4096)


def work(batch, q_len, prefix):
    """FLOPs that grow with all three, and stop growing with the prefix at 100."""
    return batch * (0.3 * q_len + 0.01 * q_len * np.minimum(prefix, 100.0)) + 0.5


def is_short(batch, q_len, prefix):
    return q_len + prefix <= 70


@st.composite
def tables(draw):
    """Points (batch, q_len, prefix) in us, scattered as modules of sparse attention are."""
    axis = st.sampled_from(SIZES)
    point = st.tuples(axis, axis, st.sampled_from((0, *SIZES)))
    points = draw(st.lists(point, min_size=1, max_size=25, unique=True))
    us = draw(st.lists(st.floats(1.0, 1e4), min_size=len(points), max_size=len(points)))
    return {tuple(map(float, p)): u for p, u in zip(points, us, strict=True)}


def packed(points, segment=None) -> RaggedTable:
    columns = tuple(np.array(column) for column in zip(*points, strict=True))
    return pack_ragged(columns, np.array(list(points.values())), work, segment)


def look_up(table: RaggedTable, at, method: str = "roofline"):
    sizes = [np.array([float(x)]) if np.isscalar(x) else np.asarray(x, float) for x in at]
    us, origin = np.empty(len(sizes[0])), np.empty(len(sizes[0]), np.uint8)
    table.latency(sizes, us, origin, method)
    return us, origin


anywhere = st.tuples(st.integers(1, 6000), st.integers(1, 6000), st.integers(0, 6000))
near_nodes = st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES), st.sampled_from((0, 3, *SIZES)))


@pytest.mark.parametrize("segment", [None, is_short], ids=["one kernel", "two kernels"])
@given(points=tables(), at=st.one_of(anywhere, near_nodes))
def test_a_point_is_the_naive_lookup(segment, points, at):
    us, origin = look_up(packed(points, segment), at)
    expected, made = ragged(points, work, tuple(map(float, at)), segment)
    np.testing.assert_allclose(us, expected, rtol=1e-12)
    assert origin.tolist() == [made]


@given(points=tables())
def test_measured_points_come_back_to_the_last_bit(points):
    table = packed(points)
    at = table.points()
    assert sorted(zip(*(a.tolist() for a in at), strict=True)) == sorted(points)
    for method in ("roofline", "linear_mfu", "nearest", "floor"):
        us, origin = look_up(table, at, method)
        assert us.tolist() == [points[p] for p in zip(*(a.tolist() for a in at), strict=True)]
        assert (origin == 0).all()


@given(points=tables(), many=st.lists(anywhere, min_size=2, max_size=20), seed=st.integers(0, 9))
def test_a_batch_is_its_singles_in_any_order_of_rows(points, many, seed):
    table = packed(points)
    us, origin = look_up(table, tuple(np.array(column) for column in zip(*many, strict=True)))
    order = np.random.default_rng(seed).permutation(len(points))
    rows = list(points.items())
    shuffled = packed(dict(rows[i] for i in order))
    for i, at in enumerate(many):
        for other in (table, shuffled):
            single = look_up(other, at)
            assert (single[0][0], single[1][0]) == (us[i], origin[i])


def test_each_row_is_interpolated_over_its_own_points():
    # the rows' prefixes have nothing in common: on their union every other node would be a hole
    points = {(1.0, 16.0, float(p)): 10.0 + p for p in (0, 10, 20)}
    points |= {(1.0, 64.0, float(p)): 50.0 + p for p in (5, 15, 25)}
    us, origin = look_up(packed(points), (1, 16, 15))
    assert us[0] == pytest.approx(25.0)
    assert origin[0] == 1
    us, origin = look_up(packed(points), (1, 64, 10))
    assert us[0] == pytest.approx(60.0)


def test_beyond_a_row_the_latency_over_the_roofline_is_held():
    points = {(1.0, 16.0, 0.0): 10.0, (1.0, 16.0, 50.0): 14.0, (4.0, 16.0, 0.0): 30.0}
    (us,), (origin,) = look_up(packed(points), (1, 16, 90))
    assert us == pytest.approx(14.0 * (10.0 + work(1, 16, 90)) / (10.0 + work(1, 16, 50)))
    assert origin == 2
    # where B does not grow any more neither does the latency
    (end,), _ = look_up(packed(points), (1, 16, 100))
    (far,), _ = look_up(packed(points), (1, 16, 10**6))
    assert far == pytest.approx(end)


def test_half_way_between_two_nodes_the_smaller_one_is_nearest():
    """Distances are octaves: 8 is as far from 4 as from 16, and 9 is not."""
    points = {(1.0, 4.0, 0.0): 10.0, (1.0, 16.0, 0.0): 100.0}
    table = packed(points)
    for q_len, node in ((7, 4), (8, 4), (9, 16)):
        (us,), _ = look_up(table, (1, q_len, 0), "nearest")
        assert us == pytest.approx(points[1, node, 0] * work(1, q_len, 0) / work(1, node, 0), rel=1e-12)


def test_points_of_two_kernels_are_not_interpolated_between():
    points = {(1.0, 16.0, 40.0): 10.0, (1.0, 16.0, 90.0): 100.0, (1.0, 16.0, 200.0): 101.0}
    (us,), (origin,) = look_up(packed(points, is_short), (1, 16, 50))
    assert us == pytest.approx(10.0 * (10.0 + work(1, 16, 50)) / (10.0 + work(1, 16, 40)))
    assert origin == 2
    (us,), _ = look_up(packed(points, is_short), (1, 16, 60))
    assert us == pytest.approx(100.0 * (10.0 + work(1, 16, 60)) / (10.0 + work(1, 16, 90)))


def test_of_duplicates_the_median_counts():
    times = [3.0, 7.0, 100.0]
    table = pack_ragged((np.ones(3), np.full(3, 2.0), np.zeros(3)), np.array(times), work)
    us, _ = look_up(table, (1, 2, 0))
    assert us.tolist() == [statistics.median(times)]


@given(points=tables(), at=anywhere)
def test_other_methods_keep_the_work_over_the_latency_of_nodes(points, at):
    table = packed(points)
    rates = {p: work(*p) / us for p, us in points.items()}
    for method in ("nearest", "floor"):
        us, _ = look_up(table, at, method)
        rate = work(*map(float, at)) / us[0]
        assert any(rate == pytest.approx(other, rel=1e-9) for other in rates.values())
    us, _ = look_up(table, at, "linear_mfu")
    rate = work(*map(float, at)) / us[0]
    assert min(rates.values()) * (1 - 1e-9) <= rate <= max(rates.values()) * (1 + 1e-9)
