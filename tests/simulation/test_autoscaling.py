"""Autoscaled replicas: equal to naive ones to the last bit, to fixed fleets, and in what they cost."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fastroof
from fastroof import Trace, Workload
from fastroof.engines import FrontEnd, load_engine
from fastroof.errors import FastroofError, SimulationError
from fastroof.simulation import Autoscaler, Simulation, pools
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_run import run_pools
from tests.reference.made_fleets import a_plan, a_rule, a_workload, naively, prove, run_replicas
from tests.reference.made_workloads import made_sessions
from tests.reference.pools import ROUTES


def run_autoscaled(
    plan: Any,
    trace: Trace,
    own: Any,
    rule: Autoscaler,
    first: int = 1,
    router: str = "round_robin",
    hits: str = "given",
    seed: int = 0,
) -> Outcomes:
    return run_pools([pools.EnginePool(plan, own, first, router, hits, autoscaler=rule)], trace, seed=seed)


def columns_of(lives: Any) -> Any:
    """Return lives as the naive autoscaler has them."""
    names = ("replica", "ordered_us", "ready_us", "drained_us", "stopped_us")
    return np.column_stack([lives[name] for name in names])


OTHERS = ["", "ranks", "cache"]


@pytest.mark.loops
@pytest.mark.slow
@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("others", OTHERS)
def test_hundreds_of_workloads_are_served_as_by_a_naive_autoscaler(others: str) -> None:
    prove(f"rules {others}", range(300), least=31)


@pytest.mark.loops
@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), others=st.sampled_from(OTHERS))
def test_any_workload_is_served_to_the_bit(seed: int, others: str) -> None:
    prove(f"rules {others}", [seed])


# -- what autoscaled replicas keep to -------------------------------------------------------------


def a_trace(seed: int) -> tuple[Trace, Any]:
    rng = np.random.default_rng(seed)
    trace, own = a_workload(rng, clients=seed % 3 == 0)
    return (made_sessions(Random(seed), trace) if seed % 3 == 1 else trace), own


@given(seed=st.integers(0, 2**32), replicas=st.integers(2, 4), router=st.sampled_from(sorted(ROUTES)[:-2]))
def test_as_few_as_most_replicas_are_a_fixed_fleet(seed: int, replicas: int, router: str) -> None:
    trace, own = a_trace(seed)
    plan = a_plan(1 + seed % 2)
    rule = Autoscaler("queue", 1, max_replicas=replicas, min_replicas=replicas, startup_s=1, interval_s=0.01)
    for name in (router, "power_of_two"):
        got = run_autoscaled(plan, trace, own, rule, router=name, seed=seed)
        fixed = run_replicas(plan, trace, own, replicas, name, seed=seed)
        for field in ("arrival_us", "first_us", "last_us", "preemptions", "status", "replica"):
            np.testing.assert_array_equal(getattr(got, field), getattr(fixed, field), err_msg=field)
        assert np.array_equal(got.gaps, fixed.gaps)
        if name != "round_robin" or trace.clients or trace.has_parents:
            # independent replicas add their steps in bins of other widths
            assert got.bin_us == fixed.bin_us
            np.testing.assert_allclose(got.series, fixed.series, rtol=1e-9, atol=1e-6)
        assert got.counters == pytest.approx(fixed.counters, rel=1e-12)
        assert got.lives is not None
        assert len(got.lives) == replicas


@given(seed=st.integers(0, 2**32))
def test_replicas_get_requests_between_their_start_and_their_end(seed: int) -> None:
    rng = np.random.default_rng(seed)
    trace, own = a_trace(seed)
    rule = a_rule(rng, int(rng.integers(1, 6)))
    got = run_autoscaled(a_plan(), trace, own, rule, router="least_load")
    lives = got.lives
    assert lives is not None
    place, ordered_us, ready_us, drained_us, stopped_us = columns_of(lives).T
    for arrival_us, replica in zip(got.arrival_us, got.replica, strict=True):
        may = (place == replica) & (ready_us <= arrival_us) & (arrival_us < drained_us)
        assert may.sum() == 1
    assert (ordered_us <= stopped_us).all()
    assert (np.minimum(drained_us, got.counters["end_us"]) <= stopped_us).all()
    for one in range(rule.max_replicas):
        order = np.argsort(ordered_us[place == one])
        # a replica's lives follow each other
        assert (stopped_us[place == one][order][:-1] <= ordered_us[place == one][order][1:]).all()


@pytest.fixture(scope="module")
def day() -> Simulation:
    """Traffic that rises and falls, two hours of it."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100")
    load = Workload(ramp=(2, 30, 2, 2, 40, 2), requests=20_000, isl=1000, osl=150, seed=1)
    rule = Autoscaler("concurrency", 20, max_replicas=6, startup_s=60)
    return fastroof.simulate(plan, load.trace(), autoscaler=rule, router="least_outstanding")


