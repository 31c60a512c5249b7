"""Mixtral and OLMoE: experts in every layer."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind

BALANCED: Final = "balanced"
"""Routing of Mixtral, whose few large experts are trained to share the tokens.

Three runs of vLLM 0.15 on H100: TPOT bias -1.0 % with it, +4.4 with power_law_1.2. TensorRT-LLM 0.17 in bf16
on A100, 36 rows: 10.4 and 11.5 % off. In fp8 on H100 and H200 it is 2 to 9 points worse: the kernels measured
there are of a newer version, and 15 to 20 % too fast with skewed routing too.
"""


def _layers(fields: Fields) -> list[LayerKind]:
    heads = head_sizes(fields)
    experts = RoutedExperts(
        fields.size("num_local_experts", "num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        routing=BALANCED,
    )
    windows = layer_windows(fields, fields.optional_size("sliding_window"))
    return layer_kinds((GroupedQueryAttention(*heads, window=window), experts) for window in windows)


def _olmoe(fields: Fields) -> list[LayerKind]:
    heads = head_sizes(fields, missing_means_all=True)
    bias = fields.flag("attention_bias", default=False)
    attention = GroupedQueryAttention(*heads, bias, bias, qk_norm=True, qk_norm_spans_heads=True)
    experts = RoutedExperts(
        fields.size("num_experts"), fields.size("num_experts_per_tok"), fields.size("intermediate_size")
    )
    return layer_kinds([(attention, experts)] * fields.num_layers)


FAMILIES: Final = (
    Family(
        "mixtral", {"mixtral": ("MixtralForCausalLM",)}, _layers, reads=("num_local_experts", "num_experts")
    ),
    Family("olmoe", {"olmoe": ("OlmoeForCausalLM",)}, _olmoe, reads=("num_experts",)),
)
