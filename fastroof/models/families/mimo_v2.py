"""MiMo-V2 Flash and V2.5: windowed layers with own heads, narrower values, a dense first layer."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.deepseek import latent_experts
from fastroof.models.families.family import Family, kv_heads, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp


def _layers(fields: Fields) -> list[LayerKind]:
    num_layers, num_q_heads = fields.num_layers, fields.size("num_attention_heads")
    bias = fields.flag("attention_bias", default=False)
    full = GroupedQueryAttention(
        num_q_heads,
        kv_heads(fields, num_q_heads),
        fields.size("head_dim"),
        bias,
        v_head_dim=fields.optional_size("v_head_dim"),
        sinks=fields.flag("add_full_attention_sink_bias", default=False),
    )
    window = fields.size("sliding_window_size", "sliding_window")
    windowed = GroupedQueryAttention(
        fields.size("swa_num_attention_heads"),
        fields.size("swa_num_key_value_heads"),
        fields.size("swa_head_dim"),
        bias,
        v_head_dim=fields.optional_size("swa_v_head_dim"),
        sinks=fields.flag("add_swa_attention_sink_bias", default=False),
        window=None if window >= fields.size("max_position_embeddings") else window,
    )
    experts = latent_experts(fields)
    dense = GatedMlp(fields.size("intermediate_size"))
    is_windowed = fields.of_layers("hybrid_layer_pattern", fields.numbers("hybrid_layer_pattern"), num_layers)
    has_experts = fields.of_layers("moe_layer_freq", fields.numbers("moe_layer_freq"), num_layers)
    if is_windowed is None or has_experts is None:
        missing = "hybrid_layer_pattern" if is_windowed is None else "moe_layer_freq"
        raise fields.error(f"field {missing} is missing")
    return layer_kinds(
        (windowed if narrow else full, experts if moe else dense)
        for narrow, moe in zip(is_windowed, has_experts, strict=True)
    )


FAMILIES: Final = (
    Family(
        "mimo-v2",
        {"mimo_v2_flash": ("MiMoV2FlashForCausalLM",), "mimo_v2": ("MiMoV2ForCausalLM",)},
        _layers,
        reads=("n_routed_experts", "attention_chunk_size"),
    ),
)