def test_gpu_hours_are_the_replicas_over_time(day: Simulation) -> None:
    fleet = day.fleet.to_pydict()
    numbers = [np.array(fleet[name]) for name in ("starting", "serving", "draining")]
    held_s = (sum(numbers)[:-1] * np.diff(fleet["time_s"])).sum()
    assert day.gpu_hours == pytest.approx(held_s / 3600, rel=1e-12)
    assert all((one >= 0).all() and one[-1] == 0 for one in numbers)
    assert sum(numbers).max() <= 6
    assert numbers[1][:-1].min() >= 1
    series = day.series()
    length_s = np.diff(np.append(series["time_s"].to_numpy(), fleet["time_s"][-1]))
    means = sum(series[name].to_numpy() for name in ("starting", "serving", "draining"))
    assert (means * length_s).sum() / 3600 == pytest.approx(day.gpu_hours, rel=1e-9)
    assert 0 < max(series["busy"].to_pylist()) < 1 + 1e-6
    answers = day.summary(with_range=False)
    scaling = answers["autoscaling"]
    assert scaling["replicas"]["mean"] * answers["duration_s"] / 3600 == pytest.approx(
        day.gpu_hours, rel=1e-3
    )
    assert scaling["started"] > 2
    assert scaling["stopped"] > 2
    assert 0 < answers["busy"] <= 1
    # a replica that stopped draws nothing
    energy = day.energy()
    assert energy["watts_per_gpu"] * day.gpu_hours * 3600 == pytest.approx(energy["joules"])


def test_it_costs_less_than_a_fleet_at_the_peak_and_limits_show_whether_it_serves(
    day: Simulation,
) -> None:
    limits = {"ttft_ms": 1000.0, "tpot_ms": 40.0}
    scaling = day.summary(**limits, with_range=False)["autoscaling"]
    peak, fewest = scaling["fixed"]["at_peak"], scaling["fixed"]["fewest"]
    assert peak["replicas"] == scaling["replicas"]["max"]
    assert scaling["gpu_hours"] < peak["gpu_hours"]
    assert all(fewest["kept"].values())
    one_less = day.fixed(fewest["replicas"] - 1, limits)
    assert not one_less.keeps
    plan, trace = day.plan, day.trace
    alone = fastroof.simulate(plan, trace, replicas=fewest["replicas"], router="least_outstanding")
    assert alone.goodput(**limits)["share"] == fewest["share"]
    hours = alone.summary(with_range=False)["duration_s"] * fewest["replicas"] / 3600
    assert fewest["gpu_hours"] == pytest.approx(hours, rel=1e-12)
    assert day.summary(ttft_ms=1e-3, with_range=False)["autoscaling"]["fixed"]["fewest"] is None


def test_fleets_count_the_gpus_of_a_replica_and_have_their_own_front_ends(h100: fastroof.Tables) -> None:
    engine = replace(load_engine("vllm"), front_end=FrontEnd(server_ms=150.0))
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, engine=engine)
    trace = Trace(np.zeros(20), [10] * 20, [1] * 20)
    rule = Autoscaler("concurrency", 100, max_replicas=2, startup_s=1)
    sim = fastroof.simulate(plan, trace, autoscaler=rule)
    answers = sim.summary(ttft_ms=1e6, with_range=False)
    peak = answers["autoscaling"]["fixed"]["at_peak"]
    assert peak["replicas"] == 1
    # the API server of the replica that is up shares its thread among all
    assert answers["ttft_ms"]["mean"] == pytest.approx(150.0 * 20, rel=0.02)
    alone = fastroof.simulate(plan, trace).summary(with_range=False)
    assert peak["gpu_hours"] == pytest.approx(2 * alone["duration_s"] / 3600, rel=1e-9)


def test_a_longer_start_makes_tokens_slower(day: Simulation) -> None:
    plan, trace, rule = day.plan, day.trace, day.pools[0].autoscaler
    tails_ms = [
        fastroof.simulate(
            plan, trace, autoscaler=replace(rule, startup_s=s), router="least_outstanding"
        ).times.percentile("tpot_ms", 99)
        for s in (0, 60, 900)
    ]
    assert tails_ms[0] < tails_ms[1] < tails_ms[2]


