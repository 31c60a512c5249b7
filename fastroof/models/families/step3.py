"""Windowed layers with heads of their own: Step 3.5 and 3.7 Flash, MiMo-V2 Flash and V2.5.

Step has more query heads in the windows of three of four layers, MiMo narrower values. First layers
are dense.
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.deepseek import latent_experts
from fastroof.models.families.family import WINDOWED, Family, head_sizes, kv_heads, layer_kinds, layer_windows
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp

# Field names of the published files, and their common names.
_SAME: Final = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
}


def _layers(fields: Fields) -> list[LayerKind]:
    fields = fields.with_defaults(
        {ours: fields.config[own] for own, ours in _SAME.items() if fields.has(own)}
    )
    num_layers, other = fields.num_layers, fields.part("attention_other_setting")
    full = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), head_sizes(fields), strict=True))
    windowed = full if other is None else _other(other, full)
    gate = fields.flag("use_head_wise_attn_gate", default=False)
    shared_fields = {"qk_norm": True, "head_gate": gate}
    experts = RoutedExperts(
        fields.size("num_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("moe_intermediate_size"),
        fields.count("share_expert_dim"),
        router_bias=fields.flag("use_moe_router_bias", default=False),
    )
    dense = GatedMlp(fields.size("intermediate_size"))
    has_experts = _has_experts(fields, num_layers)
    return layer_kinds(
        (
            GroupedQueryAttention(**(full if window is None else windowed), **shared_fields, window=window),
            experts if moe else dense,
        )
        for window, moe in zip(_windows(fields, num_layers), has_experts, strict=True)
    )


def _other(other: Fields, full: dict[str, Any]) -> dict[str, Any]:
    """Return the heads of the windowed layers."""
    if other.config.get("attention_type", WINDOWED) != WINDOWED:
        raise other.error(f"field attention_type must be {WINDOWED}, got {other.config['attention_type']!r}")
    return {
        "num_q_heads": other.size_or("num_attention_heads", full["num_q_heads"]),
        "num_kv_heads": other.size_or("num_attention_groups", full["num_kv_heads"]),
        "head_dim": other.size_or("head_dim", full["head_dim"]),
    }


def _windows(fields: Fields, num_layers: int) -> list[int | None]:
    kinds = fields.texts("layer_types")
    if kinds is not None:
        # the last layers predict further tokens
        further = fields.count("num_nextn_predict_layers")
        kinds = kinds[:num_layers] if len(kinds) == num_layers + further else kinds
        fields = Fields({**fields.config, "layer_types": kinds}, fields.where)
    return layer_windows(fields, fields.optional_size("sliding_window"))


def _has_experts(fields: Fields, num_layers: int) -> list[bool]:
    listed = fields.config.get("moe_layers_enum")
    if isinstance(listed, str):
        try:
            listed = [int(layer) for layer in listed.split(",")]
        except ValueError:
            raise fields.error(f"field moe_layers_enum must list layers, got {listed[:40]!r}") from None
    if listed is None:
        first = fields.count("first_k_dense_replace", 1)
        return [layer >= first for layer in range(num_layers)]
    layers = set(Fields({"moe_layers_enum": listed}, fields.where).numbers("moe_layers_enum") or ())
    return [layer in layers for layer in range(num_layers)]


def _mimo(fields: Fields) -> list[LayerKind]:
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
        "step-3",
        {
            "step3p5": ("Step3p5ForCausalLM",),
            "step3p7": ("Step3p7ForConditionalGeneration", "Step3p7FlashForCausalLM"),
        },
        _layers,
        reads=("num_experts", "moe_num_experts"),
        module_names={
            "experts": ("moe.experts", *(f"moe.{name}_proj" for name in ("gate", "up", "down"))),
            "shared_gate_up": ("share_expert.gate_proj", "share_expert.up_proj"),
            "shared_down": ("share_expert.down_proj",),
        },
    ),
    Family(
        "mimo-v2",
        {"mimo_v2_flash": ("MiMoV2FlashForCausalLM",), "mimo_v2": ("MiMoV2ForCausalLM",)},
        _mimo,
        reads=("n_routed_experts", "attention_chunk_size"),
    ),
)
