"""Replicas over pools of blocks: each is an engine by itself, and a router that knows what they hold."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError
from fastroof.simulation import Fleet, Pool
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.pools import POOLED_ROUTINGS
from fastroof.simulation.settings import EngineSettings
from tests.reference.made_fleets import prove, run_replicas
from tests.reference.made_prefixes import made_prefixes

run_lru = partial(run_engine, prefix_cache="lru")
run_fleet = partial(run_replicas, prefix_cache="lru")


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, max_num_seqs=256, engine="kernels"
    )


def an_open_loop(seed, most=40):
    """A workload whose requests all have room and arrive at times of their own."""
    work = made_prefixes(Random(seed), most)
    size, trace = work.settings.block_size, work.trace
    needed = -(-(trace.input_tokens + trace.output_tokens) // size)
    blocks = max(work.settings.num_gpu_blocks, int(needed.max()))
    settings = replace(work.settings, num_gpu_blocks=blocks, chunked_prefill=True)
    names = ("parents", "parent_offsets", "delay_s", "history_tokens", "clients")
    return replace(trace, **dict.fromkeys(names), think_s=0.0), settings


def part_of(trace, which):
    """The requests of a trace that one replica has."""
    more = {}
    if trace.hash_ids is not None:
        of_each = np.split(trace.hash_ids, trace.hash_offsets[1:-1])
        ids = [of_each[i] for i in np.flatnonzero(which)]
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids])])
        more = {
            "hash_ids": np.concatenate(ids),
            "hash_offsets": offsets,
            "hash_block_size": trace.hash_block_size,
        }
    rows = (trace.arrival_s, trace.input_tokens, trace.output_tokens, trace.cached_tokens)
    return Trace(*(row[which] for row in rows), **more)


@pytest.mark.loops
@given(seed=st.integers(0, 2**32), router=st.sampled_from(POOLED_ROUTINGS), replicas=st.integers(2, 4))
def test_each_replica_is_an_engine_of_its_requests(plan, seed, router, replicas):
    trace, settings = an_open_loop(seed, most=20)
    got = run_fleet(plan, trace, settings, replicas, router, seed=seed)
    evictions = found_again = 0
    for one in range(replicas):
        which = got.replica == one
        if not which.any():
            continue
        alone = run_lru(plan, part_of(trace, which), settings)
        for name in ("first_us", "last_us", "preemptions", "status", "cached_tokens"):
            np.testing.assert_array_equal(getattr(got, name)[which], getattr(alone, name), err_msg=name)
        evictions += alone.counters["evictions"]
        found_again += alone.counters["found_again_tokens"]
    assert got.counters["found_again_tokens"] == found_again
    if settings.num_gpu_blocks < 200:
        # else a pool of few requests has fewer
        assert got.counters["evictions"] >= evictions
    if router == "round_robin":
        assert (got.replica == np.arange(len(trace)) % replicas).all()


@pytest.mark.loops
def test_fleets_find_what_naive_ones_do() -> None:
    """Replicas and their ranks, open loops, clients and sessions: every time, and every token found."""
    prove("cache ranks", range(150), least=16)


def test_conversations_find_more_where_their_prefixes_are(plan):
    """30 conversations of 8 turns over 4 replicas, none of which has room for all."""
    turns, talks = 8, 30
    rng = np.random.default_rng(3)
    arrivals, inputs, ids = [], [], []
    for talk in range(talks):
        at_s = rng.uniform(0, 20)
        for turn in range(turns):
            arrivals.append(at_s)
            inputs.append(512 * (turn + 1) + 100)
            ids.append([100 * talk + i for i in range(turn + 1)] + [-1 - 100 * talk - turn])
            at_s += rng.uniform(5, 10)
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in ids])])
    trace = Trace(
        arrivals,
        inputs,
        [50] * len(inputs),
        hash_ids=np.concatenate(ids),
        hash_offsets=offsets,
        hash_block_size=512,
    )
    settings = EngineSettings(2048, 64, 3000)
    found = {
        router: run_fleet(plan, trace, settings, 4, router).counters["found_tokens"]
        for router in ("round_robin", "least_outstanding", "prefix_aware")
    }
    # of what one cache without a limit would find
    most = talks * sum(512 * turn for turn in range(turns))
    assert found["prefix_aware"] > 0.8 * most
    assert max(found["round_robin"], found["least_outstanding"]) < 0.5 * most


@pytest.mark.parametrize(
    ("replicas", "router", "more", "message"),
    [
        (0, "round_robin", {}, "replicas"),
        (2, "nearest", {}, "router must be one of round_robin, least_outstanding"),
    ],
)
def test_invalid_fleets_are_refused(plan, replicas, router, more, message):
    trace = Trace([0.0, 0.0], [8, 8], [2, 2], **more)
    with pytest.raises(SimulationError, match=re.escape(message)):
        run_fleet(plan, trace, EngineSettings(64, 8, 100), replicas, router)


def test_requests_without_room_are_sent_nowhere(plan):
    trace = Trace([0.0, 0.0, 0.0], [8, 800, 8], [2, 2, 2])
    got = run_fleet(plan, trace, EngineSettings(64, 8, 10), 2)
    # the router cannot know: the turn of the second is taken
    assert got.replica.tolist() == [0, -1, 0]
    assert got.cached_tokens.tolist() == [0, -1, 0]


def test_prefill_engines_of_pools_find_prefixes(plan):
    """A prefill engine finds what it would by itself with one output token each; decode engines need none."""
    trace, settings = an_open_loop(5, most=40)
    assert trace.hash_ids is not None
    pool = {"num_gpu_blocks": 1000, "block_size": settings.block_size, "max_num_batched_tokens": 256}
    sim = fastroof.simulate(Fleet([Pool(plan, **pool), Pool(plan, 2, **pool)]), trace)
    one = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
    alone = fastroof.simulate(plan, one, **pool)
    assert sim.requests["cached_tokens"].equals(alone.requests["cached_tokens"])
    assert sim.summary()["prefix_cache"] == alone.summary()["prefix_cache"]
    assert sim.summary()["prefix_cache"]["found_tokens"] > 0
    pools = [Pool(plan, prefix_cache="given", **pool), Pool(plan, 2, **pool)]
    given = fastroof.simulate(Fleet(pools), trace)
    assert "prefix_cache" not in given.summary()
