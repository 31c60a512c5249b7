"""Groups of GPUs of sizes that were not measured, or over several nodes; sends between stages."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import Tables, compile_plan, load_gpu, load_tables
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MEASURED, ORIGIN_MODELLED
from fastroof.errors import MissingTableError, PlanError
from fastroof.operators.calls import AllReduce, Collective, SendReceive
from fastroof.operators.communication import (
    ALLREDUCE,
    COLLECTIVE,
    SEND_RECEIVE,
    allreduce_wire_bytes,
    boundaries_between_nodes,
)
from fastroof.operators.links import BORROWED_GROUP, INTER_NODE_US, OVER_NODES, placed
from fastroof.operators.registry import OPERATORS
from fastroof.operators.row_operator import CurveOptions, RowNodes
from fastroof.plan.curves import RowCurve, row_values
from tests.reference.handmade import handmade_tables

KIB = 1024
MESSAGES = [(KIB, 10.0), (KIB + 2**20, 110.0)]
ALLREDUCES = [("bf16", gpus, "graph", size, us + extra) for gpus, extra in ((2, 0.0), (4, 1.0))
              for size, us in MESSAGES]  # fmt: skip
COLLECTIVES = [("fp16", name, 8, size, us) for name in ("all_gather", "reduce_scatter", "alltoall")
               for size, us in MESSAGES]  # fmt: skip
NAMES = ("all_gather", "reduce_scatter", "alltoall")


def allreduce(num_gpus: int, row_bytes: float = KIB) -> AllReduce:
    return AllReduce("mlp_allreduce", "all-reduce", 1, num_gpus, row_bytes)


def collective(name: str, num_gpus: int, row_bytes: float = KIB, stride: int = 1) -> Collective:
    return Collective("experts_gather", name, 1, name, num_gpus, row_bytes, stride=stride)


def nodes(tables: Tables, call: AllReduce | Collective) -> RowNodes:
    return OPERATORS[call.operator].row_nodes(call, tables, CurveOptions(), 4096)  # type: ignore[attr-defined]


def at(tables: Tables, call: AllReduce | Collective, rows: int) -> tuple[float, int]:
    value, flag = row_values(RowCurve(call, *nodes(tables, call)), rows)
    return float(value[rows]), int(flag[rows])


def test_a_measured_group_comes_back():
    tables = handmade_tables(allreduce=ALLREDUCES, collective=COLLECTIVES)
    assert at(tables, allreduce(4), 1) == (11.0, ORIGIN_MEASURED)
    assert at(tables, allreduce(4), 1025) == (111.0, ORIGIN_MEASURED)
    for name in NAMES:
        assert at(tables, collective(name, 8), 1025) == (110.0, ORIGIN_MEASURED)


def test_another_size_is_borrowed_at_equal_bytes_on_the_wire():
    """Eight of four: 7/8 over 3/4 of the bytes, and a doubling more of what the smallest message takes."""
    tables = handmade_tables(allreduce=ALLREDUCES)
    ratio = float(allreduce_wire_bytes(1.0, 8) / allreduce_wire_bytes(1.0, 4))
    slope_us = 100.0 / 1024
    found, origin = at(tables, allreduce(8), 512)
    assert found == pytest.approx(11.0 + (512 * ratio - 1) * slope_us + 1.0, rel=1e-12)
    assert origin == ORIGIN_BORROWED
    # three are nearer to four, whose smallest message is no smaller
    found, origin = at(tables, allreduce(3), 512)
    ratio = float(allreduce_wire_bytes(1.0, 3) / allreduce_wire_bytes(1.0, 4))
    assert found == pytest.approx(11.0 + (512 * ratio - 1) * slope_us, rel=1e-12)
    assert origin == ORIGIN_BORROWED
    with pytest.raises(MissingTableError):
        nodes(handmade_tables(collective=COLLECTIVES[:2]), collective("alltoall", 4))


def test_two_nodes_add_a_phase_and_what_crosses_them():
    tables = handmade_tables(allreduce=[("bf16", 8, "graph", *m) for m in MESSAGES], collective=COLLECTIVES)
    far = tables.gpu.inter_node_bytes_per_s / 1e6
    rows = 1025
    sent = rows * KIB
    found, origin = at(tables, allreduce(16), rows)
    # eight shares of the sum, each all-reduced between two GPUs
    assert found == pytest.approx(110.0 + 2 * INTER_NODE_US + 2 * (1 / 2) * sent / 8 / far, rel=1e-12)
    assert origin == ORIGIN_MODELLED
    found, _ = at(tables, collective("reduce_scatter", 16), rows)
    assert found == pytest.approx(110.0 + INTER_NODE_US + (1 / 2) * sent / 8 / far, rel=1e-12)
    # a gather within a node passes on what came from the other one
    found, _ = at(tables, collective("all_gather", 16), 512)
    near_us = 10.0 + (2 * 512 - 1) * 100.0 / 1024
    assert found == pytest.approx(near_us + INTER_NODE_US + 512 * KIB / far, rel=1e-12)
    found, _ = at(tables, collective("alltoall", 16), 2050)
    assert found == pytest.approx(110.0 + INTER_NODE_US + 2050 * KIB / 2 / far, rel=1e-12)


def test_a_group_whose_members_are_a_node_apart_has_no_near_part():
    tables = handmade_tables(collective=COLLECTIVES)
    assert placed(2, 8, tables.gpu) == (1, 2)
    call = collective("all_gather", 2, stride=8)
    found, origin = at(tables, call, 100)
    assert origin == ORIGIN_MODELLED
    assert found == pytest.approx(INTER_NODE_US + 100 * KIB / (tables.gpu.inter_node_bytes_per_s / 1e6))
    assert COLLECTIVE.serving(call, tables) is None
    assert COLLECTIVE.row_variance(call, tables, np.array([1.0]))[0] == OVER_NODES**2


def test_a_rack_behind_one_switch_is_one_domain():
    gb200 = load_gpu("gb200")
    assert placed(72, 1, gb200) == (72, 1)
    assert placed(144, 1, gb200) == (72, 2)
    assert placed(16, 1, load_gpu("h100")) == (8, 2)
    assert placed(4, 4, load_gpu("h100")) == (2, 2)


def test_what_is_between_nodes_must_be_known():
    gpu = replace(load_gpu("h20"), name="mine")
    with pytest.raises(PlanError, match=r"mine has no bandwidth between nodes.*inter_node_gb_per_s"):
        ALLREDUCE.datasheet_nodes(allreduce(16), gpu)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(("allreduce", *NAMES)), st.integers(2, 64), st.integers(1, 4096))
def test_more_bytes_and_more_nodes_are_never_faster(h100, name, num_gpus, rows):
    """A group behind one switch is no slower than the same group over nodes."""
    call = allreduce(num_gpus, 8192) if name == "allreduce" else collective(name, num_gpus, 8192)
    alone = Tables(h100.measured, replace(h100.gpu, linked_gpus=64))
    spread = row_values(RowCurve(call, *nodes(h100, call)), 8192)[0]
    near = row_values(RowCurve(call, *nodes(alone, call)), 8192)[0]
    if num_gpus > 8:
        assert spread[rows] > nodes(h100, replace(call, num_gpus=8)).value[1]
        assert np.all(np.diff(OPERATORS[call.operator].datasheet_nodes(call, h100.gpu).value) > 0)  # type: ignore[attr-defined]
    # measured rows are jagged: by a tenth at most over twice the bytes
    assert spread[2 * rows] > 0.9 * spread[rows]
    assert spread[rows] >= 0.9 * near[rows]


def test_errors_grow_with_unmeasured_parts(h100):
    rows = np.array([16.0, 1024.0])
    variances = [ALLREDUCE.row_variance(allreduce(n, 8192), h100, rows) for n in (8, 5, 16)]
    assert np.all(variances[1] >= BORROWED_GROUP**2)
    assert np.all(variances[2] >= OVER_NODES**2)
    assert np.all(variances[0] < BORROWED_GROUP**2)


@pytest.mark.loops
def test_a_model_over_two_nodes(h100):
    plans = [
        compile_plan(
            "llama-3.1-70b", "h100", h100, tp=tp, max_num_batched_tokens=64, max_num_seqs=16, engine="kernels"
        )
        for tp in (8, 16)
    ]
    parts = [{p.role: p for p in plan.explain([(1, 999)] * 8).operators} for plan in plans]
    assert parts[0]["mlp_allreduce"].origin < ORIGIN_BORROWED
    assert parts[1]["mlp_allreduce"].origin == ORIGIN_MODELLED
    assert parts[1]["mlp_allreduce"].total_us > parts[0]["mlp_allreduce"].total_us
    assert 0.0 < plans[1].decode_error(8, 1000) < 1.0


def test_nodes_of_a_larger_group_reduce_as_nccl_does():
    """An engine's own all-reduce is of one node."""
    rows = [("bf16", 8, "graph", *m) for m in MESSAGES]
    rows += [("fp16", gpus, "nccl", size, 2 * us) for gpus in (4, 8) for size, us in MESSAGES]
    tables = handmade_tables(allreduce=rows)
    assert at(tables, allreduce(8), 1025) == (110.0, ORIGIN_MEASURED)
    crossing = 1025 * KIB / 8 / (tables.gpu.inter_node_bytes_per_s / 1e6)
    assert at(tables, allreduce(16), 1025)[0] == pytest.approx(
        220.0 + 2 * INTER_NODE_US + crossing, rel=1e-12
    )
    assert ALLREDUCE.table_points(allreduce(16), tables, np.array([1.0]))[0] == ("fp16", 8, "nccl")


