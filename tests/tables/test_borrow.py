"""Head shapes that were not measured: whose rows they borrow, and at which batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.columns import ORIGIN_MODELLED
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.attention import ATTENTION_DECODE, ATTENTION_PREFILL
from fastroof.operators.attention_grids import WIDTH, head_donors
from fastroof.operators.attention_work import HeadShape
from tests.reference import lookups as naive
from tests.reference.handmade import attention_rows, handmade_tables

# hypothesis prints the tables that a failing test was given, and warns of their length instead of failing
pytestmark = pytest.mark.filterwarnings("ignore:Generating overly large repr")

METHODS = ("roofline", "linear_mfu", "nearest", "floor")


def decode(tables, nh, nkv, batch_size, kv_len, **options):
    sizes = {"num_q_heads": nh, "num_kv_heads": nkv, "head_dim": 128}
    return tables.lookup("attention_decode", **sizes, batch_size=batch_size, kv_len=kv_len, **options)


def prefill(tables, nh, nkv, batch_size, q_len, **options):
    sizes = {"num_q_heads": nh, "num_kv_heads": nkv, "head_dim": 128}
    kv_len = options.pop("kv_len", q_len)
    return tables.lookup(
        "attention_prefill", **sizes, batch_size=batch_size, q_len=q_len, kv_len=kv_len, **options
    )


def measured(tables, operator, nh, nkv):
    return ("bf16", nh, nkv, 128, 0) in tables.groups(operator)


# One group size


@pytest.mark.parametrize("method", METHODS)
def test_decode_of_192_kv_heads_is_that_of_96_at_twice_the_batch(h100, method):
    assert not measured(h100, "attention_decode", 192, 192)
    assert measured(h100, "attention_decode", 96, 96)
    batch, kv_len = np.meshgrid([1, 2, 3, 7, 64, 500, 4096], [1, 2, 100, 4096, 5000, 200_000])
    got = decode(h100, 192, 192, batch, kv_len, method=method)
    borrowed = decode(h100, 96, 96, 2 * batch, kv_len, method=method)
    # far beyond the measured batches the last bit may differ
    np.testing.assert_array_max_ulp(got.latency_us, borrowed.latency_us, maxulp=1)
    assert (got.origin == 3).all()


@given(batch=st.integers(1, 3000), kv_len=st.integers(1, 300_000))
def test_shapes_of_one_group_size_share_a_table_whatever_their_ratio(h100, batch, kv_len):
    got = decode(h100, 12, 3, 8 * batch, kv_len)
    donor = ATTENTION_DECODE.grid(h100, HeadShape("bf16", 12, 3, 128)).donors
    (shape,) = donor
    assert shape.num_q_heads == 4 * shape.num_kv_heads
    units = 8 * batch * 3
    borrowed = decode(h100, shape.num_q_heads, shape.num_kv_heads, units // shape.num_kv_heads, kv_len)
    if units % shape.num_kv_heads == 0:
        assert float(got.latency_us) == pytest.approx(float(borrowed.latency_us), rel=1e-12)
    assert int(got.origin) == 3


def test_prefill_is_borrowed_over_heads_too(h100):
    nh, nkv = 20, 5
    assert not measured(h100, "attention_prefill", nh, nkv)
    (donor,) = ATTENTION_PREFILL.grid(h100, HeadShape("bf16", nh, nkv, 128)).donors
    assert donor.num_q_heads == 4 * donor.num_kv_heads
    batch, q_len = np.meshgrid([1, 2, 5, 16], [1, 16, 1000, 1024, 16384, 40000])
    got = prefill(h100, nh, nkv, donor.num_kv_heads * batch, q_len)
    borrowed = prefill(h100, donor.num_q_heads, donor.num_kv_heads, nkv * batch, q_len)
    np.testing.assert_allclose(got.latency_us, borrowed.latency_us, rtol=1e-12)
    assert (got.origin == 3).all()
    assert (prefill(h100, nh, nkv, batch, q_len, kv_len=q_len + 5).origin == 4).all()


# Between two group sizes


def test_group_size_7_lies_between_6_and_8(h100):
    """Qwen2.5-7B: 28 query heads on 4 KV heads; no table has 7 query heads on one KV head."""
    shape = HeadShape("bf16", 28, 4, 128)
    low, high = ATTENTION_DECODE.grid(h100, shape).donors
    assert (low.group_size, high.group_size) == (6.0, 8.0)
    columns = h100.table("attention_decode").columns
    rows = h100.groups("attention_decode")[tuple(low)]
    kv_len = np.unique(columns["kv_len"][rows])
    for units in (8, 32, 128, 512):
        got = decode(h100, 28, 4, units // 4, kv_len)
        below, above = (
            decode(h100, s.num_q_heads, s.num_kv_heads, units // s.num_kv_heads, kv_len) for s in (low, high)
        )
        np.testing.assert_allclose(got.latency_us, (below.latency_us + above.latency_us) / 2, rtol=1e-12)
        assert (got.origin == 3).all()


@given(units=st.integers(1, 4096).map(lambda u: 8 * u), kv_len=st.integers(1, 300_000))
def test_decode_between_group_sizes_is_their_weighted_mean_everywhere(h100, units, kv_len):
    low, high = ATTENTION_DECODE.grid(h100, HeadShape("bf16", 28, 4, 128)).donors
    got = decode(h100, 28, 4, units // 4, kv_len)
    ends = [decode(h100, s.num_q_heads, s.num_kv_heads, units // s.num_kv_heads, kv_len) for s in (low, high)]
    mean = sum(float(end.latency_us) for end in ends) / 2
    assert float(got.latency_us) == pytest.approx(mean, rel=1e-12)


def test_the_weights_follow_the_group_size():
    points = {(1, 64): 10.0, (1, 128): 14.0, (4, 64): 20.0, (4, 128): 30.0}
    double = {at: 2 * us for at, us in points.items()}
    tables = handmade_tables(
        attention_decode=[*attention_rows(points, (2, 1, 128)), *attention_rows(double, (6, 1, 128))]
    )
    got = decode(tables, 3, 1, 4, np.array([64, 96, 128]))
    np.testing.assert_allclose(got.latency_us, np.array([20.0, 25.0, 30.0]) * 1.25, rtol=1e-12)
    assert got.origin.tolist() == [3, 3, 3]


# Beyond every group size, and nothing to borrow from


def test_beyond_the_measured_group_sizes_the_distance_to_the_roofline_is_held():
    points = {(1, 64): 10.0, (1, 4096): 40.0}
    tables = handmade_tables(attention_decode=attention_rows(points, (8, 1, 128)))
    own, borrowed = (
        naive.Attention(
            {(1.0, 64.0): 10.0}, naive.decode_work(tables.gpu, ("bf16", nh, 1, 128)), is_decode=True
        )
        for nh in (16, 8)
    )
    got = decode(tables, 16, 1, 1, np.array([64, 4096]))
    expected = [us * own.bound(1, x) / borrowed.bound(1, x) for (_, x), us in points.items()]
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-12)
    assert got.origin.tolist() == [3, 3]


@pytest.mark.parametrize(("wanted", "batch"), [((16, 1), 4), ((32, 2), 2), ((64, 4), 1)])
def test_beyond_the_measured_group_sizes_rows_are_borrowed_at_equal_batch_times_kv_heads(wanted, batch):
    points = {(b, x): 5.0 * b + x / 100 for b in (1, 2, 4) for x in (64, 4096)}
    tables = handmade_tables(attention_decode=attention_rows(points, (8, 2, 128)))
    own, borrowed = (
        naive.Attention(
            {at: float(us) for at, us in points.items()},
            naive.decode_work(tables.gpu, ("bf16", *heads, 128)),
            is_decode=True,
        )
        for heads in (wanted, (8, 2))
    )
    # four sequences x KV heads each: two sequences of the donor's
    got = decode(tables, *wanted, batch, np.array([64, 4096]))
    expected = [points[2, x] * own.bound(batch, x) / borrowed.bound(2, x) for x in (64, 4096)]
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-12)
    assert got.origin.tolist() == [3, 3]


def test_the_nearest_measured_shape_is_the_donor():
    shapes = [HeadShape("bf16", 4 * kv, kv, 128) for kv in (1, 2, 8)]
    assert head_donors(HeadShape("bf16", 16, 4, 128), shapes)[0].num_kv_heads in (2, 8)
    assert head_donors(HeadShape("bf16", 64, 16, 128), shapes) == (shapes[2],)
    assert head_donors(shapes[1], shapes) == (shapes[1],)
    other = [*shapes, HeadShape("bf16", 12, 3, 64), HeadShape("fp8", 12, 3, 128)]
    assert head_donors(HeadShape("bf16", 12, 3, 128), other) == (shapes[1],)


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
def test_another_kv_dtype_or_a_distant_head_dim_is_not_borrowed(h100, operator):
    call = decode if operator == "attention_decode" else prefill
    with pytest.raises(MissingTableError, match=r"(?s)int3.*measured: .*head_dim 128 with fp8 KV"):
        call(h100, 8, 8, 1, 128, kv_dtype="int3")
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 24, "batch_size": 1, "kv_len": 64}
    if operator == "attention_prefill":
        sizes["q_len"] = 64
    with pytest.raises(MissingTableError, match=r"(?s)head_dim 24.*measured: .*head_dim 128"):
        h100.lookup(operator, **sizes)


WIDE = {(b, x): 5.0 + 0.02 * b * x + 0.001 * (x % 7) for b in (1, 4, 32) for x in (16, 128, 1024, 8192)}


@pytest.mark.parametrize("operator", [ATTENTION_DECODE, ATTENTION_PREFILL], ids=lambda one: one.name)
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_a_head_dim_that_nothing_measured_is_modelled_at_equal_latency_over_the_roofline(operator, head_dim):
    is_decode = operator is ATTENTION_DECODE
    tables = handmade_tables(**{operator.name: attention_rows(WIDE, (32, 8, 128), is_decode=is_decode)})
    batch, length = np.array(list(WIDE)).T
    sizes = {"num_q_heads": 32, "num_kv_heads": 8, "batch_size": batch, "kv_len": length}
    if not is_decode:
        sizes["q_len"] = length
    got = tables.lookup(operator.name, **sizes, head_dim=head_dim, with_error=True)
    known = tables.lookup(operator.name, **sizes, head_dim=128, with_error=True)
    donor, shape = (HeadShape("bf16", 32, 8, width) for width in (128, head_dim))
    launch_us = min(WIDE.values())
    theirs, own = (operator.bound(one, tables.gpu, launch_us)(batch, length) for one in (donor, shape))
    np.testing.assert_allclose(got.latency_us, np.array(list(WIDE.values())) * own / theirs, rtol=1e-12)
    assert (got.origin == ORIGIN_MODELLED).all()
    # 0.22 per octave, and 3.8 % of another head shape
    away = WIDTH * abs(np.log2(head_dim / 128))
    assert (got.relative_error**2 >= known.relative_error**2 + away**2).all()


def test_a_window_of_an_unmeasured_head_dim_is_full_attention_of_that_head_dim():
    tables = handmade_tables(attention_decode=attention_rows(WIDE, (64, 8, 128)))
    sizes = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "batch_size": [1, 4, 32]}
    windowed = tables.lookup("attention_decode", **sizes, kv_len=4096, window=128, with_error=True)
    full = tables.lookup("attention_decode", **sizes, kv_len=128, with_error=True)
    np.testing.assert_allclose(windowed.latency_us, full.latency_us, rtol=1e-12)
    assert (windowed.origin == ORIGIN_MODELLED).all()
    assert (windowed.relative_error > full.relative_error).all()


@pytest.mark.parametrize("operator", [ATTENTION_DECODE, ATTENTION_PREFILL], ids=lambda one: one.name)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_stated_errors_of_another_head_dim_hold_where_it_was_measured(h100, operator, head_dim):
    table = h100.table(operator.name)
    is_own = (table.columns["head_dim"] == head_dim) & (table.columns["window"] == 0)
    is_own &= table.columns["kv_dtype"] == "bf16"
    others = h100.some_rows(operator.name, table.columns["head_dim"] != head_dim)
    rows = {name: values[is_own] for name, values in table.columns.items()}
    rows = {name: values[operator.plain_rows(rows)] for name, values in rows.items()}
    names = [name for name in operator.arguments if name not in ("kv_dtype", "window")]
    found = others.lookup(operator.name, **{name: rows[name] for name in names}, with_error=True)
    off = np.abs(np.log(found.latency_us / rows["latency_us"]))
    assert (found.origin == ORIGIN_MODELLED).all()
    assert np.median(off) < 0.25
    # four of five within 1.28 standard errors, if the errors are right
    assert (off < 1.2816 * found.relative_error).mean() > 0.7


@pytest.mark.parametrize(("nh", "nkv"), [(9, 8), (4, 8), (30, 4)])
def test_query_heads_must_be_a_multiple_of_kv_heads(h100, nh, nkv):
    with pytest.raises(LookupInputError, match=f"num_q_heads {nh} .* num_kv_heads {nkv}"):
        decode(h100, nh, nkv, 1, 64)
    with pytest.raises(LookupInputError, match=f"num_q_heads {nh} .* num_kv_heads {nkv}"):
        prefill(h100, nh, nkv, 1, 64)


@pytest.mark.parametrize("operator", ["attention_decode", "attention_prefill"])
@given(data=st.data())
def test_any_head_shape_has_a_finite_positive_latency(h100, operator, data):
    nkv = data.draw(st.integers(1, 128))
    nh = nkv * data.draw(st.integers(1, 64))
    batch, x = data.draw(st.integers(1, 2**24)), data.draw(st.integers(1, 2**28))
    call = decode if operator == "attention_decode" else prefill
    for method in METHODS:
        got = call(h100, nh, nkv, batch, x, method=method)
        assert np.isfinite(got.latency_us)
        assert got.latency_us > 0
        assert got.origin >= 3 or measured(h100, operator, nh, nkv)
