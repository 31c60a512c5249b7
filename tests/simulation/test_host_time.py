"""Prompts whose kernels the host launches one by one, while decodes hide a part of that."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

import fastroof
from fastroof.engines import EngineProfile, Scheduling, StepCosts
from fastroof.plan import StepPlan
from fastroof.serving import estimate
from fastroof.simulation import EngineSettings, Trace, Workload, simulate
from fastroof.simulation.fleet_run import run_engine
from tests.reference.fleet import serve

FLOOR_US = 900.0
"""Of a layer: between the kernels of one prompt and of a full step."""

OVERLAPS = Scheduling(order="prefill_first", async_scheduling=True)


def compiled(layer_us: float, scheduling: Scheduling = OVERLAPS) -> StepPlan:
    engine = EngineProfile(
        "host", costs=StepCosts(step_us=50.0, prefill_floor_layer_us=layer_us), scheduling=scheduling
    )
    tables = fastroof.load_tables("h100")
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", tables, engine=engine, max_num_batched_tokens=4096, max_num_seqs=64
    )


@pytest.fixture(scope="module")
def plans() -> tuple[StepPlan, StepPlan]:
    """A plan with a slow host, and its kernels."""
    return compiled(FLOOR_US), compiled(0.0)


def a_trace(random: Random, clients: int | None) -> Trace:
    count = random.randint(1, 60)
    arrival_s = sorted(random.choice([0.0, random.uniform(0.0, 2.0)]) for _ in range(count))
    return Trace(
        arrival_s=np.zeros(count) if clients else np.array(arrival_s),
        input_tokens=np.array([random.choice([1, 40, 900, 5000]) for _ in range(count)]),
        output_tokens=np.array([random.choice([1, 2, 30, 90]) for _ in range(count)]),
        clients=clients,
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_simulation_is_the_naive_one(plans, seed):
    random = Random(seed)
    host, kernels = plans
    overlaps = random.random() < 0.7
    trace = a_trace(random, random.choice([None, 1, 6, 20]))
    settings = EngineSettings(
        random.choice([1024, 4096]), random.choice([4, 64]), 4000, 16, order="prefill_first",
        async_scheduling=overlaps,
    )  # fmt: skip
    scale = random.choice([1.0, 1.3])
    got = run_engine(host, trace, settings, time_scale=scale)
    floor_us = FLOOR_US * host.model.num_layers
    naive = serve(trace, settings, kernels.step_scalar, time_scale=scale, host_us=floor_us)
    first_us = [request.first_us for request in naive.requests]
    last_us = [request.last_us for request in naive.requests]
    np.testing.assert_allclose(got.first_us, first_us, rtol=1e-12)
    np.testing.assert_allclose(got.last_us, last_us, rtol=1e-12)


def test_a_decode_step_hides_as_much_of_the_host_as_it_takes(plans):
    host, _ = plans
    floor_us = FLOOR_US * host.model.num_layers
    alone = host.step_us(fastroof.StepBatch.from_requests([[(40, 0)]]))[0]
    assert alone == floor_us
    # the second arrives during decodes of the first
    trace = Trace(np.array([0.0, 0.1]), np.array([40, 40]), np.array([90, 2]))
    got = run_engine(
        host, trace, EngineSettings(4096, 64, 4000, 16, order="prefill_first", async_scheduling=True)
    )
    assert got.first_us[0] == floor_us
    decode_us = host.decode_us(1, 60)
    assert got.first_us[1] - 1e5 < floor_us + 2 * decode_us
    apart = run_engine(host, trace, EngineSettings(4096, 64, 4000, 16, order="prefill_first"))
    hidden_us = (apart.last_us[0] - apart.first_us[0]) - (got.last_us[0] - got.first_us[0])
    assert hidden_us == pytest.approx(decode_us, rel=0.02)


@pytest.mark.parametrize("clients", [1, 4, 16, 48])
@pytest.mark.parametrize(("isl", "osl"), [(400, 200), (2000, 100), (300, 40)])
def test_an_estimate_is_near_a_simulation(plans, clients, isl, osl):
    host, kernels = plans
    lengths = [f"uniform:{round(mean / 0.9 * 0.8)}:{round(mean / 0.9)}" for mean in (isl, osl)]
    load = Workload(clients=clients, requests=clients * 40, isl=lengths[0], osl=lengths[1])
    seen = simulate(host, load.trace(), max_num_batched_tokens=4096, max_num_seqs=64).requests
    later = slice(clients * 15, clients * 35)
    tpot_ms = float(np.nanmean(seen.column("tpot_ms").to_numpy()[later]))
    got = estimate(host, isl, osl, clients, 4096, requests_per_client="steady")
    assert got.tpot_ms == pytest.approx(tpot_ms, rel=0.06)
    kernels_ms = estimate(kernels, isl, osl, clients, 4096, requests_per_client="steady").tpot_ms
    apart = compiled(FLOOR_US, replace(OVERLAPS, async_scheduling=False))
    apart_ms = estimate(apart, isl, osl, clients, 4096, requests_per_client="steady").tpot_ms
    if clients > 1 and isl <= 400:
        # without the decodes that hide a part of it, the host would take longer
        assert kernels_ms < got.tpot_ms < apart_ms
    else:
        # of one client none of it is between two tokens, and long prompts take their kernels' time
        assert kernels_ms <= got.tpot_ms <= apart_ms
