"""Replicas, routers and ranks: equal to naive engines with a naive router, to the last bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Trace
from fastroof.compiled.simulation.records import CODE_STUCK, CommonFeatures, Features, PlainFeatures
from fastroof.compiled.simulation.run import fleet_run
from fastroof.errors import SimulationError
from fastroof.plan import StepPlan
from fastroof.simulation import pools
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_arrays import new_fleet
from fastroof.simulation.pools import ROUTINGS
from fastroof.simulation.requests import mean_step
from fastroof.simulation.settings import EngineSettings
from tests.reference import made_fleets
from tests.reference.fleet import Fleet
from tests.reference.made_fleets import a_plan, a_workload, made_fleet, run_replicas
from tests.reference.made_workloads import made_sessions
from tests.reference.pools import Pool
from tests.reference.replay import RankStep, Schedule, TimedRequest, replay
from tests.simulation import test_exactness

US_PER_S = 1e6
KINDS = ["open", "closed", "sessions"]


MOE = (made_fleets.MOE,)
RULES = [
    "",
    "prompt_tokens=fullest decode_tokens=fullest",
    "prompt_tokens=graphs decode_tokens=graphs graph_tokens=24",
    "decode_tokens=half_full idle_tokens=0 assignment=round_robin",
    "decode_tokens=fullest assignment=fewest_tokens balance_steps=4",
    "assignment=fewest_tokens balance_steps=40 floor_us=30",
    "decode_tokens=half_full idle_tokens=0 assignment=round_robin floor_us=300 hides_host=1",
]
"""Of ranks that share experts; two let prompts wait for each other, and two launch them kernel by kernel."""


def assert_equal(outcomes: Outcomes, served: Fleet) -> None:
    assert outcomes.replica.tolist() == served.replica
    test_exactness.assert_same_requests(served.requests, outcomes)


def with_pauses(settings: EngineSettings, rng: np.random.Generator) -> EngineSettings:
    """An engine whose prompts wait for decode steps or, prompts first, also for free slots."""
    if settings.order == "mixed":
        return replace(settings, prefill_schedule_interval=int(rng.choice([2, 3, 7])))
    steps, slots = int(rng.choice([0, 2, 6])), int(rng.choice([0, 3, 8]))
    return replace(settings, prefill_decode_interval=steps, min_free_slots_delay=slots)


@pytest.mark.loops
@pytest.mark.parametrize(
    ("model", "clients"),
    [
        (("llama-3.1-8b",), True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((("llama-3.1-8b",), False), (MOE, False), (MOE, True))
        ),
    ],
)
def test_ranks_pause_together_as_naive_ones_do(model: tuple[str, ...], clients: bool) -> None:
    rng = np.random.default_rng([len(model[0]), clients])
    differ = 0
    for seed in range(20):
        trace, settings = a_workload(rng, clients=clients)
        paused = with_pauses(settings, rng)
        replicas, dp = int(rng.integers(1, 3)), int(rng.choice([2, 4]))
        plan = a_plan(dp, rng.choice(["", "lockstep=all"]), *model)
        outcomes = run_replicas(plan, trace, paused, replicas, "least_outstanding", seed=seed)
        assert_equal(outcomes, naively(plan, trace, paused, replicas, "least_outstanding", seed))
        plain = run_replicas(plan, trace, settings, replicas, "least_outstanding", seed=seed)
        differ += not np.array_equal(plain.first_us, outcomes.first_us, equal_nan=True)
    print(f"{differ} of 20 differ from ranks that do not pause")
    assert differ > 3


@pytest.mark.loops
@pytest.mark.usefixtures("features")
@pytest.mark.parametrize("router", ROUTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_serve_as_naive_engines_do(router: str, kind: str) -> None:
    rng = np.random.default_rng([len(router), KINDS.index(kind)])
    preemptions = timed_out = 0
    for seed in range(25):
        trace, settings = a_workload(rng, clients=kind == "closed")
        if kind == "sessions":
            trace = made_sessions(Random(seed), trace)
        replicas, dp = int(rng.integers(1, 5)), int(rng.choice([1, 1, 2, 3]))
        plan = a_plan(dp, rng.choice(["", "lockstep=all", "assignment=round_robin"]))
        outcomes = run_replicas(plan, trace, settings, replicas, router, seed=seed, threads=2)
        assert_equal(outcomes, naively(plan, trace, settings, replicas, router, seed))
        preemptions += outcomes.preemptions.sum()
        timed_out += (outcomes.status == 1).sum()
    assert preemptions > 10
    assert timed_out > 10


def naively(
    plan: StepPlan, trace: Trace, settings: EngineSettings, replicas: int, router: str, seed: int = 0
) -> Fleet:
    """Serve with naive engines, whose ranks step together or are engines by themselves."""
    served: Fleet = made_fleets.naively(
        [pools.EnginePool(plan, settings, replicas, router)], trace, seed=seed
    )
    return served


@pytest.mark.loops
@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("clients", [False, True])
def test_ranks_that_share_experts_serve_as_naive_ones_do(rules: str, clients: bool) -> None:
    """What experts compute, who gets a request and which prompts wait: by every rule that an engine has."""
    rng = np.random.default_rng([len(rules), clients])
    differ = 0
    for seed in range(12):
        trace, settings = a_workload(rng, clients=clients)
        replicas, dp = int(rng.integers(1, 3)), int(rng.choice([2, 4]))
        plan = a_plan(dp, rules, MOE[0])
        outcomes = run_replicas(plan, trace, settings, replicas, "least_load", seed=seed)
        assert_equal(outcomes, naively(plan, trace, settings, replicas, "least_load", seed))
        if settings.timeout_s == math.inf:
            ended_us = float(outcomes.last_us.max()) * (1.0 + 1e-9)
            assert outcomes.counters["busy_us"] <= replicas * dp * ended_us
        padded = a_plan(dp, f"{rules} prompt_tokens=fullest decode_tokens=fullest", MOE[0])
        other = run_replicas(padded, trace, settings, replicas, "least_load", seed=seed)
        differ += not np.array_equal(other.last_us, outcomes.last_us, equal_nan=True)
    # padding does not change one that pads already
    assert (differ > 1) == (rules != RULES[1])


@pytest.mark.loops
@pytest.mark.parametrize(
    "settings", [EngineSettings(512, 12, 1000), EngineSettings(120, 32, 1000, chunked_prefill=False)]
)
def test_ranks_without_a_place_or_tokens_for_a_prompt_do_not_wait(settings: EngineSettings) -> None:
    trace = Trace([0.0] * 24 + [0.05] * 4, [4] * 24 + [110] * 4, [100] * 24 + [5] * 4)
    plan = a_plan(2, "balance_steps=10", MOE[0])
    assert_equal(run_replicas(plan, trace, settings), naively(plan, trace, settings, 1, "least_load"))


def test_a_prompt_of_one_rank_costs_the_others_what_its_experts_take() -> None:
    """One rank computes a prompt, three have a decode each: experts see 403 tokens, not 4 x 400."""
    trace = Trace([0.0, 0.0, 0.0, 1.0], [4, 4, 4, 400], [200, 200, 200, 2])
    settings = EngineSettings(512, 8, 1000)
    plan, padded = (a_plan(4, rules, MOE[0]) for rules in ("", "prompt_tokens=fullest"))
    took_ms = [
        float(outcomes.first_us[3] - outcomes.arrival_us[3])
        for one in (plan, padded)
        for outcomes in [run_replicas(one, trace, settings)]
    ]
    assert took_ms[0] < 0.75 * took_ms[1]


@pytest.mark.slow
def test_prompts_wait_for_those_of_other_ranks() -> None:
    """A prompt beside decodes of all ranks begins when each has one, or after so many steps."""
    trace = Trace([0.0] * 4 + [0.3 + 0.13 * at for at in range(6)], [4] * 10, [400] * 4 + [2] * 6)
    settings = EngineSettings(512, 8, 1000)
    waits_us = {}
    for wait in (0, 10, 40):
        plan = a_plan(4, f"balance_steps={wait}", MOE[0])
        outcomes = run_replicas(plan, trace, settings)
        waits_us[wait] = float(np.mean((outcomes.first_us - outcomes.arrival_us)[4:]))
    step = plan.decode_us(1, 400)
    # the count goes on whether a prompt waits or not: one comes in the middle of it
    assert waits_us[0] < 2.5 * step
    for wait in (10, 40):
        assert 0.2 * wait * step < waits_us[wait] - waits_us[0] < 0.75 * wait * step


@pytest.mark.parametrize(("model", "engines"), [("llama-3.1-8b", 3), (MOE[0], 1)])
def test_steps_run_for_at_most_all_of_the_time(model: str, engines: int) -> None:
    """Ranks by themselves have clocks of their own; those in lockstep one."""
    ranks = 3 if engines == 3 else 4
    plan = a_plan(ranks, model=model)
    trace = Trace([0.0] * 24, [60] * 24, [50] * 24)
    sim = fastroof.simulate(plan, trace, max_num_batched_tokens=64, max_num_seqs=8, num_gpu_blocks=400)
    assert sim.engines == engines
    assert 0.9 < sim.summary(with_range=False)["busy"] < 1.0 + 1e-9
    assert 0.0 < max(sim.series()["busy"].to_pylist()) < 1.0 + 1e-9
    # a step of one rank: eight requests, or fewer
    running, _ = mean_step(sim.outcomes, sim.settings, ranks // engines)
    assert running < 8.0 + 1e-9


def test_ranks_of_a_dense_model_do_not_wait() -> None:
    """Each is an engine by itself: replicas behind a router that looks at the load when a request comes."""
    rng = np.random.default_rng(6)
    for _ in range(5):
        trace, settings = a_workload(rng)
        apart = run_replicas(a_plan(3), trace, settings, 1)
        alone = run_replicas(a_plan(), trace, settings, 3, "least_load")
        assert np.array_equal(apart.last_us, alone.last_us, equal_nan=True)
        assert set(apart.replica.tolist()) <= {0, -1}
        assert apart.counters == alone.counters


@pytest.mark.parametrize(
    "features",
    ["", "cache", "pools", "ranks rules", "stages tiers pools rules", "drafts", "drafts pools ranks"],
)
def test_features_that_a_fleet_does_not_need_change_no_bit(
    features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [made_fleet(seed, features) for seed in range(15)]
    fitting = [one.run() for one in made]
    every = Features(*[1] * len(Features._fields))
    monkeypatch.setattr(
        "fastroof.simulation.fleet_run.fleet_run", lambda fleet: fleet_run(fleet._replace(has=every))
    )
    for one, alone in zip(made, fitting, strict=True):
        test_exactness.assert_equal(alone, one.run())


def test_a_loop_is_compiled_once_for_pools_and_one_for_what_most_runs_need() -> None:
    """Numba compiles by type, and that of an array includes whether it may be written."""
    settings, trace = EngineSettings(64, 8, 20), Trace([0.0], [10], [2])
    pool = pools.EnginePool(a_plan(), settings)
    one = new_fleet([pool], trace)
    two = new_fleet([pool] * 2, trace, link=pools.Link(1e9), takes_us=np.zeros(1))
    assert type(one.has) is type(two.has) is PlainFeatures
    assert not one.arena.flags.writeable
    assert not two.arena.flags.writeable
    ranks = new_fleet([pools.EnginePool(a_plan(2, "lockstep=all"), settings)], trace)
    assert type(ranks.has) is CommonFeatures


@pytest.mark.loops
@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("arrivals_s", [[0.0, 0.0, 0.0], [0.0, 0.0, 9.0]])
def test_a_request_without_room_stops_the_loop(dp: int, arrivals_s: list[float]) -> None:
    """It is rejected beforehand; the loop returns an error, and does not hang."""
    for clients, lockstep in itertools.product((None, 2), ("", "lockstep=all")):
        trace = Trace(arrivals_s, [10, 500, 10], [2, 2, 2], clients=clients)
        pool = pools.EnginePool(a_plan(dp, lockstep), EngineSettings(64, 8, 20), 2)
        assert fleet_run(new_fleet([pool], trace)) == CODE_STUCK


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_are_those_of_the_second_scheduler(asynchronous: bool) -> None:
    """It counts in seconds: with times in halves of a us both are exact."""
    rng = np.random.default_rng(asynchronous)
    plan = a_plan(3, "lockstep=all")

    def half_us(new_tokens: Sequence[int], context_len: Sequence[int]) -> float:
        return round(2.0 * plan.step_scalar(new_tokens, context_len)) / 2.0

    def of_ranks(ranks: Sequence[RankStep]) -> float:
        return max(half_us(*step) for step in ranks if step[0]) * US_PER_S

    for _ in range(10):
        trace, settings = a_workload(rng)
        settings = replace(
            settings, order="mixed", reserve_output=False, async_scheduling=asynchronous, timeout_s=math.inf
        )
        schedule = Schedule(8, settings.max_num_batched_tokens, settings.num_gpu_blocks, 4, 3, asynchronous)
        served = Fleet(trace, Pool(settings, half_us, ranks=3))
        requests = served.requests
        timed = [TimedRequest(one.arrival_us, one.prompt, one.output, one.cached) for one in requests]
        seen = replay(timed, of_ranks, schedule)
        served.run()
        assert seen.first_token_s.tolist() == [request.first_us for request in requests]
        assert seen.last_token_s.tolist() == [request.last_us for request in requests]
        assert seen.preemptions == sum(request.preemptions for request in requests)
        assert seen.steps == len(served.flights)


def test_more_replicas_than_requests_leave_some_idle() -> None:
    trace = Trace([0.0, 0.0, 0.0], [100, 100, 100], [5, 5, 5])
    settings = EngineSettings(512, 8, 100)
    for router in ("round_robin", "least_outstanding", "least_kv", "least_load"):
        outcomes = run_replicas(a_plan(), trace, settings, 5, router)
        # blocks are taken by the first step, which is later than that all arrive
        assert outcomes.replica.tolist() == [0, 1, 2]
        assert len(set(outcomes.last_us)) == 1


def test_any_number_of_threads_and_any_order_of_equal_requests_gives_the_same_bits() -> None:
    trace, settings = a_workload(np.random.default_rng(8))
    one = run_replicas(a_plan(), trace, settings, 7, threads=1)
    for threads in (2, 5, None):
        test_exactness.assert_equal(one, run_replicas(a_plan(), trace, settings, 7, threads=threads))


def test_rows_of_a_file_may_be_in_any_order() -> None:
    rng = np.random.default_rng(4)
    columns = [np.cumsum(rng.exponential(0.002, 60)), rng.integers(1, 60, 60), rng.integers(1, 30, 60)]
    settings, order = EngineSettings(64, 8, 40, 4), rng.permutation(60)
    shuffled = Trace(*(column[order] for column in columns))
    for router in ROUTINGS:
        one = run_replicas(a_plan(), Trace(*columns), settings, 3, router)
        other = run_replicas(a_plan(), shuffled, settings, 3, router)
        for name in ("first_us", "last_us", "replica"):
            assert np.array_equal(getattr(one, name)[order], shuffled.in_file_order(getattr(other, name)))


@pytest.mark.parametrize("router", ROUTINGS)
def test_nothing_is_lost_on_the_way(router: str) -> None:
    rng = np.random.default_rng(3)
    count = 300
    trace = Trace(
        np.cumsum(rng.exponential(0.002, count)), rng.integers(1, 400, count), rng.integers(1, 50, count)
    )
    settings = EngineSettings(512, 16, 400)
    outcomes = run_replicas(a_plan(), trace, settings, 3, router)
    assert (outcomes.status == 0).all()
    assert set(outcomes.replica) == {0, 1, 2}
    counters = outcomes.counters
    assert (
        counters["decode_tokens"] + counters["prefill_tokens"]
        >= (trace.input_tokens + trace.output_tokens - 1).sum()
    )
    assert outcomes.gaps.sum() == (trace.output_tokens - 1).sum()
    assert (outcomes.first_us > outcomes.arrival_us).all()
    assert (outcomes.last_us >= outcomes.first_us).all()
    # a request is as fast as one that is alone, or slower
    alone = run_replicas(a_plan(), trace.rate_scaled(1e-4), settings)
    assert (outcomes.last_us - outcomes.arrival_us >= (alone.last_us - alone.arrival_us) * (1 - 1e-9)).all()
    assert outcomes.series[:, -1].sum() == trace.output_tokens.sum()


def test_looking_at_the_load_helps_where_requests_differ() -> None:
    """Every second request is long: turns send all of these to one of two replicas."""
    count = 400
    trace = Trace(np.arange(count) * 0.04, np.full(count, 64), np.tile([200, 2], count // 2))
    settings = EngineSettings(512, 16, 2000)
    waited = {
        router: float(np.max(outcomes.first_us - outcomes.arrival_us))
        for router in ROUTINGS
        for outcomes in [run_replicas(a_plan(), trace, settings, 2, router)]
    }
    for router in ("least_outstanding", "least_load", "least_kv"):
        assert waited[router] < 0.5 * waited["round_robin"]


def test_what_can_never_run_is_sent_nowhere() -> None:
    trace = Trace([0.0, 0.0, 0.0], [100, 10_000, 100], [5, 5, 5])
    settings = EngineSettings(512, 8, 100)
    for router in ROUTINGS:
        outcomes = run_replicas(a_plan(), trace, settings, 2, router)
        assert outcomes.status.tolist() == [0, 2, 0]
        assert outcomes.replica[1] == -1
        assert np.isnan(outcomes.first_us[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 2.5}, "replicas"),
        ({"replicas": 2, "router": "random"}, "round_robin"),
        ({"replicas": 2, "threads": 0}, "threads"),
    ],
)
def test_no_such_replicas(given: dict[str, Any], message: str) -> None:
    trace = Trace([0.0], [100], [5])
    with pytest.raises(SimulationError, match=message):
        run_replicas(a_plan(), trace, EngineSettings(512, 8, 100), **given)
