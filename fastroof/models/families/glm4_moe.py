"""GLM-4.5 to 4.7: first dense layers, then experts; routers are stored in float32, timed in bf16."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.deepseek import first_dense, latent_experts
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind


def _layers(fields: Fields) -> list[LayerKind]:
    attention = GroupedQueryAttention(
        *head_sizes(fields),
        qkv_bias=fields.flag("attention_bias", default=False),
        qk_norm=fields.flag("use_qk_norm", default=False),
    )
    # no file names the method, and every checkpoint has the correction
    experts = latent_experts(fields.with_defaults({"topk_method": "noaux_tc"}))
    return layer_kinds((attention, mlp) for mlp in first_dense(fields, experts))


FAMILIES: Final = (
    Family(
        "glm4-moe",
        {"glm4_moe": ("Glm4MoeForCausalLM",), "glm4v_moe_text": ("Glm4vMoeTextModel",)},
        _layers,
        reads=("n_routed_experts",),
    ),
)
