"""Families: what their files mean, against every tensor of a small checkpoint written out by hand."""

# ruff: noqa: RUF005 - tensors of parts are added up, as the parts are

from __future__ import annotations

import math
from typing import Any

import pytest

from fastroof.errors import ModelError, PlanError, UnsupportedModelError
from fastroof.models import DenseModel, Layout, ModelSpec, load_model
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.execution import Execution
from fastroof.models.families.registry import FAMILIES, MODEL_TYPES
from fastroof.models.layers import LayerKind, NoAttention, NoMlp
from fastroof.models.linear_attention import Mamba2
from fastroof.models.spec import stages_of
from fastroof.operators.calls import AllReduce, AttentionCall, Call, Elementwise, Experts, Gemm, Parallel
from tests.reference import families
from tests.reference.checkpoints import (
    ATTENTION,
    DENSE,
    KV,
    QK_NORMS,
    Case,
    Config,
    H,
    Q,
    Shapes,
    V,
    config,
    moe,
)

# 8 heads of 16 and 32 states in 2 groups: projections, convolution with its bias, A, D, time steps, norms.
MAMBA: Shapes = [(2 * 128 + 2 * 64 + 8, H), (256, 4), (256,), (8,), (8,), (8,), (128,), (H, 128), (H,)]
NEMOTRON: Config = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48,
}
# Router with its correction and norm, experts of two projections over 24, projections to 24 and back.
LATENT: Shapes = [(4, H), (4,), (H,), *4 * [(32, 24), (24, 32)], (48, H), (H, 48), (24, H), (H, 24)]

