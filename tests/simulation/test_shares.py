"""Replica k of R serves its part of the requests as if it were alone, to the last bit."""

from __future__ import annotations

import functools
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import StepPlan, Trace
from fastroof.simulation import Fleet, Pool, simulate
from fastroof.simulation.autoscaling import Autoscaler
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import EnginePool
from tests.reference.made_fleets import prove, run_replicas
from tests.reference.made_workloads import MadeWorkload, made_workload

EACH = 30
"""Workloads of a test; there are four kinds of plans, and two sources of prefix hits."""


@functools.cache
def a_plan(dp: int, has_front_end: bool) -> StepPlan:
    overhead: dict[str, Any] = {} if has_front_end else {"front_end": 0}
    plan = fastroof.compile_plan(
        "llama-3.1-8b",
        "h100",
        fastroof.load_tables("h100"),
        engine="vllm",
        dp=dp,
        max_num_seqs=1024,
        **overhead,
    )
    assert plan.profile.front_end.adds_nothing != has_front_end
    return plan


def of_rows(trace: Trace, rows: np.ndarray) -> Trace:
    columns = ("arrival_s", "input_tokens", "output_tokens", "cached_tokens", "history_tokens")
    return Trace(**{name: getattr(trace, name)[rows] for name in columns if getattr(trace, name) is not None})


def open_workload(random: Random) -> MadeWorkload:
    while True:
        made = made_workload(random, random.choice(["usual", "scarce", "tiny"]))
        if not made.trace.is_closed:
            return made


