"""Draft tokens in simulations: the naive fleet, what is drawn or given, and the closed form."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Pool, SimulationError, SpeculativeDecoding, Trace
from fastroof.compiled import steps
from fastroof.errors import FastroofError
from fastroof.plan.speculation import speculated
from fastroof.serving import estimate
from fastroof.simulation.drafts import ONE, draws, geometric_rates
from fastroof.simulation.fleet_run import run_pools
from tests.reference import drafts, verification
from tests.reference.made_fleets import a_plan, prove
from tests.reference.scheduler import Step
from tests.simulation import test_exactness

FEATURES = ("", "ranks", "cache", "tiers", "pools", "rules", "pools ranks", "pools cache")


@pytest.fixture(scope="module")
def plan(h100: Any) -> Any:
    return fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, engine="vllm", max_num_batched_tokens=8192, front_end=0
    )


@pytest.fixture(scope="module")
def trace() -> Trace:
    return fastroof.Workload(rate=20, requests=200, isl=500, osl=60, seed=1).trace()


# -- the naive fleet --------------------------------------------------------------------------------


@pytest.mark.loops
@pytest.mark.parametrize("others", FEATURES)
def test_fleets_are_the_naive_ones(others: str) -> None:
    seen = prove(f"drafts {others}", range(25))
    assert min(seen["drafts"], seen["preemptions"], seen["timed out"]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("others", FEATURES)
def test_many_fleets_are_the_naive_ones(others: str) -> None:
    seen = prove(f"drafts {others}", range(25, 150))
    assert min(seen["drafts"], seen["preemptions"], seen["timed out"]) > 0


@pytest.mark.loops
def test_nothing_changes_without_draft_tokens(plan: Any, trace: Trace) -> None:
    alone = fastroof.simulate(plan, trace)
    for none in (None, SpeculativeDecoding(0, 1.0)):
        same = fastroof.simulate(plan, trace, speculation=none)
        test_exactness.assert_equal(alone.outcomes, same.outcomes)
        assert same.summary() == alone.summary()
    assert "acceptance_length" not in alone.summary()


# -- the time of a step -----------------------------------------------------------------------------


@pytest.mark.parametrize("draft", [None, "mtp"])
def test_a_step_is_that_of_the_naive_verification(h100: Any, draft: str | None) -> None:
    """Rows by hand and rooflines, in steps with decodes, with prompts and with both."""
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="kernels", max_num_batched_tokens=8192)
    loops = speculated(plan, SpeculativeDecoding(3, 2.0, draft))
    naive = drafts.Drafts(loops.arena, 4, 0, (), 0, [])
    rng = np.random.default_rng(1)
    for _ in range(40):
        contexts = rng.integers(10, 5000, int(rng.integers(0, 60))).tolist()
        chunks = [(int(rng.integers(2, 900)), int(rng.integers(0, 900))) for _ in range(int(rng.integers(3)))]
        if not contexts and not chunks:
            continue
        new = [4] * len(contexts) + [new for new, _ in chunks]
        step = Step([], new, [*contexts, *(context for _, context in chunks)])
        step.verifies = [True] * len(contexts) + [False] * len(chunks)
        own_us, draft_us = naive.times_us(step)
        expected_us = verification.mixed_step_us(plan, [(4, context) for context in contexts], chunks)
        assert own_us == pytest.approx(expected_us, rel=1e-9)
        assert (draft_us > 0.0) == (draft is not None)


def test_a_step_is_one_that_verifies(plan: Any) -> None:
    loops = speculated(plan, SpeculativeDecoding(3, 2.0))
    naive = drafts.Drafts(loops.arena, 4, 0, (), 0, [])
    step = Step([], [4] * 8, [996] * 8)
    step.verifies = [True] * 8
    assert naive.times_us(step)[0] == pytest.approx(plan.verify_us(8, 1000, 4), rel=1e-12)


# -- what steps keep --------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", [2.2, (0.8, 0.5, 0.25), 1.0, 4.0, (0.3, 0.3, 0.0)])
def test_drawn_tokens_have_the_rates_of_positions(accepted: Any) -> None:
    drafting = Pool(a_plan(), speculation=SpeculativeDecoding(3, accepted)).drafting
    assert drafting is not None
    length = SpeculativeDecoding(3, accepted).acceptance_length
    assert 1.0 + sum(drafting.rates) == pytest.approx(length, abs=1e-12)
    count, output = 200, 300
    naive = drafts.Drafts(None, 4, 0, drafting.rates, 7, [output] * count)
    kept = Counter(naive.kept(row, left) for row in range(count) for left in range(4, output))
    total = sum(kept.values())
    for position, rate in enumerate(drafting.rates):
        share = sum(number for tokens, number in kept.items() if tokens > position + 1) / total
        assert share == pytest.approx(rate, abs=4.0 * math.sqrt(rate * (1.0 - rate) / total) + 1e-9)


def test_a_mean_length_has_one_rate_for_all_positions() -> None:
    rates = np.array(geometric_rates(5, 3.0))
    assert rates[1:] / rates[:-1] == pytest.approx(rates[0])
    assert geometric_rates(3, 1.0) == pytest.approx((0.0, 0.0, 0.0), abs=1e-15)
    assert geometric_rates(3, 4.0) == (1.0, 1.0, 1.0)


def test_a_request_keeps_the_same_wherever_it_is_served(plan: Any, trace: Trace) -> None:
    """A lone request has as many steps on one engine and on replicas, whatever came before it."""
    speculation = SpeculativeDecoding(3, 2.2)
    lone = Trace(np.arange(20) * 10.0, [500] * 20, [60] * 20)
    runs = [
        fastroof.simulate(plan, lone, speculation=speculation),
        fastroof.simulate(plan, lone, speculation=speculation, replicas=3),
        fastroof.simulate(plan, lone, speculation=speculation, replicas=3, router="least_kv"),
    ]
    lengths = [run.summary(with_range=False)["acceptance_length"] for run in runs]
    assert lengths == [lengths[0]] * 3
    other = fastroof.simulate(plan, lone, speculation=speculation, seed=1)
    assert other.summary(with_range=False)["acceptance_length"] != lengths[0]
    drafting = Pool(plan, speculation=speculation).drafting
    keys = draws([drafting], np.array([5, 2]), np.array([3, 3]), 0)["drafted"]["key"]
    assert keys.tolist() == np.random.default_rng(0).integers(0, ONE, 6)[[5, 2]].tolist()


@pytest.mark.parametrize(("kept", "decodes"), [(1, 59), (2, 30), (4, 15), ([3, 1], 29), ([4, 4, 4, 1], 18)])
def test_given_tokens_are_kept(plan: Any, kept: Any, decodes: int) -> None:
    """One token comes with the prompt, and 59 with as many steps as they need."""
    lone = Trace([0.0, 50.0], [500, 500], [60, 60])
    given = kept if isinstance(kept, int) else [kept, kept]
    sim = fastroof.simulate(plan, lone, speculation=SpeculativeDecoding(3, 2.0), kept_tokens=given)
    summary = sim.summary(with_range=False)
    assert summary["decode_steps"] == 2 * decodes
    assert summary["acceptance_length"] == pytest.approx(59 / decodes)
    # tokens of a step come together: a gap for each step, and TPOT over all tokens
    assert sim.outcomes.gaps.sum() == 2 * decodes
    times = sim.requests.to_pylist()[0]
    itl_ms = summary["itl_ms"]["mean"]
    assert times["tpot_ms"] * 59 == pytest.approx(itl_ms * decodes, rel=0.005)


def test_given_tokens_follow_the_rows_of_the_file(plan: Any) -> None:
    unsorted = Trace([50.0, 0.0], [500, 500], [60, 60])
    sim = fastroof.simulate(plan, unsorted, speculation=SpeculativeDecoding(3, 2.0), kept_tokens=[[4], [1]])
    fast, slow = sim.requests["tpot_ms"].to_pylist()
    assert fast < 0.35 * slow


def test_rejected_tokens_keep_their_blocks(plan: Any) -> None:
    """vLLM allocates blocks for all tokens that a step verifies, and for the draft's next ones."""
    lone, sizes = Trace([0.0], [100], [50]), {"block_size": 1, "num_gpu_blocks": 1000}
    peaks = {
        draft: fastroof.simulate(
            plan, lone, speculation=SpeculativeDecoding(3, 1.0, draft), **sizes
        ).outcomes.counters["peak_blocks"]
        for draft in (None, "mtp")
    }
    # the last step computes one token after 148 and verifies three drafts
    assert peaks == {None: 148 + 4, "mtp": 148 + 4 + 3}