# Sends between pipeline stages


def test_boundaries_of_stages():
    sizes = ((2, 4), (4, 4), (2, 8), (4, 8), (2, 3))
    assert [boundaries_between_nodes(*one, 8) for one in sizes] == [0, 1, 1, 3, 0]
    assert boundaries_between_nodes(3, 3, 8) == 1
    assert boundaries_between_nodes(9, 8, 72) == 0


def test_a_send_is_a_message_and_its_bytes():
    gpu = load_gpu("h100")
    near = SendReceive("stage_send", "send", 1, 8192.0, 2, 4)
    far = replace(near, stage_gpus=8)
    both = replace(near, stages=4)
    rows = np.array([0.0, 1024.0])
    us = [np.interp(rows, *SEND_RECEIVE.datasheet_nodes(call, gpu)[:2]) for call in (near, far, both)]
    assert us[1][0] == INTER_NODE_US
    assert us[1][1] - us[1][0] == pytest.approx(1024 * 8192 / (gpu.inter_node_bytes_per_s / 1e6))
    assert np.all(us[0] < us[1])
    assert us[2] == pytest.approx((2 * us[0] + us[1]) / 3)
    assert set(SEND_RECEIVE.datasheet_nodes(near, gpu).flag) == {ORIGIN_MODELLED}


