"""Dense layers first, then experts: DeepSeek V2 and V3, Kimi K2 to K2.7, GLM-4.5 to 4.7, Ling and Ring.

DeepSeek, Kimi and GLM-4.7 Flash have latent attention; GLM-4.5 to 4.7 and Ling have grouped queries. Routers
that GLM stores in float32 are timed in bf16.

LongCat-Flash has two latent attentions and two dense MLPs a layer, and experts next to them. A layer of its
file is three here: two of attention and an MLP, and one of experts only. Engines run the experts next to the
second half; they are added up here. Its router also picks experts that return their input: a token goes to as
many real ones as if all were picked equally often.
"""

from __future__ import annotations

from typing import Any, Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.latent import LatentAttention
from fastroof.models.layers import LayerKind, NoAttention
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


def _glm4_moe(fields: Fields) -> list[LayerKind]:
    attention = GroupedQueryAttention(
        *head_sizes(fields),
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm=fields.flag("use_qk_norm", default=False),
    )
    # no file names the method, and every checkpoint has the correction
    experts = latent_experts(fields.with_defaults({"topk_method": "noaux_tc"}))
    return layer_kinds((attention, mlp) for mlp in first_dense(fields, experts))


def _bailing(fields: Fields) -> list[LayerKind]:
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


_LONGCAT_NAMES: Final = {
    "num_hidden_layers": "num_layers",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
}
"""Names of a field in most files, and in LongCat's."""


def _longcat(fields: Fields) -> list[LayerKind]:
    standard = {name: fields.config[own] for name, own in _LONGCAT_NAMES.items() if own in fields.config}
    fields = Fields({**fields.config, **standard}, fields.where)
    real, zero = fields.size("n_routed_experts"), fields.count("zero_expert_num")
    picked = fields.size("num_experts_per_tok")
    experts = RoutedExperts(
        real,
        max(1, round(picked * real / (real + zero))),
        fields.size("moe_intermediate_size"),
        router_bias=True,
        zero_experts=zero,
        norm=False,
    )
    half = LayerKind(latent_attention(fields), GatedMlp(fields.size("intermediate_size")), "dense")
    return [half, LayerKind(NoAttention(), experts, "experts"), half] * fields.num_layers


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
    Family(
        "glm4-moe",
        {"glm4_moe": ("Glm4MoeForCausalLM",), "glm4v_moe_text": ("Glm4vMoeTextModel",)},
        _glm4_moe,
        reads=("n_routed_experts",),
    ),
    Family(
        "bailing-moe",
        {"bailing_moe": ("BailingMoeForCausalLM",), "bailing_moe_v2": ("BailingMoeV2ForCausalLM",)},
        _bailing,
        reads=("num_experts",),
        module_names={"qkv": ("attention.query_key_value",), "o": ("attention.dense",)},
    ),
    Family(
        "longcat-flash",
        {"longcat_flash": ("LongcatFlashForCausalLM",)},
        _longcat,
        defaults=LATENT_DEFAULTS,
        reads=("n_routed_experts", "kv_lora_rank"),
        module_names={
            "gate_up": tuple(f"mlps.{half}.{name}" for half in (0, 1) for name in ("gate_proj", "up_proj")),
            "down": ("mlps.0.down_proj", "mlps.1.down_proj"),
        },
    ),
)
