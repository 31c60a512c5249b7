"""Stated errors of estimates: the profile's, on runs that no fit has seen."""

import dataclasses

import numpy as np
import pytest

import fastroof
from fastroof.engines import ServingErrors, load_engine
from fastroof.errors import PlanError
from fastroof.serving import estimate
from fastroof.simulation.step_range import step_error

KNOWN = ServingErrors(tpot=0.08, ttft=0.2)


@pytest.fixture(scope="module")
def plan(h100: fastroof.Tables) -> fastroof.StepPlan:
    engine = dataclasses.replace(load_engine("vllm"), errors=KNOWN)
    return fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=engine)


def test_errors_are_the_profiles_on_request(plan: fastroof.StepPlan) -> None:
    seen = estimate(plan, 1024, 128, [1, 16, 20000], with_error=True)
    assert seen.tpot_relative_error.tolist() == [0.08] * 3
    assert seen.wait_ms[2] > 0.0
    np.testing.assert_array_equal(seen.ttft_relative_error, [0.2, 0.2, np.nan])
    assert estimate(plan, 1024, 128, 1).tpot_relative_error is None
    assert {"tpot_relative_error", "ttft_relative_error"} <= set(seen.to_arrow().column_names)


def test_bursts_and_waiting_requests_are_known_less_well(h100: fastroof.Tables) -> None:
    errors = dataclasses.replace(KNOWN, burst_tpot=0.15, burst_ttft=0.3, waiting_tpot=0.4, waiting_ttft=0.9)
    engine = dataclasses.replace(load_engine("vllm"), errors=errors)
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=engine)
    for rounds, tpot, ttft in ((10, 0.08, 0.2), (1, 0.15, 0.3)):
        seen = estimate(plan, 1024, 128, [16, 20000], requests_per_client=rounds, with_error=True)
        assert seen.tpot_relative_error.tolist() == [tpot, 0.4]
        assert seen.ttft_relative_error.tolist() == [ttft, 0.9]


def test_steps_of_short_kernels_are_known_less_well() -> None:
    b200 = fastroof.load_tables("b200")
    engine = dataclasses.replace(load_engine("vllm"), errors=dataclasses.replace(KNOWN, layer_us=9.0))
    small, large = (
        fastroof.compile_plan(model, "b200", b200, engine=engine) for model in ("qwen3-0.6b", "llama-3.1-70b")
    )
    clients = [1, 64, 1024]
    for plan in (small, large):
        seen = estimate(plan, 1024, 128, clients, with_error=True)
        step_us = np.maximum(seen.decode_step_us, seen.tpot_ms * 1000.0)
        expected = np.maximum(0.08, 9.0 * plan.model.num_layers / step_us)
        np.testing.assert_allclose(seen.tpot_relative_error, expected, rtol=1e-12)
        np.testing.assert_array_equal(seen.ttft_relative_error[:2], [0.2, 0.2])
    assert estimate(small, 1024, 128, 1, with_error=True).tpot_relative_error > 0.12
    assert estimate(large, 1024, 128, 1, with_error=True).tpot_relative_error == 0.08
    # no output after the first token: no decode step
    assert estimate(small, 1024, 1, 1, with_error=True).tpot_relative_error == 0.08
    assert step_error(small, 1.0, 1024.0).relative == pytest.approx(
        9.0 * small.model.num_layers / small.decode_us(1, 1024), rel=1e-12
    )


def test_a_profile_without_errors_states_none(h100: fastroof.Tables) -> None:
    engine = dataclasses.replace(load_engine("vllm"), errors=ServingErrors())
    seen = estimate(
        fastroof.compile_plan("llama-3.1-8b", "h100", h100, engine=engine), 1024, 128, 8, with_error=True
    )
    assert seen.relative_error is not None
    assert seen.tpot_relative_error is None


@pytest.mark.parametrize("value", [-0.1, float("nan"), "0.1", True, None])
def test_invalid_errors_are_refused(value: object) -> None:
    with pytest.raises(PlanError, match=r"tpot of \[errors\] must be a number of at least 0"):
        load_engine({"name": "mine", "errors": {"tpot": value}})
