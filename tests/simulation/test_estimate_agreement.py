"""The closed form of ``estimate`` against simulated closed loops: one question, answered twice.

A client of these loops sends its next request as its last answer ends, which is when a step ends.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

import fastroof
from fastroof import serving
from fastroof.simulation.fleet_run import run_engine
from tests.reference.made_workloads import a_trace, an_engine

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

BUDGET = 8192
MODES = {
    # engine, and what its scheduler does
    "vllm": ("vllm", {}),
    "trtllm": ("trtllm", {"chunked_prefill": False, "reserve_output": True}),
}
# isl, osl, clients, and tokens of a step
LIGHT = [
    (1024, 128, 2, BUDGET), (1024, 128, 8, BUDGET), (1024, 128, 32, BUDGET), (128, 512, 64, BUDGET),
    (4096, 64, 16, BUDGET), (1024, 128, 32, 2048), (1024, 128, 128, BUDGET), (512, 16, 64, BUDGET),
]  # fmt: skip
CUT = [(4096, 128, 16, 2048), (1024, 128, 64, 1024)]


class Seen(NamedTuple):
    """Means over the requests of a simulation's later rounds, us."""

    ttft_us: float
    tpot_us: float
    cycle_us: float


@pytest.fixture(scope="module")
def plans(h100):
    return {
        engine: fastroof.compile_plan(
            "llama-3.1-8b", "h100", h100, engine=engine, max_num_batched_tokens=BUDGET, front_end=0
        )
        for engine in ("vllm", "trtllm", "sglang")
    }


def simulated(plan, isl, osl, clients, *, spread=1 / 3, rounds=60, think_us=0.0, **engine):
    """Serve clients that begin at once; lengths a third apart have taken them apart after twenty rounds."""
    rng = np.random.default_rng(isl + osl)
    half = spread / (2.0 - spread)
    shape = clients * rounds
    inputs, outputs = (
        np.maximum(1, np.rint(mean * rng.uniform(1.0 - half, 1.0 + half, shape))).astype(np.int32)
        for mean in (isl, osl)
    )
    trace = a_trace(np.zeros(shape), inputs, outputs, clients=clients, think_s=think_us / 1e6)
    got = run_engine(
        plan, trace, an_engine(**{"max_num_seqs": 1024, "max_num_batched_tokens": BUDGET, **engine})
    )
    later = slice(clients * (rounds // 3), clients * (rounds - 2))
    assert not got.status.any()
    ttft_us = (got.first_us - got.arrival_us)[later]
    gaps = (outputs - 1.0)[later]
    cycle_us = (got.last_us - got.arrival_us)[later] + think_us
    tpot_us = ((got.last_us - got.first_us)[later] / np.maximum(gaps, 1.0))[gaps > 0]
    return Seen(
        float(ttft_us.mean()), float(tpot_us.mean()) if len(tpot_us) else math.nan, float(cycle_us.mean())
    )


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("mode", "isl", "osl", "clients", "budget"),
    [(mode, *sizes) for mode in MODES for sizes in (LIGHT + CUT if mode == "vllm" else LIGHT)],
)
def test_estimates_of_closed_loops(plans, mode, is_async, isl, osl, clients, budget):
    engine, settings = MODES[mode]
    got = estimate(plans[engine], isl, osl, clients, budget, max_kv_tokens=1.6e6, async_scheduling=is_async)
    sizes = {"max_num_batched_tokens": budget, **settings}
    seen = simulated(plans[engine], isl, osl, clients, async_scheduling=is_async, **sizes)
    assert got.tpot_ms * 1e3 == pytest.approx(seen.tpot_us, rel=0.03)
    assert got.request_latency_ms * 1e3 == pytest.approx(seen.cycle_us, rel=0.03)
    # where a prompt takes several steps, how long it queues for them is not modelled any closer
    is_cut = (isl, osl, clients, budget) in CUT
    assert got.ttft_ms * 1e3 == pytest.approx(seen.ttft_us, rel=0.2 if is_cut else 0.08)


@pytest.mark.parametrize("interval", [2, 8, 32])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("isl", "osl", "clients"), [(1024, 128, 8), (1024, 128, 32), (128, 512, 64), (4096, 512, 16)]
)
def test_estimates_of_prompts_every_few_steps(plans, isl, osl, clients, interval, is_async):
    given = {"async_scheduling": is_async, "prefill_schedule_interval": interval}
    got = estimate(plans["vllm"], isl, osl, clients, BUDGET, max_kv_tokens=1.6e6, **given)
    seen = simulated(plans["vllm"], isl, osl, clients, **given)
    # where the prompts of an interval nearly fill a step, the engine often goes on without a pause
    is_full = interval * clients * isl / (osl + interval) > 0.75 * BUDGET
    within = 0.05 if is_full else 0.03
    assert got.tpot_ms * 1e3 == pytest.approx(seen.tpot_us, rel=within)
    assert got.request_latency_ms * 1e3 == pytest.approx(seen.cycle_us, rel=within)
    assert got.ttft_ms * 1e3 == pytest.approx(seen.ttft_us, rel=0.08)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("spread", [0.0, 0.2])
@pytest.mark.parametrize(
    ("isl", "osl", "clients"),
    [(1024, 128, 32), (1024, 512, 64), (3000, 64, 16), (8192, 128, 8), (20_000, 100, 4)],
)
def test_estimates_of_prompts_that_run_first(plans, isl, osl, clients, spread, is_async):
    """Equal lengths go in waves, others do not; tolerances are those of the estimate's own simulation."""
    plan = plans["sglang"]
    got = estimate(
        plan, isl, osl, clients, max_kv_tokens=2e6, length_spread=spread, async_scheduling=is_async
    )
    seen = simulated(
        plan, isl, osl, clients, spread=spread, rounds=9 if spread == 0.0 else 60,
        order="prefill_first", async_scheduling=is_async,
    )  # fmt: skip
    assert got.tpot_ms * 1e3 == pytest.approx(seen.tpot_us, rel=0.05)
    assert got.ttft_ms * 1e3 == pytest.approx(seen.ttft_us, rel=0.1)


@pytest.mark.parametrize(
    ("isl", "osl", "room", "reservation"),
    [(1024, 512, 25 * 1536, "full"), (4096, 128, 10 * 4224, "full"), (4096, 128, 25 * 4224, "mean")],
)
def test_estimates_of_clients_that_wait_for_room(plans, isl, osl, room, reservation):
    plan, is_full = plans["vllm"], reservation == "full"
    got = estimate(plan, isl, osl, 64, BUDGET, max_kv_tokens=room, kv_reservation=reservation)
    seen = simulated(plan, isl, osl, 64, num_gpu_blocks=room // 16, reserve_output=is_full)
    assert got.tpot_ms * 1e3 == pytest.approx(seen.tpot_us, rel=0.05)
    assert got.request_latency_ms * 1e3 == pytest.approx(seen.cycle_us, rel=0.05)
    assert got.ttft_ms * 1e3 == pytest.approx(seen.ttft_us, rel=0.25)
