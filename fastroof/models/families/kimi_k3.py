"""Kimi K3: Kimi delta attention in three of four layers, latent attention in the fourth, latent experts.

Kimi Linear is also read: narrower gates, a single residual, and experts as wide as the model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from fastroof.models.attention import Attention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.deepseek import latent_attention
from fastroof.models.families.family import Family
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import KimiDeltaAttention
from fastroof.models.mlp import GatedMlp
from fastroof.models.residuals import AttentionResiduals

_LAYERS: Final = "linear_attn_config"


def _layers(fields: Fields) -> list[LayerKind]:
    num_layers, sizes = fields.num_layers, fields.part(_LAYERS)
    if sizes is None:
        raise fields.error(f"field {_LAYERS} is missing")
    # the delta rule encodes positions
    latent = replace(
        latent_attention(fields),
        rope=not fields.flag("mla_use_nope", default=False),
        output_gate=fields.flag("mla_use_output_gate", default=False),
    )
    mixers: dict[str, Attention] = {"linear": _linear(sizes), "latent": latent}
    first, experts = fields.count("first_k_dense_replace"), _experts(fields)
    dense = GatedMlp(fields.size("intermediate_size"))
    connections = _connections(fields)
    return [
        LayerKind(
            mixers[kind],
            dense if layer < first else experts,
            f"{'dense' if layer < first else 'moe'} {kind}",
            connections=connections,
        )
        for layer, kind in enumerate(_kinds(sizes, num_layers))
    ]


def _kinds(sizes: Fields, num_layers: int) -> list[str]:
    """Return the kind of each layer; the file counts layers from 1."""
    linear, latent = (set(sizes.numbers(name) or ()) for name in ("kda_layers", "full_attn_layers"))
    if linear & latent or linear | latent != set(range(1, num_layers + 1)):
        raise sizes.error(
            f"fields kda_layers and full_attn_layers must list each of the layers 1 to {num_layers} once, "
            f"got {len(linear)} and {len(latent)}"
        )
    return ["linear" if layer in linear else "latent" for layer in range(1, num_layers + 1)]


def _linear(sizes: Fields) -> KimiDeltaAttention:
    heads, width = sizes.size("num_heads"), sizes.size("head_dim")
    return KimiDeltaAttention(
        heads,
        width,
        heads,
        width,
        sizes.size_or("short_conv_kernel_size", 4),
        gate_rank=None if sizes.flag("use_full_rank_gate", default=False) else width,
    )


def _experts(fields: Fields) -> RoutedExperts:
    width = fields.size("moe_intermediate_size")
    return RoutedExperts(
        fields.size("num_experts"),
        fields.size("num_experts_per_token", "num_experts_per_tok"),
        width,
        fields.count("num_shared_experts") * width,
        router_bias=True,
        latent=fields.count("routed_expert_hidden_size"),
        latent_norm=fields.flag("latent_moe_use_norm", default=False),
    )


def _connections(fields: Fields) -> AttentionResiduals | None:
    block, num_layers = fields.count("attn_res_block_size"), fields.num_layers
    if not block:
        return None
    sealed = [1 + layer // block for layer in range(num_layers)]
    return AttentionResiduals(max(sealed) + 1, sum(sealed) / num_layers)


FAMILIES: Final = (
    Family(
        "kimi-k3",
        {"kimi_k3": ("KimiK3ForConditionalGeneration",), "kimi_linear": ("KimiLinearForCausalLM",)},
        _layers,
        reads=("num_experts", "kv_lora_rank", _LAYERS),
        module_names={
            "state_in": tuple(f"self_attn.{name}_proj" for name in ("q", "k", "v", "g")),
            "state_out": ("self_attn.o_proj",),
            "experts": (
                "block_sparse_moe.experts",
                *(f"block_sparse_moe.experts.0.{name}" for name in ("w1", "w2", "w3")),
            ),
            # no pattern of the file excludes them, but their size is that of bf16
            "experts_down": (),
            "experts_up": (),
        },
    ),
)
