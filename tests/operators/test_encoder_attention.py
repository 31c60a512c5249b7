"""Attention of an encoder: measured points, the law between them, work, and the package's rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastroof import Tables
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.attention import ENCODER_ATTENTION
from tests.reference.handmade import handmade_tables

POINTS = {(1, 64): 8.0, (1, 256): 9.0, (1, 1024): 30.0, (4, 64): 8.5, (4, 256): 12.0, (4, 1024): 100.0}
HEADS = {"num_q_heads": 16, "num_kv_heads": 16, "head_dim": 64}


def tables() -> Tables:
    """One head shape by hand."""
    rows = [("bf16", 16, 16, 64, 0, batch, tokens, us) for (batch, tokens), us in POINTS.items()]
    return handmade_tables(encoder_attention=rows)


def test_measured_points_come_back_with_their_mfu():
    batch, tokens = np.array(list(POINTS)).T
    answer = tables().lookup("encoder_attention", batch_size=batch, kv_len=tokens, **HEADS)
    assert answer.latency_us.tolist() == list(POINTS.values())
    assert (answer.origin == 0).all()
    flops = 4.0 * 16 * 64 * tokens**2 * batch
    np.testing.assert_allclose(answer.mfu, flops / (np.array(list(POINTS.values())) * 989.5e6), rtol=1e-12)


@settings(deadline=None)
@given(tokens=st.integers(256, 1024))
def test_between_two_lengths_time_follows_the_roofline(tokens: int):
    """Linear in B, which is a square and a line: the naive form of it, at one batch."""
    gpu = tables().gpu

    def bound(t: float) -> float:
        return 1e6 * (4 * 16 * 64 * t * t / gpu.peak("bf16") + 4 * 2 * 16 * 64 * t / gpu.hbm_bytes_per_s)

    weight = (bound(tokens) - bound(256)) / (bound(1024) - bound(256))
    answer = tables().lookup("encoder_attention", kv_len=tokens, **HEADS)
    assert float(answer.latency_us) == pytest.approx(9.0 + (30.0 - 9.0) * weight, rel=1e-12)
    assert int(answer.origin) == (0 if tokens in (256, 1024) else 1)


def test_other_heads_borrow_at_equal_heads_in_all():
    answer = tables().lookup(
        "encoder_attention", num_q_heads=8, num_kv_heads=8, head_dim=64, batch_size=8, kv_len=1024
    )
    assert (float(answer.latency_us), int(answer.origin)) == (100.0, 3)
    with pytest.raises(MissingTableError, match="head_dim 64"):
        tables().lookup("encoder_attention", num_q_heads=8, num_kv_heads=8, head_dim=80, kv_len=64)
    with pytest.raises(LookupInputError, match="needs kv_len"):
        tables().lookup("encoder_attention", **HEADS)


def test_rows_of_the_package_become_its_rows():
    raw = {
        "attn_dtype": np.array(["bfloat16", "float8"], object),
        "kernel_source": np.array(["a", "b"], object),
        **{name: np.array([2, 3]) for name in ("batch_size", "isl", "num_heads", "head_dim")},
        "latency": np.array([0.5, 0.25]),
    }
    (file,) = ENCODER_ATTENTION.package_files
    rows = file.convert(raw)
    assert set(rows.columns) == {*(c.name for c in ENCODER_ATTENTION.required), "kernel"}
    assert rows.columns["latency_us"].tolist() == [500.0, 250.0]
    assert rows.columns["num_kv_heads"].tolist() == [2, 3]
    assert [mask.tolist() for mask in rows.left_out.values()] == [[False, True]]


def test_every_method_and_the_error_answer_on_shipped_rows(h100: Tables):
    rows = h100.table("encoder_attention").columns
    some = {name: rows[name][::700] for name in ENCODER_ATTENTION.arguments if name != "kv_dtype"}
    for method in ("roofline", "linear_mfu", "nearest", "floor"):
        answer = h100.lookup("encoder_attention", method=method, **some)
        assert (np.abs(answer.latency_us / rows["latency_us"][::700] - 1.0) < 0.2).all()
    error = h100.lookup("encoder_attention", with_error=True, **some).relative_error
    assert ((error > 0.0) & (error < 0.5)).all()
