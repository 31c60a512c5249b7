"""Tokens to experts in plans: measured kernels, others at equal bytes, and nodes beyond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fastroof import Tables, load_tables
from fastroof.columns import ORIGIN_BORROWED, ORIGIN_MEASURED, ORIGIN_MODELLED
from fastroof.errors import MissingTableError, TableError
from fastroof.load.aiconfigurator import installed_root
from fastroof.operators.calls import Dispatch
from fastroof.operators.expert_dispatch import EXPERT_DISPATCH
from fastroof.operators.links import INTER_NODE_US
from fastroof.operators.moe_work import dispatch_wire_bytes, sent_to
from fastroof.operators.row_operator import CurveOptions
from fastroof.plan.curves import RowCurve, row_values
from tests.reference.handmade import handmade_tables

SHAPE = ("default", 4096, 8, 128, 8, 1)
POINTS = ((1, 20.0), (101, 120.0), (1001, 1020.0))
ROWS = [
    (library, phase, *SHAPE, sms, tokens, us * (2 if phase == "combine" else 1))
    for library, sms in (("deepep_ll", 0), ("deepep_normal", 20), ("deepep_normal", 8))
    for phase in ("dispatch", "combine")
    for tokens, us in POINTS
]  # fmt: skip
CALL = Dispatch("experts_dispatch", "dispatch", 1, "deepep_ll", "dispatch", "default", 4096, 8, 128, 8)


def at(tables: Tables, call: Any, rows: int) -> tuple[float, int]:
    nodes = EXPERT_DISPATCH.row_nodes(call, tables, CurveOptions(), 4096)
    value, flag = row_values(RowCurve(call, *nodes), rows)
    return float(value[rows]), int(flag[rows])


@pytest.fixture(scope="module")
def tables() -> Tables:
    return handmade_tables(expert_dispatch=ROWS)


def test_a_measured_kernel_comes_back(tables):
    assert at(tables, CALL, 101) == (120.0, ORIGIN_MEASURED)
    assert at(tables, replace(CALL, phase="combine"), 101) == (240.0, ORIGIN_MEASURED)
    # of a rank's tokens each of two GPUs sends half
    assert at(tables, replace(CALL, shared_by=2), 202) == (120.0, ORIGIN_MEASURED)
    # as many SMs as DeepEP takes by itself
    normal = replace(CALL, library="deepep_normal")
    table = EXPERT_DISPATCH.table_points(normal, tables, np.array([1.0]))[0]
    assert table[-1] == 20


def test_a_row_that_gpus_share_is_a_token_at_least(tables):
    """A quarter of a row each: one token of one of them, as no kernel runs without any."""
    shared = replace(CALL, shared_by=4)
    for method in ("nearest", "floor", "linear_mfu"):
        nodes = EXPERT_DISPATCH.row_nodes(shared, tables, CurveOptions(method), 404)
        found = np.interp([1.0, 2.0, 4.0, 404.0], nodes.axis, nodes.value)
        assert found.tolist() == [20.0, 20.0, 20.0, 120.0]


def test_another_shape_is_borrowed_at_equal_bytes(tables):
    wide = replace(CALL, hidden=8192)
    assert at(tables, wide, 50) == pytest.approx((20.0 + 99.0, ORIGIN_BORROWED), rel=1e-12)
    four = replace(CALL, num_gpus=4)
    fewer = float(dispatch_wire_bytes(1, 1, 8, 4) / dispatch_wire_bytes(1, 1, 8, 8))
    assert at(tables, four, 100) == pytest.approx((20.0 + 100 * fewer - 1, ORIGIN_BORROWED), rel=1e-12)
    bf16 = replace(CALL, comm_dtype="bf16")
    assert at(tables, bf16, 50)[0] == at(tables, wide, 50)[0]
    with pytest.raises(MissingTableError, match="expert_dispatch row"):
        at(tables, replace(CALL, library="nvlink_one_sided"), 1)
    # of the same kind: another library's
    assert at(tables, replace(CALL, library="deepep_ht"), 101)[1] == ORIGIN_BORROWED


def test_over_nodes_a_message_and_the_bytes_that_cross_are_added(tables):
    per_us = tables.gpu.inter_node_bytes_per_s / 1e6
    two = replace(CALL, num_gpus=16)
    # half of a token's copies stay in the node
    found, origin = at(tables, two, 202)
    assert found == pytest.approx(120.0 + INTER_NODE_US + 202 * 4096 * 8 / 2 / per_us, rel=1e-12)
    assert origin == ORIGIN_MODELLED
    # high throughput: one copy to the other node, which passes it on
    found, _ = at(tables, replace(two, library="deepep_normal"), 101)
    crossing = 101 * 4096 * sent_to(2, 8)
    assert found == pytest.approx(120.0 + INTER_NODE_US + crossing / per_us, rel=1e-12)
    assert sent_to(2, 8) == 1.0 - 0.5**8


@pytest.mark.parametrize("library", ["deepep_ll", "deepep_normal"])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_more_tokens_and_more_gpus_are_never_faster(h100, library, phase):
    call = replace(CALL, library=library, phase=phase, hidden=7168, num_experts=256)
    by_gpus = [at(h100, replace(call, num_gpus=gpus), 512)[0] for gpus in (8, 16, 32, 64)]
    assert by_gpus == sorted(by_gpus)
    nodes = EXPERT_DISPATCH.datasheet_nodes(replace(call, num_gpus=16), h100.gpu)
    near = EXPERT_DISPATCH.datasheet_nodes(call, h100.gpu)
    assert np.all(nodes.value > near.value)
    assert np.all(np.diff(near.value) > 0)
    variances = [
        float(EXPERT_DISPATCH.row_variance(replace(call, num_gpus=gpus), h100, np.array([64.0]))[0])
        for gpus in (8, 16)
    ]
    assert variances[0] < variances[1]


def test_deepep_over_nodes_against_what_was_measured():
    """H100 in nodes of eight, predicted from one node: rows that do not ship."""
    try:
        root = installed_root()
    except TableError as error:
        pytest.skip(str(error))
    folder = root / "systems/data/h100_sxm/comm/sglang/0.5.6.post2"
    rows = [r for r in pq.read_table(folder / "wideep_deepep_ll_perf.parquet").to_pylist()
            if r["num_experts"] == 256]  # fmt: skip
    near = [
        ("deepep_ll", phase, "default", 7168, 8, 256, 8, 1, 0, row["num_token"], row[f"{phase}_avg_t_us"])
        for row in rows if row["node_num"] == 1 for phase in ("dispatch", "combine")
    ]  # fmt: skip
    tables = handmade_tables(expert_dispatch=near)
    for phase in ("dispatch", "combine"):
        for node_num in (2, 4, 8):
            call = replace(CALL, phase=phase, hidden=7168, num_experts=256, num_gpus=8 * node_num)
            measured = [(r["num_token"], r[f"{phase}_avg_t_us"]) for r in rows if r["node_num"] == node_num]
            off = [at(tables, call, tokens)[0] / us - 1.0 for tokens, us in measured]
            assert len(off) == 13
            assert np.mean(np.abs(off)) < 0.2


def over_nodes(*counts: int, library: str = "deepep_ll") -> Tables:
    """One node as above, and groups over nodes of eight whose latency is 100 us a node, and 1 us a token."""
    shape = ("default", 4096, 8, 128)
    rows = [
        (library, "dispatch", *shape, 8 * count, count, 0, tokens, 100.0 * count + tokens)
        for count in counts for tokens in (1, 101, 1001)
    ]  # fmt: skip
    return handmade_tables(expert_dispatch=[*ROWS, *rows])


@pytest.mark.parametrize("nodes", [2, 4])
def test_a_group_over_as_many_nodes_comes_back(nodes):
    tables = over_nodes(2, 4)
    call = replace(CALL, num_gpus=8 * nodes)
    assert at(tables, call, 101) == (100.0 * nodes + 101, ORIGIN_MEASURED)
    assert EXPERT_DISPATCH.table_points(call, tables, np.array([1.0]))[0][7] == nodes
    # as many GPUs in more nodes than they need are another group
    scattered = [
        ("deepep_ll", "dispatch", "default", 4096, 8, 128, 16, 4, 0, tokens, 7.0) for tokens in (1, 9)
    ]
    far = handmade_tables(expert_dispatch=[*ROWS, *scattered])
    assert at(far, replace(CALL, num_gpus=16), 9)[1] != ORIGIN_MEASURED


def test_another_number_of_nodes_is_borrowed_at_equal_bytes_that_cross():
    """Low latency: copies beyond the node, topk (g - 8) / g; high throughput: other nodes with an expert."""
    tables = over_nodes(2, 4)
    more = replace(CALL, num_gpus=64)
    copies = (56 / 64) / (24 / 32)
    assert at(tables, more, 300) == (pytest.approx(400.0 + 300 * copies, rel=1e-12), ORIGIN_BORROWED)
    normal = over_nodes(2, library="deepep_normal")
    reached = sent_to(8, 8) / sent_to(2, 8)
    found = at(normal, replace(more, library="deepep_normal"), 200)
    assert found == (pytest.approx(200.0 + 200 * reached, rel=1e-12), ORIGIN_BORROWED)
    # at another width too
    wide = at(tables, replace(more, hidden=8192), 150)
    assert wide[0] == pytest.approx(400.0 + 300 * copies, rel=1e-12)
    errors = [
        EXPERT_DISPATCH.row_variance(replace(CALL, num_gpus=g), tables, np.array([50.0])) for g in (32, 64)
    ]
    assert errors[0] < errors[1]


def test_a_combine_over_nvlink_is_bf16_whatever_the_experts_are():
    tables = load_tables("gb200")
    one = replace(CALL, library="nvlink_one_sided", hidden=7168, num_experts=256, num_gpus=16)
    combine = replace(one, phase="combine", role="experts_combine")
    answers = [at(tables, replace(combine, comm_dtype=dtype), 512) for dtype in ("nvfp4", "bf16", "fp8")]
    assert [us for us, _ in answers] == [answers[0][0]] * 3
    assert [origin for _, origin in answers] == [ORIGIN_MEASURED, ORIGIN_BORROWED, ORIGIN_BORROWED]
    # dispatch is not: a token in bf16 is 32/9 of one in nvfp4
    sent = [at(tables, replace(one, comm_dtype=dtype), 4096)[0] for dtype in ("nvfp4", "bf16")]
    assert sent[1] > 2.0 * sent[0]


def test_a_rack_without_rows_borrows_those_of_the_rack_with_its_link():
    gb200 = load_tables("gb200")
    own = [(*row[:6], 4, *row[7:]) for row in ROWS]
    gb300 = handmade_tables("gb300", expert_dispatch=own)
    one = replace(
        CALL, library="nvlink_two_sided", comm_dtype="bf16", hidden=7168, num_experts=256, num_gpus=32
    )
    mine, theirs = (at(tables, one, 512) for tables in (gb300, gb200))
    assert mine == (theirs[0], ORIGIN_BORROWED)
    assert theirs[1] == ORIGIN_MEASURED
    assert EXPERT_DISPATCH.serving(one, gb300).source.startswith("gb200 ")
    assert EXPERT_DISPATCH.table_points(one, gb300, np.array([1.0])) is None
    variances = [EXPERT_DISPATCH.row_variance(one, tables, np.array([512.0])) for tables in (gb200, gb300)]
    assert variances[0] < variances[1]
    # what it has of its own kind it reads itself
    assert EXPERT_DISPATCH.serving(replace(CALL, num_gpus=4), gb300).source == "by hand"


def test_the_same_library_comes_before_as_many_gpus():
    """One-sided kernels were measured of up to 32 GPUs, two-sided ones of 64."""
    tables = load_tables("gb200")
    one = replace(
        CALL, library="nvlink_one_sided", comm_dtype="nvfp4", hidden=7168, num_experts=256, num_gpus=64
    )
    for phase in ("dispatch", "combine"):
        key, _ = EXPERT_DISPATCH.table_points(replace(one, phase=phase), tables, np.array([1.0]))
        assert (key[0], key[6]) == ("nvlink_one_sided", 32)
