"""Latent attention: what one GPU runs of it, weighs and keeps; the models that have it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fastroof.errors import ModelError, PlanError
from fastroof.models import Layout, load_model
from fastroof.models.execution import Execution
from fastroof.models.latent import LatentAttention
from fastroof.models.mtp import mtp_model
from fastroof.models.named import preset_config
from fastroof.operators.calls import AllReduce, Elementwise, Gemm, LatentProduct, MixerCall

HIDDEN = 7168
V3 = LatentAttention(128, 512, 128, 64, 128, 1536)
KIMI = replace(V3, num_heads=64)
FP8 = Execution("fp8_block", "fp8")


def config(**changed: Any) -> dict[str, Any]:
    """A config.json of DeepSeek-V3 with some fields changed; ``...`` takes one away."""
    merged = {**preset_config("deepseek-v3"), **changed}
    return {key: value for key, value in merged.items() if value is not ...}


def gemms(attention: LatentAttention, tp: int, execution: Execution = FP8) -> dict[str, tuple[int, int, str]]:
    calls = attention.calls(HIDDEN, Layout(tp), execution)
    return {c.role: (c.n, c.k, c.steps) for c in calls if isinstance(c, Gemm)}


def mixer(attention: LatentAttention, tp: int, execution: Execution = FP8, hidden: int = HIDDEN) -> MixerCall:
    (call,) = (c for c in attention.calls(hidden, Layout(tp), execution) if isinstance(c, MixerCall))
    return call


def test_projections_to_latent_vectors_are_whole_on_every_gpu() -> None:
    assert gemms(V3, 1) == {
        "q_down": (1536 + 512 + 64, 7168, "all"),
        "q_up": (128 * (128 + 64), 1536, "all"),
        "kv_up": (128 * (128 + 128), 512, "with_prefill"),
        "o": (7168, 128 * 128, "all"),
    }
    eight = gemms(V3, 8)
    assert eight["q_down"] == gemms(V3, 1)["q_down"]
    assert eight["q_up"][0] * 8 == gemms(V3, 1)["q_up"][0]
    assert eight["kv_up"][0] * 8 == gemms(V3, 1)["kv_up"][0]
    assert eight["o"][1] * 8 == gemms(V3, 1)["o"][1]


def test_weights_are_those_of_the_gemms() -> None:
    for attention in (V3, KIMI, replace(V3, q_lora_rank=None)):
        for tp in (1, 8):
            weights = attention.linear_weights(HIDDEN, Layout(tp))
            assert weights == {role: n * k for role, (n, k, _) in gemms(attention, tp).items()}


def test_without_latent_queries_one_projection_makes_them() -> None:
    plain = gemms(replace(V3, q_lora_rank=None), 8)
    assert plain["q_down"][:2] == (512 + 64, HIDDEN)
    assert plain["q_up"][:2] == (16 * 192, HIDDEN)


def test_decodes_absorb_and_prompts_expand() -> None:
    calls = V3.calls(HIDDEN, Layout(8), FP8)
    products = [c for c in calls if isinstance(c, LatentProduct)]
    assert [(c.part, c.num_heads, c.head_dim, c.kv_lora_rank, c.steps) for c in products] == [
        ("pre", 16, 128, 512, "decode_only"),
        ("post", 16, 128, 512, "decode_only"),
    ]
    order = [c.name for c in calls]
    assert (
        order.index("absorbed product pre") < order.index("attention") < order.index("absorbed product post")
    )
    assert order[-2:] == ["o", "attention all-reduce"]


@pytest.mark.parametrize(
    ("attention", "tp", "heads"), [(V3, 8, 16), (KIMI, 8, 8), (KIMI, 4, 16), (V3, 1, 128)]
)
def test_kernels_are_named_by_the_heads_of_one_gpu(attention: LatentAttention, tp: int, heads: int) -> None:
    parts = mixer(attention, tp)
    assert parts.decode == ("mla_decode", ("fp8", heads, 512, 64))
    assert parts.prefill == ("mla_prefill", ("bf16", "fp8", heads, 128, 64))
    whole = mixer(attention, tp, FP8._replace(whole_blocks=("fp8_block",)))
    key = ("fp8_block", "fp8", "bf16", "deepseek-v3", heads)
    assert (whole.decode, whole.prefill) == (("mla_module_decode", key), ("mla_module_prefill", key))


def test_a_whole_block_has_everything_but_the_norm_before_it_and_the_sum_after_it() -> None:
    calls = V3.calls(HIDDEN, Layout(8), FP8._replace(whole_blocks=("bf16", "fp8_block")))
    assert [type(c) for c in calls] == [Elementwise, MixerCall, AllReduce]


@pytest.mark.parametrize(
    ("attention", "execution", "hidden"),
    [
        (V3, FP8._replace(whole_blocks=("bf16",)), HIDDEN),
        # widths that no module was measured for
        (V3, FP8._replace(whole_blocks=("fp8_block",)), 5120),
        (replace(V3, v_dim=256), FP8._replace(whole_blocks=("fp8_block",)), HIDDEN),
        (replace(V3, q_lora_rank=None), FP8._replace(whole_blocks=("fp8_block",)), HIDDEN),
        # DeepSeek-V3.1-NVFP4: the output projection alone is quantised
        (V3, Execution("nvfp4", formats=(("o", "nvfp4"),), whole_blocks=("bf16", "nvfp4")), HIDDEN),
    ],
)
def test_else_it_runs_by_parts(attention: LatentAttention, execution: Execution, hidden: int) -> None:
    assert mixer(attention, 8, execution, hidden).decode.operator == "mla_decode"  # type: ignore[union-attr]


def test_projections_have_the_formats_of_the_checkpoint() -> None:
    model = load_model("deepseek-v3.1-nvfp4")
    execution = model.kinds[0].run_as(Execution("nvfp4", formats=()))
    calls = [c for c in V3.calls(HIDDEN, Layout(8), execution) if isinstance(c, Gemm | LatentProduct)]
    assert {c.role: c.dtype for c in calls} == {
        "q_down": "bf16", "q_up": "bf16", "kv_up": "bf16", "latent_products": "bf16", "o": "nvfp4",
    }  # fmt: skip


def test_a_token_keeps_one_latent_vector_on_every_gpu() -> None:
    for tp in (1, 2, 8):
        assert V3.kv_bytes_per_token(Layout(tp), "bf16") == (512 + 64) * 2
        assert V3.kv_bytes_per_token(Layout(tp), "fp8") == 512 + 64


def test_a_gate_and_no_rotation() -> None:
    gated = replace(V3, output_gate=True, rope=False)
    calls = gated.calls(HIDDEN, Layout(8), FP8)
    names = [c.name for c in calls]
    assert "rope" not in names
    assert "rope" in [c.name for c in V3.calls(HIDDEN, Layout(8), FP8)]
    assert names.index("attention gate") < names.index("gated attention") < names.index("o")
    assert gemms(gated, 8)["attention_gate"][:2] == (16 * 128, HIDDEN)
    more = gated.other_weights(HIDDEN, Layout(8)) - V3.other_weights(HIDDEN, Layout(8))
    assert more == 16 * 128 * HIDDEN
    whole = gated.calls(HIDDEN, Layout(8), FP8._replace(whole_blocks=("fp8_block",)))
    assert [c.name for c in whole][1:4] == ["attention gate", "gated attention", "attention block"]


def test_norms_and_biases_are_weights_too() -> None:
    assert V3.other_weights(HIDDEN, Layout(8)) == 7168 + 1536 + 512
    biased = replace(V3, bias=True)
    assert biased.other_weights(HIDDEN, Layout(8)) == 7168 + 1536 + 512 + (1536 + 512 + 64 + 7168)


def test_heads_are_split_evenly_or_not_at_all() -> None:
    assert V3.obstacles(Layout(8)) == []
    assert replace(V3, num_heads=12).obstacles(Layout(8)) == ["12 heads do not divide by 8"]
    model = load_model(config(num_attention_heads=100))
    with pytest.raises(PlanError, match=r"100 heads do not divide by 8; valid: tp=1, 2, 4"):
        model.check_layout(Layout(8))


@pytest.mark.parametrize(
    "size", ["num_heads", "kv_lora_rank", "nope_dim", "rope_dim", "v_dim", "q_lora_rank"]
)
def test_sizes_are_at_least_one(size: str) -> None:
    with pytest.raises(ModelError, match=size):
        replace(V3, **{size: 0})


@pytest.mark.parametrize(("name", "dense"), [("deepseek-v3", 3), ("deepseek-r1", 3), ("kimi-k2.5", 1)])
def test_dense_first_layers_are_dense(name: str, dense: int) -> None:
    model = load_model(name)
    first, rest = model.layers
    assert (first.count, rest.count) == (dense, 61 - dense)
    assert not first.kind.mlp.has_experts
    assert rest.kind.mlp.has_experts
    assert first.kind.mlp.linear_weights(HIDDEN, Layout())["down"] == 18432 * HIDDEN
    assert first.kind.attention == rest.kind.attention


def test_a_layer_that_predicts_further_tokens_is_one_of_experts() -> None:
    # README_WEIGHTS.md of DeepSeek-V3: 671 B, and 11.5 B of that layer beside the embedding and the head
    model = load_model("deepseek-v3")
    assert model.num_parameters == 671_026_419_200
    layer = mtp_model(model)
    own = layer.num_parameters - 2 * layer.vocab * layer.hidden
    assert own / 1e9 == pytest.approx(11.5, abs=0.15)
    assert layer.kv_bytes_per_token(Layout(8), "bf16") == 576 * 2


def test_experts_every_other_layer_and_shared_ones() -> None:
    model = load_model(
        config(num_hidden_layers=8, first_k_dense_replace=2, moe_layer_freq=2, n_shared_experts=2)
    )
    assert [(g.kind.name, g.count) for g in model.layers] == [("dense", 5), ("moe", 3)]
    experts: Any = model.layers[1].kind.mlp
    assert experts.shared_intermediate == 2 * 2048
    assert experts.router_bias
    softmax: Any = load_model(config(topk_method="greedy")).layers[1].kind.mlp
    assert not softmax.router_bias


def test_widths_that_are_missing_are_those_of_all_published_models() -> None:
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias")
    without = load_model(config(**dict.fromkeys(names, ...)))
    assert without.layers == load_model("deepseek-v3").layers
