"""Corners of the compiled engine that drawn workloads seldom meet, against the naive scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fastroof
from fastroof.simulation import EngineSettings, Trace
from fastroof.simulation.fleet_run import run_engine
from tests.reference.fleet import serve
from tests.simulation.test_exactness import assert_same_requests

pytestmark = pytest.mark.loops


def served(plan, trace, settings):
    """Hold the engine to the naive scheduler; return what it made."""
    naive, got = serve(trace, settings, plan.step_scalar), run_engine(plan, trace, settings)
    assert_same_requests(naive.requests, got)
    assert got.gaps.sum() == len(naive.gaps_us)
    return got


@pytest.fixture(scope="module")
def plan(h100):
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=2048, engine="kernels")


@pytest.mark.slow
def test_plans_of_other_methods_have_no_straight_lines(h100):
    plan = fastroof.compile_plan(
        "llama-3.1-8b", "h100", h100, method="linear_mfu", max_num_batched_tokens=512, engine="kernels"
    )
    served(plan, Trace([0.0, 0.001], [30, 40], [9, 5]), EngineSettings(64, 4, 100))


def test_decodes_go_on_beyond_the_last_node(plan):
    prompt = 2**24
    trace = Trace([0.0], [prompt], [6], [prompt - 1])
    served(plan, trace, EngineSettings(64, 4, 2**21))


def test_a_request_may_be_preempted_before_it_fills_a_window(h100):
    plan = fastroof.compile_plan("gpt-oss-20b", "h100", h100, max_num_batched_tokens=512, engine="kernels")
    trace = Trace([0.0, 0.0], [20, 20], [180, 180])
    got = served(plan, trace, EngineSettings(64, 4, 13))
    assert got.preemptions.sum() > 0


def test_clients_give_up_between_first_and_second_token(plan):
    """One of them while it is preempted, with its second token under way."""
    trace = Trace([0.0, 0.0], [15, 15], [20, 20])
    patient = EngineSettings(64, 4, 3, order="prefill_first", async_scheduling=True)
    free = served(plan, trace, patient)
    assert free.preemptions.tolist() == [0, 1]
    given_up = served(plan, trace, replace(patient, timeout_s=(free.first_us[0] + 1.0) / 1e6))
    assert given_up.status.tolist() == [1, 1]
