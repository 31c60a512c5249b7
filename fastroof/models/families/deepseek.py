"""DeepSeek V2 and V3, Kimi K2 to K2.7, GLM-4.7 Flash: latent attention; first dense layers, then experts."""

from __future__ import annotations

from typing import Any, Final

from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.latent import LatentAttention
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp, Mlp

# Defaults of the configuration class in transformers for sizes that all published models set.
LATENT_DEFAULTS: Final[dict[str, Any]] = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def latent_attention(fields: Fields) -> LatentAttention:
    """Read latent attention by the field names of DeepSeek's files."""
    return LatentAttention(
        fields.size("num_attention_heads"),
        fields.size("kv_lora_rank"),
        fields.size("qk_nope_head_dim"),
        fields.size("qk_rope_head_dim"),
        fields.size("v_head_dim"),
        fields.optional_size("q_lora_rank"),
        fields.flag("attention_bias", default=False),
    )


def latent_experts(fields: Fields) -> RoutedExperts:
    """Read the experts; shared experts are given as a multiple of a routed expert's width."""
    width = fields.size("moe_intermediate_size")
    return RoutedExperts(
        fields.size("n_routed_experts", "num_routed_experts"),
        fields.size("num_experts_per_tok"),
        width,
        fields.count("n_shared_experts", fields.count("num_shared_experts")) * width,
        router_bias=fields.text("topk_method") == "noaux_tc",
    )


def first_dense(fields: Fields, experts: RoutedExperts) -> list[Mlp]:
    """Return the MLP of each layer: dense ones before ``first_k_dense_replace``, then experts."""
    first, every = fields.count("first_k_dense_replace"), fields.size_or("moe_layer_freq", 1)
    dense = GatedMlp(fields.size("intermediate_size"))
    return [experts if layer >= first and layer % every == 0 else dense for layer in range(fields.num_layers)]


def _layers(fields: Fields) -> list[LayerKind]:
    attention, mlps = latent_attention(fields), first_dense(fields, latent_experts(fields))
    return layer_kinds((attention, mlp) for mlp in mlps)


def _glm4_lite(fields: Fields) -> list[LayerKind]:
    defaults = {"topk_method": "noaux_tc", "first_k_dense_replace": 1}
    return _layers(fields.with_defaults(defaults))


FAMILIES: Final = (
    Family(
        "deepseek",
        {
            "deepseek_v2": ("DeepseekV2ForCausalLM",),
            "deepseek_v3": ("DeepseekV3ForCausalLM",),
            "kimi_k2": ("DeepseekV3ForCausalLM",),
            "kimi_k25": ("KimiK25ForConditionalGeneration",),
        },
        _layers,
        defaults=LATENT_DEFAULTS,
        reads=("n_routed_experts", "num_routed_experts", "kv_lora_rank"),
    ),
    Family(
        "glm4-moe-lite",
        {"glm4_moe_lite": ("Glm4MoeLiteForCausalLM",)},
        _glm4_lite,
        reads=("n_routed_experts", "kv_lora_rank"),
    ),
)
