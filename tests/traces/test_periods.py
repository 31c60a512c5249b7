"""The period of a trace: the rate that follows from it, repeats of it, and the hours of a day."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import StepPlan, Trace, TraceError, Workload, load_trace
from fastroof.simulation.capacity import capacity
from fastroof.simulation.fewest_replicas import fewest_by_hour, fewest_replicas
from fastroof.simulation.session_runs import mean_rate
from fastroof.simulation.steady import steady_run

HOUR_S = 3600.0
LIMITS = {"ttft_p99_ms": 4000.0, "tpot_p99_ms": 100.0}


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), engine="vllm")


def an_hour(within_s: list[float], sessions: bool) -> Trace:
    """Requests of the second hour of a day, or sessions of two requests each that start then."""
    starts_s = np.sort(np.array(within_s)) + HOUR_S
    if not sessions:
        count = len(starts_s)
        return Trace(starts_s, [100] * count, [10] * count).sliced(HOUR_S, 2 * HOUR_S)
    rows = np.arange(2 * len(starts_s))
    arrival_s = np.where(rows % 2, 0.0, np.repeat(starts_s - HOUR_S, 2))
    parents = np.where(rows % 2, rows - 1, -1)
    return Trace(arrival_s, [100] * len(rows), [10] * len(rows), parents=parents, period_s=HOUR_S)


@pytest.mark.parametrize("sessions", [False, True])
@given(
    within_s=st.lists(st.floats(0.0, 3599.0), min_size=1, max_size=5),
    span=st.sampled_from([1.0, 1e-3, 1e-9, 0.0]),
    wanted=st.integers(1, 60),
)
def test_an_hour_that_is_repeated_has_its_requests_in_each_hour(
    sessions: bool, within_s: list[float], span: float, wanted: int
) -> None:
    """Whatever time they span: n requests in an hour are n / 3600 a second."""
    hour = an_hour([at_s * span for at_s in within_s], sessions)
    run = steady_run(hour, wanted)
    assert run.per_s == mean_rate(hour) == len(hour) / HOUR_S
    starts_s = run.trace.arrival_s
    if run.session is not None:
        starts_s = np.sort([starts_s[run.session == one].min() for one in range(run.session.max() + 1)])
    # from every request to the one that repeats it
    apart_s = starts_s[len(within_s) :] - starts_s[: -len(within_s)]
    assert len(apart_s)
    assert apart_s == pytest.approx(HOUR_S, rel=1e-9)


def test_two_requests_at_once_in_an_hour_need_no_more_replicas_than_the_file(plan: StepPlan) -> None:
    """One request every 10 s, but in the second hour two within a millisecond."""
    calm_s = np.arange(360) * 10.0
    arrival_s = np.concatenate([calm_s, [HOUR_S + 1.0, HOUR_S + 1.001], calm_s + 2 * HOUR_S])
    night = Trace(arrival_s, [1500] * 722, [100] * 722, name="night")
    found = fewest_by_hour(plan, night, **LIMITS)
    assert [each and each.replicas for each in found.hours] == [1, 1, 1]
    assert found.rates_per_s == (0.1, 2 / 3600, 0.1)
    assert [each and each.requests_per_s for each in found.hours] == [0.1, 2 / 3600, 0.1]
    assert fewest_replicas(plan, night, **LIMITS, steady=False).replicas == 1


def test_hours_are_those_of_the_clock_that_arrivals_count_from(plan: StepPlan) -> None:
    late = Trace([3 * HOUR_S + 7.0], [1500], [100])
    found = fewest_by_hour(plan, late, **LIMITS)
    assert [each and each.replicas for each in found.hours] == [None, None, None, 1]
    assert found.rates_per_s == (0.0, 0.0, 0.0, 1 / 3600)


def test_a_capacity_of_a_trace_with_a_period_is_over_it(plan: StepPlan) -> None:
    """A burst a minute: the largest rate is that of the bursts, not the one within them."""
    burst = Trace(np.arange(20) * 1e-3, [1500] * 20, [100] * 20, period_s=60.0)
    most = capacity(plan, burst, ttft_p99_ms=4000, with_range=False)
    rate = most.requests_per_s / burst.requests_per_s
    assert burst.requests_per_s == 20 / 60
    assert rate < 1000
    sim = fastroof.simulate(plan, steady_run(burst, 20_000).trace.rate_scaled(rate))
    assert np.percentile(sim.times.ttft_ms, 99) <= 4000


def test_a_period_goes_with_the_trace(tmp_path: Path) -> None:
    trace = Trace([0.0, 1.0, 2.5], [8, 9, 7], [1, 1, 1], period_s=30)
    assert (trace.period_s, trace.requests_per_s) == (30.0, 0.1)
    assert trace.rate_scaled(3).requests_per_s == pytest.approx(0.3)
    assert load_trace(trace.table()).period_s == 30.0
    assert load_trace(trace.table(), limit=2, rate_scale=2, period_s=60).requests_per_s == 2 / 30
    assert (trace.limited(2).period_s, trace.limited(3).period_s) == (None, 30.0)
    assert trace.sliced(1, 11).requests_per_s == 0.2
    assert (trace.sliced(1).period_s, trace.sliced(1).requests_per_s) == (None, 1 / 1.5)
    assert Trace([0.0, 1.0, 2.5], [8, 9, 7], [1, 1, 1]).requests_per_s == 2 / 2.5
    linked = Trace([0.0, 0.0, 5.0], [8, 9, 7], [1, 1, 1], parents=[-1, 0, -1], period_s=30)
    assert mean_rate(linked) == 0.1
    assert mean_rate(linked.rate_scaled(2)) == pytest.approx(0.2)
    assert mean_rate(replace(linked, period_s=None)) == 3 / 10


@pytest.mark.parametrize("period_s", [-1.0, math.nan, math.inf, 1e11, "60", True, [60.0]])
def test_a_period_is_a_number_of_seconds(period_s: Any) -> None:
    with pytest.raises(TraceError, match=r"period_s must be seconds from 0 to 1e\+10, got"):
        Trace([0.0], [8], [1], period_s=period_s)
    with pytest.raises(TraceError, match="it lasts over"):
        Trace([0.0], [8], [1], period_s=1e9).rate_scaled(0.01)


@pytest.mark.parametrize(
    "given", [Workload(rate=10.0, requests=1500, seed=2), Workload(rate=10.0, requests=1500, turns=3, seed=2)]
)
def test_a_workload_has_the_rate_that_it_is_given(plan: StepPlan, given: Workload) -> None:
    """1,500 requests drawn at 10/s come at 9.4 to 10.9/s."""
    few = fewest_replicas(plan, given, ttft_p99_ms=500, tpot_p99_ms=50, steady=False)
    if few.sessions_per_s is None:
        assert few.requests_per_s == 10.0
    else:
        assert few.sessions_per_s == pytest.approx(10.0, rel=1e-15)
    assert mean_rate(given.trace()) != few.requests_per_s
