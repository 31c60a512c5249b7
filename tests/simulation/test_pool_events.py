"""Pools where one feeds back to the other: equal to naive pools, event by event, to the last bit."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from fastroof import Trace
from fastroof.compiled.simulation.run import fleet_run
from fastroof.errors import SimulationError
from fastroof.simulation.fleet_arrays import new_fleet
from fastroof.simulation.fleet_run import pooled_outcomes, run_pools
from fastroof.simulation.pools import EnginePool, Link, sent_in_us, takes_us
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import LRU
from tests.reference.made_fleets import a_plan, a_workload, made_fleet, prove
from tests.reference.made_workloads import made_sessions, sampled

US_PER_S = 1e6


@pytest.mark.loops
@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("others", ["", "ranks", "cache", "rules", "ranks rules"])
def test_pools_feed_back_as_naive_ones_do(others: str) -> None:
    prove(f"pools {others}", range(40), least=5)


@pytest.mark.slow
@pytest.mark.loops
def test_a_thousand_pools_feed_back_as_naive_ones_do() -> None:
    prove("pools ranks", range(1000), least=101)


@pytest.mark.loops
def test_without_feedback_event_by_event_is_one_pool_after_the_other() -> None:
    for seed in sampled(range(30)):
        made = made_fleet(seed, "pools ranks")
        rng = np.random.default_rng(seed)
        endless = [
            pool._replace(settings=replace(pool.settings, timeout_s=math.inf, num_gpu_blocks=30))
            for pool in made.pools
        ]
        assert made.link is not None
        link = made.link._replace(back_pressure=False, by_layer=False)
        trace, _ = a_workload(rng)
        takes_us = sent_in_us(*endless, trace.input_tokens, link)
        scale = float(rng.choice([1.0, 1.1]))
        both = []
        for is_coupled in (0, 1):
            run = new_fleet(endless, trace, link=link, takes_us=takes_us, time_scale=scale, seed=seed)
            run.line["is_coupled"] = is_coupled
            assert fleet_run(run) == 0
            both.append(pooled_outcomes(endless, run, link))
        one, other = both
        for name in ("arrival_us", "first_us", "last_us", "preemptions", "status", "replica", "gaps"):
            assert np.array_equal(getattr(one, name), getattr(other, name)), name
        assert np.array_equal(one.transfer_us, other.transfer_us, equal_nan=True)
        assert np.array_equal(one.prefill_replica, other.prefill_replica)
        assert one.counters == pytest.approx(other.counters, rel=1e-12)
        assert one.series.sum(0) == pytest.approx(other.series.sum(0), rel=1e-9)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e6])
def test_common_starts_of_prompts_are_found_with_and_without_feedback(timeout_s: float) -> None:
    count = 40
    trace = Trace(np.arange(count) / 5, np.full(count, 200), np.full(count, 3))
    shared = replace(trace, history_tokens=np.full(count, 160, np.int32))
    pool = roomy_pool(timeout_s=timeout_s)
    found = run_pools([pool._replace(prefix_cache=LRU), pool], shared).cached_tokens
    assert found is not None
    # the first one finds nothing
    assert found.tolist() == [0] + [160] * (count - 1)


# -- what pools keep to ---------------------------------------------------------------------------


def roomy_pool(replicas: int = 1, **given: Any) -> EnginePool:
    settings = {"max_num_batched_tokens": 512, "max_num_seqs": 64, "num_gpu_blocks": 20_000} | given
    return EnginePool(a_plan(), EngineSettings(**settings), replicas)


def test_with_room_back_pressure_changes_nothing() -> None:
    rng = np.random.default_rng(1)
    sent, _ = a_workload(rng)
    for trace in (sent, a_workload(rng, clients=True)[0], made_sessions(Random(1), sent)):
        pools = roomy_pool(2), roomy_pool()
        one, other = (run_pools(pools, trace, Link(1e9, back_pressure=held)) for held in (False, True))
        assert one.last_us.tolist() == other.last_us.tolist()
        assert np.array_equal(one.transfer_us, other.transfer_us, equal_nan=True)


def test_a_full_decode_engine_holds_back_prefill_and_needs_no_preemption() -> None:
    trace = Trace([0.0] * 12, [100] * 12, [50] * 12)
    prefill = roomy_pool(num_gpu_blocks=14)
    decode = roomy_pool(num_gpu_blocks=20)
    free, held = (run_pools([prefill, decode], trace, Link(1e9, back_pressure=on)) for on in (False, True))
    # two prompts have room in either pool: the others wait before their prefill, not after it
    assert np.sort(free.first_us)[-1] < 0.2 * free.last_us.max()
    assert np.sort(held.first_us)[-1] > 0.7 * held.last_us.max()
    assert held.prefill.last_us.max() > 5.0 * free.prefill.last_us.max()
    assert held.prefill.counters["peak_blocks"] == 14


def test_layers_are_sent_while_others_are_computed() -> None:
    """What a transfer adds is its last layer, or what the link could not send before."""
    plan = a_plan()
    trace = Trace([0.0], [500], [2])
    layers = plan.model.num_layers
    prefill_us = float(plan.step_scalar([500], [0]))
    for bytes_per_s in (1e9, 1e10, 1e12):
        link = Link(bytes_per_s, latency_us=7.0, by_layer=True)
        sent_us = run_pools([roomy_pool(), roomy_pool()], trace, link).transfer_us[0]
        whole_us = float(takes_us(plan, plan, [500], link._replace(latency_us=0.0))[0])
        exposed_us = max(whole_us / layers, whole_us - prefill_us * (layers - 1) / layers)
        assert sent_us == pytest.approx(exposed_us + 7.0, rel=1e-9)


def test_a_chain_of_requests_is_one_client() -> None:
    count = 12
    sizes = [100] * count, [20] * count
    closed = run_pools([roomy_pool(), roomy_pool()], Trace([0.0] * count, *sizes, clients=1, think_s=0.01))
    chain = Trace(
        [0.0] * count,
        *sizes,
        parents=[-1, *range(count - 1)],
        delay_s=[0.0, *[0.01] * (count - 1)],
    )
    seen = run_pools([roomy_pool(), roomy_pool()], chain)
    assert seen.last_us.tolist() == closed.last_us.tolist()
    arrivals_us, ends_us = closed.arrival_us, closed.last_us
    assert arrivals_us[1:] == pytest.approx(ends_us[:-1] + 0.01 * US_PER_S)


def test_a_client_gives_up_wherever_its_request_is() -> None:
    """In the prefill engine's queue, on the link, in the decode engine: all end, none later than noticed."""
    trace = Trace([0.0] * 30, [400] * 30, [60] * 30)
    for link in (Link(1e8), Link(1e10), Link(1e8, back_pressure=True)):
        pools = roomy_pool(max_num_seqs=2, timeout_s=0.1), roomy_pool(timeout_s=0.1)
        seen = run_pools(pools, trace, link)
        gave_up = seen.status == 1
        assert gave_up.any()
        assert np.isnan(seen.last_us[gave_up]).all()
        finished_us = (seen.last_us - seen.arrival_us)[~gave_up]
        assert (finished_us <= 0.1 * US_PER_S).all()