# -- the closed form --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "options", "speculation"),
    [
        ("llama-3.1-8b", {}, SpeculativeDecoding(3, (0.8, 0.5, 0.25))),
        ("llama-3.1-70b", {"tp": 8}, SpeculativeDecoding(4, 2.5, "mtp")),
        ("gpt-oss-20b", {}, SpeculativeDecoding(3, 2.4, "mtp")),
    ],
)
def test_closed_loops_agree_with_estimates(
    h100: Any, model: str, options: dict[str, Any], speculation: SpeculativeDecoding
) -> None:
    plan = fastroof.compile_plan(
        model, "h100", h100, engine="vllm", max_num_batched_tokens=8192, front_end=0, **options
    )
    for isl, osl, clients in ((1024, 256, 8), (1024, 256, 48), (128, 512, 64)):
        rng, count = np.random.default_rng(isl), 40 * clients
        inputs, outputs = (np.rint(size * rng.uniform(0.8, 1.2, count)).astype(int) for size in (isl, osl))
        loop = Trace(np.zeros(count), inputs, outputs, clients=clients)
        sizes = {"max_num_batched_tokens": 8192, "async_scheduling": False}
        got = fastroof.simulate(plan, loop, speculation=speculation, max_num_seqs=256, **sizes).outcomes
        later = slice(13 * clients, 38 * clients)
        tpot_ms = ((got.last_us - got.first_us) / np.maximum(outputs - 1, 1))[later].mean() / 1e3
        e2e_ms = (got.last_us - got.arrival_us)[later].mean() / 1e3
        seen = estimate(plan, isl, osl, clients, 8192, speculation=speculation, requests_per_client="steady")
        assert tpot_ms == pytest.approx(seen.tpot_ms, rel=0.02)
        assert e2e_ms == pytest.approx(seen.request_latency_ms, rel=0.03)


