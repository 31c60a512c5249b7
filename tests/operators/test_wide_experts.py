"""Wide expert parallelism: whose tokens a file counts, units, places of doubled experts, lookups."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.columns import ORIGIN_BORROWED
from fastroof.errors import MissingTableError
from fastroof.operators.calls import Experts
from fastroof.operators.expert_dispatch import MEGAMOE
from fastroof.operators.moe_work import moe_bytes, moe_flops
from fastroof.operators.row_operator import CurveOptions
from fastroof.operators.wide_experts import ANOTHER_LAYER, ANOTHER_SLOTS, ANOTHER_SPLIT, MLP, MOE_WIDE
from fastroof.plan.curves import RowCurve, row_values
from tests.operators.package_columns import converted, lists
from tests.reference.handmade import handmade_tables

H100 = load_gpu("h100")
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


LAYER = ("fp8_block", 7168, 2048, 8, 256)
CALL = Experts(
    "experts", "experts", 1, 7168, 2048, 8, 256, 1, 32, "fp8_block", "power_law_1.2",
    phase="generation", num_slots=256,
)  # fmt: skip
POINTS = ((1, 50.0), (128, 120.0), (4096, 900.0))


def rows_of(
    ep: int, distribution: str = "power_law_1.2", slots: int = 256, phase: str = "any", times: float = 1
):
    return [(*LAYER, slots, ep, phase, distribution, tokens, us * times) for tokens, us in POINTS]


def at(tables, call, tokens: int) -> tuple[float, int]:
    nodes = MOE_WIDE.row_nodes(call, tables, CurveOptions(), 4096)
    value, flag = row_values(RowCurve(call, *nodes), tokens)
    return float(value[tokens]), int(flag[tokens])


def test_a_plan_reads_the_phase_or_the_one_kernel_of_both():
    tables = handmade_tables(moe_wide=rows_of(32))
    assert [at(tables, CALL, tokens) for tokens, _ in POINTS] == [(us, 0) for _, us in POINTS]
    both = handmade_tables(moe_wide=rows_of(32, phase="generation") + rows_of(32, phase="context", times=3))
    assert at(both, CALL, 128) == (120.0, 0)
    assert at(both, replace(CALL, phase="context"), 128) == (360.0, 0)


def test_another_split_is_borrowed_at_equal_tokens_an_expert():
    """Two equally near splits give the geometric mean of latency / B, times its own B."""
    tables = handmade_tables(moe_wide=rows_of(16) + rows_of(64, times=2))
    found, origin = at(tables, CALL, 128)

    def bound_us(ep: int, launch_us: float) -> float:
        flops = float(moe_flops(128, 7168, 2048, 8, 1, ep))
        weights = float(
            moe_bytes(128, 7168, 2048, 8, 256, 1, ep, 1) - moe_bytes(128, 7168, 2048, 8, 256, 1, ep, 0)
        )
        moved = weights + 2.0 * 2 * 128 / ep * 7168
        return launch_us + (flops / H100.peak("fp8_block") + moved / H100.hbm_bytes_per_s) * 1e6

    shares = [
        us * bound_us(32, launch) / bound_us(ep, launch)
        for ep, us, launch in ((16, 120.0, 50.0), (64, 240.0, 100.0))
    ]
    assert found == pytest.approx(math.sqrt(shares[0] * shares[1]), rel=1e-9)
    assert origin == ORIGIN_BORROWED
    errors = [
        MOE_WIDE.row_variance(one, tables, np.array([128.0])) for one in (replace(CALL, moe_ep=16), CALL)
    ]
    assert errors[0] < errors[1]
    assert MOE_WIDE.table_points(CALL, tables, np.array([1.0]))[0][6] == 16


@pytest.mark.parametrize(
    ("change", "error", "tokens"),
    [
        ({"moe_ep": 64}, ANOTHER_SPLIT, 128.0),
        ({"num_slots": 320}, ANOTHER_SLOTS, 128.0 * 256 / 320),
        ({"hidden": 4096}, ANOTHER_LAYER, 128.0),
        ({"topk": 4}, ANOTHER_LAYER, 64.0),
    ],
)
def test_what_borrowing_adds_is_that_of_its_kind(change: dict[str, int], error: float, tokens: float):
    """The variance of borrowing is added to that of the donor's curve at as many tokens an expert."""
    tables = handmade_tables(moe_wide=rows_of(32))
    own = MOE_WIDE.row_variance(CALL, tables, np.array([tokens]))
    borrowed = MOE_WIDE.row_variance(replace(CALL, **change), tables, np.array([128.0]))
    np.testing.assert_allclose(borrowed - own, error**2, rtol=1e-9)


def test_what_a_load_balancer_evened_out_is_donor_to_nothing_else():
    tables = handmade_tables(moe_wide=rows_of(32, "power_law_1.2_eplb", 288))
    with pytest.raises(
        MissingTableError, match=r"no load balancer; measured: fp8_block any power_law_1.2_eplb"
    ):
        at(tables, CALL, 1)
    balanced = replace(CALL, distribution="power_law_1.2_eplb", num_slots=288)
    assert at(tables, balanced, 128) == (120.0, 0)
    # another number of places, and another skew
    assert at(tables, replace(balanced, num_slots=320), 128)[1] == ORIGIN_BORROWED
    assert at(tables, replace(balanced, distribution="power_law_1.01_eplb"), 128)[1] == ORIGIN_BORROWED


def test_the_layer_itself_comes_before_another_layer():
    other = [
        ("fp8_block", 7168, 2048, 8, 384, 384, 32, "any", "power_law_1.2", t, 9 * us) for t, us in POINTS
    ]
    tables = handmade_tables(moe_wide=[*other, *rows_of(256)])
    assert MOE_WIDE.table_points(CALL, tables, np.array([1.0]))[0][4] == 256
    assert (
        MOE_WIDE.table_points(replace(CALL, num_experts=512, num_slots=512), tables, np.array([1.0]))[0][4]
        == 384
    )


def test_more_tokens_take_longer_in_what_ships(h100):
    for change in (
        {},
        {"distribution": "power_law_1.2_eplb", "num_slots": 320},
        {"hidden": 4096, "num_experts": 128, "num_slots": 128},
    ):
        us = [at(h100, replace(CALL, **change), tokens)[0] for tokens in (64, 4096)]
        assert us == sorted(us)
