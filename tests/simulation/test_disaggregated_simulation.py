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
from fastroof.simulation import Fleet, Link, Pool, Simulation, simulate


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
def sim(plan: StepPlan, trace: Trace) -> Simulation:
    return simulate(Fleet([Pool(plan, 2), Pool(plan)], link=Link(50e9)), trace)


def test_a_row_has_its_workers_and_times(sim: Simulation, trace: Trace) -> None:
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


def test_the_summary_is_of_both_pools(sim: Simulation) -> None:
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
            "llama-3.1-8b",
            "h100",
            fastroof.load_tables("h100"),
            dp=dp,
            engine=engine,
            max_num_batched_tokens=8192,
        )
        for dp in (2, 1)
    )
    sim = simulate(Fleet([Pool(alone, 2), Pool(ranks)], link=link), trace)
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
    pools = simulate(Fleet([Pool(plan, 2), Pool(plan)]), single)
    alone = fastroof.simulate(plan, single, replicas=2)
    assert pools.requests["ttft_ms"].to_pylist() == alone.requests["ttft_ms"].to_pylist()


def test_a_decode_engine_alone_has_no_prompts_between_its_tokens(plan: StepPlan, trace: Trace) -> None:
    """Gaps between tokens are decode steps: no gap is as long as a prompt's step."""
    sim = simulate(Fleet([Pool(plan), Pool(plan)]), trace)
    longest_ms = sim.summary()["itl_ms"]["p99"]
    assert longest_ms < 2.0 * float(plan.decode_us(32, 3000)) / 1e3


def test_pools_may_be_of_different_gpus_and_settings(plan: StepPlan, trace: Trace) -> None:
    two = fastroof.compile_plan("llama-3.1-8b", "h100", fastroof.load_tables("h100"), tp=2, engine="vllm")
    sim = simulate(Fleet([Pool(two, max_num_batched_tokens=2048), Pool(plan, max_num_seqs=8)]), trace)
    assert sim.outcomes.counters["peak_running"] <= sim.outcomes.prefill.counters["peak_running"] + 8
    assert sim.pools[0].settings.max_num_batched_tokens == 2048


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prefill": {"num_gpu_blocks": 10}}, "request 0 of trace"),
        ({"decode": {"router": "random"}}, "router must be one of"),
        ({"decode": {"router": "prefix_aware"}}, "router must be one of"),
        ({"decode": {"kv_tiers": "host:1GB:1GB/s"}}, "those of the pool that prefills"),
        ({"decode": {"prefix_cache": "lru"}}, "those of the pool that prefills"),
        ({"decode": {"timeout_s": 1.0}}, "the same in both pools"),
        ({"prefill": {"replicas": 0}}, "replicas"),
        ({"link": Link(-1.0)}, "above 0"),
        ({"link": 50e9}, "link must be a Link, got 50000000000.0"),
        ({"router": "random"}, "router must be one of"),
        ({"autoscaler": "queue:2"}, "autoscaler must be an Autoscaler, got str"),
    ],
)
def test_what_cannot_be_is_refused_by_name(plan: StepPlan, given: dict[str, Any], message: str) -> None:
    def called() -> Simulation:
        pools = [Pool(plan, **given.get(name, {})) for name in ("prefill", "decode")]
        others = {name: value for name, value in given.items() if name not in ("prefill", "decode")}
        return simulate(Fleet(pools, **others), Trace([0.0], [1000], [10]))

    with pytest.raises(SimulationError, match=message):
        called()


def test_options_are_of_pools_and_links_of_two(plan: StepPlan, trace: Trace) -> None:
    one = Fleet(Pool(plan, max_num_seqs=8), router="least_kv")
    assert one.pools == (Pool(plan, max_num_seqs=8),)
    assert simulate(one, trace).requests.equals(
        simulate(plan, trace, max_num_seqs=8, router="least_kv").requests
    )
    with pytest.raises(SimulationError, match="max_num_seqs is an option of a pool"):
        simulate(one, trace, max_num_seqs=8)
    with pytest.raises(SimulationError, match="unknown option 'replica'; did you mean replicas"):
        simulate(plan, trace, replica=8)
    with pytest.raises(SimulationError, match="a link is between two pools"):
        Fleet([Pool(plan)], link=Link())
    for pools in ((), [Pool(plan)] * 3, [plan], plan, None):
        with pytest.raises(SimulationError, match="pools must be one Pool, or two"):
            Fleet(pools)  # type: ignore[arg-type]


def test_decode_engines_of_a_prefix_aware_fleet_look_at_blocks(plan: StepPlan) -> None:
    talk = fastroof.Workload(rate=5, requests=60, turns=3, isl=500, osl=50).trace()
    pools = [Pool(plan, 2), Pool(plan, 2)]
    named = [Pool(plan, 2, router="prefix_aware"), Pool(plan, 2, router="least_kv")]
    found, same = (simulate(fleet, talk) for fleet in (Fleet(pools, "prefix_aware"), Fleet(named)))
    assert found.requests.equals(same.requests)
    assert [pool.router for pool in found.pools] == ["prefix_aware", "least_kv"]


def test_a_rejected_request_has_no_engine(plan: StepPlan) -> None:
    trace = Trace([0.0, 1.0], [1000, 10], [10, 10])
    fleet = Fleet([Pool(plan), Pool(plan, num_gpu_blocks=10)])
    sim = simulate(fleet, trace, on_too_long="reject")
    assert sim.requests["status"].to_pylist() == ["rejected", "finished"]
    assert sim.requests["prefill_replica"].to_pylist() == [None, 0]
    with pytest.raises(FastroofError):
        simulate(fleet, "no such file.csv")
    with pytest.raises(SimulationError, match="on_too_long must be one of"):
        simulate(fleet, trace, on_too_long="drop")
