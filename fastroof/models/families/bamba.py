"""Mamba-2 in most layers instead of attention (Bamba), or in all next to it (Falcon-H1), and MLPs."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.family import Family, head_sizes
from fastroof.models.hf import Fields
from fastroof.models.hybrid import AttentionAndMamba
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import Mamba2
from fastroof.models.mlp import GatedMlp

MAMBA_MODULES: Final = {"state_in": ("mamba.in_proj",), "state_out": ("mamba.out_proj",)}


def mamba_2(fields: Fields, inner: int | None = None, *, norm: bool = True) -> Mamba2:
    """Read Mamba-2 by the field names of Bamba; ``inner`` is the width of all heads if known."""
    num_heads = fields.size("mamba_n_heads")
    if fields.config.get("mamba_d_head") in (None, "auto"):
        inner = inner or fields.size_or("mamba_expand", 2) * fields.size("hidden_size")
        width = inner // num_heads
    else:
        width = fields.size("mamba_d_head")
    return Mamba2(
        num_heads,
        width,
        fields.size("mamba_d_state"),
        fields.size_or("mamba_n_groups", 1),
        fields.size_or("mamba_d_conv", 4),
        fields.size_or("mamba_chunk_size", 256),
        # engines store the state in the model's compute dtype
        "bfloat16",
        bias=fields.flag("mamba_proj_bias", default=False),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        norm=norm,
    )


def _bamba(fields: Fields) -> list[LayerKind]:
    mamba = mamba_2(fields)
    attention = GroupedQueryAttention(*head_sizes(fields))
    mlp = GatedMlp(fields.size("intermediate_size"))
    attends = set(fields.numbers("attn_layer_indices") or ())
    return [
        LayerKind(attention, mlp, "attention") if i in attends else LayerKind(mamba, mlp, "mamba")
        for i in range(fields.num_layers)
    ]


def _falcon_h1(fields: Fields) -> list[LayerKind]:
    # without mamba_d_ssm a Mamba layer is mamba_expand times as wide as the model
    width = fields.optional_size("mamba_d_ssm")
    mamba = mamba_2(fields, width, norm=fields.flag("mamba_rms_norm", default=False))
    bias = fields.flag("attention_bias", default=False)
    attention = GroupedQueryAttention(*head_sizes(fields), bias, bias)
    mlp = GatedMlp(fields.size("intermediate_size"), fields.flag("mlp_bias", default=False))
    return [LayerKind(AttentionAndMamba(attention, mamba), mlp, "attention and mamba")] * fields.num_layers


FAMILIES: Final = (
    Family(
        "bamba",
        {"bamba": ("BambaForCausalLM",)},
        _bamba,
        defaults={"max_position_embeddings": 262144},
        module_names=MAMBA_MODULES,
    ),
    Family(
        "falcon-h1",
        {"falcon_h1": ("FalconH1ForCausalLM",)},
        _falcon_h1,
        module_names={
            **MAMBA_MODULES,
            "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
            "down": ("feed_forward.down_proj",),
        },
    ),
)
