"""FLOPs and bytes of the operators: worked examples, and that more work is more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.operators.attention_work import (
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
)
from fastroof.operators.communication import allreduce_wire_bytes
from fastroof.operators.expert_work import moe_bytes, moe_flops, moe_touched_experts
from fastroof.operators.gemm import gemm_bytes, gemm_flops

SIZES = st.integers(1, 2**20)


def test_worked_examples():
    assert gemm_flops(64, 6144, 4096) == 2 * 64 * 6144 * 4096
    assert gemm_bytes(64, 6144, 4096, 2) == 2 * (64 * 4096 + 6144 * 4096 + 64 * 6144)
    assert gemm_bytes(64, 6144, 4096, 1) == 64 * 4096 + 6144 * 4096 + 2 * 64 * 6144
    assert attention_flops(32, 128, 4, 4) == 4 * 32 * 128 * (1 + 2 + 3 + 4)
    assert decode_attention_flops(32, 128, 4096, 64) == 4 * 32 * 128 * 4096 * 64
    assert decode_attention_bytes(32, 8, 128, 4096, 1) == 2 * 2 * 8 * 128 * 4096 + 2 * 2 * 32 * 128
    assert decode_attention_bytes(32, 8, 128, 4096, 1, 1) == 2 * 8 * 128 * 4096 + 2 * 2 * 32 * 128
    assert allreduce_wire_bytes(1024, 2) == 1024
    assert allreduce_wire_bytes(1024, 8) == 2 * 7 / 8 * 1024
    assert moe_flops(10, 2048, 512, 8, 2, 4) == 6 * 10 * 8 * 2048 * 512 / 8


def test_the_published_mfu_of_a_prefill_is_explained_by_the_h20s_peak():
    """4096 tokens of 32-32-128 in 219.951 us, called MFU 4.222 (DESIGN, fact 2)."""
    square = 4 * 32 * 4096 * 4096 * 128 / 2
    assert square / (219.951e-6 * 148e12) == pytest.approx(4.222, abs=5e-4)
    exact = float(attention_flops(32, 128, 4096, 4096))
    assert exact / (219.951e-6 * 989.5e12) == pytest.approx(0.632, abs=5e-4)
    assert exact / square == pytest.approx(1 + 1 / 4096)


@given(q=st.integers(1, 300), context=st.integers(0, 300))
def test_causal_attention_counts_every_pair_once(q, context):
    pairs = sum(context + i for i in range(1, q + 1))
    assert attention_flops(3, 5, q, context + q, 7) == 4 * 3 * 5 * 7 * pairs


@given(q=st.integers(1, 2**16), split=st.integers(1, 2**16), context=st.integers(0, 2**16))
def test_chunks_of_a_prompt_have_the_flops_of_the_whole(q, split, context):
    whole = attention_flops(32, 128, q + split, context + q + split)
    parts = attention_flops(32, 128, q, context + q) + attention_flops(32, 128, split, context + q + split)
    assert whole == parts


@given(m=SIZES, n=SIZES, k=SIZES, more=st.integers(1, 1000))
def test_flops_and_bytes_grow_with_tokens(m, n, k, more):
    assert gemm_flops(m + more, n, k) > gemm_flops(m, n, k)
    assert gemm_bytes(m + more, n, k, 2) > gemm_bytes(m, n, k, 2)
    for function in (attention_flops, lambda *a: attention_bytes(a[0], 8, *a[1:])):
        assert function(32, 128, m + more, m + more + k) > function(32, 128, m, m + k)
        assert function(32, 128, m, m + k + more) > function(32, 128, m, m + k)
        assert function(32, 128, m, m + k, 1 + more) > function(32, 128, m, m + k, 1)
    assert moe_flops(m + more, n, 512, 8) > moe_flops(m, n, 512, 8)
    assert moe_bytes(m + more, n, 512, 8, 256) > moe_bytes(m, n, 512, 8, 256)
    assert allreduce_wire_bytes(m + more, 4) > allreduce_wire_bytes(m, 4)


@given(tokens=st.integers(1, 10**6), ep=st.sampled_from([1, 2, 4]))
def test_touched_experts_are_between_topk_and_all(tokens, ep):
    touched = float(moe_touched_experts(tokens, 8, 256, ep))
    assert 8 / ep * (1 - 1e-9) <= touched <= 256 / ep
    assert moe_touched_experts(1, 8, 256) == pytest.approx(8)


def test_products_beyond_int64_do_not_wrap():
    huge = np.int64(2**24)
    assert gemm_flops(np.int64(2**28), huge, huge) == 2.0 * 2**76