@pytest.mark.loops
def test_a_new_replica_has_an_empty_cache() -> None:
    """Two bursts of one prompt; the replica of the second one is new, and finds nothing at first."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    count = 40
    arrival_s = np.concatenate([np.linspace(0, 1, count), np.linspace(1000, 1001, count)])
    trace = Trace(
        arrival_s, [1024] * 2 * count, [50] * 2 * count,
        hash_ids=[1, 2] * 2 * count, hash_offsets=np.arange(2 * count + 1) * 2, hash_block_size=512,
    )  # fmt: skip
    rule = Autoscaler("concurrency", 4, max_replicas=2, startup_s=0.1, interval_s=0.2, scale_down_delay_s=1)
    sim = fastroof.simulate(plan, trace, autoscaler=rule, router="round_robin")
    columns = (sim.requests.column(name).to_numpy() for name in ("cached_tokens", "replica", "arrival_s"))
    cached, replica, at_s = columns
    misses = [at_s[(cached == 0) & (replica == number)] // 1000 for number in (0, 1)]
    assert len(sim.outcomes.lives) == 3
    # replica 0 at the start, 1 when it is started, and again
    assert [len(np.unique(bursts)) for bursts in misses] == [1, 2]
    assert set(replica[cached == 0]) == {0, 1}


@pytest.mark.loops
def test_rows_for_lives_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = a_plan()
    _, own = a_workload(np.random.default_rng(5))
    own = replace(own, timeout_s=math.inf)
    trace = Trace(np.repeat(np.arange(8) * 0.5, 6) + np.tile(np.arange(6) * 0.01, 8), [20] * 48, [20] * 48)
    rule = Autoscaler(
        "concurrency", 1, max_replicas=5, startup_s=0, interval_s=0.001, scale_down_delay_s=0, tolerance=0
    )
    lives = run_autoscaled(plan, trace, own, rule).lives
    assert lives is not None
    assert len(lives) > 10
    monkeypatch.setattr("fastroof.simulation.fleet_run.FIRST_LIVES", 1)
    assert np.array_equal(run_autoscaled(plan, trace, own, rule).lives, lives)


@pytest.mark.loops
def test_replicas_that_still_start_are_stopped_first() -> None:
    plan = a_plan()
    _, own = a_workload(np.random.default_rng(5))
    own = replace(own, timeout_s=math.inf)
    trace = Trace([0.0, 0.001, 0.002, 0.003, 1.0, 1.1], [20] * 6, [20] * 6)
    rule = Autoscaler("concurrency", 1, max_replicas=4, startup_s=0.5, interval_s=0.01, scale_down_delay_s=0)
    got = run_autoscaled(plan, trace, own, rule)
    assert got.lives is not None
    assert (got.lives["stopped_us"][1:] < got.lives["ready_us"][1:]).all()
    fleet = naively([pools.EnginePool(plan, own, autoscaler=rule)], trace)
    assert got.replica.tolist() == fleet.replica == [0] * 6
    assert np.array_equal(columns_of(got.lives), [one[1:] for one in fleet.lives])


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"metric": "cpu"}, "metric must be one of queue, concurrency, kv, rate"),
        ({"target": 0}, "target must be a number from 1e-06"),
        ({"target": math.nan}, "target must be a number"),
        ({"max_replicas": 0}, "max_replicas"),
        ({"max_replicas": 10**6}, "max_replicas"),
        ({"min_replicas": 9}, "min_replicas 9 is above max_replicas 4"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"startup_s": -1}, "startup_s must be a number from 0"),
        ({"interval_s": 0}, "interval_s must be a number from 0.001"),
        ({"scale_down_delay_s": 1e6, "interval_s": 0.001}, "checks of interval_s"),
        ({"tolerance": 2}, "tolerance must be a number from 0 to 1"),
        ({"low": 3}, "low must be a number from 0 to 2"),
    ],
)
def test_wrong_rules_name_valid_values(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        Autoscaler(**{"metric": "queue", "target": 2, "max_replicas": 4, "startup_s": 10, **given})


@pytest.mark.parametrize(
    "text", ["", "queue", "queue:", "queue:x", "queue:1:2:3", "cpu:1", "queue:nan", "kv:inf"]
)
def test_wrong_texts_of_rules_are_refused(text: str) -> None:
    with pytest.raises(SimulationError, match=r"METRIC:TARGET|target must be"):
        Autoscaler.parsed(text, max_replicas=2, startup_s=1)


@given(text=st.text(alphabet="queuconrytkva:0123456789.e-", max_size=12))
def test_any_text_is_a_rule_or_an_error(text: str) -> None:
    try:
        rule = Autoscaler.parsed(text, max_replicas=2, startup_s=1)
    except FastroofError:
        return
    assert Autoscaler.parsed(rule.text, max_replicas=2, startup_s=1).metric == rule.metric


@pytest.mark.parametrize(
    ("trace", "time_scale"),
    [
        (Workload(clients=1, requests=2, think_s=1e6, isl=100, osl=5).trace(), 1.0),
        pytest.param(Trace([0.0, 1.0], [100, 100], [5, 5]), 1e9, marks=pytest.mark.slow),
    ],
    ids=["clients", "requests"],
)
def test_runs_that_last_for_too_many_checks_are_refused(trace: Trace, time_scale: float) -> None:
    plan = a_plan()
    rule = Autoscaler("queue", 2, max_replicas=1, startup_s=0, interval_s=0.001, scale_down_delay_s=0)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 512, "max_num_seqs": 8, "autoscaler": rule}
    with pytest.raises(SimulationError, match=r"lasts over 10,000,000 checks of interval_s 0\.001; give"):
        fastroof.simulate(plan, trace, **sizes, time_scale=time_scale)


def test_wrong_runs_name_valid_values() -> None:
    plan = a_plan()
    rule: Any = Autoscaler("queue", 2, max_replicas=4, startup_s=10)
    trace = Trace([0.0, 1.0], [100, 100], [5, 5])
    small = {"max_num_batched_tokens": 512, "max_num_seqs": 8}
    for words, options in (
        ("autoscaler must be an Autoscaler, got str", {"autoscaler": "queue:2"}),
        ("replicas 5, with which autoscaling begins", {"autoscaler": rule, "replicas": 5}),
        ("replicas must be", {"autoscaler": rule, "replicas": 0}),
        ("at most 10,000,000", {"autoscaler": replace(rule, interval_s=0.001, scale_down_delay_s=0)}),
        ("router must be one of", {"autoscaler": rule, "router": "random"}),
    ):
        late = replace(trace, arrival_s=[0.0, 1e9]) if "most" in words else trace
        with pytest.raises(SimulationError, match=words):
            fastroof.simulate(plan, late, **small, **options)


def test_each_pool_has_replicas_by_its_own_rule() -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", engine="kernels")
    trace = Workload(ramp=(2, 40, 2), requests=400, isl=1000, osl=150).trace()
    sizes: dict[str, Any] = {"startup_s": 1, "interval_s": 0.5, "scale_down_delay_s": 2}
    rules = [Autoscaler("concurrency", target, max_replicas=4, **sizes) for target in (2, 10)]
    sim = fastroof.simulate(fastroof.Fleet([fastroof.Pool(plan, autoscaler=rule) for rule in rules]), trace)
    done = {name: pool["autoscaling"] for name, pool in sim.summary()["pools"].items()}
    assert [one["rule"] for one in done.values()] == ["concurrency:2", "concurrency:10"]
    assert all(one["started"] > 0 for one in done.values())
    assert all(one["stopped"] > 0 for one in done.values())
    assert sim.requests["status"].to_pylist() == ["finished"] * 400
    held_s = [pool["autoscaling"]["gpu_hours"] for pool in sim.summary()["pools"].values()]
    assert sim.gpu_hours == pytest.approx(sum(held_s))
    assert sum(sim.fleet[name].to_numpy()[:-1].max() for name in ("starting", "serving", "draining")) > 2


@pytest.mark.loops
def test_rejected_requests_are_in_no_replica() -> None:
    trace = Trace([0.0, 1.0], [10**6, 10**6], [5, 5])
    plan = a_plan()
    rule = Autoscaler("queue", 2, max_replicas=2, startup_s=1)
    sim = fastroof.simulate(
        plan, trace, max_num_batched_tokens=512, max_num_seqs=8, num_gpu_blocks=100, on_too_long="reject",
        autoscaler=rule,
    )  # fmt: skip
    assert sim.requests["status"].to_pylist() == ["rejected"] * 2
    assert sim.summary(with_range=False)["autoscaling"]["gpu_hours"] == 0.0
