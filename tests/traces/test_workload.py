"""Workloads draw from their distributions, the same for a seed; another rate changes nothing else."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace, TraceError, Workload

MANY = 40_000
SIZES = ("input_tokens", "output_tokens", "cached_tokens")
ARRIVALS: list[dict[str, Any]] = [
    {},
    {"arrivals": "constant"},
    {"burstiness": 0.5},
    {"burstiness": 4.0},
    {"ramp": (2, 20)},
    {"ramp": (0, 5, 1), "burstiness": 0.7},
]


def recorded() -> Trace:
    return Trace([0.0, 1.0, 2.0], [100, 200, 300], [10, 20, 30], [1, 2, 3])


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_rates_differ_by_the_rate_alone(arrivals: dict[str, Any]) -> None:
    workload = Workload(
        requests=500, isl="lognormal:800:1", osl="uniform:1:9", cached_tokens="share:0.3",
        seed=7, **arrivals,
    )  # fmt: skip
    slow, fast = workload.trace(rate=3), workload.trace(rate=12)
    assert (slow.arrival_s == fast.arrival_s * 4).all()
    for name in SIZES:
        assert (getattr(slow, name) == getattr(fast, name)).all()
    assert slow.arrival_s[0] == 0
    assert (np.diff(slow.arrival_s) >= 0).all()
    other = workload.trace(rate=3, seed=8)
    assert (other.input_tokens != slow.input_tokens).any()
    # drawn anew, and by another process
    for again in (replace(workload), pickle.loads(pickle.dumps(workload))):
        assert (again.trace(rate=3).arrival_s == slow.arrival_s).all()


@pytest.mark.parametrize("arrivals", ARRIVALS)
def test_the_mean_rate_is_the_given_one(arrivals: dict[str, Any]) -> None:
    trace = Workload(rate=8, requests=MANY, **arrivals).trace()
    # the mean of n gaps is within 5 standard errors
    variation = 0.0 if arrivals.get("arrivals") == "constant" else arrivals.get("burstiness", 1.0) ** -0.5
    assert abs(trace.requests_per_s / 8 - 1) <= 5 * max(variation, 0.01) / MANY**0.5 * 2


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 9.0])
def test_burstiness_is_the_shape_of_gaps(burstiness: float) -> None:
    gaps = np.diff(Workload(rate=1, requests=MANY, burstiness=burstiness).trace().arrival_s)
    assert gaps.mean() == pytest.approx(1, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_a_ramp_has_its_rates() -> None:
    trace = Workload(ramp=(2, 20, 2), requests=MANY, seed=3).trace()
    end_s = MANY / 11
    assert trace.arrival_s[-1] == pytest.approx(end_s, abs=5 * MANY**0.5 / 2)
    for share, rate in ((0.0, 2), (0.25, 11), (0.5, 20), (0.75, 11), (1.0, 2)):
        middle, width = share * end_s, 0.02 * end_s
        start, stop = max(middle - width, 0), min(middle + width, end_s)
        # the mean of a straight line there; twice the deviation of a count and more
        near = np.interp([start, middle, stop], [0, end_s / 2, end_s], [2, 20, 2]) @ [0.25, 0.5, 0.25]
        count = np.count_nonzero((trace.arrival_s >= start) & (trace.arrival_s < stop))
        expected = near * (stop - start)
        assert abs(count - expected) < 5 * expected**0.5 + 0.02 * expected, (share, rate)


def test_a_level_ramp_is_poisson() -> None:
    level = Workload(ramp=(4, 4), requests=300).trace().arrival_s
    np.testing.assert_allclose(level, Workload(rate=4, requests=300).trace().arrival_s, rtol=1e-12)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_fewer_requests_are_the_first_of_more(few: int, more: int, seed: int) -> None:
    few, more = sorted((few, more))
    workload = Workload(
        rate=5, burstiness=0.5, isl="lognormal:500:1:4096", osl="uniform:1:99",
        cached_tokens=recorded(), seed=seed,
    )  # fmt: skip
    short = replace(workload, requests=few).trace()
    long = replace(workload, requests=more).trace().limited(few)
    for name in ("arrival_s", *SIZES):
        assert (getattr(short, name) == getattr(long, name)).all()


def test_lengths_have_their_means() -> None:
    trace = Workload(rate=1, requests=MANY, isl="lognormal:1024:0.5", osl="uniform:512:2048").trace()
    assert trace.input_tokens.mean() == pytest.approx(1024, rel=0.02)
    assert np.log(trace.input_tokens).std() == pytest.approx(0.5, rel=0.02)
    assert trace.output_tokens.mean() == pytest.approx(1280, rel=0.02)
    assert (trace.output_tokens.min(), trace.output_tokens.max()) == (512, 2048)
    cut = Workload(rate=1, requests=MANY, isl="lognormal:1024:2:4000").trace()
    assert cut.input_tokens.max() == 4000


def test_lengths_of_one_trace_are_drawn_together(tmp_path: Any) -> None:
    source = recorded()
    pairs = set(zip([100, 200, 300], [10, 20, 30], [1, 2, 3], strict=True))
    drawn = Workload(rate=1, isl=source, osl=source, cached_tokens=source).trace()
    assert set(zip(*(getattr(drawn, name).tolist() for name in SIZES), strict=True)) == pairs
    apart = Workload(rate=1, isl=source, osl=recorded()).trace()
    assert len(set(zip(apart.input_tokens.tolist(), apart.output_tokens.tolist(), strict=True))) == 9


def test_a_cached_prefix_leaves_the_last_token() -> None:
    trace = Workload(rate=1, isl="uniform:1:20", cached_tokens=10).trace()
    assert (trace.cached_tokens == np.minimum(10, trace.input_tokens - 1)).all()
    half = Workload(rate=1, isl="uniform:1:20", cached_tokens="share:0.5").trace()
    assert (half.cached_tokens == half.input_tokens // 2).all()
    assert (Workload(rate=1, cached_tokens="share:1").trace().cached_tokens == 1023).all()


def test_a_closed_loop_has_clients() -> None:
    workload = Workload(clients=4, think_s=0.5, requests=9, isl="uniform:5:9")
    trace = workload.trace()
    assert (workload.arrivals, trace.clients, trace.think_s) == ("closed", 4, 0.5)
    assert (trace.arrival_s == 0).all()
    for wrong in (lambda: workload.trace(rate=2), lambda: trace.rate_scaled(2)):
        with pytest.raises(TraceError, match="closed loop"):
            wrong()


def test_one_request_is_a_workload() -> None:
    for arrivals in ARRIVALS:
        assert Workload(rate=2, requests=1, **arrivals).trace().arrival_s.tolist() == [0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 0}, "rate must be requests/s above 0"),
        ({"rate": float("nan")}, "rate must be"),
        ({"rate": "4"}, "rate must be"),
        ({"arrivals": "bursty"}, "arrivals must be one of poisson, gamma"),
        ({"burstiness": 0}, "burstiness must be"),
        ({"burstiness": 2, "arrivals": "poisson"}, "burstiness goes with"),
        ({"clients": 4, "rate": 1}, "clients and no rate"),
        ({"clients": 4, "arrivals": "poisson"}, "clients go with"),
        ({"arrivals": "closed"}, "'closed' needs clients"),
        ({"clients": 0}, "clients must be a whole number"),
        ({"think_s": 1}, "think_s goes with"),
        ({"rate": 5, "think_s": "1"}, "think_s goes with clients"),
        ({"clients": 1, "think_s": -1}, "think_s must be"),
        ({"arrivals": "ramp"}, "'ramp' needs ramp"),
        ({"ramp": (1, 2), "arrivals": "poisson"}, "ramp goes with"),
        ({"ramp": (1,)}, "ramp must be two or more"),
        ({"ramp": (5, 0)}, "the last above 0"),
        ({"ramp": (0, 0, 5)}, "no two neighbours 0"),
        ({"ramp": 5}, "ramp must be"),
        ({"requests": 0}, "requests must be"),
        ({"requests": 10**9}, "requests must be"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 1.5}, "seed must be"),
        ({"isl": 0}, "isl must be"),
        ({"isl": 2**24 + 1}, "isl must be"),
        ({"isl": 10.5}, "isl must be"),
        ({"isl": "normal:1:2"}, r"isl must be a number \(8\), lognormal"),
        ({"isl": "lognormal:0.5:2"}, "need a mean from 1"),
        ({"isl": "lognormal:100:11"}, "a sigma up to 10"),
        ({"isl": "lognormal:100:1:0"}, "need tokens from 1"),
        ({"osl": "uniform:9:5"}, "the minimum is above the maximum"),
        ({"osl": "uniform:0:5"}, "need tokens from 1"),
        ({"turns": "uniform:0:5"}, "need turns from 1"),
        ({"calls": 0}, r"calls must be a number .* 16,777,216 calls; got 0"),
        ({"osl": "99999999999"}, "need tokens from 1"),
        ({"cached_tokens": "share:1.5"}, "from 0 to 1"),
        ({"cached_tokens": "share:x"}, "from 0 to 1"),
        ({"cached_tokens": "share:nan"}, "from 0 to 1"),
        ({"cached_tokens": 0.5}, "whole tokens"),
        ({"cached_tokens": None}, "cached_tokens must be"),
    ],
)
def test_what_cannot_be_drawn_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        Workload(**given)


def test_a_workload_without_a_rate_is_refused() -> None:
    with pytest.raises(TraceError, match="a workload needs a rate"):
        Workload().trace()
    assert Workload().requests_per_s is None
    assert Workload(ramp=(2, 20, 2)).requests_per_s == 11
    assert fastroof.Workload(rate=3).requests_per_s == 3


@pytest.mark.parametrize("ramp", [(5e-324, 5e-324), (1e308, 1e308), (0, 1e-320), (1, 1e10)])
def test_ramps_without_a_finite_mean_are_refused(ramp: tuple[float, ...]) -> None:
    with pytest.raises(TraceError, match="ramp must be two or more rates"):
        Workload(ramp=ramp)


DAY = (2.0, 0.0, 5.0, 9.0)


def test_hours_have_the_rates_that_are_given(tmp_path: Path) -> None:
    file = tmp_path / "day.txt"
    file.write_text("2\n0, 5;9\n")
    load = Workload(hourly=DAY, seed=3)
    trace = load.trace()
    assert len(trace) == load.requests == 16 * 3600
    counts = np.bincount((trace.arrival_s // 3600).astype(int), minlength=4)
    assert np.abs(counts[:4] - np.array(DAY) * 3600).max() < 5 * np.sqrt(9 * 3600)
    assert counts[1] == 0
    same = Workload(hourly=f"file:{file}", seed=3)
    assert same == load
    assert (same.trace().arrival_s == trace.arrival_s).all()
    # a mean rate scales the hours, not the day
    double = Workload(hourly=DAY, rate=8.0, seed=3)
    assert double.hours == (4.0, 0.0, 10.0, 18.0)
    assert double.trace().duration_s == pytest.approx(4 * 3600, rel=0.02)
    even = Workload(hourly=(0, 0, 3), burstiness=4.0).trace()
    assert 2 * 3600 <= even.arrival_s.min() == even.arrival_s[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hourly": ()}, "hourly must be 1 to"),
        ({"hourly": (0, 0)}, "hourly must be 1 to"),
        ({"hourly": (1, -1)}, "hourly must be 1 to"),
        ({"hourly": (1, float("nan"))}, "hourly must be 1 to"),
        ({"hourly": 5}, "hourly must be 1 to"),
        ({"hourly": "file:/nowhere/day.txt"}, "hourly file:/nowhere/day.txt must be a text file"),
        ({"hourly": "2:x"}, "hourly file:2:x must be a text file"),
        ({"hourly": DAY, "requests": 50}, "hourly gives 57,600 requests, got requests 50"),
        ({"hourly": DAY, "ramp": (1, 2)}, "ramp"),
        ({"hourly": DAY, "clients": 3}, "hourly"),
        ({"hourly": DAY, "arrivals": "poisson"}, "hourly goes with arrivals 'hourly'"),
        ({"arrivals": "hourly"}, "arrivals 'hourly' needs hourly"),
        ({"hourly": DAY, "turns": 3}, "hourly is of requests"),
        ({"hourly": (1e9,) * 24}, "requests must be"),
    ],
)
def test_wrong_hours_name_valid_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        Workload(**given)


def test_narrow_floats_are_compared_as_they_are() -> None:
    for kind in (np.float16, np.float32):
        assert Workload(clients=2, think_s=kind(0.5)).trace().think_s == 0.5
        assert len(Workload(rate=1, burstiness=kind(2)).trace()) == 1000
