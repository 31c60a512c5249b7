"""Llama 4: chunked attention in three of four layers, experts in all or half, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp

_NO_ROPE_INTERVAL: Final = 4
# Defaults of the transformers text model for sizes that both published models have.
_DEFAULTS: Final[dict[str, Any]] = {
    "attention_chunk_size": 8192,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "num_experts_per_tok": 1,
}


def _layers(fields: Fields) -> list[LayerKind]:
    num_layers = fields.num_layers
    chunk, max_position = fields.optional_size("attention_chunk_size"), fields.size("max_position_embeddings")
    bias = fields.flag("attention_bias", default=False)
    full = GroupedQueryAttention(*head_sizes(fields), bias, bias, rope=False)
    chunked = replace(
        full,
        rope=True,
        qk_norm=fields.flag("use_qk_norm", default=True),
        qk_norm_weights=False,
        window=None if chunk is None or chunk >= max_position else chunk,
        is_chunked=chunk is not None and chunk < max_position,
    )
    dense = GatedMlp(fields.size_or("intermediate_size_mlp", fields.size("intermediate_size")))
    experts = RoutedExperts(
        fields.size("num_local_experts", "num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        fields.size("intermediate_size"),
    )
    has_rope, has_experts = _has_rope(fields, num_layers), _has_experts(fields, num_layers)
    return layer_kinds(
        (chunked if rope else full, experts if moe else dense)
        for rope, moe in zip(has_rope, has_experts, strict=True)
    )


def _has_rope(fields: Fields, num_layers: int) -> list[bool]:
    """Return which layers use RoPE and chunked attention; a 0 in the list means neither."""
    listed = fields.numbers("no_rope_layers")
    if listed:
        return [value != 0 for value in fields.of_layers("no_rope_layers", listed, num_layers) or ()]
    interval = fields.size_or("no_rope_layer_interval", _NO_ROPE_INTERVAL)
    return [(layer + 1) % interval != 0 for layer in range(num_layers)]


def _has_experts(fields: Fields, num_layers: int) -> list[bool]:
    listed = fields.numbers("moe_layers")
    if listed is not None:
        moe_layers = set(listed)
        return [layer in moe_layers for layer in range(num_layers)]
    step = fields.count("interleave_moe_layer_step", 1)
    return [step > 0 and (layer + 1) % step == 0 for layer in range(num_layers)]


FAMILIES: Final = (
    Family(
        "llama-4",
        {"llama4": ("Llama4ForConditionalGeneration",), "llama4_text": ("Llama4ForCausalLM",)},
        _layers,
        defaults=_DEFAULTS,
        reads=("num_local_experts", "num_experts", "attention_chunk_size"),
    ),
)
