"""Engines with a prefix cache: the naive one to the last bit, what must hold, what engines do."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError, TraceError
from fastroof.simulation.fleet_run import run_engine, served_by
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.settings import EngineSettings
from tests.reference.block_pool import PooledScheduler
from tests.reference.fleet import serve
from tests.reference.made_prefixes import MadePrefixes, made_prefixes
from tests.reference.made_workloads import sampled
from tests.reference.scheduler import REJECTED
from tests.simulation.test_exactness import assert_same_requests

run_lru = partial(run_engine, prefix_cache="lru")

PLANS = {"whole": "llama-3.1-8b", "windowed": "gpt-oss-20b"}


@pytest.fixture(scope="module")
def plans(h100):
    return {
        kind: fastroof.compile_plan(
            model, "h100", h100, max_num_batched_tokens=2048, max_num_seqs=256, engine="kernels"
        )
        for kind, model in PLANS.items()
    }


def assert_as_naive(plan, work):
    """Every time, count and token found of a workload as the naive engine has them; returns the outcomes."""
    scheduler = PooledScheduler(work.settings, work.trace)
    naive = serve(
        work.trace, work.settings, plan.step_scalar, time_scale=work.time_scale, scheduler=scheduler
    )
    got = run_lru(plan, work.trace, work.settings, time_scale=work.time_scale)
    assert_same_requests(naive.requests, got)
    found = [scheduler.first_found.get(request.index, -1) for request in naive.requests]
    assert got.cached_tokens.tolist() == found
    assert got.gaps.sum() == len(naive.gaps_us)
    # a token that a client got is a request's first one, or comes after a gap; steps made it, and those that
    # were for requests taken away meanwhile
    tokens, made = np.isfinite(got.first_us).sum() + len(naive.gaps_us), got.series[:, -1].sum()
    assert made >= tokens
    assert made == tokens or got.preemptions.any() or np.isnan(got.last_us[got.status != REJECTED]).any()
    assert got.counters["steps"] == len(naive.flights)
    assert got.counters["evictions"] == scheduler.pool.evictions
    assert got.counters["found_tokens"] == sum(tokens for tokens in found if tokens > 0)
    assert got.counters["found_again_tokens"] == scheduler.found_again_tokens
    # no request holds a block any more
    assert naive.free_blocks == work.settings.num_gpu_blocks
    return got


@pytest.mark.loops
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(PLANS)))
def test_the_loop_is_the_naive_engine_to_the_last_bit(plans, seed, kind):
    work = made_prefixes(Random(seed), most=25)
    if can_run(work):
        assert_as_naive(plans[kind], work)


@pytest.mark.loops
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(sorted(PLANS)), interval=st.sampled_from([2, 3, 9]))
def test_prompts_that_wait_are_those_of_the_naive_engine(plans, seed, kind, interval):
    work = made_prefixes(Random(seed), most=25)
    if work.settings.order == "mixed":
        settings = replace(work.settings, prefill_schedule_interval=interval)
    else:
        settings = replace(
            work.settings, prefill_decode_interval=interval, min_free_slots_delay=interval // 2
        )
    if can_run(work):
        assert_as_naive(plans[kind], work._replace(settings=settings))


def can_run(work):
    """Whether any of a workload's requests has room."""
    settings, trace = work.settings, work.trace
    tokens = trace.input_tokens + trace.output_tokens
    fits = -(-tokens // settings.block_size) <= settings.num_gpu_blocks
    if not settings.chunked_prefill:
        fits &= tokens - 1 <= settings.max_num_batched_tokens
    return fits.any()


@pytest.mark.slow
@pytest.mark.loops
def test_every_line_of_the_loops_is_the_naive_engine(plans):
    """With the JIT off too: requests are given up while they run, wait, or have their last token made."""
    timed_out = preemptions = 0
    for seed in range(220):
        work = made_prefixes(Random(seed), most=25)
        if can_run(work):
            got = assert_as_naive(plans["whole"], work)
            timed_out += int((got.status == 1).sum())
            preemptions += int(got.preemptions.sum())
    assert timed_out > 200
    assert preemptions > 100


@pytest.mark.loops
def test_a_last_block_that_is_found_is_computed_in_place(plans):
    """Prompts that end with a block, many of which are equal, and a cache that is too small for all."""
    found = evictions = 0
    for seed in (seeds := sampled(range(60))):
        random = Random(seed)
        blocks = [random.randint(1, 3) for _ in range(40)]
        ids = [list(range(count)) if random.random() < 0.8 else [9, 8, 7][:count] for count in blocks]
        outputs = [random.randint(1, 12) for _ in blocks]
        arrivals = np.cumsum([random.choice([0.0, 0.004, 0.03]) for _ in blocks]).tolist()
        trace = shared([4 * count for count in blocks], ids, outputs, arrivals)
        settings = replace(FOUR, num_gpu_blocks=random.randint(7, 14), max_num_seqs=random.randint(1, 4))
        got = assert_as_naive(plans["whole"], MadePrefixes(trace, settings, 1.0))
        found += got.counters["found_tokens"]
        evictions += got.counters["evictions"]
    assert min(found, evictions) > 17 * len(seeds)


@pytest.mark.loops
@pytest.mark.parametrize(
    ("inputs", "outputs", "num_blocks", "timeout_ms"),
    [
        ([2, 4], [3, 1], 6, 2),
        ([5, 1, 1, 1, 1], [5, 3, 4, 2, 1], 13, 11),
        ([4, 4, 5, 1], [1, 2, 5, 4], 12, 37),
    ],
)
def test_a_last_token_is_too_late_for_who_has_lost_its_blocks(plans, inputs, outputs, num_blocks, timeout_ms):
    """Who only awaits its last token is preempted, and gives up before it comes: of a prompt, a decode."""
    for admits_whole in (False, True):
        settings = EngineSettings(16, 8, num_blocks, 1, async_scheduling=True, timeout_s=timeout_ms * 1e-3)
        settings = replace(settings, admit_whole_prompt=admits_whole)
        trace = Trace([0.0] * len(inputs), inputs, outputs)
        got = assert_as_naive(plans["whole"], MadePrefixes(trace, settings, 1.0))
    assert (got.status == 1).any()


@pytest.mark.loops
@pytest.mark.parametrize(
    ("order", "inputs", "outputs", "num_blocks", "block_size"),
    [
        ("prefill_first", [5, 1, 5, 2], [6, 6, 8, 4], 7, 4),
        ("mixed", [3, 5, 5, 2, 3, 9], [3, 6, 3, 6, 10, 7], 9, 3),
    ],
)
def test_blocks_are_taken_before_the_next_request_is_preempted(
    plans, order, inputs, outputs, num_blocks, block_size
):
    """Two are preempted in a step: what the first one had is gone, though the second one's are blank."""
    settings = EngineSettings(64, 8, num_blocks, block_size, order=order, async_scheduling=True)
    got = assert_as_naive(
        plans["whole"], MadePrefixes(Trace([0.0] * len(inputs), inputs, outputs), settings, 1.0)
    )
    assert got.preemptions.sum() > 1


@pytest.mark.slow
def test_thousands_of_workloads_are_those_of_the_naive_engine(plans):
    counts = {"preemptions": 0, "evictions": 0, "found_tokens": 0, "found_again_tokens": 0}
    timed_out = 0
    for seed in range(1200):
        random = Random(seed)
        work = made_prefixes(random)
        if can_run(work):
            got = assert_as_naive(plans[random.choice(sorted(PLANS))], work)
            counts = {name: count + got.counters[name] for name, count in counts.items()}
            timed_out += int((got.status == 1).sum())
    # so that the comparison is not empty
    assert counts["preemptions"] > 2500
    assert counts["evictions"] > 200_000
    assert counts["found_tokens"] > 30_000
    assert counts["found_again_tokens"] > 20_000
    assert timed_out > 3000


# -- what vLLM does, by hand: blocks of 4 tokens, 100 us a step and 1 us a new token ---------------

FOUR = EngineSettings(64, 8, 100, block_size=4)


def shared(inputs, ids, outputs=None, arrivals=None, **more):
    """A trace whose prompts have these blocks of four tokens."""
    offsets = np.concatenate([[0], np.cumsum([len(of_one) for of_one in ids])])
    return Trace(
        arrivals or [float(i) for i in range(len(inputs))],
        inputs,
        outputs or [1] * len(inputs),
        hash_ids=np.concatenate(ids),
        hash_offsets=offsets,
        hash_block_size=4,
        **more,
    )


def test_whole_blocks_are_found_and_never_the_last_token(plans):
    trace = shared([10, 10, 8, 9, 7], [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 4], [1, 5]])
    got = run_lru(plans["whole"], trace, FOUR)
    # of 8 tokens the last block is computed again: its last token gives the next one
    assert got.cached_tokens.tolist() == [0, 8, 4, 8, 4]
    assert got.counters["looked_up_tokens"] == 44
    assert got.counters["found_tokens"] == 24


