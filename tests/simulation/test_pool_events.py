"""Pools where one feeds back to the other: equal to naive pools, event by event, to the last bit."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Trace
from fastroof.compiled.simulation.run import fleet_run
from fastroof.errors import SimulationError
from fastroof.plan import StepPlan
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_arrays import new_fleet
from fastroof.simulation.fleet_run import pooled_outcomes, run_pools
from fastroof.simulation.pools import EnginePool, Link, sent_in_us, takes_us
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.prompt_tree import LRU
from tests.reference import fleet, pools
from tests.reference.block_pool import PooledScheduler
from tests.reference.made_prefixes import made_prefixes
from tests.reference.made_sessions import made_sessions
from tests.reference.scheduler import Scheduler

US_PER_S = 1e6
ROUTINGS = ("round_robin", "least_outstanding", "least_load", "least_kv", "power_of_two")


@functools.cache
def a_plan(dp: int = 1, tp: int = 1) -> StepPlan:
    return fastroof.compile_plan(
        "llama-3.1-8b",
        "h100",
        fastroof.load_tables("h100"),
        tp=tp,
        dp=dp,
        max_tokens=512,
        max_seqs=64,
        engine={"name": "pools", "costs": {"step_us": 100.0}, "data_parallel": {"lockstep": "all"}},
    )


def some_settings(rng: np.random.Generator, timeout_s: float) -> EngineSettings:
    """An engine that often lacks blocks or slots."""
    return EngineSettings(
        max_num_batched_tokens=int(rng.integers(8, 64)),
        max_num_seqs=int(rng.integers(2, 9)),
        num_gpu_blocks=int(rng.integers(24, 40)),
        block_size=4,
        order=str(rng.choice(["mixed", "prefill_first"])),
        reserve_output=bool(rng.random() < 0.2),
        async_scheduling=bool(rng.random() < 0.5),
        timeout_s=timeout_s,
    )


def a_trace(rng: np.random.Generator, kind: str, seed: int) -> Trace:
    count = int(rng.integers(1, 40))
    input_tokens = rng.integers(1, 60, count)
    is_closed = kind == "closed"
    trace = Trace(
        rng.integers(0, 200, count) * rng.choice([1e-4, 1e-3]) * (not is_closed),
        input_tokens,
        rng.integers(1, 30, count),
        rng.integers(0, input_tokens) * (rng.random(count) < 0.3),
        clients=int(rng.integers(1, 12)) if is_closed else None,
        think_s=float(rng.choice([0.0, 0.0005])) if is_closed else 0.0,
    )
    return made_sessions(Random(seed), trace) if kind == "sessions" else trace


def a_pool(rng: np.random.Generator, timeout_s: float, dp: int = 1) -> EnginePool:
    plan = a_plan(dp, int(rng.choice([1, 2])))
    return EnginePool(plan, some_settings(rng, timeout_s), int(rng.integers(1, 4)), str(rng.choice(ROUTINGS)))


def naive_pool(pool: EnginePool, trace: Trace, sent: int, seed: int) -> pools.Pool:
    scheduler: Any = Scheduler
    if pool.prefix_cache == LRU:
        scheduler = functools.partial(PooledScheduler, trace=trace)
    drawn = seed, sent, pool.replicas
    return pools.Pool.of_plan(
        pool.plan, pool.settings, pool.replicas, pool.router, drawn=drawn, scheduler=scheduler
    )


def naively(
    prefill: EnginePool, decode: EnginePool, trace: Trace, link: Link, seed: int = 0
) -> fleet.LinkedFleet:
    handed = int((trace.output_tokens > 1).sum()) if link.first_token != "decode" else len(trace)
    on_wire = link._replace(latency_us=0.0) if link.by_layer else link
    naive = fleet.Link(
        lambda prompt: float(takes_us(prefill.plan, decode.plan, [prompt], on_wire)[0]),
        link.first_token,
        link.is_shared,
        link.latency_us,
        prefill.plan.model.num_layers if link.by_layer else 0,
        link.back_pressure,
    )
    both = naive_pool(prefill, trace, len(trace), seed), naive_pool(decode, trace, handed, seed)
    return fleet.LinkedFleet(trace, *both, naive).run()


def assert_same(seen: Outcomes, naive: fleet.LinkedFleet) -> None:
    """Hold every request to the naive pools."""
    assert seen.status.tolist() == [one.status for one in naive.requests]
    assert np.array_equal(seen.arrival_us, [one.arrival_us for one in naive.requests])
    assert seen.prefill_replica.tolist() == naive.replica
    last_us, first_us, sent_us, preemptions, replica = [], [], [], [], []
    for one, prompt, decode in zip(naive.requests, naive.prompts, naive.decodes, strict=True):
        goes_on = naive.goes_on[one.index]
        arrived = goes_on and decode.arrival_us == naive.there_us[one.index]
        last_us.append(math.nan if one.status else (decode if goes_on else prompt).last_us)
        first_us.append(
            decode.first_us
            if naive.link.first_token == "decode"
            else prompt.first_us
            if naive.link.first_token == "prefill" or not goes_on
            else decode.arrival_us
            if arrived
            else math.nan
        )
        sent_us.append(decode.arrival_us - naive.ready_us[one.index] if arrived else math.nan)
        preemptions.append(prompt.preemptions + decode.preemptions)
        replica.append(naive.decode_replica[one.index] if arrived else -1)
    assert np.array_equal(seen.last_us, last_us, equal_nan=True)
    assert np.array_equal(seen.first_us, first_us, equal_nan=True)
    assert np.array_equal(seen.transfer_us, sent_us, equal_nan=True)
    assert seen.preemptions.tolist() == preemptions
    assert seen.replica.tolist() == replica


def a_case(seed: int) -> tuple[EnginePool, EnginePool, Trace, Link]:
    """Draw pools, a trace and a link; a third has back pressure, a third sends layer by layer."""
    rng = np.random.default_rng(seed)
    timeout_s = float(rng.choice([math.inf, 0.01, 0.03, 0.3]))
    how = str(rng.choice(["whole", "back_pressure", "by_layer"]))
    prefill = a_pool(rng, timeout_s, int(rng.choice([1, 1, 2])))
    decode = a_pool(rng, timeout_s, 1 if how == "back_pressure" else int(rng.choice([1, 1, 2])))
    link = Link(
        float(rng.choice([1e8, 1e9, 1e11])),
        float(rng.choice([0.0, 20.0])),
        bool(rng.random() < 0.7),
        str(rng.choice(["transfer", "prefill", "decode"])),
        how == "back_pressure",
        how == "by_layer",
    )
    return prefill, decode, a_trace(rng, str(rng.choice(["open", "closed", "sessions"])), seed), link


WORKLOADS = [100, pytest.param(1000, marks=pytest.mark.slow)]


def prove(cases: Any) -> Counter[str]:
    """Hold cases to the naive pools; count what happened in them."""
    seen = Counter[str]()
    for seed, (prefill, decode, trace, link) in cases:
        pooled = run_pools([prefill, decode], trace, link, seed=seed)
        naive = naively(prefill, decode, trace, link, seed)
        assert_same(pooled, naive)
        seen["timed out"] += int((pooled.status == 1).sum())
        seen["preemptions"] += int(pooled.preemptions.sum())
        seen["by layer"] += link.by_layer
        seen["waited for room"] += int(link.back_pressure and waited(pooled, link))
    return seen


def waited(pooled: Outcomes, link: Link) -> bool:
    """Whether a transfer took longer than the longest does alone: it waited for the link, or for room."""
    sent_us = pooled.transfer_us[np.isfinite(pooled.transfer_us)]
    return bool(len(sent_us)) and not link.is_shared and sent_us.max() > 2.0 * sent_us.min() + 100.0


@pytest.mark.loops
@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("workloads", WORKLOADS)
def test_pools_feed_back_as_naive_ones_do(workloads: int) -> None:
    seen = prove((seed, a_case(seed)) for seed in range(workloads))
    assert min(seen.values()) >= workloads // 100, seen


@pytest.mark.loops
def test_prompts_keep_cached_blocks_as_naive_ones_do() -> None:
    """Prefill engines with a prefix cache, whose blocks other prompts find while they are sent."""
    seen = Counter[str]()
    for seed in range(40):
        rng = np.random.default_rng(seed)
        made = made_prefixes(Random(seed))
        prefill = a_pool(rng, made.settings.timeout_s)
        router = str(rng.choice([*ROUTINGS, "prefix_aware"]))
        prefill = prefill._replace(settings=made.settings, router=router, prefix_cache=LRU)
        decode = a_pool(rng, made.settings.timeout_s)
        roomy = replace(decode.settings, num_gpu_blocks=200, max_num_seqs=4)
        decode = decode._replace(settings=roomy)
        link = Link(1e8, first_token="decode", back_pressure=bool(rng.random() < 0.8))
        try:
            pooled = run_pools([prefill, decode], made.trace, link, seed=seed)
        except SimulationError:
            continue
        if (pooled.status == 2).any():
            continue
        naive = naively(prefill, decode, made.trace, link, seed)
        assert_same(pooled, naive)
        found = {}
        for engine in naive.engines:
            for rank in engine.schedulers:
                found |= rank.first_found
        cached = [found.get(at, -1) for at in range(len(made.trace))]
        assert pooled.cached_tokens.tolist() == cached
        seen["found"] += sum(tokens > 0 for tokens in cached)
        seen["held"] += link.back_pressure
    assert seen["found"] > 20
    assert seen["held"] > 10


@pytest.mark.loops
def test_without_feedback_event_by_event_is_one_pool_after_the_other() -> None:
    for seed in range(30):
        prefill, decode, trace, link = a_case(seed)
        rng = np.random.default_rng(seed)
        endless = [
            pool._replace(settings=replace(pool.settings, timeout_s=math.inf)) for pool in (prefill, decode)
        ]
        link = link._replace(back_pressure=False, by_layer=False)
        trace = a_trace(rng, "open", seed)
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
    for kind in ("open", "closed", "sessions"):
        trace = a_trace(rng, kind, 1)
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
            {"decode": EnginePool(a_plan(2), EngineSettings(64, 8, 60)), "link": Link(back_pressure=True)},
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
