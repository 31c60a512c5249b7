"""What simulations, capacities, estimates and sizes are given in place of plans, requests and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import FastroofError, serving
from fastroof.simulation import Autoscaler, Fleet, Pool, Workload, fleet_arrays
from fastroof.simulation.fewest_replicas import fewest_by_hour, fewest_replicas

FEW = Workload(rate=50, requests=5, isl=100, osl=9)
NO_PLANS: tuple[Any, ...] = (None, "llama-3.1-8b", 3, [], np.ones((2, 2)), object(), 10**5000)
CALLS: dict[str, Callable[[Any], Any]] = {
    "simulate": lambda plan: fastroof.simulate(plan, FEW.trace()),
    "capacity": lambda plan: fastroof.capacity(plan, FEW, ttft_p99_ms=500),
    "fewest_replicas": lambda plan: fewest_replicas(plan, FEW, ttft_p99_ms=500),
    "fewest_by_hour": lambda plan: fewest_by_hour(plan, FEW, ttft_p99_ms=500),
    "estimate": lambda plan: serving.estimate(plan, 1000, 100, 16),
    "estimate_disaggregated": lambda plan: serving.estimate_disaggregated(plan, plan, 1000, 100, 16),
}
SEARCHES: tuple[Callable[..., Any], ...] = (fastroof.capacity, fewest_replicas, fewest_by_hour)
SIZES: dict[str, Any] = {"num_gpu_blocks": 2000, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
NO_WORDS: tuple[Any, ...] = (["mixed"], np.array(["mixed", "x"]), {"mixed"}, b"mixed", 3, 10**5000)
NO_TIERS: tuple[Any, ...] = (
    np.array(3),
    np.array(["host"]),
    np.ma.masked,
    3,
    {"host": 1},
    iter(["host"]),
    b"host",
)
NO_SEEDS: tuple[Any, ...] = (None, -1, 1.5, "7", [1], np.array([1, 2]), 2**63)


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, max_num_seqs=64, engine="kernels"
    )


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", NO_PLANS, ids=lambda given: type(given).__name__)
def test_invalid_plans_are_refused(call: str, given: Any) -> None:
    with pytest.raises(FastroofError, match=r"plan must be a StepPlan \(see compile_plan\), got "):
        CALLS[call](given)


@pytest.mark.parametrize("given", NO_PLANS, ids=lambda given: type(given).__name__)
def test_invalid_requests_are_refused(plan: fastroof.StepPlan, given: Any) -> None:
    for search in SEARCHES:
        with pytest.raises(FastroofError, match="requests must be a Trace or a Workload"):
            search(plan, given, ttft_p99_ms=500)


@pytest.mark.parametrize("given", NO_WORDS, ids=lambda given: type(given).__name__)
def test_unknown_choices_are_refused(plan: fastroof.StepPlan, given: Any) -> None:
    for name in ("order", "router", "prefix_cache", "on_too_long"):
        with pytest.raises(FastroofError, match=f"{name} must be one of"):
            fastroof.simulate(plan, FEW.trace(), num_gpu_blocks=2000, **{name: given})
    for name in ("order", "router", "prefix_cache"):
        for search in SEARCHES:
            with pytest.raises(FastroofError, match=f"{name} must be one of"):
                search(plan, FEW, **SIZES, ttft_p99_ms=500, **{name: given})
    with pytest.raises(FastroofError, match="router must be one of"):
        Fleet([Pool(plan)], router=given)
    for name in ("order", "kv_reservation"):
        with pytest.raises(FastroofError, match=f"{name} must be one of"):
            serving.estimate(plan, 1000, 100, 16, **{name: given})


@pytest.mark.parametrize("given", [np.array([1, 2]), "no", 3, None], ids=lambda given: type(given).__name__)
def test_invalid_flags_and_numbers_are_refused(plan: fastroof.StepPlan, given: Any) -> None:
    if given is not None:
        with pytest.raises(FastroofError, match="reserve_output must be "):
            fastroof.simulate(plan, FEW.trace(), num_gpu_blocks=2000, reserve_output=given)
        with pytest.raises(FastroofError, match="reserve_output must be "):
            fastroof.capacity(plan, FEW, num_gpu_blocks=2000, ttft_p99_ms=500, reserve_output=given)
    with pytest.raises(FastroofError, match="with_range must be True or False, got "):
        fastroof.capacity(plan, FEW, num_gpu_blocks=2000, ttft_p99_ms=500, with_range=given)
    for search in SEARCHES:
        with pytest.raises(FastroofError, match="steady must be True or False, got "):
            search(plan, FEW, **SIZES, ttft_p99_ms=500, steady=given)
    with pytest.raises(FastroofError, match="with_error must be True or False, got "):
        serving.estimate(plan, 1000, 100, 16, with_error=given)
    with pytest.raises(FastroofError, match="with_error must be True or False, got "):
        serving.estimate_disaggregated(
            plan, plan, 100, 100, 16, max_num_batched_tokens=2048, with_error=given
        )


def test_several_timeouts_are_refused(plan: fastroof.StepPlan) -> None:
    with pytest.raises(FastroofError, match="timeout_s must be seconds above 0"):
        fastroof.simulate(plan, FEW.trace(), num_gpu_blocks=2000, timeout_s=np.array([1, 2]))


@pytest.mark.parametrize("given", NO_TIERS, ids=lambda given: type(given).__name__)
def test_invalid_tiers_are_refused(plan: fastroof.StepPlan, given: Any) -> None:
    with pytest.raises(FastroofError, match="kv_tiers must be text or a list of KvTier, got "):
        fastroof.simulate(plan, FEW.trace(), **SIZES, kv_tiers=given)
    for search in SEARCHES:
        with pytest.raises(FastroofError, match="kv_tiers must be text or a list of KvTier, got "):
            search(plan, FEW, **SIZES, ttft_p99_ms=500, kv_tiers=given)


@pytest.mark.parametrize("given", NO_SEEDS, ids=repr)
def test_invalid_seeds_are_refused(plan: fastroof.StepPlan, given: Any) -> None:
    for more in ({}, {"replicas": 2}, {"autoscaler": Autoscaler("queue", 1, 2, 0)}):
        with pytest.raises(FastroofError, match="seed must be a whole number from 0 to "):
            fastroof.simulate(plan, FEW.trace(), **SIZES, seed=given, **more)


@pytest.mark.parametrize(
    "given", [None, 0, "1", memoryview(b"ab"), np.array([1, 2])], ids=lambda given: type(given).__name__
)
def test_invalid_factors_on_times_are_refused(plan: fastroof.StepPlan, given: Any) -> None:
    for more in ({}, {"autoscaler": Autoscaler("queue", 1, 2, 0)}):
        with pytest.raises(FastroofError, match="time_scale must be a number from "):
            fastroof.simulate(plan, FEW.trace(), **SIZES, time_scale=given, **more)
    with pytest.raises(FastroofError, match="time_scale must be a number from "):
        fastroof.simulate(Fleet([Pool(plan), Pool(plan)]), FEW.trace(), time_scale=given)


def test_capacities_are_of_fixed_replicas(plan: fastroof.StepPlan) -> None:
    rule = Autoscaler("queue", 1, 2, 0)
    for search in SEARCHES:
        for fleet in (Fleet([Pool(plan, autoscaler=rule)]), Fleet([Pool(plan)], autoscaler=rule)):
            with pytest.raises(FastroofError, match="a fixed number of replicas; leave autoscaler out"):
                search(fleet, FEW, ttft_p99_ms=500)


def test_rules_are_texts() -> None:
    for given in (None, 3, b"queue:1", ["queue", 1], ""):
        with pytest.raises(FastroofError, match=r"autoscale needs METRIC:TARGET\[:LOW\]"):
            Autoscaler.parsed(given, max_replicas=2, startup_s=1)  # type: ignore[arg-type]


def test_numbers_of_replicas_may_be_of_few_bits(plan: fastroof.StepPlan) -> None:
    few: Any = np.int8(100)
    trace = FEW.trace()
    assert fastroof.simulate(plan, trace, **SIZES, replicas=few).gpus == 100
    assert fastroof.simulate(Fleet([Pool(plan, few, **SIZES)] * 2), trace).gpus == 200
    rule = Autoscaler("queue", 1, few, 0, min_replicas=few)
    assert fastroof.simulate(plan, trace, **SIZES, autoscaler=rule).summary()["finished"] == 5


def test_engines_that_take_too_much_memory_are_refused(
    plan: fastroof.StepPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_arrays, "usable_memory_bytes", lambda: 2**35)
    long = fastroof.Trace([0.0], [100], [2**20])
    words = (
        r"4,096 engines with an output of 1,048,576 tokens take 64\.\d GiB to simulate, more than is free; "
    )
    with pytest.raises(FastroofError, match=words):
        fastroof.simulate(plan, long, **SIZES | {"num_gpu_blocks": 2**21}, replicas=4096, router="least_load")


def test_messages_name_users_of_memory(plan: fastroof.StepPlan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_arrays, "MOST_STATE_BYTES", 2**20)
    monkeypatch.setattr(fleet_arrays, "usable_memory_bytes", lambda: 0)
    talk = Workload(rate=50, requests=2000, turns=4, isl=100, osl=9)
    many = Workload(rate=50, requests=2000, isl=100, osl=9)
    for load, cause, more in (
        (talk, "a simulated prefix cache for 2,000 requests", {}),
        (many, "block_size 65,536", {"block_size": 65536}),
        (many, "64 running requests", {"replicas": 999}),
    ):
        options = {**SIZES, "replicas": 99, "router": "least_kv", **more}
        with pytest.raises(FastroofError, match=f"engines with {cause} take "):
            fastroof.simulate(plan, load.trace(), **options)
        with pytest.raises(FastroofError, match=f"engines with {cause} take "):
            fastroof.capacity(plan, load, steady=False, ttft_p99_ms=500, **options)
