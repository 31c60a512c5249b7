"""Pools that prefill and decode apart: equal to naive pools, and near the closed form."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fastroof
from fastroof import Trace
from fastroof.errors import SimulationError
from fastroof.plan import StepPlan
from fastroof.serving import DisaggregatedEstimate, estimate_disaggregated
from fastroof.simulation.engine import Outcomes
from fastroof.simulation.fleet_run import run_pools
from fastroof.simulation.pools import EnginePool, Link, takes_us
from fastroof.simulation.settings import EngineSettings
from tests.reference.made_fleets import run_replicas

US_PER_S = 1e6


@functools.cache
def a_plan(tp: int = 1, model: str = "llama-3.1-8b", **given: Any) -> StepPlan:
    tables = fastroof.load_tables("h100")
    return fastroof.compile_plan(
        model, "h100", tables, tp=tp, **({"engine": "kernels", **({"max_num_batched_tokens": 4096} | given)})
    )


def one_pool(plan: StepPlan, replicas: int = 1, **given: Any) -> EnginePool:
    return EnginePool(plan, EngineSettings(**{"max_num_batched_tokens": 4096, "max_num_seqs": 256,
                                        "num_gpu_blocks": 20_000} | given), replicas)  # fmt: skip


def alone(first_token: str = "transfer", **link: Any) -> Outcomes:
    trace = Trace([0.0], [2000], [11])
    return run_pools(
        [one_pool(a_plan()), one_pool(a_plan())], trace, Link(50e9, first_token=first_token, **link)
    )


def closed_form(plan: StepPlan, isl: int, osl: int, clients: int) -> DisaggregatedEstimate:
    options: Any = {"link_bytes_per_s": 50e9, "max_num_batched_tokens": 4096, "chunked_prefill": True}
    return estimate_disaggregated(plan, plan, isl, osl, clients, **options)


def test_one_request_by_hand() -> None:
    plan = a_plan()
    prefill_us = plan.prefill_us(2000)
    transfer_us = 2000 * plan.memory.kv_bytes_per_token / 50e9 * 1e6
    # the first decode attends to the prompt, the first token and itself
    decodes_us = [plan.decode_us(1, 2000 + made) for made in range(1, 11)]
    seen = alone()
    assert seen.transfer_us[0] == pytest.approx(transfer_us, rel=1e-12)
    assert seen.first_us[0] == pytest.approx(prefill_us + transfer_us, rel=1e-12)
    assert seen.last_us[0] == pytest.approx(prefill_us + transfer_us + sum(decodes_us), rel=1e-12)
    early = alone("prefill")
    assert early.first_us[0] == prefill_us
    assert early.last_us[0] == seen.last_us[0]
    # the prompt's last token is computed again, after the 1999 before it
    late = alone("decode")
    first_us = prefill_us + transfer_us + plan.decode_us(1, 2000)
    assert late.first_us[0] == pytest.approx(first_us, rel=1e-12)
    assert late.last_us[0] == pytest.approx(first_us + sum(decodes_us), rel=1e-12)
    slow = alone(latency_us=500.0)
    assert slow.transfer_us[0] == pytest.approx(transfer_us + 500.0, rel=1e-9)


def test_a_link_sends_one_prompt_at_a_time_unless_it_need_not() -> None:
    trace = Trace([0.0] * 4, [1000] * 4, [5] * 4)
    plan = a_plan()
    lasts_us = float(takes_us(plan, plan, [1000], Link(1e9))[0])
    pools = one_pool(plan, 2), one_pool(plan)
    shared = run_pools(pools, trace, Link(1e9)).transfer_us
    # two prefill engines have a link each, and two prompts that are ready at once
    assert np.sort(shared) == pytest.approx([lasts_us, lasts_us, 2 * lasts_us, 2 * lasts_us])
    apart = run_pools(pools, trace, Link(1e9, is_shared=False)).transfer_us
    assert apart == pytest.approx([lasts_us] * 4)


def test_transfers_send_what_a_sequence_keeps_over_the_gpus_of_the_smaller_engine() -> None:
    small, large = a_plan(1), a_plan(4)
    whole_bytes = 1000 * small.memory.kv_bytes_per_token
    for pair in ((small, large), (large, small), (small, small)):
        assert takes_us(*pair, [1000], Link(1e9)) == pytest.approx([whole_bytes / 1e9 * 1e6])
    assert takes_us(large, large, [1000], Link(1e9)) == pytest.approx([whole_bytes / 4e9 * 1e6])
    # layers within a window keep no more than it
    windowed = a_plan(1, "gpt-oss-20b")
    one, two = takes_us(windowed, windowed, [4000, 8000], Link(1e9)).tolist()
    assert two < 2.0 * one
    over_nvlink = takes_us(small, small, [1000], Link())
    assert over_nvlink == pytest.approx([whole_bytes / small.gpu.nvlink_bytes_per_s * 1e6])
    # that of the slower GPU, whoever sends
    slow = replace(small, gpu=replace(small.gpu, nvlink_bytes_per_s=1e9))
    for pair in ((small, slow), (slow, small)):
        assert takes_us(*pair, [1000], Link()) == pytest.approx([whole_bytes / 1e9 * 1e6])


@pytest.mark.parametrize(("isl", "osl", "tp"), [(1000, 100, 1), (3000, 300, 2)])
def test_at_light_load_the_closed_form_agrees(isl: int, osl: int, tp: int) -> None:
    plan = a_plan(tp)
    estimated = closed_form(plan, isl, osl, 1)
    trace = Trace(np.arange(20) * 100.0, np.full(20, isl), np.full(20, osl))
    seen = run_pools([one_pool(plan), one_pool(plan)], trace, Link(50e9))
    ttft_ms = (seen.first_us - seen.arrival_us) / 1e3
    tpot_ms = (seen.last_us - seen.first_us) / (osl - 1) / 1e3
    assert ttft_ms == pytest.approx(estimated.ttft_ms, rel=1e-6)
    # the closed form times the mean step at the mean length
    assert tpot_ms == pytest.approx(estimated.tpot_ms, rel=2e-3)


def test_under_load_the_closed_form_is_near() -> None:
    """As many clients as the closed form has, at its rate, in an open loop."""
    plan = a_plan()
    isl, osl, clients = 1000, 200, 24
    estimated = closed_form(plan, isl, osl, clients)
    assert estimated.prefill_load < 0.7
    rate = clients / (estimated.request_latency_ms / 1e3)
    rng = np.random.default_rng(0)
    trace = Trace(np.cumsum(rng.exponential(1.0 / rate, 2000)), np.full(2000, isl), np.full(2000, osl))
    seen = run_pools([one_pool(plan), one_pool(plan)], trace, Link(50e9))
    tpot_ms = (seen.last_us - seen.first_us) / (osl - 1) / 1e3
    assert tpot_ms[200:].mean() == pytest.approx(estimated.tpot_ms, rel=0.05)


@pytest.mark.parametrize(("isl", "osl", "clients"), [(1000, 200, 24), (2000, 400, 8), (500, 100, 64)])
def test_closed_loops_are_near_the_closed_form(isl: int, osl: int, clients: int) -> None:
    plan = a_plan()
    estimated = closed_form(plan, isl, osl, clients)
    count = 60 * clients
    trace = Trace([0.0] * count, [isl] * count, [osl] * count, clients=clients)
    seen = run_pools([one_pool(plan), one_pool(plan)], trace, Link(50e9))
    later = slice(20 * clients, 50 * clients)
    e2e_ms = (seen.last_us - seen.arrival_us)[later].mean() / 1e3
    tpot_ms = (seen.last_us - seen.first_us)[later].mean() / (osl - 1) / 1e3
    assert tpot_ms == pytest.approx(estimated.tpot_ms, rel=0.02)
    assert e2e_ms == pytest.approx(estimated.request_latency_ms, rel=0.03)


def test_a_pool_of_each_leaves_decodes_undisturbed() -> None:
    """A long prompt beside decodes makes a gap in one pool, and none in two."""
    plan = a_plan()
    trace = Trace([0.0, 0.5], [500, 4000], [200, 2])
    together = run_replicas(plan, trace, one_pool(plan).settings)
    apart = run_pools([one_pool(plan), one_pool(plan)], trace, Link())
    took_us = [(one.last_us - one.first_us)[0] for one in (together, apart)]
    assert took_us[0] - took_us[1] > 0.5 * plan.prefill_us(4000)


def test_requests_that_fit_neither_pool_are_rejected() -> None:
    trace = Trace([0.0, 0.1, 0.2], [100, 5000, 100], [5, 5, 1])
    small = one_pool(a_plan(), num_gpu_blocks=50)
    for pools in ((small, one_pool(a_plan())), (one_pool(a_plan()), small)):
        seen = run_pools(pools, trace)
        assert seen.status.tolist() == [0, 2, 0]
        assert seen.replica.tolist() == [0, -1, -1]
        assert seen.prefill_replica.tolist() == [0, -1, 0]
        assert np.isnan(seen.transfer_us).tolist() == [False, True, True]
    with pytest.raises(SimulationError, match="no request"):
        run_pools([small, small], Trace([0.0], [5000], [5]))


def test_only_first_tokens_need_no_decode_engine() -> None:
    seen = run_pools([one_pool(a_plan()), one_pool(a_plan())], Trace([0.0, 0.1], [100, 50], [1, 1]))
    assert seen.decode is None
    assert seen.last_us.tolist() == seen.prefill.last_us.tolist()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"link": Link(0.0)}, "above 0"),
        ({"link": Link(math.nan)}, "above 0"),
        ({"link": Link(latency_us=-1.0)}, "latency_us"),
        ({"link": Link(first_token="never")}, "first_token"),
        ({"decode": EnginePool(a_plan(1, "gpt-oss-20b"), EngineSettings(64, 8, 60))}, "one model"),
        ({"decode": EnginePool(a_plan(), EngineSettings(64, 8, 60), 0)}, "replicas"),
    ],
)
def test_what_does_not_go_together(changed: dict[str, Any], message: str) -> None:
    pool = EnginePool(a_plan(), EngineSettings(64, 8, 60))
    given: dict[str, Any] = {"prefill": pool, "decode": pool, "link": Link()} | changed
    with pytest.raises(SimulationError, match=message):
        run_pools([given["prefill"], given["decode"]], Trace([0.0], [10], [2]), given["link"])


def test_scaled_steps_leave_transfers_as_they_are() -> None:
    trace = Trace([0.0], [1000], [20])
    pool = one_pool(a_plan())
    one, two = (run_pools([pool, pool], trace, Link(1e9), time_scale=scale) for scale in (1.0, 2.0))
    assert two.transfer_us == pytest.approx(one.transfer_us)
    assert two.prefill.last_us == pytest.approx(2.0 * one.prefill.last_us)
