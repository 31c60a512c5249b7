"""The compiled loops called directly: right against bisect, and safe whatever they are given."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import compile_plan
from fastroof.compiled import gemms, grids
from fastroof.compiled import guides as search
from fastroof.compiled.layout import GridNodes
from fastroof.operators.attention import ATTENTION_DECODE
from fastroof.operators.communication import ALLREDUCE
from fastroof.operators.gemm import GEMM
from tests.reference.handmade import HEADS, attention_rows, gemm_rows, handmade_tables

pytestmark = pytest.mark.loops

AXIS = st.lists(st.integers(0, 2**20), min_size=2, max_size=12, unique=True).map(
    lambda a: np.array(sorted(a), float)
)
REAL = st.floats(-1e30, 1e30) | st.sampled_from([np.inf, -np.inf, np.nan, 0.0, 5e-324])
ANY_INT = st.integers(-(2**63), 2**63 - 1) | st.sampled_from(
    [0, 1, 2, 2**28, 2**28 + 1, 2**31, 2**62, 2**63 - 1]
)


@given(axis=AXIS, x=st.floats(-10, 2**21) | st.integers(0, 2**20).map(float))
def test_bracket_is_bisect_clamped_to_the_cells(axis, x):
    expected = min(max(bisect.bisect_right(axis.tolist(), x) - 1, 0), len(axis) - 2)
    assert search.bracket(axis, 0, len(axis), x) == expected
    framed = np.concatenate([[np.nan, -1.0], axis, [np.nan]])
    assert search.bracket(framed, 2, 2 + len(axis), x) == expected + 2


@given(axis=AXIS, x=REAL)
def test_bracket_stays_on_its_axis(axis, x):
    assert 0 <= search.bracket(axis, 0, len(axis), x) <= len(axis) - 2


@given(axis=AXIS, x=st.integers(1, 2**21).map(float))
def test_nearest_node_is_nearest_in_log2_and_the_smaller_of_a_tie(axis, x):
    axis = axis + 1.0
    ratios = [max(x / a, a / x) for a in axis]
    found = search.nearest_node(axis, 0, len(axis), x)
    assert ratios[found] <= min(ratios) * (1 + 1e-15)
    assert search.nearest_node(axis, 0, 1, x) == 0
    assert search.nearest_node(np.array([2.0, 8.0]), 0, 2, 4.0) == 0


@given(axis=AXIS, data=st.data())
def test_a_curve_passes_through_its_nodes_and_stays_between_them(axis, data):
    value = np.array(data.draw(st.lists(st.floats(0.1, 1e6), min_size=len(axis), max_size=len(axis))))
    flag = np.array(
        data.draw(st.lists(st.sampled_from([0, 2, 4]), min_size=len(axis), max_size=len(axis))), np.uint8
    )
    for i, x in enumerate(axis[:-1]):  # packed axes end beyond any size
        assert search.curve_point(axis, value, flag, 0, len(axis), x) == (value[i], flag[i])
    x = data.draw(st.floats(axis[0], axis[-1]))
    us, made = search.curve_point(axis, value, flag, 0, len(axis), x)
    i = min(int(np.searchsorted(axis, x, side="right")) - 1, len(axis) - 2)
    ends = value[i : i + 2]
    slack = 1e-15 * ends.max()
    assert ends.min() - slack <= us <= ends.max() + slack
    assert made in (flag[i], flag[i + 1], max(flag[i], flag[i + 1], 1))


# Lookups


@pytest.fixture(scope="module")
def tables():
    grid = {(b, x): 9.0 + b * x / 4096 for b in (1, 8, 64) for x in (64, 512, 4096) if b * x < 64 * 4096}
    return handmade_tables(
        gemm=gemm_rows({(1, 64, 64): 3.0, (16, 64, 64): 4.0, (8, 256, 64): 5.0, (16, 128, 512): 6.0}),
        attention_decode=attention_rows(grid),
        attention_prefill=attention_rows(grid, is_decode=False),
        allreduce=[("bf16", 2, "graph", 256, 5.0), ("bf16", 2, "graph", 4096, 6.0)],
        elementwise=[("copy", 1, 2**28, 2**30, 400.0)],
    )


@given(points=st.lists(st.tuples(REAL, REAL, REAL), max_size=5))
def test_lookup_loops_survive_any_coordinates(tables, points):
    m, n, k = np.array(points).reshape(-1, 3).T.copy()
    out, origin = np.empty(len(m)), np.empty(len(m), np.uint8)
    packed = GEMM.packed(tables, "bf16")
    with np.errstate(all="ignore"):
        gemms.gemm_latency_us(packed, m, n, k, out, origin)
        gemms.gemm_linear_mfu_us(packed, m, n, k, out, origin)
        gemms.gemm_floor_us(packed, m, n, k, out, origin)
        axes, sizes = (packed.m_axis, packed.n_axis, packed.k_axis), (m, n, k)
        log2_axes, log2_sizes = (tuple(np.log2(a) for a in of) for of in (axes, sizes))
        gemms.gemm_nearest_us(packed, log2_axes, sizes, log2_sizes, out, origin)
        search.curve_latency_us(ALLREDUCE.packed(tables, ("bf16", 2, "graph")).curve, m, out, origin)
        (key,) = tables.groups("attention_decode")
        grid = ATTENTION_DECODE.grid(tables, _shape(key)).grid
        grids.grid_latency_us(grid.arena, m, n, out, origin)
        nodes = GridNodes(grid.y_axis, grid.x_axis, grid.cells, grid.flags, np.ones(grid.flags.shape))
        grids.grid_linear_mfu_us(grid.arena, nodes, m, n, k, out, origin)
        grids.grid_floor_us(nodes, m, n, k, out, origin)
        log2 = grids.GridLog2(*(np.log2(a) for a in (grid.y_axis, grid.x_axis, m, n)))
        grids.grid_nearest_us(nodes, log2, m, n, k, out, origin)
    assert origin.max(initial=0) <= 4


def _shape(key):
    from fastroof.operators.attention_work import HeadShape

    return HeadShape(*key[:4])


@pytest.mark.parametrize("method", ["roofline", "linear_mfu", "nearest", "floor"])
def test_every_method_times_a_small_table(tables, method):
    """Walks every branch of the lookups: on, between, beside a hole, below and above the nodes."""
    sizes = np.array([1, 8, 12, 16, 64, 100, 128, 256, 512, 9999])
    m, n, k = (a.ravel() for a in np.meshgrid(sizes, sizes, sizes))
    found = [tables.lookup("gemm", method=method, m=m, n=n, k=k)]
    heads = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), HEADS, strict=True))
    found.append(tables.lookup("attention_decode", method=method, **heads, batch_size=m, kv_len=n))
    found.append(
        tables.lookup("attention_prefill", method=method, **heads, batch_size=m, q_len=n, kv_len=n + k)
    )
    found.append(tables.lookup("allreduce", method=method, num_gpus=2, message_bytes=m * n))
    for got in found:
        assert np.isfinite(got.latency_us).all()
        assert (got.latency_us > 0).all()
    plan = compile_plan(
        "llama-3.1-8b", "h100", tables, method=method, tp=1, max_num_batched_tokens=64, engine="kernels"
    )
    batch, kv_len = np.meshgrid([1, 7, 8, 64], [1, 64, 500, 512, 4096, 9999])
    times = plan.decode_us(batch, kv_len)
    assert np.isfinite(times).all()
    assert (plan.prefill_us([1, 8, 64], [[0], [9]]) > 0).all()
