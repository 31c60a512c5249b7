"""Tiers of KV cache: the naive engine to the last bit, limits, conservation, settings."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError
from fastroof.simulation.engine import run_engine
from fastroof.simulation.kv_tiers import KvTier, Tiers, block_bytes, named_tiers, tiers_of
from fastroof.simulation.replicas import run_replicas
from fastroof.simulation.settings import EngineSettings
from tests.reference.kv_tiers import Tier, TieredScheduler, made_tiers
from tests.reference.made_prefixes import made_prefixes
from tests.reference.scheduler import REJECTED, serve


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, max_tokens=2048, max_seqs=256, engine="kernels"
    )


def naive_tiers(tiers, size):
    """Tiers of blocks of a size as the naive engine has them."""
    return [
        Tier(tier, int(tier.capacity_bytes // size), size / tier.bytes_per_s * 1e6) for tier in tiers
    ]


def as_naive(plan, work, given):
    """Every time, count and token found as the naive engine has them; returns the outcomes."""
    tiers = Tiers.of_plan(given, plan, work.settings)
    naive_of = naive_tiers(given, tiers.block_bytes)
    scheduler = TieredScheduler(work.settings, work.trace, naive_of, plan.model.num_layers)
    naive = serve(
        work.trace, work.settings, plan.step_scalar, time_scale=work.time_scale, scheduler=scheduler
    )
    got = run_engine(
        plan, work.trace, work.settings, time_scale=work.time_scale, prefix_cache="lru", tiers=tiers
    )
    np.testing.assert_array_equal(got.status, [request.status for request in naive.requests])
    arrived = got.status != REJECTED
    arrival_us = np.array([request.arrival_us for request in naive.requests])
    np.testing.assert_array_equal(got.arrival_us[arrived], arrival_us[arrived])
    found = [scheduler.first_found.get(request.index, -1) for request in naive.requests]
    assert got.cached_tokens.tolist() == found
    for name in ("first_us", "last_us", "preemptions"):
        of_naive = [getattr(request, name) for request in naive.requests]
        np.testing.assert_array_equal(getattr(got, name), of_naive, err_msg=name)
    assert got.counters["steps"] == len(naive.steps)
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


def can_run(work):
    """Whether any of a workload's requests has room."""
    settings, trace = work.settings, work.trace
    tokens = trace.input_tokens + trace.output_tokens
    fits = -(-tokens // settings.block_size) <= settings.num_gpu_blocks
    if not settings.chunked_prefill:
        fits &= tokens - 1 <= settings.max_num_batched_tokens
    return fits.any()


def made(plan, seed, most=25):
    """A workload and tiers, drawn by a seed; the tiers None if nothing of it has room."""
    random = Random(seed)
    work = made_prefixes(random, most)
    tiers = made_tiers(random, block_bytes(plan, work.settings))
    return work, tiers if can_run(work) else None


@pytest.mark.loops
@given(seed=st.integers(0, 2**32))
def test_the_loop_is_the_naive_engine_to_the_last_bit(plan, seed):
    work, tiers = made(plan, seed)
    if tiers is not None:
        as_naive(plan, work, tiers)
