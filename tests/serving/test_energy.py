"""Energy of estimates: bounds, idle time, refusals, and agreement with sweeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import StepBatch, StepPlan, compile_plan, serving
from fastroof.errors import BatchError, SweepError
from fastroof.serving import SpeculativeDecoding
from fastroof.sweep import run_sweep
from fastroof.sweep.best import best_deployments

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

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


def test_an_engine_idles_while_all_clients_are_in_the_front_end() -> None:
    plan = compile_plan("llama-3.1-8b", "h100", front_end=200.0)
    for clients in (1, 2, 4, 8):
        apart, as_one = (
            estimate(plan, 100, 20, clients, length_spread=spread, arrivals="random", with_energy=True)
            for spread in (0.2, 0.0)
        )
        outside = 200.0 / apart.request_latency_ms
        decode = plan.energy(StepBatch.from_requests([[(1, 109)] * max(round(apart.decodes), 1)])).watts[0]
        watts = [one.joules_per_token * one.tokens_per_s_per_gpu for one in (apart, as_one)]
        more = watts[0] - watts[1]
        expected = (outside - outside**clients) * (decode - plan.gpu.idle_w)
        assert more == pytest.approx(expected, rel=0.01, abs=1e-9), clients


SPEC: dict[str, Any] = {
    "models": ["llama-3.1-8b"], "gpus": ["h100"], "tp": [1, 2], "isl": 1000, "osl": [50, 200],
    "clients": [1, 64], "constraints": {"tpot_ms": 15}, "objective": "energy",
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
        seen = estimate(plan, 1000, row["osl"], row["clients"], with_energy=True)
        assert row["joules_per_token"] == pytest.approx(seen.joules_per_token, rel=1e-9)
    assert best.feasible == every.feasible == len(rows)
    answer = best_deployments({**SPEC, "osl": 200}).answers[0]
    assert answer.choices[0].row["joules_per_token"] == min(
        row["joules_per_token"] for row in rows if row["osl"] == 200
    )
    assert answer.why_mean == "energy is that of mean steps"


def test_the_best_by_energy_counts_ranks_that_wait() -> None:
    layouts = {"models": ["mixtral-8x7b"], "tp": [1, 8], "dp": [1, 8], "ep": [1, 8]}
    answer = best_deployments({**SPEC, **layouts, "osl": 100, "clients": 2, "constraints": {}}).answers[0]
    found = {
        (choice.row["tp"], choice.row["dp"], choice.row["ep"]): choice.row["joules_per_token"]
        for choice in answer.choices
    }
    assert next(iter(found)) == (8, 1, 1)
    for (tp, dp, ep), joules in found.items():
        plan = compile_plan("mixtral-8x7b", "h100", tp=tp, dp=dp, ep=ep)
        seen = estimate(plan, 1000, 100, 2, with_energy=True)
        assert joules == pytest.approx(seen.joules_per_token, rel=1e-9)


def test_layouts_without_room_are_left_out() -> None:
    spec = {**SPEC, "models": ["mixtral-8x7b"], "osl": 100, "clients": 2, "constraints": {}}
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


def test_refusals_of_estimates(plans: dict[str, StepPlan]) -> None:
    with pytest.raises(BatchError, match="the power of drafts is unknown"):
        estimate(plans["mixed"], 100, 10, 1, speculation=SpeculativeDecoding(2, 1.5), with_energy=True)
    with pytest.raises(BatchError, match="with_energy"):
        estimate(plans["mixed"], 100, 10, 1, with_energy=1)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="no measured tables"):
        unknown = compile_plan("llama-3.1-8b", "l40", tables="datasheet")
    with pytest.raises(BatchError, match="power of l40 is unknown"):
        estimate(unknown, 100, 10, np.array([1, 2]), with_energy=True)
