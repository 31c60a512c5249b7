"""vLLM's ops as their libraries declare them, with an implementation in torch: every call binds and fits."""

import pytest

torch = pytest.importorskip("torch", reason="torch is optional: pip install torch")
import torch.nn.functional as functional  # noqa: E402

from kernels_bench.protocol import Point  # noqa: E402
from kernels_bench.providers import vllm_ops  # noqa: E402
from kernels_bench.providers.device import Device  # noqa: E402
from kernels_bench.providers.small_ops import RMS_EPSILON  # noqa: E402
from kernels_bench.providers.vllm_provider import VllmProvider  # noqa: E402
from kernels_bench.run.check import check_result  # noqa: E402
from tests.kernels_bench.providers.in_place import InPlaceOps  # noqa: E402

if any(vllm_ops.find_library(name) for name in vllm_ops.LIBRARY_FILES):
    pytest.skip("vLLM's own libraries are here", allow_module_level=True)

HOST = Device("cpu", 20_000, (9, 0))
HEADS = {"kv_dtype": "bf16", "num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "window": 0}
MLA = {"kv_dtype": "bf16", "num_q_heads": 5, "kv_lora_rank": 512, "rope_dim": 64}
SEEN = {}


def metadata(
    batch_size, max_seqlen_q, max_seqlen_k, num_heads, num_heads_k, headdim, headdim_v, qkv_dtype,
    seqused_k, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k, page_size,
    max_seqlen_k_new, is_causal, window_size_left, window_size_right, has_softcap, num_splits, pack_gqa,
    sm_margin,
):  # fmt: skip
    assert seqused_k.dtype == cu_seqlens_q.dtype == torch.int32
    assert batch_size == len(seqused_k) == len(cu_seqlens_q) - 1
    assert max_seqlen_k == seqused_k.max()
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert page_size % 16 == 0
    assert is_causal
    SEEN["num_splits"] = num_splits
    SEEN["widths"] = num_heads, num_heads_k, headdim, headdim_v, qkv_dtype
    SEEN["window"] = window_size_left, window_size_right
    return torch.zeros(1 + -(-batch_size // 4) * 16, dtype=torch.int32)


def fwd(
    q, k, v, k_new, v_new, q_v, out, cu_q, cu_k, cu_k_new, used_q, used_k, max_q, max_k, page_table, *rest
):
    (
        _,
        _,
        _,
        _,
        _,
        *descales,
        scale,
        causal,
        left,
        right,
        softcap,
        _,
        metadata,
        splits,
        _,
        _,
        _,
        size,
        rank,
        _,
    ) = rest
    assert SEEN["widths"] == (q.shape[1], k.shape[2], k.shape[3], v.shape[3], k.dtype)
    assert q.dtype == k.dtype == v.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    if q.dtype == torch.float8_e4m3fn:
        assert all(d.shape == (len(used_k), k.shape[2]) and d.dtype == torch.float32 for d in descales)
        assert out.dtype == torch.bfloat16
    else:
        assert descales == [None] * 3
    assert (softcap, size, rank) == (0.0, 1, 0)
    assert (left, right) == SEEN["window"]
    assert right == (0 if left >= 0 else -1)
    assert causal
    assert metadata is not None
    assert splits == SEEN["num_splits"]
    if q_v is None:
        assert scale == pytest.approx(q.shape[-1] ** -0.5)
    else:  # MLA: q and k are rotary; q_v is multiplied by v, which is what is latent of the keys
        assert (q.shape[-1], q_v.shape[-1], k.shape[2]) == (64, 512, 1)
        assert scale == pytest.approx(192**-0.5)
        q, k = torch.cat((q_v, q), dim=-1), torch.cat((v, k), dim=-1)
    assert page_table.dtype == torch.int32
    assert page_table.is_contiguous()
    for s in range(len(used_k)):
        rows = slice(int(cu_q[s]), int(cu_q[s + 1]))
        kv_len = int(used_k[s])
        pages = page_table[s].long()
        keys, values = (x.float()[pages].flatten(0, 1)[:kv_len].transpose(0, 1)[None] for x in (k, v))
        queries = q.float()[rows].transpose(0, 1)[None]
        before = torch.arange(kv_len - queries.shape[2], kv_len)[:, None] - torch.arange(kv_len)
        seen = (before >= 0) & (before <= (left if left >= 0 else kv_len))
        result = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, enable_gqa=True, scale=scale
        )
        out[rows] = result[0].transpose(0, 1)
    return [torch.zeros(1)]


def fused_add_rms_norm(input, residual, weight, epsilon):
    assert epsilon == RMS_EPSILON
    assert input.is_contiguous()
    assert residual.is_contiguous()
    InPlaceOps().rmsnorm_residual(input, residual, weight)


def rotary_embedding(
    positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False
):
    assert is_neox
    assert cos_sin_cache.dtype == query.dtype
    InPlaceOps().rope(positions, query, key, head_size, cos_sin_cache)


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    assert kv_cache_dtype == "auto"
    assert slot_mapping.dtype == torch.int64
    InPlaceOps().kv_write(key, value, key_cache, value_cache, slot_mapping)


IMPLEMENTATIONS = {
    "_vllm_fa3_C::fwd": fwd,
    "_vllm_fa3_C::get_scheduler_metadata": metadata,
    "_C::fused_add_rms_norm": fused_add_rms_norm,
    "_C::rotary_embedding": rotary_embedding,
    "_C::silu_and_mul": lambda result, input: InPlaceOps().silu_and_mul(result, input),
    "_C::static_scaled_fp8_quant": lambda result, input, scale, group_shape=None: InPlaceOps().fp8_quantise(
        result, input, scale
    ),
    "_C_cache_ops::reshape_and_cache_flash": reshape_and_cache_flash,
}


@pytest.fixture(scope="module")
def provider():
    libraries = []
    for name, schema in vllm_ops.SCHEMAS.items():
        space, op = name.split("::")
        library = torch.library.Library(space, "FRAGMENT")
        library.define(schema)
        library.impl(op, IMPLEMENTATIONS[name], "CompositeExplicitAutograd")
        libraries.append(library)
    yield VllmProvider(HOST)
    for library in libraries:
        library._destroy()


POINTS = [
    Point("attention_decode", {**HEADS, "batch_size": 3, "kv_len": 40}),
    Point("attention_prefill", {**HEADS, "batch_size": 2, "q_len": 9, "kv_len": 30}),
    Point("attention_prefill", {**HEADS, "batch_size": 1, "q_len": 600, "kv_len": 600}),
    Point("attention_decode", {**HEADS, "window": 17, "batch_size": 3, "kv_len": 70}),
    Point("attention_prefill", {**HEADS, "window": 8, "batch_size": 2, "q_len": 9, "kv_len": 90}),
    Point("attention_decode", {**HEADS, "kv_dtype": "fp8", "batch_size": 3, "kv_len": 70}),
    Point("attention_decode", {**HEADS, "kv_dtype": "fp8", "window": 17, "batch_size": 4, "kv_len": 40}),
    Point("mla_decode", {**MLA, "batch_size": 3, "kv_len": 70}),
    Point("mla_decode", {**MLA, "num_q_heads": 128, "batch_size": 1, "kv_len": 16}),
    *(
        Point("elementwise", {"kind": kind, "m": 9, "width": 512, "io_bytes": 1})
        for kind in ("rmsnorm_residual", "rope", "silu_and_mul", "kv_write", "fp8_quantise")
    ),
]


@pytest.mark.parametrize("point", POINTS, ids=lambda p: p.key[:50])
def test_every_call_binds_to_the_schema_and_gives_the_reference(provider, point):
    assert provider.reasons == {"fa3": "", "ops": ""}
    assert provider.refuses(point) is None
    prepared = provider.prepare(point, 2, 10**9)
    assert check_result(point, prepared).passed
    assert "vllm" in prepared.kernel


def test_splits_are_bounded_only_where_vllm_replays_graphs(provider):
    provider.prepare(POINTS[0], 0, 10**9)
    assert SEEN["num_splits"] == 32
    provider.prepare(POINTS[2], 0, 10**9)
    assert SEEN["num_splits"] == 0


def test_every_schema_is_called():
    assert set(IMPLEMENTATIONS) == set(vllm_ops.SCHEMAS)


def test_refusals(provider):
    fp8 = {**HEADS, "kv_dtype": "fp8", "batch_size": 1, "kv_len": 9}
    assert "computes in fp8" in provider.refuses(Point("attention_prefill", {**fp8, "q_len": 4}))
    assert "computes in int8" in provider.refuses(Point("attention_decode", {**fp8, "kv_dtype": "int8"}))
    mla = {**MLA, "batch_size": 1, "kv_len": 9}
    assert "no MLA over fp8 KV" in provider.refuses(Point("mla_decode", {**mla, "kv_dtype": "fp8"}))
    assert "not 256 and 64" in provider.refuses(Point("mla_decode", {**mla, "kv_lora_rank": 256}))
    assert "torch" in provider.refuses(Point("gemm", {"dtype": "bf16", "m": 1, "n": 16, "k": 16}))
    ampere = VllmProvider(Device("cuda", 0, (8, 0)))
    assert "Hopper" in ampere.reasons["fa3"]