def sent_us(tables: Tables, model: str, tp: int, pp: int) -> float:
    plan = compile_plan(model, "h100", tables, tp=tp, pp=pp, engine="kernels")
    parts = {part.name: part for part in plan.explain([(1024, 0)]).operators}
    return float(parts["pipeline send"].total_us)


@pytest.mark.parametrize("sizes", [(1, 8), (8, 1)])
def test_plans_of_the_same_tables_send_over_their_own_boundaries(sizes):
    """Two stages of 8 GPUs lie in two nodes, two of one GPU in the same, whichever was compiled first."""
    tables = load_tables("h100")
    sent = {tp: sent_us(tables, "llama-3.1-8b", tp, 2) for tp in sizes}
    # 4096 elements of two bytes a token
    crossing_us, near_us = (
        1024 * 8192 / rate * 1e6
        for rate in (tables.gpu.inter_node_bytes_per_s, tables.gpu.nvlink_bytes_per_s)
    )
    assert sent[8] == pytest.approx(INTER_NODE_US + crossing_us)
    assert 0.0 < sent[1] - near_us < INTER_NODE_US


@pytest.mark.parametrize("order", [("llama-3.1-8b", "llama-3.1-70b"), ("llama-3.1-70b", "llama-3.1-8b")])
def test_wider_models_send_more(order):
    tables = load_tables("h100")
    sent = {model: sent_us(tables, model, 8, 2) - INTER_NODE_US for model in order}
    # 8192 elements of two bytes a token where the smaller model has 4096
    assert sent["llama-3.1-70b"] == pytest.approx(2 * sent["llama-3.1-8b"])


@pytest.mark.parametrize("order", [(2, 4, 8), (8, 4, 2)])
def test_more_stages_of_as_many_gpus_cross_more_nodes(order):
    """Two stages of 4 GPUs are in a node: none of 1, one of 3, three of 7 boundaries are between nodes."""
    tables = load_tables("h100")
    sent = {pp: sent_us(tables, "llama-3.1-8b", 4, pp) for pp in order}
    far_us = sent[4] - 2 * sent[2]
    assert far_us > 2 * sent[2]
    assert sent[8] == pytest.approx(4 * sent[2] + 3 * far_us)
