"""The compiled engine against the naive scheduler, to the last bit, and what both must keep to."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.errors import SimulationError
from fastroof.simulation.fleet_run import run_engine, served_by
from fastroof.simulation.pools import EnginePool
from tests.reference.fleet import serve
from tests.reference.made_workloads import PLANS, a_trace, an_engine, made_workload, sampled
from tests.reference.scheduler import FINISHED, REJECTED, TIMED_OUT

WORKLOADS, PREEMPTIONS = 2700, 200_000
"""How many workloads the whole proof takes, and how often their requests must have lost their blocks."""

MANTISSA_BITS = 7
"""Of a gap's logarithm to 2, for the histogram."""


@pytest.fixture(scope="module")
def plans(h100):
    return {
        kind: fastroof.compile_plan(model, "h100", h100, engine="vllm", max_num_batched_tokens=2048)
        for kind, model in PLANS.items()
    }


def served(plans, work):
    """What the naive scheduler and the compiled engine make of a workload."""
    plan = plans[work.plan]
    naive = serve(work.trace, work.settings, plan.step_scalar, time_scale=work.time_scale)
    return naive, run_engine(plan, work.trace, work.settings, time_scale=work.time_scale)


def column(requests, name):
    return np.array([getattr(request, name) for request in requests])


def assert_same_requests(requests, got):
    """What becomes of requests, and all of their times to the last bit."""
    status = column(requests, "status")
    np.testing.assert_array_equal(got.status, status)
    # one that is refused never arrives
    arrived = status != REJECTED
    np.testing.assert_array_equal(got.arrival_us[arrived], column(requests, "arrival_us")[arrived])
    for name in ("first_us", "last_us", "preemptions"):
        np.testing.assert_array_equal(getattr(got, name), column(requests, name), err_msg=name)


def assert_same(naive, got):
    """Requests, all counts, and all gaps by the bin that they fall into."""
    assert_same_requests(naive.requests, got)
    assert gap_counts(got.gaps) == naive_gap_counts(naive)
    assert {name: got.counters[name] for name in naive_counters(naive)} == naive_counters(naive)


def gap_counts(gaps):
    """How many gaps are in each bin that has any."""
    at = np.flatnonzero(gaps)
    return dict(zip(at.tolist(), gaps[at].tolist(), strict=True))


def naive_gap_counts(naive):
    """The same of a list: bins are 128 of each power of two, from 1 us on."""
    counts = {}
    for gap_us in naive.gaps_us:
        mantissa, exponent = math.frexp(gap_us)
        at = max((exponent - 1) * 128 + int((2.0 * mantissa - 1.0) * 128), 0)
        counts[at] = counts.get(at, 0) + 1
    return counts


def naive_counters(naive):
    steps = [step for flight in naive.flights for step in flight.made]
    kinds = [(any(step.is_prompt), not all(step.is_prompt)) for step in steps]
    chunks = [c for step in steps for c in zip(step.is_prompt, step.new_tokens, strict=True)]
    return {
        "steps": len(steps),
        "mixed_steps": kinds.count((True, True)),
        "prefill_steps": kinds.count((True, False)),
        "decode_steps": kinds.count((False, True)),
        "preemptions": sum(column(naive.requests, "preemptions").tolist()),
        "prefill_tokens": sum(new for is_prompt, new in chunks if is_prompt),
        "decode_tokens": sum(new for is_prompt, new in chunks if not is_prompt),
        "end_us": naive.flights[-1].end_us if steps else 0.0,
    }


# -- the proof ------------------------------------------------------------------------------------


def prove(plans, works):
    """Hold workloads to the naive scheduler; return how often it preempted, and what became of requests."""
    preemptions, statuses = 0, np.zeros(3, np.int64)
    for work in works:
        naive, got = served(plans, work)
        assert_same(naive, got)
        preemptions += int(column(naive.requests, "preemptions").sum())
        statuses += np.bincount(column(naive.requests, "status"), minlength=3)
    return preemptions, statuses


