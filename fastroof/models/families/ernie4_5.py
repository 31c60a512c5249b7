"""ERNIE 4.5: the layers of Llama, with experts in some layers of the larger models."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp, Mlp

_TO_THE_END: Final = -1


def _attention(fields: Fields) -> GroupedQueryAttention:
    bias = fields.flag("use_bias", default=False)
    return GroupedQueryAttention(*head_sizes(fields, missing_means_all=True), bias, bias)


def _dense(fields: Fields) -> list[LayerKind]:
    mlp = GatedMlp(fields.size("intermediate_size"), fields.flag("use_bias", default=False))
    return layer_kinds([(_attention(fields), mlp)] * fields.num_layers)


def _moe(fields: Fields) -> list[LayerKind]:
    num_layers, width = fields.num_layers, fields.size("moe_intermediate_size")
    experts = RoutedExperts(
        fields.size("moe_num_experts"),
        fields.size("moe_k"),
        width,
        fields.count("moe_num_shared_experts") * width,
        router_bias=True,
    )
    first, every = fields.count("moe_layer_start_index"), fields.size_or("moe_layer_interval", 1)
    last = num_layers - 1
    if fields.config.get("moe_layer_end_index") != _TO_THE_END:
        last = fields.count("moe_layer_end_index", last)
    dense = GatedMlp(fields.size("intermediate_size"), fields.flag("use_bias", default=False))
    mlps: list[Mlp] = [
        experts if first <= layer <= last and (layer + 1) % every == 0 else dense
        for layer in range(num_layers)
    ]
    attention = _attention(fields)
    return layer_kinds((attention, mlp) for mlp in mlps)


FAMILIES: Final = (
    Family("ernie4.5", {"ernie4_5": ("Ernie4_5ForCausalLM",)}, _dense, tie_embeddings=True),
    Family(
        "ernie4.5-moe",
        {"ernie4_5_moe": ("Ernie4_5_MoeForCausalLM",)},
        _moe,
        tie_embeddings=True,
        reads=("moe_num_experts",),
    ),
)