def test_a_prompt_of_the_same_step_is_found(plans):
    trace = shared([10, 10], [[1, 2, 3], [1, 2, 3]], arrivals=[0.0, 0.0])
    got = run_lru(plans["whole"], trace, FOUR)
    assert got.cached_tokens.tolist() == [0, 8]
    assert got.counters["steps"] == 1


def test_the_tail_of_what_was_used_first_goes_first(plans):
    # of 8 blocks the first two prompts take 4 each, of which 3 can be found: free are 2 blank ones, and 2 1 0
    # of the first, 2 1 0 of the second. The third takes the blank ones and 2 of the first
    first = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]
    few = replace(FOUR, num_gpu_blocks=8)
    # so of the first prompt 1 and 0 are found; for the rest there is a blank one, and 2 of the second goes
    again = shared([14, 14, 11, 14, 14], [*first, [1, 2, 3, 4], [5, 6, 7, 8]])
    assert run_lru(plans["whole"], again, few).cached_tokens.tolist() == [0, 0, 0, 8, 8]
    # or all of the second are found, and the blank one is enough
    again = shared([14, 14, 11, 14, 14], [*first, [5, 6, 7, 8], [1, 2, 3, 4]])
    assert run_lru(plans["whole"], again, few).cached_tokens.tolist() == [0, 0, 0, 12, 8]


