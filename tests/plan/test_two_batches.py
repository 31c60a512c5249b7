"""Steps as two halves whose sending and computing overlap: a model, against one written for reading."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastroof import StepBatch, compile_plan, compile_plans, load_model
from fastroof.columns import ORIGIN_MODELLED
from fastroof.engines import load_engine
from fastroof.errors import PlanError
from fastroof.models import LayerGroup, LayerKind
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.mlp import GatedMlp
from fastroof.plan.calls import OTHER_HALF
from tests.reference.two_batches import step_us

SGLANG = load_engine("sglang").kernels_alone()
LIMITS = {"max_num_batched_tokens": 1024, "max_num_seqs": 256}
MODEL = load_model("qwen3-235b-a22b")
SENT = {"dp": 8, "ep": 8, "engine": SGLANG, "exchange": "alltoall", "dtype": "fp8_block", **LIMITS}


def pair(h100, model=MODEL, **options):
    return tuple(
        compile_plan(model, "h100", h100, **{"engine": "kernels", **SENT, **options}, two_batch_overlap=both)
        for both in (False, True)
    )


def floors(plan):
    tables = plan.error_source.tables
    heads = {"num_q_heads": 64, "num_kv_heads": 4, "head_dim": 128}
    decode = tables.lookup("attention_decode", batch_size=1, kv_len=1, **heads)
    prefill = tables.lookup("attention_prefill", q_len=1, kv_len=1, batch_size=1, **heads)
    return float(decode.latency_us), float(prefill.latency_us)


@pytest.mark.loops
@pytest.mark.parametrize("shared", [0, 4096])
def test_a_step_is_its_phases(h100, shared):
    """Without shared experts and with some, which cover the way back."""
    mlp = RoutedExperts(128, 8, 1536, shared_intermediate=shared)
    kind = LayerKind(GroupedQueryAttention(64, 4, 128), mlp, "mine")
    model = replace(MODEL, layers=(LayerGroup(kind, 3),))
    plain, split = pair(h100, model)
    decode_us, prefill_us = floors(plain)
    for size in (2, 8, 64, 256):
        requests = [(1, 99)] * size
        assert split.decode_us(size, 100) == pytest.approx(step_us(plain, requests, decode_us), rel=1e-9)
    for requests in ([(64, 0)] * 2, [(128, 0)] * 8):
        found = float(split.step_us(StepBatch.from_requests([requests]))[0])
        assert found == pytest.approx(step_us(plain, requests, prefill_us), rel=1e-9)


@pytest.mark.loops
def test_its_parts_add_up_and_are_marked_as_modelled(h100):
    plain, split = pair(h100)
    for requests in ([(1, 99)] * 33, [(64, 0)] * 4 + [(1, 99)] * 8):
        explained = split.explain(requests)
        assert sum(o.total_us for o in explained.operators) == pytest.approx(explained.total_us, rel=1e-12)
        assert explained.origin == ORIGIN_MODELLED
        names = [o.name for o in explained.operators]
        assert names.count(OTHER_HALF) == 1
        assert "experts dispatch, not overlapped" in names
        before, after = ({o.role: o.total_us for o in p.explain(requests).operators} for p in (plain, split))
        for role in ("experts_dispatch", "experts_combine"):
            assert after[role] <= before[role]
    assert 0.0 < split.decode_error(64, 100) < 0.5
    assert split.describe()["two_batch_overlap"] == "yes"
    assert "two_batch_overlap" not in plain.describe()


@pytest.mark.parametrize(("larger", "smaller"), [(4, 3), (32, 31), (5, 4), (16, 16)])
def test_a_kernel_is_as_measured_as_both_its_halves(h100, larger, smaller):
    """Powers of two were measured, and their neighbours are between."""
    plain, split = pair(h100)

    def origins(plan, size):
        explained = plan.explain([(1, 99)] * size)
        return np.array([p.origin for p in explained.operators if p.role in ("o", "router", "experts")])

    one, other = origins(plain, larger), origins(plain, smaller)
    assert (one == other).all() == (larger == smaller)
    assert origins(split, larger + smaller).tolist() == np.maximum(one, other).tolist()


def test_one_token_is_not_split_and_few_are_slower(h100):
    plain, split = pair(h100)
    assert split.decode_us(1, 100) == plain.decode_us(1, 100)
    assert split.decode_us(2, 100) > plain.decode_us(2, 100)
    # no better than if nothing was sent at all, and each half ran by itself
    for size in (2, 64, 256):
        sent = sum(
            o.total_us
            for o in plain.explain([(1, 99)] * size).operators
            if o.role in ("experts_dispatch", "experts_combine")
        )
        assert split.decode_us(size, 100) >= plain.decode_us(size, 100) - sent


def test_over_nodes_large_batches_gain(h100):
    plain, split = pair(h100, dp=32, ep=32)
    gain = [plain.decode_us(size, 2000) / split.decode_us(size, 2000) for size in (4, 256)]
    assert gain[0] < 1.0 < gain[1]


def test_an_engine_sets_the_threshold_in_tokens(h100):
    plain, split = pair(h100, engine="vllm")
    assert [split.decode_us(size, 100) == plain.decode_us(size, 100) for size in (31, 32)] == [True, False]
    assert [split.prefill_us(size) == plain.prefill_us(size) for size in (511, 512)] == [True, False]


def test_layers_that_send_nothing_are_not_split(h100):
    attention = GroupedQueryAttention(64, 4, 128)
    dense = LayerKind(attention, GatedMlp(8192), "dense")
    experts = LayerKind(attention, RoutedExperts(128, 8, 1536), "experts")
    model = replace(MODEL, layers=(LayerGroup(dense, 2), LayerGroup(experts, 3)))
    parts = [
        {o.name: o.total_us for o in plan.explain([(1, 99)] * 64).operators} for plan in pair(h100, model)
    ]
    for name in (
        "qkv (dense)",
        "down (dense)",
        "decode attention (dense)",
        "lm_head",
        "decode attention (experts)",
    ):
        assert parts[0][name] == parts[1][name]
    assert parts[0]["qkv (experts)"] < parts[1]["qkv (experts)"]


def test_stages_and_sets_of_plans(h100):
    split = compile_plan(MODEL, "h100", h100, **{"engine": "kernels", **SENT}, pp=2, two_batch_overlap=True)
    whole = sum(float(stage.decode_us(64, 100)) for stage in split.stages)
    assert whole == pytest.approx(split.decode_us(64, 100), rel=1e-9)
    plans = compile_plans(
        [{"model": MODEL, **SENT, "two_batch_overlap": both} for both in (False, True)], "h100", h100
    )
    assert [plan.decode_us(64, 100) for plan in plans] == [plan.decode_us(64, 100) for plan in pair(h100)]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (MODEL, {"exchange": "gather"}, "use exchange='alltoall' with dp and ep 8, above 1"),
        (MODEL, {"engine": "trtllm-1.1"}, "trtllm-1.1 has no such option: use engine='sglang' or 'vllm'"),
        ("llama-3.1-8b", {"dp": 1, "ep": 1, "exchange": None}, "it has no routed experts"),
        (MODEL, {"two_batch_overlap": 1}, "two_batch_overlap must be True or False, got 1"),
    ],
)
def test_what_no_engine_runs(h100, model, options, message):
    with pytest.raises(PlanError, match=message):
        compile_plan(
            model, "h100", h100, **{"engine": "kernels", **SENT, "two_batch_overlap": True, **options}
        )
