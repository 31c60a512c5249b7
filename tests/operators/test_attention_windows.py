"""Sliding windows: attention whose work stops growing, or grows no faster than its queries."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof import load_gpu
from fastroof.compiled.grids import grid_latency_us
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.attention import ATTENTION_PREFILL
from fastroof.operators.attention_work import HeadShape
from tests.reference.handmade import HEADS, attention_rows, handmade_tables

H100 = load_gpu("h100")
NH, NKV, DH = HEADS
WINDOW = 128
SHAPE = {"num_q_heads": NH, "num_kv_heads": NKV, "head_dim": DH}
DECODE = {
    (b, kv): 4.0 + 0.01 * b * min(kv, 150) + 0.003 * (kv % 7) + 1e-6 * b * kv
    for b in (1, 4, 32)
    for kv in (2, 16, 64, 128, 512, 4096)
}
PREFILL = {
    (b, q): 5.0 + 1e-4 * b * q * min(q, 140) + 0.02 * (q % 5)
    for b in (1, 2, 8)
    for q in (1, 32, 128, 512, 2048)
}


def windowed(decode=DECODE, prefill=PREFILL):
    return handmade_tables(
        attention_decode=[
            *attention_rows(decode, window=WINDOW),
            *attention_rows({p: 2.0 * us for p, us in decode.items()}),
        ],
        attention_prefill=attention_rows(prefill, is_decode=False, window=WINDOW),
    )


TABLES = windowed()
TABLES_OF_FULL = handmade_tables(
    attention_decode=attention_rows(DECODE), attention_prefill=attention_rows(PREFILL, is_decode=False)
)


def pairs(q_len: float, kv_len: float) -> float:
    """(query, key) pairs of one sequence, counted one query at a time."""
    context = int(kv_len - q_len)
    return float(sum(min(WINDOW, context + i + 1) for i in range(int(q_len))))


def seen(q_len: float, kv_len: float) -> float:
    """Tokens that any query attends to."""
    return min(kv_len, WINDOW + q_len - 1)


def work_us(batch: float, q_len: float, kv_len: float) -> float:
    """B without its launch."""
    moved = batch * DH * (4 * NH * q_len + 4 * NKV * seen(q_len, kv_len))
    return 1e6 * (
        4 * NH * DH * batch * pairs(q_len, kv_len) / H100.peak("bf16") + moved / H100.hbm_bytes_per_s
    )


def naive(points, bound, batch: float, x: float) -> float:
    """Between the four measured corners, along the length and then along the batch."""

    def around(nodes, at):
        right = min(max(bisect.bisect_right(nodes, at), 1), len(nodes) - 1)
        return nodes[right - 1], nodes[right]

    (b0, b1), (x0, x1) = (around(sorted({p[i] for p in points}), at) for i, at in ((0, batch), (1, x)))
    rise = bound(1, x1) - bound(1, x0)
    weight = (bound(1, x) - bound(1, x0)) / rise if rise > 1e-12 else (x - x0) / (x1 - x0)
    low, high = (points[b, x0] + weight * (points[b, x1] - points[b, x0]) for b in (b0, b1))
    return low + (high - low) * (batch - b0) / (b1 - b0)


@given(batch=st.integers(1, 32), kv_len=st.integers(2, 4096))
def test_decode_is_the_naive_lookup(batch: int, kv_len: int):
    got = TABLES.lookup("attention_decode", **SHAPE, batch_size=batch, kv_len=kv_len, window=WINDOW)
    expected = naive(DECODE, lambda b, kv: work_us(b, 1, kv), batch, kv_len)
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-9)
    on_node = (batch, kv_len) in DECODE
    assert int(got.origin) == (0 if on_node else 1)
    if on_node:
        assert float(got.latency_us) == DECODE[batch, kv_len]
    flops = 4 * NH * DH * batch * min(kv_len, WINDOW)
    np.testing.assert_allclose(got.mfu, flops / (expected * 1e-6 * H100.peak("bf16")), rtol=1e-9)


@given(batch=st.integers(1, 8), q_len=st.integers(1, 2048))
def test_prefill_is_the_naive_lookup(batch: int, q_len: int):
    got = TABLES.lookup(
        "attention_prefill", **SHAPE, batch_size=batch, q_len=q_len, kv_len=q_len, window=WINDOW
    )
    expected = naive(PREFILL, lambda b, q: work_us(b, q, q), batch, q_len)
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-9)
    flops = 4 * NH * DH * batch * pairs(q_len, q_len)
    np.testing.assert_allclose(got.mfu, flops / (expected * 1e-6 * H100.peak("bf16")), rtol=1e-9)


def test_beyond_its_last_length_a_windowed_decode_costs_no_more():
    last, far = TABLES.lookup(
        "attention_decode", **SHAPE, batch_size=4, kv_len=[4096, 2**20], window=WINDOW
    ).latency_us
    assert far == pytest.approx(last, rel=1e-9)


@given(q_len=st.integers(1, 300), prefix=st.integers(1, 400), batch=st.integers(1, 8))
def test_a_windowed_prefix_costs_the_pairs_within_the_window(q_len: int, prefix: int, batch: int):
    sizes = {**SHAPE, "batch_size": batch, "q_len": q_len, "window": WINDOW}
    alone = TABLES.lookup("attention_prefill", **sizes, kv_len=q_len)
    got = TABLES.lookup("attention_prefill", **sizes, kv_len=q_len + prefix)
    longest = PREFILL[1, 2048] / (min(PREFILL.values()) + work_us(1, 2048, 2048))
    more_pairs = pairs(q_len, q_len + prefix) - pairs(q_len, q_len)
    more_tokens = seen(q_len, q_len + prefix) - seen(q_len, q_len)
    bound_us = 1e6 * (
        4 * NH * DH * batch * more_pairs / H100.peak("bf16")
        + 4 * NKV * DH * batch * more_tokens / H100.hbm_bytes_per_s
    )
    expected = float(alone.latency_us) + max(1.0, longest) * bound_us
    np.testing.assert_allclose(got.latency_us, expected, rtol=1e-9)
    assert int(got.origin) == 4
    far = TABLES.lookup("attention_prefill", **sizes, kv_len=q_len + 10**6).latency_us
    assert got.latency_us <= far * (1 + 1e-12)


def test_a_window_is_0_by_default():
    sizes = {**SHAPE, "batch_size": [1, 4, 32], "kv_len": 512}
    full, windowed_us = (
        TABLES.lookup("attention_decode", **sizes, **more).latency_us for more in ({}, {"window": WINDOW})
    )
    assert (full == 2.0 * windowed_us).all()
    both = TABLES.lookup("attention_decode", **sizes | {"batch_size": 4}, window=[0, WINDOW]).latency_us
    assert both.tolist() == [full[1], windowed_us[1]]


def test_windows_are_not_borrowed_from_each_other():
    sizes = {"batch_size": 1, "kv_len": 64}
    other = TABLES.lookup(
        "attention_decode", **SHAPE | {"num_q_heads": 16, "num_kv_heads": 4}, **sizes, window=128
    )
    assert int(other.origin) == 3
    only = handmade_tables(attention_decode=attention_rows(DECODE, window=WINDOW))
    with pytest.raises(MissingTableError, match=r"window 256; measured: .*window 128"):
        only.lookup("attention_decode", **SHAPE, **sizes, window=256)
    with pytest.raises(LookupInputError, match="window must be at least 0"):
        TABLES.lookup("attention_decode", **SHAPE, **sizes, window=-1)


@given(
    batch=st.integers(1, 32), kv_len=st.integers(2, 20000), window=st.sampled_from([2, 48, 512, 513, 5000])
)
def test_decodes_of_a_window_that_was_not_measured_are_full_attention_up_to_it(batch, kv_len, window):
    sizes = {**SHAPE, "batch_size": batch}
    got = TABLES.lookup("attention_decode", **sizes, kv_len=kv_len, window=window)
    # the next simple number: 513 is not one
    end = {513: 544, 5000: 5120}.get(window, window)
    full = TABLES.lookup("attention_decode", **sizes, kv_len=min(kv_len, end))
    np.testing.assert_allclose(got.latency_us, full.latency_us, rtol=1e-12)
    assert int(got.origin) == 3


@given(
    window=st.sampled_from([48, 256, 4096]),
    b=st.sampled_from([1, 2, 8]),
    q_len=st.sampled_from([32, 128, 512, 2048]),
)
def test_prompts_of_such_a_window_are_full_attention_of_as_many_tokens_and_pairs(window, b, q_len):
    got = TABLES_OF_FULL.lookup(
        "attention_prefill", **SHAPE, batch_size=b, q_len=q_len, kv_len=q_len, window=window
    )
    own = sum(min(i, window) for i in range(1, q_len + 1))
    length = 2 * own / q_len - 1
    table = ATTENTION_PREFILL.grid(TABLES_OF_FULL, HeadShape("bf16", *HEADS)).grid
    expected, origin = np.empty(1), np.empty(1, np.uint8)
    grid_latency_us(table.arena, np.array([b * q_len / length]), np.array([length]), expected, origin)
    np.testing.assert_allclose(got.latency_us, expected[0], rtol=1e-12)
    assert int(got.origin) == 3


def test_a_borrowed_window_is_less_sure_beyond_it():
    for operator, lengths in (("attention_decode", {"kv_len": [200, 4000]}), ("attention_prefill", None)):
        lengths = lengths or {"q_len": [200, 4000], "kv_len": [200, 4000]}
        errors = TABLES_OF_FULL.lookup(
            operator, **SHAPE, batch_size=4, **lengths, window=256, with_error=True
        ).relative_error
        full = TABLES_OF_FULL.lookup(
            operator, **SHAPE, batch_size=4, **lengths, with_error=True
        ).relative_error
        assert errors[0] == pytest.approx(full[0], rel=1e-9)
        assert errors[1] > 0.1


def test_a_window_between_nodes_ends_in_a_node_of_its_own():
    left = {point: us for point, us in DECODE.items() if point[1] != WINDOW}
    tables = windowed(decode=left)
    sizes = {**SHAPE, "batch_size": 4, "window": WINDOW}
    got = tables.lookup("attention_decode", **sizes, kv_len=[64, 100, 128, 300, 512])
    assert got.origin.tolist() == [0, 1, 1, 1, 0]
    grown = (work_us(4, 1, 100) - work_us(4, 1, 64)) / (work_us(4, 1, 128) - work_us(4, 1, 64))
    rise = left[4, 512] - left[4, 64]
    np.testing.assert_allclose(got.latency_us[1], left[4, 64] + rise * grown, rtol=1e-9)
    np.testing.assert_allclose(got.latency_us[2:], left[4, 512], rtol=1e-12)


def test_a_table_that_ends_before_its_window_grows_up_to_it():
    short = {point: us for point, us in DECODE.items() if point[1] <= 64}
    tables = windowed(decode=short)
    sizes = {**SHAPE, "batch_size": 4, "window": WINDOW}
    got = tables.lookup("attention_decode", **sizes, kv_len=[64, 128, 10**5])
    added = work_us(4, 1, 128) - work_us(4, 1, 64)
    assert got.latency_us[1] >= short[4, 64] + added
    np.testing.assert_allclose(got.latency_us[2], got.latency_us[1], rtol=1e-9)
    assert got.origin.tolist() == [0, 2, 2]


@pytest.mark.parametrize(
    ("operator", "lengths"),
    [
        ("attention_decode", {"kv_len": [2, 100, 300, 5000]}),
        ("attention_prefill", {"q_len": [2, 100, 300, 5000], "kv_len": [2, 100, 700, 6000]}),
    ],
)
def test_errors_of_windows_are_finite(operator: str, lengths: dict[str, list[int]]):
    got = TABLES.lookup(operator, **SHAPE, batch_size=3, **lengths, window=WINDOW, with_error=True)
    assert got.relative_error is not None
    assert np.isfinite(got.relative_error).all()
    assert (got.relative_error > 0).all()
