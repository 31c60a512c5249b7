"""Hyper-connections: one time is that of all sites of a layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.errors import MissingTableError
from fastroof.operators.calls import HyperConnection
from fastroof.operators.hyper_connections import (
    HYPER_CONNECTIONS,
    hyper_connection_bytes,
    hyper_connection_flops,
)
from fastroof.operators.operator import METHODS
from fastroof.operators.row_operator import CurveOptions
from tests.operators.package_columns import converted, lists
from tests.reference.handmade import handmade_tables

H100 = load_gpu("h100")


def test_rows_of_the_package_keep_their_sites_and_stages():
    rows = converted(
        HYPER_CONNECTIONS, "mhc_module_perf", op_name=["pre", "post", "head"], num_sites=2, hc_mult=4,
        hidden_size=7168, sinkhorn_iters=20, num_tokens=16, latency=[0.02, 0.01, 0.03],
    )  # fmt: skip
    assert lists(rows, "stage", "latency_us", "sites", "streams", "sinkhorn_iterations", "dtype") == [
        ["pre", "post"], [20.0, 10.0], [2, 2], [4, 4], [20, 20], ["bf16", "bf16"],
    ]  # fmt: skip


def test_two_sites_move_twice_what_one_does():
    for stage in ("pre", "post"):
        for work in (hyper_connection_bytes, hyper_connection_flops):
            assert work(stage, 100, 7168, 4, 2) == 2 * work(stage, 100, 7168, 4, 1)
    assert hyper_connection_bytes("post", 100, 7168, 4, 1) == 100 * 7168 * 2 * 9
    assert hyper_connection_bytes("pre", 100, 7168, 4, 1) == 100 * 7168 * 2 * 5 + 4 * 4 * 7168 * 24
    assert hyper_connection_flops("pre", 1, 7168, 4, 1) == 2 * 4 * 7168 * 25
    # each of four streams is made of all four and of the sublayer's output
    assert hyper_connection_flops("post", 3, 7168, 4, 1) == 3 * 4 * 2 * (4 + 1) * 7168


def test_a_measured_h100_call_streams_at_most_as_fast_as_the_memory_with_both_sites():
    """262,144 tokens in 23.0127 ms (vLLM 0.24.0): 0.88 of 3.35 TB/s with both sites, 0.44 with one."""
    share = float(hyper_connection_bytes("post", 262_144, 7168, 4, 2)) / 23.0127e-3 / H100.hbm_bytes_per_s
    assert share == pytest.approx(0.88, abs=0.005)


def test_measured_points_come_back_and_between_them_time_is_linear():
    key = ("bf16", "pre", 7168, 4, 20, 2)
    tables = handmade_tables(hyper_connections=[(*key, 1, 20.0), (*key, 101, 30.0)])
    answer = tables.lookup("hyper_connections", stage="pre", hidden=7168, num_tokens=[1, 51, 101])
    assert answer.latency_us.tolist() == pytest.approx([20.0, 25.0, 30.0], rel=1e-12)
    assert answer.origin.tolist() == [0, 1, 0]
    flops = hyper_connection_flops("pre", np.array([1, 51, 101]), 7168, 4, 2)
    np.testing.assert_allclose(answer.mfu, flops / (answer.latency_us * 1e-6 * H100.peak("bf16")), rtol=1e-12)
    with pytest.raises(MissingTableError):
        tables.lookup("hyper_connections", stage="pre", hidden=7168, num_tokens=1, sites=1)


CALL = HyperConnection("hyper_connection", "before", 1, "pre", 7168, 4, 20, 2)


def test_a_plan_reads_its_rows_as_lookups_do(h100):
    tokens = np.array([1, 7, 64, 1000, 8192])
    for stage in ("pre", "post"):
        call = replace(CALL, stage=stage)
        for method in METHODS:
            nodes = HYPER_CONNECTIONS.row_nodes(call, h100, CurveOptions(method), 8192)
            found = h100.lookup(
                "hyper_connections", stage=stage, hidden=7168, num_tokens=tokens, method=method
            )
            np.testing.assert_allclose(
                np.interp(tokens, nodes.axis, nodes.value), found.latency_us, rtol=1e-9
            )
            if method != "roofline":
                # padded by the first and the last number of rows, which are looked up themselves
                last = (nodes.value[-2], nodes.flag[-2])
                assert nodes.axis[[1, -2]].tolist() == [1.0, 8192.0]
                assert (nodes.value[0], nodes.flag[0]) == (nodes.value[1], nodes.flag[1])
                assert (nodes.value[-1], nodes.flag[-1]) == last
        variance = HYPER_CONNECTIONS.row_variance(call, h100, tokens.astype(float))
        errors = h100.lookup(
            "hyper_connections", stage=stage, hidden=7168, num_tokens=tokens, with_error=True
        ).relative_error
        assert (np.sqrt(variance) <= errors * (1 + 1e-9)).all()


@pytest.mark.parametrize("stage", ["pre", "post"])
def test_without_tables_streams_cost_their_bytes(h100, stage):
    nodes = HYPER_CONNECTIONS.datasheet_nodes(replace(CALL, stage=stage), H100)
    assert set(nodes.flag) == {4}
    # one token shows the launch
    for tokens in (1, 1024, 16384):
        measured = float(
            h100.lookup("hyper_connections", stage=stage, hidden=7168, num_tokens=tokens).latency_us
        )
        modelled = float(np.interp(tokens, nodes.axis, nodes.value))
        assert 0.6 < modelled / measured < 1.6


def test_streams_of_another_width_have_no_table(h100):
    with pytest.raises(MissingTableError):
        HYPER_CONNECTIONS.serving(replace(CALL, hidden=5120), h100)
