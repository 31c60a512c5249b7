"""Bands along m: the nodes that packing adds, against the rule in words, and rows that were hidden."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fastroof
from fastroof.operators.calls import Gemm
from fastroof.operators.gemm import GEMM
from fastroof.pack.bands import Bands, bands_of, left_out_us, residue_start, with_band_nodes
from fastroof.plan.curves import TableCurves
from tests.reference import bands as naive
from tests.reference.handmade import gemm_rows, handmade_tables

TILES = [(16, 64, 128, 256), (64, 128, 192, 256), (256,), (32, 64), (16, 17, 64)]
MEASURED = [1, 8, 16, 17, 32, 48, 64, 65, 80, 96, 128, 129, 160, 192, 193, 256, 257, 300, 512, 513, 768, 769,
            900, 1024, 1025, 2048, 4352, 4353, 8192, 16384, 16385]  # fmt: skip
IN_PAIRS = (16, 17, 32, 33, 48, 49, 64, 65, 96, 97, 128, 129, 160, 161, 192, 193, 224, 225, 256, 257, 512,
            513, 768, 769, 1024, 1025)  # fmt: skip


@st.composite
def curves(draw):
    ends = draw(st.sampled_from(TILES))
    rows = draw(st.sets(st.sampled_from(MEASURED), min_size=3, max_size=len(MEASURED)))
    us = draw(st.lists(st.floats(1.0, 100.0), min_size=len(rows), max_size=len(rows)))
    return Bands(ends[-1], ends), dict(zip(map(float, sorted(rows)), us, strict=True))


def in_words(bands: Bands) -> naive.Bands:
    return naive.Bands(list(bands.ends[:-1]), bands.width)


@pytest.mark.slow
@given(made=curves())
def test_nodes_of_bands_equal_the_naive_rule(made):
    bands, curve = made
    m, us = np.array(list(curve)), np.array(list(curve.values()))
    axis, values, is_measured = with_band_nodes(bands, m, us[:, None])
    assert (np.diff(axis) > 0).all()
    assert axis[is_measured].tolist() == m.tolist()
    assert values[is_measured, 0].tolist() == us.tolist()
    assert set(axis[~is_measured].tolist()) <= set(naive.bends(curve, in_words(bands)))
    at = np.unique(np.r_[np.arange(m[0], min(m[-1], 1100.0)), axis, (axis[1:] + axis[:-1]) // 2])
    at = at[(at >= m[0]) & (at <= m[-1])]
    expected = [naive.latency_us(curve, in_words(bands), x) for x in at.tolist()]
    np.testing.assert_allclose(np.interp(at, axis, values[:, 0]), expected, rtol=1e-12)


@given(made=curves(), data=st.data())
def test_a_node_left_out_is_the_curve_without_it(made, data):
    bands, curve = made
    m = sorted(curve)
    i = data.draw(st.integers(1, len(m) - 2))
    us = np.array([[curve[x], 2.0 * curve[x]] for x in m])
    others = {x: y for x, y in curve.items() if x != m[i]}
    expected = naive.latency_us(others, in_words(bands), m[i])
    found = left_out_us(bands, np.array(m), us, i)
    np.testing.assert_allclose(found, [expected, 2.0 * expected], rtol=1e-12)


def table(bands: naive.Bands | None, step: float) -> dict[tuple[float, float, float], float]:
    """Latencies that grow by a factor at each first row."""
    found = {}
    for n, k in ((2048, 2048), (4096, 8192), (64, 64)):
        us = 10.0
        for m in IN_PAIRS:
            us *= step if bands is not None and n > 64 and bands.is_start(m) else 1.01
            found[float(m), float(n), float(k)] = us
    return found


def arrays(points):
    points = dict(sorted(points.items(), key=lambda item: (item[0][2], item[0][1], item[0][0])))
    m, n, k = np.array(list(points)).T.copy()
    return m, n, k, np.array(list(points.values()))


@pytest.mark.parametrize(
    ("smaller", "width", "step", "expected"),
    [
        ([64, 128], 256, 1.3, Bands(256, (64, 128, 256))),
        ([], 256, 1.3, Bands(256, (256,))),
        ([64, 128, 192], 256, 1.3, Bands(256, (64, 128, 192, 256))),
        ([64, 128], 256, 1.09, None),
        ([], 768, 1.3, None),
    ],
    ids=["tiles of 64, 128 and 256", "256", "64 up to 256", "steps below 1.1", "one step alone"],
)
def test_bands_are_what_the_steps_of_a_table_show(smaller, width, step, expected):
    points = table(naive.Bands(smaller, width), step)
    assert bands_of(*arrays(points)) == expected
    in_reference = naive.bands_of(points)
    assert (in_reference is None) == (expected is None)
    if expected is not None:
        assert (in_reference.smaller, in_reference.width) == (list(expected.ends[:-1]), expected.width)


@pytest.mark.parametrize(
    ("bands", "padded", "above"),
    [(None, 1.3, 0.0), (naive.Bands([64, 128], 256), 1.3, 256.0), (None, 1.03, None), (None, 1.0, None)],
    ids=["everywhere", "above 256 where bands end too", "too little", "none"],
)
def test_multiples_of_four_have_a_curve_of_their_own_where_the_table_shows_it(bands, padded, above):
    points = {at: us * (padded if at[0] % 4 else 1.0) for at, us in table(bands, 1.3).items()}
    assert residue_start(*arrays(points)) == above
    assert bands_of(*arrays(points)) is None
    assert naive.bands_of(points) is None or above is None


# Shipped tables


@pytest.fixture(scope="module")
def h100():
    return fastroof.load_tables("h100")


def of_source(tables: fastroof.Tables, engine: str, dtype: str) -> Bands | None:
    (one,) = (t for t in tables.candidates("gemm") if engine in t.source)
    rows = {n: c[one.columns["dtype"] == dtype] for n, c in one.columns.items()}
    order = np.lexsort((rows["m"], rows["n"], rows["k"]))
    return bands_of(*(rows[name][order].astype(float) for name in ("m", "n", "k", "latency_us")))


def test_only_fp8_of_vllm_and_sglang_has_bands_on_the_h100(h100):
    found = {
        (engine, dtype): of_source(h100, engine, dtype)
        for engine in ("vllm", "sglang", "trtllm")
        for dtype in ("bf16", "fp8", "fp8_block")
    }
    bands = Bands(256, (64, 128, 256))
    assert {at: one for at, one in found.items() if one} == {("vllm", "fp8"): bands, ("sglang", "fp8"): bands}


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_measured_gemm_comes_back_to_the_last_bit(h100, dtype):
    rows = h100.rows(GEMM, (dtype,))
    found = h100.lookup("gemm", dtype=dtype, **{name: rows[name] for name in ("m", "n", "k")})
    np.testing.assert_array_equal(found.latency_us, rows["latency_us"])
    np.testing.assert_array_equal(found.origin, rows["origin"])


def test_without_bands_no_node_is_added(h100):
    for dtype in ("bf16", "fp8_block"):
        rows = h100.rows(GEMM, (dtype,))
        with_bands, without = (GEMM.pack((dtype,), rows, h100.gpu, how) for how in ("", "measured"))
        for one, other in zip(with_bands, without, strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_node_of_a_band_is_interpolated_and_no_other_method_sees_it(h100):
    sizes = {"n": 4096, "k": 8192, "dtype": "fp8"}
    assert h100.lookup("gemm", m=448, **sizes).origin == 1
    first = h100.lookup("gemm", m=257, **sizes).latency_us
    assert h100.lookup("gemm", m=448, **sizes, method="floor").latency_us == first * (448 / 257)
    near = h100.lookup("gemm", m=512, **sizes).latency_us
    assert h100.lookup("gemm", m=448, **sizes, method="nearest").latency_us == near * (448 / 512)
    assert h100.lookup("gemm", m=512, **sizes, method="linear_mfu").latency_us == near


def test_the_excess_of_a_first_row_is_gone_at_three_quarters_of_its_band(h100):
    m = np.arange(257, 513)
    us = h100.lookup("gemm", m=m, n=8192, k=8192, dtype="fp8").latency_us
    assert us[0] > 1.1 * us[-1]
    assert (np.diff(us) <= 1e-12 * us[-1]).all()
    np.testing.assert_allclose(us[m >= 448], us[-1], rtol=1e-12)
    np.testing.assert_allclose(
        us[m == 384], us[-1] + (us[0] - us[-1]) * (448 - 384) / (448 - 257), rtol=1e-12
    )


HIDDEN = {
    "160 to 225": lambda m: (m >= 160) & (m <= 225),
    "2560 to 3841": lambda m: (m >= 2560) & (m <= 3841),
    "every third band": lambda m: np.isin(m // 256, (3, 6, 9, 12, 15)) & (m > 257),
}


@pytest.mark.parametrize(
    ("hidden", "last_rows", "all_rows"),
    [("160 to 225", None, 0.037), ("2560 to 3841", 0.025, 0.03), ("every third band", 0.025, 0.03)],
)
def test_hidden_rows_of_fp8_are_nearer_than_on_a_line(h100, hidden, last_rows, all_rows):
    columns = h100.table("gemm").columns
    is_fp8 = columns["dtype"] == "fp8"
    m = columns["m"]
    out = is_fp8 & HIDDEN[hidden](m)
    thin = h100.some_rows("gemm", is_fp8 & ~out)
    sizes = {name: columns[name][out] for name in ("m", "n", "k")}
    error = np.abs(thin.lookup("gemm", dtype="fp8", **sizes).latency_us / columns["latency_us"][out] - 1.0)
    straight = dataclasses.replace(thin)
    packed = GEMM.pack(("fp8",), thin.rows(GEMM, ("fp8",)), thin.gpu, "measured")
    straight.cached(("packed", "gemm", thin.source_of("gemm", ("fp8",)), ("fp8",), ""), lambda: packed)
    on_a_line = np.abs(
        straight.lookup("gemm", dtype="fp8", **sizes).latency_us / columns["latency_us"][out] - 1.0
    )
    assert error.mean() < all_rows
    assert error.mean() < on_a_line.mean()
    if last_rows is not None:
        is_last = m[out] % 256 == 0
        assert error[is_last].mean() < last_rows < 0.75 * on_a_line[is_last].mean()


def test_a_small_table_is_looked_up_as_measured():
    tables = handmade_tables(gemm=gemm_rows({(m, 64, 64): 3.0 + m for m in (16, 17, 32, 33)}))
    packed = GEMM.packed(tables, "bf16")
    assert (packed.flag != 1).all()


# Residues: the fp8_block of vLLM on Blackwell


@pytest.fixture(scope="module")
def b200():
    return fastroof.load_tables("b200", source={"gemm": "aiconfigurator-vllm-0.25.0"})


def test_where_multiples_of_four_are_faster_both_curves_have_their_measured_points(b200):
    rows = b200.rows(GEMM, ("fp8_block",))
    found = b200.lookup("gemm", dtype="fp8_block", **{name: rows[name] for name in ("m", "n", "k")})
    np.testing.assert_array_equal(found.latency_us, rows["latency_us"])
    np.testing.assert_array_equal(found.origin, rows["origin"])


def test_a_multiple_of_four_is_between_multiples_of_four(b200):
    sizes = {"n": 8192, "k": 8192, "dtype": "fp8_block"}
    m = np.array([257, 260, 261, 262, 264, 513, 512, 256, 384])
    us = dict(zip(m.tolist(), b200.lookup("gemm", m=m, **sizes).latency_us.tolist(), strict=True))
    assert us[260] == us[256] + (us[512] - us[256]) * (4 / 256)
    assert us[384] == us[256] + (us[512] - us[256]) * 0.5
    assert us[261] == us[257] + (us[513] - us[257]) * (4 / 256)
    assert us[261] > 1.2 * us[260]


def test_hidden_rows_of_both_residues_are_nearer_than_on_one_curve(b200):
    columns = b200.table("gemm").columns
    is_block = columns["dtype"] == "fp8_block"
    for hidden in ("160 to 225", "every third band"):
        out = is_block & HIDDEN[hidden](columns["m"])
        thin = b200.some_rows("gemm", is_block & ~out)
        sizes = {name: columns[name][out] for name in ("m", "n", "k")}
        found = thin.lookup("gemm", dtype="fp8_block", **sizes)
        error = np.abs(found.latency_us / columns["latency_us"][out] - 1.0)
        assert error.mean() < 0.06


def test_a_plan_has_every_row_where_multiples_of_four_have_a_curve(b200):
    call = Gemm("qkv", "qkv", 1, 6144, 4096, "fp8_block")
    source = TableCurves(b200)
    for max_rows in (300, 700):
        us, origin = source.row_values(call, max_rows)
        m = np.arange(1, max_rows + 1)
        found = b200.lookup("gemm", m=m, n=call.n, k=call.k, dtype=call.dtype)
        np.testing.assert_array_equal(us[1:], found.latency_us)
        np.testing.assert_array_equal(origin[1:], found.origin)
