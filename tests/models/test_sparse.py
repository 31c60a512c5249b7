"""Sparse attention with an indexer: what files mean, against tensors written out, and what a layer runs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fastroof.errors import ModelError, PlanError, UnsupportedModelError
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Execution
from fastroof.models.sparse import BlockSparseAttention, SparseLatentAttention
from fastroof.operators.calls import AllReduce, AttentionCall, Call, MixerCall
from fastroof.operators.sparse_attention import DsaDecode

Config = dict[str, Any]
Shapes = list[tuple[int, ...]]

H, V, WIDTH, EXPERTS = 6144, 512, 2048, 4
GLM: Config = {
    "model_type": "glm_moe_dsa",
    "hidden_size": H,
    "intermediate_size": 12288,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "first_k_dense_replace": 3,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "vocab_size": V,
    "max_position_embeddings": 8192,
}
M3: Config = {
    "model_type": "minimax_m3",
    "hidden_size": H,
    "intermediate_size": WIDTH,
    "dense_intermediate_size": 4096,
    "shared_intermediate_size": WIDTH,
    "num_hidden_layers": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_layer_freq": [0, 1, 1],
    "sparse_attention_config": {
        "use_sparse_attention": True,
        "sparse_num_index_heads": 4,
        "sparse_index_dim": 128,
        "sparse_topk_blocks": 16,
        "sparse_block_size": 128,
        "sparse_attention_freq": [0, 1, 1],
    },
    "vocab_size": V,
    "max_position_embeddings": 8192,
}

# q_a, kv_a, their norms, q_b, kv_b, o, the layer's norm
LATENT: Shapes = [
    (2048, H),
    (576, H),
    (2048,),
    (512,),
    (64 * 256, 2048),
    (64 * (192 + 256), 512),
    (H, 64 * 256),
    (H,),
]
# wq_b, wk, weights_proj, k_norm and its bias
INDEXER: Shapes = [(32 * 128, 2048), (128, H), (32, H), (128,), (128,)]
GROUPED: Shapes = [(8192, H), (512, H), (512, H), (H, 8192), (128,), (128,), (H,)]
# index_q, index_k and their norms
BLOCK_INDEX: Shapes = [(512, H), (128, H), (128,), (128,)]


def glm(**more: Any) -> ModelSpec:
    return load_model({**GLM, **more})


def m3(**more: Any) -> ModelSpec:
    return load_model({**M3, **more})


def mlp(width: int) -> Shapes:
    return [(width, H), (width, H), (H, width)]


def moe() -> Shapes:
    """Router and its correction, the norm, experts and a shared one."""
    return [(EXPERTS, H), (EXPERTS,), (H,), *(EXPERTS + 1) * mlp(WIDTH)]


def weights(*parts: Shapes) -> int:
    return sum(math.prod(shape) for part in parts for shape in part)


def kinds(model: ModelSpec) -> list[tuple[str, int]]:
    return [(group.kind.name, group.count) for group in model.layers]


def calls_of(model: ModelSpec, kind: str, layout: Layout, **execution: Any) -> tuple[Call, ...]:
    (found,) = (k for k in model.kinds if k.name == kind)
    return found.attention.calls(model.hidden, layout, Execution(**execution))


def test_weights_are_those_of_the_tensors() -> None:
    ends: Shapes = [(V, H), (V, H), (H,)]
    model = glm(index_topk_freq=4, index_skip_topk_offset=3)
    assert kinds(model) == [("dense", 3), ("moe shared index", 4), ("moe", 1)]
    dense: Shapes = [*mlp(12288), (H,)]
    own = weights(ends, 8 * LATENT, 4 * INDEXER, 3 * dense, 5 * moe())
    assert model.num_parameters == own
    model = m3()
    assert kinds(model) == [("dense full", 1), ("moe sparse", 2)]
    dense = [*mlp(4096), (H,)]
    assert model.num_parameters == weights(ends, 3 * GROUPED, 2 * BLOCK_INDEX, dense, 2 * moe())


def test_weights_of_one_gpu_keep_what_every_gpu_has_whole() -> None:
    (dense, _), half = glm().kinds, Layout(2)
    whole, split = (dense.attention.linear_weights(H, layout) for layout in (Layout(), half))
    assert {role: whole[role] // split[role] for role in whole} == {
        "q_down": 1,
        "q_up": 2,
        "kv_up": 2,
        "o": 2,
        "index": 1,
    }
    sparse = m3().kinds[1].attention
    # 4 index heads on 8 GPUs are one each, and the one key is on all
    assert sparse.linear_weights(H, Layout(8))["index"] == H * 2 * 128


def test_layers_that_share_an_index_are_named_by_lists_letters_or_a_period() -> None:
    shared = "moe shared index"
    types = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
    expected = [("dense", 3), (shared, 4), ("moe", 1)]
    assert kinds(glm(indexer_types=types)) == expected
    assert kinds(glm(index_topk_pattern="FFFSSSFS", index_topk_freq=1)) == expected
    assert kinds(glm(index_topk_freq=4, index_skip_topk_offset=3)) == expected
    # without an offset the period starts at the second layer
    assert kinds(glm(index_topk_freq=4)) == [("dense", 2), ("dense shared index", 1), (shared, 4), ("moe", 1)]
    assert kinds(glm()) == [("dense", 3), ("moe", 5)]
    for wrong in ({"indexer_types": ["shared"] * 8}, {"indexer_types": ["some"] * 8}):
        with pytest.raises(ModelError, match="indexer_types"):
            glm(**wrong)
    with pytest.raises(ModelError, match="index_topk_pattern has 3 layers"):
        glm(index_topk_pattern="FSS")


def test_dense_layers_are_named_by_a_list_or_a_count() -> None:
    listed = ["dense", "sparse", *["dense"] * 2, *["sparse"] * 4]
    assert kinds(glm(mlp_layer_types=listed)) == [("dense", 3), ("moe", 5)]
    assert kinds(glm(moe_layer_freq=2)) == [("dense", 6), ("moe", 2)]
    with pytest.raises(ModelError, match="mlp_layer_types has odd"):
        glm(mlp_layer_types=["odd"] * 8)
    with pytest.raises(ModelError, match="moe_router_dtype must be float32 or bfloat16"):
        glm(moe_router_dtype="float64")
    assert glm(moe_router_dtype="float32") == glm()


def test_a_layer_runs_one_block_between_its_norm_and_its_sum() -> None:
    model = glm(index_topk_freq=4, index_skip_topk_offset=3)
    for kind, name in (("moe", "glm-5"), ("moe shared index", "glm-5-shared-index")):
        norm, block, added = calls_of(model, kind, Layout(8), kv_dtype="fp8")
        assert (norm.name, norm.row_bytes) == ("attention rmsnorm", 4 * 2 * H)
        assert isinstance(block, MixerCall)
        assert isinstance(added, AllReduce)
        key = ("bf16", "fp8", "bf16", name, 8)
        assert (block.decode, block.prefill) == (("dsa_decode", key), ("dsa_prefill", key))
        assert (block.window, block.kv_dtype, block.times) == (2048, "fp8", 1)
    model = m3()
    _, block, _ = calls_of(model, "moe sparse", Layout(8))
    assert isinstance(block, MixerCall)
    assert block.decode == ("msa_decode", ("bf16", "bf16", "bf16", "minimax-m3", 8))
    assert block.window == 16 * 128
    (full,) = (c for c in calls_of(model, "dense full", Layout(8)) if isinstance(c, AttentionCall))
    assert (full.num_q_heads, full.num_kv_heads, full.window) == (8, 1, 0)


def test_a_block_of_several_formats_is_timed_in_the_one_of_most_weights() -> None:
    attention = load_model("deepseek-v3.2").kinds[0].attention

    def dtype(*formats: tuple[str, str]) -> str:
        (block,) = (
            c for c in attention.calls(7168, Layout(), Execution(formats=formats)) if isinstance(c, MixerCall)
        )
        assert block.decode is not None
        return str(block.decode.key[0])

    # of 201 million weights the output projection has 117, q_b 38, kv_b 17
    assert dtype(("o", "nvfp4")) == "nvfp4"
    assert dtype(("q_up", "nvfp4"), ("kv_up", "nvfp4")) == "bf16"
    stored = {"deepseek-v3.2-nvfp4": "nvfp4", "glm-5-nvfp4": "bf16", "glm-5-fp8": "fp8_block"}
    for preset, expected in stored.items():
        model = load_model(preset)
        calls = model.kinds[-1].calls(model.hidden, Layout(), Execution(formats=()))
        (block,) = (call for call in calls if isinstance(call, MixerCall))
        assert block.decode is not None
        assert block.decode.key[0] == expected


def test_the_cache_is_a_vector_and_an_index_key_on_every_gpu() -> None:
    model = glm(index_topk_freq=4, index_skip_topk_offset=3)
    for layout in (Layout(), Layout(8)):
        # 8 latent vectors, and 4 keys of 128 fp8 with a float32
        assert model.kv_bytes_per_token(layout, "bf16") == 8 * 1152 + 4 * 132
        assert model.kv_bytes_per_token(layout, "fp8") == 8 * 576 + 4 * 132
    assert model.window is None
    assert m3().kv_bytes_per_token(Layout(), "fp8") == 3 * 2 * 4 * 128 + 2 * 256
    assert m3().kv_bytes_per_token(Layout(8), "fp8") == 3 * 2 * 128 + 2 * 256


def test_widths_that_were_not_measured_are_refused_where_the_file_is_read() -> None:
    with pytest.raises(ModelError, match=r"no block of sparse .* deepseek-v3.2, glm-5"):
        glm(q_lora_rank=1024)
    sparse = {**M3["sparse_attention_config"], "sparse_topk_blocks": 8}
    with pytest.raises(UnsupportedModelError, match="MiniMax-M3's widths only"):
        m3(sparse_attention_config=sparse)
    with pytest.raises(ModelError, match="moe_layer_freq is missing"):
        m3(moe_layer_freq=None)


def test_sparse_attention_may_be_off_in_its_file() -> None:
    config: Config = M3["sparse_attention_config"]
    unsaid = {name: value for name, value in config.items() if name != "use_sparse_attention"}
    assert m3(sparse_attention_config=unsaid) == m3()
    assert kinds(m3()) == [("dense full", 1), ("moe sparse", 2)]
    model = m3(sparse_attention_config=config | {"use_sparse_attention": False})
    assert kinds(model) == [("dense full", 1), ("moe full", 2)]
    assert all(isinstance(kind.attention, GroupedQueryAttention) for kind in model.kinds)


def test_heads_divide_by_the_gpus() -> None:
    with pytest.raises(PlanError, match="tp must be one of"):
        glm().check_layout(Layout(3))
    odd = SparseLatentAttention(36, 2048, 512, 192, 64, 256, 32, 128, 2048)
    assert odd.obstacles(Layout(8)) == ["36 query heads do not divide by 8"]
    blocks = BlockSparseAttention(36, 6, 128, 6, 128, 16, 128)
    assert blocks.obstacles(Layout(4)) == ["6 KV heads neither divide by 4 nor can be replicated evenly"]
    assert len(blocks.obstacles(Layout(8))) == 2
    with pytest.raises(ModelError, match="36 query heads do not divide by 5 KV heads"):
        BlockSparseAttention(36, 5, 128, 5, 128, 16, 128)


def test_an_index_of_pooled_keys_scores_and_caches_a_fraction() -> None:
    model = load_model("glm-5.3-flash")
    (kind,) = (kind for kind in model.kinds if kind.name == "moe sparse")
    attention = kind.attention
    assert isinstance(attention, SparseLatentAttention)
    assert (attention.index_pool, attention.rope_dim, attention.module(model.hidden)) == (
        4,
        0,
        "glm-5.3-flash",
    )
    # a latent vector of 512, and a key of 128 with its scale per 4 tokens
    assert attention.kv_bytes_per_token(Layout(8), "fp8") == 512 + 132 / 4
    (call,) = (
        call for call in kind.calls(model.hidden, Layout(8), Execution()) if isinstance(call, MixerCall)
    )
    assert call.decode == ("dsa_decode", ("bf16", "bf16", "bf16", "glm-5.3-flash", 8))
    # one score per query and pool of tokens
    columns = {
        "dtype": np.array(["bf16"]), "kv_dtype": np.array(["bf16"]), "attn_dtype": np.array(["bf16"]),
        "num_heads": np.array([8.0]), "batch_size": np.array([64.0]), "kv_len": np.array([4096.0]),
    }  # fmt: skip
    flops = DsaDecode().parts({**columns, "model": np.array(["glm-5.3-flash"])})
    assert flops[-2].flops == 2 * 32 * 128 * 64 * 4096 / 4
    whole = DsaDecode().parts({**columns, "model": np.array(["glm-5"])})
    assert whole[-2].flops == 2 * 32 * 128 * 64 * 4096
