"""Engines that run prompts first: estimates against a simulation, and how profiles or callers select it."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pytest

import fastroof
from fastroof import serving
from fastroof.errors import BatchError
from tests.reference.prefill_first import simulate

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")


@pytest.fixture(scope="module")
def plan():
    tables = fastroof.load_tables("h100")
    return fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine="sglang", front_end=0)


@pytest.fixture(scope="module")
def simulated(plan):
    """Run the simulation of a plan, each distinct step timed once."""

    @cache
    def prompts_us(chunks):
        return float(plan.step_us(fastroof.StepBatch.from_requests([list(chunks)]))[0])

    @cache
    def decodes_us(batch, kv_len):
        return float(plan.decode_us(batch, kv_len))

    def run(isl, osl, clients, arrivals, **options):
        think_us = decodes_us(clients, isl + osl // 2) if arrivals == "random" else 0.0
        return simulate(
            lambda chunks: prompts_us(tuple(chunks)),
            # lengths a few tokens apart are one
            lambda batch, kv_len: decodes_us(batch, max(kv_len // 8 * 8, 1)),
            isl, osl, clients, think_us=think_us, **options,
        )  # fmt: skip

    return run


SIZES = [(1024, 128, 4), (1024, 128, 32), (1024, 512, 64), (3000, 64, 16), (8192, 128, 8), (20_000, 100, 4)]
BENCHES = {
    # equal lengths go on as they began; those that differ come apart, and are anywhere in the end
    "equal": ({"length_spread": 0.0, "requests_per_client": 5, "counted": slice(1, 4)}, {"length_spread": 0}),
    "bench": (
        {"length_spread": 0.2, "requests_per_client": 10},
        {"length_spread": 0.2, "requests_per_client": 10},
    ),
    "steady": (
        {"length_spread": 0.2, "requests_per_client": 45, "counted": slice(30, 40)},
        {"length_spread": 0.2},
    ),
}
TTFT_TOLERANCE = {"equal": 0.1, "bench": 0.2, "steady": 0.15}


@pytest.mark.parametrize("arrivals", ["closed", "random"])
@pytest.mark.parametrize(
    ("bench", "isl", "osl", "clients"),
    # forty requests of each of many clients take long
    [(bench, *sizes) for bench in BENCHES for sizes in SIZES if bench != "steady" or sizes[1] < 512],
)
def test_estimates_are_near_a_simulation(plan, simulated, bench, isl, osl, clients, arrivals):
    run, wanted = BENCHES[bench]
    seen = simulated(isl, osl, clients, arrivals, **run)
    got = estimate(
        plan, isl, osl, clients, max_kv_tokens=2e6, arrivals=arrivals, async_scheduling=False, **wanted
    )
    assert got.tpot_ms * 1e3 == pytest.approx(seen.tpot_us, rel=0.06)
    assert got.ttft_ms * 1e3 == pytest.approx(seen.ttft_us, rel=TTFT_TOLERANCE[bench])


@pytest.mark.parametrize("arrivals", ["closed", "random"])
@pytest.mark.parametrize(("isl", "osl", "clients"), [(1024, 256, 4), (1024, 256, 32), (300, 512, 16)])
def test_an_engine_that_looks_seldom_is_simulated_too(plan, simulated, isl, osl, clients, arrivals):
    run = {"length_spread": 0.2, "requests_per_client": 25, "counted": slice(14, 20), "looks": 20}
    seen = simulated(isl, osl, clients, arrivals, **run)
    got = estimate(
        plan, isl, osl, clients, max_kv_tokens=2e6, wait_steps=20, arrivals=arrivals, async_scheduling=False
    )
    assert got.tpot_ms * 1e3 == pytest.approx(seen.tpot_us, rel=0.06)
    assert got.ttft_ms * 1e3 == pytest.approx(seen.ttft_us, rel=0.15)


def test_mixing_prompts_in_is_another_answer(plan):
    """What waves do: first tokens come later, the others sooner, and throughput stays."""
    sizes = (1024, 128, 64)
    waves = estimate(plan, *sizes, length_spread=0)
    apart = estimate(plan, *sizes, length_spread=0.2)
    assert waves.ttft_ms > 5 * apart.ttft_ms
    assert waves.tpot_ms < apart.tpot_ms
    assert waves.tokens_per_s_per_gpu == pytest.approx(apart.tokens_per_s_per_gpu, rel=0.1)
    mixed = estimate(plan, *sizes, order="mixed")
    assert mixed.mixed_step_us > mixed.decode_step_us
    # a mixed schedule keeps groups of equal lengths together, and the order is the engine's own
    assert estimate(plan, *sizes, order="mixed", length_spread=0.8).tpot_ms == mixed.tpot_ms
    train = estimate(plan, *sizes, order="mixed", length_spread=0)
    assert train.ttft_ms > 2 * mixed.ttft_ms
    assert train.tpot_ms < mixed.tpot_ms
    assert estimate(plan, *sizes, order="prefill_first").tpot_ms == apart.tpot_ms


def test_decodes_leave_the_budget_to_prompts(plan):
    seen = estimate(plan, 64, 500, 300, max_num_batched_tokens=128)
    assert seen.effective_concurrency == 300
    assert estimate(plan, 64, 500, 300, max_num_batched_tokens=128, order="mixed").effective_concurrency < 130


def test_an_invalid_spread_and_an_unknown_order_are_refused(plan):
    for spread in (-0.1, float("nan"), "wide"):
        with pytest.raises(BatchError, match="length_spread must be a number of at least 0"):
            estimate(plan, 64, 64, 1, length_spread=spread)
    with pytest.raises(BatchError, match=r"length_spread must be below 1, got 1\.0"):
        estimate(plan, 64, 64, 1, length_spread=1.0)
    with pytest.raises(BatchError, match="order must be one of mixed, prefill_first, got 'decodes'"):
        estimate(plan, 64, 64, 1, order="decodes")


def test_more_time_between_starts_brings_clients_apart(plan):
    runs = np.array([estimate(plan, 1024, 128, 64, requests_per_client=r).ttft_ms for r in (1, 3, 10, 1000)])
    assert (np.diff(runs) < 0).all()
    assert runs[-1] == pytest.approx(estimate(plan, 1024, 128, 64).ttft_ms, rel=0.2)