# 2 heads of keys and 4 of values, of 16: projections to queries, keys, values and gate, and to decays and
# steps; convolution, decay's scale and bias, norm of the output, output, norm.
DELTA: Shapes = [(2 * 32 + 64 + 64, H), (2 * 4, H), (128, 4), (4,), (4,), (16,), (H, 64), (H,)]
LINEAR: Config = {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

# A file, its kinds of layers, and the tensors of all layers.
CASES: dict[str, Case] = {
    **families.cases(),
    "mixtral": (
        config("mixtral", num_local_experts=4, num_experts_per_tok=2),
        [("moe", 4)],
        4 * (ATTENTION + moe(4, 96)),
    ),
    "qwen2_moe": (
        config(
            "qwen2_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
        ),
        [("moe", 4)],
        4 * (ATTENTION + [(Q,), (KV,), (KV,)] + moe(4, 32, 48) + [(1, H)]),
    ),
    "qwen3_moe with dense layers": (
        config(
            "qwen3_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
        [("dense", 3), ("moe", 1)],
        4 * (ATTENTION + QK_NORMS) + 3 * DENSE + moe(4, 32),
    ),
    "gpt_oss": (
        config("gpt_oss", num_local_experts=4, num_experts_per_tok=2, head_dim=...),
        [("moe windowed", 2), ("moe full", 2)],
        4
        * (
            [(512, H), (128, H), (128, H), (H, 512), (H,), (512,), (128,), (128,), (H,), (8,)]
            + moe(4, 96)
            + [(4,)]
            + 4 * [(2 * 96,), (H,)]
        ),
    ),
    "minimax_m2": (
        config("minimax_m2", num_local_experts=4, num_experts_per_tok=2),
        [("moe", 4)],
        4 * (ATTENTION + [(Q,), (KV,)] + moe(4, 96) + [(4,)]),
    ),
    "llama4": (
        config(
            "llama4_text",
            num_local_experts=4,
            interleave_moe_layer_step=2,
            intermediate_size_mlp=128,
            attention_chunk_size=1024,
        ),
        [("dense chunked", 2), ("moe chunked", 1), ("moe full", 1)],
        4 * ATTENTION + 2 * [(128, H), (128, H), (H, 128), (H,)] + 2 * moe(4, 96, 96),
    ),
    "step3p5": (
        config(
            "step3p5",
            num_key_value_heads=...,
            num_attention_groups=2,
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=32,
            share_expert_dim=48,
            moe_layers_enum="1,2,3",
            use_moe_router_bias=True,
            use_head_wise_attn_gate=True,
            sliding_window=512,
            num_nextn_predict_layers=1,
            layer_types=["full_attention", *["sliding_attention"] * 3, "full_attention"],
            attention_other_setting={"num_attention_heads": 12, "head_dim": 16},
        ),
        [("dense full", 1), ("moe windowed", 3)],
        ATTENTION
        + QK_NORMS
        + [(8, H)]
        + DENSE
        + 3 * ([(192, H), (KV, H), (KV, H), (H, 192), (H,), (12, H)] + QK_NORMS + moe(4, 32, 48) + [(4,)]),
    ),
    "mimo_v2_flash": (
        config(
            "mimo_v2_flash",
            v_head_dim=8,
            swa_num_attention_heads=8,
            swa_num_key_value_heads=4,
            swa_head_dim=16,
            swa_v_head_dim=8,
            sliding_window=128,
            hybrid_layer_pattern=[0, 1, 1, 0],
            moe_layer_freq=[0, 1, 1, 1],
            add_swa_attention_sink_bias=True,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            topk_method="noaux_tc",
        ),
        [("dense full", 1), ("moe windowed", 2), ("moe full", 1)],
        2 * [(Q, H), (KV, H), (16, H), (H, 64), (H,)]
        + DENSE
        + 2 * [(Q, H), (64, H), (32, H), (H, 64), (H,), (8,)]
        + 3 * (moe(4, 32) + [(4,)]),
    ),
    "gemma": (config("gemma"), [("dense", 4)], 4 * (ATTENTION + DENSE)),
    "gemma2": (
        config("gemma2", sliding_window=512),
        [("dense windowed", 2), ("dense full", 2)],
        4 * (ATTENTION + DENSE + [(H,), (H,)]),
    ),
    "gemma3": (
        {
            "model_type": "gemma3",
            "text_config": config("gemma3_text", sliding_window=512, sliding_window_pattern=4),
        },
        [("dense windowed", 3), ("dense full", 1)],
        4 * (ATTENTION + QK_NORMS + DENSE + [(H,), (H,)]),
    ),
    "gemma4": (
        config(
            "gemma4_text",
            global_head_dim=32,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            num_hidden_layers=7,
        ),
        [("dense windowed", 5), ("dense full", 2)],
        5 * (ATTENTION + QK_NORMS)
        + 7 * (DENSE + [(H,), (H,)])
        + 2 * [(256, H), (32, H), (H, 256), (H,), (32,), (32,)],
    ),
    "gemma4 with experts": (
        config(
            "gemma4_text",
            enable_moe_block=True,
            num_experts=4,
            top_k_experts=2,
            moe_intermediate_size=32,
            layer_types=["sliding_attention"] * 4,
        ),
        [("moe", 4)],
        # the norm of moe() is that before the MLP; after attention, after either branch, before the
        # experts, after the sum; the router's scale and one an expert
        4 * (ATTENTION + QK_NORMS + moe(4, 32, 96) + 5 * [(H,)] + [(H,), (4,)]),
    ),
    "nemotron-nas": (
        config(
            "nemotron-nas",
            num_key_value_heads=None,
            intermediate_size=None,
            block_configs=[
                {"attention": {"n_heads_in_group": 4}, "ffn": {"ffn_mult": 6.0}},
                {"attention": {"no_op": True}, "ffn": {"ffn_mult": 0.1}},
                {"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}},
                {"attention": {"no_op": True}, "ffn": {"intermediate_size": 96}},
            ],
        ),
        [("2 KV heads + MLP 256", 1), ("MLP 256", 1), ("2 KV heads", 1), ("MLP 96", 1)],
        2 * ATTENTION + 2 * [(256, H), (256, H), (H, 256), (H,)] + DENSE,
    ),
    "nemotron_h": (
        config("nemotron_h", hybrid_override_pattern="M*-M", mamba_ssm_cache_dtype="float32", **NEMOTRON),
        [("mamba", 2), ("attention", 1), ("MLP", 1)],
        2 * MAMBA + ATTENTION + [(96, H), (H, 96), (H,)],
    ),
    "nemotron_h with experts": (
        config(
            "nemotron_h",
            layers_block_type=["mamba", "moe", "attention", "moe"],
            num_hidden_layers=...,
            moe_latent_size=24,
            **NEMOTRON,
        ),
        [("mamba", 1), ("experts", 2), ("attention", 1)],
        MAMBA + ATTENTION + 2 * LATENT,
    ),
    "phi3": (
        config("phi3", head_dim=..., num_key_value_heads=...),
        [("dense", 4)],
        4 * (4 * [(H, H)] + [(H,)] + DENSE),
    ),
    "qwen3_next": (
        config(
            "qwen3_next",
            full_attention_interval=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=48,
            **LINEAR,
        ),
        [("moe linear", 3), ("moe full", 1)],
        # a gate beside the queries, one weight of the shared expert
        3 * DELTA + ATTENTION + QK_NORMS + [(Q, H)] + 4 * (moe(4, 32, 48) + [(1, H)]),
    ),
    "qwen3_5": (
        {
            "model_type": "qwen3_5",
            "text_config": config(
                "qwen3_5_text",
                attn_output_gate=False,
                layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
                **LINEAR,
            ),
        },
        [("dense full", 2), ("dense linear", 2)],
        2 * DELTA + 2 * (ATTENTION + QK_NORMS) + 4 * DENSE,
    ),
    "qwen2 with windows": (
        config("qwen2", sliding_window=512, use_sliding_window=True, max_window_layers=1),
        [("dense full", 1), ("dense windowed", 3)],
        4 * (ATTENTION + [(Q,), (KV,), (KV,)] + DENSE),
    ),
}


# Families whose models have one matrix for embedding and head unless their file overrides it.
TIED = ("cohere", "ernie4_5", "gemma", "lfm2", "smollm3")


@pytest.mark.parametrize("name", CASES)
def test_a_family_has_the_layers_and_tensors_of_its_checkpoints(name: str) -> None:
    file, kinds, tensors = CASES[name]
    model = load_model(file)
    assert [(group.kind.name, group.count) for group in model.layers] == kinds
    embeddings = V * H * (1 if model.tie_embeddings else 2)
    assert model.num_parameters == embeddings + H + sum(math.prod(shape) for shape in tensors)
    assert model.tie_embeddings == name.startswith(TIED)


@pytest.mark.parametrize("name", CASES)
def test_shares_of_gpus_are_the_whole(name: str) -> None:
    model = load_model(CASES[name][0])
    one, two = (
        model.sum_layers(lambda k, t=tp: sum(k.linear_weights(H, Layout(t)).values())) for tp in (1, 2)
    )
    replicated = model.sum_layers(
        lambda k: (
            0
            if not isinstance(k.attention, GroupedQueryAttention) or k.attention.num_kv_heads % 2 == 0
            else k.attention.num_kv_heads * k.attention.head_dim * (1 + k.attention.has_values) * H
        )
    )
    latent = model.sum_layers(lambda k: 2 * H * getattr(k.mlp, "latent", 0))
    # a single group of heads has its B and C on every GPU
    single = model.sum_layers(lambda k: 2 * H * single_group_states(k.attention))
    assert 2 * two == one + replicated + latent + single
    assert model.kv_bytes_per_token(Layout(2), "bf16") * 2 >= model.kv_bytes_per_token(Layout(), "bf16")


def single_group_states(attention: object) -> int:
    return attention.state_dim if isinstance(attention, Mamba2) and attention.num_groups == 1 else 0


# Roles of small linear layers that no checkpoint quantises.
APART = ("router", "shared_gate", "attention_gate", "state_gate")


@pytest.mark.parametrize("name", CASES)
def test_gemms_are_the_linear_layers(name: str) -> None:
    for kind in load_model(CASES[name][0]).kinds:
        found: dict[str, int] = {}
        for call in flat(kind.calls(H, Layout(2), Execution())):
            if isinstance(call, Gemm) and call.role not in APART:
                found[call.role] = found.get(call.role, 0) + call.n * call.k * call.times
            elif isinstance(call, Experts):
                gemms = 3 if call.is_gated else 2
                found["experts"] = call.num_experts * gemms * call.hidden * call.intermediate // call.moe_tp
        assert found == kind.linear_weights(H, Layout(2))


def flat(calls: tuple[Call, ...]) -> list[Call]:
    found: list[Call] = []
    for call in calls:
        found += [c for path in call.paths for c in path] if isinstance(call, Parallel) else [call]
    return found


def calls_of(model: ModelSpec, kind: str, tp: int, **execution: Any) -> list[Call]:
    (found,) = (k for k in model.kinds if k.name == kind)
    return flat(found.calls(model.hidden, Layout(tp), Execution(**execution)))


def role(call: Call) -> str:
    """The role of what is no attention and no set of paths."""
    return "" if isinstance(call, AttentionCall | Parallel) else call.role


def named(calls: list[Call], name: str) -> list[Any]:
    return [call for call in calls if call.name == name]


def test_a_norm_over_all_heads_is_an_all_reduce_of_its_sums_where_gpus_share_them() -> None:
    model = load_model(CASES["minimax_m2"][0])
    alone, shared = (calls_of(model, "moe", tp) for tp in (1, 2))
    assert not [call for call in alone if role(call) == "qk_norm_allreduce"]
    assert [call.times for call in alone if role(call) == "qk_norm"] == [1]
    (reduced,) = (
        call for call in shared if isinstance(call, AllReduce) and role(call) == "qk_norm_allreduce"
    )
    fused = calls_of(model, "moe", 2, fused_norm_tokens=2048)
    norms = [call for call in fused if isinstance(call, Elementwise) and role(call) == "qk_norm"]
    assert [(call.times, call.beyond) for call in norms] == [(1, 2048), (1, 2048)]
    plain = [call for call in shared if isinstance(call, Elementwise) and role(call) == "qk_norm"]
    assert [call.row_bytes for call in norms] == [2.0 * call.row_bytes for call in plain]
    assert reduced in fused
    # a float32 of queries and one of keys
    assert (reduced.num_gpus, reduced.row_bytes, reduced.times) == (2, 8.0, 1)
    assert [call.times for call in shared if role(call) == "qk_norm"] == [2, 2]
    # squares read queries and keys once and write a float32 each; the norm reads and writes them
    qk_bytes = (4 + 1) * 16 * 2
    streamed = [c.times * c.row_bytes for c in shared if isinstance(c, Elementwise) and role(c) == "qk_norm"]
    assert streamed == [qk_bytes + 8, 2 * qk_bytes]
    assert named(calls_of(load_model(config("qwen3")), "dense", 2), "qk norm all-reduce") == []


def test_layers_without_position_have_neither_rotation_nor_norm() -> None:
    model = load_model(CASES["llama4"][0])
    chunked, full = (calls_of(model, kind, 1) for kind in ("moe chunked", "moe full"))
    assert [role(call) for call in chunked if role(call) in ("qk_norm", "rope")] == ["qk_norm", "rope"]
    assert not [call for call in full if role(call) in ("qk_norm", "rope")]
    windows = [
        [call.window for call in calls if isinstance(call, AttentionCall)] for calls in (chunked, full)
    ]
    assert windows == [[1024], [0]]
    assert [kind.attention.is_chunked for kind in model.kinds] == [True, True, False]  # type: ignore[attr-defined]


def test_a_chunk_that_covers_the_longest_context_is_ignored() -> None:
    model = load_model(config("llama4_text", num_local_experts=4, max_position_embeddings=8192))
    assert model.window is None
    assert [(kind.name, kind.attention.is_chunked) for kind in model.kinds] == [("moe", False)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(("length", "window"), [(None, None), (16, 16), (4095, 4095), (4096, None)])
def test_a_searched_window_that_covers_the_longest_context_is_ignored(
    length: int | None, window: int | None
) -> None:
    attention = {"n_heads_in_group": 4, "window_length": length}
    blocks = [{"attention": attention, "ffn": {"ffn_mult": 1}}] * 4
    model = load_model(config("nemotron-nas", block_configs=blocks, max_position_embeddings=4096))
    assert model.window == window


def test_windowed_layers_have_heads_and_a_gate_of_their_own() -> None:
    model = load_model(CASES["step3p5"][0])
    for kind, heads, window in (("dense full", 8, 0), ("moe windowed", 12, 512)):
        calls = calls_of(model, kind, 2)
        (call,) = (c for c in calls if isinstance(c, AttentionCall))
        assert (call.num_q_heads, call.num_kv_heads, call.window) == (heads // 2, 1, window)
        gate, gated = (c for c in calls if role(c) == "attention_gate")
        assert isinstance(gate, Gemm)
        assert (gate.n, gate.k, gate.dtype) == (heads // 2, H, "bf16")
        assert isinstance(gated, Elementwise)
        assert gated.row_bytes == 2 * heads // 2 * 16 * 2


def test_values_may_be_narrower_than_keys() -> None:
    model = load_model(CASES["mimo_v2_flash"][0])
    full, windowed = calls_of(model, "moe full", 1), calls_of(model, "moe windowed", 1)
    for calls, kv_heads in ((full, 2), (windowed, 4)):
        (qkv,), (o,), (write,) = (named(calls, name) for name in ("qkv", "o", "kv write"))
        assert (qkv.n, o.k) == (Q + kv_heads * (16 + 8), 8 * 8)
        assert write.row_bytes == kv_heads * (16 + 8) * (2 + 2)
    assert model.kv_bytes_per_token(Layout(), "fp8") == 2 * 2 * 24 + 2 * 4 * 24


def test_keys_that_are_the_values_are_cached_twice_and_projected_once() -> None:
    model = load_model(CASES["gemma4"][0])
    (qkv,), (write,) = (named(calls_of(model, "dense full", 1), name) for name in ("qkv", "kv write"))
    assert qkv.n == 8 * 32 + 32
    assert write.row_bytes == 2 * 32 * (2 + 2)
    assert len(named(calls_of(model, "dense windowed", 1), "v rmsnorm")) == 1


def test_experts_parallel_to_an_mlp_are_summed_up_apart() -> None:
    model = load_model(CASES["gemma4 with experts"][0])
    for tp, reduced in ((1, 0), (2, 2)):
        for overlaps in (False, True):
            every = calls_of(model, "moe", tp, shared_beside=overlaps)
            # calls that overlap in decode steps run one after the other in those with prefill
            calls = [call for call in every if getattr(call, "steps", "all") != "with_prefill"]
            assert sum(role(call) == "mlp_allreduce" for call in calls) == reduced
            norms = [call for call in calls if role(call) == "mlp_norm"]
            assert sum(call.row_bytes for call in norms) == (4 + 4 * 2 + 3) * H * 2  # type: ignore[union-attr]
    (kind,) = model.kinds
    (parallel,) = (
        c for c in kind.calls(H, Layout(2), Execution(shared_beside=True)) if isinstance(c, Parallel)
    )
    # each path ends with its sum over GPUs and its norm
    assert all([role(call) for call in path][-2:] == ["mlp_allreduce", "mlp_norm"] for path in parallel.paths)


def test_norms_after_a_block_follow_its_sum_over_gpus() -> None:
    calls = calls_of(load_model(CASES["gemma2"][0]), "dense full", 2)
    names = [call.name for call in calls]
    for reduced, norm in (
        ("attention all-reduce", "post-attention rmsnorm"),
        ("mlp all-reduce", "post-mlp rmsnorm"),
    ):
        assert names.index(norm) == names.index(reduced) + 1


def test_a_layer_may_be_without_attention_or_mlp() -> None:
    model = load_model(CASES["nemotron-nas"][0])
    without = [kind for kind in model.kinds if isinstance(kind.attention, NoAttention)]
    assert [kind.name for kind in without] == ["MLP 256", "MLP 96"]
    for kind in without:
        assert not [call for call in kind.calls(H, Layout(), Execution()) if isinstance(call, AttentionCall)]
        assert kind.kv_bytes_per_token(Layout(), "bf16") == 0
    # what attends nowhere is no model: neither a file nor a pipeline stage
    no_attention = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1}}
    with pytest.raises(ModelError, match="none of 4 layers has attention"):
        load_model(config("nemotron-nas", block_configs=[no_attention] * 4))
    with pytest.raises(ModelError, match="fewer pipeline stages"):
        stages_of(model, 4)[1].model(model)
    nothing = LayerKind(NoAttention(), NoMlp(), "nothing")
    assert nothing.calls(H, Layout(), Execution()) == ()
    assert nothing.num_parameters(H) == nothing.activation_width(H, Layout()) == 0


def test_what_gpus_cannot_share_is_named_for_every_kind() -> None:
    with pytest.raises(PlanError, match="12 query heads do not divide by 8"):
        load_model(CASES["step3p5"][0]).check_layout(Layout(8))


def test_wrappers_load_as_their_text_model() -> None:
    text = config("qwen3", tie_word_embeddings=...)
    vision = {"depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 96, "patch_size": 16}
    wrapper = {
        "model_type": "qwen3_vl",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
    }
    model = load_model(wrapper)
    assert (model.architecture, model.tie_embeddings) == ("Qwen3VLForConditionalGeneration", True)
    assert model.layers == load_model(text).layers
    assert model.vision is not None
    assert (model.vision.num_layers, model.vision.num_heads, model.vision.head_dim) == (3, 4, 12)
    assert load_model(text).vision is None
    # one that no family has is known by its text model
    other = load_model({**wrapper, "model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]})
    assert (other.architecture, other.layers) == ("LlavaForConditionalGeneration", model.layers)
    with pytest.raises(UnsupportedModelError, match="model_type 'llava' is not supported"):
        load_model({**wrapper, "model_type": "llava", "text_config": {**text, "model_type": "gpt2"}})


@pytest.mark.parametrize(
    ("file", "more"),
    [
        (config("gemma2", layer_types=["full_attention"] * 4), "post_norm"),
        (config("minimax_m2", num_local_experts=4, num_experts_per_tok=2), "not a dense transformer"),
        (
            config(
                "nemotron-nas",
                block_configs=[{"attention": {"n_heads_in_group": 4}, "ffn": {"no_op": True}}] * 4,
            ),
            "not a dense transformer",
        ),
    ],
)
def test_a_dense_models_sizes_leave_nothing_out(file: Config, more: str) -> None:
    with pytest.raises(ModelError, match=more):
        DenseModel.of(load_model(file))
    assert DenseModel.of(load_model(config("phi3"))).spec().layers == load_model(config("phi3")).layers


def test_every_model_type_is_of_one_family() -> None:
    listed = [model_type for family in FAMILIES for model_type in family.classes]
    assert sorted(listed) == list(MODEL_TYPES)
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize(
    ("file", "error", "complaint"),
    [
        (
            config("minimax_m2", num_local_experts=4, num_experts_per_tok=2, attn_type_list=[1, 0, 1, 1]),
            UnsupportedModelError,
            "attn_type_list has 0: it needs a linear attention operator",
        ),
        (
            config("gemma4_text", num_kv_shared_layers=2),
            UnsupportedModelError,
            "layers that share other layers' KV cache",
        ),
        (
            config("gemma4_text", hidden_size_per_layer_input=8),
            UnsupportedModelError,
            "embeddings of each layer",
        ),
        (
            config(
                "nemotron-nas", block_configs=[{"attention": {"replace_with_linear": True}, "ffn": {}}] * 4
            ),
            UnsupportedModelError,
            r"block_configs\[0\], attention: replace_with_linear",
        ),
        (config("nemotron-nas", block_configs=[{"attention": {}}] * 4), ModelError, "field ffn is missing"),
        (
            config(
                "nemotron-nas", block_configs=[{"attention": {"no_op": True}, "ffn": {"ffn_mult": "2"}}] * 4
            ),
            ModelError,
            "field ffn_mult must be a number up to 1024, got '2'",
        ),
        (
            config("nemotron-nas", block_configs=[{"attention": {"n_heads_in_group": 3}, "ffn": {}}] * 4),
            ModelError,
            "num_attention_heads 8 does not divide by n_heads_in_group 3",
        ),
        (config("nemotron-nas", block_configs=[]), ModelError, "block_configs has 0 layers"),
        (config("nemotron-nas"), ModelError, "field block_configs is missing"),
        (
            config("mixtral", num_local_experts=4, num_experts_per_tok=8),
            ModelError,
            "model config: a token cannot be routed to 8 of 4 experts",
        ),
        (
            config("nemotron_h", hybrid_override_pattern="MXE*", **NEMOTRON),
            ModelError,
            r"hybrid_override_pattern has 'X': valid layers are M, \*, -, E",
        ),
        (
            config("nemotron_h", hybrid_override_pattern="ME*", **NEMOTRON),
            ModelError,
            "hybrid_override_pattern has 3 layers, num_hidden_layers is 4",
        ),
        (
            config("nemotron_h", layers_block_type=["mamba", "rnn", "moe", "moe"], **NEMOTRON),
            ModelError,
            "layers_block_type has 'rnn': valid layers are mamba, attention, mlp, moe",
        ),
        (
            config("nemotron_h", **NEMOTRON),
            ModelError,
            "hybrid_override_pattern or layers_block_type is missing",
        ),
        (
            config("nemotron_h", hybrid_override_pattern="MMMM", **NEMOTRON | {"n_groups": 3}),
            ModelError,
            "model config: 8 heads do not divide into 3 groups",
        ),
        (
            config("nemotron_h", hybrid_override_pattern="MMMM", mamba_ssm_cache_dtype="int8", **NEMOTRON),
            ModelError,
            "unknown state dtype 'int8'; valid: float32, float16, bfloat16",
        ),
        (config("mixtral", num_experts_per_tok=2), ModelError, "field num_local_experts is missing"),
        (config("mimo_v2_flash", v_head_dim=8), ModelError, "field sliding_window_size is missing"),
        (
            config(
                "step3p5",
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=32,
                moe_layers_enum="1;2",
            ),
            ModelError,
            "moe_layers_enum must list layers, got '1;2'",
        ),
        (config("qwen3", num_hidden_layers=4097), ModelError, "field num_hidden_layers must be a whole"),
        (config("qwen3", layer_types=["chunked_attention"] * 4), ModelError, "layer_types has chunked"),
        ({"model_type": "qwen3_vl", "text_config": 7}, ModelError, "field text_config must be an object"),
    ],
)
def test_what_a_family_does_not_take_is_named(file: Config, error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint) as caught:
        load_model(file)
    assert type(caught.value) is error
