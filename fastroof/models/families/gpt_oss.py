"""gpt-oss: experts in every layer, windows in every other layer, sinks and biases."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import FULL, WINDOWED, Family, kv_heads, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind

_HEAD_DIM: Final = 64


def _layers(fields: Fields) -> list[LayerKind]:
    num_q_heads, num_layers = fields.size("num_attention_heads"), fields.num_layers
    num_kv_heads, width = kv_heads(fields, num_q_heads), fields.size_or("head_dim", _HEAD_DIM)
    bias = fields.flag("attention_bias", default=True)
    experts = RoutedExperts(
        fields.size("num_local_experts", "num_experts"),
        fields.size("num_experts_per_tok", "experts_per_token"),
        fields.size("intermediate_size"),
        router_bias=True,
        expert_bias=True,
    )
    alternating = {"layer_types": [WINDOWED if i % 2 == 0 else FULL for i in range(num_layers)]}
    fields = fields.with_defaults(alternating)
    windows = layer_windows(fields, fields.size("sliding_window"))
    return layer_kinds(
        (GroupedQueryAttention(num_q_heads, num_kv_heads, width, bias, bias, window=w, sinks=True), experts)
        for w in windows
    )


FAMILIES: Final = (
    Family(
        "gpt-oss",
        {"gpt_oss": ("GptOssForCausalLM",)},
        _layers,
        reads=("num_local_experts", "num_experts"),
        defaults={"sliding_window": 128},
    ),
)
