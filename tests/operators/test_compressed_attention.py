"""Blocks over compressed caches, block-sparse ones, and the parts that correct them: work and rows."""

from __future__ import annotations

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.errors import LookupInputError
from fastroof.operators.registry import OPERATORS
from tests.reference.handmade import handmade_tables
from tests.reference.raw_rows import converted, left_out

H100 = load_gpu("h100")
ROW = {
    "kernel_source": "compressed_flashmla", "model": "sgl-project/DeepSeek-V4-Flash-FP8",
    "mla_dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3", "gemm_type": "fp8_block",
    "num_heads": 16, "batch_size": 2, "isl": 1, "step": 4095, "compress_ratio": 4, "latency": 0.125,
}  # fmt: skip
MSA = {n: v for n, v in ROW.items() if n != "compress_ratio"} | {
    "model": "MiniMaxAI/MiniMax-M3", "kv_cache_dtype": "bfloat16",
}  # fmt: skip


# rows of the package


@pytest.mark.parametrize("operator", ["csa_decode", "hca_decode"])
def test_decodes_count_cached_tokens_and_the_new_one(operator: str):
    ratio = {"csa_decode": 4, "hca_decode": 128}[operator]
    rows = [ROW | {"step": s, "compress_ratio": ratio} for s in (1, 4, 1048575)]
    found = converted(operator, f"dsv4_{operator[:3]}_generation_module_perf", rows)
    assert found.columns["kv_len"].tolist() == [2, 5, 2**20]
    assert found.columns["kv_dtype"].tolist() == ["fp8"] * 3
    assert found.columns["latency_us"].tolist() == [125.0] * 3
    assert left_out(found) == {}
    other = [ROW | {"compress_ratio": 4}, ROW | {"compress_ratio": 128}, ROW | {"compress_ratio": 7}]
    assert left_out(converted(operator, f"dsv4_{operator[:3]}_generation_module_perf", other)) == {
        f"not compressed {ratio} to 1": 2
    }


def test_one_model_has_one_name_whoever_uploaded_it():
    rows = [
        ROW | {"model": m} for m in ("sgl-project/DeepSeek-V4-Pro-FP8", "deepseek-ai/DeepSeek-V4-Pro", "x/y")
    ]
    found = converted("csa_prefill", "dsv4_csa_context_module_perf", rows)
    assert found.columns["model"].tolist() == ["deepseek-v4-pro", "deepseek-v4-pro", "x/y"]
    assert left_out(found) == {"model x/y": 1}
    assert found.columns["q_len"].tolist() == [1] * 3
    assert found.columns["kv_len"].tolist() == [4096] * 3


def test_msa_rows():
    found = converted("msa_decode", "msa_generation_module_perf", [MSA | {"step": s} for s in (1, 3, 131071)])
    assert found.columns["kv_len"].tolist() == [2, 4, 131072]
    assert set(found.columns["model"]) == {"minimax-m3"}
    prefill = converted("msa_prefill", "msa_context_module_perf", [MSA | {"isl": 64, "step": 128}]).columns
    assert (prefill["q_len"].tolist(), prefill["kv_len"].tolist()) == ([64], [192])


TOPK = {n: v for n, v in ROW.items() if n != "gemm_type"} | {"score_mode": "v1_flat"}


def test_scores_and_kernels_of_a_top_k_are_alternatives_with_keys_of_their_own():
    modes = ["v1_flat", "v2_flat", "v1_top_last", "v2_top_last"]
    found = converted(
        "sparse_part", "dsv4_csa_topk_calib_perf", [TOPK | {"score_mode": m} for m in modes]
    ).columns
    assert found["part"].tolist() == ["topk_v1", "topk_v2", "topk_v1", "topk_v2"]
    assert found["scores"].tolist() == ["flat", "flat", "top_last", "top_last"]
    glm = TOPK | {"model": "zai-org/GLM-5", "compress_ratio": 1}
    found = converted(
        "sparse_part", "glm5_topk_module_perf", [glm | {"score_mode": m} for m in ("flat", "top_last")]
    ).columns
    assert found["part"].tolist() == ["topk", "topk"]
    assert found["scores"].tolist() == ["flat", "top_last"]
    assert set(found["model"]) == {"glm-5"}


def test_calls_that_pick_nothing_make_no_row():
    rows = [TOPK, TOPK | {"step": 100, "latency": 0.0}]
    found = converted("sparse_part", "dsv4_csa_topk_calib_perf", rows)
    assert left_out(found) == {"nothing to pick, so nothing ran": 1}


def test_parts_without_scores_and_with_local_heads():
    part = {n: v for n, v in ROW.items() if n != "gemm_type"}
    logits = converted("sparse_part", "dsv4_paged_mqa_logits_module_perf", [part]).columns
    assert (logits["part"].tolist(), logits["scores"].tolist()) == (["mqa_logits"], ["none"])
    attention = part | {"num_heads": 64, "local_num_heads": 8, "compress_ratio": 128}
    found = converted("sparse_part", "dsv4_hca_attn_module_perf", [attention]).columns
    assert (found["part"].tolist(), found["num_heads"].tolist()) == (["attention"], [8])


# work


def rows_of(operator: str, **columns):
    shape = {
        "dtype": "fp8_block",
        "kv_dtype": "fp8",
        "attn_dtype": "bf16",
        "num_heads": 16,
        "latency_us": 1.0,
    }
    return {n: np.array([v], object if isinstance(v, str) else None) for n, v in (shape | columns).items()}


