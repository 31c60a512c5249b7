"""Mamba-2 in most layers instead of attention (Bamba, Granite 4), or in all next to it (Falcon-H1).

Granite 3 has attention in every layer, and MLPs or experts.
"""

from __future__ import annotations

from typing import Final

from fastroof.models.attention import Attention, GroupedQueryAttention
from fastroof.models.experts import RoutedExperts
from fastroof.models.families.family import Family, head_sizes, layer_kinds
from fastroof.models.hf import Fields
from fastroof.models.layers import LayerKind
from fastroof.models.linear_attention import AttentionAndMamba, Mamba2
from fastroof.models.mlp import GatedMlp, Mlp

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


_ATTENTION: Final = "attention"
_MAMBA: Final = "mamba"
_SHARED_UP: Final = ("shared_mlp.input_linear",)
_SHARED_DOWN: Final = ("shared_mlp.output_linear",)
_EXPERTS: Final = {
    "experts": ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    "shared_gate_up": _SHARED_UP,
    "shared_down": _SHARED_DOWN,
}


def _attention(fields: Fields, *, rope: bool) -> GroupedQueryAttention:
    bias = fields.flag("attention_bias", default=False)
    return GroupedQueryAttention(*head_sizes(fields, missing_means_all=True), bias, bias, rope=rope)


def _experts(fields: Fields) -> RoutedExperts:
    return RoutedExperts(
        fields.size("num_local_experts"),
        fields.size("num_experts_per_tok"),
        fields.size("intermediate_size"),
        fields.count("shared_intermediate_size"),
    )


def _dense(fields: Fields) -> list[LayerKind]:
    mlp = GatedMlp(fields.size("intermediate_size"), fields.flag("mlp_bias", default=False))
    return layer_kinds([(_attention(fields, rope=True), mlp)] * fields.num_layers)


def _moe(fields: Fields) -> list[LayerKind]:
    return layer_kinds([(_attention(fields, rope=True), _experts(fields))] * fields.num_layers)


def _hybrid(fields: Fields) -> list[LayerKind]:
    valid = (_ATTENTION, _MAMBA)
    kinds = fields.layer_words("layer_types", valid) or fields.layer_words("layers_block_type", valid)
    if kinds is None:
        raise fields.error("field layer_types is missing")
    # without routed experts, the shared expert is the MLP
    mlp: Mlp = GatedMlp(fields.size("shared_intermediate_size"))
    if fields.count("num_local_experts"):
        mlp = _experts(fields)
    mixers: dict[str, Attention] = {}
    if _ATTENTION in kinds:
        mixers[_ATTENTION] = _attention(fields, rope=fields.text("position_embedding_type") == "rope")
    if _MAMBA in kinds:
        mixers[_MAMBA] = mamba_2(fields)
    return [LayerKind(mixers[kind], mlp, kind) for kind in kinds]


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
    Family("granite", {"granite": ("GraniteForCausalLM",)}, _dense),
    Family(
        "granite-moe",
        {"granitemoe": ("GraniteMoeForCausalLM",), "granitemoeshared": ("GraniteMoeSharedForCausalLM",)},
        _moe,
        reads=("num_local_experts",),
        module_names=_EXPERTS,
    ),
    Family(
        "granite-4",
        {"granitemoehybrid": ("GraniteMoeHybridForCausalLM",)},
        _hybrid,
        reads=("num_local_experts", "layer_types"),
        module_names={**MAMBA_MODULES, **_EXPERTS, "gate_up": _SHARED_UP, "down": _SHARED_DOWN},
    ),
)
