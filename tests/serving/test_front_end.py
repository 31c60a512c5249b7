"""What users see outside the engine: in estimates, simulations, best, capacity and commands by one rule."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fastroof
from fastroof import serving
from fastroof.cli import app
from fastroof.engines import EngineProfile, FrontEnd, engine_names, load_engine
from fastroof.errors import FastroofError, PlanError, SweepError
from fastroof.serving import estimate_disaggregated
from fastroof.simulation import Fleet, Pool
from fastroof.simulation.fleet_run import served_by
from fastroof.simulation.pools import EnginePool
from fastroof.simulation.settings import EngineSettings
from fastroof.sweep import best_deployments, load_spec
from tests.command_line import document as printed
from tests.reference import front_end as naive

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

BUSY = FrontEnd(request_ms=5.0, token_us=9.0, server_ms=6.0)


def plan_with(tables: fastroof.Tables, front_end: FrontEnd, **given: Any) -> fastroof.StepPlan:
    engine = replace(load_engine(given.pop("engine", "vllm")), front_end=front_end)
    return fastroof.compile_plan("llama-3.1-8b", "h100", tables, engine=engine, **given)


@pytest.fixture(scope="module")
def bare(h100: fastroof.Tables) -> fastroof.StepPlan:
    return plan_with(h100, FrontEnd())


@pytest.fixture(scope="module")
def busy(h100: fastroof.Tables) -> fastroof.StepPlan:
    return plan_with(h100, BUSY)


# -- the API server --------------------------------------------------------------------------------


def left_us(plan: fastroof.StepPlan, sent_us: Any, front_end: FrontEnd, prompt: Any = 1) -> Any:
    """When requests reach the engine, by the order of sending."""
    count = len(sent_us)
    trace = fastroof.Trace(np.asarray(sent_us) / 1e6, np.full(count, prompt), np.ones(count, int))
    pool = EnginePool(plan, EngineSettings.of_plan(plan))
    return served_by([pool], trace, front_end=front_end).requests["arrival_us"][0]


@given(st.lists(st.floats(0.0, 5_000.0), min_size=1, max_size=40), st.floats(1.0, 2_000.0))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_shared_thread_is_the_naive_one(
    bare: fastroof.StepPlan, gaps: list[float], takes_us: float
) -> None:
    sent_us = np.cumsum(np.array(gaps))
    found = left_us(bare, sent_us, FrontEnd(server_ms=takes_us / 1e3))
    np.testing.assert_allclose(found, naive.shared_ends(sent_us.tolist(), takes_us), rtol=1e-7, atol=1e-6)
    # in order, none faster than alone, and the thread does one request's work at a time
    assert (np.diff(found) >= 0.0).all()
    assert (found >= (sent_us + takes_us) * (1.0 - 1e-9)).all()


def test_requests_that_arrive_together_leave_together(bare: fastroof.StepPlan) -> None:
    assert left_us(bare, np.zeros(1000), FrontEnd(server_ms=6.0)) == pytest.approx(6e6)


def test_alone_a_request_takes_its_own_time(bare: fastroof.StepPlan) -> None:
    sent_us = np.arange(50) * 7_000.0
    assert left_us(bare, sent_us, FrontEnd(server_ms=6.0)) == pytest.approx(sent_us + 6_000.0)


# -- estimates -------------------------------------------------------------------------------------


def test_ttft_is_what_clients_see(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    isl, osl, clients = [100, 1000, 4000], 500, [1, 8, 64]
    # on their way requests lose touch with the end of a step
    engine, seen = estimate(bare, isl, osl, clients, arrivals="random"), estimate(busy, isl, osl, clients)
    added_ms = BUSY.request_ms + BUSY.server_ms + BUSY.token_us * np.array(isl) / 1e3
    np.testing.assert_allclose(seen.ttft_ms, engine.ttft_ms + added_ms, rtol=1e-9)
    np.testing.assert_array_equal(seen.tpot_ms, engine.tpot_ms)
    np.testing.assert_allclose(seen.request_latency_ms, engine.request_latency_ms + added_ms, rtol=1e-9)
    rate = engine.tokens_per_s_per_gpu * engine.request_latency_ms / seen.request_latency_ms
    np.testing.assert_allclose(seen.tokens_per_s_per_gpu, rate, rtol=1e-9)
    np.testing.assert_array_equal(seen.decode_step_us, engine.decode_step_us)


def test_clients_outside_the_engine_do_not_load_it(busy: fastroof.StepPlan, bare: fastroof.StepPlan) -> None:
    # 4 output tokens: a large share of a request is outside
    seen, alone = estimate(busy, 500, 4, 16), estimate(bare, 500, 4, 16)
    inside = seen.tokens_per_s_per_gpu / 4 * (seen.request_latency_ms - 15.5) / 1e3
    assert inside < 16
    assert seen.tpot_ms < alone.tpot_ms
    assert seen.tokens_per_s_per_gpu < alone.tokens_per_s_per_gpu


@pytest.mark.parametrize(("isl", "osl", "clients"), [(100, 4, 200), (64, 2, 1000), (500, 100, 16)])
def test_an_api_server_limits_the_rate(busy: fastroof.StepPlan, isl: int, osl: int, clients: int) -> None:
    seen = estimate(busy, isl, osl, clients)
    requests_per_s = seen.tokens_per_s_per_gpu / osl
    assert requests_per_s <= 1e3 / BUSY.server_ms * (1.0 + 1e-9)
    engine_us = seen.request_latency_ms * 1e3 - naive.outside_us(BUSY.times_us, isl, clients, math.inf)
    assert engine_us > 0.0


def test_a_start_of_all_clients_shares_the_api_server(
    bare: fastroof.StepPlan, busy: fastroof.StepPlan
) -> None:
    more = [
        estimate(plan, 1000, 500, 32, requests_per_client=10, arrivals="random").ttft_ms
        - estimate(plan, 1000, 500, 32, arrivals="random").ttft_ms
        for plan in (bare, busy)
    ]
    assert more[1] - more[0] == pytest.approx(BUSY.server_ms * 31 / 10)


def test_prompts_in_a_prefix_cache_are_tokenized(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    engine, seen = (
        estimate(plan, 4000, 500, 8, prefix_hit=0.9, arrivals="random").ttft_ms for plan in (bare, busy)
    )
    assert seen - engine == pytest.approx(5.0 + 6.0 + 36.0)


def test_disaggregated_workers_are_behind_the_same(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    engine, seen = (estimate_disaggregated(plan, plan, 2000, 300, 4, 1, 1) for plan in (bare, busy))
    assert seen.ttft_ms - engine.ttft_ms == pytest.approx(29.0, rel=0.02)
    assert seen.wait_ms == pytest.approx(engine.wait_ms, abs=0.2)


def test_steps_do_not_change(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    assert bare.decode_us(16, 1000) == busy.decode_us(16, 1000)
    assert np.array_equal(bare.arena, busy.arena)


# -- simulations -----------------------------------------------------------------------------------


def poisson(rate: float, count: int = 400) -> fastroof.Trace:
    random = np.random.default_rng(3)
    arrival_s = np.cumsum(random.exponential(1.0 / rate, count))
    return fastroof.Trace(arrival_s, random.integers(50, 3000, count), random.integers(2, 200, count))


def test_open_loops_arrive_later(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    trace = poisson(5.0)
    # the scheduler's requests are those of the trace, each after its own time
    ends_us = np.array(naive.shared_ends((trace.arrival_s * 1e6).tolist(), 6_000.0))
    came_us = left_us(busy, trace.arrival_s * 1e6, BUSY, trace.input_tokens)
    np.testing.assert_allclose(came_us, ends_us + 5_000.0 + 9.0 * trace.input_tokens, rtol=1e-12)
    arrived = replace(trace, arrival_s=came_us / 1e6, order=None)
    seen, engine = fastroof.simulate(busy, trace), fastroof.simulate(bare, arrived)
    first_us = arrived.in_file_order(engine.outcomes.first_us)
    np.testing.assert_array_equal(seen.outcomes.first_us, first_us)
    np.testing.assert_allclose(seen.times.ttft_ms, first_us / 1e3 - trace.arrival_s * 1e3, rtol=1e-9)
    assert seen.requests["arrival_s"].to_pylist() == pytest.approx(trace.arrival_s.tolist(), rel=1e-12)


def test_no_overhead_is_the_engine(bare: fastroof.StepPlan, h100: fastroof.Tables) -> None:
    own = fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=0)
    kept = [fastroof.simulate(plan, poisson(8.0)).requests for plan in (bare, own)]
    assert kept[0].equals(kept[1])


def test_a_constant_overhead_only_shifts(bare: fastroof.StepPlan, h100: fastroof.Tables) -> None:
    late = fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=32)
    engine, seen = (fastroof.simulate(plan, poisson(8.0)) for plan in (bare, late))
    np.testing.assert_allclose(seen.times.ttft_ms, engine.times.ttft_ms + 32.0, rtol=1e-6)
    np.testing.assert_allclose(seen.times.tpot_ms, engine.times.tpot_ms, rtol=1e-5)


def test_a_burst_waits_for_the_api_server(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    trace = fastroof.Trace(np.zeros(1000), np.full(1000, 128), np.full(1000, 4))
    engine, seen = (fastroof.simulate(plan, trace).summary() for plan in (bare, busy))
    late_ms = 1000 * 6.0 + 5.0 + 128 * 0.009
    assert seen["ttft_ms"]["mean"] == pytest.approx(engine["ttft_ms"]["mean"] + late_ms)
    assert seen["duration_s"] == pytest.approx(engine["duration_s"] + late_ms / 1e3)
    two = fastroof.simulate(busy, trace, replicas=2).summary()
    assert two["ttft_ms"]["mean"] < 0.6 * seen["ttft_ms"]["mean"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_clients_of_closed_loops_share_the_api_server(
    bare: fastroof.StepPlan, busy: fastroof.StepPlan, replicas: int
) -> None:
    count, clients = 400, 8
    trace = fastroof.Trace(
        np.zeros(count), np.full(count, 1000), np.linspace(50, 150, count).astype(int), clients=clients
    )
    seen = fastroof.simulate(busy, trace, replicas=replicas)
    engine = fastroof.simulate(bare, trace, replicas=replicas)
    arrival_us = seen.outcomes.arrival_us
    assert (arrival_us[:clients] == 0.0).all()
    later_ms = 5.0 + 6.0 + 9.0
    first_ms = later_ms + 6.0 * (clients / replicas - 1.0)
    assert seen.times.ttft_ms[:clients].min() > first_ms
    assert seen.times.ttft_ms[clients:].min() > later_ms
    # a client sends its next request when the last one ended, not before
    ends = np.sort(seen.outcomes.last_us)[: count - clients]
    np.testing.assert_allclose(np.sort(arrival_us[clients:]), ends, rtol=1e-9)
    assert seen.summary()["duration_s"] > engine.summary()["duration_s"]


def test_a_client_gives_up_by_its_own_clock(h100: fastroof.Tables) -> None:
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=300)
    trace = fastroof.Trace([0.0, 1.0], [500, 500], [2, 100])
    sim = fastroof.simulate(plan, trace, timeout_s=0.5)
    assert sim.requests["status"].to_pylist() == ["finished", "timed_out"]
    assert fastroof.simulate(plan, trace, timeout_s=0.2).summary()["timed_out"] == 2


@pytest.mark.parametrize("prefix_cache", ["given", "lru"])
def test_outcomes_are_in_the_clients_order(h100: fastroof.Tables, prefix_cache: str) -> None:
    # the first prompt takes a second to tokenize, so the second overtakes it
    plan = plan_with(h100, FrontEnd(token_us=1000.0))
    sim = fastroof.simulate(plan, fastroof.Trace([0.0, 0.1], [1000, 10], [5, 5]), prefix_cache=prefix_cache)
    assert sim.requests["arrival_s"].to_pylist() == [0.0, 0.1]
    long_ms, short_ms = sim.requests["ttft_ms"].to_pylist()
    assert long_ms > 1000.0
    assert short_ms < 100.0


def sessions(count: int = 120) -> fastroof.Trace:
    """Sessions of four requests, of which the last waits for the two before; one has an arrival too."""
    random = np.random.default_rng(5)
    parents = [[] if i % 4 == 0 else [i - 1] if i % 4 < 3 else [i - 1, i - 2] for i in range(count)]
    each = np.array([len(some) for some in parents])
    arrival_s = np.where(each == 0, np.repeat(np.sort(random.uniform(0.0, 20.0, count // 4)), 4), 0.0)
    arrival_s[-1] = 500.0
    return fastroof.Trace(
        arrival_s,
        random.integers(50, 6000, count),
        random.integers(1, 100, count),
        parents=np.array([parent for some in parents for parent in some]),
        parent_offsets=np.concatenate([[0], np.cumsum(each)]),
        delay_s=np.where(each > 0, random.choice([0.0, 0.2, 1.5], count), 0.0),
    )


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("prefix_cache", ["given", "lru"])
def test_requests_that_follow_others_are_sent_when_those_end(
    busy: fastroof.StepPlan, prefix_cache: str, replicas: int
) -> None:
    trace = sessions()
    sim = fastroof.simulate(busy, trace, prefix_cache=prefix_cache, replicas=replicas, router="least_load")
    seen = sim.outcomes
    own_us = 5_000.0 + 6_000.0 + 9.0 * trace.input_tokens
    for row in range(len(trace)):
        sent_us = trace.arrival_s[row] * 1e6
        of_row = trace.parents[trace.parent_offsets[row] : trace.parent_offsets[row + 1]]
        if len(of_row):
            sent_us = max(sent_us, seen.last_us[of_row].max() + trace.delay_s[row] * 1e6)
        assert seen.arrival_us[row] == pytest.approx(sent_us, rel=1e-9)
    assert (seen.first_us - seen.arrival_us > own_us * (1.0 - 1e-9)).all()
    assert sim.requests["arrival_s"].to_pylist() == pytest.approx(
        trace.in_file_order(seen.arrival_us / 1e6).tolist(), rel=1e-9
    )


def test_an_api_server_hands_on_one_request_in_its_time(bare: fastroof.StepPlan) -> None:
    """Clients, and calls of sessions that follow others, queue as those of an open loop do."""
    front_end = FrontEnd(server_ms=50.0)
    plan = replace(bare, profile=replace(bare.profile, front_end=front_end))
    count = 200
    closed = fastroof.Trace(np.zeros(count), np.full(count, 100), np.full(count, 5), clients=20)
    sim = fastroof.simulate(plan, closed)
    assert 0.9 * 1e3 / 50.0 < sim.summary()["requests_per_s"] <= 1e3 / 50.0
    offsets = np.maximum(np.arange(count + 1) - 20, 0)
    parents = {"parents": np.arange(count - 20), "parent_offsets": offsets, "delay_s": np.zeros(count)}
    followed = fastroof.simulate(plan, replace(closed, clients=None, **parents))
    np.testing.assert_allclose(np.sort(followed.outcomes.last_us), np.sort(sim.outcomes.last_us), rtol=1e-9)


@pytest.mark.loops
def test_clients_give_up_in_the_front_end(bare: fastroof.StepPlan) -> None:
    plan = replace(bare, profile=replace(bare.profile, front_end=FrontEnd(server_ms=100.0)))
    trace = fastroof.Trace(np.zeros(8), np.full(8, 10), np.full(8, 2), clients=4)
    # four at once leave after 0.4 s, two after 0.2 s
    sim = fastroof.simulate(plan, trace, timeout_s=0.25)
    assert sim.requests["status"].to_pylist() == ["timed_out"] * 8
    assert sim.outcomes.replica.tolist() == [-1] * 8
    assert sim.outcomes.arrival_us.tolist() == [0.0] * 4 + [250_000.0] * 4
    assert fastroof.simulate(plan, trace, timeout_s=0.5).summary()["timed_out"] == 0


def test_sessions_without_an_overhead_are_the_engines(bare: fastroof.StepPlan, h100: fastroof.Tables) -> None:
    trace = sessions()
    own = fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=0)
    kept = [fastroof.simulate(plan, trace) for plan in (bare, own)]
    assert kept[0].requests.equals(kept[1].requests)
    assert kept[0].sessions.equals(kept[1].sessions)


def test_pools_are_behind_the_prefill_engines(bare: fastroof.StepPlan, busy: fastroof.StepPlan) -> None:
    trace = fastroof.Trace(np.arange(20) * 0.5, np.full(20, 2000), np.full(20, 50))
    engine, seen = (fastroof.simulate(Fleet([Pool(plan)] * 2), trace) for plan in (bare, busy))
    np.testing.assert_allclose(seen.times.ttft_ms, engine.times.ttft_ms + 29.0, rtol=1e-6)
    np.testing.assert_allclose(seen.outcomes.transfer_us, engine.outcomes.transfer_us, rtol=1e-6)


# -- agreement -------------------------------------------------------------------------------------


def rows_of(question: dict[str, Any]) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        fastroof.run_sweep(question, path, threads=1)
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


LOADS = [(1000, 200, 8), (4000, 100, 4), (500, 400, 32), (2000, 60, 8)]


@pytest.mark.parametrize(("isl", "osl", "clients"), LOADS)
def test_a_simulated_loop_agrees_with_the_estimate(
    busy: fastroof.StepPlan, isl: int, osl: int, clients: int
) -> None:
    random = np.random.default_rng(1)
    count = 60 * clients
    outputs = random.integers(round(0.8 * osl), round(1.2 * osl) + 1, count)
    trace = fastroof.Trace(np.zeros(count), np.full(count, isl), outputs, clients=clients)
    sim = fastroof.simulate(busy, trace)
    late = slice(10 * clients, None)
    seen = estimate(busy, isl, float(outputs.mean()), clients)
    assert seen.ttft_ms == pytest.approx(sim.times.ttft_ms[late].mean(), rel=0.12)
    assert seen.request_latency_ms == pytest.approx(sim.times.e2e_ms[late].mean(), rel=0.05)


@pytest.mark.parametrize("engine", ["vllm", "trtllm-1.1", "sglang"])
@pytest.mark.parametrize("overhead", [None, 0.0, 80.0])
@pytest.mark.parametrize("mode", ["aggregated", "disaggregated"])
def test_best_answers_what_estimates_do(
    h100: fastroof.Tables, engine: str, overhead: float | None, mode: str
) -> None:
    workers = {"prefill_workers": 1, "decode_workers": 1} if mode == "disaggregated" else {}
    question = {
        "models": "llama-3.1-8b", "gpus": "h100", "tp": 1, "mode": mode, "isl": 1500, "osl": [30, 300],
        "clients": [2, 24], "engine": engine, "keep": "all", "max_num_batched_tokens": 8192,
        "max_num_seqs": 256, "front_end": overhead, **workers,
    }  # fmt: skip
    rows = rows_of(question)
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine=engine, front_end=overhead, max_num_seqs=9000
    )
    assert len(rows) == 4
    for row in rows:
        sizes = row["isl"], row["osl"], row["clients"]
        if workers:
            seen: Any = estimate_disaggregated(plan, plan, *sizes, 1, 1, 8192, max_num_seqs=256)
        else:
            seen = estimate(plan, *sizes, 8192, max_num_seqs=256)
        for name in ("ttft_ms", "tpot_ms", "tokens_per_s_per_gpu"):
            assert row[name] == pytest.approx(getattr(seen, name), rel=1e-9), name


def test_limits_are_on_what_users_see(h100: fastroof.Tables) -> None:
    question = {
        "models": "llama-3.1-8b", "gpus": "h100", "tp": 1, "isl": 1000, "osl": 100, "clients": [1, 2],
        "constraints": {"ttft_ms": 60.0}, "k": 1,
    }  # fmt: skip
    within = best_deployments({**question, "front_end": 10}, percentile=None).answers[0]
    assert within.choices
    beyond = best_deployments({**question, "front_end": 70}, percentile=None).answers[0]
    assert not beyond.choices
    plans = [fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=ms) for ms in (0.0, 150.0)]
    most = [
        fastroof.capacity(
            plan,
            fastroof.Workload(isl=500, osl=50, requests=1500),
            ttft_p99_ms=200.0,
            tolerance=0.05,
        ).requests_per_s
        for plan in plans
    ]
    assert most[1] < 0.9 * most[0]


def test_a_rate_needs_clients_outside_the_engine_too(h100: fastroof.Tables) -> None:
    rows = {}
    for overhead in (0.0, 200.0):
        question = {
            "models": "llama-3.1-8b", "gpus": "h100", "tp": 1, "isl": 1000, "osl": 200, "rate": 5.0,
            "keep": "all", "max_num_batched_tokens": 8192, "max_num_seqs": 256,
            "front_end": overhead,
        }  # fmt: skip
        (rows[overhead],) = rows_of(question)
    more = rows[200.0]["clients"] - rows[0.0]["clients"]
    assert more == pytest.approx(5.0 * 0.2, rel=0.05)
    assert rows[200.0]["tpot_ms"] == pytest.approx(rows[0.0]["tpot_ms"], rel=0.02)


# -- profiles and options --------------------------------------------------------------------------


def test_serving_engines_have_one_with_its_evidence() -> None:
    for name in engine_names():
        found = load_engine(name).front_end
        if not load_engine(name).engine:
            assert found.adds_nothing, name
            continue
        assert not found.adds_nothing, name
        # of runs that were all behind a router the time on the engine's own server is unknown
        assert found.server_ms > 0.0 or found.behind == "dynamo", name
        assert found.residual > 0.0, name
        assert found.source, name
        assert found.evidence, name


def test_an_overhead_replaces_the_profiles(h100: fastroof.Tables) -> None:
    own = fastroof.compile_plan("llama-3.1-8b", "h100", h100)
    assert own.profile.front_end == load_engine("vllm").front_end
    named: dict[Any, tuple[float, float, float]] = {
        12.5: (12_500, 0, 0), "12.5": (12_500, 0, 0), "dynamo": (5000, 2, 0), "none": (0, 0, 0),
        "plain": own.profile.front_end.times_us,
    }  # fmt: skip
    for name, times_us in named.items():
        plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=name)
        assert plan.profile.front_end.times_us == times_us, name
    dynamo = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="trtllm-1.0", front_end="dynamo")
    assert dynamo.profile.front_end == load_engine("trtllm-1.0").front_end
    with pytest.raises(PlanError, match=r"the runs of trtllm-1\.0 were all behind dynamo; use dynamo"):
        fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="trtllm-1.0", front_end="plain")


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, 1e7, "fast", "1e7", True, [3]])
def test_invalid_overheads_are_refused(h100: fastroof.Tables, wrong: Any) -> None:
    with pytest.raises(PlanError, match="front_end must be plain, dynamo, none or milliseconds"):
        fastroof.compile_plan("llama-3.1-8b", "h100", h100, front_end=wrong)
    question = {"models": "llama-3.1-8b", "isl": 10, "osl": 10, "clients": 1}
    with pytest.raises(SweepError, match="front_end"):
        load_spec({**question, "front_end": wrong})


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"request_ms": -1}, "request_ms must be a number of at least 0"),
        ({"token_us": math.nan}, "token_us must be"),
        ({"server_ms": "3"}, "server_ms must be a number"),
        ({"evidence": 3}, "evidence must be text"),
        ({"tokens": 3}, "front_end: unknown key 'tokens'"),
        (5, "front_end must be a table"),
    ],
)
def test_invalid_front_ends_are_refused(part: Any, message: str) -> None:
    with pytest.raises(FastroofError, match=message):
        load_engine({"name": "mine", "front_end": part})


def test_a_file_may_have_its_own(tmp_path: Any) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('engine = "vllm"\n[front_end]\nrequest_ms = 3\nserver_ms = 1.5\n')
    found: EngineProfile = load_engine(path)
    assert found.front_end.words() == "3 ms a request, 1.5 ms a request on the API server"


def test_commands_take_an_overhead() -> None:
    load = ("--model", "llama-3.1-8b", "--isl", "1000", "--osl", "300", "--clients", "4")
    ttft = [printed("serving", *load, "--front-end", ms)["rows"][0]["ttft_ms"] for ms in ("5", "30")]
    assert ttft[1] - ttft[0] == pytest.approx(25.0)
    run = ("--model", "llama-3.1-8b", "--rate", "2", "--num-requests", "50")
    mean = [printed("simulate", *run, "--front-end", ms)["ttft_ms"]["mean"] for ms in ("0", "25")]
    assert mean[1] - mean[0] == pytest.approx(25.0)
    refused = CliRunner().invoke(app, ["step", "--model", "llama-3.1-8b", "--front-end", "5"])
    assert refused.exit_code != 0
