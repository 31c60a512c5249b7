"""Energy of steps: a naive sum over operators, bounds, and batches of steps."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, StepPlan, compile_plan
from fastroof.config import GpuSpec, load_gpu
from fastroof.errors import PlanError
from fastroof.operators.power import DRAWS, GAP, OTHER
from fastroof.operators.registry import OPERATORS
from fastroof.plan.calls import Ranks
from fastroof.plan.curves import per_row, row_cost
from fastroof.plan.energy import MeanSteps, Parts, attention_parts, gap_watts, mean_steps, with_host
from fastroof.plan.explain import row_time

PLANS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama-3.1-8b", "gpu": "h100"},
    "split": {"model": "llama-3.1-70b", "gpu": "h100", "tp": 4, "engine": "sglang"},
    "experts and windows": {"model": "gpt-oss-20b", "gpu": "h100", "tables": "datasheet"},
    "ranks": {"model": "qwen3-30b-a3b", "gpu": "b200", "tables": "datasheet", "dp": 2, "ep": 2},
    "one attention call": {"model": "llama-3.1-8b", "gpu": "a100", "tables": "datasheet"},
    "latent": {"model": "deepseek-v3", "gpu": "b200", "tables": "datasheet", "tp": 8},
}


@pytest.fixture(scope="module")
def plans() -> dict[str, StepPlan]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *args, **kwargs: None)
        return {name: compile_plan(**options) for name, options in PLANS.items()}


REQUESTS = st.lists(
    st.one_of(
        st.tuples(st.just(1), st.integers(1, 20_000)), st.tuples(st.integers(1, 900), st.integers(0, 5000))
    ),
    max_size=8,
)


def naive_watts(gpu: GpuSpec, operator: str, us: float, launch_us: float, work: tuple[float, float]) -> float:
    """Power of one kernel in plain Python; ``work`` is its FLOPs and bytes over the peaks, us."""
    draw = DRAWS.get(operator, DRAWS["allreduce"] if OPERATORS[operator].over_link else OTHER)
    busy = draw.busy * max(1.0 - launch_us / us, 0.0)
    share = draw.floor + busy + (draw.compute * work[0] + draw.memory * work[1]) / us
    return gpu.idle_w + (gpu.tdp_w - gpu.idle_w) * min(share, 1.0)


def naive_step_joules(plan: StepPlan, decodes: int, kv_len: int) -> float:
    """Energy of a decode step, operator by operator."""
    gpu, uj, us = plan.gpu, 0.0, 0.0
    rows = Ranks.of(plan.layout, plan.execution).of_step(decodes, decodes)
    for curve in plan.row_curves:
        call = curve.operator
        if call.steps == "with_prefill":
            continue
        one = row_time(gpu, curve, rows[call.rows])
        time_us = one.total_us / call.times
        if not time_us:
            continue
        is_link = per_row(call).over_link
        flops_us = one.flops / call.times / gpu.peak(row_cost(call).dtype) * 1e6
        bytes_us = 0.0 if is_link else one.moved_bytes / call.times / gpu.hbm_bytes_per_s * 1e6
        work = flops_us if flops_us > 0.0 else 0.0, bytes_us
        uj += one.total_us * naive_watts(gpu, call.operator, time_us, curve.launch_us, work)
        us += one.total_us
    batch, length = np.array([float(decodes)]), np.array([float(kv_len)])
    part = attention_parts(plan, True, batch, length)
    uj += float(part.uj[0])
    us += float(part.us[0])
    step_us = float(plan.decode_us(decodes, kv_len))
    host_us = step_us - us
    whole = (
        uj + host_us * (gpu.idle_w + GAP * (gpu.tdp_w - gpu.idle_w)) if host_us >= 0 else uj / us * step_us
    )
    return whole / 1e6 * plan.layout.world_size / plan.layout.batches_in_flight


@pytest.mark.parametrize("name", PLANS)
def test_a_decode_step_is_the_sum_of_its_operators(plans: dict[str, StepPlan], name: str) -> None:
    for decodes, kv_len in ((1, 1), (3, 700), (64, 4096), (200, 900)):
        batch = StepBatch.from_requests([[(1, kv_len - 1)] * decodes]) if kv_len > 1 else None
        if batch is not None:
            joules = float(plans[name].energy(batch).joules[0])
            assert joules == pytest.approx(naive_step_joules(plans[name], decodes, kv_len), rel=1e-9)


@given(st.sampled_from(sorted(PLANS)), st.lists(REQUESTS, min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_between_idle_and_the_limit_and_a_batch_equals_its_singles(
    plans: dict[str, StepPlan], name: str, steps: list[list[tuple[int, int]]]
) -> None:
    plan = plans[name]
    batch = StepBatch.from_requests(steps)
    seen, times = plan.energy(batch), plan.run(batch)
    step_s = times.latency_us / 1e6 * plan.layout.world_size / plan.layout.batches_in_flight
    assert (seen.joules >= plan.gpu.idle_w * step_s * (1.0 - 1e-12)).all()
    assert (seen.joules <= plan.gpu.tdp_w * step_s * (1.0 + 1e-12)).all()
    assert (seen.tokens == [sum(new for new, _ in step) for step in steps]).all()
    has = times.latency_us > 0.0
    assert seen.watts[has] * step_s[has] == pytest.approx(seen.joules[has])
    assert not seen.joules[~has].any()
    singles = [plan.energy(StepBatch.from_requests([step])) for step in steps]
    assert (np.concatenate([one.joules for one in singles]) == seen.joules).all()


@given(
    st.integers(1, 200),
    st.integers(1, 30_000),
    st.integers(1, 100),
    st.integers(1, 2000),
    st.integers(1, 500),
)
@settings(max_examples=60, deadline=None)
def test_more_work_never_takes_less_energy(
    plans: dict[str, StepPlan], decodes: int, kv_len: int, more: int, longer: int, new: int
) -> None:
    # measured times may fall with size, those of rooflines do not
    plan = plans["experts and windows"]
    steps = [
        [(1, kv_len)] * decodes,
        [(1, kv_len)] * (decodes + more),
        [(1, kv_len + longer)] * decodes,
        [(new, 0)],
        [(new + longer, 0)],
    ]
    few, many, long, short_prompt, long_prompt = plan.energy(StepBatch.from_requests(steps)).joules
    assert few <= many * (1.0 + 1e-9)
    assert few <= long * (1.0 + 1e-9)
    assert short_prompt <= long_prompt * (1.0 + 1e-9)


@pytest.mark.parametrize("name", ["dense", "one attention call"])
def test_mean_steps_are_whole_steps_at_whole_sizes(plans: dict[str, StepPlan], name: str) -> None:
    plan = plans[name]
    sizes = [np.array([float(size)]) for size in (32, 1000, 0, 0, 1)]
    mean = mean_steps(plan, MeanSteps(*sizes))
    batch = StepBatch.from_requests([[(1, 999)] * 32])
    assert mean.us == pytest.approx(plan.run(batch).latency_us)
    assert mean.watts == pytest.approx(plan.energy(batch).watts)
    sizes = [np.array([float(size)]) for size in (32, 1000, 512, 1, 512)]
    mean = mean_steps(plan, MeanSteps(*sizes))
    batch = StepBatch.from_requests([[(1, 999)] * 32 + [(512, 0)]])
    assert mean.us == pytest.approx(plan.run(batch).latency_us)
    assert mean.watts == pytest.approx(plan.energy(batch).watts)


def test_gpus_of_a_batch() -> None:
    batch = StepBatch.from_requests([[(1, 999)] * 8])
    one, two_ranks, two_stages = (
        compile_plan("llama-3.1-8b", "h100", **options).energy(batch)
        for options in ({}, {"dp": 2}, {"pp": 2})
    )
    assert two_ranks.joules == one.joules
    assert two_stages.joules == pytest.approx(one.joules, rel=0.05)
    assert two_stages.watts == pytest.approx(one.watts, rel=0.05)


@pytest.mark.parametrize("longer", [0.5, 1.0, 2.0])
def test_a_host_that_waits_draws_less_and_a_short_step_no_more(longer: float) -> None:
    gpu, kernels = load_gpu("b200"), Parts(np.array([6e5]), np.array([1e3]))
    step_us, waits = longer * kernels.us, max(1.0 - 1.0 / longer, 0.0)
    watts = (1.0 - waits) * 600.0 + waits * gap_watts(gpu)
    assert with_host(gpu, kernels, step_us) / step_us == pytest.approx(watts)


def test_gpus_that_share_a_long_prompt_draw_as_one_alone() -> None:
    """Computing is all that its attention takes, and each GPU computes its share in a share of the time."""
    size, length = np.array([1.0]), np.array([32_768.0])
    alone, shared = (
        attention_parts(compile_plan("llama-3.1-8b", "h100", cp=cp), False, size, length) for cp in (1, 4)
    )
    assert shared.us == pytest.approx(alone.us / 4, rel=0.02)
    assert shared.watts == pytest.approx(alone.watts, rel=0.02)


def test_errors_and_basis(plans: dict[str, StepPlan]) -> None:
    batch = StepBatch.from_requests([[(1, 999)]])
    seen = plans["dense"].energy(batch)
    assert (seen.basis, plans["latent"].energy(batch).basis) == ("modelled", "measured")
    both = plans["dense"].energy(batch, with_error=True)
    of_time = plans["dense"].step_error(batch)
    assert both.relative_error == pytest.approx(np.hypot(seen.relative_error, of_time))
    table = both.to_arrow()
    assert table["joules_per_token"].to_pylist() == pytest.approx(both.joules.tolist())
    gpu = load_gpu("b200")
    assert gpu.idle_w < gap_watts(gpu) < gpu.tdp_w


def test_a_gpu_without_power_is_refused_and_a_pickled_plan_is_not() -> None:
    batch = StepBatch.from_requests([[(1, 999)]])
    with pytest.warns(UserWarning, match="no measured tables"):
        unknown = compile_plan("llama-3.1-8b", "l40", tables="datasheet")
    with pytest.raises(PlanError, match=r"power of l40 is unknown: add \[power\] with tdp_w and idle_w"):
        unknown.energy(batch)
    plan = compile_plan("llama-3.1-8b", "h100")
    again = pickle.loads(pickle.dumps(plan))
    assert (again.energy(batch).joules == plan.energy(batch).joules).all()
    assert "row_energy" not in plan.__getstate__()
