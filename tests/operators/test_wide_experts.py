"""Wide expert parallelism: whose tokens a file counts, units, places of doubled experts, lookups."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.operators.expert_work import moe_bytes, moe_flops
from fastroof.operators.wide_experts import MEGAMOE, MLP, MOE_WIDE
from tests.operators.package_columns import converted, lists
from tests.reference.handmade import handmade_tables

H200 = load_gpu("h200")


def test_wide_experts_of_sglang_have_a_phase_and_a_place_an_expert():
    given = {"moe_dtype": "fp8_block", "num_experts": 256, "moe_tp_size": 1, "latency": 0.25}
    for phase in ("context", "generation"):
        rows = converted(MOE_WIDE, f"wideep_{phase}_moe_perf", **given)
        assert lists(rows, "phase", "num_slots", "latency_us") == [[phase], [256], [250.0]]


def test_wide_experts_of_trtllm_count_the_tokens_of_all_gpus_and_doubled_experts():
    """rank0_num_tokens and dp_num_tokens of the file are shares of num_tokens, which is global."""
    rows = converted(
        MOE_WIDE,
        "wideep_moe_perf",
        moe_dtype="nvfp4",
        num_tokens=[1024, 2048],
        num_experts=256,
        num_slots=[256, 288],
        moe_tp_size=[1, 2],
        moe_ep_size=32,
        distribution="power_law_1.01_eplb",
    )
    assert lists(rows, "num_tokens", "num_slots", "phase") == [[1024], [256], ["any"]]
    assert [reason for reason, mask in rows.left_out.items() if mask.any()] == ["experts that are split"]


def test_a_gpu_does_its_share_of_all_tokens():
    key = ("fp8_block", 7168, 2048, 8, 256, 288, 32, "any", "uniform")
    tables = handmade_tables("h200", moe_wide=[(*key, 32, 100.0), (*key, 4096, 400.0)])
    shape = {
        "hidden": 7168,
        "intermediate": 2048,
        "topk": 8,
        "num_experts": 256,
        "num_slots": 288,
        "moe_ep": 32,
    }
    answer = tables.lookup(
        "moe_wide", num_tokens=[32, 4096], phase="any", distribution="uniform", dtype="fp8_block", **shape
    )
    assert answer.latency_us.tolist() == [100.0, 400.0]
    flops = moe_flops(np.array([32, 4096]), 7168, 2048, 8, 1, 32)
    np.testing.assert_allclose(
        answer.mfu, flops / (np.array([100e-6, 400e-6]) * H200.peak("fp8")), rtol=1e-12
    )
    work = MOE_WIDE.work(tables.table("moe_wide").columns, H200)
    weights = moe_bytes(4096, 7168, 2048, 8, 288, 1, 32, 1) - moe_bytes(4096, 7168, 2048, 8, 288, 1, 32, 0)
    assert work.moved_bytes[1] == pytest.approx(float(weights) + 4096 / 32 * 2 * 2 * 7168, rel=1e-12)
    between = tables.lookup(
        "moe_wide", num_tokens=1000, phase="any", distribution="uniform", dtype="fp8_block", **shape
    )
    assert 100.0 < float(between.latency_us) < 400.0
    assert int(between.origin) == 1


def test_megamoe_counts_the_tokens_of_all_gpus():
    rows = converted(
        MEGAMOE,
        "dsv4_megamoe_module_perf",
        moe_dtype="w4a8_mxfp4_mxfp8",
        num_tokens=[4, 4],
        global_num_tokens=[32, 32],
        moe_ep_size=8,
        moe_tp_size=1,
        num_fused_shared_experts=[0, 1],
        phase="generation",
        latency=[0.1, 0.2],
    )
    assert lists(rows, "num_tokens", "moe_ep", "latency_us", "phase") == [[32], [8], [100.0], ["generation"]]
    assert [reason for reason, mask in rows.left_out.items() if mask.any()] == [
        "shared experts in the kernel"
    ]


def test_mlps_have_milliseconds_in_a_column_of_their_own():
    given = {"quant_type": "fp8_block", "num_token": [1, 64], "hidden_size": 7168, "avg_ms": [0.031, 0.04]}
    for phase in ("context", "generation"):
        rows = converted(MLP, f"wideep_{phase}_mlp_perf", **given, intermediate_size=2048)
        assert lists(rows, "latency_us", "phase", "num_tokens") == [[31.0, 40.0], [phase] * 2, [1, 64]]


def test_an_mlp_is_three_gemms_between_its_points():
    key = ("fp8_block", 7168, 2048, "generation")
    tables = handmade_tables("h200", mlp=[(*key, 1, 30.0), (*key, 1025, 230.0)])
    answer = tables.lookup("mlp", hidden=7168, intermediate=2048, num_tokens=[1, 513])
    assert answer.latency_us.tolist() == pytest.approx([30.0, 130.0], rel=1e-12)
    assert answer.mfu[1] == pytest.approx(6 * 513 * 7168 * 2048 / (130e-6 * H200.peak("fp8")), rel=1e-12)
