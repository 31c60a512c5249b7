"""Tokens to experts and back: phases, units, and whose tokens a file counts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.expert_dispatch import EXPERT_DISPATCH
from fastroof.operators.moe_work import dispatch_wire_bytes
from tests.operators.package_columns import converted, lists
from tests.reference.handmade import handmade_tables

KEY = {"library": "deepep_ll", "hidden": 7168, "topk": 8, "num_experts": 256, "num_gpus": 8}


def tables():
    shape = ("deepep_ll", "dispatch", "default", 7168, 8, 256, 8, 1, 0)
    back = ("deepep_ll", "combine", *shape[2:])
    rows = [(*shape, 1, 12.0), (*shape, 128, 40.0), (*back, 1, 14.0), (*back, 128, 70.0)]
    return handmade_tables(expert_dispatch=rows)


def test_dispatch_and_combine_are_two_calls_of_one_exchange():
    there, back = (
        tables().lookup("expert_dispatch", phase=p, num_tokens=[1, 128], **KEY)
        for p in ("dispatch", "combine")
    )
    assert there.latency_us.tolist() == [12.0, 40.0]
    assert back.latency_us.tolist() == [14.0, 70.0]
    assert np.isnan(there.mfu).all()
    between = tables().lookup("expert_dispatch", phase="dispatch", num_tokens=65, **KEY)
    assert float(between.latency_us) == pytest.approx(12.0 + 28.0 * 64 / 127, rel=1e-12)


def test_the_number_of_sms_is_a_key_and_0_leaves_it_to_the_library():
    with pytest.raises(MissingTableError):
        tables().lookup("expert_dispatch", phase="dispatch", num_tokens=1, sms=24, **KEY)
    with pytest.raises(LookupInputError, match="sms must be at least 0, got -1"):
        tables().lookup("expert_dispatch", phase="dispatch", num_tokens=1, sms=-1, **KEY)
    both = tables().lookup("expert_dispatch", phase="dispatch", num_tokens=1, sms=[0, 0], **KEY)
    assert both.latency_us.tolist() == [12.0, 12.0]


def test_refuses_groups_that_cannot_be():
    alone = KEY | {"num_gpus": 1}
    with pytest.raises(LookupInputError, match="num_gpus of at least 2, got 1"):
        tables().lookup("expert_dispatch", phase="dispatch", num_tokens=1, **alone)
    with pytest.raises(LookupInputError, match="num_nodes 9 is more than num_gpus 8"):
        tables().lookup("expert_dispatch", phase="dispatch", num_tokens=1, num_nodes=9, **KEY)


@given(tokens=st.integers(1, 10**6), topk=st.integers(1, 16), gpus=st.integers(2, 64))
def test_a_token_goes_to_each_other_gpu_at_most_once(tokens: int, topk: int, gpus: int):
    sent = float(dispatch_wire_bytes(tokens, 1, topk, gpus)) / tokens
    assert 0 < sent <= min(topk, gpus - 1) * (1 + 1e-9)
    assert dispatch_wire_bytes(tokens + 1, 1, topk, gpus) > dispatch_wire_bytes(tokens, 1, topk, gpus)


def test_work_counts_fp8_out_and_bf16_back():
    rows = tables().table("expert_dispatch").columns
    out, back = (EXPERT_DISPATCH.moved_bytes(rows)[rows["phase"] == p] for p in ("dispatch", "combine"))
    np.testing.assert_allclose(back, 2 * out, rtol=1e-12)
    np.testing.assert_allclose(out, [dispatch_wire_bytes(n, 7168, 8, 8) for n in (1, 128)], rtol=1e-12)
    work = EXPERT_DISPATCH.work(rows, tables().gpu)
    assert work.over_link
    assert "microseconds" in EXPERT_DISPATCH.package_notes({}, tables().gpu)["note"]
    assert work.bandwidth_bytes_per_s == tables().gpu.nvlink_bytes_per_s


def test_moe_a2a_is_in_microseconds():
    rows = converted(
        EXPERT_DISPATCH,
        "moe_a2a_perf",
        comm_backend=["deepep_ht", "trtllm_deepep_ll"],
        phase=["dispatch", "combine"],
        comm_dtype=["default", "bfloat16"],
        ep_size=8,
        node_num=1,
        hidden_size=7168,
        sms=[20, 0],
        num_tokens=[4096, 8],
        latency=[1457.0, 47.0],
    )
    assert lists(rows, "latency_us") == [[1457.0, 47.0]]
    assert lists(rows, "library", "phase", "comm_dtype", "num_gpus", "sms", "num_tokens", "hidden") == [
        ["deepep_ht", "trtllm_deepep_ll"],
        ["dispatch", "combine"],
        ["default", "bf16"],
        [8, 8],
        [20, 0],
        [4096, 8],
        [7168, 7168],
    ]


def test_deepep_low_latency_has_a_row_a_phase_and_nodes_of_eight():
    sizes = {"hidden_size": 7168, "num_topk": 8, "num_experts": 256, "num_token": 64}
    times = {"dispatch_avg_t_us": 25.0, "combine_avg_t_us": 40.0}
    rows = converted(EXPERT_DISPATCH, "wideep_deepep_ll_perf", node_num=[1, 4], **sizes, **times)
    assert lists(rows, "phase", "latency_us", "num_gpus", "num_nodes", "sms", "num_tokens") == [
        ["dispatch", "dispatch", "combine", "combine"],
        [25.0, 25.0, 40.0, 40.0],
        [8, 32, 8, 32],
        [1, 4, 1, 4],
        [0] * 4,
        [64] * 4,
    ]
    rows = converted(
        EXPERT_DISPATCH, "wideep_deepep_ll_perf", node_num=1, device="NVIDIA GB200", **sizes, **times
    )
    assert lists(rows, "num_gpus") == [[4, 4]]


def test_deepep_normal_adds_telling_to_sending_by_sms():
    rows = converted(
        EXPERT_DISPATCH,
        "wideep_deepep_normal_perf",
        node_num=2,
        dispatch_sms=[20, 24],
        combine_sms=[12, 24],
        dispatch_transmit_us=[500.0, 400.0],
        dispatch_notify_us=[50.0, 0.0],
        combine_transmit_us=[900.0, 800.0],
        combine_notify_us=[7.0, 0.0],
    )
    assert lists(rows, "phase", "sms", "latency_us", "library") == [
        ["dispatch", "dispatch", "combine", "combine"],
        [20, 24, 12, 24],
        [550.0, 400.0, 907.0, 800.0],
        ["deepep_normal"] * 4,
    ]


def test_trtllms_exchange_is_in_milliseconds_and_its_kernels_are_alternatives():
    rows = converted(
        EXPERT_DISPATCH,
        "trtllm_alltoall_perf",
        kernel_source=["NVLinkOneSided", "NVLinkTwoSided", "NVLinkTwoSided"],
        op_name=["alltoall_dispatch", "alltoall_prepare", "alltoall_combine"],
        moe_dtype=["nvfp4", "fp8", "bfloat16"],
        distribution=["balanced", "balanced", "power_law_1.2"],
        moe_ep_size=[32, 4, 4],
        latency=[0.02, 0.01, 0.03],
    )
    assert lists(rows, "library", "phase", "latency_us", "num_gpus", "num_nodes", "comm_dtype") == [
        ["nvlink_one_sided", "nvlink_two_sided"],
        ["dispatch", "prepare"],
        [20.0, 10.0],
        [32, 4],
        [8, 1],
        ["nvfp4", "fp8"],
    ]
    assert {reason: int(mask.sum()) for reason, mask in rows.left_out.items()} == {
        "routed by power_law_1.2": 1
    }