def test_children_of_a_rejected_request_are_rejected() -> None:
    trace = Trace([0.0] * 4, [100, 5000, 100, 100], [5] * 4, parents=[-1, -1, 0, 1], delay_s=[0.0] * 4)
    seen = run_pools([roomy_pool(), roomy_pool(num_gpu_blocks=50)], trace)
    assert seen.status.tolist() == [0, 2, 0, 2]
    assert seen.prefill_replica.tolist() == [0, -1, 0, -1]


SMALL = EngineSettings(64, 8, 60)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"link": Link(back_pressure=True, by_layer=True)}, "exclude each other"),
        ({"link": Link(back_pressure="yes")}, "back_pressure"),
        ({"link": Link(by_layer=1)}, "by_layer"),
        (
            {
                "decode": EnginePool(a_plan(2, "lockstep=all"), EngineSettings(64, 8, 60)),
                "link": Link(back_pressure=True),
            },
            "lockstep",
        ),
        ({"prefill": EnginePool(a_plan(), replace(SMALL, timeout_s=1.0))}, "the same in both pools"),
    ],
)
def test_what_does_not_go_together(given: dict[str, Any], message: str) -> None:
    pool = EnginePool(a_plan(), SMALL)
    options: dict[str, Any] = {"prefill": pool, "decode": pool, "link": Link()} | given
    with pytest.raises(SimulationError, match=message):
        run_pools([options["prefill"], options["decode"]], Trace([0.0], [10], [2]), options["link"])
