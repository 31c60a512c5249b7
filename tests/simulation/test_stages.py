"""Engines with pipeline stages: equal to naive ones, and near the closed form."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError
from fastroof.plan import StepPlan
from fastroof.serving import estimate
from fastroof.simulation import Autoscaler, pools
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_run import run_engine, run_pools, run_replicas
from fastroof.simulation.settings import EngineSettings
from tests.reference.fleet import Fleet, Link, LinkedFleet
from tests.reference.made_sessions import made_sessions
from tests.reference.made_workloads import PLANS, MadeWorkload, made_workload
from tests.reference.pools import Pool, Rule
from tests.simulation.test_exactness import assert_same_requests
from tests.simulation.test_prefix_replicas import part_of

WORKLOADS = [40, pytest.param(1000, marks=pytest.mark.slow)]
US_PER_S = 1e6


@functools.cache
def a_plan(pp: int, model: str = "llama-3.1-8b", **given: int) -> StepPlan:
    """A plan of stages, of kernels alone."""
    tables = fastroof.load_tables("h100")
    return fastroof.compile_plan(model, "h100", tables, pp=pp, engine="kernels", **given)


def without_pauses(settings: EngineSettings) -> EngineSettings:
    return replace(settings, prefill_schedule_interval=1, prefill_decode_interval=0, min_free_slots_delay=0)


def drawn(random: Random) -> tuple[MadeWorkload, int]:
    """Draw a workload that stages serve, and their number."""
    work = made_workload(random, random.choice(["tiny", "tiny", "usual", "scarce"]))
    settings = without_pauses(work.settings)
    if settings.order == "mixed" and random.random() < 0.4:
        settings = replace(settings, admit_whole_prompt=False)
    trace = made_sessions(random, work.trace) if random.random() < 0.3 else work.trace
    work, pp = work._replace(trace=trace, settings=settings), random.choice([2, 3, 4])
    return (giving_up_at_a_step_end(random, work, pp) if random.random() < 0.4 else work), pp


def served(work: MadeWorkload, pp: int) -> Outcomes:
    plan = a_plan(pp, PLANS[work.plan])
    return run_engine(plan, work.trace, work.settings, time_scale=work.time_scale)


def giving_up_at_a_step_end(random: Random, work: MadeWorkload, pp: int) -> MadeWorkload:
    """Let clients that send at 0 give up at the instant when some step ends."""
    patient = work._replace(settings=replace(work.settings, timeout_s=math.inf))
    ends_us = served(patient, pp).first_us
    end_us = float(random.choice(ends_us.tolist()))
    for timeout_s in (end_us / US_PER_S, math.nextafter(end_us / US_PER_S, math.inf)):
        if timeout_s * US_PER_S == end_us:
            return work._replace(settings=replace(work.settings, timeout_s=timeout_s))
    return work


def prove(work: MadeWorkload, pp: int) -> Counter[str]:
    """Hold a workload to a naive engine; count what happened, nothing if requests are rejected."""
    trace, settings = work.trace, work.settings
    got = served(work, pp)
    if (got.status == 2).any():
        return Counter()
    plan = a_plan(pp, PLANS[work.plan])
    naive = Fleet(trace, Pool.of_plan(plan, settings, time_scale=work.time_scale)).run()
    assert_same_requests(naive.requests, got)
    assert got.counters["steps"] == len(naive.flights)
    preemptions = int(got.preemptions.sum())
    deadlines_us = got.arrival_us + settings.timeout_s * US_PER_S
    return Counter(
        {
            "workloads": 1,
            "timed out": int((got.status == 1).sum()),
            "preemptions": preemptions,
            "give up as a step ends": bool(np.isin(deadlines_us[got.status == 1], got.first_us).any()),
            "preempts where chunks alone need room": bool(preemptions) and not settings.admit_whole_prompt,
            "preempts with prompts first": bool(preemptions) and settings.order == "prefill_first",
            "preempts in sessions": bool(preemptions) and trace.has_parents,
            "prompts first": settings.order == "prefill_first",
            "closed loop": trace.is_closed,
            "sessions": trace.has_parents,
            "prompts are cut": bool((trace.input_tokens > settings.max_num_batched_tokens).any()),
            "cached tokens": bool(trace.cached_tokens.any()),
            "reserves outputs": settings.reserve_output,
            "windowed": work.plan == "windowed",
            f"{pp} stages": 1,
        }
    )


@pytest.mark.loops
@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("workloads", WORKLOADS)
def test_stages_serve_as_naive_ones_do(workloads: int) -> None:
    """Open and closed loops, sessions, time-outs; engines that lack blocks nearly all the time."""
    seen = Counter[str]()
    for seed in itertools.count():
        seen.update(prove(*drawn(Random(seed))))
        if seen["workloads"] == workloads:
            break
    print(dict(seen))
    assert seen["timed out"] > workloads
    assert seen["preemptions"] > workloads
    assert all(count >= workloads // 40 for count in seen.values())


def test_naive_fleets_of_stages_are_engines_of_stages() -> None:
    """Replicas of stages, autoscaled ones and pools of them, which simulations refuse, of their parts."""
    compared = Counter[str]()
    for seed in range(60):
        work, pp = drawn(Random(seed))
        trace, settings = work.trace, work.settings
        if trace.is_closed or trace.has_parents or (served(work, pp).status == 2).any():
            continue
        fixed, scaled, prefill, decode = (
            Pool.of_plan(a_plan(pp, PLANS[work.plan]), settings, replicas, time_scale=work.time_scale)
            for replicas in (2, 2, 1, 1)
        )
        always_two = Rule("queue", 1.0, None, 0.0, 2, 2, 2, 1e6, 0.0, 0.0)
        for naive in (Fleet(trace, fixed).run(), Fleet(trace, scaled, always_two).run()):
            for which in {at % 2 for at in range(len(trace))}:
                part = part_of(trace, np.arange(len(trace)) % 2 == which)
                assert_same_requests(naive.requests[which::2], served(work._replace(trace=part), pp))
                compared["parts"] += 1
        if settings.timeout_s < math.inf:
            continue
        pools = LinkedFleet(trace, prefill, decode, Link(lambda prompt: 100.0 * prompt)).run()
        prompts = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
        assert_same_requests(pools.prompts, served(work._replace(trace=prompts), pp))
        sent = sorted((one for one in pools.decodes if one.output), key=lambda one: one.arrival_us)
        if sent:
            columns = [(one.arrival_us / US_PER_S, one.prompt, one.output, one.prompt - 1) for one in sent]
            got = served(work._replace(trace=Trace(*zip(*columns, strict=True))), pp)
            assert_same_requests(sent, got)
            compared["pools"] += 1
    assert min(compared["parts"] // 4, compared["pools"]) > 3, compared


def test_batches_do_not_take_each_others_blocks_forever() -> None:
    """One that was preempted does not start again with room for a chunk alone."""
    settings = EngineSettings(4, 2, 37, block_size=3, admit_whole_prompt=False)
    work = MadeWorkload(Trace([0.0] * 7, [106] * 7, [3] * 7), settings, "whole", 1.0)
    assert prove(work, 4)["preemptions"] > 0


def test_preempted_requests_that_gave_up_do_not_block_others() -> None:
    """Others start with room for a chunk in the very step after that."""
    seen = Counter[str]()
    for seed in range(300, 450):
        random = Random(seed)
        work = made_workload(random, "tiny")
        settings = replace(
            without_pauses(work.settings),
            order="mixed",
            admit_whole_prompt=False,
            max_num_batched_tokens=max(work.settings.max_num_batched_tokens, work.settings.max_num_seqs),
        )
        pp = random.choice([2, 3, 4])
        seen += prove(giving_up_at_a_step_end(random, work._replace(settings=settings), pp), pp)
    assert seen["give up as a step ends"] > 30


def test_one_request_passes_all_stages() -> None:
    """Alone it is as fast as a batch by itself: the other stages wait."""
    plan = a_plan(4)
    got = run_engine(plan, Trace([0.0], [1000], [3]), EngineSettings(2048, 64, 1000))
    steps_us = [
        plan.bottleneck.step_scalar(*sizes) for sizes in (([1000], [0]), ([1], [1000]), ([1], [1001]))
    ]
    assert got.first_us[0] == pytest.approx(steps_us[0], rel=1e-12)
    assert got.last_us[0] == pytest.approx(sum(steps_us), rel=1e-12)


def test_as_many_batches_as_stages_are_in_flight() -> None:
    """Prompts that fill a step each follow each other, a stage apart."""
    plan = a_plan(4)
    got = run_engine(plan, Trace([0.0] * 4, [2048] * 4, [1] * 4), EngineSettings(2048, 64, 1000))
    step_us = plan.bottleneck.step_scalar([2048], [0])
    assert got.last_us == pytest.approx([step_us * (1.0 + behind / 4.0) for behind in range(4)])
    assert got.counters["busy_us"] == pytest.approx(got.last_us[-1])


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(("isl", "osl", "clients"), [(2048, 200, 32), (1024, 100, 16), (4096, 300, 64)])
def test_closed_loops_are_near_the_closed_form(pp: int, isl: int, osl: int, clients: int) -> None:
    """Clients whose prompts fill a step each spread over the batches, as the closed form has them."""
    plan = a_plan(pp)
    estimated = estimate(plan, isl, osl, clients, isl, max_kv_tokens=1.6e6)
    count = 60 * clients
    trace = Trace([0.0] * count, [isl] * count, [osl] * count, clients=clients)
    settings = EngineSettings(isl, 1024, 100_000)
    got = run_engine(plan, trace, settings)
    later = slice(20 * clients, 50 * clients)
    tpot_ms = (got.last_us - got.first_us)[later].mean() / (osl - 1) / 1e3
    e2e_ms = (got.last_us - got.arrival_us)[later].mean() / 1e3
    assert tpot_ms == pytest.approx(estimated.tpot_ms, rel=0.02)
    assert tpot_ms == pytest.approx(estimated.tpot_ms, rel=0.02)
    assert e2e_ms == pytest.approx(estimated.request_latency_ms, rel=0.03)


def test_sglangs_batches_have_their_share_of_the_slots() -> None:
    settings = EngineSettings(4096, 8, 10_000, order="prefill_first")
    trace = Trace([0.0] * 40, [100] * 40, [20] * 40)
    got = run_engine(a_plan(4), trace, settings)
    assert got.counters["peak_running"] == 8
    assert not got.status.any()


def test_simulate_takes_a_plan_with_stages() -> None:
    trace = Trace([0.0, 0.1, 0.2], [1000, 2000, 500], [100, 50, 1])
    sim = fastroof.simulate(a_plan(2), trace)
    answers = sim.summary(with_range=True)
    assert (answers["finished"], sim.gpus) == (3, 2)
    assert 0.0 < answers["busy"] <= 1.0
    assert math.isfinite(answers["range"]["e2e_ms"]["mean"][0])


def test_prompts_of_stages_do_not_wait_for_steps() -> None:
    with pytest.raises(SimulationError, match="not simulated with pipeline stages"):
        fastroof.simulate(a_plan(2, max_tokens=8192), Trace([0.0], [100], [2]), prefill_schedule_interval=4)


# -- what stages go with --------------------------------------------------------------------------

BURST = Trace(np.repeat(np.arange(10) * 0.05, 4), np.arange(40) * 37 % 900 + 1, np.arange(40) * 13 % 50 + 1)
FEW = EngineSettings(256, 6, 200)


def of_rows(rows: Any) -> Trace:
    return Trace(BURST.arrival_s[rows], BURST.input_tokens[rows], BURST.output_tokens[rows])


def test_replicas_of_stages_are_engines_on_their_shares() -> None:
    plan = a_plan(2)
    whole = run_replicas(plan, BURST, FEW, 3)
    rows = np.arange(len(BURST))
    for replica in range(3):
        own = rows[replica::3]
        alone = run_engine(plan, of_rows(own), FEW)
        assert np.array_equal(whole.last_us[own], alone.last_us)
        assert np.array_equal(whole.preemptions[own], alone.preemptions)


def test_ranks_of_stages_are_replicas_behind_a_router() -> None:
    """Those of a dense model do not wait for one another."""
    apart = run_replicas(a_plan(2, dp=2), BURST, FEW)
    routed = run_replicas(a_plan(2), BURST, FEW, 2, "least_load")
    assert np.array_equal(apart.last_us, routed.last_us)
    assert apart.counters == pytest.approx(routed.counters)


@pytest.mark.parametrize("stages", [(2, 1), (1, 2), (2, 2)])
def test_pools_of_stages_prefill_and_then_decode(stages: tuple[int, int]) -> None:
    prefill, decode = (pools.EnginePool(a_plan(pp), FEW) for pp in stages)
    got = run_pools([prefill, decode], BURST, pools.Link(50e9))
    prompts = run_engine(prefill.plan, replace(BURST, output_tokens=np.ones_like(BURST.output_tokens)), FEW)
    assert got.prefill is not None
    assert got.decode is not None
    assert np.array_equal(got.prefill.last_us, prompts.last_us)
    goes_on = np.flatnonzero(BURST.output_tokens > 1)
    handed = Trace(
        (prompts.last_us + got.transfer_us)[goes_on] / US_PER_S,
        BURST.input_tokens[goes_on] + 1,
        BURST.output_tokens[goes_on] - 1,
        BURST.input_tokens[goes_on],
    )
    decoded = run_engine(decode.plan, handed, FEW)
    assert got.decode.last_us == pytest.approx(decoded.last_us, rel=1e-9)


def test_a_scaled_fleet_of_stages_that_cannot_change_is_a_fixed_one() -> None:
    rule = Autoscaler("queue", 1, max_replicas=2, min_replicas=2, startup_s=1)
    for trace in (BURST, replace(BURST, arrival_s=np.zeros(40), clients=7)):
        scaled = run_pools([pools.EnginePool(a_plan(2), FEW, router="least_kv", autoscaler=rule)], trace)
        fixed = run_replicas(a_plan(2), trace, FEW, 2, "least_kv")
        assert np.array_equal(scaled.last_us, fixed.last_us)
        assert scaled.counters == pytest.approx(fixed.counters)


@pytest.mark.parametrize("tiers", [None, "host:1GB:50GB/s"])
def test_batches_in_stages_find_the_same_prompts(tiers: str | None) -> None:
    """Of prompts that follow each other, as one batch finds them; with room in the GPU nothing is fetched."""
    count = 20
    arrival_s, ids = np.arange(count) * 1.0, np.arange(2 * count) // 4
    trace = Trace(
        arrival_s, [1024] * count, [9] * count,
        hash_ids=ids, hash_offsets=np.arange(count + 1) * 2, hash_block_size=512,
    )  # fmt: skip
    found = [
        fastroof.simulate(a_plan(pp), trace, kv_tiers=tiers).requests["cached_tokens"].to_pylist()
        for pp in (1, 2)
    ]
    assert found[0] == found[1]
    assert sum(found[0]) > 0


def test_blocks_come_back_from_tiers_of_stages() -> None:
    count = 30
    trace = Trace(
        np.arange(count) * 1.0, [1024] * count, [9] * count,
        hash_ids=np.arange(count) % 5, hash_offsets=np.arange(count + 1), hash_block_size=1024,
    )  # fmt: skip
    given: dict[str, Any] = {"num_gpu_blocks": 70, "block_size": 16, "kv_tiers": "host:100GB:50GB/s"}
    one, two = (fastroof.simulate(a_plan(pp), trace, **given).summary()["kv_tiers"] for pp in (1, 2))
    assert two["tiers"][0]["found_tokens"] == one["tiers"][0]["found_tokens"] > 0
    assert two["tiers"][0]["fetched_bytes"] > 0