def with_history(made: MadeWorkload, random: Random) -> MadeWorkload:
    """Prompts with some tokens in common, of which a simulated cache finds whole blocks."""
    shared = [random.choice([0, tokens // 2, tokens - 1]) for tokens in made.trace.input_tokens.tolist()]
    trace = replace(made.trace, history_tokens=shared, cached_tokens=None)
    return made._replace(trace=trace)


def assert_shares(whole: Outcomes, alone: list[Outcomes], replicas: int) -> None:
    names = ("arrival_us", "first_us", "last_us", "status", "preemptions", "cached_tokens")
    for k, own in enumerate(alone):
        assert set(whole.replica[k::replicas].tolist()) <= {k, -1}
        for name in names:
            if getattr(own, name) is not None:
                np.testing.assert_array_equal(getattr(whole, name)[k::replicas], getattr(own, name), name)
    assert np.array_equal(whole.gaps, np.sum([own.gaps for own in alone], axis=0))
    for name in ("steps", "preemptions", "prefill_tokens", "decode_tokens"):
        assert whole.counters[name] == sum(own.counters[name] for own in alone)


@pytest.mark.parametrize("prefix_cache", ["given", "lru"])
@pytest.mark.parametrize("has_front_end", [False, True])
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("seeds", [range(EACH), pytest.param(range(EACH, 20 * EACH), marks=pytest.mark.slow)])
def test_a_replica_is_its_share(seeds: range, dp: int, has_front_end: bool, prefix_cache: str) -> None:
    plan = a_plan(dp, has_front_end)
    for seed in seeds:
        random = Random(seed)
        made = open_workload(random)
        if prefix_cache == "lru":
            made = with_history(made, random)
        trace, replicas = made.trace, min(random.choice([2, 3, 4]), len(made.trace))
        options: dict[str, Any] = {"time_scale": made.time_scale, "prefix_cache": prefix_cache}
        whole = run_replicas(plan, trace, made.settings, replicas, **options)
        rows = np.arange(len(trace))
        alone = [
            run_replicas(plan, of_rows(trace, rows[k::replicas]), made.settings, **options)
            for k in range(replicas)
        ]
        assert_shares(whole, alone, replicas)


ROUTERS = ("round_robin", "least_outstanding", "least_load", "least_kv", "prefix_aware")
"""Those that give equal replicas one each of equal requests that come together."""


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("timeout_s", [None, 2.5])
def test_a_replica_is_its_share_behind_every_router(router: str, dp: int, timeout_s: float | None) -> None:
    """Groups of equal requests come at random times, each of one request for each replica."""
    plan, groups, replicas = a_plan(dp, True), 60, 3
    rng = np.random.default_rng(7)
    prompts, outputs = rng.integers(1, 4000, groups), rng.integers(1, 200, groups)
    one = Trace(np.cumsum(rng.exponential(0.03, groups)), prompts, outputs)
    every = Trace(*(np.repeat(values, replicas) for values in (one.arrival_s, prompts, outputs)))
    options: dict[str, Any] = {"timeout_s": timeout_s}
    if router == "prefix_aware":
        options["prefix_cache"] = "lru"
    alone = simulate(plan, one, **options).outcomes
    whole = simulate(plan, every, replicas=replicas, router=router, **options).outcomes
    assert (timeout_s is None) == (not alone.status.any())
    for k in range(replicas):
        assert set(whole.replica[k::replicas].tolist()) <= {k, -1}
        for name in ("arrival_us", "first_us", "last_us", "status", "preemptions"):
            np.testing.assert_array_equal(getattr(whole, name)[k::replicas], getattr(alone, name), name)
    assert np.array_equal(whole.gaps, replicas * alone.gaps)


@pytest.mark.parametrize("router", ["least_outstanding", "least_load"])
@pytest.mark.parametrize("think_s", [0.0, 0.005])
def test_clients_share_replicas(router: str, think_s: float) -> None:
    """Equal requests of clients, which replicas that end them together get again."""
    plan, replicas, clients, each = a_plan(1, True), 3, 8, 96
    one = Trace(np.zeros(each), [500] * each, [40] * each, clients=clients, think_s=think_s)
    count = replicas * each
    every = Trace(np.zeros(count), [500] * count, [40] * count, clients=replicas * clients, think_s=think_s)
    alone = simulate(plan, one).outcomes
    whole = simulate(plan, every, replicas=replicas, router=router).outcomes
    for k in range(replicas):
        own = whole.replica == k
        assert own.sum() == each
        for name in ("arrival_us", "first_us", "last_us"):
            np.testing.assert_array_equal(
                np.sort(getattr(whole, name)[own]), np.sort(getattr(alone, name)), name
            )


@pytest.mark.parametrize("others", ["", "rules", "ranks", "stages", "tiers", "pools", "pools rules ranks"])
def test_fleets_behind_front_ends_are_the_naive_ones(others: str) -> None:
    seen = prove(f"front {others}", range(60))
    assert seen["timed out"] * seen["closed loops"] * seen["sessions"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("others", ["", "rules", "ranks", "stages", "tiers", "pools", "pools rules ranks"])
def test_many_fleets_behind_front_ends_are_the_naive_ones(others: str) -> None:
    prove(f"front {others}", range(60, 400))


def test_a_router_counts_what_an_engine_rejects() -> None:
    trace = Trace([0.0, 0.1, 0.2, 0.3], [100, 10**6, 100, 100], [5] * 4)
    sim = fastroof.simulate(a_plan(1, False), trace, replicas=2, on_too_long="reject")
    assert sim.outcomes.replica.tolist() == [0, -1, 0, 1]


@pytest.mark.parametrize("seed", range(3))
def test_round_robin_follows_the_order_of_sending_everywhere(seed: int) -> None:
    """A long prompt takes longer to reach the scheduler than a short one that was sent after it."""
    made = open_workload(Random(seed))
    plan, count = a_plan(1, True), len(made.trace)
    trace = replace(made.trace, input_tokens=np.where(np.arange(count) % 2, 1, 400), cached_tokens=None)
    settings = replace(made.settings, num_gpu_blocks=10**5, chunked_prefill=True)
    turns = np.arange(count) % 3
    fixed = run_replicas(plan, trace, settings, 3)
    assert (fixed.replica == turns).all()
    rule = Autoscaler("queue", 1, max_replicas=3, min_replicas=3, startup_s=1)
    scaled = run_pools([EnginePool(plan, settings, autoscaler=rule)], trace)
    for name in ("first_us", "last_us", "status", "replica"):
        np.testing.assert_array_equal(getattr(scaled, name), getattr(fixed, name), name)
    for timeout_s in (None, 1e6):
        both = Fleet([Pool(plan, replicas, timeout_s=timeout_s) for replicas in (3, 1)])
        pools = simulate(both, trace)
        assert (pools.requests["prefill_replica"].to_numpy() == turns).all()
