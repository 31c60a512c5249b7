"""Falcon-H1: attention and Mamba-2 next to each other in every layer, and an MLP."""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import GroupedQueryAttention
from fastroof.models.families.bamba import MAMBA_MODULES, mamba_2
from fastroof.models.families.family import Family, head_sizes
from fastroof.models.hf import Fields
from fastroof.models.hybrid import AttentionAndMamba
from fastroof.models.layers import LayerKind
from fastroof.models.mlp import GatedMlp


def _layers(fields: Fields) -> list[LayerKind]:
    # without mamba_d_ssm a Mamba layer is mamba_expand times as wide as the model
    width = fields.optional_size("mamba_d_ssm")
    mamba = mamba_2(fields, width, norm=fields.flag("mamba_rms_norm", default=False))
    bias = fields.flag("attention_bias", default=False)
    attention = GroupedQueryAttention(*head_sizes(fields), bias, bias)
    mlp = GatedMlp(fields.size("intermediate_size"), fields.flag("mlp_bias", default=False))
    return [LayerKind(AttentionAndMamba(attention, mamba), mlp, "attention and mamba")] * fields.num_layers


FAMILIES: Final = (
    Family(
        "falcon-h1",
        {"falcon_h1": ("FalconH1ForCausalLM",)},
        _layers,
        module_names={
            **MAMBA_MODULES,
            "gate_up": ("feed_forward.gate_proj", "feed_forward.up_proj"),
            "down": ("feed_forward.down_proj",),
        },
    ),
)
