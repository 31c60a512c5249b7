"""The search for a largest rate, where the answer is known by a formula."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.simulation.capacity_search import LOWEST_SHARE, bracket, largest_rate


def waits(service_s: float, rate: float) -> float:
    """Mean wait of a queue with Poisson arrivals and constant service (Pollaczek and Khinchine), s."""
    load = rate * service_s
    return math.inf if load >= 1.0 else load * service_s / (2.0 * (1.0 - load))


@given(
    st.floats(1e-4, 1e3),
    st.floats(0.01, 100.0),
    st.floats(0.05, 20.0),
    st.sampled_from([0.3, 0.1, 0.01, 1e-6]),
)
def test_the_largest_rate_of_a_queue_equals_its_formula(
    service_s: float, services: float, off: float, tolerance: float
) -> None:
    """Wherever the search begins: wait <= W at load <= 2 W / (s + 2 W)."""
    limit_s = services * service_s
    exact = 2.0 * limit_s / (service_s + 2.0 * limit_s) / service_s
    found = largest_rate(
        lambda rate: waits(service_s, rate), lambda wait_s: wait_s <= limit_s, off / service_s,
        tolerance=tolerance, tried={},
    )  # fmt: skip
    assert found.within <= exact * (1 + 1e-12)
    assert found.beyond >= exact * (1 - 1e-12)
    assert found.beyond <= found.within * (1.0 + tolerance)


def test_what_was_tried_is_not_tried_again_and_serves_other_limits() -> None:
    calls: list[float] = []

    def wait_s(rate: float) -> float:
        calls.append(rate)
        return waits(0.1, rate)

    tried: dict[float, float] = {}
    found = [
        largest_rate(wait_s, lambda seen, most=most: seen <= most, 10.0, tolerance=0.01, tried=tried)
        for most in (0.5, 0.6, 0.5)
    ]
    assert len(calls) == len(set(calls)) == len(tried)
    assert found[0] == found[2]
    assert found[1].within > found[0].within
    alone: dict[float, float] = {}
    largest_rate(lambda rate: waits(0.1, rate), lambda seen: seen <= 0.6, 10.0, tolerance=0.01, tried=alone)
    assert len(tried) < 2 * len(alone)


@given(st.floats(1e-3, 1e3), st.floats(0.01, 100.0), st.floats(0.05, 20.0))
def test_a_line_between_excesses_needs_fewer_rates_for_the_same_answer(
    service_s: float, services: float, off: float
) -> None:
    limit_s = services * service_s
    exact = 2.0 * limit_s / (service_s + 2.0 * limit_s) / service_s

    def excess(wait_s: float) -> float:
        return math.log(wait_s / limit_s) if 0.0 < wait_s < math.inf else math.nan

    counts = []
    for given_excess in (None, excess):
        tried: dict[float, float] = {}
        found = largest_rate(
            lambda rate: waits(service_s, rate), lambda wait_s: wait_s <= limit_s, off / service_s,
            tolerance=0.01, tried=tried, excess=given_excess,
        )  # fmt: skip
        assert found.within <= exact * (1 + 1e-12)
        assert found.beyond >= exact * (1 - 1e-12)
        assert found.beyond <= found.within * 1.01
        counts.append(len(tried))
    assert counts[1] <= counts[0] + 4


def test_a_line_saves_rates_where_waits_are_smooth() -> None:
    counts = []
    for given_excess in (None, lambda wait_s: math.log(wait_s / 0.3) if wait_s < math.inf else math.nan):
        tried: dict[float, float] = {}
        largest_rate(
            lambda rate: waits(0.1, rate), lambda wait_s: wait_s <= 0.3, 7.0,
            tolerance=0.001, tried=tried, excess=given_excess,
        )  # fmt: skip
        counts.append(len(tried))
    assert counts[1] < counts[0]


def test_an_excess_that_misleads_does_no_harm() -> None:
    """Lines that always point to one end: every third cut is in the middle."""
    tried: dict[float, float] = {}
    found = largest_rate(
        lambda rate: rate, lambda rate: rate <= 3.0, 1.0, tolerance=0.01, tried=tried,
        excess=lambda rate: -1e-12 if rate <= 3.0 else 1e12,
    )  # fmt: skip
    assert found.within <= 3.0 < found.beyond <= found.within * 1.01
    assert len(tried) < 40


def test_where_nothing_holds_the_answer_is_0_after_few_rates() -> None:
    calls: list[float] = []
    found = largest_rate(calls.append, lambda _: False, 8.0, tolerance=0.01, tried={})
    assert found == (0.0, pytest.approx(8.0 * LOWEST_SHARE, rel=5e-4))
    assert len(calls) <= 6


def test_where_all_holds_nothing_is_tried_beyond_the_highest() -> None:
    calls: list[float] = []
    found = largest_rate(calls.append, lambda _: True, 8.0, tolerance=0.01, tried={}, highest=100.0)
    assert found == (100.0, math.inf)
    assert max(calls) == 100.0


@given(st.sets(st.floats(0.5, 2.0), max_size=20), st.floats(0.02, 0.5))
def test_no_rate_that_was_tried_below_the_answer_fails(failing: set[float], width: float) -> None:
    """Verdicts that come and go: the answer is one that nothing below it contradicts."""
    tried: dict[float, bool] = {}
    found = largest_rate(
        lambda rate: not any(abs(rate - bad) < width * bad for bad in failing), bool, 1.0,
        tolerance=0.01, tried=tried, highest=64.0,
    )  # fmt: skip
    assert all(holds for rate, holds in tried.items() if rate <= found.within)
    assert found.beyond == math.inf or not tried[found.beyond]
    assert found == bracket(tried, bool)


@pytest.mark.parametrize("tolerance", [1e-15, 1e-300])
def test_a_tolerance_beyond_numbers_ends(tolerance: float) -> None:
    found = largest_rate(lambda rate: rate, lambda rate: rate <= math.pi, 1.0, tolerance=tolerance, tried={})
    assert found.within == pytest.approx(math.pi, rel=1e-15)
