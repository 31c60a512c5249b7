"""Qwen 2 and 3 with experts in all layers or in every n-th; Qwen3-Next, Qwen3.5 and Qwen3.6.

The latter have gated delta nets in three of four layers, attention in the fourth.
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.dense import QWEN3_HEAD_DIM, qwen_windows
from fastroof.models.families.family import FULL, Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import GatedDeltaNet
from fastroof.models.mlp import GatedMlp, Mlp


def sparse_steps(fields: Fields, shared_intermediate: int) -> list[Mlp]:
    """Return the MLP of each layer: experts in every ``decoder_sparse_step``-th, and dense ones."""
    step = fields.size_or("decoder_sparse_step", 1)
    dense_layers = set(fields.numbers("mlp_only_layers") or ())
    experts = RoutedExperts(
        fields.size("num_experts", "num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        shared_intermediate,
        shared_gate=shared_intermediate > 0,
    )
    has_experts = [(i + 1) % step == 0 and i not in dense_layers for i in range(fields.num_layers)]
    dense = experts if all(has_experts) else GatedMlp(fields.size("intermediate_size"))
    return [experts if has else dense for has in has_experts]


def _qwen2(fields: Fields) -> list[LayerKind]:
    heads = head_sizes(fields)
    bias = fields.flag("qkv_bias", default=True)
    mlps = sparse_steps(fields, fields.size("shared_expert_intermediate_size"))
    return layer_kinds(
        (GroupedQueryAttention(*heads, bias, window=window), mlp)
        for window, mlp in zip(qwen_windows(fields), mlps, strict=True)
    )


def _qwen3(fields: Fields) -> list[LayerKind]:
    heads = head_sizes(fields, missing_head_dim=QWEN3_HEAD_DIM)
    bias = fields.flag("attention_bias", default=False)
    return layer_kinds(
        (GroupedQueryAttention(*heads, bias, bias, True, window), mlp)
        for window, mlp in zip(qwen_windows(fields), sparse_steps(fields, 0), strict=True)
    )


_LINEAR: Final = "linear_attention"
_EVERY: Final = 4

# Defaults of the transformers configuration classes for sizes that a file may omit.
_DEFAULTS: Final[dict[str, Any]] = {"head_dim": 256}


def _qwen3_5(fields: Fields) -> list[LayerKind]:
    linear, full = _linear(fields), _full(fields)
    mixers = [full if kind == FULL else linear for kind in _kinds(fields)]
    return [
        LayerKind(
            mixer, mlp, f"{'moe' if mlp.has_experts else 'dense'} {'full' if mixer is full else 'linear'}"
        )
        for mixer, mlp in zip(mixers, _mlps(fields), strict=True)
    ]


def _kinds(fields: Fields) -> list[str]:
    every = fields.size_or("full_attention_interval", _EVERY)
    return fields.layer_words("layer_types", (FULL, _LINEAR)) or [
        _LINEAR if (layer + 1) % every else FULL for layer in range(fields.num_layers)
    ]


def _linear(fields: Fields) -> GatedDeltaNet:
    return GatedDeltaNet(
        fields.size("linear_num_key_heads"),
        fields.size("linear_key_head_dim"),
        fields.size("linear_num_value_heads"),
        fields.size("linear_value_head_dim"),
        fields.size("linear_conv_kernel_dim"),
        fields.text("mamba_ssm_dtype") or "float32",
    )


def _full(fields: Fields) -> Attention:
    bias = fields.flag("attention_bias", default=False)
    return GroupedQueryAttention(
        *head_sizes(fields),
        bias,
        bias,
        qk_norm=True,
        output_gate=fields.flag("attn_output_gate", default=True),
    )


def _mlps(fields: Fields) -> list[Mlp]:
    if not fields.count("num_experts"):
        return [GatedMlp(fields.size("intermediate_size"))] * fields.num_layers
    return sparse_steps(fields, fields.count("shared_expert_intermediate_size"))


FAMILIES: Final = (
    Family(
        "qwen2-moe",
        {"qwen2_moe": ("Qwen2MoeForCausalLM",)},
        _qwen2,
        reads=("num_experts", "num_local_experts"),
    ),
    Family(
        "qwen3-moe",
        {
            "qwen3_moe": ("Qwen3MoeForCausalLM",),
            "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration",),
            "qwen3_vl_moe_text": ("Qwen3VLMoeTextModel",),
        },
        _qwen3,
        reads=("num_experts", "num_local_experts"),
    ),
    Family(
        "qwen3.5",
        {
            "qwen3_next": ("Qwen3NextForCausalLM",),
            "qwen3_5": ("Qwen3_5ForConditionalGeneration",),
            "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
            "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration",),
            "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        },
        _qwen3_5,
        defaults=_DEFAULTS,
        reads=("num_experts", "full_attention_interval"),
        module_names={
            "state_in": tuple(f"linear_attn.in_proj_{name}" for name in ("qkvz", "qkv", "z")),
            "state_out": ("linear_attn.out_proj",),
        },
    ),
)
