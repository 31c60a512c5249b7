"""Layers of hybrid, parallel and double models: what one GPU runs of them, against a reading by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fastroof.errors import ModelError, PlanError, UnsupportedModelError
from fastroof.models import Layout, ModelSpec, load_model
from fastroof.models.execution import Execution
from fastroof.models.linear_attention import ShortConvolution
from fastroof.operators.calls import AllReduce, AttentionCall, Elementwise, Experts, Gemm, MixerCall
from tests.models.test_families import CASES, calls_of
from tests.reference.checkpoints import H, V, config

LONGCAT: dict[str, Any] = config(
    "longcat_flash",
    num_hidden_layers=...,
    num_layers=2,
    intermediate_size=...,
    ffn_hidden_size=96,
    expert_ffn_hidden_size=32,
    num_key_value_heads=...,
    head_dim=...,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    zero_expert_num=4,
    moe_topk=6,
)
# of one latent attention: queries down, norm, up; keys and values down, norm, up; output; norm before it
LATENT = 24 * H + 24 + 8 * 24 * 24 + 40 * H + 32 + 8 * 32 * 32 + H * 128 + H


def shapes(calls: list[Any]) -> list[tuple[Any, ...]]:
    """Kernels as (kind, sizes): outputs and inputs of a GEMM, bytes per row of what streams."""
    found: list[tuple[Any, ...]] = []
    for call in calls:
        if isinstance(call, Gemm):
            found.append(("gemm", call.n, call.k))
        elif isinstance(call, Elementwise):
            found.append(("stream", call.times * call.row_bytes, call.steps))
        elif isinstance(call, AllReduce):
            found.append(("sum", call.row_bytes))
        elif isinstance(call, AttentionCall):
            found.append(("attention", call.num_q_heads, call.num_kv_heads, call.window))
        else:
            found.append((type(call).__name__,))
    return found


def test_mamba_runs_next_to_attention_on_one_norm() -> None:
    model = load_model(CASES["falcon_h1"][0])
    row = 2.0 * H
    every = "all"
    assert shapes(calls_of(model, "attention and mamba", 2)) == [
        ("stream", 4 * row, every),
        ("gemm", 64 + 2 * 16, H),
        ("stream", 2 * (4 + 1) * 16 * 2.0, every),
        ("stream", 2 * 16 * 4.0, every),
        ("attention", 4, 1, 0),
        ("gemm", H, 64),
        ("sum", row),
        # z, x, B, C and time steps of 4 heads of 16 and one group of 32 states
        ("gemm", 64 + 64 + 2 * 32 + 4, H),
        ("MixerCall",),
        ("MixerCall",),
        ("stream", 3 * 64 * 2.0, every),
        ("gemm", H, 64),
        ("sum", row),
        ("stream", 3 * row, every),
        ("stream", 4 * row, every),
        ("gemm", 96, H),
        ("stream", 3 * 48 * 2.0, every),
        ("gemm", H, 48),
        ("sum", row),
    ]
    whole = load_model(CASES["falcon_h1"][0])
    # three taps of x, B and C, and a state of 8 heads, in bf16; keys and values of 2 heads
    assert whole.state_bytes(Layout()) == 4 * 2 * (3 * 256 + 8 * 16 * 32)
    assert whole.kv_bytes_per_token(Layout(), "bf16") == 4 * 2 * 2 * 16 * 2
    (kind,) = whole.kinds
    assert kind.attention.heads_text == "8-2-16 + 8 SSM 16x32"
    with pytest.raises(PlanError, match="2 groups of heads of Mamba do not divide by 4"):
        whole.check_layout(Layout(4))


def test_a_short_convolution_streams_its_gates_and_taps() -> None:
    model = load_model(CASES["lfm2_moe"][0])
    row = 2.0 * H
    calls = calls_of(model, "dense convolution", 2)[:7]
    assert shapes(calls) == [
        ("stream", 4 * row, "all"),
        ("gemm", 3 * 32, H),
        ("stream", 2 * 3 * 32 * 2.0, "all"),
        # two taps are read and written, besides a row each
        ("stream", (2 + 2 * 2) * 32 * 2.0, "decode_only"),
        ("stream", 2 * 32 * 2.0, "with_prefill"),
        ("gemm", H, 32),
        ("sum", row),
    ]
    assert model.state_bytes(Layout()) == 2 * 2 * H * 2
    assert model.kv_bytes_per_token(Layout(), "bf16") == 2 * 2 * 2 * 16 * 2
    assert ShortConvolution(64).obstacles(Layout(3)) == ["a convolution's width of 64 does not divide by 3"]
    with pytest.raises(ModelError, match="taps"):
        ShortConvolution(64, 0)


def test_a_parallel_block_has_one_norm_and_one_sum() -> None:
    model = load_model(CASES["cohere2"][0])
    row = 2.0 * H
    for kind, window in (("dense windowed", 512), ("dense full", 0)):
        calls = shapes(calls_of(model, kind, 2))
        rope = [("stream", 2 * (4 + 1) * 16 * 2.0, "all")] if window else []
        assert calls == [
            ("stream", 4 * row, "all"),
            ("gemm", 64 + 2 * 16, H),
            *rope,
            ("stream", 2 * 16 * 4.0, "all"),
            ("attention", 4, 1, window),
            ("gemm", H, 64),
            ("gemm", 96, H),
            ("stream", 3 * 48 * 2.0, "all"),
            ("gemm", H, 48),
            ("stream", 3 * row, "all"),
            ("sum", row),
        ]


def test_a_layer_of_longcat_is_two_halves_and_experts() -> None:
    model = load_model(LONGCAT)
    assert [(group.kind.name, group.count) for group in model.layers] == [("dense", 4), ("experts", 2)]
    experts = 12 * H + 12 + 8 * 3 * 32 * H
    assert model.num_parameters == 2 * V * H + H + 4 * (LATENT + 3 * 96 * H + H) + 2 * experts
    # 4 of 6 picks go to the 8 of 12 experts that have weights
    assert model.num_parameters - model.active_parameters == 2 * 4 * 3 * 32 * H
    calls = calls_of(model, "experts", 1)
    assert shapes(calls) == [("stream", 5 * 2.0 * H, "all"), ("gemm", 12, H), ("Experts",)]
    (routed,) = (call for call in calls if isinstance(call, Experts))
    assert (routed.topk, routed.num_experts) == (4, 8)
    assert model.kv_bytes_per_token(Layout(), "bf16") == 4 * 40 * 2
    assert model.num_blocks == 5


def test_the_flash_of_glm_4_has_latent_attention() -> None:
    file = config(
        "glm4_moe_lite",
        **{key: LONGCAT[key] for key in LONGCAT if "lora" in key or key.endswith("head_dim")},
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    )
    model = load_model(file)
    assert [(group.kind.name, group.count) for group in model.layers] == [("dense", 1), ("moe", 3)]
    moe = 4 * H + 4 + H + 5 * 3 * 32 * H
    assert model.num_parameters == 2 * V * H + H + 4 * LATENT + 3 * 96 * H + H + 3 * moe


def test_the_encoder_of_qwen_2_5_attends_within_windows() -> None:
    encoder = load_model("qwen2.5-vl-7b").encoder
    (image,) = [encoder.pieces(1120, 560)]
    assert (image.patches, image.tokens) == (80 * 40, 40 * 20)
    # 28 of 32 layers attend within 8 x 8 patches
    assert encoder.attended(image) == [(4, 1, 3200), (28, 50, 64)]
    whole = load_model("qwen3-vl-8b").encoder
    assert whole.attended(image) == [(whole.num_layers, 1, 3200)]


def mixers(model: ModelSpec) -> int:
    return sum(
        isinstance(call, MixerCall) for kind in model.kinds for call in kind.calls(H, Layout(), Execution())
    )


def test_granite_rotates_only_if_its_config_does() -> None:
    file = CASES["granitemoehybrid"][0]
    for given, has_rope in (("nope", False), ("rope", True), (None, False)):
        model = load_model({**file, "position_embedding_type": given})
        assert any(call.name == "rope" for call in calls_of(model, "attention", 1)) == has_rope
        assert mixers(model) == 2


@pytest.mark.parametrize(
    ("file", "error", "complaint"),
    [
        (config("cohere", use_qk_norm=True), UnsupportedModelError, "use_qk_norm true has a norm"),
        (
            config("exaone4", sliding_window=512, sliding_window_pattern="LLXG"),
            ModelError,
            "sliding_window_pattern must be of L and G, got 'LLXG'",
        ),
        (config("lfm2"), ModelError, "field layer_types or full_attn_idxs is missing"),
        (
            config("lfm2", full_attn_idxs=[1], block_ffn_dim_multiplier="2"),
            ModelError,
            "block_ffn_dim_multiplier must be a number up to 256, got '2'",
        ),
        (
            config("lfm2_moe", layer_types=["mamba", *["conv"] * 3], num_experts=4, num_experts_per_tok=2,
                   moe_intermediate_size=32),
            ModelError,
            "layer_types has mamba: full_attention and conv are valid",
        ),
        (
            config("granitemoehybrid", shared_intermediate_size=48),
            ModelError,
            "field layer_types is missing",
        ),
        (
            config("granitemoehybrid", layer_types=["conv"] * 4, shared_intermediate_size=48),
            ModelError,
            "layer_types has conv: attention and mamba are valid",
        ),
        # layers that no Llama has
        (
            config("llama", layer_types=["conv", *["full_attention"] * 3]),
            UnsupportedModelError,
            "layer_types conv means short convolutions, which llama models do not have",
        ),
        (
            config("qwen2", vision_config={"depth": 2}),
            UnsupportedModelError,
            "it is multimodal .vision_config. without a text_config",
        ),
    ],
)  # fmt: skip
def test_what_these_families_do_not_take_is_named(
    file: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint) as caught:
        load_model(file)
    assert type(caught.value) is error