def test_a_capacity_counts_drafts(plan: Any) -> None:
    load = fastroof.Workload(rate=10, requests=300, isl=500, osl=100, seed=1)
    limits = {"tpot_p99_ms": 12.0, "steady": False}
    alone = fastroof.capacity(plan, load, **limits)
    more = fastroof.capacity(plan, load, speculation=SpeculativeDecoding(3, 2.5), **limits)
    assert more.requests_per_s > 1.2 * alone.requests_per_s
    assert more.relative_error is None


# -- memory, settings and what is refused -----------------------------------------------------------


def test_drafts_take_memory_and_tokens_of_a_step(plan: Any, trace: Trace) -> None:
    alone, drafted = Pool(plan), Pool(plan, speculation=SpeculativeDecoding(3, 2.0, "mtp"))
    ours, others = drafted.settings(trace), alone.settings(trace)
    assert ours.num_gpu_blocks < others.num_gpu_blocks
    few = Pool(plan, speculation=SpeculativeDecoding(3, 2.0), max_num_batched_tokens=200)
    assert few.settings(trace).max_num_seqs == 50
    assert steps.open_plan(plan.arena).max_num_batched_tokens == 8192


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kept_tokens": 2}, "kept_tokens needs speculation"),
        ({"kept_tokens": 5}, "a number from 1 to 4"),
        ({"kept_tokens": [[1, 9]] * 200}, "numbers from 1 to 4, got 9 for request 0"),
        ({"kept_tokens": [[1]]}, "1 sequences and trace .* 200 requests"),
        ({"kept_tokens": "all"}, "a sequence of them for each request"),
        ({"max_num_seqs": 64, "max_num_batched_tokens": 128}, "64 x 4 tokens .* at most 32 requests"),
    ],
)
def test_wrong_drafts_are_refused(plan: Any, trace: Trace, options: Any, message: str) -> None:
    speculation = None if "needs" in message else SpeculativeDecoding(3, 2.0)
    with pytest.raises(SimulationError, match=message):
        fastroof.simulate(plan, trace, speculation=speculation, **options)


def test_what_is_not_simulated_with_drafts_is_refused(h100: Any, plan: Any, trace: Trace) -> None:
    stages = fastroof.compile_plan("llama-3.1-8b", "h100", h100, pp=2)
    with pytest.raises(FastroofError, match="drafting across stages is not modelled"):
        fastroof.simulate(stages, trace, speculation=SpeculativeDecoding(3, 2.0))
    sim = fastroof.simulate(plan, trace, speculation=SpeculativeDecoding(3, 2.0))
    with pytest.raises(SimulationError, match="the power of drafts is unknown"):
        sim.energy()
    assert sim.range()["basis"] == "unknown: steps that verify draft tokens were not measured"
    assert run_pools(sim.pools, trace).counters["kept_drafts"] > 0