@pytest.mark.loops
@pytest.mark.usefixtures("features")
def test_tiny_workloads_are_served_to_the_bit(plans):
    """Every line of the loops, with the JIT off too."""
    preemptions, statuses = prove(plans, (made_workload(Random(seed), "tiny") for seed in range(220)))
    assert preemptions > 100
    assert (statuses > 10).all()


@pytest.mark.slow
def test_workloads_are_served_to_the_bit(plans):
    preemptions, statuses = prove(plans, map(made_workload, map(Random, range(200))))
    assert preemptions > 5000
    assert (statuses > 100).all()


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["tiny", "usual", "scarce"]))
def test_any_workload_is_served_to_the_bit(plans, seed, kind):
    prove(plans, [made_workload(Random(seed), kind)])


@pytest.mark.slow
@pytest.mark.release
def test_thousands_of_workloads_equal_the_naive_engine(plans):
    """Thousands of workloads, and preemptions by the hundred thousand."""
    # most of them lack blocks nearly all the time
    works = (made_workload(Random(1000 + i), "scarce" if i % 8 else None) for i in range(WORKLOADS))
    preemptions, statuses = prove(plans, works)
    print(f"{WORKLOADS} workloads, {statuses.sum()} requests, {preemptions} preemptions: no bit differs")
    assert WORKLOADS >= 2000
    assert preemptions >= PREEMPTIONS


def with_pauses(work, seed):
    """A workload whose prompts wait for decode steps or, prompts first, also for free slots."""
    random = Random(seed)
    pauses = {"prefill_schedule_interval": random.choice([2, 3, 5, 17])}
    if work.settings.order == "prefill_first":
        pauses = {
            "prefill_decode_interval": random.choice([0, 1, 4, 16]),
            "min_free_slots_delay": random.choice([0, 2, 3, 100]),
        }
    return work._replace(settings=replace(work.settings, **pauses))


@pytest.mark.loops
@pytest.mark.parametrize(
    "kind",
    # minutes without the JIT
    ["tiny", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("usual", "scarce"))],
)
def test_prompts_that_wait_are_served_to_the_bit(plans, kind):
    seeds = sampled(range(150 if kind == "tiny" else 40))
    works = [made_workload(Random(seed), kind) for seed in seeds]
    waiting = [with_pauses(work, seed) for seed, work in enumerate(works)]
    prove(plans, waiting)
    firsts, later = (
        [run_engine(plans[one.plan], one.trace, one.settings).first_us for one in which]
        for which in (works, waiting)
    )
    differ = sum(
        not np.array_equal(one, other, equal_nan=True) for one, other in zip(firsts, later, strict=True)
    )
    print(f"{kind}: {differ} of {len(works)} differ from engines whose prompts do not wait")
    assert differ > len(works) // 10


@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["tiny", "usual", "scarce"]))
def test_any_prompts_that_wait_are_served_to_the_bit(plans, seed, kind):
    prove(plans, [with_pauses(made_workload(Random(seed), kind), seed)])


# -- what both keep to ----------------------------------------------------------------------------

SOME = range(300, 340)


def assert_equal(one, other):
    for name in ("arrival_us", "first_us", "last_us", "preemptions", "status", "gaps", "series"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name), err_msg=name)
    assert one.counters == other.counters


def test_repeated_and_concurrent_runs_have_the_same_bits(plans):
    works = [made_workload(Random(seed)) for seed in SOME]

    def run(work):
        return run_engine(plans[work.plan], work.trace, work.settings, time_scale=work.time_scale)

    alone = [run(work) for work in works]
    for threads in (1, 3, 8):
        with ThreadPoolExecutor(threads) as pool:
            for one, other in zip(alone, pool.map(run, works), strict=True):
                assert_equal(one, other)


