"""Tiers of KV cache: the naive engine to the last bit, limits, conservation, settings."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.kv_tiers import KvTier, Tiers, block_bytes, named_tiers, tiers_of
from fastroof.simulation.settings import EngineSettings
from tests.reference.fleet import serve
from tests.reference.kv_tiers import TieredScheduler, made_tiers
from tests.reference.made_fleets import naive_tiers, prove
from tests.reference.made_prefixes import made_prefixes
from tests.simulation.test_exactness import assert_equal, assert_same_requests
from tests.simulation.test_prefix_cache import can_run


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, max_num_seqs=256, engine="kernels"
    )


def as_naive(plan, work, given):
    """Every time, count and token found as the naive engine has them; returns the outcomes."""
    tiers = Tiers.of_plan(given, plan, work.settings)
    naive_of = naive_tiers(tiers, 1)
    scheduler = TieredScheduler(work.settings, work.trace, naive_of, plan.model.num_layers)
    naive = serve(
        work.trace, work.settings, plan.step_scalar, time_scale=work.time_scale, scheduler=scheduler
    )
    got = run_engine(
        plan, work.trace, work.settings, time_scale=work.time_scale, prefix_cache="lru", tiers=tiers
    )
    assert_same_requests(naive.requests, got)
    found = [scheduler.first_found.get(request.index, -1) for request in naive.requests]
    assert got.cached_tokens.tolist() == found
    assert got.counters["steps"] == len(naive.flights)
    assert got.counters["evictions"] == scheduler.pool.evictions
    assert got.counters["found_again_tokens"] == scheduler.found_again_tokens
    assert naive.free_blocks == work.settings.num_gpu_blocks
    use = got.tiers
    none = [0] * len(given)
    assert use.tokens.tolist() == [scheduler.first_from.get(i, none) for i in range(len(naive.requests))]
    for name, of_naive in (
        ("found_tokens", "found_tokens"),
        ("fetched_blocks", "fetched"),
        ("written_blocks", "written"),
        ("evicted_blocks", "lost"),
        ("peak_blocks", "most"),
    ):
        assert getattr(use, name).tolist() == [getattr(tier, of_naive) for tier in naive_of], name
    assert (use.wait_us, use.step_wait_us) == (scheduler.wait_us, scheduler.step_wait_us)
    return got


def made(plan, seed, most=25):
    """A workload and tiers, drawn by a seed; the tiers None if nothing of it has room."""
    random = Random(seed)
    work = made_prefixes(random, most)
    if random.random() < 0.5:
        needed = -(-(work.trace.input_tokens + work.trace.output_tokens) // work.settings.block_size)
        work = work._replace(settings=replace(work.settings, num_gpu_blocks=int(needed.max())))
    tiers = made_tiers(random, block_bytes(plan, work.settings))
    return work, tiers if can_run(work) else None


@pytest.mark.loops
@example(seed=285)  # requests give up while their blocks are fetched
@given(seed=st.integers(0, 2**32))
def test_the_loop_is_the_naive_engine_to_the_last_bit(plan, seed):
    work, tiers = made(plan, seed)
    if tiers is not None:
        as_naive(plan, work, tiers)


@pytest.mark.slow
def test_a_thousand_workloads_are_those_of_the_naive_engine(plan):
    fetched = evicted = waits = timed_out = preempted = 0
    for seed in range(1050):
        work, tiers = made(plan, seed, 20)
        if tiers is not None:
            got = as_naive(plan, work, tiers)
            fetched += int(got.tiers.fetched_blocks.sum())
            evicted += int(got.tiers.evicted_blocks.sum())
            waits += got.tiers.wait_us > 0.0
            timed_out += int((got.status == 1).sum())
            preempted += int(got.preemptions.sum())
    # so that the comparison is not empty
    assert fetched > 3000
    assert evicted > 10_000
    assert waits > 100
    assert min(timed_out, preempted) > 500


@pytest.mark.loops
@pytest.mark.parametrize("others", ["ranks", "rules", "pools", "ranks pools rules"])
def test_fleets_find_what_naive_ones_do(others):
    """Replicas that a rule starts and stops, ranks, prefill pools: every time, and every token found."""
    prove(f"tiers {others}", range(60), least=6)


# -- limits and conservation ------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
def test_a_tier_without_room_changes_nothing(plan, seed):
    work, tiers = made(plan, seed)
    if tiers is None:
        return
    plain = run_engine(plan, work.trace, work.settings, time_scale=work.time_scale, prefix_cache="lru")
    empty = Tiers.of_plan([replace(tier, capacity_bytes=0) for tier in tiers], plan, work.settings)
    got = run_engine(
        plan, work.trace, work.settings, time_scale=work.time_scale, prefix_cache="lru", tiers=empty
    )
    assert_equal(got, plain)
    np.testing.assert_array_equal(got.cached_tokens, plain.cached_tokens)
    assert not got.tiers.fetched_blocks.any()


@given(seed=st.integers(0, 2**32), writes=st.sampled_from(["write_through", "write_back"]))
def test_a_tier_without_limits_finds_what_a_gpu_without_limits_would(plan, seed, writes):
    """One request after the other, so that none waits for room: to the last bit, however it is fetched."""
    random = Random(seed)
    work = made_prefixes(random, 25)
    count = len(work.trace)
    none = dict.fromkeys(("parents", "parent_offsets", "delay_s", "history_tokens", "clients"))
    trace = replace(work.trace, **none, think_s=0.0, arrival_s=np.arange(count) * 10.0)
    needed = -(-(trace.input_tokens + trace.output_tokens) // work.settings.block_size)
    settings = replace(
        work.settings, num_gpu_blocks=int(needed.max()), chunked_prefill=True, timeout_s=math.inf
    )
    tier = KvTier("host", math.inf, math.inf, 0.0, writes, random.choice(["wait", "before_step", "by_layer"]))
    got = run_engine(plan, trace, settings, prefix_cache="lru", tiers=Tiers.of_plan([tier], plan, settings))
    most = run_engine(plan, trace, replace(settings, num_gpu_blocks=10**6), prefix_cache="lru")
    for name in ("first_us", "last_us", "cached_tokens"):
        np.testing.assert_array_equal(getattr(got, name), getattr(most, name), err_msg=name)
    assert got.tiers.evicted_blocks.tolist() == [0]


@given(seed=st.integers(0, 2**32))
def test_what_is_fetched_was_found_and_no_tier_holds_more_than_it_can(plan, seed):
    work, tiers = made(plan, seed)
    if tiers is None:
        return
    given = Tiers.of_plan(tiers, plan, work.settings)
    got = run_engine(plan, work.trace, work.settings, prefix_cache="lru", tiers=given)
    use, size = got.tiers, work.settings.block_size
    assert (use.found_tokens == use.tokens.sum(0)).all()
    assert (use.fetched_blocks * size >= use.found_tokens).all()
    if not got.preemptions.any():
        assert (use.fetched_blocks * size == use.found_tokens).all()
    assert (use.tokens.sum(1) <= np.maximum(got.cached_tokens, 0)).all()
    assert (use.evicted_blocks <= use.written_blocks).all()
    for tier, peak in zip(tiers, use.peak_blocks, strict=True):
        assert peak * given.block_bytes <= tier.capacity_bytes


# -- by hand: prompts of four blocks of four tokens, of which the GPU has room for two ---------------

FOUR = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks": 8, "block_size": 4}


def talk():
    """Three prompts, each twice, a second apart."""
    ids = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]] * 2
    return Trace(
        np.arange(6.0),
        [14] * 6,
        [1] * 6,
        hash_ids=np.concatenate(ids),
        hash_offsets=np.arange(0, 25, 4),
        hash_block_size=4,
    )


@pytest.mark.parametrize("fetch", ["wait", "before_step", "by_layer"])
def test_a_fetch_takes_its_latency_and_its_bytes_over_the_bandwidth(plan, fetch):
    free, slow = (
        fastroof.simulate(plan, talk(), **FOUR, kv_tiers=[KvTier("host", 1e9, speed, latency, fetch=fetch)])
        for speed, latency in ((math.inf, 0.0), (1e9, 300.0))
    )
    found = [0, 0, 0, 12, 12, 12]
    assert free.requests["cached_tokens"].to_pylist() == slow.requests["cached_tokens"].to_pylist() == found
    fetched = np.array(slow.requests["tokens_from_host"].to_pylist())
    assert (fetched[3:] > 0).all()
    size = block_bytes(plan, slow.settings) // 4
    fetch_ms = np.where(fetched > 0, fetched * size / 1e9 * 1e3 + 0.3, 0.0)
    more_ms = np.subtract(slow.requests["ttft_ms"].to_pylist(), free.requests["ttft_ms"].to_pylist())
    if fetch == "by_layer":
        # all but the first layer's part, while the step of two tokens computes
        expected = fetch_ms / plan.model.num_layers
        assert (more_ms[3:] >= expected[3:] * (1 - 1e-9)).all()
        assert (more_ms <= fetch_ms).all()
    else:
        np.testing.assert_allclose(more_ms, fetch_ms, rtol=1e-9, atol=1e-12)
    tiers = slow.summary()["kv_tiers"]
    assert tiers["tiers"][0]["fetched_bytes"] == fetched.sum() * size
    waits_s = tiers["request_wait_s" if fetch == "wait" else "step_wait_s"]
    np.testing.assert_allclose(waits_s, more_ms.sum() / 1e3, rtol=1e-6)
    assert tiers["gpu_hit_rate"] + tiers["tiers"][0]["hit_rate"] == pytest.approx(36 / 84)


def test_answers_are_found_where_they_are_stored(plan):
    """A second turn's prompt is the first one's prompt and answer; between them others fill the GPU."""
    trace = Trace(
        [0.0, 0.0, 2.0, 4.0],
        [8, 30, 20, 20],
        [9, 2, 1, 1],
        history_tokens=[0, 0, 16, 16],
        parents=[0, 2],
        parent_offsets=[0, 0, 0, 1, 2],
        delay_s=[0.0, 0.0, 1.0, 1.0],
    )
    engine = {**FOUR, "num_gpu_blocks": 10, "max_num_seqs": 1}
    found = {
        words: fastroof.simulate(plan, trace, **engine, kv_tiers=f"host:1GB:1GB/s:{words}")
        .requests["cached_tokens"]
        .to_pylist()[2]
        for words in ("answers", "prompts")
    }
    assert found["answers"] == 16
    assert found["prompts"] == 8


def test_requests_that_overtake_others_in_the_front_end_have_their_own_tokens(h100):
    """Long prompts take longer to tokenize, so that the engine sees another order than clients."""
    rng = np.random.default_rng(1)
    blocks = [
        [1000 * talk + at for at in range(int(rng.integers(1, 20)))] for talk in rng.integers(0, 30, 300)
    ]
    trace = Trace(
        np.sort(rng.uniform(0, 6, 300)),
        [512 * len(one) for one in blocks],
        rng.integers(1, 40, 300),
        hash_ids=np.concatenate(blocks),
        hash_offsets=np.cumsum([0, *map(len, blocks)]),
        hash_block_size=512,
    )
    behind = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")
    sim = fastroof.simulate(behind, trace, num_gpu_blocks=9000, kv_tiers="host:50GB:50GB/s")
    cached, host = (sim.requests[name].to_numpy() for name in ("cached_tokens", "tokens_from_host"))
    assert (np.diff(sim.requests["ttft_ms"].to_numpy()) < 0).any()
    assert host.sum() == sim.summary()["kv_tiers"]["tiers"][0]["found_tokens"] > 0
    assert (host <= cached).all()
    assert (cached < trace.input_tokens).all()


def test_replicas_have_tiers_of_their_own_and_ranks_share_one(plan):
    trace = talk()
    sim = fastroof.simulate(plan, trace, **FOUR, replicas=2, kv_tiers="host:1GB:1GB/s")
    # the third prompt is with the first replica, then with the second
    assert sim.requests["replica"].to_pylist() == [0, 1, 0, 1, 0, 1]
    assert sum(sim.requests["cached_tokens"].to_pylist()) == 0


# -- settings ----------------------------------------------------------------------------------------

ENGINE = EngineSettings(64, 8, 1000, block_size=16)


def test_packaged_tiers_are_what_their_engines_have(plan):
    size = block_bytes(plan, ENGINE)
    (lmcache,) = tiers_of("lmcache-cpu", plan, ENGINE)
    assert (lmcache.capacity_bytes, lmcache.fetch, lmcache.stores_answers) == (
        5 * 2**30,
        "before_step",
        False,
    )
    (hicache,) = tiers_of("sglang-hicache", plan, ENGINE)
    assert (hicache.capacity_bytes, hicache.fetch) == (2 * 1000 * size, "by_layer")
    host, store = tiers_of("vllm-offloading:200GB,mooncake-store:2TB:write_through", plan, ENGINE)
    assert (host.name, host.capacity_bytes, host.bytes_per_s, host.fetch) == ("host", 200e9, 54e9, "wait")
    assert (store.name, store.capacity_bytes, store.bytes_per_s) == ("remote", 2e12, 7e9)
    for name, values in named_tiers().items():
        assert values["source"], name
        (tier,) = tiers_of(f"{name}:1GiB:2MB/s:3ms", plan, ENGINE)
        assert (tier.capacity_bytes, tier.bytes_per_s, tier.latency_us) == (2**30, 2e6, 3000.0)


def test_packaged_tiers_are_of_all_gpus_and_each_scheduler_has_its_part(h100):
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, tp=2, dp=2, engine="sglang")
    token_bytes = 32 * 8 * 128 * 2 * 2
    hicache, mooncake = tiers_of("sglang-hicache,mooncake-store:2TB", plan, ENGINE)
    assert hicache.capacity_bytes == 2 * plan.layout.dp * 1000 * 16 * token_bytes
    assert (hicache.bytes_per_s, mooncake.bytes_per_s) == (54e9 * 4, 7e9)
    blocks, block_us = Tiers.of_plan((hicache,), plan, ENGINE).rows[:2]
    assert blocks == 2 * 1000
    assert block_us == pytest.approx(16 * token_bytes / (54e9 * 2) * 1e6)
    (lmcache,) = tiers_of("lmcache-cpu", plan, ENGINE)
    assert (lmcache.capacity_bytes, lmcache.bytes_per_s) == (5 * 2**30 * 4, 54e9 * 4)


@pytest.mark.parametrize("layout", [{"tp": 4}, {"dp": 2}, {"tp": 2, "dp": 2}], ids=str)
def test_each_gpu_has_its_own_link_to_its_host(h100, layout):
    wide = fastroof.compile_plan("llama-3.1-8b", "h100", h100, **layout, engine="kernels")
    gpus = wide.layout.world_size
    for name in ("lmcache-cpu", "vllm-offloading:200GB", "sglang-hicache"):
        assert tiers_of(name, wide, ENGINE)[0].bytes_per_s == gpus * 54e9
    assert tiers_of("lmcache-cpu", wide, ENGINE)[0].capacity_bytes == gpus * 5 * 2**30
    # a store elsewhere has one link for all, and so has a given bandwidth
    for name, bytes_per_s in (("mooncake-store:2TB", 7e9), ("lmcache-cpu:9GB/s", 9e9)):
        assert tiers_of(name, wide, ENGINE)[0].bytes_per_s == bytes_per_s


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hots", "unknown KV tier 'hots'; .*host:200GB:50GB/s"),
        ("vllm-offloading", r"needs a size \(200GB\)"),
        ("host:1GB", r"needs a bandwidth \(50GB/s\)"),
        ("lmcache-disk:1TB", "needs a bandwidth"),
        ("host:1GB:1GB/s:soon", "'soon' in KV tier .* is not a size"),
        ("host:1:1GB/s", "'1' in KV tier"),
        ("host:1GB:1GB/s,host:2GB:1GB/s", "must have different names, got host, host"),
        (
            "a:1GB:1GB/s,b:1GB:1GB/s:write_back",
            r"must come before .* got a \(write_through\), b \(write_back\)",
        ),
        (",".join(f"t{i}:1GB:1GB/s" for i in range(5)), "has 5 tiers; there are at most 4"),
        ("host:1GB:1GB/s,", "a KV tier must be a name"),
        ("Host:1GB:1GB/s", "lower-case letters"),
        ("host:1GB:0B/s", "bytes_per_s of KV tier host must be a number from 1 to"),
        (3, "kv_tiers must be text or a list of KvTier"),
        ([None], "or a KvTier, got None"),
    ],
)
def test_invalid_tiers_are_refused(plan, given, message):
    with pytest.raises(SimulationError, match=message):
        fastroof.simulate(plan, talk(), **FOUR, kv_tiers=given)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes of KV tier host"),
        ({"capacity_bytes": math.nan}, "capacity_bytes"),
        ({"bytes_per_s": "1"}, "bytes_per_s"),
        ({"latency_us": math.inf}, "latency_us"),
        ({"writes": "back"}, "writes must be one of write_through, write_back"),
        ({"fetch": None}, "fetch must be one of wait, before_step, by_layer"),
        ({"stores_answers": 1}, "stores_answers must be true or false"),
        ({"writes": "write_back", "stores_answers": False}, "leave stores_answers on"),
    ],
)
def test_invalid_attributes_of_a_tier_are_refused(words, message):
    with pytest.raises(SimulationError, match=message):
        KvTier(**{"name": "host", "capacity_bytes": 1e9, "bytes_per_s": 1e9, **words})


def test_tiers_need_a_simulated_prefix_cache(plan):
    with pytest.raises(SimulationError, match='give prefix_cache="lru"'):
        fastroof.simulate(plan, Trace([0.0], [8], [2]), **FOUR, kv_tiers="host:1GB:1GB/s")


def test_a_tier_that_gets_more_than_its_link_carries_is_a_warning(plan):
    trace = Trace(np.zeros(40), [60] * 40, [2] * 40)
    sim = fastroof.simulate(
        plan, trace, **FOUR | {"num_gpu_blocks": 99}, prefix_cache="lru", kv_tiers="disk:1TB:1KB/s"
    )
    assert any("KV tier disk gets" in words for words in sim.summary()["warnings"])
    # each of two replicas has a link, which half of what all write passes
    two = {**FOUR, "num_gpu_blocks": 99, "prefix_cache": "lru", "replicas": 2}
    seen = fastroof.simulate(plan, trace, **two, kv_tiers=[KvTier("disk", 1e12, math.inf)]).summary()
    rate = seen["kv_tiers"]["tiers"][0]["written_bytes"] / seen["duration_s"]
    for share, is_too_much in ((0.6, False), (0.4, True)):
        sim = fastroof.simulate(plan, trace, **two, kv_tiers=[KvTier("disk", 1e12, share * rate)])
        assert any("KV tier disk gets" in words for words in sim.summary()["warnings"]) is is_too_much
