"""What simulations, capacities, estimates and sizes are given in place of plans, requests and words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import FastroofError, serving
from fastroof.simulation import Workload

FEW = Workload(rate=50, requests=5, input_tokens=100, output_tokens=9)
NO_PLANS: tuple[Any, ...] = (None, "llama-3.1-8b", 3, [], np.ones((2, 2)), object(), 10**5000)
CALLS: dict[str, Callable[[Any], Any]] = {
    "simulate": lambda plan: fastroof.simulate(plan, FEW.trace()),
    "capacity": lambda plan: fastroof.capacity(plan, FEW, ttft_p99_ms=500),
    "estimate": lambda plan: serving.estimate(plan, 1000, 100, 16),
    "estimate_disaggregated": lambda plan: serving.estimate_disaggregated(plan, plan, 1000, 100, 16),
    "largest_batch": lambda plan: serving.largest_batch(plan, 100),
    "largest_context": lambda plan: serving.largest_context(plan, 1),
}
NO_WORDS: tuple[Any, ...] = (["mixed"], np.array(["mixed", "x"]), {"mixed"}, b"mixed", 3, 10**5000)


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, max_tokens=2048, max_seqs=64, engine="kernels")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("given", NO_PLANS, ids=lambda given: type(given).__name__)
def test_what_is_no_plan_is_refused(call: str, given: Any) -> None:
    with pytest.raises(FastroofError, match=r"plan must be a StepPlan \(see compile_plan\), got "):
        CALLS[call](given)


@pytest.mark.parametrize("given", NO_PLANS, ids=lambda given: type(given).__name__)
def test_what_are_no_requests_is_refused(plan: fastroof.StepPlan, given: Any) -> None:
    with pytest.raises(FastroofError, match="requests must be a Trace or a Workload"):
        fastroof.capacity(plan, given, ttft_p99_ms=500)


@pytest.mark.parametrize("given", NO_WORDS, ids=lambda given: type(given).__name__)
def test_what_is_none_of_some_words_is_refused(plan: fastroof.StepPlan, given: Any) -> None:
    for name in ("order", "routing", "prefix_cache", "on_too_long"):
        with pytest.raises(FastroofError, match=f"{name} must be one of"):
            fastroof.simulate(plan, FEW.trace(), num_gpu_blocks=2000, **{name: given})
    for name in ("order", "kv_reservation"):
        with pytest.raises(FastroofError, match=f"{name} must be one of"):
            serving.estimate(plan, 1000, 100, 16, **{name: given})


@pytest.mark.parametrize("given", [np.array([1, 2]), "no", 3, None], ids=lambda given: type(given).__name__)
def test_what_is_no_flag_and_no_number_is_refused(plan: fastroof.StepPlan, given: Any) -> None:
    if given is not None:
        with pytest.raises(FastroofError, match="reserve_output must be "):
            fastroof.simulate(plan, FEW.trace(), num_gpu_blocks=2000, reserve_output=given)
        with pytest.raises(FastroofError, match="reserve_output must be "):
            fastroof.capacity(plan, FEW, num_gpu_blocks=2000, ttft_p99_ms=500, reserve_output=given)
    with pytest.raises(FastroofError, match="with_range must be True or False, got "):
        fastroof.capacity(plan, FEW, num_gpu_blocks=2000, ttft_p99_ms=500, with_range=given)
    with pytest.raises(FastroofError, match="with_error must be True or False, got "):
        serving.estimate(plan, 1000, 100, 16, with_error=given)
    with pytest.raises(FastroofError, match="with_error must be True or False, got "):
        serving.estimate_disaggregated(plan, plan, 100, 100, 16, max_batched_tokens=2048, with_error=given)


def test_several_timeouts_are_refused(plan: fastroof.StepPlan) -> None:
    with pytest.raises(FastroofError, match="timeout_s must be seconds above 0"):
        fastroof.simulate(plan, FEW.trace(), num_gpu_blocks=2000, timeout_s=np.array([1, 2]))
