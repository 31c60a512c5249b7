"""Latent attention: the kernel, whole blocks, and the two GEMMs around it; their work and their rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fastroof
from fastroof import load_gpu
from fastroof.errors import LookupInputError, MissingTableError
from fastroof.operators.calls import LatentProduct
from fastroof.operators.registry import OPERATORS
from fastroof.operators.widths import LatentShape, shape_name
from fastroof.units import US_PER_S
from tests.reference.handmade import handmade_tables
from tests.reference.raw_rows import converted, left_out

H100 = load_gpu("h100")
KERNEL = {
    "kernel_source": "flash_attention", "mla_dtype": "bfloat16", "kv_cache_dtype": "fp8", "num_heads": 16,
    "batch_size": 4, "isl": 1, "step": 1023, "latency": 0.25,
}  # fmt: skip
MODULE = KERNEL | {"model": "deepseek-ai/DeepSeek-V3", "gemm_type": "fp8_block", "step": 1024}
BMM = {
    "kernel_source": "torch", "op_name": "mla_gen_pre", "bmm_dtype": "bfloat16", "num_tokens": 64,
    "num_heads": 16, "latency": 0.004,
}  # fmt: skip


# rows of the package


def test_kernels_count_cached_tokens_and_the_new_one():
    rows = converted("mla_decode", "generation_mla_perf", [KERNEL | {"step": s} for s in (1, 3, 7, 1023)])
    assert rows.columns["kv_len"].tolist() == [2, 4, 8, 1024]
    assert rows.columns["num_q_heads"].tolist() == [16] * 4
    assert (rows.columns["kv_lora_rank"][0], rows.columns["rope_dim"][0]) == (512, 64)
    assert rows.columns["latency_us"].tolist() == [250.0] * 4


def test_modules_count_the_new_token_among_the_steps():
    rows = converted(
        "mla_module_decode", "mla_generation_module_perf", [MODULE | {"step": s} for s in (2, 4, 1024)]
    )
    assert rows.columns["kv_len"].tolist() == [2, 4, 1024]
    # not because it is a module: by its steps
    rows = converted(
        "mla_module_decode", "mla_generation_module_perf", [MODULE | {"step": s} for s in (1, 3)]
    )
    assert rows.columns["kv_len"].tolist() == [2, 4]


def test_wide_expert_parallelism_counts_the_sequence_as_its_input():
    old = {name: value for name, value in MODULE.items() if name not in ("model", "gemm_type")}
    old |= {"mla_dtype": "fp8_block", "step": 0}
    rows = converted("mla_module_decode", "wideep_generation_mla_perf", [old | {"isl": n} for n in (4, 512)])
    assert rows.columns["kv_len"].tolist() == [4, 512]
    # what it calls the dtype of MLA is the format of the projections
    assert set(zip(rows.columns["dtype"], rows.columns["attn_dtype"], strict=True)) == {("fp8_block", "bf16")}
    assert set(rows.columns["model"]) == {"deepseek-v3"}


def test_prompts_have_a_batch_and_a_prefix():
    rows = converted(
        "mla_prefill", "context_mla_perf", [KERNEL | {"isl": 512, "step": s} for s in (0, 100)]
    ).columns
    assert (rows["batch_size"].tolist(), rows["q_len"].tolist()) == ([4, 4], [512, 512])
    assert rows["kv_len"].tolist() == [512, 612]
    module = converted("mla_module_prefill", "mla_context_module_perf", [MODULE | {"isl": 64, "step": 0}])
    assert (module.columns["q_len"].tolist(), module.columns["kv_len"].tolist()) == ([64], [64])


def test_what_one_gpu_runs_is_the_key_whatever_tp_made_it():
    # 16 heads of 128 over 8 GPUs and of 64 over 4 are one kernel, measured twice
    rows = converted("mla_decode", "generation_mla_perf", [KERNEL, KERNEL | {"latency": 0.75}])
    names = [c.name for c in OPERATORS["mla_decode"].required]
    twice = [tuple(rows.columns[n][i] for n in names) for i in (0, 1)]
    assert "tp_size" not in names
    assert twice[0][:-1] == twice[1][:-1]
    found = handmade_tables(mla_decode=twice).lookup(
        "mla_decode", num_q_heads=16, batch_size=4, kv_len=1024, kv_dtype="fp8"
    )
    assert float(found.latency_us) == 500.0


def test_the_two_gemms_around_attention_are_parts_not_alternatives():
    rows = [BMM, BMM | {"op_name": "mla_gen_post", "latency": 0.009}]
    found = converted("mla_bmm", "mla_bmm_perf", rows).columns
    assert found["part"].tolist() == ["pre", "post"]
    tables = handmade_tables(mla_bmm=[("bf16", "pre", 16, 64, 4.0), ("bf16", "post", 16, 64, 9.0)])
    sizes = {"num_heads": 16, "num_tokens": 64}
    both = [float(tables.lookup("mla_bmm", part=part, **sizes).latency_us) for part in ("pre", "post")]
    assert both == [4.0, 9.0]
    with pytest.raises(LookupInputError, match="needs part"):
        tables.lookup("mla_bmm", **sizes)


def test_rows_that_nothing_is_known_of_are_left_out_by_reason():
    rows = [MODULE, MODULE | {"model": "moonshotai/Kimi-K3"}, MODULE | {"gemm_type": "fp3"}]
    rows += [MODULE | {"kv_cache_dtype": "int3"}]
    found = converted("mla_module_decode", "mla_generation_module_perf", rows)
    assert left_out(found) == {"model moonshotai/Kimi-K3": 1, "dtype fp3": 1, "dtype int3": 1}
    assert left_out(
        converted("mla_decode", "generation_mla_perf", [KERNEL, KERNEL | {"mla_dtype": "fp8"}])
    ) == {"computes in fp8": 1}


# work


def module_rows(**columns):
    shape = {"dtype": "fp8_block", "kv_dtype": "fp8", "attn_dtype": "bf16", "model": "deepseek-v3"}
    rows = shape | {"num_heads": 16, "latency_us": 1.0} | columns
    return {n: np.array([v], object if isinstance(v, str) else None) for n, v in rows.items()}


def test_a_block_of_decode_is_its_gemms_absorbed_and_over_the_latent_cache():
    batch, kv_len, heads = 8, 1000, 16
    rows = module_rows(batch_size=batch, kv_len=kv_len)
    gemms = 7168 * (1536 + 512 + 64) + 1536 * heads * 192 + heads * 128 * 7168
    absorbed = heads * 512 * (128 + 128)
    attention = 2 * heads * (2 * 512 + 64) * batch * kv_len
    operator = OPERATORS["mla_module_decode"]
    assert operator.flops(rows).tolist() == [2 * batch * (gemms + absorbed) + attention]
    moved = gemms + absorbed + batch * kv_len * 576 + 2 * 2 * batch * 7168
    assert operator.moved_bytes(rows).tolist() == [moved]
    peak, _ = operator.peaks(rows, H100)
    seconds = 2 * batch * gemms / H100.peak("fp8") + (2 * batch * absorbed + attention) / H100.peak("bf16")
    np.testing.assert_allclose(peak, operator.flops(rows) / seconds, rtol=1e-12)


def test_a_block_of_prompts_expands_keys_and_values():
    batch, q_len, heads = 2, 100, 16
    rows = module_rows(batch_size=batch, q_len=q_len, kv_len=q_len + 50)
    gemms = 7168 * (1536 + 512 + 64) + 1536 * heads * 192 + heads * 128 * 7168
    expanded = heads * 512 * (128 + 128)
    pairs = sum(50 + i + 1 for i in range(q_len))
    flops = 2 * batch * q_len * gemms + 2 * batch * (q_len + 50) * expanded
    flops += 2 * heads * (192 + 128) * batch * pairs
    assert OPERATORS["mla_module_prefill"].flops(rows).tolist() == [flops]


@pytest.mark.parametrize(("dtype", "measured", "width"), [("bf16", "bf16", 2), ("fp8_block", "fp8", 1)])
def test_a_step_s_product_does_the_work_of_the_measured_one(dtype: str, measured: str, width: int):
    call = LatentProduct("q_absorb", "q_absorb", 1, "pre", 16, 128, 512, dtype)
    rows = np.array([1.0, 64.0])
    operator = OPERATORS["mla_bmm"]
    flops, moved = operator.row_work(call, rows)
    assert flops.tolist() == (2 * rows * 16 * 128 * 512).tolist()
    assert moved.tolist() == (width * 16 * 128 * 512 + 2 * rows * 16 * (128 + 512)).tolist()
    table = {"dtype": np.array([measured] * 2, object), "num_heads": np.array([16, 16]), "num_tokens": rows}
    assert operator.flops(table).tolist() == flops.tolist()
    assert operator.moved_bytes(table).tolist() == moved.tolist()


PRESETS = Path(fastroof.__file__).parent / "models" / "presets"


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        ("deepseek-v3", "deepseek-v3"), ("kimi-k2", "deepseek-v3"), ("deepseek-v3.2", "deepseek-v3.2"),
        ("glm-5", "glm-5"), ("glm-5.2", "glm-5"),
    ],
)  # fmt: skip
def test_a_model_meets_the_blocks_of_its_published_widths(preset: str, name: str):
    config = json.loads((PRESETS / f"{preset}.json").read_text())
    widths = (
        "hidden_size", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    index = [config.get(key, 0) for key in ("index_n_heads", "index_head_dim", "index_topk")]
    shape = LatentShape(*(config[key] for key in widths), *index)
    assert shape_name(shape) == name
    assert shape_name(shape._replace(topk=shape.topk + 1)) is None
    # only GLM-5.2 has layers that reuse what another one's indexer picked
    shared = {"glm-5": "glm-5-shared-index", "deepseek-v3": "deepseek-v3"}
    assert shape_name(shape._replace(index_heads=0, index_dim=0)) == shared.get(name)


# lookups


def test_lookups_of_modules_answer_and_refuse():
    key = ("bf16", "bf16", "bf16", "deepseek-v3", 16)
    points = {(1, 64): 50.0, (1, 4096): 60.0, (64, 64): 70.0}
    tables = handmade_tables(mla_module_decode=[(*key, *p, us) for p, us in points.items()])
    got = tables.lookup("mla_module_decode", num_heads=16, batch_size=[1, 1, 64], kv_len=[64, 1000, 5000])
    assert got.latency_us[0] == 50.0
    assert 50.0 < got.latency_us[1] < 60.0
    assert got.origin.tolist() == [0, 1, 2]
    work = OPERATORS["mla_module_decode"].flops(module_rows(
        dtype="bf16", kv_dtype="bf16", batch_size=1, kv_len=64
    ))  # fmt: skip
    np.testing.assert_allclose(got.mfu[0], work / (50.0 / US_PER_S * H100.peak("bf16")), rtol=1e-9)
    with pytest.raises(LookupInputError, match="unknown model 'gpt-2': use one of deepseek-v3"):
        tables.lookup("mla_module_decode", num_heads=16, batch_size=1, kv_len=64, model="gpt-2")
    with pytest.raises(MissingTableError, match=r"closest: .*num_heads=16"):
        tables.lookup("mla_module_decode", num_heads=32, batch_size=1, kv_len=64)


def test_a_prefix_needs_a_kv_len_that_counts_it():
    rows = [("bf16", "bf16", 16, 128, 64, 1, q, q, 10.0 + q) for q in (16, 64)]
    tables = handmade_tables(mla_prefill=rows)
    alone, longer = tables.lookup("mla_prefill", num_q_heads=16, q_len=16, kv_len=[16, 48]).latency_us
    assert alone == 26.0
    assert longer > alone
    with pytest.raises(LookupInputError, match="kv_len counts the prefix and the new tokens"):
        tables.lookup("mla_prefill", num_q_heads=16, q_len=16, kv_len=15)
