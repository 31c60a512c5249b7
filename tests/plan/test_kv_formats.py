"""Cache formats that no table has: bytes as engines' sources have them, modelled times, refusals."""

from __future__ import annotations

import pytest

from fastroof import compile_plan, load_model
from fastroof.columns import ORIGIN_MODELLED
from fastroof.errors import PlanError


def stored_bytes(kv_dtype: str, heads: int, head_dim: int) -> int:
    """Bytes of a token in a layer: nvfp4_kv_cache_full_dim and TritonAttentionBackend of vLLM 0.33.0."""
    side = head_dim // 2 + head_dim // 16 if kv_dtype == "nvfp4" else head_dim + 4
    return 2 * heads * side


@pytest.mark.parametrize("kv_dtype", ["nvfp4", "int8_per_token_head"])
@pytest.mark.parametrize(("model", "heads", "head_dim"), [("qwen3-32b", 8, 128), ("gpt-oss-20b", 8, 64)])
def test_a_token_takes_the_bytes_of_the_engine(kv_dtype, model, heads, head_dim):
    plan = compile_plan(model, "b200", kv_dtype=kv_dtype)
    layers = load_model(model).num_layers
    assert plan.memory.kv_bytes_per_token == layers * stored_bytes(kv_dtype, heads, head_dim)


@pytest.mark.parametrize(
    ("kv_dtype", "least", "most"), [("nvfp4", 0.5, 1.0), ("int8_per_token_head", 1.0, 1.04)]
)
def test_times_are_those_of_fp8_at_equal_latency_over_bound(kv_dtype, least, most):
    """Decodes that read much cache take the share of its bytes, others their launch; all are modelled."""
    plans = [compile_plan("qwen3-32b", "b200", kv_dtype=name, engine="kernels") for name in (kv_dtype, "fp8")]
    for batch, kv_len in ((1, 128), (8, 1024), (64, 4096), (256, 8192)):
        steps = [plan.explain([(1, kv_len - 1)] * batch).operators for plan in plans]
        ours, fp8 = (next(one for one in step if one.name == "decode attention") for step in steps)
        assert least <= ours.total_us / fp8.total_us <= most
        assert (ours.origin, fp8.origin < ORIGIN_MODELLED) == (ORIGIN_MODELLED, True)


@pytest.mark.parametrize(
    ("model", "gpu", "engine", "kv_dtype", "message"),
    [
        ("deepseek-v3", "b200", "vllm", "nvfp4", "keys and values of heads, and deepseek-v3 caches 128 MLA"),
        ("qwen3-32b", "b200", "sglang", "nvfp4", "sglang .* has no known nvfp4 KV cache on b200"),
        ("qwen3-32b", "b200", "vllm-0.12", "int8_per_token_head", "vllm-0.12 .* has no known int8"),
        ("gpt-oss-20b", "h100", "vllm", "nvfp4", "head_dim of 128, 256, 512, and gpt-oss-20b has 64"),
    ],
)
def test_what_has_no_kernel_is_refused(model, gpu, engine, kv_dtype, message):
    with pytest.raises(PlanError, match=f"{message}.*: use kv_dtype bf16 or fp8$"):
        compile_plan(model, gpu, engine=engine, kv_dtype=kv_dtype)
