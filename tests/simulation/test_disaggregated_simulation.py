"""Answers of a simulation whose engines prefill and decode apart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Trace
from fastroof.engines import FrontEnd, load_engine
from fastroof.errors import FastroofError, SimulationError
from fastroof.plan import StepPlan
from fastroof.simulation import DisaggregatedSimulation, Link, simulate_disaggregated


@pytest.fixture(scope="module")
def plan() -> StepPlan:
    return fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), engine="vllm")


@pytest.fixture(scope="module")
def trace() -> Trace:
    rng = np.random.default_rng(0)
    count = 200
    return Trace(
        # not in order of arrival, as files may be
        rng.permutation(np.cumsum(rng.exponential(0.1, count))),
        rng.integers(10, 3000, count),
        rng.integers(1, 60, count),
    )


@pytest.fixture(scope="module")
def sim(plan: StepPlan, trace: Trace) -> DisaggregatedSimulation:
    return simulate_disaggregated(plan, plan, trace, 2, 1, link=Link(50e9))


def test_a_row_has_its_workers_and_times(sim: DisaggregatedSimulation, trace: Trace) -> None:
    table = sim.requests
    rows = table.to_pylist()
    assert [row["input_tokens"] for row in rows] == trace.in_file_order(trace.input_tokens).tolist()
    per_token_ms = 131072 / 50e9 * 1e3
    for row in rows:
        assert row["status"] == "finished"
        assert row["prefill_replica"] in (0, 1)
        if row["output_tokens"] == 1:
            assert (row["replica"], row["transfer_ms"]) == (None, None)
            assert row["e2e_ms"] == row["ttft_ms"]
        else:
            assert row["replica"] == 0
            # it may wait for the link
            assert row["transfer_ms"] >= row["input_tokens"] * per_token_ms * (1 - 1e-6)
            assert row["ttft_ms"] > row["transfer_ms"]
    assert table.schema.field("transfer_ms").metadata[b"unit"] == b"ms"
    assert table.schema.metadata[b"fastroof.link.bytes_per_s"] == b"50000000000.0"
    assert table.schema.metadata[b"fastroof.prefill.replicas"] == b"2"


def test_the_summary_is_of_both_pools(sim: DisaggregatedSimulation) -> None:
    answers = sim.summary(with_range=True)
    assert answers["finished"] == len(sim)
    pools = answers["pools"]
    assert answers["steps"] == pools["prefill"]["steps"] + pools["decode"]["steps"]
    assert 0.0 < pools["prefill"]["busy"] < 1.0
    assert answers["busy"] == pytest.approx((2 * pools["prefill"]["busy"] + pools["decode"]["busy"]) / 3)
    assert answers["transfer_ms"]["p50"] > 0.0
    low, high = answers["range"]["tpot_ms"]["mean"]
    assert low < answers["tpot_ms"]["mean"] < high


@pytest.mark.parametrize("lockstep", ["all", "experts"])
@pytest.mark.parametrize("link", [Link(50e9), Link(50e9, by_layer=True)], ids=["in turn", "fed back"])
def test_both_pools_are_as_busy_as_all_engines(lockstep: str, link: Link, trace: Trace) -> None:
    """Also of ranks that wait for each other, whose engine is busy while any of them computes."""
    engine = {"name": "ranks", "costs": {"step_us": 100.0}, "data_parallel": {"lockstep": lockstep}}
    ranks, alone = (
        fastroof.compile_plan(
            "llama-3.1-8b", "h100", fastroof.load_tables("h100"), dp=dp, engine=engine, max_tokens=8192
        )
        for dp in (2, 1)
    )
    sim = simulate_disaggregated(alone, ranks, trace, 2, 1, link=link)
    answers = sim.summary()
    prefill, decode = (answers["pools"][name]["busy"] for name in ("prefill", "decode"))
    engines = 1 if lockstep == "all" else 2
    assert answers["busy"] * sim.engines == pytest.approx(2 * prefill + engines * decode)
    assert 0.0 < decode < 1.0
    assert sim.gpus == 2 + 2


@pytest.mark.parametrize("dp", [1, 2])
def test_prompts_reach_prefill_engines_as_any_engines(dp: int, trace: Trace) -> None:
    """Each rank has an API server, which is busy here."""
    engine = replace(load_engine("vllm"), front_end=FrontEnd(request_ms=5.0, server_ms=150.0))
    plan = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), dp=dp, engine=engine)
    single = replace(trace, output_tokens=np.ones_like(trace.output_tokens))
    pools = simulate_disaggregated(plan, plan, single, 2, 1)
    alone = fastroof.simulate(plan, single, replicas=2)
    assert pools.requests["ttft_ms"].to_pylist() == alone.requests["ttft_ms"].to_pylist()


def test_a_decode_engine_alone_has_no_prompts_between_its_tokens(plan: StepPlan, trace: Trace) -> None:
    """Gaps between tokens are decode steps: no gap is as long as a prompt's step."""
    sim = simulate_disaggregated(plan, plan, trace)
    longest_ms = sim.summary()["itl_ms"]["p99"]
    assert longest_ms < 2.0 * float(plan.decode_us(32, 3000)) / 1e3


def test_pools_may_be_of_different_gpus_and_settings(plan: StepPlan, trace: Trace) -> None:
    two = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), tp=2, engine="vllm")
    sim = simulate_disaggregated(
        two, plan, trace, prefill={"max_num_batched_tokens": 2048}, decode={"max_num_seqs": 8}
    )
    assert sim.outcomes.counters["peak_running"] <= sim.outcomes.prefill.counters["peak_running"] + 8
    assert sim.prefill.settings.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill": {"num_gpu_blocks": 10}}, "request 0 of trace"),
        ({"decode": {"blocks": 10}}, "no setting blocks"),
        ({"decode_routing": "random"}, "routing"),
        ({"prefill_replicas": 0}, "replicas"),
        ({"on_too_long": "drop"}, "on_too_long"),
        ({"link": Link(-1.0)}, "above 0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(plan: StepPlan, given: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        simulate_disaggregated(plan, plan, Trace([0.0], [1000], [10]), **given)


def test_a_rejected_request_has_no_engine(plan: StepPlan) -> None:
    trace = Trace([0.0, 1.0], [1000, 10], [10, 10])
    sim = simulate_disaggregated(plan, plan, trace, decode={"num_gpu_blocks": 10}, on_too_long="reject")
    assert sim.requests["status"].to_pylist() == ["rejected", "finished"]
    assert sim.requests["prefill_replica"].to_pylist() == [None, 0]
    with pytest.raises(FastroofError):
        simulate_disaggregated(plan, plan, "no such file.csv")
