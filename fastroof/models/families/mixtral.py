"""Mixtral: experts in every layer."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_dim, kv_heads, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind


def _layers(fields: Fields) -> list[LayerKind]:
    hidden, num_q_heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    num_kv_heads, width = kv_heads(fields, num_q_heads), head_dim(fields, hidden, num_q_heads)
    experts = RoutedExperts(
        fields.size("num_local_experts", "num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
    )
    windows = layer_windows(fields, fields.num_layers, fields.optional_size("sliding_window"))
    return layer_kinds(
        (GroupedQueryAttention(num_q_heads, num_kv_heads, width, window=window), experts)
        for window in windows
    )


FAMILIES: Final = (
    Family(
        "mixtral",
        {"mixtral": ("MixtralForCausalLM",)},
        _layers,
        reads=("num_local_experts", "num_experts"),
    ),
)
