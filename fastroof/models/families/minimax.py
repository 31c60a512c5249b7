"""MiniMax M2, M2.5 and M2.7: experts in every layer, query and key norms over all heads together."""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind

_OVER_ALL_HEADS: Final = "per_layer"
"""MiniMax's name for one norm per layer over all its heads."""


def _layers(fields: Fields) -> list[LayerKind]:
    num_layers = fields.num_layers
    softmax = fields.of_layers("attn_type_list", fields.numbers("attn_type_list"), num_layers)
    if softmax is not None and not all(softmax):
        raise UnsupportedModelError(
            f"{fields.where}: attn_type_list has 0: it needs a linear attention operator"
        )
    attention = GroupedQueryAttention(
        *head_sizes(fields),
        qk_norm=fields.flag("use_qk_norm", default=True),
        qk_norm_spans_heads=fields.config.get("qk_norm_type", _OVER_ALL_HEADS) == _OVER_ALL_HEADS,
    )
    experts = RoutedExperts(
        fields.size("num_local_experts", "num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        fields.count("shared_intermediate_size"),
        router_bias=fields.flag("use_routing_bias", default=True),
    )
    return layer_kinds([(attention, experts)] * num_layers)


FAMILIES: Final = (
    Family(
        "minimax-m2",
        {"minimax_m2": ("MiniMaxM2ForCausalLM",)},
        _layers,
        reads=("num_local_experts", "num_experts"),
    ),
)
