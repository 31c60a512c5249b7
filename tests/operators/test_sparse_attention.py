"""Sparse attention with an indexer: its work, its rows, and the two kernels of SGLang's prompts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fastroof import load_gpu
from fastroof.errors import TableError
from fastroof.operators.registry import OPERATORS
from fastroof.tables import Tables
from tests.reference.handmade import handmade_tables
from tests.reference.raw_rows import converted

H100 = load_gpu("h100")
ROW = {
    "kernel_source": "sglang_dsa_indexer_flashmla_kv", "model": "deepseek-ai/DeepSeek-V3.2",
    "mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "gemm_type": "fp8_block", "num_heads": 16,
    "batch_size": 1, "isl": 1, "step": 4095, "latency": 0.5,
}  # fmt: skip
KEY = ("fp8_block", "fp8", "bf16", "deepseek-v3.2", 16)


# rows of the package


def test_the_new_token_is_among_steps_of_powers_of_two_alone():
    file = "dsa_generation_module_perf"
    vllm = converted("dsa_decode", file, [ROW | {"step": s} for s in (2, 4, 131072)])
    sglang = converted("dsa_decode", file, [ROW | {"step": s} for s in (1, 4, 163839)])
    assert vllm.columns["kv_len"].tolist() == [2, 4, 131072]
    assert sglang.columns["kv_len"].tolist() == [2, 5, 163840]


def test_a_few_other_steps_do_not_change_what_steps_are():
    steps = [2**n for n in range(1, 18)] * 2 + [1056, 8191]
    found = converted("dsa_decode", "dsa_generation_module_perf", [ROW | {"step": s} for s in steps])
    assert found.columns["kv_len"].tolist() == steps


def test_vllm_names_layers_that_skip_the_indexer_in_op_name():
    shared = "glm-5-shared-index"
    rows = [ROW | {"kernel_source": "FLASHMLA_SPARSE", "model": "zai-org/GLM-5.2"}] * 3
    names = ["dsa_context_module", "dsa_context_module_skip_indexer", "dsa_context_module"]
    rows = [row | {"op_name": name} for row, name in zip(rows, names, strict=True)]
    found = converted("dsa_prefill", "dsa_context_module_perf", rows)
    assert found.columns["model"].tolist() == ["glm-5", shared, "glm-5"]


def test_blocks_of_glm_5_3_flash_are_of_both_phases_in_one_file():
    shape = {
        "is_context": True, "kv_cache_dtype": "bfloat16", "layer_kind": "sparse_mla", "num_heads": 8,
        "projection_quant_mode": "fp8_block",
    }  # fmt: skip
    row = {"component": "attention", "batch_size": 2, "prefix": 128, "x": 16, "latency": 0.07}
    row["kernel_source"] = "IndexerKPool"
    rows = [
        row | {"geometry": json.dumps(shape | changed)} | sizes
        for changed, sizes in (
            ({}, {}),
            ({"is_context": False}, {"prefix": 0, "x": 2048}),
            ({"layer_kind": "kda"}, {}),
            ({"kv_cache_dtype": "fp8"}, {"component": "linear"}),
        )
    ]
    file = "glm53_attention_module_perf"
    prompts, decodes = (converted(operator, file, rows) for operator in ("dsa_prefill", "dsa_decode"))
    keys = [c.name for c in OPERATORS["dsa_prefill"].keys]
    kept = ~np.any(list(prompts.left_out.values()), axis=0)
    assert kept.tolist() == [True, False, False, False]
    key = tuple(prompts.columns[name][0] for name in keys)
    assert key == ("fp8_block", "bf16", "bf16", "glm-5.3-flash", 8)
    assert [prompts.columns[n][0] for n in ("batch_size", "q_len", "kv_len")] == [2, 16, 144]
    assert (~np.any(list(decodes.left_out.values()), axis=0)).tolist() == [False, True, False, False]
    assert [decodes.columns[n][1] for n in ("batch_size", "kv_len")] == [2, 2049]
    for geometry in ("{", "[]", "7"):
        with pytest.raises(TableError):
            converted("dsa_decode", file, [row | {"geometry": geometry}])


def test_one_key_of_the_index_stands_for_four_tokens_in_glm_5_3_flash():
    pooled, whole = (
        OPERATORS["dsa_decode"].work(columns(model=model, batch_size=1, kv_len=1_000_000), H100)
        for model in ("glm-5.3-flash", "glm-5")
    )
    more, same = (
        OPERATORS["dsa_decode"].work(columns(model=model, batch_size=1, kv_len=2_000_000), H100)
        for model in ("glm-5.3-flash", "glm-5")
    )
    assert more.flops - pooled.flops == (same.flops - whole.flops) / 4 == [2.0 * 32 * 128 * 1_000_000 / 4]
    assert (more.moved_bytes - pooled.moved_bytes) * 4 == same.moved_bytes - whole.moved_bytes


def test_layers_without_an_indexer_are_rows_of_their_own():
    names = ["sglang_dsa_indexer_trtllm", "sglang_dsa_skip_indexer_trtllm", "sglang_dsa_dense_mha_fa3"]
    rows = [ROW | {"kernel_source": names[0]}, ROW | {"kernel_source": names[2]}]
    skipping = ROW | {"model": "zai-org/GLM-5.2-FP8"}
    rows += [skipping | {"kernel_source": name} for name in names[1:]]
    whole = ROW | {"model": "nvidia/GLM-5.2-NVFP4"}
    rows += [whole | {"kernel_source": name} for name in (names[0], names[0], names[1], names[2])]
    found = converted("dsa_prefill", "dsa_context_module_perf", rows).columns["model"].tolist()
    shared = "glm-5-shared-index"
    assert found == ["deepseek-v3.2"] * 2 + [shared] * 2 + ["glm-5", "glm-5", shared, "glm-5"]


def test_a_checkpoint_s_format_does_not_change_its_model():
    models = ["zai-org/GLM-5", "zai-org/GLM-5-FP8"]
    rows = [
        ROW | {"model": m, "gemm_type": g} for m, g in zip(models, ("bfloat16", "fp8_block"), strict=True)
    ]
    found = converted("dsa_prefill", "dsa_context_module_perf", rows).columns
    assert (found["model"].tolist(), found["dtype"].tolist()) == (["glm-5"] * 2, ["bf16", "fp8_block"])
    assert found["latency_us"].tolist() == [500.0, 500.0]


# work


def columns(kernel: str = "", **sizes):
    shape = dict(zip([c.name for c in OPERATORS["dsa_prefill"].keys], KEY, strict=True))
    rows = shape | {"kernel": kernel, "latency_us": 1.0} | sizes
    return {n: np.array([v], object if isinstance(v, str) else None) for n, v in rows.items()}


GEMMS = 7168 * (1536 + 512 + 64) + 1536 * 16 * 192 + 16 * 128 * 7168
ABSORBED = 16 * 512 * 256
INDEXER = 1536 * 64 * 128 + 7168 * 128 + 7168 * 64


@pytest.mark.parametrize("kv_len", [100, 2048, 50_000])
def test_attention_stops_growing_where_the_indexer_does_not(kv_len: int):
    rows = columns(batch_size=3, kv_len=kv_len)
    flops = 2 * 3 * (GEMMS + ABSORBED + INDEXER) + 2 * 64 * 128 * 3 * kv_len
    flops += 2 * 16 * (2 * 512 + 64) * 3 * min(kv_len, 2048)
    assert OPERATORS["dsa_decode"].flops(rows).tolist() == [flops]


@pytest.mark.parametrize("kv_len", [100, 50_000])
def test_a_decode_reads_its_weights_what_it_picks_and_every_key_of_the_indexer(kv_len: int):
    rows = columns(batch_size=3, kv_len=kv_len)
    indexer = 1536 * 64 * 128 + 7168 * 128
    moved = GEMMS + ABSORBED + indexer + 3 * (min(kv_len, 2048) * 576 + kv_len * 128) + 2 * 2 * 3 * 7168
    assert OPERATORS["dsa_decode"].moved_bytes(rows).tolist() == [moved]
    # as a prompt of one token does, in bf16 at twice the weights
    wide = columns(batch_size=3, q_len=1, kv_len=kv_len, dtype="bf16")
    twice = moved + GEMMS + ABSORBED + indexer
    assert OPERATORS["dsa_prefill"].moved_bytes(wide).tolist() == [twice]


def test_a_query_of_a_prompt_attends_to_what_it_picks():
    q_len, context = 3000, 500
    rows = columns(batch_size=2, q_len=q_len, kv_len=q_len + context)
    picked = sum(min(2048, context + i + 1) for i in range(q_len))
    scored = sum(context + i + 1 for i in range(q_len))
    flops = 2 * 2 * q_len * (GEMMS + ABSORBED + INDEXER) + 2 * 64 * 128 * 2 * scored
    flops += 2 * 16 * (2 * 512 + 64) * 2 * picked
    assert OPERATORS["dsa_prefill"].flops(rows).tolist() == [flops]


def test_a_short_prompt_of_sglang_is_expanded_and_scores_nothing():
    rows = columns("sglang_dsa_dense_mha_fa3", batch_size=2, q_len=100, kv_len=100)
    pairs = 100 * 101 // 2
    flops = 2 * 2 * 100 * (GEMMS + ABSORBED + 7168 * 128) + 2 * 16 * (192 + 128) * 2 * pairs
    assert OPERATORS["dsa_prefill"].flops(rows).tolist() == [flops]


# lookups


def prompt_tables(kernels: tuple[str, str]) -> Tables:
    points = {1024: 900.0, 2048: 1000.0, 4096: 8000.0, 8192: 16000.0}
    tables = handmade_tables(dsa_prefill=[(*KEY, 8, 16, kv, us) for kv, us in points.items()])
    named = np.array([kernels[kv > 2048] for kv in points], object)
    tables.table("dsa_prefill").columns["kernel"] = named  # type: ignore[index]
    return tables


def test_lookups_do_not_interpolate_between_two_kernels():
    sizes = {"num_heads": 16, "dtype": "fp8_block", "kv_dtype": "fp8", "batch_size": 8, "q_len": 16}
    kv_len = [1500, 2048, 2049, 3000, 6000]
    two = prompt_tables(("sglang_dsa_dense_mha_fa3", "sglang_dsa_indexer_flashmla_kv"))
    got = two.lookup("dsa_prefill", **sizes, kv_len=kv_len)
    assert 900.0 < got.latency_us[0] < 1000.0
    assert got.latency_us[1] == 1000.0
    # from the sparse kernel's side, though 2048 is the nearer point
    assert (got.latency_us[2:4] > 5000.0).all()
    assert 8000.0 < got.latency_us[4] < 16000.0
    assert got.origin.tolist() == [1, 0, 2, 2, 1]
    one = prompt_tables(("FLASHMLA_SPARSE", "FLASHMLA_SPARSE"))
    between = one.lookup("dsa_prefill", **sizes, kv_len=[2049, 3000])
    assert (between.latency_us < 5000.0).all()
    assert between.origin.tolist() == [1, 1]


def test_errors_of_prompts_are_finite():
    tables = prompt_tables(("FLASHMLA_SPARSE", "FLASHMLA_SPARSE"))
    sizes = {"num_heads": 16, "dtype": "fp8_block", "kv_dtype": "fp8", "batch_size": 8}
    got = tables.lookup("dsa_prefill", **sizes, q_len=16, kv_len=[1024, 3000, 10**6], with_error=True)
    assert got.relative_error is not None
    assert np.isfinite(got.relative_error).all()
    assert got.relative_error[0] < got.relative_error[2]
