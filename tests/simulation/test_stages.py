"""Engines with pipeline stages: equal to naive ones, and near the closed form."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError
from fastroof.plan import StepPlan
from fastroof.serving import estimate
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from tests.reference.fleet import Fleet
from tests.reference.made_fleets import prove as prove_fleets
from tests.reference.made_workloads import PLANS, MadeWorkload, made_sessions, made_workload
from tests.reference.pools import Pool
from tests.simulation.test_exactness import assert_same_requests

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
    # each stage computes each step for a quarter of its time
    assert got.counters["busy_us"] == pytest.approx(step_us)


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize(("isl", "osl", "clients"), [(2048, 200, 32), (1024, 100, 16), (4096, 300, 64)])
def test_closed_loops_are_near_the_closed_form(pp: int, isl: int, osl: int, clients: int) -> None:
    """Clients whose prompts fill a step each spread over the batches, as the closed form has them."""
    plan = a_plan(pp)
    estimated = estimate(plan, isl, osl, clients, isl, max_kv_tokens=1.6e6, requests_per_client="steady")
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
        fastroof.simulate(
            a_plan(2, max_num_batched_tokens=8192), Trace([0.0], [100], [2]), prefill_schedule_interval=4
        )


# -- what stages go with --------------------------------------------------------------------------


@pytest.mark.loops
@pytest.mark.parametrize(
    "others", ["", "ranks", "cache", "tiers", "pools", "rules", "ranks pools rules", "tiers pools rules"]
)
def test_fleets_of_stages_serve_as_naive_ones_do(others: str) -> None:
    prove_fleets(f"stages {others}", range(30), least=3)
