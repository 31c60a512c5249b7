"""Estimates of plans of several ranks, stages and groups of experts."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fastroof import compile_plan, load_tables, serving
from fastroof.errors import BatchError
from fastroof.serving import estimate_disaggregated
from fastroof.sweep import best_deployments

# without the start of a run
estimate = partial(serving.estimate, requests_per_client="steady")

LOAD = {"isl": 1000, "osl": 100}
FIELDS = ("ttft_ms", "tpot_ms", "request_latency_ms", "tokens_per_s_per_gpu", "decodes", "kv_len")


@pytest.fixture(scope="module")
def tables():
    return load_tables("h100")


def test_ranks_of_a_dense_model_serve_like_replicas(tables):
    one = compile_plan("llama-3.1-8b", "h100", tables, max_num_batched_tokens=16384, engine="kernels")
    four = compile_plan("llama-3.1-8b", "h100", tables, dp=4, max_num_batched_tokens=16384, engine="kernels")
    clients = np.array([1, 8, 64])
    alone, ranks = estimate(one, **LOAD, clients=clients), estimate(four, **LOAD, clients=4 * clients)
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(ranks, name), getattr(alone, name))
    np.testing.assert_array_equal(ranks.effective_concurrency, 4 * alone.effective_concurrency)


def test_ranks_without_a_client_are_idle(tables):
    plan = compile_plan("llama-3.1-8b", "h100", tables, dp=4, max_num_batched_tokens=16384, engine="kernels")
    one, four = (estimate(plan, **LOAD, clients=clients) for clients in (1, 4))
    assert one.tpot_ms == four.tpot_ms
    assert one.tokens_per_s_per_gpu == pytest.approx(four.tokens_per_s_per_gpu / 4, rel=1e-12)
    assert one.effective_concurrency == pytest.approx(1.0)


@pytest.mark.parametrize("clients", [0, -3, 0.5, float("nan")])
def test_ranks_need_a_client_as_one_does(tables, clients):
    for dp in (1, 4):
        plan = compile_plan(
            "llama-3.1-8b", "h100", tables, dp=dp, max_num_batched_tokens=16384, engine="kernels"
        )
        with pytest.raises(BatchError, match=f"clients {clients:g}"):
            estimate(plan, **LOAD, clients=[8, clients])


def test_workers_of_ranks_are_as_many_workers(tables):
    one = compile_plan("llama-3.1-8b", "h100", tables, max_num_batched_tokens=16384, engine="kernels")
    two = compile_plan("llama-3.1-8b", "h100", tables, dp=2, max_num_batched_tokens=16384, engine="kernels")
    workers = estimate_disaggregated(one, one, **LOAD, clients=64, prefill_workers=2, decode_workers=2)
    ranks = estimate_disaggregated(two, two, **LOAD, clients=64)
    assert ranks.columns() == workers.columns()


@pytest.mark.parametrize(
    "split", [{"tp": 2, "ep": 2}, {"tp": 1, "dp": 4, "ep": 4}, {"tp": 4, "ep": 1}, {"tp": 2, "pp": 5}]
)
def test_best_equals_estimate(tables, split):
    sweep = {name: [size] for name, size in split.items()}
    spec = {
        "models": ["qwen3-30b-a3b"], "gpus": ["h100"], **sweep, "engine": ["kernels"], **LOAD,
        "clients": [96], "replicas": 2,
    }  # fmt: skip
    ((choice,),) = [answer.choices for answer in best_deployments(spec).answers]
    plan = compile_plan(
        "qwen3-30b-a3b", "h100", tables, **{"engine": "kernels", **split}, max_num_batched_tokens=16384
    )
    alone = estimate(plan, **LOAD, clients=48)
    gpus = plan.layout.world_size * 2
    assert choice.row["total_gpus"] == gpus
    for name in ("ttft_ms", "tpot_ms", "tokens_per_s_per_gpu"):
        assert choice.row[name] == pytest.approx(getattr(alone, name), rel=1e-9)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(2, 1), (1, 2)])
def test_rates_are_shared_over_the_gpus_of_workers_of_both_kinds(tables, prefill_tp, decode_tp):
    prefill, decode = (
        compile_plan("llama-3.1-8b", "h100", tables, tp=tp, engine="kernels")
        for tp in (prefill_tp, decode_tp)
    )
    found = estimate_disaggregated(prefill, decode, **LOAD, clients=16, prefill_workers=2, decode_workers=3)
    gpus = 2 * prefill_tp + 3 * decode_tp
    # clients are as many as requests a second times what one takes
    tokens_per_s = 16 / (found.request_latency_ms / 1e3) * LOAD["osl"]
    assert found.tokens_per_s_per_gpu == pytest.approx(tokens_per_s / gpus, rel=1e-9)
