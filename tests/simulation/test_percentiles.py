"""Percentiles: numpy's where values are at hand, and within the stated error from a histogram."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.compiled.simulation.series import GAP_BINS, Record, add_gaps
from fastroof.simulation.requests import (
    FEW_EACH,
    GAP_ERROR,
    MANY,
    gap_spread,
    gap_values_us,
    percentile,
    spread,
)

TIMES = st.floats(1e-3, 1e9)


@given(st.lists(TIMES, min_size=1, max_size=60), st.sampled_from([0, 12.5, 50, 90, 95, 99, 99.9, 100]))
def test_a_percentile_is_numpys_to_the_last_bit(values: list[float], percent: float) -> None:
    array = np.array(values)
    assert percentile(array, percent) == np.percentile(array, percent)


@pytest.mark.parametrize("percent", [90, 90.5, 99, 99.9, 100])
@pytest.mark.parametrize("kind", ["drawn", "rising", "equal", "high where it looks"])
def test_a_high_percentile_of_many_is_numpys_too(kind: str, percent: float) -> None:
    array = np.random.default_rng(1).lognormal(3.0, 1.0, MANY + 9)
    if kind == "rising":
        array.sort()
    elif kind == "equal":
        array[:] = 7.0
    elif kind == "high where it looks":
        array[::FEW_EACH] += 1e6
    assert percentile(array, percent) == np.percentile(array, percent)


@given(st.lists(TIMES, min_size=1, max_size=60))
def test_a_spread_is_the_mean_and_numpys_percentiles(values: list[float]) -> None:
    array = np.array(values)
    found = spread(array)
    assert list(found) == ["mean", "p50", "p90", "p95", "p99"]
    assert found["mean"] == array.mean()
    assert [found[f"p{p}"] for p in (50, 90, 95, 99)] == [np.percentile(array, p) for p in (50, 90, 95, 99)]


def test_what_never_came_is_beyond_all_others() -> None:
    values = np.array([1.0, 2.0, 3.0, math.inf, math.inf])
    assert percentile(values, 50) == 3.0
    assert percentile(values, 51) == math.inf
    assert percentile(values, 75) == math.inf
    assert percentile(values[3:], 50) == math.inf


def test_an_empty_array_has_no_percentile() -> None:
    nothing = np.array([])
    assert math.isnan(percentile(nothing, 50))
    assert all(map(math.isnan, spread(nothing).values()))
    assert all(map(math.isnan, gap_spread(np.zeros(8, np.int64), gap_values_us(8, 0)).values()))


def histogram(gaps_us: list[tuple[float, int]]) -> np.ndarray:
    record = Record(np.zeros(GAP_BINS, np.int64), np.zeros((1, 1)), np.zeros(1))
    for gap_us, count in gaps_us:
        add_gaps(record, gap_us, count)
    return record.gaps


@pytest.mark.loops
@given(st.floats(1.0, 2.0**41 * 0.999))
def test_a_gap_is_within_the_error_of_its_bin(gap_us: float) -> None:
    (place,) = np.flatnonzero(histogram([(gap_us, 1)]))
    assert abs(gap_values_us(GAP_BINS, 0)[place] - gap_us) <= GAP_ERROR * gap_us


@pytest.mark.loops
@given(st.lists(st.tuples(st.floats(1.0, 1e8), st.integers(1, 5)), min_size=1, max_size=40))
def test_answers_of_a_histogram_are_within_the_stated_error(gaps_us: list[tuple[float, int]]) -> None:
    every = np.concatenate([np.full(count, gap_us) for gap_us, count in gaps_us])
    found, exact = gap_spread(histogram(gaps_us), gap_values_us(GAP_BINS, 0)), spread(every)
    for name, value in exact.items():
        assert abs(found[name] - value) <= GAP_ERROR * value * (1.0 + 1e-12)
    assert GAP_ERROR < 0.004