def test_requests_in_any_order_of_the_file_are_served_alike(plans):
    """Arrivals decide, and where they are equal requests that are equal too may change places."""
    rng = np.random.default_rng(0)
    count = 60
    arrivals = np.repeat(np.cumsum(rng.exponential(0.02, count // 2)), 2)
    sizes = rng.integers(1, 60, (2, count // 2)).repeat(2, axis=1)
    settings = an_engine(num_gpu_blocks=20, block_size=7)
    one = run_engine(plans["whole"], a_trace(arrivals, *sizes), settings)
    assert one.counters["preemptions"]
    order = rng.permutation(count)
    other = run_engine(plans["whole"], a_trace(arrivals[order], *sizes[:, order]), settings)
    assert_equal(one, other)


@pytest.mark.slow
def test_requests_tokens_and_blocks_are_neither_lost_nor_found(plans):
    for seed in SOME:
        work = made_workload(Random(seed))
        naive, got = served(plans, work)
        assert naive.free_blocks == work.settings.num_gpu_blocks
        assert not any(request.blocks for request in naive.requests)
        finished, refused = got.status == FINISHED, got.status == REJECTED
        outputs, prompts = work.trace.output_tokens, work.trace.input_tokens
        assert np.isin(got.status, (FINISHED, TIMED_OUT, REJECTED)).all()
        np.testing.assert_array_equal(np.isfinite(got.last_us), finished)
        assert (np.isfinite(got.first_us) >= finished).all()
        assert np.isnan(got.first_us[refused]).all()
        # every token after the first has a gap before it
        gaps = int((outputs[finished] - 1).sum())
        assert got.gaps.sum() == gaps if finished.all() else got.gaps.sum() >= gaps
        counters = got.counters
        assert counters["steps"] == sum(counters[f"{kind}_steps"] for kind in ("mixed", "prefill", "decode"))
        assert counters["preemptions"] == got.preemptions.sum()
        if (finished | refused).all():
            # prompts are computed but for what is cached, and more where a request lost its blocks
            least = int((prompts - work.trace.cached_tokens)[finished].sum())
            assert counters["prefill_tokens"] >= least
            if not counters["preemptions"]:
                assert counters["prefill_tokens"] == least
                assert counters["decode_tokens"] == gaps


@pytest.mark.slow
def test_nothing_comes_before_its_cause(plans):
    for seed in SOME:
        work = made_workload(Random(seed))
        _, got = served(plans, work)
        seen = np.isfinite(got.first_us)
        assert (got.first_us[seen] > got.arrival_us[seen]).all()
        done = got.status == FINISHED
        assert (got.last_us[done] >= got.first_us[done]).all()
        alone = work.trace.output_tokens == 1
        np.testing.assert_array_equal(got.last_us[done & alone], got.first_us[done & alone])
        ends = got.last_us[done]
        assert got.counters["end_us"] >= ends.max(initial=0.0)
        assert got.counters["busy_us"] <= got.counters["end_us"] * (1 + 1e-12)
        # who came first has its first token first, where none is thrown out or gives up
        if not got.preemptions.any() and not work.settings.timeout_s < math.inf:
            assert (np.diff(got.first_us[seen]) >= 0.0).all()
        # a step has a token of a request at most, and so many new ones in all
        steps = got.counters["steps"]
        assert steps >= work.trace.output_tokens[done].max(initial=0)
        computed = got.counters["prefill_tokens"] + got.counters["decode_tokens"]
        # decode steps without prompts are limited by the number of requests
        most = max(work.settings.max_num_batched_tokens, work.settings.max_num_seqs)
        assert computed <= steps * most


def test_twice_as_slow_with_twice_as_much_time_is_twice_as_late(plans):
    """Doubling is exact, so that every time is doubled to the bit, and every decision the same."""
    for seed in SOME:
        work = made_workload(Random(seed))
        trace, settings = work.trace, work.settings
        slow = replace(trace, arrival_s=2.0 * trace.arrival_s, think_s=2.0 * trace.think_s)
        patient = replace(settings, timeout_s=2.0 * settings.timeout_s)
        one = run_engine(plans[work.plan], trace, settings, time_scale=work.time_scale)
        two = run_engine(plans[work.plan], slow, patient, time_scale=2.0 * work.time_scale)
        for name in ("arrival_us", "first_us", "last_us"):
            np.testing.assert_array_equal(getattr(two, name), 2.0 * getattr(one, name))
        np.testing.assert_array_equal(two.status, one.status)
        np.testing.assert_array_equal(two.preemptions, one.preemptions)
        assert two.counters["steps"] == one.counters["steps"]
        # a power of two further
        np.testing.assert_array_equal(two.gaps[128:], one.gaps[:-128])


def test_unneeded_blocks_and_places_change_nothing(plans):
    for seed in SOME:
        work = made_workload(Random(seed), "usual")
        trace, block_size = work.trace, work.settings.block_size
        needed = int((-(-(trace.input_tokens + trace.output_tokens) // block_size)).sum())
        budget = max(work.settings.max_num_batched_tokens, 2 * len(trace))
        roomy = replace(
            work.settings, max_num_batched_tokens=budget, num_gpu_blocks=needed, max_num_seqs=len(trace)
        )
        more = replace(roomy, num_gpu_blocks=2 * needed + 5, max_num_seqs=2 * len(trace))
        one, two = (run_engine(plans[work.plan], trace, settings) for settings in (roomy, more))
        assert not one.preemptions.any()
        np.testing.assert_array_equal(one.first_us, two.first_us)
        np.testing.assert_array_equal(one.last_us, two.last_us)


@pytest.mark.parametrize("order", ["mixed", "prefill_first"])
def test_one_request_is_served_alike_by_every_scheduler(plans, order):
    plan = plans["whole"]
    trace = a_trace([0.25], [5000], [40])
    one, other = (
        run_engine(plan, trace, an_engine(order=order, async_scheduling=on)) for on in (False, True)
    )
    # blocks are taken a step earlier, and so seen by the series
    assert_equal(one._replace(series=other.series), other)
    chunks_us = (
        plan.step_scalar([2048], [0]) + plan.step_scalar([2048], [2048]) + plan.step_scalar([904], [4096])
    )
    assert one.first_us[0] == pytest.approx(0.25e6 + chunks_us, rel=1e-12)
    decodes_us = plan.decode_us(1, np.arange(5001, 5040)).sum()
    assert one.last_us[0] - one.first_us[0] == pytest.approx(decodes_us, rel=1e-12)


@pytest.mark.parametrize("order", ["mixed", "prefill_first"])
def test_an_asynchronous_engine_is_one_whose_clients_take_a_moment(plans, order):
    """A request that comes with the end of a step finds the next one made, or just comes too late for it."""
    rng = np.random.default_rng(1)
    inputs, outputs = rng.integers(1, 3000, 300), rng.integers(1, 40, 300)
    at_once = a_trace([0] * 300, inputs, outputs, clients=12)
    a_moment = replace(at_once, think_s=1e-6)
    late = run_engine(plans["whole"], at_once, an_engine(order=order, async_scheduling=True))
    slow = run_engine(plans["whole"], a_moment, an_engine(order=order))
    np.testing.assert_array_equal(late.last_us, slow.last_us)
    np.testing.assert_array_equal(late.first_us, slow.first_us)
    np.testing.assert_array_equal(late.arrival_us[:12], slow.arrival_us[:12])
    np.testing.assert_array_equal(late.arrival_us[12:] + 1.0, slow.arrival_us[12:])


def test_a_trace_in_which_no_request_fits_has_no_steps(plans):
    got = run_engine(plans["whole"], a_trace([0, 1], [90, 90], [9, 9]), an_engine(num_gpu_blocks=2))
    assert (got.status == REJECTED).all()
    assert got.counters["steps"] == 0


@pytest.mark.loops
def test_a_request_without_room_in_an_empty_engine_is_an_error(plans):
    """Such requests are refused before anything runs; the loop does not wait for them either."""
    trace, settings = a_trace([0], [20], [5]), an_engine(block_size=4)
    pool = EnginePool(plans["whole"], replace(settings, num_gpu_blocks=2))
    with pytest.raises(SimulationError, match="no room in an empty engine; give more num_gpu_blocks"):
        served_by([pool], trace)