def test_a_preempted_request_finds_its_own_blocks_and_output(plans):
    # each has 2 blocks, the 5th goes to the first: the second gives 8 tokens back, one of which it has sent.
    # Before it comes back the first takes another block: the one that was given back first, its second
    trace = Trace([0.0, 0.0], [7, 7], [9, 9])
    settings = replace(FOUR, num_gpu_blocks=5)
    got = run_lru(plans["whole"], trace, settings)
    without = run_engine(plans["whole"], trace, settings)
    assert got.preemptions.tolist() == without.preemptions.tolist() == [0, 1]
    assert got.counters["found_again_tokens"] == 4
    assert got.counters["prefill_tokens"] == without.counters["prefill_tokens"] - 4
    assert got.last_us[0] == without.last_us[0]


def test_what_is_given_is_found_first_and_their_own_afterwards(plans):
    trace = Trace([0.0, 0.0], [7, 7], [9, 9], [5, 6])
    got = run_lru(plans["whole"], trace, replace(FOUR, num_gpu_blocks=5))
    assert got.cached_tokens.tolist() == [5, 6]
    assert got.preemptions.sum() == 1
    assert got.counters["found_again_tokens"] > 0


# -- agreement ------------------------------------------------------------------------------------


@given(seed=st.integers(0, 2**32))
def test_where_nothing_is_shared_or_preempted_it_is_the_plain_engine(plans, seed):
    work = made_prefixes(Random(seed))
    settings = replace(work.settings, num_gpu_blocks=10_000)
    alone = {"hash_ids": None, "hash_offsets": None, "hash_block_size": 0, "history_tokens": None}
    trace = replace(work.trace, **alone)
    plain = run_engine(plans["whole"], trace, settings)
    if can_run(work._replace(trace=trace, settings=settings)):
        pooled = run_lru(plans["whole"], trace, settings)
        assert not plain.preemptions.any()
        for name in ("arrival_us", "first_us", "last_us", "preemptions", "status", "gaps"):
            np.testing.assert_array_equal(getattr(pooled, name), getattr(plain, name), err_msg=name)
        for name in ("steps", "busy_us", "end_us", "prefill_tokens"):
            assert pooled.counters[name] == plain.counters[name], name
        served = pooled.cached_tokens >= 0
        assert (pooled.cached_tokens[served] == trace.cached_tokens[served]).all()


