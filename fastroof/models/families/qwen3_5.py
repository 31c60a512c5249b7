"""Qwen3-Next, Qwen3.5 and Qwen3.6: gated delta nets in three of four layers, attention in the fourth."""

from __future__ import annotations

from typing import Any, Final

from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.families.family import FULL, Family, head_sizes
from fastroof.models.families.qwen_moe import sparse_steps
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import GatedDeltaNet
from fastroof.models.mlp import GatedMlp, Mlp

_LINEAR: Final = "linear_attention"
_EVERY: Final = 4

# Defaults of the transformers configuration classes for sizes that a file may omit.
_DEFAULTS: Final[dict[str, Any]] = {"head_dim": 256}


def _layers(fields: Fields) -> list[LayerKind]:
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
        "qwen3.5",
        {
            "qwen3_next": ("Qwen3NextForCausalLM",),
            "qwen3_5": ("Qwen3_5ForConditionalGeneration",),
            "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5TextModel"),
            "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration",),
            "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextModel"),
        },
        _layers,
        defaults=_DEFAULTS,
        reads=("num_experts", "full_attention_interval"),
        module_names={
            "state_in": tuple(f"linear_attn.in_proj_{name}" for name in ("qkvz", "qkv", "z")),
            "state_out": ("linear_attn.out_proj",),
        },
    ),
)
