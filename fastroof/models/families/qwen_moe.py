"""Qwen 2 and 3 with experts in all layers or in every n-th layer."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.dense import QWEN3_HEAD_DIM, qwen_windows
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
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
)
