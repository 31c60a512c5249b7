"""Ling and Ring 1 and 2 (Bailing): first dense layers, then experts; norms of heads in some."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.deepseek import first_dense
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind


def _layers(fields: Fields) -> list[LayerKind]:
    bias = fields.flag("use_bias", default=False)
    attention = GroupedQueryAttention(
        *head_sizes(fields),
        qkv_bias=bias or fields.flag("use_qkv_bias", default=False),
        o_bias=bias,
        qk_norm=fields.flag("use_qk_norm", default=False),
    )
    width = fields.size("moe_intermediate_size")
    shared = fields.size_or("moe_shared_expert_intermediate_size", width)
    experts = RoutedExperts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        width,
        fields.count("num_shared_experts") * shared,
        router_bias=fields.flag("moe_router_enable_expert_bias", default=False),
    )
    return layer_kinds((attention, mlp) for mlp in first_dense(fields, experts))


FAMILIES: Final = (
    Family(
        "bailing-moe",
        {"bailing_moe": ("BailingMoeForCausalLM",), "bailing_moe_v2": ("BailingMoeV2ForCausalLM",)},
        _layers,
        reads=("num_experts",),
        module_names={"qkv": ("attention.query_key_value",), "o": ("attention.dense",)},
    ),
)
