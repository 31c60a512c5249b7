"""Experts in every layer: Mixtral, OLMoE, gpt-oss, and MiniMax M2, M2.5 and M2.7.

gpt-oss has windows in every other layer, sinks and biases. MiniMax has query and key norms over all heads
together.
"""

from __future__ import annotations

from typing import Final

from fastroof.errors import UnsupportedModelError
from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import (
    FULL,
    WINDOWED,
    Family,
    head_sizes,
    kv_heads,
    layer_kinds,
    layer_windows,
)
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind

BALANCED: Final = "balanced"
"""Routing of Mixtral, whose few large experts are trained to share the tokens.

Three runs of vLLM 0.15 on H100: TPOT bias -1.0 % with it, +4.4 with power_law_1.2. TensorRT-LLM 0.17 in bf16
on A100, 36 rows: 10.4 and 11.5 % off. In fp8 on H100 and H200 it is 2 to 9 points worse: the kernels measured
there are of a newer version, and 15 to 20 % too fast with skewed routing too.
"""


def _mixtral(fields: Fields) -> list[LayerKind]:
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


_HEAD_DIM: Final = 64


def _gpt_oss(fields: Fields) -> list[LayerKind]:
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


_OVER_ALL_HEADS: Final = "per_layer"
"""MiniMax's name for one norm per layer over all its heads."""


def _minimax(fields: Fields) -> list[LayerKind]:
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
        "mixtral", {"mixtral": ("MixtralForCausalLM",)}, _mixtral, reads=("num_local_experts", "num_experts")
    ),
    Family("olmoe", {"olmoe": ("OlmoeForCausalLM",)}, _olmoe, reads=("num_experts",)),
    Family(
        "gpt-oss",
        {"gpt_oss": ("GptOssForCausalLM",)},
        _gpt_oss,
        reads=("num_local_experts", "num_experts"),
        defaults={"sliding_window": 128},
    ),
    Family(
        "minimax-m2",
        {"minimax_m2": ("MiniMaxM2ForCausalLM",)},
        _minimax,
        reads=("num_local_experts", "num_experts"),
    ),
)
