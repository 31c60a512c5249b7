"""Capacities: against simulations one by one, where nothing or everything is kept, and what is refused."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest

import fastroof
from fastroof import FastroofError, SimulationError, StepPlan, Trace, Workload
from fastroof.simulation import steady
from fastroof.simulation.capacity import Capacity, capacity
from fastroof.simulation.capacity_search import CapacitySearch, Limits, parsed_limits
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fewest_replicas import fewest_by_hour, fewest_replicas
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.settings import EngineSettings
from fastroof.simulation.simulation import Simulation
from fastroof.simulation.steady import steady_run
from tests.reference.made_fleets import run_replicas

LIMITS = {"ttft_p99_ms": 400.0, "tpot_p99_ms": 30.0}


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    tables = fastroof.load_tables("h100")
    return fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="vllm", front_end=0)


@pytest.fixture(scope="module")
def load() -> Workload:
    return Workload(rate=1.0, requests=400, isl="lognormal:800:0.6", osl="lognormal:80:0.6", seed=3)


def as_given(plan: StepPlan, requests: Any, **options: Any) -> Capacity:
    """The capacity of the requests given, all of which count."""
    return capacity(plan, requests, steady=False, **options)


@pytest.fixture(scope="module")
def most(plan: StepPlan, load: Workload) -> Capacity:
    return as_given(plan, load, **LIMITS)


def times_ms(plan: StepPlan, trace: Trace, time_scale: float = 1.0, **given: int) -> dict[str, np.ndarray]:
    """What each request saw, by the plainest sums."""
    outcomes = run_engine(plan, trace, EngineSettings.of_plan(plan, **given), time_scale=time_scale)
    gaps = np.maximum(trace.output_tokens - 1, 1)
    return {
        "ttft": (outcomes.first_us - outcomes.arrival_us) / 1e3,
        "tpot": ((outcomes.last_us - outcomes.first_us) / gaps / 1e3)[trace.output_tokens > 1],
        "e2e": (outcomes.last_us - outcomes.arrival_us) / 1e3,
    }


def simulated(plan: StepPlan, trace: Trace) -> Simulation:
    settings = EngineSettings.of_plan(plan)
    return Simulation([EnginePool(plan, settings)], trace, run_engine(plan, trace, settings))


def p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


def at_rate(trace: Trace, requests_per_s: float) -> Trace:
    return trace.rate_scaled(requests_per_s / trace.requests_per_s)


def test_simulated_at_its_capacity_a_deployment_keeps_the_limits_and_a_little_above_it_does_not(
    plan: StepPlan, load: Workload, most: Capacity
) -> None:
    kept = times_ms(plan, load.trace(most.requests_per_s))
    assert most.at_capacity == {"ttft_p99_ms": p99(kept["ttft"]), "tpot_p99_ms": p99(kept["tpot"])}
    assert p99(kept["ttft"]) <= 400.0
    assert p99(kept["tpot"]) <= 30.0
    beyond = min(rate for rate, seen in most.seen.items() if not most.limits.holds(seen))
    assert most.requests_per_s < beyond <= most.requests_per_s * 1.01
    broken = times_ms(plan, load.trace(beyond))
    assert p99(broken[most.limit[:4]]) > LIMITS[most.limit]


def test_nothing_that_was_tried_below_it_fails_and_all_of_it_is_in_the_table(most: Capacity) -> None:
    rows = most.simulated.to_pylist()
    assert len(rows) == len(most.seen) <= most.simulations
    assert [row["requests_per_s"] for row in rows] == sorted(most.seen)
    assert all(row["holds"] for row in rows if row["requests_per_s"] <= most.requests_per_s)
    assert math.isinf(rows[-1]["requests_per_s"])
    assert rows[-1]["ttft_p99_ms"] > 400.0
    assert most.document()["simulated"] == rows


def test_low_and_high_are_capacities_on_slower_and_faster_steps(plan: StepPlan, load: Workload) -> None:
    """Found on other clocks, to a tenth: twice as long steps are half the rate and half the limits."""
    # of smaller steps, whose percentiles rise with the rate here
    sizes = {"max_num_batched_tokens": 2048, "max_num_seqs": 256}
    most = as_given(plan, load, **LIMITS, **sizes)
    assert most.relative_error == plan.profile.errors.tpot
    assert most.low < most.requests_per_s < most.high
    error = plan.profile.errors.tpot
    for rate, scale in ((most.low, math.exp(error)), (most.high, math.exp(-error))):
        kept = times_ms(plan, load.trace(rate), scale, **sizes)
        assert p99(kept["ttft"]) <= 400.0 * (1 + 1e-9)
        assert p99(kept["tpot"]) <= 30.0 * (1 + 1e-9)
        broken = times_ms(plan, load.trace(rate * math.exp(error / 10.0) * 1.0001), scale, **sizes)
        assert p99(broken["ttft"]) > 400.0 or p99(broken["tpot"]) > 30.0
    alone = as_given(plan, load, **LIMITS, **sizes, with_range=False)
    assert (alone.low, alone.requests_per_s, alone.high) == (most.requests_per_s,) * 3


def test_looser_limits_serve_no_less_and_the_tightest_binds(plan: StepPlan, load: Workload) -> None:
    rates = [
        as_given(plan, load, tpot_p99_ms=tpot_ms, with_range=False).requests_per_s
        for tpot_ms in (15, 20, 30, 50)
    ]
    assert all(slow <= fast * 1.01 for slow, fast in itertools.pairwise(rates))
    one = as_given(plan, load, tpot_p99_ms=20, with_range=False)
    both = as_given(plan, load, tpot_p99_ms=20, ttft_p99_ms=1e6, with_range=False)
    assert (one.requests_per_s, one.limit) == (both.requests_per_s, both.limit) == (rates[1], "tpot_p99_ms")


def test_if_no_rate_keeps_the_limits_it_is_0_and_names_the_limit(plan: StepPlan, load: Workload) -> None:
    none = as_given(plan, load, ttft_p99_ms=1.0, e2e_p50_ms=1e9)
    assert (none.requests_per_s, none.low, none.limit, none.at_capacity) == (0.0, 0.0, "ttft_p99_ms", {})
    assert none.requests_per_s_per_gpu == 0.0
    assert none.simulations < 10


def test_where_even_all_requests_at_once_keep_the_limits_the_throughput_binds(
    plan: StepPlan, load: Workload
) -> None:
    every = as_given(plan, load, e2e_p99_ms=1e9)
    assert every.limit == "throughput"
    at_once = replace(load.trace(), arrival_s=np.zeros(400))
    served_s = times_ms(plan, at_once)["e2e"].max() / 1e3
    assert every.seen[math.inf].served_per_s == pytest.approx(400 / served_s, rel=1e-12)
    assert every.limits.keeps(every.seen[math.inf])
    kept = times_ms(plan, load.trace(every.requests_per_s))
    assert every.at_capacity == {"e2e_p99_ms": p99(kept["e2e"])}
    beyond = min(rate for rate, seen in every.seen.items() if not every.limits.holds(seen))
    assert every.requests_per_s < beyond <= every.requests_per_s * 1.01
    assert every.seen[beyond].growth > every.limits.growth


def test_a_limit_that_all_requests_at_once_keep_may_bind_below(plan: StepPlan) -> None:
    """Prompts at once are computed before most decodes; those that arrive later delay decodes."""
    load = Workload(rate=1.0, requests=400, isl=200, osl=50, seed=3)
    found = [
        as_given(plan, load, tpot_p99_ms=tpot_ms, max_num_seqs=64, with_range=False)
        for tpot_ms in (9.0, 10.5, 1e9)
    ]
    assert [each.limit for each in found] == ["tpot_p99_ms", "tpot_p99_ms", "throughput"]
    assert found[1].limits.keeps(found[1].seen[math.inf])
    assert found[0].requests_per_s < found[1].requests_per_s < found[2].requests_per_s


def test_of_two_requests_no_rate_is_too_fast(plan: StepPlan) -> None:
    pair = Workload(rate=1.0, requests=2, isl=200, osl=50, seed=3)
    every = as_given(plan, pair, e2e_p99_ms=1e9)
    assert (every.limit, every.requests_per_s) == ("none", every.seen[math.inf].served_per_s)


def test_a_queue_that_grows_until_the_trace_ends_is_not_kept(plan: StepPlan) -> None:
    """Its percentile is within the limit only because there are no more requests."""
    load = Workload(rate=1.0, requests=2000, isl=500, osl=50, seed=1)
    at_once = as_given(plan, load, e2e_p99_ms=1e9).seen[math.inf]
    # nearly as long as all at once take: at any rate that is just too fast, the last wait for less
    most = as_given(plan, load, e2e_p99_ms=at_once.values_ms[0] * 0.9)
    assert most.limit == "throughput"
    assert most.requests_per_s < 1.1 * at_once.served_per_s
    kept = [seen for rate, seen in most.seen.items() if rate > most.requests_per_s]
    assert any(most.limits.keeps(seen) and seen.growth > most.limits.growth for seen in kept)


def test_a_goodput_is_the_share_of_requests_within_their_limits(plan: StepPlan, load: Workload) -> None:
    most = as_given(plan, load, goodput=0.95, ttft_ms=300, tpot_ms=25, with_range=False)
    assert most.limit == "goodput"
    trace = load.trace(most.requests_per_s)
    outcomes = run_engine(plan, trace, EngineSettings.of_plan(plan))
    gaps = np.maximum(trace.output_tokens - 1, 1)
    tpot_ms = (outcomes.last_us - outcomes.first_us) / gaps / 1e3
    kept = (outcomes.first_us - outcomes.arrival_us <= 300e3) & (tpot_ms <= 25.0)
    assert kept.mean() >= 0.95
    assert most.seen[most.requests_per_s].goodput == kept.mean()


def test_clients_that_give_up_count_as_served_in_no_time(plan: StepPlan, load: Workload) -> None:
    patient = as_given(plan, load, ttft_p99_ms=20_000)
    hurried = as_given(plan, load, ttft_p99_ms=20_000, timeout_s=3.0)
    assert hurried.requests_per_s < patient.requests_per_s
    assert hurried.low <= hurried.requests_per_s <= hurried.high
    lost = max(seen.growth for rate, seen in hurried.seen.items() if rate < math.inf)
    assert lost > 0.0


def test_it_is_the_same_however_often_and_wherever_it_is_searched(
    plan: StepPlan, load: Workload, most: Capacity
) -> None:
    again = as_given(plan, replace(load, rate=7.3), **LIMITS)
    assert again.document() == most.document()


def test_draws_estimate_the_sampling_error(plan: StepPlan, load: Workload, most: Capacity) -> None:
    drawn = as_given(plan, load, **LIMITS, draws=4)
    assert (drawn.requests_per_s, drawn.low, drawn.high) == (most.requests_per_s, most.low, most.high)
    assert drawn.sampling_error is not None
    assert 0.0 < drawn.sampling_error < 0.5
    alone = as_given(plan, replace(load, seed=4), **LIMITS, with_range=False).requests_per_s
    two = as_given(plan, load, **LIMITS, draws=2, with_range=False).sampling_error
    assert two == pytest.approx(abs(math.log(alone / most.requests_per_s)) / math.sqrt(2.0), abs=0.02)
    # percentiles of a draw are not monotone in the rate: a search finds one of its capacities
    assert most.sampling_error is None


def test_percentiles_of_gaps_are_limits_too(plan: StepPlan, load: Workload) -> None:
    most = as_given(plan, load, itl_p99_ms=25, with_range=False)
    assert most.limit == "itl_p99_ms"
    assert most.at_capacity["itl_p99_ms"] <= 25.0
    sim = simulated(plan, load.trace(most.requests_per_s))
    assert sim.summary(with_range=False)["itl_ms"]["p99"] == pytest.approx(most.at_capacity["itl_p99_ms"])


@pytest.mark.parametrize("percent", [50, 90, 95, 99])
def test_it_sees_the_percentiles_that_simulate_answers(plan: StepPlan, load: Workload, percent: int) -> None:
    names = {f"{what}_p{percent}_ms": 1e5 for what in ("ttft", "tpot", "itl", "e2e")}
    limits = parsed_limits(names, None, 1.0)
    trace = load.trace(20.0)
    sim = simulated(plan, trace)
    answers = sim.summary(with_range=False)
    seen = limits.measure(trace, sim.outcomes)
    assert list(seen.values_ms) == pytest.approx(
        [answers[limit.metric][f"p{percent}"] for limit in limits.percentiles], rel=1e-12
    )


def queue(trace: Trace, service_s: float) -> Outcomes:
    """One server, first come first served, without an engine."""
    arrival_s, first_s = trace.arrival_s, np.empty(len(trace))
    free_s = 0.0
    for i, at_s in enumerate(arrival_s.tolist()):
        free_s = max(free_s, at_s) + service_s
        first_s[i] = free_s
    count = len(trace)
    return Outcomes(
        arrival_s * 1e6, first_s * 1e6, first_s * 1e6, np.zeros(count, np.int32), np.zeros(count, np.uint8),
        np.zeros(count, np.int32), np.zeros(8, np.int64), np.zeros((1, 1)), 1.0, {"steps": count},
    )  # fmt: skip


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_the_capacity_of_one_server_equals_theory(load: float) -> None:
    """M/D/1: the mean wait is known, and with it the rate at which a limit on it would bind.

    Percentiles of a wait have no short form, but they scale: a server four times as fast serves four times as
    many within a quarter of the limit, up to the tolerance.
    """
    trace = Workload(rate=1.0, requests=4000, seed=5).trace()
    limits: Limits = parsed_limits({"ttft_p90_ms": 1e3 * (1.0 + load / (1.0 - load))}, None, 0.05)
    slow = CapacitySearch(trace, limits, lambda some, _: queue(some, 1.0), 0.01).found()
    fast = CapacitySearch(trace, limits.scaled(0.25), lambda some, _: queue(some, 0.25), 0.01).found()
    assert fast.requests_per_s == pytest.approx(4.0 * slow.requests_per_s, rel=0.01)
    assert fast.limit == slow.limit
    assert slow.limit == "ttft_p90_ms"
    other_clock = CapacitySearch(trace, limits, lambda some, _: queue(some, 1.0), 0.01)
    assert other_clock.found(4.0).requests_per_s < slow.requests_per_s / 4.0
    assert other_clock.found(0.25).requests_per_s > slow.requests_per_s * 4.0
    waits_s = [(seen.first_us - seen.arrival_us).mean() / 1e6 - 1.0
               for rate in (0.4, 0.6) for seen in [queue(at_rate(trace, rate), 1.0)]]  # fmt: skip
    assert waits_s == pytest.approx([0.4 / 1.2, 0.6 / 0.8], rel=0.15)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "a capacity needs a limit, like ttft_p99_ms"),
        ({"ttft_p99": 500}, "unknown limit 'ttft_p99'"),
        ({"ttft_p100_5_ms": 500}, "unknown limit 'ttft_p100_5_ms'"),
        ({"ttft_p101_ms": 500}, "unknown limit"),
        ({"tfft_p99_ms": 500}, "unknown limit"),
        ({"max_num_sequences": 4, "ttft_p99_ms": 5}, "unknown limit 'max_num_sequences'"),
        ({"ttft_p99_ms": 0}, "ttft_p99_ms must be milliseconds above 0, got 0"),
        ({"ttft_p99_ms": -1}, "above 0, got -1"),
        ({"ttft_p99_ms": math.nan}, "above 0, got nan"),
        ({"ttft_p99_ms": math.inf}, "above 0, got inf"),
        ({"ttft_p99_ms": "500"}, "above 0, got '500'"),
        ({"ttft_p99_ms": True}, "above 0, got True"),
        ({"ttft_ms": 500}, "ttft_ms: goodput is the share"),
        ({"goodput": 0.9, "ttft_p99_ms": 500}, "goodput: goodput is the share"),
        ({"goodput": 90, "ttft_ms": 500}, "goodput must be a share"),
        ({"goodput": 0, "ttft_ms": 500}, "goodput must be a share"),
        ({"ttft_p99_ms": 500, "tolerance": 0}, "tolerance must be a number above 0 and up to 0.5"),
        ({"ttft_p99_ms": 500, "tolerance": 0.6}, "tolerance must be"),
        ({"ttft_p99_ms": 500, "replicas": 0}, "replicas must be a whole number"),
        ({"ttft_p99_ms": 500, "draws": 0}, "draws must be a whole number"),
        ({"ttft_p99_ms": 500, "max_num_seqs": 0}, "max_num_seqs"),
        ({"ttft_p99_ms": 500, "num_gpu_blocks": 3}, "blocks of 16, there are 3"),
        ({"ttft_p99_ms": 500, "timeout_s": -3}, "timeout_s"),
    ],
)
def test_impossible_questions_are_refused(
    plan: StepPlan, load: Workload, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FastroofError, match=message):
        as_given(plan, load, **options)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (Trace([0.0, 0.0], [8, 8], [4, 4]), "has no rate to scale"),
        (Trace([1.0], [8], [4]), "has no rate to scale"),
        (Workload(clients=4, requests=20), "is a closed loop"),
        ([1, 2], "a Trace or a Workload, got list"),
    ],
)
def test_requests_without_a_rate_are_refused(plan: StepPlan, requests: Any, message: str) -> None:
    with pytest.raises(FastroofError, match=message):
        as_given(plan, requests, ttft_p99_ms=500)


def test_a_trace_has_one_draw(plan: StepPlan, load: Workload) -> None:
    with pytest.raises(SimulationError, match="draws needs a workload"):
        as_given(plan, load.trace(), ttft_p99_ms=500, draws=2)


def test_capacity_grows_with_replicas_under_round_robin(
    plan: StepPlan, load: Workload, most: Capacity
) -> None:
    two = as_given(plan, load, **LIMITS, replicas=2, with_range=False)
    assert two.gpus == 2
    assert two.requests_per_s_per_gpu == two.requests_per_s / 2
    # each has every second arrival, more even than one has: not less
    assert 1.8 * most.requests_per_s < two.requests_per_s < 2.6 * most.requests_per_s
    least = as_given(plan, load, **LIMITS, replicas=2, router="least_load", with_range=False)
    assert least.requests_per_s > 1.8 * most.requests_per_s


def test_the_fewest_replicas_keep_the_limits_and_one_fewer_does_not(plan: StepPlan, load: Workload) -> None:
    trace = load.trace(120.0)
    fewest = fewest_replicas(plan, replace(load, rate=120.0), **LIMITS, steady=False)
    assert fewest.replicas == fewest.gpus > 1
    assert fewest.requests_per_s == 120.0
    assert {fewest.replicas - 1, fewest.replicas} <= fewest.seen.keys()
    assert fewest.limits.holds(fewest.seen[fewest.replicas])
    assert fewest.limit in LIMITS
    outcomes = run_replicas(plan, trace, EngineSettings.of_plan(plan), fewest.replicas - 1)
    one_less = fewest.limits.measure(trace, outcomes)
    assert one_less == fewest.seen[fewest.replicas - 1]
    assert not fewest.limits.holds(one_less)
    serves = [
        as_given(plan, load, **LIMITS, replicas=count, with_range=False).requests_per_s
        for count in (fewest.replicas - 1, fewest.replicas)
    ]
    assert serves[0] < 120.0 <= serves[1] * 1.01


def test_one_replica_or_none_may_suffice(plan: StepPlan, load: Workload) -> None:
    one = fewest_replicas(plan, load.trace(rate=2.0), **LIMITS)
    assert (one.replicas, one.limit) == (1, "none")
    assert one.at_replicas["tpot_p99_ms"] <= 30.0
    none = fewest_replicas(plan, load.trace(rate=2.0), ttft_p99_ms=1.0, most=3)
    assert (none.replicas, none.gpus, none.limit, none.at_replicas) == (0, 0, "ttft_p99_ms", {})
    assert list(none.seen) == [1, 2, 3]
    clients = fewest_replicas(plan, Workload(clients=200, requests=400), tpot_p99_ms=15)
    assert clients.replicas > 1


@pytest.mark.slow
def test_a_capacity_does_not_depend_on_the_number_of_requests_given(plan: StepPlan) -> None:
    """600, 1,000, 30,000 and 300,000 requests gave 29.6, 29.5, 28.0 and 27.4 requests/s, without an error."""
    found = [
        capacity(plan, Workload(requests=count), ttft_p99_ms=500, tpot_p99_ms=50, with_range=False)
        for count in (600, 1000, 30_000, 300_000)
    ]
    assert found[0].requests_per_s == found[1].requests_per_s
    longest = found[-1]
    assert longest.counted == 300_000
    for each in found:
        assert each.counted >= 20_000
        assert each.requests == each.counted + -(-each.counted // 4) + -(-each.counted // 16)
        assert each.sampling_error is not None
        assert longest.sampling_error is not None
        assert 0.002 < each.sampling_error < 0.02
        chance = math.hypot(each.sampling_error, longest.sampling_error)
        assert abs(math.log(each.requests_per_s / longest.requests_per_s)) < 3.0 * chance + each.tolerance


def test_only_requests_between_ramp_and_drain_count(plan: StepPlan) -> None:
    load = Workload(requests=300, seed=2)
    most = capacity(plan, load, tpot_p99_ms=40, ttft_p50_ms=1e4, with_range=False)
    drawn = replace(load, requests=most.requests).trace(most.requests_per_s)
    counted = slice(-(-most.counted // 4), -(-most.counted // 4) + most.counted)
    kept = times_ms(plan, drawn)
    assert most.at_capacity == {
        "tpot_p99_ms": p99(kept["tpot"][counted]), "ttft_p50_ms": float(np.median(kept["ttft"][counted]))
    }  # fmt: skip
    seen = most.seen[most.requests_per_s]
    # what is served while they arrive is what arrives: the queue is steady
    assert seen.served_per_s == pytest.approx(most.requests_per_s, rel=0.02)
    assert seen.in_system == pytest.approx(most.requests_per_s * kept["e2e"][counted].mean() / 1e3, rel=0.02)
    assert most.counted >= 50 * seen.in_system


@pytest.mark.slow
def test_the_sampling_error_is_how_much_other_draws_differ(plan: StepPlan) -> None:
    limits = {"tpot_p99_ms": 40, "ttft_p99_ms": 1000}
    alone = [
        capacity(plan, Workload(seed=seed), **limits, with_range=False, tolerance=0.002) for seed in range(8)
    ]
    # more were drawn for the tolerance
    assert {each.counted for each in alone} == {80_000}
    spread = float(np.std([math.log(each.requests_per_s) for each in alone], ddof=1))
    stated = float(np.sqrt(np.mean([float(each.sampling_error or 0.0) ** 2 for each in alone])))
    # of 8 draws, a standard deviation is within a factor of 2 in 99 of 100
    assert 0.5 < stated / spread < 2.0


def test_a_short_trace_is_repeated(plan: StepPlan) -> None:
    trace = replace(Workload(requests=150, seed=6).trace(20.0), name="mine")
    most = capacity(plan, trace, tpot_p99_ms=40, with_range=False)
    assert (most.counted % 150, most.counted >= 20_000) == (0, True)
    run = steady_run(trace, 400)
    assert (run.requests, run.cycle, len(run.trace)) == (450, 150, 450 + 113 + 29)
    again = run.trace.input_tokens[run.counted].reshape(3, 150)
    assert (again == trace.input_tokens).all()
    gaps = np.diff(run.trace.arrival_s)
    lap = np.append(np.diff(trace.arrival_s), trace.duration_s / 149)
    # the first gap is one into the counted requests, whose first is the trace's
    assert gaps == pytest.approx(np.resize(np.roll(lap, 113), len(gaps)), abs=1e-9)
    assert run.trace.requests_per_s == pytest.approx(trace.requests_per_s, rel=0.05)
    assert run.per_s == trace.requests_per_s
    assert sorted(np.concatenate(run.pieces(run.counted)).tolist()) == list(range(113, 563))
    assert {int(place - 113) % 150 * 16 // 150 for place in run.pieces(run.counted)[3]} == {3}


def test_rates_that_change_over_a_run_are_repeated_as_a_whole() -> None:
    load = Workload(ramp=(2.0, 20.0), requests=200)
    run = steady_run(load, 300)
    assert (run.requests, run.cycle) == (400, 200)
    assert (run.trace.output_tokens[run.counted][:200] == load.trace().output_tokens).all()


def test_replicas_for_a_rate_are_counted_in_a_steady_state(plan: StepPlan, load: Workload) -> None:
    fewest = fewest_replicas(plan, replace(load, rate=120.0), **LIMITS)
    serves = [
        capacity(plan, load, **LIMITS, replicas=count, with_range=False).requests_per_s
        for count in (fewest.replicas - 1, fewest.replicas)
    ]
    assert serves[0] < 120.0 * 1.03
    assert serves[1] > 120.0 / 1.03


def test_requests_that_would_last_too_long_are_taken_as_given(plan: StepPlan) -> None:
    slow = Trace([0.0, 1e9, 2e9], [100, 200, 300], [10, 20, 30])
    most = capacity(plan, slow, ttft_p99_ms=500, with_range=False)
    assert (most.requests, most.counted) == (3, 3)


def talks() -> Trace:
    """Conversations whose prompts grow, all after one system prompt, by hash_ids."""
    rng = np.random.default_rng(0)
    rows = []
    for talk in range(40):
        blocks, start = [7], float(rng.uniform(0, 20))
        for turn in range(int(rng.integers(1, 5))):
            blocks = [*blocks, *(1000 * talk + 100 * turn + at + 10 for at in range(int(rng.integers(1, 6))))]
            rows.append((start + 3.0 * turn, list(blocks)))
    ids = [one for _, blocks in rows for one in blocks]
    offsets = np.concatenate([[0], np.cumsum([len(blocks) for _, blocks in rows])])
    sizes = [512 * len(blocks) - int(rng.integers(0, 500)) for _, blocks in rows]
    return Trace(
        [start for start, _ in rows],
        sizes,
        rng.integers(1, 60, len(rows)),
        hash_ids=ids,
        hash_offsets=offsets,
        hash_block_size=512,
        name="talks",
    )


def test_each_hour_has_the_fewest_replicas_of_its_rate(plan: StepPlan, load: Workload) -> None:
    day = replace(load, rate=None, arrivals="", hourly=(20.0, 0.0, 120.0, 20.0), requests=1000)
    found = fewest_by_hour(plan, day, **LIMITS)
    one, two = (fewest_replicas(plan, replace(load, rate=rate), **LIMITS).replicas for rate in (20.0, 120.0))
    assert [each and each.replicas for each in found.hours] == [one, None, two, one]
    assert found.peak == two > one
    assert (found.gpu_hours, found.gpu_hours_at_peak) == (2 * one + two, 4 * two)
    rows = found.document()["hours"]
    assert [row["requests_per_s"] for row in rows] == [20.0, 0.0, 120.0, 20.0]
    assert [row["replicas"] for row in rows] == [one, 0, two, one]
    none = fewest_by_hour(plan, day, ttft_p99_ms=1.0, most=2)
    assert none.peak == 0
    assert math.isnan(none.gpu_hours)


def test_the_hours_of_a_trace_are_its_parts(plan: StepPlan, load: Workload) -> None:
    busy = replace(load, requests=3000).trace(40.0)
    calm = replace(load, requests=300, seed=5).trace(4.0)
    arrival_s = np.concatenate([calm.arrival_s, busy.arrival_s + 7200.0])
    sizes = {
        name: np.concatenate([getattr(calm, name), getattr(busy, name)])
        for name in ("input_tokens", "output_tokens")
    }
    found = fewest_by_hour(plan, Trace(arrival_s, **sizes, name="day"), **LIMITS)
    assert [each and each.replicas for each in found.hours] == [
        fewest_replicas(plan, replace(calm, period_s=3600), **LIMITS).replicas,
        None,
        fewest_replicas(plan, replace(busy, period_s=3600), **LIMITS).replicas,
    ]
    assert found.rates_per_s == (300 / 3600, 0.0, 3000 / 3600)
    with pytest.raises(SimulationError, match="closed loop"):
        fewest_by_hour(plan, Workload(clients=4, requests=40), **LIMITS)
    with pytest.raises(SimulationError, match="lasts 300,001 hours"):
        fewest_by_hour(plan, replace(calm, arrival_s=np.linspace(0, 3600 * 300_000, 300)), **LIMITS)


def percentiles_ms(sim: Simulation) -> dict[str, float]:
    return {f"{name}_p99_ms": p99(getattr(sim.times, f"{name}_ms")) for name in ("ttft", "e2e")}


@pytest.mark.parametrize(
    ("prefix_cache", "tiers"), [("auto", None), ("given", None), ("lru", None), ("auto", "host:9GB:50GB/s")]
)
@pytest.mark.parametrize("overhead_ms", [0.0, None])
def test_a_capacity_simulates_what_simulate_does(
    prefix_cache: str, tiers: str | None, overhead_ms: float | None
) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", front_end=overhead_ms)
    limits, given = {"ttft_p99_ms": 200.0, "e2e_p99_ms": 4000.0}, {"num_gpu_blocks": 800}
    trace = talks()
    options: dict[str, Any] = {"prefix_cache": prefix_cache, "kv_tiers": tiers, "router": "least_kv"} | given
    most = as_given(plan, trace, **limits, **options, replicas=2, with_range=False)
    for rate, seen in most.seen.items():
        if rate < math.inf:
            sim = fastroof.simulate(plan, at_rate(trace, rate), replicas=2, **options)
            assert dict(zip(limits, seen.values_ms, strict=True)) == percentiles_ms(sim)
    few = fewest_replicas(plan, trace.rate_scaled(8), **limits, **options, steady=False)
    for count, seen in few.seen.items():
        sim = fastroof.simulate(plan, trace.rate_scaled(8), replicas=count, **options)
        assert dict(zip(limits, seen.values_ms, strict=True)) == percentiles_ms(sim)


def test_no_repeat_of_a_trace_finds_the_blocks_of_another(plan: StepPlan) -> None:
    trace = talks()
    alone = fastroof.simulate(plan, trace, num_gpu_blocks=10**6).outcomes.cached_tokens
    assert alone is not None
    assert alone.sum() > 0
    run = steady_run(trace, 3 * len(trace))
    found = fastroof.simulate(plan, run.trace, num_gpu_blocks=10**6).outcomes.cached_tokens
    assert found is not None
    assert (found[run.counted].reshape(3, -1) == alone).all()
    plain = replace(trace, hash_ids=None, hash_offsets=None, hash_block_size=0)
    same = steady_run(plain, 3 * len(trace)).trace
    for name in ("arrival_s", "input_tokens", "output_tokens", "cached_tokens"):
        assert (getattr(same, name) == getattr(run.trace, name)).all()


def test_common_starts_of_prompts_stay_common_in_all_repeats(plan: StepPlan) -> None:
    """A system prompt is one in the whole run; what is cached raises the capacity."""
    load = Workload(requests=100, isl=2000, osl=20, seed=4).trace(10.0)
    shared = replace(load, history_tokens=np.full(100, 1600))
    assert (steady_run(shared, 300).trace.history_tokens == 1600).all()
    rates = [
        capacity(plan, each, ttft_p99_ms=300, with_range=False).requests_per_s for each in (load, shared)
    ]
    assert rates[1] > 2.0 * rates[0]


def test_a_router_that_knows_the_cache_needs_one(plan: StepPlan, load: Workload) -> None:
    for answer in (capacity, fewest_replicas):
        with pytest.raises(SimulationError, match='give prefix_cache="lru"'):
            answer(plan, load.trace(), ttft_p99_ms=500, router="prefix_aware")
        with pytest.raises(SimulationError, match="kv_tiers needs a simulated prefix cache"):
            answer(plan, load.trace(), ttft_p99_ms=500, kv_tiers="host:1GB:50GB/s")
        with pytest.raises(SimulationError, match="prefix_cache must be one of auto, given, lru"):
            answer(plan, load.trace(), ttft_p99_ms=500, prefix_cache="no")


AGENTS: dict[str, Any] = {
    "turns": 2, "calls": "uniform:1:4", "growth_tokens": 300, "isl": "lognormal:900:0.4",
    "osl": "uniform:5:60", "tool_s": "exponential:0.4", "think_s": 3.0, "system_tokens": 200,
}  # fmt: skip


def agents(requests: int = 150, seed: int = 0) -> Workload:
    """Agents of two turns, each of a few calls."""
    return Workload(requests=requests, seed=seed, name="agents", **AGENTS)


def recorded_agents() -> Trace:
    """Sessions with two starts, a fan-out, a join, and requests that wait for their own times too."""
    rng = np.random.default_rng(2)
    rows: dict[str, list[Any]] = {name: [] for name in ("at", "own", "parents", "delay", "session")}
    for session in range(30):
        first, start = 6 * session, float(rng.uniform(0, 20))
        rows["at"] += [start, start + 0.5, 0.0, 0.0, start + 4.0, 0.0]
        rows["parents"] += [[], [], [first], [first, first + 1], [first + 3], [first + 2, first + 4]]
        rows["delay"] += [0.0, 0.0, 0.2, 1.5, 0.1, 0.0]
        rows["session"] += [session] * 6
    count = len(rows["at"])
    return Trace(
        rows["at"],
        rng.integers(200, 3000, count),
        rng.integers(1, 60, count),
        parents=[parent for own in rows["parents"] for parent in own],
        parent_offsets=np.concatenate([[0], np.cumsum([len(own) for own in rows["parents"]])]),
        delay_s=rows["delay"],
        session=rows["session"],
        name="recorded",
    )


def starts_of(trace: Trace) -> np.ndarray:
    """Starts of sessions, s, by the plainest loop."""
    assert trace.session is not None
    starts: dict[int, float] = {}
    for session, arrival_s in zip(trace.session.tolist(), trace.arrival_s.tolist(), strict=True):
        starts[session] = min(starts.get(session, math.inf), arrival_s)
    return np.sort(list(starts.values()))


def sessions_per_s(trace: Trace) -> float:
    starts_s = starts_of(trace)
    return float((len(starts_s) - 1) / (starts_s[-1] - starts_s[0]))


@pytest.mark.parametrize(
    ("prefix_cache", "tiers"), [("auto", None), ("given", None), ("auto", "host:9GB:50GB/s")]
)
@pytest.mark.parametrize("overhead_ms", [0.0, None])
@pytest.mark.parametrize("trace", [agents().trace(1.0), recorded_agents()], ids=lambda trace: trace.name)
def test_a_capacity_of_sessions_simulates_what_simulate_does(
    trace: Trace, prefix_cache: str, tiers: str | None, overhead_ms: float | None
) -> None:
    if trace.history_tokens is None and tiers:
        return
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", front_end=overhead_ms)
    limits, given = {"ttft_p99_ms": 200.0, "e2e_p99_ms": 900.0}, {"num_gpu_blocks": 700}
    options: dict[str, Any] = {"prefix_cache": prefix_cache, "kv_tiers": tiers, "router": "least_kv"} | given
    most = as_given(plan, trace, **limits, **options, replicas=2, with_range=False)
    assert most.requests_per_session == pytest.approx(len(trace) / len(starts_of(trace)), rel=1e-12)
    assert most.limit in limits
    base = sessions_per_s(trace)
    for rate, seen in most.seen.items():
        if rate < math.inf:
            faster = trace.rate_scaled(rate / most.requests_per_session / base)
            assert sessions_per_s(faster) * most.requests_per_session == pytest.approx(rate, rel=1e-9)
            sim = fastroof.simulate(plan, faster, replicas=2, **options)
            assert list(seen.values_ms) == pytest.approx(list(percentiles_ms(sim).values()), rel=1e-9)
    few = fewest_replicas(plan, trace.rate_scaled(8), **limits, **options, steady=False)
    assert few.sessions_per_s == pytest.approx(sessions_per_s(trace.rate_scaled(8)), rel=1e-12)
    for count, seen in few.seen.items():
        sim = fastroof.simulate(plan, trace.rate_scaled(8), replicas=count, **options)
        assert dict(zip(limits, seen.values_ms, strict=True)) == percentiles_ms(sim)


def test_sessions_count_that_come_while_the_counted_ones_start(plan: StepPlan) -> None:
    """A longer run, and what a person would measure of it."""
    limits = {"ttft_p99_ms": 300.0, "e2e_p90_ms": 1500.0}
    most = capacity(plan, agents(), **limits, with_range=False)
    assert most.limit in limits
    assert most.requests_per_session is not None
    faster = replace(agents(), requests=most.requests).trace(most.sessions_per_s)
    assert most.counted >= 19_000
    sim = fastroof.simulate(plan, faster)
    starts_s = starts_of(faster)
    first, after = (math.ceil(len(starts_s) * part / (1 + 1 / 4 + 1 / 16)) for part in (1 / 4, 1 / 16))
    sent_s = sim.outcomes.arrival_us / 1e6
    counted = (sent_s >= starts_s[first]) & (sent_s < starts_s[len(starts_s) - after])
    assert counted.sum() == pytest.approx(most.counted, rel=0.01)
    assert most.at_capacity == pytest.approx(
        {
            "ttft_p99_ms": p99(sim.times.ttft_ms[counted]),
            "e2e_p90_ms": float(np.percentile(sim.times.e2e_ms[counted], 90)),
        },
    )
    open_s = np.array(sim.sessions["e2e_ms"].to_pylist()) / 1e3
    assert most.open_sessions == pytest.approx(most.sessions_per_s * open_s.mean(), rel=0.02)
    assert most.counted >= 50 * most.open_sessions * most.requests_per_session


def test_slower_steps_serve_fewer_sessions_whose_delays_stay(plan: StepPlan) -> None:
    load = agents(600)
    most = as_given(plan, load, ttft_p99_ms=150.0, tpot_p99_ms=20.0, tolerance=0.001)
    assert most.low < most.requests_per_s < most.high
    assert most.requests_per_session is not None
    error = plan.profile.errors.tpot
    assert most.relative_error == error
    for rate, scale in ((most.low, math.exp(error)), (most.high, math.exp(-error))):
        kept, *above = (
            fastroof.simulate(
                plan, load.trace((1.0 + more) * rate / most.requests_per_session), time_scale=scale
            ).times
            for more in (0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.00101)
        )
        assert p99(kept.ttft_ms) <= 150.0 * (1 + 1e-6)
        assert p99(kept.tpot_ms[kept.has_gaps]) <= 20.0 * (1 + 1e-6)
        # percentiles of so few sessions go up and down with the rate
        assert any(p99(one.ttft_ms) > 150.0 or p99(one.tpot_ms[one.has_gaps]) > 20.0 for one in above)


def test_sessions_that_all_give_up_if_they_start_at_once_have_a_capacity(plan: StepPlan) -> None:
    """The search begins at what is served at once, nearly nothing."""
    most = as_given(plan, agents(6000), goodput=0.95, ttft_ms=150, timeout_s=2.0, with_range=False)
    assert most.limit == "goodput"
    assert most.seen[math.inf].served_per_s < 0.01 * most.requests_per_s
    assert most.seen[most.requests_per_s].goodput >= 0.95


@pytest.mark.parametrize("trace", [agents().trace(1.0), recorded_agents()], ids=lambda trace: trace.name)
def test_sessions_of_a_trace_are_repeated_whole(plan: StepPlan, trace: Trace) -> None:
    """Every repeat has the sessions of the trace, and finds in the prefix cache what the trace finds."""
    run = steady_run(trace, 3 * len(trace) - 5)
    sessions = len(starts_of(trace))
    assert (run.cycle, run.counted.stop - run.counted.start, run.requests) == (
        sessions, 3 * sessions, 3 * len(trace),
    )  # fmt: skip
    starts_s, own_s = starts_of(run.trace)[run.counted], starts_of(trace)
    lap_s = (own_s[-1] - own_s[0]) * sessions / (sessions - 1)
    assert starts_s - starts_s[0] == pytest.approx(
        np.concatenate([own_s - own_s[0] + lap * lap_s for lap in range(3)]), abs=1e-9
    )
    alone, repeated = (
        fastroof.simulate(plan, some.rate_scaled(1e-3), num_gpu_blocks=10**6) for some in (trace, run.trace)
    )

    def rows_of(sim: Simulation, session: int) -> list[Any]:
        """Requests of a session, and s after its start."""
        rows = sim.requests.filter(pc.equal(sim.requests["session"], session)).to_pylist()
        begin_s = min(row["arrival_s"] for row in rows)
        names = ("input_tokens", "output_tokens", "cached_tokens", "turn")
        found = [tuple(row.get(name) for name in names) for row in rows]
        return sorted(
            (*own, round(row["arrival_s"] - begin_s, 3)) for own, row in zip(found, rows, strict=True)
        )

    numbers = alone.sessions["session"].to_pylist()
    # the first session of all finds no system prompt
    for place in (1, 2, sessions // 2, sessions - 1):
        own = rows_of(alone, numbers[place])
        for lap in range(3):
            assert rows_of(repeated, run.counted.start + lap * sessions + place) == own


def test_sessions_that_no_capacity_is_of(plan: StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Trace([0.0, 0.0], [10, 20], [2, 2], parents=[-1, 0])
    with pytest.raises(SimulationError, match="no rate to scale: all of its sessions start at once"):
        capacity(plan, one, ttft_p99_ms=500)
    with pytest.raises(SimulationError, match="has sessions, which hours would cut"):
        fewest_by_hour(plan, agents().trace(1.0), **LIMITS)
    monkeypatch.setattr(steady, "MOST_STEPS", 2**16)
    slow = Workload(requests=500, turns=10, think_s=1e4, osl=4)
    for answer, given in ((capacity, slow), (fewest_replicas, slow.trace(1.0))):
        with pytest.raises(SimulationError, match="sessions stay open too long for a steady state"):
            answer(plan, given, ttft_p99_ms=500)
    with pytest.raises(SimulationError, match="the delays of its sessions are too long"):
        as_given(plan, replace(slow, think_s=9e8), tpot_p99_ms=1)


@pytest.mark.slow
def test_sessions_that_a_queue_alone_keeps_open_have_a_capacity(plan: StepPlan) -> None:
    """Up to the tolerance the queue grows with the run, and with it the time of sessions."""
    load = Workload(requests=300, turns=20, isl=1, osl=2, growth_tokens=1, seed=1)
    given: dict[str, Any] = {"max_num_seqs": 4, "tolerance": 0.05, "with_range": False}
    most = capacity(plan, load, e2e_p99_ms=1e9, **given)
    assert most.limit == "throughput"
    assert most.open_sessions is not None
    assert most.counted < 8 * most.open_sessions * 20


@pytest.mark.slow
def test_a_capacity_of_sessions_does_not_depend_on_the_number_of_requests_given(plan: StepPlan) -> None:
    """150 requests alone, 21 sessions, would be all open at once."""
    found = [
        capacity(plan, agents(count, seed), ttft_p99_ms=120, with_range=False)
        for seed, count in enumerate((150, 3000, 40_000))
    ]
    for each in found[1:]:
        assert each.sampling_error is not None
        assert found[0].sampling_error is not None
        chance = math.hypot(each.sampling_error, found[0].sampling_error)
        assert abs(math.log(each.requests_per_s / found[0].requests_per_s)) < 3.0 * chance + each.tolerance
    assert as_given(plan, agents(), ttft_p99_ms=120).requests_per_s > 1.2 * found[0].requests_per_s