@given(seed=st.integers(0, 2**32))
def test_more_blocks_than_all_take_change_nothing(plans, seed):
    work = made_prefixes(Random(seed))
    many, most = (replace(work.settings, num_gpu_blocks=blocks) for blocks in (20_000, 2**40))
    if can_run(work._replace(settings=many)):
        got, other = (run_lru(plans["whole"], work.trace, engine) for engine in (many, most))
        np.testing.assert_array_equal(got.last_us, other.last_us)
        assert got.counters["evictions"] == other.counters["evictions"] == 0
        # and it is as good as any cache: nothing is evicted, and no request preempted
        assert got.counters["found_again_tokens"] == 0


def test_requests_without_room_are_left_out(plans):
    trace = shared([40, 10, 10], [list(range(10)), [11, 12, 13], [11, 12, 13]])
    got = run_lru(plans["whole"], trace, replace(FOUR, num_gpu_blocks=8))
    assert got.status.tolist() == [REJECTED, 0, 0]
    assert got.cached_tokens.tolist() == [-1, 0, 8]
    assert math.isnan(got.last_us[0])


def test_the_logs_preempted_requests_find_their_blocks_again(plans, shared_logs):
    """A full engine of requests with prefixes that are given: they end earlier when they find their own."""
    settings = EngineSettings(2048, 128, 1500, async_scheduling=True)
    got = run_lru(plans["whole"], shared_logs, settings)
    without = run_engine(plans["whole"], shared_logs, settings)
    assert got.preemptions.sum() > 20
    assert got.counters["found_again_tokens"] > 5000
    assert (got.last_us - got.arrival_us).mean() < (without.last_us - without.arrival_us).mean()


@pytest.fixture
def shared_logs():
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(0.02, 300))
    prompts, outputs = rng.integers(20, 600, 300), rng.integers(20, 500, 300)
    return Trace(arrivals, prompts, outputs, prompts // 3 // 16 * 16)


@pytest.mark.loops
def test_a_stuck_loop_returns_an_error(plans):
    """Requests without room are left out before; here the first has none, and no request is running."""
    trace, settings = Trace([0.0], [9], [2]), replace(FOUR, num_gpu_blocks=2)
    with pytest.raises(SimulationError, match="no room in an empty engine"):
        served_by([EnginePool(plans["whole"], settings, prefix_cache="lru")], trace)


def test_a_run_answers_what_its_cache_found(plans):
    trace = shared([10, 9, 40, 10], [[1, 2, 3], [1, 2, 4], list(range(20, 30)), [1, 2, 3]])
    engine = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "num_gpu_blocks": 8, "block_size": 4}
    sim = fastroof.simulate(plans["whole"], trace, **engine, prefix_cache="lru", on_too_long="reject")
    assert sim.requests["cached_tokens"].to_pylist() == [0, 8, None, 8]
    cache = sim.summary()["prefix_cache"]
    assert cache["hit_rate"] == 16 / 29
    assert (cache["looked_up_tokens"], cache["found_tokens"], cache["found_again_tokens"]) == (29, 16, 0)
    by_default = fastroof.simulate(plans["whole"], trace, **engine, on_too_long="reject")
    assert by_default.requests.equals(sim.requests)
    given = fastroof.simulate(plans["whole"], trace, **engine, prefix_cache="given", on_too_long="reject")
    assert "cached_tokens" not in given.requests.column_names
    assert "prefix_cache" not in given.summary()
    same = run_lru(plans["whole"], trace, sim.settings)
    np.testing.assert_array_equal(sim.outcomes.last_us, same.last_us)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"prefix_cache": "mru"}, "prefix_cache must be one of auto, given, lru"),
        ({"router": "prefix_aware", "replicas": 2}, "needs a simulated prefix cache"),
    ],
)
def test_an_invalid_cache_is_refused(plans, more, message):
    with pytest.raises(SimulationError, match=message):
        fastroof.simulate(plans["whole"], Trace([0.0], [8], [2]), **more)


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        ({}, {"cached_tokens": [4, 0]}, "hash_ids, by which blocks are found"),
    ],
)
def test_unsupported_simulations_are_refused(plans, settings, more, message):
    trace = replace(shared([10, 10], [[1, 2, 3], [1, 2, 3]]), order=None, **more)
    with pytest.raises(SimulationError, match=message):
        run_lru(plans["whole"], trace, replace(FOUR, **settings))


def test_blocks_that_do_not_make_those_of_the_trace_are_refused(plans):
    with pytest.raises(TraceError, match="block_size must divide that, got 3"):
        run_lru(plans["whole"], shared([10], [[1, 2, 3]]), replace(FOUR, block_size=3))