def csa_weights() -> tuple[int, int]:
    """Weights of DeepSeek-V4-Flash's block and its indexer: 16 heads in two groups of the output."""
    compressors = 4096 * 2 * 2 * 512
    own = 4096 * (1024 + 512) + 1024 * 16 * 512 + 16 * 512 * 1024 + 2 * 1024 * 4096 + compressors
    return own, 1024 * 64 * 128 + 4096 * (64 + 2 * 2 * 128)


@pytest.mark.parametrize("kv_len", [100, 2048, 40_000])
def test_csa_attends_to_what_it_picks_and_to_its_window(kv_len: int):
    own, indexer = csa_weights()
    entries = min(kv_len / 4, 512) + min(kv_len, 128)
    flops = 2 * 3 * (own + indexer) + 3 * (2 * 64 * 128 * kv_len / 4 + 4 * 16 * 512 * entries)
    rows = rows_of("csa_decode", model="deepseek-v4-flash", batch_size=3, kv_len=kv_len)
    assert OPERATORS["csa_decode"].flops(rows).tolist() == [flops]


@pytest.mark.parametrize(
    ("model", "ratio", "heads", "topk"), [("glm-5", 1, 32, 2048), ("deepseek-v4-flash", 4, 64, 512)]
)
def test_scores_of_a_part_are_products_of_the_indexer_s_heads_with_every_entry(model, ratio, heads, topk):
    batch, context, q_len = 3, 4000, 8
    scored = batch * sum(context + i + 1 for i in range(q_len)) / ratio
    sizes = {
        "model": model, "compress_ratio": ratio, "batch_size": batch,
        "q_len": q_len, "kv_len": context + q_len,
    }  # fmt: skip
    logits, picking = (
        rows_of("sparse_part", part=part, scores="none", **sizes) for part in ("mqa_logits", "topk_v1")
    )
    operator = OPERATORS["sparse_part"]
    assert operator.flops(logits).tolist() == [2 * heads * 128 * scored]
    assert operator.peaks(logits, H100)[0].tolist() == [H100.peak("fp8")]
    assert operator.moved_bytes(logits).tolist() == [batch * (context + q_len) / ratio * 128 + 4 * scored]
    # a comparison a score, each read once
    assert operator.flops(picking).tolist() == [scored]
    assert operator.moved_bytes(picking).tolist() == [4 * scored]
    # 4 x 16 heads x 512 a pair: what is picked, and the window of a compressed cache
    attention = rows_of("sparse_part", part="attention", scores="none", **sizes)
    pairs = batch * q_len * (topk + (128 if ratio > 1 else 0))
    assert pairs == pytest.approx(float(operator.flops(attention)[0]) / (4 * 16 * 512), rel=1e-3)


def test_hca_attends_to_every_entry_and_has_no_indexer():
    own = csa_weights()[0] - 4096 * 2 * 512
    flops = 2 * 3 * own + 3 * 4 * 16 * 512 * (40_000 / 128 + 128)
    rows = rows_of("hca_decode", model="deepseek-v4-flash", batch_size=3, kv_len=40_000)
    assert OPERATORS["hca_decode"].flops(rows).tolist() == [flops]


@pytest.mark.parametrize("operator", ["csa_prefill", "hca_prefill", "msa_prefill"])
def test_one_new_token_of_a_prompt_is_a_decode(operator: str):
    model = "minimax-m3" if operator == "msa_prefill" else "deepseek-v4-pro"
    sizes = {"model": model, "batch_size": 4, "kv_len": 9_000}
    decode = operator.replace("prefill", "decode")
    one = OPERATORS[operator].work(rows_of(operator, q_len=1, **sizes), H100)
    other = OPERATORS[decode].work(rows_of(decode, **sizes), H100)
    np.testing.assert_allclose(one.flops, other.flops, rtol=1e-12)
    np.testing.assert_allclose(one.moved_bytes, other.moved_bytes, rtol=1e-12)


def test_msa_scores_all_tokens_and_attends_to_2048():
    batch, kv_len, heads = 2, 10_000, 32
    weights = 6144 * 128 * (2 * heads + 2 * 2 + 2 + 1)
    flops = 2 * batch * weights + batch * (2 * 128 * 2 * kv_len + 4 * 128 * heads * 2048)
    rows = rows_of("msa_decode", model="minimax-m3", num_heads=heads, batch_size=batch, kv_len=kv_len)
    assert OPERATORS["msa_decode"].flops(rows).tolist() == [flops]


# lookups


def test_a_block_is_corrected_by_its_parts():
    key = ("fp8_block", "fp8", "bf16", "deepseek-v4-flash", 16)
    part = ("topk_v2", "deepseek-v4-flash")
    tables = handmade_tables(
        csa_decode=[(*key, 1, 4096, 164.0), (*key, 1, 8192, 165.0)],
        sparse_part=[(*part, "flat", 4, 64, 1, 1, 4096, 81.0), (*part, "top_last", 4, 64, 1, 1, 4096, 2.7)],
    )
    block = tables.lookup("csa_decode", num_heads=16, batch_size=1, kv_len=4096, dtype="fp8_block")
    sizes = {"part": "topk_v2", "model": "deepseek-v4-flash", "compress_ratio": 4, "num_heads": 64}
    flat, top_last = (
        float(tables.lookup("sparse_part", **sizes, scores=scores, q_len=1, kv_len=4096).latency_us)
        for scores in ("flat", "top_last")
    )
    assert float(block.latency_us) - flat + top_last == pytest.approx(85.7)
    with pytest.raises(LookupInputError, match="unknown model 'glm-5': use one of deepseek-v4-flash"):
        tables.lookup("csa_decode", num_heads=16, batch_size=1, kv_len=4096, model="glm-5")
