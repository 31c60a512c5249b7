"""Energy of serving: bounds, and agreement of estimates, simulations and sweeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, StepPlan, Workload, compile_plan, simulate
from fastroof.errors import BatchError, SimulationError, SweepError
from fastroof.serving import SpeculativeDecoding, estimate
from fastroof.simulation import simulate_disaggregated
from fastroof.sweep import run_sweep
from fastroof.sweep.best import best_deployments

ENGINES: dict[str, dict[str, Any]] = {
    "mixed": {"engine": "vllm"},
    "prefill first": {"engine": "sglang"},
    "shared": {"engine": "vllm", "tp": 2},
}


@pytest.fixture(scope="module")
def plans() -> dict[str, StepPlan]:
    return {name: compile_plan("llama-3.1-8b", "h100", **options) for name, options in ENGINES.items()}


@given(
    name=st.sampled_from(sorted(ENGINES)),
    isl=st.integers(1, 8000),
    osl=st.integers(1, 500),
    clients=st.floats(0.5, 200.0).map(lambda value: max(value, 1.0)),
)
@settings(max_examples=60, deadline=None)
def test_an_estimate_draws_between_idle_and_the_limit(
    plans: dict[str, StepPlan], name: str, isl: int, osl: int, clients: float
) -> None:
    plan = plans[name]
    seen = estimate(plan, isl, osl, clients, with_energy=True)
    watts = seen.joules_per_token * seen.tokens_per_s_per_gpu
    assert plan.gpu.idle_w <= watts <= plan.gpu.tdp_w
    without = estimate(plan, isl, osl, clients)
    assert without.joules_per_token is None
    assert (without.tpot_ms, without.ttft_ms) == pytest.approx((seen.tpot_ms, seen.ttft_ms), nan_ok=True)


def test_one_client_is_its_steps(plans: dict[str, StepPlan]) -> None:
    plan = compile_plan("llama-3.1-8b", "h100", client_overhead_ms=0.0)
    seen = estimate(plan, 1000, 400, 1, with_energy=True)
    steps = [[(1000, 0)], *([(1, 1000 + done)] for done in range(399))]
    joules = plan.energy(StepBatch.from_requests(steps)).joules.sum()
    assert seen.joules_per_token * 400 == pytest.approx(joules, rel=0.03)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(("isl", "osl", "clients"), [(1000, 100, 1), (500, 300, 32), (3000, 60, 16)])
def test_simulated_loops_draw_as_estimated(
    plans: dict[str, StepPlan], name: str, isl: int, osl: int, clients: int
) -> None:
    plan = plans[name]
    lengths = f"uniform:{round(osl * 0.9)}:{round(osl * 1.1)}"
    load = Workload(requests=60 + 15 * clients, input_tokens=isl, output_tokens=lengths, clients=clients)
    sim = simulate(plan, load.trace())
    drawn, seen = sim.energy(), estimate(plan, isl, osl, clients, with_energy=True)
    watts = seen.joules_per_token * seen.tokens_per_s_per_gpu
    assert drawn["watts_per_gpu"] == pytest.approx(watts, rel=0.06)
    assert drawn["joules_per_token"] == pytest.approx(seen.joules_per_token, rel=0.1)
    assert drawn["busy_joules"] + drawn["idle_joules"] == drawn["joules"]


def test_a_simulation_that_waits_is_idle(plans: dict[str, StepPlan]) -> None:
    plan = plans["mixed"]
    rare = Workload(rate=0.05, requests=20, input_tokens=100, output_tokens=20).trace()
    sim = simulate(plan, rare)
    drawn = sim.energy()
    busy, seconds = sim.summary()["busy"], sim.summary()["duration_s"]
    assert drawn["idle_joules"] == pytest.approx((1.0 - busy) * seconds * plan.gpu.idle_w, rel=1e-6)
    assert plan.gpu.idle_w < drawn["watts_per_gpu"] < 1.1 * plan.gpu.idle_w
    both = simulate(plan, rare, replicas=2).energy()
    assert both["watts_per_gpu"] < drawn["watts_per_gpu"]
    assert both["busy_joules"] == pytest.approx(drawn["busy_joules"], rel=0.05)


def test_gpus_that_stop_idle_for_their_hours_alone_and_pools_are_refused(plans: dict[str, StepPlan]) -> None:
    plan = plans["mixed"]
    trace = Workload(rate=2.0, requests=40, input_tokens=500, output_tokens=50).trace()
    sim = simulate(plan, trace, replicas=3)
    whole_s = sim.summary(with_range=False)["duration_s"] * 3
    drawn, fewer = sim.energy(), sim.energy(whole_s * 0.9)
    assert fewer["busy_joules"] == drawn["busy_joules"]
    assert drawn["idle_joules"] - fewer["idle_joules"] == pytest.approx(0.1 * whole_s * plan.gpu.idle_w)
    assert fewer["watts_per_gpu"] * 0.9 * whole_s == pytest.approx(fewer["joules"])
    pools = simulate_disaggregated(plan, plan, trace, 1, 1)
    with pytest.raises(SimulationError, match="prefill and decode pools"):
        pools.energy()


SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b"], "gpus": ["h100"], "tp": [1, 2], "isl": 1000, "osl": [50, 200],
    "concurrency": [1, 64], "constraints": {"tpot_ms": 15}, "objective": "energy",
}  # fmt: skip


def test_the_best_by_energy_is_the_least_of_all(tmp_path: Any) -> None:
    import pyarrow.parquet as pq

    best = run_sweep({**SPEC, "k": 1}, tmp_path / "best.parquet")
    every = run_sweep({**SPEC, "keep": "all"}, tmp_path / "all.parquet")
    rows = [row for row in pq.read_table(every.output).to_pylist() if row["exceeds"] is None]
    kept = pq.read_table(best.output).to_pylist()
    assert len(kept) == 2
    for row in kept:
        same = [each for each in rows if each["osl"] == row["osl"]]
        assert row["joules_per_token"] == min(each["joules_per_token"] for each in same)
        plan = compile_plan("llama-3.1-8b", "h100", tp=row["tp"])
        seen = estimate(plan, 1000, row["osl"], row["concurrency"], with_energy=True)
        assert row["joules_per_token"] == pytest.approx(seen.joules_per_token, rel=1e-9)
    assert best.feasible == every.feasible == len(rows)
    answer = best_deployments({**SPEC, "osl": 200}).answers[0]
    assert answer.choices[0].row["joules_per_token"] == min(
        row["joules_per_token"] for row in rows if row["osl"] == 200
    )
    assert answer.why_mean == "energy is that of mean steps"


def test_layouts_without_room_are_left_out() -> None:
    spec = {**SPEC, "models": ["mixtral-8x7b"], "osl": 100, "concurrency": 2, "constraints": {}}
    choices = best_deployments(spec).answers[0].choices
    assert [choice.row["tp"] for choice in choices] == [2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": ["disaggregated"]}, "'energy' needs mode 'aggregated'"),
        ({"gpus": ["h100", "l40"]}, r"needs \[power\] in the gpu.toml of l40"),
        ({"histogram": True}, "histogram: values of the objective 'energy' are not counted"),
        ({"speculation": {"num_draft_tokens": 2, "accepted": 1.5, "draft": "none"}}, "the power of drafts"),
    ],
)
def test_what_energy_does_not_go_with(change: dict[str, Any], words: str) -> None:
    with pytest.raises(SweepError, match=words):
        best_deployments({**SPEC, **change})


def test_refusals_of_estimates_and_simulations(plans: dict[str, StepPlan]) -> None:
    with pytest.raises(BatchError, match="the power of drafts is unknown"):
        estimate(plans["mixed"], 100, 10, 1, speculation=SpeculativeDecoding(2, 1.5), with_energy=True)
    with pytest.raises(BatchError, match="with_energy"):
        estimate(plans["mixed"], 100, 10, 1, with_energy=1)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no measured tables"):
        unknown = compile_plan("llama-3.1-8b", "l40", tables="datasheet")
    with pytest.raises(BatchError, match="power of l40 is unknown"):
        estimate(unknown, 100, 10, np.array([1, 2]), with_energy=True)
    sim = simulate(unknown, Workload(rate=1.0, requests=3).trace())
    with pytest.raises(SimulationError, match="power of l40 is unknown"):
        sim.energy()
