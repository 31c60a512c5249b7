"""The example of a custom loop equals fastroof.simulate to the bit if it schedules alike."""

from __future__ import annotations

import numpy as np
import pytest

import fastroof
from fastroof import PlanRangeError, StepPlan, Tables
from fastroof.simulation.fleet_run import run_engine
from fastroof.simulation.settings import EngineSettings
from fastroof.traces.trace import Trace
from tests.examples import numba_callers as numba_callers_example


@pytest.fixture(scope="module")
def plan(h100: Tables) -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine="vllm")


def made_trace(seed: int, per_s: float) -> Trace:
    random = np.random.default_rng(seed)
    count = 400
    lengths = random.integers(1, 3000, count), random.integers(1, 200, count)
    return Trace(random.exponential(1 / per_s, count).cumsum(), *lengths)


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "max_num_seqs"), [(2048, 256), (512, 16), (40, 40)])
@pytest.mark.parametrize("per_s", [5.0, 40.0])
def test_first_come_first_served_is_the_engines(
    plan: StepPlan, budget: int, max_num_seqs: int, per_s: float
) -> None:
    sizes = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    trace = made_trace(budget, per_s)
    settings = EngineSettings.of_plan(plan, num_gpu_blocks=10**6, async_scheduling=False, **sizes)
    expected = run_engine(plan, trace, settings)
    arguments = trace.arrival_s * 1e6, trace.input_tokens, trace.output_tokens
    first_us, last_us, steps = numba_callers_example.serve(plan, *arguments, **sizes)
    np.testing.assert_array_equal(first_us, expected.first_us)
    np.testing.assert_array_equal(last_us, expected.last_us)
    assert steps == expected.counters["steps"]


def test_a_policy_of_its_own_changes_who_waits(plan: StepPlan) -> None:
    trace = made_trace(7, 40.0)
    arguments = trace.arrival_s * 1e6, trace.input_tokens, trace.output_tokens
    sizes = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
    as_they_come, _, _ = numba_callers_example.serve(plan, *arguments, **sizes)
    shortest, last_us, _ = numba_callers_example.serve(plan, *arguments, shortest_first=True, **sizes)
    assert np.isfinite(last_us).all()
    short = trace.input_tokens < 500
    assert np.median(shortest[short]) < np.median(as_they_come[short])
    # the longest wait longer, by more than half
    arrival_us, long = trace.arrival_s * 1e6, trace.input_tokens >= 2000
    waits = [np.median((first_us - arrival_us)[long]) for first_us in (shortest, as_they_come)]
    assert waits[0] > 1.3 * waits[1]


@pytest.mark.slow
def test_a_step_beyond_the_plan_is_an_error(plan: StepPlan, h100: Tables) -> None:
    small = fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_num_batched_tokens=256, engine="kernels")
    with pytest.raises(PlanRangeError, match="max_num_batched_tokens of at least 8192"):
        numba_callers_example.serve(small, np.zeros(1), np.array([2000]), np.array([5]))


@pytest.mark.slow
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    numba_callers_example.main()
    assert "shortest prompt first: TTFT p50" in capsys.readouterr().out
