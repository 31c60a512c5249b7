"""Ranks of attention data parallelism in estimates: naive closed forms, and simulated random questions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from benchmarks.accuracy import simulated_loops
from fastroof import Workload, compile_plan, load_tables, simulate
from fastroof import serving as fastroof_serving
from fastroof.plan.calls import rank_rules
from fastroof.serving import SpeculativeDecoding
from tests.reference import prefill_first, serving

# without the start of a run
estimate = partial(fastroof_serving.estimate, requests_per_client="steady")

LOADS = [
    # isl, osl, clients of all four ranks, tokens of a step
    (1024, 128, 3, 8192), (1024, 128, 4, 8192), (3000, 64, 50, 8192), (6000, 32, 100, 8192),
    (500, 300, 17, 1024), (100, 1, 20, 4096), (3500, 100, 40, 4096),
    # in chunks, and more prompts than the budget takes
    (6000, 200, 8, 1024), (4000, 3, 200, 2048),
]  # fmt: skip


@pytest.fixture(scope="module")
def tables():
    return load_tables("h100")


@pytest.fixture(scope="module")
def plans(tables):
    return {
        engine: compile_plan(
            "qwen3-30b-a3b",
            "h100",
            tables,
            dp=4,
            ep=4,
            engine=engine,
            max_num_batched_tokens=9000,
            front_end=0,
        )
        for engine in simulated_loops.ENGINES
    }


@pytest.mark.slow
@pytest.mark.loops
@pytest.mark.parametrize("engine", simulated_loops.ENGINES)
@pytest.mark.parametrize("arrivals", ["closed", "random"])
@pytest.mark.parametrize("rounds", [None, 5.0])
def test_ranks_are_the_closed_form(plans, engine, arrivals, rounds):
    assert_closed_form(plans[engine], arrivals, rounds, LOADS)


@pytest.mark.loops
def test_ranks_with_more_prompts_than_steps_take_are_the_closed_form(plans):
    for engine in ("vllm", "sglang"):
        assert_closed_form(plans[engine], "closed", None, [(6000, 200, 6, 1024), (4000, 3, 200, 2048)])


@pytest.mark.loops
def test_balanced_prompts_start_at_once_while_a_rank_has_no_client(plans):
    plan = plans["trtllm-1.1"]
    assert_closed_form(plan, "random", None, [(1000, 5, 1, 8192), (1000, 5, 3, 8192)])
    trace = Workload(requests=20, isl=1000, osl=5, clients=1).trace()
    simulated = simulate(plan, trace, max_num_batched_tokens=8192).summary(with_range=False)
    seen = estimate(plan, 1000, 5, 1, 8192, length_spread=0.0)
    assert seen.ttft_ms == pytest.approx(simulated["ttft_ms"]["mean"], rel=1e-6)
    assert seen.tpot_ms == pytest.approx(simulated["tpot_ms"]["mean"], rel=1e-3)


@pytest.mark.loops
def test_outputs_of_one_token_wait_for_prompts_of_other_ranks(plans):
    for arrivals in ("closed", "random"):
        assert_closed_form(plans["vllm"], arrivals, None, [(1000, 1, clients, 2048) for clients in (2, 4)])
    alone, few, each = (estimate(plans["vllm"], 1000, 1, clients).ttft_ms for clients in (1, 2, 4))
    assert alone < few < each


def assert_closed_form(plan, arrivals, rounds, loads):
    scheduling = plan.profile.scheduling
    for isl, osl, clients, budget in loads:
        if isl > budget and not scheduling.chunked_prefill:
            continue
        got = estimate(
            plan,
            isl,
            osl,
            clients,
            budget,
            max_kv_tokens=1e7,
            arrivals=arrivals,
            requests_per_client=rounds or "steady",
        )
        is_first = scheduling.order == "prefill_first"
        met = float(scheduling.async_scheduling)
        if arrivals == "random":
            # and wait for the step that an asynchronous scheduler has made ahead
            met = None if is_first else -1.0 - met
        closed_form = prefill_first.closed_form if is_first else serving.closed_form
        expected = closed_form(
            plan, isl, osl, clients / 4, budget, max_kv_tokens=1e7, rounds=rounds, rules=rank_rules(plan),
            steps_met=met,
            is_chunked=scheduling.chunked_prefill, osl_reserved=plan.profile.memory.osl_reserved,
        )  # fmt: skip
        found = (got.ttft_ms, got.tpot_ms, got.decode_step_us / 1e3, got.mixed_step_us / 1e3)
        np.testing.assert_allclose(np.array(found) * 1e3, expected[:4], rtol=1e-9)
        assert got.mixed_share == pytest.approx(expected.mixed_share, rel=1e-9)


@pytest.mark.loops
def test_ranks_wait_for_each_others_prompts(plans):
    """One client a rank sees no prompt of its own rank, and those of the three others."""
    for engine in ("vllm", "vllm-0.12", "sglang"):
        alone, few, each = (estimate(plans[engine], 4000, 100, clients).tpot_ms for clients in (1, 2, 4))
        assert alone < few < each
    vllm = estimate(plans["vllm"], 4000, 100, [1, 4])
    assert vllm.mixed_share[0] == 0.0
    assert vllm.mixed_share[1] == pytest.approx(1.0 - (1.0 - 1.0 / 101.0) ** 3)
    # all of equal requests run their prompts at once, where prompts run first
    together = estimate(plans["sglang"], 4000, 100, 4, length_spread=0.0)
    assert together.tpot_ms < estimate(plans["sglang"], 4000, 100, 4).tpot_ms


@pytest.mark.loops
def test_experts_compute_what_the_engine_pads_to(tables, plans):
    padded = plans["vllm-0.12"]
    ranks = replace(padded.profile.data_parallel, prompt_tokens="sum")
    summed = compile_plan(
        "qwen3-30b-a3b", "h100", tables, dp=4, ep=4, engine=replace(padded.profile, data_parallel=ranks),
        max_num_batched_tokens=9000, front_end=0,
    )  # fmt: skip
    of_padded, of_sum = (estimate(plan, 4000, 100, 32) for plan in (padded, summed))
    assert of_padded.decode_step_us == of_sum.decode_step_us
    assert of_padded.tpot_ms > 1.1 * of_sum.tpot_ms


@pytest.mark.loops
def test_dense_ranks_are_replicas_but_in_old_vllm(tables):
    # from 0.5.10 on SGLang pads prompts to its graphs, but not those of several ranks
    for engine in ("vllm", "vllm-0.12", "sglang-0.5.9", "trtllm-1.1"):
        one, four = (
            compile_plan(
                "llama-3.1-8b", "h100", tables, dp=dp, engine=engine, max_num_batched_tokens=9000, front_end=0
            )
            for dp in (1, 4)
        )
        alone, ranks = estimate(one, 2000, 200, 8), estimate(four, 2000, 200, 32)
        if engine == "vllm-0.12":
            assert ranks.tpot_ms > 1.02 * alone.tpot_ms
        else:
            assert ranks.tpot_ms == alone.tpot_ms


def test_estimates_of_ranks_are_near_a_simulation(tables):
    """A small part of ``python -m benchmarks.accuracy simulated-loops``."""
    found = simulated_loops.sample(tables, (1, 2, 4, 8), 64)
    balanced = [one for one in found if one.question.engine.startswith("trtllm") and one.question.ranks > 1]
    others = [one for one in found if one not in balanced]
    tpot = np.abs([one.tpot for one in others])
    assert np.median(tpot) < 0.015
    assert (tpot < 0.05).mean() > 0.85
    assert tpot.max() < 0.2
    of_one = [one for one in found if one.question.ranks == 1]
    assert max(abs(one.tpot) for one in of_one) < 0.05
    assert np.median(np.abs([one.ttft for one in of_one])) < 0.02
    # prompts that wait for each other run together in the estimate, however seldom they come
    assert np.median(np.abs([one.tpot for one in balanced])) < 0.06


@pytest.mark.loops
def test_prompts_held_back_and_drafts_take_their_part(tables, plans):
    plan = plans["vllm"]
    now, held = (estimate(plan, 1000, 200, 30, wait_steps=wait) for wait in (0.0, 8.0))
    assert held.ttft_ms > now.ttft_ms
    draft = compile_plan(
        "qwen3-30b-a3b", "h100", tables, dp=4, ep=4, engine="vllm", max_num_batched_tokens=9000, front_end=0
    )
    guess, drafted = (
        estimate(plan, 1000, 200, 30, speculation=SpeculativeDecoding(3, 2.5, draft=by))
        for by in (None, draft)
    )
    # 30 clients of 4 ranks: two of them have one more
    assert drafted.decode_step_us > guess.decode_step_us + 3 * draft.decode_us(7, 1100)
    assert drafted.tpot_ms > guess.tpot_ms
