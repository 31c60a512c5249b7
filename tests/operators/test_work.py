"""FLOPs and bytes of the operators: worked examples, and that more work is more."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastroof.config import load_gpu
from fastroof.load.rows import MOST_INT
from fastroof.operators.attention_work import (
    attention_bytes,
    attention_flops,
    decode_attention_bytes,
    decode_attention_flops,
)
from fastroof.operators.communication import allreduce_wire_bytes
from fastroof.operators.gemm import gemm_bytes, gemm_flops
from fastroof.operators.moe_work import moe_bytes, moe_flops, moe_touched_experts
from fastroof.operators.registry import OPERATORS

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


WORDS = {
    "part": ("fused", "convolution", "recurrence", "attention", "topk_v1", "mqa_logits", "pre", "post"),
    "stage": ("pre", "post"),
    "phase": ("context", "generation", "verify"),
    "kind": ("fp8_quantise",),
    "collective": ("all_gather",),
    "distribution": ("balanced", "power_law_1.2"),
}
"""Of columns of text, where what a row does depends on them."""

MODELS = {"model": "deepseek-v4-flash", "scores": "none", "spread": "pair", "mode": "graph"}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_products_of_the_largest_sizes_of_a_table_do_not_overflow(operator):
    given = {name: words for name, words in WORDS.items() if name in [c.name for c in operator.keys]}
    for words in itertools.product(*given.values()):
        named = dict(zip(given, words, strict=True))
        rows = {}
        for column in operator.required:
            word = named.get(column.name) or operator.defaults.get(column.name)
            if column.kind == "text":
                word = word if isinstance(word, str) else MODELS.get(column.name, "bf16")
                rows[column.name] = np.array([word], object)
            else:
                rows[column.name] = np.array([MOST_INT])
        floats = {name: one if one.dtype == object else one.astype(float) for name, one in rows.items()}
        ours, theirs = (operator.work(columns, load_gpu("h100")) for columns in (rows, floats))
        for ours_of, theirs_of in zip(vars(ours).values(), vars(theirs).values(), strict=True):
            np.testing.assert_allclose(ours_of, theirs_of, rtol=1e-12)
        assert ours.moved_bytes > 0.0
        assert not ours.flops <= 0.0
